"""Episodes: replies that are written while a row is sampled, against `generate_naive`, which reads everything again."""

import threading
import time
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from conftest import DEVICE, make_flat_model, make_model, rows_of

import lora
from decoding import decode_batch
from decoding.kvcache import KVCache
from sample import generate_naive, sample_groups

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
STOP = 3
LONGEST = 90  # tokens of an episode


class Replies:
    """Replies of 0 to 60 tokens that depend on the row, its turn and the turn's ids; 1 to 6 turns a row."""

    def __init__(self, longest=60):
        self.longest, self.turns, self.asked = longest, Counter(), {}

    def __call__(self, row, ids):
        self.turns[row] += 1
        self.asked.setdefault(row, []).append(ids)
        if self.turns[row] > row % 6:
            return None
        draw = np.random.default_rng([row, self.turns[row], *ids])
        length = draw.choice([0, 1, int(draw.integers(2, 12)), self.longest], p=[0.2, 0.2, 0.55, 0.05])
        return draw.integers(0, 16, length).tolist()  # stop tokens, too


def ends_in_5_5(ids):
    return ids[-2:] == [5, 5]


# shape, options of the sampler, of the sampler alone
CASES = {
    "all rows at once": ("gpt2", {}, {}),
    "slots filled again": ("llama", {}, dict(max_batch=5)),
    "one slot": ("llama", {}, dict(max_batch=1)),
    "the likeliest tokens": ("gpt2", dict(temperature=0.0), {}),
    "stop strings": ("llama", dict(is_over=ends_in_5_5, temperature=0.8), {}),
    "stop strings, few slots": ("llama", dict(is_over=ends_in_5_5, temperature=0.8), dict(max_batch=7)),
    "LoRA": ("llama", dict(seed=6), dict(max_batch=9)),
}


@cache
def model_of(shape, adapters):
    model = make_flat_model(shape, block_size=LONGEST + 8)
    if adapters:
        lora.add(model, rank=2, alpha=8, targets=list(lora.TARGETS))
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1)
    return model


@cache
def naive_rows(shape, adapters, **options):
    """-> (the oracle's rows, its Replies)"""
    model, replies = model_of(shape, adapters), Replies()
    return [
        generate_naive(model, prompt, LONGEST, row=4 * p + i, respond=replies, **options)
        for p, prompt in enumerate(PROMPTS)
        for i in range(4)
    ], replies


@pytest.mark.parametrize("every, leave, wait", [(1, 1 / 4, 1 / 8), (3, 0.0, 0.0), (4, 0.5, 1.0)])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_naive_generator(case, every, leave, wait, monkeypatch):
    for setting, value in (("LOOK_EVERY", every), ("SHRINK_AT", leave), ("SHRINK_ABOVE", 1), ("REPLY_AT", wait)):
        monkeypatch.setitem(getattr(decode_batch, setting), DEVICE, value)
    monkeypatch.setitem(decode_batch.REPLY_CONTEXT, DEVICE, 3 * (LONGEST + 8))  # three replies at a time
    shape, options, own = CASES[case]
    options = dict(stop_token=STOP, seed=8) | options
    model, replies = model_of(shape, case == "LoRA"), Replies()
    rollouts = sample_groups(model, PROMPTS, 4, LONGEST, respond=replies, **options, **own)
    naive, naive_replies = naive_rows(shape, case == "LoRA", **options)
    assert replies.asked == naive_replies.asked  # every turn once, with what was sampled in it
    for i, (ids, logprobs) in enumerate(rows_of(rollouts)):
        naive_ids, expected = naive[i]
        assert ids == naive_ids
        mask = rollouts.mask[i].tolist()
        assert mask == [int(value is not None) for value in expected] + [0] * (len(mask) - len(ids))
        assert logprobs == pytest.approx([value or 0.0 for value in expected], abs=1e-5)
        assert all(value == 0 for value, drawn in zip(logprobs, mask, strict=False) if not drawn)
        assert bool(rollouts.stopped[i]) == (replies.turns[i] == i % 6 + 1)  # respond said so
    if case != "the likeliest tokens":
        assert {1, 2, 3, 4} <= set(replies.turns.values()) and not rollouts.stopped.all()
        assert (rollouts.mask == 0).sum() > 150


