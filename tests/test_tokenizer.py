"""Text survives the tokenizers; no text becomes a special token, and no special token becomes text. A folder's tokenizer.json has the
ids and texts of the library `tokenizers`, and messages get the ids of `transformers`.
"""

import hashlib
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import requests
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from helpers import tokenizers as made
from helpers.errors import assert_refused, refusal
from helpers.tokenizers import FAMILIES, HERMES, SPELLED, STOP, TOOLED, added, folder_of, texts, tool, user
from snug.options import SnugError
from snug.tokenizer import DATE, END_OF_TEXT, FILES, get_tokenizer

BYTES = get_tokenizer("bytes")


@pytest.fixture(scope="module")
def gpt2():
    """From the folder TIKTOKEN_CACHE_DIR; tests never wait for a download."""
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("TIKTOKEN_CACHE_DIR is not set")
    try:
        return get_tokenizer("gpt2")
    except SnugError as error:
        pytest.skip(str(error))


@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 255)))
def test_bytes_are_the_utf8_bytes(text, ids):
    assert BYTES.encode(text) == list(text.encode()) and BYTES.decode(BYTES.encode(text)) == text
    assert BYTES.decode(ids) == bytes(ids).decode(errors="replace")


def test_gpt2_is_tiktokens(gpt2):
    assert (gpt2.name, gpt2.n_vocab, gpt2.stop_tokens, gpt2.files) == ("gpt2", 50257, (50256,), {})
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.decode(gpt2.encode("🙂")[:1]) == "\ufffd"
    for text in texts(1000):
        ids = gpt2.encode(text)
        assert ids == tiktoken.get_encoding("gpt2").encode_ordinary(text) and gpt2.decode(ids) == text
        assert len(ids) <= len(text.encode())  # bytes bound tokens, which task.longest relies on


@pytest.mark.parametrize("error", [requests.exceptions.ConnectionError("no route"), ValueError("hash mismatch")])
def test_gpt2_without_its_files(monkeypatch, tmp_path, error):
    monkeypatch.setattr("tiktoken.load.read_file", Mock(side_effect=error))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    advice = "set TIKTOKEN_CACHE_DIR to a folder that has its two files, or use --tokenizer=bytes"
    assert_refused(advice, get_tokenizer, "gpt2")


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.__name__)
def pair(request, tmp_path_factory):
    """-> ours and theirs, of one file."""
    config = dict(eos_token=STOP[request.param])
    folder = folder_of(tmp_path_factory.mktemp("tokenizer"), request.param(), tokenizer_config=config)
    return get_tokenizer(folder), tokenizers.Tokenizer.from_file(folder + "/tokenizer.json")


def reserved(tokenizer, ids):
    """The special tokens among ids, without <unk>, which text may become."""
    return [i for i in ids if i in tokenizer.special.values() and i != tokenizer.special.get("<unk>")]


def test_ids_and_texts_are_those_of_tokenizers(pair):
    ours, theirs = pair
    rng = random.Random(0)
    assert ours.n_vocab == 1 + max(theirs.get_vocab().values())
    for text in texts(300):
        expected = made.ids_of(theirs, text, False)
        assert ours.encode(text) == expected
        assert ours.decode(expected) == theirs.decode(expected)
        assert ours.encode(text, special=True) == made.ids_of(theirs, text, True)
        sampled = [rng.randrange(ours.n_vocab + 5) for _ in range(9)]
        assert ours.decode(sampled) == theirs.decode(sampled)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "folder"])
def test_special_tokens_are_never_text(name, pair, request):
    """And whatever a model samples decodes; and lone surrogates are read as U+FFFD."""
    ours = {"bytes": BYTES, "folder": pair[0]}.get(name) or request.getfixturevalue("gpt2")
    for token, number in ours.special.items():
        assert ours.decode([number]) == "" and ours.encode(token, special=True) == [number]
        for text in (token, f"a {token}b", token * 3):
            if type(ours.backend.model) is not models.Unigram:  # whose model makes </s> of its spelling
                assert not reserved(ours, ours.encode(text))
            assert ours.encode(text, special=True).count(number) == text.count(token)
    assert ours.decode([ours.n_vocab, 10**9, *ours.encode("a"), ours.stop_token]) == "a"
    assert ours.encode("a\ud800b") == ours.encode("a\ufffdb")
    assert ours.encode("a\ud83d\ude42") == ours.encode("a🙂")  # a pair that belongs together is its character


