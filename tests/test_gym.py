"""Task reasoning_gym: rows that are the same for ever and never cross, and rewards that the package's scorers cannot be talked out of.

`--long` asks every generator of the package, and prints what their scorers say of their own answers, of nothing, and of noise.
"""

import importlib.util
import json
import random
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from test_sandbox import ENDS, LATE, LINUX, WRITES, processes, wait_for
from test_sandbox import place as folder  # noqa: F401, a fixture

from data import make_task
from data.gym import reasoning_gym
from data.gym.reasoning_gym import REQUEST, START, TRAINING, ReasoningGym, read_options
from data.gym.sandbox import Sandbox, SandboxError
from data.task import split_of
from options import SnugError
from settings import GRPOSettings, SFTSettings

HERE = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not HERE, reason="reasoning_gym is not installed")

QUICK = (
    "leg_counting chain_sum gcd base_conversion spell_backward knights_knaves maze mini_sudoku largest_island".split()
)
EXECUTING = (
    "binary_matrix n_queens spiral_matrix string_insertion countdown intermediate_integration polynomial_multiplication puzzle24 "
    "simple_integration"
).split()
ODD = "isomorphic_strings list_functions acre".split()  # sets, global random numbers, lists
OTHERS = "coin_flip graph_color tower_of_hanoi".split()


@pytest.fixture(scope="module")
def child():
    """One child for all generators that are asked here with no options; else there would be a second of imports for each test."""
    names = QUICK + EXECUTING + ODD + OTHERS
    with closing(Sandbox("data.gym.worker:Gym", {"datasets": {name: {} for name in names}}, timeout=60)) as child:
        yield child


@pytest.fixture(scope="module")
def hasty():
    datasets = {"datasets": {name: {} for name in EXECUTING}}
    with closing(Sandbox("data.gym.worker:Gym", datasets, timeout=0.5, memory_mb=512)) as child:
        yield child


@pytest.fixture
def task_of(child, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "open_sandbox", lambda *_: child)
    monkeypatch.setattr(reasoning_gym, "SURVEY", 50)

    def task_of(names, cls=GRPOSettings, **options):
        settings = cls(task="reasoning_gym", gym_dataset=",".join(names), **options)
        return make_task(settings, demonstrations=cls is SFTSettings)

    return task_of


def rewards(task, rows, answers, **more):
    completions = [f"so <answer>{answer}</answer>" for answer in answers]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    return task.rewards([row["prompt"] for row in rows], completions, **columns, **more)


def noise(rng):
    return "".join(rng.choice("abc XYZ 0123456789 +-*/()[],._\n") for _ in range(rng.randrange(1, 60)))


# -----------------------------------------------------------------------------
# With the package


@needs_package
def test_right_answers_score_one_and_others_nothing(task_of):
    """Of generators whose scorers compare, and of some that execute what they are given."""
    rng = random.Random(0)
    for names, number in ((QUICK, 10 * len(QUICK)), (EXECUTING[:4] + ["polynomial_multiplication"], 10)):
        task = task_of(names)
        rows = task.prompts("train", range(number))
        assert [row["item"][0] for row in rows] == [names[i % len(names)] for i in range(number)]
        texts = [task.demonstration(row, rng) for row in rows]
        assert task.rewards([], texts, item=[row["item"] for row in rows]) == [1.0] * number
        for wrong in ("", noise(rng)):
            assert rewards(task, rows, [wrong] * number) == [0.0] * number
    assert "reasoning_gym" not in sys.modules


@needs_package
@LINUX
@pytest.mark.parametrize(
    "name, every",
    [
        ("string_insertion", 2),
        ("polynomial_multiplication", 7),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in EXECUTING),
    ],
)
def test_exploits_given_to_scorers_that_execute(name, every, hasty, folder):  # noqa: F811
    """Each before an honest answer; of so many, `every` says how many are tried: sympy takes its time. --long: all, by all scorers."""
    made = hasty.make([[name, 7]])[0]
    item, kept, before = [name, 7, reasoning_gym.crc(made["question"])], folder / "kept", processes()
    for kind, text in [*(WRITES | ENDS | LATE).items()][::every]:
        kept.write_text("kept")
        text = text.format(X=folder / "X", KEPT=kept) if "{" in text else text
        scored, right = hasty.score([(item, text), (item, made["answer"])])
        assert right == 1.0 and scored < 0.2, kind
        assert list(folder.iterdir()) == [kept] and kept.read_text() == "kept", kind
    assert wait_for(lambda: processes() == before)


