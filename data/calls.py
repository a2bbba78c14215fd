"""Call functions of the user: within a time limit, also `async def`; and say which one failed, and where.

    with blaming("reward function short", "reward_timeout=300"):
        reward = complete(partial(short, prompts=prompts, completions=completions), seconds=300)

In the main thread, where reward functions run, the limit is an alarm (SIGALRM). It stops Python code, regular
expressions and waiting, but not C code that never looks for signals. A function that sets alarms itself, as
math_verify does, replaces it. In another thread, where tools run, the function gets one of its own: the caller goes on
in time, and the function goes on in vain.

All coroutines share one event loop in a thread, as in TRL, so that they can share a client. One that blocks the loop
(time.sleep, requests) makes the others wait. Tests: tests/test_reward.py, tests/test_tools.py.
"""

import asyncio
import inspect
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from snug.options import SnugError

AGAIN = 1.0  # seconds between alarms after the first, for a function that catches it
LOCK = threading.Lock()


class OutOfTime(BaseException):
    """A function is late. It is no Exception, so `except Exception` in the function does not catch it."""


def complete(call: Callable, seconds: float):
    """What call() returns, also of an `async def`. Raises OutOfTime after `seconds` (0: no limit)."""
    if not seconds:
        answer = call()
    elif threading.current_thread() is threading.main_thread():
        answer = with_alarm(call, seconds)
    else:
        answer = in_a_thread(call, seconds)
    return awaited(answer, seconds)


def awaited(answer, seconds: float = 0.0):
    """The result of a coroutine. Anything else is one already."""
    if not inspect.iscoroutine(answer):
        return answer
    with LOCK:
        future = asyncio.run_coroutine_threadsafe(answer, event_loop())
    try:
        if wait([future], seconds or None).not_done:
            raise OutOfTime
        return future.result()
    finally:
        future.cancel()


@cache
def event_loop():
    loop = asyncio.new_event_loop()

    def work():
        while True:
            with suppress(BaseException):  # a coroutine's SystemExit ends run_forever
                loop.run_forever()

    threading.Thread(target=work, daemon=True).start()
    return loop


def with_alarm(call, seconds):
    def ring(number, frame):
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def in_a_thread(call, seconds):
    outcome = Future()

    def work():
        try:
            outcome.set_result(call())
        except KeyboardInterrupt:  # Ctrl-C reaches the main thread alone
            outcome.set_exception(RuntimeError("KeyboardInterrupt"))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if wait([outcome], seconds).not_done:
        raise OutOfTime
    return outcome.result()


@contextmanager
def blaming(what: str, limit: str, hint: str):
    """What is raised inside becomes a SnugError: what failed and at which line. The traceback is its note.

    limit: the option of the time limit, and its value. hint: what the function gets, which it may have mistaken.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = f"took longer than {limit} seconds"
        if not isinstance(error, OutOfTime):
            place = traceback.extract_tb(error.__traceback__)[-1]
            problem = (
                f"raised {type(error).__name__}: {str(error)[:200]!r} "
                f"at {Path(place.filename).name}:{place.lineno}"
            )
        if isinstance(error, KeyError | AttributeError | TypeError):
            problem += f"; {hint}"
        failure = SnugError(f"{what} {problem}")
        failure.add_note("".join(traceback.format_exception(error)).rstrip())
        raise failure from None


def name_of(function: Callable) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
