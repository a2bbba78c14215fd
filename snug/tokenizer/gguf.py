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
NAMES = dict(bos_token="bos", eos_token="eos", unk_token="unknown", pad_token="padding")


def save_tokenizer(metadata: dict, folder: Path):
    """Write the files. Raises SnugError for what is not supported, and any error for lists that do not fit."""
    c = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, cut = c["model"], c.get("pre")
    if kind == "llama":
        backend = sentencepiece(c)
    elif kind == "gpt2" and cut in RULES:
        backend = byte_level(c, RULES[cut])
    else:
        raise SnugError(
            f"tokenizer.ggml.model={kind!r:.40} with tokenizer.ggml.pre={cut!r:.40} is not supported"
        )
    ids = {name: c.get(f"{key}_token_id") for name, key in NAMES.items()}
    names = {name: c["tokens"][i] for name, i in ids.items() if i is not None}
    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(c["tokens"], c["token_type"], strict=True)
            if UNKNOWN <= kind <= USER_DEFINED or token in names.values()
        ]
    )
    has_bos = kind == "llama" or backend.model.ignore_merges
    if c.get("add_bos_token", has_bos) and "bos_token" in names:
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            [bos, "$A"], special_tokens=[(bos, ids["bos_token"])]
        )
    config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    stops = {c[key]: 0 for key in ("eos_token_id", "eot_token_id") if key in c}
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
    tokens, merges = c["tokens"], []
    vocab = {token: i for i, token in enumerate(tokens)}
    for token, score, kind in zip(tokens, c["scores"], c["token_type"], strict=True):
        if kind == NORMAL and len(token) <= LONGEST:
            halves = [(token[:i], token[i:]) for i in range(1, len(token))]
            pairs = [(vocab[a], vocab[b]) for a, b in halves if a in vocab and b in vocab]
            merges += [(-score, *pair) for pair in sorted(pairs)]
    merges.sort(key=lambda merge: merge[0])
    backend = Tokenizer(
        models.BPE(
            vocab,
            [(tokens[a], tokens[b]) for _, a, b in merges],
            unk_token=tokens[c["unknown_token_id"]] if "unknown_token_id" in c else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Replace(" ", "▁")]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if c.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        parts.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(spaces), decoders.Sequence(parts)
    return backend
