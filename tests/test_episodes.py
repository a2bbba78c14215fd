"""Episodes: replies that are written while a row is sampled, against `generate_naive`, which reads everything again.

Then tools and environments in conversations whose turns are given: messages, ids and rewards.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from functools import cache

import numpy as np
import pytest

import grpo
from data.episodes import CUT, LONGEST_TOKEN, Episodes, as_text, make_toolbox
from helpers.episodes import CHATS, call, hermes, sampled, says, tool_of
from helpers.errors import assert_refused
from helpers.models import DEVICE, add_adapters, make_flat_model
from helpers.rollouts import rows_of
from helpers.tasks import written
from helpers.tokenizers import HERMES, added, folder_of, qwen_like, tool, user
from runs.prepare import prepare
from sample import generate_naive, sample_groups
from settings import GRPOSettings
from snug.decoding import decode_batch
from snug.tokenizer import get_tokenizer

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
STOP = 3
LONGEST = 90  # tokens of an episode


class Replies:
    """Replies of 0 to 60 tokens that depend on the row, its turn and the turn's ids; 1 to 6 turns a row."""

    def __init__(self, longest=60):
        self.longest, self.turns, self.asked = longest, Counter(), {}

    def __call__(self, row, ids):
        self.turns[row] += 1
        self.asked.setdefault(row, []).append(ids)
        if self.turns[row] > row % 6:
            return None
        draw = np.random.default_rng([row, self.turns[row], *ids])
        length = draw.choice([0, 1, int(draw.integers(2, 12)), self.longest], p=[0.2, 0.2, 0.55, 0.05])
        return draw.integers(0, 16, length).tolist()  # stop tokens, too


def second_five(ids):
    """Other fives, of earlier turns or of replies, do not count."""
    return ids[-1] == 5 and ids.count(5) == 2


# shape, options of the sampler, of the sampler alone
CASES = {
    "all rows at once": ("gpt2", {}, {}), "slots filled again": ("llama", {}, dict(max_batch=5)),
    "one slot": ("llama", {}, dict(max_batch=1)), "the likeliest tokens": ("gpt2", dict(temperature=0.0), {}),
    "stop strings": ("llama", dict(is_over=second_five, temperature=0.8), {}),
    "stop strings, few slots": ("llama", dict(is_over=second_five, temperature=0.8), dict(max_batch=7)),
    "LoRA": ("llama", dict(seed=6), dict(max_batch=9)),
    "states": ("linear", {}, dict(max_batch=5)),
    "states, stop strings": ("linear", dict(is_over=second_five, temperature=0.8), {}),
}  # fmt: skip


@cache
def model_of(shape, adapters):
    model = make_flat_model(shape, block_size=LONGEST + 8)
    return add_adapters(model, rank=2) if adapters else model


@cache
def naive_rows(shape, adapters, **options):
    """-> (the oracle's rows, its Replies)"""
    model, replies = model_of(shape, adapters), Replies()
    options |= dict(respond=replies)
    rows = [(4 * p + i, prompt) for p, prompt in enumerate(PROMPTS) for i in range(4)]
    return [generate_naive(model, prompt, LONGEST, row=row, **options) for row, prompt in rows], replies


# How often the host looks, when idle slots leave, how many rows wait for a reply.
WAYS = [(1, 1 / 4, 1 / 8), (3, 0.0, 0.0), (4, 0.5, 1.0)]
LONGER = "all rows at once", "one slot", "stop strings", "LoRA"
SHORT = [(case, *WAYS[i % 3]) for i, case in enumerate(CASES) if case not in LONGER]
LONG = [(case, *way) for case in CASES for way in WAYS if (case, *way) not in SHORT]


