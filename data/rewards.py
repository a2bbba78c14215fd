"""Call reward functions as TRL does: check what they return, limit their time, name the one that fails.

    function(prompts=[...], completions=[...], completion_ids=[...], **columns) -> a list of numbers or None, not scored

A prompt is a text, and its completion is one too; or it is messages, and its completion is [{"role": "assistant",
"content": text}]. With tools or an environment a completion is the messages of its episode, as in TRL; the answers of
tools and environments are among them (data/episodes.py). columns: the task's, each a list as long as completions, and
besides

    stopped        did the completion end by itself? (TRL does not have it)
    environments   the environment of each completion, if the run has one
    trainer_state  trainer_state.global_step of trainer_state.max_steps; a step is an iteration
    log_metric     log_metric("name", number): log.jsonl has the mean as metric/name; evaluations do not log it
    log_extra      log_extra("column", values), a value for each completion: samples.jsonl has it

`async def` functions run concurrently, after the others, with one time limit for all. A function that raises, returns
something else or takes longer than reward_timeout ends the run with one line that names it. It is not called again,
because a call may cost money. Its traceback is a note of the error: options and runs/log.py show it.

The time limit is an alarm (SIGALRM) in the main thread. A function that sets alarms itself, as math_verify does,
replaces it. Left out: reward models by name; a separate process. A function can do whatever Python can, so name only
code that you trust. Tests: tests/test_reward.py.
"""

import asyncio
import faulthandler
import inspect
import math
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from options import SnugError

GRACE = 60.0  # seconds after the limit until the process ends, if no alarm can stop the function
AGAIN = 1.0  # seconds between alarms after the first
LARGEST = 1e38  # rewards become float32
ARGUMENTS = {
    "prompts",
    "completions",
    "completion_ids",
    "environments",
    "stopped",
    "trainer_state",
    "log_metric",
    "log_extra",
}


def repeat_columns(rows: list[dict], k: int = 1):
    """Rows -> columns, each value k times. k=2: [{"answer": 1}, {"answer": 2}] -> {"answer": [1, 1, 2, 2]}."""
    return {name: [row[name] for row in rows for _ in range(k)] for name in rows[0] if name != "prompt"}


@dataclass
class TrainerState:
    """How far a run is, under TRL's names."""

    global_step: int = 0
    max_steps: int = 0


class Scores(NamedTuple):
    """What the functions said of N completions."""

    totals: list[float]  # the weighted sum of the functions' rewards; NaN: no function scored it
    by_function: dict[str, list]  # {function's name: its N rewards, None: not scored}
    extra: dict[str, list]  # of log_extra
    metrics: dict[str, list[float]]  # of log_metric


def as_completion(prompt: str | list[dict], completion: str | list[dict]):
    """A completion as reward functions get it: text behind text, messages behind messages; an episode's messages."""
    if isinstance(prompt, str) or isinstance(completion, list):
        return completion
    return [{"role": "assistant", "content": completion}]


def total_rewards(
    functions: list[Callable],
    prompts: list,
    completions: list[str] | list[list[dict]],
    columns: dict[str, list],
    timeout: float = 0.0,
    weights: Sequence[float] = (),
    state: TrainerState | None = None,
) -> Scores:
    """Call each function on the completions. weights: default 1 each.

    None adds nothing; if every function returns None for a completion, its total is NaN.
    timeout: seconds for each function; 0: no limit. Raises SnugError.
    """
    extra, metrics = {}, {}

    def log_extra(column, values):
        values = list(values)
        if len(values) != len(completions):
            raise ValueError(
                f"log_extra({column!r}) has {len(values)} values for {len(completions)} completions"
            )
        extra[str(column)] = values

    def log_metric(name, value):
        metrics.setdefault(str(name), []).append(float(value))

    arguments = columns | dict(
        prompts=list(prompts),
        completions=list(map(as_completion, prompts, completions)),
        trainer_state=state or TrainerState(),
        log_extra=log_extra,
        log_metric=log_metric,
    )
    rewards = call_all(functions, arguments, timeout)
    weights = weights or [1.0] * len(functions)
    totals = []
    for of_completion in zip(*rewards, strict=True):
        pairs = zip(weights, of_completion, strict=True)
        scored = [weight * reward for weight, reward in pairs if reward is not None]
        totals.append(sum(scored) if scored else math.nan)
    names = [name_of(function) for function in functions]
    unique = [name if names.count(name) == 1 else f"{name}.{i}" for i, name in enumerate(names)]
    return Scores(totals, dict(zip(unique, rewards, strict=True)), extra, metrics)


