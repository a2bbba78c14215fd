"""Text and chat messages to token ids and back, with the library `tokenizers`.

    tokenizer = get_tokenizer("models/Qwen2.5-0.5B-Instruct")
    tokenizer.encode_prompt([{"role": "user", "content": "Hi"}])       # the ids of transformers' apply_chat_template

Names for other files: get_tokenizer, the Tokenizer that it returns, its `chat` (chat.Chat).

`bytes` has the 256 bytes as tokens. `gpt2` is OpenAI's; tiktoken downloads its two files once. A folder with a
tokenizer.json can have any kind: byte-level BPE (GPT-2, SmolLM2, Llama 3, Qwen), sentencepiece BPE (Llama 2, Mistral),
Unigram.

Special tokens, such as <|endoftext|>, are ids and never text: text that spells one gets ordinary tokens. Special tokens
decode to nothing. They come only from a chat template (snug/tokenizer/chat.py), or from a prompt of text that a chat
template has rendered before.

Left out: training a tokenizer; special tokens after a text, such as BERT's [SEP], because a prompt is continued; a
model that itself makes special tokens of text, as some Unigram models do.
Tests: tests/test_tokenizer.py.
"""

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from datetime import date
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from snug.options import SnugError, in_one_line, well_formed
from snug.options.typed import read_object
from snug.tokenizer.chat import BREAK, CUT, TURN, Chat

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # what ends a text if no file says so
DATE = "chat_date.txt"  # a file of older runs: the day in their prompts
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    DATE,
)
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_VOCAB = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"  # SHA-256
GPT2_MERGES = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


