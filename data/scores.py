"""What samples say of a model: pass@k, majority votes, and how sure that is. Pure functions of counts and lists.

Four samples of a prompt answer 7, 7, 8 and nothing, and 7 is right. Of the six pairs

    five have a right one                                             pass@2 = 5/6    pass_at(2, 4, 2)
    77, 7-, 7- elect 7; 78, 78 are ties, which count half; 8- elects 8    maj@2 = 4/6    majority_at(2, 4, ((1, 0), (2, 2)))

Both are means over every k of the n samples, not over some of them: so maj@k is never above pass@k. Formulas and sources: docs/evaluation.md.
Left out: paired differences of two models, intervals for anything but means over prompts.
"""

import math
from fractions import Fraction
from functools import cache
from math import comb

Z = 1.959963984540054  # a normal variable is within as many standard deviations with probability 0.95


def powers(n):
    """The k that are reported: 1, 2, 4, ... below n, and n."""
    return [2**i for i in range(n.bit_length()) if 2**i < n] + [n]


def pass_at(k, n, right):
    """The share of the k-subsets of n samples that have one of the `right` ones, 1 - C(n - right, k) / C(n, k)."""
    return (comb(n, k) - comb(n - right, k)) / comb(n, k)  # of integers of any size: rounded once


def ballots(answers, right):
    """n answers and whether each is right -> ((votes, right ones among them), ...), an entry each different answer; None votes for nothing."""
    found = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            count, good = found.get(answer, (0, 0))
            found[answer] = count + 1, good + bool(is_right)
    return tuple(sorted(found.values()))


@cache
def majority_at(k, n, votes):
    """The mean, over the k-subsets of n samples, of how right the answer with the most votes is.

    votes: as `ballots` makes them, of at most n. An answer is right by the share of its samples that are; answers that tie count
    by equal shares; a subset in which nothing votes counts 0.

    Subsets are counted, not listed: for each t, those in which no answer has more than t votes and some have t. Samples that give
    one answer are alike, so `worth`, right ones over votes, stands for the share of right ones among the t that were drawn.
    """
    silent, total = n - sum(count for count, _ in votes), Fraction(0)
    scale = math.lcm(*(count for count, _ in votes))  # worths are whole numbers of 1/scale
    for t in range(1, min(k, max((count for count, _ in votes), default=0)) + 1):
        table = {(0, 0): (1, 0)}  # (answers with t votes, samples drawn): (subsets, their winners' worths added up)
        for count, right in votes:
            share, further = scale * right // count, {}
            for (tied, drawn), (subsets, worth) in table.items():
                for more in range(min(count, t, k - drawn) + 1):
                    wins, ways = more == t, comb(count, more)
                    place = tied + wins, drawn + more
                    so_far = further.get(place, (0, 0))
                    gained = worth + subsets * share * wins
                    further[place] = so_far[0] + ways * subsets, so_far[1] + ways * gained
            table = further
        total += sum(
            Fraction(worth * comb(silent, k - drawn), tied * scale)
            for (tied, drawn), (_, worth) in table.items()
            if tied
        )
    return float(total / comb(n, k))


def wilson(mean, n):
    """A 95 % interval for the expectation of values in [0, 1], from the mean of n of them -> (low, high). n >= 1.

    It is meant for zeros and ones. Values between vary less about the same mean, so for them it is wider than need be.
    """
    centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * math.sqrt(max(mean * (1 - mean), 0) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def of_prompts(greedy, groups):
    """Each score of each prompt -> {name: P numbers between 0 and 1}.

    greedy: P bools, is the likeliest completion right? groups: of P prompts n pairs (answer, right); or [], and only pass_at_1 is told.
    Names: pass_at_1 (greedy), pass_at_1_sampled, and pass_at_k, maj_at_k for every other k of `powers`.
    """
    scores = {"pass_at_1": [float(right) for right in greedy]}
    if not groups:
        return scores
    n = len(groups[0])
    counts = [sum(right for _, right in group) for group in groups]
    votes = [ballots(*zip(*group, strict=True)) for group in groups]
    scores["pass_at_1_sampled"] = [pass_at(1, n, count) for count in counts]
    scores |= {f"pass_at_{k}": [pass_at(k, n, count) for count in counts] for k in powers(n)[1:]}
    return scores | {f"maj_at_{k}": [majority_at(k, n, vote) for vote in votes] for k in powers(n)[1:]}


def judge(greedy, sampled, n, different):
    """The samples of P prompts, P greedy ones and P * n others or none -> the scores, their intervals, and means over all that was sampled.

    A sample: {"answer", "reward", "length", "stopped", "reward/<name>", ...}. different: of the prompts, for repeats tell nothing new.
    -> {"scores": {name: mean}, "intervals": {name: [low, high]}, "means": {"length": tokens, "stopped": share, "reward/<name>": ...}}
    """
    groups = [[(s["answer"], s["reward"] == 1) for s in sampled[i : i + n]] for i in range(0, len(sampled), n or 1)]
    scores = {name: mean_of(values) for name, values in of_prompts([s["reward"] == 1 for s in greedy], groups).items()}
    shown = sampled or greedy
    names = ["length", "stopped", *(name for name in shown[0] if name.startswith("reward/"))]
    means = {name: mean_of([s[name] for s in shown if s[name] is not None]) for name in names}
    return dict(scores=scores, intervals={name: wilson(mean, different) for name, mean in scores.items()}, means=means)


def mean_of(values):
    return math.fsum(values) / len(values) if values else None


def table(head):
    """The first line of a file of samples -> lines of text for people: name, value, 95 % interval, remark."""
    asked = head["settings"]
    n, P = asked["num_samples"] if asked["temperature"] else 0, asked["num_prompts"]
    title = f"{head['checkpoint']}: {asked['task']}, {P} prompts of the {asked['eval_split']} split"
    title += f" ({head['different_prompts']} different)" if head["different_prompts"] < P else ""
    title += f", {n} sample{'s'[: n > 1]} each at temperature {asked['temperature']:g}" if n else ""
    remarks = {"pass_at_1": "greedy", "pass_at_1_sampled": f"mean of {n} samples" if n > 1 else "sampled"}
    remarks |= {"length": "tokens, mean", "stopped": "share"}
    rows = [
        (
            name.removesuffix("_sampled").replace("_at_", "@"),
            f"{mean:.3f}",
            "{:.3f} to {:.3f}".format(*head["intervals"][name]),
            remarks.get(name, ""),
        )
        for name, mean in head["scores"].items()
    ]
    for name, mean in head["means"].items():
        rows.append(
            (
                name,
                "-" if mean is None else f"{mean:.1f}" if name == "length" else f"{mean:.3f}",
                "",
                remarks.get(name, "mean"),
            )
        )
    width = max(len(row[0]) for row in rows)
    return [title + "; 95 % intervals", *(f"  {a:<{width}}  {b:>6}   {c:<14}   {d}".rstrip() for a, b, c, d in rows)]
