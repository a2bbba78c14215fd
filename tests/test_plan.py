"""The planner against the meter and PyTorch's profiler, the settings it finds, and going on after out-of-memory."""

import dataclasses
import gc
import json
import os
from functools import partial

import pytest
import torch
from conftest import DEVICE
from test_memory import profiled_peak
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo
import grpo as collect
import sample
import train_sft
from data.task import Task
from memory.fit import apply, fit, show
from memory.ledger import HOST, MIB
from memory.oom import is_out_of_memory, surviving
from memory.plan import GIB, HOME, Births, plan
from options import SnugError
from runs.checkpoint import newest, read_state
from runs.log import read_log
from runs.prepare import Prepared, prepare
from settings import GRPOSettings, SFTSettings
from tokenizer import get_tokenizer

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="exact bytes of the CPU meter; on CUDA bench/memory.py compares"
)
LLAMA = dict(norm="rmsnorm", position="rotary", mlp="swiglu", n_kv_head=2, tie_embeddings=False)
COMMON = dict(
    digits=4,
    n_layer=3,
    n_embd=96,
    block_size=64,
    device="cpu",
    eval_prompts=16,
    eval_interval=1,
    save_interval=0,
    max_iters=2,
)
GRPO = dict(batch_size=6, group_size=4, max_new_tokens=24)
BF16 = dict(param_dtype="bfloat16", dtype="bfloat16", optimizer_dtype="bfloat16")
CONFIGS = {
    "plain": dict(),
    "token budget": dict(max_tokens_per_micro_batch=200),
    "block": dict(checkpoint_blocks="block", max_tokens_per_micro_batch=200),
    "selective": dict(checkpoint_blocks="selective", gradient_accumulation_steps=2, **LLAMA),
    "offload": dict(checkpoint_blocks="block", activation_offload=True, gradient_accumulation_steps=2),
    "bfloat16": dict(max_tokens_per_micro_batch=400, n_embd=192, **BF16),
    "autocast": dict(dtype="bfloat16", n_embd=192, **LLAMA),
    "optimizer on the host": dict(optimizer_device="host", grad_offload=True, vocab_size=4000, **LLAMA),
    "reference on the host": dict(beta=0.04, reference="host", vocab_size=4000, max_tokens_per_micro_batch=100),
    "reference": dict(beta=0.04, vocab_size=20000, max_tokens_per_micro_batch=100),
    "long rollouts": dict(batch_size=15, group_size=8, max_tokens_per_micro_batch=64, max_rollout_batch=60),
    "sequence level": dict(importance_sampling_level="sequence", max_tokens_per_micro_batch=256),
    "entropy and importance": dict(entropy_coef=0.01, importance_sampling_cap=2.0, max_tokens_per_micro_batch=256),
    "refilled": dict(max_num_gen_batches=3, max_tokens_per_micro_batch=256),
    "cache in pieces": dict(batch_size=15, group_size=8, max_tokens_per_micro_batch=64, kv_cache_mb=1.0),
}


def no_stop(monkeypatch):
    """Every completion is as long as it may be, as the planner takes it to be."""
    original = sample.sample_groups
    monkeypatch.setattr(
        collect, "sample_groups", lambda *args, stop_token, **options: original(*args, stop_token=None, **options)
    )


def prepared_run(tmp_path, **changes):
    settings = GRPOSettings(**COMMON | GRPO | changes | dict(out_dir=str(tmp_path / "run")))
    if settings.beta:
        shape = {name: value for name, value in changes.items() if name in ("vocab_size", *LLAMA)}
        sft = SFTSettings(
            **COMMON | shape | dict(max_iters=1, eval_prompts=0, batch_size=2, out_dir=str(tmp_path / "sft"))
        )
        train_sft.main(prepare(sft))
        settings.init_from = sft.out_dir
    prepared = prepare(settings)
    prepared.reward_funcs = [one_group_differs if settings.max_num_gen_batches > 1 else differ]
    return prepared, settings


def differ(prompts, completions, **columns):
    """Something to learn, whatever an untrained model says."""
    return [float(i % 2) for i in range(len(prompts))]


