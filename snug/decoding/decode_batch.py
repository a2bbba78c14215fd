"""Continuous batching: many completions are decoded together, a token per step. Where one ends, another starts.

A sequence is one completion; sequence i continues prompt i // k. A slot is a position in the decode batch, which goes
through the model in every step. A prompt slot is where the KV cache holds one prompt. The life of a sequence:

    prefill   its prompt goes through the model once, into a prompt slot; the prompt's last hidden state is kept
    start     the sequence gets a slot, and its first token is drawn from that hidden state
    step      all slots go through the model together and get one more token each
    retire    after a stop token or max_new_tokens the device makes the slot idle
    refill    the host looks at the slots now and then, and starts waiting sequences in the idle ones

When no sequence waits, idle slots are removed.

With `respond` a stop token or a stop string ends a turn (turns.py). At its next look the host sees this end, and asks
for a reply in a thread. The slot keeps its sequence and waits, while the other slots go on. Once many sequences wait
(REPLY_AT), their replies are read together: each reply goes through the model behind the slot's own columns, and the
next token is drawn. The moment of reading depends on counts alone, never on how long a tool takes, so that a run can be
repeated bit for bit.

Left out: what a rollout is (sample.py).
Test: pytest tests/test_sample.py
"""

from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from snug.decoding.draw import sample_tokens
from snug.decoding.kvcache import KVCache
from snug.decoding.recorder import Recorder
from snug.decoding.turns import Turns
from snug.device.kinds import kind_of, upload
from snug.memory.ledger import unwatched
from snug.options import SnugError
from snug.options.progress import counted, phase

# Prompt tokens that are prefilled at a time. With so few, a CPU keeps their activations in its caches.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
# Steps between two looks at the slots. On CUDA a look waits for the device.
LOOK_EVERY = {"cpu": 1, "cuda": 4}
# Idle slots are removed if more than this share is idle. CUDA then records a new graph.
SHRINK_AT = {"cpu": 1 / 4, "cuda": 1 / 2}
# Idle slots are removed only above this number of slots. On CUDA 16 slots take no longer than fewer slots: the time of
# a step goes into reading the weights.
SHRINK_ABOVE = {"cpu": 1, "cuda": 16}
# Replies are read once this share of the active sequences waits for a reply.
REPLY_AT = {"cpu": 1 / 8, "cuda": 1 / 4}
# The replies that are read at a time see at most this many tokens, whose keys and values are copied.
REPLY_CONTEXT = {"cpu": 4096, "cuda": 16384}


