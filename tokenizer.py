"""Text to token ids and back, on tiktoken.

`bytes`, whose 256 tokens are the 256 bytes, needs no files; `gpt2`, whose two files tiktoken fetches once and keeps; or a folder
with a `tokenizer.json` as Hugging Face writes it for GPT-2, SmolLM2, Llama 3, Qwen2.5, Qwen3 and other byte-level BPE, whose ids are
those that the library `tokenizers` gives.

Special tokens, such as <|endoftext|>, are ids and never text: no text encodes to them, and they decode to nothing. The stop tokens,
of which training teaches the first, say that a completion is over. Only a chat template writes special tokens (chat.py).

Which files are read is tokenizer_json.py's to say, and why tiktoken gives the same ids as their merges bpe.py's.

Left out: training a tokenizer, and what those two leave out. Of characters
newer than Unicode 9 the libraries know different things: which of them are letters, and in which order NFC puts marks.
"""

import json
import unicodedata
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import regex
import tiktoken

from options import SnugError
from pretrained.bpe import SUPPORTED, Trees, symbols_of
from pretrained.chat import Chat, well_formed
from pretrained.tokenizer_json import END_OF_TEXT, FILES, GPT2, Added, one_line, read_files, read_tokenizer


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
        self.matchers_chat = self.matchers_of(
            raw
        )  # a special token as the template spells it, never what NFC makes of a content

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
            raise SnugError(
                f"tiktoken fails on a text of {len(text)} characters ({one_line(error)}); cut it into shorter texts"
            ) from None
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
        return plain(
            "bytes", tiktoken.Encoding("bytes", pat_str="(?s).", mergeable_ranks=dict(Trees().ranks), special_tokens={})
        )
    if name == "gpt2":
        return plain("gpt2", gpt2_encoding())
    files = read_files(name, FILES)
    if "tokenizer.json" in files:
        return Tokenizer(*read_tokenizer(Path(name), files))
    reason = (
        f"; {name} has a tokenizer.model, of sentencepiece, alone: {SUPPORTED}"
        if read_files(name, ["tokenizer.model"])
        else ""
    )
    raise SnugError(f"tokenizer={name!r} is not one of bytes, gpt2, or a folder that has a tokenizer.json{reason}")


def plain(name, encoding):
    """A tokenizer of an encoding's bytes and merges and one special token, the last id."""
    stop = len(encoding.token_byte_values())
    texts = [encoding.decode_single_token_bytes(i) for i in range(stop)] + [b""]
    return Tokenizer(name, encoding, texts, [Added(END_OF_TEXT, stop, True, False)], (stop,))


def gpt2_encoding():
    try:
        return tiktoken.get_encoding("gpt2")
    except (
        OSError,
        ValueError,
    ) as error:  # no network (requests raises an OSError), an unwritable folder, a damaged file
        raise SnugError(
            f"the two files of tokenizer=gpt2 cannot be had ({type(error).__name__}): "
            "set TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer=bytes"
        ) from None


# -----------------------------------------------------------------------------
# Text, before BPE


def alternatives(names):
    """A pattern that matches the longest name at the leftmost place; None for no names."""
    return (
        regex.compile("(" + "|".join(map(regex.escape, sorted(names, key=len, reverse=True))) + ")") if names else None
    )


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
    stop = dict(
        id=tokenizer.stop_token,
        content=END_OF_TEXT,
        single_word=False,
        lstrip=False,
        rstrip=False,
        normalized=False,
        special=True,
    )
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None)
    model |= dict(fuse_unk=False, byte_fallback=False, ignore_merges=False)
    model |= dict(vocab={symbols_of(token): i for i, token in enumerate(tokens)}, merges=merges)
    spec = dict(version="1.0", truncation=None, padding=None, added_tokens=[stop], normalizer=None)
    spec |= dict(
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]),
        post_processor=None,
        decoder=byte_level,
        model=model,
    )
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)
    files = {"tokenizer.json": spec, "tokenizer_config.json": config}
    return {name: json.dumps(value, ensure_ascii=False, indent=1).encode() for name, value in files.items()}
