"""config.json <-> the shape of a GPT, for the families of ARCHITECTURES.

read_shape returns GPTConfig's keywords and refuses options that GPT does not have. `family_of` finds the family of a
shape: a Mistral without a window is written as a Llama. To add a family is to add its values here and, if its tensors
have other names, in tensors.py.

In a Qwen the first layers do not slide and the rest does: there block_size is at most the window, so that it never cuts
a sequence. With longrope it is at most the original context, for which the short factors are. Left out: the ranges of
sizes and of rope's numbers, which GPTConfig checks. Tests: tests/test_pretrained.py, tests/test_families.py.
"""

import json
import math
from dataclasses import fields
from pathlib import Path

from snug.options import SnugError, in_one_line
from snug.options.typed import Fields
from snug.shape import is_every

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
GPT2 = dict(  # GPTConfig's name and config.json's
    vocab_size="vocab_size",
    block_size="n_positions",
    n_layer="n_layer",
    n_head="n_head",
    n_embd="n_embd",
    n_hidden="n_inner",
    norm_eps="layer_norm_epsilon",
    tie_embeddings="tie_word_embeddings",
)
LLAMA = dict(  # the same of all others
    vocab_size="vocab_size",
    block_size="max_position_embeddings",
    n_layer="num_hidden_layers",
    n_head="num_attention_heads",
    n_kv_head="num_key_value_heads",
    n_embd="hidden_size",
    head_size="head_dim",
    n_hidden="intermediate_size",
    norm_eps="rms_norm_eps",
    tie_embeddings="tie_word_embeddings",
)
ORIGINAL = {"rope_original_block_size": ("original_max_position_embeddings", int)}
ATTENTION = {"rope_attention_factor": ("attention_factor", float, 1.0)}
LLAMA3_ROPE = ORIGINAL | {
    "rope_low_freq_factor": ("low_freq_factor", float),
    "rope_high_freq_factor": ("high_freq_factor", float),
}
YARN = ORIGINAL | ATTENTION
YARN |= {
    "rope_low_freq_factor": ("beta_slow", float, 1.0),
    "rope_high_freq_factor": ("beta_fast", float, 32.0),
}
LONGROPE = ORIGINAL | ATTENTION
LONGROPE |= {"rope_short_factor": ("short_factor", list), "rope_long_factor": ("long_factor", list)}
ROPES = {"linear": {}, "llama3": LLAMA3_ROPE, "yarn": YARN, "longrope": LONGROPE}  # what each has
PARTS = dict(  # what a Llama has
    norm="rmsnorm",
    zero_centered_norm=False,
    pre_norm=True,
    post_norm=False,
    position="rotary",
    mlp="swiglu",
    bias=False,
    qkv_bias=False,
    proj_bias=False,
    qk_norm=False,
    qk_norm_joint=False,
)
OLMO = dict(pre_norm=False, post_norm=True, qk_norm=True, qk_norm_joint=True)
GEMMA = dict(zero_centered_norm=True, post_norm=True, mlp="geglu", qk_norm=True)
SLIDING = "sliding_window", "full_every", "rope_sliding_theta"
# What others have, and the properties that they may have. The first that fits a shape is its family.
FAMILIES = {
    "llama": ({}, ()),
    "qwen2": (dict(qkv_bias=True), ()),
    "qwen3": (dict(qk_norm=True), ()),
    "olmo2": (OLMO, ()),
    "mistral": ({}, SLIDING[:1]),
    "smollm3": ({}, ("nope_every",)),
    "phi3": ({}, ("rotary_fraction", "rope_short_factor", "sliding_window")),
    "olmo3": (OLMO, SLIDING),
    "gemma3_text": (GEMMA, (*SLIDING, "embedding_scale", "query_scale")),
}
OPTIONAL = {name for _, names in FAMILIES.values() for name in names}
MISSING = {  # what these families' files may leave out
    "smollm3": dict(tie_word_embeddings=True),
    "gemma3_text": dict(
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        rope_theta=1e6,
    ),
}


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
    config = MISSING.get(config["model_type"], {}) | config
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
    shape = sizes(c, GPT2, n_hidden=hidden, norm_eps=1e-5, tie_embeddings=True)
    return shape | dict(norm="layernorm", position="learned", mlp="gelu", bias=True)


