"""TODO"""

import ast
import dataclasses
import difflib
import importlib.util
import json
import os
import sys
import textwrap
import types
import typing
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path


class SnugError(Exception):
    """What the user can put right: one line that names what is wrong, the value seen and what to do. Exit code 2."""


def option(default, meaning, unit="", choices=(), minimum=None):
    """One option. `unit` and `choices` are shown by --help; values outside `choices` or under `minimum` are refused."""
    metadata = dict(meaning=meaning, unit=unit, choices=choices, minimum=minimum)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# Reading them


def read_settings(cls, argv, positional="config"):
    """`argv` (without the program's name) -> (cls instance, the set of names that were given, the positional argument).

    With positional="config" the argument without dashes is a config file, read before the overrides; with "folder"
    it is returned as it is. `--help` prints every option and exits 0. Raises SnugError for whatever else is wrong.
    """
    places, overrides = [], []
    words = iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            try:
                print(help_text(cls, positional), flush=True)
            except BrokenPipeError:  # | head: the flush at exit would complain of it again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        if not word.startswith("--"):
            places.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and name in fields(cls) and type_of(cls, name)[0] is bool:
            value = "true"  # --plan
        elif not equals:  # --name value
            value = next(words, "--")
            if value.startswith("--"):
                raise SnugError(f"{word} has no value; write {word}=value")
        overrides.append((name, value))
    if len(places) > 1:
        raise SnugError(
            f"one {positional} is taken, {len(places)} were given: {' '.join(places)}; options are --name=value"
        )
    place = places[0] if places else ""
    values = read_config(cls, place) if place and positional == "config" else {}
    for name, value in overrides:
        check_name(cls, name, "--" + name)
        values[name] = parse_value(cls, name, value)
    settings = cls(**values)
    settings.check()
    return settings, set(values), place


def read_config(cls, path):
    """A file of `name = literal` lines -> {name: value}."""
    try:
        tree = ast.parse(Path(path).read_text())
    except OSError as error:
        near = difflib.get_close_matches(str(path), [str(p) for p in sorted(Path("config").glob("*.py"))], 1, 0.3)
        raise SnugError(f"config {path}: {error.strerror}" + (f"; did you mean {near[0]}?" if near else "")) from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SnugError(f"config {path}: {error}") from None
    values = {}
    for node in tree.body:
        where = f"{path}:{node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise SnugError(f"{where}: {ast.unparse(node)[:60]!r} is not a plain assignment, name = value")
        name = check_name(cls, node.targets[0].id, where + ": " + node.targets[0].id)
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError):  # a TypeError for {[]}
            raise SnugError(
                f"{where}: {name} = {ast.unparse(node.value)[:60]} is not a literal; write the value itself"
            ) from None
        values[name] = check_value(cls, name, value, f"{where}: {name}")
    return values


def fields(cls):
    """{name: dataclass field} in the order --help shows them."""
    return {f.name: f for f in dataclasses.fields(cls)}


def check_name(cls, name, shown):
    if name not in fields(cls):
        near = difflib.get_close_matches(name, fields(cls), 1, 0.5)
        raise SnugError(
            f"unknown option {shown}" + (f"; did you mean {near[0]}?" if near else "; --help lists them all")
        )
    return name


def type_of(cls, name):
    """-> (type, may it be None): float | None -> (float, True), list[str] -> (list, False)."""
    hint = typing.get_type_hints(cls)[name]
    optional = isinstance(hint, types.UnionType)
    hint = typing.get_args(hint)[0] if optional else hint
    return typing.get_origin(hint) or hint, optional


def parse_value(cls, name, text):
    """The word after `--name=` -> a value of the option's type."""
    kind, optional = type_of(cls, name)
    if optional and text.lower() == "none":
        value = None
    elif kind is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif kind is list:
        value = [element_of(cls, name, part.strip()) for part in text.split(",") if part.strip()]
    elif kind is str:
        value = text
    else:
        try:
            value = kind(text)
        except ValueError:
            value = text
    return check_value(cls, name, value, "--" + name)


def element_of(cls, name, text):
    """A part of a list's text -> a number, where it is a list of numbers."""
    try:
        return float(text) if typing.get_type_hints(cls)[name] == list[float] else text
    except ValueError:
        return text


def check_value(cls, name, value, where):
    """`value` if the option may have it (an int serves as a float); else SnugError, with `where` it was written."""
    kind, optional = type_of(cls, name)
    metadata = fields(cls)[name].metadata
    if value is None and optional:
        return None
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else float("inf")
    if kind is list and isinstance(value, list | tuple):
        value = list(value)
    element = typing.get_args(typing.get_type_hints(cls)[name])[0] if kind is list else None
    if element is float and type(value) is list:
        value = [float(v) if type(v) is int and abs(v) < 2**1023 else v for v in value]
    if type(value) is not kind or (kind is list and not all(type(v) is element for v in value)):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        names[list] = "a list of numbers" if element is float else "a list of names"
        raise SnugError(f"{where} takes {names[kind]}, not {value!r}")
    if float in (kind, element) and not all(abs(v) < float("inf") for v in (value if element else [value])):
        raise SnugError(f"{where} must be finite, not {value}")
    if metadata["choices"] and value not in metadata["choices"]:
        near = difflib.get_close_matches(value, metadata["choices"], 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SnugError(f"{where}={value!r} is not one of {', '.join(metadata['choices'])}{hint}")
    if metadata["minimum"] is not None and value < metadata["minimum"]:
        raise SnugError(f"{where}={value} is below {metadata['minimum']}")
    return value


def help_text(cls, positional):
    """Every option with default, unit and meaning, a paragraph each class it comes from."""
    usage = (
        f"python {Path(sys.argv[0]).name} [{positional}{'.py' if positional == 'config' else ''}] [--name=value ...]"
    )
    lines = [f"usage: {usage}", "", cls.__doc__]
    shown = set()
    for base in (cls, *cls.__mro__[1:-1]):
        own = [f for f in dataclasses.fields(cls) if f.name in base.__annotations__ and f.name not in shown]
        if base is not cls:
            lines += ["", base.__doc__]
        for f in own:
            shown.add(f.name)
            default = f.default if f.default is not MISSING else f.default_factory()
            meaning = f.metadata["meaning"]
            if f.metadata["choices"]:
                meaning += f" [{' | '.join(f.metadata['choices'])}]"
            head = f"  --{f.name}={default}" + (f" {f.metadata['unit']}" if f.metadata["unit"] else "")
            lines += [head, *textwrap.wrap(meaning, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(lines)


def to_json(settings):
    return json.dumps(dataclasses.asdict(settings), indent=2) + "\n"


@contextmanager
def friendly_errors():
    """A SnugError becomes one line on stderr and exit code 2, Ctrl-C one line and 130, a reader that left nothing; else a traceback."""
    try:
        yield
    except SnugError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # | head has seen enough; the flush at exit would complain of it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("stopped; --resume=auto goes on from the newest checkpoint", file=sys.stderr)
        sys.exit(130)
