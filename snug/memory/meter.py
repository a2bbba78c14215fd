"""Allocated, reserved and peak bytes, and seconds, phase by phase.

    with MemoryMeter(device) as meter:
        with meter.phase("rollout"):
            ...
        meter.stats()  # {"mem_alloc_mb": ..., "mem_max_alloc_mb": ..., "mem_max_alloc_mb_rollout": ..., ...}

On CUDA the figures are the caching allocator's. On a CPU they are the exact bytes of live tensors (ledger.py), and
"reserved" is the process's resident size. MPS keeps no peak, so tensors are counted as on a CPU. Tensors on the host
count too, because host and device share their memory; "reserved" is what Metal's driver holds. All `*_mb` are MiB
(2**20 bytes).

Left out: other devices' counters; memory that is not tensors.
"""

import resource
import time
from contextlib import contextmanager
from mmap import PAGESIZE
from pathlib import Path

import torch

from snug.device.host import HOST
from snug.device.kinds import MIB
from snug.memory.ledger import LiveBytes
from snug.options import progress


class MemoryMeter:
    """Allocated, reserved and peak bytes of a device, and seconds, by phase.

    A context manager: on a CPU it counts the tensors that are made inside its block.
    """

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self.live = None if self.device.type == "cuda" else LiveBytes()
        self.now = None  # the phase that is going on
        self.reset()

    def __enter__(self):
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, *error):
        if self.live:
            self.live.__exit__(*error)

    def figures(self) -> dict[str, int]:
        """Bytes: `current`, of live tensors; `peak`, the most since reset_peak; `reserved`, by CUDA's caching allocator
        or Metal's driver; on a CPU the process's resident size."""
        if not self.live:
            return dict(
                current=torch.cuda.memory_allocated(self.device),
                reserved=torch.cuda.memory_reserved(self.device),
                peak=torch.cuda.max_memory_allocated(self.device),
            )
        mps = self.device.type == "mps"
        reserved = torch.mps.driver_allocated_memory() if mps else resident_bytes()
        return dict(current=self.live.current, reserved=reserved, peak=self.live.peak)

    def reset_peak(self):
        if self.live:
            self.live.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    def reset(self):
        """Begin a new iteration."""
        self.phases, self.peak = {}, 0  # name -> its figures; most bytes before the last phase
        self.reset_peak()
        HOST.reset_peak()

    @contextmanager
    def phase(self, name):
        """Peak and seconds of the block go to `name`. For a phase entered twice: the larger peak, the sum of the
        seconds."""
        self.peak = max(self.peak, self.figures()["peak"])
        self.reset_peak()
        started, self.now = time.perf_counter(), name
        try:
            with progress.phase(name):
                yield
        finally:
            self.now = None
            if not self.live:
                torch.cuda.synchronize(self.device)
            if self.device.type == "mps":
                torch.mps.synchronize()
            before = self.phases.get(name, dict(peak=0, seconds=0.0))
            entry = self.phases[name] = self.figures()
            entry["peak"] = max(entry["peak"], before["peak"])
            entry["seconds"] = before["seconds"] + time.perf_counter() - started

    def stats(self):
        """Figures since the last `reset`, for the log: MiB and seconds."""
        now, peaks = self.figures(), [entry["peak"] for entry in self.phases.values()]
        sizes = {
            "mem_alloc_mb": now["current"],
            "mem_reserved_mb": now["reserved"],
            "mem_max_alloc_mb": max(self.peak, now["peak"], *peaks),
        }
        for name, entry in self.phases.items():
            sizes[f"mem_max_alloc_mb_{name}"] = entry["peak"]
            sizes[f"mem_alloc_mb_{name}"] = entry["current"]
            sizes[f"mem_reserved_mb_{name}"] = entry["reserved"]
        if HOST.peak:
            sizes["mem_max_host_mb"] = HOST.peak
        stats = {name: round(size / MIB, 3) for name, size in sizes.items()}
        for name, entry in self.phases.items():
            stats[f"time_{name}_s"] = round(entry["seconds"], 4)
        return stats

    def lines(self, place):
        """A line per phase: `[MEM] <place> after rollout: current=1.2MiB reserved=... peak_since_reset=...`"""
        return [mem_line(f"{place} after {name}", **entry) for name, entry in self.phases.items()]

    def line(self, place):
        """The same line with the present figures."""
        return mem_line(place, **self.figures())


def mem_line(place, current, reserved, peak, seconds=0):
    return (
        f"[MEM] {place}: current={current / MIB:.1f}MiB reserved={reserved / MIB:.1f}MiB "
        f"peak_since_reset={peak / MIB:.1f}MiB"
    )


def resident_bytes():
    """The process's resident set, from the kernel where there is /proc, else its peak from getrusage."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE
    except OSError:  # on macOS, where ru_maxrss is in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
