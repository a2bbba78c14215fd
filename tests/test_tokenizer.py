"""Text survives the tokenizers, and nothing that is text can become the stop token, nor the reverse. What is read from a tokenizer.json
has the ids of the library `tokenizers`, and what is written from messages those of `transformers`.
"""

import copy
import hashlib
import json
import os
import random
import string
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import requests
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from options import SnugError
from pretrained.bpe import SYMBOLS
from pretrained.tokenizer_json import END_OF_TEXT, FILES, GPT2, LLAMA3, QWEN2
from tokenizer import get_tokenizer

proper_text = st.text(st.characters(exclude_categories=["Cs"]))
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


def test_sizes_and_stop_tokens(gpt2):
    assert (BYTES.name, BYTES.n_vocab, BYTES.stop_token) == ("bytes", 257, 256)
    assert (gpt2.name, gpt2.n_vocab, gpt2.stop_token) == ("gpt2", 50257, 50256)


@given(proper_text)
def test_bytes_are_the_utf8_bytes(text):
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode(text)) == text


@pytest.mark.parametrize("text", ["", "\n", "\r\n\r\n", "\x00", "\ufeffa", "a  b\t\n", "é中🙂", "x" * 100_000])
def test_awkward_text_survives_bytes(text):
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.lists(st.integers(0, 255)))
def test_bytes_decode_any_ids(ids):
    assert BYTES.decode(ids) == bytes(ids).decode(errors="replace")


def test_gpt2_round_trips(gpt2):
    assert gpt2.encode("6025+3528=13,04") == tiktoken.get_encoding("gpt2").encode("6025+3528=13,04")
    assert gpt2.encode("Hello world") == [15496, 995]

    @given(proper_text)
    def survives(text):
        assert gpt2.decode(gpt2.encode(text)) == text

    survives()


def check_stop_token_is_never_text(tokenizer):
    for text in (END_OF_TEXT, f"1+2={END_OF_TEXT}3", END_OF_TEXT * 3):
        ids = tokenizer.encode(text)
        assert tokenizer.stop_token not in ids
        assert tokenizer.decode(ids) == text
    three = tokenizer.encode("3")
    stop = [tokenizer.stop_token]
    assert tokenizer.decode(stop) == ""
    assert tokenizer.decode(stop + three + stop) == "3"
    assert tokenizer.decode([tokenizer.n_vocab, *three, 10**9, -1, 10**30]) == "3"


def test_bytes_stop_token_is_never_text():
    check_stop_token_is_never_text(BYTES)


def test_gpt2_stop_token_is_never_text(gpt2):
    check_stop_token_is_never_text(gpt2)


def check_lone_surrogates(tokenizer):
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\udc80") == tokenizer.encode("\ufffd")
    assert tokenizer.encode("a\ud83d\ude42") == tokenizer.encode("a🙂")  # a pair that belongs together is its character


def test_bytes_read_a_lone_surrogate_as_the_replacement_character():
    check_lone_surrogates(BYTES)


def test_gpt2_reads_a_lone_surrogate_as_the_replacement_character(gpt2):
    check_lone_surrogates(gpt2)


def test_gpt2_decodes_a_torn_character(gpt2):
    torn = gpt2.encode("🙂")[:1]
    assert gpt2.decode(torn) == "\ufffd"


def test_a_token_is_never_less_than_a_byte(gpt2):
    """What the loops rely on when they check block_size: the longest text's bytes bound every text's tokens."""

    @given(proper_text)
    def bounded(text):
        assert len(gpt2.encode(text)) <= len(text.encode())

    bounded()
    assert len(gpt2.encode("6025")) > len(gpt2.encode("9999"))


def test_unknown_name():
    with pytest.raises(SnugError, match="'gpt3' is not one of bytes, gpt2"):
        get_tokenizer("gpt3")


@pytest.mark.parametrize(
    "error", [requests.exceptions.ConnectionError("no route"), TimeoutError(), ValueError("hash mismatch")]
)
def test_gpt2_without_its_files(monkeypatch, tmp_path, error):
    def no_network(*args, **kwargs):
        raise error

    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # forget those already loaded
    monkeypatch.setattr("tiktoken.load.read_file", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(SnugError) as caught:
        get_tokenizer("gpt2")
    assert "TIKTOKEN_CACHE_DIR" in str(caught.value) and "--tokenizer=bytes" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_torch():
    """What answers bad input must not wait for torch to be imported."""
    code = """
import sys
from data import make_task
from settings import SFTSettings
from tokenizer import get_tokenizer

get_tokenizer("bytes")
for task in ("addition", "countdown"):
    make_task(SFTSettings(task=task)).prompts("test", range(3))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


@given(proper_text.filter(bool), proper_text, proper_text)
def test_a_stop_string_is_found_where_it_ends(stop, before, after):
    """At the token whose byte completes it, and at none before; bytes are the shortest tokens there are."""
    is_over = BYTES.stopper(stop)
    ids = BYTES.encode(before + stop + after)
    ends = [n for n in range(1, len(ids) + 1) if is_over(ids[:n])]
    text = (before + stop).encode()
    expected = text.index(stop.encode()) + len(stop.encode())
    assert ends[0] == expected <= len(text)


def test_a_stop_string_that_ends_within_a_token(gpt2):
    is_over = gpt2.stopper("</answer>")
    ids = gpt2.encode("so it is <answer>42</answer>\n\nAnd")
    ends = [n for n in range(len(ids) + 1) if is_over(ids[:n])]
    assert "</answer>" in gpt2.decode(ids[: ends[0]]) and "</answer>" not in gpt2.decode(ids[: ends[0] - 1])
    assert gpt2.stopper("") is None and not is_over([]) and not is_over([gpt2.stop_token])


# -----------------------------------------------------------------------------
# tokenizer.json: four kinds of files, trained here on random words


SCRIPTS = [
    "aeiou" + string.ascii_lowercase,
    "абвгдежзиклмнопрст",
    "αβγδεζηθικλμνξο",
    "你好世界中文字天地人",
    "かなカナひらがな",
    "한글말하기",
    "عربيةمدسل",
    "नमस्ते",
    "ไทยภาษา",
]
SPACES = [" ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\x85", "\x0b"]
CONTRACTIONS = ["'s", "'LL", "'Re", "it's", "WE'VE", "'\u017f", "don't", "'D", "’s", "I'M"]
EMOJI = ["👩\u200d👩\u200d👧", "🏳️\u200d🌈", "👍🏽", "🇩🇪", "🙂"]
CONTROL = ["\x00", "\x1b[0m", "\ufeff", "\u200d", "\x1c", "\x7f", "\ufffd", "\uffff"]
MARKS = [
    "e\u0301",
    "a\u0323\u0301",
    "a\u0301\u0323",
    "\u1e9b\u0323",
    "=\u0338",
    "\u0344",
    "가\u11a8",
    "\u212b",
    "\u0958",
    "\u1fef",
]
CODE = [
    "def f(x):\n    return x ** 2",
    "x[i] += 1;\r\n\r\n",
    "<a href='#'>",
    "://",
    "}\n\n\n",
    "    if",
    "-----",
    "#!/bin/sh",
    "\\n",
    "&&",
]
ADDED = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|im_",
    "|>",
    "<tool é>",
    "<tool e\u0301>",
]
# Assigned for so long that every library knows them alike; of the ideographs and of the private ones, few
MANY = [range(0x3400, 0xD7A4), range(0xE000, 0xF900), range(0x20000, 0x110000)]
CHARACTERS = [
    c for n, c in enumerate(map(chr, range(0x110000))) if n % 50 == 0 or not any(n in block for block in MANY)
]
CHARACTERS = [c for c in CHARACTERS if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs")]


def words(rng, count):
    return ["".join(rng.choices(rng.choice(SCRIPTS)[:6], k=rng.randrange(1, 7))) for _ in range(count)]


@cache
def vocabulary():
    return words(random.Random(0), 400)


def random_text(rng):
    parts = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(12)
        if kind < 5:
            parts.append(rng.choice(["", " ", " "]) + " ".join(rng.choices(vocabulary(), k=rng.randrange(1, 4))))
        elif kind == 5:
            parts.append("".join(rng.choices(CHARACTERS, k=rng.randrange(1, 8))))
        elif kind == 6:
            parts.append(rng.choice(SPACES) * rng.randrange(1, 7))
        elif kind == 7:
            parts.append(str(rng.randrange(10 ** rng.randrange(1, 12))))
        else:
            parts.append(rng.choice(rng.choice([CONTRACTIONS, EMOJI, CONTROL, MARKS, CODE, ADDED])))
    return "".join(parts)


@cache
def texts(count, seed=1):
    rng = random.Random(seed)
    return [random_text(rng) for _ in range(count)]


def trained(pre_tokenizer, special=(), normalizer=None):
    """-> what tokenizer.json says of a tokenizer trained on 3,000 texts; special tokens are its first ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(texts(3000, seed=2), trainer)
    return json.loads(tokenizer.to_str())


def split(pattern):
    isolated = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def added(spec, *tokens, special=True, normalized=False):
    """The spec with more added tokens, after those it has."""
    vocab, entries = spec["model"]["vocab"], spec["added_tokens"]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=normalized, special=special)
    for token in tokens:
        last = max(len(vocab) - 1, *(entry["id"] for entry in entries), 0) if entries else len(vocab) - 1
        entries.append(dict(id=vocab.get(token, last + 1), content=token) | flags)
    return spec


