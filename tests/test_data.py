"""Tasks: prompts that never cross from train to test, and rewards that cannot be talked into anything."""

import random
import re
import sys
import time
from fractions import Fraction

import pytest

import data
import evaluate
import grpo
from data import load_reward_function
from exploits import dressed
from helpers import HOME
from helpers.episodes import Script, says
from helpers.models import make_chat_model
from helpers.runs import refused
from helpers.tasks import COUNTDOWN, needs_package, rewards, task_of
from helpers.tokenizers import HERMES
from model import GPT
from runs.prepare import prepare
from settings import GRPOSettings

FIELD = dict(task=COUNTDOWN, countdown_max_number=99)
TASKS = {"addition": {}, "countdown": dict(task=COUNTDOWN)}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_right_demonstrations_score_one(name, split):
    task = task_of(**TASKS[name])
    rows = task.prompts(split, range(100))
    demonstrations = [task.demonstration(row, random.Random(i)) for i, row in enumerate(rows)]
    assert rewards(task, rows, demonstrations) == [1.0] * 100
    assert rewards(task, rows, demonstrations, stopped=[i % 2 == 0 for i in range(100)]) == [1.0, 0.0] * 50
    others = demonstrations[1:] + demonstrations[:1]  # the next row's answer is not this row's
    assert sum(rewards(task, rows, others)) < 5


class Asks:
    """An environment that answers the first turn."""

    def reset(self, **row):
        self.replies = ["Go on."]

    def reply(self, text):
        return self.replies.pop() if self.replies else None


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """-> its folder, the model"""
    folder = make_chat_model(tmp_path_factory.mktemp("chat") / "model", HERMES)
    return str(folder), GPT.from_pretrained(folder)


# task: its options, the text of a right answer; None: the demonstration
EVERY = {name: (options, None) for name, options in TASKS.items()}
EVERY |= {
    "lookup": (dict(task="examples.lookup:Lookup"), "{answer}"),
    "gsm8k": (dict(task="gsm8k", data_file=str(HOME / "tests/gsm8k_sample.jsonl")), "#### {answer}"),
    "jsonl": (dict(task="jsonl", data_file=str(HOME / "data/sums.jsonl")), "it is {answer}"),
    "code": (
        dict(task="examples.code:Code", data_file=str(HOME / "data/functions.jsonl")),
        "\n```\n{head}{solution}```",
    ),
    "gym": (dict(task="examples.gym:ReasoningGym", gym_dataset=["chain_sum"]), None),
}


def test_every_task_is_among_these():
    assert {options.get("task", "addition") for options, _ in EVERY.values()} > set(data.TASKS)


BEGIN = {"tools": ["<calc>1+1</calc>"], "environment": ["wait"], "": []}  # the first turn


WAYS = [("tools", False), ("environment", True), ("", True)]
SCORED = [(name, *way) for name in list(EVERY)[:-1] for way in WAYS]


@pytest.mark.parametrize("name, others, chat", [*SCORED, pytest.param("gym", "", True, marks=needs_package)])
def test_training_and_evaluations_score_every_task(name, others, chat, chat_model, monkeypatch):
    """In a text behind a call; in a chat behind a reply, and in one turn: of two completions one is right."""
    (folder, model), (options, right) = chat_model, EVERY[name]
    options = options | dict(
        tools=["examples.tools:calc"] * (others == "tools"), environment="Asks" * (others == "environment")
    )
    options |= dict(chat=chat, max_new_tokens=900, batch_size=2, group_size=2, eval_prompts=1, device="cpu")
    settings = GRPOSettings(init_from=folder, **options)
    prepared = prepare(settings, functions=dict(Asks=Asks))
    task, tokenizer = prepared.task, prepared.tokenizer
    rows = task.prompts("train", range(2))
    texts = [right.format(**row) if right else task.demonstration(row, random.Random(0)) for row in rows]
    begin = says(tokenizer, *BEGIN[others])
    if others == "tools":
        begin[0].pop()  # a call in a prompt of text ends the turn by itself
    turns = [begin + says(tokenizer, text) for row in texts for text in (row, "no #### 1.5 <answer>1.5</answer>")]

    Script.follow_episodes(monkeypatch, turns)
    scored = grpo.score(*grpo.sample_rows(model, prepared, rows, 0), prepared)
    assert scored.rewards.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    Script.follow_episodes(monkeypatch, turns)
    samples = evaluate.sample_and_score(model, prepared, rows, 2, temperature=1.0, max_new_tokens=900)
    assert [sample["right"] for sample in samples] == [True, False] * 2
    assert [sample["answer"] for sample in samples[::2]] == [task.answer_of(text) for text in texts]


@pytest.mark.parametrize("name", TASKS)
def test_exploits_score_nothing_and_do_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = task_of(**TASKS[name])
    rows = task.prompts("train", range(20))
    for i, completion in enumerate(dressed()):
        began = time.monotonic()
        assert rewards(task, [rows[i % 20]], [completion]) == [0.0], completion[:80]
        task.answer_of(completion)
        assert time.monotonic() - began < 10, completion[:80]  # not how fast it should be, but when it hangs
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [dict(), dict(digits=1), dict(task=COUNTDOWN, seed=7)])
def test_train_and_test_never_share_a_problem(options):
    task = task_of(**options)
    train, test = ({task.identity(row) for row in task.prompts(split, range(500))} for split in ("train", "test"))
    assert train and test and not train & test
    if "digits" not in options:
        assert len(train) > 400 and len(test) > 300  # and there is something to learn from


