"""A hint for each figure that is not well, once a run, and none for one that is. Cases with other causes have other hints."""

import math
import re
from pathlib import Path

import torch

from runs.hints import HINTS, hints
from sample import Rollouts
from settings import GRPOSettings
from snug.options import fields
from training.figures import Scored, rollout_metrics

WELL = dict(reward_mean=0.5, reward_std=0.4, frac_reward_zero_std=0.3, entropy=0.5, kl=0.05)
WELL |= dict(truncated_fraction=0.02, mismatch_kl=1e-9, clip_fraction=0.01)
ILL = dict(frac_reward_zero_std=0.95, entropy=0.004, kl=3.0)
ILL |= dict(truncated_fraction=0.8, mismatch_kl=0.02, clip_fraction=0.5)


def test_each_figure_has_its_hint():
    assert hints(WELL) == {} and hints({}) == {} and hints(dict.fromkeys(WELL, float("nan"))) == {}
    assert hints(dict(loss=0.1, entropy=0.004)) == {}  # SFT's
    taught = dict(frac_reward_zero_std=1, reward_std=0, reward_mean=0, divergence=0.3)
    assert hints(WELL | taught) == {}  # a teacher teaches without rewards
    for name, value in ILL.items():
        found = hints(WELL | {name: value})
        assert set(found) == {name} and "\n" not in found[name]
        assert re.match(rf"{name} {value:.3g}( [a-z ]+)?: ", found[name])


def scored(lengths, rewards, most):
    """Groups of 4 completions with these lengths and rewards; those of `most` tokens were cut off."""
    lengths = torch.tensor(lengths)
    tokens = torch.zeros(len(lengths), most + 1, dtype=torch.long)
    mask = (torch.arange(most) < lengths[:, None]).long()
    rollouts = Rollouts(tokens, torch.ones_like(lengths), lengths, mask.float(), mask, lengths < most)
    rewards = torch.tensor(rewards, dtype=torch.float32)
    return Scored(rollouts, rewards.view(-1, 4), dict(f=rewards.tolist()), {}, {}, {}, 4)


def test_the_share_of_completions_that_were_scored():
    for unscored in (0, 3, 8):
        metrics = rollout_metrics(scored([5] * 8, [math.nan] * unscored + [1.0] * (8 - unscored), 16))
        assert metrics["scored_fraction"] == 1 - unscored / 8 and metrics["reward_std"] == 0
        found = hints(metrics | dict(frac_reward_zero_std=1.0))["frac_reward_zero_std"]
        assert ("nothing was scored" in found) == (unscored == 8) != ("every reward is the same" in found)


def test_hints_name_options_that_there_are():
    text = " ".join(hint["text"] for hint in HINTS)
    named = set(re.findall(r"--(\w+)", text)) | set(re.findall(r"\b[a-z]+_[a-z_]+\b", text)) - {"train_sft"}
    assert len(named) >= 8 and named <= set(fields(GRPOSettings))
    assert {next(iter(hint["where"])) for hint in HINTS} == set(ILL)
    page = (Path(__file__).parent.parent / "docs/algorithm.md").read_text()
    assert all(f"`{name}`" in page for hint in HINTS for name in hint["where"])