@pytest.mark.parametrize(
    "case, every, leave, wait", [*dict.fromkeys(SHORT), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_equals_the_naive_generator(case, every, leave, wait, monkeypatch):
    for setting, value in (("LOOK_EVERY", every), ("SHRINK_AT", leave), ("SHRINK_ABOVE", 1), ("REPLY_AT", wait)):
        monkeypatch.setitem(getattr(decode_batch, setting), DEVICE, value)
    monkeypatch.setitem(decode_batch.REPLY_CONTEXT, DEVICE, 3 * (LONGEST + 8))  # three replies at a time
    shape, options, own = CASES[case]
    options = dict(stop_token=STOP, seed=8) | options
    model, replies = model_of(shape, case == "LoRA"), Replies()
    rollouts = sample_groups(model, PROMPTS, 4, LONGEST, respond=replies, **options, **own)
    naive, naive_replies = naive_rows(shape, case == "LoRA", **options)
    assert replies.asked == naive_replies.asked  # every turn once, with what was sampled in it
    for i, (ids, logprobs) in enumerate(rows_of(rollouts)):
        naive_ids, expected = naive[i]
        assert ids == naive_ids
        mask = rollouts.mask[i].tolist()
        assert mask == [int(value is not None) for value in expected] + [0] * (len(mask) - len(ids))
        assert logprobs == pytest.approx([value or 0.0 for value in expected], abs=1e-5)
        assert all(value == 0 for value, drawn in zip(logprobs, mask, strict=False) if not drawn)
        assert bool(rollouts.stopped[i]) == (replies.turns[i] == i % 6 + 1)  # respond said so
    if case != "the likeliest tokens":
        assert {1, 2, 3, 4} <= set(replies.turns.values()) and not rollouts.stopped.all()
        assert (rollouts.mask == 0).sum() > 150


def test_an_error_in_respond_ends_the_call_after_the_others_returned():
    done = []

    def respond(row, ids):
        if row == 3:
            raise ValueError("no tool")
        time.sleep(0.05)
        done.append(row)

    with pytest.raises(ValueError, match="no tool"):
        sample_groups(make_flat_model(), PROMPTS, 3, 8, stop_token=tuple(range(16)), respond=respond)
    finished = len(done)
    time.sleep(0.1)
    assert len(done) == finished


# Conversations: the turns are given, everything else is real.

QUESTION = [dict(role="user", content="How much?")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """-> {form: the folder of a tokenizer}"""
    pytest.importorskip("transformers", reason="pip install -r requirements-tools.txt")
    made = {}
    for form, (family, template, end) in CHATS.items():
        config = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=template, eos_token=end, bos_token="<s>")
        made[form] = folder_of(tmp_path_factory.mktemp(form), family(), tokenizer_config=config)
    return made


@pytest.fixture
def chats(folders):
    return {form: get_tokenizer(folder) for form, folder in folders.items()}


def talk(monkeypatch, tokenizer, *turns, prompt=QUESTION, longest=300, functions=None, **options):
    """-> (the messages of one completion with these turns, its Rollouts, the Episodes)"""
    pytest.importorskip("transformers", reason="pip install -r requirements-tools.txt")
    toolbox = make_toolbox(GRPOSettings(**dict(tools=["examples.tools:calc"]) | options), tokenizer, functions or {})
    episodes = Episodes(toolbox, tokenizer, [dict(prompt=prompt)], 1)
    rollouts = sampled(monkeypatch, tokenizer, episodes, [turns], longest)
    [completion] = episodes.finish(rollouts)
    return completion, rollouts, episodes


def assistant(content, *calls):
    return dict(role="assistant", content=content) | (dict(tool_calls=list(calls)) if calls else {})


def llama(name, **arguments):
    return json.dumps(dict(name=name, parameters=arguments), ensure_ascii=False)


SUM, ANSWER = call("calc", expression="6*7"), [tool("42"), assistant("42.")]
UNREADABLE = 'a call must be a JSON object with "name" and "arguments", which must be an object'
NO_SUM = tool("{'error': 'there is no tool sum; the tools are calc'}", "sum")
TURNS = {  # form, turns, the messages, how many calls failed
    "hermes": ("hermes", ["Hm. " + hermes("calc", expression="6*7"), "42."], [assistant("Hm.", SUM), *ANSWER], 0),
    "hermes, two calls": (
        "hermes",
        [hermes("calc", expression="1") + "\n" + hermes("sum", a=1), "a", "never said"],
        [assistant("", call("calc", expression="1"), call("sum", a=1)), tool("1"), NO_SUM, assistant("a")],
        1,
    ),
    "hermes, not readable": (
        "hermes",
        ["<tool_call>{calc</tool_call>", "Sorry."],
        [assistant("", call("") | dict(error=UNREADABLE)), tool(str(dict(error=UNREADABLE)), ""), assistant("Sorry.")],
        1,
    ),
    "hermes, no call": ("hermes", ["42", "never said"], [assistant("42")], 0),
    "llama": ("llama", [llama("calc", expression="6*7"), "42."], [assistant("", SUM), *ANSWER], 0),
    "hermes, a good call behind a bad one": (
        "hermes",
        [hermes("sum") + hermes("calc", expression="6*7"), "42."],
        [assistant("", call("sum"), SUM), NO_SUM, *ANSWER],
        1,
    ),
    "llama, a text with a call": ("llama", ["I " + llama("calc", expression="1")], None, 0),
    "inline": ("inline", ["6*7 = <calc>6*7</calc>", "42."], [assistant("6*7 =", SUM), *ANSWER], 0),
    "inline, one after the other": ("inline", ["<calc>6*7</calc>", "<calc>6*</calc>", "42."], None, 1),
    "inline, a tag that was not opened": ("inline", ["6*7</calc>", "never said"], [assistant("6*7</calc>")], 0),
}


@pytest.mark.parametrize(
    "case, as_a_text",
    [*((case, False) for case in TURNS), *((case, True) for case in TURNS if case.startswith("inline"))],
)
def test_what_is_said_and_called(case, as_a_text, chats, monkeypatch):
    """In a chat; inline also behind a prompt of text. The mask is 1 on what was said, and the ids are those."""
    form, turns, expected, errors = TURNS[case]
    tokenizer = chats[form]
    messages, rollouts, episodes = talk(monkeypatch, tokenizer, *turns, prompt="How much? " if as_a_text else QUESTION)
    if expected:
        assert messages == expected
    assert episodes.figures()["tool_errors"] == [errors] and rollouts.stopped.all()
    [(ids, logprobs)] = rows_of(rollouts)
    mask = rollouts.mask[0].tolist()
    said = [i for i, drawn in zip(ids, mask, strict=True) if drawn]
    turns = [turn for turn in turns if turn != "never said"]
    ends = [[tokenizer.stop_token] * (form != "inline" or "</" not in turn) for turn in turns]
    spoken = [tokenizer.encode(turn) + end for turn, end in zip(turns, ends, strict=True)]
    assert said == sum(spoken, []) and logprobs == [-1.0 * drawn for drawn in mask]
    results = [message for message in messages if message["role"] == "tool"]
    assert (0 in mask) == bool(results)
    if form == "inline" and results:
        written = tokenizer.decode([i for i, drawn in zip(ids, mask, strict=True) if not drawn])
        assert written == "".join(f"<result>{message['content']}</result>" for message in results)
    assert as_text(messages).count("  -> ") == sum(len(message.get("tool_calls", [])) for message in messages)


@pytest.mark.parametrize("which", [0, 1])
def test_a_turn_may_end_with_any_of_the_stop_tokens(which, tmp_path, monkeypatch):
    """The answer is written behind it, without a second end of the turn."""
    spec = qwen_like()
    ids = {each["content"]: each["id"] for each in spec["added_tokens"]}
    files = dict(tokenizer_config=dict(chat_template=HERMES, eos_token="<|im_end|>"))
    files |= dict(generation_config=dict(eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]]))
    tokenizer = get_tokenizer(folder_of(tmp_path, spec, **files))
    turn = [*tokenizer.encode(hermes("calc", expression="6*7")), tokenizer.stop_tokens[which]]
    messages, rollouts, _ = talk(monkeypatch, tokenizer, turn, "42.")
    assert messages == [assistant("", SUM), *ANSWER] and rollouts.stopped.all()
    said = [*turn, *tokenizer.encode_reply([tool("42")], True), *says(tokenizer, "42.")[0]]
    assert rows_of(rollouts)[0][0] == said


