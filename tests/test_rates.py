"""data/rates.py against a simulation and against exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from data.rates import others, plausible, prospects, share_teaching, teaching


def test_the_usual_reward_is_the_commonest_and_what_is_not_scored_does_not_count():
    assert others([0, 0, 1, 0, 0, 0, 1, 0]) == (2, 8)
    assert others([1, 0, 0, 0]) == (1, 4)
    assert others([1, 1, 1, 0.5, None, math.nan]) == (1, 4)
    assert others([0.1, 0.2, 0.3, 0.4, 0.5]) == (2, 5)  # at most half
    assert others([0.1 + 0.2, 0.3]) == (0, 2)  # not a difference
    assert others([None]) == (0, 0)


@pytest.mark.parametrize("a, b, k", [(1, 1, 4), (2, 5, 8), (3, 1, 16)])
def test_the_chance_that_a_group_teaches_is_the_beta_integral(a, b, k):
    """The mean of q^k is a product of fractions."""

    def mean_of_power(a):
        return math.prod(Fraction(a + i, a_and_b + i) for i in range(k))

    a_and_b = a + b
    assert teaching(a, b, k) == pytest.approx(float(1 - mean_of_power(a) - mean_of_power(b)), abs=1e-12)


def test_the_grid_is_weighed_by_the_likelihood_of_all_prompts():
    """Two prompts are as likely as the product of both."""
    both, one, other = plausible([(1, 4), (3, 4)]), plausible([(1, 4)]), plausible([(3, 4)])
    assert both == pytest.approx(one * other / (one * other).sum(), rel=1e-9)


SHAPES = {
    "hard": lambda rng, n: rng.beta(0.3, 3, n),
    "mixed": lambda rng, n: np.where(rng.random(n) < 0.7, rng.beta(1, 60, n), rng.beta(20, 4, n)),
    "even": lambda rng, n: rng.beta(5, 5, n),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n, k", [(4, 4), (4, 16), (8, 4), (8, 8), (8, 16)])
def test_the_interval_has_the_true_share(shape, n, k):
    """Of 40 probes of 32 prompts at least 34 intervals: 95 % of 40 are 38, less three standard deviations of 1.4."""
    rng = np.random.default_rng(0)
    rates = SHAPES[shape](rng, 100_000)
    truth, found = (1 - rates**k - (1 - rates) ** k).mean(), 0
    for _ in range(40):
        x = rng.binomial(n, SHAPES[shape](rng, 32))
        _, low, high = share_teaching([(min(i, n - i), n) for i in x.tolist()], k)
        found += low - 0.002 <= truth <= high + 0.002
    assert found >= 34


def test_equal_rewards_leave_something_open():
    """Twenty prompts with 8 equal rewards each: few groups teach, but nobody knows that none does."""
    share, low, high = share_teaching([(0, 8)] * 20, 32)
    assert low < 0.01 and 0 < share < 0.1 and 0.05 < high < 0.4
    share, low, high = share_teaching([(4, 8)] * 20, 8)
    assert low > 0.9


def test_a_run_says_what_its_first_groups_promise():
    share, low, high = share_teaching([(1, 4)] * 9 + [(0, 4)], 8)
    text = prospects([(1, 4)] * 9 + [(0, 4)])
    assert f", {share:.0%} of 8 completions ({low:.0%} to {high:.0%}), " in text
