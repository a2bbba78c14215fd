"""Out of memory, in earnest: at any allocation, the run goes on in smaller pieces with the same result."""

import dataclasses
import weakref
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo
from batch import Cut, Sequences
from helpers.models import DEVICE
from helpers.peaks import prepared_run
from helpers.runs import limits_of
from runs.checkpoint import newest, read_state
from runs.log import read_log
from runs.prepare import prepare
from settings import GRPOSettings
from snug.memory.limits import Limits, is_out_of_memory
from snug.options import SnugError

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="allocations are counted by the CPU's meter")


class OutOfMemoryAt(TorchDispatchMode):
    """The `count`-th op that makes a storage in a phase that works on the device finds no memory, once."""

    def __init__(self, count, meter):
        super().__init__()
        self.left, self.meter = count, meter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = {id(x.untyped_storage()) for x in tree_leaves(result) if isinstance(x, torch.Tensor)} - given
        if made and self.meter.now in ("rollout", "reference", "train", "optimizer"):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.\nGPU 0 ...")
        return result


def weights_after(tmp_path, point, dtype="float64", **changes):
    """Two iterations with an out-of-memory at allocation `point` of the first (0: none) -> weights, allocations, settings.

    All in float64: then what is decoded or cut in other pieces differs by 1e-16 or so. Adam divides a gradient by its own
    size + 1e-8, so an error in it comes out at most 1e8 times as large, in units of the learning rate 1e-3.
    """
    prepared, settings = prepared_run(tmp_path, **changes | dict(eval_prompts=0, save_interval=1))
    settings.param_dtype = settings.optimizer_dtype = dtype
    prepared.reward_funcs = [lambda prompts, completions, **columns: [sum(map(ord, c)) % 7 for c in completions]]
    original, modes = grpo.iterate, []

    def iterate(iteration, training, *rest):
        with OutOfMemoryAt(point if iteration == 0 else 0, training.meter) as mode:
            modes.append(mode)
            return original(iteration, training, *rest)

    with patch.object(grpo, "iterate", iterate):
        grpo.main(prepared)
    return load_file(newest(settings.out_dir) / "model.safetensors"), -modes[0].left, settings


# A group takes 10 + 8 * 23 = 194 tokens of the row. Half of that cuts it between completions: 3, 3 and 2 of them.
GROUPS = dict(batch_size=3, group_size=8, max_tokens_per_micro_batch=200)
SMALL = dict(n_layer=1, n_embd=32, learning_rate=1e-3, **GROUPS)
ON_HOST = dict(optimizer_device="host", grad_offload=True, checkpoint_blocks="block", activation_offload=True)
ON_HOST["n_layer"] = 2
LONG = [pytest.param(changes, 25, marks=pytest.mark.long) for changes in (dict(), ON_HOST)]


@pytest.mark.parametrize("changes, points", [(ON_HOST, 3), *LONG])
def test_an_out_of_memory_anywhere_changes_nothing_but_the_pieces(changes, points, tmp_path, capsys):
    """Points of an iteration, evenly from its first allocation to its last."""
    expected, allocations, _ = weights_after(tmp_path / "whole", 0, **SMALL | changes)
    assert allocations > 500 and min(record["grad_norm"] for record in read_log(tmp_path / "whole/run")) > 0.01
    remembered = set()
    for i in range(points):
        point = 1 + i * (allocations - 2) // (points - 1)
        weights, _, settings = weights_after(tmp_path / str(i), point, **SMALL | changes)
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-9)
        remembered |= {(name, *values) for name, values in read_state(newest(settings.out_dir))["after_oom"].items()}
    assert remembered == {("max_rollout_batch", 0, 12), ("max_tokens_per_micro_batch", 200, 97)}
    assert "CUDA out of memory. Tried to allocate 1 EiB.; going on with max_" in capsys.readouterr().out


def test_a_resumed_run_remembers(tmp_path, capsys):
    changes = SMALL | dict(max_tokens_per_micro_batch=0, dtype="float32")
    _, allocations, _ = weights_after(tmp_path / "whole", 0, **changes)
    _, _, settings = weights_after(tmp_path / "again", allocations - 30, **changes)
    ((asked, smaller),) = read_state(newest(settings.out_dir))["after_oom"].values()
    assert asked == 0 < smaller
    resumed = dataclasses.replace(settings, resume="auto", max_iters=3)
    grpo.main(prepare(resumed))
    assert f"an earlier out-of-memory; going on with max_tokens_per_micro_batch={smaller}" in capsys.readouterr().out
    assert read_state(newest(resumed.out_dir))["after_oom"] == {"max_tokens_per_micro_batch": [0, smaller]}
    own = dataclasses.replace(resumed, max_tokens_per_micro_batch=50, max_iters=4)  # what the user changes
    grpo.main(prepare(own))
    assert read_state(newest(resumed.out_dir))["after_oom"] == {}


class Counted(Limits):
    """Limits of which nothing is halved: `failures` has the first line of each out-of-memory."""

    def __init__(self):
        super().__init__(SimpleNamespace(settings=GRPOSettings(), longest=lambda: (1, 1)), print)
        self.failures = []

    def make_smaller(self, phase, failure, failures):
        self.failures.append(failure)


def test_other_errors_are_not_mistaken_for_it():
    limits = Counted()

    def fail():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        limits.retry("train", fail)
    assert not limits.failures
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))


def test_a_failed_call_is_gone_before_the_next():
    """Its tensors too: `make_smaller` must find the memory free."""
    cpu_error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    alive, calls = [], []

    def work():
        calls.append(None)
        tensor = torch.zeros(3)
        alive.append(weakref.ref(tensor))
        if len(calls) < 3:
            raise torch.OutOfMemoryError("first") if len(calls) == 1 else cpu_error
        return len(calls)

    class Checked(Counted):
        def make_smaller(self, phase, failure, failures):
            cpu_error.__traceback__ = None  # this one is held by the test
            assert failures == len(calls) and all(reference() is None for reference in alive)
            super().make_smaller(phase, failure, failures)

    limits = Checked()
    assert limits.retry("train", work) == 3 and limits.failures == ["first", str(cpu_error)]


def test_the_next_attempt_has_smaller_pieces_of_its_own_kind():
    limits, cuts = limits_of(GRPOSettings(max_tokens_per_micro_batch=8)), []
    sequences = Sequences.from_lists([[0, 0]] * 4, [[1, 1, 1]] * 4)  # 4 tokens of the row each

    def step(cut):
        cuts.append(cut.steps[0])
        if len(cuts) == 1:
            raise torch.OutOfMemoryError("first")

    limits.retry("train", step, Cut(sequences, max_tokens=8))
    assert list(map(len, cuts)) == [2, 4]

    before = limits.max_rollout_batch, limits.max_eval_batch
    with pytest.raises(StopIteration):
        limits.retry("eval", Mock(side_effect=[torch.OutOfMemoryError("first")]))
    assert limits.max_rollout_batch == before[0] and limits.max_eval_batch < before[1]


def test_an_optimizer_step_is_tried_once_more():
    calls = []

    def step():
        calls.append(None)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(SnugError, match="in the optimizer step: CUDA out of memory.; try "):
        limits_of(GRPOSettings()).retry("optimizer", step)
    assert len(calls) == 2
