"""Packed rows = padded rows: loss, metrics and every gradient; and no token sees what it must not."""

from dataclasses import replace

import pytest
import torch

import grpo
from batch import Cut
from helpers.models import DEVICE, make_flat_model
from helpers.rollouts import BUDGETS, K, N, assert_same_gradient, gradient, make_rollouts
from padded import a_few, padded
from settings import LOSSES, GRPOSettings
from snug.memory.ledger import LiveBytes
from training import frozen

VARIANTS = {
    "dapo": dict(beta=0.1), "grpo": dict(loss_type="grpo"), "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo", beta=0.1, kl_estimator="k3_no_ratio"),
    "cispo": dict(loss_type="cispo", epsilon_high=1.1, importance_sampling_cap=1.1),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.05, beta=0.1),
    "gspo of dr_grpo": dict(loss_type="dr_grpo", importance_sampling_level="sequence"),
    "gspo of cispo": dict(loss_type="cispo", importance_sampling_level="sequence", epsilon_high=1.1),
    "gspo of bnpo": dict(loss_type="bnpo", importance_sampling_level="sequence", mask_truncated_completions=True),
    "sapo": dict(loss_type="sapo", sapo_temperature_neg=2.0, beta=0.1),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence", epsilon=0.05),
    "truncated importance": dict(importance_sampling_cap=1.1, temperature=0.7, beta=0.1),
    "completions filtered": dict(mask_truncated_completions=True, loss_type="grpo", beta=0.1),
    "completions filtered, dapo": dict(mask_truncated_completions=True, beta=0.1), "SFT": None,
}  # fmt: skip
VARIANTS |= {name: dict(loss_type=name) for name in LOSSES if name not in VARIANTS}
SHAPES = ["gpt2", "llama"]


@pytest.mark.parametrize(
    "shape, variant", [*zip(SHAPES * len(VARIANTS), VARIANTS, strict=False), ("llama", "dapo"), ("gpt2", "SFT")]
)
def test_packed_is_padded(shape, variant):
    """Every loss, whole and cut, with small chunks of logits; bnpo's mean depends on the cut, so there both have the same."""
    model = make_flat_model(shape, dtype=torch.float64)
    rollouts = make_rollouts(episodes=shape == "llama")
    options = None if variant == "SFT" else GRPOSettings(max_new_tokens=12, **VARIANTS[variant])
    with padded(poison=7):
        oracle = gradient(model, rollouts, a_few(Cut(rollouts), 4), options)
    if options:
        options = replace(options, logits_chunk_mb=1e-3)
    assert len(oracle[1]) == len(list(model.parameters()))
    assert all(value.abs().max() > 1e-6 for value in oracle[1].values())
    for group_size in (K, 1) if variant in ("dapo", "SFT") else (K,):
        for budget in BUDGETS.values() if variant in ("dapo", "SFT", "bnpo") else (0, 14):
            cut = Cut(rollouts, 0, budget, group_size)
            if "bnpo" in variant:
                with padded():
                    oracle = gradient(model, rollouts, cut, options)
            assert_same_gradient(gradient(model, rollouts, cut, options), oracle)


@pytest.mark.parametrize("step_size, budget", [(2, 14), (6, 0), (9, 14)])
def test_packed_is_padded_step_by_step(step_size, budget):
    """Also where a step ends inside a group."""
    model, rollouts = make_flat_model("llama", dtype=torch.float64), make_rollouts()
    options = GRPOSettings(max_new_tokens=12, mask_truncated_completions=step_size > 2)
    cut = Cut(rollouts, step_size, budget, K)
    assert len(cut.steps) == N // step_size
    for step in range(len(cut.steps)):
        with padded(poison=3):
            oracle = gradient(model, rollouts, a_few(cut, 5), options, step)
        assert_same_gradient(gradient(model, rollouts, cut, options, step), oracle)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_nothing_is_read_beyond_the_end(shape):
    """Ids and NaN behind each sequence's end, and NaN where nothing was sampled, change no bit."""
    model = make_flat_model(shape)
    rollouts, poisoned = (make_rollouts(dtype=torch.float32, episodes=shape == "llama") for _ in range(2))
    behind = torch.arange(rollouts.tokens.shape[1], device=DEVICE)
    behind = behind >= (rollouts.prompt_lengths + rollouts.completion_lengths)[:, None]
    poisoned.tokens[behind] = 10**6  # no id
    for name in ("sampling_logprobs", "old_logprobs", "ref_logprobs"):
        getattr(poisoned, name)[rollouts.mask == 0] = torch.nan
    options = GRPOSettings(max_new_tokens=12, beta=0.1, importance_sampling_cap=1.1)
    for budget in BUDGETS.values():
        cut = Cut(rollouts, 0, budget, K)
        assert torch.equal(*(frozen.trainer_logprobs(model, x, cut, options) for x in (rollouts, poisoned)))
        for loop in (options, None):
            (metrics, right), (others, gradients) = (gradient(model, x, cut, loop) for x in (rollouts, poisoned))
            assert metrics == others and all(torch.equal(gradients[name], right[name]) for name in right)


def peak_bytes(model, rollouts, cut, options):
    """Of live tensors made in an optimizer step."""
    gradient(model, rollouts, cut, options)  # tables and what else is made once
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        grpo.accumulate_gradient(model, rollouts, cut, 0, options, torch.zeros_like(rollouts.sampling_logprobs))
    return live.peak


@pytest.mark.skipif(DEVICE == "cuda", reason="counts tensors on the host")
@pytest.mark.parametrize("shape, way", [("gpt2", "none"), ("llama", "block")])
def test_a_shared_prompt_is_kept_once(shape, way):
    """8 completions of 64 behind a prompt of 192: 192 + 8 * 63 = 696 tokens instead of 8 * 256 = 2048, or 0.34.

    Where all keep everything and each sequence has its own prompt, the packed row saves their last tokens only. Its
    rotary tables have a line a token; padded rows have a line a position, which all rows share.
    """
    model = make_flat_model(shape, block_size=256, n_embd=64)
    model.checkpoint_blocks = way
    options = GRPOSettings(max_new_tokens=64, logits_chunk_mb=0.25)
    tables = 2 * 8 * 127 * model.config.head_size * 4 if shape == "llama" else 0
    alone = [([(64, [64])] * 8, 1, 1, tables)] if way == "none" else []
    for groups, group_size, most, more in [([(192, [64] * 8)], 8, 0.4, 0), *alone]:
        rollouts = make_rollouts(groups, torch.float32)
        packed = peak_bytes(model, rollouts, Cut(rollouts, group_size=group_size), options)
        with padded():
            bytes_padded = peak_bytes(model, rollouts, Cut(rollouts, group_size=group_size), options)
        assert packed <= most * bytes_padded + more
