"""CUDA graphs of a decode step: what a recording asks of torch.cuda, here of a stand-in, and what follows one that fails.

On a GPU steps that are replayed are compared with the steps as they are; without one test_graphs.py replays them on the
CPU.
"""

import gc
import weakref
from contextlib import nullcontext
from unittest.mock import Mock, call

import pytest
import torch

from helpers.models import DEVICE, add_adapters, make_flat_model
from sample import sample_groups
from snug.decoding import decode_batch, recorder
from snug.decoding.recorder import Recorder
from snug.device import cuda

FULL = torch.OutOfMemoryError("CUDA out of memory")


class Pool:
    id = (0, 1)


@pytest.fixture
def gpu(monkeypatch):
    """In place of torch.cuda: its calls, and `pool`, a weak reference. A recording runs the step."""
    gpu = Mock(device=lambda _: nullcontext(), stream=lambda _: nullcontext())

    def new_pool():
        pool = Pool()
        gpu.pool = weakref.ref(pool)
        return pool

    for name in ("device", "stream", "CUDAGraph", "current_stream", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(torch.cuda, "MemPool", new_pool)
    monkeypatch.setattr(recorder, "capture_stream", lambda device: gpu.side)
    monkeypatch.setattr(cuda, "BROKEN", [])  # of this test alone
    return gpu


def test_a_step_is_run_then_recorded_then_replayed(gpu):
    """The side stream waits, and no finaliser may run meanwhile."""
    seen = []
    steps = Recorder("cuda")
    for _ in range(3):
        steps.run(lambda: seen.append(gc.isenabled()))
    assert seen == [True, False] and gc.isenabled()
    graph, current = call.CUDAGraph(), call.current_stream()
    wanted = [graph, current, call.side.wait_stream(gpu.current_stream.return_value)]
    wanted += [call.CUDAGraph().capture_begin(pool=Pool.id, capture_error_mode="thread_local")]
    wanted += [call.CUDAGraph().capture_end(), call.current_stream().wait_stream(gpu.side)]
    wanted += [call.CUDAGraph().replay()] * 2
    assert gpu.mock_calls == wanted


@pytest.mark.parametrize("failures", [[FULL], [FULL, FULL], [RuntimeError("not allowed")]], ids=len)
def test_without_a_recording_sampling_goes_on(failures, gpu, monkeypatch, capsys):
    """After one out-of-memory the cache is emptied, and the recording tried again. After another error the pool stays for
    ever, there are no more recordings, and the cache is never emptied: the allocator would raise."""
    errors, again, unusable = iter(failures), failures == [FULL], failures[0] is not FULL

    def step():
        if not gc.isenabled() and (error := next(errors, None)):
            raise type(error)(*error.args)  # one whose traceback nobody keeps

    steps = Recorder("cuda")
    for _ in range(3):
        steps.run(step)
    ends, emptied = gpu.CUDAGraph().capture_end.call_count, 0 if unusable else len(failures)
    assert ends == len(failures) + again and gpu.empty_cache.call_count == emptied and gc.isenabled()
    said = capsys.readouterr().err
    assert f"sampling goes on without CUDA graphs: {failures[0]}" in said if not again else not said
    assert gpu.CUDAGraph().replay.call_count == 2 * again and Recorder("cuda").enabled == (not unusable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda.empty_cache()
    assert gpu.empty_cache.call_count == emptied + (not unusable)
    cuda.BROKEN.clear()  # as at the end of the process
    del steps
    assert (gpu.pool() is not None) == unusable


@pytest.mark.skipif(DEVICE == "cpu", reason="records real graphs: on CUDA only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_real_graphs_replay_the_steps_as_they_are(shape, dtype, monkeypatch, capsys):
    """The same kernels on the same numbers. cuBLAS may choose another kernel on the recording's stream, so log-probs
    may differ by a rounding; tokens of a random model are so far apart that none changes in float32."""
    replays, replayed = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replayed(graph)))
    monkeypatch.setitem(decode_batch.SHRINK_ABOVE, "cuda", 1)
    model = add_adapters(make_flat_model(shape, n_layer=1, vocab_size=24, n_vocab=16), rank=2, std=0.3)
    prompts, options = [[1, 2, 3], [4], [5, 6, 7, 8, 9]], dict(stop_token=(3, 9), seed=21, max_batch=5)
    model = model.to(dtype)
    expected = sample_groups(model, prompts, 3, 8, enforce_eager=True, **options)
    assert not replays
    rollouts = sample_groups(model, prompts, 3, 8, **options)
    assert len(replays) > 3 and "without CUDA graphs" not in capsys.readouterr().err
    if dtype == torch.float32:
        assert rollouts.tokens.equal(expected.tokens)
        torch.testing.assert_close(rollouts.sampling_logprobs, expected.sampling_logprobs, atol=1e-5, rtol=0)