def test_a_reply_without_room_is_not_written():
    """The turn (. ) ends at token 1: a reply of 6 fits behind it in 8 tokens, one of 7 leaves no token to sample."""
    model = make_flat_model("llama")
    with torch.no_grad():
        model.head.weight[STOP] = 50 * model.norm.weight  # the likeliest by far, or the least likely
    always = dict(stop_token=tuple(range(16)), seed=1)
    for length, expected in ((6, 8), (7, 1), (0, 8)):
        rollouts = sample_groups(model, [[1, 2]], 2, 8, respond=lambda row, ids, n=length: [7] * n, **always)
        assert rollouts.completion_lengths.tolist() == [expected, expected]
        assert not rollouts.stopped.any()
        assert int((rollouts.mask == 0).sum()) == (12 if length == 6 else 0)
    rollouts = sample_groups(model, [[1, 2]], 2, 1, respond=lambda row, ids: None, **always)
    assert rollouts.stopped.all() and rollouts.completions() == [[3], [3]]


def test_the_cache_of_a_reply_is_that_of_a_whole_forward():
    """In float64, to 1e-10: hidden states behind replies of 1, 4 and 6 tokens, and the cache for the next step."""
    model = make_model("llama", dtype=torch.float64)
    config, generator = model.config, torch.Generator().manual_seed(3)
    rows = torch.randint(0, config.vocab_size, (4, 20), generator=generator)
    prompts, t, lengths, slots = [5, 3], np.array([4, 2, 7]), np.array([1, 4, 6]), np.array([0, 3, 1])
    prompt_slots = np.array([1, 0, 1])
    for slot, prompt in zip(slots, prompt_slots, strict=True):  # completions of the same prompt begin alike
        rows[slot, : prompts[prompt]] = torch.arange(prompts[prompt]) + 10 * prompt
    rows = rows.to(DEVICE)
    cache = KVCache(config, 2, 5, 4, 15, torch.float64, model.device)
    with torch.no_grad():
        whole = model(rows)
        for prompt in (0, 1):
            cache.begin_prefill([prompt], [prompts[prompt]])
            model(rows[slots[prompt_slots == prompt][0], : prompts[prompt]][None], cache=cache)
        for slot, prompt, first, n in zip(slots, prompt_slots, t, lengths, strict=True):
            begin = prompts[prompt]
            for part in ((0, first), (first, first + n)):  # the turn, then the reply: each in one forward
                columns = torch.arange(*part, device=DEVICE)
                one = [np.array([value]) for value in (slot, prompt, part[0], part[1] - part[0])]
                cache.begin_reply(*one)
                hidden = model(rows[slot, begin + columns][None], begin + columns[None], cache)
                torch.testing.assert_close(hidden[0], whole[slot, begin + columns], atol=1e-10, rtol=0)
        # Three replies of different lengths together, right-padded.
        cache.begin_reply(slots, prompt_slots, t, lengths)
        columns = torch.tensor(t[:, None] + np.arange(6), device=DEVICE)
        positions = columns + torch.tensor([prompts[p] for p in prompt_slots], device=DEVICE)[:, None]
        at = torch.tensor(slots, device=DEVICE)[:, None]
        hidden = model(rows[at, positions], positions, cache)
        for i, n in enumerate(lengths):
            expected = whole[slots[i], positions[i, :n]]
            torch.testing.assert_close(hidden[i, :n], expected, atol=1e-10, rtol=0)


def test_slow_replies_change_nothing_and_are_asked_together():
    """The result does not depend on how long a reply takes, and many rows wait at the same time."""
    model, running, most = make_flat_model("llama", block_size=LONGEST + 8), 0, 0
    lock = threading.Lock()

    def slow(row, ids):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02 * (row % 3))
        with lock:
            running -= 1
        return fast(row, ids)

    results = []
    for respond in (Replies(), slow):
        fast = Replies()
        results.append(sample_groups(model, PROMPTS, 6, LONGEST, stop_token=STOP, seed=5, respond=respond))
    for name, column in results[0].columns().items():
        assert torch.equal(column, getattr(results[1], name)), name
    assert most > 3


def test_an_error_in_respond_ends_the_call_after_the_others_returned():
    done = []

    def respond(row, ids):
        if row == 3:
            raise ValueError("no tool")
        time.sleep(0.05)
        done.append(row)

    with pytest.raises(ValueError, match="no tool"):
        sample_groups(make_flat_model(), PROMPTS, 3, 8, stop_token=tuple(range(16)), respond=respond)
    finished = len(done)
    time.sleep(0.1)
    assert len(done) == finished
