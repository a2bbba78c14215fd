"""Paired comparisons: figures of A and of B for the same prompts, or for the same seeds. Is B better, or is it luck?

Four prompts, answered wrong, wrong, right, right by A and right, right, right, wrong by B: B is up in 2 and down in 1.
Three random signs make a sum of 1 or more always: sign_flip([1, 1, 0, -1]) = 1.

evaluate.py makes two lists of samples in the same order. With the same seed token t of row i is drawn with the same
number in both, so completions are the same up to where the models differ. runs/verdict.py compares runs by their seeds;
random signs of fewer than six pairs never have p < 0.05.

Left out: corrections of p for several looks. Tests: tests/test_pairs.py, tests/test_verdict.py.
"""

import json
import math
from collections import defaultdict

import numpy as np

from data.scores import Z

PARTS = 720_720 * 64  # of 1: all means of up to 16 whole numbers, or of 2^n, are whole numbers of parts
MOST = 100_000  # units that differences add up to; finer ones are rounded


def sign_flip(d: np.ndarray) -> float:
    """p of a permutation test: how often random signs make the sum of the differences d (P,) at least as large.

    It is exact, by adding one difference after the other. For zeros and ones it is McNemar's exact test.
    """
    parts = [round(x * PARTS) for x in d.tolist()]
    unit = max(math.gcd(*parts), sum(map(abs, parts)) / MOST) or 1
    units = [round(x / unit) for x in parts]
    chances = np.ones(1)  # [i]: that signs + have i units
    for n in filter(None, map(abs, units)):
        chances = (np.pad(chances, (0, n)) + np.pad(chances, (n, 0))) / 2
    total = len(chances) - 1
    sums = 2 * np.arange(total + 1) - total
    return float(chances[abs(sums) >= abs(sum(units))].sum())


def compared(pairs):
    """Figures (A's, B's) of the same prompts -> a, b: means; low, high: 95 % of B - A; p; up, down: how many prompts.

    The interval counts one prompt more that is up and one that is down, by as much as the largest difference, or by 1
    if there is none. For zeros and ones this is Bonett and Price's (2012, J. Educ. Behav. Stat. 37:479).
    """
    a, b = np.array(pairs, dtype=float).T
    d = (b - a).round(9)
    most = abs(d).max() or 1.0
    more = np.append(d, [most, -most])
    half = Z * more.std() / math.sqrt(len(more))
    return dict(
        a=float(a.mean()),
        b=float(b.mean()),
        low=float(more.mean() - half),
        high=float(more.mean() + half),
        p=sign_flip(d),
        up=int((d > 0).sum()),
        down=int((d < 0).sum()),
    )


def said(row) -> str:
    """`compared` -> "A 0.952, B 0.901, B - A -0.051 (-0.081 to -0.021), up in 0 and down in 5, p = 0.062"."""
    a, b = row["a"], row["b"]
    return (
        f"A {a:.3f}, B {b:.3f}, B - A {b - a:+.3f} ({row['low']:+.3f} to {row['high']:+.3f}), "
        f"up in {row['up']} and down in {row['down']}, p = {row['p']:.2g}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Two models


def comparison(ours, theirs):
    """Samples of A and of B -> {"greedy right": `compared`, "sampled right": ..., "sampled reward": ...}.

    A prompt that is repeated counts once, with its mean. reward: if all completions were scored, and it is more than
    right and wrong.
    """
    kinds = defaultdict(lambda: defaultdict(list))
    for a, b in zip(ours, theirs, strict=True):
        kinds["greedy" if a["greedy"] else "sampled"][json.dumps(a["prompt"])].append((a, b))
    figures = {}
    for kind, prompts in kinds.items():
        means = []
        for pairs in prompts.values():
            values = [[(s["right"], s["reward"]) for s in pair] for pair in pairs]
            means.append(np.array(values, dtype=float).mean(axis=0).T)  # None, not scored, is NaN
        right, reward = zip(*means, strict=True)
        figures[f"{kind} right"] = compared(right)
        if np.isfinite(reward).all() and not np.array_equal(right, reward):
            figures[f"{kind} reward"] = compared(reward)
    return figures


def verdict(figures):
    """`comparison` -> lines for people: the figures, and whether B is better, by sampled answers if there are any."""
    lines = [f"{name}: {said(row)}" for name, row in figures.items()]
    name, row = [item for item in figures.items() if item[0].endswith("right")][-1]
    result = "no difference to see"
    if row["p"] < 0.05:
        result = f"B is {'better' if row['b'] > row['a'] else 'worse'}"
    return [*lines, f"{result}: {name}, p = {row['p']:.2g}"]
