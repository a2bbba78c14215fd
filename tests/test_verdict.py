"""Verdicts about runs: what is an arm, what two arms differ by, and whose reward rises alone."""

import dataclasses
import json
import math
import re
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

import grpo
import train_sft
from data.pairs import student
from helpers.runs import tiny
from runs.page.runs import Run, read_runs
from runs.prepare import prepare
from runs.verdict import difference, suspicion, verdict

RNG = np.random.default_rng(0)


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


def test_students_distribution_is_the_closed_form():
    exact = {
        1: lambda t: 0.5 + math.atan(t) / math.pi,
        2: lambda t: 0.5 + t / math.sqrt(2 + t * t) / 2,
        4: lambda t: 0.5 + t * (6 + t * t) / (4 + t * t) ** 1.5 / 2,
        1000: NormalDist().cdf,
    }
    for df, below in exact.items():
        for t in (-8, -2.5, -0.1, 0, 1, 3):
            assert np.interp(t, *student(df)) == pytest.approx(below(t), abs=3e-4 if df > 4 else 1e-6)
    values, chances = student(9)
    assert np.interp(0.975, chances, values) == pytest.approx(2.262157, abs=1e-5)  # as in any table


def test_what_is_said_of_pairs():
    """Worked by hand: the differences 0.04 and 0.02 have the standard error 0.01; t is 12.7062."""
    said = difference([(0.80, 0.84), (0.70, 0.72)], 100)
    start = "A 0.750, B 0.780, B - A +0.030 in 2 pairs, up in 2 and down in 0, 95 % -0.097 to +0.157; "
    assert said == f"{start}B is better with probability {0.5 + math.atan(3) / math.pi:.3f}"
    equal = difference([(0.5, 0.75)] * 3, 100)
    assert equal == "A 0.500, B 0.750, B - A +0.250 in 3 pairs, up in 3 and down in 0, by as much in each"
    assert difference([(0.5, 0.6), (0.6, 0.5)], 9).endswith("B is better with probability 0.500")
    one = difference([(0.5, 0.75)], 200)
    choice = 1.96 * math.sqrt(0.625 * 0.375 * 2 / 200)
    error = f"(+- {choice:.3f} by the choice of prompts)"
    assert one == f"A 0.500, B 0.750, B - A +0.250 {error}; one seed says nothing about luck"
    assert difference([(0.5, 0.75)], 0) == "A 0.500, B 0.750, B - A +0.250; one seed says nothing about luck"
    assert "+- 0.010 " in difference([(1.0, 1.0)], 200)  # never 0


def test_all_of_five_pairs_count():
    """Differences of 0.1, 0.3, -0.1, 0, 0.2: mean 0.1, standard deviation sqrt(0.1 / 4), error sqrt(0.005); t of four
    degrees is 2.7764, and the mean is sqrt(2) errors."""
    first = scores_of(range(5), 0.5, 0)
    second = [make(f"b{s}", (0.1, 0.5 + d), seed=s, beta=0.1) for s, d in enumerate((0.1, 0.3, -0.1, 0, 0.2))]
    half, t = 2.7764 * math.sqrt(0.005), math.sqrt(2)
    better = 0.5 + t * (6 + t * t) / (4 + t * t) ** 1.5 / 2
    expected = "pass_at_1: A 0.500, B 0.600, B - A +0.100 in 5 pairs, up in 3 and down in 1, "
    expected += f"95 % {0.1 - half:+.3f} to {0.1 + half:+.3f}; B is better with probability {better:.3f}"
    assert verdict([*first, *second]) == ["A: 0.5-0", "B: b0, beta is 0.1, not 0.0", expected]


