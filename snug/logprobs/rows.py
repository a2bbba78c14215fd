"""Rows of logits to log-probs and back: the fused log-softmax and gather, by a Triton kernel or in plain torch.

    forward_rows    logits -> log-prob, log-sum-exp and, if wanted, entropy, in one read. If wanted, the gradient
                    d logprob / d logits overwrites the logits.
    backward_rows   the gradient of log-probs and entropies for an upstream gradient that comes later
    token_logprobs  both, as a differentiable function of logits

The kernels run on CUDA, plain torch elsewhere and in float64. All write into buffers that their caller allocated; on
fake tensors nothing is done, but plain torch's work space is made, so that the planner sees it. Sums are float32, or
float64 for float64 logits. In the kernels exponents have base 2, for which the hardware has an instruction: scale =
log2(e) / temperature.
Test: pytest tests/test_logprobs.py tests/test_kernels.py
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from snug.kernels import (
    LN2,
    LOG2_OF_E,
    LOG2E,
    LOW,
    LOWEST,
    constexpr,
    launch,
    nothing_to_do,
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
        ahead = tl.load(logits + lane, lane < width, -float("inf"))
        for start in range(0, width, BLOCK):
            x = ahead  # the next block loads while this one is computed
            column = start + BLOCK + lane
            ahead = tl.load(logits + column, column < width, -float("inf"))
            z = x.to(tl.float32) * scale
            if PADDED:
                z = tl.where(start + lane < n_vocab, z, -float("inf"))
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
        lse,
        entropy,
        coefficients,
        dentropy,
        dlogits,
        scale,
        slope,
        width,
        n_vocab,
        row_stride,
        out_row_stride,
        BLOCK: constexpr,
        PADDED: constexpr,
    ):
        """One program per row: logprobs, lse and, if it is there, entropy; or with coefficients their gradient alone.

        dlogits may be logits; the second read comes from the L2 cache (`tile`). Without coefficients it becomes
        slope * (onehot - softmax). coefficients and dentropy are already divided by the temperature.
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        target = tl.load(targets + row)
        if coefficients is None:
            best, log_sum, mean = read_row(
                logits, scale, width, n_vocab, BLOCK, PADDED, entropy is not None
            )
            known = (target >= 0) & (target < n_vocab)
            chosen = tl.load(logits + target, known, -float("inf")).to(tl.float32) * scale
            tl.store(logprobs + row, (chosen - best - log_sum) * LN2)
            tl.store(lse + row, (best + log_sum) * LN2)
            if entropy is not None:
                tl.store(entropy + row, (best + log_sum - mean) * LN2)
            c = slope
        else:
            best, log_sum, c = tl.load(lse + row) * LOG2E, 0.0, tl.load(coefficients + row)
        if dlogits is not None:
            tl.debug_barrier()  # `chosen` is read before any lane overwrites it
            for start in range(0, width, BLOCK):
                column = start + tl.arange(0, BLOCK)
                mask = column < width
                # "evict_first": nobody reads the logits again.
                x = tl.load(logits + column, mask, other=-float("inf"), eviction_policy="evict_first")
                z = x.to(tl.float32) * scale - best - log_sum
                share = c
                if coefficients is not None:  # dH / dz = -p (log p + H)
                    log_p = tl.maximum(z, LOW) * LN2
                    share += tl.load(dentropy + row) * (log_p + tl.load(entropy + row))
                d = tl.where(column == target, c, 0.0) - share * tl.exp2(z)
                if PADDED:
                    d = tl.where(column < n_vocab, d, 0.0)
                tl.store(dlogits + row * out_row_stride + column, d.to(dlogits.dtype.element_ty), mask)


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
    temperature: float
    n_vocab: int  # ids from here on are padding: probability 0, gradient 0
    entropy: bool
    dtype: torch.dtype  # of the logits
    chunk_size: int = 0  # rows


def accumulator(dtype):
    """-> the type of sums, log-probs and entropies."""
    return torch.promote_types(dtype, torch.float32)


