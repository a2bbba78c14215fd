"""Tensors in host memory, and copies from the device to the host and back.

On a CPU they are copies all the same, counted apart (ledger.HOST). Left out: when to move what (model, optimizer).
"""

import math
import os
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch

from memory.ledger import HOST, MIB, host_ledger


def available_on_host() -> int:
    """Bytes that the host can still give, or this process's container (cgroup v2), whichever is less."""
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
    except (OSError, ValueError):
        return free


def new_on_host(like: torch.Tensor, dtype: torch.dtype | None = None, keep: bool = False) -> torch.Tensor:
    """An empty tensor in host memory of the shape of `like`; pinned where `like` is on CUDA, so that copies are fast.

    keep: it is large and lives long. Then its pages are pinned in place. PyTorch's own pinned allocator rounds every
    block up to a power of two, at worst twice the bytes.
    """
    ledger, dtype, pin = host_ledger(like), dtype or like.dtype, like.device.type == "cuda"
    in_place = keep and math.prod(like.shape) * dtype.itemsize >= MIB  # pages that nothing else uses
    ledger.making = True
    try:
        tensor = torch.empty(like.shape, dtype=dtype, pin_memory=pin and not in_place)
    finally:
        ledger.making = False
    if pin and in_place:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        weakref.finalize(tensor.untyped_storage(), unpin, tensor.data_ptr()).atexit = False
    ledger.follow(tensor)
    return tensor


def unpin(address):
    torch.cuda.synchronize()  # wait for copies that are under way
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def to_host(tensor: torch.Tensor, keep: bool = False) -> torch.Tensor:
    """A copy in host memory; on CUDA it is complete once the stream has reached it."""
    return new_on_host(tensor, keep=keep).copy_(tensor.detach(), non_blocking=True)


def spare_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in ordinary host memory that no ledger counts. The saver makes it only where there is room to spare."""
    HOST.making = True
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    finally:
        HOST.making = False


def to_device(tensor: torch.Tensor, device) -> torch.Tensor:
    """A copy on the device; on a CPU it is a copy too."""
    return torch.empty_like(tensor, device=device).copy_(tensor.detach(), non_blocking=True)


def load(module, device):
    """Move a module's weights from the host to the device, until `unload`."""
    for p in module.parameters():
        if not hasattr(p, "host"):  # it has one if a forward ran out of memory half way
            p.host, p.data = p.data, to_device(p.data, device)


def unload(module):
    for p in module.parameters():
        p.data = p.host
        del p.host


def stream_from_host(model, units, device):
    """Keep a frozen model's weights on the host. Each of `units`, submodules, has them on the device while it runs."""
    for p in model.parameters():
        p.data = to_host(p, keep=True)
    for unit in units:
        unit.register_forward_pre_hook(lambda unit, _: load(unit, device))
        unit.register_forward_hook(lambda unit, *_: unload(unit))


@contextmanager
def borrowed(modules, device):
    """Modules whose weights are on the host have them on the device inside the context."""
    for module in modules:
        load(module, device)
    try:
        yield
    finally:
        for module in modules:
            unload(module)