@needs_package
def test_no_answer_changes_how_a_real_scorer_scores(task_of):
    """string_insertion's eval lets an answer replace its own scorer, in the process that scores it and in no other."""
    task = task_of(["string_insertion"])
    row = task.prompts("train", [0])[0]
    traitor = "[setattr(c, 'score_answer', lambda *_: 1.0) for c in __import__('reasoning_gym').dataset.ProceduralDataset.__subclasses__()]"
    assert rewards(task, [row] * 3, [traitor, "wrong", row["answer"]]) == [0.0, 0.0, 1.0]
    assert rewards(task, [row] * 2, ["wrong", traitor]) == [0.0, 0.0]


@needs_package
def test_splits_share_nothing(task_of):
    """Over seeds too; and items of train and test come from seeds that are 10 ** 9 apart at least."""
    names, seen, places = ["leg_counting", "coin_flip", "gcd"], {}, {}
    for seed, tuning in ((1, "test"), (1, "tune"), (2, "tune")):
        task = task_of(names, seed=seed, eval_split=tuning)
        for split in ("train", "tune", "test"):
            rows = task.prompts(split, range(90))
            seen[seed, tuning, split] = {row["prompt"] for row in rows}
            places[seed, tuning, split] = {row["item"][1] for row in rows}
    for key, prompts in seen.items():
        for other, others in seen.items():
            held_out = other[2] == "test" or other[2] == "tune" and key[1] == "tune"
            assert key[2] == other[2] or not held_out or not prompts & others, (key, other)
    assert seen[1, "test", "test"] == seen[2, "tune", "test"] and seen[1, "test", "tune"] == seen[2, "tune", "tune"]
    assert not places[1, "tune", "train"] & places[2, "tune", "train"] and len(places[1, "test", "train"]) == 90
    for key, found in places.items():
        least, most = {"train": (0, TRAINING), "tune": (START["tune"], 2**32), "test": (START["test"], 2**32)}[key[2]]
        assert least <= min(found) and max(found) < most
    assert TRAINING + 10**9 <= START["tune"] and START["tune"] + 10**9 <= START["test"]


@needs_package
def test_rows_are_the_same_on_every_call_and_in_another_child(task_of, child):
    """Of generators that ask sets, global random numbers and lists made beforehand, too."""
    names = ["leg_counting", "knights_knaves", *ODD]
    options = dict(gym_max_chars=2000)
    task = task_of(names, **options)
    rows = {split: task.prompts(split, range(10)) for split in ("train", "test")}
    assert len({row["prompt"] for split in rows for row in rows[split]}) == 20
    child.close()
    another = task_of(names, seed=1, **options)
    assert another.prompts("test", reversed(range(10))) == rows["test"][::-1]
    assert another.prompts("train", [9, 3]) == rows["train"][9:2:-6]
    assert another.longest(None) == task.longest(None) and another.fingerprint() == task.fingerprint()
    assert task_of(names, seed=2, **options).prompts("test", range(7)) == rows["test"][:7]
    assert task_of(names, seed=2, **options).prompts("train", range(7)) != rows["train"][:7]
    with pytest.raises(KeyError):
        task.prompts("valid", [0])


@needs_package
def test_rows_are_the_same_for_ever(task_of):
    """Evaluations of different versions are compared on these."""
    rows = task_of(["gcd"]).prompts("test", range(2))
    assert [row["item"][:2] for row in rows] == [["gcd", 4000000006], ["gcd", 4000000028]]
    assert rows[0]["prompt"] == (
        "Find the Greatest Common Divisor (GCD) of these numbers: 735, 550. Give only the GCD as your final answer.\n"
        "End with your final answer inside <answer> </answer>.\n"
    )


@needs_package
def test_a_small_generator_repeats_its_test_rows_when_it_has_no_more(task_of):
    rows = task_of(["coin_flip"]).prompts("test", range(60))
    distinct = len({row["prompt"] for row in rows})
    assert 5 < distinct < 60 and len({row["prompt"] for row in rows[:distinct]}) == distinct
    assert rows == [rows[i % distinct] for i in range(60)]


