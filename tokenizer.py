"""Text to token ids and back, on tiktoken.

`bytes`, whose 256 tokens are the 256 bytes, needs no files; `gpt2`, whose two files tiktoken fetches once and keeps; or a folder
with a `tokenizer.json` as Hugging Face writes it for GPT-2, SmolLM2, Llama 3, Qwen2.5, Qwen3 and other byte-level BPE, whose ids are
those that the library `tokenizers` gives.

Special tokens, such as <|endoftext|>, are ids and never text: no text encodes to them, and they decode to nothing. The stop tokens,
of which training teaches the first, say that a completion is over. Only a chat template writes special tokens (chat.py).

How a tokenizer.json becomes a tiktoken.Encoding: tiktoken merges any two neighbours that make a token, the lowest rank first;
`tokenizers` merges the pairs of a list. Both give the same ids where the pair that tiktoken comes upon is always in the list, which
is shown for each token when the file is read (Trees); a file for which it cannot be shown is refused. Of what tokenizers might be,
a whitelist is read: what is not known is refused by name.

Left out: training a tokenizer, sentencepiece (Llama 2, Gemma, Mistral), WordPiece, added tokens that swallow spaces. Of characters
newer than Unicode 9 the libraries know different things: which of them are letters, and in which order NFC puts marks.
"""

import hashlib
import json
import unicodedata
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import regex
import tiktoken

from chat import Chat, well_formed
from settings import SnugError

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # what ends a text where no file says what does
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
SUPPORTED = "snug reads byte-level BPE (GPT-2, SmolLM2, Llama 3, Qwen2.5, Qwen3)"
LARGEST_ID = 10_000_000  # a table is as long as the largest id

Added = namedtuple("Added", "content id special normalized")  # a token that is matched in the text before BPE sees it


