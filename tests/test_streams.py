"""Copies beside compute: nothing is read or written too early, and pinned memory is unpinned before it goes.

Test: pytest tests/test_streams.py
"""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import streams
import train_sft
from batch import Cut
from helpers.errors import assert_refused
from helpers.models import make_flat_model
from helpers.rollouts import some_rollouts
from helpers.runs import limits_of
from runs.checkpoint import find_run
from runs.loading import load_frozen
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings
from snug.device.host import HOST, borrowed, new_on_host, stream_from_host
from snug.device.kinds import MIB
from streams import COMPUTE, Pinnable, fake_pinning, fake_streams
from training import frozen

CPU = torch.device("cpu")


both = pytest.mark.parametrize("kind_of_streams", [fake_streams] + [nullcontext] * torch.cuda.is_available())


said = []


def reference_on_host(n_layer=4, max_tokens=20):
    """-> (a Training with a streamed reference, rollouts, the log-probs of a resident one)."""
    reference = make_flat_model("llama", dtype=torch.float64, n_layer=n_layer).requires_grad_(False)
    rollouts = some_rollouts(reference)
    settings = GRPOSettings(beta=0.04, reference="host", max_tokens_per_micro_batch=max_tokens, init_from="x")
    wanted = frozen.trainer_logprobs(reference, rollouts, Cut(rollouts), settings)
    model = make_flat_model("llama", dtype=torch.float64, n_layer=1)
    stream_from_host(reference, reference.device)
    limits = limits_of(settings, said.append)
    return SimpleNamespace(settings=settings, model=model, reference=reference, limits=limits), rollouts, wanted


def all_at_home(reference):
    return all(id(p.untyped_storage()) in HOST.sizes and not hasattr(p, "host") for p in reference.parameters())


@both
@pytest.mark.parametrize("n_layer", [1, 3])
def test_a_streamed_reference_is_the_resident_one(n_layer, kind_of_streams):
    training, rollouts, wanted = reference_on_host(n_layer)
    cut = Cut(rollouts, 0, 20)
    with kind_of_streams():
        found = frozen.reference_logprobs(training, rollouts, cut)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert all_at_home(training.reference)
    assert cut.steps == Cut(rollouts, 0, 20).steps  # training's own is as it was


def test_the_weights_of_a_block_are_on_their_way_while_the_one_before_computes():
    """And those of the first while the last one does, for the next micro-batch."""
    training, rollouts, _ = reference_on_host(n_layer=3, max_tokens=0)
    reference = training.reference
    blocks = enumerate(reference.blocks)
    names = {id(p.untyped_storage()): i for i, block in blocks for p in block.parameters()}  # of storages on the host
    with fake_streams() as races:
        for _ in range(2):
            with borrowed(reference):
                for _ in range(2):
                    reference(rollouts.tokens)
            assert all_at_home(reference)
    events, owner = [], {}
    for op in races.log:
        if op.stream == COMPUTE:
            owner = {key: block for key, block in owner.items() if key not in op.writes}  # a new tensor
        for key in op.reads:
            if op.name == "copy_" and key in names:
                assert op.stream != COMPUTE
                owner[op.writes[0]] = names[key]
                events.append(f"copy {names[key]}")
            elif op.stream == COMPUTE and key in owner and op.name != "copy_":
                events.append(f"run {owner[key]}")
    order = [event for event, before in zip(events, [None, *events], strict=False) if event != before]
    forward = "copy 1, run 0, copy 2, run 1, copy 0, run 2"
    assert ", ".join(order) == ", ".join(["copy 0", forward, forward] * 2)


@both
def test_after_an_out_of_memory_no_weight_is_left_on_the_device(kind_of_streams):
    """Half way, with one block there and the next on its way. Each attempt has smaller micro-batches than the last."""
    training, rollouts, wanted = reference_on_host(max_tokens=40)
    sizes, broken = [], [1, 2, 3]

    def run_out(block, inputs):
        sizes.append(inputs[0].shape[:2].numel())
        if broken:
            broken.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    training.reference.blocks[2].register_forward_pre_hook(run_out)
    limits, make_smaller = training.limits, training.limits.make_smaller
    cut = Cut(rollouts, 0, 40)

    def smaller(*arguments, cut):
        assert all_at_home(training.reference)
        make_smaller(*arguments, cut)

    limits.make_smaller = smaller
    with kind_of_streams():
        found = limits.retry("reference", partial(frozen.reference_logprobs, training, rollouts), cut)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert sizes[:3] == sorted(sizes[:3], reverse=True) and max(sizes[3:]) < sizes[2] < sizes[1] < sizes[0] <= 160
    smaller = ["reference_batches=2", "reference_batches=1", "max_tokens_per_micro_batch=20"]
    assert [line.partition("going on with ")[2] for line in said[-3:]] == smaller