def test_an_inline_call_of_any_tool_ends_a_turn_in_any_row(chats, monkeypatch):
    """Beside rows of chats, which call otherwise, and beside the run's stop string."""
    tokenizer = chats["hermes"]
    options = GRPOSettings(tools=["examples.tools:calc", "search"])
    toolbox = make_toolbox(options, tokenizer, dict(search=search))
    rows = [dict(prompt="How much? "), dict(prompt=QUESTION)]
    episodes = Episodes(toolbox, tokenizer, rows, 3, stop_string="END")
    first, second, third = map(tokenizer.encode, ("<calc>6*7</calc>", "<search>a</search>", "c END"))
    turns = [[first, "42."], [second, "b"], [third], *[["a"]] * 3]
    rollouts = sampled(monkeypatch, tokenizer, episodes, turns, 99)
    completions = episodes.finish(rollouts)
    assert completions[0] == [assistant("", SUM), *ANSWER] and rollouts.stopped.all()
    found = [assistant("", call("search", query="a")), tool('3 of "a"\n', "search"), assistant("b")]
    assert completions[1:] == [found, [assistant("c END")], *[[assistant("a")]] * 3]


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_conversation_has_the_ids_of_transformers(form, folders, chats, monkeypatch):
    """Schemas of tools, calls, results, an answer of the user simulator, another call, the last answer."""
    transformers = pytest.importorskip("transformers")
    folder, ours = folders[form], chats[form]
    write = dict(hermes=hermes, llama=llama)[form]
    asked = write("calc", expression="6*7")
    turns = ["I compute." + "\n" + asked if form == "hermes" else asked, "It is 42. Is this all?"]
    turns += [write("search", query='a "b" é', top=2), "Bye."]
    functions = {"search": search, "m:Simulator": Simulator}
    options = dict(functions=functions, tools=["examples.tools:calc", "search"], environment="m:Simulator")
    messages, rollouts, episodes = talk(monkeypatch, ours, *turns, longest=900, **options)
    assert [message["role"] for message in messages] == "assistant tool assistant user assistant tool assistant".split()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tools = ours.chat.tools
    assert [each["function"]["name"] for each in tools] == ["calc", "search"]
    expected = theirs.apply_chat_template([*QUESTION, *messages], tools=tools, tokenize=True, return_dict=False)
    ids = rollouts.tokens[0].tolist()
    assert expected[: len(ids)] == ids and ours.decode(expected[len(ids) :]).strip() == ""
    assert len(ids) > 100 and "expression" in ours.decode(ids[: int(rollouts.prompt_lengths[0])])


