"""Inputs for a GPU: lengths that repeat, and uploads for which the host does not wait.

Left out: which GPU there is, and what it cannot do (runs/device.py).
"""

import torch

from memory.ledger import kind_of

MULTIPLE = 16  # tokens


def padded(length: int, tokens: torch.Tensor) -> int:
    """How long a row of `tokens` is made: on CUDA a multiple of 16 tokens.

    So a run has few shapes: the allocator can reuse its blocks, and the libraries their choice of kernels.
    """
    return -(-length // MULTIPLE) * MULTIPLE if kind_of(tokens) == "cuda" else length


def upload(numbers, device: torch.device, dtype=torch.long) -> torch.Tensor:
    """Numbers to the device; to a GPU from pinned memory, so that the host does not wait. On a CPU it may be a view."""
    numbers = torch.as_tensor(numbers, dtype=dtype)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
