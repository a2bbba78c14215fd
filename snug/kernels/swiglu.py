"""SwiGLU (Shazeer 2020): silu(gate) * up, and its gradient, in one kernel. Backward keeps only the input.

Test: pytest tests/test_layer_kernels.py
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from snug.kernels import LOG2E, constexpr, launch, tl, triton, uses_triton

if triton is not None:

    @triton.jit
    def swiglu_kernel(x, dy, out, n, blocks, BLOCK: constexpr):
        """One program per block of a row: x (rows, 2 n) -> out (rows, n). With dy (rows, n): dx (rows, 2 n) -> out."""
        row = (tl.program_id(0) // blocks).to(tl.int64)
        column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = column < n
        x += row * 2 * n + column
        gate = tl.load(x, mask, 0.0).to(tl.float32)
        up = tl.load(x + n, mask, 0.0).to(tl.float32)
        if dy is None:
            value = gate / (1 + tl.exp2(-gate * LOG2E)) * up
            tl.store(out + row * n + column, value.to(out.dtype.element_ty), mask)
        else:
            out += row * 2 * n + column
            d = tl.load(dy + row * n + column, mask, 0.0).to(tl.float32)
            sigmoid = 1 / (1 + tl.exp2(-gate * LOG2E))
            dgate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
            dup = d * gate * sigmoid
            tl.store(out, dgate.to(out.dtype.element_ty), mask)
            tl.store(out + n, dup.to(out.dtype.element_ty), mask)


def on_rows(x, dy, out):
    """Run the kernel over the rows of x."""
    n = x.shape[-1] // 2
    block = min(1024, triton.next_power_of_2(n))
    blocks = triton.cdiv(n, block)
    launch(swiglu_kernel, (x.numel() // (2 * n) * blocks,), x, dy, out, n, blocks, BLOCK=block)


def forward_torch(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def backward_torch(x, dy, dx):
    """Fill dx. It computes silu again: to read a kept copy would move as many bytes."""
    gate, up = x.chunk(2, -1)
    dgate, dup = dx.chunk(2, -1)
    scratch = F.silu(gate)
    torch.mul(dy, scratch, out=dup)
    torch.mul(dy, up, out=scratch)
    torch.ops.aten.silu_backward.grad_input(scratch, gate, grad_input=dgate)


class SwiGLU(torch.autograd.Function):
    """x (..., 2 n), gate beside up -> silu(gate) * up (..., n)."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        if not uses_triton(x):
            return forward_torch(x)
        y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        on_rows(x, None, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        if uses_triton(x):
            on_rows(x, dy.contiguous(), dx)
        else:
            backward_torch(x, dy, dx)
        return dx
