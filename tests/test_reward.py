"""Reward functions that lie, raise, draw blanks or never come back: named, with their place, and never obeyed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_commands import HOME, command

from data import rewards
from data.rewards import OutOfTime, ask, call, repeat_columns, total_rewards
from options import SnugError, told
from runs.checkpoint import newest

PROMPTS, COMPLETIONS, COLUMNS = ["a", "b", "c"], ["x", "yy", "zzz"], {"answer": [1, 2, 3]}


def refused(function, timeout=0.0):
    with pytest.raises(SnugError) as error:
        ask(function, PROMPTS, COMPLETIONS, COLUMNS, timeout)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_wrong_answer_names_the_function_and_the_completion():
    def mine(prompts, completions, answer):
        return wrong

    for wrong, message in (  # noqa: B007
        ([1.0], "must return a list of 3 numbers, one a completion, not 1 of them"),
        (None, "not None"),
        ("123", "not '123'"),
        (iter([1, 2, 3]), "not <list_iterator"),
        ([0, 10**400, 0], "returned 1000.* for the completion 'yy'; return None or a number below 1e\\+38"),
        (["1", 0, 0], "returned '1' for the completion 'x'"),
        ([0, b"1.0", 0], "returned b'1.0' for the completion 'yy'"),
        ([0, [1.0], 0], r"returned \[1.0\] for the completion 'yy'"),
        ([torch.ones(2), 0, 0], r"returned tensor\(\[1., 1.\]\) for the completion 'x'"),
        ([Decimal("nan"), 0, 0], r"returned Decimal\('NaN'\) for the completion 'x'"),
        ([np.array(np.inf), 0, 0], r"returned array\(inf\) for the completion 'x'"),
        ([0, 0, -float("inf")], "returned -inf for the completion 'zzz'"),
        ([0, 1j, 0], "returned 1j for the completion 'yy'"),
        (torch.tensor([0.0, float("nan"), 0.0]), "returned nan for the completion 'yy'"),
        (np.zeros((3, 1)), r"returned \[0.0\] for the completion 'x'"),
    ):
        assert re.search(r"reward function mine .*" + message, refused(mine))


@pytest.mark.parametrize(
    "answer",
    [
        [1, None, 0.5],
        (1, None, 0.5),
        np.array([1, 0, 0.5]),
        torch.tensor([1, 0, 0.5]),
        [True, None, np.float32(0.5)],
        [np.bool_(True), np.int64(0), Fraction(1, 2)],
        [Decimal(1), None, Decimal("0.5")],
        [torch.tensor(1), np.array(0), torch.tensor(0.5)],
    ],
)
def test_right_answers(answer):
    functions = [lambda **_: answer, lambda **_: [1, 1, 1]]
    assert total_rewards(functions, PROMPTS, COMPLETIONS, COLUMNS)[0] == [2.0, 1.0, 1.5]


def test_weights_names_and_completions_that_are_not_scored():
    first, second = lambda **_: [1, None, 2], lambda **_: [3, None, None]
    totals, parts = total_rewards([first, second], PROMPTS, COMPLETIONS, COLUMNS, weights=[1.0, 0.5])
    assert totals[::2] == [2.5, 2.0] and np.isnan(totals[1])
    assert parts == {"<lambda>.0": [1.0, None, 2.0], "<lambda>.1": [3.0, None, None]}
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    assert repeat_columns(rows, 2) == {"answer": [1, 1, 2, 2]} and repeat_columns(rows) == {"answer": [1, 2]}


def test_rewards_that_add_up_to_more_than_a_float32():
    huge = [lambda **_: [0, 9e37, 0]] * 3
    with pytest.raises(SnugError, match="rewards of the completion 'yy' add up to 2.69"):
        total_rewards(huge, PROMPTS, COMPLETIONS, COLUMNS)


@pytest.mark.parametrize("kind", [ValueError, RecursionError, SystemExit])
def test_an_exception_is_named_with_its_place_and_its_traceback_is_kept(kind):
    calls = []

    def inner():
        raise kind("bad luck")

    def mine(prompts, completions, answer):
        calls.append(completions)
        inner()

    with pytest.raises(SnugError) as error:
        ask(mine, PROMPTS, COMPLETIONS, COLUMNS)
    line = inner.__code__.co_firstlineno + 1
    assert str(error.value) == f"reward function mine raised {kind.__name__}: 'bad luck' at test_reward.py:{line}"
    assert calls == [COMPLETIONS]  # a second call may cost money
    assert "in mine\n    inner()\n" in told(error.value) and told(error.value).endswith(f"\nerror: {error.value}")


def endless():
    while True:
        pass


def deaf():
    """Catches every Exception, again and again."""
    while True:
        try:
            time.sleep(1000)
        except Exception:
            pass


def reading():
    os.read(os.pipe()[0], 1)


def stubborn():
    """Catches everything, in a line that sleeps."""
    while True:
        try:
            time.sleep(1000)
        except:  # noqa: E722
            pass


def stubborn_twice():
    while True:
        try:
            try:
                time.sleep(1000)
            except BaseException:
                sum(range(10))
        except BaseException:
            sum(range(10))


def suppressing():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1000)


@pytest.mark.parametrize("how", [endless, deaf, reading, stubborn, stubborn_twice, suppressing])
def test_a_function_past_its_time_limit_is_named_and_its_place_is_kept(how, monkeypatch):
    monkeypatch.setattr(rewards, "AGAIN", 0.05)
    calls = []

    def mine(prompts, completions, answer):
        calls.append(completions)
        how()

    before = signal.getsignal(signal.SIGALRM), sys.gettrace()
    with pytest.raises(SnugError) as error:
        ask(mine, PROMPTS, COMPLETIONS, COLUMNS, timeout=0.2)
    assert str(error.value) == "reward function mine took longer than reward_timeout=0.2 seconds"
    assert f"in {how.__name__}\n" in told(error.value) and calls == [COMPLETIONS]
    assert (signal.getsignal(signal.SIGALRM), sys.gettrace()) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_alarms_of_the_function_and_of_its_caller():
    """math_verify sets its own inside; whoever has one outside has the same handler and the rest of its time afterwards."""

    def mine(prompts, completions, answer):
        rung = []
        before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.1)
        signal.signal(signal.SIGALRM, before)
        return [float(len(rung))] * len(completions)

    outside = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGALRM, outside)
    signal.setitimer(signal.ITIMER_REAL, 1000, 7)
    try:
        assert ask(mine, PROMPTS, COMPLETIONS, COLUMNS, timeout=30) == [1.0] * 3
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert signal.getsignal(signal.SIGALRM) is outside and 900 < left <= 1000 and interval == 7
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_limit_that_is_nearly_reached_leaves_nothing():
    """Whichever comes first, the result or the alarm: afterwards there is no alarm, and the handler is the one before."""
    before, ends = signal.getsignal(signal.SIGALRM), []

    def mine(prompts, completions):
        time.sleep(0.002)
        return [0.0]

    for _ in range(200):
        try:
            call(mine, ["a"], ["b"], {}, 0.0021)
            ends.append("result")
        except OutOfTime:
            ends.append("limit")
        assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert set(ends) <= {"result", "limit"}


@pytest.mark.parametrize("body, code", [("sum(itertools.repeat(1))", 1), ("return [0.0]", 0)])
def test_code_that_hears_no_signal_ends_the_process(body, code):
    """A loop in C never returns to the interpreter: after the grace the process is gone, and says where it was."""
    script = f"""
