"""Micro-batches: the worked example, the budget, and every completion token exactly once."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch import Cut, Sequences, make_micro_batch
from helpers.kernels import Ops
from helpers.models import DEVICE, make_flat_model
from helpers.rollouts import as_on_cuda, assert_same_gradient, gradient, some_rollouts
from settings import GRPOSettings
from snug.device.processes import OneProcess
from training import frozen


def test_the_docstrings_example():
    a, b, x, y, stop, z, c, u = range(1, 9)
    batch = Sequences.from_lists([[a, b], [a, b], [c], [c]], [[x, y, stop], [z, stop], [u, stop], [stop]], DEVICE)
    batch.sampling_logprobs = torch.tensor([[-1.0, -2, -3], [-4, -5, 0], [-6, -7, 0], [-8, 0, 0]], device=DEVICE)
    batch.advantages = torch.tensor([0.5, -0.5, 1.0, -1.0], device=DEVICE)
    micro = make_micro_batch(batch, [0, 1, 2], Cut(batch, group_size=2))
    ours = slice(7)  # on CUDA padding follows
    assert micro.tokens[0, ours].tolist() == [a, b, x, y, z, c, u]
    assert micro.positions[0, ours].tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert micro.mask.groups[:2] == [(0, 2, 5), (5, 7, 7)]
    assert micro.states.tolist() == [1, 2, 3, 1, 4, 5, 6]
    assert micro.targets.tolist() == [x, y, stop, z, stop, u, stop]
    assert micro.sequence.tolist() == [0, 0, 0, 1, 1, 2, 2] and micro.place.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert micro.lengths.tolist() == [3, 2, 2] and micro.index.tolist() == [0, 1, 2]
    assert micro.sampling_logprobs.tolist() == [-1, -2, -3, -4, -5, -6, -7]
    assert micro.advantages.tolist() == [0.5, -0.5, 1.0]
    assert micro.old_logprobs is None and micro.ref_logprobs is None


def lengths_of(*lengths):
    """Sequences of so many tokens: (prompt, completion), ..."""
    return Sequences.from_lists(*([[1] * length for length in part] for part in zip(*lengths, strict=True)))


def test_cut_by_example():
    """The docstring's, and the largest first."""
    batch = lengths_of((4, 3), (4, 5), (2, 9), (2, 1))
    cases = [(0, [[[0, 1, 2, 3]]], 20), (20, [[[0, 1, 2, 3]]], 20), (10, [[[0, 1], [2, 3]]], 10)]
    cases += [(8, [[[2], [1], [0, 3]]], 10), (1, [[[2], [1], [0], [3]]], 10)]  # one sequence at least
    for max_tokens, steps, largest in cases:
        cut = Cut(batch, max_tokens=max_tokens, group_size=2)
        assert cut.steps == steps and cut.largest == largest and cut.longest == 10
    alone = lengths_of(*((1, length) for length in (3, 9, 4, 8)))
    assert Cut(alone, max_tokens=13).steps == [[[1, 2], [3, 0]]]
    two = Cut(alone, step_size=2, max_tokens=11)
    assert two.steps == [[[1], [0]], [[3], [2]]] and two.step_indices[1] == range(2, 4)
    larger = two.with_limit(12)
    assert larger.steps == [[[1, 0]], [[3, 2]]] and larger.largest == 12
    assert larger.steps != two.steps  # which stay
    assert larger.with_limit(11).steps == two.steps == [[[1], [0]], [[3], [2]]]
    assert Cut(lengths_of((1, 9), (1, 4)), step_size=1).largest == 9  # of all steps


def test_each_process_has_about_as_many_tokens():
    """The next group goes to the process with the fewest so far: 9 + 3 and 8 + 4. A large group is shared; one of half
    the tokens stays whole: of 19 each process takes 10 at most."""
    processes = OneProcess()
    processes.size = 2
    cut = Cut(lengths_of(*((1, length) for length in (3, 9, 4, 8))), processes=processes)
    assert cut.steps == [[[1, 0], [3, 2]]] and cut.rank_of == {1: 0, 0: 0, 3: 1, 2: 1}
    for max_tokens in (0, 100):
        cut = Cut(lengths_of(*[(4, 5)] * 4), max_tokens=max_tokens, group_size=4, processes=processes)
        assert sorted(cut.rank_of.values()) == [0, 0, 1, 1]
    cut = Cut(lengths_of((4, 3), (4, 5), (4, 3), (4, 4)), group_size=2, processes=processes)
    assert cut.steps == [[[0, 1], [2, 3]]] and cut.rank_of == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize("max_tokens", [2048, 8192])
