"""Attention of packed groups: a prompt and its k completions in one row, without padding and with the prompt once.

    Segments   which tokens of the row see which
    attend     attention by them, differentiable: on CUDA Triton kernels (flash.py), on a CPU a few calls of PyTorch's
               own, elsewhere F.scaled_dot_product_attention with a dense mask, which is the oracle of both

On a CPU a completion's attention has two parts, to its prompt and to itself. Each part is a softmax of its own; the
logarithms of their sums tell how to join them. Backward is exact part by part if each part is given the joint output
and the joint sum: a part's probabilities are exp(score - joint log-sum), whatever the other parts hold.

Left out: prompts that share a beginning, and decoding (decoding/attention.py). Test: pytest tests/test_segments.py
"""

from copy import copy
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels import flash, uses_triton
from kernels.flash import TILE

forward_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ALONE = 256  # tokens; longer segments are not copied into a batch
SIMILAR = 0.75  # segments of a batch have at least this share of the longest one's tokens
MANY = 4  # neighbours of the same length; they are a batch without a copy


class Segments:
    """Who sees what in a row of T tokens: groups, each a prompt and then its completions, one behind the other.

    A token sees its group's prompt, and its own segment up to itself. A prompt with one completion is one segment. Two
    groups, (a b | x y | z) and (c | u):

        token    a b x y z c u      segments begin at 0 2 4 5
        start    0 0 2 2 4 5 5      where the token's segment begins
        groups   (0, 2, 5), (5, 7, 7)     where its prompt begins, its completions begin, and it ends
    """

    def __init__(self, groups: list[tuple[int, list[int]]], device="cpu"):
        """groups: (tokens of the prompt, [tokens of each completion, perhaps 0]). A prompt has at least one."""
        self.groups, lengths, end = [], [], 0
        for prompt, completions in groups:
            if len(completions) == 1:
                prompt, completions = prompt + completions[0], []
            self.groups.append((end, end + prompt, end := end + prompt + sum(completions)))
            lengths += [prompt, *completions]
        self.lengths = np.array(lengths)
        self.begins = self.lengths.cumsum() - self.lengths  # of the segments
        self.longest = max(
            prompt + max(completions, default=0) for prompt, completions in groups
        )  # tokens seen
        self.device, self.kept = torch.device(device), None

    def start(self) -> np.ndarray:
        """(T,) where each token's segment begins."""
        return self.begins.repeat(self.lengths)

    def tiles(self) -> np.ndarray:
        """(n, 5): TILE tokens at most, a prompt's or a group's completions', for a program of the kernels.

        A line is: the first token, the end, where the prompt that they see begins and ends (0, 0: a prompt's own
        tokens see no other), and the end of the tokens that see them. Prompts come first: the most tokens see them.
        """
        ends, lines = self.begins + self.lengths, []
        for begin, middle, end in self.groups:
            for first in range(begin, middle, TILE):
                lines.append((first, min(first + TILE, middle), 0, 0, end))
            for first in range(middle, end, TILE):
                last = min(first + TILE, end)
                lines.append((first, last, begin, middle, ends[np.searchsorted(ends, last)]))
        return np.array(sorted(lines, key=lambda line: line[2] < line[3]))

    def mask(self) -> torch.Tensor:
        """(T, T) boolean: True where the token of the line sees that of the column."""
        start, token = self.start(), np.arange(self.lengths.sum())
        sees = (token >= start[:, None]) & (token <= token[:, None])
        for begin, middle, end in self.groups:
            sees[middle:end, begin:middle] = True
        return torch.from_numpy(sees).to(self.device)

    @cached_property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`start` and `tiles` on the device."""
        return tuple(torch.from_numpy(table).to(self.device) for table in (self.start(), self.tiles()))

    @cached_property
    def batches(self) -> list["Batch"]:
        """The segments, those of about the same length together."""
        order, found = np.argsort(-self.lengths, kind="stable")[: np.count_nonzero(self.lengths)], []
        while len(order):
            longest = self.lengths[order[0]]
            n = 1 if longest > ALONE else int((self.lengths[order] >= SIMILAR * longest).sum())
            some, order = order[:n], order[n:]
            cuts = np.flatnonzero(np.diff(self.begins[some]) != longest) + 1
            neighbours = self.lengths[some[-1]] == longest and MANY * (len(cuts) + 1) <= n
            found += [
                Batch(self.begins[s], self.lengths[s])
                for s in (np.split(some, cuts) if neighbours else [some])
            ]
        return found

    def keeping(self) -> "Segments":
        """A copy that keeps what `attend` computes first, and gives it away when a checkpointed block runs again."""
        other = copy(self)
        other.kept = []
        return other


class Batch:
    """Segments of about the same length, side by side, padded behind. No token that is there sees the padding.

    Neighbours of the same length are a view of the row.
    """

    def __init__(self, begins, lengths):
        n, longest = len(begins), int(lengths.max())
        column, begin = np.arange(longest), int(begins[0])
        view = (begins == begin + longest * np.arange(n)).all() and (lengths == longest).all()
        self.shape, self.slice = (n, longest), slice(begin, begin + n * longest) if view else None
        there = (column < lengths[:, None]).ravel()
        self.index = torch.from_numpy(
            (begins[:, None] + np.minimum(column, lengths[:, None] - 1)).ravel()
        )  # (n * L,)
        self.there, self.padding = (
            (None, None) if there.all() else map(torch.from_numpy, map(np.flatnonzero, (there, ~there)))
        )
        self.tokens = self.index if self.there is None else self.index[self.there]

    def take(self, x):
        """x (1, H, T, D) or (1, H, T) -> (n, H, L, D) or (n, H, L). Padding repeats a segment's last token."""
        if self.slice:
            return x[0, :, self.slice].unflatten(1, self.shape).transpose(0, 1)
        return x[0].transpose(0, 1)[self.index].unflatten(0, self.shape).transpose(1, 2)

    def put(self, x, into):
        """The other way, without the padding."""
        if self.slice:
            into[0, :, self.slice].unflatten(1, self.shape).copy_(x.transpose(0, 1))
            return
        x = x.transpose(1, 2).flatten(0, 1)
        into[0].transpose(0, 1)[self.tokens] = x if self.there is None else x[self.there]


