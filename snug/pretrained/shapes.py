"""config.json <-> the shape of a GPT, for GPT-2 and the families of families.toml.

read_shape returns GPTConfig's keywords. Each key of a file is read, harmless, or refused where it means another model;
a line names the others. `family_of` finds the family of a shape; a Mistral without a window is written as a Llama. To
add a family: a table in families.toml and, where its tensors have other names, a line in tensors.py.

With longrope block_size is at most the original context, for which the short factors are. Left out: the ranges of sizes
and of rope's numbers, which GPTConfig checks; windows in some layers only, except in every n-th one.
Tests: tests/test_pretrained.py, tests/test_families.py, tests/test_configs.py, against transformers.
"""

import json
import math
import sys
import tomllib
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path

from snug.options import SnugError, in_one_line, plain
from snug.options.typed import Fields
from snug.shape import GPTConfig, is_every

TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
NAMES, ROPES, FAMILIES, ONLY = (TABLE[name] for name in ("names", "ropes", "families", "only"))
HARMLESS = {*TABLE["harmless"].split()}
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel"}
ARCHITECTURES |= {name: family["architecture"] for name, family in FAMILIES.items()}
DEFAULTS = {field.name: field.default for field in fields(GPTConfig)}
OPTIONAL = {name for family in FAMILIES.values() for name in family.get("may_have", ())}
ORIGINAL = "original_max_position_embeddings"


def is_pretrained(folder: str | Path) -> bool:
    """Is it a Hugging Face folder, of a model or of adapters? Folders of runs and checkpoints have neither config."""
    names = "config.json", "adapter_config.json"
    return bool(folder) and any((Path(folder) / name).is_file() for name in names)


def read_config(folder: str | Path) -> dict:
    """config.json of a supported architecture. Raises SnugError."""
    path = Path(folder) / "config.json"
    with in_one_line(f"{path}: cannot be read"):
        config = json.loads(path.read_bytes())
    c = Fields(config, path)
    if c.get("model_type", str) == "gemma3":  # with eyes; what it reads is a gemma3_text
        config |= c.part("text_config").values | dict(model_type="gemma3_text")
    c.want("model_type", *ARCHITECTURES)
    if config.get("quantization_config"):
        raise SnugError(
            f"{path}: the weights are quantized; name the folder in bfloat16, with --base_dtype=nf4 for 4 bits"
        )
    return config


def stored_dtype(folder: str | Path) -> str | None:
    """The dtype of the weights, such as "bfloat16", as config.json says it."""
    config = read_config(folder)
    return config.get("dtype", config.get("torch_dtype"))


def read_shape(folder: str | Path):
    """A folder's config.json -> GPTConfig's keywords. Raises SnugError."""
    return shape_of(Fields(read_config(folder), Path(folder) / "config.json"))


def shape_of(c: Fields) -> dict:
    """The same of a content of config.json. Says which of its keys nobody knows."""
    family = c.values["model_type"]
    missing = FAMILIES.get(family, {}).get("missing", {})
    c = Fields(missing | c.values, c.path)
    if "use_sliding_window" in missing:  # it must be false: Qwen's files have a window, too
        c.values["sliding_window"] = None
    for name, values in (ONLY["all"] | ONLY.get(family, {})).items():
        c.want(name, *values)
    shape = gpt2_shape(c) if family == "gpt2" else llama_shape(c, family)
    with in_one_line(f"{c.path}: not the shape of a model"):
        GPTConfig(**shape)
    if unknown := c.unread() - HARMLESS:
        note(f"{c.path}: unknown to snug, and ignored: {', '.join(sorted(unknown))}")
    return shape


@cache  # each text once
def note(text: str):
    print(plain(text), file=sys.stderr)


def sizes(c, names, **optional):
    """-> {GPTConfig's name: value}. optional: what a value is where the file has none."""
    kinds = GPTConfig.__annotations__
    return {ours: c.get(theirs, kinds[ours], optional.get(ours)) for ours, theirs in names.items()}


def gpt2_shape(c) -> dict:
    hidden = 4 * c.get("n_embd", int)
    shape = sizes(c, NAMES["gpt2"], n_hidden=hidden, norm_eps=1e-5, tie_embeddings=True)
    return shape | dict(norm="layernorm", position="learned", mlp="gelu", bias=True)