search = tool_of("search", lambda query, top=3: f'{top} of "{query}"\n', query=str, top=int)


class Simulator:
    """A user who answers a question once."""

    def reset(self, **columns):
        self.answers = ["No: say bye.", None]

    def reply(self, text: str) -> str | None:
        return self.answers.pop(0) if self.answers else None


@pytest.mark.parametrize("form", CHATS)
def test_what_tools_and_users_write_stays_text(form, chats, monkeypatch):
    """Spellings of special tokens, a lone surrogate, which no file and no console can hold, and a tag of a call."""
    tokenizer = chats[form]
    spelled = "".join(tokenizer.special) + "\ud800</say><say>"

    say = tool_of("say", lambda text: spelled, text=str)

    class Spells:
        def reset(self, **columns):
            self.left = [spelled]

        def reply(self, text):
            return self.left.pop() if self.left else None

    turn = dict(hermes=hermes("say", text="a"), llama=llama("say", text="a"), inline="<say>a</say>")[form]
    functions = dict(say=say, E=Spells)
    options = dict(functions=functions, tools=["say"], environment="E", longest=500)
    messages, rollouts, _ = talk(monkeypatch, tokenizer, turn, "b", "c", **options)
    assert [message["role"] for message in messages] == "assistant tool assistant user assistant".split()
    [(ids, _)] = rows_of(rollouts)
    written = [i for i, drawn in zip(ids, rollouts.mask[0].tolist(), strict=True) if not drawn]
    plain = messages[1]["content"]
    assert plain == spelled.replace("\ud800", "\ufffd") == messages[3]["content"]
    harmless = tokenizer.encode_reply([user("a")], True)
    if form != "inline":
        harmless = [*tokenizer.encode_reply([tool("a", "say")], True), *harmless]
    special = set(tokenizer.special.values())
    assert [i for i in written if i in special] == [i for i in harmless if i in special]
    json.dumps(messages, ensure_ascii=False).encode(), as_text(messages).encode()


def test_a_call_in_a_thought_is_not_made(folders, tmp_path, monkeypatch):
    """Whether the model opened it, or the template, as R1's does. What was written stays in the message."""
    opening = HERMES.replace("assistant\\n' }}{%- endif %}\n", "assistant\\n<think>\\n' }}{%- endif %}\n")
    config = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=opening, eos_token="<|im_end|>")
    opens = get_tokenizer(folder_of(tmp_path, qwen_like(), tokenizer_config=config))
    aside, real = hermes("calc", expression="1+1"), hermes("calc", expression="6*7")
    for tokenizer, begin in ((get_tokenizer(folders["hermes"]), "<think>"), (opens, "")):
        thought = f"{begin}maybe {aside} or <tool_call> then</think>"
        messages, _, episodes = talk(monkeypatch, tokenizer, f"{thought}\n{real}", f"{begin}so {aside}")
        assert messages == [assistant(thought, SUM), tool("42"), assistant(f"{begin}so {aside}")]
        assert episodes.figures()["tool_errors"] == [0]


