"""A decode step's CUDA graph without a GPU: recorded and replayed on the CPU, in Triton's interpreter.

A recording notes every ATen op and every launch of a kernel with its arguments, and undoes what they wrote. A replay runs
them again on the same tensors, without the Python of the step: numbers and addresses are those of the recording. What the
recording made is filled with rubbish before. An op that waits for the device is refused. test_replay.py: what is asked of
torch.cuda, and recordings that fail.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from helpers.models import add_adapters, make_flat_model
from helpers.rollouts import assert_naive
from interpreted import INTERPRETED, in_the_interpreter, long
from sample import sample_groups
from snug import lora
from snug.decoding import decode_batch, recorder
from snug.kernels.layers import hold_in_nf4

pytest.importorskip("triton", reason="Triton is not installed")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.bincount}
ON_HOST = {torch.tensor, torch.as_tensor, torch.from_numpy}
ON_HOST |= {getattr(torch.Tensor, name) for name in ("cpu", "numpy", "tolist", "item", "pin_memory", "__array__")}
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
test_in_the_interpreter = in_the_interpreter(__file__, 4)


def tensors_in(*values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def place_of(tensor) -> int:
    return tensor.untyped_storage()._cdata


class HostCopies(TorchFunctionMode):
    """Refuses copies between host and device, which on a CPU leave no trace among ATen's ops."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in ON_HOST, f"{func} waits"
        return func(*args, **kwargs or {})


class Graph(TorchDispatchMode):
    """torch.cuda.CUDAGraph."""

    recording, replays, launches = None, 0, 0

    def __init__(self):
        super().__init__()
        self.calls = []  # (what to run, its outputs)
        self.made = {}  # storages made during the recording: place -> a tensor over all of it
        self.before = {}  # storages that were there: place -> (storage, its bytes before)
        self.copies = HostCopies()

    def capture_begin(self, **_):
        Graph.recording = self
        self.copies.__enter__()
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        self.copies.__exit__(None, None, None)
        Graph.recording = None
        with _disable_current_modes():
            for storage, content in self.before.values():
                storage.copy_(content)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        masks = packet in (aten.index, aten.index_put, aten.index_put_) and tensors_in(args[1])
        assert packet not in WAITS and not any(mask.dtype == torch.bool for mask in masks or ()), f"{func} waits"
        self.keep(tensors_in(args, kwargs))
        result = func(*args, **kwargs)
        given = {place_of(tensor) for tensor in tensors_in(args, kwargs)}
        fresh = [tensor for tensor in tensors_in(result) if place_of(tensor) not in given]
        for tensor in fresh:
            self.made[place_of(tensor)] = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        if (fresh or func._schema.is_mutable) and packet not in EMPTY:
            self.calls.append((lambda: func(*args, **kwargs), result))
        return result

    def launched(self, executor, args, kwargs):
        self.keep(tensors_in(args, kwargs))
        self.calls.append((lambda: executor(*args, **kwargs), None))
        Graph.launches += 1

    def keep(self, tensors):
        for tensor in tensors:
            place, storage = place_of(tensor), tensor.untyped_storage()
            if place not in self.made and place not in self.before:
                self.before[place] = storage, storage.clone()

    def replay(self):
        Graph.replays += 1
        assert Graph.replays < 200, "rows that do not end"
        for whole in self.made.values():
            whole.fill_(torch.nan if whole.is_floating_point() else True if whole.dtype == torch.bool else 2**30)
        with torch.autocast("cpu", enabled=False):  # casts were recorded
            for run, outputs in self.calls:
                for old, new in zip(tensors_in(outputs), tensors_in(run()), strict=True):
                    if place_of(old) != place_of(new):
                        old.copy_(new)


def as_on_cuda(monkeypatch):
    """CUDA's settings on the CPU. Batches are small here, so slots leave from the first one on."""
    for settings in (decode_batch.LOOK_EVERY, decode_batch.SHRINK_AT, decode_batch.PREFILL_TOKENS):
        monkeypatch.setitem(settings, "cpu", settings["cuda"])