def all_splits(spec):
    """The merges as they are written from a tiktoken file: each token's every cut into two tokens, in the order of the tokens."""
    vocab = spec["model"]["vocab"]
    made = {"".join(pair): None for pair in spec["model"]["merges"]}
    known = set(made) | set(SYMBOLS.values())
    cuts = {
        token: [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in known and token[n:] in known]
        for token in made
    }
    spec["model"]["merges"] = [
        list(pair) for token in made for pair in sorted(cuts[token], key=lambda pair: [vocab[p] for p in pair])
    ]
    spec["model"]["ignore_merges"] = True
    return spec


def begin_with(spec, token):
    """As Llama 3's: the token is put before each text."""
    number = next(entry["id"] for entry in spec["added_tokens"] if entry["content"] == token)
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    template = dict(
        type="TemplateProcessing", single=[{"SpecialToken": {"id": token, "type_id": 0}}, sequence], pair=[sequence]
    )
    template["special_tokens"] = {token: dict(id=token, ids=[number], tokens=[token])}
    byte_level = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=False, use_regex=True)
    spec["post_processor"] = dict(type="Sequence", processors=[byte_level, template])
    return spec


@cache
def gpt2_like():
    spec = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    spec["model"]["vocab"][END_OF_TEXT] = len(spec["model"]["vocab"])  # as OpenAI's has it: in the vocabulary too
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    return added(spec, END_OF_TEXT, normalized=True)


@cache
def llama3_like():
    """Some tokens of Llama 3's are made of parts of higher ranks, and some of no two: so are two of these."""
    spec = all_splits(
        added(
            trained(split(LLAMA3)),
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        )
    )
    return begin_with(spec, "<|begin_of_text|>")


@cache
def qwen_like():
    spec = trained(split(QWEN2), normalizer=normalizers.NFC())
    spec = added(spec, END_OF_TEXT, "<|im_start|>", "<|im_end|>")
    return added(added(spec, "<think>", "</think>", special=False), "<tool é>", special=False, normalized=True)


@cache
def smollm2_like():
    """Special tokens are its first ids; digits are cut off before the pattern sees a text."""
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return trained(digits, [END_OF_TEXT, "<|im_start|>", "<|im_end|>", *(f"<unused{n}>" for n in range(5))])


@cache
def shuffled():
    """Ids in no order, and three cuts of which the last does not match everything, as DeepSeek V3's."""
    last = split(r" ?\p{L}+|\s+(?!\S)|\s+")
    cuts = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in (r"\p{N}{1,3}", "[一-龥ぁ-ヿ]+")]
    spec = trained(pre_tokenizers.Sequence([*cuts, last[0], last[1]]))
    vocab = list(spec["model"]["vocab"])
    random.Random(0).shuffle(vocab)
    spec["model"]["vocab"] = {token: number for number, token in enumerate(vocab)}
    return added(spec, END_OF_TEXT)


FAMILIES = [gpt2_like, llama3_like, qwen_like, smollm2_like, shuffled]


def folder_of(path, spec, **files):
    """Writes the files of a tokenizer: objects as JSON, text and bytes as they are."""
    path.mkdir(exist_ok=True)
    names = {"tokenizer.json": spec} | {
        f"{name}.{'jinja' if name == 'chat_template' else 'json'}": value for name, value in files.items()
    }
    for name, value in names.items():
        data = value if isinstance(value, str | bytes) else json.dumps(value)
        (path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.__name__)
def pair(request, tmp_path_factory):
    """-> ours and theirs, of one file."""
    folder = folder_of(tmp_path_factory.mktemp("tokenizer"), request.param())
    return get_tokenizer(folder), tokenizers.Tokenizer.from_file(folder + "/tokenizer.json")


def ids_of(theirs, strings, special):
    theirs.encode_special_tokens = not special
    return [encoding.ids for encoding in theirs.encode_batch(strings, add_special_tokens=False)]


@pytest.mark.parametrize("special, count", [(True, 10_000), (False, 2_000)])
def test_ids_are_those_of_tokenizers(pair, special, count):
    ours, theirs = pair
    strings = texts(10_000)[:count]
    for text, ids in zip(strings, ids_of(theirs, strings, special), strict=True):
        assert ours.encode(text, special) == ids, text


