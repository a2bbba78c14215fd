"""Reward functions that lie, raise, draw blanks or never come back: named, with their place, and never obeyed."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo
from data import calls
from data.rewards import TrainerState, call_all, repeat_columns, total_rewards
from helpers.errors import PanicException, assert_refused
from helpers.runs import tiny
from runs.checkpoint import newest
from runs.log import read_log
from runs.prepare import prepare
from runs.saver import Saver
from snug.options import SnugError, told

PROMPTS, COMPLETIONS, COLUMNS = ["a", "b", "c"], ["x", "yy", "zzz"], {"answer": [1, 2, 3]}
ARGUMENTS = dict(prompts=PROMPTS, completions=COMPLETIONS, **COLUMNS)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([1.0], "must return a list of 3 numbers, not 1$"),
        (None, "not None"),
        ([0, 10**400, 0], "returned 1000.* for the completion 'yy'; return None or a number below 1e\\+25"),
        ([0, 2e25, 0], "returned 2e\\+25 for the completion 'yy'"),
        ("abc", "must return a list of 3 numbers, not 'abc'"),
        ([1.0, "1.0", 0], "returned '1.0' for the completion 'yy'; return None or a number"),
        (np.array(["1.0", "0", "0"]), "returned '1.0' for the completion 'x'"),
        ([0, [1.0], 0], r"returned \[1.0\] for the completion 'yy'"),
        ([Decimal("nan"), 0, 0], r"returned Decimal\('NaN'\) for the completion 'x'"),
        ([0, 0, -float("inf")], "returned -inf for the completion 'zzz'"),
        (torch.tensor([0.0, float("nan"), 0.0]), "returned nan for the completion 'yy'"),
    ],
)
def test_a_wrong_reward_names_the_function_and_the_completion(wrong, message):
    def mine(prompts, completions, answer):
        return wrong

    assert_refused(r"^reward function mine .*" + message, call_all, [mine], ARGUMENTS, 0.0)


RETURNED = [(1, None, 0.5), np.array([1, 0, 0.5]), torch.tensor([1, 0, 0.5])]
RETURNED += [torch.tensor([1, 0, 0.5], requires_grad=True)]
RETURNED += [[True, np.float16(0), np.array(0.5)], [torch.tensor(True), torch.tensor(0), torch.tensor(0.5).bfloat16()]]
RETURNED += [[np.bool_(True), np.int64(0), Fraction(1, 2)], [torch.tensor(1), np.array(0), Decimal("0.5")]]


@pytest.mark.parametrize("returned", RETURNED)
def test_right_rewards(returned):
    functions = [lambda **_: returned, lambda **_: [1, 1, 1]]
    assert total_rewards(functions, PROMPTS, COMPLETIONS, COLUMNS)[0] == [2.0, 1.0, 1.5]


def test_weights_names_and_completions_that_are_not_scored():
    first, second = lambda **_: [1, None, 2], lambda **_: [3, None, None]
    totals, by_function, _, _ = total_rewards([first, second], PROMPTS, COMPLETIONS, COLUMNS, weights=[1.0, 0.5])
    assert totals[::2] == [2.5, 2.0] and np.isnan(totals[1])
    assert by_function == {"<lambda>.0": [1.0, None, 2.0], "<lambda>.1": [3.0, None, None]}
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    assert repeat_columns(rows, 2) == {"answer": [1, 1, 2, 2]} and repeat_columns(rows) == {"answer": [1, 2]}


def length(completions, n, **columns):
    return [n] * len(completions)


def test_a_partial_has_the_name_of_its_function():
    """Also one of a partial, of an object, of a method; two of one function are told apart."""
    functions = [partial(length, n=1), partial(partial(length, n=2), n=3), partial(Judge([], 4)), lambda **_: [5] * 3]
    found = total_rewards(functions, PROMPTS, COMPLETIONS, COLUMNS).by_function
    wanted = {"length.0": 1, "length.1": 3, "Judge": 4, "<lambda>": 5}
    assert {name: values[0] for name, values in found.items()} == wanted
    with pytest.raises(SnugError, match="^reward function length raised TypeError"):
        total_rewards([partial(length, m=1)], PROMPTS, COMPLETIONS, COLUMNS)


CHAT = [[{"role": "user", "content": text}] for text in PROMPTS]


def test_what_functions_get_and_log():
    """Texts behind texts, messages behind messages; the trainer's state; what they log."""
    seen = []

    def mine(prompts, completions, trainer_state, log_metric, log_extra, **columns):
        seen.append((prompts, completions, trainer_state.global_step, trainer_state.max_steps, columns))
        log_metric("length", torch.tensor(2.0))
        log_metric("length", 4)
        log_extra("parsed", (text[-1] for text in COMPLETIONS))
        return [0, 0, 0]

    for prompts in (PROMPTS, CHAT, [PROMPTS[0], *CHAT[1:]]):
        scores = total_rewards([mine], prompts, COMPLETIONS, COLUMNS, state=TrainerState(3, 9))
        assert scores.metrics == {"length": [2.0, 4.0]} and scores.extra == {"parsed": ["x", "y", "z"]}
    messages = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    assert seen[0] == (PROMPTS, COMPLETIONS, 3, 9, COLUMNS) and seen[1] == (CHAT, messages, 3, 9, COLUMNS)
    assert seen[2][1] == ["x", *messages[1:]]
    with pytest.raises(SnugError, match="raised TypeError: .*; it gets answer"):
        total_rewards([lambda log_metric, **_: log_metric("a", "1.0")], PROMPTS, COMPLETIONS, COLUMNS)
    with pytest.raises(SnugError, match="raised ValueError: .* shorter than"):
        total_rewards([lambda log_extra, **_: log_extra("a", [1])], PROMPTS, COMPLETIONS, COLUMNS)