@pytest.fixture
def graphs(monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    launch, init = GridExecutor.__call__, decode_batch.DecodeBatch.__init__

    def seen(executor, *args, **kwargs):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if Graph.recording:
                Graph.recording.launched(executor, args, kwargs)
            return launch(executor, *args, **kwargs)

    def with_graphs(*args, **options):
        init(*args, **options | {"cuda_graphs": True})

    class Stream:
        def wait_stream(self, other):
            pass

    monkeypatch.setattr(GridExecutor, "__call__", seen)
    monkeypatch.setattr(decode_batch.DecodeBatch, "__init__", with_graphs)
    monkeypatch.setattr(recorder, "capture_stream", lambda _: Stream())
    stand_ins = dict(CUDAGraph=Graph, MemPool=lambda: Stream, device=lambda *_: nullcontext(), current_stream=Stream)
    for name, stand_in in (stand_ins | dict(stream=lambda _: nullcontext())).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    Stream.id = (0, 1)
    Graph.replays = Graph.launches = 0
    as_on_cuda(monkeypatch)


def model_of(shape, adapters=False, in_nf4=False):
    """A small one whose last 8 ids are padding; adapters: with LoRA on all four matrices, which changes the samples."""
    heads = dict(n_head=2, n_kv_head=2 if shape == "gpt2" else 1)
    layers = dict(n_layer=2, full_every=2) if shape == "linear" else dict(n_layer=1)
    model = make_flat_model(shape, **layers, n_embd=64 if in_nf4 else 16, vocab_size=24, n_vocab=16, **heads)
    if in_nf4:
        hold_in_nf4(model, "cpu")
    return add_adapters(model, rank=2, std=0.3) if adapters else model


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def sampled(model, slots=3, k=2, **options):
    return sample_groups(model, PROMPTS, k, 8, stop_token=(3, 9), seed=21, max_batch=slots, **options)


def reply(row, ids):
    """None, or a reply of 0 to 2 tokens, stop tokens too."""
    return None if sum(ids) % 4 == 3 else [3, ids[0]][: sum(ids) % 4]


# shape, rows a prompt, slots, LoRA, other options. All are ragged; with fewer slots than rows, slots are filled again.
EPISODES = "llama", 3, 4, True, dict(respond=reply, is_over=lambda ids: ids[-2:] == [5, 5])


@interpreted
@pytest.mark.parametrize(
    "shape, k, slots, adapters, options",
    [
        long(*EPISODES),
        ("llama", 1, 2, False, {}),
        ("linear", 2, 3, False, dict(respond=reply)),
        long("linear", 3, 4, False, EPISODES[4]),
    ],
)
def test_replayed_steps_equal_the_naive_generator(shape, k, slots, adapters, options, graphs):
    model = model_of(shape, adapters)
    rollouts = sampled(model, slots, k, **options)
    assert_naive(rollouts, model, PROMPTS, 8, stop_token=(3, 9), seed=21, **options)
    assert Graph.replays > 3 and Graph.launches > 0 and len(set(rollouts.completion_lengths.tolist())) > 1


@interpreted
@pytest.mark.long
@pytest.mark.parametrize("shape, in_nf4", [("gpt2", False), ("llama", True)])
def test_replayed_steps_under_autocast_are_the_steps_as_they_are(shape, in_nf4, request, monkeypatch):
    """To the bit: the same ops in the same order. In NF4 by the kernel that reads 4 bits."""
    model, products, product = model_of(shape, True, in_nf4), [], lora.product
    monkeypatch.setattr(lora, "product", lambda *args: products.append(args) or product(*args))
    with monkeypatch.context() as patch, torch.autocast("cpu", torch.float16):
        as_on_cuda(patch)
        expected = sampled(model)
    request.getfixturevalue("graphs")
    with torch.autocast("cpu", torch.float16):
        rollouts = sampled(model)
    assert Graph.replays > 3 and bool(products) == in_nf4
    assert rollouts.tokens.equal(expected.tokens) and rollouts.sampling_logprobs.equal(expected.sampling_logprobs)
