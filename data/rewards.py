"""Asking reward functions, which are other people's code: checked, timed, and named where they fail.

    function(prompts=[...], completions=[...], **columns) -> a list of numbers, or None for "nothing to say"

columns: the task's, each a list as long as completions, and `stopped` and `completion_ids`. A function that raises, returns
something else, or takes longer than reward_timeout ends the run with one line that names it and the completion it was
about; where that is not known, it is found by asking again, one completion at a time.

Left out: a process of its own. A function runs in the main thread, where it may use signal.alarm as it likes; it can
do whatever Python can, so name only code that you trust.
"""

import faulthandler
import math
import signal
import sys
import threading
import time
import traceback
from numbers import Real
from pathlib import Path

from options import SnugError

GRACE = 60.0  # seconds after which a function that does not even hear the signal ends the process, its stack on stderr


def total_rewards(functions, prompts, completions, columns, timeout=0.0, weights=()):
    """-> one float a completion: the functions' answers, weighted (default 1 each) and added up; and {function's name: its answers}.

    None adds nothing; a completion of which every function said None is not scored: NaN. timeout: seconds a function has; 0: any.
    Raises SnugError.
    """
    answers = [ask(function, prompts, completions, columns, timeout) for function in functions]
    totals = []
    for said in zip(*answers, strict=True):
        parts = [
            weight * reward
            for weight, reward in zip(weights or [1.0] * len(functions), said, strict=True)
            if reward is not None
        ]
        totals.append(sum(parts) if parts else math.nan)
    for total, completion in zip(totals, completions, strict=True):
        if abs(total) >= 1e38:  # float32 has no more
            raise SnugError(
                f"the rewards of the completion {completion!r:.60} add up to {total}; numbers below 1e38 are wanted"
            )
    names = [name_of(function) for function in functions]
    unique = [name if names.count(name) == 1 else f"{name}.{i}" for i, name in enumerate(names)]
    return totals, dict(zip(unique, answers, strict=True))


def ask(function, prompts, completions, columns, timeout=0.0):
    """A reward function's answer, refused with its name where it is not one finite number (or None) a completion."""
    try:
        rewards = call(function, prompts, completions, columns, timeout)
    except Failed as failure:
        raise SnugError(blame(function, prompts, completions, columns, timeout, failure)) from None
    name = name_of(function)
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != len(completions):
        seen = f"{len(rewards)} of them" if isinstance(rewards, list | tuple) else repr(rewards)[:60]
        raise SnugError(
            f"reward function {name} must return a list of {len(completions)} numbers, one a completion, not {seen}"
        )
    for text, reward in zip(completions, rewards, strict=True):
        if reward is not None and not (isinstance(reward, Real) and abs(reward) < 1e300):
            raise SnugError(
                f"reward function {name} returned {reward!r:.60} for the completion {text!r:.60}; a finite number or None is wanted"
            )
    return [reward if reward is None else float(reward) for reward in rewards]


class Failed(Exception):
    """What a reward function did, in words."""


def call(function, prompts, completions, columns, timeout):
    limit = TimeLimit(timeout)
    try:
        try:
            limit.start()
            return function(prompts=list(prompts), completions=list(completions), **columns)
        finally:
            limit.over = True
    except OutOfTime:
        raise Failed(f"took longer than reward_timeout={timeout:g} seconds") from None
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise Failed(
            f"raised {type(error).__name__}: {str(error)[:200]!r} at {Path(place.filename).name}:{place.lineno}"
        ) from None
    finally:
        limit.stop()


def blame(function, prompts, completions, columns, timeout, failure):
    """One line: the function, what it did, and the first completion with which it does it alone. Takes `timeout` at most, all in all."""
    left, most = timeout, len(completions)
    for i in range(most):
        one, started = slice(i, i + 1), time.monotonic()
        try:
            call(
                function, prompts[one], completions[one], {name: column[one] for name, column in columns.items()}, left
            )
        except Failed as alone:
            took = time.monotonic() - started
            if timeout and str(alone).startswith("took") and took < timeout / 2:
                break  # it was the ones before that took the time
            if str(alone).startswith("took"):
                alone = f"took longer than reward_timeout={timeout:g} seconds"
            return f"reward function {name_of(function)} {alone} for the completion {completions[i]!r:.60} of the prompt {prompts[i]!r:.60}"
        left = (
            max(timeout - (time.monotonic() - started) if i == 0 else left - (time.monotonic() - started), 1e-3)
            if timeout
            else 0.0
        )
    return f"reward function {name_of(function)} {failure} for {most} completions together, for none of them alone"


def name_of(function):
    return getattr(function, "__name__", repr(function))


class OutOfTime(BaseException):
    """Not an Exception: a reward function that catches those is to be interrupted too."""


class TimeLimit:
    """Raises OutOfTime in the main thread after `seconds`, and again every second until it is heard; 0: never.

    A watching thread sends the main one SIGUSR2, which interrupts a sleep or a read too, and leaves SIGALRM to whoever uses it.
    Code that holds the interpreter (a C library's endless loop) hears no signal: GRACE later the process ends.
    """

    def __init__(self, seconds):
        self.seconds, self.over = min(seconds, 10.0**6), False  # over: whoever is late, it no longer matters
        self.stopped, self.watcher = threading.Event(), None

    def start(self):
        if not self.seconds or threading.current_thread() is not threading.main_thread():
            return
        self.before = signal.signal(signal.SIGUSR2, self.late)
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True, file=sys.__stderr__)
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def stop(self):
        self.over = True
        if self.watcher is not None:
            self.stopped.set()
            self.watcher.join()
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGUSR2, self.before)

    def late(self, number, frame):
        if not self.over:
            raise OutOfTime

    def watch(self):
        wait = self.seconds
        while not self.stopped.wait(wait):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
            wait = 1.0