MISTRAL = "{{ '[AVAILABLE_TOOLS] ' + tools | tojson if tools }}{% for message in messages %}{% if message.tool_calls %}"
MISTRAL += "{{ '[TOOL_CALLS] [' + message.tool_calls[0].function | tojson + ']</s>' }}"
MISTRAL += "{% else %}{{ message.content + '</s>' }}{% endif %}{% endfor %}"


def test_a_template_with_another_form_of_calls_is_refused_at_the_start(tmp_path):
    """By what it writes. Behind prompts of text, and without tools, it does not matter."""
    config = dict(chat_template=MISTRAL, eos_token="<|im_end|>")
    folder = folder_of(tmp_path / "mistral", qwen_like(), tokenizer_config=config)
    wanted = r"^tools: snug cannot read the chat template's calls, which end with 'OL_CALLS. .*arguments.*.</s>'; leave out --"
    assert_refused(wanted, prepared_for, tmp_path, folder, {}, tools=["examples.tools:calc"])
    prepared_for(tmp_path, folder, {})
    talks = made_of(lambda self, **columns: None, reply=lambda self, text: "And?")
    for options in (
        dict(prompt="2+2=", tools=["examples.tools:calc"]), dict(environment="E"),
    ):  # which has no tools to call  # fmt: skip
        prepared = prepared_for(tmp_path, folder, dict(E=talks), **options)
        [row] = prepared.task.prompts("train", [0])
        assert Episodes(prepared.toolbox, prepared.tokenizer, [row], 1).episodes[0].form == "inline"


@pytest.mark.parametrize("most, calls", [(1, 0), (2, 1), (3, 2), (0, 3)])
def test_the_call_of_the_last_turn_is_not_made(most, calls, chats, monkeypatch):
    """max_turns; 0 is no limit."""
    made = []
    count = tool_of("count", lambda a: made.append(a), a=int)
    options = dict(functions=dict(count=count), tools=["count"], max_turns=most, longest=600)
    turns = [*(hermes("count", a=i) for i in range(3)), "end"]
    messages, rollouts, episodes = talk(monkeypatch, chats["hermes"], *turns, **options)
    assert made == list(range(calls)) and rollouts.stopped.all()
    said = [message for message in messages if message["role"] == "assistant"]
    assert len(said) == (most or 4) and messages[-1] == said[-1] and ("tool_calls" in said[-1]) == (most > 0)
    assert int(rollouts.completion_lengths[0]) == len(rollouts.mask[0]) and rollouts.mask[0, -1] == 1


@pytest.mark.parametrize("form", CHATS)
def test_long_results_are_cut(form, chats, monkeypatch):
    """To max_tool_tokens tokens, with a mark. Of 10 MB only what may be needed is encoded."""
    tokenizer, encoded = chats[form], []
    results = dict(a="9" * 36, b="9" * 37, c="x y" * 10**7)
    get, encode = tool_of("get", lambda key: results[key], key=str), tokenizer.encode
    noted = lambda text, special=False: encoded.append(len(text)) or encode(text, special)  # noqa: E731
    monkeypatch.setattr(tokenizer, "encode", noted)
    turn = dict(hermes=hermes, llama=llama, inline=lambda name, key: f"<{name}>{key}</{name}>")[form]
    most = len(tokenizer.encode(results["a"]))
    options = dict(functions=dict(get=get), tools=["get"], max_tool_tokens=most, longest=600)
    messages, rollouts, _ = talk(monkeypatch, tokenizer, *(turn("get", key=key) for key in "abc"), "end", **options)
    contents = [message["content"] for message in messages if message["role"] == "tool"]
    assert contents[0] == results["a"] and contents[1].endswith(CUT) and contents[2].endswith(CUT)
    for key, content in zip("bc", contents[1:], strict=True):
        kept = content.removesuffix(CUT)
        assert results[key].startswith(kept) and tokenizer.encode(kept) == tokenizer.encode(results[key][:99])[:most]
    assert max(encoded) <= max(most * LONGEST_TOKEN, 2000) and rollouts.stopped.all()


