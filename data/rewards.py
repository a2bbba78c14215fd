"""Call reward functions as TRL does: check what they return, limit their time, name the one that fails.

    function(prompts=[...], completions=[...], completion_ids=[...], **columns) -> a list of numbers or None, not scored

A prompt is a text, and its completion is one too; or it is messages, and its completion is [{"role": "assistant",
"content": text}]. With tools or an environment a completion is the messages of its episode, as in TRL; the answers of
tools and environments are among them (data/episodes.py). columns: the task's, each a list as long as completions, and
besides

    stopped        did the completion end by itself? (TRL does not have it)
    environments   the environment of each completion, if the run has one
    trainer_state  trainer_state.global_step of trainer_state.max_steps; a step is an iteration
    log_metric     log_metric("name", number): log.jsonl has the mean as metric/name
    log_extra      log_extra("column", values), a value for each completion: samples.jsonl has it

Each function gets copies, which it may change. The working directory is put back after them; so is the mode of
gradients, when the training goes on. `async def` functions work too, one after the other: gather requests inside one.

A function that raises, returns something else or takes longer than reward_timeout ends the run with one line that
names it. It is not called again, because a call may cost money. Its traceback is a note of the error: options and
runs/log.py show it. calls.py has the time limit.

Left out: reward models by name; a separate process. A function can do whatever Python can, so name only code that you
trust. Tests: tests/test_reward.py.
"""

import math
from contextlib import chdir, suppress
from copy import deepcopy
from functools import partial
from typing import NamedTuple

from data.calls import blaming, complete, name_of
from snug.options import SnugError

LARGEST = 1e25  # rewards with weights of up to 1e9 are added up and become float32, which ends at 3e38
OURS = {"environments", "trainer_state", "log_metric", "log_extra"}
ARGUMENTS = OURS | {"prompts", "completions", "completion_ids", "stopped"}


def repeat_columns(rows, k=1):
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


def total_rewards(
    functions,
    prompts,
    completions,
    columns,
    timeout=0.0,
    weights=(),
    state=None,
) -> Scores:
    """Call each function on N completions. columns: {name: N values}. weights: default 1 each. state: a TrainerState.

    None adds nothing; if every function returns None for a completion, its total is NaN.
    timeout: seconds for each function; 0: no limit. Raises SnugError.
    """
    extra, metrics = {}, {}

    def log_extra(column, values):
        extra[str(column)] = [value for _, value in zip(prompts, values, strict=True)]

    def log_metric(name, value):
        metrics.setdefault(str(name), []).append(float(0 + value))

    # Text behind text, messages behind messages; an episode is messages.
    as_completions = [
        each
        if isinstance(prompt, str) or isinstance(each, list)
        else [{"role": "assistant", "content": each}]
        for prompt, each in zip(prompts, completions, strict=True)
    ]
    arguments = columns | dict(
        prompts=prompts,
        completions=as_completions,
        trainer_state=state or TrainerState(),
        log_extra=log_extra,
        log_metric=log_metric,
    )
    rewards = call_all(functions, arguments, timeout)
    weights = weights or [1.0] * len(functions)
    totals = []
    for of_completion in zip(*rewards, strict=True):
        scored = [
            weight * reward
            for weight, reward in zip(weights, of_completion, strict=True)
            if reward is not None
        ]
        totals.append(sum(scored) if scored else math.nan)
    names = list(map(name_of, functions))
    unique = [name if names.count(name) == 1 else f"{name}.{i}" for i, name in enumerate(names)]
    return Scores(totals, dict(zip(unique, rewards, strict=True)), extra, metrics)


def call_all(functions, arguments, timeout):
    """Each function's rewards, a finite number or None per completion. Raises SnugError that names the function."""
    completions = arguments["completions"]
    hint = f"it gets {', '.join(arguments)}; the first completion is {completions[0]!r:.80}"

    rewards = []
    with chdir("."):
        for function in functions:
            name = f"reward function {name_of(function)}"
            with blaming(name, f"reward_timeout={timeout:g}", hint):
                own = {  # a copy of each completion's values, which the function may change
                    column: value if column in OURS else list(map(deepcopy, value))
                    for column, value in arguments.items()
                }
                answer = complete(partial(function, **own), timeout)
            rewards.append(checked(name, answer, completions))
    return rewards


def checked(name, rewards, completions):
    """What the function of this name returned -> a finite number or None per completion. Raises SnugError."""
    count = len(completions)
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != count:
        found = len(rewards) if isinstance(rewards, list) else rewards
        raise SnugError(f"{name} must return a list of {count} numbers, not {found!r:.60}")
    numbers = []
    for completion, reward in zip(completions, rewards, strict=True):
        number = None if reward is None else math.nan
        with suppress(Exception):  # None; no number, such as "1.0", which float alone reads
            number = float(0 + reward)
        numbers.append(number)
        if number is not None and not abs(number) < LARGEST:
            raise SnugError(
                f"{name} returned {reward!r:.60} for the completion {completion!r:.60}; return None or a number "
                f"below {LARGEST:g}"
            )
    return numbers
