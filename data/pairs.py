"""Two models, A and B, on the same prompts with the same luck: is B better, and where do their completions part?

With the same seed token t of row i is drawn with the same number in both. So equal distributions draw equal tokens, and
two completions are the same up to where the models differ. Four prompts, answered wrong, wrong, right, right by A and
right, right, right, wrong by B: B is up in 2 and down in 1. A fair coin is always as uneven: mcnemar(2, 1) = 1.

Pure functions of two lists of samples, which evaluate.py makes, in the same order. A prompt that is repeated counts
once, with its mean. Left out: corrections of p for several looks. Tests: tests/test_pairs.py.
"""

import json
from collections import Counter, defaultdict
from itertools import product
from math import ceil, comb, exp, sqrt
from statistics import fmean

import numpy as np

from data.scores import Z

Z80 = 0.8416212335729143  # 80 % of a normal distribution are below
MOST_EXACT = 14  # differences; of more, 10,000 of all their signs are drawn
TINY = 1e-9
SHOWN = 10  # kinds of partings on the console
FIGURES = ("right", "reward", "length", "stopped")


def mcnemar(up: int, down: int) -> float:
    """McNemar's exact p, for answers that became right and wrong: how often a fair coin is at least as uneven."""
    n = up + down
    fewer = min(up, down)
    tail = sum(comb(n, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip(differences: np.ndarray) -> float:
    """p of a permutation test: how often random signs make the sum of the differences (P,) at least as large."""
    d = differences[differences != 0]
    n = len(d)
    if n <= MOST_EXACT:
        signs = list(product((-1, 1), repeat=n))
        sums = np.array(signs) @ d
    else:
        rng = np.random.default_rng(0)
        blocks = [rng.integers(0, 2, (100, n)) @ d for _ in range(100)]
        sums = 2 * np.concatenate(blocks) - d.sum()
        sums[0] = d.sum()  # what was seen is one of them, so p is never 0
    return float(np.mean(abs(sums) > abs(d.sum()) - TINY))


def compared(pairs: list[tuple[dict, dict]], name: str) -> dict:
    """A figure of samples (A's, B's) -> a, b: its means; low, high: of the difference; p; up, down: numbers of prompts;
    needed: prompts that find such a difference in 80 % of evaluations, by the normal formula; None if there is none.

    The interval of greedy answers is Bonett and Price's (2012, J. Educ. Behav. Stat. 37:479): it counts one prompt more
    that is up, and one that is down. Others are the normal one.
    """
    values = defaultdict(list)
    for a, b in pairs:
        values[json.dumps(a["prompt"])].append([a[name], b[name]])
    means = np.array([np.mean(each, axis=0) for each in values.values()])  # (P, 2)
    a, b = means.mean(axis=0).tolist()
    d = means @ [-1, 1]
    up = int((d > 0).sum())
    down = int((d < 0).sum())
    needed = None
    if abs(b - a) > TINY:
        spread = d.std() / (b - a)
        needed = ceil(((Z + Z80) * spread) ** 2)
    p = sign_flip(d)
    if pairs[0][0]["greedy"] and name == "right":
        p = mcnemar(up, down)
        d = np.append(d, [1, -1])
    half = Z * d.std() / sqrt(len(d))
    low, high = (d.mean() + [-half, half]).tolist()
    return dict(
        a=a,
        b=b,
        low=low,
        high=high,
        p=p,
        up=up,
        down=down,
        needed=needed,
    )


def comparison(ours: list[dict], theirs: list[dict]) -> dict[str, dict]:
    """Samples of A and of B -> {"greedy right": `compared`, ..., "sampled right": ...}.

    reward: if all completions were scored, and it is more than right and wrong.
    """
    kinds = defaultdict(list)
    figures = {}
    for a, b in zip(ours, theirs, strict=True):
        kinds["greedy" if a["greedy"] else "sampled"].append((a, b))
    for kind, pairs in kinds.items():
        samples = [sample for pair in pairs for sample in pair]
        right = [sample["right"] for sample in samples]
        for name in FIGURES:
            values = [sample[name] for sample in samples]
            says_more = name != "reward" or values != right
            if None not in values and says_more:
                figures[f"{kind} {name}"] = compared(pairs, name)
    return figures


def verdict(figures: dict[str, dict]) -> list[str]:
    """`comparison` -> lines for people: the figures, and whether B is better, by sampled answers if there are any."""
    lines = [f"{'':16}      A        B     B - A   95 % interval       p        prompts up, down"]
    for name, row in figures.items():
        a, b, p = row["a"], row["b"], row["p"]
        difference = b - a
        cells = [
            f"  {name:16}{a:8.3f}{b:9.3f}{difference:+10.3f}",
            f"{row['low']:+.3f} to {row['high']:+.3f}",
            f"{p:<8.2g} {row['up']}, {row['down']}",
        ]
        lines.append("   ".join(cells))
        if name.endswith("right"):
            said = f"{name} {difference:+.3f}, p = {p:.2g}"
            result = f"B is {'better' if difference > 0 else 'worse'}: {said}"
            if p >= 0.05:
                result = f"no difference to see: {said}"
                if row["needed"]:
                    result += f"; one of this size takes about {row['needed']:,} prompts (power 80 %)"
    return [*lines, result]


def pairs_of(ours: list[dict], theirs: list[dict], decode) -> list[dict]:
    """Samples of A and of B, with "ids" -> a dict for each pair: a, b: the samples; flip: 1 if only B is right, -1 if
    only A is, else 0; at: the first place where both go on, with different tokens, or None; shared: the text before;
    tokens: A's and B's there. Of the ids 5 7 7 and 5 8 it is place 1, and 7 and 8.
    """
    pairs = []
    for a, b in zip(ours, theirs, strict=True):
        both = zip(a["ids"], b["ids"], strict=False)
        at = next((place for place, (x, y) in enumerate(both) if x != y), None)
        pair = dict(
            at=at,
            flip=b["right"] - a["right"],
            a=a,
            b=b,
        )
        if at is not None:
            shared = pair["shared"] = decode(a["ids"][:at])
            texts = [decode(each["ids"][: at + 1]) for each in (a, b)]
            pair["tokens"] = [text[len(shared) :] or "<end>" for text in texts]
        pairs.append(pair)
    return pairs


def partings(pairs: list[dict]) -> list[str]:
    """`pairs_of`, with "logprobs_a" and "logprobs_b" of both tokens -> lines for people: the most frequent partings."""
    groups = defaultdict(list)
    for pair in pairs:
        groups[tuple(pair.get("tokens", ()))].append(pair)
    same = len(groups.pop((), []))
    lines = [f"{same} of {len(pairs)} pairs are the same"]
    if groups:
        lines[0] += "; the others part first at"
        lines.append("   pairs   won  lost   A's token     probability      B's token     probability")
    often = sorted(groups, key=lambda tokens: -len(groups[tokens]))
    for tokens in often[:SHOWN]:
        group = groups[tokens]
        flips = Counter(pair["flip"] for pair in group)
        line = f"{len(group):8}{flips[1]:6}{flips[-1]:6}"
        for i, token in enumerate(tokens):
            a = fmean(exp(pair["logprobs_a"][i]) for pair in group)
            b = fmean(exp(pair["logprobs_b"][i]) for pair in group)
            shown = json.dumps(token, ensure_ascii=False)
            line += f"   {shown:14}{a:.3f} -> {b:.3f}"
        lines.append(line)
    return lines
