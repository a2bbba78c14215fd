"""Reward functions that lie, raise, draw blanks or never come back: named, with their completion, and never obeyed."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.rewards import Failed, ask, call, total_rewards
from options import SnugError

PROMPTS, COMPLETIONS, COLUMNS = ["a", "b", "c"], ["x", "yy", "zzz"], {"answer": [1, 2, 3]}


def refused(function, timeout=0.0):
    with pytest.raises(SnugError) as error:
        ask(function, PROMPTS, COMPLETIONS, COLUMNS, timeout)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "answer, message",
    [
        ([1.0], "must return a list of 3 numbers, one a completion, not 1 of them"),
        ([1.0] * 4, "not 4 of them"),
        (None, "not None"),
        (1.0, "not 1.0"),
        ("123", "not '123'"),
        ({0: 1, 1: 2, 2: 3}, "not {0: 1"),
        ([0, 10**400, 0], "returned 1000.* for the completion 'yy'"),
        (["1", 0, 0], "returned '1' for the completion 'x'"),
        ([0, float("nan"), 0], "returned nan for the completion 'yy'"),
        ([0, 0, -float("inf")], "returned -inf for the completion 'zzz'"),
        ([0, [1], 0], r"returned \[1\] for the completion 'yy'"),
        ([0, 1j, 0], "returned 1j for the completion 'yy'"),
        (torch.tensor([0.0, float("nan"), 0.0]), "returned nan for the completion 'yy'"),
        (np.zeros((3, 1)), r"returned \[0.0\] for the completion 'x'"),
        (iter([1, 2, 3]), "not <list_iterator"),
    ],
)
def test_a_wrong_answer_names_the_function_and_the_completion(answer, message):
    def mine(prompts, completions, answer):
        return wrong

    wrong = answer
    import re

    assert re.search(r"reward function .*mine .*" + message, refused(mine))


@pytest.mark.parametrize(
    "answer",
    [[1, None, 0.5], (1, None, 0.5), np.array([1, 0, 0.5]), torch.tensor([1, 0, 0.5]), [True, None, np.float32(0.5)]],
)
def test_right_answers(answer):
    assert total_rewards([lambda **_: answer, lambda **_: [1, 1, 1]], PROMPTS, COMPLETIONS, COLUMNS)[0] == [
        2.0,
        1.0,
        1.5,
    ]


def test_rewards_that_add_up_to_more_than_a_float32():
    huge = [lambda **_: [0, 9e37, 0]] * 3
    with pytest.raises(SnugError, match="rewards of the completion 'yy' add up to 2.69"):
        total_rewards(huge, PROMPTS, COMPLETIONS, COLUMNS)


@pytest.mark.parametrize(
    "kind", [ValueError, ZeroDivisionError, KeyError, RecursionError, MemoryError, SystemExit, AssertionError]
)
def test_an_exception_names_the_sample(kind):
    def mine(prompts, completions, answer):
        if "yy" in completions:
            raise kind("bad luck")
        return [0.0] * len(completions)

    message = refused(mine)
    assert (
        "mine raised " + kind.__name__ in message
        and "for the completion 'yy' of the prompt 'b'" in message
        and "test_reward.py:" in message
    )


def test_an_exception_of_all_together():
    def mine(prompts, completions, answer):
        if len(completions) > 1:
            raise ValueError("too many")
        return [0.0]

    assert (
        "raised ValueError: 'too many'" in (message := refused(mine))
        and "3 completions together, for none of them alone" in message
    )


def endless(completions):
    while "yy" in completions:
        pass


def asleep(completions):
    if "yy" in completions:
        time.sleep(1000)


def deaf(completions):
    """Catches every Exception, again and again."""
    while "yy" in completions:
        try:
            time.sleep(1000)
        except Exception:
            pass


def reading(completions):
    if "yy" in completions:
        import os

        os.read(os.pipe()[0], 1)


@pytest.mark.parametrize("how", [endless, asleep, deaf, reading])
def test_a_function_past_its_time_limit_is_named_with_the_sample(how):
    def mine(prompts, completions, answer):
        how(completions)
        return [0.0] * len(completions)

    before = signal.getsignal(signal.SIGUSR2)
    assert "mine took longer than reward_timeout=0.2 seconds for the completion 'yy'" in refused(mine, timeout=0.2)
    assert signal.getsignal(signal.SIGUSR2) is before and threading.active_count() < 20


def test_a_function_may_use_alarms_of_its_own():
    """As math_verify does."""

    def mine(prompts, completions, answer):
        rung = []
        before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.1)
        signal.signal(signal.SIGALRM, before)
        return [float(len(rung))] * len(completions)

    assert ask(mine, PROMPTS, COMPLETIONS, COLUMNS, timeout=30) == [1.0] * 3


def test_a_limit_that_is_nearly_reached_leaves_nothing():
    """Whichever comes first, the answer or the signal: afterwards no signal comes, and the handler is the one before."""
    before, ends = signal.getsignal(signal.SIGUSR2), []

    def mine(prompts, completions):
        time.sleep(0.002)
        return [0.0]

    for _ in range(200):
        try:
            call(mine, ["a"], ["b"], {}, 0.002)
            ends.append("answer")
        except Failed:
            ends.append("limit")
        assert signal.getsignal(signal.SIGUSR2) is before
    assert set(ends) <= {"answer", "limit"} and threading.active_count() < 20
    time.sleep(1.2)  # the second signal would come after a second


def test_looking_for_the_sample_takes_no_longer_than_the_limit():
    def slow(prompts, completions, answer):
        time.sleep(0.05 * len(completions))
        return [0.0] * len(completions)

    many, started = [str(i) for i in range(40)], time.monotonic()
    with pytest.raises(
        SnugError, match=r"slow took longer than reward_timeout=0.3 seconds for 40 completions together"
    ):
        ask(slow, many, many, {"answer": many}, 0.3)
    assert time.monotonic() - started < 5


def test_code_that_hears_no_signal_ends_the_process(tmp_path):
    """A C call that holds the interpreter: after the grace the process is gone, and says where it was."""
    code = f"""
import ctypes, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from data import rewards as reward
reward.GRACE = 0.3
def mine(prompts, completions):
    ctypes.PyDLL(None).usleep(900_000_000)  # PyDLL keeps the lock
reward.ask(mine, ["a"], ["b"], {{}}, 0.2)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 1 and "Timeout" in child.stderr and "in mine" in child.stderr


@given(
    st.lists(
        st.one_of(st.none(), st.floats(), st.integers(), st.text(), st.booleans(), st.complex_numbers()), max_size=5
    )
)
def test_any_answer_is_taken_or_refused_by_name(answer):
    def mine(prompts, completions, answer):
        return given_answer

    given_answer = answer
    try:
        rewards, parts = total_rewards([mine], PROMPTS, COMPLETIONS, COLUMNS)
    except SnugError as error:
        assert "mine" in str(error) or "add up to" in str(error)
    else:
        assert len(rewards) == 3 and all(type(reward) is float for reward in rewards)
        assert all(abs(reward) < 1e38 or said is None for reward, said in zip(rewards, *parts.values(), strict=True))
