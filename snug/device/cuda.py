"""Inputs for a GPU: lengths that repeat, and uploads for which the host does not wait. The allocator's cache.

Left out: which GPU there is, and what it cannot do (snug/device/pick.py).
"""

import ctypes

import torch

from snug.device.kinds import kind_of

MULTIPLE = 16  # tokens
BROKEN = []  # memory pools of CUDA graphs whose recording failed: no more graphs


def padded(length: int, tokens: torch.Tensor) -> int:
    """How long a row of `tokens` is made: on a GPU a multiple of 16 tokens.

    So a run has few shapes: the allocator can reuse its blocks, and the libraries their choice of kernels, or on MPS
    their graphs.
    """
    return -(-length // MULTIPLE) * MULTIPLE if kind_of(tokens) != "cpu" else length


def upload(numbers, device: torch.device, dtype=torch.long) -> torch.Tensor:
    """Numbers to the device; on CUDA from pinned memory, so that the host does not wait. On a CPU it may be a view.

    MPS has to wait: it reads memory that is not pinned later, when it may be free.
    """
    numbers = torch.as_tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def keep_broken(pool):
    """Keep one reference for ever: up to torch 2.12 deleting such a pool can abort the process, also at its end."""
    BROKEN.append(pool)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


def empty_cache():
    """Give the blocks that the allocator caches back to the GPU, if there is one.

    After a broken recording it does nothing: up to torch 2.12 the allocator believes that it still records, and raises.
    """
    if torch.cuda.is_available() and not BROKEN:
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
