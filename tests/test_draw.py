"""Tokens from logits: the uniforms, the inverse CDF, what `Truncation` leaves."""

import math

import numpy as np
import pytest
import torch
from conftest import DEVICE, make_flat_model, make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.draw import Truncation, sample_tokens, uniforms
from sample import generate_naive, sample_groups


def test_uniforms_depend_on_seed_row_and_step_alone():
    grid = uniforms(7, range(50), range(40))
    assert grid.shape == (50, 40) and grid.dtype == np.float32
    np.testing.assert_array_equal(uniforms(7, [31, 4], range(20, 40)), grid[[31, 4], 20:])
    assert (uniforms(8, range(50), range(40)) != grid).mean() > 0.999
    assert len(np.unique(uniforms(0, range(1000), range(100)))) > 99_000
    big = uniforms(2**63 + 5, range(4000), range(50))
    assert 0 < big.min() and big.max() < 1
    counts = np.histogram(big, 100, (0, 1))[0]
    assert ((counts - 2000.0) ** 2 / 2000).sum() < 180  # 99 degrees of freedom: exceeded once in a million tries
    assert abs(np.corrcoef(big[:, :-1].ravel(), big[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(big[:-1].ravel(), big[1:].ravel())[0, 1]) < 0.01


def test_the_largest_uniform_never_picks_a_token_of_probability_zero():
    model = make_model("gpt2")
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.embedding.weight[[5, 6, 40]] = 50.0  # the others have e^-1600: 0 in float32
    hidden = model(torch.zeros(3, 1, dtype=torch.long, device=DEVICE))[:, 0]
    u = torch.tensor([0.0, 0.5, 1 - 2**-23], device=DEVICE)
    tokens, logprobs = sample_tokens(model, hidden, u, 1.0)
    assert tokens.tolist() == [5, 6, 40] and logprobs.tolist() == pytest.approx([-np.log(3)] * 3, abs=1e-6)


def rows_with_an_unlikely_end(V):
    """-> logits (40, V), uniforms (40,) near 1: 256 likely tokens; the others, at the end, have 1e-23 together."""
    generator = np.random.default_rng(0)
    x = generator.normal(50, 3, (40, V)).astype(np.float32)
    x[:, 256:] = x[:, 256:] / 30
    return x, np.float32(1) - np.float32(2**-24) * generator.integers(1, 8, 40).astype(np.float32)


# ----------------------------------------------------------------------------------------------------------------------


def left_by(probs, top_k, top_p, min_p):
    """What the docstring of Truncation says, token by token, on one row of floats."""
    ranked = sorted((i for i, p in enumerate(probs) if p > 0), key=lambda i: (-probs[i], i))
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1:
        whole, before, some = sum(probs[i] for i in ranked), 0.0, []
        for i in ranked:
            if before >= top_p * whole:
                break
            some.append(i)
            before += probs[i]
        ranked = some
    return {i for i in ranked if probs[i] >= min_p * max(probs)}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 1, 2, 3, 8, 13]), min_size=1, max_size=9).filter(any),
    st.integers(0, 10),
    st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_truncation_leaves_what_it_says(weights, top_k, top_p, min_p):
    """Ties, zeros, a limit above the vocabulary; weights are multiples of 1/64, so that sums are exact."""
    weights = [w / 64 for w in weights]
    mask = Truncation(top_k, top_p, min_p)(torch.tensor([weights, weights[::-1]], dtype=torch.float64))
    for row, values in zip(mask, (weights, weights[::-1]), strict=True):
        expected = left_by(values, top_k, top_p, min_p)
        assert set(row.nonzero()[:, 0].tolist()) == expected and expected


def test_truncation_by_hand():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    for truncation, expected in [
        (Truncation(top_k=2), [1, 3]),
        (Truncation(top_p=0.7), [1, 3]),
        (Truncation(top_p=0.71), [1, 2, 3]),
        (Truncation(min_p=0.5), [1, 2, 3]),
        (Truncation(top_k=3, top_p=0.4), [1]),  # 0.4 of the 0.9 that are left are less than 0.4
        (Truncation(top_p=0.0001), [1]),
        (Truncation(), [0, 1, 2, 3]),
    ]:
        assert truncation(probs)[0].nonzero()[:, 0].tolist() == expected
    halves = torch.tensor([[0.25, 0.5, 0.25]])  # exact sums: at the limit itself nothing is added
    assert Truncation(top_p=0.5)(halves).tolist() == [[False, True, False]]
    assert Truncation(top_p=0.75)(halves).tolist() == [[True, True, False]]
    assert not Truncation() and Truncation(top_k=1) and Truncation(top_p=0.9) and Truncation(min_p=0.1)


@pytest.mark.parametrize("truncation", [Truncation(top_p=0.6), Truncation(6, 0.8, 0.1)])
def test_sampled_frequencies_of_truncated_distributions(truncation):
    """The support is exact; within it frequencies are the model's; log-probs are those of the whole distribution."""
    model = make_flat_model("gpt2", vocab_size=13)
    rollouts = sample_groups(model, [[1, 2]], 20_000, 1, seed=3, temperature=0.8, truncation=truncation)
    with torch.no_grad():
        p = torch.softmax(model.logits(model(torch.tensor([[1, 2]], device=DEVICE))[0, -1]).double() / 0.8, -1).cpu()
    support = left_by(p.tolist(), truncation.top_k, truncation.top_p, truncation.min_p)
    tokens = rollouts.tokens[:, 2].cpu()
    assert set(tokens.tolist()) == support and 1 < len(support) < 13
    expected = torch.tensor([p[i] if i in support else 0 for i in range(13)])
    expected *= len(tokens) / expected.sum()
    found = torch.bincount(tokens, minlength=13)
    inside = expected > 0
    assert (
        float(((found - expected) ** 2 / expected)[inside].sum()) < 40
    )  # at most 12 degrees of freedom: once in 14,000 tries
    logprobs = rollouts.sampling_logprobs[:, 0].cpu()
    torch.testing.assert_close(logprobs, p.log()[tokens].float(), atol=1e-5, rtol=0)


def test_truncated_rows_equal_the_naive_generator():
    truncation = Truncation(5, 0.7, 0.05)
    model, prompts = make_flat_model("llama"), [[1, 2, 3], [4]]
    rollouts = sample_groups(
        model, prompts, 3, 9, temperature=0.9, stop_token=3, seed=5, truncation=truncation, max_batch=4
    )
    for i, (row, p, c) in enumerate(
        zip(rollouts.tokens, rollouts.prompt_lengths, rollouts.completion_lengths, strict=True)
    ):
        ids, logprobs = generate_naive(
            model, prompts[i // 3], 9, temperature=0.9, stop_token=3, seed=5, row=i, truncation=truncation
        )
        assert row[p : p + c].tolist() == ids
        assert rollouts.sampling_logprobs[i, :c].tolist() == pytest.approx(logprobs, abs=1e-5)


def test_one_token_left_is_the_greedy_one():
    model = make_model("gpt2")
    greedy = sample_groups(model, [[1, 2], [7]], 2, 8, temperature=0.0)
    one = sample_groups(model, [[1, 2], [7]], 2, 8, truncation=Truncation(top_k=1))
    assert one.tokens.equal(greedy.tokens)
    assert math.isclose(float(one.sampling_logprobs.sum()), float(greedy.sampling_logprobs.sum()), abs_tol=1e-4)
