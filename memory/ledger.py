"""Which storages are alive, and how many bytes they have: the device's, and apart from them those in host memory.

A CPU has no caching allocator to ask, so a dispatch mode sees what every op returns and holds a weak reference to its storage. That
is exact for tensors and blind to what an op allocates and frees inside itself; it costs about 10 microseconds an op.

`HOST` counts tensors that belong in host memory, on a CPU too, where "device" and "host" are the same chips. So what an option
saves on a GPU can be counted without one.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20


planned_kind = None  # "cuda" while a planner's fake tensors, which are the CPU's, stand for a CUDA device's (plan.py)


def kind_of(tensor):
    """ "cuda" or "cpu": the kind of device a tensor is on, or is planned to be on."""
    return planned_kind or tensor.device.type


class Ledger:
    """Storages that are alive: their bytes, and the most there have been since `reset_peak`."""

    def __init__(self):
        super().__init__()
        self.current = self.peak = 0
        self.sizes = {}  # id of a storage -> (weak reference, bytes)

    def follow(self, tensor):
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
            self.born(key, tensor, size)
        self.peak = max(self.peak, self.current)

    def born(self, key, tensor, size):
        """For who wants to know more of a new storage (plan.py)."""

    def forget(self, key):
        self.current -= self.sizes.pop(key)[1]

    def reset_peak(self):
        self.peak = self.current


class HostLedger(Ledger):
    making = False  # while a tensor is made that is to be counted here, and not by LiveBytes


HOST = HostLedger()


class LiveBytes(Ledger, TorchDispatchMode):
    """Device bytes: what every op returns is followed, except what is in `HOST`.

    Storages made before it was entered are unknown to it until an op returns them; `follow` adds them by hand.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.follow(result)
        elif isinstance(result, tuple | list):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self.follow(item)
        return result

    def follow(self, tensor):
        if not HOST.making and id(tensor.untyped_storage()) not in HOST.sizes:
            super().follow(tensor)
