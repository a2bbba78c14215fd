"""Call reward functions as TRL does: check what they return, limit their time, name the one that fails.

    function(prompts=[...], completions=[...], completion_ids=[...], **columns) -> a list of numbers or None, not scored

A prompt is a text, and its completion is one too; or it is messages, and its completion is [{"role": "assistant",
"content": text}]. With tools or an environment a completion is the messages of its episode, as in TRL; the answers of
tools and environments are among them (data/episodes.py). columns: the task's, each a list as long as completions, and
besides

    stopped        did the completion end by itself? (TRL does not have it)
    environments   the environment of each completion, if the run has one
    trainer_state  trainer_state.global_step of trainer_state.max_steps; a step is an iteration
    log_metric     log_metric("name", number): log.jsonl has the mean as metric/name, of evaluations as eval_metric/name
    log_extra      log_extra("column", values), a value for each completion: samples.jsonl has it

Each function gets copies, which it may change. The working directory is put back after it; so is the mode of gradients,
when the training goes on. `async def` functions run concurrently, after the others, with one time limit for all.

A function that raises, returns something else or takes longer than reward_timeout ends the run with one line that
names it. It is not called again, because a call may cost money. Its traceback is a note of the error: options and
runs/log.py show it.

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
from contextlib import chdir, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

from snug.options import SnugError

GRACE = 60.0  # seconds after the limit until the process ends, if no alarm can stop the function
AGAIN = 1.0  # seconds between alarms after the first
LARGEST = 1e25  # rewards with weights of up to 1e9 are added up and become float32, which ends at 3e38
OURS = {"environments", "trainer_state", "log_metric", "log_extra"}
ARGUMENTS = OURS | {"prompts", "completions", "completion_ids", "stopped"}


def repeat_columns(rows: list[dict], k: int = 1):
    """Rows -> columns, each value k times. k=2: [{"answer": 1}, {"answer": 2}] -> {"answer": [1, 1, 2, 2]}."""
    return {name: [row[name] for row in rows for _ in range(k)] for name in rows[0] if name != "prompt"}


class TrainerState(NamedTuple):
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
        prompts=prompts,
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
    answers = {}
    for i, function in enumerate(functions):
        with blaming([function], timeout, arguments):
            answers[i] = call(function, own_copy(arguments), timeout)
    waiting = [i for i, answer in answers.items() if inspect.isawaitable(answer)]
    if waiting:
        coroutines = dict(coroutines=[answers[i] for i in waiting])
        with blaming([functions[i] for i in waiting], timeout, arguments):
            answers |= zip(waiting, call(in_a_loop, coroutines, timeout), strict=True)
    rewards = []
    for i, function in enumerate(functions):
        with blaming([function], timeout, arguments):
            if isinstance(answers[i], Exception):
                raise answers[i]
            rewards.append(checked(function, answers[i], arguments["completions"]))
    return rewards


def own_copy(arguments: dict) -> dict:
    """A function may change its arguments. So it gets a copy of each completion's values; others see them unchanged."""
    return {
        name: value if name in OURS else [deepcopy(each) for each in value]
        for name, value in arguments.items()
    }


def in_a_loop(coroutines) -> list:
    """What these return or raise, in a thread of its own: a notebook has a loop in this one."""

    async def gather():
        return await asyncio.gather(*coroutines, return_exceptions=True)

    answers = []
    thread = threading.Thread(target=lambda: answers.extend(asyncio.run(gather())), daemon=True)
    thread.start()
    thread.join()
    return answers


@contextmanager
def blaming(functions, timeout: float, arguments: dict):
    """What is raised inside becomes a SnugError that names the functions and the line, with the traceback as a note.

    Afterwards the working directory is the one before."""
    try:
        with chdir("."):
            yield
    except SnugError:
        raise
    except (Exception, SystemExit, OutOfTime) as error:
        problem = f"took longer than reward_timeout={timeout:g} seconds"
        if not isinstance(error, OutOfTime):
            place = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"raised {type(error).__name__}: {str(error)[:200]!r}"
            problem += f" at {Path(place.filename).name}:{place.lineno}{hint_of(error, arguments)}"
        failure = SnugError(f"reward function {', '.join(map(name_of, functions))} {problem}")
        failure.add_note("".join(traceback.format_exception(error)).rstrip())
        raise failure from None


def hint_of(error: BaseException, arguments: dict) -> str:
    """The end of an error message: what there is, if the function may have expected something else."""
    if isinstance(error, KeyError):
        return f"; it gets {', '.join(arguments)}"
    if not isinstance(error, AttributeError | TypeError):
        return ""
    if isinstance(arguments["completions"][0], str):
        return "; here a completion is a text"
    return '; here a completion is messages, and its text is completion[0]["content"]'


def checked(function: Callable, rewards, completions: list) -> list[float | None]:
    """What a function returned -> a finite number or None per completion. Raises SnugError."""
    name = f"reward function {name_of(function)}"
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    count, is_list = len(completions), isinstance(rewards, list | tuple)
    if not is_list or len(rewards) != count:
        shown = f"{len(rewards)} of them" if is_list else repr(rewards)[:60]
        raise SnugError(f"{name} must return a list of {count} numbers, one per completion, not {shown}")
    numbers = []
    for completion, reward in zip(completions, rewards, strict=True):
        numbers.append(None if reward is None else as_float(reward))
        if reward is not None and not abs(numbers[-1]) < LARGEST:
            shown = f"{'the text ' if isinstance(reward, str) else ''}{reward!r:.60}"
            raise SnugError(
                f"{name} returned {shown} for the completion {completion!r:.60}; "
                f"return None or a number below {LARGEST:g}"
            )
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
    if timeout <= 0 or threading.current_thread() is not threading.main_thread():
        return function(**arguments)
    returned = False

    def late(number, frame):
        if not returned:  # the alarm and the result may come at the same time
            raise OutOfTime

    handler = signal.signal(signal.SIGALRM, late)
    faulthandler.dump_traceback_later(timeout + GRACE, exit=True, file=sys.__stderr__)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, timeout, AGAIN)
            return function(**arguments)
        finally:
            returned = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        faulthandler.cancel_dump_traceback_later()


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)
