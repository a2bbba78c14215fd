"""TODO"""

import math
import sys
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from tqdm import tqdm

from decoding.draw import sample_tokens
from decoding.kvcache import KVCache
from logprobs.kernels import uses_triton
from memory.ledger import kind_of

# Prompts' tokens that go through the model at a time; on a CPU their activations stay in its caches.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}


# Steps between two looks at who is done; on CUDA a look waits for the device.
LOOK_EVERY = {"cpu": 1, "cuda": 4}


# Slots are taken away when a larger share of them has nobody; on CUDA that takes a new graph.
LEAVE_AT = {"cpu": 1 / 4, "cuda": 1 / 2}


@contextmanager
def casts_kept(model):
    """Autocast keeps its bfloat16 copy of a weight for the next step only if the weight requires a gradient; frozen ones do meanwhile."""
    frozen = (
        [p for p in model.parameters() if not p.requires_grad] if torch.is_autocast_enabled(model.device.type) else []
    )
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


class Flight:
    """The completions that are being decoded, a slot each; those that wait for one; and what has been drawn.

    Slot s holds row `rows[s]`, whose latest token is its `t[s]`-th. A row whose completion is over leaves, on the device, and its
    slot holds row N, which is nobody's: what is drawn there goes into a line of the tables that is thrown away. The host looks
    at `rows` now and then, and gives free slots to rows that wait. Where none waits, it takes free slots away.
    """

    def __init__(self, model, prompts, k, max_new_tokens, slots, stop_token, how, is_over=None, graphs=False):
        """how: sample_tokens' last arguments. graphs: are steps to be recorded and replayed, where kernels take them?"""
        self.model, self.prompts, self.k, self.steps = model, prompts, k, max_new_tokens
        self.stop_tokens, self.how, self.is_over, self.graph = as_tuple(stop_token), how, is_over, None
        self.N, self.device = len(prompts) * k, model.device
        self.tokens = torch.zeros(self.N + 1, max_new_tokens, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(self.N + 1, max_new_tokens, dtype=torch.float32, device=self.device)
        self.u = torch.zeros(self.N + 1, max_new_tokens, device=self.device)
        places = places_for(slots, k, len(prompts))
        width = max(len(p) for p in prompts)
        self.cache = KVCache(model.config, places, width, slots, max_new_tokens, model.compute_dtype, self.device, k)
        self.graphs = graphs and uses_triton(self.cache.own)  # plain torch has lengths and addresses of the host in it
        self.ends = torch.zeros(
            places, model.config.n_embd, dtype=model.compute_dtype, device=self.device
        )  # the prompts' last hidden
        self.rows = torch.full((slots,), self.N, device=self.device)
        self.t, self.token, self.start_at = (torch.zeros(slots, dtype=torch.long, device=self.device) for _ in range(3))
        # What only the host knows: of slots, their place in the cache, the step at which their row began and, for stop strings,
        # that row and how many of its tokens were read.
        self.place, self.began, self.reading, self.have_read = (np.zeros(slots, dtype=np.int64) for _ in range(4))
        self.reading[:] = self.N
        self.held = {}  # prompt: its place
        self.cut = {}  # row: its length, where a stop string ended it
        self.next = self.now = 0  # the first row that waits; steps so far
        self.free, self.oldest, self.even = (
            slots,
            0,
            True,
        )  # slots without a row; the step at which the first row began; did all?

    def draw(self, hidden, slots):
        """hidden (n, C) of these slots -> their next tokens, written down; who is done leaves."""
        rows, t = self.rows[slots], self.t[slots]
        token, logprob = sample_tokens(self.model, hidden, self.u[rows, t], *self.how)
        self.tokens[rows, t], self.logprobs[rows, t] = token, logprob
        over = t == self.steps - 1
        for stop in self.stop_tokens:
            over |= token == stop
        self.token[slots], self.rows[slots] = token, rows.masked_fill(over, self.N)

    def step(self):
        """One token more in every slot. With graphs the first step with so many slots is taken as it is, which warms up what is
        compiled or chosen at the first call, and then recorded, which takes no step; those that follow replay it."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.advance()
            if self.graphs:
                self.record()
        self.now += 1

    def record(self):
        """A graph of the next step; where there cannot be one, out of memory for instance, steps go on as they are."""
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
            ):  # also after an error
                graph = torch.cuda.CUDAGraph()
                # thread_local: another thread may be writing a checkpoint
                with torch.cuda.graph(graph, stream=capture_stream(self.device), capture_error_mode="thread_local"):
                    self.advance()
            self.graph = graph
        except RuntimeError as error:
            self.graphs = False
            tqdm.write(f"sampling goes on without CUDA graphs: {str(error).splitlines()[0]}", file=sys.stderr)

    def advance(self):
        columns = min(self.now - self.oldest + 1, self.steps)
        self.cache.begin_step(self.t, columns, self.even)
        hidden = self.model(self.token[:, None], (self.start_at + self.t)[:, None], self.cache)[:, 0]
        self.t.add_(1).clamp_(max=self.steps - 1)  # of slots that nobody has, too
        self.draw(hidden, slice(None))

    def fill(self):
        """Rows that wait get the slots of those that are over; where none waits, slots that are over are taken away -> is one left?"""
        changed = False
        while len(free := np.flatnonzero((rows := self.look()) == self.N)):
            new = self.admitted(len(free), rows)
            if not new:
                break
            self.start(free[: len(new)], new, [self.held[row // self.k] for row in new])
            changed = True
        self.free = len(free)
        if len(free) == len(rows):
            return False
        alive = np.flatnonzero(rows < self.N)
        if self.next == self.N and len(free) > len(rows) * LEAVE_AT[kind_of(self.rows)]:
            self.leave(alive)
            alive, self.free, changed = np.arange(len(alive)), 0, True
        if changed:
            place = np.full(len(self.place), -1)
            place[alive] = self.place[alive]
            self.cache.begin_rows(place)
            self.oldest = self.began[alive].min()
            self.even = bool((self.began == self.oldest).all())
        return True

    def look(self):
        """-> the slots' rows, on the host; what has come to a stop string has left."""
        if self.is_over:
            self.read_texts()
        return self.rows.cpu().numpy()

    def read_texts(self):
        """The new tokens of every slot, one after the other, also of those whose row has left since the last look."""
        slots, over = np.flatnonzero(self.reading < self.N), []
        table = self.tokens[torch.tensor(self.reading[slots], device=self.device)].cpu().numpy()
        for slot, tokens in zip(slots, table, strict=True):
            row, read = self.reading[slot], self.have_read[slot]
            ids = tokens[: min(self.now - self.began[slot] + 1, self.steps)].tolist()
            ids = ids[: next((i for i, token in enumerate(ids) if token in self.stop_tokens), None)]
            end = next((n for n in range(read + 1, len(ids) + 1) if self.is_over(ids[:n])), None)
            self.have_read[slot] = len(ids)
            if end:
                self.cut[int(row)] = end
                self.reading[slot] = self.N
                over.append(slot)
        self.rows[torch.tensor(over, dtype=torch.long, device=self.device)] = self.N

    def admitted(self, room, rows):
        """-> the next rows, at most `room`, whose prompts have a place; prompts are read into the places that are free."""
        new = range(self.next, min(self.next + room, self.N))
        if any(row // self.k not in self.held for row in new):
            busy = set((rows[rows < self.N] // self.k).tolist())
            self.held = {
                prompt: place for prompt, place in self.held.items() if prompt in busy or prompt >= self.next // self.k
            }
            free = sorted(
                set(range(len(self.ends))) - set(self.held.values())
            )  # the lowest first: places in use lie together
            ahead = (
                (new.stop - 1) // self.k + 1 + math.ceil(len(rows) / self.k / 4)
            )  # not one at a time, nor all there is room for
            coming = [p for p in range(self.next // self.k, min(ahead, len(self.prompts))) if p not in self.held]
            self.read(coming[: len(free)], free[: len(coming)])
        return range(new.start, next((row for row in new if row // self.k not in self.held), new.stop))

    def read(self, prompts, places):
        """Prompts into the cache, some at a time."""
        self.held |= zip(prompts, places, strict=True)
        some = max(1, PREFILL_TOKENS[kind_of(self.ends)] // self.cache.prompt.shape[4])
        for i in range(0, len(prompts), some):
            texts = [self.prompts[p] for p in prompts[i : i + some]]
            self.ends[places[i : i + some]] = prefill(self.model, texts, self.cache, places[i : i + some]).to(
                self.ends.dtype
            )

    def start(self, slots, new, places):
        """The first tokens of rows `new`, a range, in these slots, from the ends of the prompts in these places."""
        self.next = new.stop
        self.place[slots], self.began[slots], self.reading[slots], self.have_read[slots] = places, self.now, new, 0
        slots, places = (torch.tensor(numbers, device=self.device) for numbers in (slots, places))
        self.rows[slots] = torch.arange(new.start, new.stop, device=self.device)
        self.start_at[slots] = self.cache.prompt_lengths[places]
        self.t[slots] = 0
        self.draw(self.ends[places], slots)

    def leave(self, alive):
        """Only these slots, an array of rising numbers, are left, and the places that they read."""
        used, self.place = np.unique(self.place[alive], return_inverse=True)
        self.began, self.reading, self.have_read = (x[alive] for x in (self.began, self.reading, self.have_read))
        self.graph = None
        self.cache.keep(alive, used, min(self.now - self.began.min() + 1, self.steps))
        alive = torch.tensor(alive, device=self.device)
        self.rows, self.t, self.token, self.start_at = (
            x[alive] for x in (self.rows, self.t, self.token, self.start_at)
        )

    def rehearse(self):
        """What all that allocates at most: every place is read, every slot begins, a quarter leaves, and a step in which the cache is
        full, the rows have different lengths, the first place has as many slots as can be, and the last one has some."""
        n, places = len(self.rows), len(self.ends)
        some = min(
            places, max(1, PREFILL_TOKENS[kind_of(self.ends)] // self.cache.prompt.shape[4])
        )  # one prefill stands for all
        self.read(range(some), range(some))
        self.start(np.arange(n), range(n), np.arange(n) % places)
        crowd = max(min(self.k, n - (places > 1)), 1)
        others = places - 1 - np.arange(n - crowd) % max(places - 1, 1)
        self.cache.begin_rows(np.concatenate([np.zeros(crowd, dtype=np.int64), others]))
        self.now, self.oldest, self.even = self.steps - 1, 0, False
        self.step()
        self.leave(np.arange(max(n - n // 4 - 1, 1)))


@cache
def capture_stream(device):
    """One a device: the matrix products' workspace of a stream is kept."""
    return torch.cuda.Stream(device)


def as_tuple(stop_token):
    """None, a token or several -> a tuple."""
    return () if stop_token is None else tuple(stop_token) if isinstance(stop_token, tuple | list) else (stop_token,)


def places_for(slots, k, P):
    """-> prompts held at a time: a group keeps its prompt until its last row is over, and by then other groups have begun."""
    return min(P, slots, 4 * math.ceil(slots / k))


def decode_batch(P, k, max_batch=None):
    """-> completions decoded at a time: all, unless max_batch says less."""
    return min(max_batch or P * k, P * k)


def prefill(model, prompts, cache, places):
    """Every prompt once through the model, into its place in the cache -> the last token's hidden (P, C)."""
    lengths = [len(p) for p in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(model.device)
    cache.begin_prompts(places, lengths)
    return model(tokens, cache=cache, last=torch.tensor(lengths, device=model.device) - 1)[:, 0]
