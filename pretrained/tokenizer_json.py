"""The files of a tokenizer as Hugging Face writes them, tokenizer.json and those beside it -> what a Tokenizer has (tokenizer.py).

Of what they might say a whitelist is read, and what is not known is refused by name: byte-level BPE, patterns that cut a text before it,
NFC, tokens that are put before a text, added tokens, chat templates. What is damaged is refused in one line that names the file.

Left out: sentencepiece (Llama 2, Gemma, Mistral), WordPiece, added tokens that swallow spaces.
"""

import hashlib
import json
from collections import namedtuple
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import regex
import tiktoken

from options import SnugError
from pretrained.bpe import SUPPORTED, bytes_of, read_merges, shown
from pretrained.chat import Chat

END_OF_TEXT = "<|endoftext|>"


ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # what ends a text where no file says what does


FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


LARGEST_ID = 10_000_000  # a table is as long as the largest id


Added = namedtuple("Added", "content id special normalized")  # a token that is matched in the text before BPE sees it


# Patterns

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


LLAMA3, QWEN2 = WORDS % r"\p{N}{1,3}", WORDS % r"\p{N}"


WHOLE = (GPT2, LLAMA3, QWEN2)  # these match at every character; tiktoken drops what a pattern does not match


ANYTHING = r"[\s\S]+"


LONGEST_PATTERN = 5000


# What Oniguruma (of `tokenizers`), Rust's regex (of tiktoken) and Python's regex all read the same way, and none takes long to compile
ESCAPE = r"\\[rntsSd.*+?()\[\]{}|^$\\/-]|\\[pP]\{[LMNPSZ][a-z]?\}"


FOLDED = r"'?(?:[sdmt]|ll|ve|re|\[[sdmt]+\])"  # with others, such as ss and ß, case is folded differently


SYNTAX = regex.compile(
    rf"(?:{ESCAPE}|[^\\^$*+?()\[\]{{}}]|\[\^?(?:{ESCAPE}|(?!&&|--|~~|\|\|)[^\[\]\\])+\]|\(\?:|\((?!\?)|\)(?!\{{)|\(\?!\\S\)(?!\{{)"
    rf"|\(\?i:{FOLDED}(?:\|{FOLDED})*\)(?!\{{)|[*+?][+?]?|\{{\d{{1,3}}(?:,\d{{0,3}})?\}}(?![*+?{{]))*+"
)


def checked(pattern):
    """A pattern of a tokenizer.json, compiled. Raises ValueError where it is not sure to mean to us what it means to `tokenizers`."""
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"the pattern {shown(pattern)} has more than {LONGEST_PATTERN} characters")
    end = SYNTAX.match(pattern).end()
    if end < len(pattern):
        raise ValueError(f"the pattern {shown(pattern)} has {shown(pattern[end : end + 10])}, which is not supported")
    try:
        compiled = regex.compile(pattern)
    except (regex.error, OverflowError, MemoryError) as error:
        raise ValueError(f"the pattern {shown(pattern)} is wrong: {error}") from None
    if compiled.fullmatch(""):
        raise ValueError(f"the pattern {shown(pattern)} matches the empty text")
    return compiled


def read_pre_tokenizer(spec):
    """-> the patterns that isolate parts of a text, one after the other."""
    stages, patterns = members(spec, "pretokenizers"), []
    for stage in stages:
        kind = the(str, stage, "type")
        if kind == "ByteLevel" and stage is stages[-1]:
            if the(bool, stage, "add_prefix_space"):
                raise ValueError("ByteLevel with add_prefix_space is not supported")
            return patterns + [GPT2] * the(bool, stage, "use_regex", True)
        if kind == "Split":
            patterns.append(read_split(stage))
        elif kind == "Digits":
            patterns.append(r"\p{N}" if the(bool, stage, "individual_digits") else r"\p{N}+")
        else:
            raise ValueError(
                f"pre_tokenizer {named(kind)} is not supported here, only Split, Digits and, at the end, ByteLevel are"
            )
    raise ValueError(f"the pre_tokenizer does not end with ByteLevel; {SUPPORTED}")


def read_split(stage):
    behavior, pattern = the(str, stage, "behavior"), the(dict, stage, "pattern")
    if behavior != "Isolated" or the(bool, stage, "invert"):
        raise ValueError(
            f"Split with behavior {shown(behavior)}, invert {stage['invert']} is not supported, only Isolated, False is"
        )
    if "Regex" in pattern:
        return the(str, pattern, "Regex")
    return "".join(f"\\{c}" if c in r".*+?()[]{}|^$\\" else c for c in the(str, pattern, "String"))


# A folder


def read_files(folder, names):
    """-> {name: bytes} of those that the folder has."""
    files = {}
    for name in names:
        try:
            path = Path(folder) / name
            if folder and path.is_file():
                files[name] = path.read_bytes()
        except (TypeError, ValueError):  # what no file can be called
            break
        except OSError as error:
            raise SnugError(f"{one_line(path)}: cannot be read ({error.strerror})") from None
    return files


