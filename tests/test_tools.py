"""Untrusted text becomes calls or text, fast; no tool stops, kills or doubles the process."""

import asyncio
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import AsyncMock, Mock

import pytest

from data.episodes import Episode, make_toolbox
from data.tools import call_tool, load_tools, methods_of, parse_calls, schema_of
from examples.tools import calc, python
from helpers.episodes import call, hermes, tool_of
from helpers.errors import PanicException, assert_refused
from settings import GRPOSettings
from snug.options import SnugError
from snug.tokenizer import get_tokenizer

TOOLS = dict(calc=calc, python=python)
bare = tool_of("bare", lambda: None)
search = tool_of("search", lambda query, top=3, exact=None: None, query=str, top=int, exact=bool)
every = tool_of("every", lambda a, b, c, d: None, a=list[int], b=dict[str, float], c=Literal["x", "y"], d=Any)


class Counter:
    """An environment, with state and a property that must not be computed."""

    def __init__(self):
        self.count = 0

    def reset(self, **columns):
        self.count = 0

    def get_reward(self):
        return 1.0

    def reply(self, text):
        return None

    @property
    def costly(self):
        raise AssertionError

    def increment(self, by: int) -> int:
        """Add to the counter.

        Args:
            by: how much
        """
        self.count += by
        return self.count

    def add(self) -> None:
        """Add one."""
        self.count += 1

    def _hidden(self):
        pass


def undescribed(a: int):
    """Add."""


HINTS = tuple[int, ...], "NoSuchType"


@pytest.mark.parametrize(
    "function", [lambda a: a, undescribed, *(tool_of("add", lambda a: a, a=hint) for hint in HINTS)]
)
def test_a_function_without_a_schema_is_refused(function):
    assert_refused("^tool .* has no JSON schema; a tool needs a docstring ", schema_of, function)


def test_transformers_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    assert_refused("^tools and environments need transformers: pip install transformers", schema_of, search)