def llama_shape(c, family: str) -> dict:
    """What a family cannot have is read, too, and refused: another class would compute it, and this one not."""
    heads = c.get("num_attention_heads", int)
    head_size = c.get("hidden_size", int) // heads
    shape = sizes(
        c, NAMES["llama"], n_kv_head=heads, head_size=head_size, norm_eps=1e-6, tie_embeddings=False
    )
    shape |= FAMILIES["llama"]["has"] | FAMILIES[family].get("has", {})
    may_have = {*FAMILIES[family].get("may_have", ())}
    interval = c.get("no_rope_layer_interval", int, 0)
    shape["nope_every"] = period(c, "no_rope_layers", (1, 0), interval)
    interval = c.get("sliding_window_pattern", int, 0)
    every = period(c, "layer_types", ("sliding_attention", "full_attention"), interval)
    if window := c.get("sliding_window", int, 0):
        shape |= dict(sliding_window=window, full_every=every)
    if "embedding_scale" in may_have:
        shape["embedding_scale"] = shape["n_embd"] ** 0.5
        shape["query_scale"] = (shape["head_size"] / c.get("query_pre_attn_scalar", int)) ** 0.5
    shape |= rope_shape(c, shape, "rope_sliding_theta" in may_have)
    for name in sorted(shape.keys() & OPTIONAL - may_have):
        if shape[name] != DEFAULTS[name]:
            raise SnugError(f"{c.path}: a {family} with {name}={shape[name]!r:.40} is not supported")
    return shape


def period(c, name: str, kinds: tuple, interval: int) -> int:
    """-> n if every n-th layer is of the second kind and no other; 0 if none is; without a list, the interval. Raises
    SnugError for another pattern."""
    if not (layers := c.get(name, list, [])):
        return interval
    count = min(c.get("num_hidden_layers", int), len(layers) + 1)  # a short list is refused
    n = layers.index(kinds[1]) + 1 if kinds[1] in layers[:count] else 0
    if layers[:count] != [kinds[is_every(layer, n)] for layer in range(count)]:
        raise SnugError(
            f"{c.path}: {name}={layers!r:.60} is not supported; name all layers: only every n-th may be of another kind"
        )
    return n


def rope_shape(c, shape, by_kind: bool) -> dict:
    """Newer files have all in rope_parameters, perhaps by kind of layer; older ones rope_theta and rope_scaling."""
    result = {}
    if not by_kind:
        rope = c.part("rope_scaling" if c.values.get("rope_scaling") else "rope_parameters")
    else:
        kinds = c.part("rope_parameters")
        sliding, rope = kinds.part("sliding_attention"), kinds.part("full_attention")
        sliding.want("rope_type", "default")
        base = c.get("rope_local_base_freq", float)
        result["rope_sliding_theta"] = sliding.get("rope_theta", float, base)
        rope.values |= c.get("rope_scaling", dict, {})
    kind = rope.values["rope_type"] = rope.get("rope_type", str, rope.get("type", str, "default"))
    rope.want("rope_type", "default", *ROPES)
    result["rope_theta"] = rope.get("rope_theta", float, c.get("rope_theta", float, 1e4))
    fraction = c.get("partial_rotary_factor", float, 1.0)
    result["rotary_fraction"] = rope.get("partial_rotary_factor", float, fraction)
    original = c.get(ORIGINAL, int, 0)
    if kind == "default":
        return result
    if original:
        rope.values[ORIGINAL] = original
    for ours, theirs in ROPES[kind].items():
        like = type(DEFAULTS[ours])
        result[ours] = rope.get(
            theirs, list if like is tuple else like, TABLE["rope_missing"].get(theirs)
        )
    return result | stretched(rope, kind, shape["block_size"], result)


def stretched(rope, kind: str, longest: int, result: dict) -> dict:
    """What a rule with a factor adds to `result`."""
    attention, original = 1.0, result.get("rope_original_block_size")
    factor = rope.get("factor", float, longest / original if kind == "longrope" else None)
    if factor < 1 or original == 1:
        raise SnugError(f"{rope.path}: factor={factor:g} or {ORIGINAL}={original} is too small")
    if kind == "longrope":
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
        result["block_size"] = min(longest, original)
    if kind == "yarn":
        rope.want("truncate", True)
        rope.want("mscale_all_dim", 0)
        # attn_factor: DeepSeek's; it multiplies the default, as vLLM reads it
        attention = (0.1 * math.log(factor) + 1) * rope.get("attn_factor", float, 1.0)
    if kind in ("longrope", "yarn"):
        attention = rope.get("attention_factor", float, attention)
    kind = "" if kind == "linear" else kind
    return dict(rope_type=kind, rope_factor=factor, rope_attention_factor=attention)


