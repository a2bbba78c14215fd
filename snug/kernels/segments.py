"""Attention of packed groups: a prompt and its k completions in one row, without padding and with the prompt once.

    Segments   which tokens of the row see which
    attend     attention by them, differentiable: Triton kernels on CUDA (flash.py), a few calls of PyTorch's attention
               on a CPU, and F.scaled_dot_product_attention with a dense mask elsewhere and for windows on a CPU, group
               by group. The last is the others' oracle, and attention without segments.

On a CPU a completion's attention has two parts: to its prompt and to itself. Each part is a softmax by itself; the
logarithms of their sums tell how to join them. Backward is exact for each part if it gets the joint output and the
joint log-sum: a probability is exp(score - joint log-sum), whatever the other part holds.

A window limits how many tokens a token sees, itself included.

Left out: prompts that share a beginning, and decoding (snug/decoding/attention.py). Test: pytest tests/test_segments.py
"""

from copy import copy
from functools import cached_property

import numpy as np
import torch

from snug.device.kinds import kind_of, upload, wide
from snug.kernels import flash, uses_triton
from snug.kernels.flash import TILE
from snug.shape import CONVOLUTION

cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ALONE = 256  # tokens; longer segments are not copied into a batch
SIMILAR = 0.75  # segments of a batch have at least this share of the longest one's tokens
MANY = 4  # neighbours of the same length; they are a batch without a copy


class Segments:
    """Which token sees which in a row of T tokens: groups, each a prompt and then its completions.

    A token sees its group's prompt, and its segment up to itself. A prompt with one completion is one segment. Two
    groups, (a b | x y | z) and (c | u):

        token    a b x y z c u      segments begin at 0 2 4 5
        start    0 0 2 2 4 5 5      where the token's segment begins
        groups   (0, 2, 5), (5, 7, 7)     a prompt's first token, its completions' first token, and the group's end
    """

    def __init__(self, groups: list[tuple[int, list[int]]], device="cpu"):
        """groups: (length of the prompt, [lengths of its completions, perhaps 0]). A prompt has at least one token."""
        self.groups = []
        lengths, prompts = [], []
        end = 0
        for prompt, completions in groups:
            if len(completions) == 1:
                prompt, completions = prompt + completions[0], []
            begin, middle = end, end + prompt
            end = middle + sum(completions)
            self.groups.append((begin, middle, end))
            prompts += [len(lengths)] * (1 + len(completions))
            lengths += [prompt, *completions]
        # The prompt and the completions of each group that has both apart.
        self.parts = [
            (slice(begin, middle), slice(middle, end))
            for begin, middle, end in self.groups
            if middle < end
        ]
        self.lengths = np.array(lengths)
        self.prompt = np.array(prompts)  # of each segment; a prompt's is itself
        self.ends = self.lengths.cumsum()
        self.begins = self.ends - self.lengths
        self.start = self.begins.repeat(self.lengths)  # (T,): where each token's segment begins
        # The most tokens that one token sees, itself included.
        self.longest = max(prompt + max(completions, default=0) for prompt, completions in groups)
        self.device = torch.device(device)
        self.kept = None

    @cached_property
    def positions(self) -> torch.Tensor:
        """(T,): each token's place in its sequence. A completion goes on behind its prompt."""
        position = np.arange(len(self.start)) - self.start
        for begin, middle, end in self.groups:
            position[middle:end] += middle - begin
        return torch.from_numpy(position).to(self.device)

    def tiles(self):
        """-> (n, 5): tiles of at most TILE tokens, for the kernels' programs. A tile is of one prompt, or of the
        completions of one group.

        Columns: its first token, its end, first token and end of the prompt that it sees (0, 0 for a prompt's tile),
        and the end of the tokens that see it. Prompts come first, because the most tokens see them.
        """
        prompts, completions = [], []
        for begin, middle, end in self.groups:
            for first in range(begin, middle, TILE):
                prompts.append((first, min(first + TILE, middle), 0, 0, end))
            for first in range(middle, end, TILE):
                last = min(first + TILE, end)
                completions.append(
                    (first, last, begin, middle, self.ends[np.searchsorted(self.ends, last)])
                )
        return np.array(prompts + completions)

    def mask(self, window=0):
        """-> (T, T) boolean: True where the row's token sees the column's token."""
        token = np.arange(len(self.start))
        sees = (token >= self.start[:, None]) & (token <= token[:, None])
        for begin, middle, end in self.groups:
            sees[middle:end, begin:middle] = True
        sees = torch.from_numpy(sees).to(self.device)
        return sees & in_window(self.positions, self.positions, window) if window else sees

    @cached_property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`start` and `tiles` on the device."""
        return tuple(torch.from_numpy(table).to(self.device) for table in (self.start, self.tiles()))

    @cached_property
    def batches(self) -> list["Batch"]:
        """The segments in batches of about the same length."""
        batches = []
        for similar in similar_ones(self.lengths, self.lengths > 0, ALONE):
            n = len(similar)
            longest = self.lengths[similar[0]]
            gaps = np.flatnonzero(np.diff(self.begins[similar]) != longest) + 1
            neighbours = self.lengths[similar[-1]] == longest and MANY * (len(gaps) + 1) <= n
            for numbers in np.split(similar, gaps) if neighbours else [similar]:
                batches.append(Batch(self, numbers))
        return batches

    @cached_property
    def turns(self):
        """-> [(Batch, rows) of the prompts], [... of the completions], for layers with a state (snug/delta.py).

        rows (n,): which of the states at the prompts' ends, in the order of their batches, each segment begins with.
        Prompts have 0 there: they begin with the state 0."""
        follows = self.prompt != np.arange(len(self.prompt))
        row = np.zeros(len(follows), int)
        turns = []
        for chosen in (~follows, follows & (self.lengths > 0)):
            turn = []
            ended = []
            for batch in similar_ones(self.lengths, chosen):
                turn.append((Batch(self, batch), upload(row[self.prompt[batch]], self.device)))
                ended.extend(batch)
            row[ended] = range(len(ended))
            turns.append(turn)
        return turns

    @cached_property
    def earlier(self) -> torch.Tensor:
        """(CONVOLUTION, T): the places in the row of the tokens that a token's convolution sees; T if there is none.
        A completion's first tokens see the end of their prompt."""
        T = len(self.start)
        begin = self.begins[self.prompt].repeat(self.lengths)
        behind = self.ends[self.prompt].repeat(self.lengths)
        place = np.arange(T) - np.arange(CONVOLUTION)[::-1, None]
        jump = np.where(begin < self.start, behind - self.start, 0)
        place += np.where(place < self.start, jump, 0)
        return upload(np.where(place < begin, T, place), self.device)

    def keeping(self):
        """-> a copy that keeps what `attend` computes first, and returns it when a checkpointed block runs again."""
        segments = copy(self)
        segments.kept = []
        return segments


