"""Tensors in host memory, and copies from the device to the host and back.

`HOST` counts them, on a CPU too, where "device" and "host" are the same chips. So what an option saves on a GPU can be
counted without one. A planner's fake tensors bring a ledger of their own.

Left out: when to move what (model, optimizer).
"""

import math
import mmap
import os
import weakref
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from device.kinds import MIB, planning_mode
from device.streams import aside
from options import SnugError

UNUSED = []  # (address, pages) of freed tensors whose pages are still pinned


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
    # True while a host tensor is made, so that LiveBytes does not count it as the device's
    making = False


HOST = HostLedger()


def host_ledger(tensor: torch.Tensor) -> HostLedger:
    """The ledger that counts host copies of a tensor."""
    mode = planning_mode(tensor)
    return mode.host if mode else HOST


def available_on_host() -> int:
    """Bytes that the host can still give, or this process's container (cgroup v2), whichever is less."""
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit, used = (
            Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current")
        )
        return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
    except (OSError, ValueError):
        return free


def new_on_host(
    like: torch.Tensor, dtype: torch.dtype | None = None, keep: bool = False
) -> torch.Tensor:
    """An empty tensor in host memory of the shape of `like`; pinned, for fast copies, if `like` is on CUDA or pinned.

    keep: it is large and lives long. Then it has pages of its own, pinned in place. PyTorch's own pinned allocator
    rounds every block up to a power of two, at worst twice the bytes. Raises SnugError if they cannot be pinned.
    """
    ledger, dtype, pin = (
        host_ledger(like),
        dtype or like.dtype,
        like.device.type == "cuda" or like.is_pinned(),
    )
    ledger.making = True
    try:
        if pin and keep and math.prod(like.shape) * dtype.itemsize >= MIB:
            tensor = pinned_in_place(like.shape, dtype)
        else:
            tensor = torch.empty(like.shape, dtype=dtype, pin_memory=pin)
    finally:
        ledger.making = False
    ledger.follow(tensor)
    return tensor


def pinned_in_place(shape, dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    except RuntimeError as error:
        less = (
            "keep less on the host (reference, optimizer_device, grad_offload), or give it more memory"
        )
        raise SnugError(
            f"the host cannot pin {size / MIB:.0f} MiB for copies to the device: {error}; {less}"
        ) from None
    weakref.finalize(tensor.untyped_storage(), unpin, tensor.data_ptr(), pages)  # at exit too
    return tensor


def unpin(address, pages):
    """Called when a tensor is freed. While a CUDA graph is recorded the host must not wait: then the next call unpins.

    It waits for copies that are under way, because PyTorch's allocator does not know this memory.
    """
    UNUSED.append((address, pages))
    if torch.cuda.is_current_stream_capturing():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # the device has failed: that error ends the run, and the driver unpins
        return
    while UNUSED:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(UNUSED[-1][0]))
        UNUSED.pop()


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


def fetch(module, device):
    """Begin to copy a module's weights from the host to the device. Compute may use them after `module.arrival.wait()`.

    They stay until `unload`. Does nothing if they are there or on their way.
    """
    if hasattr(module, "arrival"):
        return
    weights = [torch.empty_like(p, device=device) for p in module.parameters()]
    with aside(device, to="device") as arrival:
        for p, weight in zip(module.parameters(), weights, strict=True):
            weight.copy_(p.detach(), non_blocking=True)
    for p, weight in zip(module.parameters(), weights, strict=True):
        p.host, p.data = p.data, weight
    module.arrival = arrival


def unload(module):
    if hasattr(module, "arrival"):
        module.arrival.wait()
        for p in module.parameters():
            p.data = p.host
            del p.host
        del module.arrival


def stream_from_host(model, blocks, device):
    """Keep a frozen model's weights on the host. `blocks`, a ModuleList in it, are on the device while they run.

    They run in this order, and again from the first. While one runs, the weights of the next are on their way: two
    blocks are on the device at once. The other weights are there inside `borrowed`: run the model only inside it.
    """
    for p in model.parameters():
        p.data = to_host(p, keep=True)
    for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
        block.register_forward_pre_hook(partial(arrive, following, device))
        block.register_forward_hook(lambda block, *_: unload(block))
    model.streamed = [module for module in model.children() if module is not blocks], device


def arrive(following, device, block, _):
    fetch(block, device)
    block.arrival.wait()
    fetch(following, device)


@contextmanager
def borrowed(model):
    """Surrounds forwards of a model that `stream_from_host` keeps on the host. After it all weights are there again.

    Does nothing for other models.
    """
    outside, device = getattr(model, "streamed", ([], None))
    try:
        for module in outside:
            fetch(module, device)
        for module in outside:
            module.arrival.wait()
        yield
    finally:
        for module in (
            model.modules()
        ):  # blocks too: the one fetched last, or those of a forward that ran out of memory
            unload(module)
