"""Tasks, one file each: prompts, demonstrations and rewards; their options; reward functions; scores of evaluations.

    task = make_task(settings)
    rows = task.prompts("train", range(0, 64))
    task.rewards([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])

task.py says what a task is. tools.py has the functions that a model calls. Nothing here imports torch.
Tests: tests/test_data.py.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from data.addition import Addition, AdditionOptions
from data.code import Code, CodeOptions
from data.countdown import Countdown, CountdownOptions
from data.gsm8k import GSM8K
from data.jsonl import Jsonl
from data.lookup import Lookup
from data.reasoning_gym import GymOptions, ReasoningGym
from data.rewards import ARGUMENTS
from data.rows import FileOptions, FileTask
from data.task import Task
from snug.options import SnugError, did_you_mean, find_path, option, refuse_namesakes

TASKS = {
    "addition": Addition,
    "countdown": Countdown,
    "lookup": Lookup,
    "gsm8k": GSM8K,
    "reasoning_gym": ReasoningGym,
    "jsonl": Jsonl,
    "code": Code,
}


@dataclass
class TaskOptions(AdditionOptions, CountdownOptions, FileOptions, CodeOptions, GymOptions):
    """What the model learns and how it is scored."""

    task: str = option("addition", "the task: prompts, demonstrations and reward", choices=tuple(TASKS))
    demonstration_noise: float = option(
        0.0,
        "probability of an error: in each carry (addition), in each demonstration (others)",
        maximum=1,
    )
    chat: bool = option(False, "ask prompts as messages, in the tokenizer's chat template")
    system_prompt: str = option(
        "",
        "chat: system message of prompts without one; empty: none, or the template's own",
    )
    chat_template_kwargs: dict = option(
        {},
        'JSON, variables of the chat template: {"enable_thinking": false}; an export keeps them',
    )
    tokenizer: str = option(
        "bytes",
        "bytes, gpt2, or a folder with a tokenizer.json; with init_from its own",
    )


def make_task(settings: TaskOptions, demonstrations: bool = False) -> Task:
    """The task named settings.task. `settings` also has `seed` and `eval_prompts`.

    demonstrations=True: every row must have one (SFT). Raises SnugError if the options leave no usable task.
    """
    task = TASKS[settings.task](settings, demonstrations)
    reads = isinstance(task, FileTask)
    fits = dict(data_file=reads, test_file=reads, drop_long_prompts=reads, system_prompt=settings.chat)
    for name, it_fits in fits.items():
        value = getattr(settings, name)
        if value and not it_fits:
            needed = "--chat" if name == "system_prompt" else "--task=jsonl, or another task of a file"
            raise SnugError(
                f"{name}={value!r:.60} does not fit task={settings.task!r}, chat={settings.chat}; add {needed}"
            )
    task.survey()
    return task


def load_reward_function(spec: str, functions: dict[str, Callable], columns: Iterable[str]):
    """ "module:function" -> that function: of `functions`, which a caller has by these names, or of the module.

    The module is also looked for in the current directory. columns: of the task's rows. Raises SnugError if there is no
    such module or function, or if it wants other columns. An error inside the module keeps its traceback.
    """
    advice = (
        "write module:function, such as my_rewards:is_short; call a reward model in such a function"
    )
    function = imported(spec, "reward_funcs", advice, functions)
    try:
        inspect.signature(function).bind(**dict.fromkeys(sorted(ARGUMENTS | {*columns})))
    except TypeError as error:
        advice = (
            "it must take **columns, and every other argument needs a column of this name or a default"
        )
        raise SnugError(
            f"reward_funcs={spec!r}: {error}; {advice}; the rows have {', '.join(columns)}"
        ) from None
    return function


def imported(spec: str, option: str, advice: str, functions) -> Callable:
    """ "module:name" -> what a module has by this name, or `functions`. option: what the spec is of, for messages.

    advice: for a spec that is not of this form. Raises SnugError, as load_reward_function.
    """
    if spec in functions:
        return functions[spec]
    module_name, _, name = spec.partition(":")
    problem = f"{option}={spec!r}"
    if ".py:" in spec:
        raise SnugError(f"{problem}: name the module, not its file: {Path(module_name).stem}:{name}")
    if not all(word.isidentifier() for word in [*module_name.split("."), name]):
        raise SnugError(f"{problem}: {advice}")
    file = find_path(f"{module_name.partition('.')[0]}.py")  # perhaps above the run
    folder = str(file.resolve().parent) if file.exists() else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a file there hides no other module
    refuse_namesakes(Path(__file__).parents[1], [folder])
    try:
        with chdir("."):  # back behind it: the run's folders are relative to this one
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports one that does not
        where = f"in {folder} or on the Python path"
        raise SnugError(f"{problem}: no module {error.name} {where}") from None
    found = getattr(module, name, None)
    if not callable(found):
        hint = did_you_mean(name, dir(module))
        raise SnugError(f"{problem}: {module_name} has no function {name}{hint}")
    return found
