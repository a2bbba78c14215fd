"""One token from each row of a model's logits, and its log-prob.

A token comes from a uniform number by inverse CDF, and the number is a hash of (seed, row, step): what a row becomes does not
depend on its neighbours, on the order in which rows are decoded or on the number of processes.

On CUDA one kernel reads the logits once for their maximum and sum, and again, now from the L2 cache, up to the chosen token.
Elsewhere, and where the likeliest token is asked for or `Truncation` leaves some out, plain torch does it in a few ops.

Left out: penalties and biases (training would not apply them), beams.
Test: pytest tests/test_draw.py (and tests/test_kernels.py for the kernel).
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from logprobs.kernels import nothing_to_do, tile, triton, uses_triton
from memory.ledger import MIB, kind_of, logits_budget

if triton is not None:
    import triton.language as tl

    from logprobs.kernels import LN2, LOG2E, LOW

    @triton.jit
    def draw_kernel(logits, u, tokens, logprobs, scale, n_vocab, row_stride, BLOCK: tl.constexpr):
        """One program a row. Exponents are base 2: scale = log2(e) / temperature."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        columns = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), LOW, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)  # a lane's sum of 2^(z - top)
        for start in range(0, n_vocab, BLOCK):
            x = tl.load(logits + start + columns, mask=start + columns < n_vocab, other=-float("inf"))
            z = x.to(tl.float32) * scale
            smaller = tl.exp2(-tl.abs(z - top))
            total = tl.where(z > top, total * smaller + 1, total + smaller)
            top = tl.maximum(top, z)
        best = tl.max(top, 0)
        sum_all = tl.sum(total * tl.exp2(top - best), 0)
        target = tl.load(u + row) * sum_all
        # The first column above the target, which never is one of probability 0. Sums in another order may end below it: then
        # the last column that has a probability.
        before = 0.0
        chosen = 0
        start = 0
        limit = n_vocab
        while start < limit:
            x = tl.load(logits + start + columns, mask=start + columns < n_vocab, other=-float("inf"))
            p = tl.exp2(x.to(tl.float32) * scale - best)
            here = before + tl.cumsum(p, 0)
            after = tl.max(here, 0)
            first = tl.min(tl.where((here > target) & (p > 0), start + columns, n_vocab), 0)
            last = tl.max(tl.where(p > 0, start + columns, chosen), 0)
            chosen = tl.where(first < n_vocab, first, last)
            limit = tl.where(first < n_vocab, 0, limit)
            before = after
            start += BLOCK
        z = tl.load(logits + chosen).to(tl.float32) * scale
        tl.store(tokens + row, chosen.to(tl.int64))
        tl.store(logprobs + row, (z - best - tl.log2(sum_all)) * LN2)


@dataclass(frozen=True)
class Truncation:
    """The likeliest tokens alone, in this order: the top_k; of those that are left the fewest that together have top_p of what
    is left; and those with at least min_p of the likeliest one's probability. Probabilities are those at the temperature.

    Of equally likely tokens the smaller id goes first. The likeliest is always left.
    """

    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    def __bool__(self):
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def __call__(self, probs):
        """probs (N, V) -> a mask (N, V), True for those that are left."""
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        kept = ranked > 0
        if self.top_k:
            kept[:, self.top_k :] = False
        if self.top_p < 1:
            left = ranked * kept
            before = left.cumsum(-1) - left  # of those that are likelier
            kept &= before < self.top_p * left.sum(-1, keepdim=True)
        if self.min_p:
            kept &= ranked >= self.min_p * ranked[:, :1]
        return torch.zeros_like(kept).scatter_(-1, order, kept)


@torch.no_grad()
def sample_tokens(model, hidden, u, temperature, chunk_mb=0, truncation=None):
    """hidden (N, C), u (N,) in [0, 1) -> tokens (N,), log-probs (N,) float32.

    The token whose stretch of the cumulative distribution u falls into; temperature 0: the likeliest, with its log-prob
    at temperature 1. A log-prob is that of the whole distribution, whatever `truncation`, a Truncation, leaves out. Rows go through
    the head a few at a time: the logits and what is made of them take chunk_mb MiB at most (0: logprobs.logits_budget).
    """
    N, config = len(hidden), model.config
    kernel = temperature > 0 and not truncation and uses_triton(hidden)
    # Of a row there are its logits alone; or, in float32, three at a time of logits, log-probs, probabilities, orders, masks
    width = config.vocab_size * (hidden.element_size() if kernel else 3 * 4 * (2 if truncation else 1))
    rows = max(1, int(logits_budget(chunk_mb, kind_of(hidden)) * MIB) // width)
    tokens = torch.empty(N, dtype=torch.long, device=hidden.device)
    logprobs = torch.empty(N, dtype=torch.float32, device=hidden.device)
    choose = draw_triton if kernel else draw_torch
    for start in range(0, N, rows):
        part = slice(start, start + rows)
        choose(model, hidden[part], u[part], temperature, truncation, tokens[part], logprobs[part])
    return tokens, logprobs


def draw_torch(model, hidden, u, temperature, truncation, tokens, logprobs):
    """hidden (n, C), u (n,) -> fills tokens and logprobs, (n,) each. The kernel's oracle."""
    logits = model.logits(hidden).float()
    if temperature not in (0, 1):
        logits /= temperature
    logp = torch.log_softmax(logits, -1)
    del logits
    if temperature:
        probs = logp.exp()
        if truncation:
            probs *= truncation(probs)
        cdf = probs.cumsum_(-1)
        # right=True: the first entry above u * total, which is never a token of probability 0
        chosen = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
        chosen.clamp_(max=model.config.n_vocab - 1)  # a parallel sum need not rise in every place
    else:
        chosen = logp.argmax(-1, keepdim=True)
    torch.gather(logp, -1, chosen, out=logprobs[:, None])
    tokens.copy_(chosen[:, 0])


def draw_triton(model, hidden, u, temperature, truncation, tokens, logprobs):
    """As draw_torch, for a temperature above 0 and no truncation."""
    logits = F.linear(hidden, model.lm_head_weight)
    if nothing_to_do(logits):
        return
    block, warps = tile(model.config.n_vocab, logits.element_size(), gradient=True)  # read twice, as for a gradient
    with torch.cuda.device_of(logits):
        scale = LOG2E.value / temperature
        draw_kernel[(len(logits),)](
            logits, u, tokens, logprobs, scale, model.config.n_vocab, logits.stride(0), BLOCK=block, num_warps=warps
        )


def uniforms(seed, rows, steps):
    """rows (N,), steps (T,) arrays of integers -> (N, T) float32 in [0, 1): a hash of (seed, row, step), the same everywhere.

    splitmix64's finaliser (Steele, Lea & Flood 2014) over a counter. 23 bits, so that u * total < total in float32.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant

        def mix(x):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return x ^ (x >> np.uint64(31))

        golden = np.uint64(0x9E3779B97F4A7C15)
        key = mix(np.array(seed % 2**64, dtype=np.uint64) + golden)
        row = mix(key ^ mix((np.asarray(rows).astype(np.uint64) + np.uint64(1)) * golden))[:, None]
        bits = mix(row + (np.asarray(steps).astype(np.uint64) + np.uint64(1)) * golden)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2**-23)
