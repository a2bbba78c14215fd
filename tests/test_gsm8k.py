"""GSM8K: which texts are which numbers, files that are refused, and files that are fetched from a server that may lie or fall silent."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
from decimal import Decimal
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from exploits import FORMS, dressed, harmless
from hypothesis import given
from hypothesis import strategies as st

from data import make_task
from data.answers import MAX_ANSWER, MAX_COMPLETION, in_answer_tags, last_number, number_after_marker
from data.gsm8k import __main__ as gsm8k
from data.task import split_of
from options import SnugError
from settings import GRPOSettings, SFTSettings

HERE = Path(__file__).parent
SAMPLE = HERE / "gsm8k_sample.jsonl"
LINES = SAMPLE.read_text().splitlines()
PUBLISHED = os.environ.get("SNUG_GSM8K")  # the folder of the two files


def made_up(number):
    """A problem in the published form; its question is like no other's."""
    a, b = number + 2, 2 * number + 1
    answer = f"They have {a}+{b}=<<{a}+{b}={a + b}>>{a + b} pens.\nThat is ${a + b}*2=$<<{a + b}*2={2 * (a + b)}>>{2 * (a + b)}.\n"
    return {
        "question": f"Ann has {a} pens and Bob {b}. A pen is $2.  What are they worth?",
        "answer": answer + f"#### {2 * (a + b):,}",
    }


