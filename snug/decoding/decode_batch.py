"""Continuous batching: many completions are decoded together, a token per step. Those that end make room for others.

A sequence is one completion; sequence i continues prompt i // k. A slot is a position in the decode batch, which goes
through the model in every step. A prompt slot is where the KV cache holds one prompt. The life of a sequence:

    prefill   its prompt goes through the model once, into a prompt slot; the prompt's last hidden state is kept
    start     the sequence gets a slot, and its first token is drawn from that hidden state
    step      all slots go through the model together and get one more token each
    retire    with a stop token or after max_new_tokens, on the device: the slot becomes idle
    refill    the host looks at the slots now and then, and starts waiting sequences in the idle ones

When no sequence waits, idle slots are removed.

With `respond` a stop token or a stop string ends a turn. The host sees it at its next look and asks for a reply, in a
thread. The slot keeps its sequence and waits, and the others go on. The replies that wait are read together once they
are many (REPLY_AT): each goes through the model behind the slot's own columns, and the next token is drawn. When that
is depends on counts alone, never on how long a tool takes, so that a run can be repeated bit for bit.

Left out: what a rollout is (sample.py).
Test: pytest tests/test_sample.py
"""

import gc
import math
import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from functools import cache

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from snug.decoding.draw import sample_tokens
from snug.decoding.kvcache import KVCache
from snug.device import cuda
from snug.device.cuda import upload
from snug.device.kinds import kind_of
from snug.kernels import uses_triton
from snug.kernels.nf4 import NF4
from snug.lora import adapted
from snug.memory.ledger import COMPONENTS
from snug.options import first_line

COMPONENTS[__name__] = "rollouts"
# Tokens of prompts that are prefilled at a time. On a CPU their activations then stay in its caches.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
# Steps between two looks at the slots. On CUDA a look waits for the device.
LOOK_EVERY = {"cpu": 1, "cuda": 4}
# Idle slots are removed if more than this share is idle. CUDA then records a new graph.
SHRINK_AT = {"cpu": 1 / 4, "cuda": 1 / 2}
# They are removed only above this number of slots. On CUDA few slots take no longer than fewer: a step reads weights.
SHRINK_ABOVE = {"cpu": 1, "cuda": 16}
# Replies are read once this share of the sequences waits for one, or all.
REPLY_AT = {"cpu": 1 / 8, "cuda": 1 / 4}
# Tokens that replies see which are read at a time: their keys and values are copied.
REPLY_CONTEXT = {"cpu": 4096, "cuda": 16384}