def read_tokenizer(folder, files):
    """The folder and {name: bytes} of its files -> what a Tokenizer has, in its order. Raises SnugError for files that are damaged or not supported."""
    name = "tokenizer.json"
    with blamed(folder / name):
        spec = parsed(files[name])
        vocab = read_vocab(the(dict, spec, "model"))
        added = read_added(the(list, spec, "added_tokens", []), vocab)
    ids = vocab | {token.content: token.id for token in added}
    config = read_object(folder, files, "tokenizer_config.json")
    variables = token_names(read_object(folder, files, "special_tokens_map.json")) | token_names(config)
    stop_tokens = read_stop_tokens(folder, files, variables.get("eos_token"), ids, added)
    if variables.get("eos_token") not in ids:  # config.json, which does not travel with a checkpoint, may have said it
        generation = read_object(folder, files, "generation_config.json") | {"eos_token_id": list(stop_tokens)}
        files = files | {"generation_config.json": json.dumps(generation, indent=1).encode()}
    added = [token._replace(special=token.special or token.id in stop_tokens) for token in added]
    special = {token.id for token in added if token.special}
    with blamed(folder / name):
        tokens = {symbols: bytes_of(symbols) for symbols in vocab}
        ordinary = {symbols: token for symbols, token in tokens.items() if token and vocab[symbols] not in special}
        encoding, table, cuts = read_encoding(spec, vocab, ordinary)
        normalize = read_normalizer(the(dict, spec, "normalizer", {}))
        bos = read_post_processor(the(dict, spec, "post_processor", {}), set(ids.values()))
        if the(str, the(dict, spec, "decoder"), "type") != "ByteLevel":
            raise ValueError(
                f"decoder {named(spec['decoder']['type'])} is not supported, only ByteLevel is; {SUPPORTED}"
            )
    if config.get("add_bos_token") is True and not bos and variables.get("bos_token") in ids:
        bos = [ids[variables["bos_token"]]]
    texts = [b""] * (1 + max(ids.values()))
    for symbols, token in tokens.items():
        texts[vocab[symbols]] = token or symbols.encode(errors="replace")
    for token in added:
        texts[token.id] = b"" if token.special else token.content.encode()
    template = read_template(folder, files, config)
    chat = Chat(template, variables, [token.content for token in added if token.special]) if template else None
    name = f"{name}@{hashlib.sha256(files[name]).hexdigest()[:12]}"
    return name, encoding, texts, added, stop_tokens, table, cuts, normalize, tuple(bos), chat, files


def read_vocab(model):
    """tokenizer.json's model -> {symbols: id}."""
    kind = the(str, model, "type", "BPE")
    if kind != "BPE":
        raise ValueError(f"the model {named(kind)} is not supported; {SUPPORTED}")
    if the(bool, model, "byte_fallback", False):
        raise ValueError(f"byte_fallback, of sentencepiece, is not supported; {SUPPORTED}")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ValueError(f"the model's {key}={shown(model[key])} is not supported")
    vocab = the(dict, model, "vocab")
    ids = list(vocab.values())
    if not vocab or set(map(type, ids)) != {int}:
        raise ValueError("the vocabulary must be tokens with whole numbers, their ids")
    if min(ids) < 0 or max(ids) > LARGEST_ID:
        raise ValueError(
            f"the vocabulary has ids from {min(ids)} to {max(ids)}, and they must be within 0 to {LARGEST_ID}"
        )
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens of the vocabulary have the same id")
    return vocab


def read_added(entries, vocab):
    """tokenizer.json's added_tokens -> a list of Added."""
    added, last, taken = {}, -1, set(vocab.values())
    for entry in entries:
        content, number = the(str, entry, "content"), the(int, entry, "id")
        for flag in ("single_word", "lstrip", "rstrip"):
            if the(bool, entry, flag):
                raise ValueError(f"the added token {shown(content)} has {flag}, which is not supported")
        if not content or content in added:
            raise ValueError(f"the added token {shown(content)} is {'there twice' if content else 'empty'}")
        expected = vocab.get(content, max(len(vocab), last + 1))
        if number != expected or content not in vocab and number in taken:
            raise ValueError(
                f"the added token {shown(content)} has id {number}, where `tokenizers` would give it {expected}"
            )
        content.encode()
        added[content] = Added(content, number, the(bool, entry, "special"), the(bool, entry, "normalized"))
        last = max(last, number)
    return list(added.values())


def read_encoding(spec, vocab, tokens):
    """-> (encoding, the ids of its ranks or None if they are those, patterns that cut a text before it does)."""
    model = spec["model"]
    order = read_merges(the(list, model, "merges"), the(bool, model, "ignore_merges", False), vocab, tokens)
    numbers = {token: vocab[symbols] for symbols, token in tokens.items()}
    table = [numbers[token] for token in order]
    in_order = all(
        a < b for a, b in pairwise(table[256:])
    )  # single bytes are never merged into: their ranks may be any
    ranks = dict(zip(order, table if in_order else range(len(order)), strict=True))
    patterns = read_pre_tokenizer(the(dict, spec, "pre_tokenizer"))
    cuts = [checked(pattern) for pattern in patterns]
    last = ANYTHING
    if patterns and patterns[-1] in WHOLE:
        last = patterns[-1]
        cuts.pop()
    encoding = tiktoken.Encoding("tokenizer.json", pat_str=last, mergeable_ranks=ranks, special_tokens={})
    return encoding, None if in_order else table, cuts


