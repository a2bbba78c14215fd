"""Completions out of the model: grouped, cached, batched. Token ids in, token ids out.

A prompt goes through the model once; its k completions share its keys and values; all groups are decoded in one batch. A row
that is over leaves at once, and one that waits takes its slot: a step costs what the rows that go on cost. On CUDA a step is
a replayed graph, and the host looks now and then at who is done. Token t of row i comes from a uniform number that depends on
(seed, i, t) alone (draw.py): a row does not depend on its neighbours. `generate_naive` is the oracle.

    python sample.py out/grpo_small --prompt="6025+3528=" --num_samples=4

Left out: beams, penalties; speculative decoding.
"""

import math
import sys
import time
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from checkpoint import find_run
    from settings import SampleSettings, friendly_errors, read_settings

    with friendly_errors():
        settings, _, folder = read_settings(SampleSettings, sys.argv[1:], positional="folder")
        find_run(folder)

import numpy as np
import torch
from tqdm import tqdm

from draw import Truncation, sample_tokens, uniforms
from kvcache import KVCache
from logprobs import uses_triton
from memory import MIB, kind_of, tensor_bytes
from model import autocast

# Prompts' tokens that go through the model at a time; on a CPU their activations stay in its caches.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
# Steps between two looks at who is done; on CUDA a look waits for the device.
LOOK_EVERY = {"cpu": 1, "cuda": 4}
# Slots are taken away when a larger share of them has nobody; on CUDA that takes a new graph.
LEAVE_AT = {"cpu": 1 / 4, "cuda": 1 / 2}