def call_all(functions: list[Callable], arguments: dict, timeout: float) -> list[list[float | None]]:
    """Each function's rewards, a finite number or None per completion. Raises SnugError that names the function."""
    answers, waiting = {}, {i: function for i, function in enumerate(functions) if is_async(function)}
    for i, function in enumerate(functions):
        if i not in waiting:
            with blaming([function], timeout):
                answers[i] = call(function, arguments, timeout)
    if waiting:
        together = partial(in_a_loop, list(waiting.values()))
        with blaming(waiting.values(), timeout):
            answers |= zip(waiting, call(together, arguments, timeout), strict=True)
    rewards = []
    for i, function in enumerate(functions):
        if isinstance(answers[i], Exception):
            with blaming([function], timeout):
                raise answers[i]
        rewards.append(checked(function, answers[i], arguments["completions"]))
    return rewards


def is_async(function: Callable) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def in_a_loop(functions, **arguments) -> list:
    """What these `async def` functions return or raise, in a thread of its own: a notebook has a loop in this one."""

    async def one(function):
        return await function(**arguments)

    async def gather():
        return await asyncio.gather(*map(one, functions), return_exceptions=True)

    answers = []
    thread = threading.Thread(target=lambda: answers.extend(asyncio.run(gather())), daemon=True)
    thread.start()
    thread.join()
    return answers


@contextmanager
def blaming(functions, timeout: float):
    """What is raised inside becomes a SnugError that names the functions and the line, with the traceback as a note."""
    try:
        yield
    except (Exception, SystemExit, OutOfTime) as error:
        problem = f"took longer than reward_timeout={timeout:g} seconds"
        if not isinstance(error, OutOfTime):
            place = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"raised {type(error).__name__}: {str(error)[:200]!r}"
            problem += f" at {Path(place.filename).name}:{place.lineno}"
        failure = SnugError(f"reward function {', '.join(map(name_of, functions))} {problem}")
        failure.add_note("".join(traceback.format_exception(error)).rstrip())
        raise failure from None


def checked(function: Callable, rewards, completions: list) -> list[float | None]:
    """What a function returned -> a finite number or None per completion. Raises SnugError."""
    name = f"reward function {name_of(function)}"
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    count = len(completions)
    if not isinstance(rewards, list | tuple) or len(rewards) != count:
        shown = f"{len(rewards)} of them" if isinstance(rewards, list | tuple) else repr(rewards)[:60]
        wanted = f"a list of {count} numbers, one per completion"
        raise SnugError(f"{name} must return {wanted}, not {shown}")
    numbers = []
    for completion, reward in zip(completions, rewards, strict=True):
        numbers.append(None if reward is None else as_float(reward))
        if reward is not None and not abs(numbers[-1]) < LARGEST:
            problem = f"returned {reward!r:.60} for the completion {completion!r:.60}"
            raise SnugError(f"{name} {problem}; return None or a number below {LARGEST:g}")
    return numbers


def as_float(reward):
    """Any number, also of NumPy or torch -> float. Text and everything else -> NaN."""
    try:
        return math.nan if isinstance(reward, str) else float(reward)
    except Exception:
        return math.nan


class OutOfTime(BaseException):
    """A reward function is late. It is no Exception, so `except Exception` in the function does not catch it."""


def call(function: Callable, arguments: dict[str, list], timeout: float):
    """What the function returns. Raises OutOfTime after `timeout` seconds (0: never).

    An alarm raises OutOfTime inside the function, and again every AGAIN seconds, in case the function catches it. A
    function that no alarm stops, such as a regular expression that runs for hours, ends the process after GRACE.
    """
    returned, limited = False, timeout > 0 and threading.current_thread() is threading.main_thread()

    def late(number, frame):
        if not returned:  # the alarm and the result may come at the same time
            raise OutOfTime

    if limited:
        handler = signal.signal(signal.SIGALRM, late)
        faulthandler.dump_traceback_later(timeout + GRACE, exit=True, file=sys.__stderr__)
    try:
        try:
            if limited:
                signal.setitimer(signal.ITIMER_REAL, timeout, AGAIN)
            return function(**arguments)
        finally:
            returned = True
    finally:
        if limited:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            faulthandler.cancel_dump_traceback_later()
        if sys.stdout.closed:  # by the function
            sys.stdout = open(1, "w", errors="replace", closefd=False)


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)