@pytest.mark.parametrize("stops", [["</answer>"], ["\n\n"], [" b a", "é", "", "🜁"], ["</calc>", "🙂\n", "b"]], ids=str)
def test_a_stop_string_is_found_where_it_ends(pair, stops):
    """At the first token after which the text of all tokens has one of them."""
    ours, rng = pair[0], random.Random(0)
    is_over = ours.stopper(stops)
    assert ours.stopper([]) is ours.stopper([""]) is None
    for before, after in zip(texts(60, seed=4), texts(60, seed=5), strict=True):
        ids = ours.encode(before + rng.choice(["", "𝄞"]) + rng.choice(stops) * rng.randrange(1, 3) + after)
        ids.insert(rng.randrange(len(ids)), ours.stop_token)
        decoded = [any(stop in ours.decode(ids[:n]) for stop in stops if stop) for n in range(len(ids) + 1)]
        first = decoded.index(True) if True in decoded else len(ids)
        assert [is_over(ids[:n]) for n in range(first + 1)] == decoded[: first + 1]


def test_special_tokens_within_a_stop_string_do_not_hide_it():
    is_over, stop = BYTES.stopper(["ab"]), BYTES.stop_token
    assert is_over([*b"a", *[stop] * 9, *b"b"]) and not is_over([*b"a", *[stop] * 9])


