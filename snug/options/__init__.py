"""What an option is, and how options are read from a config file and the command line.

    @dataclass
    class Settings:
        seed: int = option(1, "seed of every random number", minimum=0)

        def check(self):  # if there is one; raises SnugError if values do not fit together
            ...

    settings, names, config = read_settings(Settings, ["config/small.py", "--seed=3"])

An option's type is bool, int, float, str, dict, list[str] or list[float]; `| None` allows None. A config is a file of
plain assignments, read by ast.literal_eval and never executed. Every user error raises SnugError. Nothing here imports
torch, so that a typo is reported in 0.2 s. other_names.toml has the words of other projects, with the answer to each.
Left out: nested options, environment variables. Tests: tests/test_settings.py.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import get_args

from snug.home import HOME, begun_as

OWN = "module:function"  # a choice that stands for any of them
# What users of other projects may write -> the answer.
ELSEWHERE = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text())


class SnugError(Exception):
    """An error that the user can correct. One line: what is wrong, the value, what to do. Exit code 2.

    A note (`add_note`) is the traceback of the user's own code that failed.
    """


# Codes of terminals; what turns the order of text or breaks its lines, and what nobody sees. Without the joiners U+200C
# and U+200D, which scripts and emoji need.
HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """The text as a terminal or a page may get it: HIDDEN characters are text, such as \\x1b or \\u202e.

    For what a model, a file or a user's function may have written.
    """
    return HIDDEN.sub(lambda found: repr(found[0])[1:-1], text)


@cache  # each text once
def note(text):
    """A line on stderr."""
    print(plain(text), file=sys.stderr)


def told(error: SnugError) -> str:
    """What people read: the notes, then the line."""
    return plain("\n".join([*getattr(error, "__notes__", []), f"error: {error}"]))


def described(error: BaseException) -> str:
    """Kind and text of an error, on one line: "ValueError: bad luck". Of a SnugError its text alone."""
    kind = "" if isinstance(error, SnugError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}"[:1000].split())


def well_formed(text: str) -> str:
    """Lone surrogates, which UTF-8 cannot carry, become U+FFFD; two halves of a pair become their character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def find_path(path: str | Path, run: str | Path = "") -> Path:
    """What is not in the current folder may be in the project's: configs name files relative to it. Or above the folder
    of a run that was started elsewhere, or where that was."""
    above = [Path(run), *Path(run).resolve().parents] if run else []
    above += [place for folder in above for place in started_in(folder)]
    places = [Path(path), *(place / path for place in (HOME, *above))]
    return next(filter(os.path.exists, places), places[0])


