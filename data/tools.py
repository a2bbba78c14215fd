"""Tools: functions that a model calls while it samples; their JSON schemas, how calls are read and made.

    functions = load_tools(["calc", "my_tools:search"])             # {"calc": function, "search": function}
    schemas = [schema_of(function) for function in functions.values()]
    content, calls = parse_calls(text, "hermes", schemas)
    text, failed = call_tool(functions, calls[0], seconds=10)

A tool has type hints and a docstring with "Args:", as for TRL and transformers. `calc` and `python` are built in.
An environment is an object with state, one for each completion: its public methods are its tools, as in TRL.

A model writes a call in the form that its chat template teaches (Chat.call_form):

    hermes  <tool_call>{"name": "calc", "arguments": {"expression": "1+1"}}</tool_call>, any number of them
    llama   {"name": "calc", "parameters": {"expression": "1+1"}}, and nothing else in the turn; several behind ";"
    inline  <calc>1+1</calc> at the end of the turn

Left out: hints of tuples, Enums and unions, "(choices: ...)" in docstrings; other forms of calls, such as Mistral's;
checks of an argument's type. A tool can do whatever Python can, so name only code that you trust.
Tests: tests/test_tools.py.
"""

import ast
import asyncio
import ctypes
import functools
import inspect
import io
import json
import operator
import os
import re
import threading
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from copy import deepcopy
from fractions import Fraction

from data import imported
from data.countdown import MAX_CHARS, NODES, value_of
from data.rewards import OutOfTime, name_of
from options import SnugError, in_one_line
from sandbox import Sandbox
from tokenizer.chat import well_formed

MAX_BITS = 4000  # of a power in `calc`
PYTHON_SECONDS = 5.0  # for the code of one call
MAX_OUTPUT = 10_000  # characters that the code prints
MAX_ERROR = 500  # characters of an error
NO_TOOLS = ("reset", "get_reward", "reply")  # methods of an environment
NONE = types.MappingProxyType({})
LOCK = threading.Lock()  # so that there is one event loop

# ----------------------------------------------------------------------------------------------------------------------
# Schemas

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
JSON_TYPES |= {list: "array", dict: "object"}
SECTION = re.compile(r"\n\s*(Args|Returns|Raises):")
ARGUMENT = re.compile(r"(?ms)^([ \t]*)(\w+):\s*(.*?)\s*(?=^(?!\1[ \t])[ \t]*\w+:|\Z)")


def schema_of(function: Callable) -> dict:
    """The schema that transformers.utils.get_json_schema makes of type hints and a docstring with "Args:".

    {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}. Raises SnugError.
    """
    name, properties = name_of(function), {}
    description, *sections = SECTION.split("\n" + (inspect.getdoc(function) or ""))
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    described = {argument: text for _, argument, text in ARGUMENT.findall(texts.get("Args", ""))}
    advice = 'a type hint that JSON has (str, int, list, ...) and "its name: ..." below "Args:" in the docstring'
    with in_one_line(f"tool {name}: each argument needs {advice}"):
        hints, arguments = typing.get_type_hints(function), inspect.signature(function).parameters
        for argument in arguments:
            text = re.sub(r"\s*\n\s*", " ", described[argument])
            properties[argument] = type_schema(hints[argument]) | {"description": text}
    parameters = {"type": "object", "properties": properties}
    if required := [key for key, value in arguments.items() if value.default is value.empty]:
        parameters["required"] = required
    schema = {"name": name, "description": description.strip(), "parameters": parameters}
    with suppress(Exception):  # a model does not need it
        schema["return"] = type_schema(hints["return"])
        schema["return"]["description"] = texts["Returns"].strip()
    return {"type": "function", "function": schema}


