"""The scores of an evaluation: pass@k, majority votes, confidence intervals. Pure functions of counts and lists.

Four samples of a prompt answer 7, 7, 8 and nothing, and 7 is right. Five of the six pairs have a right sample, so
pass@2 is 5/6: pass_at(2, 4, 2). 7 has the most votes, so maj@4 is 1: majority([7, 7, 8, None], [1, 1, 0, 0]).
pass@k is a mean over all k-subsets of the n samples; maj@n is the vote of all n. See docs/evaluation.md.

A sample is a dict that evaluate.py makes of a completion: {"answer", "right", "reward", "length", "stopped", ...}.
Left out: differences of two models (pairs.py), intervals of anything but means over prompts.
Tests: tests/test_evaluate.py.
"""

import json
from collections import Counter
from math import comb, sqrt
from statistics import fmean

Z = 1.959963984540054  # standard deviations that hold 95 % of a normal distribution


def powers(n: int):
    """The k of pass@k: 1, 2, 4, ... below n, and n."""
    return [2**i for i in range(n.bit_length()) if 2**i < n] + [n]


def pass_at(k: int, n: int, right: int) -> float:
    """The share of the k-subsets of n samples with at least one of the `right` ones, 1 - C(n - right, k) / C(n, k)."""
    return (comb(n, k) - comb(n - right, k)) / comb(n, k)  # whole numbers, rounded once


def majority(answers, right):
    """How right is the answer with the most votes? -> the share of its samples that are right. None has no vote.

    If answers tie, the mean over them; without a vote, 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=None)
    winners = [
        is_right for answer, is_right in zip(answers, right, strict=True) if votes[answer] == most
    ]
    return fmean(winners) if winners else 0.0


def wilson(mean: float, n: int):
    """Wilson's 95 % interval for the expectation of n values in [0, 1] with this mean -> (low, high).

    Of zeros and ones it has the expectation in about 95 of 100 cases (n = 10: in 89 to 98, near 0 and 1 in 84). Values
    between them vary less, so for them it is wider than necessary.
    """
    share = Z**2 / n
    centre = mean + share / 2
    half = Z * sqrt(mean * (1 - mean) / n + share / n / 4)
    return max(0.0, (centre - half) / (1 + share)), min(1.0, (centre + half) / (1 + share))


def share_of(count: int, n: int) -> str:
    """A count of n and its `wilson` interval, such as "15 of 32, 47 % (31 % to 63 %)"."""
    low, high = wilson(count / n, n)
    return f"{count:,} of {n:,}, {100 * count / n:.0f} % ({100 * low:.0f} % to {100 * high:.0f} %)"


def summarize(greedy, sampled):
    """A greedy sample of each prompt and n others of each, or none -> what the file of samples says first.

    -> {"scores": {name: mean}, "intervals": {name: (low, high)}, "means": {name: mean}, "different_prompts": number}.
    Means have the length in tokens, the share of stopped completions, and rewards if the reward is more than pass@1.
    """
    scores = pass_rates(greedy)
    if sampled:
        n = len(sampled) // len(greedy)
        pairs = [(sample["answer"], sample["right"]) for sample in sampled]
        groups = [pairs[i : i + n] for i in range(0, len(pairs), n)]
        scores |= pass_rates(sampled, "_sampled") | group_scores(groups)
    different = len({json.dumps(sample["prompt"]) for sample in greedy})
    intervals = {name: wilson(mean, different) for name, mean in scores.items()}
    shown = sampled or greedy
    means = {name: fmean(sample[name] for sample in shown) for name in ("length", "stopped")}
    rewards = reward_means(shown)
    if len(rewards) > 1:
        means |= {"reward_greedy": reward_means(greedy)["reward"]} | rewards
    return dict(scores=scores, intervals=intervals, means=means, different_prompts=different)


def group_scores(groups):
    """A group of n pairs (answer, right) per prompt -> pass_at_k for the `powers` above 1, and maj_at_n.

    Each score is a mean over the prompts.
    """
    n = len(groups[0])
    counts = [sum(right for _, right in group) for group in groups]
    scores = {f"pass_at_{k}": fmean(pass_at(k, n, count) for count in counts) for k in powers(n)[1:]}
    if n > 1:
        scores[f"maj_at_{n}"] = fmean(majority(*zip(*group, strict=True)) for group in groups)
    return scores


def pass_rates(samples, suffix=""):
    """-> {"pass_at_1": the share of right samples}, and task_pass_at_1 if they have a task_reward."""
    rates = {"pass_at_1" + suffix: fmean(sample["right"] for sample in samples)}
    if "task_reward" in samples[0]:
        rates["task_pass_at_1" + suffix] = fmean(sample["task_reward"] == 1 for sample in samples)
    return rates


def reward_means(samples):
    """-> {"reward": mean, "reward/<function>": mean, ...}. Without None, "not scored"."""
    means = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        if name.startswith("reward"):
            scored = [s[name] for s in samples if s.get(name) is not None]
            means[name] = fmean(scored) if scored else None
    return means


def table(summary):
    """The first line of a file of samples -> lines for people: name, value, 95 % interval."""
    options, different = summary["settings"], summary["different_prompts"]
    prompts, n = options["num_prompts"], options["num_samples"]
    title = f"{summary['checkpoint']}: {options['task']}, {prompts} prompts of the test split"
    if different < prompts:
        title += f" ({different} different)"
    if options["temperature"]:
        title += f", {n} sample{'s' * (n > 1)} each at temperature {options['temperature']:g}"
    rows = {name: f"{value:.3f}" for name, value in summary["scores"].items()}
    for name, (low, high) in summary["intervals"].items():
        rows[name] += f"   {low:.3f} to {high:.3f}"
    rows |= {name: f"{mean:.3f}" for name, mean in summary["means"].items() if mean is not None}
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    if summary["means"]["stopped"] <= 0.5:
        lines.append(f"  most were cut off at max_new_tokens={options['max_new_tokens']}")
    return [title + "; 95 % intervals", *lines]
