"""Rotary positions (Su et al. 2021): queries and keys rotated in one kernel, and their gradient rotated back in one.

They are rotated in place, in the output of the projection. Attention reads three views of it, so no rotated copy is
kept for backward. Left out: decoding's rotation, which goes into the KV cache (decoding/attention.py).
Test: pytest tests/test_layer_kernels.py
"""

import math

import torch
from torch.autograd.function import once_differentiable

from kernels import nothing_to_do, triton, uses_triton

if triton is not None:
    import triton.language as tl

    @triton.jit
    def rotary_kernel(
        q, k, v, out, cos, sin, T, H, HG, heads, D, q_batch, q_head, q_time, k_batch, k_head, k_time,
        v_batch, v_head, v_time, out_batch, out_head, out_time, table_batch, table_time,
        M: tl.constexpr, DP: tl.constexpr, BACK: tl.constexpr,
    ):  # fmt: skip
        """One program per token and M heads: H of queries, then keys up to HG, then values, which are copied.

        A program reads its elements before it writes them, so `out` may be the memory of q, k and v."""
        b, t = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
        head = (tl.program_id(1) * M + tl.arange(0, M))[:, None].to(tl.int64)
        d, half = tl.arange(0, DP)[None, :], D // 2
        there = (head < heads) & (d < half)
        turned = (head < HG) & (d < half)
        angle = b * table_batch + t * table_time + d  # the same for both halves of the table
        c, s = (
            tl.load(cos + angle, mask=turned, other=1.0),
            tl.load(sin + angle, mask=turned, other=0.0),
        )
        if BACK:
            s = -s
        keys_or_values = tl.where(
            head < HG,
            k + b * k_batch + t * k_time + (head - H) * k_head,
            v + b * v_batch + t * v_time + (head - HG) * v_head,
        )
        x = tl.where(head < H, q + b * q_batch + t * q_time + head * q_head, keys_or_values) + d
        left = tl.load(x, mask=there, other=0.0).to(tl.float32)
        right = tl.load(x + half, mask=there, other=0.0).to(tl.float32)
        y = out + b * out_batch + t * out_time + head * out_head + d
        tl.store(y, (left * c - right * s).to(out.dtype.element_ty), mask=there)
        tl.store(y + half, (right * c + left * s).to(out.dtype.element_ty), mask=there)


def rotary_frequencies(config, device) -> torch.Tensor:
    """A GPTConfig -> radians a position (head_size / 2,), float32, in Hugging Face's order of operations, so rounding
    agrees."""
    exponent = (
        torch.arange(0, config.head_size, 2, device=device, dtype=torch.float32) / config.head_size
    )
    frequency = 1.0 / config.rope_theta**exponent
    if not config.rope_original_block_size:
        return frequency / config.rope_factor
    wavelength = 2 * math.pi / frequency
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = (config.rope_original_block_size / wavelength - low) / (high - low)
    kept = kept.clamp(0, 1)  # 0: a long wavelength, divided by rope_factor; 1: a short one, unchanged
    return (1 - kept) * (frequency / config.rope_factor) + kept * frequency


def rotary_table(config, length: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """-> cos, sin (length, head_size), float32: RoFormer's rotation in Llama's half-split layout."""
    angle = torch.arange(length, device=device)[:, None] * rotary_frequencies(
        config, device
    )  # (T, D/2)
    angle = torch.cat([angle, angle], -1)  # (T, D)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x (B, H, T, D); cos, sin (B, 1, T, D) -> x with each pair (i, i + D/2) rotated by its position's angle."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


def turn(parts, places, cos, sin, back=False):
    """Write queries, keys and values (B, heads, T, D) to `places`: parts of one tensor, perhaps the inputs themselves.

    Queries and keys are rotated (back: by the negative angles), values are copied. There may be fewer parts."""
    if not uses_triton(places[0]):
        for i, (part, place) in enumerate(zip(parts, places, strict=True)):
            place.copy_(rotate(part, cos, -sin if back else sin) if i < 2 else part)
    elif not nothing_to_do(places[0]):
        launch(parts, places[0], cos, sin, back)


def launch(parts, out, cos, sin, back):
    """`turn` by the kernel; out: the first of the places, the others follow it."""
    (B, _, T, D), sizes = parts[0].shape, [part.shape[1] for part in parts]
    H, HG, heads = sizes[0], sum(sizes[:2]), sum(sizes)
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    q, k, v = [*parts, parts[-1], parts[-1]][:3]
    table = cos.expand(B, -1, -1, -1)
    strides = [x.stride(i) for x in (q, k, v, out) for i in (0, 1, 2)]
    M = min(16, triton.next_power_of_2(heads))
    with torch.cuda.device_of(q):
        rotary_kernel[(B * T, triton.cdiv(heads, M))](
            q, k, v, out, cos, sin, T, H, HG, heads, D, *strides, table.stride(0), table.stride(2),
            M=M, DP=max(16, triton.next_power_of_2(D // 2)), BACK=back,
        )  # fmt: skip


class Rotary(torch.autograd.Function):
    """x (B, heads, T, D), rotated in place -> its parts (B, size, T, D): `sizes` heads of queries, keys and values.

    The op that made x must not keep it for backward; linear layers and norms do not. cos, sin (B or 1, 1, T, D)."""

    @staticmethod
    def forward(ctx, x, cos, sin, sizes):
        ctx.save_for_backward(cos, sin)
        parts = x.detach().split(sizes, 1)
        turn(parts[:2], parts[:2], cos, sin)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        heads, (B, _, T, D) = [gradient.shape[1] for gradient in gradients], gradients[0].shape
        dx = gradients[0].new_empty(B, T, sum(heads), D).transpose(1, 2)
        turn(gradients, dx.split(heads, 1), *ctx.saved_tensors, back=True)
        return dx, None, None, None
