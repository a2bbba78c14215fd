"""Continuous batching: many completions are decoded together, a token a step, and finished ones make room for others.

A row is one completion; row i continues prompt i // k. A slot is one line of the batch that goes through the model in a
step. A prompt slot is where the KV cache holds one prompt. The life of a row:

    prefill   its prompt goes through the model once, into a prompt slot; the prompt's last hidden state is kept
    start     the row gets a slot, and its first token is drawn from that hidden state
    step      all slots go through the model together and get one more token each
    retire    with a stop token or after max_new_tokens, on the device: the slot becomes idle
    refill    the host looks at the slots now and then, and starts waiting rows in the idle ones

When no row waits, idle slots are removed. Left out: what a rollout is (sample.py). Test: pytest tests/test_sample.py
"""

import gc
import math
import sys
from contextlib import contextmanager, suppress
from functools import cache

import numpy as np
import torch
from tqdm import tqdm

from decoding.draw import Truncation, sample_tokens
from decoding.kvcache import KVCache
from device import cuda
from device.cuda import upload
from device.kinds import kind_of
from kernels import uses_triton
from model import GPT
from options import first_line

PREFILL_TOKENS = {
    "cpu": 1024,
    "cuda": 16384,
}  # of prompts at a time; on a CPU their activations stay in its caches
LOOK_EVERY = {
    "cpu": 1,
    "cuda": 4,
}  # steps between two looks at the slots; on CUDA a look waits for the device
SHRINK_AT = {
    "cpu": 1 / 4,
    "cuda": 1 / 2,
}  # remove idle slots if more than this share is idle; CUDA takes a new graph
SHRINK_ABOVE = {
    "cpu": 1,
    "cuda": 16,
}  # slots; on CUDA few slots take as long as fewer: a step mostly reads weights


