"""config.json <-> the shape of a GPT, for GPT-2 and the families of families.toml.

read_shape returns GPTConfig's keywords. Each key of a file is read, or harmless, or refused if it describes another
model; a note names all other keys. `config_of` writes the file of the first family whose file, read again, gives the
same shape: a Mistral without a window becomes a Llama. To add a family: a table in families.toml and, where its tensors
have other names, a line in tensors.py.

With longrope, block_size is at most the original context length: the short factors are for such lengths. Left out:
damaged numbers; windows in some layers only, except every n-th layer.
Tests: tests/test_pretrained.py, tests/test_families.py, tests/test_configs.py, against transformers.
"""

import json
import math
import tomllib
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from snug.options import SnugError, in_one_line, note
from snug.options.typed import Fields, read_object
from snug.shape import GPTConfig, is_every

TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
NAMES, ROPES, FAMILIES, ONLY = (TABLE[name] for name in ("names", "ropes", "families", "only"))
HARMLESS = {*TABLE["harmless"].split()}
LLAMA = FAMILIES["llama"]
for family in FAMILIES.values():
    family["has"] = LLAMA["has"] | family.get("has", {})
    family["missing"] = LLAMA["missing"] | family.get("missing", {})
    family["may_have"] = {*family.get("may_have", ())}
NAMES["qwen3_5_text"] = NAMES["llama"] | NAMES["linear"]
OPTIONAL = set().union(*(family["may_have"] for family in FAMILIES.values()))
ORIGINAL = "original_max_position_embeddings"


def is_pretrained(folder):
    """Is it a Hugging Face folder, of a model or of adapters? Folders of runs and checkpoints have neither config."""
    names = "config.json", "adapter_config.json"
    return bool(folder) and any((Path(folder) / name).is_file() for name in names)


def read_config(folder) -> dict:
    """config.json of a supported architecture. Raises SnugError."""
    path = Path(folder) / "config.json"
    config = read_object(path)
    c = Fields(config, path)
    kind = c.get("model_type", str)
    if kind in ("gemma3", "qwen3_5"):  # a vision-language model; its text part is a gemma3_text
        config |= c.get("text_config", dict) | dict(model_type=f"{kind}_text")
    c.want("model_type", *FAMILIES)
    if config.get("quantization_config"):
        raise SnugError(
            f"{path}: the weights are quantized; use the bfloat16 model, with --base_dtype=nf4 for 4 bits"
        )
    return config


def stored_dtype(folder) -> str | None:
    """The dtype of the weights, such as "bfloat16", as config.json says it."""
    config = read_config(folder)
    return config.get("dtype", config.get("torch_dtype"))


def read_shape(folder: str | Path) -> dict:
    """A folder's config.json -> GPTConfig's keywords. A note names unknown keys. Raises SnugError."""
    path = Path(folder) / "config.json"
    shape, unknown = shape_of(read_config(folder), path)
    if unknown:
        note(f"{path}: unknown to snug, and ignored: {', '.join(sorted(unknown))}")
    return shape


def shape_of(config, path: Path | str):
    """-> (GPTConfig's keywords, the unknown keys of config.json).

    What this family cannot have is read too, and refused: another family's class would use it, this one's would not.
    """
    name = config["model_type"]
    family = FAMILIES[name]
    missing = family["missing"]
    may_have = family["may_have"]
    with in_one_line(f"{path}: not the shape of a model"):
        c = Fields(flat(config, missing), path)
        for key, values in (ONLY["all"] | ONLY.get(name, {})).items():
            c.want(key, *values)
        shape = family["has"] | sizes(c, NAMES.get(name, NAMES["llama"]))
        count = shape["n_layer"]
        linear = "linear_key_heads" in may_have
        kinds = f"{'linear' if linear else 'sliding'}_attention", "full_attention"
        interval = "full_attention_interval" if linear else "sliding_window_pattern"
        shape["nope_every"] = period(c, "no_rope_layers", "no_rope_layer_interval", (1, 0), count)
        every = period(c, "layer_types", interval, kinds, count)
        window = c.get("sliding_window", int, 0)
        # A Qwen's file has a window, too.
        if linear or window and "use_sliding_window" not in missing:
            shape |= dict(sliding_window=window, full_every=every)
        shape = asdict(GPTConfig(**shape | rope_of(c, shape["block_size"])))
        if "embedding_scale" in may_have:
            shape["embedding_scale"] = shape["n_embd"] ** 0.5
            shape["query_scale"] = (shape["head_size"] / c.get("query_pre_attn_scalar", int)) ** 0.5
    for key in sorted(OPTIONAL - may_have):
        if shape[key] != getattr(GPTConfig, key):  # the default
            raise SnugError(f"{path}: a {name} with {key}={shape[key]!r:.40} is not supported")
    return shape, c.values.keys() - c.read - HARMLESS - missing.keys()


def flat(config, missing: dict) -> dict:
    """config.json with defaults for missing keys, with the keys about positions beside the others, and without nulls.

    Newer files have all keys about positions in rope_parameters, perhaps by kind of layer; older ones in rope_scaling.
    """
    config = missing | config
    newer, older = (config.pop(name, None) or {} for name in ("rope_parameters", "rope_scaling"))
    rope = older or newer
    if newer and "rope_local_base_freq" in missing:
        sliding = newer["sliding_attention"]
        rope = newer["full_attention"] | older
        rope |= dict(sliding_rope_type=sliding["rope_type"], rope_local_base_freq=sliding["rope_theta"])
    if config.get(ORIGINAL):  # transformers' own files have it here
        rope = rope | {ORIGINAL: config[ORIGINAL]}
    return {name: value for name, value in (config | rope).items() if value is not None}


