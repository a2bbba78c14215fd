"""Verdicts about runs: what is an arm, and how two arms are compared."""

import dataclasses
from pathlib import Path

from data.pairs import compared, said
from runs.page.runs import Run
from runs.verdict import verdict


def make(name="a", scores=(0.2, 0.5), rewards=(), iterations=8, **settings):
    """A run that has ended, with an evaluation before it and after it: pass@1 greedy and sampled."""
    settings = dict(group_size=4, max_iters=iterations, eval_prompts=100, seed=1, out_dir=name) | settings
    records = [dict(iter=i, reward_std=0.5) for i in range(iterations)]
    for record, reward in zip(records, rewards, strict=False):
        record["reward_mean"] = reward
    own = "task_pass_at_1" if settings.get("reward_funcs") else "pass_at_1"
    records[0] |= {f"before/{own}": scores[0], f"before/{own}_sampled": scores[0]}
    records[-1] |= {own: scores[1], f"{own}_sampled": scores[1], "eval_reward_mean": 7.0}
    return Run(Path(name), settings, records, [], 1)


def scores_of(arm, seeds, start, step=0.01, **settings):
    return [make(f"{arm}-seed{seed}", (0.1, start + step * i), seed=seed, **settings) for i, seed in enumerate(seeds)]


def test_six_pairs_are_compared_as_prompts_are():
    """Differences of 0.1 in each of six pairs: 2 of 64 signs give as much. Each further arm is compared with the
    first."""
    a, b, c = (scores_of(name, range(6), start) for name, start in (("a", 0.5), ("b", 0.6), ("c", 0.5)))
    first = [(0.5 + i / 100, 0.6 + i / 100) for i in range(6)]
    better, equal = (said(compared(pairs)) for pairs in (first, [(x, x) for x, _ in first]))
    lines = ["A: a", "B: b", f"B - A: pass_at_1 of 6 pairs: {better}"]
    assert verdict([*a, *b, *c]) == [*lines, "A: a", "B: c", f"B - A: pass_at_1 of 6 pairs: {equal}"]
    assert "A 0.525, B 0.625, B - A +0.100 (" in verdict([*a, *b])[2]
    assert verdict([*a, *b])[2].endswith("up in 6 and down in 0, p = 0.031")


def test_arms_are_compared_by_their_seeds():
    a, b = scores_of("a", (1, 2, 3), 0.5), scores_of("b", (2, 3, 4), 0.6)
    assert verdict(a) == verdict(a[:1]) == verdict([]) == []
    sft = dataclasses.replace(a[0], settings=dict(max_iters=8))
    assert verdict([sft, *a, *b])[2].startswith("B - A: pass_at_1 of 2 pairs: A 0.515, B 0.605, B - A +0.090")
    alone = "B - A: 1 seeds in common say nothing; python -m runs.fork makes pairs"
    assert verdict([a[0], *scores_of("b", (9, 1), 0.6)])[2] == alone
    assert verdict([*a, *scores_of("b", (7, 8), 0.6)])[2] == alone.replace("1", "0")
    running = dataclasses.replace(b[0], settings=b[0].settings | dict(max_iters=9))
    assert verdict([*a, running]) == []


def test_the_score_is_the_tasks_or_else_the_rewards():
    own, other = dict(reward_funcs=["m:f"]), dict(reward_funcs=["m:g"])
    a, b, c = (scores_of(name, (1, 2), 0.5, **funcs) for name, funcs in (("a", own), ("b", own), ("c", other)))
    assert verdict([*a, *b])[2].startswith("B - A: task_pass_at_1 of 2 pairs: A 0.505, B 0.505")
    assert verdict([*a, *c])[2].startswith("B - A: task_pass_at_1 of 2 pairs")  # of the same prompts
    for run in [*a, *b, *c]:
        run.records[-1].pop("task_pass_at_1")
    assert verdict([*a, *c])[2] == "B - A: their prompts or reward_funcs differ"
    assert verdict([*a, *b])[2].startswith("B - A: eval_reward_mean of 2 pairs: A 7.000, B 7.000")
