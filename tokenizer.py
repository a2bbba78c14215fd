"""Text to token ids and back, on tiktoken.

Two tokenizers: `bytes`, whose 256 tokens are the 256 bytes and which needs no files, and `gpt2`, whose two files
tiktoken fetches once and keeps. Each has one special token, <|endoftext|>, which says that a completion is over:
the stop token. It is an id and never text: no text encodes to it, and it decodes to nothing.

Left out: training a tokenizer, chat templates, other special tokens.
"""

import tiktoken

from settings import SnugError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """name; n_vocab, ids are 0 .. n_vocab - 1; stop_token, the id of <|endoftext|>.

    >>> tokenizer = get_tokenizer("bytes")
    >>> tokenizer.encode("1+2=")
    [49, 43, 50, 61]
    >>> tokenizer.decode([51, tokenizer.stop_token])
    '3'
    """

    def __init__(self, name, encoding):
        self.name = name
        self.encoding = encoding
        self.n_vocab = encoding.n_vocab
        self.stop_token = encoding.eot_token
        self.stop_tokens, self.files = (self.stop_token,), {}

    def encode(self, text):
        """Text -> list of ids, never the stop token: a prompt that spells <|endoftext|> gets those 13 characters.

        Text that UTF-8 cannot carry, a lone surrogate such as "\\ud800", is read as U+FFFD, the replacement character.
        """
        return self.encoding.encode_ordinary(text)

    def decode(self, ids):
        """Ids -> text. The stop token and ids of no token (a model's vocabulary may be padded) are skipped, and
        bytes that are not UTF-8 become U+FFFD: whatever a model samples decodes to some text.
        """
        return self.encoding.decode([i for i in ids if 0 <= i < self.n_vocab and i != self.stop_token], errors="replace")

    def stopper(self, text):
        """-> a function of a completion's ids: has `text` come to its end in the last of them? None for no text.

        It is to be asked after each token. The text may span tokens, and its end be a part of one: each token has at least one
        byte, so the last tokens, as many as the text has bytes, have all of it.
        """
        if not text:
            return None
        window = len(text.encode("utf-8", "replace"))
        return lambda ids: text in self.decode(ids[-window:])


def get_tokenizer(name):
    """The Tokenizer of that name: "bytes" (n_vocab 257, stop_token 256) or "gpt2" (50257, 50256).

    Raises SnugError for any other name, and where the files of gpt2 cannot be had.
    """
    if name == "bytes":
        return Tokenizer(name, byte_encoding())
    if name == "gpt2":
        return Tokenizer(name, gpt2_encoding())
    raise SnugError(f"tokenizer={name!r} is not one of bytes, gpt2")


def byte_encoding():
    # The pattern cuts text into characters, (?s) counting a newline as one; with no ranks beyond single bytes, nothing merges.
    ranks = {bytes([byte]): byte for byte in range(256)}
    return tiktoken.Encoding("bytes", pat_str="(?s).", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})


def gpt2_encoding():
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # no network (requests raises an OSError), an unwritable folder, a damaged file
        raise SnugError(
            f"the two files of tokenizer=gpt2 cannot be had ({type(error).__name__}): "
            "set TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer=bytes"
        ) from None
