"""The meter against arithmetic and against PyTorch's own profiler."""

import pytest
import torch

from snug.device.kinds import MIB
from snug.memory.ledger import LiveBytes
from snug.memory.meter import MemoryMeter

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the allocator's own counters are used")


def test_threads_may_free_storages_at_the_same_time():
    live = LiveBytes()

    class Interrupted(dict):
        def pop(self, key):
            if key == first:
                live.forget(second)  # what another thread does meanwhile
            return super().pop(key)

    with live:
        tensors = torch.zeros(10), torch.zeros(100)
    first, second = live.sizes
    live.sizes = Interrupted(live.sizes)
    live.forget(first)
    assert live.current == 0 and len(tensors) == 2


@needs_cpu
def test_phases_have_their_own_peaks():
    with MemoryMeter("cpu") as meter:
        torch.zeros(5 * MIB // 4)  # before the phases: counts for the iteration
        with meter.phase("rollout"):
            torch.zeros(4 * MIB // 4)
        with meter.phase("train"):
            kept = torch.zeros(2 * MIB // 4)
        with meter.phase("rollout"):  # beside what is kept: 3 MiB, less than before
            torch.zeros(MIB // 4)
        stats = meter.stats()
        assert stats["mem_max_alloc_mb_rollout"] == 4 and stats["mem_max_alloc_mb_train"] == 2
        assert stats["mem_max_alloc_mb"] == 5 and stats["mem_alloc_mb"] == 2
        assert stats["mem_alloc_mb_train"] == 2 and stats["mem_reserved_mb_train"] > 50
        assert stats["mem_reserved_mb"] > 50 and stats["time_rollout_s"] >= 0
        lines = meter.lines("[GRPO step 000/079]")
        assert lines[1].startswith("[MEM] [GRPO step 000/079] after train: current=2.0MiB reserved=")
        assert lines[1].endswith("MiB peak_since_reset=2.0MiB")
        meter.reset()
        assert meter.stats()["mem_max_alloc_mb"] == 2 and "time_rollout_s" not in meter.stats()
        assert meter.line("after init").startswith("[MEM] after init: current=2.0MiB reserved=")
        del kept
