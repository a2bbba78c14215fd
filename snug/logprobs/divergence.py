"""The divergence between two models' next tokens, of rows of logits, and its gradient: exact on-policy distillation.

p: the student's softmax(logits / temperature); q: the teacher's, at the same temperature. Sums are over the tokenizer's
ids; a model's padding rows have probability 0.

    reverse_kl   D = KL(p || q) = sum p (log p - log q)      dD / dz = p (log p - log q - D)

    p [.5, .5], q [.9, .1]: .511

It is TRL's with beta 1 (GKD, Agarwal et al. 2024).
Left out: KL(q || p), mixtures of p and q; sums over the likeliest ids alone. Test: pytest tests/test_teacher.py
"""

from typing import NamedTuple

import torch

from snug.device.kinds import kind_of, wide
from snug.logprobs.rows import slabs

TEMPORARIES = 8  # tensors of a slab's size at a time


class Teacher(NamedTuple):
    """What the head needs for the divergence from a teacher. Its vocabulary and its width may have other sizes."""

    hidden: torch.Tensor  # (M, C_T), the teacher's states at the student's tokens
    weight: torch.Tensor  # (V_T, C_T), its head


def divergence_rows(logits, teacher_logits, options, divergence):
    """Fill divergence (m,) from logits (m, V) and teacher_logits (m, V_T), which become d divergence / d logits.

    Columns from n_vocab on are not read.
    """
    n_vocab = options.n_vocab
    dtype = wide(logits.dtype)
    width = TEMPORARIES * n_vocab
    if kind_of(logits) != "cpu":
        width = -(-width // 32)  # a GPU would wait for launches
    for rows in slabs(len(logits), width):
        log_p = torch.log_softmax(logits[rows, :n_vocab].to(dtype) / options.temperature, -1)
        log_q = torch.log_softmax(teacher_logits[rows, :n_vocab].to(dtype) / options.temperature, -1)
        p = log_p.exp()
        gap = log_p - log_q
        value = divergence[rows] = (p * gap).sum(-1)
        gradient = p * (gap - value[:, None])
        teacher_logits[rows, :n_vocab] = gradient / options.temperature
