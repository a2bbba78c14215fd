"""Countdown: its rows, what counts as an answer, and expressions that are read by a whitelist."""

import re
from fractions import Fraction

import pytest

from helpers.tasks import COUNTDOWN, task_of


def test_countdown_rows():
    task = task_of(task=COUNTDOWN, countdown_numbers="3-5", countdown_max_number=12)
    rows = task.prompts("train", range(500))
    assert {len(row["numbers"]) for row in rows} == {3, 4, 5}
    assert {number for row in rows for number in row["numbers"]} == set(range(1, 13))
    assert set("+-*/()") <= set("".join(row["solution"] for row in rows))
    for row in rows:
        assert row["prompt"] == " ".join(map(str, row["numbers"])) + f"={row['target']}:"
        assert type(row["target"]) is int and 1 <= row["target"] <= 9999
        assert python_value(row["solution"]) == row["target"]


def python_value(text):
    """Python's own arithmetic, on Fractions: fit for texts that this file or a task made, and for no others."""
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})


RIGHT = ["3*5+7", " ( 3*5 ) + 7 ", "((((3*5))))+7", "(" * 97 + "3*5+7" + ")" * 97, " " * 195 + "3*5+7"]
WRONG = "3*5+7=22 7--3*5 03*5+7 3*5+٧ 3*5+7\n (3)(5)+7 7//3*5 7**3*5".split(" ") + [" " * 196 + "3*5+7"]
WRONG += "3*5+7+ +3*5+7 3*(-(-5))+7 3*(5+7 3*5)+7 ()3*5+7 3*5.0+7 3%5+7".split() + ["3*5 7", "3*\t5+7"]


TEXTS = [([3, 5, 7], 22, text, float(text in RIGHT)) for text in RIGHT + WRONG]
TEXTS += [([4, 1, 4], 17, "4*4+1", 1.0), ([4, 1, 4], 5, "4+1", 0.0), ([4, 1, 4], 17, "4*4*1", 0.0)]  # twins
TEXTS += [([3, 3, 8, 8], 24, "8/(3-8/3)", 1.0), ([1, 3, 3], 1, "1/3*3", 1.0)]  # 23.999999999999989 in floats
TEXTS += [([1, 3, 3], 0, "1/(3-3)", 0.0), ([3, 1, 3, 3], 0, "3/(1/(3-3))", 0.0), ([3] * 4, 0, "(3-3)/(3-3)", 0.0)]
TEXTS += [([12, 3], 15, "1 2+3", 0.0)]


@pytest.mark.parametrize("numbers, target, completion, reward", TEXTS)
def test_countdown_reward(numbers, target, completion, reward):
    """Exact, and each number once."""
    assert task_of(task=COUNTDOWN).rewards([""], [completion], numbers=[numbers], target=[target]) == [reward]
