"""CUDA graphs of a decode step: recorded once per batch size, then replayed without the Python of the step.

Left out: what a step is (decode_batch.py). Test: pytest tests/test_replay.py
"""

import gc
import sys
from contextlib import suppress
from functools import cache

import torch
from tqdm import tqdm

from snug.device import cuda
from snug.options import first_line


class Recorder:
    """Runs a step as it is, or replays a graph of it.

    The tensors that a step makes are in a memory pool. The graphs of a DecodeBatch use the pool one after the other:
    delete a graph before the next one is recorded. A step writes its results into older tensors, outside the pool."""

    def __init__(self, device):
        self.device, self.enabled = device, not cuda.BROKEN
        self.graph = None
        # The memory pool, made with the first graph. It frees its memory if it is deleted after the last graph.
        # Attributes are deleted in the order of their assignment, so `pool` comes after `graph`.
        self.pool = None

    def run(self, step):
        """The first call runs step() as it is, which compiles and warms up its kernels, and then records it, which
        computes nothing. Later calls replay the recording."""
        if self.graph is not None:
            self.graph.replay()
            return
        step()
        if self.enabled:
            self.record(step)

    def record(self, step):
        """Record a step. If that fails, for instance out of memory, go on without graphs."""
        for _ in range(2):
            try:
                with torch.cuda.device(self.device):
                    self.pool = self.pool or torch.cuda.MemPool()
                    self.graph = graph_of(step, self.pool, capture_stream(self.device))
                return
            except torch.OutOfMemoryError as error:
                reason = first_line(error)
                torch.cuda.empty_cache()  # during a recording the allocator cannot free the blocks that it caches
            except RuntimeError as error:
                reason = first_line(error)
                cuda.keep_broken(self.pool)
                break
        self.enabled = False
        self.pool = None
        tqdm.write(f"sampling goes on without CUDA graphs: {reason}", file=sys.stderr)


def graph_of(step, pool, stream):
    """-> a graph of what step() does; nothing is computed. torch.cuda.graph would wait for the device and empty the
    allocator's cache first."""
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    gc.disable()  # a finaliser that waits for the device (device.host.unpin) breaks a recording
    try:
        with torch.cuda.stream(stream):  # restores the current stream, also after an error
            # thread_local: a reward function may have left a thread that uses CUDA
            graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # the end fails too; the first error says why
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        gc.enable()
    current.wait_stream(stream)
    return graph


@cache
def capture_stream(device):
    """-> the one stream of a device for recordings: each stream that records keeps a workspace for its matrix products.

    Some versions of torch free this workspace with any graph of the stream, so only one graph may live at a time.
    """
    return torch.cuda.Stream(device)
