"""What is allocated, reserved and at peak, phase by phase; moving tensors to the host and back; going on after out-of-memory.

    with MemoryMeter(device) as meter:
        with meter.phase("rollout"):
            ...
        meter.stats()  # {"mem_alloc_mb": ..., "mem_max_alloc_mb": ..., "mem_max_alloc_mb_rollout": ..., "time_rollout_s": ...}

On CUDA the figures are the caching allocator's own. On a CPU there is no such allocator, so the meter follows the
storages: a dispatch mode sees what every op returns and holds a weak reference to it. That is exact for tensors and
blind to what an op allocates and frees inside itself; it costs about 10 microseconds an op.

`new_on_host` and `to_host` make tensors that are to be outside the device's memory. They are counted apart (`HOST`), on a
CPU too, where "device" and "host" are the same chips: so what an option saves on a GPU can be counted without one.

All `*_mb` are MiB (2**20 bytes). Left out: other devices' counters, memory that is not tensors (the process's resident
size, reported as reserved on a CPU, has it all).
"""

import gc
import math
import os
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from settings import SnugError

MIB = 2**20
planned_kind = None  # "cuda" while a planner's fake tensors, which are the CPU's, stand for a CUDA device's (plan.py)
PHASES = ("rollout", "reward", "reference", "train", "optimizer", "eval")


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


class MemoryMeter:
    """Allocated, reserved and peak bytes of a device, and seconds, by phase.

    A context manager: on a CPU everything that is to be counted has to be made inside it.
    """

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self.live = None if self.device.type == "cuda" else LiveBytes()
        self.phases = {}  # name -> peak bytes and seconds since the last `stats`
        self.peak, self.now = 0, None  # now: the phase that is going on

    def __enter__(self):
        if self.live is not None:
            self.live.__enter__()
        self.reset()
        return self

    def __exit__(self, *error):
        if self.live is not None:
            self.live.__exit__(*error)

    def allocated(self):
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self.device) if self.live is None else self.live.current

    def reserved(self):
        """Bytes held by CUDA's caching allocator; on a CPU the process's resident size."""
        return torch.cuda.memory_reserved(self.device) if self.live is None else resident_bytes()

    def peak_since_reset(self):
        return torch.cuda.max_memory_allocated(self.device) if self.live is None else self.live.peak

    def reset_peak(self):
        if self.live is None:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.live.reset_peak()

    def reset(self):
        """Begin a new iteration."""
        self.phases = {}
        self.peak = 0
        self.reset_peak()
        HOST.reset_peak()

    @contextmanager
    def phase(self, name):
        """Peak and seconds between entry and exit go to `name`; entered twice, the peaks' maximum and the seconds' sum."""
        if name not in PHASES:
            raise ValueError(f"phase {name!r} is not one of {', '.join(PHASES)}")
        self.peak = max(self.peak, self.peak_since_reset())
        self.reset_peak()
        started, self.now = time.perf_counter(), name
        try:
            yield
        finally:
            self.now = None
            if self.live is None:
                torch.cuda.synchronize(self.device)
            entry = self.phases.setdefault(name, {"peak": 0, "seconds": 0.0})
            entry["seconds"] += time.perf_counter() - started
            entry["peak"] = max(entry["peak"], self.peak_since_reset())
            entry["current"], entry["reserved"] = self.allocated(), self.reserved()

    def stats(self):
        """Figures since the last `reset`, for the log: MiB and seconds."""
        peak = max([self.peak, self.peak_since_reset()] + [entry["peak"] for entry in self.phases.values()])
        stats = {"mem_alloc_mb": self.allocated(), "mem_reserved_mb": self.reserved(), "mem_max_alloc_mb": peak}
        stats |= {f"mem_max_alloc_mb_{name}": entry["peak"] for name, entry in self.phases.items()}
        stats |= {"mem_max_host_mb": HOST.peak} if HOST.peak else {}
        stats = {name: round(size / MIB, 3) for name, size in stats.items()}
        return stats | {f"time_{name}_s": round(entry["seconds"], 4) for name, entry in self.phases.items()}

    def lines(self, place):
        """`[MEM] <place> after rollout: current=1.2MiB reserved=... peak_since_reset=...`, one a phase, for grep."""
        return [
            mem_line(f"{place} after {name}", entry["current"], entry["reserved"], entry["peak"]) for name, entry in self.phases.items()
        ]

    def line(self, place):
        """The same for here and now."""
        return mem_line(place, self.allocated(), self.reserved(), self.peak_since_reset())