@dataclass(eq=False, repr=False)
class Tokenizer:
    """name; n_vocab, ids are 0 .. n_vocab - 1, of which some may be no token; stop_tokens, the ids that end a completion, and
    stop_token, the first of them; files, what belongs beside a checkpoint: file name -> bytes, none for bytes and gpt2.

    >>> tokenizer = get_tokenizer("bytes")
    >>> tokenizer.encode("1+2=")
    [49, 43, 50, 61]
    >>> tokenizer.decode([51, tokenizer.stop_token])
    '3'
    """

    name: str
    encoding: tiktoken.Encoding
    texts: list  # of each id, in bytes; b"" for what is no text
    added: list
    stop_tokens: tuple
    ids: list | None = None  # of each rank of the encoding; None: they are its ranks
    cuts: tuple = ()  # patterns that split a text before the encoding's own does
    nfc: bool = False
    bos: tuple = ()
    chat: Chat | None = None
    files: dict = field(default_factory=dict)

    def __post_init__(self):
        self.n_vocab, self.stop_token = len(self.texts), self.stop_tokens[0]
        raw = [token._replace(normalized=token.normalized and not token.special) for token in self.added]
        self.matchers, self.matchers_special = self.matchers_of(self.added, special=False), self.matchers_of(self.added)
        self.matchers_chat = self.matchers_of(raw)  # a special token as the template spells it, never what NFC makes of a content

    def encode(self, text, special=False):
        """Text -> list of ids, never special ones: a prompt that spells <|endoftext|> gets those 13 characters.

        special=True: what spells a special token is that token. Text that UTF-8 cannot carry, a lone surrogate such as "\\ud800", is
        read as U+FFFD, the replacement character. Raises SnugError where tiktoken fails: at a million spaces in a row.
        """
        return self.encode_marked(well_formed(text), {}, self.matchers_special if special else self.matchers)

    def encode_prompt(self, prompt):
        """Text, or chat messages [{"role": ..., "content": ...}, ...] -> list of ids.

        Text begins with the ids that the tokenizer puts before a text by itself. Messages are written by the chat template, which also
        opens the answer; special tokens are those that the template wrote, never the contents'. Raises SnugError.
        """
        if isinstance(prompt, str):
            return [*self.bos, *self.encode(prompt)]
        if self.chat is None:
            raise SnugError(
                f"tokenizer={self.name} has no chat template for a prompt of messages: write the prompts as text, "
                "or name a folder whose tokenizer has one"
            )
        return self.encode_marked(*self.chat.render(prompt), self.matchers_chat)

    def encode_marked(self, text, marks, matchers):
        """marks: characters of the text, by their code -> the text they stand for, put back where no added token is matched any more."""
        (before, after), ids = matchers, []
        for piece in match(map(self.normalized, match([text], *before)), *after):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self.encode_ordinary(self.normalized(piece.translate(marks)) if marks else piece)
        return ids

    def matchers_of(self, added, special=True):
        """-> (pattern, ids by what it matches), of added tokens that are matched before a text is normalized, and of the others.

        special=False: None instead of the ids of special tokens.
        """
        ids = {token: token.id if special or not token.special else None for token in added}
        before = {token.content: ids[token] for token in added if not token.normalized}
        after = {self.normalized(token.content): ids[token] for token in added if token.normalized}
        return [(alternatives(before), before), (alternatives(after), after)]

    def normalized(self, piece):
        return unicodedata.normalize("NFC", piece) if self.nfc and isinstance(piece, str) else piece

    def encode_ordinary(self, text):
        pieces = [text]
        for cut in self.cuts:
            pieces = [part for piece in pieces for part in isolate(cut, piece)]
        try:
            ranks = [rank for piece in pieces for rank in self.encoding.encode_ordinary(piece)]
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which pyo3 derives from BaseException
                raise
            raise SnugError(f"tiktoken fails on a text of {len(text)} characters ({one_line(error)}); cut it into shorter texts") from None
        return ranks if self.ids is None else [self.ids[rank] for rank in ranks]

    def decode(self, ids):
        """Ids -> text. Special tokens and ids of no token (a model's vocabulary may be padded) are skipped, and
        bytes that are not UTF-8 become U+FFFD: whatever a model samples decodes to some text.
        """
        return b"".join([self.texts[i] for i in ids if 0 <= i < self.n_vocab]).decode(errors="replace")

    def stopper(self, text):
        """-> a function of a completion's ids: has `text` come to its end in the last of them? None for no text.

        It is to be asked after each token. The text may span tokens, and its end be a part of one: each token that is text has at
        least one byte, so the last of those, as many as the text has bytes, have all of it.
        """
        if not text:
            return None
        window = len(text.encode("utf-8", "replace"))

        def is_over(ids):
            last = islice((i for i in reversed(ids) if 0 <= i < self.n_vocab and self.texts[i]), window)
            return text in self.decode(list(last)[::-1])

        return is_over

    def save(self, folder):
        """Writes `files` into the folder; for bytes and gpt2, files that `tokenizers` and `transformers` read as the same tokenizer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in (self.files or generated_files(self)).items():
            (folder / name).write_bytes(data)


def get_tokenizer(name):
    """The Tokenizer of that name: "bytes" (n_vocab 257, stop_token 256), "gpt2" (50257, 50256), or a folder with a tokenizer.json.

    A folder's tokenizer is named after the file's content, "tokenizer.json@0123456789ab": the first digits of its SHA-256. Raises
    SnugError for anything else, for a tokenizer.json that is not supported, and where the files of gpt2 cannot be had.
    """
    if name == "bytes":
        # The pattern cuts text into characters, (?s) counting a newline as one; with no ranks beyond single bytes, nothing merges.
        return plain("bytes", tiktoken.Encoding("bytes", pat_str="(?s).", mergeable_ranks=dict(Trees().ranks), special_tokens={}))
    if name == "gpt2":
        return plain("gpt2", gpt2_encoding())
    files = read_files(name, FILES)
    if "tokenizer.json" in files:
        return read_tokenizer(Path(name), files)
    reason = f"; {name} has a tokenizer.model, of sentencepiece, alone: {SUPPORTED}" if read_files(name, ["tokenizer.model"]) else ""
    raise SnugError(f"tokenizer={name!r} is not one of bytes, gpt2, or a folder that has a tokenizer.json{reason}")


def plain(name, encoding):
    """A tokenizer of an encoding's bytes and merges and one special token, the last id."""
    stop = len(encoding.token_byte_values())
    texts = [encoding.decode_single_token_bytes(i) for i in range(stop)] + [b""]
    return Tokenizer(name, encoding, texts, [Added(END_OF_TEXT, stop, True, False)], (stop,))


