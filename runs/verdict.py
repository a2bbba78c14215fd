"""Is one run better than another, or was it luck? The answer comes from the logs alone.

Runs in folders whose names differ only in -seed<N> are an arm, such as out/x-seed1 and out/x-seed2; fork.py makes arms.
The first arm is compared with each other arm, in pairs of runs with the same seed, which may share much of their luck.

Left out: runs that have not ended; a comparison prompt by prompt (evaluate.py). Tests: tests/test_verdict.py.
"""

import re

from data.pairs import compared, said
from runs.page.runs import logged
from snug.home import command

OF_SCORES = "task", "data_file", "test_file", "eval_prompts", "chat", "system_prompt"


def verdict(runs):
    """Lines about runs of GRPO: each arm beside the first."""
    runs = [run for run in runs if run.kind == "GRPO" and run.ended and held_out(run)]
    arms = {}
    for run in runs:
        name = re.sub(r"-seed\d+$", "", str(run.folder))
        arms.setdefault(name, {})[run.settings["seed"]] = run
    lines, (first, *others) = [], [*arms] or [""]
    for other in others:
        lines += [f"A: {first}", f"B: {other}", "B - A: " + difference(arms[first], arms[other])]
    return lines


def score_name(run) -> str:
    """The held-out score: pass@1 of the task, or else the mean of reward_funcs."""
    if not run.settings.get("reward_funcs"):
        return "pass_at_1"
    own = "task_pass_at_1"
    return own if logged(run.records, own) else "eval_reward_mean"


def held_out(run):
    return logged(run.records, score_name(run))


def difference(first, second):
    """-> what the last scores of two arms, {seed: run}, say, in words."""
    pairs = [(first[seed], second[seed]) for seed in first if seed in second]
    names = [*OF_SCORES]
    if "eval_reward_mean" in map(score_name, first.values()):
        names.append("reward_funcs")
    if any(a.settings.get(name) != b.settings.get(name) for a, b in pairs for name in names):
        return "their prompts or reward_funcs differ"
    if len(pairs) < 2:
        return f"{len(pairs)} seeds in common say nothing; {command('fork')} makes pairs"
    scores = [(held_out(a)[-1], held_out(b)[-1]) for a, b in pairs]
    return f"{score_name(pairs[0][0])} of {len(pairs)} pairs: {said(compared(scores))}"
