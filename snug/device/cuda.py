"""A GPU's allocator: its cache, and pools that must not be deleted.

Left out: which GPU there is, and what it cannot do (snug/device/pick.py).
"""

import ctypes

import torch

BROKEN = []  # memory pools of CUDA graphs whose recording failed: no more graphs


def keep_broken(pool):
    """Keep one reference for ever: up to torch 2.12 deleting such a pool can abort the process, also at its end."""
    BROKEN.append(pool)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


def cap(device, most: float):
    """Beyond so many bytes the allocator raises OutOfMemoryError, also if the GPU has more. inf: no cap."""
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)


def empty_cache():
    """Give the blocks that the allocator caches back to the GPU, if there is one.

    After a broken recording it does nothing: up to torch 2.12 the allocator believes that it still records, and raises.
    """
    if torch.cuda.is_available() and not BROKEN:
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
