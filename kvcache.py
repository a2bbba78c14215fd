"""Keys and values of prompts and of their completions, and the attention of one new token a row to both.

A prompt is kept once, however many completions go on from it, and read for all of them together. Slots come and go: a row
that is over makes room for another, so rows of one step have different lengths and a group's need not be neighbours.

Left out: pages (a slot is as long as the longest completion may be), sliding windows, quantised caches.
"""

import math

import numpy as np
import torch


class KVCache:
    """Two tensors. G is n_kv_head, D head_size.

    prompt (n_layer, 2, places, G, T_p, D)  a prompt a place, right-padded
    own    (n_layer, 2, slots, G, T_c, D)   a completion a slot; column t is its t-th token

    Slots 0 .. n - 1 are in use. Slot s reads the prompt at `place[s]` and its own columns 0 .. t[s]. Two places, four slots:

        place 0: a b c   slots 0, 2: x y . .   t = 1
        place 1: d e .   slots 1, 3: z . . .   t = 0

    Prompts: `begin_prompts`, then a forward, whose layers call `fill`. Whenever slots came, went or moved: `begin_rows`. A
    step: `begin_step`, then a forward, whose layers call `attend`, which writes column t[s] of each slot.
    """

    def __init__(self, config, places, prompt_width, slots, width, dtype, device):
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        shape = lambda rows, columns: (config.n_layer, 2, rows, config.n_kv_head, columns, config.head_size)  # noqa: E731
        self.prompt = torch.zeros(shape(places, prompt_width), dtype=dtype, device=device)
        self.prompt_lengths = torch.ones(places, dtype=torch.long, device=device)
        self.prompt_bias = torch.zeros(places, 1, 1, prompt_width, dtype=dtype, device=device)
        self.own = torch.empty(shape(slots, width), dtype=dtype, device=device)
        self.written = 0  # columns of the slots in use
        self.filling = None  # places that prompts are on their way into
        self.ragged = False  # is a prompt shorter than T_p?

    def begin_prompts(self, places, lengths):
        """The next forward's prompts go to these places: both lists of numbers."""
        self.filling = torch.tensor(places, device=self.device)
        self.ragged |= min(lengths) < self.prompt.shape[4]
        lengths = torch.tensor(lengths, device=self.device)
        self.prompt_lengths[self.filling] = lengths
        padding = torch.arange(self.prompt.shape[4], device=self.device) >= lengths[:, None]
        self.prompt_bias[self.filling] = torch.zeros_like(padding, dtype=self.dtype).masked_fill_(padding, -math.inf)[:, None, None]

    def fill(self, layer, k, v):
        """k, v (P, G, T, D) of the prompts, T at most T_p."""
        for part, values in enumerate((k, v)):
            self.prompt[layer, part].narrow(2, 0, values.shape[2])[self.filling] = values

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
        """place: an array (n,), whose prompt each slot goes on from.

        All slots of a place read its keys in one matmul: pairs (slot, head) are laid out in a rectangle (places, G, most),
        where `most` is the slots of the place that has the most. In the example above with one head:

            to_place 0 2 1 3   the slot of each entry; spare entries name slot 0 and are read by nobody
            to_row   0 2 1 3   the entry of each slot
        """
        G, P, n = self.config.n_kv_head, self.prompt.shape[2], len(place)
        self.filling = None
        counts = np.bincount(place, minlength=P)
        most, order = counts.max(), np.argsort(place, kind="stable")
        rank = np.empty(n, dtype=np.int64)  # of a slot among those of its place
        rank[order] = np.arange(n) - (counts.cumsum() - counts)[place[order]]
        heads = np.arange(G)
        to_row = ((place[:, None] * G + heads) * most + rank[:, None]).ravel()
        to_place = np.zeros(P * G * most, dtype=np.int64)
        to_place[to_row] = np.arange(n * G)
        self.neat = np.array_equal(to_row, np.arange(P * G * most))  # nothing to rearrange, as with one completion a prompt
        self.to_row, self.to_place = (torch.tensor(numbers, device=self.device) for numbers in (to_row, to_place))
        _, _, S, _, T_c, _ = self.own.shape
        first = torch.arange(2 * S * G, device=self.device).view(2, S, G) * T_c  # a slot's column 0, in `own[layer]` as rows of D
        self.first = first[:, :n]

    def begin_step(self, t, columns, even):
        """t (n,): the column that each slot writes now. columns: the largest of them plus one, or more. even: all are the same."""
        self.columns, self.even = columns, even
        if not even and columns > self.written:  # what no row has written is read with weight 0, and 0 * NaN is NaN
            self.own[:, :, : len(t), :, self.written : columns + 15] = 0  # some columns at a time
            self.written = columns + 15
        self.written = max(self.written, columns)
        self.targets = (self.first + t[:, None]).view(-1)  # (2 * n * G,)
        if not even:
            later = torch.arange(columns, device=t.device) > t[:, None]  # (n, columns)
            bias = torch.zeros_like(later, dtype=self.dtype).masked_fill_(later, -math.inf)
            self.own_bias = bias.repeat_interleave(self.config.n_kv_head, 0)[:, None]  # (n * G, 1, columns)

    def attend(self, layer, q, k, v):
        """q (n, H, 1, D), k and v (n, G, 1, D) -> (n, H, 1, D): softmax over [prompt, own] in one go."""
        n, H, _, D = q.shape
        P, G, T_p = self.prompt.shape[2:5]
        R = H // G  # query heads that share a key head
        self.own[layer].view(-1, D).index_copy_(0, self.targets, torch.stack([k, v]).view(-1, D).to(self.dtype))
        own_k, own_v = self.own[layer, :, :n, :, : self.columns].flatten(1, 2)  # (n * G, columns, D) each
        prompt_k, prompt_v = self.prompt[layer].flatten(1, 2)  # (P * G, T_p, D) each
        rearranged = (lambda x, index: x) if self.neat else (lambda x, index: x[index])
        q = q.reshape(n * G, R, D) * D**-0.5
        to_own = q @ own_k.mT  # (n * G, R, columns)
        if not self.even:
            to_own += self.own_bias
        to_prompt = rearranged(q, self.to_place).view(P * G, -1, D) @ prompt_k.mT  # (P * G, most * R, T_p)
        if self.ragged:
            to_prompt.view(P, -1, T_p).add_(self.prompt_bias[:, 0])
        weights = torch.softmax(torch.cat([rearranged(to_prompt.view(-1, R, T_p), self.to_row), to_own], -1), -1)
        from_prompt = rearranged(weights[..., :T_p], self.to_place).reshape(P * G, -1, T_p) @ prompt_v  # (P * G, most * R, D)
        y = torch.baddbmm(rearranged(from_prompt.view(-1, R, D), self.to_row), weights[..., T_p:], own_v)
        return y.view(n, H, 1, D)
