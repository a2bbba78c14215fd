"""What an option is, and how options are read from a config file and the command line.

    @dataclass
    class Settings:
        seed: int = option(1, "seed of every random number", minimum=0)

        def check(self):  # raises SnugError if values do not fit together
            ...

    settings, given, config = read_settings(Settings, ["config/small.py", "--seed=3"])

An option's type is bool, int, float, str, list[str] or list[float]; `| None` allows None. A config is a file of plain
assignments, read by ast.literal_eval and never executed. Every user error raises SnugError. Nothing here imports torch:
a typo is answered in 0.2 s. Left out: nested options, environment variables. Tests: tests/test_settings.py, refuse.py.
"""

import argparse
import ast
import dataclasses
import difflib
import json
import math
import os
import shutil
import sys
import types
import typing
from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path


class SnugError(Exception):
    """An error that the user can correct. One line: what is wrong, the value seen, what to do. Exit code 2.

    A note (`add_note`) is the traceback of the user's own code that failed.
    """


def told(error: SnugError) -> str:
    """What people read: the notes, then the line."""
    return "\n".join([*getattr(error, "__notes__", []), f"error: {error}"])


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def option(
    default, meaning: str, unit: str = "", choices: tuple[str, ...] = (), minimum=0, maximum=None
):
    """A dataclass field. --help shows `meaning` and `unit`; `choices`, `minimum` and `maximum` limit the value."""
    metadata = dict(meaning=meaning, unit=unit, choices=choices, minimum=minimum, maximum=maximum)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def fields(cls) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def type_of(cls, name: str) -> tuple[type, bool]:
    """-> (type, may it be None): `float | None` -> (float, True), `list[str]` -> (list[str], False)."""
    hint = fields(cls)[name].type
    return (typing.get_args(hint)[0], True) if isinstance(hint, types.UnionType) else (hint, False)


def read_settings(cls, argv: list[str], positional: str = "config") -> tuple[typing.Any, set[str], str]:
    """`argv` (without the program's name) -> (cls instance, names of the options given, positional argument or "").

    positional="config": the argument without dashes is a config file, and the command line overrides it. Otherwise
    ("folder", "file") it is returned unread. --help prints the usual options, --help=all prints every one, and both
    exit 0. Raises SnugError.
    """
    if asked := [word for word in argv if word == "-h" or word.partition("=")[0] == "--help"]:
        print(
            make_parser(cls, positional, everything="--help=all" in asked).format_help(),
            end="",
            flush=True,
        )
        sys.exit(0)  # flush: see BrokenPipeError below
    flags = {f"--{name}" for name in fields(cls) if type_of(cls, name)[0] is bool}
    argv = [f"{word}=true" if word in flags else word for word in argv]  # --plan
    namespace, rest = make_parser(cls, positional).parse_known_args(argv)
    given = vars(namespace)
    place = given.pop(positional)
    for flag in (word.partition("=")[0] for word in rest if word.startswith("-")):
        check_name(cls, flag.lstrip("-"), flag)
        raise SnugError(f"unknown option {flag}; did you mean -{flag}?")  # -seed=3
    if rest:
        raise SnugError(
            f"only one {positional} can be given, not {len(rest) + 1}: {' '.join([place, *rest])}"
        )
    if place and positional == "config":
        given = read_config(cls, place) | given
    settings = cls(**given)
    settings.check()
    return settings, set(given), place


def read_config(cls, path: str) -> dict[str, typing.Any]:
    """A file of `name = literal` lines -> {name: value}. Raises SnugError."""
    try:
        tree = ast.parse(Path(path).read_text())
    except OSError as error:
        configs = [str(p) for p in sorted(Path("config").glob("*.py"))]
        raise SnugError(f"config {path}: {error.strerror}{did_you_mean(path, configs)}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SnugError(f"config {path}: {error}") from None
    values = {}
    for node in tree.body:
        where = f"{path}:{node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if not (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            raise SnugError(
                f"{where}: {ast.unparse(node)[:60]!r} is not a plain assignment, name = value"
            )
        name = node.targets[0].id
        check_name(cls, name, f"{where}: {name}")
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError):  # TypeError: {[]}
            text = ast.unparse(node.value)[:60]
            raise SnugError(
                f"{where}: {name} = {text} is not a literal; write the value itself"
            ) from None
        values[name] = check_value(cls, name, value, f"{where}: {name}")
    return values


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: "; did you mean X?" if X is much like `word`, or ""."""
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def check_name(cls, name: str, shown: str) -> None:
    """Raises SnugError if `cls` has no such option. shown: the name as the user wrote it."""
    if name not in fields(cls):
        raise SnugError(
            f"unknown option {shown}"
            + (did_you_mean(name, fields(cls)) or "; --help=all lists them all")
        )


def parse_value(cls, name: str, text: str):
    """The text after `--name=` -> a value of the option's type. Raises SnugError."""
    kind, optional = type_of(cls, name)
    if optional and text.lower() == "none":
        value = None
    elif typing.get_origin(kind) is list:
        value = [
            convert(part.strip(), typing.get_args(kind)[0]) for part in text.split(",") if part.strip()
        ]
    else:
        value = convert(text, kind)
    return check_value(cls, name, value, "--" + name)


def convert(text: str, kind: type):
    """Text -> bool, int, float or str; text that does not fit stays text, for check_value to refuse."""
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text


KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
KINDS |= {list[str]: "a list of names", list[float]: "a list of numbers"}


