"""config.json <-> the shape of a GPT, for GPT-2 and the families of families.toml.

read_shape returns GPTConfig's keywords and refuses options that GPT does not have. `family_of` finds the family of a
shape; a Mistral without a window is written as a Llama. To add a family: a table in families.toml and, where its
tensors have other names, a line in tensors.py.

With longrope block_size is at most the original context, for which the short factors are. Left out: the ranges of sizes
and of rope's numbers, which GPTConfig checks; windows in some layers only, except in every n-th one.
Tests: tests/test_pretrained.py, tests/test_families.py, against transformers.
"""

import json
import math
import tomllib
from dataclasses import fields
from pathlib import Path

from snug.options import SnugError, in_one_line
from snug.options.typed import Fields
from snug.shape import GPTConfig, is_every

TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
NAMES, ROPES, FAMILIES = TABLE["names"], TABLE["ropes"], TABLE["families"]
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel"}
ARCHITECTURES |= {name: family["architecture"] for name, family in FAMILIES.items()}
DEFAULTS = {field.name: field.default for field in fields(GPTConfig)}
# What a GPT does not have
REFUSED = """attention_bias mlp_bias use_sliding_window use_bidirectional_attention final_logit_softcapping
attn_logit_softcapping"""


def is_pretrained(folder: str | Path) -> bool:
    """Is it a Hugging Face folder, of a model or of adapters? Folders of runs and checkpoints have neither config."""
    names = "config.json", "adapter_config.json"
    return bool(folder) and any((Path(folder) / name).is_file() for name in names)


def read_config(folder: str | Path) -> dict:
    """config.json of a supported architecture. Raises SnugError."""
    path = Path(folder) / "config.json"
    with in_one_line(f"{path}: cannot be read"):
        config = {"model_type": ""} | json.loads(path.read_bytes())
    if config["model_type"] == "gemma3":  # with eyes; what it reads is a gemma3_text
        config |= config["text_config"] | dict(model_type="gemma3_text")
    Fields(config, path).want("model_type", *ARCHITECTURES)
    if quantization := Fields(config, path).get("quantization_config", dict, {}):
        quantized = Fields(
            {"bnb_4bit_quant_type": "fp4"} | quantization, f"{path}: quantization_config"
        )
        quantized.want("quant_method", "bitsandbytes")
        quantized.want("bnb_4bit_quant_type", "nf4")
    return config


def double_quant(folder: str | Path) -> bool | None:
    """Are the scales of a folder in NF4 quantized, too? None: the folder is not quantized. Raises SnugError."""
    quantization = read_config(folder).get("quantization_config")
    return bool(quantization.get("bnb_4bit_use_double_quant")) if quantization else None


def stored_dtype(folder: str | Path) -> str | None:
    """The dtype of the weights, such as "bfloat16", as config.json says it."""
    config = read_config(folder)
    return config.get("dtype", config.get("torch_dtype"))


def read_shape(folder: str | Path):
    """A folder's config.json -> GPTConfig's keywords. Raises SnugError."""
    return shape_of(Fields(read_config(folder), Path(folder) / "config.json"))


def shape_of(c: Fields) -> dict:
    """The same of a content of config.json."""
    return gpt2_shape(c) if c.values["model_type"] == "gpt2" else llama_shape(c)


def sizes(c, names, **optional):
    """-> {GPTConfig's name: value}. optional: what a value is where the file has none; others are counts."""
    kinds = {ours: type(optional.get(ours, 0)) for ours in names}
    return {ours: c.get(theirs, kinds[ours], optional.get(ours)) for ours, theirs in names.items()}


def gpt2_shape(c) -> dict:
    c.want("activation_function", "gelu_new", "gelu_pytorch_tanh")
    c.want("scale_attn_by_inverse_layer_idx", False)
    hidden = 4 * c.get("n_embd", int)
    shape = sizes(c, NAMES["gpt2"], n_hidden=hidden, norm_eps=1e-5, tie_embeddings=True)
    return shape | dict(norm="layernorm", position="learned", mlp="gelu", bias=True)


def llama_shape(c) -> dict:
    family = FAMILIES[c.values["model_type"]]
    c = Fields(family.get("missing", {}) | c.values, c.path)
    c.want("hidden_act", "silu")
    c.want("hidden_activation", "gelu_pytorch_tanh")
    for name in REFUSED.split():
        c.want(name, False)
    heads = c.get("num_attention_heads", int)
    head_size = c.get("hidden_size", int) // heads
    shape = sizes(
        c, NAMES["llama"], n_kv_head=heads, head_size=head_size, norm_eps=1e-6, tie_embeddings=False
    )
    shape |= FAMILIES["llama"]["has"] | family.get("has", {})
    may_have = family.get("may_have", ())
    if "nope_every" in may_have:
        interval = c.get("no_rope_layer_interval", int)
        marks = [mark == 0 for mark in c.values.get("no_rope_layers") or ()]
        shape["nope_every"] = period(c, marks, interval)
    if "sliding_window" in may_have and c.values.get("sliding_window"):
        shape["sliding_window"] = c.get("sliding_window", int)
    if "full_every" in may_have:
        interval = c.get("sliding_window_pattern", int)
        marks = [kind == "full_attention" for kind in c.values.get("layer_types") or ()]
        shape["full_every"] = period(c, marks, interval)
    if "embedding_scale" in may_have:
        shape["embedding_scale"] = shape["n_embd"] ** 0.5
        shape["query_scale"] = (shape["head_size"] / c.get("query_pre_attn_scalar", int)) ** 0.5
    return shape | rope_shape(c, shape, may_have)


