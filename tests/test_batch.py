"""Micro-batches: the worked example, the budget, and every completion token exactly once."""

import random
from unittest.mock import patch

import pytest
import torch
from conftest import DEVICE, make_flat_model, make_model
from hypothesis import given
from hypothesis import strategies as st
from test_grpo import some_rollouts
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import train_sft
from batch import Cut, Sequences, gather
from memory.cuda import MULTIPLE, padded, upload
from settings import GRPOSettings, SFTSettings
from training import as_floats


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


def as_on_cuda(multiple=MULTIPLE):
    """Lengths are rounded as on CUDA."""
    return patch.multiple("memory.cuda", kind_of=lambda tensor: "cuda", MULTIPLE=multiple)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=2, max_size=12),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_every_token_once_and_within_budget(lengths, max_tokens, two_steps, multiple):
    lengths = lengths[: len(lengths) // 2 * 2]
    prompts = [[100 + i] * p for i, (p, _) in enumerate(lengths)]
    completions = [[1000 * (i + 1) + t for t in range(c)] for i, (_, c) in enumerate(lengths)]
    batch = Sequences.from_lists(prompts, completions)
    with as_on_cuda(multiple):
        cut = Cut(batch, len(lengths) // 2 if two_steps else 0, max_tokens, block_size=15)
    assert len(cut.steps) == 1 + two_steps
    for step, pieces in enumerate(cut.steps):
        seen = []
        for micro in [gather(batch, indices, cut) for indices in pieces]:
            S, T = micro.tokens.shape
            assert not max_tokens or S == 1 or S * T <= max_tokens
            longest = max(sum(lengths[i]) for i in micro.index.tolist())
            assert longest <= T < longest + multiple and (T % multiple == 0 or T == 15)  # padded no further
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


# ----------------------------------------------------------------------------------------------------------------------
# On CUDA: few shapes, and no waits.


def test_lengths_are_rounded_on_cuda_only():
    tokens = torch.zeros(1, 1)
    assert padded(65, tokens, 2048) == 65
    with as_on_cuda(64):
        assert [padded(n, tokens, 200) for n in (1, 64, 65, 128, 193, 200)] == [64, 64, 128, 128, 200, 200]
        assert padded(65, tokens, 0) == 65  # nobody knows how far it may go


def both_loops(model, rollouts, cut, **settings):
    """-> [(metrics, gradients), ...] of an optimizer step of GRPO and of SFT."""
    found = []
    for loop, *arguments in ((grpo, 0, GRPOSettings(max_new_tokens=12, **settings)), (train_sft, SFTSettings())):
        model.zero_grad()
        metrics = loop.accumulate_gradient(model, rollouts, cut, *arguments)
        found.append((metrics, [p.grad.clone() for p in model.parameters()]))
    return found


@pytest.mark.parametrize("block_size", [32, 64, 100])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_rounded_lengths_have_the_same_loss_and_gradient(shape, block_size):
    """Where the tokens are narrower than the rounded length, and where block_size is."""
    model = make_flat_model(shape, dtype=torch.float64, block_size=block_size)
    rollouts = some_rollouts(model)
    assert rollouts.tokens.shape[1] < 32
    plain = both_loops(model, rollouts, Cut(rollouts, max_tokens=60), beta=0.1)
    with as_on_cuda(64):
        cut = Cut(rollouts, max_tokens=3 * min(64, block_size), block_size=block_size)
    assert set(cut.lengths) == {min(64, block_size)}
    for one, other in zip(plain, both_loops(model, rollouts, cut, beta=0.1), strict=True):
        assert other[0] == pytest.approx(one[0], rel=1e-6)  # clip_fraction is a sum in float32
        assert other[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-12)
        torch.testing.assert_close(other[1], one[1], rtol=1e-10, atol=1e-12)


def test_a_ragged_run_has_few_shapes():
    """64 widths, with as many sequences as the budget has room for; and what is left at the end of each of 40 steps."""
    draw, widths, full, total = random.Random(0), set(), set(), set()
    for _ in range(40):
        batch = Sequences(torch.zeros(64, 1), *(torch.tensor([draw.randint(1, 512) for _ in range(64)]) for _ in "pc"))
        with as_on_cuda():
            cut = Cut(batch, max_tokens=4096, block_size=1024)
        shapes = [(len(piece), max(cut.lengths[i] for i in piece)) for piece in cut.steps[0]]
        widths |= {T for _, T in shapes}
        full |= set(shapes[:-1])
        total |= set(shapes)
    assert widths <= set(range(16, 1025, 16)) and len(full) <= 64 and len(total) <= 64 + 40


class Calls(TorchDispatchMode):
    """Names of the operations that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", [dict(), dict(beta=0.1, importance_sampling_cap=2.0), dict(entropy_coef=0.1)])
def test_a_micro_batch_waits_for_no_value_and_uploads_once(variant):
    """What a GPU would have to finish first: reading a scalar, finding the elements that are not 0."""
    model = make_flat_model()
    rollouts = some_rollouts(model, dtype=torch.float32)
    cut = Cut(rollouts, max_tokens=60)
    assert len(cut.steps[0]) >= 3
    with Calls() as calls:
        both_loops(model, rollouts, cut, **variant)
        grpo.trainer_logprobs(model, rollouts, cut, GRPOSettings())
    assert not {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"} & set(calls.names)
    with Calls() as calls:
        gather(rollouts, cut.steps[0][0], cut)
    assert calls.names.count("lift_fresh") == 1  # a tensor made from numbers of the host


def test_an_upload_to_cuda_is_pinned():
    assert upload([3, 1, 2], torch.device("cpu")).tolist() == [3, 1, 2]
    with patch("memory.cuda.torch.as_tensor") as tensor:
        upload([3, 1, 2], torch.device("cuda"))
    tensor.assert_called_once_with([3, 1, 2], dtype=torch.long)
    tensor.return_value.pin_memory.return_value.to.assert_called_once_with(torch.device("cuda"), non_blocking=True)


def test_totals_are_read_in_one_transfer():
    totals = dict(a=torch.tensor(0.1, device=DEVICE), b=2, c=torch.tensor(1 / 3, dtype=torch.float64, device=DEVICE))
    assert as_floats(totals) == dict(a=float(totals["a"]), b=2.0, c=1 / 3)
    assert as_floats(dict(loss=0.0)) == dict(loss=0.0)