@dataclass
class Rollouts:
    """N completions, prompt and completion side by side. k = 2 completions of (a b), stop token `.`, 3 tokens at most:

    tokens  a b x y .   prompt_lengths 2   completion_lengths 3   mask 1 1 1   stopped True
            a b z w u                  2                      3        1 1 1   stopped False (cut off)
            c y . 0 0                  1                      2        1 1 0   stopped True
    """

    tokens: torch.Tensor  # (N, T), right-padded
    prompt_lengths: torch.Tensor  # (N,)
    completion_lengths: torch.Tensor  # (N,), the stop token included
    sampling_logprobs: torch.Tensor  # (N, T_c) float32, 0 after the end
    mask: torch.Tensor  # (N, T_c), 1 on every sampled token, the stop token included
    stopped: torch.Tensor  # (N,) boolean: ended with the stop token, or with a stop string
    stopped_by_text: torch.Tensor | None = None  # (N,) boolean: ended with a stop string, whose last token is the last one
    advantages: torch.Tensor | None = None  # (N,)
    old_logprobs: torch.Tensor | None = None  # (N, T_c)
    ref_logprobs: torch.Tensor | None = None  # (N, T_c)

    @property
    def nbytes(self):
        return tensor_bytes(value for f in fields(self) if (value := getattr(self, f.name)) is not None)

    def completions(self):
        """-> N lists of ids, without the stop token."""
        by_token = self.stopped if self.stopped_by_text is None else self.stopped & ~self.stopped_by_text
        ends = zip(self.prompt_lengths.tolist(), self.completion_lengths.tolist(), by_token.tolist(), strict=True)
        rows = self.tokens.tolist()
        return [row[start : start + length - one] for row, (start, length, one) in zip(rows, ends, strict=True)]

    def select(self, rows):
        """-> the Rollouts of some rows, a tensor or list of their numbers, in that order."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return Rollouts(**{name: None if value is None else value[rows] for name, value in parts.items()})

    @classmethod
    def joined(cls, parts):
        """Several Rollouts, one below the other, padded on the right to the longest."""
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        widest = {name: max(v.shape[-1] for v in values) for name, values in columns.items() if values[0] is not None}

        def pad(name, value):
            return torch.nn.functional.pad(value, (0, widest[name] - value.shape[1])) if value.dim() > 1 else value

        return cls(**{name: torch.cat([pad(name, v) for v in columns[name]]) if name in widest else None for name in columns})


@torch.no_grad()
def sample_groups(
    model,
    prompts,
    group_size,
    max_new_tokens,
    *,
    temperature=1.0,
    stop_token=None,
    seed=0,
    max_batch=None,
    chunk_mb=0,
    kv_cache_mb=0,
    first_row=0,
    truncation=None,
    is_over=None,
    enforce_eager=False,
    progress=False,
):
    """`group_size` completions of each prompt -> Rollouts of N = len(prompts) * group_size, groups adjacent, in order.

    prompts: non-empty lists of ids. A completion ends with stop_token (or with one of several, where it is a tuple), or where is_over(its ids) is first true (tokenizer.stopper
    makes such a function of a string), or at max_new_tokens. temperature: 0 takes the likeliest token. truncation: a
    draw.Truncation.

    max_batch: completions decoded at a time (default all), kv_cache_mb: the MiB that their cache may take (default any); where
    one ends, the next begins in its place. first_row: the number of the first row, where these are more of what was begun.
    enforce_eager: no CUDA graphs. progress: a bar in a terminal, if it takes more than some seconds.

    Raises ValueError where a prompt is empty or does not leave max_new_tokens, at least 1, of block_size.
    """
    lengths = [len(p) for p in prompts]
    if not prompts or min(lengths) == 0:
        raise ValueError("a prompt has no tokens; the model needs at least one to go on from")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: a completion has at least one token")
    if max(lengths) + max_new_tokens > model.config.block_size:
        raise ValueError(
            f"a prompt of {max(lengths)} tokens + max_new_tokens={max_new_tokens} is longer than block_size={model.config.block_size}"
        )
    slots = decode_batch(model, max(lengths), len(prompts), group_size, max_new_tokens, max_batch, kv_cache_mb)
    # Inference mode saves a tenth of a step's time on a CPU, and `assemble` makes no tensor in it. In it autocast would cast the
    # weights at every step again.
    quiet = torch.no_grad() if torch.is_autocast_enabled(model.device.type) else torch.inference_mode()
    with quiet, casts_kept(model), Bar(len(prompts) * group_size, progress) as bar:
        how, graphs = (temperature, chunk_mb, truncation), model.device.type == "cuda" and not enforce_eager
        flight = Flight(model, prompts, group_size, max_new_tokens, slots, stop_token, how, is_over, graphs)
        numbers = np.arange(first_row, first_row + flight.N)
        flight.u[: flight.N] = torch.from_numpy(uniforms(seed, numbers, np.arange(max_new_tokens)))
        while flight.fill():
            for _ in range(LOOK_EVERY[kind_of(flight.rows)]):
                flight.step()
            bar.show(flight)
        tokens, logprobs, cut = flight.tokens[: flight.N], flight.logprobs[: flight.N], flight.cut
        del flight
    return assemble(prompts, group_size, tokens, logprobs, stop_token, cut if is_over else None)


@contextmanager
def casts_kept(model):
    """Autocast keeps its bfloat16 copy of a weight for the next step only if the weight requires a gradient; frozen ones do meanwhile."""
    frozen = [p for p in model.parameters() if not p.requires_grad] if torch.is_autocast_enabled(model.device.type) else []
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


class Bar:
    """Completions that are over, and tokens a second, in a terminal."""

    def __init__(self, total, wanted):
        look = dict(bar_format="sampling: {n_fmt}/{total_fmt} completions |{bar}| {elapsed}{postfix}", delay=1e9, leave=False)
        self.bar = tqdm(total=total, disable=None if wanted else True, **look)
        self.tokens, self.began, self.shown = 0, time.monotonic(), 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.shown:
            self.bar.clear()
        self.bar.close()

    def show(self, flight):
        if not self.bar.disable:
            going = len(flight.rows) - flight.free
            self.tokens += going * LOOK_EVERY[kind_of(flight.rows)]
            seconds = time.monotonic() - self.began
            if seconds > max(3.0, self.shown + 0.2):
                self.shown, self.bar.n = seconds, flight.next - going
                self.bar.set_postfix_str(f"{self.tokens / seconds:,.0f} tok/s")


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
        self.ends = torch.zeros(places, model.config.n_embd, dtype=model.compute_dtype, device=self.device)  # the prompts' last hidden
        self.rows = torch.full((slots,), self.N, device=self.device)
        self.t, self.token, self.start_at = (torch.zeros(slots, dtype=torch.long, device=self.device) for _ in range(3))
        # What only the host knows: of slots, their place in the cache, the step at which their row began and, for stop strings,
        # that row and how many of its tokens were read.
        self.place, self.began, self.reading, self.have_read = (np.zeros(slots, dtype=np.int64) for _ in range(4))
        self.reading[:] = self.N
        self.held = {}  # prompt: its place
        self.cut = {}  # row: its length, where a stop string ended it
        self.next = self.now = 0  # the first row that waits; steps so far
        self.free, self.oldest, self.even = slots, 0, True  # slots without a row; the step at which the first row began; did all?

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
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):  # also after an error
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
            self.held = {prompt: place for prompt, place in self.held.items() if prompt in busy or prompt >= self.next // self.k}
            free = sorted(set(range(len(self.ends))) - set(self.held.values()))  # the lowest first: places in use lie together
            ahead = (new.stop - 1) // self.k + 1 + math.ceil(len(rows) / self.k / 4)  # not one at a time, nor all there is room for
            coming = [p for p in range(self.next // self.k, min(ahead, len(self.prompts))) if p not in self.held]
            self.read(coming[: len(free)], free[: len(coming)])
        return range(new.start, next((row for row in new if row // self.k not in self.held), new.stop))

    def read(self, prompts, places):
        """Prompts into the cache, some at a time."""
        self.held |= zip(prompts, places, strict=True)
        some = max(1, PREFILL_TOKENS[kind_of(self.ends)] // self.cache.prompt.shape[4])
        for i in range(0, len(prompts), some):
            texts = [self.prompts[p] for p in prompts[i : i + some]]
            self.ends[places[i : i + some]] = prefill(self.model, texts, self.cache, places[i : i + some]).to(self.ends.dtype)

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
        self.rows, self.t, self.token, self.start_at = (x[alive] for x in (self.rows, self.t, self.token, self.start_at))

    def rehearse(self):
        """What all that allocates at most: every place is read, every slot begins, a quarter leaves, and a step in which the cache is
        full, the rows have different lengths, the first place has as many slots as can be, and the last one has some."""
        n, places = len(self.rows), len(self.ends)
        self.read(range(places), range(places))
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


def decode_batch(model, prompt_length, P, k, max_new_tokens, max_batch, kv_cache_mb):
    """-> completions decoded at a time: all, unless max_batch or the bytes of the KV cache say less; at least one."""
    if kv_cache_mb:
        c, itemsize = model.config, model.compute_dtype.itemsize
        token = 2 * c.n_layer * c.n_kv_head * c.head_size * itemsize
        room = kv_cache_mb * MIB / token  # tokens
        sizes = range(1, P * k + 1)
        rows = bisect_right(sizes, room, key=lambda rows: rows * max_new_tokens + places_for(rows, k, P) * prompt_length)
        rows = max(1, rows)
        max_batch = min(max_batch or rows, rows)
    return min(max_batch or P * k, P * k)


def prefill(model, prompts, cache, places):
    """Every prompt once through the model, into its place in the cache -> the last token's hidden (P, C)."""
    lengths = [len(p) for p in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(model.device)
    cache.begin_prompts(places, lengths)
    return model(tokens, cache=cache, last=torch.tensor(lengths, device=model.device) - 1)[:, 0]


def assemble(prompts, k, tokens, logprobs, stop_token, cut=None):
    """tokens, logprobs (N, T_c) -> Rollouts; T_c and T are cut to the longest there is. cut {row: length}: where text ended a row."""
    N, steps = tokens.shape
    device = tokens.device
    is_stop = torch.isin(tokens, torch.tensor(as_tuple(stop_token), dtype=torch.long, device=device))
    # The first stop token ends a row. What follows it is zero, which may be the stop token's id too.
    stopped = is_stop.any(1)
    lengths = torch.where(stopped, is_stop.int().argmax(1) + 1, steps)  # (N,)
    by_text = None
    if cut is not None:
        rows = torch.tensor(list(cut), dtype=torch.long, device=device)
        lengths[rows] = torch.tensor(list(cut.values()), dtype=torch.long, device=device)
        by_text = torch.zeros_like(stopped).index_fill_(0, rows, True)
        stopped = stopped | by_text
    T_c = int(lengths.max())
    prompt_lengths = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(k)
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(device)
    whole = torch.zeros(N, int((prompt_lengths + lengths).max()), dtype=torch.long, device=device)
    whole[:, : padded.shape[1]] = padded.repeat_interleave(k, 0)[:, : whole.shape[1]]
    mask = torch.arange(T_c, device=device) < lengths[:, None]  # (N, T_c)
    row, place = mask.nonzero(as_tuple=True)
    whole[row, prompt_lengths[row] + place] = tokens[row, place]
    return Rollouts(whole, prompt_lengths, lengths, logprobs[:, :T_c] * mask, mask.long(), stopped, by_text)


class Numbers(list):
    """Numbers that a planner knows, in place of a tensor whose values it has not."""

    def tolist(self):
        return self


@torch.no_grad()
def rehearse_groups(model, prompt_length, P, k, max_new_tokens, *, max_batch=None, chunk_mb=0, kv_cache_mb=0):
    """What sample_groups allocates at most, for a planner's fake tensors -> Rollouts in which every length is the longest.

    The largest piece is decoded, of its steps only the last, when the cache is full.
    """
    slots = decode_batch(model, prompt_length, P, k, max_new_tokens, max_batch, kv_cache_mb)
    flight = Flight(model, [[0] * prompt_length] * P, k, max_new_tokens, slots, None, (1.0, chunk_mb))
    with casts_kept(model):
        flight.rehearse()
    tokens, logprobs, N = flight.tokens[:-1], flight.logprobs[:-1], flight.N
    del flight
    whole = torch.zeros(N, prompt_length + max_new_tokens, dtype=torch.long)
    lengths = [Numbers([length] * N) for length in (prompt_length, max_new_tokens)]
    return Rollouts(whole, *lengths, logprobs.clone(), torch.ones_like(tokens), Numbers([True] * N))


@torch.no_grad()
def generate_naive(model, prompt, max_new_tokens, *, temperature=1.0, stop_token=None, seed=0, row=0, truncation=None, is_over=None):
    """One prompt, no cache, no batch, every token from a whole forward -> (ids, log-probs): row `row` of sample_groups."""
    tokens, logprobs = list(prompt), []
    for u in uniforms(seed, [row], range(max_new_tokens))[0]:
        hidden = model(torch.tensor([tokens], device=model.device))[0, -1]
        logits = model.logits(hidden).float()
        logp = torch.log_softmax(logits / temperature if temperature else logits, -1)
        probs = logp.exp()
        cdf = (probs * truncation(probs[None])[0] if truncation else probs).cumsum(-1)
        token = int(torch.searchsorted(cdf, torch.tensor(float(u)) * cdf[-1], right=True)) if temperature else int(logits.argmax())
        tokens.append(token)
        logprobs.append(float(logp[token]))
        if token in as_tuple(stop_token) or is_over and is_over(tokens[len(prompt) :]):
            break
    return tokens[len(prompt) :], logprobs


def main(settings, folder):
    from checkpoint import load_run
    from data import as_messages, make_task
    from settings import SnugError

    run = load_run(folder, settings.device)
    if not settings.prompt and not run.settings.task:
        raise SnugError(f"{folder} was not trained here, so it has no task to take a prompt from; give --prompt=...")
    prompt = settings.prompt or make_task(run.settings).prompts("test", [settings.seed])[0]["prompt"]
    if settings.prompt and (settings.chat or run.settings.chat):
        prompt = as_messages(prompt, settings.system_prompt or run.settings.system_prompt)
    elif settings.system_prompt:
        raise SnugError(f"system_prompt={settings.system_prompt!r:.60} is a message of a chat; add --chat")
    ids = run.tokenizer.encode_prompt(prompt)
    shown = prompt if isinstance(prompt, str) else f"{prompt[-1]['content']}\n"
    room = run.model.config.block_size - len(ids)
    if not ids or room < 1:
        raise SnugError(f"the prompt has {len(ids)} tokens; this model takes 1 to {run.model.config.block_size - 1}")
    with autocast(run.settings.dtype, run.model):
        rollouts = sample_groups(
            run.model,
            [ids],
            settings.num_samples,
            min(settings.max_new_tokens, room),
            temperature=settings.temperature,
            stop_token=run.tokenizer.stop_tokens,
            seed=settings.seed,
            truncation=Truncation(settings.top_k, settings.top_p, settings.min_p),
            is_over=run.tokenizer.stopper(settings.stop_string),
            enforce_eager=settings.enforce_eager,
            progress=True,
        )
    ends = zip(rollouts.completions(), rollouts.stopped.tolist(), rollouts.sampling_logprobs.sum(1).tolist(), strict=True)
    for completion, stopped, logprob in ends:
        text = run.tokenizer.decode(completion)
        text = text[: text.index(settings.stop_string)] if settings.stop_string and settings.stop_string in text else text
        print(f"{shown}{text}{'' if stopped else ' …'}   [probability {math.exp(logprob):.3g}]")


if __name__ == "__main__":
    with friendly_errors():
        main(settings, folder)
