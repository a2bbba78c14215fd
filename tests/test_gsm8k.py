"""GSM8K: which texts are which numbers, the task's rows, and files that are refused."""

import json
from pathlib import Path

import pytest

from data import make_task
from data.answers import MAX_ANSWER, MAX_COMPLETION, last_number
from examples.gsm8k import number_after_marker
from helpers.errors import assert_refused
from helpers.tasks import rewards, written
from settings import GRPOSettings

SAMPLE = Path(__file__).parent / "gsm8k_sample.jsonl"
LINES = SAMPLE.read_bytes().splitlines()


def made_up(number):
    """A problem in the published form; no other has its question."""
    a, b = number + 2, 2 * number + 1
    answer = f"They have {a}+{b}=<<{a}+{b}={a + b}>>{a + b} pens.\nThat is ${a + b}*2=$<<{a + b}*2={2 * (a + b)}>>{2 * (a + b)}.\n"
    question = f"Ann has {a} pens and Bob {b}. A pen is $2.  What are they worth?"
    return {"question": question, "answer": answer + f"#### {2 * (a + b):,}"}


def task_of(path, cls=GRPOSettings, task="gsm8k", **options):
    return make_task(cls(task=task, data_file=str(path), **options))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The 20 published problems and 1,200 more; one in ten is held out."""
    return task_of(written(tmp_path_factory.mktemp("gsm8k"), [*LINES, *map(made_up, range(1200))]))


SPELLINGS = {  # as the answer after a marker, and as the last number of a text
    "42": "42", "42.50": "42.5", ".5": "0.5", "\u221242": "-42", "-0.00": "0", "-$1,000.50 a week!": "-1000.5",
    "42 %, 个": "42", "9" * MAX_ANSWER: "9" * MAX_ANSWER,
} | dict.fromkeys(["9" * (MAX_ANSWER + 1), "1/2", "18³", "1,00", "4e1", "1.2.3", "４２", ""])  # fmt: skip
FORTY_TWO = ["####\n42\r\n\nQuestion: what are 2 and 3?", "**#### 42**", "#### 1\n#### 42", "\\boxed{1} #### 42"]
FORTY_TWO += ["So it is $\\boxed{42 \\text{ apples}}$, 6 each.", "x" * (MAX_COMPLETION - 7) + "#### 42"]
NO_NUMBER = ["#### 42\n#### unknown", "\\boxed{42} \\boxed{7", "#### 18 or 19", "\\boxed{\\frac{84}{2}}", "42"]
NO_NUMBER += ["#### x = 42", "#### 42" + " apples" * 40, "x" * (MAX_COMPLETION - 6) + "#### 42"]
MARKED = dict.fromkeys(FORTY_TWO, "42") | dict.fromkeys(NO_NUMBER)
MARKED |= {f"so\n#### {text}\nQuestion 2:": number for text, number in SPELLINGS.items()}
LAST = {"29 + 21 = 50.": "50", "29+21=50": "50", "x=-7": "-7", "答案是-50。": "-50", "3 -5": "-5"}
LAST |= dict.fromkeys(["3-5", "3-$5", "x-5", "10%-5"], "5")
LAST |= dict.fromkeys(["10^{3}", "10^{-3}", "\\frac{1}{2}", "\\frac{1}{-2}", "1/-2", "1/$2", "4e-1", "2^-5"])
LAST |= {"x" * (MAX_COMPLETION - 2) + "50": "50", "x" * (MAX_COMPLETION - 1) + "50": None}
LAST |= {f"so {text}": number for text, number in SPELLINGS.items()}


def test_number_after_marker(task):
    for text, number in MARKED.items():
        assert number_after_marker(text) == task.answer_of(text) == number, text[:80]
        for answer in ("42", "-42", "1", "18", "1000"):
            assert task.rewards([""], [text], answer=[answer]) == [float(answer == number)]
        assert task.answers_of([text], stopped=[False]) == [None]


def test_last_number():
    for text, number in LAST.items():
        assert last_number(text) == number, text[:80]


# A text with a dash and what it ends with. No digits stand before it in the first, so its number is negative.
MINUS = [
    "is -5", "is - 5", "= -5", "= - 5", "=-5", "=\u20135", "= \u2013 5", "is \u2212 5", "is \u20105", "is \u20115",
    "is \u2012 5", "is \uff0d5", "is \ufe635", "is -\u00a05", "is  -  5", "(-5)", "[-5]", "{- 5}", "| - 5 |", "-5",
    "- 5", "a\n-5", "12\n-5", "is -$5", "is - $5", "is $-5", "is - $ 5", "is -\\$5", "$- 5$", "$-5$", "is -\u20ac5",
    "is \u2013 \u00a35", "\\(-5\\)", "**-5**", "is **-5**", "is -**5**", "is - **5**", "is - *5*", "is `-5`",
    "is negative 5", "is Negative 5", "is minus $5", "= minus 5", "it's - 5", "a - 5", "so: - 5", "3 -5", "3 - -5",
    "3 * -5", "12 apples, so - 5", "that\u2019s - 5.", "is -5%", "-5.0", "-005",
]  # fmt: skip
OPERATOR = [
    "3-5", "3 - 5", "3  -  5", "3 -  5", "3- 5", "3\u20135", "3 \u2013 5", "3 \u2212 5", "3 minus 5", "x-5",
    "x - 5", "5x - 5", "x\u00b2 - 5", "(3) - 5", "[3] - 5", "{3} - 5", "50% - 5", "50%-5", "90\u00b0 - 5",
    "$3$ - 5", "3\u20ac - 5", "**3** - 5", "3 - $5", "3 - **5**", "x_-5", "top-5", "COVID-5", "3+-5", "3--5", "--5",
    "B - 5", "so \u2014 5", "so\u20145", "is 5 -", "is +5", "= + 5", "is -\n5", "They are\n- 5",
    "They are\n  - 5 apples", "They are\n- **5**", "12\n\u2013 5", "3 - 0, 5", "-3, 5", "-3 is 5",
]  # fmt: skip


LAST |= dict.fromkeys(OPERATOR, "5") | dict.fromkeys([*MINUS, *(f"It {text} in all." for text in MINUS)], "-5")
EIGHTEEN = [
    "18", "**18**", "__18__", "*18*", "***18***", "`18`", "$18$", "**$18**", "$\\$18$", "\\$18", "\\(18\\)", "+18",
    "+ 18", "**18** apples", "**18.00**", "\u20ac18", "$ 18",
]  # fmt: skip
NOT_EIGHTEEN = ["**18** or 19", "**x = 18**", "(18)", "18**2", "--18", "- -18", "\u00b118", "\u2014 18", "** or 18"]


@pytest.mark.parametrize("form", ["#### {}", "so **#### {}", "\\boxed{{{}}}"])
def test_marks_and_signs_around_the_number_behind_a_marker(form):
    for text in EIGHTEEN:
        assert number_after_marker(form.format(text)) == "18", text
    signed = ["-{}", "- {}", "\u2013{}", "\u2212 {}", "minus {}", "Negative {}", "**-{}", "$-{}$"]
    for text in [sign.format(text) for sign in signed for text in EIGHTEEN[:12] if "+" not in text]:
        assert number_after_marker(form.format(text)) == "-18", text
    assert [number_after_marker(form.format(text)) for text in NOT_EIGHTEEN] == [None] * len(NOT_EIGHTEEN)


def test_problems_are_answered_rightly_by_their_answers_alone(task):
    """The 20 published ones and others in the same form, held out by their questions."""
    for split in ("train", "test"):
        rows = task.prompts(split, range(200))
        right = [task.demonstration(row, None) for row in rows]
        assert rewards(task, rows, right) == [1.0] * 200
        assert rewards(task, rows, right, stopped=[i % 2 == 0 for i in range(200)]) == [1.0, 0.0] * 100
        assert [task.answer_of(text) for text in right] == [row["answer"] for row in rows]
        assert sum(rewards(task, rows, right[1:] + right[:1])) < 20  # the next one's answer
        twice = [f"{text} or {row['answer']}" for text, row in zip(right, rows, strict=True)]
        unmarked = [text.replace("####", "is") for text in right]
        for wrong in ([""] * 200, [f"{text}1" for text in right], twice, unmarked):
            assert rewards(task, rows, wrong) == [0.0] * 200


def test_prompts_and_demonstrations(tmp_path):
    path = written(tmp_path, LINES)
    task = task_of(path, test_file=written(tmp_path, [made_up(1)], "test.jsonl"))
    row = next(row for row in task.rows["train"] if "Natalia" in row["question"])
    published = json.loads(LINES[0])
    assert row["question"] == published["question"] and row["answer"] == "72"
    assert row["prompt"].startswith(row["question"] + "\n") and row["prompt"].endswith("number.\n")
    assert task.demonstration(row, None) == published["answer"].replace("<<48/2=24>>", "").replace("<<48+24=72>>", "")
    assert not any("<<" in row["demonstration"] or ">>" in row["demonstration"] for row in task.rows["train"])
    long = {"question": "Why? " * 400, "answer": "Because. " * 400 + "#### 1"}
    other = task_of(path, test_file=written(tmp_path, [long], "long.jsonl"))
    assert other.longest(lambda text, special=True: text) == (len(row["prompt"]) - len(row["question"]) + 2000, 3606)
    chat = task_of(path, test_file=str(tmp_path / "test.jsonl"), chat=True, system_prompt="Be brief.")
    spoken = chat.prompts("test", [0])[0]["prompt"]
    asked = {"role": "user", "content": task.prompts("test", [0])[0]["prompt"].rstrip()}
    assert spoken == [{"role": "system", "content": "Be brief."}, asked]
    answers = "72 10 5 42 624 35 48 16 41 990 121 5 85 1080 850000 2250 10000 109200000 -7 -47".split()
    assert sorted(row["answer"] for row in task.rows["train"]) == sorted(answers)


def test_a_program_is_right_if_it_returns_the_number(tmp_path):
    path = written(tmp_path, [json.dumps(made_up(249)).encode()])  # 2 x (251 + 499) = 1,500
    test = written(tmp_path, LINES[:1], "test.jsonl")
    task = task_of(path, task="examples.gsm8k_program:GSM8KProgram", test_file=test)
    (row,) = task.prompts("train", [0])
    assert row["prompt"].startswith(row["question"]) and row["answer"] == "1500"
    results = {"2 * (251 + 499)": 1, "1500.0": 1, "'1500'": 1, "1501": 0, "-1500": 0, "None": 0, "'$1500'": 0, "2 *": 0}
    texts = [f"So:\n```python\ndef solution():\n    return {each}\n```" for each in results]
    assert rewards(task, [row] * len(texts), texts) == list(results.values())
    assert rewards(task, [row] * 2, ["#### 1500", texts[0].replace("solution", "other")]) == [0, 0]


def test_a_question_in_both_files_is_refused_however_it_is_set(tmp_path):
    one, other = json.loads(LINES[0]), json.loads(LINES[1])
    one["question"] = "  " + one["question"].upper().replace(" ", " \n ")
    train, test = written(tmp_path, LINES), written(tmp_path, [one, other, made_up(1)], "test.jsonl")
    said = "test.jsonl has 2 prompts of data_file, such as 'natalia sold clips .*; remove them"
    assert_refused(said, task_of, train, test_file=test)


BAD = [  # Lines of JSON. test_jsonl.py has lines that are not JSON.
    (b"5", 'must be {"question": text, "answer": text}, not 5'),
    (b'{"prompt": "a", "answer": "#### 1"}', "must be .* not {'prompt': 'a', "),
    (b'{"question": "a", "answer": 1}', "must be .* not {'question': 'a', 'answer': 1}"),
    (b'{"question": "a", "answer": "so\\n#### 1/2"}', r"its answer has no number after ####: 'so\\n#### 1/2'"),
]


def test_a_bad_line_is_named_with_file_and_line(tmp_path):
    path, lines = tmp_path / "train.jsonl", [*LINES]
    for number, (line, message) in enumerate(BAD):
        place = (0, 7, 20)[number % 3]
        path.write_bytes(b"\n".join([*lines[:place], line, *lines[place:]]))
        assert_refused(f"{path}:{place + 1}: {message}", task_of, path)