class Batch:
    """Segments of about the same length side by side, right-padded. Real tokens never attend to padding.

    Neighbours of the same length are a view of the row.
    """

    def __init__(self, segments, numbers):
        begins = segments.begins[numbers]
        lengths = segments.lengths[numbers]
        n = len(begins)
        longest = int(lengths.max())
        self.shape = n, longest
        begin = int(begins[0])
        self.slice = None
        if (begins == begin + longest * np.arange(n)).all() and (lengths == longest).all():
            self.slice = slice(begin, begin + n * longest)
        column = np.arange(longest)
        index = begins[:, None] + np.minimum(column, lengths[:, None] - 1)  # (n, L)
        real = (column < lengths[:, None]).ravel()
        # index: (n * L,)
        self.index, self.real, self.padding = (
            upload(x, segments.device)
            for x in (index.ravel(), np.flatnonzero(real), np.flatnonzero(~real))
        )
        self.tokens = self.index[self.real]

    def take(self, x):
        """x (1, H, T, D) or (1, H, T) -> (n, H, L, D) or (n, H, L). Padding is 0."""
        if self.slice:
            return x[0, :, self.slice].unflatten(1, self.shape).transpose(0, 1)
        x = x[0].transpose(0, 1)[self.index]
        x[self.padding] = 0
        return x.unflatten(0, self.shape).transpose(1, 2)

    def put(self, x, row):
        """Write x (n, H, L, D) or (n, H, L) back to row (1, H, T, D) or (1, H, T), without the padding."""
        if self.slice:
            row[0, :, self.slice].unflatten(1, self.shape).copy_(x.transpose(0, 1))
        else:
            row[0].transpose(0, 1)[self.tokens] = x.transpose(1, 2).flatten(0, 1)[self.real]


def similar_ones(lengths, chosen, alone=np.inf):
    """Yield numbers of the chosen segments, the longest first, in batches of SIMILAR lengths."""
    order = np.argsort(-lengths, kind="stable")
    order = order[chosen[order]]
    while len(order):
        longest = lengths[order[0]]
        n = np.count_nonzero(lengths[order] >= SIMILAR * longest) if longest <= alone else 1
        yield order[:n]
        order = order[n:]