def type_schema(hint) -> dict:
    """Raises an error for a type without a JSON schema."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if origin is typing.Literal:
        [kind] = {type(value) for value in arguments}
        return {"type": JSON_TYPES[kind], "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        [kind] = {*arguments} - {type(None)}
        return type_schema(kind) | {"nullable": True}
    schema = {"type": JSON_TYPES[origin or hint]}
    if origin:
        [inner] = arguments[origin is dict :]
        schema["additionalProperties" if origin is dict else "items"] = type_schema(inner)
    return schema


# ----------------------------------------------------------------------------------------------------------------------
# The tools that are built in


def calc(expression: str) -> str:
    """Compute an expression of numbers.

    Args:
        expression: numbers with + - * / // % ** and parentheses, such as (1 + 2) / 4
    """
    try:
        if len(expression) > MAX_CHARS or not re.fullmatch(r"[-+*/%(). 0-9]+", expression):
            raise ValueError
        value = value_of(ast.parse(expression.strip(), mode="eval").body, OPERATORS)
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, ValueError, OverflowError):
        problem = f"no expression of numbers and + - * / // % ** ( ), up to {MAX_CHARS} characters"
        raise ValueError(f"{problem}, or a number is too large") from None


def power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = (base.numerator * base.denominator).bit_length()
    if exponent.denominator > 1 or bits * abs(exponent) > MAX_BITS:
        raise ValueError
    return base**exponent


OPERATORS = NODES | {ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: power}
OPERATORS |= {ast.UAdd: operator.pos, ast.USub: operator.neg}


def python(code: str) -> str:
    """Run Python code and return what it prints.

    Args:
        code: the code; it can import installed packages, and cannot use other files, processes or the network
    """
    [(text, error)] = POOL.submit(lambda: THREAD.sandbox.run("run", [[code]])).result()
    if error:
        raise ValueError(error)
    return text


def enter_pool():
    THREAD.sandbox = Sandbox("data.tools:Interpreter", timeout=PYTHON_SECONDS)


# A sandbox dies with the thread that started it. So these threads stay, and each has its own.
POOL, THREAD = ThreadPoolExecutor(16, initializer=enter_pool), threading.local()
TOOLS = {"calc": calc, "python": python}


class Interpreter:
    """Lives in the processes of a sandbox."""

    def run(self, code: str) -> str:
        printed, problem = io.StringIO(), ""
        try:
            with redirect_stdout(printed):
                exec(code, {"__name__": "__main__"})
        except BaseException as error:
            problem = traceback.format_exception_only(error)[-1]
        return printed.getvalue()[:MAX_OUTPUT] + problem[:MAX_ERROR]


# ----------------------------------------------------------------------------------------------------------------------
# The user's tools


def load_tools(specs: Sequence[str], functions: Mapping[str, Callable] = NONE) -> dict[str, Callable]:
    """["calc", "module:function", ...] -> {name: function}, in this order.

    functions: those of a caller, by their specs. `python` starts its first sandbox. Raises SnugError, also for a tool
    without a schema.
    """
    tools, known = {}, {**TOOLS, **functions}
    advice = f"write {', '.join(TOOLS)}, or module:function, such as my_tools:search"
    for spec in specs:
        tool = imported(spec, "tools", advice, known)
        name = schema_of(tool)["function"]["name"]
        if name in tools:
            raise SnugError(f"tools={spec!r}: another tool has the name {name}; rename one")
        tools[name] = tool
        if tool is python:
            POOL.submit(lambda: THREAD.sandbox.start()).result()
    return tools


def methods_of(environment) -> dict[str, Callable]:
    """-> {name: bound method} of its tools, in the order of names. Raises SnugError if it has no `reset`.

    Looks at the class, because looking at the object would compute its properties.
    """
    kind = type(environment)
    if not callable(getattr(kind, "reset", None)):
        raise SnugError(f"environment {kind.__name__} has no method reset; add def reset(self, **columns)")
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return {name: getattr(environment, name) for name in names if name[0] != "_" and name not in NO_TOOLS}


# ----------------------------------------------------------------------------------------------------------------------
# Calls in text


def parse_calls(text: str, form: str, schemas: Sequence[dict]) -> tuple[str, list[dict]]:
    """What a model wrote -> (the text outside calls, [{"type": "function", "function": {"name", "arguments"}}, ...]).

    form: Chat.call_form. schemas: those of the tools. A call that cannot be read has the name "" and a further key
    "error", a text for the model. The text is untrusted; the time grows with its length. Never raises.
    """
    if form == "hermes":
        pieces = re.split(r"(?s)<tool_call>(.*?)(?:</tool_call>|\Z)", text)
        return "".join(pieces[::2]).strip(), [call for block in pieces[1::2] for call in read_calls(block)]
    if form == "llama":
        calls = read_calls(text.strip().removeprefix("<|python_tag|>"))
        return (text.strip(), []) if "error" in calls[0] else ("", calls)
    # inline: at most one call, the last, because the turn ends where it does
    tools = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
    end, name = max(((text.rfind(f"</{name}>"), name) for name in tools), default=(-1, ""))
    before, tag, argument = text[: max(end, 0)].rpartition(f"<{name}>")
    if not tag:
        return text.strip(), []
    kinds = tools[name]["properties"].items()
    texts = [key for key, kind in kinds if kind.get("type") == "string"]
    if texts and len(tools[name].get("required", [])) < 2:
        argument = json.dumps({texts[0]: argument})
    return before.strip(), read_calls(f'{{"name": "{name}", "arguments": {argument}}}')


def read_calls(text: str) -> list[dict]:
    """JSON objects with a name and arguments, separated by ";" -> calls; one call with an error if that fails."""
    text, at, calls = text.strip(), 0, []
    try:
        while at < len(text) or not calls:
            value, at = json.JSONDecoder().raw_decode(text, at)
            value = value if isinstance(value, dict) else {}
            name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise ValueError
            # Files of a run can hold neither NaN nor a lone surrogate.
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
            calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
            at = re.compile(r"[\s;]*").match(text, at).end()
        return calls
    except (ValueError, RecursionError):
        problem = 'a call must be a JSON object with "name" and "arguments", which must be an object'
        return [{"type": "function", "function": {"name": "", "arguments": {}}, "error": problem}]


# ----------------------------------------------------------------------------------------------------------------------
# Calls


def call_tool(functions: Mapping[str, Callable], call: dict, seconds: float) -> tuple[str | None, bool]:
    """-> (what the model reads, did the call fail?), after `seconds` at the latest. Never raises. Threads may use it.

    The text is str(what the function returns), of any length, or None; or str({"error": ...}) if the call cannot be
    made or the function raises, as in TRL. A function that is late gets an exception; what it returns then is dropped.
    Coroutines of `async def` functions share one event loop, in a thread.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    answers = []

    def work():
        with answering(answers):
            if name not in functions:
                problem = f"there is no tool {name:.60}; the tools are {', '.join(functions)}"
                raise ValueError(call.get("error", problem))
            result = functions[name](**deepcopy(arguments))  # of a row or of a message, which stay
            if not inspect.iscoroutine(result):
                return answers.append((as_text(result), False))
            # A second later, so that the text for the model is always the one below.
            waiting = asyncio.wait_for(awaited(result), seconds + 1)
            with LOCK:
                loop = event_loop()
            asyncio.run_coroutine_threadsafe(waiting, loop).result()

    async def awaited(coroutine):
        with answering(answers):
            answers.append((as_text(await coroutine), False))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    # A thread that waits outside of Python gets the exception when it comes back.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(OutOfTime))
    return error_text(f"{name} took longer than {seconds:g} seconds"), True


@contextmanager
def answering(answers: list):
    """What is raised inside becomes an answer. A fork of this process, made by a tool, ends here."""
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        answers.append((error_text(str(error) or type(error).__name__), True))
    finally:
        if os.getpid() != process:
            os._exit(0)


def as_text(result) -> str | None:
    return None if result is None else well_formed(str(result))


def error_text(problem: str) -> str:
    return str({"error": problem[:MAX_ERROR]})


@functools.cache
def event_loop():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
