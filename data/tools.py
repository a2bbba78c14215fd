"""Tools: functions that a model calls while it samples; their JSON schemas, how calls are read and made.

    functions = load_tools(["examples.tools:calc", "my_tools:search"])  # {"calc": function, "search": function}
    schemas = [schema_of(function) for function in functions.values()]
    content, calls = parse_calls(text, "hermes", schemas)
    text, failed = call_tool(functions, calls[0], seconds=10)

A tool has type hints and a docstring with "Args:", as for TRL and transformers; examples/tools.py has two.
An environment is an object with state, one for each completion: its public methods are its tools, as in TRL.

A model writes a call in the form that its chat template writes (Chat.call_form):

    hermes  <tool_call>{"name": "calc", "arguments": {"expression": "1+1"}}</tool_call>, any number of them
    xml     <tool_call><function=calc><parameter=expression>1+1</parameter></function></tool_call>, the same
    llama   {"name": "calc", "parameters": {"expression": "1+1"}}, and nothing else in the turn
    inline  <calc>1+1</calc> at the end of the turn

In hermes, xml and llama a thought has no calls. It begins with <think>, at the start of the turn or at the end of the
prompt, and ends with the last </think>.

Left out: other forms of calls, such as Mistral's; checks of an argument's type, as in TRL. A tool can do whatever
Python can, so name only code that you trust.
Tests: tests/test_tools.py.
"""

import inspect
import json
import re
from contextlib import suppress
from copy import deepcopy

from data import imported
from data.calls import OutOfTime, awaited, complete, name_of
from snug.options import SnugError, in_one_line, well_formed

MAX_ERROR = 500  # characters of an error
NO_TOOLS = ("reset", "get_reward", "reply")  # methods of an environment

# ----------------------------------------------------------------------------------------------------------------------
# The user's tools


def load_tools(specs, functions=(), run=""):
    """["module:function", ...] -> {name: function}, in this order.

    functions: {spec: function} of a caller. run: a run's folder. A tool may have a function `start`, which is called
    here. Raises SnugError.
    """
    tools = {}
    for spec in specs:
        tool = imported(spec, "tools", "examples.tools:calc", functions, run)
        if tools.setdefault(name_of(tool), tool) is not tool:
            raise SnugError(f"tools={spec!r}: two tools have the name {name_of(tool)}; rename one")
        if start := getattr(tool, "start", None):
            start()
    return tools


def schema_of(function) -> dict:
    """The function's JSON schema, of its type hints and a docstring with "Args:", as in TRL. Raises SnugError."""
    with in_one_line("tools and environments need transformers: pip install transformers"):
        from transformers.utils import get_json_schema
    with in_one_line(
        f"tool {name_of(function)} has no JSON schema; "
        'a tool needs a docstring with "Args:", and a type hint for each argument'
    ):
        return get_json_schema(function)


def methods_of(environment):
    """-> {name: bound method} of its tools, in the order of names.

    Looks at the class, because looking at the object would compute its properties.
    """
    members = inspect.getmembers(type(environment), inspect.isfunction)
    return {
        name: getattr(environment, name)
        for name, _ in members
        if name[0] != "_" and name not in NO_TOOLS
    }


# ----------------------------------------------------------------------------------------------------------------------
# Calls in text

NO_XML = "a call must be <function=name><parameter=name>value</parameter>...</function>"
UNREADABLE = 'a call must be a JSON object with "name" and "arguments", which must be an object'


def parse_calls(text, form, schemas, thinks=False):
    """What a model wrote -> (the text outside calls, [{"type": "function", "function": {"name", "arguments"}}, ...]).

    form: Chat.call_form. schemas: those of the tools. thinks: the prompt ends with <think>. A call that cannot be read
    has the name "" and a further key "error", a text for the model. The text is untrusted; the time grows with its
    length. Never raises.
    """
    tools = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
    if form == "inline":
        return parse_inline(text, tools)
    thought = ""
    if thinks or text.lstrip().startswith("<think>"):
        before, end, text = text.rpartition("</think>")
        thought = before + end
        if not end:  # the thought goes on
            return text.strip(), []
    if form in ("hermes", "xml"):
        pieces = re.split(r"(?s)<tool_call>(.*?)(?:</tool_call>|\Z)", text)
        calls = [read_call(piece, tools if form == "xml" else None) for piece in pieces[1::2]]
        return (thought + "".join(pieces[::2])).strip(), calls
    call = read_call(text.strip().removeprefix("<|python_tag|>"))
    return ((thought + text).strip(), []) if "error" in call else (thought.strip(), [call])