def small(tokens=(), merges=()):
    """The bytes, then these tokens, then <|endoftext|>."""
    vocab = BYTES.backend.get_vocab(with_added_tokens=False) | {token: 256 + n for n, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return added(json.loads(tokenizer.to_str()), END_OF_TEXT)


def test_a_file_that_cuts_or_pads(tmp_path):
    spec = small(["ab"], [("a", "b")])
    spec["truncation"] = dict(direction="Right", max_length=3, strategy="LongestFirst", stride=0)
    spec["padding"] = dict(strategy=dict(Fixed=64), direction="Left", pad_id=0, pad_type_id=0, pad_token="!")
    spec["padding"]["pad_to_multiple_of"] = None
    assert get_tokenizer(folder_of(tmp_path, spec)).encode("ab" * 5) == [256] * 5


STOPS = [  # files -> the ids that end a completion; <|endoftext|> is 256, <b> 257, </s> 258
    ({}, (256,)), (dict(tokenizer_config=dict(eos_token="<b>")), (257,)),
    (dict(tokenizer_config=dict(eos_token=dict(content="<b>"))), (257,)),
    (dict(tokenizer_config=dict(eos_token="<b>"), generation_config=dict(eos_token_id=258)), (257, 258)),
    (dict(tokenizer_config=dict(eos_token="<b>"), generation_config=dict(eos_token_id=[258, 257, 999])), (257, 258)),
    (dict(config=dict(eos_token_id=[258, 257])), (258, 257)),
    (dict(config=dict(eos_token_id=[258, 257]), generation_config=dict(top_k=5)), (258, 257)),
    (dict(generation_config=dict(eos_token_id=257)), (257,)),
    (dict(tokenizer_config=b"{"), "tokenizer_config.json: cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize("files, expected", STOPS, ids=range(len(STOPS)))
def test_stop_tokens(tmp_path, files, expected):
    folder = folder_of(tmp_path, added(small(), "<b>", "</s>", special=False), **files)
    if isinstance(expected, str):
        assert_refused(expected, get_tokenizer, folder)
        return
    tokenizer = get_tokenizer(folder)
    assert (tokenizer.stop_tokens, tokenizer.stop_token, tokenizer.n_vocab) == (expected, expected[0], 259)
    assert tokenizer.decode([*b"x", *expected]) == "x"  # a stop token is no text, whatever its flags say
    assert not set(expected) & set(tokenizer.encode("<|endoftext|><b></s>"))
    tokenizer.save(tmp_path / "checkpoint")  # which has no config.json
    assert get_tokenizer(tmp_path / "checkpoint").stop_tokens == expected


def test_what_a_text_begins_with(tmp_path):
    spec, config = added(small(), "<b>"), dict(bos_token="<b>", add_bos_token=True)
    by_config = get_tokenizer(folder_of(tmp_path, spec, tokenizer_config=config))
    plain = get_tokenizer(folder_of(tmp_path, spec, tokenizer_config=config | dict(add_bos_token=False)))
    assert plain.encode_prompt("a<b>") == [*b"a<b>"] and by_config.encode_prompt("a<b>") == [257, *b"a<b>"]
    assert by_config.encode_prompt("<b>a<b>") == [257, *b"a", 257]  # as somebody rendered it
    for unknown in (dict(add_bos_token=True), dict(add_bos_token=True, bos_token="<c>")):
        assert get_tokenizer(folder_of(tmp_path, spec, tokenizer_config=unknown)).encode_prompt("a") == [*b"a"]
    ends = [("<b>", 257), (END_OF_TEXT, 256)]
    two = tokenizers.Tokenizer.from_str(json.dumps(spec))
    two.post_processor = processors.TemplateProcessing(single=["<b>", END_OF_TEXT, "$A"], special_tokens=ends)
    by_file = get_tokenizer(folder_of(tmp_path, json.loads(two.to_str()), tokenizer_config=config))
    assert by_file.encode_prompt("a") == [257, 256, *b"a"]  # also where the configuration adds one
    for family, bos in ((made.llama3_like, ["<s>"]), (made.unigram, []), (made.qwen_like, [])):
        ours = get_tokenizer(folder_of(tmp_path, family(), tokenizer_config=dict(eos_token=STOP[family])))
        theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a b")
        assert ours.encode_prompt("a b") == theirs.ids[: len(theirs.ids) - (family is made.unigram)]
        assert list(ours.bos) == [ours.special[token] for token in bos]


def test_files_go_out_as_they_came_in(tmp_path):
    config = dict(bos_token="<b>", eos_token=END_OF_TEXT, chat_template="{{ bos_token }}{{ messages[0].content }}")
    files = dict(tokenizer_config=config, special_tokens_map={}, generation_config={}, chat_template="{{ 1 }}\r\n")
    folder = folder_of(tmp_path / "in", small(), **files, config={"a": 1})
    tokenizer = get_tokenizer(folder)
    tokenizer.save(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(tokenizer.files) == {*FILES} - {DATE}
    for name in tokenizer.files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes() == tokenizer.files[name]
    digest = hashlib.sha256(tokenizer.files["tokenizer.json"]).hexdigest()
    assert get_tokenizer(tmp_path / "out").name == tokenizer.name == "tokenizer.json@" + digest[:12]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_bytes_and_gpt2_are_saved(name, request, tmp_path):
    """Written out, they are the same tokenizer to us, to `tokenizers` and to `transformers`."""
    tokenizer = BYTES if name == "bytes" else request.getfixturevalue("gpt2")
    folder = tmp_path / "new" / "folder"
    tokenizer.save(folder)
    again = get_tokenizer(folder)
    assert (again.n_vocab, again.stop_tokens) == (tokenizer.n_vocab, tokenizer.stop_tokens)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert auto.eos_token_id == tokenizer.stop_token and len(auto) == tokenizer.n_vocab
    for text in texts(200):
        ids = tokenizer.encode(text, special=True)
        assert ids == again.encode(text, special=True) == auto(text).input_ids
        assert again.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["", "gpt3", "no/such/folder", "tokenizer.json@0123456789ab"])
def test_names_of_no_tokenizer(name):
    assert_refused(f"^'{name}' has no tokenizer.json .*, and is not bytes or gpt2", get_tokenizer, name)


PANICS = json.loads(json.dumps(made.llama3_like()))  # in Rust: a BaseException, and no Exception
PANICS["post_processor"]["single"][0]["SpecialToken"]["id"] = "[NONE]"
NO_TOKENIZER = {  # what is said: tokenizer.json
    "ValueError: Cannot instantiate": b"",
    "ValueError: Cannot instantiate Tokenizer from buffer: invalid type": b"[" * 100_000,
    "ValueError: Cannot instantiate Tokenizer from buffer: Model missing": b"{}",
    "no added token ends a completion": small() | dict(added_tokens=[]),
    "PanicException: no entry found for key": PANICS,
}


@pytest.mark.parametrize("said", NO_TOKENIZER)
def test_files_that_are_no_tokenizer(tmp_path, said):
    with refusal(f"{tmp_path}: has no tokenizer that can be read .{said}"):
        get_tokenizer(folder_of(tmp_path, NO_TOKENIZER[said]))


def test_a_rule_of_cutting_that_never_ends_is_one_line(tmp_path):
    """In Rust it is a panic, as soon as a text has it."""
    split = dict(type="Split", pattern=dict(Regex="(a+)+$"), behavior="Isolated", invert=False)
    spec = small() | dict(pre_tokenizer=split)
    ours = get_tokenizer(folder_of(tmp_path, spec, chat_template="{{ messages[0].content }}"))
    for prompt in ("a" * 60 + "!", [user("a" * 60 + "!")]):
        assert_refused(f"{tmp_path}/tokenizer.json: cannot encode a text of 61 characters", ours.encode_prompt, prompt)
    assert ours.encode_prompt("abc") and not ours.lock.locked()


LLAMA2 = "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
LLAMA2 += "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
JOINED = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHATS = {name: (family, template) for name, (family, template, *_) in TOOLED.items()}
CHATS |= dict(llama2=(made.llama2_like, LLAMA2), mistral=(made.mistral_like, LLAMA2), unigram=(made.unigram, LLAMA2))
CHATS |= dict(joined=(made.qwen_like, JOINED))
PHI4 = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
PHI4 += "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
GEMMA3 = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
GEMMA3 += (
    "{{ m.content|trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CHATS |= dict(phi4=(made.qwen_like, PHI4), gemma3=(made.llama2_like, GEMMA3))
MORE = dict(phi4=["<|im_sep|>"], gemma3=["<start_of_turn>", "<end_of_turn>"])


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """-> {name: (folder, our tokenizer)}."""
    folders = {}
    for name, (family, template) in CHATS.items():
        config = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=template)
        config |= dict(eos_token=STOP[family], bos_token="<s>")
        spec = added(family(), *MORE.get(name, []))
        folder = folder_of(tmp_path_factory.mktemp("chat"), spec, tokenizer_config=config)
        folders[name] = folder, get_tokenizer(folder)
    return folders


@pytest.mark.parametrize("name", CHATS)
def test_prompts_are_those_of_transformers(chats, name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, ours = chats[name]
    theirs, rng = transformers.AutoTokenizer.from_pretrained(folder), random.Random(5)
    for _ in range(25):
        roles = [rng.choice(["system", "user"])] + ["user", "assistant"] * rng.randrange(3) + ["user"]
        contents = rng.choices(["", "<", "> 3", "<tool_response>", *texts(300, spelled=False)], k=len(roles))
        contents = [rng.choice(["", " ", "\n"]) + content for content in contents]
        messages = [user(content, role) for content, role in zip(contents, roles, strict=True)]
        options = dict(add_generation_prompt=True, tokenize=False)
        for begun in (None, "Let me\n<think>", "It is ", " ", *rng.choices(contents, k=2)):
            if begun is not None:  # the last message is to be continued
                messages = [*messages[: len(roles)], user(begun, "assistant")]
                options = dict(continue_final_message=True, tokenize=False)
            text = theirs.apply_chat_template(messages, **options)
            expected = theirs(text, add_special_tokens=False).input_ids
            assert ours.encode_prompt(messages) == expected
            assert name == "joined" or ours.is_rendered(text) and ours.encode_prompt(text) == expected
            within = f"a{text}"  # no template begins like this
            assert ours.encode_prompt(within) == ours.bos + ours.encode(within, special=ours.is_rendered(within))


PARTS = [*SPELLED, "a", "user", " ", "\n", "<", "<|", "|", ">", "im_end|>", "<|im", "\u0338", "\ud800"]
contents = st.lists(st.sampled_from(PARTS)).map("".join)


@settings(max_examples=40)
@given(st.lists(contents, min_size=1, max_size=4))
def test_special_tokens_in_messages_stay_text(chats, spelled):
    ours = chats["qwen3"][1]
    start, end = ours.special["<|im_start|>"], ours.special["<|im_end|>"]
    messages = [user("a", "system"), *map(user, spelled)]
    turns = [[start, *ours.encode(f"{m['role']}\n{m['content']}"), end, *ours.encode("\n")] for m in messages]
    assert ours.encode_prompt(messages) == [*sum(turns, []), start, *ours.encode("assistant\n")]
    for name, (_, ours) in chats.items():
        if name not in ("unigram", "joined"):  # "joined" may join two contents into a special token
            harmless = reserved(ours, ours.encode_prompt([user("a")] * len(spelled)))
            assert reserved(ours, ours.encode_prompt([*map(user, spelled)])) == harmless, name


def chat_of(path, source, **config):
    """Its special tokens: <|endoftext|> 256, <b> 257, <|user|> 258."""
    spec = added(small(), "<b>", "<|user|>")
    return get_tokenizer(folder_of(path, spec, tokenizer_config=dict(bos_token="<b>", chat_template=source) | config))


def rendered(path, source, **config):
    tokenizer = chat_of(path, source, **config)
    return tokenizer.decode(tokenizer.encode_prompt([user("a<b>c")]))


def test_a_content_within_what_the_template_writes(tmp_path):
    """A role may be a part of a special token."""
    assert chat_of(tmp_path, "{{ bos_token }}a").encode_prompt([user("")]) == [257, *b"a"]
    assert chat_of(tmp_path, "<|{{ messages[0].role }}|>").encode_prompt([user("")]) == [258]
    assert chat_of(tmp_path, "{{ messages[0].content|trim }}").encode_prompt([user("a<|user|> ")]) == [*b"a<|user|>"]


USES = {  # template -> text, for the message a<b>c; None if it fails, or reaches for Python
    "{{ messages|tojson }}": '[{"role": "user", "content": "a<b>c"}]',
    "  {% if true %}\n{{ strftime_now('%d %b %Y') }}\n  {% endif %}": "26 Jul 2024\n",
    "{{ x_token }}{{ y_token is defined }}": "XFalse",
    "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
    "{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ dict(a=1).a }}": "21",
    "{% generation %}{{ 'a' }}{% endgeneration %}{%- generation -%} b {%- endgeneration %}": "ab",
    "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}": "TrueTrueTrue",
    "{% if 'a<' in messages[0].content %}yes{% endif %}": "yes",
    "{{ ''.__class__ }}{{ range.__closure__ }}{{ (''['__class__']) is defined }}": "False",
}


@pytest.mark.parametrize("source", USES)
def test_what_templates_can_use(tmp_path, source):
    assert rendered(tmp_path, source, x_token=dict(content="X"), y_token=5) == USES[source]


def test_where_templates_stand(tmp_path):
    templates = [dict(name="tool_use", template="tool"), dict(name="default", template="the default")]
    assert rendered(tmp_path, templates) == "the default"
    for tokenizer in (chat_of(tmp_path, templates[:1]), chat_of(tmp_path, None), BYTES):
        with refusal("messages need a chat template, which tokenizer=.* lacks: name a model such as --init_from="):
            tokenizer.encode_prompt([user("")])
    assert_refused("has no tokenizer that can be read", chat_of, tmp_path, [{}])
    folder = folder_of(tmp_path, small(), chat_template="the file", tokenizer_config=dict(chat_template="the config"))
    ours = get_tokenizer(folder)
    assert ours.decode(ours.encode_prompt([user("")])) == "the file"


BROKEN = [
    *["{% if %}", "{{ raise_exception('only\nusers') }}", "{{ nothing.at_all }}", "{{ messages[0].content + 1 }}"],
    *["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'x' %}", "{{ range(10 ** 30)|list }}"],
    *["{{ ''.__class__.__mro__ }}", "{{ raise_exception.__globals__['json'] }}", "{{ messages.append(1) }}"],
]


@pytest.mark.parametrize("source", BROKEN)
def test_templates_that_fail_or_reach_for_python(tmp_path, source):
    assert_refused("the chat template fails .[A-Z]", rendered, tmp_path, source)


SCHEMA = dict(name="calc", description='a "sum" é', parameters={"type": "object"})
SCHEMA = {"type": "function", "function": SCHEMA}


@pytest.mark.parametrize("name", TOOLED)
def test_turns_and_replies_are_the_ids_of_the_whole_conversation(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family, template, end, form = TOOLED[name]
    config = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=template, eos_token=end, bos_token="<s>")
    ours = get_tokenizer(folder := folder_of(tmp_path, family(), tokenizer_config=config))
    theirs, rng = transformers.AutoTokenizer.from_pretrained(folder), random.Random(7)
    assert ours.chat.call_form == form and ours.stop_tokens == (ours.special[end],)  # as its files say
    for trial in range(30):
        tools = [[SCHEMA], None][trial % 2]
        ours.chat.tools = tools
        words = lambda: "a" + rng.choice(texts(300, spelled=False)).strip() + "."  # noqa: E731
        thought = "<think>\nhm\n</think>\n\n" if name == "qwen3" else ""
        reply = [[tool("5")], [tool(words()), tool("{'a': 1}\n")], [user(words())]][trial % 3]
        # Qwen3 forgets the thoughts of turns before the last question: a prompt would not be a prefix of the next.
        turns = [(thought if reply[0]["role"] == "tool" else "") + "<tool_call>" + words(), thought + words()]
        messages = [user(words())]
        ids = ours.encode_prompt(messages)
        for turn, after in ((turns[0], reply), (turns[1], [])):
            ids += [*ours.encode(turn), ours.stop_token]
            messages += [user(turn, "assistant"), *after]
            if after:
                ids += ours.encode_reply(after, stopped=True)
                options = dict(tools=tools, tokenize=True, return_dict=False)
                assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, **options)
                assert ids == ours.encode_prompt(messages)
                assert ours.encode_reply(after, False) == [ours.stop_token, *ours.encode_reply(after, True)]
        expected = theirs.apply_chat_template(messages, **options)
        assert expected[: len(ids)] == ids and len(expected) - len(ids) <= 1  # a newline


def test_what_stands_between_a_turn_and_its_end(chats, tmp_path):
    """Llama 2's template has a space before </s>, which no model that ended its turn has written."""
    ours = chats["llama2"][1]
    ids = ours.encode_reply([user("a")], True)
    assert ours.encode_reply([user("a")], False)[-len(ids) - 1 :] == [ours.stop_token, *ids]
    assert ours.stop_token not in ids and ours.decode(ids).strip() == "[INST] a [/INST]"
    ours = chats["joined"][1]  # has no ends
    assert ours.encode_reply([user("a b")], True) == ours.encode_reply([user("a b")], False) == ours.encode("a b")
    ours = chat_of(tmp_path, "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}")  # beginnings alone
    assert ours.encode_reply([user("a")], True) == ours.encode_reply([user("a")], False) == [257, *b"a"]


def test_replies_that_a_template_refuses(tmp_path):
    only = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no\ntools') }}{% endif %}{{ m.content }}{% endfor %}"
    for source, why in ((only, "TemplateError: no tools"), ("{{ messages[-1].content }}", "it leaves out a message")):
        assert_refused(f"the chat template fails .{why}", chat_of(tmp_path, source).encode_reply, [tool("5")], True)
    assert_refused("messages need a chat template", BYTES.encode_reply, [tool("5")], True)
    assert chat_of(tmp_path, "{{ builtin_tools }}").chat.call_form == "inline"


def test_threads_share_a_tokenizer(chats, monkeypatch):
    """A special token is one in each thread that asks for it, and text in the others."""
    ours = chats["qwen3"][1]
    backend, wanted = ours.backend, [ours.encode("<|im_end|>", special) for special in (False, True)]

    class Slow:
        """Other threads run between the flag and the ids."""

        encode_special_tokens = property(fset=lambda self, value: setattr(backend, "encode_special_tokens", value))

        def encode(self, text, **options):
            time.sleep(0.001)
            return backend.encode(text, **options)

    monkeypatch.setattr(ours, "backend", Slow())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: ours.encode("<|im_end|>", n % 2 == 1), range(100))) == wanted * 50


THINKS = (  # Qwen3's rule: without thinking the answer begins behind an empty thought
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}{%- macro unused() %}{{ style }}{% endmacro %}{{- unused() }}"
)


