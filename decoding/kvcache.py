"""Keys and values of prompts and of their completions, and the attention of one new token a row to both.

A prompt is kept once, however many completions go on from it, and read for all of them together. Slots come and go: a row
that is over makes room for another, so rows of one step have different lengths and a group's need not be neighbours.

On CUDA four Triton kernels a layer: positions and cache, prompts, own tokens, the two together. A row's own length is read on the
device, so that a CUDA graph of a step serves all of them. Elsewhere plain torch, which is the kernels' oracle.

Left out: pages (a slot is as long as the longest completion may be), sliding windows, quantised caches.
Test: pytest tests/test_kvcache.py, and tests/test_kernels.py for the kernels.
"""

import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from decoding.attention import (
    column_block,
    join_kernel,
    own_kernel,
    place_kernel,
    prompt_kernel,
    query_tile,
    split_columns,
)
from logprobs.kernels import LOG2E, nothing_to_do, triton, uses_triton
from model import rotate


class KVCache:
    """Keys and values. G is n_kv_head, D head_size.

    prompt (n_layer, 2, places, G, T_p, D)  a prompt a place, right-padded
    own    (n_layer, 2, slots, G, T_c, D)   a completion a slot; column t is its t-th token

    Slots 0 .. n - 1 are in use. Slot s reads the prompt at `place[s]` and its own columns 0 .. t[s]. Two places, four slots:

        place 0: a b c   slots 0, 2: x y . .   t = 1
        place 1: d e .   slots 1, 3: z . . .   t = 0

    Prompts: `begin_prompts`, then a forward, whose layers call `fill`. Whenever slots came, went or moved: `begin_rows`. A
    step: `begin_step`, then a forward, whose layers call `attend`, which writes column t[s] of each slot.

    `own` is a view of `storage`, and where each slot has a prompt of its own `prompt` is, too: it has the `behind` columns before.
    """

    def __init__(self, config, places, prompt_width, slots, width, dtype, device, group_size=1):
        """places, prompt_width T_p, slots, width T_c: numbers. group_size: slots that read the same prompt, about."""
        self.config, self.dtype, self.device, self.group_size = config, dtype, torch.device(device), group_size
        shape = lambda rows, columns: (config.n_layer, 2, rows, config.n_kv_head, columns, config.head_size)  # noqa: E731
        new = partial(torch.empty, dtype=dtype, device=device)
        # Where each slot has a prompt of its own, its tokens lie right behind it, and plain torch can read both as one.
        together = group_size == 1 and places == slots and not uses_triton(new(0))
        self.behind = prompt_width if together else 0  # columns of a slot in `storage` before its own
        self.storage = new(shape(slots, self.behind + width))
        self.own = self.storage[..., self.behind :, :]
        self.prompt = (self.storage[..., :prompt_width, :] if together else new(shape(places, prompt_width))).zero_()
        self.prompt_lengths = torch.ones(places, dtype=torch.long, device=device)
        self.prompt_bias = torch.zeros(places, 1, 1, prompt_width, dtype=dtype, device=device)
        self.reach = prompt_width + width  # no position is as high
        self.written = 0  # the columns before this one are numbers, in every slot in use
        self.sorted = None
        self.filling = None  # places that prompts are on their way into
        self.ragged = False  # is a prompt shorter than T_p?

    def begin_prompts(self, places, lengths):
        """The next forward's prompts go to these places: both lists of numbers."""
        self.filling = torch.tensor(places, device=self.device)
        self.ragged |= min(lengths) < self.prompt.shape[4]
        lengths = torch.tensor(lengths, device=self.device)
        self.prompt_lengths[self.filling] = lengths
        padding = torch.arange(self.prompt.shape[4], device=self.device) >= lengths[:, None]
        self.prompt_bias[self.filling] = torch.zeros_like(padding, dtype=self.dtype).masked_fill_(padding, -math.inf)[
            :, None, None
        ]

    def fill(self, layer, k, v):
        """k, v (P, G, T, D) of the prompts, T at most T_p."""
        for part, values in enumerate((k, v)):
            self.prompt[layer, part].narrow(2, 0, values.shape[2])[self.filling] = values.to(self.dtype)

    def keep(self, slots, places, columns):
        """Only these slots and places, arrays of rising numbers; they become 0, 1, 2 ... columns: how many of a slot are in use."""
        slots, places = (torch.tensor(numbers, device=self.device) for numbers in (slots, places))
        for layer in range(len(self.own)):  # a layer at a time: the copy that indexing makes is small
            for own, prompt in zip(self.own[layer], self.prompt[layer], strict=True):
                own[: len(slots), :, :columns] = own[slots, :, :columns]
                if len(places) < len(prompt):
                    prompt[: len(places)] = prompt[places]
        self.prompt = self.prompt[:, :, : len(places)]
        self.prompt_lengths, self.prompt_bias = self.prompt_lengths[places], self.prompt_bias[places]

    def begin_rows(self, place):
        """place: an array (n,), whose prompt each slot goes on from; -1 where nobody is.

        All slots of a place read its keys in one matmul: pairs (slot, head) are laid out in a rectangle (places, G, most),
        places from the first to the last in use, where `most` is the slots of the place that has the most. In the example
        above with one head:

            to_place 0 2 1 3   the slot of each entry; spare entries name slot 0 and are read by nobody
            to_row   0 2 1 3   the entry of each slot

        The kernels take `sorted`, slots by place and their places, instead: 0 2 1 3 and 0 0 1 1.
        """
        self.filling = None
        used = place >= 0
        first = place[used].min()
        if uses_triton(self.own):
            place = np.where(used, place, first)
            order = np.argsort(place, kind="stable")
            by_place = torch.tensor(np.stack([order, place[order]]), dtype=torch.int32, device=self.device)
            if self.sorted is None or len(place) != self.sorted.shape[1]:
                self.sorted = by_place
            else:
                self.sorted.copy_(by_place)  # a graph reads it where it is
            return
        G, n, slots = self.config.n_kv_head, len(place), np.flatnonzero(used)
        taken = place[slots] - first
        counts = np.bincount(taken)
        most, order = counts.max(), np.argsort(taken, kind="stable")
        rank = np.empty_like(taken)  # of a slot among those of its place
        rank[order] = np.arange(len(taken)) - (counts.cumsum() - counts)[taken[order]]
        to_row, to_place = np.zeros((n, G), dtype=np.int64), np.zeros(len(counts) * G * most, dtype=np.int64)
        to_row[slots] = (taken[:, None] * G + np.arange(G)) * most + rank[:, None]
        to_place[to_row[slots]] = slots[:, None] * G + np.arange(G)
        self.places = slice(first, first + len(counts))
        self.to_row, self.to_place = (
            torch.tensor(numbers, device=self.device) for numbers in (to_row.ravel(), to_place)
        )
        self.together = self.behind > 0 and np.array_equal(place[slots], slots)
        _, _, S, _, columns, _ = self.storage.shape  # as rows of D, a layer's first own columns are at
        self.first = (torch.arange(2 * S * G, device=self.device).view(2, S, G) * columns + self.behind)[:, :n]

    def begin_step(self, t, columns, even):
        """t (n,): the column that each slot writes now. columns: the largest of them plus one, or more, where somebody is.
        even: all are the same, also where nobody is any more."""
        self.t, self.columns, self.even = t, columns, even
        if uses_triton(self.own):
            return
        if not even and columns > self.written:  # what no row has written is read with weight 0, and 0 * NaN is NaN
            self.own[:, :, : len(t), :, self.written : columns + 15] = 0  # some columns at a time
            self.written = columns + 15
        self.written = max(self.written, columns)
        self.targets = (self.first + t[:, None]).view(-1)  # (2 * n * G,)
        if not even:
            later = torch.arange(columns, device=t.device) > t[:, None]  # (n, columns)
            bias = torch.zeros_like(later, dtype=self.dtype).masked_fill_(later, -math.inf)
            self.own_bias = bias.repeat_interleave(self.config.n_kv_head, 0)[:, None]  # (n * G, 1, columns)

    def attend(self, layer, q, k, v, rotary=None):
        """q (n, H, 1, D), k and v (n, G, 1, D) -> (n, H, 1, D): softmax over [prompt, own] in one go. rotary: cos, sin (n, 1, 1, D)."""
        if uses_triton(self.own):
            return self.attend_triton(layer, q, k, v, rotary)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        n, H, _, D = q.shape
        self.storage[layer].view(-1, D).index_copy_(0, self.targets, torch.stack([k, v]).view(-1, D).to(self.dtype))
        # Scores are not rounded to bfloat16, as they are not in the trainer's fused attention. Rounded, the sampler and the
        # trainer had a KL of up to 2.5e-4; now 1e-5.
        wide = torch.promote_types(self.dtype, torch.float32)
        with nullcontext() if wide == self.dtype else torch.autocast(q.device.type, enabled=False):
            q = (
                q.reshape(-1, H // self.config.n_kv_head, D).to(wide) * D**-0.5
            )  # (n * G, R, D): R query heads share a key head
            y = self.attend_together(layer, q) if self.together else self.attend_apart(layer, q)
        return y.view(n, H, 1, D).to(self.dtype)

    def attend_apart(self, layer, q):
        """q (n * G, R, D) -> the same."""
        (_, R, D), prompt = q.shape, self.prompt[layer, :, self.places]
        P, G, T_p, _ = prompt.shape[1:]
        own_k, own_v = (
            self.own[layer, :, : len(self.t), :, : self.columns].flatten(1, 2).to(q.dtype)
        )  # (n * G, columns, D) each
        prompt_k, prompt_v = prompt.flatten(1, 2).to(q.dtype)  # (P * G, T_p, D) each
        to_own = q @ own_k.mT  # (n * G, R, columns)
        if not self.even:
            to_own += self.own_bias
        to_prompt = q[self.to_place].view(P * G, -1, D) @ prompt_k.mT  # (P * G, most * R, T_p)
        if self.ragged:
            to_prompt.view(P, -1, T_p).add_(self.prompt_bias[self.places, 0])
        weights = torch.softmax(torch.cat([to_prompt.view(-1, R, T_p)[self.to_row], to_own], -1), -1)
        from_prompt = weights[..., :T_p][self.to_place].view(P * G, -1, T_p) @ prompt_v  # (P * G, most * R, D)
        return torch.baddbmm(from_prompt.view(-1, R, D)[self.to_row], weights[..., T_p:], own_v)

    def attend_together(self, layer, q):
        """q (n * G, R, D) -> the same, where slot s reads place s and its own columns right behind: one matmul for both."""
        T_p, n = self.behind, len(self.t)
        k, v = (
            self.storage[layer, :, :n, :, : T_p + self.columns].flatten(1, 2).to(q.dtype)
        )  # (n * G, T_p + columns, D) each
        scores = q @ k.mT
        if self.ragged:
            scores.view(n, -1, k.shape[1])[..., :T_p].add_(self.prompt_bias[:n, 0])
        if not self.even:
            scores[..., T_p:].add_(self.own_bias)
        return torch.softmax(scores, -1) @ v

    def attend_triton(self, layer, q, k, v, rotary):
        """`attend` by four kernels; all they write to is made here."""
        (n, H, _, D), G = q.shape, self.config.n_kv_head
        T_p, T_c = self.prompt.shape[4], self.own.shape[4]
        R, DP = H // G, triton.next_power_of_2(max(16, D))
        M, tile = query_tile(R, self.group_size)
        tiles, block = -(-n // tile), column_block(DP, self.dtype.itemsize)
        (before, chunk), (splits, own_chunk) = split_columns(T_p, tiles * G, block), split_columns(T_c, n * G, block)
        new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)  # noqa: E731
        parts, tops, totals = new(before + splits, n, H, D), new(before + splits, n, H), new(before + splits, n, H)
        turned_q, y = (torch.empty(n, H, 1, D, dtype=self.dtype, device=q.device) for _ in range(2))
        if nothing_to_do(q):
            return y
        (own_k, own_v), (prompt_k, prompt_v) = self.own[layer], self.prompt[layer]
        cos, sin = (q, q) if rotary is None else rotary
        scale = D**-0.5 * LOG2E.value
        strides = [x.stride(i) for x in (q, k, v) for i in (0, 1)]
        with torch.cuda.device_of(q):
            place_kernel[(n, H + 2 * G)](
                q,
                k,
                v,
                cos,
                sin,
                turned_q,
                own_k,
                own_v,
                self.t,
                *strides,
                T_c,
                H,
                G,
                D,
                DP=DP,
                ROTARY=rotary is not None,
                num_warps=1,
            )
            sizes = T_p, H, G, D, chunk
            prompt_kernel[(tiles, G, before)](
                turned_q, prompt_k, prompt_v, *self.sorted, self.prompt_lengths, parts, tops, totals, scale, n, *sizes,
                R=R, TILE=tile, M=M, N=block, DP=DP,
            )  # fmt: skip
            sizes = T_c, H, G, D, own_chunk, before
            M = max(16, triton.next_power_of_2(R))
            own_kernel[(n, G, splits)](
                turned_q, own_k, own_v, self.t, parts, tops, totals, scale, n, *sizes, R=R, M=M, N=block, DP=DP
            )  # fmt: skip
            join_kernel[(n * H,)](parts, tops, totals, y, n * H, D, SPLITS=before + splits, DP=DP, num_warps=1)
        return y