@needs_package
def test_lengths_are_bounded(task_of):
    """By what the survey saw, and by gym_max_chars: what is longer is passed over."""
    for options in ({}, {"gym_max_chars": 600}):
        task = task_of(["leg_counting", "tower_of_hanoi", "knights_knaves"], **options)
        rows = [row for split in ("train", "test") for row in task.prompts(split, range(60))]
        prompt, answer = task.longest(None)
        assert max(len(row["prompt"].encode()) for row in rows) <= prompt
        assert prompt <= options.get("gym_max_chars", 1000) + len(REQUEST)
        assert max(len(task.demonstration(row, None).encode()) for row in rows) <= answer
        assert len(task.longest_prompt()) == prompt and task.longest_prompt().isascii()
    message = "gym_max_chars=50: 0 of 50 items of leg_counting have so few bytes; half have up to 2.., all up to 2..; "
    with pytest.raises(SnugError, match=message):
        task_of(["leg_counting"], gym_max_chars=50)


@needs_package
def test_items_without_answers(task_of):
    """GRPO can use them, since their scorer knows what is right; SFT cannot."""
    row = task_of(["graph_color"]).prompts("test", [0])[0]
    assert row["answer"] is None and row["prompt"].endswith(REQUEST)
    with pytest.raises(
        SnugError, match="gym_dataset='graph_color': its items have a scorer but no answer to learn from"
    ):
        task_of(["leg_counting", "graph_color"], SFTSettings)


@needs_package
def test_what_the_package_refuses():
    """In one process of its own, for this one does not import the package."""
    cases = [
        ["leg_countng", {}, r"gym_dataset='leg_countng' is not one of the 104 of .*; did you mean leg_counting\?"],
        ["qqqq", {}, "not one of the .*, such as ab, acre, "],
        ["composite", {}, "gym_dataset='composite': name its parts instead"],
        ["codeio", {}, "gym_dataset='codeio': its items come from programs"],
        ["gcd", {"seed": 3}, "gym_config: gcd has no option 'seed'; it takes "],
        [
            "gcd",
            {"max_number": 3},
            "gym_config: gcd has no option 'max_number'; it takes min_numbers=2, max_numbers=2, ",
        ],
        [
            "gcd",
            {"min_numbers": 1},
            r"gcd refuses {'min_numbers': 1} \(AssertionError: min_numbers must be at least 2\)",
        ],
        ["gcd", {"min_numbers": "two"}, r"gym_config: gcd refuses {'min_numbers': 'two'} \(TypeError: "],
    ]
    program = f"""
import json, re, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from data.gym.worker import Gym
from data.gym.reasoning_gym import crc
for name, options, message in json.loads(sys.argv[1]):
    try:
        Gym({{name: options}})
    except ValueError as error:
        assert re.search(message, str(error)) and chr(10) not in str(error), (message, str(error))
    else:
        raise AssertionError(name, options)
gym = Gym({{"gcd": {{"max_numbers": 3}}, "list_functions": {{}}, "chain_sum": {{"min_terms": 5, "max_terms": 5}}}})
assert {{gym.make(["chain_sum", place])["question"].count(" + ") for place in range(40)}} == {{0, 1, 2, 3, 4}}
made = gym.make(["gcd", 4 * 10**9])
assert gym.make(["gcd", 4 * 10**9]) == made and gym.make(["nothing", 1])["error"] == "KeyError: 'nothing'"
assert len({{gym.make(["list_functions", place])["question"] for place in range(10**9, 10**9 + 40)}}) == 40
gym.datasets["gcd"].score_answer = lambda answer, entry: len(entry["metadata"].pop("source_dataset"))
prepared = gym.prepare(["gcd", 7, crc(gym.make(["gcd", 7])["question"])])
assert [gym.score(prepared, "1") for _ in range(2)] == [3, 3], "a scorer changed the entry"
try:
    gym.prepare(["gcd", 7, 12345])
except ValueError as error:
    assert "has made another item" in str(error)
else:
    raise AssertionError
print("done")
"""
    said = subprocess.run([sys.executable, "-c", program, json.dumps(cases)], capture_output=True, text=True)
    assert said.stdout == "done\n", said.stderr


# -----------------------------------------------------------------------------
# Without it


