"""The divergence between two models' next tokens, of rows of logits, and its gradient: exact on-policy distillation.

p: the student's softmax(logits / temperature); q: the teacher's, at the same temperature. Sums are over the tokenizer's
ids; a model's padding rows have probability 0.

    reverse_kl   KL(p || q) = sum p (log p - log q)      dD / dz = p (log p - log q - D)
    forward_kl   KL(q || p) = sum q (log q - log p)      dD / dz = p - q
    jsd          half of KL(p || m) + KL(q || m), m = (p + q) / 2
                                                         dD / dz = p (log p - log m - KL(p || m)) / 2

    p [.5, .5], q [.9, .1]: reverse_kl .511, forward_kl .368, jsd .102

They are TRL's with beta 1, 0 and 0.5 (GKD, Agarwal et al. 2024). The Triton kernel runs on CUDA, plain torch elsewhere.
Left out: other mixtures of p and q; sums over the likeliest ids alone. Test: pytest tests/test_teacher.py
"""

import math
from typing import NamedTuple

import torch

from snug.kernels import LN2, LOG2_OF_E, constexpr, launch, tl, triton, uses_triton
from snug.logprobs.rows import accumulator, slabs

TEMPORARIES = 8  # tensors of a slab's size that plain torch holds at a time


class Teacher(NamedTuple):
    """What the head needs for a divergence from a teacher. Its vocabulary and its width may have other sizes."""

    hidden: torch.Tensor  # (M, C_T), the teacher's states at the student's tokens
    weight: torch.Tensor  # (V_T, C_T), its head
    divergence: str  # reverse_kl, forward_kl or jsd


def divergence_of(log_p, log_q, name: str):
    """log_p, log_q (m, n_vocab) -> the divergence (m,), and its gradient for the student's logits / temperature."""
    p, q = log_p.exp(), log_q.exp()
    if name == "forward_kl":
        return (q * (log_q - log_p)).sum(-1), p - q
    other = log_q if name == "reverse_kl" else torch.logaddexp(log_p, log_q) - math.log(2)
    gap = log_p - other
    divergence = own = (p * gap).sum(-1)
    if name == "jsd":
        divergence = (own + (q * (log_q - other)).sum(-1)) / 2
    gradient = p * (gap - own[:, None])
    return divergence, gradient / 2 if name == "jsd" else gradient


def divergence_torch(logits, teacher_logits, options, name, divergence):
    """`divergence_rows` in plain torch."""
    n_vocab, dtype = options.n_vocab, accumulator(logits.dtype)
    for rows in slabs(len(logits), n_vocab, TEMPORARIES):
        z, teacher_z = logits[rows, :n_vocab].to(dtype), teacher_logits[rows, :n_vocab].to(dtype)
        log_p = torch.log_softmax(z / options.temperature, -1)
        log_q = torch.log_softmax(teacher_z / options.temperature, -1)
        divergence[rows], gradient = divergence_of(log_p, log_q, name)
        teacher_logits[rows, :n_vocab] = gradient / options.temperature


def divergence_rows(logits, teacher_logits, options, name, divergence):
    """Fill divergence (m,) from logits (m, V) and teacher_logits (m, V_T), which become d divergence / d logits.

    Columns from n_vocab on are not read. On fake tensors the kernel does nothing.
    """
    if not uses_triton(logits):
        divergence_torch(logits, teacher_logits, options, name, divergence)
        return
    launch(
        divergence_kernel,
        (len(logits),),
        logits,
        teacher_logits,
        divergence,
        LOG2_OF_E / options.temperature,
        1 / options.temperature,
        options.n_vocab,
        logits.stride(0),
        teacher_logits.stride(0),
        NAME=name,
        BLOCK=min(2048, triton.next_power_of_2(options.n_vocab)),
        num_warps=8,
    )


if triton is not None:
    from snug.logprobs.rows import read_row

    @triton.jit
    def terms(logits, teacher, column, n_vocab, scale, log_sum_p, log_sum_q, NAME: constexpr):
        """A block's p, q, and what is summed up: the terms of p times the third, and of q times the fourth."""
        known = column < n_vocab
        log_p = tl.load(logits + column, known, -float("inf")).to(tl.float32) * scale - log_sum_p
        log_q = tl.load(teacher + column, known, -float("inf")).to(tl.float32) * scale - log_sum_q
        p, q = tl.exp2(log_p), tl.exp2(log_q)
        log_p, log_q = tl.where(known, log_p, 0.0), tl.where(known, log_q, 0.0)
        gap = (log_p - log_q) * LN2
        if NAME == "reverse_kl":
            return p, q, gap, tl.zeros_like(gap)
        if NAME == "forward_kl":
            return p, q, tl.zeros_like(gap), -gap
        m = (p + q) / 2
        log_m = tl.where(m > 0, tl.log2(m), 0.0)
        return p, q, (log_p - log_m) * (LN2 / 2), (log_q - log_m) * (LN2 / 2)

    @triton.jit
    def divergence_kernel(
        logits,
        teacher,
        divergence,
        scale,
        slope,
        n_vocab,
        row_stride,
        teacher_stride,
        NAME: constexpr,
        BLOCK: constexpr,
    ):
        """One program per row: both log-sums, then the divergence, then the gradient over the teacher's logits.

        The second and the third read come from the L2 cache. scale = log2(e) / temperature, slope = 1 / temperature.
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        teacher += row * teacher_stride
        best_p, log_sum_p, _ = read_row(logits, scale, n_vocab, n_vocab, BLOCK, False, False)
        best_q, log_sum_q, _ = read_row(teacher, scale, n_vocab, n_vocab, BLOCK, False, False)
        log_sum_p += best_p
        log_sum_q += best_q
        lane = tl.arange(0, BLOCK)
        by_p = tl.zeros((BLOCK,), tl.float32)
        by_q = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n_vocab, BLOCK):
            p, q, gap, other = terms(
                logits, teacher, start + lane, n_vocab, scale, log_sum_p, log_sum_q, NAME
            )
            by_p += p * gap
            by_q += q * other
        own = tl.sum(by_p, 0)
        tl.store(divergence + row, own + tl.sum(by_q, 0))
        for start in range(0, n_vocab, BLOCK):
            column = start + lane
            p, q, gap, other = terms(
                logits, teacher, column, n_vocab, scale, log_sum_p, log_sum_q, NAME
            )
            d = p - q if NAME == "forward_kl" else p * (gap - own)
            tl.store(teacher + column, (d * slope).to(teacher.dtype.element_ty), column < n_vocab)
