"""The scores of an evaluation: pass@k, majority votes, confidence intervals. Pure functions of counts and lists.

Four samples of a prompt answer 7, 7, 8 and nothing, and 7 is right. Of the six pairs five have a right sample: pass@2
is 5/6, pass_at(2, 4, 2). 7 has the most votes: maj@4 is 1, majority([7, 7, 8, None], [1, 1, 0, 0]). pass@k is a mean
over all k-subsets of the n samples, maj@n is the vote of all of them. See docs/evaluation.md.
Left out: paired differences of two models, intervals of anything but means over prompts. Tests: tests/test_evaluate.py.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from math import comb

Z = 1.959963984540054  # standard deviations that hold 95 % of a normal distribution


def powers(n: int) -> list[int]:
    """The k that are reported: 1, 2, 4, ... below n, and n."""
    return [2**i for i in range(n.bit_length()) if 2**i < n] + [n]


def pass_at(k: int, n: int, right: int) -> float:
    """The share of the k-subsets of n samples with at least one of the `right` ones, 1 - C(n - right, k) / C(n, k)."""
    return (comb(n, k) - comb(n - right, k)) / comb(n, k)  # exact integers, rounded once


def majority(answers: Sequence, right: Sequence[bool]) -> float:
    """How right the answer with the most votes is: the share of its samples that are right. None has no vote.

    The mean over tied answers; 0 without a vote.
    """
    votes = defaultdict(list)
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes[answer].append(is_right)
    most = max(map(len, votes.values()), default=0)
    winners = [found for found in votes.values() if len(found) == most]
    return sum(map(sum, winners)) / (most * len(winners)) if winners else 0.0


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval for the expectation of n values in [0, 1] with this mean -> (low, high).

    Made for zeros and ones; values between vary less, so for them it is wider than necessary.
    """
    centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * math.sqrt(max(mean * (1 - mean), 0) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def scores_of_prompts(greedy: list[bool], groups: list[list[tuple]]) -> dict[str, list[float]]:
    """-> {score's name: P numbers between 0 and 1, one a prompt}.

    greedy: P times, is the greedy completion right? groups: P times n pairs (answer, right); empty: only pass_at_1.
    Names: pass_at_1 (greedy), pass_at_1_sampled, pass_at_k for the other k of `powers`, and maj_at_n.
    """
    scores = {"pass_at_1": [float(right) for right in greedy]}
    if not groups:
        return scores
    n = len(groups[0])
    counts = [sum(right for _, right in group) for group in groups]
    scores["pass_at_1_sampled"] = [pass_at(1, n, count) for count in counts]
    scores |= {f"pass_at_{k}": [pass_at(k, n, count) for count in counts] for k in powers(n)[1:]}
    return scores | (
        {f"maj_at_{n}": [majority(*zip(*group, strict=True)) for group in groups]} if n > 1 else {}
    )


def summarize(greedy: list[dict], sampled: list[dict], n: int, different: int) -> dict:
    """Scores with intervals of P greedy samples and P * n others (or none), and means over all sampled ones.

    A sample: {"answer", "right", "reward", "length", "stopped", "reward/<name>", "task_reward", ...}.
    different: number of different prompts.
    -> {"scores": {name: mean}, "intervals": {name: (low, high)},
        "means": {"length": tokens, "stopped": share, "reward", "reward/<name>": mean}}, "reward" if it has parts
    """
    pairs = [(sample["answer"], sample["right"]) for sample in sampled]
    groups = [pairs[i : i + n] for i in range(0, len(pairs), n)] if pairs else []
    by_prompt = scores_of_prompts([sample["right"] for sample in greedy], groups)
    scores = {name: mean_of(values) for name, values in by_prompt.items()}
    for suffix, samples in (("", greedy), ("_sampled", sampled)):
        scores |= shares_of(samples, suffix) if samples else {}
    intervals = {name: wilson(mean, different) for name, mean in scores.items()}
    shown = sampled or greedy
    means, rewards = (
        {name: mean_of([s[name] for s in shown]) for name in ("length", "stopped")},
        reward_means(shown),
    )
    if len(rewards) > 1:  # otherwise it is pass@1
        means |= {"reward_greedy": reward_means(greedy)["reward"]} | rewards
    return dict(scores=scores, intervals=intervals, means=means)


def shares_of(samples: list[dict], suffix: str = "") -> dict[str, float]:
    """Samples -> {"pass_at_1": share of right ones, "task_pass_at_1": by the task's own reward, where it is beside}."""
    own = (
        {"task_pass_at_1": [s["task_reward"] == 1 for s in samples]}
        if "task_reward" in samples[0]
        else {}
    )
    found = {"pass_at_1": [s["right"] for s in samples]} | own
    return {name + suffix: mean_of(values) for name, values in found.items()}


def reward_means(samples: list[dict]) -> dict[str, float | None]:
    """Samples -> {"reward": mean, "reward/<name>": mean, ...} of those that were scored."""
    names = [name for name in samples[0] if name.partition("/")[0] == "reward"]
    return {name: mean_of([s[name] for s in samples if s[name] is not None]) for name in names}


def mean_of(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def table(head: dict) -> list[str]:
    """The first line of a file of samples -> lines for people: name, value, 95 % interval, remark."""
    asked = head["settings"]
    n, P = asked["num_samples"] if asked["temperature"] else 0, asked["num_prompts"]
    title = f"{head['checkpoint']}: {asked['task']}, {P} prompts of the test split"
    title += f" ({head['different_prompts']} different)" if head["different_prompts"] < P else ""
    title += (
        f", {n} {'sample' if n == 1 else 'samples'} each at temperature {asked['temperature']:g}"
        if n
        else ""
    )
    remarks = {
        "pass_at_1": "greedy",
        "pass_at_1_sampled": f"mean of {n} samples" if n > 1 else "sampled",
    }
    remarks |= {f"task_{name}": remark for name, remark in remarks.items()}
    remarks |= {"length": "tokens, mean", "stopped": "share", "reward_greedy": "greedy"}
    lines = [title + "; 95 % intervals"]
    shown_as = {name: name.removesuffix("_sampled").replace("_at_", "@") for name in head["scores"]}
    width = max(map(len, [*shown_as.values(), *head["means"]]))
    for name, shown in shown_as.items():
        mean, (low, high) = head["scores"][name], head["intervals"][name]
        lines.append(
            f"  {shown:<{width}}  {mean:>6.3f}   {low:.3f} to {high:.3f}   {remarks.get(name, '')}".rstrip()
        )
    for name, mean in head["means"].items():
        value = "-" if mean is None else f"{mean:.1f}" if name == "length" else f"{mean:.3f}"
        lines.append(f"  {name:<{width}}  {value:>6}   {'':<14}   {remarks.get(name, 'mean')}")
    return lines