class DecodeBatch:
    """The slots, the rows in them, and a table of all tokens drawn so far.

    Slot s holds row `rows[s]`, whose latest token is its t[s]-th. An idle slot points at dummy row N; its output goes
    to the last line of the tables and is discarded.
    """

    def __init__(
        self, model: GPT, prompts: list[list[int]], k: int, max_new_tokens: int, slots: int, stop_token=None, *,
        temperature: float = 1.0, chunk_mb: float = 0, truncation: Truncation | None = None, is_over=None,
        cuda_graphs: bool = False,
    ):  # fmt: skip
        """k completions of each prompt, `slots` at a time. The other options are those of sample.sample_groups."""
        self.model, self.prompts, self.k, self.max_new_tokens = model, prompts, k, max_new_tokens
        self.sampling = dict(temperature=temperature, chunk_mb=chunk_mb, truncation=truncation)
        self.stop_tokens, self.is_over = as_tuple(stop_token), is_over
        self.N, self.device = len(prompts) * k, model.device
        table = self.N + 1, max_new_tokens
        self.tokens = torch.zeros(table, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(table, dtype=torch.float32, device=self.device)
        self.u = torch.zeros(
            table, device=self.device
        )  # the uniform number that token t of row i is drawn with
        prompt_slots, width = prompt_slots_for(slots, k, len(prompts)), max(len(p) for p in prompts)
        dtype = model.compute_dtype
        self.cache = KVCache(
            model.config, prompt_slots, width, slots, max_new_tokens, dtype, self.device, k
        )
        self.prompt_hidden = torch.zeros(
            prompt_slots, model.config.n_embd, dtype=dtype, device=self.device
        )
        # A graph replays the lengths and addresses of its recording. Those of plain torch change with every step.
        self.graph, self.cuda_graphs = (
            None,
            cuda_graphs and uses_triton(self.cache.own) and not cuda.BROKEN,
        )
        # The memory pool of the graphs, made with the first one. It frees its memory when it is deleted after the last
        # graph. Attributes are deleted in the order of their assignment, so it comes after `graph`.
        self.pool = None
        # Of each slot, on the device: its row, its latest token and that token's number, its prompt's length.
        self.rows = torch.full((slots,), self.N, device=self.device)
        self.t, self.token, self.prompt_length = (
            torch.zeros(slots, dtype=torch.long, device=self.device) for _ in range(3)
        )
        # Of each slot, on the host: the prompt slot that it reads, and the step in which its row started. For stop
        # strings: the row whose text is to be checked (N: none), and how many of its tokens have been.
        self.prompt_slot, self.started, self.text_row, self.checked = (
            np.zeros(slots, dtype=np.int64) for _ in range(4)
        )
        self.text_row[:] = self.N
        self.slot_of_prompt = {}  # prompts in the cache: number -> prompt slot
        self.text_end = {}  # row -> its length, if a stop string ended it
        self.next_row = self.steps = 0  # the first row that waits; steps taken
        self.active = 0  # slots with a row, at the last look
        self.first_start, self.same_t = (
            0,
            True,
        )  # the earliest start of an active row; do all slots have the same t?

    def refill(self) -> bool:
        """Start waiting rows in idle slots. If none waits, remove idle slots once they are many -> is a slot active?"""
        changed = False
        while len(
            idle := np.flatnonzero((rows := self.look()) == self.N)
        ):  # a row may end with its first token
            new = self.admit(len(idle), rows)
            if not new:
                break
            self.start(idle[: len(new)], new, [self.slot_of_prompt[row // self.k] for row in new])
            changed = True
        active = np.flatnonzero(rows < self.N)
        self.active = len(active)
        if not self.active:
            return False
        kind = kind_of(self.rows)
        if (
            self.next_row == self.N
            and len(rows) > SHRINK_ABOVE[kind]
            and len(idle) > len(rows) * SHRINK_AT[kind]
        ):
            self.shrink(active)
            active, changed = np.arange(len(active)), True
        if changed:
            prompt_slot = np.full(len(self.prompt_slot), -1)
            prompt_slot[active] = self.prompt_slot[active]
            self.cache.assign(prompt_slot)
            self.first_start = self.started[active].min()
            self.same_t = bool((self.started == self.first_start).all())
        return True

    def look(self) -> np.ndarray:
        """-> the rows of the slots, on the host, after rows that have reached their stop string were retired."""
        if self.is_over:
            self.check_stop_strings()
        return self.rows.cpu().numpy()

    def check_stop_strings(self):
        """Check each slot's new tokens one after the other, also if its row has retired since the last look."""
        slots, over = np.flatnonzero(self.text_row < self.N), []
        table = self.tokens[upload(self.text_row[slots], self.device)].cpu().numpy()
        for slot, tokens in zip(slots, table, strict=True):
            row, checked = self.text_row[slot], self.checked[slot]
            ids = tokens[: min(self.steps - self.started[slot] + 1, self.max_new_tokens)].tolist()
            ids = ids[: next((i for i, token in enumerate(ids) if token in self.stop_tokens), None)]
            end = next((n for n in range(checked + 1, len(ids) + 1) if self.is_over(ids[:n])), None)
            self.checked[slot] = len(ids)
            if end:
                self.text_end[int(row)] = end
                self.text_row[slot] = self.N
                over.append(slot)
        if over:
            self.rows[upload(over, self.device)] = self.N

    def admit(self, room: int, rows: np.ndarray) -> range:
        """-> the next waiting rows, at most `room`, with prompts in the cache. Prefills missing prompts."""
        new = range(self.next_row, min(self.next_row + room, self.N))
        if any(row // self.k not in self.slot_of_prompt for row in new):
            busy, waiting = set((rows[rows < self.N] // self.k).tolist()), self.next_row // self.k
            self.slot_of_prompt = {
                p: slot for p, slot in self.slot_of_prompt.items() if p in busy or p >= waiting
            }
            # The lowest free prompt slots first, so that those in use lie together.
            free = sorted(set(range(len(self.prompt_hidden))) - set(self.slot_of_prompt.values()))
            # Prefill a few prompts ahead: one at a time is slow, and as many as there is room for is too early.
            ahead = (new.stop - 1) // self.k + 1 + math.ceil(len(rows) / self.k / 4)
            missing = [
                p for p in range(waiting, min(ahead, len(self.prompts))) if p not in self.slot_of_prompt
            ]
            self.prefill(missing[: len(free)], free[: len(missing)])
        return range(
            new.start, next((row for row in new if row // self.k not in self.slot_of_prompt), new.stop)
        )

    def prefill(self, prompts: list[int], prompt_slots: list[int]):
        """Read the prompts with these numbers into these prompt slots, PREFILL_TOKENS at a time."""
        self.slot_of_prompt |= zip(prompts, prompt_slots, strict=True)
        some = max(1, PREFILL_TOKENS[kind_of(self.rows)] // self.cache.prompt.shape[4])
        for i in range(0, len(prompts), some):
            self.prefill_some(prompts[i : i + some], prompt_slots[i : i + some])

    def prefill_some(self, prompts, prompt_slots):
        tokens = [torch.tensor(self.prompts[p]) for p in prompts]
        lengths = [len(ids) for ids in tokens]
        tokens = upload(
            torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), self.device
        )  # (P, T)
        self.cache.begin_prefill(prompt_slots, lengths)
        hidden = self.model(tokens, cache=self.cache, last=upload(lengths, self.device) - 1)[
            :, 0
        ]  # (P, C)
        self.prompt_hidden[upload(prompt_slots, self.device)] = hidden.to(self.prompt_hidden.dtype)

    def start(self, slots: np.ndarray, new: range, prompt_slots):
        """Start rows `new` in these slots: draw their first tokens from the hidden states of these prompt slots."""
        self.next_row = new.stop
        self.prompt_slot[slots], self.started[slots] = prompt_slots, self.steps
        self.text_row[slots], self.checked[slots] = new, 0
        slots, prompt_slots = upload(slots, self.device), upload(prompt_slots, self.device)
        self.rows[slots] = torch.arange(new.start, new.stop, device=self.device)
        self.prompt_length[slots] = self.cache.prompt_lengths[prompt_slots]
        self.t[slots] = 0
        self.draw(self.prompt_hidden[prompt_slots], slots)

    def step(self):
        """One more token in every slot. With CUDA graphs the first step of a batch size runs as it is, which compiles
        and warms up its kernels; then it is recorded, which computes nothing, and later steps replay it."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.forward_step()
            if self.cuda_graphs:
                self.record_graph()
        self.steps += 1

    def forward_step(self):
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
                reason, full = first_line(error), isinstance(error, torch.OutOfMemoryError)
            if emptied or not full:
                break
            torch.cuda.empty_cache()  # during a recording the allocator cannot free the blocks that it caches
        if not full:
            cuda.keep_broken(self.pool)
        self.cuda_graphs, self.pool = False, None
        tqdm.write(f"sampling goes on without CUDA graphs: {reason}", file=sys.stderr)

    def draw(self, hidden, slots):
        """hidden (n, C) of these slots -> write their next tokens into the tables; retire the rows that end here."""
        rows, t = self.rows[slots], self.t[slots]
        token, logprob = sample_tokens(self.model, hidden, self.u[rows, t], **self.sampling)
        self.tokens[rows, t], self.logprobs[rows, t] = token, logprob
        over = t == self.max_new_tokens - 1
        for stop in self.stop_tokens:
            over |= token == stop
        self.token[slots], self.rows[slots] = token, rows.masked_fill(over, self.N)

    def shrink(self, active: np.ndarray):
        """Keep these slots alone, rising numbers, and the prompt slots that they read."""
        used, self.prompt_slot = np.unique(self.prompt_slot[active], return_inverse=True)
        self.started, self.text_row, self.checked = (
            x[active] for x in (self.started, self.text_row, self.checked)
        )
        self.graph = None
        self.cache.compact(active, used, min(self.steps - self.started.min() + 1, self.max_new_tokens))
        active = upload(active, self.device)
        of_slots = self.rows, self.t, self.token, self.prompt_length
        self.rows, self.t, self.token, self.prompt_length = (x[active] for x in of_slots)

    def rehearse(self):
        """Allocate the most that decoding may take, for the planner: fill every prompt slot, start every slot, take one
        step with a full cache and rows of different lengths, and shrink by a quarter. In the step the first prompt slot
        has as many readers as can be, and the last one has some."""
        n, prompt_slots = len(self.rows), len(self.prompt_hidden)
        some = min(
            prompt_slots, max(1, PREFILL_TOKENS[kind_of(self.rows)] // self.cache.prompt.shape[4])
        )
        self.prefill(range(some), range(some))  # the first of several stands for all
        self.start(np.arange(n), range(n), np.arange(n) % prompt_slots)
        crowd = max(min(self.k, n - (prompt_slots > 1)), 1)
        others = prompt_slots - 1 - np.arange(n - crowd) % max(prompt_slots - 1, 1)
        self.cache.assign(np.concatenate([np.zeros(crowd, dtype=np.int64), others]))
        self.steps, self.first_start, self.same_t = self.max_new_tokens - 1, 0, False
        self.step()
        self.shrink(np.arange(max(n - n // 4 - 1, 1)))


def record(step, pool, stream) -> "torch.cuda.CUDAGraph":
    """A graph of what step() does; nothing is computed. torch.cuda.graph would wait for the device and empty the
    allocator's cache first."""
    graph, current, collects = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), gc.isenabled()
    stream.wait_stream(current)
    gc.disable()  # a finaliser that waits for the device (device.host.unpin) breaks a recording
    try:
        with torch.cuda.stream(stream):  # which restores the current stream after an error
            # thread_local: another thread may be writing a checkpoint
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
    """One a device, because each stream that was captured keeps a workspace for its matrix products.

    Some versions of torch free it with any of its graphs, so only one graph may live at a time.
    """
    return torch.cuda.Stream(device)


@contextmanager
def cached_casts(model: GPT):
    """Let autocast keep its bfloat16 copies of frozen weights from step to step. It does so only for weights that
    require a gradient, so here they do."""
    casts = torch.is_autocast_enabled(model.device.type)
    frozen = [p for p in model.parameters() if not p.requires_grad] if casts else []
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def as_tuple(stop_token) -> tuple[int, ...]:
    """None, an id or several -> a tuple."""
    return (
        ()
        if stop_token is None
        else tuple(stop_token)
        if isinstance(stop_token, tuple | list)
        else (stop_token,)
    )


def prompt_slots_for(slots: int, k: int, P: int) -> int:
    """-> prompts in the cache. A prompt stays until its last row is over; by then other groups have started."""
    return min(P, slots, 4 * math.ceil(slots / k))