def attend(q, k, v, segments: Segments) -> torch.Tensor:
    """q (1, H, T, D), k and v (1, G, T, D) -> (1, H, T, D). H / G query heads share a key head."""
    if uses_triton(q) or q.device.type == "cpu":
        return Attend.apply(q, k, v, segments)
    return attend_dense(q, k, v, segments)


def attend_dense(q, k, v, segments):
    """`attend` with a mask of (T, T) booleans."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=segments.mask(), enable_gqa=q.shape[1] != k.shape[1]
    )


class Attend(torch.autograd.Function):
    """Saved: q, k, v, the output, and the logarithm of each softmax's sum, (1, H, T) float32."""

    @staticmethod
    def forward(ctx, q, k, v, segments):
        if segments.kept:
            y, lse = segments.kept.pop()
        else:
            _, H, T, D = q.shape
            y = q.new_empty(1, T, H, D).transpose(1, 2)
            lse = torch.empty(
                1, H, T, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
            )
            (flash.forward if uses_triton(q) else forward_parts)(q, k, v, y, lse, segments)
            if segments.kept is not None:
                segments.kept.append((y, lse))
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.segments = segments
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))
        (flash.backward if uses_triton(q) else backward_parts)(
            dy, q, k, v, y, lse, dq, dk, dv, ctx.segments
        )
        return dq, dk, dv, None


def forward_parts(q, k, v, y, lse, segments):
    """Fill y (1, H, T, D) and lse (1, H, T)."""
    for batch in segments.batches:
        part, part_lse = forward_part(*(batch.take(x) for x in (q, k, v)), 0.0, True)
        batch.put(part, y)
        batch.put(part_lse, lse)
    for begin, middle, end in segments.groups:
        if middle == end:
            continue
        prompt, own = slice(begin, middle), slice(middle, end)
        part, part_lse = forward_part(q[:, :, own], k[:, :, prompt], v[:, :, prompt])
        share = torch.sigmoid(part_lse - lse[:, :, own])[..., None].to(y.dtype)  # of the prompt
        y[:, :, own].lerp_(part, share)
        torch.logaddexp(lse[:, :, own], part_lse, out=lse[:, :, own])


def backward_parts(dy, q, k, v, y, lse, dq, dk, dv, segments):
    """Fill dq (1, H, T, D), dk and dv (1, G, T, D). Every token is in one segment."""
    for batch in segments.batches:
        given = [batch.take(x) for x in (dy, q, k, v, y, lse)]
        if batch.padding is not None:
            given[0].transpose(1, 2).flatten(0, 1)[batch.padding] = 0  # a view: `take` made a copy
        for gradient, part in zip((dq, dk, dv), backward_part(*given, 0.0, True), strict=True):
            batch.put(part, gradient)
    for begin, middle, end in segments.groups:
        if middle == end:
            continue
        prompt, own = slice(begin, middle), slice(middle, end)
        given = (
            dy[:, :, own],
            q[:, :, own],
            k[:, :, prompt],
            v[:, :, prompt],
            y[:, :, own],
            lse[:, :, own],
        )
        parts = backward_part(*given, 0.0, False)
        for gradient, tokens, part in zip((dq, dk, dv), (own, prompt, prompt), parts, strict=True):
            gradient[:, :, tokens] += part
