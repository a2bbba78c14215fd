"""Rotary positions (Su et al. 2021): a kernel that rotates queries or keys, or rotates their gradients back.

The model rotates in place, in the output of the projection. Attention reads views of it, so backward keeps no rotated
copy. Left out: decoding's rotation, which goes into the KV cache (snug/decoding/attention.py).
Test: pytest tests/test_layer_kernels.py
"""

import math
from dataclasses import replace

import torch

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
        c = tl.load(cos + angle, d < half)
        s = tl.load(sin + angle, d < half)
        if BACK:
            s = -s
        x += b * x_batch + t * x_time + head * x_head + d
        left = tl.load(x, mask).to(tl.float32)
        right = tl.load(x + half, mask).to(tl.float32)
        tl.store(x, left * c - right * s, mask)
        tl.store(x + half, right * c + left * s, mask)


def rotary_frequencies(config, device):
    """A GPTConfig -> radians per position (rotary size / 2,), float32.

    The order of operations is Hugging Face's, so that both round alike."""
    size = config.rotary_size
    even = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    period = config.rope_theta ** (even / size)
    if config.rope_type == "longrope":
        return 1.0 / (torch.tensor(config.rope_short_factor, device=device) * period)
    frequency = 1.0 / period
    if not config.rope_type:
        return frequency / config.rope_factor
    # (rotary size / 2,): 0 where a frequency is divided by rope_factor, because its wave turns at most
    # rope_low_freq_factor times in the original context; 1 where it stays
    if config.rope_type == "yarn":
        kept = kept_by_yarn(config, even)
    else:  # Llama 3: between them by how often it turns
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = config.rope_original_block_size / (2 * math.pi / frequency)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * (frequency / config.rope_factor) + kept * frequency


def kept_by_yarn(config, even):
    """`kept` by YaRN (Peng et al. 2023, section 3.2): between 0 and 1 by the place in the head."""

    def place(turns):
        """Which pair of the head turns so often in the original context?"""
        period = config.rope_original_block_size / (turns * 2 * math.pi)
        return config.rotary_size * math.log(period) / (2 * math.log(config.rope_theta))

    first = max(0, math.floor(place(config.rope_high_freq_factor)))
    last = min(math.ceil(place(config.rope_low_freq_factor)), config.rotary_size - 1)
    return 1 - ((even / 2 - first) / max(last - first, 0.001)).clamp(0, 1)


def rotary_table(config, length, device, kind="rotary"):
    """-> cos, sin (length, rotary size), float32: RoFormer's rotation in Llama's half-split layout.

    kind: GPTConfig.rope's; "sliding": plain rotary positions of another base."""
    if kind == "sliding":
        config = replace(
            config,
            rope_theta=config.rope_sliding_theta,
            rope_type="",
            rope_factor=1.0,
            rope_original_block_size=0,
            rope_attention_factor=1.0,
        )
    position = torch.arange(length, device=device)
    angle = position[:, None] * rotary_frequencies(config, device)  # (T, size / 2)
    angle = torch.cat([angle, angle], -1)  # (T, size)
    return angle.cos() * config.rope_attention_factor, angle.sin() * config.rope_attention_factor


def rotate(x, cos, sin):
    """x (B, H, T, D); cos, sin (B, 1, T, size) -> x with each pair (i, i + size/2) rotated by its position's angle.

    What is behind `size` stays."""
    size = cos.shape[-1]
    left, right = x[..., :size].chunk(2, -1)
    turned = x[..., :size] * cos + torch.cat([-right, left], -1) * sin
    turned = turned.to(x.dtype)
    if size == x.shape[-1]:
        return turned
    return torch.cat([turned, x[..., size:]], -1)


def rotate_(x, cos, sin, back=False):
    """Rotate x (B, heads, T, D) in place, whose last stride is 1. back: by the negative angles."""
    if not uses_triton(x, "rotary"):
        x.copy_(rotate(x, cos, -sin if back else sin))
        return
    B, heads, T, _ = x.shape
    D = cos.shape[-1]  # of a head, what turns
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
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        dx = torch.cat([gradient.transpose(1, 2) for gradient in gradients], 2).transpose(1, 2)
        rotate_(dx[:, : ctx.rotated], *ctx.saved_tensors, back=True)
        return dx, None, None, None