def one_group_differs(prompts, completions, **columns):
    """So that groups are refilled as often as is allowed."""
    return [float(i == 0) for i in range(len(prompts))]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_is_what_a_run_takes(name, tmp_path, monkeypatch):
    """Within 2 % of the meter, phase by phase, and of the profiler's trace of the whole run; the host's bytes exactly.

    Rollouts that are decoded in pieces may take 5 % less: a plan has rows of different lengths, of prompts that are far apart.
    """
    no_stop(monkeypatch)
    most = 0.05 if name in ("long rollouts", "cache in pieces") else 0.02
    monkeypatch.setattr(
        "runs.saver.available_on_host", lambda: 0
    )  # no copies while a checkpoint is written, which a plan leaves out
    prepared, settings = prepared_run(tmp_path, **CONFIGS[name])
    its_plan = plan(partial(grpo.rehearsal, prepared), settings)
    gc.collect()
    before = HOST.current
    profiled, _ = profiled_peak(lambda: grpo.main(prepared))
    record = read_log(settings.out_dir)[-1]
    assert its_plan.peak / MIB == pytest.approx(record["mem_max_alloc_mb"], rel=most)
    assert (
        its_plan.line().endswith(f"phase={its_plan.phase}")
        and record["mem_max_alloc_mb_" + its_plan.phase] == record["mem_max_alloc_mb"]
    )
    for phase, (peak, parts) in its_plan.phases.items():
        assert peak / MIB == pytest.approx(record["mem_max_alloc_mb_" + phase], rel=most, abs=0.05)
        assert peak / MIB > 0.98 * record["mem_max_alloc_mb_" + phase] - 0.05
        assert sum(parts.values()) == peak
    if its_plan.host:
        assert its_plan.host == pytest.approx(record["mem_max_host_mb"] * MIB - before, rel=0.02)
    if its_plan.host:  # the profiler sees both, and not that they are at their peaks at different times
        assert its_plan.peak <= profiled <= 1.02 * (its_plan.peak + its_plan.host)
    else:
        assert its_plan.peak == pytest.approx(profiled, rel=most)


def test_a_plan_takes_completions_to_stop(tmp_path):
    """So that all of them are trained on, where those that do not are masked."""
    peaks = []
    for masked in (False, True):
        prepared, settings = prepared_run(tmp_path / str(masked), mask_truncated_completions=masked)
        peaks.append(plan(partial(grpo.rehearsal, prepared), settings).peak)
    assert peaks[0] == peaks[1]


def test_a_plan_says_whose_the_bytes_are(tmp_path):
    """Nearly all by name; a library in a virtual environment within the project is not the project."""
    prepared, settings = prepared_run(tmp_path)
    phases = plan(partial(grpo.rehearsal, prepared), settings).phases
    assert {"weights", "moments", "gradients", "activations", "logits"} <= set(
        phases["train"][1]
    ) and "KV cache" in phases["rollout"][1]
    assert all(parts.get("other", 0) < 0.02 * peak for peak, parts in phases.values())
    scope = {}
    exec(compile("def call(function):\n    return function()", os.path.join(HOME, ".venv/lib/thing.py"), "exec"), scope)
    assert scope["call"](lambda: scope["call"](Births.site)) == ("other", "")


@pytest.mark.parametrize("changes", [dict(), dict(max_tokens_per_micro_batch=100, checkpoint_blocks="block", **BF16)])
def test_the_plan_of_sft(changes, tmp_path):
    settings = SFTSettings(**COMMON | dict(batch_size=16, out_dir=str(tmp_path)) | changes)
    prepared = prepare(settings)
    its_plan = plan(partial(train_sft.rehearsal, prepared), settings)
    train_sft.main(prepared)
    assert its_plan.peak / MIB == pytest.approx(read_log(tmp_path)[-1]["mem_max_alloc_mb"], rel=0.02)


# ----------------------------------------------------------------------------------------------------------------------
# The promise, at sizes that do not fit here.

QWEN = dict(
    norm="rmsnorm", position="rotary", rope_theta=1e6, mlp="swiglu", qkv_bias=True, block_size=2048, n_vocab=257
)
SHAPES = {
    "GPT-2 124M": dict(vocab_size=50257, n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=True),
    "Qwen2.5-0.5B": QWEN | dict(vocab_size=151936, n_layer=24, n_head=14, n_kv_head=2, n_embd=896, n_hidden=4864),
    "Qwen2.5-1.5B": QWEN | dict(vocab_size=151936, n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, n_hidden=8960),
}