def test_ragged_groups_fill_micro_batches(max_tokens):
    """Whether groups are cut or not. Measured: 1.24 times as many as full ones, and the largest has 99.1 % of the budget."""
    draw = random.Random(0)
    for _ in range(20):
        groups = [(draw.randint(50, 300), [draw.randint(1, 512) for _ in range(8)]) for _ in range(32)]
        cut = Cut(lengths_of(*((p, c) for p, own in groups for c in own)), max_tokens=max_tokens, group_size=8)
        fewest = -(-sum(p + sum(own) - 8 for p, own in groups) // max_tokens)
        assert len(cut.steps[0]) <= 1.25 * fewest and 0.98 * max_tokens < cut.largest <= max_tokens


@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=3, max_size=3)), min_size=2, max_size=6),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_every_token_once_and_within_budget(groups, max_tokens, two_steps, multiple):
    """And every target is predicted from its prompt and the tokens before it, in their order, and from no others."""
    groups = groups[: len(groups) // 2 * 2]
    prompts = [[100 * g + t for t in range(p)] for g, (p, lengths) in enumerate(groups) for _ in lengths]
    lengths = [length for _, lengths in groups for length in lengths]
    completions = [[1000 * (i + 1) + t for t in range(length)] for i, length in enumerate(lengths)]
    batch = Sequences.from_lists(prompts, completions)
    cut = Cut(batch, len(lengths) // 2 if two_steps else 0, max_tokens, group_size=3)
    assert len(cut.steps) == 1 + two_steps
    for step, pieces in enumerate(cut.steps):
        seen = []
        for indices in pieces:
            with as_on_cuda(multiple):
                micro = make_micro_batch(batch, indices, cut)
            index, T = micro.index.tolist(), micro.tokens.shape[1]
            its_prompts = [i // 3 for i in index]
            size = sum(len(prompts[3 * g]) for g in {*its_prompts}) + sum(lengths[i] - 1 for i in index)
            assert index == indices and (not max_tokens or len(index) == 1 or size <= max_tokens)
            assert size <= T and T % multiple == 0 and (T < size + multiple or len(index) > len({*its_prompts}))
            tokens, positions, sees = micro.tokens[0], micro.positions[0], micro.mask.mask()
            where = zip(*(x.tolist() for x in (micro.targets, micro.states, micro.sequence, micro.place)), strict=True)
            for target, row, s, t in where:
                before = tokens[sees[row]][positions[sees[row]].argsort()].tolist()
                assert before == prompts[index[s]] + completions[index[s]][:t] and target == completions[index[s]][t]
                assert positions[row] == len(before) - 1
            seen += micro.targets.tolist()
        assert sorted(seen) == sorted(token for i in cut.step_indices[step] for token in completions[i])


# On CUDA: few shapes, and no waits.


def both_loops(model, rollouts, cut, **settings):
    """-> [(metrics, gradients), ...] of an optimizer step of GRPO and of SFT."""
    return [gradient(model, rollouts, cut, loop) for loop in (GRPOSettings(max_new_tokens=12, **settings), None)]


@pytest.mark.parametrize("multiple", [16, 100])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_rounded_rows_have_the_same_loss_and_gradient(shape, multiple):
    """100 tokens: longer than block_size, which limits sequences and not rows."""
    model = make_flat_model(shape, dtype=torch.float64, block_size=32)
    rollouts = some_rollouts(model)
    cut = Cut(rollouts, max_tokens=60, group_size=4)
    plain = both_loops(model, rollouts, cut, beta=0.1)
    with as_on_cuda(multiple):
        assert make_micro_batch(rollouts, cut.steps[0][0], cut).tokens.shape[1] % multiple == 0
        rounded = both_loops(model, rollouts, cut, beta=0.1)
    for one, other in zip(plain, rounded, strict=True):
        assert_same_gradient(other, one, 1e-11)


VARIANTS = dict(), dict(beta=0.1, importance_sampling_cap=2.0), dict(importance_sampling_level="sequence")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_micro_batch_waits_for_no_value_and_uploads_once(variant):
    """What a GPU would have to finish first: reading a scalar, finding the elements that are not 0."""
    model = make_flat_model()
    rollouts = some_rollouts(model, dtype=torch.float32)
    waits = []
    for most in (0, 40):
        cut = Cut(rollouts, max_tokens=most, group_size=4)
        with Ops() as calls:
            both_loops(model, rollouts, cut, **variant)
            frozen.trainer_logprobs(model, rollouts, cut, GRPOSettings())
        assert not {"nonzero", "masked_select", "is_nonzero", "equal"} & set(calls.names)
        waits.append(calls.names.count("_local_scalar_dense"))
    assert len(cut.steps[0]) >= 3 and waits[1] <= waits[0]  # a step's metrics are read at its end
    with Ops() as calls:
        make_micro_batch(rollouts, cut.steps[0][0], cut)
    assert calls.names.count("lift_fresh") == 1  # a tensor made from numbers of the host
