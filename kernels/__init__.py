"""Triton: when kernels run, and those that the model and the optimizer share.

A kernel writes into tensors that its caller allocated, so that a meter or the planner sees every tensor; on tensors
without data it is not launched. Beside each kernel is plain torch for the same: its oracle, and what runs elsewhere.
Exponents in kernels are base 2, as the hardware has them.

Left out: the kernels of log-probs (logprobs/kernels.py), decode attention and drawing (decoding/).
Test: pytest tests/test_kernels.py
"""

import torch

from memory.ledger import is_planned, kind_of

try:
    import triton
    import triton.language as tl
except ImportError:  # plain torch does everything
    triton = None

LOWEST = -1e30  # below every logit and, unlike -inf, it can be subtracted from itself and multiplied by 0
LOG2_OF_E = 1.4426950408889634

if triton is not None:
    LOG2E = tl.constexpr(LOG2_OF_E)
    LN2 = tl.constexpr(0.6931471805599453)
    LOW = tl.constexpr(LOWEST)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Kernels run on CUDA, on a planner's fake CUDA tensors, and in Triton's interpreter; not in float64."""
    if triton is None or tensor.dtype == torch.float64:
        return False
    return kind_of(tensor) == "cuda" or triton.knobs.runtime.interpret


def nothing_to_do(tensor: torch.Tensor) -> bool:
    """Has the tensor no data: empty, or a planner's?"""
    return is_planned(tensor) or tensor.is_meta or not tensor.numel()
