"""The sampler's CUDA graphs without a GPU: recorded and replayed on the CPU.

The kernels run in Triton's interpreter, so one test runs this file again in a process of its own with
TRITON_INTERPRET=1. bfloat16 has no products there; autocast is tested in float16.
"""

import gc

import pytest
import torch

import replay
from helpers.models import DEVICE, make_flat_model
from helpers.rollouts import rows_of
from interpreted import INTERPRETED, compiles, long, run_interpreted
from sample import generate_naive, sample_groups
from snug import lora
from snug.decoding import decode_batch
from snug.device import cuda
from snug.kernels.layers import hold_in_nf4

pytest.importorskip("triton", reason="Triton is not installed")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
STOPS = (3, 9)


@pytest.mark.long
@compiles
def test_in_the_interpreter(request):
    run_interpreted(__file__, 3, request)


@pytest.fixture
def device(monkeypatch):
    return replay.graphs(monkeypatch)


def model_of(shape, adapters=False, in_nf4=False):
    """A small one whose last 8 ids are padding; adapters: with LoRA on all four matrices, which changes the samples."""
    heads = dict(n_head=2, n_kv_head=dict(gpt2=2, llama=1)[shape])
    model = make_flat_model(shape, n_layer=1, n_embd=64 if in_nf4 else 16, vocab_size=24, n_vocab=16, **heads)
    if in_nf4:
        hold_in_nf4(model, DEVICE)
    if adapters:
        lora.add(model, rank=2, alpha=8, targets=list(lora.TARGETS))
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.3)
    return model


def sampled(model, slots=3, k=2, **options):
    return sample_groups(model, PROMPTS, k, 8, stop_token=STOPS, seed=21, max_batch=slots, **options)


