"""Rows of logits to log-probs and back: the fused log-softmax and gather, by a Triton kernel or in plain torch.

    forward_rows    logits -> log-prob and, if wanted, entropy, in one read. If wanted, the gradient
                    d logprob / d logits overwrites the logits.
    token_logprobs  the same, as a differentiable function of logits

The kernel runs on CUDA, plain torch elsewhere and in float64. Both write into buffers that their caller allocated; on
fake tensors plain torch computes one slab, so that the planner sees its work space. Sums are float32, or float64 for
float64 logits. In the kernel exponents have base 2, for which the hardware has an instruction: scale =
log2(e) / temperature.
Test: pytest tests/test_logprobs.py tests/test_kernels.py
"""

from typing import NamedTuple

import torch

from snug.device.kinds import is_planned, wide
from snug.kernels import (
    INF,
    LN2,
    LOG2_OF_E,
    LOW,
    LOWEST,
    constexpr,
    launch,
    tl,
    triton,
    uses_triton,
)

# Numbers that plain torch works on at a time: 2 MiB of float32 stay in the cache from operation to operation.
SCRATCH = 2**19


if triton is not None:

    @triton.jit
    def read_row(logits, scale, width, n_vocab, BLOCK, PADDED, ENTROPY):
        """Of z = scale * logits -> its largest, log2 of the sum of 2^(z - largest), and with ENTROPY the mean of z.

        Each lane keeps the maximum and the sum of its columns, so the loop has no barrier. One of the two exponentials
        of the online update (Milakov and Gimelshein 2018, algorithm 3) is always 1 and is not computed.
        """
        lane = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), LOW, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)  # sum of 2^(z - top)
        moment = tl.zeros((BLOCK,), tl.float32)  # sum of z 2^(z - top)
        ahead = tl.load(logits + lane, lane < width, -INF)
        for start in range(0, width, BLOCK):
            x = ahead  # the next block loads while this one is computed
            column = start + BLOCK + lane
            ahead = tl.load(logits + column, column < width, -INF)
            z = x.to(tl.float32) * scale
            if PADDED:
                z = tl.where(start + lane < n_vocab, z, -INF)
            smaller = tl.exp2(-tl.abs(z - top))
            rises = z > top
            total = tl.where(rises, total * smaller + 1, total + smaller)
            if ENTROPY:
                finite = tl.maximum(z, LOW)  # -inf * 0 is NaN
                moment = tl.where(rises, moment * smaller + finite, moment + finite * smaller)
            top = tl.maximum(top, z)
        best = tl.max(top, 0)
        share = tl.exp2(top - best)
        total = tl.sum(total * share, 0)
        return best, tl.log2(total), tl.sum(moment * share, 0) / total

    @triton.jit
    def rows_kernel(
        logits,
        targets,
        logprobs,
        entropy,
        scale,
        slope,
        width,
        n_vocab,
        row_stride,
        BLOCK: constexpr,
        PADDED: constexpr,
        GRADIENT: constexpr,
    ):
        """One program per row: logprobs and, if it is there, entropy.

        GRADIENT: the logits become slope * (onehot - softmax); the second read comes from the L2 cache (`tile`).
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        target = tl.load(targets + row)
        best, log_sum, mean = read_row(
            logits, scale, width, n_vocab, BLOCK, PADDED, entropy is not None
        )
        known = (target >= 0) & (target < n_vocab)
        chosen = tl.load(logits + target, known, -INF).to(tl.float32) * scale
        tl.store(logprobs + row, (chosen - best - log_sum) * LN2)
        if entropy is not None:
            tl.store(entropy + row, (best + log_sum - mean) * LN2)
        if GRADIENT:
            tl.debug_barrier()  # `chosen` is read before any lane overwrites it
            for start in range(0, width, BLOCK):
                column = start + tl.arange(0, BLOCK)
                mask = column < width
                # "evict_first": nobody reads the logits again.
                x = tl.load(logits + column, mask, other=-INF, eviction_policy="evict_first")
                z = x.to(tl.float32) * scale - best - log_sum
                d = tl.where(column == target, slope, 0.0) - slope * tl.exp2(z)
                if PADDED:
                    d = tl.where(column < n_vocab, d, 0.0)
                tl.store(logits + column, d, mask)


def tile(width, itemsize=2, gradient=False):
    """-> (columns, warps) of a program for rows of `width` columns.

    16 elements per lane: two 16-byte loads of bfloat16 and the next two are in flight. An SM has room for 32 warps of
    64 registers; together that is twice the bytes that cover an H200's latency. Eight warps per row suffice; more would
    only make the last wave longer. Rows that do not begin at 16-byte addresses are loaded element by element, and
    addresses and masks take registers too: then 8 elements, because sm_80 spills with 16. A short row is one block.

    gradient: the second read of a row finds it in the L2 cache if all rows in flight fit there together. 40 MB over 132
    SMs are 300 KB per SM (H200; A100: 40 MB over 108). An SM holds 32 warps of programs with 33 to 64 registers, so
    long rows take 16 or 32 warps, and 2 rows or 1 are in flight. (The leanest variant, without entropy and padding,
    needs 32 registers, so twice as many rows are in flight.) More than 8 elements per lane would spill.
    """
    elements = 16 if width % 16 == 0 and not gradient else 8
    warps = 8
    while gradient and warps < 32 and width * itemsize * (32 // warps) > 300_000:
        warps *= 2
    block = min(32 * warps * elements, max(128, triton.next_power_of_2(width)))
    return block, max(1, block // (32 * elements))


class Options(NamedTuple):
    """What the head and its rows need beside their tensors."""

    temperature: float
    n_vocab: int  # ids from here on are padding: probability 0, gradient 0
    dtype: torch.dtype = torch.float32  # of the head's products
    chunk_size: int = 0  # rows
    entropy: bool = False
    teacher: tuple | None = None  # divergence.Teacher


def slabs(M, width):
    """-> slices of M rows: so many that an operation of plain torch finds its input in the cache."""
    rows = max(1, SCRATCH // width)
    return [slice(i, i + rows) for i in range(0, M, rows)]


def forward_rows(logits, targets, options, logprobs, entropy=None, overwrite=False, gradient=False):
    """Fill logprobs and entropy or None, each (m,), from logits (m, V) and targets (m,).

    overwrite: plain torch may overwrite the logits, which saves a copy. gradient: the logits become d logprob /
    d logits, which is (onehot(targets) - softmax(logits / temperature)) / temperature.
    """
    n_vocab, (M, width) = options.n_vocab, logits.shape
    if uses_triton(logits, "rows"):
        block, warps = tile(width, logits.itemsize, gradient)
        launch(
            rows_kernel,
            (M,),
            logits,
            targets,
            logprobs,
            entropy,
            LOG2_OF_E / options.temperature,
            1 / options.temperature,
            width,
            n_vocab,
            logits.stride(0),
            BLOCK=block,
            PADDED=n_vocab < width,
            GRADIENT=gradient,
            num_warps=warps,
        )
        return
    in_place = overwrite and logits.dtype == logprobs.dtype
    scratch = (not in_place) + (entropy is not None)  # buffers of a slab's size
    rows_of_slabs = slabs(M, max(1, scratch) * width)
    for rows in rows_of_slabs[:1] if is_planned(logits) else rows_of_slabs:
        slab_in_torch(
            logits[rows, :n_vocab],
            targets[rows, None],
            options.temperature,
            logprobs[rows],
            None if entropy is None else entropy[rows],
            in_place,
            gradient,
        )
    if gradient:
        logits[:, n_vocab:] = 0


def slab_in_torch(x, target, temperature, logprobs, entropy, in_place, gradient):
    """The kernel in plain torch, for logits x (m, n_vocab) and target (m, 1)."""
    z = x if in_place else x.to(logprobs.dtype, copy=True)
    if temperature != 1:
        z.mul_(1 / temperature)
    chosen = z.sub_(z.amax(-1, keepdim=True)).gather(1, target)
    if entropy is not None:
        deviation = z.clamp(min=LOWEST)
    total = z.exp_().sum(-1, keepdim=True)
    logprobs[:] = (chosen - total.log())[:, 0]
    if entropy is not None:  # - sum p log p, where log p = deviation - log total
        entropy[:] = total.log()[:, 0] - deviation.mul_(z).sum(-1) / total[:, 0]
    if gradient:
        z.mul_(-1 / (temperature * total))
        z.scatter_(1, target, z.gather(1, target) + 1 / temperature)
        if not in_place:
            x.copy_(z)


def check(M, width, targets, temperature, n_vocab):
    """-> n_vocab. Raises ValueError before a kernel would read out of bounds."""
    n_vocab = n_vocab or width
    if targets.shape != (M,) or not temperature > 0 or not 0 < n_vocab <= width:
        raise ValueError(
            f"{M} rows of {width} columns with targets {tuple(targets.shape)}, temperature={temperature}, "
            f"n_vocab={n_vocab}: give a target per row, a temperature above 0, and no more ids than columns"
        )
    return n_vocab


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """log softmax(logits / temperature)[target] of every row -> (M,) float32.

    logits (M, V), copied only if a row is not contiguous; targets (M,) int64. Saved for backward: the logits. A target
    outside [0, V): RuntimeError in plain torch, -inf from the kernel, which cannot raise. Raises ValueError for shapes
    that do not fit, or a temperature not above 0.
    """
    n_vocab = check(*logits.shape, targets, temperature, None)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return TokenLogprobs.apply(logits, targets.contiguous(), Options(temperature, n_vocab))


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, options):
        dtype = wide(logits.dtype)
        logprobs = logits.new_empty(len(logits), dtype=dtype)
        forward_rows(logits, targets, options, logprobs)
        ctx.options = options
        ctx.save_for_backward(logits, targets)
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, coefficients):
        logits, targets = ctx.saved_tensors
        dlogits = logits.clone(memory_format=torch.contiguous_format)
        again = torch.empty_like(coefficients)
        forward_rows(dlogits, targets, ctx.options, again, overwrite=True, gradient=True)
        for rows in slabs(*logits.shape):
            dlogits[rows].mul_(coefficients[rows, None])
        return dlogits, None, None
