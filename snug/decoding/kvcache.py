"""Keys and values of prompts and of their completions, and the attention of each slot's new token to both.

A prompt is stored once, however many completions share it, and a step reads it for all of them together. When a
completion ends, another takes its slot. So the slots of one step have different lengths, and the completions of a group
need not be neighbours.

On CUDA a layer launches one Triton kernel (attention.py), which rotates, writes to the cache and attends. The kernel
reads each slot's length on the device, so one CUDA graph serves every step. Elsewhere plain torch does the same; it is
the kernel's oracle.

Left out: paging (a slot is as long as the longest completion may be), quantised caches.
Test: pytest tests/test_kvcache.py, and tests/test_kernels.py for the kernels.
"""

from contextlib import nullcontext

import numpy as np
import torch

from snug.decoding import attention
from snug.decoding.states import States
from snug.device.kinds import upload, wide
from snug.kernels import LOG2_OF_E, launch, uses_triton
from snug.kernels.rotary import rotate
from snug.kernels.segments import attend
from snug.memory.ledger import component


@component("KV cache")
class KVCache:
    """Keys and values. G is n_kv_head, H n_head, R = H / G, D head_size.

    prompt        (layers, 2, prompt slots, G, T_p, D)   a prompt in each slot, right-padded
    completions   (layers, 2, slots, G, T_c, D)          a completion in each slot

    Linear layers are not among these layers: they have `states` (states.py).

    Slot s reads prompt slot `prompt_slot[s]` and columns 0 .. t[s] of its completion. Two prompt slots, four slots:

        prompt slot 0: a b c   slots 0, 2: x y . .   t = 1
        prompt slot 1: d e .   slots 1, 3: z . . .   t = 0

    Prefill: `begin_prefill`, then a forward, whose layers call `write_prompts`. After sequences have got slots, left
    them or moved: `assign`. A step: `begin_step`, then a forward, whose layers call `attend`; `attend` writes column
    t[s] of each slot. A reply (several tokens behind a slot's own tokens): `begin_reply`, then a forward.
    """

    def __init__(
        self,
        config,
        prompt_slots,
        prompt_width,
        slots,
        width,
        dtype,
        device,
        group_size=1,
    ):
        """config: a GPTConfig. prompt_width is T_p, width T_c. About group_size slots read the same prompt."""

        L = len(config.windows)
        G = config.n_kv_head
        D = config.head_size
        options = dict(dtype=dtype, device=device)
        self.states = None
        if config.linear_key_heads:
            self.states = States(config, prompt_slots, slots, **options)
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.completions = torch.empty(L, 2, slots, G, width, D, **options)
        self.cleared = 0  # how many columns of completions are zeroed or written
        self.prompt = torch.zeros(L, 2, prompt_slots, G, prompt_width, D, **options)
        self.prompt_lengths = torch.ones(prompt_slots, dtype=torch.long, device=device)
        self.ragged = False  # is a prompt shorter than the others?
        self.T_p, self.T_c = prompt_width, width
        self.max_length = prompt_width + width
        # (P,) the prompt slots that the next forward fills; None: it is a step
        self.prefill_slots = None
        self.reply = None  # what the next forward needs to read replies; None: it reads none
        # For the kernel: its constants, tiles_of, and how many parts of each query's softmax are stored
        # (attention.join).
        self.kernel = None
        if uses_triton(self.prompt, "decode"):
            self.kernel = attention.kernel_shape(config.n_head, G, D, dtype.itemsize, group_size)
            self.clear(slots, width)
        self.tiles = None
        self.counters = torch.zeros(slots, config.n_head, dtype=torch.int32, device=device)

    def begin_prefill(self, prompt_slots, lengths):
        """The next forward's prompts, of these lengths, go to these prompt slots."""
        self.prefill_slots = upload(prompt_slots, self.device)
        self.ragged |= min(lengths) < self.T_p
        self.prompt_lengths[self.prefill_slots] = upload(lengths, self.device)
        if self.states:
            self.states.begin_prefill(self.prefill_slots, self.prompt_lengths, max(lengths))

    def write_prompts(self, layer, k, v):
        """k, v (P, G, T, D) of the prompts, T at most T_p."""
        for prompt, values in zip(self.prompt[layer], (k, v), strict=True):
            prompt.narrow(2, 0, values.shape[2])[self.prefill_slots] = values.to(self.dtype)

    def compact(self, slots, prompt_slots, columns):
        """Keep only these slots, with their first `columns` columns, and these prompt slots. Both are rising numbers,
        and become 0, 1, 2 ..."""
        slots, prompt_slots = (upload(x, self.device) for x in (slots, prompt_slots))
        tensors = [(self.completions, slots, columns)]
        if len(prompt_slots) < self.prompt.shape[2]:
            tensors.append((self.prompt, prompt_slots, self.T_p))
        for both, kept, width in tensors:
            for tensor in both.flatten(
                0, 1
            ):  # indexing makes a copy, here of one layer's keys or values
                tensor[: len(kept), :, :width] = tensor[kept, :, :width]
        self.prompt = self.prompt[:, :, : len(prompt_slots)]
        self.prompt_lengths = self.prompt_lengths[prompt_slots]
        if self.states:
            self.states.move(slots, slice(len(slots)))

    def assign(self, prompt_slot):
        """prompt_slot (n,): the prompt slot that each slot reads; -1: the slot is idle.

        Plain torch multiplies a prompt's keys by all queries that read the prompt, in one matmul. So the queries, which
        are pairs (slot, key head), stand in a table (prompt slots in use, G, most): `most` is the largest number of
        slots that share a prompt slot. In the example above with one head:

            pair_of_entry 0 2 1 3   the slot of each entry; spare entries name slot 0, and their results are not read
            entry_of_pair 0 2 1 3   the entry of each slot

        The kernel takes `tiles` instead (tiles_of); there an idle slot reads a prompt too.
        """
        self.prefill_slots = None
        active = prompt_slot >= 0
        first = prompt_slot[active].min()
        if self.kernel:
            readers = np.where(active, prompt_slot, first)
            table = tiles_of(readers, self.prompt.shape[2], self.kernel["TILE"])
            table = upload(table, self.device, torch.int32)
            if self.tiles is None or table.shape != self.tiles.shape:
                self.tiles = table
            self.tiles.copy_(table)  # in place: a CUDA graph reads this address
            return
        G, n, slots = self.config.n_kv_head, len(prompt_slot), np.flatnonzero(active)
        line = prompt_slot[slots] - first  # the slot's line in the table
        rank, counts = ranks(line)
        most = counts.max()
        entry_of_pair = np.zeros((n, G), int)
        entry_of_pair[slots] = (line[:, None] * G + np.arange(G)) * most + rank[:, None]
        pair_of_entry = np.zeros(len(counts) * G * most, int)
        pair_of_entry[entry_of_pair[slots]] = slots[:, None] * G + np.arange(G)
        self.entry_of_pair = torch.tensor(entry_of_pair.ravel(), device=self.device)
        self.pair_of_entry = torch.tensor(pair_of_entry, device=self.device)
        self.prompts_in_use = slice(first, first + len(counts))
        self.lengths = self.prompt_lengths[upload(prompt_slot.clip(0), self.device)]  # (n,)
        # A layer's completions, seen as a matrix with rows of D numbers: the row of each slot's first column.
        S = self.completions.shape[2]
        rows = torch.arange(2 * S * G, device=self.device).view(2, S, G)
        self.first_row = rows[:, :n] * self.T_c  # (2, n, G)

    def clear(self, slots, columns):
        """Zero the first `columns` columns of the first `slots` slots, where they are not written yet. Later calls
        never have more slots.

        Plain torch reads columns that nobody wrote with weight 0, and 0 * NaN is NaN. Unused memory is not touched:
        zeroing all of it at the start took a tenth of a rollout's time.
        """
        if columns > self.cleared:
            end = columns + 15
            self.completions[:, :, :slots, :, self.cleared : end] = 0
            self.cleared = end

    def sees(self, window, prompt_lengths, t, columns):
        """prompt_lengths (n,); t (n, S), the columns of S tokens -> (n, S, T_p + columns) boolean: which tokens of its
        prompt, and which columns of its completion, each token sees."""
        t, length = t[..., None], prompt_lengths[:, None, None]
        column = torch.arange(self.T_p, device=t.device)
        age = t - torch.arange(columns, device=t.device)
        window = window or self.max_length  # no window: longer than all
        in_prompt = (column < length) & (length + t - column < window)
        return torch.cat([in_prompt, (age >= 0) & (age < window)], -1)

    def begin_step(self, t, columns, same_t):
        """t (n,): the column that each slot writes now. columns: at least 1 + the largest t of an active slot.

        same_t: t is the same in all active slots, so that no column needs to be hidden."""
        self.t = t
        self.columns = columns
        self.reply = None
        if self.kernel:
            return
        self.write_at = (self.first_row + t[:, None]).view(-1)  # (2 * n * G,)
        if same_t:
            self.cleared = max(self.cleared, columns)  # this step writes the last of them
        else:
            self.clear(len(t), columns)
        self.bias = {}  # window -> what is added to the scores, if something is hidden
        for window in set(self.config.windows):
            if self.ragged or not same_t or 0 < window < self.T_p + columns:
                hidden = ~self.sees(window, self.lengths, t[:, None], columns)
                bias = torch.zeros_like(hidden, dtype=self.dtype)
                self.bias[window] = bias.masked_fill_(hidden, -torch.inf)

    def begin_reply(self, slots, prompt_slots, t, lengths):
        """The next forward reads tokens (w, R) for these slots, right-padded. All arguments are arrays (w,).

        lengths: how many tokens each slot gets; R is the largest. Slot s gets them in column t[s] and the columns
        behind it. A token sees its prompt, all earlier columns, and itself. Padding writes into columns behind the
        reply; a step overwrites them before any token sees them. -> columns (w, R), positions (w, R)."""
        self.prefill_slots = None
        self.clear(self.completions.shape[2], self.T_c)
        t, slots, prompt_slots = (upload(x, self.device) for x in (t, slots, prompt_slots))
        place = torch.arange(max(lengths), device=self.device)
        columns = (t[:, None] + place).clamp_(max=self.T_c - 1)
        prompt_lengths = self.prompt_lengths[prompt_slots]
        self.reply = slots, prompt_slots, columns
        if self.states:
            self.states.begin(slots, upload(lengths, self.device), max(lengths))
        self.reply_sees = {
            window: self.sees(window, prompt_lengths, columns, self.T_c)[:, None]
            for window in set(self.config.windows)
        }
        return columns, prompt_lengths[:, None] + columns

    def attend_reply(self, layer, q, k, v):
        """q (w, H, R, D), k and v (w, G, R, D) -> (w, H, R, D). Writes the keys and values of the reply."""
        slots, prompt_slots, columns = self.reply
        completion = self.completions[layer]
        new = torch.stack([k, v]).permute(1, 3, 0, 2, 4)  # (w, R, 2, G, D)
        completion[:, slots[:, None], :, columns] = new.to(self.dtype)
        prompt = self.prompt[layer][:, prompt_slots]
        k, v = torch.cat([prompt, completion[:, slots]], 3)
        return attend(q.to(self.dtype), k, v, self.reply_sees[self.config.windows[layer]])

    def attend(self, layer: int, q, k, v, rotary=None):
        """q (n, H, 1, D), k and v (n, G, 1, D), rotary's cos and sin (n, 1, 1, D) -> (n, H, 1, D).

        One softmax over the prompt and the completion of each slot."""
        if self.kernel and self.reply is None:
            return self.attend_triton(layer, q, k, v, rotary)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.reply is not None:
            return self.attend_reply(layer, q, k, v)
        n, H, _, D = q.shape
        G = k.shape[1]
        R = H // G
        new = torch.stack([k, v]).view(-1, D).to(self.dtype)
        self.completions[layer].view(-1, D).index_copy_(0, self.write_at, new)
        # Scores in float32, as in the trainer's attention: the KL to the trainer is 1e-5. With bfloat16 it was 2.5e-4.
        dtype = wide(self.dtype)
        with nullcontext() if dtype == self.dtype else torch.autocast(q.device.type, enabled=False):
            q = q.reshape(n * G, -1, D).to(dtype) * D**-0.5  # (n * G, R, D)
            prompt = self.prompt[layer, :, self.prompts_in_use]
            _, P, _, T_p, _ = prompt.shape
            prompt_k, prompt_v = prompt.flatten(1, 2).to(dtype)  # (P * G, T_p, D) each
            k, v = self.completions[layer, :, :n, :, : self.columns].flatten(1, 2).to(dtype)
            scores = q @ k.mT  # (n * G, R, columns)
            # (P * G, most * R, T_p)
            prompt_scores = q[self.pair_of_entry].view(P * G, -1, D) @ prompt_k.mT
            prompt_scores = prompt_scores.view(-1, R, T_p)[self.entry_of_pair]  # (n * G, R, T_p)
            scores = torch.cat([prompt_scores, scores], -1)
            if (bias := self.bias.get(self.config.windows[layer])) is not None:
                scores.view(-1, H, T_p + self.columns).add_(bias)
            weights = torch.softmax(scores, -1)
            prompt_weights = weights[..., :T_p][self.pair_of_entry].view(P * G, -1, T_p)
            y = (prompt_weights @ prompt_v).view(-1, R, D)[self.entry_of_pair]  # (n * G, R, D)
            y = torch.baddbmm(y, weights[..., T_p:], v)
        return y.view(n, H, 1, D).to(self.dtype)

    def attend_triton(self, layer, q, k, v, rotary):
        """`attend` by one kernel. Its buffers and its result are allocated here. Only `counters` keep their address;
        they are 0 between launches."""
        n, H, _, D = q.shape
        G = k.shape[1]
        window = self.config.windows[layer]
        lines, block = -(-n // self.kernel["TILE"]), self.kernel["N"]
        prompt_splits, prompt_chunk = attention.split_columns(self.T_p, lines * G, block)
        splits, chunk = attention.split_columns(self.T_c, n * G, block)
        parts = q.new_empty(
            n,
            H,
            prompt_splits + splits,
            D,
            dtype=torch.float32,
        )
        tops = parts.new_empty(parts.shape[:3])
        totals = parts.new_empty(parts.shape[:3])
        y = q.new_empty(n, H, 1, D, dtype=self.dtype)
        cos, sin = rotary or (q, q)  # pointers that are not read
        prompt_programs = len(self.tiles) * prompt_splits
        launch(
            attention.attend_kernel,
            (prompt_programs + n * splits, G),
            q,
            k,
            v,
            cos,
            sin,
            *(x.stride(0) for x in (q, k, v)),
            *self.prompt[layer],
            self.tiles,
            self.prompt_lengths,
            *self.completions[layer],
            self.t,
            parts,
            tops,
            totals,
            self.counters,
            y,
            D**-0.5 * LOG2_OF_E,
            self.T_p,
            self.T_c,
            D,
            prompt_programs,
            prompt_chunk,
            chunk,
            **self.kernel,
            ROTARY=rotary is not None,
            PART=cos.shape[-1] % D,
            WINDOW=window if window < self.max_length else 0,
            maxnreg=attention.REGISTERS,
        )
        return y


def tiles_of(prompt_slot: np.ndarray, prompt_slots: int, tile: int):
    """prompt_slot (n,), the prompt slot that each slot reads -> (tiles, 1 + tile) int32.

    A line has a prompt slot, then the slots for which one program reads this prompt slot; -1: no slot. The number of
    lines is the most that any n slots may need, so that the grid of a CUDA graph never changes."""
    n = len(prompt_slot)
    lines = (n + min(n, prompt_slots) * (tile - 1)) // tile
    table = np.full((lines, 1 + tile), -1, dtype=np.int32)
    rank, counts = ranks(prompt_slot)
    lines_of_prompt = -(-counts // tile)
    line = (lines_of_prompt.cumsum() - lines_of_prompt)[prompt_slot] + rank // tile
    table[line, 0] = prompt_slot
    table[line, 1 + rank % tile] = np.arange(n)
    return table


def ranks(prompt_slot: np.ndarray):
    """-> each slot's rank among those that read the same prompt slot (n,), and how many read each prompt slot."""
    counts = np.bincount(prompt_slot)
    order = np.argsort(prompt_slot, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - (counts.cumsum() - counts)[prompt_slot[order]]
    return rank, counts