class LongTask:
    """256 + 768 tokens."""

    chat = False

    def longest_prompt(self):
        return "x" * 256

    def longest_answer(self):
        return "x" * 767

    longest = Task.longest


def planned(shape, settings):
    prepared = Prepared(settings, LongTask(), get_tokenizer("bytes"), shape | dict(tie_embeddings=True), [])
    loop = grpo if isinstance(settings, GRPOSettings) else train_sft
    return plan(partial(loop.rehearsal, prepared), settings)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * name.startswith("Qwen")) for name in SHAPES]
)
def test_grpo_is_planned_to_need_what_sft_needs(name):
    """And a resident reference its own bytes on top."""
    common = dict(device="cuda", max_tokens_per_micro_batch=4096, eval_prompts=0, checkpoint_blocks="block", **BF16)
    options = common | dict(batch_size=8, group_size=8, max_new_tokens=768, kv_cache_mb=256.0)
    sft = planned(SHAPES[name], SFTSettings(**common, batch_size=16))
    none, on_host, resident = (
        planned(SHAPES[name], GRPOSettings(**options, **more))
        for more in (dict(), dict(beta=0.04, reference="host"), dict(beta=0.04))
    )
    rollouts = 64 * (1024 * 8 + 768 * (4 + 8) + 768 * 4 + 100)
    assert none.peak <= 1.01 * (sft.peak + rollouts) and on_host.peak <= 1.01 * (sft.peak + rollouts)
    reference = on_host.host
    assert abs(resident.peak - none.peak - reference) <= 0.001 * reference + rollouts


def test_the_configs_of_the_repository_hold_what_they_promise():
    """Planned peaks, all parameters: 1.5B in 12.2 GiB, in 6.6 with the optimizer on the host; 7B in 18."""
    from options import read_settings

    for words, most in (
        (["config/grpo_qwen2_1.5b.py"], 12.2),
        (["config/grpo_qwen2_1.5b.py", "--optimizer_device=host"], 6.6),
        (["config/grpo_24gb.py"], 18.0),
    ):
        prepared = prepare(*read_settings(GRPOSettings, [*words, "--device=cuda"])[:2])
        its_plan = plan(partial(grpo.rehearsal, prepared), prepared.settings)
        assert 0.5 * most * GIB < its_plan.peak <= most * GIB, (words, its_plan.line())
        assert (its_plan.host > 0) == (len(words) > 1 or "24gb" in words[0])


# ----------------------------------------------------------------------------------------------------------------------
# What fits.


def test_fit_takes_the_cheapest_and_takes_back_what_is_not_needed(tmp_path):
    prepared, settings = prepared_run(tmp_path, batch_size=16)
    make = partial(grpo.rehearsal, prepared)
    whole = plan(make, settings).peak
    longest = sum(prepared.longest(settings))
    assert fit(make, settings, longest, whole)[2] == {}
    for share in (0.9, 0.5, 0.2):
        fitted, its_plan, changed, _ = fit(make, settings, longest, share * whole)
        fitted.check()
        assert its_plan.peak <= share * whole and plan(make, fitted).peak == its_plan.peak
        assert (
            set(changed) <= {"max_tokens_per_micro_batch", "max_rollout_batch", "checkpoint_blocks"}
            and len(changed) >= 1
        )
        for name in changed:  # each is needed
            if share < 0.9:
                assert plan(make, dataclasses.replace(fitted, **{name: getattr(settings, name)})).peak > share * whole
    fitted, its_plan, changed, _ = fit(make, settings, longest, 0)  # impossible: the whole ladder
    assert {"optimizer_device", "max_tokens_per_micro_batch"} <= set(changed) and its_plan.peak < 0.2 * whole


@pytest.mark.parametrize("changes", [dict(kv_cache_mb=400.0), dict(max_tokens_per_micro_batch=100_000)])
def test_fit_begins_with_what_binds(changes, tmp_path):
    """A bound far above what there is does not keep the ladder from its first rungs."""
    prepared, settings = prepared_run(
        tmp_path,
        **changes | dict(batch_size=64, max_tokens_per_micro_batch=changes.get("max_tokens_per_micro_batch", 100)),
    )
    make = partial(grpo.rehearsal, prepared)
    budget = 0.7 * plan(make, settings).peak
    fitted, its_plan, changed, _ = fit(make, settings, sum(prepared.longest(settings)), budget)
    assert its_plan.peak <= budget and set(changed) <= {"kv_cache_mb", "max_tokens_per_micro_batch"}