def llama_shape(c) -> dict:
    family = c.values["model_type"]
    c.want("hidden_act", "silu")
    c.want("hidden_activation", "gelu_pytorch_tanh")
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        c.want(name, False)
    c.want("final_logit_softcapping", 0)
    c.want("attn_logit_softcapping", 0)
    heads = c.get("num_attention_heads", int)
    head_size = 128 if family == "qwen3" else c.get("hidden_size", int) // heads
    shape = sizes(c, LLAMA, n_kv_head=heads, head_size=head_size, norm_eps=1e-6, tie_embeddings=False)
    shape |= PARTS | FAMILIES[family][0] | layers_shape(c, family)
    if family == "gemma3_text":
        shape["embedding_scale"] = shape["n_embd"] ** 0.5
        shape["query_scale"] = (shape["head_size"] / c.get("query_pre_attn_scalar", int, 256)) ** 0.5
    return shape | rope_shape(c, family, shape)


def layers_shape(c, family) -> dict:
    """Which layers see a window, and which have no positions."""
    layers = c.get("num_hidden_layers", int)
    if family == "smollm3":
        c.want("use_sliding_window", False)
        interval = c.get("no_rope_layer_interval", int, 4)
        marks = c.get("no_rope_layers", list, [int((i + 1) % interval > 0) for i in range(layers)])
        return dict(nope_every=period(c, "no_rope_layers", [not mark for mark in marks[:layers]]))
    window = c.values.get("sliding_window", 4096)
    slides = "sliding_window" in FAMILIES[family][1] or c.get("use_sliding_window", bool, False)
    if not slides or window is None:
        return {}
    window = c.get("sliding_window", int, 4096)
    if family.startswith("qwen"):
        return dict(block_size=min(c.get("max_position_embeddings", int), window))
    if "full_every" not in FAMILIES[family][1]:
        return dict(sliding_window=window)
    interval = c.get("sliding_window_pattern", int, 4 if family == "olmo3" else 6)
    default = [("sliding" if (i + 1) % interval else "full") + "_attention" for i in range(layers)]
    full = [kind == "full_attention" for kind in c.get("layer_types", list, default)]
    return dict(sliding_window=window, full_every=period(c, "layer_types", full))


def period(c, name, marks: list[bool]) -> int:
    """-> n if every n-th layer is marked and no other; 0 if none is. Raises SnugError for another pattern."""
    n = marks.index(True) + 1 if True in marks else 0
    if any(mark != is_every(layer, n) for layer, mark in enumerate(marks)):
        raise SnugError(f"{c.path}: {name} is not supported; only one layer in every n may differ")
    return n


def rope_shape(c, family, shape) -> dict:
    """Newer files have all in rope_parameters, perhaps by kind of layer; older ones rope_theta and rope_scaling."""
    kinds = c.get("rope_parameters", dict, {}) or c.get("rope_scaling", dict, {})
    values = kinds.get("full_attention", kinds)
    rope = Fields({"rope_type": values.get("type", "default")} | values, c.path)
    rope.want("rope_type", "default", *ROPES)
    kind = rope.values["rope_type"]
    theta = rope.get("rope_theta", float, c.get("rope_theta", float, 10000.0))
    result = dict(rope_theta=theta)
    if "rope_sliding_theta" in FAMILIES[family][1]:
        local = c.get("rope_local_base_freq", float, 10000.0 if family == "gemma3_text" else theta)
        sliding = Fields(kinds.get("sliding_attention", {}), c.path)
        sliding.want("rope_type", "default")
        result["rope_sliding_theta"] = sliding.get("rope_theta", float, local)
    if family == "phi3":
        fraction = c.get("partial_rotary_factor", float, 1.0)
        result["rotary_fraction"] = rope.get("partial_rotary_factor", float, fraction)
    if kind == "default":
        return result
    result["rope_type"] = "" if kind == "linear" else kind
    if kind == "longrope":
        return result | longrope_shape(c, rope, shape)
    factor = result["rope_factor"] = rope.get("factor", float)
    result |= {ours: rope.get(*theirs) for ours, theirs in ROPES[kind].items()}
    if kind == "yarn":
        rope.want("truncate", True)
        rope.want("mscale_all_dim", 0)
        attention = (0.1 * math.log(factor) + 1) * rope.get("attn_factor", float, 1.0)
        result["rope_attention_factor"] = rope.get("attention_factor", float, attention)
    return result


