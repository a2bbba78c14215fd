"""Drafts change no completion: every row against `generate_naive`, whatever is guessed; and which tokens are guessed."""

import numpy as np
import pytest
import torch
from conftest import DEVICE, make_flat_model, make_model, rows_of
from interpreted import INTERPRETED

from sample import generate_naive, sample_groups
from snug import lora
from snug.decoding import decode_batch, drafts
from snug.decoding.drafts import MOST, MOST_ROWS, Drafts

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the kernels read one token per slot")
PLAIN = dict(dtype=torch.float64) if DEVICE == "cuda" else {}


@pytest.fixture
def always(monkeypatch):
    """Every guess is read, and the batches are kept. -> the batches"""
    monkeypatch.setattr(drafts, "ROWS", 1000)
    monkeypatch.setattr(drafts, "CACHED", 0)
    batches, original = [], decode_batch.DecodeBatch.step

    def step(batch):
        if batch not in batches:
            batches.append(batch)
        original(batch)

    monkeypatch.setattr(decode_batch.DecodeBatch, "step", step)
    return batches


def random_case(draw):
    """-> (a model, prompts, k, longest, options of both samplers, of ours alone)."""
    shape = str(draw.choice(["gpt2", "llama"]))
    model = make_flat_model(shape, seed=int(draw.integers(1000)), block_size=80).double()
    with torch.no_grad():
        model.norm.weight *= draw.choice([1.0, 5.0, 20.0])  # from all tokens alike to nearly one
    if draw.random() < 0.3:
        lora.add(model, rank=2, alpha=8, targets=list(lora.TARGETS))
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1)
    prompts = [draw.integers(0, 16, draw.integers(1, 20)).tolist() for _ in range(draw.integers(1, 4))]
    k, longest = int(draw.integers(1, 7)), int(draw.integers(1, 50))
    stops = (None, 3, (3, 9))[draw.integers(3)]
    options = dict(seed=int(draw.integers(1000)), stop_token=stops)
    options |= dict(temperature=float(draw.choice([0.0, 0.7, 1.0])))
    if draw.random() < 0.3:
        options |= dict(is_over=lambda ids: ids[-2:] == [5, 5])
    if stops and draw.random() < 0.4:
        options |= dict(respond=lambda row, ids: [(row + len(ids)) % 16] * (len(ids) % 5) if len(ids) % 3 else None)
    own = dict(max_batch=int(draw.integers(1, len(prompts) * k + 1)))
    return model, prompts, k, longest, options, own