def test_a_result_of_long_tokens_is_cut(tmp_path, monkeypatch):
    """A token of 64 characters: the beginning that is encoded has fewer tokens than allowed, and the result has more."""
    spec = added(qwen_like(), "=" * 64, special=False)
    config = dict(chat_template=HERMES, eos_token="<|im_end|>")
    tokenizer = get_tokenizer(folder_of(tmp_path, spec, tokenizer_config=config))
    lines = tool_of("lines", lambda count: "=" * 64 * count, count=int)
    turns = [hermes("lines", count=1), hermes("lines", count=3), "end"]
    options = dict(functions=dict(lines=lines), tools=["lines"], max_tool_tokens=2)
    messages, *_ = talk(monkeypatch, tokenizer, *turns, **options)
    contents = [message["content"] for message in messages if message["role"] == "tool"]
    assert contents[0] == lines(1) and contents[1].endswith(CUT) and len(contents[1]) < len(lines(3))


def test_a_second_reply_without_room_is_not_in_the_messages(chats, monkeypatch):
    """Neither of its two results. It is shorter than the first reply, which stays."""
    tokenizer = chats["hermes"]
    turns = [hermes("calc", expression="9*" * 60 + "9"), hermes("calc", expression="1") * 2]
    whole, rollouts, _ = talk(monkeypatch, tokenizer, *turns, "end", longest=600)
    ends = len(says(tokenizer, "end")[0]) + len(tokenizer.encode_reply([tool("1")] * 2, True))
    longest = int(rollouts.completion_lengths[0]) - ends + 1
    messages, rollouts, _ = talk(monkeypatch, tokenizer, *turns, "end", longest=longest)
    assert messages == whole[:3] and not rollouts.stopped.any()


def test_long_answers_of_a_user_are_cut(chats, monkeypatch):
    kind = type("User", (), dict(reset=lambda self, **columns: None, reply=lambda self, text: "9" * 99))
    options = dict(functions=dict(E=kind), tools=[], environment="E", max_tool_tokens=9, max_turns=2)
    messages, *_ = talk(monkeypatch, chats["hermes"], "a", "b", **options)
    assert messages == [assistant("a"), user("9" * 9 + CUT), assistant("b")]


def test_a_person_reads_all_arguments_of_all_calls():
    calls = [call("search", query="a b", top=2), call("calc", expression="1")]
    messages = [assistant("Hm.", *calls), tool("2", "search"), tool("1"), user("Why?"), assistant("")]
    shown = ["Hm.", '  -> search({"query": "a b", "top": 2})', '  -> calc({"expression": "1"})']
    assert as_text(messages).split("\n") == [*shown, "  search: 2", "  calc: 1", "  user: Why?"]


def test_a_reply_without_room_is_not_in_the_messages(chats, monkeypatch):
    """Nor in the ids. With room for one more token that token is a turn, which is cut off."""
    tokenizer = chats["hermes"]
    turn = "Hm. " + hermes("calc", expression="6*7")
    whole, rollouts, _ = talk(monkeypatch, tokenizer, turn, "42, yes.")
    first = len(says(tokenizer, turn)[0])
    written = int((rollouts.mask == 0).sum())
    for longest in (first, first + 1, first + written):
        messages, rollouts, _ = talk(monkeypatch, tokenizer, turn, "42, yes.", longest=longest)
        assert messages == whole[:1] and rows_of(rollouts)[0][0] == says(tokenizer, turn)[0]
        assert not rollouts.stopped.any() and rollouts.mask.all()
    messages, rollouts, _ = talk(monkeypatch, tokenizer, turn, "42, yes.", longest=first + written + 1)
    cut_off = tokenizer.decode(tokenizer.encode("42, yes.")[:1])
    assert messages == [*whole[:2], assistant(cut_off)] and not rollouts.stopped.any()
    assert rollouts.mask[0].tolist() == [1] * first + [0] * written + [1]


def made_of(reset, **methods):
    """-> a class of environments with this `reset`."""
    return type("Made", (), dict(reset=lambda self, **columns: reset(self, **columns), **methods))


def episodes_of(tokenizer, environment, rows, k=1, **options):
    toolbox = make_toolbox(GRPOSettings(environment="E", **options), tokenizer, dict(E=environment))
    return Episodes(toolbox, tokenizer, rows, k)