def sizes(c: Fields, names):
    """-> {GPTConfig's name: value}. Values that GPTConfig derives from others may be missing."""
    result = {}
    for ours, theirs in names.items():
        kind = GPTConfig.__annotations__[ours]
        default = 0 if ours in ("n_kv_head", "head_size", "n_hidden") else None
        result[ours] = c.get(theirs, list if kind is tuple else kind, default)
    return result


def period(c: Fields, name, interval: str, kinds: tuple, n_layer):
    """-> n if exactly every n-th layer is of the second kind; 0 if none is; without a list of layers the interval.
    Raises SnugError for another pattern."""
    n, layers = c.get(interval, int, 0), c.get(name, list, [])
    if not layers:
        return n
    count = min(n_layer, len(layers) + 1)  # a short list is refused
    n = layers.index(kinds[1]) + 1 if kinds[1] in layers[:count] else 0
    if layers[:count] != [kinds[is_every(layer, n)] for layer in range(count)]:
        raise SnugError(
            f"{c.path}: {name}={layers!r:.60} is not supported: only every n-th layer may be of another kind"
        )
    return n


def rope_of(c: Fields, longest) -> dict:
    """-> GPTConfig's keywords about positions, and the block_size that they allow."""
    result = dict(block_size=longest, rope_sliding_theta=c.get("rope_local_base_freq", float, 0.0))
    kind = c.values["rope_type"] = c.get("rope_type", str, c.get("type", str, "default"))
    c.want("rope_type", "default", *ROPES)
    if kind == "default":
        return result
    if kind == "longrope":
        original = c.get(ORIGINAL, int)
        c.values.setdefault("factor", longest / original)
        result["block_size"] = min(longest, original)
    longer = math.log(max(c.get("factor", float), 1.0))
    if kind == "longrope":
        c.values.setdefault("attention_factor", math.sqrt(1 + longer / math.log(original)))
    if kind == "yarn":
        # attn_factor: DeepSeek's; it multiplies the default, as vLLM reads it
        c.values.setdefault("attention_factor", (0.1 * longer + 1) * c.get("attn_factor", float, 1.0))
    result["rope_type"] = "" if kind == "linear" else kind
    return result | sizes(c, ROPES[kind])


def config_of(c: GPTConfig, dtype):
    """GPTConfig -> the content of config.json of the first family that has this shape, without padding ids (n_vocab and
    above). Raises SnugError if none has it."""
    c = replace(c, vocab_size=c.n_vocab)
    wanted = asdict(c)
    others = {}
    for family in FAMILIES:
        config = written(c, family, dtype)
        with suppress(SnugError):
            again, _ = shape_of(json.loads(json.dumps(config)), family)
            if family == "gpt2":  # it gets biases of 0
                again["bias"] = c.bias
            others[family] = [
                f"{name}={wanted[name]}" for name in wanted if wanted[name] != again[name]
            ]
            if not others[family]:
                return config
    family = min(others, key=lambda name: len(others[name]))
    raise SnugError(
        f"a {family}, the nearest architecture, cannot have {', '.join(others[family]):.300}"
    )


def written(c: GPTConfig, family, dtype) -> dict:
    """config.json for transformers 4 and 5, as this family would have it."""
    table = FAMILIES[family]
    may_have = table["may_have"]
    names = NAMES.get(family, NAMES["llama"])
    config = dict(architectures=[table["architecture"]], model_type=family, torch_dtype=dtype)
    config |= {theirs: getattr(c, ours) for ours, theirs in names.items()}
    config |= TABLE["activations"][c.mlp]
    config["pad_token_id"] = None  # transformers' own may be no token of this model
    if "query_scale" in may_have:
        config["query_pre_attn_scalar"] = round(c.head_size / c.query_scale**2)
    # If a file has no window, classes have defaults of their own; classes with two kinds of layers need a number.
    if "sliding_window" in may_have:
        config["sliding_window"] = c.sliding_window or (
            c.block_size if "full_every" in may_have else None
        )
    if "full_every" in may_have:
        kinds = "full_attention", "sliding_attention", "linear_attention"
        config["layer_types"] = [kinds[c.slides(i) + 2 * c.is_linear(i)] for i in range(c.n_layer)]
    if "nope_every" in may_have:
        config["no_rope_layers"] = [int(c.rope(layer) != "") for layer in range(c.n_layer)]
    rope = {}
    if c.rope_factor != 1 or c.rope_type:
        kind = c.rope_type or "linear"
        rope = {theirs: getattr(c, ours) for ours, theirs in ROPES[kind].items()}
        rope["rope_type"] = kind
        config["rope_scaling"] = rope
    if c.rope_type == "longrope":
        config[ORIGINAL] = c.rope_original_block_size
        config["max_position_embeddings"] = round(c.rope_original_block_size * c.rope_factor)
    # transformers 5's OLMo 3 has a base of its own otherwise.
    if "rope_sliding_theta" in may_have and c.rope_sliding_theta:
        config["rope_local_base_freq"] = c.rope_sliding_theta
        full = dict(rope_type="default", rope_theta=c.rope_theta)
        sliding = full | dict(rope_theta=c.rope_sliding_theta)
        config["rope_parameters"] = dict(full_attention=full | rope, sliding_attention=sliding)
    return config
