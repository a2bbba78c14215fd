"""What is allocated, reserved and at peak, phase by phase.

    with MemoryMeter(device) as meter:
        with meter.phase("rollout"):
            ...
        meter.stats()  # {"mem_alloc_mb": ..., "mem_max_alloc_mb": ..., "mem_max_alloc_mb_rollout": ..., "time_rollout_s": ...}

On CUDA the figures are the caching allocator's own. On a CPU there is no such allocator, so the meter follows the
storages: a dispatch mode sees what every op returns and holds a weak reference to it. That is exact for tensors and
blind to what an op allocates and frees inside itself; it costs about 10 microseconds an op.

All `*_mb` are MiB (2**20 bytes). Left out: other devices' counters, memory that is not tensors (the process's resident
size, reported as reserved on a CPU, has it all).
"""

import os
import time
import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20
PHASES = ("rollout", "reward", "reference", "train", "optimizer", "eval")


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive, and the most there have been since `reset_peak`.

    Storages made before it was entered are unknown to it until an op returns them; `follow` adds them by hand.
    """

    def __init__(self):
        super().__init__()
        self.current = self.peak = 0
        self.sizes = {}  # id of a storage -> (weak reference, bytes)

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
        self.peak = max(self.peak, self.current)

    def forget(self, key):
        self.current -= self.sizes.pop(key)[1]

    def reset_peak(self):
        self.peak = self.current


class MemoryMeter:
    """Allocated, reserved and peak bytes of a device, and seconds, by phase.

    A context manager: on a CPU everything that is to be counted has to be made inside it.
    """

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self.live = None if self.device.type == "cuda" else LiveBytes()
        self.phases = {}  # name -> peak bytes and seconds since the last `stats`
        self.peak = 0

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

    @contextmanager
    def phase(self, name):
        """Peak and seconds between entry and exit go to `name`; entered twice, the peaks' maximum and the seconds' sum."""
        if name not in PHASES:
            raise ValueError(f"phase {name!r} is not one of {', '.join(PHASES)}")
        self.peak = max(self.peak, self.peak_since_reset())
        self.reset_peak()
        started = time.perf_counter()
        try:
            yield
        finally:
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


def tensor_bytes(tensors):
    """Bytes of the distinct storages of some tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
