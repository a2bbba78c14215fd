"""Which storages on the device are alive, and how many bytes they have.

A CPU has no caching allocator to ask, so a dispatch mode sees what every op returns and holds a weak reference to its
storage. That is exact for tensors and blind to what an op allocates and frees inside itself; it costs about 10
microseconds an op.
"""

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from device.host import HOST, HostLedger, Ledger


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
            if isinstance(item, torch.Tensor) and not (
                item.is_meta or is_traceable_wrapper_subclass(item)
            ):
                self.follow(item)  # a DTensor holds nothing, the tensor in it does
        return result

    def follow(self, tensor):
        if not self.host.making and id(tensor.untyped_storage()) not in self.host.sizes:
            super().follow(tensor)


def unwatched():
    """A context in which LiveBytes sees no op: for many small steps, where 10 microseconds an op are a long time."""
    return _disable_current_modes()