class Tokenizer:
    """What get_tokenizer returns.

    name         "bytes", "gpt2", or "tokenizer.json@" and the first 12 hex digits of the file's SHA-256
    n_vocab      ids are 0 .. n_vocab - 1; there may be ids without a token
    stop_tokens  ids that end a completion; stop_token is the first, which training teaches
    special      {spelling: id} of the special tokens; spellings finds them
    bos          ids before a prompt of text
    files        {file name: bytes} to keep beside a checkpoint; empty for bytes and gpt2
    chat         writes messages as text; None without a chat template

    Threads may share it.

    >>> tokenizer = get_tokenizer("bytes")
    >>> tokenizer.encode("1+2=")
    [49, 43, 50, 61]
    >>> tokenizer.decode([51, tokenizer.stop_token])
    '3'
    """

    def __init__(self, name, backend, stop_tokens):
        """backend: a tokenizers.Tokenizer."""
        self.name, self.backend = name, backend
        self.stop_tokens, self.stop_token = stop_tokens, stop_tokens[0]
        self.bos, self.chat, self.files, self.file = [], None, {}, name
        self.lock = threading.Lock()  # held from setting the backend's flag until its ids are there
        self.n_vocab = 1 + max(backend.get_vocab().values())
        added = backend.get_added_tokens_decoder()
        # A stop token is special, whatever its flags say.
        backend.add_special_tokens([added[i].content for i in stop_tokens if not added[i].special])
        self.special = {
            t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special
        }
        # The longest spelling at the leftmost place, as `tokenizers` finds it.
        longest_first = sorted(self.special, key=len, reverse=True)
        self.spellings = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Text -> ids, never of special tokens: text that spells <|endoftext|> gets those 13 characters.

        special=True: text that spells a special token becomes that token, unless BREAK is in it. A lone surrogate such
        as "\\ud800", which UTF-8 cannot carry, becomes U+FFFD.
        """
        if BREAK in text:
            return [
                number
                for piece in self.spellings.split(text)
                for part in piece.replace(BREAK, "").split(CUT)
                for number in self.encode(part, special and piece in self.special)
            ]
        with self.lock:
            self.backend.encode_special_tokens = not special
            with in_one_line(f"{self.file}: cannot encode a text of {len(text)} characters"):
                return self.backend.encode(well_formed(text), add_special_tokens=False).ids

    def is_rendered(self, prompt: str | list[dict]) -> bool:
        """Is it text whose special tokens count? It spells one; without a chat template it must begin with one."""
        find = self.spellings.search if self.chat else self.spellings.match
        return isinstance(prompt, str) and bool(find(prompt))

    def encode_prompt(self, prompt: str | list[dict], before=(), special=True) -> list[int]:
        """Text, or chat messages [{"role": ..., "content": ...}, ...] -> ids.

        Text gets the tokenizer's bos ids in front, unless it begins with a special token. So rendered text gets the ids
        of transformers' `tokenizer(text, add_special_tokens=False)`. special=False: special tokens in it are text like
        any other. For messages the chat template writes the text, and opens the answer or continues one. Special tokens
        come from the template, never from a content. before: as for Chat.render. Raises SnugError.
        """
        if isinstance(prompt, str):
            special = special and self.is_rendered(prompt)
            begins = special and self.spellings.match(prompt)
            return self.bos * (not begins) + self.encode(prompt, special)
        if self.chat is None:
            raise SnugError(
                f"messages need a chat template, which tokenizer={self.name} lacks: name a model such as "
                "--init_from=Qwen/Qwen2.5-0.5B-Instruct, or --chat=false"
            )
        return self.encode(self.chat.render(prompt, before), special=True)

    def encode_reply(self, messages, stopped: bool):
        """Messages that answer a turn of the assistant -> the ids between this turn and the assistant's next one.

        messages: such as [{"role": "tool", "name": "calc", "content": "5"}]. stopped: a stop token ended the turn, so
        the ids begin behind the one that the template writes; otherwise they begin with it. Raises SnugError.
        """
        ids, end = self.encode_prompt(messages, TURN), self.special.get(self.chat.end)
        return ids[ids.index(end) + 1 :] if stopped and end in ids else ids

    def set_template_kwargs(self, variables):
        """Set variables of the chat template, such as {"enable_thinking": False}, for prompts and for `files`."""
        if not variables:
            return
        if self.chat is None:
            raise SnugError(
                f"chat_template_kwargs={variables}: tokenizer={self.name} has no chat template"
            )
        self.chat.set_defaults(variables)
        self.files["chat_template.jinja"] = self.chat.source.encode()

    def decode(self, ids: list[int]) -> str:
        """Ids -> text. Special tokens and ids without a token are skipped, and bytes that are not UTF-8 become U+FFFD.

        Sentencepiece tokenizers drop a space at the beginning: a completion reads "4", not " 4", as in TRL.
        """
        return self.backend.decode(ids)

    def stopper(self, texts: Sequence[str]):
        """-> a function of a completion's ids, called after each token: does the last one complete one of `texts`?

        None if all texts are empty. A text may span several tokens and end within one. So the function decodes a tail:
        one token for each byte of the longest text, and one more, because a decoder may drop the first space. If the
        tail begins within a character (U+FFFD), it is up to 3 tokens longer, which are the other bytes of the
        character.
        """
        texts = list(filter(None, texts))
        if not texts:
            return None
        window = max(len(text.encode(errors="replace")) for text in texts) + 1
        special = set(self.special.values())

        def is_over(ids):
            last = list(islice((i for i in reversed(ids) if i not in special), window + 3))[::-1]
            for n in range(window, window + 4):
                tail = self.decode(last[-n:])
                found = any(text in tail for text in texts)
                if found or not tail.startswith("\ufffd"):
                    return found
            return False

        return is_over

    def save(self, folder):
        """Write `files` into the folder; for bytes and gpt2, files of the same tokenizer for `transformers`."""
        config = dict(
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token=END_OF_TEXT,
            clean_up_tokenization_spaces=False,
        )
        files = self.files or {
            "tokenizer.json": self.backend.to_str(pretty=True).encode(),
            "tokenizer_config.json": json.dumps(config, indent=1).encode(),
        }
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)


def get_tokenizer(name: str) -> Tokenizer:
    """The Tokenizer of "bytes" (n_vocab 257, stop_token 256), "gpt2" (50257, 50256) or a folder with a tokenizer.json.

    Raises SnugError for any other name, for damaged files, and if the files of gpt2 cannot be downloaded.
    """
    if name == "bytes":
        # `tokenizers` writes each byte as a printable character. A byte that is printable in Latin-1 stands for itself.
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        order = sorted(range(256), key=lambda byte: chr(byte) not in symbols)
        return byte_level(name, dict(zip(symbols, order, strict=True)), [])
    if name == "gpt2":
        from tiktoken.load import read_file_cached

        with in_one_line(
            "tokenizer=gpt2 cannot be downloaded: set TIKTOKEN_CACHE_DIR to a folder that has its two files, "
            "or use --tokenizer=bytes"
        ):
            vocab = json.loads(read_file_cached(GPT2 + "encoder.json", GPT2_VOCAB))
            lines = read_file_cached(GPT2 + "vocab.bpe", GPT2_MERGES).decode().splitlines()
        # The first line is a version.
        return byte_level(name, vocab, [tuple(line.split()) for line in lines[1:]])
    folder = Path(name)
    with in_one_line(f"{folder}: has no tokenizer that can be read"):
        files = {file: (folder / file).read_bytes() for file in FILES if (folder / file).is_file()}
        if "tokenizer.json" in files:
            return tokenizer_of(folder, files)
    raise SnugError(
        f"{name!r} has no tokenizer.json (transformers' AutoTokenizer makes one of a tokenizer.model), and is not "
        "bytes or gpt2"
    )


def byte_level(name, vocab, merges):
    """A byte-level BPE like GPT-2's; its last id is <|endoftext|>."""
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(name, backend, (backend.token_to_id(END_OF_TEXT),))


