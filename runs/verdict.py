"""Is a run better than another, or was it luck? And does it learn the task, or only the reward? Figures of logs only.

Runs whose options are equal but for the seed are an arm. The first arm is compared with each other one, in pairs of
runs with the same seed: they may share much of their luck (fork.py). Where no two seeds agree, pairs are in the runs'
order. Two pairs with the differences 0.04 and 0.02 have a mean of 0.03, but the interval -0.10 to 0.16.

Left out: runs that have not ended; the same prompt by prompt (evaluate.py). Tests: tests/test_verdict.py.
"""

import json
import math
from pathlib import Path
from statistics import NormalDist, fmean, stdev

import numpy as np

from data.pairs import compared, student
from runs.log import values_of
from runs.page.runs import Run, logged
from settings import GRPOSettings, LogOptions
from snug.options import fields

# Of a run; they change no result.
LUCK = {"seed", "out_dir", "resume", "device", "plan", "probe", *fields(LogOptions)}
PROMPTS = {"task", "data_file", "test_file"}


def verdict(runs: list[Run]) -> list[str]:
    """Lines about runs of GRPO: each arm beside the first, and the runs that may learn only the reward."""
    arms, lines = {}, []
    for run in runs:
        if run.kind == "GRPO" and run.ended and held_out(run):
            options = json.dumps(but_luck(run.settings), sort_keys=True)
            arms.setdefault(options, []).append(run)
    first, *others = [*arms.values()] or [[]]
    for arm in others:
        lines += compared_arms(first, arm)
    return lines + list(filter(None, map(suspicion, runs)))


def but_luck(settings: dict) -> dict:
    """The options of a run without its seed. If init_from is a run, its options stand for it."""
    settings = vars(GRPOSettings()) | settings  # an older run lacks some
    kept = {name: value for name, value in settings.items() if name not in LUCK}
    origin = Path(settings.get("init_from") or "-", "settings.json")
    if origin.is_file():
        kept["init_from"] = but_luck(json.loads(origin.read_text()))
    return kept


def score_name(run: Run) -> str:
    """The held-out score: pass@1 of the task, or else the mean of reward_funcs."""
    if not run.settings.get("reward_funcs"):
        return "pass_at_1"
    own = "task_pass_at_1"
    return own if logged(run.records, own) else "eval_reward_mean"


def held_out(run: Run) -> list[float]:
    return logged(run.records, score_name(run))


# ----------------------------------------------------------------------------------------------------------------------
# Two arms


def compared_arms(first: list[Run], second: list[Run]) -> list[str]:
    """Lines about the last scores of two arms."""
    a, b = first[0], second[0]
    was, now = but_luck(a.settings), but_luck(b.settings)
    changed = [name for name in now if now[name] != was.get(name)]
    lines = [f"A: {a.folder}", f"B: {b.folder}"]
    for name in changed:
        before, after = a.settings.get(name, was[name]), b.settings.get(name, now[name])
        lines[1] += f", {name} is {after}, not {before}"
    prompts, others = a.settings["eval_prompts"], PROMPTS
    if score_name(a) == "eval_reward_mean":
        prompts, others = 0, PROMPTS | {"reward_funcs"}
    if others & {*changed}:
        return [*lines, "B - A: their scores are of other prompts or reward_funcs"]
    of_a, of_b = map(last_scores, (first, second))
    pairs = [(of_a[seed], of_b[seed]) for seed in of_a if seed in of_b]
    if not pairs:
        pairs = list(zip(of_a.values(), of_b.values(), strict=False))
    return [*lines, f"{score_name(a)}: {difference(pairs, prompts)}"]


def last_scores(arm: list[Run]) -> dict[int, float]:
    """-> {seed: the last held-out score}."""
    return {run.settings["seed"]: held_out(run)[-1] for run in arm}


def difference(pairs: list[tuple[float, float]], prompts: int) -> str:
    """What pairs of scores of the arms A and B say about B - A. prompts: if scores are shares of them, else 0.

    Student's t interval; the posterior probability with a flat prior.
    """
    row = compared(pairs)
    a, b, n = row["a"], row["b"], len(pairs)
    mean = b - a
    text = f"A {a:.3f}, B {b:.3f}, B - A {mean:+.3f}"
    if n == 1 and prompts:
        error = deviation(a, b, prompts) * math.sqrt(2 / prompts)
        choice = 1.96 * error
        text += f" (+- {choice:.3f} by the choice of prompts)"
    if n == 1:
        return f"{text}; one seed says nothing about luck"
    text += f" in {n} pairs, up in {row['up']} and down in {row['down']}"
    error = error_of(pairs)
    if error < 1e-9:
        return f"{text}, by as much in each"
    values, chances = student(n - 1)
    half = error * np.interp(0.975, chances, values)
    better = np.interp(mean / error, values, chances)
    text += f", 95 % {mean - half:+.3f} to {mean + half:+.3f}"
    return f"{text}; B is better with probability {better:.3f}"


# ----------------------------------------------------------------------------------------------------------------------
# One run


def suspicion(run: Run) -> str:
    """A line if the reward rises in training, but pass@1 of the task on held-out prompts does not; else "".

    The reward rises if its last quarter of iterations is above the first (p < 0.01). If it stands for the task, both
    rise by about as many standard deviations of a completion. The line needs a score that has not risen (p > 0.05), and
    that has risen by less than half as many (p < 0.05). So few prompts say nothing.
    """
    name = f"{score_name(run)}_sampled"
    scores = [score for _, score in values_of(run.records, name)]
    rewards = logged(run.records, "reward_mean")
    quarter = len(rewards) // 4
    if quarter < 2 or len(scores) < 2 or name.startswith("eval"):
        return ""
    first, last = rewards[:quarter], rewards[-quarter:]
    pairs = list(zip(first, last, strict=True))
    mean = fmean(b - a for a, b in pairs)
    error = error_of(pairs) or 1e-9
    p_reward = np.interp(-mean / error, *student(quarter - 1))
    before, after = scores[0], scores[-1]
    n = run.settings["eval_prompts"]
    rise = (after - before) / deviation(before, after, n)
    noise = math.sqrt(2 / n)  # of rise
    spread = fmean(logged(run.records, "reward_std")) or math.inf
    enough = mean / spread / 2
    room = (1 - before) / deviation(before, before, n)
    most = 1.645 * noise  # a rise by luck
    if p_reward > 0.01 or rise > most or rise > enough - most or room < enough:
        return ""
    p_score = NormalDist().cdf(-rise / noise)
    return (
        f"{run.folder}: the reward rises (p = {p_reward:.1g}), but {name} does not, {before:.3f} -> {after:.3f} "
        f"(p = {p_score:.1g}): read what is rewarded"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def error_of(pairs: list[tuple[float, float]]) -> float:
    """The standard error of the mean difference."""
    return stdev(b - a for a, b in pairs) / math.sqrt(len(pairs))


def deviation(a: float, b: float, n: int) -> float:
    """The standard deviation of right or wrong, where a and b of n prompts were right; never 0."""
    right = n * (a + b)
    share = (right + 1) / (2 * n + 2)
    return math.sqrt(share * (1 - share))
