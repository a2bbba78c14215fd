"""Hints: what an iteration's figures say if something is wrong, one line each, with what to try. hints.toml has them.

The thresholds come from runs that went wrong elsewhere. They are no laws: an easy task ends with most of its groups
solved, and still gets a hint. A run prints a hint once.

Left out: what guard.py stops.
"""

import math
import tomllib
from pathlib import Path

HINTS = tomllib.loads(Path(__file__).with_name("hints.toml").read_text())["hint"]


def hints(record):
    """A line of GRPO's log -> {figure: hint}, for example {"kl": "kl 3: nats a token from the reference: ..."}."""
    lines = {}
    for hint in HINTS:
        where = hint["where"]
        figure = next(iter(where))
        within = [low <= record.get(name, math.nan) <= high for name, (low, high) in where.items()]
        if all(within) and hint.get("unless") not in record:
            lines.setdefault(figure, f"{figure} {record[figure]:.3g}: {hint['text']}")
    return lines
