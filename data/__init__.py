"""Tasks: prompts, demonstrations and rewards; reward functions; the scores of an evaluation. One file a task.

    task = make_task(settings)
    rows = task.prompts("train", range(0, 64))
    task.rewards([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])

task.py says what a task is. gym/ has the scorers that execute what they score.
"""

import difflib
import importlib
import os
import sys

from data.addition import Addition
from data.countdown import Countdown
from data.gsm8k import GSM8K
from data.gym.reasoning_gym import ReasoningGym
from data.jsonl import Jsonl
from data.task import SURVEY_HITS, Task, as_messages, split_of
from options import SnugError

TASKS = {"addition": Addition, "countdown": Countdown, "gsm8k": GSM8K, "reasoning_gym": ReasoningGym, "jsonl": Jsonl}


def make_task(settings):
    """The task that settings.task names, with the TaskOptions and the seed of `settings` -> Task. Raises SnugError."""
    if settings.task not in TASKS:
        raise SnugError(f"task={settings.task!r} is not one of {', '.join(TASKS)}")
    task = TASKS[settings.task](settings)
    if settings.format_reward and len(task.reward_functions()) == 1:
        raise SnugError(
            f"format_reward={settings.format_reward}, but task={settings.task!r} wants its answers in no form of their own; leave it out"
        )
    task.survey()
    return task


def load_reward_function(spec):
    """The function that "module:function" names: `f(prompts, completions, **columns) -> list[float | None]`, as `Task.rewards`.

    The module is found in the current directory too. Raises SnugError where there is no such module or function; what
    goes wrong inside the module keeps its traceback.
    """
    name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in [*name.split("."), function_name]):
        raise SnugError(f"reward_funcs={spec!r}: write module:function, such as my_rewards:is_short")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file there shadows nothing
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name + ".").startswith(error.name + "."):
            raise SnugError(
                f"reward_funcs={spec!r}: there is no module {error.name} in {os.getcwd()} or on the Python path"
            ) from None
        raise  # it is there, and something that it imports is not
    function = getattr(module, function_name, None)
    if function is None:
        near = difflib.get_close_matches(function_name, dir(module), 1)
        raise SnugError(
            f"reward_funcs={spec!r}: {name} has no {function_name}" + (f"; did you mean {near[0]}?" if near else "")
        )
    if not callable(function):
        raise SnugError(f"reward_funcs={spec!r}: {function_name} is not a function but {function!r:.40}")
    return function
