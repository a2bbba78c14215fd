"""Keys and values of prompts and of their completions, and the attention of one new token a row to both.

A prompt is stored once, however many completions share it, and a step reads it for all of them together. A finished row
gives its slot to another row, so the rows of one step have different lengths, and the rows of a group need not be
neighbours.

On CUDA a layer takes one Triton kernel (attention.py): it rotates, writes to the cache and attends. It reads each row's
length on the device, so one CUDA graph serves every step. Elsewhere plain torch, which is its oracle.

Left out: paging (a slot is as long as the longest completion may be), sliding windows, quantised caches.
Test: pytest tests/test_kvcache.py, and tests/test_kernels.py for the kernels.
"""

import math
from contextlib import nullcontext

import numpy as np
import torch

from decoding import attention
from device.cuda import upload
from kernels import LOG2_OF_E, nothing_to_do, uses_triton
from kernels.rotary import rotate
from model import GPTConfig


class KVCache:
    """Keys and values. G is n_kv_head, H n_head, R = H / G, D head_size.

    prompt (n_layer, 2, prompt slots, G, T_p, D)   a prompt a slot, right-padded
    own    (n_layer, 2, slots, G, T_c, D)          a completion a slot; column t is its t-th token

    Slot s reads prompt slot `prompt_slot[s]` and its own columns 0 .. t[s]. Two prompt slots, four slots:

        prompt slot 0: a b c   slots 0, 2: x y . .   t = 1
        prompt slot 1: d e .   slots 1, 3: z . . .   t = 0

    Prefill: `begin_prefill`, then a forward, whose layers call `write_prompts`. After slots were given to rows, freed
    or moved: `assign`. A step: `begin_step`, then a forward, whose layers call `attend`, which writes column t[s] of
    each slot.
    """

    def __init__(
        self, config: GPTConfig, prompt_slots: int, prompt_width: int, slots: int, width: int,
        dtype: torch.dtype, device: torch.device, group_size: int = 1,
    ):  # fmt: skip
        """prompt_width is T_p, width T_c. About group_size slots read the same prompt."""

        def new(rows, columns):
            shape = config.n_layer, 2, rows, config.n_kv_head, columns, config.head_size
            return torch.empty(shape, dtype=dtype, device=device)

        self.config, self.dtype, self.device, self.group_size = (
            config,
            dtype,
            torch.device(device),
            group_size,
        )
        # If every slot has its own prompt, own tokens lie right behind it in `storage`: plain torch reads both as one.
        like = torch.empty(0, dtype=dtype, device=device)
        behind = group_size == 1 and prompt_slots == slots and not uses_triton(like)
        self.own_column = (
            prompt_width if behind else 0
        )  # the column of `storage` where own tokens begin
        self.storage = new(slots, self.own_column + width)
        self.own = self.storage[..., self.own_column :, :]
        self.prompt = (
            self.storage[..., :prompt_width, :] if behind else new(prompt_slots, prompt_width)
        ).zero_()
        self.prompt_lengths = torch.ones(prompt_slots, dtype=torch.long, device=device)
        self.prompt_bias = torch.zeros(
            prompt_slots, 1, 1, prompt_width, dtype=dtype, device=device
        )  # -inf: padding
        self.max_length = prompt_width + width
        self.written = 0  # columns [0, written) are initialised in every active slot
        self.ragged = False  # is a prompt shorter than T_p?
        self.prefill_slots = (
            None  # (P,) the prompt slots that the next forward fills; None: it is a step
        )
        # For the kernel: attention.tiles_of, and how many parts of each query's softmax are there (attention.join).
        self.tiles = None
        self.counters = torch.zeros(slots, config.n_head, dtype=torch.int32, device=device)

    def begin_prefill(self, prompt_slots: list[int], lengths: list[int]):
        """The next forward's prompts, of these lengths, go to these prompt slots."""
        self.prefill_slots = upload(prompt_slots, self.device)
        self.ragged |= min(lengths) < self.prompt.shape[4]
        lengths = upload(lengths, self.device)
        self.prompt_lengths[self.prefill_slots] = lengths
        padding = torch.arange(self.prompt.shape[4], device=self.device) >= lengths[:, None]  # (P, T_p)
        bias = torch.zeros_like(padding, dtype=self.dtype).masked_fill_(padding, -math.inf)
        self.prompt_bias[self.prefill_slots] = bias[:, None, None]

    def write_prompts(self, layer: int, k, v):
        """k, v (P, G, T, D) of the prompts, T at most T_p."""
        for part, values in enumerate((k, v)):
            self.prompt[layer, part].narrow(2, 0, values.shape[2])[self.prefill_slots] = values.to(
                self.dtype
            )

    def compact(self, slots: np.ndarray, prompt_slots: np.ndarray, columns: int):
        """Keep only these slots and prompt slots, rising numbers, as 0, 1, 2 ... columns: own columns in use."""
        slots, prompt_slots = (upload(numbers, self.device) for numbers in (slots, prompt_slots))
        for layer in range(len(self.own)):  # indexing makes a copy, here of one layer
            for own, prompt in zip(self.own[layer], self.prompt[layer], strict=True):
                own[: len(slots), :, :columns] = own[slots, :, :columns]
                if len(prompt_slots) < len(prompt):
                    prompt[: len(prompt_slots)] = prompt[prompt_slots]
        self.prompt = self.prompt[:, :, : len(prompt_slots)]
        self.prompt_lengths, self.prompt_bias = (
            self.prompt_lengths[prompt_slots],
            self.prompt_bias[prompt_slots],
        )

    def assign(self, prompt_slot: np.ndarray):
        """prompt_slot (n,): the prompt slot that each slot reads; -1: the slot is idle.

        Plain torch multiplies a prompt's keys by all queries that read it in one matmul. The queries, pairs (slot, key
        head), are laid out in a rectangle (prompt slots, G, most): the prompt slots from the first to the last in use,
        and `most` is the largest number of slots that share one. In the example above with one head:

            pair_of_entry 0 2 1 3   the slot of each entry; spare entries name slot 0, and their results are not read
            entry_of_pair 0 2 1 3   the entry of each slot

        The kernel takes `tiles` instead (attention.tiles_of); there an idle slot reads a prompt too.
        """
        self.prefill_slots = None
        active = prompt_slot >= 0
        first = prompt_slot[active].min()
        if uses_triton(self.own):
            readers = np.where(active, prompt_slot, first)
            table = attention.tiles_of(readers, self.prompt.shape[2], self.kernel_shape()["TILE"])
            table = upload(table, self.device, torch.int32)
            if self.tiles is None or table.shape != self.tiles.shape:
                self.tiles = table
            else:
                self.tiles.copy_(table)  # in place: a CUDA graph reads this address
            return
        G, n, slots = self.config.n_kv_head, len(prompt_slot), np.flatnonzero(active)
        line = prompt_slot[slots] - first  # of the rectangle
        counts = np.bincount(line)
        most, order = counts.max(), np.argsort(line, kind="stable")
        rank = np.empty_like(line)  # of a slot among those that share its prompt slot
        rank[order] = np.arange(len(line)) - (counts.cumsum() - counts)[line[order]]
        entry_of_pair = np.zeros((n, G), dtype=np.int64)
        pair_of_entry = np.zeros(len(counts) * G * most, dtype=np.int64)
        entry_of_pair[slots] = (line[:, None] * G + np.arange(G)) * most + rank[:, None]
        pair_of_entry[entry_of_pair[slots]] = slots[:, None] * G + np.arange(G)
        self.entry_of_pair = torch.tensor(entry_of_pair.ravel(), device=self.device)
        self.pair_of_entry = torch.tensor(pair_of_entry, device=self.device)
        self.prompts_in_use = slice(first, first + len(counts))
        self.together = self.own_column > 0 and np.array_equal(prompt_slot[slots], slots)
        # With a layer's storage as a matrix of rows of D: the row of each slot's first own column.
        _, _, S, _, columns, _ = self.storage.shape
        starts = torch.arange(2 * S * G, device=self.device).view(2, S, G) * columns + self.own_column
        self.own_starts = starts[:, :n]  # (2, n, G)

    def begin_step(self, t: torch.Tensor, columns: int, same_t: bool):
        """t (n,): the column that each slot writes now. columns: at least 1 + the largest t of an active slot.
        same_t: t is the same in all slots, idle ones too."""
        self.t, self.columns, self.same_t = t, columns, same_t
        if uses_triton(self.own):
            return
        if not same_t and columns > self.written:
            # Columns beyond a row's own t are read with weight 0, and 0 * NaN is NaN. Zero some columns at a time.
            self.own[:, :, : len(t), :, self.written : columns + 15] = 0
            self.written = columns + 15
        self.written = max(self.written, columns)
        self.write_at = (self.own_starts + t[:, None]).view(-1)  # (2 * n * G,)
        if not same_t:
            later = torch.arange(columns, device=t.device) > t[:, None]  # (n, columns)
            bias = torch.zeros_like(later, dtype=self.dtype).masked_fill_(later, -math.inf)
            self.own_bias = bias.repeat_interleave(self.config.n_kv_head, 0)[
                :, None
            ]  # (n * G, 1, columns)

    def attend(self, layer: int, q, k, v, rotary=None) -> torch.Tensor:
        """q (n, H, 1, D), k and v (n, G, 1, D), rotary's cos and sin (n, 1, 1, D) -> (n, H, 1, D).

        One softmax over [prompt, own]."""
        if uses_triton(self.own):
            return self.attend_triton(layer, q, k, v, rotary)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        n, H, _, D = q.shape
        self.storage[layer].view(-1, D).index_copy_(
            0, self.write_at, torch.stack([k, v]).view(-1, D).to(self.dtype)
        )
        # Scores in float32, as in the trainer's attention: the KL to the trainer is 1e-5. In bfloat16 it was 2.5e-4.
        wide = torch.promote_types(self.dtype, torch.float32)
        with nullcontext() if wide == self.dtype else torch.autocast(q.device.type, enabled=False):
            q = q.reshape(-1, H // self.config.n_kv_head, D).to(wide) * D**-0.5  # (n * G, R, D)
            y = self.attend_together(layer, q) if self.together else self.attend_apart(layer, q)
        return y.view(n, H, 1, D).to(self.dtype)

    def attend_apart(self, layer: int, q):
        """q (n * G, R, D) -> the same."""
        (_, R, D), prompt = q.shape, self.prompt[layer, :, self.prompts_in_use]
        P, G, T_p, _ = prompt.shape[1:]
        own = self.own[layer, :, : len(self.t), :, : self.columns]
        own_k, own_v = own.flatten(1, 2).to(q.dtype)  # (n * G, columns, D) each
        prompt_k, prompt_v = prompt.flatten(1, 2).to(q.dtype)  # (P * G, T_p, D) each
        to_own = q @ own_k.mT  # (n * G, R, columns)
        if not self.same_t:
            to_own += self.own_bias
        to_prompt = q[self.pair_of_entry].view(P * G, -1, D) @ prompt_k.mT  # (P * G, most * R, T_p)
        if self.ragged:
            to_prompt.view(P, -1, T_p).add_(self.prompt_bias[self.prompts_in_use, 0])
        weights = torch.softmax(
            torch.cat([to_prompt.view(-1, R, T_p)[self.entry_of_pair], to_own], -1), -1
        )
        from_prompt = (
            weights[..., :T_p][self.pair_of_entry].view(P * G, -1, T_p) @ prompt_v
        )  # (P * G, most * R, D)
        return torch.baddbmm(from_prompt.view(-1, R, D)[self.entry_of_pair], weights[..., T_p:], own_v)

    def attend_together(self, layer: int, q):
        """q (n * G, R, D) -> the same. For slots that each lie behind their own prompt: one matmul for both."""
        T_p, n = self.own_column, len(self.t)
        both = self.storage[layer, :, :n, :, : T_p + self.columns]
        k, v = both.flatten(1, 2).to(q.dtype)  # (n * G, T_p + columns, D) each
        scores = q @ k.mT  # (n * G, R, T_p + columns)
        if self.ragged:
            scores.view(n, -1, k.shape[1])[..., :T_p].add_(self.prompt_bias[:n, 0])
        if not self.same_t:
            scores[..., T_p:].add_(self.own_bias)
        return torch.softmax(scores, -1) @ v

    def kernel_shape(self) -> dict:
        c = self.config
        return attention.kernel_shape(
            c.n_head, c.n_kv_head, c.head_size, self.dtype.itemsize, self.group_size
        )

    def attend_triton(self, layer: int, q, k, v, rotary):
        """`attend` by one kernel. All that it writes to is allocated here, but for `counters`, which are 0 between
        launches and stay where they are."""
        (n, H, _, D), G, shape = q.shape, self.config.n_kv_head, self.kernel_shape()
        T_p, T_c, tiles = self.prompt.shape[4], self.own.shape[4], len(self.tiles)
        prompt_splits, prompt_chunk = attention.split_columns(
            T_p, -(-n // shape["TILE"]) * G, shape["N"]
        )
        own_splits, own_chunk = attention.split_columns(T_c, n * G, shape["N"])
        parts = torch.empty(prompt_splits + own_splits, n, H, D, dtype=torch.float32, device=q.device)
        tops, totals = (
            torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2)
        )
        y = torch.empty(n, H, 1, D, dtype=self.dtype, device=q.device)
        if nothing_to_do(q):
            return y
        strides = [x.stride(i) for x in (q, k, v) for i in (0, 1)]
        prompt_programs = tiles * G * prompt_splits
        with torch.cuda.device_of(q):
            attention.attend_kernel[(prompt_programs + n * G * own_splits,)](
                q, k, v, *(rotary or (q, q)), *strides, *self.prompt[layer], self.tiles, self.prompt_lengths,
                *self.own[layer], self.t, parts, tops, totals, self.counters, y, D**-0.5 * LOG2_OF_E, n, T_p, T_c,
                H, G, D, prompt_programs, prompt_splits, prompt_chunk, own_splits, own_chunk, **shape,
                ROTARY=rotary is not None, maxnreg=attention.REGISTERS,
            )  # fmt: skip
        return y