def test_each_of_three_arms_is_compared_with_the_first():
    arms = [
        make(name, (0.1, score), beta=beta) for name, score, beta in (("a", 0.5, 0), ("b", 0.6, 0.1), ("c", 0.4, 0.5))
    ]
    shown = [line.partition(" (+-")[0] for line in verdict(arms)]
    first = ["A: a", "B: b, beta is 0.1, not 0", "pass_at_1: A 0.500, B 0.600, B - A +0.100"]
    second = ["A: a", "B: c, beta is 0.5, not 0", "pass_at_1: A 0.500, B 0.400, B - A -0.100"]
    assert shown == [*first, *second]


def finds_a_difference(shift, n, spread=0.03, luck=0.1):
    """Do n pairs, which share luck, show a difference? -> 0, or the sign of the interval that has no 0."""
    shared = RNG.normal(0.5, luck, n)
    pairs = zip(shared + RNG.normal(0, spread, n), shared + RNG.normal(shift, spread, n), strict=True)
    low, high = map(float, re.search(r"95 % (\S+) to (\S+);", difference([*pairs], 100)).groups())
    return (low > 0) - (high < 0)


def within(found, of, share):
    """Is a count as likely as not: at most 3 standard deviations away?"""
    return abs(found - of * share) < 3 * math.sqrt(of * share * (1 - share))


@pytest.mark.parametrize("n", [2, 5])
def test_equal_arms_are_called_different_in_five_of_a_hundred(n):
    """200 pairs of arms: 10, at most 9.2 more or less."""
    assert within(sum(map(abs, (finds_a_difference(0.0, n) for _ in range(200)))), 200, 0.05)


def scores_of(seeds, start, step=0.01, **settings):
    return [make(f"{start}-{s}", (0.1, start + step * i), seed=s, **settings) for i, s in enumerate(seeds)]


def test_runs_of_equal_options_are_an_arm():
    a, b = scores_of((1, 2, 3), 0.5, out_dir="x"), scores_of((2, 3, 4), 0.6, resume="auto", beta=0.1)
    assert verdict(a) == verdict(a[:1]) == verdict([]) == []
    lines = verdict([*a, *b, dataclasses.replace(a[0], settings=dict(max_iters=8))])  # the last one is of SFT
    assert lines[:2] == ["A: 0.5-1", "B: 0.6-2, beta is 0.1, not 0.0"] and len(lines) == 3
    # Paired by their seeds: 2 and 3
    assert lines[2].startswith("pass_at_1: A 0.515, B 0.605, B - A +0.090 in 2 pairs, up in 2 and down in 0, by as")
    no_seed_in_common = verdict(a + scores_of((7, 8), 0.6, beta=0.1))
    assert no_seed_in_common[2].startswith("pass_at_1: A 0.505, B 0.605, B - A +0.100 in 2 pairs")
    # The pair of the one seed that both have, not the order
    shared = verdict([a[0], *scores_of((9, 1), 0.6, beta=0.1)])
    assert shared[2].startswith("pass_at_1: A 0.500, B 0.610, B - A +0.110 (+-")
    logged_elsewhere = dict(report_to=["wandb"], save_total_limit=9, probe=False, device="cpu")
    assert verdict([*a, *scores_of((4, 5), 0.6, **logged_elsewhere)]) == []
    other_task = verdict([a[0], make("c", task="countdown")])
    assert other_task[2] == "B - A: their scores are of other prompts or reward_funcs"
    running = dataclasses.replace(b[0], settings=b[0].settings | dict(max_iters=9))
    assert verdict([*a, running]) == []


def test_warm_starts_of_equal_options_are_one(tmp_path):
    runs = []
    for seed, steps in ((1, 5), (2, 5), (2, 6)):
        origin = tmp_path / f"sft-{seed}-{steps}"
        origin.mkdir()
        text = json.dumps(dict(seed=seed, max_iters=steps, init_from="models/x", out_dir=str(origin)))
        (origin / "settings.json").write_text(text)
        runs.append(make(origin.name, seed=seed, init_from=str(origin)))
    assert verdict(runs[:2]) == []
    assert verdict(runs[1:])[1] == f"B: sft-2-6, init_from is {tmp_path}/sft-2-6, not {tmp_path}/sft-2-5"


