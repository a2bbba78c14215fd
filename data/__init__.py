"""Tasks, one file each: prompts, demonstrations and rewards; their options; reward functions; scores of evaluations.

    task = make_task(settings)
    rows = task.prompts("train", range(0, 64))
    task.rewards([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])

task.py says what a task is. gym/ runs scorers that execute what they score. Nothing here imports torch.
Tests: tests/test_data.py.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from data.addition import Addition, AdditionOptions
from data.countdown import Countdown, CountdownOptions
from data.gsm8k import GSM8K
from data.gym.reasoning_gym import GymOptions, ReasoningGym
from data.jsonl import Jsonl
from data.rows import FileOptions, FileTask
from data.task import Task
from options import SnugError, did_you_mean, option

TASKS = {
    "addition": Addition,
    "countdown": Countdown,
    "gsm8k": GSM8K,
    "reasoning_gym": ReasoningGym,
    "jsonl": Jsonl,
}


@dataclass
class TaskOptions(AdditionOptions, CountdownOptions, FileOptions, GymOptions):
    """What the model learns and how it is scored."""

    task: str = option("addition", "the task: prompts, demonstrations and reward", choices=tuple(TASKS))
    demonstration_noise: float = option(
        0.0,
        "probability of an error in each carry (addition) or in each demonstration (countdown)",
        maximum=1,
    )
    format_reward: float = option(
        0.0,
        "gsm8k, reasoning_gym, countdown_form=tags: reward for an answer in the right form, even a wrong one",
    )
    chat: bool = option(False, "ask prompts as messages, in the tokenizer's chat template")
    system_prompt: str = option(
        "", "chat: system message before each prompt; empty: none, or the template's own"
    )
    eval_split: str = option(
        "test",
        "prompts to evaluate; tune: a tenth of the training prompts, not trained on",
        choices=("test", "tune"),
    )
    tokenizer: str = option(
        "bytes",
        "bytes (needs no files), gpt2, or a folder with a tokenizer.json. With init_from: that run's or folder's own",
    )


def make_task(settings: TaskOptions, demonstrations: bool = False) -> Task:
    """The task named settings.task. `settings` also has a `seed`. demonstrations=True: every row must have one (SFT).

    Raises SnugError if the options leave no usable task.
    """
    name = settings.task
    if name not in TASKS:
        raise SnugError(f"task={name!r} is not one of {', '.join(TASKS)}")
    for option_name, path in (("data_file", settings.data_file), ("test_file", settings.test_file)):
        if path and not issubclass(TASKS[name], FileTask):
            raise SnugError(
                f"{option_name}={path!r} is read by the tasks jsonl and gsm8k, and task is {name!r}"
            )
    if settings.system_prompt and not settings.chat:
        raise SnugError(f"system_prompt={settings.system_prompt!r:.60} is a message; add --chat")
    task = TASKS[name](settings, demonstrations)
    if settings.format_reward and not task.has_form:
        form = f"task={name!r} has no form of answer to reward"
        raise SnugError(f"format_reward={settings.format_reward}, but {form}; leave it out")
    task.survey()
    return task


def load_reward_function(spec: str) -> Callable:
    """ "module:function" -> that function, called like `Task.rewards`; it may return None for completions.

    The module is also looked for in the current directory. Raises SnugError if there is no such module or function.
    An error inside the module keeps its traceback.
    """
    name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in [*name.split("."), function_name]):
        raise SnugError(f"reward_funcs={spec!r}: write module:function, such as my_rewards:is_short")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last, so that a file there hides no other module
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            problem = f"no module {error.name} in {here} or on the Python path"
            raise SnugError(f"reward_funcs={spec!r}: {problem}") from None
        raise  # the module exists, but imports one that does not
    function = getattr(module, function_name, None)
    if function is None:
        hint = did_you_mean(function_name, dir(module))
        raise SnugError(f"reward_funcs={spec!r}: {name} has no {function_name}{hint}")
    if not callable(function):
        raise SnugError(
            f"reward_funcs={spec!r}: {function_name} is not a function but {function!r:.40}"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # not known of some that are written in C
        return function
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        said = f"{function_name} takes no **columns, and the file's columns are passed to it by name"
        raise SnugError(
            f"reward_funcs={spec!r}: {said}; write def {function_name}(prompts, completions, **columns)"
        )
    return function