def started_in(run: str | Path) -> list[Path]:
    """The folder in which a run was started, if the run's folder says it."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return [Path(json.loads(Path(run, "settings.json").read_text())["started_in"])]
    return []


def option(default, meaning: str, choices: tuple[str, ...] = (), minimum=0, maximum=math.inf):
    """A dataclass field. --help shows `meaning`, with its unit; `choices`, `minimum` and `maximum` limit the value."""
    metadata = dict(meaning=meaning, choices=choices, minimum=minimum, maximum=maximum)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def fields(cls) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def type_of(cls, name: str):
    """-> (type, may it be None?): `float | None` -> (float, True), `list[str]` -> (list[str], False)."""
    hint = fields(cls)[name].type
    return (get_args(hint)[0], True) if type(None) in get_args(hint) else (hint, False)


def read_settings(cls, argv: list[str], positional: str = "config", class_of_runs=None):
    """`argv` (without the program's name) -> (cls instance, names of the options that were set, positional argument).

    positional="config": the argument without dashes is a config file, and the command line overrides it. Otherwise
    ("folder", "file") it is returned unread, "" if it is missing; "folders": a list of one or two. class_of_runs(cls,
    folders): what gives cls the options of the task of these folders, or of the run to resume, if no task is given.
    --help prints the usual options and those of the task, --help=all prints all, and both exit with 0. Raises
    SnugError.
    """
    if positional == "config" and not argv:
        raise SnugError("name a config, such as config/grpo_small.py, or options; --help lists them")
    places, texts = [], {}
    words = list(argv)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        if not flag.startswith("-"):
            places.append(flag + equals + text)
            continue
        is_known = flag[2:] in fields(cls)  # else perhaps the task knows it
        is_switch = type_of(cls, flag[2:])[0] is bool if is_known else flag in ("--help", "-h")
        if not equals and not is_switch and words and not words[0].startswith("--"):
            text = words.pop(0)  # --seed 3
        elif not equals:
            if is_known and not is_switch:
                raise SnugError(f"{flag} has no value; options are written --name=value")
            text = "true"  # --plan
        texts[flag] = text
    if places[1 + (positional == "folders") :]:
        raise SnugError(f"one argument too many: {places[-1]}; options are written --name=value")
    place = places[0] if places else ""
    wants_help = texts.pop("--help", "") or texts.pop("-h", "")
    given = read_config(place) if positional == "config" and place else {}
    if "--task" in texts:
        given["task"] = "--task", texts["--task"]
    elif class_of_runs and not wants_help:
        runs = [texts.get("--resume", "")] if positional == "config" else places
        cls = class_of_runs(cls, [run for run in runs if run not in ("", "auto", "never")])
    cls = class_of(cls, given)
    if wants_help:
        # flush: see BrokenPipeError below
        print(help_of(cls, positional, everything=wants_help == "all"), end="", flush=True)
        sys.exit(0)
    for flag, text in texts.items():
        name = flag.removeprefix("--")
        if name not in fields(cls):
            raise unknown_option(cls, name.lstrip("-"), flag)
        given[name] = flag, parse_value(cls, name, text)
    return *checked_settings(cls, given), places or [""] if positional == "folders" else place


def make_settings(cls, config: str, values: dict):
    """A config's options ("": none) and `values`, which override them -> (cls instance, names of the options set)."""
    given = read_config(config) if config else {}
    given |= {name: (name, value) for name, value in values.items()}
    return checked_settings(class_of(cls, given), given)


def class_of(cls, given: dict):
    """-> cls with the options of the task that is given."""
    if not hasattr(cls, "with_task"):
        return cls
    where, task = given.get("task", ("task", cls.task))
    return cls.with_task(check_value(cls, "task", task, where))


def checked_settings(cls, given: dict):
    """{name: (where it was given, value)} -> (cls instance, the names). Raises SnugError."""
    values = {name: check_value(cls, name, value, where) for name, (where, value) in given.items()}
    settings = cls(**values)
    if hasattr(settings, "check"):
        settings.check()
    return settings, set(values)


def merge_options(cls, run, settings, given: set[str], **changes):
    """-> a cls: an option as it was `given` in `settings`, or as in `changes`, or as in `run`, or its default."""
    cls = cls.with_task(changes.get("task", run.task))
    known = fields(cls)
    values = {name: getattr(run, name) for name in known if hasattr(run, name)} | changes
    return cls(**values | {name: getattr(settings, name) for name in given & known.keys()})


def read_config(path: str) -> dict:
    """A file of `name = literal` lines -> {name: (file and line, value)}. Raises SnugError."""
    file, shipped = find_path(path), HOME / f"config/{path}.py"
    if not file.is_file() and shipped.exists():
        file = shipped
    try:
        tree = ast.parse(file.read_bytes())
    except OSError as error:
        configs = [
            *map(str, Path("config").glob("*.py")),
            *(each.stem for each in shipped.parent.glob("*.py")),
        ]
        raise SnugError(f"config {path}: {error.strerror}{did_you_mean(path, configs)}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SnugError(f"config {path}: {error}") from None
    values = {}
    for node in tree.body:
        where = f"{path}:{node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            continue
        try:
            [target] = node.targets
            name, value = target.id, ast.literal_eval(node.value)
        except (AttributeError, ValueError, TypeError):  # another statement; no literal; {[]}
            raise SnugError(
                f"{where}: {ast.unparse(node)[:60]!r} is not name = value with a literal value"
            ) from None
        values[name] = f"{where}: {name}", value
    return values


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: "; did you mean X?" if X is similar to `word`, else "". Of paths the names are
    compared: two in a folder share its name, and are not similar for that."""
    names = {Path(each).name: each for each in known}
    near = difflib.get_close_matches(Path(word).name, names, 1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def answer_to(word: str, known: Iterable[str]) -> str:
    """The end of an error message for a word of another project, or as did_you_mean."""
    return f"; {ELSEWHERE[word]}" if word in ELSEWHERE else did_you_mean(word, known)


def unknown_option(cls, name: str, shown: str) -> SnugError:
    """shown: the name as the user wrote it."""
    has_task = hasattr(cls, "hint")
    hint = (cls.hint(name) if has_task else "") or answer_to(name, fields(cls))
    hint = hint or "; --help=all lists all options" + ", with --task=NAME its own too" * has_task
    return SnugError(f"unknown option {shown}{hint}")


def parse_value(cls, name: str, text: str):
    """The text after `--name=` -> a value of the option's type, or the text; check_value refuses it."""
    kind, optional = type_of(cls, name)
    return None if optional and text.lower() == "none" else convert(text, kind)


def convert(text: str, kind):
    """Text -> a value of the type. Text that does not fit stays text; check_value refuses it."""
    if elements := get_args(kind):
        return [convert(word.strip(), *elements) for word in text.split(",") if word.strip()]
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    try:
        return json.loads(text) if kind is dict else kind(text)
    except ValueError:
        return text


KINDS = {  # type -> as error messages name it
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a JSON object",
    list[str]: "a list of names",
    list[float]: "a list of numbers",
}


def check_value(cls, name: str, value, where: str):
    """-> `value` within the option's type and limits; an int may become a float, a tuple a list. Raises SnugError.

    where: start of the error message.
    """
    if name not in fields(cls):
        raise unknown_option(cls, name, where)
    kind, optional = type_of(cls, name)
    if value is None and optional:
        return None
    is_list = isinstance(value, list | tuple)
    [element] = get_args(kind) or [kind]
    items = list(value) if is_list else [value]
    if element is float:
        # By way of text: 10**400 becomes infinite, where float(10**400) raises.
        items = [float(str(item)) if type(item) is int else item for item in items]
    if is_list != (element is not kind) or any(type(item) is not element for item in items):
        raise SnugError(f"{where} takes {KINDS[kind]}, not {value!r}")
    limits = fields(cls)[name].metadata
    choices, minimum, maximum = limits["choices"], limits["minimum"], limits["maximum"]
    for item in items:
        if choices and item not in choices and not (OWN in choices and ":" in item):
            raise SnugError(
                f"{where}={item!r} is not one of {', '.join(choices)}{answer_to(item, choices)}"
            )
        if element in (int, float) and (item == math.inf or not minimum <= item <= maximum):
            raise SnugError(f"{where}={item} is not from {minimum} to {maximum}")
    return items if is_list else items[0]


def help_of(cls, positional: str, everything: bool) -> str:
    """The help of the options of `cls`, in which each class that has some is a topic.

    everything=False: the options that `cls.usual` names, if there is such a list, and the task's.
    """
    usual = [*fields(cls)]
    if not everything and hasattr(cls, "usual"):
        usual = [*cls.usual.split(), *fields(cls.own_options)]
    hidden = len(fields(cls)) - len(usual)
    parser = argparse.ArgumentParser(
        usage=f"{begun_as()} [{positional}] [--name=value ...]",
        description=cls.__doc__,
        epilog=f"{hidden} more options: --help=all" if hidden else None,
        add_help=False,
    )
    left, defaults = {*usual}, vars(cls())
    for topic in cls.__mro__:
        names = [name for name in inspect.get_annotations(topic) if name in left]
        left -= {*names}
        title = topic.__name__.removesuffix("Options").removesuffix("Settings")
        group = parser.add_argument_group(title, topic.__doc__ if names and everything else None)
        for name in names:
            limits = fields(cls)[name].metadata
            choices = "|".join(choice for choice in limits["choices"] if choice != OWN)
            text = f"{limits['meaning']} (default: {defaults[name]!r})".replace("%", "%%")
            kind = type_of(cls, name)[0].__name__.upper()
            group.add_argument(f"--{name}", metavar=choices or kind, help=text)
    return parser.format_help()


@contextmanager
def in_one_line(problem: str):
    """If a library fails on a damaged file, raise a SnugError: problem (error's type: error's text)."""
    try:
        yield
    except BaseException as error:
        # PanicException: of a library in Rust
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SnugError(f"{problem} ({described(error)[:300]})") from None


@contextmanager
def friendly_errors():
    """SnugError: its notes and one line on stderr, exit code 2. A closed pipe: silent.

    A console that cannot show a character shows "?" in its place.
    """
    sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except SnugError as error:
        print(told(error), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Python flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