def gpt2_encoding():
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # no network (requests raises an OSError), an unwritable folder, a damaged file
        raise SnugError(
            f"the two files of tokenizer=gpt2 cannot be had ({type(error).__name__}): "
            "set TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer=bytes"
        ) from None


# -----------------------------------------------------------------------------
# Text, before BPE


def alternatives(names):
    """A pattern that matches the longest name at the leftmost place; None for no names."""
    return regex.compile("(" + "|".join(map(regex.escape, sorted(names, key=len, reverse=True))) + ")") if names else None


def match(pieces, pattern, names):
    """Texts, among ids -> texts and ids: what the pattern matches has become its id; where that is None, it goes with the text around it."""
    for piece in pieces:
        if pattern is None or isinstance(piece, int):
            yield piece
            continue
        text = ""
        for place, part in enumerate(pattern.split(piece)):  # text, match, text, match, ..., text
            number = names[part] if place % 2 else None
            if number is None:
                text += part
                continue
            yield from (text, number) if text else (number,)
            text = ""
        if text:
            yield text


def isolate(cut, text):
    """-> what the pattern matches, and what is between, in order."""
    parts, end = [], 0
    for found in cut.finditer(text):
        parts += [text[end : found.start()], found.group()]
        end = found.end()
    return [part for part in [*parts, text[end:]] if part]


# -----------------------------------------------------------------------------
# BPE


class Trees:
    """Of which two tokens each token is made, when BPE makes it of its bytes; tokens are added in the order of their ranks.

    Take any two neighbours that BPE merges into a token, in any text. Nothing has been merged across the token's ends so far, so what
    happened between them is what happens to the token's bytes alone: the two neighbours are always the same two. So tiktoken never
    merges another pair into this token, and the list of merges needs this pair, and no others.
    """

    def __init__(self):
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.ranks = {token: rank for rank, token in enumerate(self.tokens)}
        self.left, self.right = list(range(256)), list(range(256))  # ranks of the two parts; None where they are not known

    def add(self, token, cuts):
        """Gives the token the next rank and -> at which of these bytes it is cut in two; None, and no rank, if that cannot be said."""
        for cut in cuts:
            left, right = self.ranks.get(token[:cut]), self.ranks.get(token[cut:])
            if left is None or right is None or self.left[left] is None or self.left[right] is None:
                continue
            if self.stay_apart(left, right):
                self.append(token, left, right)
                return cut
        return None

    def append(self, token, left=None, right=None):
        self.ranks[token] = len(self.tokens)
        self.tokens.append(token)
        self.left.append(left)
        self.right.append(right)

    def stay_apart(self, left, right):
        """Of the bytes of two tokens, one after the other, does BPE make just these two, with the ranks so far?

        It does if it merges nothing across. Time is run backwards: of the two tokens that touch there, the one of the higher rank was
        made last, and before, its part stood there. A pair that was there would have been merged, had it come before that in turn;
        of equal ranks the left one does.
        """
        tokens, ranks = self.tokens, self.ranks
        limit = len(tokens)
        while ranks.get(tokens[left] + tokens[right], limit) >= limit:
            if left < 256 and right < 256:
                return True
            if left > right:
                limit, left = left, self.right[left]
            else:
                limit, right = right + 1, self.left[right]
        return False


