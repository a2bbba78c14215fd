"""Micro-batches: the worked example, the budget, and every completion token exactly once."""

import torch
from conftest import DEVICE, make_model
from hypothesis import given
from hypothesis import strategies as st

from batch import Cut, Sequences, gather


def test_the_docstrings_example():
    a, b, x, y, stop, c, z = range(1, 8)
    batch = Sequences.from_lists([[a, b], [c]], [[x, y, stop], [z, stop]], DEVICE)
    batch.sampling_logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]], device=DEVICE)
    batch.advantages = torch.tensor([0.5, -0.5], device=DEVICE)
    micro = gather(batch, list(range(len(batch.tokens))), Cut(batch))
    assert micro.tokens.tolist() == [[a, b, x, y, stop], [c, z, stop, 0, 0]]
    assert micro.rows.tolist() == [1, 2, 3, 5, 6]
    assert micro.targets.tolist() == [x, y, stop, z, stop]
    assert micro.sequence.tolist() == [0, 0, 0, 1, 1] and micro.place.tolist() == [0, 1, 2, 0, 1]
    assert micro.lengths.tolist() == [3, 2] and micro.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert micro.sampling_logprobs.tolist() == [-1, -2, -3, -4, -5] and micro.advantages.tolist() == [0.5, -0.5]
    assert micro.old_logprobs is None and micro.ref_logprobs is None


def lengths_of(*totals):
    """Sequences with a prompt of one token and so many in all."""
    return Sequences.from_lists([[1]] * len(totals), [[2] * (total - 1) for total in totals])


def test_cut_by_example():
    assert Cut(lengths_of(3, 9, 4, 8), max_tokens=18).steps == [[[1, 3], [2, 0]]]
    assert Cut(lengths_of(5, 5, 5), max_tokens=4).steps == [[[0], [1], [2]]]  # one sequence at least
    assert Cut(lengths_of(3, 9, 4, 8)).steps == [[[1, 3, 2, 0]]]
    two = Cut(lengths_of(3, 9, 4, 8), step_size=2, max_tokens=12)
    assert two.steps == [[[1], [0]], [[3], [2]]] and two.sequences(1) == range(2, 4) and two.longest == 9
    two.into(18)
    assert two.steps == [[[1, 0]], [[3, 2]]]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=2, max_size=12),
    st.integers(0, 40),
    st.booleans(),
)
def test_every_token_once_and_within_budget(lengths, max_tokens, two_steps):
    lengths = lengths[: len(lengths) // 2 * 2]
    prompts = [[100 + i] * p for i, (p, _) in enumerate(lengths)]
    completions = [[1000 * (i + 1) + t for t in range(c)] for i, (_, c) in enumerate(lengths)]
    batch = Sequences.from_lists(prompts, completions)
    cut = Cut(batch, len(lengths) // 2 if two_steps else 0, max_tokens)
    assert len(cut.steps) == 1 + two_steps
    for step, pieces in enumerate(cut.steps):
        seen = []
        for micro in [gather(batch, indices, cut) for indices in pieces]:
            S, T = micro.tokens.shape
            assert not max_tokens or S == 1 or S * T <= max_tokens
            assert T == max(sum(lengths[i]) for i in micro.index.tolist())  # padded no further than its longest
            previous = micro.tokens.flatten()[micro.rows].tolist()
            where = zip(micro.targets.tolist(), previous, micro.sequence.tolist(), micro.place.tolist(), strict=True)
            for target, before, s, t in where:
                i = int(micro.index[s])
                assert target == completions[i][t] and before == (completions[i][t - 1] if t else prompts[i][-1])
            seen += micro.targets.tolist()
        assert sorted(seen) == sorted(token for i in cut.sequences(step) for token in completions[i])


def test_only_completion_rows_reach_the_head():
    model = make_model()
    batch = Sequences.from_lists([[1, 2, 3], [4]], [[5, 6], [7, 8, 9]], DEVICE)
    micro = gather(batch, list(range(len(batch.tokens))), Cut(batch))
    hidden = model(micro.tokens, micro.positions)
    rows = micro.completion_hidden(hidden)
    assert rows.shape == (5, 32)
    assert micro.index.tolist() == [0, 1]
    torch.testing.assert_close(
        rows, torch.stack([hidden[0, 2], hidden[0, 3], hidden[1, 0], hidden[1, 1], hidden[1, 2]])
    )