def test_a_budget_changes_the_run_and_says_so(tmp_path, capsys):
    prepared, settings = prepared_run(tmp_path, eval_prompts=0)
    peak = plan(partial(grpo.rehearsal, prepared), settings).peak
    settings.memory_budget_gb = str(0.6 * peak / GIB)
    grpo.main(prepared)
    said = capsys.readouterr().out
    assert "GiB may be used: changed --max_tokens_per_micro_batch=" in said and "planned: peak_gib=" in said
    assert read_log(settings.out_dir)[-1]["mem_max_alloc_mb"] <= 0.6 * peak / MIB
    assert json.loads((tmp_path / "run/settings.json").read_text())["max_tokens_per_micro_batch"] > 0


def test_what_cannot_fit_is_refused_before_the_first_step(tmp_path, capsys):
    prepared, settings = prepared_run(tmp_path, memory_budget_gb="0.0001")
    with pytest.raises(SnugError, match=r"the plan takes 0\.\d+ GiB in \w+ even with --.*: a smaller model"):
        grpo.main(prepared)
    assert "together" in capsys.readouterr().out and not (tmp_path / "run").exists()


def test_a_host_that_is_too_small_is_refused(tmp_path, monkeypatch):
    prepared, settings = prepared_run(tmp_path, memory_budget_gb="4", optimizer_device="host")
    monkeypatch.setattr("memory.fit.available_on_host", lambda: 1000)
    with pytest.raises(SnugError, match="GiB of the host, which has 0 GiB left"):
        apply(partial(grpo.rehearsal, prepared), settings, 34, torch.device("cpu"), print)


def test_show_ends_with_the_line(tmp_path):
    prepared, settings = prepared_run(tmp_path, memory_budget_gb="0.015")
    lines = show(partial(grpo.rehearsal, prepared), settings, 34).splitlines()
    assert lines[-1].startswith("peak_gib=0.0") and " host_gib=0.000 phase=" in lines[-1]
    assert lines[-2].startswith("fits into 0.015 GiB with --max_tokens_per_micro_batch=")
    assert any(line.split()[:1] == ["together"] for line in lines)


# ----------------------------------------------------------------------------------------------------------------------
# Out of memory, in earnest.


class OutOfMemoryAt(TorchDispatchMode):
    """The `count`-th op that makes a storage in a phase that works on the device finds no memory, once."""

    def __init__(self, count, meter):
        super().__init__()
        self.left, self.meter = count, meter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if self.meter.now in ("rollout", "reference", "train", "optimizer") and any(
            isinstance(x, torch.Tensor) and id(x.untyped_storage()) not in given for x in tree_leaves(result)
        ):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.\nGPU 0 ...")
        return result


def weights_after(tmp_path, point, **changes):
    """-> final weights of two iterations with an out-of-memory at allocation `point` (0: none), and how many allocations there were."""
    prepared, settings = prepared_run(
        tmp_path, **changes | dict(eval_prompts=0, save_interval=1, gradient_accumulation_steps=2)
    )
    prepared.reward_funcs = [
        lambda prompts, completions, **columns: [sum(map(ord, c)) % 7 for c in completions]
    ]  # all different
    original = grpo.iterate

    injected = []

    def iterate(iteration, training):
        with OutOfMemoryAt(point if iteration == 0 else 0, training.meter) as mode:
            injected.append(mode)
            original(iteration, training)

    grpo.iterate = iterate
    try:
        grpo.main(prepared)
    finally:
        grpo.iterate = original
    from safetensors.torch import load_file

    return load_file(newest(settings.out_dir) / "model.safetensors"), -injected[0].left, settings


ON_HOST = dict(optimizer_device="host", grad_offload=True, checkpoint_blocks="block")