@pytest.mark.parametrize("name", TASKS)
def test_rows_depend_on_their_number_and_train_rows_on_the_seed(name):
    task = task_of(**TASKS[name], seed=1)
    rows = {split: task.prompts(split, range(50)) for split in ("train", "test")}
    random.seed(0)  # the global generator has no part in it
    for split in rows:
        assert task_of(**TASKS[name], seed=1).prompts(split, range(50)) == rows[split]
        assert task.prompts(split, [17, 3, 17]) == [rows[split][17], rows[split][3], rows[split][17]]
        assert len({row["prompt"] for row in rows[split]}) > 40
    assert task_of(**TASKS[name], seed=2).prompts("test", range(50)) == rows["test"]
    assert task_of(**TASKS[name], seed=2).prompts("train", range(50)) != rows["train"]
    assert task.prompts("train", []) == []
    with pytest.raises(KeyError):
        task.prompts("valid", [0])


def test_rows_are_the_same_for_ever():
    """Evaluations of different versions are compared on these."""
    assert [row["prompt"] for row in task_of().prompts("test", range(2))] == ["5143+6259=", "7389+2910="]
    rows = task_of(task=COUNTDOWN).prompts("test", range(2))
    assert [row["prompt"] for row in rows] == ["17 19 8=10:", "5 8 15 4=63:"]


LONGEST = [{}, dict(digits=1), dict(task=COUNTDOWN), FIELD]
LONGEST += [dict(task=COUNTDOWN, countdown_numbers="3-10", countdown_max_number=50)]
LONGEST += [dict(task=COUNTDOWN, countdown_numbers="2", countdown_operators="-/")]


@pytest.mark.parametrize("options", LONGEST)
def test_nothing_is_longer_than_the_longest(options):
    for noise in (0.0, 0.5):
        task = task_of(**options, demonstration_noise=noise)
        rows = [row for split in ("train", "test") for row in task.prompts(split, range(80))]
        prompt, answer = task.longest_bytes()
        assert max(len(row["prompt"].encode()) for row in rows) <= prompt
        rng = random.Random(0)
        assert max(len(task.demonstration(row, rng).encode()) for row in rows) <= answer


def test_addition_by_hand():
    task = task_of()
    row = {"prompt": "6025+3528=", "numbers": [6025, 3528], "answer": 9553}
    assert task.demonstration(row, random.Random(0)) == "13,05,05,09>09553"
    always = task_of(demonstration_noise=1.0)
    assert always.demonstration(row, random.Random(0)) == "13,04,05,09>09543"
    row = {"numbers": [58, 67]}
    assert task_of(digits=2, demonstration_noise=1.0).demonstration(row, random.Random(0)) == "15,11>015"
    assert task_of(digits=2).demonstration(row, random.Random(0)) == "15,12>125"
    assert task_of(digits=1).demonstration({"numbers": [9, 9]}, random.Random(0)) == "18>18"


def test_addition_reward():
    right = [">9553", "13,05,05,09>09553", ">1>2>9553"]
    wrong = ["9553", ">9553>", ">9554", ">009553", ">9553 ", ">९५५३", ">6025+3528"]
    rewarded = task_of().rewards(["6025+3528="] * 10, right + wrong, answer=[9553] * 10)
    assert rewarded == [1.0] * 3 + [0.0] * 7


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


def test_load_reward_function_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "snug_test_rewards.py").write_text(
        "def is_short(prompts, completions, **columns):\n    return [1.0]\nlength = 3\n"
        "def wants(completions, solution, stopped, other=1, **columns): pass\n"
        "def narrow(prompts, completions): pass\n"
    )
    (tmp_path / "snug_test_broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_reward_function("snug_test_rewards:is_short", {}, [])(["1"], ["2"]) == [1.0]
    for spec, message in {
        "snug_test_rewards:is_shrt": "has no function or class is_shrt; did you mean is_short?",
        "snug_test_rewards:wants": "missing a required argument: 'solution'; it must take **columns, and the rows have prompt, answer",
        "snug_test_rewards:narrow": "got an unexpected keyword argument 'answer'; it must take **columns",
        "Qwen/Qwen-RM": "write module:name, such as my_rewards:is_short",
        "../a-b/snug_test.py:f": "write module:name",
        "snug_test_rewards:length": "has no function or class length",
        "__main__:gone": "a script or a notebook defined it: resume there",
        "snug_test_absent:f": "no module snug_test_absent in",
        **dict.fromkeys(["snug_test_rewards", ":f", ".relative:f", "a:b:c", ""], "write module:name"),
    }.items():
        said = refused(load_reward_function, spec, {}, ["prompt", "answer"])
        assert message in said and repr(spec) in said
    # an error inside the module keeps its traceback
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load_reward_function("snug_test_broken:f", {}, [])
