"""Countdown: its rows, what counts as an answer, and expressions that are read by a whitelist."""

import ast
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.countdown import ARITHMETIC, evaluate
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


TEXTS = [([3, 5, 7], 22, text, float(text in RIGHT)) for text in RIGHT + WRONG]
TEXTS += [([4, 1, 4], 17, "4*4+1", 1.0), ([4, 1, 4], 5, "4+1", 0.0), ([4, 1, 4], 17, "4*4*1", 0.0)]  # twins
TEXTS += [([3, 3, 8, 8], 24, "8/(3-8/3)", 1.0), ([1, 3, 3], 1, "1/3*3", 1.0)]  # 23.999999999999989 in floats
TEXTS += [([1, 3, 3], 0, "1/(3-3)", 0.0), ([3, 1, 3, 3], 0, "3/(1/(3-3))", 0.0), ([3] * 4, 0, "(3-3)/(3-3)", 0.0)]
TEXTS += [([12, 3], 15, "1 2+3", 0.0)]


@pytest.mark.parametrize("numbers, target, completion, reward", TEXTS)
def test_countdown_reward(numbers, target, completion, reward):
    """Exact, and each number once."""
    assert task_of(task=COUNTDOWN).rewards([""], [completion], numbers=[numbers], target=[target]) == [reward]


# A tree is a number or (operator, tree, tree).
trees = st.recursive(st.integers(1, 20), lambda inner: st.tuples(st.sampled_from("+-*/"), inner, inner), max_leaves=6)


def text_of(tree, space=""):
    if isinstance(tree, int):
        return str(tree)
    symbol, left, right = tree
    return f"({text_of(left, space)}{space}{symbol}{space}{text_of(right, space)})"


def worth_to_python(text):
    """The value by Python's grammar, cut down to the four operators and numbers without a leading zero."""
    try:
        tree = ast.parse(text.strip(" "), mode="eval").body
    except SyntaxError:
        return None

    def plain(node):
        if isinstance(node, ast.BinOp):
            known = isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div)
            return known and plain(node.left) and plain(node.right)
        return isinstance(node, ast.Constant)

    if not plain(tree) or re.search(r"\b0[0-9]", text):
        return None
    try:
        return python_value(text.strip(" "))
    except ZeroDivisionError:
        return None


@settings(max_examples=150)
@given(
    trees.map(text_of),
    st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.text("0123+-*/() ", max_size=2)), max_size=3),
)
def test_parser_reads_what_pythons_grammar_does(text, edits):
    """Right expressions with a few characters lost and others put in: the two must agree on each."""
    for place, lose, extra in edits:
        place %= len(text) + 1
        text = text[:place] + extra + text[place + lose :]
    numbers = [int(digits) for digits in re.findall("[0-9]+", text)]
    assert evaluate(text, numbers, "+-*/") == worth_to_python(text)


def test_parser_time_is_bounded():
    hard = ["(" * 80 + "9*9" * 40, "1/" * 99 + "1", "9" * 200, "*" * 200, "(((1+" * 39 + "1", "1-" * 99 + "1"]
    start = time.process_time()
    for text in hard * 20:
        numbers = [int(digits) for digits in re.findall("[0-9]+", text)]
        evaluate(text, numbers, "+-*/")
    assert time.process_time() - start < 2
    assert set(ARITHMETIC) == set("+-*/")
