"""Tensors in host memory, and copies from the device to the host and back.

`HOST` counts them, on a CPU too, where "device" and "host" are the same chips. So a CPU can count what an option saves
on a GPU. A planner's fake tensors are counted by the planner's ledger.

Two users copy beside compute, each in the order in which it needs the tensors: the reference's blocks (below), and the
optimizer's state and gradients (training/optimizer.py). Inputs of blocks (snug/kernels/layers.py) are copied in order.
"""

import mmap
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from snug.device.kinds import MIB, is_planned
from snug.device.streams import aside
from snug.options import SnugError


class Ledger:
    """Live storages: their bytes, and the most there have been since `reset_peak`."""

    making = False  # True while a host tensor is made: LiveBytes must not count it as the device's

    def __init__(self):
        super().__init__()
        self.current = self.peak = 0
        self.sizes = {}  # id of a storage -> (weak reference, bytes)

    def follow(self, tensor):
        """Count the storage of a tensor, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self.sizes:
            self.sizes[key] = weakref.ref(storage, lambda _: self.forget(key)), size
            self.current += size
            self.peak = max(self.peak, self.current)

    def forget(self, key):
        # Two statements: during `pop` another thread may forget another storage.
        size = self.sizes.pop(key)[1]
        self.current -= size

    def reset_peak(self):
        self.peak = self.current


HOST = Ledger()
SYSTEM = Path("/")


def available_on_host() -> int:
    """Bytes that the host can still give, or a container or other cgroup of this process, whichever is least."""
    kib = dict(line.split()[:2] for line in (SYSTEM / "proc/meminfo").read_text().splitlines())
    return max(0, min([1024 * int(kib["MemAvailable:"]), *left_in_cgroups()]))


def left_in_cgroups():
    """Yield what each cgroup of this process, from the inner one to the outermost, has left under its limit.

    What it has read from files counts as left: the kernel drops it before anything is killed.
    """
    groups = (SYSTEM / "proc/self/cgroup").read_text()
    inner = SYSTEM / "sys/fs/cgroup" / groups.rpartition("0::/")[2].strip()  # of version 2: "0::/a/b"
    for folder in (inner, *inner.parents):
        # From inside a container an outer one is not seen; "max" is no limit.
        with suppress(OSError, ValueError, KeyError):
            stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
            files = int(stat["active_file"]) + int(stat["inactive_file"])
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            yield limit - used + files


def new_on_host(like: torch.Tensor, dtype=None, keep=False, device=None) -> torch.Tensor:
    """An empty tensor in host memory of the shape of `like`; pinned, for fast copies, if `like` is pinned or `device`,
    default its own, is CUDA.

    keep: it is large and lives long. Then pages are mapped for it and pinned in place. PyTorch's allocator of pinned
    memory rounds every block up to a power of two, at worst twice the bytes, and torch 2.11 cannot turn that off.
    Raises SnugError if the pages cannot be pinned.
    """
    dtype = dtype or like.dtype
    size = like.shape.numel() * dtype.itemsize
    ledger = like.fake_mode.host if is_planned(like) else HOST
    pin = (device or like.device).type == "cuda" or like.is_pinned()
    ledger.making = True
    try:
        if pin and keep and size >= MIB:
            tensor = pinned_in_place(like.shape, dtype, size)
        else:
            tensor = torch.empty(like.shape, dtype=dtype, pin_memory=pin)
    finally:
        ledger.making = False
    ledger.follow(tensor)
    return tensor


def pinned_in_place(shape, dtype, size) -> torch.Tensor:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A reward function may fork this process. The kernel would copy all pinned pages, which no fork needs.
    pages.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
    except RuntimeError as error:
        raise SnugError(
            f"the host cannot pin {size / MIB:.0f} MiB ({error}); keep less there"
        ) from None
    weakref.finalize(tensor.untyped_storage(), unpin, tensor.data_ptr(), pages)  # at exit too
    return tensor


def unpin(address, pages):
    """Called when a tensor is freed. pages: they live until they are unpinned.

    PyTorch's allocator does not know this memory, so nobody else waits for the copies that are under way.
    """
    with suppress(
        RuntimeError
    ):  # the device has failed: that error ends the run, and the driver unpins
        torch.cuda.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def fetch(module, device):
    """Begin to copy a module's weights from the host to the device. Compute may use them after `module.arrival.wait()`.

    They stay until `unload`. Does nothing if they are on the device or on their way.
    """
    if hasattr(module, "arrival"):
        return
    weights = [torch.empty_like(p, device=device) for p in module.parameters()]
    with aside(device, to="device") as module.arrival:
        for p, weight in zip(module.parameters(), weights, strict=True):
            p.host, p.data = p.data, weight
            weight.copy_(p.host, non_blocking=True)


def unload(module):
    if hasattr(module, "arrival"):
        module.arrival.wait()
        for p in module.parameters():
            p.data = p.host
            del p.host
        del module.arrival


def stream_from_host(model, device):
    """Keep a frozen GPT's weights on the host. Its `blocks` are on the device while they run.

    They run in this order, and again from the first. While one runs, the weights of the next are on their way: two
    blocks are on the device at once. The other weights are on the device inside `borrowed`: run the model only there.
    An embedding that is not the head runs on the host.
    """
    for p in model.parameters():
        p.data = new_on_host(p, keep=True, device=device).copy_(p.data, non_blocking=True)
    blocks, at_home = model.blocks, model.head and model.embedding
    for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
        block.register_forward_pre_hook(partial(arrive, following, device))
        block.register_forward_hook(lambda block, *_: unload(block))
    model.streamed = [module for module in model.children() if module not in (blocks, at_home)]
    model.runs_on = device


def arrive(following, device, block, _):
    fetch(block, device)
    block.arrival.wait()
    fetch(following, device)


@contextmanager
def borrowed(model):
    """Put it around forwards of a model that `stream_from_host` keeps on the host. Does nothing for other models."""
    outside = getattr(model, "streamed", ())
    try:
        for module in outside:
            fetch(module, model.runs_on)
        for module in outside:
            module.arrival.wait()
        yield
    finally:
        # Blocks too: the one that was fetched last, or those of a forward that ran out of memory.
        for module in model.modules():
            unload(module)