def mem_line(place, current, reserved, peak):
    return f"[MEM] {place}: current={current / MIB:.1f}MiB reserved={reserved / MIB:.1f}MiB peak_since_reset={peak / MIB:.1f}MiB"


def resident_bytes():
    """The process's resident set, from the kernel where there is /proc, else its peak from getrusage."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource  # not on every platform; ru_maxrss is in bytes on macOS, the one that lacks /proc

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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


def tensor_bytes(tensors):
    """Bytes of the distinct storages of some tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def allocator_snapshot(folder, device):
    """-> a context that records what CUDA's allocator does, and writes folder/memory_snapshot.pickle, also after an error."""
    if device.type != "cuda":
        raise SnugError(f"memory_snapshot records CUDA's allocator, and device is {device}; leave it out")
    return record_allocator(folder)


@contextmanager
def record_allocator(folder):
    torch.cuda.memory._record_memory_history(max_entries=100_000)  # the latest are kept
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(os.path.join(folder, "memory_snapshot.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)


# ----------------------------------------------------------------------------------------------------------------------
# To the host and back.


def new_on_host(shape, dtype, device, keep=False):
    """An empty tensor in host memory, pinned where `device` is CUDA, so that the bus is fast and the host need not wait.

    keep: it is large and lives long. Then its pages are pinned where they are: PyTorch's own pinned allocator, which reuses
    what is freed, rounds every block up to a power of two, at worst twice the bytes.
    """
    HOST.making = True
    try:
        pin = device.type == "cuda"
        keep = keep and math.prod(shape) * dtype.itemsize >= MIB  # pages that nothing else is on
        tensor = torch.empty(shape, dtype=dtype, pin_memory=pin and not keep)
    finally:
        HOST.making = False
    if pin and keep:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        weakref.finalize(tensor.untyped_storage(), unpin, tensor.data_ptr()).atexit = False
    HOST.follow(tensor)
    return tensor


def unpin(address):
    torch.cuda.synchronize()  # no copy is under way
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def to_host(tensor, keep=False):
    """A copy in host memory; on CUDA it is there once the stream has got so far."""
    return new_on_host(tensor.shape, tensor.dtype, tensor.device, keep).copy_(tensor.detach(), non_blocking=True)


def spare_copy(tensor):
    """A copy in the host's ordinary memory that no ledger counts, because it is only made where there is room to spare (saver.py)."""
    HOST.making = True
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    finally:
        HOST.making = False


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


# ----------------------------------------------------------------------------------------------------------------------
# After out-of-memory.


def is_out_of_memory(error):
    """The device's; on a CPU that is the host's. CUDA's libraries have words of their own for it."""
    words = ["CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "CUDA driver error: out of memory"]
    words += [] if torch.cuda.is_initialized() else ["can't allocate memory"]
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def surviving(attempt, smaller):
    """attempt() -> its result. After an out-of-memory `smaller(what PyTorch said)` makes the next attempt need less, or raises."""
    while True:
        try:
            return attempt()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).strip().splitlines()[0]
        # Here the exception is gone, and with it the frames that held the failed attempt's tensors.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        smaller(said)


def biggest_tensors(model, count=3):
    """The largest tensors alive on the model's device -> "embedding.weight 147.2 MiB, ..."."""
    named = list(model.named_parameters())
    named += [(f"the gradient of {name}", p.grad) for name, p in named if p.grad is not None]
    known = {id(tensor.untyped_storage()): name for name, tensor in named}
    sizes = {}
    for thing in [tensor for _, tensor in named] + gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device == model.device:
            storage = thing.untyped_storage()
            if id(storage) not in HOST.sizes:
                sizes[id(storage)] = storage.nbytes(), known.get(id(storage), f"a tensor {tuple(thing.shape)}")
    largest = sorted(sizes.values(), reverse=True)[:count]
    return ", ".join(f"{name} {size / MIB:.1f} MiB" for size, name in largest)
