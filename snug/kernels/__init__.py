"""Triton: when kernels run, and the kernels of the model and the optimizer.

A kernel writes into tensors that its caller allocated, so the meter and the planner see every tensor. On tensors
without data it is not launched. Each kernel has a twin in plain torch: tests and snug/trust.py compare the two, and the
twin runs where no kernel can. Kernels use exp2 and log2, because the hardware has instructions for them. What tl.store
stores takes the tensor's type.

gated, norm, rotary, adamw: one operation each. segments, flash: attention of packed groups. nf4: matrices in 4 bits.
delta_step: a decode step of a linear layer.
layers: linear layers, norm and embedding made of these and of plain torch; it has no kernel of its own.

Left out: the kernels of log-probs (snug/logprobs/rows.py), decode attention and drawing (decoding/).
Test: pytest tests/test_kernels.py
"""

import os

import torch

from snug.device.kinds import is_planned, kind_of

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # plain torch does everything
    triton = tl = constexpr = INF = LOG2E = LN2 = LOW = dot = None

# Below every logit and, unlike -inf, it can be subtracted from itself and multiplied by 0.
LOWEST = -1e30
LOG2_OF_E = 1.4426950408889634

if triton is not None:
    # Without it Triton 3.9 warns, and 3.10 adds and multiplies apart.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    INF = constexpr(float("inf"))
    LOG2E = constexpr(LOG2_OF_E)
    LN2 = constexpr(0.6931471805599453)
    LOW = constexpr(LOWEST)

    @triton.jit
    def dot(a, b, total=None):
        """-> a b, + total; float32 is not rounded to TF32."""
        return tl.dot(a, b, total, input_precision="ieee")


OFF = {}  # kernels that plain torch replaces, or "all": why (snug/trust.py)


def uses_triton(tensor, kernel):
    """Kernels run on CUDA, on a planner's fake CUDA tensors and in Triton's interpreter; not in float64, nor if OFF."""
    if triton is None or OFF.keys() & {"all", kernel} or tensor.dtype == torch.float64:
        return False
    return triton.knobs.runtime.interpret or kind_of(tensor) == "cuda"


def has_tensor_cores(tensor):
    """Has its device tensor cores for bfloat16? Ampere and later have; tests on a CPU compute as if it had.

    AMD's GPUs count as without: they too have 64 KiB of shared memory, and not every product with another result type.
    """
    if not tensor.is_cuda:
        return True
    return not torch.version.hip and torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def nothing_to_do(tensor):
    """Has the tensor no data, because it is empty or a planner's?"""
    return is_planned(tensor) or not tensor.numel()


def launch(kernel, grid: tuple, tensor, *arguments, **constants):
    """Run a kernel, whose first argument is `tensor`, on its device; for a tensor without data do nothing.

    AMD: Triton has no maxnreg there, and a program has at most 1,024 lanes, which are 16 warps of 64.
    """
    if torch.version.hip:
        constants.pop("maxnreg", None)
        constants["num_warps"] = min(16, constants.get("num_warps", 4))
    if not nothing_to_do(tensor):
        with torch.cuda.device_of(tensor):
            kernel[grid](tensor, *arguments, **constants)
