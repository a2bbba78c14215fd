"""Run a program that a model wrote beside the tests of its task, each in a confined process of its own.

    verdict = judge(program="def f(x): return x + 1", setup="", names=["f"], tests=["assert f(1) == 2"], seconds=3)
    # {"passed": 1.0, "error": ""}

The program's process never sees the tests, and the tests' process never executes the program. Each call goes through
this process as JSON: plain values only, which are numbers, text, bytes, booleans, None, lists, tuples, dicts and sets.
So a program that patches `assert`, defines `__eq__`, prints a verdict or exits early gains nothing: all that it can do
is to answer a call. Any other value that it returns becomes an object, which equals nothing.

    the tests' process          this one            the program's process
    assert f((1, 2)) == 3   ->  ["f", ...]      ->  f((1, 2)) returns 3
                            <-  3               <-

What the program raises arrives as the nearest of Python's own exceptions, with its args. A test fails, whatever it
catches, if a call of it has no answer: the program has no such function, or a message is longer than a MiB of JSON or
is none. If the program's process ends or is late, this test and all behind it fail, and those before it count.

What a call changes in its arguments, and what it prints, the tests do not see.
Left out: tests that pass functions, or look at classes of the program. Tests: tests/test_code.py.
"""

import ast
import builtins
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from numbers import Integral, Real

from snug.options import described
from snug.sandbox import LONGEST, Result, Sandbox

MAX_ERROR = 300  # characters
POOL = ThreadPoolExecutor(min(8, os.cpu_count()))  # each thread has its own processes
THREAD = threading.local()
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes}


def judge(program: str, setup: str, names: Sequence[str], tests: Sequence[str], seconds: float) -> dict:
    """-> {"passed": the share of the tests, "error": the first, in one line}.

    program: of the model. setup: code that the tests need. names: of the program's functions that they call.
    tests: statements; those with an assert count, and another one that fails. The program has `seconds` in all.
    Thread-safe; a thread has its own processes.
    """
    with of_thread(Program, seconds).conversation("serve") as tell:
        _, error = said(tell(program))
        passed = 0.0
        if error is None:
            # The tests may wait for the program as long as it has time.
            with of_thread(Checker, 2 * seconds).conversation("check") as check:
                passed, error = verdict_of(check, tell, [setup, names, tests])
    return dict(passed=passed, error=error or "")


def of_thread(target: type, seconds: float) -> Sandbox:
    """This thread's Sandbox of a class without arguments. It dies with the thread that started it: use a pool's."""
    boxes = vars(THREAD).setdefault("boxes", {})
    new = Sandbox(
        f"{target.__module__}:{target.__name__}", timeout=seconds
    )  # it starts with its first request
    return boxes.setdefault((target, seconds), new)


def verdict_of(check, tell, message):
    """Carry calls and answers between both conversations -> (share of tests passed, the first error).

    A lost process ends both, and the tests' process has no word in it: a test may catch all that is raised there.
    """
    passed = 0.0
    while True:
        value, error = said(check(message))
        if value is None:  # the tests' process is lost
            return passed, error
        call, passed = value
        if call is None:
            return passed, error
        message, lost = said(tell(call))
        if lost:
            return passed, error or lost


def said(result: Result):
    """What a process says -> (a value, error or None). It may say anything."""
    with suppress(ValueError, TypeError, RecursionError):
        value, error = json.loads(result.value)
        return value, error and str(error)[:MAX_ERROR]
    return None, result.error or "it says no JSON"


# ----------------------------------------------------------------------------------------------------------------------
# What lives in the confined processes


class Program:
    """Executes what a model wrote, and then calls its functions."""

    def serve(self, program, ask):
        namespace = {"__name__": "program"}
        problem = None
        try:
            exec(compile(program, "program", "exec"), namespace)
        except BaseException as error:
            problem = described(error)[:MAX_ERROR]
        answer = json.dumps([None, problem])
        while True:
            name, arguments, keywords = from_plain(ask(answer))
            try:
                value, how = NameError(f"name {name!r} is not defined"), "unanswered"
                if name in namespace:
                    value, how = namespace[name](*arguments, **keywords), "returned"
            except BaseException as error:
                value, how = error, "raised"
            try:
                answer = sent(value, how)
            except BaseException as error:
                answer = sent(RuntimeError(described(error)[:MAX_ERROR]), "unanswered")


class Checker:
    """Executes tests. The functions that they test are in the other process."""

    def check(self, task, ask):
        setup, names, tests = task
        namespace = {"__name__": "tests"}
        passed, first, unanswered = 0, "", []
        counted = list(map(is_test, tests))

        def remote(name):
            def call(*arguments, **keywords):
                unanswered.append(name)
                message = sent([name, arguments, keywords], passed / sum(counted), first)
                value, how = ask(message)
                value = from_plain(value)
                if how != "unanswered":
                    unanswered.pop()
                if how == "returned":
                    return value
                # In all(map(f, ...)) it would be the end, as if the others were true.
                if isinstance(value, StopIteration) and "StopIteration" not in setup + test:
                    raise RuntimeError("StopIteration")
                raise value

            return call

        try:
            exec(setup, namespace)
            namespace |= {name: remote(name) for name in names}
            for test, counts in zip(tests, counted, strict=True):
                try:
                    unanswered.clear()
                    exec(test, namespace)
                    if unanswered:  # and the test caught what was raised
                        raise RuntimeError(f"no answer to a call of {unanswered[0]}")
                    passed += counts
                except BaseException as error:
                    first = first or f"{described(error)} in {test}"[:MAX_ERROR]
                    if not counts:  # the next ones stand on it
                        counted.append(True)
                        break
        except BaseException as error:
            first = first or described(error)[:MAX_ERROR]
        ask(sent(None, passed / sum(counted), first))


def sent(value, mark, error=None):
    """-> the message [[value, mark], error]. Raises an error if the value is nested too deeply or too long."""
    text = json.dumps([[to_plain(value), mark], error])
    if len(json.dumps(text)) > LONGEST - 99:  # as text in a message
        raise ValueError(f"a value is longer than {LONGEST:,} bytes of JSON")
    return text


def is_test(statement: str):
    """Has it an assert that can fail, and is executed here? A function that has one is only defined."""
    body = ast.parse(statement).body
    done = [part for part in body if not isinstance(part, ast.FunctionDef | ast.ClassDef)]
    asserts = [node for part in done for node in ast.walk(part) if isinstance(node, ast.Assert)]
    return any(not isinstance(node.test, ast.Constant) for node in asserts)


def to_plain(value):
    """A value -> as JSON has it: {1: (2.5, "x")} becomes {"dict": [[1, {"tuple": [2.5, "x"]}]]}."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):  # NumPy's, too
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, dict):
        return {"dict": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: list(map(to_plain, value))}
    if isinstance(value, BaseException):
        own = (kind.__name__ for kind in type(value).__mro__ if kind.__module__ == "builtins")
        return {"error": [next(own), to_plain(value.args)]}
    return {"object": []}


def from_plain(value):
    """The inverse of `to_plain`. Raises an error for anything else."""
    if not isinstance(value, dict | list):
        return value
    [(name, items)] = value.items()
    if name == "error":
        kind, arguments = getattr(builtins, items[0]), from_plain(items[1])
        return kind(*arguments) if issubclass(kind, BaseException) else object()
    if name == "dict":
        return {from_plain(key): from_plain(item) for key, item in items}
    return CONTAINERS[name](map(from_plain, items)) if name != "object" else object()
