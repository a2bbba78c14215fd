"""A hint for each figure that is not well, once a run, and none for one that is."""

import re
from pathlib import Path

from options import fields
from runs import hints as module
from runs.hints import hints
from settings import GRPOSettings

WELL = dict(reward_mean=0.5, frac_reward_zero_std=0.3, entropy=0.5, kl=0.05)
WELL |= dict(truncated_fraction=0.02, mismatch_kl=1e-9, clip_fraction=0.01)
ILL = dict(
    frac_reward_zero_std=0.95, entropy=0.004, kl=3.0, truncated_fraction=0.8, mismatch_kl=0.02, clip_fraction=0.5
)


def test_each_figure_has_its_hint():
    assert hints(WELL) == {} and hints({}) == {} and hints(dict.fromkeys(WELL)) == {}
    for name, value in ILL.items():
        assert hints({"loss": 0.1, name: value}) == {}  # SFT's
        found = hints(WELL | {name: value})
        assert set(found) == {name} and f"{value:.3g}" in found[name] and "\n" not in found[name]


def test_hints_name_options_that_there_are():
    names, _, _, texts = zip(*(line.split(maxsplit=3) for line in module.HINTS.splitlines()), strict=True)
    text = " ".join(texts)
    named = set(re.findall(r"--(\w+)", text)) | set(re.findall(r"\b[a-z]+_[a-z_]+\b", text))
    assert len(named) >= 8 and named <= set(fields(GRPOSettings))
    assert sorted(names) == sorted(ILL)
    page = (Path(__file__).parent.parent / "docs/algorithm.md").read_text()
    assert all(f"`{name}`" in page for name in ILL)