def assert_naive(model, rollouts, k=2, **options):
    for i, (ids, logprobs) in enumerate(rows_of(rollouts)):
        naive = generate_naive(model, PROMPTS[i // k], 8, stop_token=STOPS, seed=21, row=i, **options)
        expected = [value or 0.0 for value in naive[1]]  # None: written by `respond`
        assert ids == naive[0] and logprobs == pytest.approx(expected, abs=1e-5)


def reply(row, ids):
    """None, or a reply of 0 to 2 tokens, stop tokens too."""
    return None if sum(ids) % 4 == 3 else [3, ids[0]][: sum(ids) % 4]


def ends_in_5_5(ids):
    return ids[-2:] == [5, 5]


# shape, rows a prompt, slots, LoRA, other options. All are ragged; with fewer slots than rows, slots are filled again.
CASES = {
    "episodes": ("llama", 3, 4, True, dict(respond=reply, is_over=ends_in_5_5)),
    "all rows at once": ("gpt2", 4, None, False, {}),
    "the likeliest tokens": ("gpt2", 2, 4, True, dict(temperature=0.0)),
    "a stop string": ("gpt2", 3, 4, False, dict(is_over=ends_in_5_5, temperature=0.8)),
    "one row a prompt": ("llama", 1, 2, False, {}),
}


@interpreted
@pytest.mark.parametrize("case", [*map(long, list(CASES)[:-1]), "one row a prompt"])
def test_replayed_steps_equal_the_naive_generator(case, device):
    shape, k, slots, adapters, options = CASES[case]
    model = model_of(shape, adapters)
    rollouts = sampled(model, slots, k, **options)
    assert_naive(model, rollouts, k, **options)
    assert device.replays > 3 and device.launches > 0 and len(set(rollouts.completion_lengths.tolist())) > 1
    assert not device.live and device.log[-1] == "pool's memory given back"


@interpreted
@pytest.mark.parametrize("shape, in_nf4", [long("gpt2", False), long("llama", True)])
def test_replayed_steps_under_autocast_are_the_steps_as_they_are(shape, in_nf4, monkeypatch):
    """To the bit: the same ops in the same order. In NF4 by the kernel that reads 4 bits."""
    model, products, product = model_of(shape, True, in_nf4), [], lora.product
    monkeypatch.setattr(lora, "product", lambda *args: products.append(args) or product(*args))
    with monkeypatch.context() as patch, torch.autocast("cpu", torch.float16):
        replay.as_on_cuda(patch)
        expected = sampled(model)
    device = replay.graphs(monkeypatch)
    with torch.autocast("cpu", torch.float16):
        rollouts = sampled(model)
    assert device.replays > 3 and bool(products) == in_nf4
    assert rollouts.tokens.equal(expected.tokens) and rollouts.sampling_logprobs.equal(expected.sampling_logprobs)


# ----------------------------------------------------------------------------------------------------------------------
# Recording itself.

FULL = torch.OutOfMemoryError, "CUDA out of memory"


@interpreted
def test_a_recording_waits_for_nothing_and_empties_no_cache(device):
    sampled(model_of("llama"), slots=5, k=3)
    recordings = device.log.count("begin")
    assert recordings > 1  # slots left
    one = ["side waits for default", "begin", "end", "default waits for side"]
    assert device.log == one * recordings + ["pool's memory given back"]
    assert gc.isenabled() and device.current is device.default


@interpreted
@pytest.mark.long
def test_out_of_memory_during_a_recording_empties_the_cache_and_tries_again(device, capsys):
    device.failures = [FULL]
    sampled(model_of("gpt2"))
    assert device.replays > 3 and device.log.count("empty_cache") == 1
    assert device.log.index("empty_cache") > device.log.index("end")  # the failed recording is over
    assert not capsys.readouterr().err


@interpreted
@pytest.mark.parametrize(
    "failures", [long([FULL, FULL]), long([(RuntimeError, "not allowed")])], ids=["memory", "other"]
)
def test_without_a_recording_sampling_goes_on(failures, device, monkeypatch, capsys):
    device.failures, model, users, unusable = list(failures), model_of("gpt2"), [], len(failures) == 1
    refill = decode_batch.DecodeBatch.refill
    look = lambda batch: (users.append(list(device.pools.values())), refill(batch))[1]  # noqa: E731
    monkeypatch.setattr(decode_batch.DecodeBatch, "refill", look)
    assert_naive(model, sampled(model))
    assert device.replays == 0 and device.log.count("begin") == device.log.count("end") == len(failures)
    assert not device.live and users[1] == [unusable]  # the pool is gone at once, not at the end, if it may go
    assert gc.isenabled() and device.current is device.default
    assert f"sampling goes on without CUDA graphs: {failures[0][1]}" in capsys.readouterr().err
    sampled(model)
    assert (device.log.count("begin") > len(failures)) == (not unusable)  # the next rollout tries again, if it may
    emptied = device.log.count("empty_cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda.empty_cache()
    assert device.log.count("empty_cache") - emptied == (not unusable)  # the allocator would raise
    cuda.BROKEN.clear()  # as at the end of the process
    assert next(iter(device.pools.values())) == unusable


@interpreted
@pytest.mark.parametrize(
    "wait",
    [
        lambda u: u.max().item(),
        long(lambda u: u[u > 0.5]),
        long(lambda u: u.cpu()),
        long(lambda u: torch.tensor([1.0], device=u.device)),
    ],
)
def test_a_step_that_waits_is_not_recorded(wait, device, monkeypatch, capsys):
    """As on CUDA, where the recording breaks and ending it raises as well."""
    original = decode_batch.sample_tokens
    waits = lambda model, hidden, u, **options: (wait(u), original(model, hidden, u, **options))[1]  # noqa: E731
    monkeypatch.setattr(decode_batch, "sample_tokens", waits)
    sampled(model_of("gpt2"))
    assert device.replays == 0 and "sampling goes on without CUDA graphs" in capsys.readouterr().err


@pytest.mark.skipif(DEVICE == "cpu", reason="records real graphs: on CUDA only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_real_graphs_replay_the_steps_as_they_are(shape, dtype, monkeypatch, capsys):
    """The same kernels on the same numbers. cuBLAS may choose another kernel on the recording's stream, so log-probs
    may differ by a rounding; tokens of a random model are so far apart that none changes in float32."""
    replays, replayed = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replayed(graph)))
    monkeypatch.setitem(decode_batch.SHRINK_ABOVE, "cuda", 1)
    model = model_of(shape, adapters=True).to(dtype)
    expected = sampled(model, slots=5, k=3, enforce_eager=True)
    assert not replays
    rollouts = sampled(model, slots=5, k=3)
    assert len(replays) > 3 and "without CUDA graphs" not in capsys.readouterr().err
    if dtype == torch.float32:
        assert rollouts.tokens.equal(expected.tokens)
        torch.testing.assert_close(rollouts.sampling_logprobs, expected.sampling_logprobs, atol=1e-5, rtol=0)
