"""Countdown: its rows, what counts as an answer, and expressions that are read by a whitelist."""

import ast
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.countdown import ARITHMETIC, evaluate
from helpers.tasks import task_of


def test_countdown_rows():
    task = task_of(task="countdown", countdown_numbers="3-5", countdown_max_number=12)
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


@pytest.mark.parametrize("completion, reward", [(text, 1.0) for text in RIGHT] + [(text, 0.0) for text in WRONG])
def test_countdown_reward(completion, reward):
    assert task_of(task="countdown").rewards(["3 5 7=22:"], [completion], numbers=[[3, 5, 7]], target=[22]) == [reward]


def test_countdown_uses_each_number_once_even_twins():
    task = task_of(task="countdown")
    columns = dict(numbers=[[4, 1, 4]] * 3, target=[17, 5, 17])
    assert task.rewards([""] * 3, ["4*4+1", "4+1", "4*4*1"], **columns) == [1.0, 0.0, 0.0]
    assert task.rewards([""], ["1 2+3"], numbers=[[12, 3]], target=[15]) == [0.0]


def test_countdown_is_exact():
    task = task_of(task="countdown")
    # 23.999999999999989 in floats
    assert task.rewards([""], ["8/(3-8/3)"], numbers=[[3, 3, 8, 8]], target=[24]) == [1.0]
    assert task.rewards([""], ["1/3*3"], numbers=[[1, 3, 3]], target=[1]) == [1.0]
    for text in ("1/(3-3)", "3/(1/(3-3))", "(3-3)/(3-3)"):
        numbers = [int(digit) for digit in text if digit.isdigit()]
        assert task.rewards([""], [text], numbers=[numbers], target=[0]) == [0.0]


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
            return (
                isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div) and plain(node.left) and plain(node.right)
            )
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