def slabs(M, width, buffers=1):
    """-> slices of M rows: so many that an operation of plain torch finds its input in the cache."""
    rows = max(1, SCRATCH // (max(1, buffers) * width))
    return [slice(i, i + rows) for i in range(0, M, rows)]


def new_scratch(logits, buffers):
    """-> work space of plain torch for a slab, and the slabs: none without data."""
    rows = slabs(*logits.shape, buffers)
    size = min(len(logits), rows[0].stop if rows else 0) * logits.shape[1]
    scratch = torch.empty(buffers, size, dtype=accumulator(logits.dtype), device=logits.device)
    return scratch, [] if nothing_to_do(logits) else rows


def forward_rows(
    logits, targets, options, logprobs, lse, entropy=None, overwrite=False, gradient=False
):
    """Fill logprobs, lse and entropy or None, each (m,), from logits (m, V) and targets (m,).

    overwrite: plain torch may overwrite the logits, which saves a copy. gradient: the logits become d logprob /
    d logits, which is (onehot(targets) - softmax(logits / temperature)) / temperature.
    """
    if uses_triton(logits):
        launch_rows(
            logits, targets, options, logprobs, lse, entropy, dlogits=logits if gradient else None
        )
        return
    n_vocab, inverse = options.n_vocab, 1 / options.temperature
    in_place = overwrite and logits.dtype == lse.dtype
    scratch, slices = new_scratch(logits, (not in_place) + (entropy is not None))
    for rows in slices:
        x = logits[rows, :n_vocab]
        target = targets[rows, None]
        spare = [buffer[: x.numel()].view(x.shape) for buffer in scratch]
        z = x if in_place else spare[0].copy_(x)  # (m, n_vocab)
        if options.temperature != 1:
            z.mul_(inverse)
        top = z.amax(-1, keepdim=True)
        chosen = z.sub_(top).gather(1, target)
        if entropy is not None:
            deviation = torch.clamp(z, min=LOWEST, out=spare[-1])
        total = z.exp_().sum(-1, keepdim=True)
        logprobs[rows] = (chosen - total.log())[:, 0]
        lse[rows] = (top + total.log())[:, 0]
        if entropy is not None:  # - sum p log p, where log p = deviation - log total
            entropy[rows] = total.log()[:, 0] - deviation.mul_(z).sum(-1) / total[:, 0]
        if gradient:
            z.mul_(-1 / (options.temperature * total))
            z.scatter_(1, target, z.gather(1, target) + inverse)
            if not in_place:
                x.copy_(z)
    if gradient:
        logits[:, n_vocab:] = 0


def backward_rows(logits, targets, options, lse, entropy, coefficients, dentropy, dlogits):
    """dlogits = (coefficients * (onehot(targets) - p) - dentropy * p * (log p + entropy)) / temperature.

    p = softmax(logits / temperature). coefficients, dentropy (m,): the upstream gradients of the log-probs and of the
    entropies. dlogits may be the logits.
    """
    coefficients = coefficients / options.temperature
    dentropy = dentropy / options.temperature
    if uses_triton(logits):
        launch_rows(logits, targets, options, None, lse, entropy, coefficients, dentropy, dlogits)
        return
    in_place = dlogits.dtype == lse.dtype
    scratch, slices = new_scratch(logits, 2 - in_place)
    for rows in slices:
        x = logits[rows, : options.n_vocab]
        d = dlogits[rows, : options.n_vocab]
        c = coefficients[rows, None]
        spare = [buffer[: x.numel()].view(x.shape) for buffer in scratch]
        p = (d if in_place else spare[0]).copy_(x)  # (m, n_vocab)
        if options.temperature != 1:
            p.mul_(1 / options.temperature)
        p.sub_(lse[rows, None])
        share = torch.clamp(p, min=LOWEST, out=spare[-1])  # dH / dz = -p (log p + H)
        share.add_(entropy[rows, None]).mul_(dentropy[rows, None]).add_(c)
        p.exp_().mul_(share).neg_().scatter_add_(1, targets[rows, None], c)
        if not in_place:
            d.copy_(p)
    dlogits[:, options.n_vocab :] = 0


def launch_rows(
    logits,
    targets,
    options,
    logprobs,
    lse,
    entropy,
    coefficients=None,
    dentropy=None,
    dlogits=None,
):
    """The kernel, for both."""
    M, width = logits.shape
    block, warps = tile(width, logits.element_size(), dlogits is not None)
    launch(
        rows_kernel,
        (M,),
        logits,
        targets,
        logprobs,
        lse,
        entropy,
        coefficients,
        dentropy,
        dlogits,
        LOG2_OF_E / options.temperature,
        1 / options.temperature,
        width,
        options.n_vocab,
        logits.stride(0),
        0 if dlogits is None else dlogits.stride(0),
        BLOCK=block,
        PADDED=options.n_vocab < width,
        num_warps=warps,
    )


def check(M, width, targets, temperature, n_vocab):
    """-> n_vocab. Raises ValueError before a kernel would read out of bounds."""
    n_vocab = n_vocab or width
    if targets.shape != (M,) or not temperature > 0 or not 0 < n_vocab <= width:
        raise ValueError(
            f"{M} rows of {width} columns with targets {tuple(targets.shape)}, temperature={temperature}, "
            f"n_vocab={n_vocab}: give one target per row, a temperature above 0, and n_vocab in 1 to {width}"
        )
    return n_vocab


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """log softmax(logits / temperature)[target] of every row -> (M,) float32.

    logits (M, V), copied only if a row is not contiguous; targets (M,) int64. Saved for backward: the logits, (M,)
    numbers. A target outside [0, V): RuntimeError in plain torch, -inf from the kernel, which cannot raise. Raises
    ValueError for shapes that do not fit, or a temperature not above 0.
    """
    M, V = logits.shape
    options = Options(temperature, check(M, V, targets, temperature, None), False, logits.dtype)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return TokenLogprobs.apply(logits, targets.contiguous(), options)


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, options):
        logprobs = logits.new_empty(len(logits), dtype=accumulator(logits.dtype))
        lse = torch.empty_like(logprobs)
        forward_rows(logits, targets, options, logprobs, lse)
        ctx.options = options
        ctx.save_for_backward(logits, targets, lse)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, coefficients):
        logits, targets, lse = ctx.saved_tensors
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        zeros = torch.zeros_like(lse)  # the entropy has no gradient
        backward_rows(logits, targets, ctx.options, lse, zeros, coefficients, zeros, dlogits)
        return dlogits, None, None
