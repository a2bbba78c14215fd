"""Micro-batches: the worked example, the budget, and every completion token exactly once."""

import torch
from conftest import DEVICE, make_model
from hypothesis import given
from hypothesis import strategies as st

from batch import Sequences, cut, micro_batches


def test_the_docstrings_example():
    a, b, x, y, stop, c, z = range(1, 8)
    batch = Sequences.from_lists([[a, b], [c]], [[x, y, stop], [z, stop]], DEVICE)
    batch.sampling_logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]], device=DEVICE)
    batch.advantages = torch.tensor([0.5, -0.5], device=DEVICE)
    (micro,) = micro_batches(batch)
    assert micro.tokens.tolist() == [[a, b, x, y, stop], [c, z, stop, 0, 0]]
    assert micro.rows.tolist() == [1, 2, 3, 5, 6]
    assert micro.targets.tolist() == [x, y, stop, z, stop]
    assert micro.sequence.tolist() == [0, 0, 0, 1, 1] and micro.place.tolist() == [0, 1, 2, 0, 1]
    assert micro.lengths.tolist() == [3, 2] and micro.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert micro.sampling_logprobs.tolist() == [-1, -2, -3, -4, -5] and micro.advantages.tolist() == [0.5, -0.5]
    assert micro.old_logprobs is None and micro.ref_logprobs is None


def test_cut_by_example():
    assert cut([3, 9, 4, 8], max_tokens=18) == [[1, 3], [2, 0]]
    assert cut([5, 5, 5], max_tokens=4) == [[0], [1], [2]]  # one sequence at least
    assert cut([1, 2, 3, 4], max_sequences=2) == [[3, 2], [1, 0]]
    assert cut([1, 2]) == [[1, 0]] and cut([]) == []


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(0, 40),
    st.integers(0, 5),
    st.data(),
)
def test_every_selected_token_once_and_within_budget(lengths, max_tokens, max_sequences, data):
    prompts = [[100 + i] * p for i, (p, _) in enumerate(lengths)]
    completions = [[1000 * (i + 1) + t for t in range(c)] for i, (_, c) in enumerate(lengths)]
    batch = Sequences.from_lists(prompts, completions)
    select = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True, min_size=1))
    seen = []
    for micro in micro_batches(batch, max_tokens, max_sequences, torch.tensor(select)):
        S, T = micro.tokens.shape
        assert not max_tokens or S == 1 or S * T <= max_tokens
        assert not max_sequences or S <= max_sequences
        assert T == max(sum(lengths[i]) for i in micro.index.tolist())  # padded no further than its longest
        previous = micro.tokens.flatten()[micro.rows].tolist()
        for target, before, s, t in zip(
            micro.targets.tolist(), previous, micro.sequence.tolist(), micro.place.tolist(), strict=True
        ):
            i = int(micro.index[s])
            assert target == completions[i][t] and before == (completions[i][t - 1] if t else prompts[i][-1])
        seen += micro.targets.tolist()
    assert sorted(seen) == sorted(token for i in select for token in completions[i])


def test_only_completion_rows_reach_the_head():
    model = make_model()
    batch = Sequences.from_lists([[1, 2, 3], [4]], [[5, 6], [7, 8, 9]], DEVICE)
    (micro,) = micro_batches(batch)
    hidden = model(micro.tokens, micro.positions)
    rows = micro.completion_hidden(hidden)
    assert rows.shape == (5, 32)
    assert micro.index.tolist() == [0, 1]
    torch.testing.assert_close(
        rows, torch.stack([hidden[0, 2], hidden[0, 3], hidden[1, 0], hidden[1, 1], hidden[1, 2]])
    )