class DecodeBatch:
    """The slots, the sequences in them, and tables of all tokens drawn so far.

    On the device slot s holds sequence `sequences[s]`; the number of the sequence's latest token is t[s]. An idle slot
    holds the dummy sequence N; its output goes to the last row of the tables and is discarded. On the host `held[s]` is
    the sequence in slot s at the last look; a sequence that waits for a reply stays in `held`. The host's other records
    are by sequence or by prompt, not by slot.

    tokens, logprobs  (N + 1, max_new_tokens)  what was drawn; row i is sequence i
    u                 (N + 1, max_new_tokens)  the uniform numbers to draw with
    written           (N + 1, max_new_tokens)  True: a reply's token, not drawn; None without `ask`
    turns             where turns end on the host; None without `is_over` and `ask`
    """

    def __init__(
        self,
        model,
        prompts,
        k,
        max_new_tokens,
        max_batch,
        stop_token=None,
        *,
        temperature=1.0,
        chunk_mb=0,
        is_over=None,
        ask=None,
        cuda_graphs=False,
    ):
        """k: completions of each prompt. ask(sequence, ids of its turn) -> a concurrent.futures.Future of what
        `respond` returns. The other options are the same as in sample.sample_groups."""
        self.model, self.prompts, self.k, self.max_new_tokens = model, prompts, k, max_new_tokens
        self.sampling = dict(temperature=temperature, chunk_mb=chunk_mb)
        self.stop_tokens = as_tuple(stop_token)
        self.N = len(prompts) * k
        slots = min(max_batch or self.N, self.N)
        self.device = model.device
        shape, zeros = (self.N + 1, max_new_tokens), partial(torch.zeros, device=self.device)
        self.tokens = zeros(shape, dtype=torch.long)
        self.logprobs = zeros(shape, dtype=torch.float32)
        self.u = zeros(shape)
        self.kind = kind_of(self.u).replace("mps", "cuda")  # a GPU, too
        self.written = zeros(shape, dtype=torch.bool) if ask else None
        self.turns = Turns(max_new_tokens, self.stop_tokens, is_over, ask) if is_over or ask else None
        # A prompt stays until its last sequence is over. Before that, other groups start and need prompt slots too.
        prompt_slots = min(len(prompts), slots, 4 * -(-slots // k))
        width, dtype = max(map(len, prompts)), model.compute_dtype
        self.cache = KVCache(
            model.config, prompt_slots, width, slots, max_new_tokens, dtype, self.device, k
        )
        self.prompt_hidden = zeros(prompt_slots, model.config.n_embd, dtype=dtype)
        groups = slots if self.kind == "cpu" else -(-slots // k)  # few slots: small prefills
        self.prompts_at_once = max(1, min(PREFILL_TOKENS[self.kind] // width, groups))
        self.replies_at_once = max(1, REPLY_CONTEXT[self.kind] // self.cache.max_length)
        # A reply goes on from a state, which must not have read a token behind the turn's stop string.
        at_once = self.cache.states and is_over and ask
        self.look_every = 1 if at_once else LOOK_EVERY[self.kind]
        # A graph replays the lengths and addresses that were recorded. In plain torch they change with every step.
        self.recorder = Recorder(self.device) if cuda_graphs and self.cache.kernel else None
        # On the device, per slot: its sequence, the number of its latest token, this token, its prompt's length.
        self.sequences = torch.full((slots,), self.N, device=self.device)
        self.t = zeros(slots, dtype=torch.long)
        self.token = torch.zeros_like(self.t)
        self.prompt_length = torch.zeros_like(self.t)
        self.held = np.full(slots, self.N)
        # Per sequence: the step that drew its first token. A reply of n tokens moves this number n steps back.
        self.started = np.zeros(self.N, int)
        # Per prompt: its prompt slot; -1: not in the cache. The last entry is for the dummy prompt of idle slots.
        self.prompt_slot = np.full(len(prompts) + 1, -1)
        self.next_prompt = 0  # the first prompt that has not been in the cache
        self.next_sequence = 0  # the first sequence that has not started
        self.steps = 0  # taken so far
        self.first_start = 0  # the earliest start of an active sequence
        self.same_t = True  # is t the same in all active slots?

    def decode(self):
        """Step until all completions are over. The bar counts a completion that goes on as its share of
        max_new_tokens."""
        with phase("sampling", self.N, "completions") as bar:
            before = bar.n
            while self.refill():
                for _ in range(self.look_every):
                    # Metering costs time on a CPU, and a step's memory changes slowly: meter every 16th step.
                    with unwatched() if self.steps % 16 else nullcontext():
                        self.step()
                held = self.held[self.held < self.N]
                tokens = (self.steps - self.started[held] + 1).sum()
                done = self.next_sequence - len(held) + int(tokens) // self.max_new_tokens
                bar.update(before + done - bar.n)
            bar.update(before + self.N - bar.n)

    def refill(self):
        """Start waiting sequences in idle slots. If none waits, remove idle slots once they are many.

        -> the number of active slots"""
        changed = False
        while True:  # a sequence may end with its first token
            self.look()
            replied = self.read_replies()
            idle = np.flatnonzero(self.held == self.N)
            new = self.admit(len(idle))
            if not new and not replied:
                break
            self.start(idle[: len(new)], new)
            changed = True
        slots, active = len(self.held), np.flatnonzero(self.held < self.N)
        started = self.started[self.held[active]]
        many_idle = slots > SHRINK_ABOVE[self.kind] and len(idle) > slots * SHRINK_AT[self.kind]
        if len(active) and self.next_sequence == self.N and many_idle:
            self.shrink(active)
            changed = True
        if len(active) and changed:
            self.cache.assign(self.prompt_slot[self.held // self.k])
            self.first_start = started.min()
            self.same_t = bool((started == self.first_start).all())
        return len(active)

    def look(self):
        """Update `held`. Where a turn has ended since the last look, retire its sequence, or ask for a reply.

        The device itself retires a sequence at a stop token. It does not know stop strings: the tokens that it has
        drawn behind one are dropped.
        """
        over = self.sequences.cpu().numpy() == self.N
        if self.turns is None:
            self.held[over] = self.N
            return
        waits = np.isin(self.held, list(self.turns.waiting))
        may_be_over = over | bool(self.turns.is_over)
        slots = np.flatnonzero((self.held < self.N) & ~waits & may_be_over)
        sequences = self.held[slots]
        rows = self.tokens[upload(sequences, self.device)].cpu().numpy()
        drawn = np.minimum(self.steps - self.started[sequences] + 1, self.max_new_tokens)
        ended = [
            slot
            for slot, sequence, row, n in zip(slots, sequences.tolist(), rows, drawn, strict=True)
            if self.turns.ended(sequence, row[:n].tolist())
        ]
        if ended:
            self.sequences[upload(ended, self.device)] = self.N
            self.retire()

    def retire(self):
        """The slots of sequences whose last turn ended become idle."""
        self.held[np.isin(self.held, list(self.turns.ends))] = self.N

    def read_replies(self):
        """If enough sequences wait: each goes on behind its reply, or is retired. -> does any go on?"""
        waiting = len(self.turns.waiting) if self.turns else 0
        if not waiting or waiting < REPLY_AT[self.kind] * np.count_nonzero(self.held < self.N):
            return False
        slot_of = {sequence: slot for slot, sequence in enumerate(self.held.tolist())}
        replies = [(slot_of[sequence], *rest) for sequence, *rest in self.turns.replies()]
        self.retire()
        n = self.replies_at_once
        for i in range(0, len(replies), n):
            self.read(*zip(*replies[i : i + n], strict=True))
        return bool(replies)

    def read(self, slots, lengths, replies):
        """Write `replies` (lists of ids) behind the first `lengths` tokens of these slots' sequences, run the model on
        them, and draw the next tokens.

        The model reads the turn's last token too: perhaps no step has read this token yet."""
        added = np.array(list(map(len, replies)))
        slots, lengths = np.array([slots, lengths])
        ends = lengths + added
        held = self.held[slots]
        for row, begin, end, reply in zip(held, lengths, ends, replies, strict=True):
            self.tokens[row, begin:end] = upload(reply, self.device)
            self.written[row, begin:end] = True
        self.started[held] = self.steps - ends
        columns, positions = self.cache.begin_reply(
            slots, self.prompt_slot[held // self.k], lengths - 1, added + 1
        )
        slots, held, added, ends = (upload(x, self.device) for x in (slots, held, added, ends))
        hidden = self.model(self.tokens[held[:, None], columns], positions, self.cache, last=added)
        self.sequences[slots] = held
        self.t[slots] = ends
        self.draw(hidden[:, 0], slots)

    def admit(self, room):
        """-> the next sequences to start, at most `room`, whose prompts are in the cache. Prefills missing prompts."""
        stop = min(self.next_sequence + room, self.N)
        if stop > self.next_prompt * self.k:
            over = np.setdiff1d(np.arange(self.next_sequence // self.k), self.held // self.k)
            self.prompt_slot[over] = -1
            # The lowest free prompt slots first, so that the slots in use are neighbours.
            free = np.setdiff1d(np.arange(len(self.prompt_hidden)), self.prompt_slot)
            # Prefill a few prompts ahead: one at a time is slow, and all free slots would be filled too early.
            ahead = (stop - 1) // self.k + 1 + -(-len(self.held) // (4 * self.k))
            missing = range(self.next_prompt, min(ahead, len(self.prompts)))[: len(free)]
            self.prefill(missing, free[: len(missing)])
            self.next_prompt += len(missing)
        return range(self.next_sequence, min(stop, self.next_prompt * self.k))

    def prefill(self, prompts, prompt_slots):
        """Run the model on the prompts with these numbers, PREFILL_TOKENS at a time, and fill these prompt slots."""
        self.prompt_slot[prompts] = prompt_slots
        n = self.prompts_at_once
        for i in counted(range(0, len(prompts), n), "prefills"):
            slots = prompt_slots[i : i + n]
            tokens = [torch.tensor(self.prompts[p]) for p in prompts[i : i + n]]
            lengths = [len(ids) for ids in tokens]
            self.cache.begin_prefill(slots, lengths)
            tokens = upload(
                torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), self.device
            )  # (P, T)
            last = upload(lengths, self.device) - 1
            hidden = self.model(tokens, cache=self.cache, last=last)[:, 0]  # (P, C)
            self.prompt_hidden[upload(slots, self.device)] = hidden.to(self.prompt_hidden.dtype)

    def start(self, slots, new):
        """Start sequences `new` in these slots: draw their first tokens from their prompts' hidden states."""
        self.next_sequence = new.stop
        self.held[slots] = new
        self.started[new] = self.steps
        prompt_slots = upload(self.prompt_slot[self.held[slots] // self.k], self.device)
        slots = upload(slots, self.device)
        self.sequences[slots] = torch.arange(new.start, new.stop, device=self.device)
        self.prompt_length[slots] = self.cache.prompt_lengths[prompt_slots]
        self.t[slots] = 0
        if states := self.cache.states:
            states.move(states.first_prompt + prompt_slots, slots)
        self.draw(self.prompt_hidden[prompt_slots], slots)

    def step(self):
        """One more token in every slot."""
        if self.recorder:
            self.recorder.run(self.forward_step)
        else:
            self.forward_step()
        self.steps += 1

    def forward_step(self):
        """Run the model on each slot's latest token, and draw the next."""
        columns = min(self.steps - self.first_start + 1, self.max_new_tokens)
        self.cache.begin_step(self.t, columns, self.same_t)
        if self.cache.states:
            self.cache.states.begin(slice(len(self.t)), self.sequences < self.N, 1)
        positions = (self.prompt_length + self.t)[:, None]
        hidden = self.model(self.token[:, None], positions, self.cache)[:, 0]  # (slots, C)
        self.t.add_(1).clamp_(max=self.max_new_tokens - 1)  # idle slots count too
        self.draw(hidden, slice(None))

    def draw(self, hidden, slots):
        """hidden (n, C) of these slots -> write their next tokens into the tables; retire sequences that end here."""
        sequences = self.sequences[slots]
        t = self.t[slots]
        token, logprob = sample_tokens(self.model, hidden, self.u[sequences, t], **self.sampling)
        self.tokens[sequences, t] = token
        self.logprobs[sequences, t] = logprob
        over = t == self.max_new_tokens - 1
        for stop in self.stop_tokens:
            over |= token == stop
        self.token[slots] = token
        self.sequences[slots] = sequences.masked_fill(over, self.N)

    def shrink(self, active):
        """Keep only these slots (rising numbers) and the prompt slots that they read."""
        if self.recorder:
            self.recorder.graph = None
        self.held = self.held[active]
        prompts = self.held // self.k
        prompt_slots, self.prompt_slot[prompts] = np.unique(
            self.prompt_slot[prompts], return_inverse=True
        )
        self.cache.compact(active, prompt_slots, self.steps - self.started[self.held].min())
        active = upload(active, self.device)
        self.sequences = self.sequences[active]
        self.t = self.t[active]
        self.token = self.token[active]
        self.prompt_length = self.prompt_length[active]

    def rehearse(self):
        """Allocate the most that decoding may take, for the planner: prefill, start every slot, take one step with a
        full cache and sequences of different lengths, read the longest replies, and shrink by a quarter. In this step
        as many slots as possible read the first prompt slot; the other slots share the other prompt slots."""
        n, prompt_slots = len(self.held), len(self.prompt_hidden)
        # Prompts are prefilled some at a time; the first of these prefills stands for all.
        P = min(prompt_slots, self.prompts_at_once)
        self.prefill(range(P), np.arange(P))
        self.prompt_slot[:-1] = np.arange(len(self.prompts)) % prompt_slots
        self.start(np.arange(n), range(n))
        self.held[:] = np.arange(n) % len(self.prompts) * self.k
        readers = max(min(self.k, n - (prompt_slots > 1)), 1)
        others = prompt_slots - 1 - np.arange(n - readers) % max(prompt_slots - 1, 1)
        self.cache.assign(np.concatenate([np.zeros(readers, int), others]))
        self.steps = self.max_new_tokens - 1
        self.first_start = 0
        self.same_t = False
        self.forward_step()
        if self.written is not None:
            w, longest = min(n, self.replies_at_once), self.max_new_tokens - 2
            self.read(range(w), [1] * w, [[0] * longest] * w)
        self.shrink(np.arange(max(n - n // 4 - 1, 1)))


def check_prompts(prompts, max_new_tokens, block_size):
    longest = max(map(len, prompts))
    if not all(prompts):
        raise ValueError("a prompt has no tokens; the model needs at least one")
    if longest + max_new_tokens > block_size:
        raise SnugError(
            f"a prompt of {longest} tokens + max_new_tokens={max_new_tokens} is longer than block_size={block_size}; "
            "lower max_new_tokens or max_prompt_length"
        )


def as_tuple(stop_token):
    """None, an id or several -> a tuple."""
    if stop_token is None:
        return ()
    return tuple(stop_token) if isinstance(stop_token, tuple | list) else (stop_token,)