def test_a_function_that_changes_its_arguments_changes_nothing_for_others():
    """Also two completions of one row, whose lists the columns share; async functions too. Environments are themselves."""
    cards, environments, seen = [1, [2]], [object(), object(), object()], []

    def changing(prompts, completions, cards, environments, **columns):
        seen.append([json.dumps([prompts, completions, cards]), environments])
        for card, prompt in zip(cards, prompts, strict=True):
            assert card.pop().pop() == 2 and prompt.pop()
        return [len(completions.pop(0)[0].pop("content")) for _ in range(3)]

    async def later(**columns):
        return changing(**columns)

    columns = dict(cards=[cards] * 3, environments=environments)
    functions = [changing, later, changing, later]
    assert total_rewards(functions, [CHAT[0]] * 3, COMPLETIONS, columns).totals == [4.0, 8.0, 12.0]
    assert len({text for text, _ in seen}) == 1 and cards == [1, [2]] and CHAT[0][0]["content"] == "a"
    assert all(each[i] is environments[i] for _, each in seen for i in range(3))


HINTS = {
    "object has no attribute 'split'.*; the first completion is .*'content': 'x'}.$": (CHAT, lambda c, _: c.split()),
    "; the first completion is 'x'$": (PROMPTS, lambda c, _: c[0]["content"]),
    "'levle'.*; it gets answer, level, prompts, completions, trainer_state,": (PROMPTS, lambda c, more: more["levle"]),
    r"at test_reward.py:\d+$": (PROMPTS, lambda c, _: 1 / 0),
}


@pytest.mark.parametrize("said", HINTS)
def test_an_error_says_what_the_function_gets(said):
    prompts, body = HINTS[said]

    def mine(completions, **columns):
        return [body(completion, columns) for completion in completions]

    assert_refused(said, total_rewards, [mine], prompts, COMPLETIONS, COLUMNS | dict(level=[1, 2, 3]))


def test_a_module_and_a_tool_that_change_the_working_folder_do_not_move_the_run(tmp_path, monkeypatch):
    """The module when it is imported, the environment in each episode, and a tool that is late before a save."""
    after = Saver.after

    def late(saver, *arguments):
        os.chdir(tmp_path / "elsewhere")
        after(saver, *arguments)

    monkeypatch.setattr(Saver, "after", late)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = """
import os
os.chdir("elsewhere")
class Rude:
    def reset(self, **columns):
        os.chdir(f"{os.path.dirname(__file__)}/elsewhere")
def mine(completions, **columns):
    return [float(i % 3) for i, _ in enumerate(completions)]
"""
    (tmp_path / "rude_module.py").write_text(source)
    settings = tiny(tmp_path, out_dir="run", init_from="", beta=0.0, max_iters=2, eval_prompts=0, save_interval=1)[1]
    options = dict(reward_funcs=["rude_module:mine"], environment="rude_module:Rude", report_to=["tensorboard"])
    grpo.main(prepare(replace(settings, **options)))
    assert os.getcwd() == str(tmp_path) and not list((tmp_path / "elsewhere").iterdir())
    assert newest("run").name == "checkpoint-000002" and len(read_log("run")) == 2
    assert json.loads(Path("run/settings.json").read_text())["out_dir"] == "run"