@pytest.mark.parametrize(
    "changes, points",
    [
        (dict(), 13),
        (ON_HOST, 9),
        pytest.param(dict(), 25, marks=pytest.mark.long),
        pytest.param(ON_HOST, 25, marks=pytest.mark.long),
    ],
)
def test_an_out_of_memory_anywhere_changes_nothing_but_the_pieces(changes, points, tmp_path, capsys):
    """Points of an iteration, evenly from its first allocation to its last, for each of two configs."""
    changes = changes | dict(n_layer=1, n_embd=32, learning_rate=1e-3)
    expected, allocations, _ = weights_after(tmp_path / "whole", 0, **changes)
    assert allocations > 500 and min(record["grad_norm"] for record in read_log(tmp_path / "whole/run")) > 0.01
    remembered = set()
    for i in range(points):
        point = 1 + i * (allocations - 2) // (points - 1)
        weights, _, settings = weights_after(tmp_path / str(i), point, **changes)
        for name, weight in expected.items():
            torch.testing.assert_close(
                weights[name], weight, rtol=0, atol=3e-6
            )  # decoded in other pieces, log-probs are rounded otherwise
        after_oom = read_state(newest(settings.out_dir))["after_oom"]
        remembered |= set(after_oom)
        assert all(getattr(settings, name) == value for name, (_, value) in after_oom.items())
    assert remembered == {"max_rollout_batch", "max_tokens_per_micro_batch"}
    assert "CUDA out of memory. Tried to allocate 1 EiB.; going on with max_" in capsys.readouterr().out


def test_a_resumed_run_remembers(tmp_path):
    changes = dict(n_layer=1, n_embd=32)
    _, allocations, _ = weights_after(tmp_path / "whole", 0, **changes)
    _, _, settings = weights_after(tmp_path / "again", allocations - 30, **changes)
    smaller = settings.max_tokens_per_micro_batch
    assert smaller > 0
    resumed = dataclasses.replace(settings, max_tokens_per_micro_batch=0, resume="auto", max_iters=3)
    grpo.main(prepare(resumed))
    assert resumed.max_tokens_per_micro_batch == smaller
    assert read_state(newest(resumed.out_dir))["after_oom"] == {"max_tokens_per_micro_batch": [0, smaller]}
    own = dataclasses.replace(
        resumed, max_tokens_per_micro_batch=50, max_iters=4
    )  # what the user changes is the user's
    grpo.main(prepare(own))
    assert own.max_tokens_per_micro_batch == 50


def test_at_the_floor_the_error_says_what_is_next(tmp_path, monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for module, where, said in (
        (collect, "sample_groups", "decoding one completion at a time"),
        (grpo, "accumulate", "one sequence of "),
    ):
        prepared, _ = prepared_run(tmp_path, eval_prompts=0)
        with monkeypatch.context() as patch:
            patch.setattr(module, where, no_memory)
            with pytest.raises(SnugError) as caught:
                grpo.main(prepared)
        text = str(caught.value)
        assert (
            said in text
            and "MiB" in text
            and "; next: --checkpoint_blocks=selective, with --resume=auto" in text
            and "\n" not in text
        )


def test_other_errors_are_not_mistaken_for_it():
    def wrong():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        surviving(wrong, lambda said: pytest.fail("was taken for an out-of-memory"))
    attempts = iter([RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), None])

    def once():
        error = next(attempts)
        if error:
            raise error
        return 7

    said = []
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert surviving(once, said.append) == 7 and said == [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    ]


def test_auto_asks_what_is_free(tmp_path, monkeypatch, capsys):
    prepared, settings = prepared_run(tmp_path, eval_prompts=0, memory_budget_gb="auto", max_iters=1)
    peak = plan(partial(grpo.rehearsal, prepared), settings).peak
    monkeypatch.setattr("memory.fit.available_on_host", lambda: peak)  # of which a twentieth is left alone
    grpo.main(prepared)
    assert "GiB may be used: changed --" in capsys.readouterr().out
    assert read_log(settings.out_dir)[-1]["mem_max_alloc_mb"] <= 0.95 * peak / MIB
    monkeypatch.undo()
    assert "changed" not in show(partial(grpo.rehearsal, prepared), settings, 34)  # here there is enough


def test_the_allocator_is_set_before_torch_is_imported(tmp_path, monkeypatch):
    for given, expected in ((None, "expandable_segments:True"), ("garbage_collection_threshold:0.8",) * 2):
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        if given:
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
        prepared_run(tmp_path)
        assert os.environ["PYTORCH_ALLOC_CONF"] == expected  # the user's own stays
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    prepared_run(tmp_path, cuda_allocator="")
    assert "PYTORCH_ALLOC_CONF" not in os.environ