def family_of(c) -> str:
    """The architecture of `c`, a GPTConfig. Raises SnugError if there is none."""
    plain_heads = c.n_kv_head == c.n_head and c.head_size * c.n_head == c.n_embd and not c.qk_norm
    if (c.norm, c.position, c.mlp) == ("layernorm", "learned", "gelu") and plain_heads:
        return "gpt2"
    more = {name for name in OPTIONAL if getattr(c, name) != DEFAULTS[name]}
    for name, family in FAMILIES.items():
        has = FAMILIES["llama"]["has"] | family.get("has", {})
        alike = all(getattr(c, key) == value for key, value in has.items())
        if alike and more <= {*family.get("may_have", ())}:
            return name
    raise SnugError(f"no architecture of {', '.join(ARCHITECTURES)} has this shape: {c}")


def config_of(c, dtype: str):
    """GPTConfig -> the content of config.json for transformers 4 and 5, without padding ids (n_vocab and above)."""
    family = family_of(c)
    table = NAMES.get(family, NAMES["llama"])
    config = dict(architectures=[ARCHITECTURES[family]], model_type=family, torch_dtype=dtype)
    config |= {theirs: getattr(c, ours) for ours, theirs in table.items()}
    config["vocab_size"] = c.n_vocab
    if family == "gpt2":
        config["activation_function"] = "gelu_new"
    else:
        config |= llama_config(c, FAMILIES[family].get("may_have", ())) | rope_config(c)
    again = asdict(GPTConfig(**shape_of(Fields(json.loads(json.dumps(config)), family))))
    again |= dict(vocab_size=c.vocab_size, n_vocab=c.n_vocab)
    if family == "gpt2":  # it gets biases of 0
        again["bias"] = c.bias
    if other := [f"{name}={value}" for name, value in asdict(c).items() if value != again[name]]:
        raise SnugError(f"a {family}, the nearest architecture, cannot have {', '.join(other):.300}")
    return config


def llama_config(c, may_have) -> dict:
    config = dict(pad_token_id=None)  # transformers' own may be no token of this model
    if c.mlp == "geglu":
        config["hidden_activation"] = "gelu_pytorch_tanh"
        config["query_pre_attn_scalar"] = round(c.head_size / c.query_scale**2)
    else:
        config["hidden_act"] = "silu"
    # Classes have windows of their own where a file says nothing; those with two kinds of layers want a number.
    if "sliding_window" in may_have:
        config["sliding_window"] = c.sliding_window or (
            c.block_size if "full_every" in may_have else None
        )
    if "full_every" in may_have:
        kinds = "full_attention", "sliding_attention"
        config["layer_types"] = [kinds[c.slides(layer)] for layer in range(c.n_layer)]
    if c.nope_every:
        config["no_rope_layers"] = [int(c.rope(layer) != "") for layer in range(c.n_layer)]
    return config


def rope_config(c) -> dict:
    config = dict(rope_theta=c.rope_theta, partial_rotary_factor=c.rotary_fraction)
    kind, rope = c.rope_type or "linear", {}
    if c.rope_factor != 1 or c.rope_type:
        rope = dict(rope_type=kind, factor=c.rope_factor)
        rope |= {theirs: getattr(c, ours) for ours, theirs in ROPES[kind].items()}
        config["rope_scaling"] = rope
    if kind in ("yarn", "longrope"):
        rope["attention_factor"] = c.rope_attention_factor
    if kind == "longrope":
        config["original_max_position_embeddings"] = c.rope_original_block_size
        config["max_position_embeddings"] = round(c.rope_original_block_size * c.rope_factor)
    if c.rope_sliding_theta:  # transformers 5's OLMo 3 has a base of its own otherwise
        config["rope_local_base_freq"] = c.rope_sliding_theta
        plain = dict(rope_type="default", rope_theta=c.rope_theta)
        sliding = plain | dict(rope_theta=c.rope_sliding_theta)
        config["rope_parameters"] = dict(full_attention=plain | rope, sliding_attention=sliding)
    return config