class Judge:
    """An `async def` object."""

    def __init__(self, loops, number):
        self.loops, self.number = loops, number

    async def __call__(self, completions, **columns):
        self.loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.001)
        return [self.number, None, len(completions)]


def test_async_functions_have_one_loop():
    """As in TRL, so that they can share a client."""
    loops = []
    functions = [Judge(loops, 5), lambda **_: [1, 1, 1], Judge(loops, 7)]
    scores = total_rewards(functions, PROMPTS, COMPLETIONS, COLUMNS, 30)
    assert scores.totals == [13.0, 1.0, 7.0]
    assert scores.by_function == {"Judge.0": [5, None, 3], "<lambda>": [1, 1, 1], "Judge.2": [7, None, 3]}

    async def in_a_notebook():  # which has a loop of its own
        return total_rewards(functions, PROMPTS, COMPLETIONS, COLUMNS).totals

    assert asyncio.run(in_a_notebook()) == scores.totals and len(loops) == 4 and len({*loops}) == 1


KINDS = [ValueError, RecursionError, SystemExit, PanicException, GeneratorExit, asyncio.CancelledError]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_is_named_with_its_place_and_its_traceback_is_kept(kind):
    calls = []

    def inner():
        raise kind("bad luck")

    def mine(prompts, completions, answer):
        calls.append(completions)
        inner()

    with pytest.raises(SnugError) as error:
        call_all([mine], ARGUMENTS, 0.0)
    line = inner.__code__.co_firstlineno + 1
    assert str(error.value) == f"reward function mine raised {kind.__name__}: 'bad luck' at test_reward.py:{line}"
    assert calls == [COMPLETIONS]  # a second call may cost money
    assert "in mine\n    inner()\n" in told(error.value) and told(error.value).endswith(f"\nerror: {error.value}")


@pytest.mark.parametrize("error", [SystemExit(3), PanicException("no")], ids=repr)
@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_an_async_function_that_fails_is_named_and_the_next_one_works(error, seconds):
    """Also where asyncio ends its loop: at SystemExit."""

    async def bad(**_):
        raise error

    with pytest.raises(SnugError, match=f"^reward function bad raised {type(error).__name__}: ") as said:
        total_rewards([bad], PROMPTS, COMPLETIONS, COLUMNS, seconds)
    assert told(said.value).startswith("Traceback") and "\n" not in str(said.value)
    assert total_rewards([Judge([], 5)], PROMPTS, COMPLETIONS, COLUMNS, 30).totals[0] == 5


def test_ctrl_c_in_a_reward_function_is_none_of_its_errors():
    with pytest.raises(KeyboardInterrupt):
        total_rewards([lambda **_: signal.raise_signal(signal.SIGINT)], PROMPTS, COMPLETIONS, COLUMNS, 30)


def deaf():
    """Catches every Exception, again and again."""
    while True:
        with contextlib.suppress(Exception):
            time.sleep(1000)


def stubborn():
    """Catches the first alarm."""
    with contextlib.suppress(BaseException):
        time.sleep(9)
    time.sleep(9)


def backtracking():
    re.match("(a*)*b", "a" * 40)


@pytest.mark.parametrize("how", [deaf, stubborn, backtracking])
def test_a_function_past_its_time_limit_is_named_and_its_place_is_kept(how, monkeypatch):
    monkeypatch.setattr(calls, "AGAIN", 0.05)
    called = []

    def mine(prompts, completions, answer):
        called.append(completions)
        how()
        return [1, 1, 1]

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(SnugError) as error:
        call_all([mine], ARGUMENTS, timeout=0.1)
    assert str(error.value) == "reward function mine took longer than reward_timeout=0.1 seconds"
    assert f"in {how.__name__}\n" in told(error.value) and called == [COMPLETIONS]
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_function_with_alarms():
    """math_verify sets its own inside."""

    def mine(prompts, completions, answer):
        rung = []
        before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.1)
        signal.signal(signal.SIGALRM, before)
        return [float(len(rung))] * len(completions)

    before = signal.getsignal(signal.SIGALRM)
    assert call_all([mine], ARGUMENTS, 30) == [[1.0] * 3]
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