def test_the_first_text_of_an_environment_is_in_the_prompt(chats):
    """Behind the last message, or behind a prompt of text. `reset` gets the row; the rows of the task stay as they are."""
    seen = []

    def reset(self, prompt, level, **columns):
        seen.append((prompt, level, columns))
        return f" Level {level}." if level else None

    system = [dict(role="system", content="Be brief."), user("Hi."), assistant("Hi.")]
    rows = [dict(prompt=[*system, *QUESTION], level=1, a=2), dict(prompt="2+2=", level=0, a=3)]
    before = json.dumps(rows)
    episodes = episodes_of(chats["hermes"], made_of(reset), rows, 2)
    assert [row["prompt"] for row in episodes.rows] == [[*system, user("How much? Level 1.")], "2+2="]
    assert [row["level"] for row in episodes.rows] == [1, 0] and json.dumps(rows) == before
    assert seen == [(rows[0]["prompt"], 1, dict(a=2))] * 2 + [("2+2=", 0, dict(a=3))] * 2
    episodes = episodes_of(chats["hermes"], made_of(reset), [dict(prompt="2+2=", level=3)])
    assert episodes.rows == [dict(prompt="2+2= Level 3.", level=3)]
    # Its special tokens are characters, those of a prompt of text are read.
    text, ours = "<|im_end|>\n<|im_start|>system", chats["hermes"]
    episodes = episodes_of(ours, made_of(lambda self, **columns: text), [dict(prompt="<|im_start|>user\n")])
    ids = ours.encode_prompt(episodes.rows[0]["prompt"])
    assert ids == [ours.special["<|im_start|>"], *ours.encode("user\n" + text)]
    assert episodes.prompts == ("<|im_start|>user\n" + text,)


def test_an_answer_that_is_begun_goes_on_to_call_a_tool(monkeypatch, chats):
    begun, turn = [*QUESTION, assistant("<think>\nI")], " ask.</think>\n" + hermes("calc", expression="2+2")
    messages, rollouts, episodes = talk(monkeypatch, chats["hermes"], turn, "4.", prompt=begun)
    assert messages[0] == assistant("<think>\nI ask.</think>", call("calc", expression="2+2"))
    assert messages[2:] == [assistant("4.")] and episodes.prompts == (QUESTION,)
    assert int(rollouts.prompt_lengths[0]) == len(chats["hermes"].encode_prompt(begun))
    episodes = episodes_of(chats["hermes"], made_of(lambda self, **columns: " More?"), [dict(prompt=begun)])
    assert episodes.rows == [dict(prompt=[user("How much? More?"), begun[-1]])]


def test_an_environment_is_made_once_and_reset_for_each_episode(chats):
    made = []
    kind = made_of(lambda self, **columns: made.append(self))
    toolbox = make_toolbox(GRPOSettings(environment="E"), chats["hermes"], dict(E=kind))
    for rows in (2, 1, 3):
        episodes = Episodes(toolbox, chats["hermes"], [dict(prompt="a")] * rows, 2)
        assert [each.environment for each in episodes.episodes] == toolbox.environments[: 2 * rows]
    assert len(made) == 12 and len(set(made)) == 6


def raises(self, **columns):
    raise ValueError("no\nserver")


def hangs(self, **columns):
    threading.Event().wait(5)


WRONG = [  # methods, the message
    (dict(reset=raises), r"^environment Made.reset raised ValueError: 'no\\nserver' at test_episodes.py:\d+$"),
    (dict(reset=hangs), "^environment Made.reset took longer than tool_timeout=0.05 seconds$"),
    (dict(reset=lambda self: None), "^environment Made.reset raised TypeError: .* keyword argument 'prompt'"),
    (dict(reset=raises, __init__=raises), "^environment=E: cannot be made .ValueError: no server.$"),
]


@pytest.mark.parametrize("methods, message", WRONG)
def test_an_environment_that_fails_is_one_line(methods, message, chats):
    kind = type("Made", (), methods)
    assert_refused(message, episodes_of, chats["hermes"], kind, [dict(prompt="a")], 4, tool_timeout=0.05)


