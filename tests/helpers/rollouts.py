"""Rollouts made by hand or sampled, and the gradients of them."""

from unittest.mock import patch

import pytest
import torch

import grpo
import train_sft
from helpers.models import DEVICE
from loss import group_advantages
from sample import Rollouts, generate_naive, sample_groups
from settings import SFTSettings
from snug.device.kinds import MULTIPLE


def rows_of(rollouts):
    """-> N pairs (ids, log-probs) of the completions, the stop token included."""
    columns = rollouts.tokens, rollouts.sampling_logprobs, rollouts.prompt_lengths, rollouts.completion_lengths
    return [(row[p : p + c].tolist(), values[:c].tolist()) for row, values, p, c in zip(*columns, strict=True)]


def assert_naive(rollouts, model, prompts, longest, **options):
    """Ids and log-probs are those of `generate_naive`, which reads everything again."""
    k = len(rollouts.tokens) // len(prompts)
    for i, (ids, logprobs) in enumerate(rows_of(rollouts)):
        expected, values = generate_naive(model, prompts[i // k], longest, row=i, **options)
        assert ids == expected, i  # None: written by `respond`
        assert logprobs == pytest.approx([value or 0.0 for value in values], abs=1e-5)


STOP = 3


def some_rollouts(model, group_size=4, dtype=torch.float64, **options):
    """Rollouts of a tiny model with advantages and a reference, ragged."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    rollouts = sample_groups(model, prompts, group_size, 12, stop_token=STOP, seed=3, **options)
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(3, group_size, generator=generator)
    rollouts.advantages = group_advantages(rewards).flatten().to(DEVICE)
    for name in ("sampling_logprobs", "old_logprobs", "ref_logprobs"):
        noise = 0.3 * torch.randn(rollouts.sampling_logprobs.shape, generator=generator, dtype=dtype).to(DEVICE)
        setattr(rollouts, name, rollouts.sampling_logprobs.to(dtype) + (noise if name != "sampling_logprobs" else 0))
    return rollouts


def never_stop(monkeypatch):
    """Every completion is as long as it may be, as the planner takes it to be."""
    original = sample_groups
    endless = lambda *args, stop_token, **options: original(*args, stop_token=None, **options)  # noqa: E731
    monkeypatch.setattr("sample.sample_groups", endless)


# (tokens of the prompt, tokens of each completion): the shortest of each, and each longer than the other.
GROUPS = [(5, [3, 9, 1]), (1, [1, 1, 1]), (9, [2, 1, 12]), (1, [7, 1, 3]), (2, [11, 4, 4]), (14, [1, 1, 1])]
K, N = 3, 18
CUT_OFF = {1, 4, 6, 7, 8, 10, 15}  # not stopped: some of a group, the whole of group 2, the longest and a short one
BUDGETS = {"one micro-batch": 0, "several groups": 45, "groups cut": 14, "one sequence": 1}


def make_rollouts(groups=GROUPS, dtype=torch.float64, seed=0, vocab_size=16, episodes=False):
    """Rollouts of random tokens. Log-probs are about those of a flat model, so that some ratios are clipped.

    episodes: a half of the tokens between a completion's first and last were not sampled."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [(prompt, length) for prompt, completions in groups for length in completions]
    shape = len(lengths), max(length for _, length in lengths)
    tokens = torch.randint(vocab_size, (len(lengths), max(map(sum, lengths))), generator=draw)
    k = len(groups[0][1])
    for i, (prompt, _) in enumerate(lengths):
        tokens[i, :prompt] = tokens[i - i % k, :prompt]
    prompts, completions = torch.tensor(lengths).T
    mask = (torch.arange(shape[1]) < completions[:, None]).long()
    if episodes:
        inside = (torch.arange(shape[1]) > 0) & (torch.arange(shape[1]) < completions[:, None] - 1)
        mask[inside & (torch.rand(shape, generator=draw) < 0.5)] = 0
    rewards = torch.rand(len(groups), k, generator=draw, dtype=torch.float64)
    drawn = [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3)]
    old, reference, sampled = ((0.3 * x - 2.77).to(DEVICE, dtype) * mask.to(DEVICE) for x in drawn)
    stopped = torch.tensor([i not in CUT_OFF for i in range(len(lengths))])
    columns = (x.to(DEVICE) for x in (tokens, prompts, completions, sampled, mask, stopped))
    advantages = group_advantages(rewards).flatten().to(DEVICE, dtype)
    return Rollouts(*columns, advantages=advantages, old_logprobs=old, ref_logprobs=reference)


def gradient(model, rollouts, cut, options, step=0, teacher=None):
    """-> metrics and {name: gradient} of an optimizer step; without options, of SFT."""
    model.zero_grad(set_to_none=True)
    if options is None:
        metrics = train_sft.accumulate_gradient(model, rollouts, cut, SFTSettings())
    else:
        metrics = grpo.accumulate_gradient(model, rollouts, cut, step, options, rollouts.old_logprobs.clone(), teacher)
    return metrics, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradient(ours, oracle, tolerance=1e-10):
    (metrics, gradients), (expected, right) = ours, oracle
    assert metrics.keys() == expected.keys() and gradients.keys() == right.keys()
    for name, value in expected.items():
        rounding = 1e-6 if name == "clip_fraction" else tolerance  # a count over a count, in float32
        assert metrics[name] == pytest.approx(value, rel=rounding, abs=rounding), name
    for name, value in right.items():
        torch.testing.assert_close(gradients[name], value, rtol=tolerance, atol=tolerance, msg=f"{name}'s gradient")


WAYS = {
    "none": dict(), "block": dict(checkpoint_blocks="block"), "selective": dict(checkpoint_blocks="selective"),
    "block, offload": dict(checkpoint_blocks="block", activation_offload=True),
    "selective, offload": dict(checkpoint_blocks="selective", activation_offload=True),
}  # fmt: skip


def as_on_cuda(multiple=MULTIPLE):
    """Rows are rounded as on CUDA."""
    return patch.multiple("snug.device.kinds", kind_of=lambda tensor: "cuda", MULTIPLE=multiple)
