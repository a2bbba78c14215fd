"""Text survives the tokenizers, and nothing that is text can become the stop token, nor the reverse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from settings import SnugError
from tokenizer import END_OF_TEXT, get_tokenizer

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


@pytest.mark.parametrize("error", [requests.exceptions.ConnectionError("no route"), TimeoutError(), ValueError("hash mismatch")])
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