def tokenizer_of(folder, files) -> Tokenizer:
    """A tokenizer.json and the files beside it."""
    config, generation, model = (
        read_object(folder / f"{name}.json") if (folder / f"{name}.json").is_file() else {}
        for name in ("tokenizer_config", "generation_config", "config")
    )
    backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    backend.no_truncation()
    backend.no_padding()
    texts = {key: v.get("content") if isinstance(v, dict) else v for key, v in config.items()}
    names = {key: v for key, v in texts.items() if key.endswith("_token") and isinstance(v, str)}
    probe = backend.encode("a")
    end = backend.token_to_id(names.get("eos_token", ""))
    eos = model.get("eos_token_id") if end is None else end
    stop_tokens = stop_ids(backend, [eos, generation.get("eos_token_id")])
    digest = hashlib.sha256(files["tokenizer.json"]).hexdigest()
    tokenizer = Tokenizer(f"tokenizer.json@{digest[:12]}", backend, stop_tokens)
    tokenizer.file = folder / "tokenizer.json"
    tokenizer.bos = probe.ids[: probe.special_tokens_mask.index(0)]
    begin = backend.token_to_id(names.get("bos_token", ""))
    if not tokenizer.bos and config.get("add_bos_token") and begin is not None:
        tokenizer.bos = [begin]

    template = config.get("chat_template")
    if isinstance(template, list):  # several templates with names: take the default
        template = {item["name"]: item["template"] for item in template}.get("default")
    if "chat_template.jinja" in files:  # a file comes first, as for transformers
        template = files["chat_template.jinja"].decode()
    if day := files.get(DATE):
        names["strftime_now"] = date.fromisoformat(day.decode()).strftime
    if template:
        tokenizer.chat = Chat(template, names, tokenizer.spellings)
        written = tokenizer.special.get(tokenizer.chat.end)
        if written not in (None, *stop_tokens):
            tokenizer.stop_tokens += (written,)  # the template writes it behind an answer
    if end is None or tokenizer.stop_tokens != stop_tokens:
        # config.json, which may name a stop token, is not kept beside a checkpoint; generation_config.json is kept.
        generation["eos_token_id"] = tokenizer.stop_tokens
        files["generation_config.json"] = json.dumps(generation, indent=1).encode()
    tokenizer.files = files
    return tokenizer


def stop_ids(backend, values):
    """values: ids, lists of ids, None -> the ids that are added tokens, or else one of ENDS. Raises SnugError."""
    ids = [i for value in values for i in (value if isinstance(value, list) else [value])]
    added = backend.get_added_tokens_decoder()
    known = [i for i in ids if i in added]
    known = known or [i for i in map(backend.token_to_id, ENDS) if i in added][:1]
    if not known:
        raise SnugError(
            "no added token ends a completion; name one as eos_token in tokenizer_config.json"
        )
    return tuple(dict.fromkeys(known))