def agree(seed, monkeypatch):
    """Compare the rows of a random case with the naive generator's -> how many there are."""
    draw = np.random.default_rng(seed)
    model, prompts, k, longest, options, own = random_case(draw)
    monkeypatch.setattr(drafts, "ROWS", int(draw.choice([3, 12, 1000])))  # steps without guesses, few, many
    rollouts = sample_groups(model, prompts, k, longest, **options, **own)
    for i, ids in enumerate(rollouts.completions()):
        naive, logprobs = generate_naive(model, prompts[i // k], longest, row=i, **options)
        assert ids == naive, (seed, i)
        logprobs = [logprob or 0.0 for logprob in logprobs]
        assert rollouts.sampling_logprobs[i, : len(ids)].tolist() == pytest.approx(logprobs, abs=1e6)
    return len(rollouts.tokens)


def test_random_cases(always, monkeypatch):
    assert sum(agree(seed, monkeypatch) for seed in range(30)) > 150
    kept = sum(batch.drafts.kept.sum() for batch in always)
    tried = sum(batch.drafts.tried.sum() for batch in always)
    assert 100 < kept < tried - 100  # guesses were right, and wrong


@pytest.mark.long
def test_two_thousand_rows(always, monkeypatch):
    rows, seed = 0, 1000
    while rows < 2000:
        rows += agree(seed, monkeypatch)
        seed += 1


@pytest.mark.parametrize("right, steps", [(True, 4), (False, 31)])
def test_whatever_is_guessed(right, steps, always, monkeypatch):
    """The true tokens: a step for eight of them, the first comes from the prompt. Only wrong ones: a step for each."""
    model = make_flat_model("llama", block_size=48).to(**PLAIN)
    prompts = [[1, 2, 3], [4]]
    expected = rows_of(sample_groups(model, prompts, 2, 32, seed=1))
    always.clear()

    def find(self, sequence):
        prompt = len(self.prompts[sequence // self.k])
        done = len(self.texts[sequence]) - prompt
        tokens = expected[sequence][0][done : done + MOST]
        return 3, tokens if right else [(token + 1) % 16 for token in tokens]

    monkeypatch.setattr(Drafts, "find", find)
    rows = rows_of(sample_groups(model, prompts, 2, 32, seed=1))
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(rows, expected, strict=True):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)
    assert always[0].steps == steps


def test_a_guess_does_not_go_on_behind_a_stop_token(always, monkeypatch):
    """What the rows would draw without the stop token is guessed: they end with it nevertheless, and at once."""
    model = make_flat_model("llama", block_size=48).to(**PLAIN)
    further = rows_of(sample_groups(model, [[1, 2, 3]], 6, 32, seed=1))
    always.clear()

    def find(self, sequence):
        done = len(self.texts[sequence]) - 3
        return 3, further[sequence][0][done : done + MOST]

    monkeypatch.setattr(Drafts, "find", find)
    rows = rows_of(sample_groups(model, [[1, 2, 3]], 6, 32, seed=1, stop_token=3))
    lengths = [len(ids) for ids, _ in rows]
    assert any(1 < n % 8 for n in lengths) and max(lengths) > 10
    assert always[0].steps == -(-(max(lengths) - 1) // 8)
    for i, n in enumerate(lengths):
        assert rows[i][0] == further[i][0][:n] and not always[0].tokens[i, n:].any()


def test_what_stood_behind_the_last_tokens_is_guessed():
    texts = Drafts([[1, 2, 3]], 4)
    texts.follow(0, [7, 7, 8, 9])
    texts.follow(1, [7, 7, 4])
    texts.follow(2, [7, 7])
    assert texts.find(2) == (3, [4])  # behind 3 7 7; the second completion is the later one
    texts.follow(2, [7, 7, 8])
    assert texts.find(2) == (3, [9])
    texts.follow(2, [7, 7, 8, 1])
    assert texts.find(2) == (1, [2, 3, 7, 7, 8, 1])  # of its own prompt, and on
    texts.follow(2, [7, 7, 8, 1, 6])
    assert texts.find(2) == (0, [])
    texts.follow(0, [7, 7, 8, 9, 6, 5])
    assert texts.find(2) == (1, [5])


def test_groups_share_no_texts():
    texts = Drafts([[1, 2], [3, 1]], 2)
    texts.follow(0, [5, 6])
    texts.follow(2, [5])
    assert texts.find(2) == (0, [])
    texts.follow(1, [5])
    assert texts.find(1) == (3, [6])


def test_guesses_are_read_as_long_as_they_pay(monkeypatch):
    """With three tokens found guesses are right nine times in ten, with one three times."""
    texts = Drafts([[1]], 40)
    texts.kept[:], texts.tried[:] = [0, 299, 0, 899], [0, 998, 0, 998]
    guesses = {0: (3, [5] * MOST), 1: (1, [6] * MOST)}
    monkeypatch.setattr(texts, "find", lambda sequence: guesses.get(sequence % 2))

    def lengths(sequences, rows, room=99):
        monkeypatch.setattr(drafts, "ROWS", rows)
        return [len(guess) for guess in texts.guess(dict.fromkeys(sequences, room))]

    assert lengths([0, 1], 1e6) == [MOST, MOST]
    assert lengths([0, 1], 24) == [MOST, 1]
    assert lengths([0, 1], 0.1) == [0, 0]
    assert lengths([0, 1], 1e6, room=2) == [2, 2] and lengths([0], 1e6, room=0) == [0]
    many = lengths([*range(20)], 1e6)
    assert sum(many) + 20 == MOST_ROWS and set(many[::2]) == {4, 5} and set(many[1::2]) == {0}


def test_guesses_are_counted():
    """Of three guessed tokens one was right: two were tried. Of two both were."""
    texts = Drafts([[1]], 2)
    texts.asked = [(3, [7, 7, 7]), (1, [5, 5]), (0, [])]
    texts.count([1, 2, 0])
    assert texts.kept.tolist() == [0, 2, 0, 1]
    assert texts.tried.tolist() == [0, 2, 0, 2]


def test_where_a_step_does_not_wait_for_weights_there_are_no_drafts(monkeypatch):
    """Small weights stay in a CPU's caches. The Triton kernels read one token per slot."""

    def drafts_of(model):
        return decode_batch.DecodeBatch(model, [[1]], 2, 8, None).drafts

    model = make_model("gpt2").to(**PLAIN)
    assert drafts_of(model) is None
    monkeypatch.setattr(drafts, "CACHED", sum(p.nbytes for p in model.parameters()) - 1)
    assert drafts_of(model)
    monkeypatch.setattr(drafts, "uses_triton", lambda tensor: True)
    assert drafts_of(model) is None
