"""Text to token ids and back.

`bytes` (256 tokens) and `gpt2` (tiktoken downloads its two files once) run on tiktoken. A folder with a tokenizer.json
runs on the library `tokenizers` and has its ids: byte-level BPE (GPT-2, SmolLM2, Llama 3, Qwen), sentencepiece BPE
(Llama 2, Mistral), Unigram, WordPiece.

Special tokens, such as <|endoftext|>, are ids and never text: text that spells one gets ordinary tokens. They decode to
nothing. Only a chat template writes them (tokenizer/chat.py).

Left out: training a tokenizer; special tokens after a text, such as BERT's [SEP], because a prompt is continued.
Tests: tests/test_tokenizer.py.
"""

import hashlib
import json
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from options import SnugError, in_one_line
from tokenizer.chat import Chat, alternatives, well_formed

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # what ends a text if no file says so
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
DATE = "chat_date.txt"  # the day on which a run began, if its chat template asks for the date
FILES += ("chat_template.jinja", DATE)


class Tokenizer:
    """What get_tokenizer returns.

    name         "bytes", "gpt2", or "tokenizer.json@" and the first 12 hex digits of the file's SHA-256
    n_vocab      ids are 0 .. n_vocab - 1; some of them may be no token
    stop_tokens  ids that end a completion; stop_token is the first, which training teaches
    files        {file name: bytes} to keep beside a checkpoint; empty for bytes and gpt2
    chat         writes messages as text; None without a chat template

    >>> tokenizer = get_tokenizer("bytes")
    >>> tokenizer.encode("1+2=")
    [49, 43, 50, 61]
    >>> tokenizer.decode([51, tokenizer.stop_token])
    '3'
    """

    def __init__(self, name, n_vocab, text_ids, special, stop_tokens, bos=(), chat=None, files=None):
        """text_ids: ids that decode to text. special: {spelling: id}. bos: ids before a prompt of text."""
        self.name, self.n_vocab, self.text_ids, self.special = name, n_vocab, text_ids, special
        self.stop_tokens, self.stop_token = stop_tokens, stop_tokens[0]
        self.bos, self.chat, self.files = bos, chat, files or {}
        self.spellings = alternatives(special)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Text -> ids, never of special tokens: a prompt that spells <|endoftext|> gets those 13 characters.

        special=True: text that spells a special token becomes that token. A lone surrogate such as "\\ud800", which
        UTF-8 cannot carry, becomes U+FFFD. Raises SnugError if `tokenizers` cannot encode the text.
        """
        text = well_formed(text)
        return self.encode_special(text) if special else self.encode_ordinary(text)

    def encode_prompt(self, prompt: str | list[dict]) -> list[int]:
        """Text, or chat messages [{"role": ..., "content": ...}, ...] -> ids.

        Text gets the tokenizer's bos ids in front. The chat template writes messages and opens the answer; special
        tokens come from the template, never from a content. Raises SnugError.
        """
        if isinstance(prompt, str):
            return [*self.bos, *self.encode(prompt)]
        if self.chat is None:
            advice = "write the prompts as text, or name a folder whose tokenizer has one"
            raise SnugError(
                f"tokenizer={self.name} has no chat template for a prompt of messages: {advice}"
            )
        text, parts = self.chat.render(prompt)
        return self.encode_parts(parts) if parts else self.encode_special(text)

    def encode_special(self, text):
        return self.encode_parts(self.spellings.split(text))

    def encode_parts(self, parts):
        """[text, special token, text, ..., text] -> ids."""
        ids = []
        for place, part in enumerate(parts):
            ids += [self.special[part]] if place % 2 else self.encode_ordinary(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Ids -> text. Special tokens and ids of no token are skipped, and bytes that are not UTF-8 become U+FFFD.

        Sentencepiece tokenizers drop a space at the beginning: a completion reads "4", not " 4", as in TRL.
        """
        return self.decode_text([i for i in ids if i in self.text_ids])

    def stopper(self, text: str):
        """-> a function of a completion's ids, called after each token: does the last one complete `text`? None if "".

        The text may span tokens and end within one. A tail is decoded: one token for each byte of the text, and one
        more, because a decoder may drop the first space. If it begins within a character (U+FFFD), up to 3 tokens are
        added, the other bytes of the character.
        """
        if not text:
            return None
        window = len(text.encode(errors="replace")) + 1

        def is_over(ids):
            last = list(islice((i for i in reversed(ids) if i in self.text_ids), window + 3))[::-1]
            for n in range(window, window + 4):
                tail = self.decode_text(last[-n:])
                if text in tail or not tail.startswith("\ufffd"):
                    return text in tail
            return False

        return is_over

    def save(self, folder: str | Path):
        """Write `files` into the folder; for bytes and gpt2, files of the same tokenizer for `transformers`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in (self.files or self.generated_files()).items():
            (folder / name).write_bytes(data)


def get_tokenizer(name: str) -> Tokenizer:
    """The Tokenizer of "bytes" (n_vocab 257, stop_token 256), "gpt2" (50257, 50256) or a folder with a tokenizer.json.

    Raises SnugError for any other name, for damaged files, and if the files of gpt2 cannot be downloaded.
    """
    if name == "bytes":
        # The pattern cuts text into characters, newlines too (?s); without ranks beyond single bytes, nothing merges.
        ranks = {bytes([byte]): byte for byte in range(256)}
        return TiktokenTokenizer(
            tiktoken.Encoding("bytes", pat_str="(?s).", mergeable_ranks=ranks, special_tokens={})
        )
    if name == "gpt2":
        try:
            return TiktokenTokenizer(tiktoken.get_encoding("gpt2"))
        except (
            OSError,
            ValueError,
        ) as error:  # no network (requests raises an OSError), a damaged file
            advice = "set TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer=bytes"
            seen = f"the two files of tokenizer=gpt2 cannot be had ({type(error).__name__})"
            raise SnugError(f"{seen}: {advice}") from None
    files = read_files(Path(name), FILES)
    if name and "tokenizer.json" in files:
        return FolderTokenizer(Path(name), files)
    seen = f"tokenizer={name!r} is not one of bytes, gpt2, or a folder that has a tokenizer.json"
    raise SnugError(f"{seen} (AutoTokenizer of transformers makes one of a tokenizer.model)")


class TiktokenTokenizer(Tokenizer):
    """bytes and gpt2: the tokens of a tiktoken.Encoding, then <|endoftext|>."""

    def __init__(self, encoding):
        self.encoding, stop = encoding, len(encoding.token_byte_values())
        super().__init__(encoding.name, stop + 1, range(stop), {END_OF_TEXT: stop}, (stop,))

    def encode_ordinary(self, text):
        return self.encoding.encode_ordinary(text)

    def decode_text(self, ids):
        return self.encoding.decode(ids)

    def generated_files(self):
        symbols = sorted(
            pre_tokenizers.ByteLevel.alphabet()
        )  # a printable byte's symbol is itself; these come first
        symbol_of = dict(
            zip(sorted(range(256), key=lambda byte: chr(byte) not in symbols), symbols, strict=True)
        )
        ranks = {self.encoding.decode_single_token_bytes(i): i for i in self.text_ids}
        names = {token: "".join(symbol_of[byte] for byte in token) for token in ranks}
        vocab = {names[token]: i for token, i in ranks.items()}
        merges = [(names[left], names[right]) for left, right in merges_of(ranks)]
        same = tokenizers.Tokenizer(models.BPE(vocab, merges))
        same.pre_tokenizer, same.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        same.add_special_tokens([END_OF_TEXT])
        config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END_OF_TEXT)
        config = json.dumps(config | dict(clean_up_tokenization_spaces=False), indent=1)
        return {
            "tokenizer.json": same.to_str(pretty=True).encode(),
            "tokenizer_config.json": config.encode(),
        }


def merges_of(ranks):
    """tiktoken's {token: rank} -> the two parts of each token of several bytes, before BPE's last merge."""
    for token in list(ranks)[256:]:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        yield parts


class FolderTokenizer(Tokenizer):
    """A tokenizer.json and the files beside it, on the library `tokenizers`."""

    def __init__(self, folder, files):
        spec, config, token_map, generation = (read_json(folder, files, name) for name in FILES[:4])
        with in_one_line(f"{folder / 'tokenizer.json'}: `tokenizers` cannot read it"):
            self.backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
            self.backend.no_truncation()
            self.backend.no_padding()
            if isinstance(self.backend.model, models.BPE):
                self.backend.model.dropout = None  # it makes ids random
            probe = self.backend.encode("a")
        vocab, added = self.backend.get_vocab(), self.backend.get_added_tokens_decoder()

        variables = token_names(token_map) | token_names(config)
        eos = variables.get("eos_token")
        if eos in vocab:
            stop_tokens = stop_ids([{"eos_token_id": vocab[eos]}, generation], folder, vocab, added)
        else:  # config.json may name it; it is not kept beside a checkpoint, generation_config.json is
            model_config = read_json(folder, read_files(folder, ["config.json"]), "config.json")
            stop_tokens = stop_ids([model_config, generation], folder, vocab, added)
            generation = json.dumps(generation | {"eos_token_id": stop_tokens}, indent=1)
            files = files | {"generation_config.json": generation.encode()}

        # A stop token is special, whatever its flags say. Special tokens are found in text before it is normalized.
        special = {token.content: i for i, token in added.items() if token.special or i in stop_tokens}
        tokens = []
        for token in (added[i] for i in special.values()):
            spaces = dict(single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip)
            tokens.append(
                tokenizers.AddedToken(token.content, normalized=False, special=True, **spaces)
            )
        self.backend.add_special_tokens(tokens)
        # Text may become the model's unknown token, which is often special, but no other special token.
        model = spec["model"]
        unknown = model.get("unk_id", vocab.get(model.get("unk_token")))
        self.reserved = {i for i in special.values() if i != unknown or i in stop_tokens}

        bos = probe.ids[: probe.special_tokens_mask.index(0)] if 0 in probe.special_tokens_mask else []
        if not bos and config.get("add_bos_token") is True and variables.get("bos_token") in vocab:
            bos = [vocab[variables["bos_token"]]]
        template = config.get("chat_template")
        if "chat_template.jinja" in files:
            template = files["chat_template.jinja"].decode(errors="replace")
        elif isinstance(template, list):
            with in_one_line(
                f"{folder / FILES[1]}: chat_template must be a text or a list of named ones"
            ):
                template = {item["name"]: item["template"] for item in template}.get("default")
        now = None
        if "strftime_now" in str(template):
            files = {
                DATE: datetime.now().date().isoformat().encode()
            } | files  # a checkpoint's date stays
            with in_one_line(f"{folder / DATE}: not a date"):
                now = datetime.fromisoformat(files[DATE].decode())
        name = f"tokenizer.json@{hashlib.sha256(files['tokenizer.json']).hexdigest()[:12]}"
        chat = Chat(template, variables, list(special), now) if template else None
        text_ids = set(vocab.values()) - set(special.values())
        super().__init__(
            name, 1 + max(vocab.values()), text_ids, special, stop_tokens, bos, chat, files
        )

    def run(self, text, special):
        self.backend.encode_special_tokens = not special
        with in_one_line(f"tokenizer={self.name} cannot encode {text[:60]!r}"):
            return self.backend.encode(text, add_special_tokens=False)

    def encode_ordinary(self, text):
        """If the model makes a special token of text that spells it (such as Unigram), cut the text in two there."""
        found = self.run(text, special=False)
        starts = [
            start for i, (start, _) in zip(found.ids, found.offsets, strict=True) if i in self.reserved
        ]
        if not starts:
            return found.ids
        if len(text) == 1:
            return []
        cuts = sorted({0, *starts, *(start + 1 for start in starts), len(text)})
        return [i for start, end in pairwise(cuts) for i in self.encode_ordinary(text[start:end])]

    def encode_special(self, text):
        """The whole text at once, unless the model makes a special token of text that spells it when normalized."""
        ids, spelled = (
            self.run(text, special=True).ids,
            [self.special[name] for name in self.spellings.findall(text)],
        )
        if [i for i in ids if i in self.reserved] == [i for i in spelled if i in self.reserved]:
            return ids
        return super().encode_special(text)

    def decode_text(self, ids):
        return self.backend.decode(ids)


def read_files(folder, names):
    """-> {name: bytes} of those that the folder has."""
    with in_one_line(f"{folder}: cannot be read"):
        return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def read_json(folder, files, name):
    """-> the object in that file, empty if there is no such file."""
    with in_one_line(f"{folder / name}: not JSON"):
        value = json.loads(files.get(name, b"{}").decode())
    if not isinstance(value, dict):
        raise SnugError(f"{folder / name}: must be an object, not {type(value).__name__}")
    return value


def token_names(config):
    """A tokenizer_config.json or special_tokens_map.json -> {"eos_token": "<|endoftext|>", ...}."""
    values = {
        key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()
    }
    return {
        key: value for key, value in values.items() if key.endswith("_token") and isinstance(value, str)
    }


def stop_ids(configs, folder, vocab, added):
    """-> the configs' eos_token_ids that are tokens, or one of ENDS. Raises SnugError if the first is not added."""
    values, known = [config.get("eos_token_id") for config in configs], set(vocab.values())
    ids = [i for value in values for i in (value if isinstance(value, list) else [value])]
    ids = [i for i in ids if type(i) is int and i in known] or [
        vocab[end] for end in ENDS if end in vocab
    ][:1]
    if not ids or ids[0] not in added:
        seen = f"must be one of tokenizer.json's added_tokens, not {ids[:1]}"
        advice = "name one as eos_token in tokenizer_config.json"
        raise SnugError(f"{folder}: the token that ends a completion {seen}; {advice}")
    return tuple(dict.fromkeys(ids))