def byte_symbols():
    """The characters that tokenizer.json has for the 256 bytes: printable ones stand for themselves, the others are U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


SYMBOLS = byte_symbols()
BYTES = {code: "\uffff" for code in range(256)} | {ord(symbol): chr(byte) for byte, symbol in SYMBOLS.items()}  # U+FFFF: no byte


def bytes_of(symbols):
    """Symbols of a vocabulary -> bytes; None if they are others than the 256."""
    try:
        return symbols.translate(BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return None


def symbols_of(token):
    return "".join(SYMBOLS[byte] for byte in token)


def read_merges(model, vocab, tokens):
    """tokenizer.json's model and {symbols: bytes} of its vocabulary that may come from text -> those tokens that BPE or a look at the
    whole piece makes, in the order of their ranks. Raises ValueError where tiktoken would not make the same of them.
    """
    missing = set(SYMBOLS.values()) - set(tokens)
    if missing:
        raise ValueError(f"{len(missing)} of the 256 bytes are not in the vocabulary: it is not byte-level; {SUPPORTED}")
    groups, trees, known = grouped(the(list, model, "merges"), vocab, tokens), Trees(), dict.fromkeys(tokens.values())
    whole = the(bool, model, "ignore_merges", False)
    if whole:  # a piece that is a token is not looked at further, be there merges for it or not
        groups |= {token: [] for token in known if len(token) > 1 and token not in groups}
    for token, cuts in groups.items():
        if trees.add(token, cuts):
            continue
        if not whole or any(token[:cut] in known and token[cut:] in known for cut in range(1, len(token)) if cut not in cuts):
            raise ValueError(f"tiktoken would not make the token {shown(token)} of the parts that merges have; {SUPPORTED}")
        trees.append(token)  # whichever two parts it is made of, they are in the list
    return trees.tokens


def grouped(merges, vocab, tokens):
    """-> {token in bytes: the places that its merges join it at}, in their order. A token's merges have to follow each other."""
    groups, last = {}, None
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], str):
            raise ValueError(f"a merge must be two tokens, not {shown(merge)}")
        a, b = pair
        left, right, token = tokens.get(a), tokens.get(b), tokens.get(a + b)
        if left and right and token:
            if token != last and token in groups:
                raise ValueError(f"the token {shown(token)} has merges of ranks that are apart; {SUPPORTED}")
            groups.setdefault(token, []).append(len(left))
            last = token
        elif a not in vocab or b not in vocab or a + b not in vocab:
            raise ValueError(f"the merge {shown(merge)} has tokens that are not in the vocabulary")
    return groups


# -----------------------------------------------------------------------------
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
            raise ValueError(f"pre_tokenizer {named(kind)} is not supported here, only Split, Digits and, at the end, ByteLevel are")
    raise ValueError(f"the pre_tokenizer does not end with ByteLevel; {SUPPORTED}")


def read_split(stage):
    behavior, pattern = the(str, stage, "behavior"), the(dict, stage, "pattern")
    if behavior != "Isolated" or the(bool, stage, "invert"):
        raise ValueError(f"Split with behavior {shown(behavior)}, invert {stage['invert']} is not supported, only Isolated, False is")
    if "Regex" in pattern:
        return the(str, pattern, "Regex")
    return "".join(f"\\{c}" if c in r".*+?()[]{}|^$\\" else c for c in the(str, pattern, "String"))


