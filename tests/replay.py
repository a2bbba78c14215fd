"""CUDA graphs without a GPU: a stand-in for torch.cuda.CUDAGraph on the CPU.

`graphs` puts stand-ins in place of the parts of torch.cuda that record a graph. During a recording the stand-in notes
every ATen op and every Triton launch (in Triton's interpreter, TRITON_INTERPRET=1) with its arguments, and undoes what
they wrote, because nothing is computed during a real one. A replay runs them again on the same tensors, without the
Python of the step: as in a graph, numbers and addresses are those of the recording. Memory that the recording made is
filled with rubbish wherever a real graph promises nothing about it.

A recording fails, as on CUDA, if an op waits for the device or copies from or to the host.

Left out: what only a real device shows, such as kernels that differ from the interpreter's, races, and speed.
"""

import gc
from contextlib import contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from snug.decoding import decode_batch, recorder
from snug.device import cuda

aten = torch.ops.aten
RECORDING = []  # the graph that is recorded now


class NotCapturable(RuntimeError):
    """What CUDA would not allow during a recording."""


def tensors_in(*values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def storage_key(tensor) -> int:
    return tensor.untyped_storage()._cdata


def written_by(func, args, kwargs) -> list[torch.Tensor]:
    """The tensors that an ATen op writes to."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return written


# ----------------------------------------------------------------------------------------------------------------------
# What may not be recorded.

WAITS = {  # ops whose result's size or value the host needs
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.bincount,
}  # fmt: skip
FROM_OR_TO_HOST = {  # functions that copy between the host and the device
    torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist,
    torch.Tensor.item, torch.Tensor.pin_memory, torch.Tensor.__array__,
}  # fmt: skip


def refuse(func, args):
    """Raise NotCapturable for an ATen op that waits for the device."""
    packet, overload = func.overloadpacket, func._overloadname
    by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1])
    )
    by_counts = packet is aten.repeat_interleave and overload == "Tensor"
    if packet in WAITS or by_mask or by_counts:
        raise NotCapturable(f"{func} waits for the device")


class HostCopies(TorchFunctionMode):
    """Refuses copies between host and device, which on a CPU leave no trace among ATen's ops."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = args[1] if func is torch.Tensor.to and len(args) > 1 else kwargs.get("device")
        if func in FROM_OR_TO_HOST or func is torch.Tensor.to and isinstance(target, str):
            raise NotCapturable(f"{getattr(func, '__name__', func)} copies between host and device")
        return func(*args, **kwargs)


@contextmanager
def watching(graph):
    """Show the graph every ATen op (its mode) and every Triton launch (`launched`), and refuse copies."""
    RECORDING.append(graph)
    try:
        with HostCopies(), graph:
            yield
    finally:
        RECORDING.pop()


def see_launches(monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__

    def launch(executor, *args, **kwargs):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for graph in RECORDING:
                graph.launched(executor, args, kwargs)
            return original(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)


# ----------------------------------------------------------------------------------------------------------------------
# Stand-ins for torch.cuda.


class Device:
    """The state of the pretended device: streams, pools, graphs, and a log of what happened."""

    def __init__(self):
        self.log, self.pools, self.live, self.replays, self.launches = [], {}, [], 0, 0
        self.default = self.current = Stream(self, "default")
        self.failures = []  # errors that the next recordings raise: (type, message)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_stream(self, other):
        self.device.log.append(f"{self.name} waits for {other.name}")


class Pool:
    """torch.cuda.MemPool. The allocator refuses a recording into a pool that nothing uses any more."""

    def __init__(self, device):
        self.device, self.id = device, (0, len(device.pools) + 1)
        device.pools[self.id] = 1  # users: this object and the graphs

    def __del__(self):
        self.device.pools[self.id] -= 1
        left = self.device.pools[self.id]
        self.device.log.append("pool's memory given back" if left == 0 else "pool's memory kept")


class Graph(TorchDispatchMode):
    """torch.cuda.CUDAGraph."""

    def __init__(self, device):
        super().__init__()
        self.device, self.pool = device, None
        self.calls = []  # (what to run, its outputs)
        self.made = {}  # storages made during the recording: key -> a tensor over all of it
        self.before = {}  # storages that were there and are written to: key -> (storage, its bytes before)
        self.recording = self.broken = self.overwritten = False

    def capture_begin(self, pool=None, capture_error_mode="global"):
        device = self.device
        assert device.current is not device.default, "CUDA graphs must be captured on a non-default stream"
        assert not gc.isenabled(), "a finaliser may run during the recording"
        assert capture_error_mode == "thread_local" and pool is not None
        if device.pools[pool] < 1:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        device.pools[pool] += 1
        for other in device.live:
            other.overwritten |= other.pool == pool
        self.pool, self.recording = pool, True
        device.live.append(self)
        device.log.append("begin")
        self.context = watching(self)
        self.context.__enter__()

    def capture_end(self):
        self.context.__exit__(None, None, None)
        self.recording = False
        with _disable_current_modes():
            for storage, content in self.before.values():
                storage.copy_(content)
        self.spoil()
        self.device.log.append("end")
        if self.broken:
            raise RuntimeError("the recording was broken by an earlier error")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.device.failures:
            kind, message = self.device.failures.pop(0)
            raise kind(message)
        self.broken = True  # if this raises
        refuse(func, args)
        self.broken = False
        given = tensors_in(args, kwargs)
        self.keep(written_by(func, args, kwargs))
        result = func(*args, **kwargs)
        known = {storage_key(tensor) for tensor in given}
        outputs = [tensor for tensor in tensors_in(result) if storage_key(tensor) not in known]
        for tensor in outputs:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.made[storage_key(tensor)] = whole
        is_view = len(outputs) == 0 and not func._schema.is_mutable
        if not is_view and func.overloadpacket not in (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty):
            self.calls.append((lambda: func(*args, **kwargs), result))
        return result

    def launched(self, executor, args, kwargs):
        self.keep(tensors_in(args, kwargs))  # which of them it writes to, nobody says
        self.calls.append((lambda: executor(*args, **kwargs), None))
        self.device.launches += 1

    def keep(self, tensors):
        """Remember the bytes of storages that were there before the recording."""
        for tensor in tensors:
            key, storage = storage_key(tensor), tensor.untyped_storage()
            if key not in self.made and key not in self.before:
                self.before[key] = storage, storage.clone()

    def spoil(self):
        """Fill what the recording made with rubbish."""
        with _disable_current_modes():
            for whole in self.made.values():
                whole.fill_(float("nan") if whole.is_floating_point() else True if whole.dtype == torch.bool else 2**30)

    def replay(self):
        assert not self.recording and not self.overwritten, "a graph whose memory another one has taken"
        assert self.device.replays < 30, "rows that do not end"
        self.spoil()
        with torch.autocast("cpu", enabled=False):  # casts were recorded
            for run, outputs in self.calls:
                again = run()
                for old, new in zip(tensors_in(outputs), tensors_in(again), strict=True):
                    if storage_key(old) != storage_key(new):
                        old.copy_(new)
        self.device.replays += 1

    def reset(self):
        if self.pool is not None:
            self.device.pools[self.pool] -= 1
            self.device.live.remove(self)
            self.pool = None
            self.spoil()


class Handle:
    """What the code holds of a graph; deleting it deletes the graph."""

    def __init__(self, device):
        self.graph = Graph(device)
        self.capture_begin, self.capture_end, self.replay = (
            getattr(self.graph, name) for name in ("capture_begin", "capture_end", "replay")
        )

    def __del__(self):
        self.graph.reset()


def graphs(monkeypatch) -> Device:
    """Decode batches record and replay graphs on the CPU, with CUDA's settings; -> the device, to ask what happened."""
    device = Device()
    see_launches(monkeypatch)
    side = Stream(device, "side")
    stand_ins = dict(CUDAGraph=lambda: Handle(device), MemPool=lambda: Pool(device), device=lambda *_: nullcontext())
    stand_ins |= dict(current_stream=lambda *_: device.current, stream=device.stream)
    stand_ins |= dict(synchronize=lambda *_: device.log.append("synchronize"))
    stand_ins |= dict(empty_cache=lambda: device.log.append("empty_cache"))
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(recorder, "capture_stream", lambda _: side)
    monkeypatch.setattr(cuda, "BROKEN", [])  # of this test alone
    init = decode_batch.DecodeBatch.__init__
    with_graphs = lambda *args, **options: init(*args, **options | {"cuda_graphs": True})  # noqa: E731
    monkeypatch.setattr(decode_batch.DecodeBatch, "__init__", with_graphs)
    as_on_cuda(monkeypatch)
    return device


def as_on_cuda(monkeypatch):
    """CUDA's settings on the CPU. Batches are small here, so slots leave from the first one on."""
    for settings in (decode_batch.LOOK_EVERY, decode_batch.SHRINK_AT, decode_batch.PREFILL_TOKENS):
        monkeypatch.setitem(settings, "cpu", settings["cuda"])