def in_window(queries, keys, window):
    """Positions of queries (M,) and of keys (N,) -> (M, N) boolean: True where the query may see the key."""
    age = queries[:, None] - keys
    return (age >= 0) & (age < window)


def attend(q, k, v, mask=None, window=0):
    """q (B, H, T, D), k and v (B, G, T, D) -> (B, H, T, D). H / G query heads share a key head.

    mask: Segments (B = 1), or booleans, broadcast to (B, H, T, T). Default: causal. Right padding needs no mask: a
    causal row never sees what comes after it.
    window: how many tokens a token sees, itself included; 0: all. Of other masks than Segments, neighbours in a row
    have neighbouring positions.
    """
    T = q.shape[2]
    if isinstance(mask, Segments):
        if window >= mask.longest:
            window = 0
        if uses_triton(q, "attention") or kind_of(q) == "cpu" and not window:
            return Attend.apply(q, k, v, mask, window)
        # Group by group, because attention keeps its scores for backward: no group's for another
        sees, rows = mask.mask(window), [slice(begin, end) for begin, _, end in mask.groups]
        parts = [attend(*(x[:, :, row] for x in (q, k, v)), sees[row, row]) for row in rows]
        return torch.cat(parts, 2)
    if 0 < window < T:
        position = torch.arange(T, device=q.device)
        band = in_window(position, position, window)
        mask = band if mask is None else mask & band
    grouped = q.shape[1] != k.shape[1]
    if grouped and kind_of(q) == "cuda" and (q.dtype == torch.float32 or mask is not None):
        # In float32, or with a mask, CUDA's fused attention does not share heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


class Attend(torch.autograd.Function):
    """Saved: q, k, v, the output, and the logarithm of each softmax's sum, (1, H, T) float32."""

    @staticmethod
    def forward(ctx, q, k, v, segments, window):
        if segments.kept:
            y, lse = segments.kept.pop()
        else:
            _, H, T, D = q.shape
            y = q.new_empty(1, T, H, D).transpose(1, 2)
            lse = q.new_empty(1, H, T, dtype=wide(q.dtype))
            fill = flash.forward if uses_triton(q, "attention") else forward_torch
            fill(q, k, v, y, lse, segments, window)
            if segments.kept is not None:
                segments.kept.append((y, lse))
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.segments, ctx.window = segments, window
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        _, _, T, D = q.shape
        dq, dk, dv = (x.new_empty(1, T, x.shape[1], D).transpose(1, 2) for x in (q, k, v))
        fill = flash.backward if uses_triton(q, "attention") else backward_torch
        fill(dy, q, k, v, y, lse, dq, dk, dv, ctx.segments, ctx.window)
        return dq, dk, dv, None, None


def forward_torch(q, k, v, y, lse, segments, _):
    """Fill y (1, H, T, D) and lse (1, H, T)."""
    for batch in segments.batches:
        inputs = [batch.take(x) for x in (q, k, v)]
        y_batch, lse_batch = cpu_attention(*inputs, is_causal=True)
        batch.put(y_batch, y)
        batch.put(lse_batch, lse)
    for prompt, completions in segments.parts:
        y_prompt, lse_prompt = cpu_attention(q[:, :, completions], k[:, :, prompt], v[:, :, prompt])
        lse_own = lse[:, :, completions]
        share = torch.sigmoid(lse_prompt - lse_own)[..., None].to(y.dtype)  # of the prompt
        y[:, :, completions].lerp_(y_prompt, share)
        torch.logaddexp(lse_own, lse_prompt, out=lse_own)


def backward_torch(dy, q, k, v, y, lse, dq, dk, dv, segments, _):
    """Fill dq (1, H, T, D), dk and dv (1, G, T, D)."""
    for batch in segments.batches:  # every token is in one batch
        inputs = [batch.take(x) for x in (dy, q, k, v, y, lse)]
        gradients = cpu_attention_backward(*inputs, 0.0, is_causal=True)
        for gradient, row in zip(gradients, (dq, dk, dv), strict=True):
            batch.put(gradient, row)
    for prompt, completions in segments.parts:
        # of completions' queries for their prompt's keys
        dy_own, q_own, y_own, lse_own = (x[:, :, completions] for x in (dy, q, y, lse))
        inputs = dy_own, q_own, k[:, :, prompt], v[:, :, prompt], y_own, lse_own
        gradients = cpu_attention_backward(*inputs, 0.0, is_causal=False)
        places = (dq, completions), (dk, prompt), (dv, prompt)
        for gradient, (row, tokens) in zip(gradients, places, strict=True):
            row[:, :, tokens] += gradient
