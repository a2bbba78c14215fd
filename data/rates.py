"""How many groups will teach something, from completions that were scored.

A group of k completions whose rewards are equal teaches nothing. If a prompt has two rewards, one with the chance q,
its group teaches with the chance 1 - q^k - (1 - q)^k. Of the rewards 0 0 1 0 0 0 1 0 two of 8 are not the usual one:
`others`. Three rewards or more count as two, so their groups may teach a little more than is said.

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
SIZES = 4, 8, 16, 32  # of groups, to compare
STRENGTHS = np.geomspace(0.05, 200, 25)
A = (MEANS[:, None] * STRENGTHS).ravel()  # (G,) of a grid of G beta distributions
B = ((1 - MEANS)[:, None] * STRENGTHS).ravel()


def others(rewards: list) -> tuple[int, int]:
    """The rewards of a prompt -> (how many are not the usual one, at most half; how many there are).

    None is not scored.
    """
    scored = [reward for reward in rewards if reward is not None and reward == reward]
    times = Counter(round(reward, 6) for reward in scored)
    usual = max(times.values(), default=0)
    n = len(scored)
    return min(n - usual, n // 2), n


def plausible(counts: list[tuple[int, int]]) -> np.ndarray:
    """`others` of each prompt -> the probability of each beta distribution of the grid (G,), which add up to 1."""
    likelihood = np.zeros(len(A))
    for (x, n), times in Counter(counts).items():
        # Which of the two rewards is the usual one is not known.
        one = rising(A, x) + rising(B, n - x)
        other = rising(A, n - x) + rising(B, x)
        either = np.logaddexp(one, other)
        likelihood += times * (either - rising(A + B, n))
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
    z = np.asarray(z)[..., None]
    factors = z + np.arange(m)
    return np.log(factors).sum(-1)


def share_teaching(counts: list[tuple[int, int]], k: int):
    """-> (the expected share of groups of k that teach, low, high) of prompts like these; a 95 % interval."""
    weights = plausible(counts)
    shares = teaching(A, B, k)
    order = shares.argsort()
    below = weights[order].cumsum()
    low, high = shares[order][below.searchsorted([0.025, 0.975])]
    return float(weights @ shares), float(low), float(high)


def prospects(counts: list[tuple[int, int]]) -> str:
    """What a run says of its first groups."""
    shares = []
    for k in SIZES:
        share, low, high = share_teaching(counts, k)
        shares.append(f"{share:.0%} of {k} completions ({low:.0%} to {high:.0%})")
    return f"groups that teach something, estimated from these: {', '.join(shares)}"