def test_template_variables_are_those_of_transformers_and_travel(tmp_path):
    """With and without thinking; a checkpoint's files and an export keep the variables, and a caller's values win."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", chat_template=THINKS)
    folder = folder_of(tmp_path / "in", made.qwen_like(), tokenizer_config=config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
    for kwargs in ({}, {"enable_thinking": False}, {"style": 'a "b" \\ {%', "enable_thinking": False}):
        ours = get_tokenizer(folder)
        ours.set_template_kwargs(kwargs)
        expected = theirs.apply_chat_template([user("Hi")], **options, **kwargs)
        assert ours.encode_prompt([user("Hi")]) == expected
        ours.save(tmp_path / "out")
        again = get_tokenizer(tmp_path / "out")
        assert again.encode_prompt([user("Hi")]) == expected
        exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert exported.apply_chat_template([user("Hi")], **options) == expected
        again.set_template_kwargs(kwargs)  # as a resumed run does
        assert again.files == ours.files
        again.set_template_kwargs({"enable_thinking": True})
        plain = theirs.apply_chat_template([user("Hi")], **options | kwargs | {"enable_thinking": True})
        assert again.encode_prompt([user("Hi")]) == plain
    for name, tokenizer in (("enable_thinkin", again), ("a}}", again), ("enable_thinking", BYTES)):
        with pytest.raises(SnugError, match="chat template has no variable|has no chat template"):
            tokenizer.set_template_kwargs({name: False})


START = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.tool_calls %}"
START += "{{ 'assistant\n\n' }}{% for c in m.tool_calls %}{% set f = c.function %}"
FINISH = "{% endfor %}{% else %}{{ m.role + ' ' + m.content }}{% endif %}{% endfor %}"
FINISH += "{% if add_generation_prompt %}assistant{% endif %}"
WRITTEN = {  # family: how its template writes a call, the form or what the refusal shows
    "Qwen2.5": (
        r"""{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}{{ '}\n</tool_call>' }}""",
        "hermes",
    ),
    "Llama 3.2": ("""{{ '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}""", "llama"),
    "SmolLM3": ("{# <tool_call> #}", "hermes"),
    "Mistral": ("[TOOL_CALLS] [{{ f | tojson }}]", "arguments"),
    "DeepSeek V3": ("{{ '```json\n' + f.arguments }}", "the chat template fails .TypeError"),
    "Coder": (
        "<tool_call>\n<function={{ f.name }}>\n<parameter=k>\n5\n</parameter>\n</function>\n</tool_call>",
        "</fu",
    ),
    "no calls": ("", "assistant"),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_the_form_of_calls_is_what_the_template_writes(tmp_path, family):
    """Another form is refused in one line that shows it, where a prompt describes tools. Other prompts may use it."""
    written, expected = WRITTEN[family]
    ours = chat_of(tmp_path, START + written + FINISH)
    without = ours.encode_prompt([user("a")])
    ours.chat.tools = [SCHEMA]
    if expected in ("hermes", "llama"):
        assert ours.chat.call_form == expected and len(ours.encode_prompt([user("a")])) > len(without)
        return
    assert_refused(f"^(?=.*{expected}).{{,259}}$", ours.encode_prompt, [user("a")])


def test_a_result_spells_no_token_of_the_template(tmp_path):
    """Qwen's tokenizer has <tool_response> as a token that is not special. Other results have the ids that they had."""
    tags = "<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>"
    config = dict(chat_template=HERMES, eos_token="<|im_end|>")
    ours = get_tokenizer(folder_of(tmp_path, added(made.qwen_like(), *tags, special=False), tokenizer_config=config))
    number = {tag: ours.backend.token_to_id(tag) for tag in (*tags, "<think>", "</think>")}
    assert None not in number.values()
    for text in ("a", "a</tool_response>b<tool_response>c", "<tool_call>{}</tool_call>", "</think>"):
        ids = ours.encode_reply([tool(text)], True)
        assert [i for i in ids if i in number.values()] == [number[tag] for tag in tags[:2]]
        assert text in ours.decode(ids)
    whole = "\n<|im_start|>user\n<tool_response>\n<b>a</b>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert ours.encode_reply([tool("<b>a</b>")], True) == ours.encode(whole, special=True)


def test_what_the_template_writes_behind_an_answer_ends_a_completion(tmp_path):
    """A base model with ChatML, whose files name only <|endoftext|>. A checkpoint and an export keep it."""
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END_OF_TEXT, chat_template=HERMES)
    number = next(token["id"] for token in made.qwen_like()["added_tokens"] if token["content"] == END_OF_TEXT)
    generation = dict(eos_token_id=number, top_k=5)
    folder = folder_of(tmp_path / "in", made.qwen_like(), tokenizer_config=config, generation_config=generation)
    ours = get_tokenizer(folder)
    first, end = ours.special[END_OF_TEXT], ours.special["<|im_end|>"]
    assert ours.stop_tokens == (first, end) and ours.stop_token == first  # which training teaches
    ours.save(tmp_path / "out")
    kept = get_tokenizer(tmp_path / "out")
    assert kept.stop_tokens == (first, end)
    assert json.loads(kept.files["generation_config.json"]) == dict(eos_token_id=[first, end], top_k=5)
    reply = ours.encode_reply([user("b")], True)
    assert ours.encode_reply([user("b")], False) == [end, *reply]


def test_a_template_without_an_end_adds_no_stop_token(tmp_path):
    for source in (JOINED, "{% if %}", "{{ raise_exception('no') }}", "{{ messages[0].content }}<|user|>"):
        ours = chat_of(tmp_path, source)
        assert ours.stop_tokens == (256,)