def test_tools_are_loaded_by_name(tmp_path, monkeypatch):
    other = 'def calc(a: int):\n    """Add.\n\n    Args:\n        a: a number\n    """\n'
    (tmp_path / "snug_test_tools.py").write_text(f"{other}class Game:\n    def reset(self): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    tools = load_tools(["examples.tools:python", "snug_test_tools:calc", "mine"], {"mine": search})
    assert list(tools) == ["python", "calc", "search"] and tools["calc"] is not TOOLS["calc"]
    assert load_tools([]) == {} and list(load_tools(["mine", "mine"], {"mine": search})) == ["search"]
    with pytest.raises(SnugError, match="tools='snug_test_tools:calc': two tools have the name calc; rename one"):
        load_tools(["examples.tools:calc", "snug_test_tools:calc"])
    assert_refused("tools='calk': write module:name, such as examples.tools:calc", load_tools, ["calk"])
    tokenizer = get_tokenizer("bytes")
    tokenizer.chat = SimpleNamespace(tools=["another run's"])
    assert make_toolbox(GRPOSettings(environment="snug_test_tools:Game"), tokenizer).schemas == []
    assert tokenizer.chat.tools is None  # templates tell no tools from a list of none
    tokenizer.chat = None
    toolbox = make_toolbox(GRPOSettings(environment="Counter"), tokenizer, {"Counter": Counter})
    assert toolbox.make_environment is Counter
    with pytest.raises(SnugError, match="^tools: environment=Counter has a method add, too; rename one$"):
        functions = {"Counter": Counter, "add": tool_of("add", lambda: 1)}
        make_toolbox(GRPOSettings(tools=["add"], environment="Counter"), tokenizer, functions)
    assert_refused("environment='Game': write module:name", make_toolbox, GRPOSettings(environment="Game"), tokenizer)


def test_methods_of_an_environment():
    counter = Counter()
    methods = methods_of(counter)
    assert list(methods) == ["add", "increment"]
    assert call_tool(methods, call("increment", by=2), 5) == ("2", False) and counter.count == 2
    assert methods_of(None) == {}


# The tools of examples/

SUMS = {"1+2*3": "7", "(1 + 2) / 4": "0.75", "0.1 + 0.2": "0.3", "1/3": "0.333333333333", " -(+3) ": "-3", "10/5": "2"}
NO_SUMS = ["", "1 if 1 else 2", *"a __import__('os') 1+ () 1,2 '1'*9 1j True ... 2**2 7//2".split()]
NO_SUMS += ["1<2", "9**9**9", "1" * 201, "\x00", "(" * 100, "1\n+2", "(1)(2)", "²", "1/0", "7%3", "1-~1"]


@pytest.mark.parametrize("text", [*SUMS, *NO_SUMS])
def test_sums(text):
    began = time.monotonic()
    reply, failed = call_tool(TOOLS, call("calc", expression=text), 5)
    assert failed == (text in NO_SUMS) and time.monotonic() - began < 1
    assert "no expression of numbers" in reply if failed else reply == SUMS[text]


def test_python_prints():
    def reply(code):
        return call_tool(TOOLS, call("python", code=code), 60)

    codes = ["print(1)\nimport math\nprint(math.pi)", "x = 1", "print('a')\n1/0", "1 +", "raise SystemExit(3)"]
    assert len(reply("raise ValueError('x' * 10**5)")[0]) < 600
    codes += ["print('x' * 10**6)", "open('/tmp/snug', 'w')", "import os\nprint(os.fork())", "print(x)"]
    with ThreadPoolExecutor(4) as pool:  # several at once, each with a fresh interpreter
        texts, failed = zip(*pool.map(reply, codes), strict=True)
    # The model reads what is raised behind what was printed, as at a prompt.
    assert not any(failed)
    assert texts[:3] == ("1\n3.141592653589793\n", "", "a\nZeroDivisionError: division by zero\n")
    assert texts[3].startswith("SyntaxError: ") and texts[4] == "SystemExit: 3\n" and len(texts[5]) == 10_000
    assert all("PermissionError: " in text for text in texts[6:8]) and texts[8].startswith("NameError: ")
    ended = "the process ended, or its message is too long or no JSON"
    assert reply("import os\nos._exit(0)") == (str({"error": ended}), True)


def test_code_that_does_not_end(monkeypatch):
    """The caller does not wait for it, and the next call works."""
    monkeypatch.setattr("examples.tools.PYTHON_SECONDS", 0.5)
    monkeypatch.setattr("examples.tools.POOL", ThreadPoolExecutor(1))
    assert call_tool(TOOLS, call("python", code="print(2)"), 60) == ("2\n", False)
    endless = call("python", code="while True: pass")
    assert call_tool(TOOLS, endless, 0.1) == ("{'error': 'python took longer than 0.1 seconds'}", True)
    assert call_tool(TOOLS, call("python", code="print(3)"), 60) == ("3\n", False)
    assert call_tool(TOOLS, endless, 60)[0] == "{'error': 'took longer than 0.5 seconds'}"


two = tool_of("two", lambda a, b="x": None, a=str, b=str)
both = tool_of("both", lambda a, b: None, a=str, b=str)
perhaps = tool_of("perhaps", lambda a="x": None, a=str)
number = tool_of("number", lambda a, b="x": None, a=int, b=str)
named = tool_of("named", lambda query, top=3, place="": None, query=str, top=int, place=str)
SCHEMAS = [schema_of(function) for function in (*TOOLS.values(), every, search, bare, Counter().increment)]
SCHEMAS += map(schema_of, (two, both, perhaps, number, named))


# SUM is the right reading. F: the start of an object, up to its arguments.
SUM, CODE = call("calc", expression="1+1"), call("python", code="a=1\nprint(a)\t#")
ONE, F, ARGS = hermes("calc", expression="1+1"), '{"name": "calc", "arguments": ', '{"expression": "1+1"}'


def xml(name, **arguments):
    """As Qwen3.5's template writes it."""
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


READ = [  # form, text, content, calls
    ("hermes", f"{ONE}\n{hermes('f', a=[1, None])} x", "x", [SUM, call("f", a=[1, None])]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": ";"}, "id": 7}</tool_call>', "", [call("f", a=";")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}', "", [call("f", a=2)]),
    ("hermes", f"Let me see.\n\n<tool_call>\n{F}{ARGS}}}", "Let me see.", [SUM]),
    # Hermes 2 Pro
    ("hermes", f'<tool_call>{{"arguments": {ARGS}, "name": "calc"}}</tool_call>\nDone.', "Done.", [SUM]),
    ("hermes", '<tool_call>{"name": "python", "arguments": {"code": "a=1\nprint(a)\t#"}}</tool_call>', "", [CODE]),
    (
        "xml",
        f"Well.\n\n{xml('search', query='1', top='5', exact='True')}\n{xml('none')}",
        "Well.",
        [call("search", query="1", top=5, exact="True"), call("none")],
    ),
    ("xml", "<tool_call><function=f><parameter=a>[1]</function>", "", [call("f", a=[1])]),
    ("xml", xml("python", code="a=1\nprint(a)\t#"), "", [CODE]),
    ("xml", xml("f", a='[1, {"b": "c"}]', d="<parameter=e>"), "", [call("f", a=[1, dict(b="c")], d="<parameter=e>")]),
    ("llama", ' {"name": "f", "parameters": {"a": "x; y"}}\n', "", [call("f", a="x; y")]),
    ("llama", f'<|python_tag|>{{"type": "function", "name": "calc", "parameters": {ARGS}}}', "", [SUM]),
    ("llama", '{"name": "python", "parameters": {"code": "a=1\nprint(a)\t#"}}', "", [CODE]),
    ("inline", "<calc>1</calc> <calc>2</calc>.", "<calc>1</calc>", [call("calc", expression="2")]),
    ("inline", f"1+1 = <calc>{ARGS}</calc>", "1+1 =", [SUM]),
    ("inline", "<python>a=1\nprint(a)\t#</python>", "", [CODE]),
    ("inline", '<python>{"a": 1}</python>', "", [call("python", code='{"a": 1}')]),
    ("inline", '<search>a "b"\n</search>', "", [call("search", query='a "b"\n')]),
    ("inline", '<increment>{"by": 2}</increment>', "", [call("increment", by=2)]),
    ("inline", '<every>{"a": [1], "b": {}}</every>', "", [call("every", a=[1], b={})]),
    ("inline", "<bare>{}</bare>", "", [call("bare")]),
    ("inline", "<two>c</two>", "", [call("two", a="c")]),
    ("inline", '<both>{"a": "c", "b": "d"}</both>', "", [call("both", a="c", b="d")]),
    ("inline", "<perhaps>c</perhaps>", "", [call("perhaps", a="c")]),
    ("inline", '<number>{"a": 1, "b": "y"}</number>', "", [call("number", a=1, b="y")]),
    ("inline", "<named>a b</named>", "", [call("named", query="a b")]),
    ("inline", '<named>{"top": 5, "query": "q"}</named>', "", [call("named", query="q", top=5)]),
]
# Texts without a call.
NO_CALL = {"inline": ["<sum>1</sum>", "</calc> <calc>", "1</calc>"], "llama": ["", "[1]", '{"name": "calc", "para']}
NO_CALL["llama"] += ['{"name": "Ada", "age": 36}', 'I use {"name": "f", "parameters": {}}']
NO_CALL["llama"] += ['{"name": "f", "parameters": {}} Done']
READ += [(form, text, text, []) for form, texts in NO_CALL.items() for text in texts]
REAL, ASIDE = hermes("calc", expression="2+2"), hermes("calc", expression="1+1")
TWO = [call("calc", expression="2+2")]
LLAMA = [json.dumps(dict(name="calc", parameters=dict(expression=text))) for text in ("1+1", "2+2")]
ASIDES = f"<think>a</think>b<think>{ASIDE}</think>"
THOUGHTS = [  # form, does the prompt end with <think>, text, content, calls
    ("hermes", False, f"<think>maybe {ASIDE}</think>{REAL}", f"<think>maybe {ASIDE}</think>", TWO),
    ("hermes", True, f"maybe {ASIDE}</think>\n\n{REAL}", f"maybe {ASIDE}</think>", TWO),
    ("hermes", False, f"<think>a <tool_call> b</think>\n{REAL} ok", "<think>a <tool_call> b</think>\n ok", TWO),
    ("hermes", True, f"I write <tool_call> now.</think>{REAL}", "I write <tool_call> now.</think>", TWO),
    ("hermes", False, ASIDES + REAL, ASIDES, TWO),
    ("hermes", False, f"\n<think>hm {REAL}", f"<think>hm {REAL}", []),
    ("hermes", True, f"hm {REAL}", f"hm {REAL}", []),
    ("hermes", False, "<think>\n\n</think>\n\n" + REAL, "<think>\n\n</think>", TWO),
    # No thought was opened: the tags are what the call is about.
    ("hermes", False, hermes("f", code="'</think>'"), "", [call("f", code="'</think>'")]),
    ("llama", False, f"<think>maybe {LLAMA[0]}</think>\n{LLAMA[1]}", f"<think>maybe {LLAMA[0]}</think>", TWO),
    ("llama", True, f"{LLAMA[0]}</think>{LLAMA[1]}", f"{LLAMA[0]}</think>", TWO),
    ("llama", True, LLAMA[0], LLAMA[0], []),
    ("llama", False, '{"name": "f", "parameters": {"a": "<think>"}}', "", [call("f", a="<think>")]),
    ("inline", True, "hm <calc>2+2</calc>", "hm", TWO),  # the turn ends there, in a thought, too
]


@pytest.mark.parametrize(
    "form, thinks, text, content, calls", [*((form, False, *its) for form, *its in READ), *THOUGHTS]
)
def test_calls_are_read_and_a_thought_has_none(form, thinks, text, content, calls):
    """It ends with the last </think>."""
    assert parse_calls(text, form, SCHEMAS, thinks) == (content, calls)


DEEP = '{"name": "f", "arguments": {"a": ' + "[" * 50_000
BAD = ["", "{", "x", "[]", "1", '"f"', "{}", '{"name": "f"}', '{"name": 1, "arguments": {}}', DEEP]
BAD += [f"{F}{ARGS}}}}}", f"[{F}{ARGS}}}]", f"{F}{json.dumps(ARGS)}}}", f"{F}{ARGS},}}"]
BAD += ["{'name': 'calc', 'arguments': {}}"]
BAD += ["<function=calc><parameter=expression>1+1</parameter></function>", '{"name": "f", "arguments": {"a": "\\d"}}']
BAD += ['{"name": "f", "arguments": []}', '{"name": "f", "arguments": "[]"}', '{"name": null, "arguments": {}}']
BAD += ['{"name": "\\ud800", "arguments": {}}', '{"name": "f", "arguments": {}} {}', '{"name": "f", "arguments": {}} x']
NUMBERS = "NaN", "-Infinity", "1e999", "9" * 5000, '"\\udfff"'
BAD += ['{"name": "f", "arguments": {"a": ' + value + "}}" for value in NUMBERS]


@pytest.mark.parametrize("block", BAD, ids=range(len(BAD)))
def test_a_call_that_cannot_be_read_gets_an_answer(block):
    content, calls = parse_calls(f"a<tool_call>{block}</tool_call>b{ONE}", "hermes", SCHEMAS)
    assert content == "ab" and calls[1] == call("calc", expression="1+1") and len(calls) == 2
    assert calls[0]["function"] == {"name": "", "arguments": {}} and calls[0].keys() == call("").keys() | {"error"}
    text, failed = call_tool(TOOLS, calls[0], 5)
    assert failed and "a call must be a JSON object" in text
    assert parse_calls(block, "llama", SCHEMAS) == (block.strip(), [])
    for name in ("increment", "every", "number", "both"):
        [bad] = parse_calls(f"<{name}>{block}x</{name}>", "inline", SCHEMAS)[1]
        assert bad["error"] == calls[0]["error"]


BAD_XML = ["", "calc", "{}", "<function=calc>", "<function=f>x</function>", "<function=>\n</function>"]
BAD_XML += [
    f"<function=f>{part}</function>" for part in ("<parameter=a>1</parameter>b", "<parameter=a>NaN</parameter>")
]


@pytest.mark.parametrize("block", BAD_XML)
def test_xml_that_cannot_be_read_gets_an_answer(block):
    content, calls = parse_calls(f"a<tool_call>{block}</tool_call>b{xml('calc', expression='1+1')}", "xml", SCHEMAS)
    assert (content, calls[1]) == ("ab", SUM) and "a call must be <function=" in calls[0]["error"]
    assert calls[0]["function"] == {"name": "", "arguments": {}}


def test_any_text_is_read_at_once():
    """50,000 characters; nothing raises, and the time does not explode."""
    pieces = ["<tool_call>", "</tool_call>", "<calc>", "</calc>", '{"name":', "\ud800", *'{}["\\; :9']
    rng, began = random.Random(2), time.monotonic()
    texts = ["".join(rng.choices(pieces, k=50_000))[:50_000] for _ in range(5)]
    pieces += [
        '{"a":',
        "<tool_call>{",
        "<tool_call><function=f>",
        "<parameter=a>",
        "</function>",
        '{"name":"f","arguments":{}};',
    ]
    texts += [(piece * 50_000)[:50_000] for piece in pieces]
    for text in texts:
        for form in ("hermes", "xml", "llama", "inline"):
            content, calls = parse_calls(text, form, SCHEMAS)
            assert len(content) <= len(text) and all(each["function"].keys() == {"name", "arguments"} for each in calls)
    assert time.monotonic() - began < 10


def ok(a, b=0):
    return [a, b]


async def later(a):
    await asyncio.sleep(0.01)
    return a


FUNCTIONS = dict(ok=ok, fail=Mock(side_effect=Exception("x" * 10_000)))
FUNCTIONS |= dict(leave=Mock(side_effect=SystemExit("bye")), later=later)
FUNCTIONS |= dict(mute=Mock(side_effect=type("TypeError", (TypeError,), dict(__str__=lambda self: 1 / 0))))
FUNCTIONS |= dict(none=lambda: None, text=lambda: "a\n", big=lambda: "x" * 10**7)
CALLS = [
    (call("ok", a=1), "[1, 0]", False), (call("none"), None, False), (call("text"), "a\n", False),
    (call("big"), "x" * 10**7, False), (call("later", a=5), "5", False),
    (call("fail", a=1), str({"error": "x" * 500}), True), (call("leave"), "{'error': 'bye'}", True),
    (call("mute"), "{'error': 'TypeError'}", True),
    (call("ok"), str({"error": "ok() missing 1 required positional argument: 'a'"}), True),
    (call("later", b=1), str({"error": "later() got an unexpected keyword argument 'b'"}), True),
    (call("nothing"), f"{{'error': 'there is no tool nothing; the tools are {', '.join(FUNCTIONS)}'}}", True),
]  # fmt: skip


@pytest.mark.parametrize("tool_call, text, failed", CALLS)
def test_what_a_call_answers(tool_call, text, failed):
    assert call_tool(FUNCTIONS, tool_call, 10) == (text, failed)


ENDS = [PanicException("a"), SystemExit(3), GeneratorExit("a"), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ENDS, ids=repr)
@pytest.mark.parametrize("kind", ["plain", "async", "reply"])
def test_no_exception_of_a_tool_ends_the_run(error, kind):
    """In the threads where tools run. Of an environment it is an error with the environment's name."""

    said = str({"error": getattr(error, "code", 0) and "3" or (error.args and "a") or type(error).__name__})
    with ThreadPoolExecutor(1) as pool:
        if kind == "reply":
            toolbox = make_toolbox(GRPOSettings(environment="Counter"), get_tokenizer("bytes"), {"Counter": Counter})
            toolbox.environments[0].reply = Mock(side_effect=error)
            episode = Episode(toolbox, dict(prompt="a"), toolbox.environments[0])
            assert_refused("^environment Counter.reply raised", pool.submit(episode.of_environment, "reply", {}).result)
        else:
            functions = FUNCTIONS | dict(f=(Mock if kind == "plain" else AsyncMock)(side_effect=error))
            calls = [call("f"), call("ok", a=1), call("later", a=5)]
            answers = [pool.submit(call_tool, functions, each, 10).result() for each in calls]
            assert answers == [(said, True), ("[1, 0]", False), ("5", False)]


def test_a_tool_that_changes_its_arguments_does_not_change_the_transcript():
    made = call("ordered", numbers=[3, 1, 2])
    assert call_tool(dict(ordered=lambda numbers: numbers.sort() or numbers), made, 5) == ("[1, 2, 3]", False)
    assert made == call("ordered", numbers=[3, 1, 2])


def test_a_long_name_does_not_hide_the_tools():
    unknown = call_tool(FUNCTIONS, call("x" * 10**6), 10)[0]
    assert len(unknown) < 600 and "the tools are ok, fail, " in unknown


class Endless:
    def __str__(self):
        while not over.wait(0.001):
            pass
        return "late"


over = threading.Event()  # what no thread can stop ends with the test


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_tool_that_is_late(in_a_thread):
    """The answer comes in time, also if the text of a result is late. A coroutine and the main thread do not go on."""
    ended = threading.Event()
    over.clear()

    def stubborn():
        with suppress(Exception):
            over.wait(0.5)
        return "late"

    def busy():
        try:
            while not over.is_set():
                pass
        finally:
            ended.set()

    async def hang():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        run = (lambda *arguments: pool.submit(call_tool, *arguments).result()) if in_a_thread else call_tool
        for function, stops in {stubborn: False, Endless: False, busy: not in_a_thread, hang: True}.items():
            ended.clear()
            assert run({"f": function}, call("f"), 0.1) == ("{'error': 'f took longer than 0.1 seconds'}", True)
            assert ended.wait(5) or not stops
            over.set() if function is busy else None
        assert run(FUNCTIONS, call("later", a=1), 10) == ("1", False)
