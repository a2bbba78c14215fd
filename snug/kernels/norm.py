"""RMS norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight, and its gradients, in one kernel.

All is computed in float32 and rounded once. Heads of queries and keys are read where the projection left them. Backward
keeps only the input; the order in which it sums the weight's gradient is fixed.
Test: pytest tests/test_layer_kernels.py
"""

import torch

from snug.device.kinds import wide
from snug.kernels import constexpr, launch, tl, triton, uses_triton

# Numbers that backward's programs write, all together, of the weight's gradient: 512 programs of 2,048.
SUMS = 2**20

if triton is not None:

    @triton.jit
    def norm_kernel(
        x,
        weight,
        dy,
        out,
        sums,
        rows,
        heads,
        n,
        x_token,
        x_head,
        eps,
        BLOCK: constexpr,
        CENTERED: constexpr,
    ):
        """x (tokens, heads, n) -> out. With dy: dx -> out, and what the rows of each program add to the weight's
        gradient -> sums (programs, n), if there are sums."""
        d = tl.arange(0, BLOCK)
        mask = d < n
        scale = tl.load(weight + d, mask, 0.0).to(tl.float32) + CENTERED
        total = tl.zeros_like(scale)
        for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
            at = row // heads * x_token + row % heads * x_head + d
            unit = tl.load(x + at, mask, 0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(unit * unit, 0) / n + eps)
            unit *= rstd
            value = unit * scale
            if dy is not None:
                value = tl.load(dy + row * n + d, mask, 0.0)
                total += value * unit
                value *= scale
                value = (value - unit * (tl.sum(value * unit, 0) / n)) * rstd
            tl.store(out + row * n + d, value, mask)
        if sums is not None:
            tl.store(sums + tl.program_id(0) * n + d, total, mask)


def norm_in_triton(x, weight, dy, eps, centered):
    """-> y, None; with dy: dx, and the weight's gradient if it needs one."""
    out, sums = x.new_empty(x.shape), None
    x = x.flatten(0, -3)  # (tokens, heads, n); without heads (B, T, n)
    n = x.shape[2]
    rows, block = x.numel() // n, triton.next_power_of_2(n)
    programs = rows if dy is None else min(rows, SUMS // block)
    if dy is not None:
        dy = dy.contiguous()
        if weight.requires_grad:
            sums = x.new_empty(programs, n, dtype=torch.float32)
    launch(
        norm_kernel,
        (programs,),
        x,
        weight,
        dy,
        out,
        sums,
        rows,
        *x.shape[1:],
        *x.stride()[:2],
        eps,
        block,
        centered,
        num_warps=max(1, min(16, block // 256)),
    )
    return out, None if sums is None else sums.sum(0).to(weight.dtype)


def norm_in_torch(x, weight, dy, eps, centered):
    """Its twin."""
    dtype = wide(x.dtype)
    scale = 1 + weight.to(dtype) if centered else weight
    unit = x.to(dtype)
    rstd = torch.rsqrt(unit.square().mean(-1, keepdim=True) + eps)
    unit = unit * rstd
    if dy is None:
        return (unit * scale).to(x.dtype), None
    dy, dweight = dy.to(dtype), None
    if weight.requires_grad:
        dweight = (dy * unit).transpose(1, -2).flatten(0, -2).sum(0).to(weight.dtype)
    dy = dy * scale
    dx = (dy - unit * (dy * unit).mean(-1, keepdim=True)).mul_(rstd)
    return dx.to(x.dtype), dweight


class Norm(torch.autograd.Function):
    """x (B, T, n) or heads (B, T, heads, n), weight (n,) -> x of RMS 1, times weight; centered: times 1 + weight."""

    @staticmethod
    def forward(ctx, x, weight, *options):
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.compute = options, norm_in_triton if uses_triton(x, "norm") else norm_in_torch
        return ctx.compute(x, weight, None, *options)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return *ctx.compute(*ctx.saved_tensors, dy, *ctx.options), None, None