def written(tmp_path, rows, name="train.jsonl"):
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def task_of(path, cls=GRPOSettings, **options):
    return make_task(cls(task="gsm8k", data_file=str(path), **options))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The 20 published problems and 1,200 more; one in ten is held out."""
    return task_of(written(tmp_path_factory.mktemp("gsm8k"), [*LINES, *map(made_up, range(1200))]))


def rewards(task, rows, completions, **more):
    return task.rewards([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows], **more)


# -----------------------------------------------------------------------------
# Which text is which number

SAID = {
    # as it should be
    "#### 42": "42",
    "6*7 is 42.\n#### 42": "42",
    "####42": "42",
    "####\t42  ": "42",
    "####\n42": "42",
    "##### 42": "42",
    "#### 42\n": "42",
    "#### 42\r\n": "42",
    "#### 42\n\nQuestion: what are 2 and 3?": "42",
    "\\boxed{42}": "42",
    "So it is $\\boxed{42}$.": "42",
    "\\boxed{ 42 } apples, 6 each": "42",
    # the last one counts
    "#### 1\n#### 42": "42",
    "#### 1 #### 42": "42",
    "\\boxed{1}, no, \\boxed{42}": "42",
    "\\boxed{1} #### 42": "42",
    "#### 1 \\boxed{42}": "42",
    "#### \\boxed{42}": "42",
    "#### 42 ####": None,
    "#### 42\n#### unknown": None,
    "\\boxed{42} \\boxed{}": None,
    "\\boxed{42} \\boxed{7": None,
    # other spellings
    "#### 42.": "42",
    "#### 42.0": "42",
    "#### 42.00": "42",
    "#### 42.50": "42.5",
    "#### .5": "0.5",
    "#### 042": "42",
    "#### +42": "42",
    "#### -42": "-42",
    "#### \u221242": "-42",
    "#### -0": "0",
    "#### -0.00": "0",
    "#### 0": "0",
    "#### 1,000": "1000",
    "#### 1,000,000": "1000000",
    "#### 1,000.50": "1000.5",
    "#### $1,000": "1000",
    "#### $ 1,000": "1000",
    "#### -$5": "-5",
    "#### $-5": "-5",
    "#### \\$42": "42",
    "#### $42$": "42",
    "#### €42": "42",
    "#### 42%": "42",
    "#### 42\\%": "42",
    "#### 42 %": "42",
    "\\boxed{\\$42}": "42",
    "\\boxed{42\\%}": "42",
    "\\boxed{42 \\text{ apples}}": "42",
    "\\boxed{42\\,\\text{km/h}}": "42",
    "**#### 42**": "42",
    "#### 42 apples": "42",
    "#### 42 dollars.": "42",
    "#### 42apples": "42",
    "#### 42, I think!": "42",
    "#### 42 (forty-two)": "42",
    "#### 42 kilomètres": "42",
    "#### 42 个": "42",
    "#### 42 thousand": "42",
    "#### 123456789012345678901234567890": "123456789012345678901234567890",
    "#### " + "9" * MAX_ANSWER: "9" * MAX_ANSWER,
    # two numbers are none
    "#### 1 or 2 or 3": None,
    "#### 18 19": None,
    "#### 18, 19": None,
    "#### 18/19": None,
    "#### 18-19": None,
    "#### 18 (or 19)": None,
    "#### 18 ٣": None,
    "#### 18 ³": None,
    "#### 18四": None,
    "\\boxed{18, 19}": None,
    "\\boxed{18 \\text{ or } 19}": None,
    # no number, or not at once
    "": None,
    "42": None,
    "# 42": None,
    "### 42": None,
    "boxed{42}": None,
    "\\boxed 42": None,
    "#### forty-two": None,
    "#### about 42": None,
    "#### x = 42": None,
    "#### = 42": None,
    "#### (42)": None,
    "#### #42": None,
    "#### $": None,
    "#### -": None,
    "#### .": None,
    "#### ,": None,
    "#### nan": None,
    "#### inf": None,
    "#### -Infinity": None,
    "#### True": None,
    # separators
    "#### 1,00": None,
    "#### 10,00": None,
    "#### 1,0000": None,
    "#### 1000,000": None,
    "#### 1,000,0000": None,
    "#### 1,000,00": None,
    "#### ,100": None,
    "#### 0,100": None,
    "#### 1,,000": None,
    "#### 1, 000": None,
    "#### 1 000": None,
    "#### 1.000,50": None,
    "#### 42,5": None,
    "#### 1'000": None,
    "\\boxed{1{,}000}": None,
    # what other readers would take
    "#### 84/2": None,
    "#### 84 / 2": None,
    "#### 1/2": None,
    "#### 1 1/2": None,
    "#### ½": None,
    "#### 1½": None,
    "\\boxed{\\frac{84}{2}}": None,
    "#### 6*7": None,
    "#### 40+2": None,
    "#### 2^5": None,
    "#### 2**5": None,
    "#### 4e1": None,
    "#### 4.2e1": None,
    "#### 4E+1": None,
    "#### 0x2A": None,
    "#### 0xff": None,
    "#### 0b11": None,
    "#### -0xff": None,
    "#### 0o": None,
    "#### 0 oranges": "0",
    "#### 1_000": None,
    "#### 4_2": None,
    "#### 42_": None,
    "#### ４２": None,
    "#### ٤٢": None,
    "#### 4２": None,
    "#### 𝟜𝟚": None,
    "#### ⅩⅬⅡ": None,
    "#### --42": None,
    "#### -$-42": None,
    "#### +-42": None,
    "#### - 42": None,
    "#### –42": None,  # a dash
    "#### 42=42": None,
    "#### 42 = x": None,
    "#### 1.2.3": None,
    "#### 12:30": None,
    "#### 42\x00": None,
    "#### \x0042": None,
    "#### 42\u200b": None,
    "#### 42;<script>": None,
    # length
    "#### " + "9" * (MAX_ANSWER + 1): None,
    "#### 42" + " apples" * 40: None,
    "#### 42" + " " * 1000: "42",
    "####" + " " * 1000 + "42": "42",
    "\\boxed{" + " " * MAX_ANSWER + "42}": None,
    "x" * (MAX_COMPLETION - 7) + "#### 42": "42",
    "x" * (MAX_COMPLETION - 6) + "#### 42": None,
}


def test_which_text_is_which_number(task):
    for said, expected in SAID.items():
        assert number_after_marker(said) == task.answer_of(said) == expected, said[:80]
        for answer in ("42", "-42", "1", "18", "1000", expected):
            assert task.rewards([""], [said], answer=[answer]) == [float(answer is not None and answer == expected)]
        assert task.formatted([""], [said]) == [float(expected is not None)]
        assert task.formatted([""], [said], stopped=[False]) == [0.0]


numbers = st.builds(
    lambda digits, places: Decimal(digits).scaleb(-places), st.integers(-(10**12), 10**12), st.integers(0, 6)
)


def spelled(number, rng):
    """One of the ways to write a Decimal."""
    sign, text = ("-" if number < 0 else rng.choice(["", "+"])), f"{abs(number):{rng.choice(['', ','])}f}"
    text += rng.choice(["", "0", "00"]) if "." in text else rng.choice(["", ".", ".0"])
    money = rng.choice(["", "$", "\\$"])
    number = rng.choice([sign + money, money + sign]) + text + rng.choice(["", "%", " apples", " a day.", "!"])
    return rng.choice(["#### {}", "#### {}\nAnd 7 more.", "\\boxed{{{}}}", "#### 1\n#### {}"]).format(number)


@given(numbers, numbers, st.randoms(use_true_random=False))
def test_equal_numbers_are_equal_however_they_are_written(a, b, rng):
    one, other, again = (number_after_marker(spelled(number, rng)) for number in (a, b, a))
    assert one == again and Fraction(one) == Fraction(a)
    assert (one == other) == (Fraction(a) == Fraction(b))


@given(st.text(alphabet="0123456789.,-+$%/eE_x \\{}#\n\u2212a", max_size=30), st.sampled_from(FORMS))
def test_whatever_is_read_is_a_number_that_is_written_there(text, form):
    number = number_after_marker(form[0] + text + form[1])
    if number is not None:
        assert re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]*[1-9])?", number)
        assert number.strip("-0.") in re.sub("[,]", "", text) or not number.strip("-0.")


LAST = {
    "29 + 21 = 50.": "50",
    "29+21=50": "50",
    "50": "50",
    "It costs $1,000.50.": "1000.5",
    "-$1,000.50 a week": "-1000.5",
    "\\$ 5": "5",
    "-7": "-7",
    "x=-7": "-7",
    "x = \u22127%": "-7",
    "**-7**, I think": "-7",
    "\\boxed{-7}": "-7",
    "+7": "7",
    "-0.00": "0",
    "007.50": "7.5",
    "is .5": "0.5",
    "-.5": "-0.5",
    "US$50": "50",
    "USD50": "50",
    "50kg": "50",
    "答案是-50。": "-50",
    "5 or 6?": "6",
    "4... 5...": "5",
    "No.5": "5",
    "wait...5": "5",
    "5 0": "0",
    "5\n6\n": "6",
    # an operator, not a sign
    "3-5": "5",
    "3-.5": "0.5",
    "3-$5": "5",
    "x-5": "5",
    "(2+1)-5": "5",
    "10%-5": "5",
    "covid-19": "19",
    "2026-10-05": "5",
    "3 - 5": "5",
    "3 -5": "-5",
    # part of a number
    "1/2": None,
    "1/-2": None,
    "10^3": None,
    "10^-3": None,
    "4e1": None,
    "4e-1": None,
    "0x2A1": None,
    "1.2.3": None,
    "1,00": None,
    "1000,000": None,
    "5²": None,
    "5½": None,
    # none
    "": None,
    "fifty": None,
    "½": None,
    "５０": None,
    "9" * MAX_ANSWER: "9" * MAX_ANSWER,
    "9" * (MAX_ANSWER + 1): None,
    "x" * (MAX_COMPLETION - 2) + "50": "50",
    "x" * (MAX_COMPLETION - 1) + "50": None,
}


def test_the_last_number_of_a_text():
    for said, expected in LAST.items():
        assert last_number(said) == expected, said[:80]


@given(
    numbers,
    numbers,
    st.sampled_from(["{} and {}", "{}\n{}", "{}+{}", "{} - {}", "{}=={}.", "{}/x={} apples", "({}) ({})"]),
)
def test_the_last_of_two_numbers(a, b, form):
    text = form.format(f"{a:,f}", f"{b:f}")
    expected = Fraction(abs(b)) if form == "{}+{}" else Fraction(b)  # 3+-5: a sign after a sign is an operator too
    assert Fraction(last_number(text)) == expected
    operator = last_number(f"{a:f}{abs(b):+f}".replace("+", "-"))  # 3-5
    assert Fraction(operator) == Fraction(abs(b))


@given(st.text(alphabet="0123456789.,-+$%/^eE_x \\{}#\n\u2212a²", max_size=30))
def test_the_last_number_is_written_there_and_no_digit_follows(text):
    number = last_number(text)
    if number is not None:
        assert re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]*[1-9])?", number) and last_number(number) == number
        last = re.findall(r"[0-9]+(?:[.,][0-9]+)*", text)[-1].replace(",", "")
        assert abs(Fraction(number)) in {Fraction(last), Fraction(last if "." in last else f"0.{last}")}
        assert number[0] != "-" or re.search("[-\u2212][\\\\$ ]*[0-9.,]+[^0-9]*$", text)


def test_the_last_number_is_found_in_time_in_hostile_texts():
    with harmless():
        for text in dressed():
            last_number(text)
            last_number(text[:MAX_COMPLETION])


@pytest.mark.parametrize(
    "text, inside",
    [
        ("<answer> 1 </answer>", "1"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("1</answer>", None),
        ("<answer>1", None),
        ("</answer><answer>", None),
        ("", None),
        (" " * MAX_COMPLETION + "<answer>1</answer>", None),
    ],
)
def test_what_is_in_answer_tags(text, inside):
    assert in_answer_tags(text) == inside


# -----------------------------------------------------------------------------
# The task


def test_a_thousand_problems_are_answered_rightly_by_their_answers_alone(task):
    """The 20 published ones and 1,200 in the same form, held out by their questions."""
    rng = random.Random(0)
    for split in ("train", "test"):
        rows = task.prompts(split, range(1000))
        right = [task.demonstration(row, rng) for row in rows]
        assert rewards(task, rows, right) == [1.0] * 1000
        assert rewards(task, rows, right, stopped=[i % 2 == 0 for i in range(1000)]) == [1.0, 0.0] * 500
        assert [task.answer_of(text) for text in right] == [row["answer"] for row in rows]
        assert rewards(task, rows, [""] * 1000) == [0.0] * 1000
        assert sum(rewards(task, rows, right[1:] + right[:1])) < 20  # the next one's answer
        assert rewards(task, rows, [f"{text}1" for text in right]) == [0.0] * 1000
        assert (
            rewards(task, rows, [f"{text} or {row['answer']}" for text, row in zip(right, rows, strict=True)])
            == [0.0] * 1000
        )
        assert rewards(task, rows, [text.replace("####", "is") for text in right]) == [0.0] * 1000
        noise = ["".join(map(chr, rng.choices(range(256), k=rng.randrange(60)))) for _ in rows]
        assert rewards(task, rows, [f"{rng.choice(['', '#### '])}{text}" for text in noise]) == [0.0] * 1000


def test_exploits_score_nothing_and_do_nothing(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with harmless():
        for text in dressed():
            for answer in ("72", "1", "0"):
                assert task.rewards([""], [text], answer=[answer]) == [0.0], text[:80]
    assert not list(tmp_path.iterdir())


def test_prompts_and_demonstrations(tmp_path):
    path = written(tmp_path, LINES)
    task = task_of(path, test_file=written(tmp_path, [made_up(1)], "test.jsonl"))
    row = next(row for row in task.rows["train"] if "Natalia" in row["question"])
    published = json.loads(LINES[0])
    assert row["question"] == published["question"] and row["answer"] == "72"
    assert (
        row["prompt"].startswith(row["question"] + "\n")
        and "step by step" in row["prompt"]
        and row["prompt"].endswith("number.\n")
    )
    assert task.demonstration(row, None) == published["answer"].replace("<<48/2=24>>", "").replace("<<48+24=72>>", "")
    assert not any("<<" in row["demonstration"] or ">>" in row["demonstration"] for row in task.rows["train"])
    long = {"question": "Why? " * 400, "answer": "Because. " * 400 + "#### 1"}
    other = task_of(path, test_file=written(tmp_path, [long], "long.jsonl"))
    assert other.longest(list) == (len(row["prompt"]) - len(row["question"]) + 2000, 3606)
    assert task.longest(list) == (
        max(len(r["prompt"]) for r in task.rows["train"]),
        max(len(r["demonstration"]) for r in task.rows["train"]),
    )
    chat = task_of(path, test_file=str(tmp_path / "test.jsonl"), chat=True, system_prompt="Be brief.")
    spoken = chat.prompts("test", [0])[0]["prompt"]
    assert spoken == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": task.prompts("test", [0])[0]["prompt"].rstrip()},
    ]
    assert sorted(row["answer"] for row in task.rows["train"]) == sorted(
        "72 10 5 42 624 35 48 16 41 990 121 5 85 1080 850000 2250 10000".split() + ["109200000", "-7", "-47"]
    )


def test_splits_share_no_question(tmp_path, task):
    questions = {split: {row["question"] for row in task.rows[split]} for split in ("train", "test")}
    assert not questions["train"] & questions["test"] and len(questions["train"]) + len(questions["test"]) == 1220
    assert all(split_of(" ".join(question.split()).lower()) == "test" for question in questions["test"])
    path = written(tmp_path, [*LINES, *map(made_up, range(300))])
    tuning = task_of(path, eval_split="tune")
    tune = {row["question"] for row in tuning.rows["tune"]}
    assert 15 < len(tune) < 60 and not tune & {row["question"] for row in tuning.rows["train"] + tuning.rows["test"]}
    assert tuning.fingerprint() != task_of(path).fingerprint() == task_of(path, seed=7).fingerprint()
    epoch = [row["question"] for row in tuning.prompts("train", range(len(tuning.rows["train"])))]
    assert len(set(epoch)) == len(epoch) and epoch != [row["question"] for row in tuning.rows["train"]]


def test_a_question_in_both_files_is_refused_however_it_is_set(tmp_path):
    one, other = json.loads(LINES[0]), json.loads(LINES[1])
    one["question"] = "  " + one["question"].upper().replace(" ", " \n ")
    train, test = written(tmp_path, LINES), written(tmp_path, [one, other, made_up(1)], "test.jsonl")
    with pytest.raises(
        SnugError, match="test.jsonl has 2 prompts of data_file, such as 'natalia sold clips .*; remove them"
    ) as error:
        task_of(train, test_file=test)
    assert "\n" not in str(error.value)


BAD = [
    (b'{"question": "a"', r"not JSON \(Expecting"),
    (b"\xff", r"not JSON \('utf-8' codec"),
    (b"[" * 100_000, r"not JSON \("),
    (b"[]", 'must be {"question": text, "answer": text}, not \\[]'),
    (b"null", "must be .* not None"),
    (b'{"question": "a"}', "must be .* not {'question': 'a'}"),
    (b'{"prompt": "a", "answer": "#### 1"}', "must be .* not {'prompt': 'a', "),
    (b'{"question": "a", "answer": "#### 1", "level": 1}', "must be .* not {'question': 'a', "),
    (b'{"question": "a", "answer": 1}', "must be .* not {'question': 'a', 'answer': 1}"),
    (b'{"question": ["a"], "answer": "#### 1"}', r"must be .* not {'question': \['a'\], "),
    (b'{"question": " ", "answer": "#### 1"}', "has no question"),
    (b'{"question": "a", "answer": "1"}', "its answer has no number after ####: '1'"),
    (b'{"question": "a", "answer": "so\\n#### 1/2"}', r"its answer has no number after ####: 'so\\n#### 1/2'"),
    (b'{"question": "\\ud800", "answer": "#### 1"}', "not JSON .*surrogates not allowed"),
]


def test_a_bad_line_is_named_with_file_and_line(tmp_path):
    path, lines = tmp_path / "train.jsonl", [text.encode() for text in LINES]
    for number, (line, message) in enumerate(BAD):
        place = (0, 7, 20)[number % 3]
        path.write_bytes(b"\n".join([*lines[:place], line, *lines[place:]]))
        with pytest.raises(SnugError, match=f"{path}:{place + 1}: {message}") as error:
            task_of(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(data_file=""),
            "task='gsm8k' reads data_file: name GSM8K's train.jsonl; python -m data.gsm8k prepare downloads it",
        ),
        (
            dict(data_file="no/train.jsonl"),
            r"no/train.jsonl: cannot be read \(No such file .*\); python -m data.gsm8k prepare downloads it",
        ),
        (
            dict(test_file="no/test.jsonl"),
            r"no/test.jsonl: cannot be read \(No such file .*\); python -m data.gsm8k prepare downloads it",
        ),
        (dict(data_file="."), r"\.: cannot be read \(Is a directory\)$"),
        (
            dict(demonstration_noise=0.5),
            "demonstration_noise=0.5: task='gsm8k' takes its demonstrations from the file",
        ),
        (
            dict(eval_split="tune", test_file="sample"),
            "none of its 20 rows is in the tune split; leave out eval_split=tune",
        ),
    ],
)
def test_files_that_do_not_serve(tmp_path, options, message):
    options = dict(data_file=str(SAMPLE)) | options
    if options.get("test_file") == "sample":
        rows = [line for line in LINES if split_of(" ".join(json.loads(line)["question"].split()).lower()) != "tune"]
        options |= dict(data_file=written(tmp_path, rows), test_file=written(tmp_path, [made_up(1)], "test.jsonl"))
        message = message.replace("20", str(len(rows)))
    with pytest.raises(SnugError, match=message):
        make_task(SFTSettings(task="gsm8k", **options))


@pytest.mark.skipif(not PUBLISHED, reason="SNUG_GSM8K names no folder with train.jsonl and test.jsonl")
def test_the_published_files():
    for name, expected in gsm8k.FILES.items():
        gsm8k.check((Path(PUBLISHED) / name).read_bytes(), expected, name, "")
    task = task_of(Path(PUBLISHED) / "train.jsonl", test_file=str(Path(PUBLISHED) / "test.jsonl"))
    assert {split: len(rows) for split, rows in task.rows.items()} == {"train": 7473, "test": 1319, "tune": 0}
    for rows in (task.rows["train"], task.rows["test"]):
        right = [row["demonstration"] for row in rows]
        assert rewards(task, rows, right) == [1.0] * len(rows) and rewards(task, rows, [""] * len(rows)) == [0.0] * len(
            rows
        )
        assert sum(rewards(task, rows, right[1:] + right[:1])) < 0.04 * len(rows)
        assert all(
            Fraction(row["answer"]) == int(text.split("####")[1].replace(",", ""))
            for row, text in zip(rows, right, strict=True)
        )


# -----------------------------------------------------------------------------
# Fetching

CONTENT = {
    "train.jsonl": "".join(f"{line}\n" for line in LINES).encode(),
    "test.jsonl": json.dumps(made_up(1)).encode() + b"\n",
}


class Server(BaseHTTPRequestHandler):
    how, asked = "well", []

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        data, how = (
            CONTENT[name],
            "well" if name == "train.jsonl" and self.how.endswith("test") else self.how.split()[0],
        )
        self.asked.append(self.path)
        if how == "silent":
            self.server.over.wait(5)
            return
        self.send_response({"missing": 404, "down": 500, "moved": 302}.get(how, 200))
        if how == "moved":
            self.send_header("Location", "file:///etc/passwd")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(
            {
                "wrong": data.replace(b"clips", b"slips").replace(b"Ann", b"Bob"),
                "truncated": data[:50],
                "empty": b"",
            }.get(how, data)
        )

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server in place of GitHub, for the sample and one row, and the hashes of these."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    http.over = threading.Event()
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Server, "how", "well")
    monkeypatch.setattr(Server, "asked", [])
    monkeypatch.setattr(gsm8k, "SOURCE", f"http://127.0.0.1:{http.server_port}/data/")
    files = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}
    monkeypatch.setattr(gsm8k, "FILES", files)
    yield Server
    http.over.set()
    http.shutdown()
    thread.join()
    http.server_close()


def test_fetched_once(server, tmp_path, capsys):
    folder = tmp_path / "deep" / "gsm8k"
    gsm8k.main(["prepare", str(folder)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT
    assert server.asked == ["/data/train.jsonl", "/data/test.jsonl"]
    assert capsys.readouterr().out == f"{folder}/train.jsonl: downloaded\n{folder}/test.jsonl: downloaded\n"
    gsm8k.main(["prepare", str(folder)])
    assert len(server.asked) == 2 and capsys.readouterr().out.count("was there") == 2
    (folder / "test.jsonl").unlink()
    gsm8k.main(["prepare", str(folder)])
    assert (
        server.asked[2:] == ["/data/test.jsonl"]
        and len(task_of(folder / "train.jsonl", test_file=str(folder / "test.jsonl")).rows["train"]) == 20
    )


@pytest.mark.parametrize(
    "how, message",
    [
        (
            "wrong",
            r"train.jsonl: its 10,757 bytes have SHA-256 [0-9a-f]{64}, but should have [0-9a-f]{64}; nothing was written; try again",
        ),
        (
            "truncated",
            r"train.jsonl: (cannot be downloaded \(IncompleteRead|its 50 bytes have SHA-256 .* but should have)",
        ),
        (
            "empty",
            r"train.jsonl: (cannot be downloaded \(IncompleteRead|its 0 bytes have SHA-256 e3b0c442.* but should have)",
        ),
        ("missing", r"train.jsonl: cannot be downloaded \(HTTPError: HTTP Error 404"),
        ("down", r"train.jsonl: cannot be downloaded \(HTTPError: HTTP Error 500"),
        ("moved", r"train.jsonl: cannot be downloaded \(HTTPError: HTTP Error 302"),
        ("silent", r"train.jsonl: cannot be downloaded \(TimeoutError: timed out\); try again"),
    ],
)
@pytest.mark.parametrize("which", ["train", "test"])
def test_what_a_server_may_do(server, tmp_path, monkeypatch, how, message, which):
    monkeypatch.setattr(server, "how", how if which == "train" else f"{how} test")
    monkeypatch.setattr(gsm8k, "TIMEOUT", 0.2)
    with pytest.raises(SnugError, match=message.replace("train", which).replace("10,757", "[0-9,]+")) as error:
        gsm8k.prepare(tmp_path / "gsm8k")
    assert "\n" not in str(error.value) and gsm8k.SOURCE in str(error.value)
    assert [path.name for path in (tmp_path / "gsm8k").iterdir()] == (["train.jsonl"] if which == "test" else [])


def test_nobody_there(server, tmp_path, monkeypatch):
    monkeypatch.setattr(gsm8k, "SOURCE", "http://127.0.0.1:9/")
    with pytest.raises(
        SnugError, match=r"http://127.0.0.1:9/train.jsonl: cannot be downloaded \(URLError: .*Connection refused"
    ):
        gsm8k.prepare(tmp_path)


def test_wrong_files_are_named_and_left_alone(server, tmp_path, monkeypatch):
    (tmp_path / "train.jsonl").write_text("mine\n")
    found, expected = hashlib.sha256(b"mine\n").hexdigest(), gsm8k.FILES["train.jsonl"]
    with pytest.raises(
        SnugError, match=f"train.jsonl: its 5 bytes have SHA-256 {found}, but should have {expected}; move it away"
    ):
        gsm8k.prepare(tmp_path)
    assert (tmp_path / "train.jsonl").read_text() == "mine\n" and not server.asked
    (tmp_path / "other" / "train.jsonl").mkdir(parents=True)
    with pytest.raises(SnugError, match=r"other/train.jsonl: cannot be read or written \(Is a directory\)"):
        gsm8k.prepare(tmp_path / "other")


def test_a_disk_that_is_full_leaves_nothing(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(SnugError, match=r"train.jsonl: cannot be read or written \(No space left on device\)"):
        gsm8k.prepare(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path):
    """In a folder that has data/gsm8k already, which is no module; whatever is wrong is one line and exit code 2."""
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text("mine\n")
    for words, message in (
        (["fetch"], "usage: python -m data.gsm8k prepare [folder]"),
        (["prepare", str(tmp_path / "gsm8k")], "its 5 bytes"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "data.gsm8k", *words], cwd=HERE.parent, capture_output=True, text=True
        )
        assert result.returncode == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert message in result.stderr and not result.stdout
