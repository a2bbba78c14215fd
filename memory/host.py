"""Tensors in host memory, and copies from the device to the host and back. On a CPU they are copies all the same, counted apart (`HOST`)."""

import math
import os
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch

from memory import ledger
from memory.ledger import MIB


def available_on_host():
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


# To the host and back.


def new_on_host(shape, dtype, device, keep=False):
    """An empty tensor in host memory, pinned where `device` is CUDA, so that the bus is fast and the host need not wait.

    keep: it is large and lives long. Then its pages are pinned where they are: PyTorch's own pinned allocator, which reuses
    what is freed, rounds every block up to a power of two, at worst twice the bytes.
    """
    ledger.HOST.making = True
    try:
        pin = device.type == "cuda"
        keep = keep and math.prod(shape) * dtype.itemsize >= MIB  # pages that nothing else is on
        tensor = torch.empty(shape, dtype=dtype, pin_memory=pin and not keep)
    finally:
        ledger.HOST.making = False
    if pin and keep:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        weakref.finalize(tensor.untyped_storage(), unpin, tensor.data_ptr()).atexit = False
    ledger.HOST.follow(tensor)
    return tensor


def unpin(address):
    torch.cuda.synchronize()  # no copy is under way
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def to_host(tensor, keep=False):
    """A copy in host memory; on CUDA it is there once the stream has got so far."""
    return new_on_host(tensor.shape, tensor.dtype, tensor.device, keep).copy_(tensor.detach(), non_blocking=True)


def spare_copy(tensor):
    """A copy in the host's ordinary memory that no ledger counts, because it is only made where there is room to spare (saver.py)."""
    ledger.HOST.making = True
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    finally:
        ledger.HOST.making = False


def to_device(tensor, device):
    """A copy on the device, which on a CPU is a copy all the same."""
    return torch.empty_like(tensor, device=device).copy_(tensor.detach(), non_blocking=True)


def load(module, device):
    """The weights of a module from the host to the device, until `unload`."""
    for p in module.parameters():
        if not hasattr(p, "host"):  # it has where a forward ran out of memory half way
            p.host, p.data = p.data, to_device(p.data, device)


def unload(module):
    for p in module.parameters():
        p.data = p.host
        del p.host


def stream_from_host(model, units, device):
    """Keep a frozen model's weights on the host; each of `units`, submodules, has them on the device while it runs."""
    for p in model.parameters():
        p.data = to_host(p, keep=True)
    for unit in units:
        unit.register_forward_pre_hook(lambda unit, _: load(unit, device))
        unit.register_forward_hook(lambda unit, *_: unload(unit))


@contextmanager
def borrowed(modules, device):
    """Modules whose weights are on the host have them on the device for a while."""
    for module in modules:
        load(module, device)
    try:
        yield
    finally:
        for module in modules:
            unload(module)
