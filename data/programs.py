"""Run a program that a model wrote beside the tests of its task, each in a confined process of its own.

    verdict = judge(program="def f(x): return x + 1", setup="", names=["f"], tests=["assert f(1) == 2"], seconds=3)
    # {"passed": 1.0, "parsed": True, "ran": True, "error": ""}

The program's process never sees the tests, and the tests' process never executes the program. Each call goes through
this process as JSON: plain values only, which are numbers, text, booleans, None, lists, tuples, dicts and sets. So a
program that patches `assert`, defines `__eq__`, prints a verdict or exits early gains nothing: all that it can do is
to answer a call. Any other value that it returns becomes an object, which equals nothing.

    the tests' process          this one            the program's process
    assert f((1, 2)) == 3   ->  ["f", ...]      ->  f((1, 2)) returns 3
                            <-  3               <-

What a call changes in its arguments, and what it prints, the tests do not see.
Left out: tests that pass functions, or look at classes. Tests: tests/test_code.py.
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
from snug.sandbox import Result, Sandbox

MAX_ERROR = 300  # characters
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def judge(program: str, setup: str, names: Sequence[str], tests: Sequence[str], seconds: float) -> dict:
    """-> {"passed": the share of the tests, "parsed", "ran": booleans, "error": the first, in one line}.

    program: of the model. setup: code that the tests need. names: of the program's functions that they call.
    tests: statements; those with an assert count, and another one that fails. The program has `seconds` in all.
    Thread-safe; a thread has its own processes.
    """
    with sandbox(Program, seconds).conversation("serve") as tell:
        parsed, error = said(tell(program))
        ran, passed = error is None, 0.0
        if ran:
            # The tests may wait for the program as long as it has time.
            with sandbox(Checker, 2 * seconds).conversation("check") as check:
                passed, error = verdict_of(check, tell, [setup, names, tests])
    return dict(passed=passed, parsed=parsed is True, ran=ran, error=error or "")


def verdict_of(check, tell, message):
    """Carry calls and answers between both conversations -> (share of tests passed, the first error)."""
    while True:
        value, error = said(check(message))
        if not isinstance(value, list):  # it is no call
            return value or 0.0, error
        message = said(tell(value))


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
        parsed, problem = False, None
        try:
            code = compile(program, "program", "exec")
            parsed = True
            exec(code, namespace)
        except BaseException as error:
            problem = described(error)[:MAX_ERROR]
        answer = json.dumps([parsed, problem])
        while True:
            name, arguments, keywords = map(from_plain, ask(answer))
            try:
                answer = json.dumps([to_plain(namespace[name](*arguments, **keywords)), None])
            except BaseException as error:
                answer = json.dumps([None, f"{type(error).__name__}: {error}"[:MAX_ERROR]])


class Checker:
    """Executes tests. The functions that they test are in the other process."""

    def check(self, task, ask):
        setup, names, tests = task
        namespace = {"__name__": "tests"}
        passed, first = 0, ""
        counted = list(map(is_test, tests))
        try:
            exec(setup, namespace)
            namespace |= {name: remote(name, ask) for name in names}
            for test, counts in zip(tests, counted, strict=True):
                try:
                    exec(test, namespace)
                    passed += counts
                except BaseException as error:
                    first = first or f"{described(error)} in {test}"[:MAX_ERROR]
                    if not counts:  # the next ones stand on it
                        counted.append(True)
                        break
        except BaseException as error:
            first = first or described(error)[:MAX_ERROR]
        ask(json.dumps([passed / sum(counted), first]))


def remote(name, ask):
    """A function of the other process. Raises what it raised there, if that is one of Python's own exceptions."""

    def call(*arguments, **keywords):
        call = [to_plain(name), to_plain(arguments), to_plain(keywords)]
        value, problem = ask(json.dumps([call, None]))
        if problem is None:
            return from_plain(value)
        kind, _, text = problem.partition(": ")
        kind = getattr(builtins, kind, None)
        raises = isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration
        raise kind(text) if raises else RuntimeError(problem)

    return call


def is_test(statement: str):
    """Has it an assert that can fail, and is executed here? A function that has one is only defined."""
    tree = ast.parse(statement)
    if isinstance(tree.body[0], ast.FunctionDef | ast.ClassDef):
        return False
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
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
    return {"object": []}


def from_plain(value):
    """The inverse of `to_plain`. Raises an error for anything else."""
    if not isinstance(value, dict | list):
        return value
    [(name, items)] = value.items()
    if name == "dict":
        return {from_plain(key): from_plain(item) for key, item in items}
    return CONTAINERS[name](map(from_plain, items)) if name != "object" else object()


# ----------------------------------------------------------------------------------------------------------------------
# The processes of a thread

POOL, THREAD = ThreadPoolExecutor(min(8, os.cpu_count())), threading.local()


def sandbox(target, seconds) -> Sandbox:
    """This thread's, which has `target`. It dies with the thread that started it, so the threads of a pool stay."""
    boxes = vars(THREAD).setdefault("boxes", {})
    if (target, seconds) not in boxes:
        name = f"{target.__module__}:{target.__name__}"
        boxes[target, seconds] = Sandbox(name, timeout=seconds)
    return boxes[target, seconds]


def missing_layers() -> list[str]:
    """Start a sandbox -> the layers that do not work here."""
    box = sandbox(Program, 1.0)
    box.start()
    return box.missing