def read_normalizer(spec):
    """-> is text to be normalized to NFC?"""
    kinds = [the(str, member, "type") for member in members(spec, "normalizers")]
    for kind in kinds:
        if kind != "NFC":
            raise ValueError(f"normalizer {named(kind)} is not supported, only NFC is; {SUPPORTED}")
    return bool(kinds)


def read_post_processor(spec, known):
    """-> the ids that are put before a text."""
    bos = []
    for member in members(spec, "processors"):
        kind = the(str, member, "type")
        if kind == "TemplateProcessing":
            single, special = the(list, member, "single"), the(dict, member, "special_tokens")
            if bos or not single or "Sequence" not in single[-1]:
                raise ValueError("a post_processor that puts tokens elsewhere than before the text is not supported")
            names = [the(str, the(dict, item, "SpecialToken"), "id") for item in single[:-1]]
            bos = [number for name in names for number in the(list, the(dict, special, name), "ids")]
        elif kind != "ByteLevel":
            raise ValueError(
                f"post_processor {named(kind)} is not supported, only ByteLevel and TemplateProcessing are"
            )
    if any(type(number) is not int or number not in known for number in bos):
        raise ValueError("the post_processor puts ids before the text that are not in the vocabulary")
    return bos


def token_names(config):
    """-> {"eos_token": "<|endoftext|>", ...}, the tokens that a tokenizer_config.json or special_tokens_map.json names."""
    found = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token")
    }
    return {key: value for key, value in found.items() if isinstance(value, str)}


def read_stop_tokens(folder, files, eos, ids, added):
    ends = [ids[eos]] if eos in ids else eos_ids(folder, read_files(folder, ["config.json"]), "config.json")
    ends += eos_ids(folder, files, "generation_config.json")
    known = set(ids.values())
    ends = list(dict.fromkeys(end for end in ends if end in known)) or [ids[name] for name in ENDS if name in ids][:1]
    if not ends:
        raise SnugError(
            f"{folder}: no file says what ends a completion; name a token of the vocabulary as eos_token in tokenizer_config.json"
        )
    if ends[0] not in {token.id for token in added}:
        raise SnugError(
            f"{folder}: the id {ends[0]} ends a completion, but it is ordinary text, not one of tokenizer.json's added_tokens"
        )
    return tuple(ends)


def eos_ids(folder, files, name):
    value = read_object(folder, files, name).get("eos_token_id")
    numbers = value if isinstance(value, list) else [value] if value is not None else []
    if any(type(number) is not int for number in numbers):
        raise SnugError(f"{one_line(folder / name)}: eos_token_id must be an id or a list of ids, not {shown(value)}")
    return numbers


def read_template(folder, files, config):
    """-> the chat template's text, or None."""
    if "chat_template.jinja" in files:
        with blamed(folder / "chat_template.jinja"):
            return files["chat_template.jinja"].decode()
    with blamed(folder / "tokenizer_config.json"):
        templates = config.get("chat_template")
        if isinstance(templates, list):
            templates = {the(str, item, "name"): the(str, item, "template") for item in templates}.get("default")
        return the(str, {"chat_template": templates}, "chat_template", None)


# JSON that anyone may have written

KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a whole number"}


def read_object(folder, files, name):
    """-> the object in that file, empty if there is no such file."""
    with blamed(folder / name):
        return parsed(files.get(name, b"{}"))


def parsed(data):
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:  # of which not being UTF-8 is one
        raise ValueError(f"not JSON ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, not {shown(value)}")
    return value


def the(kind, table, key, *default):
    """table[key], which must be of that kind; the default, if one is given, where it is missing or null."""
    if not isinstance(table, dict):
        raise ValueError(f"{shown(table)} must be an object that has {key}")
    value = table.get(key)
    if value is None and default:
        return default[0]
    if type(value) is not kind:
        raise ValueError(f"{key} must be {KINDS[kind]}, not {shown(value)}" if key in table else f"{key} is missing")
    return value


def members(spec, key):
    """What a Sequence is made of; of anything else, itself; of nothing, nothing."""
    if not spec:
        return []
    return the(list, spec, key) if the(str, spec, "type") == "Sequence" else [spec]


def named(kind):
    of_sentencepiece = kind in ("Unigram", "Metaspace", "Prepend", "Replace", "Precompiled", "ByteFallback")
    return shown(kind) + ", of sentencepiece," * of_sentencepiece


def one_line(message):
    return " ".join(str(message).split())[:200] or type(message).__name__


@contextmanager
def blamed(path):
    """What is found wrong inside is said of that file."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise SnugError(f"{one_line(path)}: {one_line(error)}") from None