def test_the_score_is_the_tasks_or_else_the_rewards():
    own, other = dict(reward_funcs=["m:f"]), dict(reward_funcs=["m:g"])
    lines = verdict([make("a"), make("b", **own)])
    assert lines[2].startswith("pass_at_1: A 0.500, B 0.500, B - A +0.000")
    runs = [make("a", **own), make("b", **own, beta=0.1), make("c", **other)]
    for run in runs:
        run.records[-1].pop("task_pass_at_1")
    assert verdict(runs[:2])[2].startswith("eval_reward_mean: A 7.000, B 7.000")
    assert verdict(runs[1:])[2] == "B - A: their scores are of other prompts or reward_funcs"


RISING, FLAT = np.linspace(0.2, 0.8, 20), np.full(20, 0.5)
CASES = {  # rewards, scores before and after, prompts: is it said?
    "a hack": (RISING, (0.3, 0.3), 200, True),
    "a hack that costs the task": (RISING, (0.3, 0.1), 200, True),
    "a hack of what never is right": (RISING, (0.0, 0.0), 200, True),
    "both rise": (RISING, (0.3, 0.8), 200, False),
    "the score rises less": (RISING, (0.3, 0.42), 200, False),
    "few prompts": (RISING, (0.3, 0.3), 8, False),
    "the reward rises too little to tell": (0.5 + RISING / 20, (0.3, 0.3), 200, False),
    "no reward rises": (FLAT, (0.3, 0.3), 200, False),
    "the reward may rise by luck": ([0.2, 0.8, 0, 0, 0, 0, 0.9, 0.95], (0.3, 0.3), 200, False),
    "the reward falls": (-RISING, (0.3, 0.2), 200, False),
    "too short": (RISING[::3], (0.3, 0.3), 200, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reward_that_rises_alone_is_named(case):
    rewards, scores, prompts, said = CASES[case]
    noisy = np.array(rewards) + RNG.normal(0, 0.02, len(rewards))
    run = make("x", scores, noisy.tolist(), len(rewards), eval_prompts=prompts, reward_funcs=["m:f"])
    line = suspicion(run)
    assert bool(line) == said
    if said:
        expected = (
            rf"x: the reward rises \(p = \S+\), but task_pass_at_1_sampled does not, {scores[0]:.3f} -> {scores[1]:.3f}"
        )
        assert re.match(expected, line) and verdict([run]) == [line]


def test_honest_runs_are_seldom_named():
    """Where the task is the reward, in 200 simulated runs that learn slowly, at most 5 % would be; here it is none."""
    named = 0
    for _ in range(200):
        rates = np.linspace(0.3, 0.3 + RNG.uniform(0, 0.3), 24)
        rewards = RNG.binomial(256, rates) / 256
        scores = RNG.binomial(200, rates[[0, -1]]) / 200
        named += bool(suspicion(make("x", scores.tolist(), rewards.tolist(), 24, eval_prompts=200)))
    assert named <= 10


def nines(prompts, completions, **columns):
    """A reward that any model can learn, and that is not the task."""
    return [float("9" in completion) for completion in completions]


def test_a_real_run_that_learns_only_its_reward_is_named(tmp_path, one_thread):
    sft, settings = tiny(tmp_path, device="cpu", reward_funcs=[f"{__name__}:nines"], eval_prompts=100)
    train_sft.main(prepare(dataclasses.replace(sft, device="cpu", max_iters=12, eval_prompts=0)))
    settings = dataclasses.replace(
        settings, max_iters=12, batch_size=8, group_size=8, eval_interval=12, learning_rate=0.01
    )
    grpo.main(prepare(settings))
    [line] = verdict(read_runs([settings.out_dir]))
    assert "the reward rises" in line and "task_pass_at_1_sampled does not" in line
