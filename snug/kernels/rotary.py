"""Rotary positions (Su et al. 2021): a kernel that rotates queries or keys, or rotates their gradients back.

The model rotates in place, in the output of the projection. Attention reads views of it, so backward keeps no rotated
copy. Left out: decoding's rotation, which goes into the KV cache (snug/decoding/attention.py).
Test: pytest tests/test_layer_kernels.py
"""

import math

import torch
from torch.autograd.function import once_differentiable

from snug.kernels import constexpr, launch, tl, triton, uses_triton

if triton is not None:

    @triton.jit
    def rotary_kernel(
        x,
        cos,
        sin,
        T,
        heads,
        D,
        x_batch,
        x_head,
        x_time,
        table_batch,
        table_time,
        M: constexpr,
        DP: constexpr,
        BACK: constexpr,
    ):
        """One program per token and M heads, in place."""
        b = (tl.program_id(0) // T).to(tl.int64)
        t = (tl.program_id(0) % T).to(tl.int64)
        head = (tl.program_id(1) * M + tl.arange(0, M))[:, None].to(tl.int64)
        d = tl.arange(0, DP)[None, :]
        half = D // 2
        mask = (head < heads) & (d < half)
        angle = b * table_batch + t * table_time + d  # both halves of the table are the same
        c = tl.load(cos + angle, d < half, 1.0)
        s = tl.load(sin + angle, d < half, 0.0)
        if BACK:
            s = -s
        x += b * x_batch + t * x_time + head * x_head + d
        left = tl.load(x, mask, 0.0).to(tl.float32)
        right = tl.load(x + half, mask, 0.0).to(tl.float32)
        tl.store(x, (left * c - right * s).to(x.dtype.element_ty), mask)
        tl.store(x + half, (right * c + left * s).to(x.dtype.element_ty), mask)


def rotary_frequencies(config, device):
    """A GPTConfig -> radians per position (head_size / 2,), float32.

    The order of operations is Hugging Face's, so that both round alike."""
    even = torch.arange(0, config.head_size, 2, device=device, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (even / config.head_size)
    if not config.rope_original_block_size:
        return frequency / config.rope_factor
    wavelength = 2 * math.pi / frequency
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = (config.rope_original_block_size / wavelength - low) / (high - low)
    kept = kept.clamp(0, 1)  # 0: a long wavelength, divided by rope_factor; 1: a short one, unchanged
    return (1 - kept) * (frequency / config.rope_factor) + kept * frequency


def rotary_table(config, length: int, device):
    """-> cos, sin (length, head_size), float32: RoFormer's rotation in Llama's half-split layout."""
    position = torch.arange(length, device=device)
    angle = position[:, None] * rotary_frequencies(config, device)  # (T, D/2)
    angle = torch.cat([angle, angle], -1)  # (T, D)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x (B, H, T, D); cos, sin (B, 1, T, D) -> x with each pair (i, i + D/2) rotated by its position's angle."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


def rotate_(x, cos, sin, back=False):
    """Rotate x (B, heads, T, D) in place, whose last stride is 1. back: by the negative angles."""
    if not uses_triton(x):
        x.copy_(rotate(x, cos, -sin if back else sin))
        return
    B, heads, T, D = x.shape
    table = cos.expand(B, -1, -1, -1)
    M = min(16, triton.next_power_of_2(heads))
    launch(
        rotary_kernel,
        (B * T, triton.cdiv(heads, M)),
        x,
        cos,
        sin,
        T,
        heads,
        D,
        *x.stride()[:3],
        table.stride(0),
        table.stride(2),
        M=M,
        DP=max(16, triton.next_power_of_2(D // 2)),
        BACK=back,
    )


class Rotary(torch.autograd.Function):
    """x (B, heads, T, D) -> its queries, keys and values (B, size, T, D), `sizes` heads of each.

    Queries and keys are rotated in place; there may be queries alone. The operation that made x must not keep it for
    backward; linear layers and norms do not. cos, sin (B or 1, 1, T, D)."""

    @staticmethod
    def forward(ctx, x, cos, sin, sizes):
        ctx.save_for_backward(cos, sin)
        ctx.rotated = sum(sizes[:2])
        x = x.detach()
        rotate_(x[:, : ctx.rotated], cos, sin)
        return x.split(sizes, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        dx = torch.cat([gradient.transpose(1, 2) for gradient in gradients], 2).transpose(1, 2)
        rotate_(dx[:, : ctx.rotated], *ctx.saved_tensors, back=True)
        return dx, None, None, None
