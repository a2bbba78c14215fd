"""How snug feeds a GPU: shapes that repeat, and numbers that reach it without making the host wait.

Left out: which GPU there is, and what it cannot do (runs/device.py).
"""

import torch

from memory.ledger import kind_of

MULTIPLE = 64  # tokens; lengths are rounded up to it


def padded(length: int, tokens: torch.Tensor, block_size: int) -> int:
    """How long a sequence of `tokens` is padded: on CUDA to a multiple of 64 tokens, but not beyond block_size.

    So there are few shapes in a run: the allocator finds blocks of the right size, and products have whole tiles.
    """
    rounded = -(-length // MULTIPLE) * MULTIPLE if kind_of(tokens) == "cuda" else length
    return max(length, min(rounded, block_size))


def upload(numbers: list[int], device: torch.device) -> torch.Tensor:
    """torch.tensor(numbers, device=device). From pinned memory, so that the host need not wait for a GPU's queue."""
    numbers = torch.tensor(numbers)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