def period(c, marks: list[bool], interval: int) -> int:
    """-> n if every n-th layer is marked and no other; 0 if none is; without marks, the interval. Raises SnugError for
    another pattern."""
    marks = marks[: c.get("num_hidden_layers", int)]
    if not marks:
        return interval
    n = marks.index(True) + 1 if True in marks else 0
    if any(mark != is_every(layer, n) for layer, mark in enumerate(marks)):
        raise SnugError(f"{c.path}: layers of two kinds are not supported, except one layer in every n")
    return n


def rope_shape(c, shape, may_have) -> dict:
    """Newer files have all in rope_parameters, perhaps by kind of layer; older ones rope_theta and rope_scaling."""
    kinds = c.get("rope_parameters", dict, {}) or c.get("rope_scaling", dict, {})
    values = kinds.get("full_attention", kinds)
    top = dict(
        rope_theta=10000.0, rope_type=values.get("type", "default"), beta_slow=1.0, beta_fast=32.0
    )
    rope = Fields(top | c.values | values, c.path)
    rope.want("rope_type", "default", *ROPES)
    kind = rope.values["rope_type"]
    result = dict(rope_theta=rope.get("rope_theta", float))
    if "rope_sliding_theta" in may_have:
        sliding = Fields(kinds.get("sliding_attention", {}), c.path)
        sliding.want("rope_type", "default")
        local = c.get("rope_local_base_freq", float, result["rope_theta"])
        result["rope_sliding_theta"] = sliding.get("rope_theta", float, local)
    if "rotary_fraction" in may_have:
        result["rotary_fraction"] = rope.get("partial_rotary_factor", float, 1.0)
    if kind == "default":
        return result
    for ours, theirs in ROPES[kind].items():
        like = type(DEFAULTS[ours])
        result[ours] = rope.get(theirs, list if like is tuple else like)
    attention = 1.0
    if kind == "longrope":
        longest, original = shape["block_size"], result["rope_original_block_size"]
        factor = rope.get("factor", float, longest / original)
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
        result["block_size"] = min(longest, original)
    else:
        factor = rope.get("factor", float)
    if kind == "yarn":
        rope.want("truncate", True)
        rope.want("mscale_all_dim", 0)
        # attn_factor: DeepSeek's; it multiplies the default, as vLLM reads it
        attention = (0.1 * math.log(factor) + 1) * rope.get("attn_factor", float, 1.0)
    attention = rope.get("attention_factor", float, attention)
    kind = "" if kind == "linear" else kind
    return result | dict(rope_type=kind, rope_factor=factor, rope_attention_factor=attention)


def family_of(c) -> str:
    """The architecture of `c`, a GPTConfig. Raises SnugError if there is none."""
    plain_heads = c.n_kv_head == c.n_head and c.head_size * c.n_head == c.n_embd and not c.qk_norm
    if (c.norm, c.position, c.mlp) == ("layernorm", "learned", "gelu") and plain_heads:
        return "gpt2"
    optional = {name for family in FAMILIES.values() for name in family.get("may_have", ())}
    more = {name for name in optional if getattr(c, name) != DEFAULTS[name]}
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
    again = behaviour(GPTConfig(**shape_of(Fields(json.loads(json.dumps(config)), family))))
    if other := [f"{k}={v}" for k, v in behaviour(c).items() if v != again[k]]:
        raise SnugError(f"a {family}, the nearest architecture, cannot have {', '.join(other):.300}")
    return config


def llama_config(c, may_have) -> dict:
    config = dict(pad_token_id=None)  # transformers' own may be no token of this model
    layers = range(c.n_layer)
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
        config["layer_types"] = [
            "sliding_attention" if c.slides(i) else "full_attention" for i in layers
        ]
    if c.nope_every:
        config["no_rope_layers"] = [int(c.rope(layer) != "") for layer in layers]
    return config


def behaviour(c) -> dict:
    """What an export keeps of a shape: windows and positions layer by layer, no sizes of vocabularies. A GPT-2 has
    biases."""
    layers, gpt2 = range(c.n_layer), c.position == "learned"
    ropes = [c.rope(i) for i in layers]
    result = vars(c) | dict(sliding_window=[c.window(i) for i in layers], nope_every=ropes)
    if "sliding" not in ropes:
        result["rope_sliding_theta"] = 0
    no_part = ("vocab", "full_every", *(("bias", "rope", "rotary") if gpt2 else ()))
    return {name: value for name, value in result.items() if not any(part in name for part in no_part)}


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
