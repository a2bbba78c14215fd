"""examples/gym.py: rows that are the same for ever and never cross, and rewards that no executed answer can change."""

import json
import sys
from contextlib import closing
from functools import partial

import pytest

from data import make_task
from data.answers import MAX_COMPLETION
from examples import gym
from examples.gym import ReasoningGym
from helpers.commands import python
from helpers.tasks import needs_package
from settings import GRPOSettings
from snug.sandbox import Result, Sandbox

TASK = "examples.gym:ReasoningGym"

QUICK = "leg_counting chain_sum gcd base_conversion spell_backward knights_knaves maze mini_sudoku".split()
EXECUTING = "binary_matrix n_queens spiral_matrix string_insertion polynomial_multiplication".split()
ODD = "isomorphic_strings list_functions acre".split()  # sets, global random numbers, lists


@pytest.fixture(scope="module")
def box():
    """One sandbox for all generators without options; a sandbox for each test would take seconds of imports."""
    datasets = {name: {} for name in QUICK + EXECUTING + ODD}
    with closing(Sandbox("examples.gym_worker:Gym", {"datasets": datasets}, timeout=60)) as box:
        yield box


@pytest.fixture
def task_of(box, monkeypatch):
    monkeypatch.setattr(gym, "Sandbox", lambda *options: box)
    monkeypatch.setattr(gym, "SURVEY", 25)

    return lambda *names: make_task(GRPOSettings(task=TASK, gym_dataset=[*names]))


@needs_package
def test_where_the_example_is_installed_or_copied_its_scorer_is_beside_it(monkeypatch):
    targets = []
    monkeypatch.setattr(gym, "Sandbox", lambda target, *_: targets.append(target))
    monkeypatch.setattr(gym, "__name__", "mine.gym")
    ReasoningGym(GRPOSettings(task=TASK, gym_dataset=["gcd"]))
    assert targets == ["mine.gym_worker:Gym"]


def rewards(task, rows, answers, **more):
    completions = [f"so <answer>{answer}</answer>" for answer in answers]
    return task.rewards([row["prompt"] for row in rows], completions, item=[row["item"] for row in rows], **more)


@needs_package
@pytest.mark.parametrize("names", [QUICK, EXECUTING], ids=len)
def test_right_answers_score_one_and_others_nothing(task_of, names):
    """Scorers that compare, and scorers that execute what they get."""
    task = task_of(*names)
    rows = task.prompts("train", range(5 * len(names)))
    assert {row["item"][0] for row in rows} == set(names)
    texts = [task.demonstration(row, None) for row in rows]
    assert task.rewards([], texts, item=[row["item"] for row in rows]) == [1.0] * len(rows)
    for wrong in ("", "9 or (x"):
        assert rewards(task, rows, [wrong] * len(rows)) == [0.0] * len(rows)
    assert "reasoning_gym" not in sys.modules


@needs_package
def test_rows_are_the_same_on_every_call_and_in_another_process(task_of, box):
    """Also those of generators with sets, global random numbers and lists."""
    names = ["leg_counting", "knights_knaves", *ODD]
    task = task_of(*names)
    rows = {split: task.prompts(split, range(10)) for split in ("train", "test")}
    assert len({row["prompt"] for split in rows for row in rows[split]}) == 20
    assert json.loads(json.dumps(rows)) == rows
    box.close()
    another = task_of(*names)
    assert another.prompts("test", reversed(range(10))) == rows["test"][::-1]
    assert another.prompts("train", [9, 3]) == rows["train"][9:2:-6]
    assert another.longest(None) == task.longest(None) and another.fingerprint() == task.fingerprint()


@needs_package
def test_the_worker():
    """In a process of its own, because this one does not import the package."""
    cases = [
        ["leg_countng", {}, r"gym_dataset='leg_countng' is not one of the 104 of .*; did you mean leg_counting\?"],
        ["codeio", {}, "gym_dataset='codeio' is not one of"],
        ["gcd", {"max_number": 3}, "gym_config: gcd refuses .*unexpected keyword argument 'max_number'"],
        ["gcd", {"min_numbers": 1}, r"\(AssertionError: min_numbers must be at least 2\)"],
    ]
    program = """
import json, re, sys
from examples.gym_worker import Gym
from snug.options import SnugError
for name, options, message in json.loads(sys.argv[1]):
    try:
        Gym({name: options})
    except SnugError as error:
        assert re.search(message, str(error)) and chr(10) not in str(error), (message, str(error))
    else:
        raise AssertionError(name, options)
gym = Gym({"gcd": {"max_numbers": 3}, "list_functions": {}, "chain_sum": {"min_terms": 5, "max_terms": 5}})
assert {gym.make("chain_sum", seed)["question"].count(" + ") for seed in range(40)} == {0, 1, 2, 3, 4}
made = gym.make("gcd", 4 * 10**9)
assert gym.make("gcd", 4 * 10**9) == made and gym.make("nothing", 1)["error"] == "KeyError: 'nothing'"
assert len({gym.make("list_functions", seed)["question"] for seed in range(10**9, 10**9 + 40)}) == 40
gym.datasets["gcd"].score_answer = lambda answer, entry: len(entry["metadata"].pop("source_dataset"))
assert [gym.score("gcd", 7, "1") for _ in range(2)] == [3, 3], "a scorer changed the item"
print("done")
"""
    result = python("-c", program, json.dumps(cases))
    assert result.stdout == "done\n", result.stderr


class Pretended:
    """A sandbox. Right is the question's number; *0.5 has the score 0.5."""

    scored = []

    def call(self, method, items):
        return [{"question": f"What is {n}?", "answer": str(n)} for _, n in items]

    def run(self, method, tasks):
        self.scored += tasks
        values = [float(a[1:]) if a[:1] == "*" else float(a == str(n)) for _, n, a in tasks]
        return [Result(value, "") for value in values]


def test_rewards(monkeypatch):
    box = Pretended()
    monkeypatch.setattr(gym, "Sandbox", lambda *options: box)
    monkeypatch.setattr(gym.importlib.util, "find_spec", lambda name: name)
    task = make_task(GRPOSettings(task=TASK, gym_dataset=["some"]))
    row = task.prompts("train", [0])[0]
    right, item = row["answer"], [row["item"]]
    box.scored.clear()
    assert rewards(task, [row] * 3, [right, "1", right]) == [1.0, 0.0, 1.0] and len(box.scored) == 2  # each once
    assert rewards(task, [row] * 2, [right] * 2, stopped=[True, False], completion_ids=[[1], [2]]) == [1.0, 0.0]
    box.scored.clear()
    assert task.rewards([""], [right], item=item) == [0.0] and not box.scored
    assert rewards(task, [row] * 5, ["*0.5", "*0.999", "*1.0", "*0.9999999999", "*nan"]) == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert task.rewards([], [], item=[]) == []
    with pytest.raises(ValueError):
        task.rewards([""] * 2, ["x"] * 2, item=item)


def test_what_is_in_answer_tags():
    answer_of = partial(ReasoningGym.answer_of, None)
    assert answer_of("<answer> 1 </answer>") == answer_of("<answer>1</answer><answer>2") == "1"
    for text in ("<answer>1</answer><answer>2</answer>", "<answer>1<answer>2</answer>"):
        assert answer_of(text) == "2"
    assert answer_of("<answer></answer>") == ""
    for text in ("</answer><answer>", "", " " * MAX_COMPLETION + "<answer>1</answer>"):
        assert answer_of(text) is None
