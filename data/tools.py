"""Tools: functions that a model calls while it samples; their JSON schemas, how calls are read and made.

    functions = load_tools(["calc", "my_tools:search"])             # {"calc": function, "search": function}
    schemas = [schema_of(function) for function in functions.values()]
    content, calls = parse_calls(text, "hermes", schemas)
    text, failed = call_tool(functions, calls[0], seconds=10)

A tool has type hints and a docstring with "Args:", as for TRL and transformers. `calc` and `python` are built in.
An environment is an object with state, one for each completion: its public methods are its tools, as in TRL.

A model writes a call in the form that its chat template writes (Chat.call_form):

    hermes  <tool_call>{"name": "calc", "arguments": {"expression": "1+1"}}</tool_call>, any number of them
    llama   {"name": "calc", "parameters": {"expression": "1+1"}}, and nothing else in the turn; several behind ";"
    inline  <calc>1+1</calc> at the end of the turn

What a model writes is read leniently where only one reading is possible: read_calls. In hermes and llama a thought has
no calls. It begins with <think>, before any call or at the end of the prompt, and ends with the last </think>.

Left out: "(choices: ...)" in docstrings; other forms of calls, such as Mistral's; checks of an argument's type, as in
TRL. A tool can do whatever Python can, so name only code that you trust.
Tests: tests/test_tools.py.
"""

import ast
import inspect
import io
import json
import operator
import re
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from enum import EnumType
from fractions import Fraction

from data import imported
from data.calls import OutOfTime, awaited, complete, name_of, text_of
from data.countdown import MAX_CHARS, NODES, value_of
from data.programs import sandbox
from snug.options import SnugError, in_one_line
from snug.tokenizer.chat import well_formed

MAX_BITS = 4000  # of a power in `calc`
PYTHON_SECONDS = 5.0  # for the code of one call
MAX_OUTPUT = 10_000  # characters that the code prints
MAX_ERROR = 500  # characters of an error
NO_TOOLS = ("reset", "get_reward", "reply")  # methods of an environment
NONE = types.MappingProxyType({})

# ----------------------------------------------------------------------------------------------------------------------
# Schemas

SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
JSON_TYPES = SCALARS | {list: "array", tuple: "array", dict: "object"}
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
    if isinstance(hint, EnumType):
        origin, arguments = typing.Literal, [member.value for member in hint]
    if origin is typing.Literal:
        names = list(dict.fromkeys(SCALARS[type(value)] for value in arguments))
        return {"type": names if names[1:] else names[0], "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        schemas = [type_schema(kind) for kind in arguments if kind is not type(None)]
        nullable = {"nullable": True} if type(None) in arguments else {}
        if not schemas[1:]:
            return schemas[0] | nullable
        if any(schema.keys() != {"type"} for schema in schemas):
            return {"anyOf": schemas} | nullable
        names = sorted({schema["type"] for schema in schemas})
        return {"type": names if names[1:] else names[0]} | nullable
    if origin is tuple and arguments:
        _, _, *_ = arguments  # not tuple[int]
        return {"type": "array", "prefixItems": list(map(type_schema, arguments))}
    schema = {"type": JSON_TYPES[origin or hint]}
    if arguments:
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
        raise ValueError(
            f"no expression of numbers and + - * / // % ** ( ), up to {MAX_CHARS} characters, "
            "or a number is too large"
        ) from None


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
    [(text, error)] = POOL.submit(lambda: interpreter().run("run", [[code]])).result()
    if error:
        raise ValueError(error)
    printed, problem = json.loads(text)
    if problem:
        raise Problem(printed + problem)
    return printed


class Problem(Exception):
    """Of a tool: the model reads its text as it is."""


POOL = ThreadPoolExecutor(16)
TOOLS = {"calc": calc, "python": python}


def interpreter():
    return sandbox(Interpreter, PYTHON_SECONDS)


class Interpreter:
    """Lives in the processes of a sandbox."""

    def run(self, code: str) -> str:
        printed, problem = io.StringIO(), ""
        try:
            with redirect_stdout(printed):
                exec(code, {"__name__": "__main__"})
        except BaseException as error:
            problem = traceback.format_exception_only(error)[-1]
        return json.dumps([printed.getvalue()[:MAX_OUTPUT], problem[:MAX_ERROR]])


# ----------------------------------------------------------------------------------------------------------------------
# The user's tools


def load_tools(
    specs: Sequence[str], functions: Mapping[str, Callable] = NONE, run: str = ""
) -> dict[str, Callable]:
    """["calc", "module:function", ...] -> {name: function}, in this order.

    functions: those of a caller, by their specs. run: a run's folder. `python` starts its first sandbox. Raises SnugError.
    """
    tools, known = {}, {**TOOLS, **functions}
    advice = f"write {', '.join(TOOLS)}, or module:function, such as my_tools:search"
    for spec in specs:
        tool = imported(spec, "tools", advice, known, run)
        if tools.setdefault(name_of(tool), tool) is not tool:
            raise SnugError(f"tools={spec!r}: two tools have the name {name_of(tool)}; rename one")
        if tool is python:
            POOL.submit(lambda: interpreter().start()).result()
    return tools


def methods_of(environment) -> dict[str, Callable]:
    """-> {name: bound method} of its tools, in the order of names.

    Looks at the class, because looking at the object would compute its properties.
    """
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return {
        name: getattr(environment, name) for name in names if name[0] != "_" and name not in NO_TOOLS
    }


# ----------------------------------------------------------------------------------------------------------------------
# Calls in text

DECODER = json.JSONDecoder(strict=False)  # code in a string may have raw newlines
BETWEEN = re.compile(r"[\s;,}]*")  # models may close one brace too many


def parse_calls(text: str, form: str, schemas: Sequence[dict], thinks=False) -> tuple[str, list[dict]]:
    """What a model wrote -> (the text outside calls, [{"type": "function", "function": {"name", "arguments"}}, ...]).

    form: Chat.call_form. schemas: those of the tools. thinks: the prompt ends with <think>. A call that cannot be read
    has the name "" and a further key "error", a text for the model. The text is untrusted; the time grows with its
    length. Never raises.
    """
    if form == "inline":
        return parse_inline(text, schemas)
    thought = ""
    if thinks or "<think>" in text.partition("<tool_call>")[0].partition('{"')[0]:
        before, end, text = text.rpartition("</think>")
        thought = before + end
        if not end:  # the thought goes on
            return text.strip(), []
    if form == "hermes":
        pieces = re.split(r"(?s)<tool_call>(.*?)(?:</tool_call>|\Z)", text)
        calls = [call for block in pieces[1::2] for call in read_calls(block)]
        return (thought + "".join(pieces[::2])).strip(), calls
    calls = read_calls(text.strip().removeprefix("<|python_tag|>"))
    return ((thought + text).strip(), []) if "error" in calls[0] else (thought.strip(), calls)


def parse_inline(text: str, schemas) -> tuple[str, list[dict]]:
    """At most one call, the last, because the turn ends where it does."""
    start, _, rest = text.rpartition("</")
    name = rest.partition(">")[0]
    before, tag, argument = start.rpartition(f"<{name}>")
    tools = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
    if not tag or name not in tools:
        return text.strip(), []
    calls = read_calls(f'{{"name": "{name}", "arguments": {argument}}}')
    properties, required = tools[name]["properties"], tools[name].get("required", [])
    texts = [key for key in required or properties if "string" in properties[key].get("type", "")]
    if texts and len(required) < 2 and not properties.keys() & calls[0]["function"]["arguments"]:
        calls = read_calls(json.dumps(dict(name=name, arguments={texts[0]: argument})))
    return before.strip(), calls


def read_calls(text: str) -> list[dict]:
    """JSON objects with a name and arguments -> calls; one call with an error if that fails."""
    with suppress(Exception):
        return list(map(call_of, json_values(text.strip("[],; \n\r\t"))))  # it may be a list
    problem = 'a call must be a JSON object with "name" and "arguments", which must be an object'
    return [{"type": "function", "function": {"name": "", "arguments": {}}, "error": problem}]


def json_values(text: str) -> list:
    """Raises an error if there is none, or other text."""
    values, at = [], 0
    while at < len(text) or not values:
        value, at = DECODER.raw_decode(text, at)
        values.append(value)
        at = BETWEEN.match(text, at).end()
    return values


def call_of(value: dict) -> dict:
    """An object with a name and arguments, as models write it -> a call. Raises an error for other values."""
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    function = dict(name=value["name"] + "", arguments={**arguments})
    # Files of a run can hold neither NaN nor a lone surrogate.
    text = json.dumps(function, allow_nan=False, ensure_ascii=False).encode()
    return {"type": "function", "function": json.loads(text)}


# ----------------------------------------------------------------------------------------------------------------------
# Calls


def call_tool(functions: Mapping[str, Callable], call: dict, seconds: float) -> tuple[str | None, bool]:
    """-> (what the model reads, did the call fail?), after `seconds` at the latest. Never raises. Threads may use it.

    The text is str(what the function returns), of any length, or None; or str({"error": ...}) if the call cannot be
    made or the function raises or is late, as in TRL.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        if name not in functions:
            problem = f"there is no tool {name:.60}; the tools are {', '.join(functions)}"
            raise ValueError(call.get("error", problem))
        return text_within(functions[name], arguments, seconds), False
    except Problem as problem:
        return str(problem), True
    except OutOfTime:
        problem = f"{name} took longer than {seconds:g} seconds"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = text_of(error) or type(error).__name__
    return str({"error": problem[:MAX_ERROR]}), True


def text_within(function: Callable, arguments: dict, seconds: float) -> str | None:
    """str(what a function returns), or None. Raises OutOfTime if this and its str take longer than `seconds`."""

    def work():
        result = awaited(function(**deepcopy(arguments)), seconds)  # of a message, which stays
        return None if result is None else well_formed(str(result))

    return complete(work, {}, seconds)