def test_streamed_weights_take_larger_micro_batches():
    """Up to four at once, to 8,192 tokens. A resident reference takes what training takes."""
    settings = GRPOSettings(max_tokens_per_micro_batch=4096, beta=0.04, init_from="x", reference="host")
    assert limits_of(settings).reference_batches == 2
    assert limits_of(replace(settings, reference="device")).reference_batches == 1
    training, rollouts, _ = reference_on_host(n_layer=1)
    cut, seen = Cut(rollouts, 0, 20), []
    training.reference.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    frozen.reference_logprobs(training, rollouts, cut)
    assert all(60 < T <= 80 for T in seen[:-1])
    assert sum(seen) == sum(cut.prompt_lengths) + sum(cut.completion_lengths) - 12


@pytest.mark.parametrize("held", ["by its name", "by a view", "by autograd"])
@pytest.mark.parametrize("shape, dtype", [([3, MIB], torch.float32), ([MIB], torch.bfloat16)])
def test_every_pinned_page_is_unpinned_once_before_it_goes(held, shape, dtype):
    gc.collect()
    before = HOST.current
    with fake_pinning() as cudart:
        tensor = new_on_host(Pinnable(shape, dtype), keep=True)
        assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype and tensor.data_ptr() % 4096 == 0
        assert cudart.pinned == {tensor.data_ptr(): tensor.nbytes} and HOST.current == before + tensor.nbytes
        tensor.fill_(3)
        if held == "by a view":
            tensor = tensor.view(-1)[5:]
        elif held == "by autograd":
            tensor = torch.ones(shape, dtype=dtype, requires_grad=True) * tensor
        assert len(cudart.pinned) == 1 and tensor.detach().flatten()[-1] == 3
        del tensor
        assert cudart.pinned == {} and HOST.current == before
    assert [name for name, _ in cudart.calls] == ["register", "synchronize", "unregister"]  # after the copies


def test_a_streamed_model_is_never_on_the_device_while_it_loads(tmp_path):
    """It has the same weights bit for bit, adapters merged. The device "meta" stands for one without any memory."""
    for name, options in (("plain", dict()), ("adapted", dict(lora_rank=2, init_from=str(tmp_path / "plain")))):
        shape = dict(digits=1, n_layer=2, n_embd=32, device="cpu", max_iters=1, batch_size=2, eval_prompts=0)
        folder = str(tmp_path / name)
        train_sft.main(prepare(SFTSettings(**shape, out_dir=folder, learning_rate=0.1, **options)))
        origin = find_run(folder)
        whole = load_frozen(origin.state["model_config"], origin, CPU, "float32", "device")
        streamed = load_frozen(origin.state["model_config"], origin, torch.device("meta"), "float32", "host")
        assert streamed.device.type == "meta"
        for ours, theirs in zip(streamed.parameters(), whole.parameters(), strict=True):
            assert ours.device == CPU and id(ours.untyped_storage()) in HOST.sizes and torch.equal(ours, theirs)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux for a mapping's flags")
def test_a_fork_does_not_copy_what_is_pinned():
    """dc: the kernel does not copy this mapping on a fork."""
    with fake_pinning():
        pinned, plain = new_on_host(Pinnable([MIB], torch.float32), keep=True), torch.zeros(MIB)
        flags = [streams.flags_of(tensor.data_ptr() + 4096) for tensor in (pinned, plain)]
        del pinned
    assert "dc" in flags[0] and "dc" not in flags[1]


def test_what_cannot_be_pinned_is_said_in_one_line():
    gc.collect()
    before = HOST.current
    with fake_pinning(error=2) as cudart:
        said = r"the host cannot pin 4 MiB .*CUDA error 2.*; keep less there"
        assert_refused(said, new_on_host, Pinnable([MIB], torch.float32), keep=True)
    assert HOST.current == before and not HOST.making
    assert [name for name, _ in cudart.calls] == ["register"]
