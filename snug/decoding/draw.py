"""One token from each row of a model's logits, and its log-prob.

A token comes from a uniform number by inverse CDF, and the number is a hash of (seed, sequence, step). So, with
the same logits, a sequence does not depend on its neighbours, on the order of decoding, or on the number of processes.

On CUDA one kernel reads a row of logits once, for the row's maximum and for the sum of each stretch of columns. Then
the kernel reads one stretch again. Elsewhere, and at temperature 0, plain torch draws the token.

Left out: top-k, top-p, penalties, biases and beams, which training does not use.
Test: pytest tests/test_draw.py, and tests/test_kernels.py for the kernel.
"""

import numpy as np
import torch

from snug.device.kinds import MIB, is_planned, kind_of, logits_budget
from snug.kernels import INF, LN2, LOG2_OF_E, LOW, constexpr, launch, tl, triton, uses_triton
from snug.logprobs.rows import tile

if triton is not None:

    @triton.jit
    def pick(p, u, N):
        """p (N,), u in [0, 1) -> the entry whose interval of the cumulative sum has u; u's place in it, in [0, 1).

        In float64 the order of additions does not matter. If rounding or a NaN leaves no such entry: the one of the
        largest p."""
        ends = tl.cumsum(p.to(tl.float64), 0)
        target = u * tl.max(ends, 0)
        entries = tl.arange(0, N)
        first = tl.min(tl.where((ends > target) & (p > 0), entries, N), 0)
        first = tl.where(first < N, first, tl.argmax(p, 0))
        end = tl.sum(tl.where(entries == first, ends, 0.0), 0)
        size = tl.sum(tl.where(entries == first, p, 0.0), 0)
        return first, 1 - (end - target) / size

    @triton.jit
    def draw_kernel(
        logits,
        u,
        tokens,
        logprobs,
        scale,
        width,
        n_vocab,
        row_stride,
        length,
        BLOCK: constexpr,
        STRETCHES: constexpr,
    ):
        """One program per row of logits. It reads the row's STRETCHES stretches of `length` columns side by side, which
        gives the sum of each stretch. The first `pick` picks a stretch. The second picks a token in this stretch,
        because `length` is at most BLOCK.

        The compiler may round x * scale - best once or twice, so the two reads may give different sums. This does no
        harm: the second pick takes its target from the sum of its own read."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        STEP: constexpr = BLOCK // STRETCHES
        columns = (tl.arange(0, STRETCHES) * length)[:, None] + tl.arange(0, STEP)[None, :]
        top = tl.full((STRETCHES, STEP), LOW, tl.float32)
        total = tl.zeros((STRETCHES, STEP), tl.float32)  # a lane's sum of 2^(z - top)
        ahead = tl.load(logits + columns, columns < width, -INF)
        for start in range(0, length, STEP):
            x = ahead  # the next block loads while this one is computed
            after = columns + start + STEP
            mask = (start + STEP < length) & (after < width)
            ahead = tl.load(logits + after, mask, -INF)
            z = tl.where(columns + start < n_vocab, x.to(tl.float32) * scale, -INF)
            smaller = tl.exp2(-tl.abs(z - top))
            total = tl.where(z > top, total * smaller + 1, total + smaller)
            top = tl.maximum(top, z)
        best = tl.max(top)
        sums = tl.sum(total * tl.exp2(top - best), 1)
        stretch, u_within = pick(sums, tl.load(u + row), STRETCHES)
        place = tl.arange(0, BLOCK)
        column = stretch * length + place
        mask = (place < length) & (column < n_vocab)
        x = tl.load(logits + column, mask, -INF)
        token, _ = pick(tl.exp2(x.to(tl.float32) * scale - best), u_within, BLOCK)
        # In a row with a NaN any token may be picked.
        token = tl.minimum(stretch * length + token, n_vocab - 1)
        z = tl.load(logits + token).to(tl.float32) * scale
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(logprobs + row, (z - best - tl.log2(tl.sum(sums, 0))) * LN2)


@torch.no_grad()
def sample_tokens(model, hidden, u, temperature, chunk_mb=0):
    """hidden (N, C), u (N,) in [0, 1) -> tokens (N,), log-probs (N,) float32.

    The token is the one whose interval of the cumulative distribution contains u; at temperature 0 it is the likeliest,
    with its log-prob at temperature 1. Only some rows of hidden go through the head at a time, so that the logits and
    what is computed from them take chunk_mb MiB (0: see logits_budget).
    """
    N, vocab_size = len(hidden), model.config.vocab_size
    if temperature > 0 and uses_triton(hidden, "draw"):
        draw, row_bytes = draw_triton, vocab_size * hidden.itemsize
    else:  # three float32 rows at a time: logits, log-probs, probabilities
        draw, row_bytes = draw_torch, vocab_size * 12
    budget = logits_budget(chunk_mb, kind_of(hidden), model.lm_head_weight.nbytes)
    n = max(1, int(budget * MIB) // row_bytes)
    tokens = hidden.new_empty(N, dtype=torch.long)
    logprobs = hidden.new_empty(N, dtype=torch.float32)
    for start in range(0, n if is_planned(hidden) else N, n):  # a planner's chunks are all alike
        rows = slice(start, start + n)
        draw(model, hidden[rows], u[rows], temperature, tokens[rows], logprobs[rows])
    return tokens, logprobs


def draw_torch(model, hidden, u, temperature, tokens, logprobs):
    """hidden (n, C), u (n,) -> fills tokens and logprobs, (n,) each. The kernel's oracle."""
    logits = model.logits(hidden).float()
    if temperature not in (0, 1):
        logits /= temperature
    logp = torch.log_softmax(logits, -1)
    del logits
    if temperature:
        cdf = logp.exp().cumsum_(-1)
        # right=True: the first entry above u * total, which is never a token of probability 0
        chosen = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
        # A parallel cumsum may end a little below its total.
        chosen.clamp_(max=model.config.n_vocab - 1)
    else:
        chosen = logp.argmax(-1, keepdim=True)
    torch.gather(logp, -1, chosen, out=logprobs[:, None])
    tokens.copy_(chosen[:, 0])