# -----------------------------------------------------------------------------
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
    """The folder and {name: bytes} of its files -> Tokenizer. Raises SnugError for files that are damaged or not supported."""
    name = "tokenizer.json"
    with blamed(folder / name):
        spec = parsed(files[name])
        vocab = read_vocab(the(dict, spec, "model"))
        added = read_added(the(list, spec, "added_tokens", []), vocab)
    ids = vocab | {token.content: token.id for token in added}
    config = read_object(folder, files, "tokenizer_config.json")
    variables = token_names(read_object(folder, files, "special_tokens_map.json")) | token_names(config)
    stop_tokens = read_stop_tokens(folder, files, variables.get("eos_token"), ids, added)
    added = [token._replace(special=token.special or token.id in stop_tokens) for token in added]
    special = {token.id for token in added if token.special}
    with blamed(folder / name):
        tokens = {symbols: bytes_of(symbols) for symbols in vocab}
        ordinary = {symbols: token for symbols, token in tokens.items() if token and vocab[symbols] not in special}
        encoding, table, cuts = read_encoding(spec, vocab, ordinary)
        normalize = read_normalizer(the(dict, spec, "normalizer", {}))
        bos = read_post_processor(the(dict, spec, "post_processor", {}), set(ids.values()))
        if the(str, the(dict, spec, "decoder"), "type") != "ByteLevel":
            raise ValueError(f"decoder {named(spec['decoder']['type'])} is not supported, only ByteLevel is; {SUPPORTED}")
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
    return Tokenizer(name, encoding, texts, added, stop_tokens, table, cuts, normalize, tuple(bos), chat, files)


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
        raise ValueError(f"the vocabulary has ids from {min(ids)} to {max(ids)}, and they must be within 0 to {LARGEST_ID}")
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
            raise ValueError(f"the added token {shown(content)} has id {number}, where `tokenizers` would give it {expected}")
        content.encode()
        added[content] = Added(content, number, the(bool, entry, "special"), the(bool, entry, "normalized"))
        last = max(last, number)
    return list(added.values())


def read_encoding(spec, vocab, tokens):
    """-> (encoding, the ids of its ranks or None if they are those, patterns that cut a text before it does)."""
    order = read_merges(spec["model"], vocab, tokens)
    numbers = {token: vocab[symbols] for symbols, token in tokens.items()}
    table = [numbers[token] for token in order]
    in_order = all(a < b for a, b in pairwise(table[256:]))  # single bytes are never merged into: their ranks may be any
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
            raise ValueError(f"post_processor {named(kind)} is not supported, only ByteLevel and TemplateProcessing are")
    if any(type(number) is not int or number not in known for number in bos):
        raise ValueError("the post_processor puts ids before the text that are not in the vocabulary")
    return bos


def token_names(config):
    """-> {"eos_token": "<|endoftext|>", ...}, the tokens that a tokenizer_config.json or special_tokens_map.json names."""
    found = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items() if key.endswith("_token")}
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
        raise SnugError(f"{folder}: the id {ends[0]} ends a completion, but it is ordinary text, not one of tokenizer.json's added_tokens")
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


# -----------------------------------------------------------------------------
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


def shown(value):
    """A value in few words, in one line."""
    return type(value).__name__ if isinstance(value, dict | list) else f"{value!r:.60}"


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


# -----------------------------------------------------------------------------
# Out again


def generated_files(tokenizer):
    """Of a tokenizer of bytes, merges and one special token: {file name: bytes} that say the same to others."""
    *tokens, _ = tokenizer.texts
    trees, merges = Trees(), []
    for token in tokens[256:]:
        cut = trees.add(token, range(1, len(token)))
        merges.append(f"{symbols_of(token[:cut])} {symbols_of(token[cut:])}")
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    split = dict(type="Split", pattern=dict(Regex=GPT2), behavior="Isolated", invert=False)
    stop = dict(id=tokenizer.stop_token, content=END_OF_TEXT, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None)
    model |= dict(fuse_unk=False, byte_fallback=False, ignore_merges=False)
    model |= dict(vocab={symbols_of(token): i for i, token in enumerate(tokens)}, merges=merges)
    spec = dict(version="1.0", truncation=None, padding=None, added_tokens=[stop], normalizer=None)
    spec |= dict(
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]), post_processor=None, decoder=byte_level, model=model
    )
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)
    files = {"tokenizer.json": spec, "tokenizer_config.json": config}
    return {name: json.dumps(value, ensure_ascii=False, indent=1).encode() for name, value in files.items()}