class Pretended:
    """A sandbox whose generators have `number` questions. Right is the question's number, and *0.5 is an answer that has the score 0.5."""

    missing = ""

    def __init__(self, number=10**12, text="What is {}?", **changes):
        self.number, self.text, self.changes, self.scored = number, text, changes, []

    def make(self, items):
        numbers = [place % self.number for _, place in items]
        return [{"question": self.text.format(n), "answer": str(n)} | self.changes for n in numbers]

    def score(self, pairs):
        self.scored += pairs
        return [
            float(answer[1:]) if answer[:1] == "*" else float(answer == str(item[1] % self.number))
            for item, answer in pairs
        ]


@pytest.fixture
def pretend(monkeypatch):
    def pretend(box=None, cls=GRPOSettings, **options):
        monkeypatch.setattr(reasoning_gym, "open_sandbox", lambda *_: box or Pretended())
        monkeypatch.setattr(reasoning_gym.importlib.util, "find_spec", lambda name: name)
        settings = cls(**{"task": "reasoning_gym", "gym_dataset": "some"} | options)
        return make_task(settings, demonstrations=cls is SFTSettings)

    return pretend


def test_the_last_answer_counts(pretend):
    task = pretend()
    for completion, answer in (
        ("x <answer> 3\n</answer> y", "3"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("</answer><answer>", None),
        ("<answer>3", None),
        ("", None),
    ):
        assert task.answer_of(completion) == answer
        assert task.formatted([""], [completion]) == [float(answer is not None)]


def test_rewards(pretend):
    box = Pretended()
    task = pretend(box)
    row = task.prompts("train", [0])[0]
    right, item = row["answer"], [row["item"]]
    box.scored.clear()
    assert rewards(task, [row] * 3, [right, "1", right]) == [1.0, 0.0, 1.0] and len(box.scored) == 2  # each once
    assert rewards(task, [row] * 2, [right] * 2, stopped=[True, False], completion_ids=[[1], [2]]) == [1.0, 0.0]
    assert task.formatted(["", ""], ["<answer>x</answer>"] * 2, stopped=[True, False]) == [1.0, 0.0]
    box.scored.clear()
    too_long = "<answer>" + "9" * 10_001 + "</answer>"
    assert task.rewards([""] * 2, [right, too_long], item=item * 2) == [0.0, 0.0] and not box.scored
    assert task.rewards([""], ["<answer>" + "9" * 10_000 + "</answer>"], item=item) == [0.0] and box.scored
    assert rewards(task, [row] * 5, ["*0.5", "*0.999", "*1.0", "*0.9999999999", "*7"]) == [0.0, 0.0, 1.0, 1.0, 1.0]
    partial = pretend(box, gym_partial_credit=True)
    assert rewards(partial, [row] * 4, ["*0.5", "*-3", "*7", "*0.01"]) == [0.5, 0.0, 1.0, 0.01]
    assert task.rewards([], [], item=[]) == []
    assert task.is_right(f"<answer>{right}</answer>", item[0]) and not task.is_right(right, item[0])
    named = [(function.__name__, weight) for function, weight in task.reward_functions()]
    assert named == [("correct", 1.0), ("formatted", 0.0)]
    assert task.correct([""], [f"<answer>{right}</answer>"], item=item) == [1.0]
    with pytest.raises(ValueError):
        task.rewards([""] * 2, ["x"] * 2, item=item)


def test_a_demonstration_is_the_answer_in_tags(pretend):
    task = pretend(cls=SFTSettings)
    row = task.prompts("train", [5])[0]
    assert task.demonstration(row, random.Random(0)) == f"<answer>{row['answer']}</answer>"
    assert row["prompt"] == f"What is {row['answer']}?{REQUEST}" and row["item"][:2] == ["some", int(row["answer"])]
    assert json.loads(json.dumps(row)) == row


def test_the_survey_comes_before_anything_else(pretend, capsys):
    for box, message in (
        (Pretended(error="KeyError: 'x'"), "some makes no items with this gym_config: KeyError: 'x'"),
        (Pretended(number=1), "some leaves no (train|test) prompt among 100 items"),
        (
            Pretended(text="{}" + "x" * 2000),
            "gym_max_chars=1000: 0 of 100 items of some have so few bytes; half have up to 2,010, all up to 2,010",
        ),
        (Pretended(answer="?"), "gym_dataset='some': its scorer gives none of its own first 5 answers a 1"),
    ):
        with pytest.raises(SnugError, match=message):
            pretend(box)
    for _ in range(2):
        box = Pretended()
        box.missing = "the kernel takes no filter"
        pretend(box)
    assert capsys.readouterr().err.count("without a seccomp filter (the kernel takes no filter)") == 1


def test_a_scorer_that_takes_anything_is_told_of(pretend, capsys):
    class Generous(Pretended):
        def score(self, pairs):
            return [float(answer in (self.taken, str(item[1] % self.number))) for item, answer in pairs]

    for taken in ("nan", "wrong"):
        box = Generous()
        box.taken = taken
        pretend(box, gym_dataset=f"generous_{taken}")
    box = Generous(answer="0")  # which is right each time
    box.taken = "0"
    pretend(box, gym_dataset="always_0")
    warning = "reasoning_gym: the scorer of generous_nan accepts the answer 'nan' to most questions; a policy will find that\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize("what", ["question", "answer"])
def test_what_is_too_long_is_passed_over(pretend, what):
    """Of texts of 10 to 1,008 bytes two in five are short enough; of these, too, what is longer than the survey saw never comes."""

    class Long(Pretended):
        def make(self, items):
            made = super().make(items)
            return [
                item | {what: "é" * (place % 500) + item["answer"].zfill(10)}
                for item, (_, place) in zip(made, items, strict=True)
            ]

        def score(self, pairs):
            return [1.0] * len(pairs)

    task = pretend(Long(), gym_max_chars=400)
    texts = {"question": [], "answer": []}
    for row in task.prompts("train", range(200)) + task.prompts("test", range(200)):
        texts["question"].append(row["prompt"].removesuffix(REQUEST))
        texts["answer"].append(task.demonstration(row, None).removeprefix("<answer>").removesuffix("</answer>"))
    longest = {"question": len(task.longest_prompt()) - len(REQUEST)}
    longest["answer"] = len(task.longest_answer()) - len("<answer></answer>")
    assert 300 < max(len(text.encode()) for text in texts[what]) <= longest[what] <= 400
    assert all(len(text.encode()) <= longest[name] for name in texts for text in texts[name])


def test_a_split_that_has_run_dry_ends_the_search(pretend):
    task = pretend()
    task.sandbox = Pretended(error="ValueError")
    for split in ("train", "test"):
        with pytest.raises(SnugError, match=f"no {split} prompt of some in 20,000 tries"):
            task.prompts(split, [0])
    task = pretend(Pretended(number=100))
    test = [str(number) for number in range(100) if split_of(f"What is {number}?{REQUEST}") == "test"]
    assert sorted({row["answer"] for row in task.prompts("test", range(50))}) == test and 0 < len(test) < 50
    assert task.prompts("test", [10_000 + 3, 3]) == task.prompts("test", [3, 3])


def test_sets_of_generators_come_in_turn(pretend):
    task = pretend(gym_dataset="a, b,c")
    for split in ("train", "tune", "test"):
        assert [row["item"][0] for row in task.prompts(split, range(7))] == list("abcabca")


def test_options_that_cannot_be(pretend):
    for options, message in (
        (dict(gym_dataset=" , "), "task='reasoning_gym' needs gym_dataset: one generator or several, such as "),
        (dict(gym_dataset="gcd,lcm,gcd"), "gym_dataset='gcd,lcm,gcd' names one twice"),
        (dict(demonstration_noise=0.5), "demonstration_noise=0.5: task='reasoning_gym' demonstrates"),
        (dict(gym_config="a=1"), "gym_config='a=1' is no JSON object .*; write options such as"),
        (dict(gym_config="[1]"), r"gym_config='\[1\]' is not of some; write options such as"),
        (dict(gym_config="{'a': 1}"), "gym_config=.* is no JSON object"),
        (dict(gym_config='{"a": NaN}'), "NaN is no JSON"),
        (dict(gym_config='{"a": 1}', gym_dataset="gcd,lcm"), 'is not of gcd, lcm; write options such as {"gcd": {"'),
        (dict(gym_config='{"a": {}}', gym_dataset="gcd,lcm"), "is not of gcd, lcm; write options such as"),
        (dict(gym_config="[1]", gym_dataset="gcd,lcm"), "is not of gcd, lcm; write options such as"),
    ):
        with pytest.raises(SnugError, match=message) as caught:
            pretend(**options)
        assert "\n" not in str(caught.value)


def test_a_package_that_is_not_there(monkeypatch):
    monkeypatch.setattr(reasoning_gym.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SnugError, match="pip install reasoning_gym"):
        ReasoningGym(GRPOSettings(task="reasoning_gym", gym_dataset="gcd"))


def test_what_the_child_says_is_said_in_one_line(pretend):
    class Broken(Pretended):
        def make(self, items):
            raise SandboxError("the child does not start: it ended")

    with pytest.raises(SnugError, match="^task reasoning_gym: the child does not start: it ended$"):
        pretend(Broken())


@needs_package
def test_the_child_gets_the_options():
    """And tasks that want the same of it have the same one."""
    asked = dict(gym_dataset="gcd,lcm", gym_config='{"lcm": {"max_numbers": 3}}', gym_timeout=2.5, gym_memory_mb=100)
    boxes = [ReasoningGym(GRPOSettings(task="reasoning_gym", **asked, seed=seed)).sandbox for seed in (1, 2)]
    assert boxes[0] is boxes[1] and boxes[0].process is None
    arguments = {"datasets": {"gcd": {}, "lcm": {"max_numbers": 3}}}
    assert boxes[0].config | {"layers": []} == dict(
        target="data.gym.worker:Gym", arguments=arguments, timeout=2.5, memory_mb=100, layers=[]
    )
    assert ReasoningGym(GRPOSettings(task="reasoning_gym", **asked | {"gym_timeout": 3.0})).sandbox is not boxes[0]


def test_ways_to_write_options():
    assert read_options("", ["a"]) == {"a": {}}
    assert read_options('{"x": [1, "b"], "y": 2}', ["a"]) == {"a": {"x": [1, "b"], "y": 2}}
    assert read_options('{"a": {"x": 1}, "b": {"x": 2}}', ["a", "b", "c"]) == {"a": {"x": 1}, "b": {"x": 2}, "c": {}}


# -----------------------------------------------------------------------------
# All of the package


@needs_package
@pytest.mark.long
def test_every_generator(monkeypatch, capsys):
    """Rows of all splits, the same in another child; and what scorers say of the answer itself, of nothing, of noise and of odd texts."""
    said = subprocess.run(
        [sys.executable, "-c", "from data.gym.worker import *; print(*sorted(set(DATASETS) - set(NOT_HERE)))"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    names = said.stdout.split()
    assert len(names) > 100
    lines, doubtful = [], set()
    with closing(Sandbox("data.gym.worker:Gym", {"datasets": {name: {} for name in names}}, timeout=60)) as child:
        monkeypatch.setattr(reasoning_gym, "open_sandbox", lambda *_: child)
        kept = {}
        for name in names:
            task = make_task(GRPOSettings(task="reasoning_gym", gym_dataset=name, gym_max_chars=20_000))
            rows = task.prompts("train", range(6)) + task.prompts("test", [0])
            kept[name] = task, rows
            rng, asked = random.Random(0), {}
            for kind, texts in (
                ("own", [row["answer"] for row in rows if row["answer"] is not None]),
                ("nothing", [""] * len(rows)),
                ("noise", [noise(rng) for _ in rows]),
                ("odd", ["nan", "[]", "{}", "0", "None", "(" * 300, "x" * 9999][: len(rows)]),
            ):
                asked[kind] = child.score([(row["item"], text) for row, text in zip(rows, texts, strict=False)])
            own = [score >= 1 - 1e-9 for score in asked["own"]]
            lines.append(
                f"{name}: own {sum(own)}/{len(own)}, "
                + ", ".join(f"{kind} up to {max(asked[kind]):g}" for kind in asked if kind != "own")
            )
            if not all(own) or max(asked["nothing"] + asked["noise"]) >= 1:
                doubtful.add(name)
        child.close()
        for name, (task, rows) in kept.items():
            task.held_out.clear()
            assert task.prompts("train", range(6)) + task.prompts("test", [0]) == rows, name
    told = re.findall(r"the scorer of (\w+) accepts the answer (\S+) to", capsys.readouterr().err)
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert doubtful == {"game_of_life_halting"}
    everything = [("game_of_life_halting", repr(text)) for text in reasoning_gym.CHEATS]
    assert sorted(told) == sorted([("coin_flip", "'0'"), ("complex_arithmetic", "'nan'"), *everything])