import itertools, time
from data import rewards
rewards.GRACE = 0.3
def mine(prompts, completions):
    {body}
rewards.ask(mine, ["a"], ["b"], {{}}, 0.2)
time.sleep(1)  # nothing is left of the limit
"""
    child = subprocess.run([sys.executable, "-c", script], cwd=HOME, capture_output=True, text=True, timeout=600)
    assert child.returncode == code, child.stderr
    assert ("Timeout" in child.stderr and "in mine" in child.stderr) == bool(code)


FUNCTIONS = """
import sys, time

def closing(prompts, completions, **columns):
    sys.stdout.close()
    return [float(len(text)) for text in completions]

def failing(prompts, completions, **columns):
    return [1 / 0]

calls = []

def stubborn(prompts, completions, **columns):
    calls.append(1)
    while len(calls) > 1:
        try:
            time.sleep(1000)
        except BaseException:
            pass
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def asked_with(tmp_path_factory):
    """-> a function: two iterations of grpo.py with one of FUNCTIONS -> its exit code, stdout, stderr, the run."""
    home = tmp_path_factory.mktemp("commands")
    (home / "mine.py").write_text(FUNCTIONS)
    words = "--digits=1 --n_layer=1 --n_embd=16 --batch_size=2 --group_size=2 --max_new_tokens=4 --max_iters=2"

    def asked_with(name, *more):
        funcs, folder = f"--reward_funcs=mine:{name}", home / "out" / name
        return *command(HOME / "grpo.py", *words.split(), funcs, f"--out_dir={folder}", *more, cwd=home), folder

    return asked_with


def test_a_function_that_closes_stdout_closes_no_console(asked_with):
    code, out, err, folder = asked_with("closing")
    assert (code, err) == (0, "") and "iter 1/2" in out and "GRPO is done" in out
    code, out, err = command(HOME / "evaluate.py", folder, "--num_prompts=4", cwd=folder.parent.parent)
    assert (code, err) == (0, "") and out.count("  pass@1 ") == 2


def test_the_traceback_of_a_function_is_in_log_txt_and_on_the_console(asked_with):
    code, _, err, folder = asked_with("failing", "--eval_prompts=0")
    said = "reward function failing raised ZeroDivisionError: 'division by zero' at mine.py:9"
    assert code == 2 and err.endswith(f"ZeroDivisionError: division by zero\nerror: {said}\n")
    assert "in failing\n    return [1 / 0]" in err and (folder / "log.txt").read_text().endswith(err)


def test_a_function_that_catches_everything_ends_a_run_that_is_saved(asked_with):
    code, _, err, folder = asked_with("stubborn", "--eval_prompts=0", "--reward_timeout=0.5", "--save_interval=0")
    assert code == 2 and err.endswith("\nerror: reward function stubborn took longer than reward_timeout=0.5 seconds\n")
    assert "saved after iteration 0" in (folder / "log.txt").read_text() and newest(folder).name == "checkpoint-000001"


ANYTHING = st.one_of(st.none(), st.floats(), st.integers(), st.text(), st.booleans(), st.complex_numbers())


@settings(max_examples=50, deadline=None)
@given(st.lists(ANYTHING, max_size=5))
def test_any_answer_is_taken_or_refused_by_name(answer):
    def mine(prompts, completions, answer):
        return given_answer

    given_answer = answer
    try:
        totals, parts = total_rewards([mine], PROMPTS, COMPLETIONS, COLUMNS)
    except SnugError as error:
        assert "mine" in str(error) or "add up to" in str(error)
    else:
        assert len(totals) == 3 and all(type(total) is float for total in totals)
        assert all(abs(total) < 1e38 or said is None for total, said in zip(totals, *parts.values(), strict=True))
