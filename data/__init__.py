"""Tasks, one file each, with options of their own; reward functions; scores of evaluations.

    task = make_task(settings)
    rows = task.prompts("train", range(0, 64))
    task.rewards([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])

task.py says what a task is. tools.py has the functions that a model calls. Nothing here imports torch.
Tests: tests/test_data.py.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import chdir
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path

from data.rewards import ARGUMENTS
from data.task import NoOptions, Task
from snug.home import HOME
from snug.options import KINDS, OWN, SnugError, did_you_mean, fields, find_path, option, type_of

TASKS = {  # a short name -> its class in the module of this name here, or module:Class
    "addition": "Addition",
    "gsm8k": "examples.gsm8k:GSM8K",
    "jsonl": "Jsonl",
}


def find_task(name: str, run: str | Path = "") -> type[Task]:
    """A name of TASKS, or "module:Class". run: a run's folder; the module may be above it. Raises SnugError."""
    place = TASKS.get(name, name)
    if name in TASKS and ":" not in place:
        return getattr(import_module(f"{__name__}.{name}"), place)
    cls = imported(place, "task", "my_tasks:Letters", run=run)
    if not (inspect.isclass(cls) and issubclass(cls, Task)):
        raise SnugError(f"task={name!r} is no task; derive the class from snug.Task")
    return cls


@cache
def joined(cls, task: str, own: type):
    """A class with the options of `cls` and those of a task, `own`."""
    if not is_dataclass(own) or any(
        not field.metadata or type_of(own, name)[0] not in KINDS for name, field in fields(own).items()
    ):
        raise SnugError(
            f"task={task!r}: its options must be a dataclass of fields such as n: int = option(3, 'meaning')"
        )
    if shared := fields(own).keys() & (fields(cls).keys() | {*dir(cls)}):
        raise SnugError(f"task={task!r}: {min(shared)} is an option already; rename the task's")
    values = dict(task=task, own_options=own, without_task=cls, __doc__=cls.__doc__)
    return dataclass(type(cls.__name__, (own, cls), values))


@dataclass
class TaskOptions:
    """What the model learns and how it is scored. --help --task=NAME shows the options of this task."""

    task: str = option(
        "addition",
        "the task: prompts, demonstrations and reward; module:Class: yours",
        choices=(*TASKS, OWN),
    )
    demonstration_noise: float = option(
        0.0,
        "probability of an error: in a carry (addition), in a demonstration (others)",
        maximum=1,
    )
    chat: bool = option(False, "ask prompts as messages, in the tokenizer's chat template")
    system_prompt: str = option(
        "",
        "chat: system message of prompts without one; empty: the template's, if any",
    )
    chat_template_kwargs: dict = option(
        {},
        'JSON, variables of the chat template: {"enable_thinking": false}; an export keeps them',
    )
    tokenizer: str = option(
        "bytes",
        "bytes, gpt2, or a folder with a tokenizer.json; with init_from its own",
    )

    without_task = None  # the class without a task's options
    own_options = NoOptions

    def __new__(cls, **values):
        """An object whose class has the options of its task, too. dataclasses.replace keeps the task."""
        return object.__new__(cls.with_task(values.get("task") or cls.task))

    def __reduce__(self):
        """For processes: pickle finds no class that is made while snug runs."""
        return partial(self.without_task, task=self.task), (), vars(self)

    @classmethod
    def with_task(cls, task: str, run=""):
        """-> the class that has this task's options, too. run: as for find_task. Raises SnugError."""
        own = find_task(task, run).options if task else NoOptions
        return joined(cls.without_task or cls, task, own)

    def of_task(self) -> list[str]:
        """The names of all options that say what the model learns."""
        return [*fields(TaskOptions), *fields(self.own_options)]

    @classmethod
    def hint(cls, name: str) -> str:
        """Which tasks have an option of this name, in words."""
        tasks = [task for task in TASKS if name in fields(find_task(task).options)]
        return f"; it is an option of --task={' or '.join(tasks)}" if tasks else ""


def make_task(settings, demonstrations: bool = False) -> Task:
    """The task named settings.task. `settings`: of settings.py.

    demonstrations=True: every row must have one (SFT). Raises SnugError if the options leave no usable task.
    """
    if settings.system_prompt and not settings.chat:
        raise SnugError(f"system_prompt={settings.system_prompt!r:.60} needs a chat; add --chat")
    task = find_task(settings.task)(settings, demonstrations)
    task.survey()
    return task


def load_reward_function(spec: str, functions, columns: Iterable[str], run: str | Path = ""):
    """ "module:function" -> that function: of `functions`, which a caller has by these names, or of the module.

    The module is also looked for in the current directory and above the `run`. columns: of the task's rows. Raises
    SnugError if there is no such module or function, or if it wants other columns. An error inside the module keeps its
    traceback.
    """
    function = imported(spec, "reward_funcs", "my_rewards:is_short", functions, run)
    try:
        inspect.signature(function).bind(**dict.fromkeys(sorted(ARGUMENTS | {*columns})))
    except TypeError as error:
        raise SnugError(
            f"reward_funcs={spec!r}: {error}; it must take **columns, and the rows have {', '.join(columns)}"
        ) from None
    return function


def imported(spec: str, option: str, example: str, functions=(), run: str | Path = "") -> Callable:
    """ "module:name" -> what a module has by this name, or `functions`. option: what the spec is of, for messages.

    example: of a spec, for messages. run: a run's folder, for find_path. Raises SnugError, as
    load_reward_function.
    """
    if spec in functions:
        return functions[spec]
    module_name, _, name = spec.partition(":")
    problem = f"{option}={spec!r}"
    if not all(word.isidentifier() for word in [*module_name.split("."), name]):
        raise SnugError(f"{problem}: write module:name, such as {example}")
    top, example = module_name.partition(".")[0], Path(f"{module_name.replace('.', '/')}.py")
    if top == "examples" and (HOME / example).exists() and not example.exists():
        module_name = f"{__name__.removesuffix('data')}{module_name}"
    file = find_path(f"{top}.py", run).resolve()
    # Not our model.py, where the user has a package of this name
    folder = str(file.parent) if file.exists() and file.parent != HOME else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a file there hides no other module
    try:
        with chdir("."):  # back behind it: the run's folders are relative to this one
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports one that does not
        raise SnugError(f"{problem}: no module {error.name} in {folder}") from None
    if not callable(getattr(module, name, None)):
        hint = did_you_mean(name, dir(module))
        if module_name == "__main__":
            hint = "; a script or a notebook defined it: resume there"
        raise SnugError(f"{problem}: {module_name} has no function or class {name}{hint}")
    return getattr(module, name)