def test_every_character_has_the_ids_of_tokenizers(pair):
    ours, theirs = pair
    strings = ["".join(CHARACTERS[place : place + 50]) for place in range(0, len(CHARACTERS), 50)]
    assert [ours.encode(text) for text in strings] == ids_of(theirs, strings, False)


def test_decoded_text_is_what_was_encoded(pair):
    ours, _ = pair
    for text in texts(2000, seed=3):
        text = unicodedata.normalize("NFC", text) if ours.nfc else text
        if not ours.nfc or "<tool" not in text:
            assert ours.decode(ours.encode(text)) == text


def test_special_tokens_are_never_text(pair):
    ours, theirs = pair
    assert theirs.get_vocab_size() == ours.n_vocab
    for token in ours.added:
        text = f"a {token.content}b"
        assert (token.id in ours.encode(text)) == (not token.special)
        assert token.id in ours.encode(text, special=True)
        assert ours.decode(ours.encode(text)) == text
        assert ours.decode([token.id]) == ("" if token.special else token.content)
    assert ours.decode([10**9, -1, *ours.encode("3")]) == "3"


def test_lone_surrogates_of_a_file(pair):
    check_lone_surrogates(pair[0])


def test_short_texts_of_awkward_characters(pair):
    ours, theirs = pair

    @given(st.lists(st.text(st.sampled_from("a b'sS1\n\u0301é<|>")), min_size=20))
    @hypothesis_settings(max_examples=30)
    def same(strings):
        assert [ours.encode(text) for text in strings] == ids_of(theirs, strings, False)

    same()


# -----------------------------------------------------------------------------
# tokenizer.json: what BPE makes, and what it does not


def small(tokens=(), merges=(), **model):
    """The bytes, then these tokens, then <|endoftext|>."""
    vocab = {SYMBOLS[byte]: byte for byte in range(256)} | {token: 256 + n for n, token in enumerate(tokens)}
    spec = dict(
        added_tokens=[],
        normalizer=None,
        post_processor=None,
        decoder=dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True),
    )
    spec["pre_tokenizer"] = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    spec["model"] = dict(type="BPE", dropout=None, unk_token=None, vocab=vocab, merges=list(merges)) | model
    return added(spec, END_OF_TEXT)


def stage(kind, **more):
    return dict(type=kind) | more


