"""How many groups will teach something, from completions that were scored.

A group of k completions whose rewards are equal teaches nothing. Most rewards of a prompt are its usual one; a
completion earns another with the chance q. Then the group teaches with the chance 1 - q^k - (1 - q)^k: exact if there
are two rewards. Of the rewards 0 0 1 0 0 0 1 0 the usual one is 0, and 2 of 8 are others: `others`.

The prompts' q follow a beta distribution that nobody knows. A grid has its mean and its strength a + b. The counts of
all prompts say how likely each point is; so an interval has what they leave open, also if all rewards were equal.

Left out: what changes while a model learns. Tests: tests/test_rates.py.
"""

import math
from collections import Counter

import numpy as np

MEANS = (
    np.sin(np.linspace(0, math.pi / 2, 102)[1:-1]) ** 2
)  # Jeffreys' prior of a share: denser near 0 and 1
STRENGTHS = np.geomspace(0.05, 200, 25)
A = (MEANS[:, None] * STRENGTHS).ravel()  # (G,) of a grid of G beta distributions
B = ((1 - MEANS)[:, None] * STRENGTHS).ravel()


def others(rewards: list) -> tuple[int, int]:
    """The rewards of a prompt -> (how many are not the usual one, how many there are). None is not scored."""
    scored = [round(reward, 6) for reward in rewards if reward is not None and reward == reward]
    return len(scored) - max(Counter(scored).values(), default=0), len(scored)


def plausible(counts: list[tuple[int, int]]) -> np.ndarray:
    """`others` of each prompt -> the probability of each beta distribution of the grid (G,), which add up to 1."""
    likelihood = np.zeros(len(A))
    for (x, n), times in Counter(counts).items():
        others_are_x = rising(A, x) + rising(B, n - x) - rising(A + B, n)
        likelihood += times * others_are_x
    weights = np.exp(likelihood - likelihood.max())
    return weights / weights.sum()


def teaching(a, b, k: int):
    """The chance that a group of k teaches, if its prompt's q follows Beta(a, b). a, b: numbers or arrays.

    Mean of 1 - q^k - (1 - q)^k; the mean of q^k is a (a + 1) ... (a + k - 1) / ((a + b) ... (a + b + k - 1)).
    """
    whole = rising(a + b, k)
    all_others = np.exp(rising(a, k) - whole)
    none = np.exp(rising(b, k) - whole)
    return 1 - all_others - none


def rising(z, m: int):
    """log of z (z + 1) ... (z + m - 1)."""
    return np.log(np.asarray(z)[..., None] + np.arange(m)).sum(-1)


def share_teaching(counts: list[tuple[int, int]], k: int, level: float = 0.95):
    """-> (the expected share of groups of k that teach, low, high) of prompts like these."""
    weights = plausible(counts)
    shares = teaching(A, B, k)
    order = shares.argsort()
    below = weights[order].cumsum()
    tail = (1 - level) / 2
    low = shares[order][(below < tail).sum()]
    high = shares[order][(below < 1 - tail).sum()]
    return float(weights @ shares), float(low), float(high)
