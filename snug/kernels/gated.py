"""SwiGLU and GeGLU (Shazeer 2020): silu(gate) * up, or gelu(gate) * up by tanh, and their gradients, in one kernel.
Backward keeps only the input.

Test: pytest tests/test_layer_kernels.py
"""

import torch

from snug.kernels import LOG2E, constexpr, launch, tl, triton, uses_triton

if triton is not None:
    # gelu(x) by tanh is x sigmoid(SLOPE (x + CUBIC x^3)), as silu(x) is x sigmoid(x)
    SLOPE = constexpr(2 * (2 / torch.pi) ** 0.5)
    CUBIC = constexpr(0.044715)

    @triton.jit
    def gated_kernel(x, dy, out, n, blocks, BLOCK: constexpr, GELU: constexpr):
        """One program per block of a row: x (rows, 2 n) -> out (rows, n). With dy (rows, n): dx (rows, 2 n) -> out."""
        row = (tl.program_id(0) // blocks).to(tl.int64)
        column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = column < n
        x += row * 2 * n + column
        gate = tl.load(x, mask).to(tl.float32)
        up = tl.load(x + n, mask).to(tl.float32)
        z, slope = gate, 1.0
        if GELU:
            z = SLOPE * (gate + CUBIC * gate * gate * gate)
            slope = SLOPE * (1 + 3 * CUBIC * gate * gate)
        sigmoid = 1 / (1 + tl.exp2(-z * LOG2E))
        if dy is None:
            tl.store(out + row * n + column, gate * sigmoid * up, mask)
        else:
            out += row * 2 * n + column
            d = tl.load(dy + row * n + column, mask)
            tl.store(out, d * up * sigmoid * (1 + gate * (1 - sigmoid) * slope), mask)
            tl.store(out + n, d * gate * sigmoid, mask)


def on_rows(x, dy, out, gelu):
    """Run the kernel over the rows of x."""
    n = x.shape[-1] // 2
    block = min(1024, triton.next_power_of_2(n))
    blocks = triton.cdiv(n, block)
    programs = x.numel() // (2 * n) * blocks
    launch(gated_kernel, (programs,), x, dy, out, n, blocks, BLOCK=block, GELU=gelu)


def activate(gate, gelu, out):
    if gelu:
        torch.ops.aten.gelu.out(gate, approximate="tanh", out=out)
    else:
        torch.ops.aten.silu.out(gate, out=out)


def rows_in_torch(x, dy, out, gelu):
    """The kernel's twin. Backward computes the activation again: to read a kept copy would move as many bytes."""
    gate, up = x.chunk(2, -1)
    if dy is None:
        activate(gate, gelu, out)
        out.mul_(up)
        return
    dgate, dup = out.chunk(2, -1)
    activate(gate, gelu, dup)
    dup.mul_(dy)
    torch.mul(dy, up, out=dgate)
    if gelu:
        torch.ops.aten.gelu_backward.grad_input(dgate, gate, approximate="tanh", grad_input=dgate)
    else:
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)


class GatedUnit(torch.autograd.Function):
    """x (..., 2 n), gate beside up -> silu(gate) * up (..., n); with gelu, gelu(gate) * up."""

    @staticmethod
    def forward(ctx, x, gelu):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.gelu, ctx.fill = gelu, on_rows if uses_triton(x, "gated") else rows_in_torch
        y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        ctx.fill(x, None, y, gelu)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        ctx.fill(x, dy.contiguous(), dx, ctx.gelu)
        return dx, None