def longrope_shape(c, rope, shape) -> dict:
    longest = shape["block_size"]
    original = c.get("original_max_position_embeddings", int, longest)
    original = rope.get("original_max_position_embeddings", int, original)
    factor = rope.get("factor", float, longest / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return dict(
        block_size=min(longest, original),
        rope_factor=factor,
        rope_original_block_size=original,
        rope_attention_factor=rope.get("attention_factor", float, attention),
        rope_short_factor=tuple(rope.get("short_factor", list)),
        rope_long_factor=tuple(rope.get("long_factor", list)),
    )


def family_of(c) -> str:
    """The architecture of `c`, a GPTConfig. Raises SnugError if there is none."""
    plain_heads = c.n_kv_head == c.n_head and c.head_size * c.n_head == c.n_embd and not c.qk_norm
    if (c.norm, c.position, c.mlp) == ("layernorm", "learned", "gelu") and plain_heads:
        return "gpt2"
    defaults = {field.name: field.default for field in fields(c)}
    more = {name for name in OPTIONAL if getattr(c, name) != defaults[name]}
    for family, (parts, optional) in FAMILIES.items():
        alike = all(getattr(c, name) == value for name, value in (PARTS | parts).items())
        if alike and more <= {*optional}:
            return family
    raise SnugError(f"no architecture of {', '.join(ARCHITECTURES)} has this shape: {c}")


def config_of(c, dtype: str):
    """GPTConfig -> the content of config.json for transformers 4 and 5, without padding ids (n_vocab and above)."""
    family = family_of(c)
    table = GPT2 if family == "gpt2" else LLAMA
    config = dict(architectures=[ARCHITECTURES[family]], model_type=family, torch_dtype=dtype)
    config |= {theirs: getattr(c, ours) for ours, theirs in table.items()}
    config["vocab_size"] = c.n_vocab
    if family == "gpt2":
        return config | dict(activation_function="gelu_new")
    layers = range(c.n_layer)
    if family == "gemma3_text":
        config["hidden_activation"] = "gelu_pytorch_tanh"
        config["query_pre_attn_scalar"] = round(c.head_size / c.query_scale**2)
        config["sliding_window_pattern"] = c.full_every
    else:
        config["hidden_act"] = "silu"
    if family == "smollm3":
        config["no_rope_layers"] = [int(c.rope(layer) != "") for layer in layers]
    if c.sliding_window:
        config["sliding_window"] = c.sliding_window
    if c.full_every:
        config["layer_types"] = [
            "sliding_attention" if c.slides(i) else "full_attention" for i in layers
        ]
    if c.rotary_fraction != 1:
        config["partial_rotary_factor"] = c.rotary_fraction
    return config | rope_config(c)


def rope_config(c) -> dict:
    config = dict(rope_theta=c.rope_theta)
    if c.rope_sliding_theta:
        config["rope_local_base_freq"] = c.rope_sliding_theta
    kind = c.rope_type or "linear"
    numbers = {theirs: getattr(c, ours) for ours, (theirs, *_) in ROPES[kind].items()}
    if c.rope_factor != 1 or c.rope_type:
        config["rope_scaling"] = dict(rope_type=kind, factor=c.rope_factor) | numbers
    if kind == "longrope":
        original = c.rope_original_block_size
        config["original_max_position_embeddings"] = original
        config["max_position_embeddings"] = round(original * c.rope_factor)
    return config
