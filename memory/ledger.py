"""Which storages are alive, and how many bytes they have: the device's, and apart from them those in host memory.

A CPU has no caching allocator to ask, so a dispatch mode sees what every op returns and holds a weak reference to its
storage. That is exact for tensors and blind to what an op allocates and frees inside itself; it costs about 10
microseconds an op.

`HOST` counts tensors that belong in host memory, on a CPU too, where "device" and "host" are the same chips. So what an
option saves on a GPU can be counted without one. A planner's fake tensors bring their own device kind and host ledger.
"""

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

MIB = 2**20


class Ledger:
    """Live storages: their bytes, and the most there have been since `reset_peak`."""

    def __init__(self):
        super().__init__()
        self.current = self.peak = 0
        self.sizes = {}  # id of a storage -> (weak reference, bytes)

    def follow(self, tensor: torch.Tensor):
        """Count the storage of a tensor, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        known = self.sizes.get(key)
        if known is not None and known[1] == size:
            return
        if known is not None:  # resized in place
            self.sizes[key] = (known[0], size)
            self.current += size - known[1]
        else:
            self.sizes[key] = (weakref.ref(storage, lambda _: self.forget(key)), size)
            self.current += size
            self.created(key, tensor, size)
        self.peak = max(self.peak, self.current)

    def created(self, key, tensor, size):
        """Called for each new storage; the planner overrides it."""

    def forget(self, key):
        size = self.sizes.pop(key)[1]
        self.current -= size  # after the call, in which another thread may forget another

    def reset_peak(self):
        self.peak = self.current


class HostLedger(Ledger):
    making = False  # True while a host tensor is made, so that LiveBytes does not count it as the device's


HOST = HostLedger()


class LiveBytes(Ledger, TorchDispatchMode):
    """Device bytes: follows what every op returns, except host tensors.

    It does not know storages made before it was entered until an op returns them; `follow` adds them by hand.
    """

    def __init__(self, host: HostLedger = HOST):
        super().__init__()
        self.host = host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and not (item.is_meta or is_traceable_wrapper_subclass(item)):
                self.follow(item)  # a DTensor holds nothing, the tensor in it does
        return result

    def follow(self, tensor):
        if not self.host.making and id(tensor.untyped_storage()) not in self.host.sizes:
            super().follow(tensor)


def unwatched():
    """A context in which LiveBytes sees no op: for many small steps, where 10 microseconds an op are a long time."""
    return _disable_current_modes()


class PlanningMode(FakeTensorMode):
    """Tensors made inside have shapes and no data. They stand for a device's of this kind, "cuda" or "cpu"."""

    def __init__(self, kind: str, host: HostLedger):
        super().__init__(allow_non_fake_inputs=True)
        self.kind, self.host = kind, host


def planning_mode(tensor: torch.Tensor) -> PlanningMode | None:
    mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
    return mode if isinstance(mode, PlanningMode) else None


def is_planned(tensor: torch.Tensor) -> bool:
    """Is it without data? Then kernels have nothing to do: their callers allocate all outputs."""
    return isinstance(tensor, FakeTensor)


def kind_of(tensor: torch.Tensor) -> str:
    """ "cuda" or "cpu": the kind of device a tensor is on, or is planned for."""
    mode = planning_mode(tensor)
    return mode.kind if mode else tensor.device.type


def host_ledger(tensor: torch.Tensor) -> HostLedger:
    """The ledger that counts host copies of a tensor."""
    mode = planning_mode(tensor)
    return mode.host if mode else HOST


def logits_budget(chunk_mb: float, kind: str) -> float:
    """The option logits_chunk_mb -> MiB for a chunk of logits and what is made of it; 0: the device's default."""
    return chunk_mb or (256 if kind == "cuda" else 16)