BYTE_LEVEL = stage("ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)


def sequence(*stages):
    return stage("Sequence", pretokenizers=[*stages, BYTE_LEVEL])


def isolated(pattern, behavior="Isolated", invert=False):
    return stage("Split", pattern=pattern, behavior=behavior, invert=invert)


def random_bpe(rng):
    """Tokens of one to three letters with merges: as training makes them, or shuffled, or all cuts of tokens in any order, with some left out,
    or tokens without merges, and ids in no order.
    """
    letters = "abc"[: rng.randrange(1, 4)]
    tokens, merges = list(letters), []
    for _ in range(rng.randrange(1, 12)):
        a, b = rng.choice(tokens), rng.choice(tokens)
        if len(a + b) < 8 and (a + b not in tokens or rng.random() < 0.1):
            merges.append([a, b])
            tokens += [a + b] * (a + b not in tokens)
    tokens = tokens[len(letters) :]
    kind = rng.randrange(4)
    if kind == 1:
        rng.shuffle(merges)
    elif kind == 2:
        rng.shuffle(tokens)
        known = {*letters, *tokens}
        merges = [
            [t[:n], t[n:]]
            for t in tokens
            for n in range(1, len(t))
            if t[:n] in known and t[n:] in known and rng.random() < 0.95
        ]
    elif kind == 3:
        tokens += {"".join(rng.choices(letters, k=rng.randrange(2, 6))) for _ in range(2)} - set(tokens)
        rng.shuffle(tokens)
    strings = ["".join(rng.choices(letters, k=length)) for length in range(1, 13) for _ in range(12)]
    return small(tokens, merges, ignore_merges=rng.random() < 0.5), strings


def test_merges_that_are_read_are_those_of_tokenizers(tmp_path):
    """And those that tiktoken would not make are refused; both have to come up."""
    read = refused = 0
    for seed in range(500):
        spec, strings = random_bpe(random.Random(seed))
        try:
            ours = get_tokenizer(folder_of(tmp_path, spec))
        except SnugError:
            refused += 1
            continue
        read += 1
        theirs = tokenizers.Tokenizer.from_str(json.dumps(spec))
        assert [ours.encode(text) for text in strings] == ids_of(theirs, strings, False), spec["model"]
    assert min(read, refused) > 130


MERGES = [  # tokens, merges, ignore_merges -> what is said, or None where it can be read
    (["ab", "abc"], ["a b", "ab c"], False, None),
    (["ab", "abc"], ["ab c", "a b"], False, "the token b'abc'"),  # made before its part is
    (["ab", "bc", "abc"], ["a b", "b c", "a bc"], False, "the token b'abc'"),  # abc is ab, c
    (["ab", "bc", "abc"], ["a b", "b c", "a bc"], True, "the token b'abc'"),
    (["ab", "bc", "abc"], ["a b", "b c", "ab c", "a bc"], True, None),
    (["ab", "bc", "abc"], ["a b", "ab c", "b c", "a bc"], True, "the token b'abc' has merges of ranks that are apart"),
    (["abc", "ab"], ["ab c", "a b"], True, None),  # as Llama 3 has some: all cuts are there
    (["ab", "abc"], ["a b"], False, None),  # abc is never made
    (["ab", "abc"], ["a b"], True, "the token b'abc'"),  # a piece that is abc is one token, but xabc is not made of it
    (["abc"], [], True, None),
    (["ab"], [["a", "b"]], False, None),
    (["ab"], ["a b c"], False, "a merge must be two tokens, not 'a b c'"),
    (["ab"], [["a"]], False, "a merge must be two tokens, not list"),
    (["ab"], [["a", ["b"]]], False, "a merge must be two tokens, not list"),
    (["ab"], [7], False, "a merge must be two tokens, not 7"),
    (["ab"], ["a c"], False, "the merge 'a c' has tokens that are not in the vocabulary"),
    (["ab"], ["x ab"], False, "the merge 'x ab' has tokens that are not in the vocabulary"),
]


@pytest.mark.parametrize("tokens, merges, whole, message", MERGES, ids=range(len(MERGES)))
def test_merges(tmp_path, tokens, merges, whole, message):
    spec = small(tokens, merges, ignore_merges=whole)
    check_reading(tmp_path, spec, message, ["abc", "xabc", "ab", "bc", "abcabc", "aabbcc", "cab"])


def check_reading(path, spec, message, strings):
    """It is refused with this message; or, for None, has the ids of tokenizers for these strings."""
    folder = folder_of(path, spec)
    if message:
        with pytest.raises(SnugError, match="tokenizer.json: .*" + message) as error:
            get_tokenizer(folder)
        assert "\n" not in str(error.value)
        return
    theirs, ours = tokenizers.Tokenizer.from_str(json.dumps(spec)), get_tokenizer(folder)
    for special in (True, False):
        assert [ours.encode(text, special) for text in strings] == ids_of(theirs, strings, special)


def test_a_special_token_that_merges_would_make_is_still_not_text(tmp_path):
    tokenizer = get_tokenizer(folder_of(tmp_path, added(small(["ab", "abc"], ["a b", "ab c"]), "ab")))
    assert tokenizer.encode("xabc") == [*b"xabc"] and tokenizer.encode("xabc", special=True) == [*b"x", 256, *b"c"]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("normalizer", [None, dict(type="NFC")])
def test_added_tokens(tmp_path, normalized, normalizer):
    """The longest at the leftmost place; normalized ones are looked for, normalized themselves, in what is left of the normalized text."""
    spec = added(
        small(["ab"], ["a b"]) | {"normalizer": normalizer},
        "<a>",
        "<a>b",
        "b<a>",
        "x",
        special=False,
        normalized=normalized,
    )
    spec = added(
        added(spec, "<e\u0301>", "é", "ab<", special=False, normalized=not normalized),
        "<a>bc",
        "<s>",
        normalized=normalized,
    )
    strings = [
        "<a>b",
        "<a>bc",
        "ab<a>",
        "b<a>b<a>",
        "<e\u0301>",
        "<é>",
        "e\u0301",
        "é",
        "<a>\u0338",
        "<e\u0301>\u0338",
        "é\u0323",
        "xab<<s>x<s>",
    ]
    check_reading(tmp_path, spec, None, strings)


PATTERNS = [  # a pattern -> what is said of it, or None where it can be read
    (GPT2, None),
    (LLAMA3, None),
    (QWEN2, None),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s+",
        None,
    ),
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s+(?!\S)|\s", None),
    (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""", None),
    (r"(?:ab|a)c|(b)|.", None),
    (r"a{2}|b{1,}|c{0,2}d|a+?b|\P{L}", None),
    (r"\w+", r"has '\\\\w\+'"),
    (r"\bx", "which is not supported"),
    (r"^a", "which is not supported"),
    (r"a$", "which is not supported"),
    (r"(?=a)a", "which is not supported"),
    (r"(?<!a)b", "which is not supported"),
    (r"a(?!b)", "which is not supported"),
    (r"(?s:.)", "which is not supported"),
    (r"(?i:ss)", "which is not supported"),
    (r"(a)\1", "which is not supported"),
    (r"\p{Greek}+", "which is not supported"),
    (r"\x41", "which is not supported"),
    (r"[a&&b]", "which is not supported"),
    (r"[a-z--b]", "which is not supported"),
    (r"[[:alpha:]]", "which is not supported"),
    (r"\p{N}{1,3}+", "which is not supported"),
    (r"(?:a{9}){9}", r"has '\)\{9}', which is not supported"),
    ("ab" * 5000, "has more than 5000 characters"),
    (r"(a", "is wrong: missing"),
    (r"a**", "is wrong"),
    (r"a*", "matches the empty text"),
    (r"a|(?!\S)", "matches the empty text"),
    ("", "matches the empty text"),
]


@pytest.mark.parametrize("pattern, message", PATTERNS, ids=range(len(PATTERNS)))
def test_patterns(tmp_path, pattern, message):
    spec = added(small(["ab", "12", "ĠĠ", "//", "'s"], ["a b", "1 2", "Ġ Ġ", "/ /", "' s"]), "<b>")
    spec["pre_tokenizer"] = sequence(isolated({"Regex": pattern}))
    check_reading(tmp_path, spec, message, texts(10_000)[:300] + ["aab ab\n\n12 1212 abc ad bb a/b//'S 'll"])


def template(*single, **special):
    return stage("TemplateProcessing", single=single, pair=[A], special_tokens=special)


A = {"Sequence": {"id": "A", "type_id": 0}}
BOS = {"SpecialToken": {"id": "bos", "type_id": 0}}
THE_BOS = dict(id="bos", ids=[257], tokens=["<b>"])
READ = [  # what is put where -> what is said, or None where it can be read
    ("pre_tokenizer", sequence(isolated({"String": "a.+"})), None),
    ("pre_tokenizer", sequence(isolated({"String": " "}), stage("Digits", individual_digits=False)), None),
    (
        "pre_tokenizer",
        sequence(isolated({"Regex": r"\s+"}), isolated({"Regex": "a"}), stage("Digits", individual_digits=True)),
        None,
    ),
    ("pre_tokenizer", sequence(), None),
    ("pre_tokenizer", BYTE_LEVEL, None),
    ("pre_tokenizer", BYTE_LEVEL | {"use_regex": None}, "1"),
    ("pre_tokenizer", BYTE_LEVEL | {"add_prefix_space": True}, "add_prefix_space is not supported"),
    (
        "pre_tokenizer",
        sequence(isolated({"Regex": "a"}, "Removed")),
        "behavior 'Removed', invert False is not supported",
    ),
    (
        "pre_tokenizer",
        sequence(isolated({"Regex": "a"}, invert=True)),
        "behavior 'Isolated', invert True is not supported",
    ),
    ("pre_tokenizer", sequence(isolated({"String": ""})), "matches the empty text"),
    ("pre_tokenizer", sequence(isolated({})), "String is missing"),
    ("pre_tokenizer", sequence(stage("Whitespace")), "pre_tokenizer 'Whitespace' is not supported"),
    ("pre_tokenizer", sequence(BYTE_LEVEL), "pre_tokenizer 'ByteLevel' is not supported here"),
    ("pre_tokenizer", stage("Metaspace", replacement="▁"), "'Metaspace', of sentencepiece, is not supported"),
    ("pre_tokenizer", sequence()["pretokenizers"], "pre_tokenizer must be an object, not list"),
    (
        "pre_tokenizer",
        stage("Sequence", pretokenizers=[stage("Digits", individual_digits=True)]),
        "does not end with ByteLevel",
    ),
    ("pre_tokenizer", None, "pre_tokenizer must be an object, not None"),
    ("normalizer", stage("NFC"), None),
    ("normalizer", stage("Sequence", normalizers=[]), None),
    ("normalizer", stage("Sequence", normalizers=[stage("NFC")]), None),
    ("normalizer", stage("NFKC"), "normalizer 'NFKC' is not supported, only NFC is"),
    ("normalizer", stage("Sequence", normalizers=[stage("NFC"), stage("Lowercase")]), "normalizer 'Lowercase'"),
    ("normalizer", stage("Prepend", prepend="▁"), "normalizer 'Prepend', of sentencepiece, is not supported"),
    ("decoder", stage("Metaspace"), "decoder 'Metaspace', of sentencepiece, is not supported"),
    ("decoder", None, "decoder must be an object, not None"),
    ("post_processor", BYTE_LEVEL, None),
    ("post_processor", template(BOS, A, bos=THE_BOS), None),
    ("post_processor", template(A, BOS, bos=THE_BOS), "elsewhere than before the text"),
    ("post_processor", template(BOS, A, BOS, bos=THE_BOS), "elsewhere than before the text"),
    ("post_processor", template(), "elsewhere than before the text"),
    ("post_processor", template(BOS, A), "bos is missing"),
    ("post_processor", template(BOS, A, bos=dict(ids=[999])), "ids before the text that are not in the vocabulary"),
    ("post_processor", template(BOS, A, bos=dict(ids=["x"])), "ids before the text that are not in the vocabulary"),
    ("post_processor", stage("RobertaProcessing"), "post_processor 'RobertaProcessing' is not supported"),
    ("model.type", "Unigram", "the model 'Unigram', of sentencepiece, is not supported; snug reads byte-level BPE"),
    ("model.type", "WordPiece", "the model 'WordPiece' is not supported"),
    ("model.byte_fallback", True, "byte_fallback, of sentencepiece, is not supported"),
    ("model.dropout", 0.1, "the model's dropout=0.1 is not supported"),
    ("model.continuing_subword_prefix", "##", "continuing_subword_prefix='##' is not supported"),
    ("model.continuing_subword_prefix", "", None),
    ("model.end_of_word_suffix", "</w>", "end_of_word_suffix='</w>' is not supported"),
    ("model.unk_token", END_OF_TEXT, None),
    ("model.merges", {}, "merges must be a list, not dict"),
    ("model.merges", None, "merges must be a list, not None"),
    ("model.vocab", [["a", 0.5]], "vocab must be an object, not list"),
    ("model.vocab", {}, "the vocabulary must be tokens with whole numbers"),
    (
        "model.vocab",
        {SYMBOLS[byte] * (1 + (byte == 97)): byte for byte in range(256)} | {"12": 256},
        "1 of the 256 bytes are not in",
    ),
    ("model.vocab.x", 7.0, "the vocabulary must be tokens with whole numbers"),
    ("model.vocab.x", True, "the vocabulary must be tokens with whole numbers"),
    ("model.vocab.x", "7", "the vocabulary must be tokens with whole numbers"),
    ("model.vocab.x", -1, "the vocabulary has ids from -1 to 256"),
    ("model.vocab.x", 10**30, "the vocabulary has ids from 0 to 10{30}, and they must be"),
    ("model.vocab.x", 5, "two tokens of the vocabulary have the same id"),
    ("added_tokens.0.id", 999, "the added token '<b>' has id 999, where `tokenizers` would give it 257"),
    ("added_tokens.0.id", True, "id must be a whole number, not True"),
    ("added_tokens.0.content", "", "the added token '' is empty"),
    ("added_tokens.0.content", END_OF_TEXT, "is there twice"),
    ("added_tokens.0.content", "a", "the added token 'a' has id 257, where `tokenizers` would give it 97"),
    ("added_tokens.0.content", "\ud800", "surrogates not allowed"),
    ("added_tokens.0.lstrip", True, "'<b>' has lstrip, which is not supported"),
    ("added_tokens.0.rstrip", True, "'<b>' has rstrip, which is not supported"),
    ("added_tokens.0.single_word", True, "'<b>' has single_word, which is not supported"),
    ("added_tokens.0.special", None, "special must be true or false, not None"),
    ("added_tokens.0.normalized", True, None),
    ("added_tokens.0", "<b>", "'<b>' must be an object that has content"),
    ("added_tokens", {}, "added_tokens must be a list, not dict"),
]


def put(spec, path, value):
    *parents, last = (int(name) if name.isdigit() else name for name in path.split("."))
    for name in parents:
        spec = spec[name]
    spec[last] = value


@pytest.mark.parametrize("path, value, message", READ, ids=range(len(READ)))
def test_what_is_read_and_what_is_refused(tmp_path, path, value, message):
    spec = small(["12"], ["1 2"])
    entries = added(spec, "<b>")["added_tokens"]
    entries.reverse()  # so that <b> is the first, with the id that is next
    entries[0]["id"], entries[1]["id"] = 257, 258
    put(spec, path, value)
    if message == "1":
        message = None
        del spec["pre_tokenizer"]["use_regex"]
    check_reading(tmp_path, spec, message, [*texts(10_000)[:200], "a.+b12 34<b>a <b>", "e\u0301\u212b<b>"])


def test_a_whitespace_run_that_tiktoken_cannot_match(tmp_path):
    spec = small()
    tokenizer = get_tokenizer(folder_of(tmp_path, spec))
    assert len(tokenizer.encode(" " * 100_000)) == 100_000
    with pytest.raises(
        SnugError, match="tiktoken fails on a text of 3000000 characters .*; cut it into shorter texts"
    ) as error:
        tokenizer.encode(" " * 3_000_000)
    assert "\n" not in str(error.value)


def mutated(value, rng):
    """The value with one of its parts replaced by something else, or gone, or there twice."""
    junk = [
        None,
        True,
        -1,
        0,
        7,
        10**12,
        0.5,
        "",
        "x",
        "\ud800",
        " ",
        [],
        {},
        [[]],
        {"type": "Sequence"},
        [{}],
        ["a", "b"],
        "Ġ",
    ]
    value = copy.deepcopy(value)
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return value
        key = rng.choice(keys[-12:])
        if isinstance(at[key], dict | list) and rng.random() < 0.8:
            at = at[key]
            continue
        change = rng.randrange(4)
        if change == 0:
            del at[key]
        elif change == 1 and isinstance(at, list):
            at.append(at[key])
        else:
            at[key] = rng.choice(junk)
        return value


def full_spec():
    spec = small(["ab", "abc"], ["a b", "ab c"], ignore_merges=True)
    spec = added(added(spec, "<b>"), "<think>", special=False, normalized=True)
    spec["pre_tokenizer"] = sequence(isolated({"Regex": r"\p{N}"}), stage("Digits", individual_digits=True))
    spec["normalizer"] = stage("Sequence", normalizers=[stage("NFC")])
    return begin_with(spec, "<b>")


CONFIG = dict(
    bos_token="<b>",
    eos_token=dict(content=END_OF_TEXT),
    add_bos_token=True,
    chat_template="{{ bos_token }}{{ messages[0].content }}",
)


def test_files_that_are_damaged_are_refused_in_one_line(tmp_path):
    """Whatever stands in the files, the answer is a tokenizer that encodes, or a SnugError."""
    rng, refused = random.Random(0), 0
    for _ in range(400):
        files = dict(spec=full_spec(), tokenizer_config=CONFIG, generation_config=dict(eos_token_id=[258, 260]))
        name = rng.choice(["spec", "spec", "spec", "tokenizer_config", "generation_config"])
        files[name] = mutated(files[name], rng)
        if rng.random() < 0.1:
            data = bytearray(json.dumps(files[name]).encode())
            data[rng.randrange(len(data))] = rng.randrange(256)
            files[name] = bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            tokenizer = get_tokenizer(folder_of(tmp_path, **files))
            tokenizer.encode("abc 12<b><think>é")
            tokenizer.encode_prompt([dict(role="user", content="<b>")])
        except SnugError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            refused += 1
    assert 130 < refused < 370


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", r"not JSON \(Expecting value"),
        (b"\xff\xfe", r"not JSON \('utf-8' codec"),
        (b"[" * 100_000, r"not JSON \("),
        (b'{"model":' * 100_000, r"not JSON \("),
        (b'{"model": {"vocab": {"a": ' + b"1" * 5000 + b"}}}", r"not JSON \("),
        (b"[1]", "must be an object, not list"),
        (b"{}", "model is missing"),
        (b'{"model": {"type": "BPE"}}', "vocab is missing"),
    ],
    ids=range(8),
)
def test_files_that_are_no_json(tmp_path, data, message):
    with pytest.raises(SnugError, match=message) as error:
        get_tokenizer(folder_of(tmp_path, data))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    with pytest.raises(SnugError, match="tokenizer_config.json: "):
        get_tokenizer(
            folder_of(tmp_path, small(), tokenizer_config=data if data != b"{}" and b"model" not in data else b"[]")
        )


@pytest.mark.parametrize("name", ["", "no/such/folder", "\x00", None, 7, b"bytes", "tokenizer.json@0123456789ab"])
def test_names_of_no_tokenizer(name):
    with pytest.raises(SnugError, match="is not one of bytes, gpt2, or a folder that has a tokenizer.json") as error:
        get_tokenizer(name)
    assert "\n" not in str(error.value)


def test_a_folder_of_sentencepiece_alone(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(SnugError, match="a tokenizer.model, of sentencepiece, alone: snug reads byte-level BPE"):
        get_tokenizer(str(tmp_path))


STOPS = [  # files -> the ids that end a completion; <|endoftext|> is 256, <b> 257, </s> 258
    ({}, (256,)),
    (dict(tokenizer_config=dict(eos_token="<b>")), (257,)),
    (dict(tokenizer_config=dict(eos_token=dict(content="<b>", lstrip=False))), (257,)),
    (dict(tokenizer_config=dict(eos_token="<b>"), generation_config=dict(eos_token_id=258)), (257, 258)),
    (
        dict(tokenizer_config=dict(eos_token="<b>"), generation_config=dict(eos_token_id=[258, 257, 999, 256])),
        (257, 258, 256),
    ),
    (dict(tokenizer_config=dict(eos_token="<b>"), config=dict(eos_token_id=258)), (257,)),
    (dict(config=dict(eos_token_id=258)), (258,)),
    (dict(config=dict(eos_token_id=[258, 257])), (258, 257)),
    (dict(tokenizer_config=dict(eos_token=None), config=dict(eos_token_id=258)), (258,)),
    (dict(special_tokens_map=dict(eos_token="</s>")), (258,)),
    (dict(tokenizer_config=dict(eos_token="<b>"), special_tokens_map=dict(eos_token="</s>")), (257,)),
    (dict(generation_config=dict(eos_token_id=257)), (257,)),
    (dict(tokenizer_config=dict(eos_token="<none>")), (256,)),
    (dict(generation_config=dict(eos_token_id="x")), "eos_token_id must be an id or a list of ids, not 'x'"),
    (dict(generation_config=dict(eos_token_id=[True])), "eos_token_id must be an id or a list of ids, not list"),
    (dict(generation_config=dict(eos_token_id=97)), "the id 97 ends a completion, but it is ordinary text"),
    (dict(tokenizer_config=dict(eos_token="a")), "the id 97 ends a completion, but it is ordinary text"),
    (dict(tokenizer_config=b"{"), "tokenizer_config.json: not JSON"),
]


@pytest.mark.parametrize("files, expected", STOPS, ids=range(len(STOPS)))
def test_stop_tokens(tmp_path, files, expected):
    spec = added(small(), "<b>", "</s>", special=False)
    if isinstance(expected, str):
        with pytest.raises(SnugError, match=expected):
            get_tokenizer(folder_of(tmp_path, spec, **files))
        return
    tokenizer = get_tokenizer(folder_of(tmp_path, spec, **files))
    assert (tokenizer.stop_tokens, tokenizer.stop_token, tokenizer.n_vocab) == (expected, expected[0], 259)
    assert tokenizer.decode([*b"x", *expected]) == "x"  # what stops is no text, whatever its flags say
    assert not set(expected) & set(tokenizer.encode("<|endoftext|><b></s>"))


def test_nothing_that_stops(tmp_path):
    spec = small()
    spec["added_tokens"] = []
    with pytest.raises(
        SnugError, match="no file says what ends a completion; name a token of the vocabulary as eos_token"
    ):
        get_tokenizer(folder_of(tmp_path, spec))


def test_what_a_text_begins_with(tmp_path):
    spec = added(small(), "<b>")
    plain = get_tokenizer(folder_of(tmp_path, spec, tokenizer_config=dict(bos_token="<b>", add_bos_token=False)))
    by_config = get_tokenizer(folder_of(tmp_path, spec, tokenizer_config=dict(bos_token="<b>", add_bos_token=True)))
    by_template = get_tokenizer(
        folder_of(tmp_path, begin_with(spec, "<b>"), tokenizer_config=dict(bos_token="<b>", add_bos_token=True))
    )
    assert plain.encode_prompt("a<b>") == [*b"a<b>"]
    assert by_config.encode_prompt("a<b>") == by_template.encode_prompt("a<b>") == [257, *b"a<b>"]
    assert by_template.encode_prompt("a") == tokenizers.Tokenizer.from_str(json.dumps(spec)).encode("a").ids
    assert by_template.encode("a") == [*b"a"] and get_tokenizer("bytes").encode_prompt("a") == [*b"a"]


def test_holes_between_ids(tmp_path):
    spec = small()
    spec["model"]["vocab"]["ab"] = 300
    spec["added_tokens"][0]["id"] = 257
    tokenizer = get_tokenizer(folder_of(tmp_path, spec))
    assert tokenizer.n_vocab == 301 and tokenizer.decode([97, 280, 300, 301, 97]) == "aaba"


def test_a_stop_string_around_special_tokens(tmp_path):
    is_over = get_tokenizer(folder_of(tmp_path, small())).stopper("ab")
    assert is_over([*b"xa", 256, 256, 256, *b"b"]) and is_over([*b"ab", 256]) and not is_over([*b"abx", 256, *b"y"])


def test_files_go_out_as_they_came_in(tmp_path):
    files = dict(
        tokenizer_config=CONFIG,
        special_tokens_map={},
        generation_config={},
        chat_template="{{ 1 }}\r\n",
        config={"a": 1},
    )
    tokenizer = get_tokenizer(folder_of(tmp_path / "in", full_spec(), **files))
    assert set(tokenizer.files) == set(FILES)
    tokenizer.save(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(FILES)
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes() == tokenizer.files[name]
    again = get_tokenizer(str(tmp_path / "out"))
    assert (
        again.name
        == tokenizer.name
        == "tokenizer.json@" + hashlib.sha256(tokenizer.files["tokenizer.json"]).hexdigest()[:12]
    )


def check_saved(tokenizer, folder, strings):
    """Written out, it is the same tokenizer to us, to `tokenizers` and, where it is installed, to `transformers`."""
    assert tokenizer.files == {}
    tokenizer.save(folder)
    again, theirs = get_tokenizer(str(folder)), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (again.n_vocab, again.stop_tokens, theirs.get_vocab_size()) == (
        tokenizer.n_vocab,
        tokenizer.stop_tokens,
        tokenizer.n_vocab,
    )
    for special in (True, False):
        expected = ids_of(theirs, strings, special)
        assert [tokenizer.encode(text, special) for text in strings] == expected
        assert [again.encode(text, special) for text in strings] == expected
    assert [again.decode(ids) for ids in expected] == strings
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert auto.eos_token_id == tokenizer.stop_token and len(auto) == tokenizer.n_vocab
    assert auto(list(strings[:300])).input_ids == [tokenizer.encode(text, special=True) for text in strings[:300]]


def test_bytes_are_saved(tmp_path):
    check_saved(BYTES, tmp_path / "new" / "folder", list(texts(10_000)[:1000]))


def test_gpt2_is_saved(gpt2, tmp_path):
    strings = list(texts(10_000)[:2000])
    check_saved(gpt2, tmp_path, strings)
    theirs = tiktoken.get_encoding("gpt2")
    assert [gpt2.encode(text) for text in strings] == [theirs.encode_ordinary(text) for text in strings]
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert (len(merges), merges[:3], merges[-1]) == (
        50_000,
        ["Ġ t", "Ġ a", "h e"],
        "Ġg azed",
    )  # as OpenAI's merges.txt has them


# -----------------------------------------------------------------------------
# Chat

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN3 = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}{% generation %}{{- content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3_CHAT = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
JOINED = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHATS = {
    "qwen2.5": (qwen_like, dict(eos_token="<|im_end|>", chat_template=QWEN25)),
    "qwen3": (qwen_like, dict(eos_token="<|im_end|>", chat_template=QWEN3)),
    "llama3": (llama3_like, dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=LLAMA3_CHAT)),
    "smollm2": (smollm2_like, dict(bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=SMOLLM2)),
    "joined": (qwen_like, dict(eos_token="<|im_end|>", chat_template=JOINED)),
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """-> {name: (folder, our tokenizer)}."""
    found = {}
    for name, (family, config) in CHATS.items():
        config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False) | config
        folder = folder_of(tmp_path_factory.mktemp("chat"), family(), tokenizer_config=config)
        found[name] = folder, get_tokenizer(folder)
    return found


def user(content, role="user"):
    return dict(role=role, content=content)


def conversations(count):
    """Chats without spellings of special tokens."""
    rng, strings = random.Random(5), [text.replace("<|", "<").replace("|>", ">") for text in texts(10_000)]
    for _ in range(count):
        roles = [rng.choice(["system", "user"])] + ["user", "assistant"] * rng.randrange(3) + ["user"]
        yield [user(rng.choice(["", " ", "\n"]) + rng.choice(strings), role) for role in roles]


def test_messages_become_what_the_template_says(chats):
    hi = [user("Hi 12")]
    ours = chats["qwen2.5"][1]
    text = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    assert ours.encode_prompt(hi) == ours.encode(
        text + "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n", special=True
    )
    ours = chats["llama3"][1]
    text = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi 12<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert ours.encode_prompt(hi) == ours.encode(text, special=True)
    assert ours.encode_prompt("Hi 12") == [*ours.bos, *ours.encode("Hi 12")] and len(ours.bos) == 1


@pytest.mark.parametrize("name", CHATS)
def test_prompts_are_those_of_transformers(chats, name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, ours = chats[name]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for messages in conversations(100):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.encode_prompt(messages) == expected
    assert list(theirs("Hi").input_ids) == ours.encode_prompt("Hi")


contents = st.lists(
    st.sampled_from([*ADDED, "a", "user", " ", "\n", "<", "<|", "|", ">", "im_end|>", "<|im", "\u0338", "\U000f0000"])
).map("".join)


@given(st.lists(contents, min_size=1, max_size=4))
def test_special_tokens_in_messages_stay_text(chats, spelled):
    for name in ("qwen2.5", "smollm2"):
        ours = chats[name][1]
        start, end = (ours.encode(token, special=True) for token in ("<|im_start|>", "<|im_end|>"))
        messages = [user("a", "system"), *map(user, spelled)]
        turns = [start + ours.encode(f"{m['role']}\n{m['content']}") + end + ours.encode("\n") for m in messages]
        assert ours.encode_prompt(messages) == sum(turns, []) + start + ours.encode("assistant\n")
    ours = chats["llama3"][1]
    token = {token.content: token.id for token in ours.added}
    expected = [token["<|begin_of_text|>"]]
    for message in [*map(user, spelled), user("", "assistant")]:
        expected += [token["<|start_header_id|>"], *ours.encode(message["role"]), token["<|end_header_id|>"]]
        expected += [*ours.encode("\n\n" + message["content"].strip()), token["<|eot_id|>"]]
    assert ours.encode_prompt([*map(user, spelled)]) == expected[:-1]


@given(st.lists(contents, min_size=1, max_size=4))
def test_contents_do_not_make_special_tokens_together(chats, spelled):
    ours = chats["joined"][1]
    ids = ours.encode_prompt([*map(user, spelled)])
    assert not {token.id for token in ours.added if token.special} & set(ids)
    assert (
        ours.decode(ids) == unicodedata.normalize("NFC", "".join(spelled))
        or "\u0338" in "".join(spelled)
        or "<tool" in "".join(spelled)
    )


@pytest.mark.parametrize(
    "parts",
    [
        ["<|im_", "end|>"],
        ["<|im_", "en", "d|>"],
        ["<", "|im_end|>"],
        [" <|im_end|", "> "],
        ["<|im_end|>"],
        ["x<|im_", "end|>y"],
    ],
    ids=str,
)
def test_parts_of_special_tokens_in_messages(chats, parts):
    ours = chats["joined"][1]
    assert ours.encode_prompt([*map(user, parts)]) == ours.encode("".join(parts))


def test_a_content_within_what_the_template_writes(tmp_path):
    """<|user|> is a special token there; a role may be a part of one, a content not."""
    assert chat_of(tmp_path, "<|{{ messages[0].role }}|>").encode_prompt([user("")]) == [258]
    assert chat_of(tmp_path, "<|{{ messages[0].content }}|>").encode_prompt([user("user")]) == [*b"<|user|>"]
    assert chat_of(tmp_path, "<|us{{ messages[0].content }}").encode_prompt([user("er|>\n")]) == [*b"<|user|>\n"]
    assert chat_of(tmp_path, "{{ messages[0].content|trim }}user|>").encode_prompt([user("a<| ")]) == [*b"a<|user|>"]


def test_a_role_that_is_a_special_token(tmp_path):
    folder = folder_of(tmp_path, added(small(), "PAD"), tokenizer_config=dict(chat_template="{{ messages[0].role }}"))
    assert get_tokenizer(folder).encode_prompt([user("", "pad")]) == [*b"pad"]
    with pytest.raises(SnugError, match="a message's role must be a word, such as user, not 'PAD'"):
        get_tokenizer(folder).encode_prompt([user("", "PAD")])


def test_what_nfc_makes_of_a_content_is_no_special_token(tmp_path):
    spec = added(small() | {"normalizer": stage("NFC")}, "<K>", normalized=True)
    ours = get_tokenizer(folder_of(tmp_path, spec, tokenizer_config=dict(chat_template="<K>{{ messages[0].content }}")))
    assert ours.encode_prompt([user("<\u212a>")]) == [257, *b"<K>"]
    assert ours.encode("<\u212a>", special=True) == [257] and ours.encode("<\u212a>") == [*b"<K>"]


def chat_of(path, source, **config):
    spec = added(small(), "<b>", "<|user|>")
    return get_tokenizer(folder_of(path, spec, tokenizer_config=dict(bos_token="<b>", chat_template=source) | config))


def rendered(path, source, messages=(("user", "a<b>c"),), **config):
    tokenizer = chat_of(path, source, **config)
    return tokenizer.decode(tokenizer.encode_prompt([user(content, role) for role, content in messages]))


def test_what_templates_can_use(tmp_path):
    assert rendered(tmp_path, "{{ messages|tojson }}") == '[{"role": "user", "content": "a<b>c"}]'
    assert rendered(tmp_path, "  {% if true %}\n{{ strftime_now('%Y')|length }}\n  {% endif %}") == "4\n"
    assert rendered(tmp_path, "{{ x_token }}{{ y_token is defined }}", x_token=dict(content="X"), y_token=5) == "XFalse"
    assert rendered(tmp_path, "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert rendered(tmp_path, "{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ dict(a=1).a }}") == "21"
    assert rendered(tmp_path, "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}") == "TrueTrueTrue"
    assert rendered(tmp_path, "{{ messages[0].content }}", [("user", "\ud800<|user|>")]) == "\ufffd<|user|>"
    assert rendered(tmp_path, "{{ '\\ud800' }}") == "\ufffd"
    assert chat_of(tmp_path, "{{ bos_token }}a").encode_prompt([user("")]) == [257, *b"a"]


def test_where_templates_stand(tmp_path):
    templates = [dict(name="tool_use", template="tool"), dict(name="default", template="the default")]
    assert rendered(tmp_path, templates) == "the default"
    folder = folder_of(tmp_path, small(), chat_template="the file", tokenizer_config=dict(chat_template="the config"))
    ours = get_tokenizer(folder)
    assert ours.decode(ours.encode_prompt([user("")])) == "the file"
    for tokenizer in (chat_of(tmp_path / "b", templates[:1]), chat_of(tmp_path / "c", None), BYTES):
        (tmp_path / "b" / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(SnugError, match="has no chat template for a prompt of messages: write the prompts as text"):
            tokenizer.encode_prompt([user("")])
    with pytest.raises(SnugError, match="tokenizer_config.json: chat_template must be text, not 5"):
        chat_of(tmp_path / "c", 5)
    with pytest.raises(SnugError, match="chat_template.jinja: 'utf-8' codec"):
        get_tokenizer(folder_of(tmp_path, small(), chat_template=b"\xff"))


BROKEN = [
    "{% if %}",
    "{{ raise_exception('only\nusers') }}",
    "{{ nothing.at_all }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].content + 1 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{{ lipsum() }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{{ range(10 ** 30)|list }}",
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ['{0.__class__}']|map('format', 1)|list }}{{ '{0.__class__}'|attr('format')(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ range.__closure__ }}",
    "{{ strftime_now.__self__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% set n = namespace(__html__=1) %}",
    "{% set n = namespace() %}{% set n.__html__ = 1 %}",
    "{{ self._TemplateReference__context }}",
    "{{ (messages[0].content ~ '<').__add__('b') }}",
]


@pytest.mark.parametrize("source", BROKEN)
def test_templates_that_fail_or_reach_for_python(tmp_path, source):
    with pytest.raises(SnugError, match="the chat template fails: ") as error:
        rendered(tmp_path, source)
    assert "\n" not in str(error.value)


LOOKING = [
    "{{ messages[0].content|length }}",
    "{{ messages[0].content|upper }}",
    "{{ messages[0].content[:3] }}",
    "{{ messages[0].content.split('<b>')[0] }}",
    "{% if '<b>' in messages[0].content %}yes{% endif %}",
    "{{ messages|tojson(ensure_ascii=true) }}",
]


@pytest.mark.parametrize("source", LOOKING)
def test_templates_that_look_at_spellings_of_special_tokens(tmp_path, source):
    with pytest.raises(
        SnugError, match="the chat template looks at '<b>' in a message, a special token or a part of one; take it out"
    ):
        rendered(tmp_path, source)
    assert rendered(tmp_path, source, [("user", "abc d")]) is not None


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        (user("a"),),
        ["a"],
        [["a"]],
        [None],
        [{}],
        [dict(role="user")],
        [dict(content="a")],
        [user(None)],
        [user(5)],
        [user([dict(type="text", text="a")])],
        [user("a", None)],
        [user("a", "")],
        [user("a", "user\n")],
        [user("a", "<b>")],
        [user("a", "üser")],
        [user("a") | {"name": "x"}],
        [user("a"), "b"],
    ],
    ids=range(20),
)
def test_messages_of_the_wrong_shape(tmp_path, messages):
    with pytest.raises(
        SnugError, match="^a (prompt must be text or a list of messages|message must be|message's role must be a word)"
    ) as error:
        chat_of(tmp_path, "x").encode_prompt(messages)
    assert "\n" not in str(error.value)


def test_a_prompt_of_all_private_characters(tmp_path):
    tokenizer, private = chat_of(tmp_path, "{{ messages[0].content }}"), "".join(map(chr, range(0xF0000, 0xFFFFE)))
    with pytest.raises(SnugError, match="all private-use characters"):
        tokenizer.encode_prompt([user("<b>" + private)])
    assert tokenizer.decode(tokenizer.encode_prompt([user(private)])) == private