def check_type(cls, name: str, value, where: str):
    """-> `value`; an int may become a float, a tuple a list. where: start of the error message. Raises SnugError."""
    kind, optional = type_of(cls, name)
    if value is None and optional:
        return None
    is_list = typing.get_origin(kind) is list
    element = typing.get_args(kind)[0] if is_list else kind
    items = value if is_list and isinstance(value, list | tuple) else [value]
    items = [float(item) if element is float and type(item) is int else item for item in items]
    if is_list != isinstance(value, list | tuple) or not all(type(item) is element for item in items):
        raise SnugError(f"{where} takes {KINDS[kind]}, not {value!r}")
    return items if is_list else items[0]


def check_value(cls, name: str, value, where: str):
    """`check_type`, and the option's limits. Raises SnugError."""
    value, (kind, _), limits = (
        check_type(cls, name, value, where),
        type_of(cls, name),
        fields(cls)[name].metadata,
    )
    if value is None:
        return None
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and "\0" in item:
            raise SnugError(f"{where}={value!r:.60} has a NUL character; remove it")
        if isinstance(item, float) and not math.isfinite(item):
            raise SnugError(f"{where} must be finite, not {value}")
    if limits["choices"] and value not in limits["choices"]:
        hint = did_you_mean(value, limits["choices"])
        raise SnugError(f"{where}={value!r} is not one of {', '.join(limits['choices'])}{hint}")
    if kind in (int, float) and value < limits["minimum"]:
        raise SnugError(f"{where}={value} is below {limits['minimum']}")
    if limits["maximum"] is not None and value > limits["maximum"]:
        raise SnugError(f"{where}={value} is above {limits['maximum']}")
    return value


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise SnugError(f"{message.removeprefix('argument ')}; options are written --name=value")


METAVARS = {int: "N", float: "X", bool: "true|false", str: "TEXT", list[str]: "A,B", list[float]: "X,Y"}


def make_parser(cls, positional: str, everything: bool = True) -> Parser:
    """A parser for the options of `cls`. In its help each class that `cls` inherits from is a topic.

    everything=False: the help shows only the options that `cls.usual` names, if there is such a list.
    """
    usual = fields(cls) if everything else getattr(cls, "usual", " ".join(fields(cls))).split()
    layout = partial(
        argparse.HelpFormatter, max_help_position=30, width=min(120, shutil.get_terminal_size().columns)
    )
    suffix = ".py" if positional == "config" else ""
    module = sys.modules["__main__"].__spec__  # python -m tools.export
    program = f"-m {module.name}" if module else Path(sys.argv[0]).name
    usage = f"python {program} [{positional}{suffix}] [--name=value ...]"
    more = len(fields(cls)) - len(usual)
    epilog = f"{more} more options: --help=all" if more else None
    names = dict(usage=usage, description=cls.__doc__, epilog=epilog, formatter_class=layout)
    parser = Parser(allow_abbrev=False, add_help=False, **names)
    about = {
        "config": "a file of `name = value` lines",
        "folder": "a run's folder",
        "file": "a GGUF file",
    }[positional]
    parser.add_argument(positional, nargs="?", default="", help=about)
    for topic, options in topics(cls).items():
        title = topic.__name__.removesuffix("Options").removesuffix("Settings")
        group = parser.add_argument_group(
            title, topic.__doc__ if everything and topic is not cls else None
        )
        for name in options:
            group.add_argument(
                f"--{name}",
                type=partial(parse_value, cls, name),
                default=argparse.SUPPRESS,
                metavar="|".join(fields(cls)[name].metadata["choices"])
                or METAVARS[type_of(cls, name)[0]],
                help=help_of(fields(cls)[name]) if name in usual else argparse.SUPPRESS,
            )
    return parser


def topics(cls) -> dict[type, list[str]]:
    """{class: names of its options}: `cls`, then the classes that it inherits from.

    An option that several of them define is under the topmost: a changed default moves no option.
    """
    named = ((name, base) for base in cls.__mro__ for name in vars(base).get("__annotations__", {}))
    first = {name: base for name, base in named if name in fields(cls)}
    return {
        base: [name for name in first if first[name] is base]
        for base in cls.__mro__
        if base in first.values()
    }


def help_of(field: dataclasses.Field) -> str:
    """What the help says of an option: `longest completion (tokens; default: 32)`."""
    unit, default = field.metadata["unit"], field.default
    if default is dataclasses.MISSING:
        default = ",".join(field.default_factory())
    shown = f"{default:g}" if type(default) is float else str(default).lower() or "empty"
    return f"{field.metadata['meaning']} ({unit + '; ' if unit else ''}default: {shown})".replace(
        "%", "%%"
    )


@contextmanager
def in_one_line(said: str):
    """What a library raises over a damaged file becomes a SnugError: said (its type: its text)."""
    try:
        yield
    except BaseException as error:
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # of a library in Rust
            raise
        kind = "" if isinstance(error, SnugError) else f"{type(error).__name__}: "
        raise SnugError(f"{said} ({kind}{' '.join(str(error).split())[:300]})") from None


def to_json(settings) -> str:
    return json.dumps(dataclasses.asdict(settings), indent=2) + "\n"


@contextmanager
def friendly_errors(advice: str = ""):
    """SnugError: its notes and one line on stderr, exit code 2. Ctrl-C: one line, 130. A closed pipe: silent.

    advice: what Ctrl-C's line says besides. A console that cannot show a character shows "?" in its place.
    """
    sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except SnugError as error:
        print(told(error), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python flushes stdout again at exit
        sys.exit(0)
    except KeyboardInterrupt:
        print(f"stopped{advice}", file=sys.stderr)
        sys.exit(130)
