"""The tokenizer in a GGUF file's metadata -> tokenizer.json and the files beside it.

tokenizer.ggml.model says the kind: `gpt2` is byte-level BPE, with merges in the file and a rule for cutting text
(tokenizer.ggml.pre, gguf_pre.toml); `llama` is sentencepiece's BPE, whose merges follow from its scores. Tokens of the
types control and unknown are special; tokens that the user defined are found in a text before it is cut.

Left out: other kinds, such as Unigram (`t5`) and WordPiece (`bert`); <eos> behind a text; tokens that take the spaces
beside them. Tests: tests/test_from_gguf.py.
"""

import json
import tomllib
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from snug.options import SnugError

TABLE = tomllib.loads(Path(__file__).with_name("gguf_pre.toml").read_text())["rule"]
RULES = {name: rule for rule in TABLE for name in rule["names"]}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # token_type
LONGEST = 256  # characters of a token that merges make; sentencepiece makes at most 16
NAMES = dict(  # tokenizer_config.json's and the file's
    bos_token="bos_token_id",
    eos_token="eos_token_id",
    unk_token="unknown_token_id",
    pad_token="padding_token_id",
)


def save_tokenizer(metadata: dict, folder: Path):
    """Write the files. Raises SnugError for a kind that is not supported, and other errors for damaged lists."""
    c = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model, cut = c["model"], c.get("pre")
    if model == "llama":
        backend = sentencepiece(c)
    elif model == "gpt2" and cut in RULES:
        backend = byte_level(c, RULES[cut])
    else:
        raise SnugError(
            f"tokenizer.ggml.model={model!r:.40} with tokenizer.ggml.pre={cut!r:.40} is not supported"
        )
    names = {name: c["tokens"][c[key]] for name, key in NAMES.items() if key in c}
    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(c["tokens"], c["token_type"], strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) or token in names.values()
        ]
    )
    bos = names.get("bos_token")
    if bos and c.get("add_bos_token", model == "llama" or backend.model.ignore_merges):
        special = [(bos, c["bos_token_id"])]
        backend.post_processor = processors.TemplateProcessing([bos, "$A"], special_tokens=special)
    config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    stops = dict.fromkeys(c[key] for key in ("eos_token_id", "eot_token_id") if key in c)
    files = {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps(config | names, indent=1),
        "generation_config.json": json.dumps(dict(eos_token_id=[*stops])),
    }
    if "tokenizer.chat_template" in c:
        files["chat_template.jinja"] = c["tokenizer.chat_template"]
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())


def byte_level(c: dict, rule: dict) -> Tokenizer:
    """rule: one of gguf_pre.toml."""
    vocab = {token: i for i, token in enumerate(c["tokens"])}
    merges = [tuple(pair.split(" ")) for pair in c["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule.get("whole_words", False)))
    if "nfc" in rule:
        backend.normalizer = normalizers.NFC()
    splits = [Split(Regex(split), "isolated") for split in rule["splits"]]
    backend.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece(c: dict) -> Tokenizer:
    """A space is "▁" in tokens; a character without a token is bytes, <0x00> to <0xFF>.

    Merges are all pairs of tokens that make a token, the best score first. With the tokens a, b, c, ab (-1), bc (-2),
    abc (-3): (a, b), (b, c), (a, bc), (ab, c).
    """
    vocab, merges = {token: i for i, token in enumerate(c["tokens"])}, []
    for token, score, kind in zip(c["tokens"], c["scores"], c["token_type"], strict=True):
        if kind == NORMAL and len(token) <= LONGEST:
            halves = [(token[:i], token[i:]) for i in range(1, len(token))]
            merges += [(-score, pair) for pair in halves if vocab.keys() >= {*pair}]
    merges.sort(key=lambda merge: merge[0])
    unknown = c["tokens"][c["unknown_token_id"]] if "unknown_token_id" in c else None
    parts = dict(unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(models.BPE(vocab, [pair for _, pair in merges], **parts))
    spaces = [normalizers.Replace(" ", "▁")]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if c.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        parts.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(spaces), decoders.Sequence(parts)
    return backend