def parse_inline(text, tools):
    """At most one call, the last, because the turn ends where it does."""
    start, _, rest = text.rpartition("</")
    name = rest.partition(">")[0]
    before, tag, argument = start.rpartition(f"<{name}>")
    if not tag or name not in tools:
        return text.strip(), []
    call = read_call(f'{{"name": "{name}", "arguments": {argument}}}')
    properties, required = tools[name]["properties"], tools[name].get("required", [])
    texts = [key for key in required or properties if properties[key].get("type") == "string"]
    if texts and len(required) < 2 and not properties.keys() & call["function"]["arguments"]:
        call = read_call(json.dumps(dict(name=name, arguments={texts[0]: argument})))
    return before.strip(), [call]


def read_function(text, tools):
    """<function=name> with its parameters -> {"name", "arguments"}. Raises any exception if it is not that.

    A value is JSON, if it can be read and the argument is not a string; else a text, without a newline at both ends.
    It ends with the first </parameter>, as for vLLM.
    """
    name, body = re.fullmatch(r"(?s)\s*<function=([^<>]+)>(.*)</function>\s*", text).groups()
    arguments = {}
    properties = tools.get(name, {}).get("properties", {})
    for part in filter(str.strip, body.split("</parameter>")):
        key, value = re.fullmatch(r"(?s)\s*<parameter=([^<>]+)>\n?(.*?)\n?", part).groups()
        if properties.get(key, {}).get("type") != "string":
            with suppress(Exception):
                value = json.loads(value)
        arguments[key] = value
    return dict(name=name, arguments=arguments)


def read_call(text: str, tools=None):
    """A JSON object with a name and arguments -> a call, or one with an error. A text in it may have raw newlines.

    tools: {name: parameters}, if the call is XML instead."""
    xml = tools is not None
    with suppress(Exception):
        value = read_function(text, tools) if xml else json.loads(text, strict=False)
        function = dict(
            name=value["name"] + "", arguments={**value.get("arguments", value.get("parameters"))}
        )
        # Files of a run can hold neither NaN nor a lone surrogate.
        json.dumps(function, allow_nan=False, ensure_ascii=False).encode()
        return dict(type="function", function=function)
    function, error = dict(name="", arguments={}), NO_XML if xml else UNREADABLE
    return dict(type="function", function=function, error=error)


# ----------------------------------------------------------------------------------------------------------------------
# Calls


def call_tool(functions, call, seconds):
    """A call as of `parse_calls` -> (what the model reads, did it fail?), after `seconds` at the latest. Never raises.

    The text is str(what the function returns), of any length, or None; or str({"error": ...}) if the call cannot be
    made or the function raises or is late, as in TRL. functions: {name: function}. Threads may use it.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name not in functions:
        problem = call.get(
            "error", f"there is no tool {name:.60}; the tools are {', '.join(functions)}"
        )
    else:
        try:
            return text_within(functions[name], arguments, seconds), False
        except OutOfTime:
            problem = f"{name} took longer than {seconds:g} seconds"
        except KeyboardInterrupt:  # Ctrl-C
            raise
        except BaseException as error:
            problem = type(error).__name__
            with suppress(Exception):  # its __str__ may raise, too
                problem = str(error) or problem
    return str({"error": problem[:MAX_ERROR]}), True


def text_within(function, arguments, seconds):
    """str(what a function returns), or None. Raises OutOfTime if this and its str take longer than `seconds`."""

    def work():
        result = awaited(function(**deepcopy(arguments)), seconds)  # of a message, which stays
        return None if result is None else well_formed(str(result))

    return complete(work, seconds)
