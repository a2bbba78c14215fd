"""MATH: which LaTeX has the value of which, and files that are refused."""

import pytest

from data import make_task
from exploits import dressed
from helpers.errors import assert_refused
from helpers.tasks import rewards, written
from settings import GRPOSettings

ROW = {"problem": "What is $1 + \\frac12$?", "answer": "\\frac{3}{2}", "solution": "It is $\\boxed{\\frac{3}{2}}$."}
RIGHT = [
    "\\boxed{1.5}",
    "\\boxed{\\dfrac32}",
    "$\\boxed{ 3/2 }$ is it.",
    "\\boxed{2}, no: \\boxed{\\frac{\\sqrt{9}}{2}}",
]
WRONG = ["1.5", "\\boxed{2}", "\\boxed{1.5} \\boxed{2}", "\\boxed{1.5", "\\boxed{}", "\\boxed{" + " " * 500 + "1.5}"]
OTHERS = [("10", "10\\%"), ("\\text{Evelyn}", "Evelyn"), ("(3, \\frac{\\pi}{2})", "\\left(3, \\frac{\\pi}{2}\\right)")]


def task_of(path):
    return make_task(GRPOSettings(task="examples.competition_math:CompetitionMath", data_file=path, eval_prompts=0))


def test_a_completion_is_right_if_its_last_box_has_the_answers_value(tmp_path):
    task = task_of(written(tmp_path, [ROW]))
    [row] = task.prompts("train", [0])
    assert (
        row["prompt"].endswith("Question:\nWhat is $1 + \\frac12$?\n\nAnswer:") and "\\boxed{ANSWER}" in row["prompt"]
    )
    texts = [task.demonstration(row, None), *RIGHT, *WRONG]
    assert rewards(task, [row] * len(texts), texts) == [1.0] * (1 + len(RIGHT)) + [0.0] * len(WRONG)
    assert task.answer_of(texts[0]) == "\\frac{3}{2}" and task.answer_of("1.5") is None
    assert all(task.is_right(f"\\boxed{{{given}}}", answer) for answer, given in OTHERS)


def test_exploits_are_wrong(tmp_path):
    task = task_of(written(tmp_path, [ROW]))
    assert not any(task.is_right(text, "\\frac{3}{2}") for text in dressed())


@pytest.mark.parametrize("row", [{}, {**ROW, "answer": 1.5}])
def test_other_rows_are_refused(row, tmp_path):
    assert_refused("data.jsonl:1: must be .*problem.*, not", task_of, written(tmp_path, [row]))