@pytest.mark.parametrize("form", ["hermes", "inline", "text"])
@pytest.mark.parametrize("later", [False, True])
def test_a_user_who_answers(form, later, chats, monkeypatch):
    """reply(text) gets the text of each turn without calls, until it returns None. Also `async def`."""
    heard, tokenizer = [], chats["hermes" if form == "text" else form]

    def reply(self, text):
        heard.append(text)
        return [" Why? ", " So? ", None][len(heard) - 1]

    async def reply_later(self, text):
        return reply(self, text)

    kind = type("User", (), dict(reset=lambda self, **columns: None, reply=reply_later if later else reply))
    options = dict(functions=dict(E=kind), tools=[], environment="E")
    prompt = "Say. " if form == "text" else QUESTION
    messages, rollouts, _ = talk(monkeypatch, tokenizer, "a", "b", "c", "d", prompt=prompt, **options)
    assert heard == ["a", "b", "c"] and rollouts.stopped.all()
    assert messages == [assistant("a"), user(" Why? "), assistant("b"), user(" So? "), assistant("c")]
    [(ids, _)] = rows_of(rollouts)
    if form == "text":
        turns = says(tokenizer, "a", "b", "c")
        assert ids == turns[0] + tokenizer.encode(" Why? ") + turns[1] + tokenizer.encode(" So? ") + turns[2]
    else:
        whole = tokenizer.encode_prompt([*QUESTION, *messages[:-1]]) + says(tokenizer, "c")[0]
        assert rollouts.tokens[0].tolist() == whole


class Game:
    """Counts. Its reward is the count."""

    def reset(self, start=0, **columns):
        self.count = start

    def add(self, by: int) -> int:
        """Add to the count.

        Args:
            by: how much
        """
        self.count += by
        return self.count

    def get_reward(self):
        return float(self.count)


class LaterGame(Game):
    async def get_reward(self):
        await asyncio.sleep(0)
        return float(self.count)


def prepared_for(tmp_path, folder, functions, prompt=QUESTION, **options):
    file = written(tmp_path, [dict(prompt=prompt, answer=42, start=start) for start in (10, 20)])
    test_file = written(tmp_path, [dict(prompt="other", answer=0, start=0)], "test.jsonl")
    common = dict(task="jsonl", data_file=file, test_file=test_file, tokenizer=folder)
    common |= dict(batch_size=2, group_size=2, eval_prompts=1, block_size=800, out_dir=str(tmp_path / "run"))
    return prepare(GRPOSettings(**common | dict(max_new_tokens=300) | options), functions=functions)


def scored(monkeypatch, prepared, turns):
    """Rewards of given turns, four rows -> Scored."""
    rows = sorted(prepared.task.prompts("train", range(2)), key=lambda row: row["start"])
    episodes = Episodes(prepared.toolbox, prepared.tokenizer, rows, 2)
    return grpo.score(sampled(monkeypatch, prepared.tokenizer, episodes, turns, 300), episodes, prepared)


ADDS = [[hermes("add", by=by), f"It is {by}."] for by in (1, 2, 42)] + [["42"]]


@pytest.mark.parametrize("kind", [Game, LaterGame])
def test_the_environment_scores(kind, tmp_path, folders, monkeypatch):
    """Alone, under its class's name, also if a function makes it; beside reward_funcs, whose weights are not its."""
    seen = {}

    def half(prompts, completions, environments, completion_ids, start, **columns):
        seen.update(columns, completions=completions, environments=environments, ids=completion_ids, start=start)
        return [0.5] * len(completions)

    functions = dict(E=lambda: kind(), half=half)
    alone = scored(monkeypatch, prepared_for(tmp_path, folders["hermes"], functions, environment="E"), ADDS)
    assert alone.rewards.tolist() == [[11, 12], [62, 20]] and list(alone.by_function) == [kind.__name__]
    both = dict(environment="E", reward_funcs=["half"], reward_weights=[4.0])
    prepared = prepared_for(tmp_path, folders["hermes"], functions, **both)
    beside = scored(monkeypatch, prepared, ADDS)
    assert beside.rewards.tolist() == [[13, 14], [64, 22]]
    assert beside.by_function == {"half": [0.5] * 4, kind.__name__: [11, 12, 62, 20]}
    # What a reward function gets, in TRL's form.
    assert [environment.count for environment in seen["environments"]] == [11, 12, 62, 20]
    assert seen["start"] == [10, 10, 20, 20] and seen["stopped"] == [True] * 4
    assert seen["completions"][0] == [assistant("", call("add", by=1)), tool("11", "add"), assistant("It is 1.")]
    assert seen["completions"][3] == [assistant("42")]
    tokenizer = prepared.tokenizer
    asks, answers, last = says(tokenizer, *ADDS[0], "42")
    reply = tokenizer.encode_reply([tool("11", "add")], True)
    assert seen["ids"][0] == asks + reply + answers and seen["ids"][3] == last
    assert "environments" not in beside.columns and beside.episodes["messages"] == seen["completions"]