def draw_triton(model, hidden, u, temperature, tokens, logprobs):
    """draw_torch for a temperature above 0."""
    logits = hidden @ model.lm_head_weight.t()
    n, width = logits.shape
    n_vocab = model.config.n_vocab
    length, shape = stretches(width, n_vocab)
    launch(
        draw_kernel,
        (n,),
        logits,
        u,
        tokens,
        logprobs,
        LOG2_OF_E / temperature,
        width,
        n_vocab,
        logits.stride(0),
        length,
        **shape,
    )


def stretches(width, n_vocab):
    """-> (columns of a stretch, draw_kernel's constants). Stretches cover the row, and each fits in a block."""
    block, warps = tile(width)
    steps = -(-n_vocab // block)
    number = triton.next_power_of_2(steps)
    return steps * (block // number), dict(BLOCK=block, STRETCHES=number, num_warps=warps)


def uniforms(seed, sequences, steps):
    """sequences (N,), steps (T,) integers -> (N, T) float32 in (0, 1): a hash of (seed, sequence, step), the same on
    every machine.

    splitmix64's finaliser (Steele, Lea & Flood 2014) over a counter. The numbers are the middles of 2^23 intervals.
    They stay below 1, also after u * total in float32. They are never 0: a 0 would draw token 0 once in 8 million
    draws, however unlikely this token is.
    """
    golden = 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        return x ^ (x >> 31)

    def counter(numbers):
        return (np.asarray(numbers, dtype=np.uint64) + 1) * golden  # arithmetic modulo 2**64

    key = mix(np.uint64([seed % 2**64]) + golden)
    row = mix(key ^ mix(counter(sequences)))[:, None]
    bits = mix(row + counter(steps))
    return ((bits >> 41).astype(np.float32) + 0.5) * 2**-23