class DecodeBatch:
    """The slots, the sequences in them, and tables of all tokens drawn so far.

    Slot s holds sequence `sequences[s]`, whose latest token is its t[s]-th. An idle slot holds the dummy sequence N;
    its output goes to the last row of the tables and is discarded.

    tokens, logprobs  (N + 1, max_new_tokens)  what was drawn; row i is sequence i
    u                 (N + 1, max_new_tokens)  the uniform numbers to draw with
    written           (N + 1, max_new_tokens)  True: a reply's token, not drawn; None without `ask`
    ends              {sequence: (its length, not cut off?)} of those that are over, with `is_over` or `ask`
    """

    def __init__(
        self,
        model: torch.nn.Module,
        prompts: list[list[int]],
        k: int,
        max_new_tokens: int,
        slots: int,
        stop_token=None,
        *,
        temperature: float = 1.0,
        chunk_mb: float = 0,
        is_over=None,
        ask=None,
        cuda_graphs: bool = False,
    ):
        """k completions of each prompt, `slots` at a time. The other options are those of sample.sample_groups, but

        ask(sequence, ids of its turn) -> a concurrent.futures.Future of what `respond` returns."""
        self.model, self.prompts, self.k, self.max_new_tokens = model, prompts, k, max_new_tokens
        self.sampling = dict(temperature=temperature, chunk_mb=chunk_mb)
        self.stop_tokens = as_tuple(stop_token)
        self.is_over, self.ask = is_over, ask
        self.N = len(prompts) * k
        self.device = model.device
        shape = self.N + 1, max_new_tokens
        self.tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.u = torch.zeros(shape, device=self.device)
        self.written = torch.zeros(shape, dtype=torch.bool, device=self.device) if ask else None
        # A prompt stays until its last sequence is over; by then other groups have started.
        prompt_slots = min(len(prompts), slots, 4 * math.ceil(slots / k))
        width = max(len(prompt) for prompt in prompts)
        dtype = model.compute_dtype
        self.cache = KVCache(
            model.config, prompt_slots, width, slots, max_new_tokens, dtype, self.device, k
        )
        hidden_shape = prompt_slots, model.config.n_embd
        self.prompt_hidden = torch.zeros(hidden_shape, dtype=dtype, device=self.device)
        # A graph replays the lengths and addresses of its recording; in plain torch they change with every step.
        self.graph = None
        self.cuda_graphs = cuda_graphs and uses_triton(self.cache.completion) and not cuda.BROKEN
        # The memory pool of the graphs, made with the first one. It frees its memory when it is deleted after the last
        # graph. Attributes are deleted in the order of their assignment, so it comes after `graph`.
        self.pool = None
        # On the device, per slot: its sequence, the number of its latest token and that token, its prompt's length.
        self.sequences = torch.full((slots,), self.N, device=self.device)
        self.t = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.token = torch.zeros_like(self.t)
        self.prompt_length = torch.zeros_like(self.t)
        # On the host, per slot: the prompt slot that it reads, and the step that drew its first token; a reply of n
        # tokens counts as n steps earlier. For turns: its sequence, also while that waits for a reply (N: none), its
        # tokens before this turn, and how many of its tokens are checked.
        self.prompt_slot = np.zeros(slots, dtype=np.int64)
        self.started = np.zeros_like(self.prompt_slot)
        self.held = np.full_like(self.prompt_slot, self.N)
        self.turn = np.zeros_like(self.prompt_slot)
        self.checked = np.zeros_like(self.prompt_slot)
        self.slot_of_prompt = {}  # prompts in the cache: number -> prompt slot
        self.next_prompt = 0  # the first that has not been in the cache
        self.ends = {}
        self.asked = {}  # sequences that wait -> (slot, length, Future of the reply)
        self.next_sequence = 0  # the first that waits
        self.steps = 0  # taken so far
        self.active = 0  # slots with a sequence, at the last look
        self.first_start = 0  # the earliest start of an active sequence
        self.same_t = True  # is t the same in all active slots?

    def refill(self):
        """Start waiting sequences in idle slots. If none waits, remove idle slots once they are many.

        -> is a slot active?"""
        changed = False
        while True:  # a sequence may end with its first token
            sequences = self.look()
            replied = self.read_replies()
            idle = np.flatnonzero(sequences == self.N)
            new = self.admit(len(idle), sequences)
            if not new and not replied:
                break
            self.start(idle[: len(new)], new)
            changed = True
        active = np.flatnonzero(sequences < self.N)
        self.active = len(active)
        if not self.active:
            return False
        kind = kind_of(self.sequences)
        slots = len(sequences)
        many_idle = slots > SHRINK_ABOVE[kind] and len(idle) > slots * SHRINK_AT[kind]
        if self.next_sequence == self.N and many_idle:
            self.shrink(active)
            active = np.arange(len(active))
            changed = True
        if changed:
            prompt_slot = np.full(len(self.prompt_slot), -1)
            prompt_slot[active] = self.prompt_slot[active]
            self.cache.assign(prompt_slot)
            self.first_start = self.started[active].min()
            self.same_t = bool((self.started[active] == self.first_start).all())
        return True

    def look(self):
        """-> the slots' sequences, on the host, after the turns that ended were dealt with."""
        sequences = self.sequences.cpu().numpy()
        if not self.is_over and not self.ask:
            return sequences
        self.end_turns(sequences)
        return self.held

    def end_turns(self, sequences):
        """Retire the sequences whose last turn ended since the last look, or ask for replies.

        The device retires a sequence with its stop token. It draws on behind a stop string: those tokens are dropped.
        """
        ended = (sequences == self.N) | bool(self.is_over)
        waits = np.isin(self.held, list(self.asked))
        slots = np.flatnonzero((self.held < self.N) & ~waits & ended)
        rows = self.tokens[upload(self.held[slots], self.device)].cpu().numpy()
        over = []
        for slot, row in zip(slots, rows, strict=True):
            sequence = int(self.held[slot])
            drawn = min(self.steps - self.started[slot] + 1, self.max_new_tokens)
            ids = row[:drawn].tolist()
            end = self.end_of_turn(ids, self.turn[slot], self.checked[slot])
            self.checked[slot] = drawn
            if end is None and drawn < self.max_new_tokens:
                continue
            over.append(slot)
            if end and self.ask:
                self.asked[sequence] = slot, end, self.ask(sequence, ids[self.turn[slot] : end])
            else:
                self.ends[sequence] = end or drawn, bool(end)
                self.held[slot] = self.N
        if over:
            self.sequences[upload(over, self.device)] = self.N

    def end_of_turn(self, ids: list[int], begin: int, checked: int) -> int | None:
        """The length with the first token behind `checked` that ends the turn that began at `begin`."""
        for n in range(checked + 1, len(ids) + 1):
            if ids[n - 1] in self.stop_tokens or self.is_over and self.is_over(ids[begin:n]):
                return n
        return None

    def read_replies(self) -> bool:
        """Once enough sequences wait: let each go on behind its reply, or retire it. -> does one go on?"""
        share = REPLY_AT[kind_of(self.sequences)]
        if not self.asked or len(self.asked) < share * np.count_nonzero(self.held < self.N):
            return False
        replies = []
        for sequence, (slot, end, future) in self.asked.items():
            reply = future.result()
            if reply is not None and end + len(reply) < self.max_new_tokens:
                replies.append((slot, end, reply))
            else:  # over, or no room
                self.ends[sequence] = end, reply is None
                self.held[slot] = self.N
        self.asked = {}
        n = self.replies_at_once()
        for i in range(0, len(replies), n):
            self.read(*zip(*replies[i : i + n], strict=True))
        return bool(replies)

    def replies_at_once(self):
        """-> how many replies are read at a time."""
        return max(1, REPLY_CONTEXT[kind_of(self.sequences)] // self.cache.max_length)

    def read(self, slots, lengths, replies):
        """Write `replies` (lists of ids) behind the first `lengths` tokens of these slots' sequences, read them, and
        draw the next tokens.

        The last token of the turn is read with them: no step has read it, or its step was not the last."""
        slots, lengths, added = map(np.array, (slots, lengths, list(map(len, replies))))
        ends, held = lengths + added, self.held[slots]
        for row, begin, end, reply in zip(held, lengths, ends, replies, strict=True):
            self.tokens[row, begin:end] = upload(reply, self.device)
            self.written[row, begin:end] = True
        self.started[slots] = self.steps - ends
        self.turn[slots] = self.checked[slots] = ends
        spans = slots, self.prompt_slot[slots], lengths - 1, added + 1
        columns, positions = self.cache.begin_reply(*spans)
        slots, held, added, ends = upload(np.stack([slots, held, added, ends]), self.device)
        hidden = self.model(self.tokens[held[:, None], columns], positions, self.cache, last=added)
        self.sequences[slots] = held
        self.t[slots] = ends
        self.draw(hidden[:, 0], slots)

    def admit(self, room: int, sequences: np.ndarray):
        """-> the next waiting sequences, at most `room`, with prompts in the cache. Prefills missing prompts."""
        stop = min(self.next_sequence + room, self.N)
        if stop > self.next_prompt * self.k:
            busy = set((sequences[sequences < self.N] // self.k).tolist())
            waiting = self.next_sequence // self.k
            stays = {p: slot for p, slot in self.slot_of_prompt.items() if p in busy or p >= waiting}
            # The lowest free prompt slots first, so that those in use lie together.
            free = sorted(set(range(len(self.prompt_hidden))) - set(stays.values()))
            # Prefill a few prompts ahead: one at a time is slow, and to fill all free slots is too early.
            ahead = (stop - 1) // self.k + 1 + math.ceil(len(sequences) / self.k / 4)
            missing = range(self.next_prompt, min(ahead, len(self.prompts)))[: len(free)]
            self.slot_of_prompt = stays
            self.prefill(missing, free[: len(missing)])
            self.next_prompt += len(missing)
        return range(self.next_sequence, min(stop, self.next_prompt * self.k))

    def prefill(self, prompts: range, prompt_slots: Sequence[int]):
        """Read the prompts with these numbers into these prompt slots, PREFILL_TOKENS at a time."""
        self.slot_of_prompt |= zip(prompts, prompt_slots, strict=True)
        n = self.prompts_at_once()
        for i in range(0, len(prompts), n):
            slots = prompt_slots[i : i + n]
            tokens = [torch.tensor(self.prompts[p]) for p in prompts[i : i + n]]
            lengths = [len(ids) for ids in tokens]
            self.cache.begin_prefill(slots, lengths)
            tokens = upload(pad_sequence(tokens, batch_first=True), self.device)  # (P, T)
            last = upload(lengths, self.device) - 1
            hidden = self.model(tokens, cache=self.cache, last=last)[:, 0]  # (P, C)
            self.prompt_hidden[upload(slots, self.device)] = hidden.to(self.prompt_hidden.dtype)

    def prompts_at_once(self):
        """-> how many prompts a prefill reads at a time."""
        return max(1, PREFILL_TOKENS[kind_of(self.sequences)] // self.cache.prompt.shape[4])

    def start(self, slots: np.ndarray, new: range):
        """Start sequences `new` in these slots: draw their first tokens from their prompts' hidden states."""
        self.next_sequence = new.stop
        prompt_slots = [self.slot_of_prompt[i // self.k] for i in new]
        self.prompt_slot[slots] = prompt_slots
        self.started[slots] = self.steps
        self.held[slots] = new
        self.turn[slots] = self.checked[slots] = 0
        slots, prompt_slots = upload(slots, self.device), upload(prompt_slots, self.device)
        self.sequences[slots] = torch.arange(new.start, new.stop, device=self.device)
        self.prompt_length[slots] = self.cache.prompt_lengths[prompt_slots]
        self.t[slots] = 0
        self.draw(self.prompt_hidden[prompt_slots], slots)

    def step(self):
        """One more token in every slot.

        With CUDA graphs the first step of a batch size runs as it is, which compiles and warms up its kernels. Then it
        is recorded, which computes nothing, and later steps replay it."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.forward_step()
            if self.cuda_graphs:
                self.record_graph()
        self.steps += 1

    def forward_step(self):
        """Run the model on each slot's latest token, and draw the next."""
        columns = min(self.steps - self.first_start + 1, self.max_new_tokens)
        self.cache.begin_step(self.t, columns, self.same_t)
        positions = (self.prompt_length + self.t)[:, None]
        hidden = self.model(self.token[:, None], positions, self.cache)[:, 0]  # (slots, C)
        self.t.add_(1).clamp_(max=self.max_new_tokens - 1)  # idle slots count too
        self.draw(hidden, slice(None))

    def record_graph(self):
        """Record a step. If that fails, for instance out of memory, go on without graphs.

        The tensors that a step makes are in a pool. The graphs of a batch use it one after the other: `shrink` drops a
        graph before the next one is recorded. The results of a step are written into older tensors, outside the pool.
        """
        for emptied in (False, True):
            try:
                with torch.cuda.device(self.device):
                    self.pool = self.pool or torch.cuda.MemPool()
                    self.graph = record(self.forward_step, self.pool, capture_stream(self.device))
                return
            except RuntimeError as error:
                reason = first_line(error)
                out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if emptied or not out_of_memory:
                break
            torch.cuda.empty_cache()  # during a recording the allocator cannot free the blocks that it caches
        if not out_of_memory:
            cuda.keep_broken(self.pool)
        self.cuda_graphs = False
        self.pool = None
        tqdm.write(f"sampling goes on without CUDA graphs: {reason}", file=sys.stderr)

    def draw(self, hidden, slots):
        """hidden (n, C) of these slots -> write their next tokens into the tables; retire sequences that end here."""
        sequences, t = self.sequences[slots], self.t[slots]
        token, logprob = sample_tokens(self.model, hidden, self.u[sequences, t], **self.sampling)
        self.tokens[sequences, t] = token
        self.logprobs[sequences, t] = logprob
        over = t == self.max_new_tokens - 1
        for stop in self.stop_tokens:
            over |= token == stop
        self.token[slots] = token
        self.sequences[slots] = sequences.masked_fill(over, self.N)

    def shrink(self, active: np.ndarray):
        """Keep only these slots, rising numbers, and the prompt slots that they read."""
        self.graph = None
        slot_of = dict(zip(active.tolist(), range(len(active)), strict=True))
        self.asked = {i: (slot_of[slot], *rest) for i, (slot, *rest) in self.asked.items()}
        prompt_slots, self.prompt_slot = np.unique(self.prompt_slot[active], return_inverse=True)
        self.started = self.started[active]
        self.held = self.held[active]
        self.turn = self.turn[active]
        self.checked = self.checked[active]
        columns = min(self.steps - self.started.min() + 1, self.max_new_tokens)
        self.cache.compact(active, prompt_slots, columns)
        active = upload(active, self.device)
        self.sequences = self.sequences[active]
        self.t = self.t[active]
        self.token = self.token[active]
        self.prompt_length = self.prompt_length[active]

    def rehearse(self):
        """Allocate the most that decoding may take, for the planner: prefill, start every slot, take one step with a
        full cache and sequences of different lengths, read the longest replies, and shrink by a quarter. In the step
        the first prompt slot has as many readers as it can have, and the others share the rest."""
        n, prompt_slots = len(self.sequences), len(self.prompt_hidden)
        # Prompts are prefilled some at a time; the first of these prefills stands for all.
        P = min(prompt_slots, self.prompts_at_once())
        self.prefill(range(P), range(P))
        self.slot_of_prompt = dict.fromkeys(range(len(self.prompts)), 0)
        self.start(np.arange(n), range(n))
        self.prompt_slot[:] = np.arange(n) % prompt_slots
        readers = max(min(self.k, n - (prompt_slots > 1)), 1)
        others = prompt_slots - 1 - np.arange(n - readers) % max(prompt_slots - 1, 1)
        self.cache.assign(np.concatenate([np.zeros(readers, dtype=np.int64), others]))
        self.steps, self.first_start, self.same_t = self.max_new_tokens - 1, 0, False
        self.step()
        if self.ask:
            w, longest = min(n, self.replies_at_once()), self.max_new_tokens - 2
            self.read(range(w), [1] * w, [[0] * longest] * w)
        self.shrink(np.arange(max(n - n // 4 - 1, 1)))


def record(step, pool, stream):
    """-> a graph of what step() does; nothing is computed. torch.cuda.graph would wait for the device and empty the
    allocator's cache first."""
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    collects = gc.isenabled()
    stream.wait_stream(current)
    gc.disable()  # a finaliser that waits for the device (device.host.unpin) breaks a recording
    try:
        with torch.cuda.stream(stream):  # which restores the current stream after an error
            # thread_local: a reward function may have left a thread that uses CUDA
            graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with suppress(RuntimeError):  # of the end, which the first error explains
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    current.wait_stream(stream)
    return graph


@cache
def capture_stream(device):
    """-> one stream per device, because each stream that was captured keeps a workspace for its matrix products.

    Some versions of torch free it with any of its graphs, so only one graph may live at a time.
    """
    return torch.cuda.Stream(device)


@contextmanager
def cached_casts(model: torch.nn.Module):
    """Keep bfloat16 copies from step to step: of adapters, and autocast's of frozen weights. Autocast does so only for
    weights that require a gradient, so here they do."""
    for layer in adapted(model):
        A, B = layer.lora_A.to(model.compute_dtype), layer.lora_B
        # The product of a matrix in NF4 casts B itself.
        layer.cast = A, B if isinstance(layer.weight, NF4) else B.to(A.dtype)
    casts = torch.is_autocast_enabled(model.device.type)
    frozen = [p for p in model.parameters() if casts and not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for layer in adapted(model):
            layer.cast = None


def as_tuple(stop_token):
    """None, an id or several -> a tuple."""
    if stop_token is None:
        return ()
    return tuple(stop_token) if isinstance(stop_token, tuple | list) else (stop_token,)
