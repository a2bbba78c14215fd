"""config.json <-> the shape of a GPT, for GPT-2, Llama, Mistral, Qwen2 (and 2.5) and Qwen3.

read_shape returns GPTConfig's keywords and refuses options that GPT does not have. With a sliding window, block_size is
at most the window, so that it never cuts a sequence. A Mistral is written as a Llama. Left out: the ranges of sizes and
of rope's numbers, which GPTConfig checks. Tests: tests/test_pretrained.py, against transformers.
"""

import json
from pathlib import Path

from snug.options import SnugError, in_one_line
from snug.options.typed import Fields

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
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
LLAMA = dict(  # the same of Llama, Mistral, Qwen2 and Qwen3
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
LLAMA3_ROPE = {
    "rope_original_block_size": ("original_max_position_embeddings", int),
    "rope_low_freq_factor": ("low_freq_factor", float),
    "rope_high_freq_factor": ("high_freq_factor", float),
}
FAMILIES = {(0, 0): "llama", (1, 0): "qwen2", (0, 1): "qwen3"}  # (qkv_bias, qk_norm) -> who has them


def is_pretrained(folder: str | Path) -> bool:
    """Is it a Hugging Face folder, of a model or of adapters? Folders of runs and checkpoints have neither config."""
    names = "config.json", "adapter_config.json"
    return bool(folder) and any((Path(folder) / name).is_file() for name in names)


def read_config(folder: str | Path) -> dict:
    """config.json of a supported architecture. Raises SnugError."""
    path = Path(folder) / "config.json"
    with in_one_line(f"{path}: cannot be read"):
        config = {"model_type": ""} | json.loads(path.read_bytes())
    fields = Fields(config, path)
    fields.want("model_type", *ARCHITECTURES)
    if quantization := fields.get("quantization_config", dict, {}):
        fields = Fields({"bnb_4bit_quant_type": "fp4"} | quantization, f"{path}: quantization_config")
        fields.want("quant_method", "bitsandbytes")
        fields.want("bnb_4bit_quant_type", "nf4")
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
    c.want("attention_bias", False)
    c.want("mlp_bias", False)
    heads = c.get("num_attention_heads", int)
    head_size = 128 if family == "qwen3" else c.get("hidden_size", int) // heads
    shape = sizes(c, LLAMA, n_kv_head=heads, head_size=head_size, norm_eps=1e-6, tie_embeddings=False)
    slides = family == "mistral" or c.get("use_sliding_window", bool, False)
    if slides and c.values.get("sliding_window", 4096) is not None:
        shape["block_size"] = min(shape["block_size"], c.get("sliding_window", int, 4096))
    parts = dict(
        norm="rmsnorm",
        position="rotary",
        mlp="swiglu",
        bias=False,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    return shape | parts | rope_shape(c)


def rope_shape(c) -> dict:
    """Newer files have all in rope_parameters; older ones have rope_theta and rope_scaling at the top."""
    values = c.get("rope_parameters", dict, {}) or c.get("rope_scaling", dict, {})
    rope = Fields({"rope_type": values.get("type", "default")} | values, c.path)
    rope.want("rope_type", "default", "linear", "llama3")
    kind = rope.values["rope_type"]
    shape = dict(rope_theta=rope.get("rope_theta", float, c.get("rope_theta", float, 10000.0)))
    if kind != "default":
        shape["rope_factor"] = rope.get("factor", float)
    if kind == "llama3":
        shape |= {ours: rope.get(*theirs) for ours, theirs in LLAMA3_ROPE.items()}
    return shape


def family_of(c) -> str:
    """The architecture of `c`, a GPTConfig. Raises SnugError if there is none."""
    kind = c.norm, c.position, c.mlp
    plain_heads = c.n_kv_head == c.n_head and c.head_size * c.n_head == c.n_embd and not c.qk_norm
    if kind == ("layernorm", "learned", "gelu") and plain_heads:
        return "gpt2"
    family = FAMILIES.get((c.qkv_bias, c.qk_norm))
    if kind == ("rmsnorm", "rotary", "swiglu") and family and not (c.bias or c.proj_bias):
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
    config |= dict(hidden_act="silu", rope_theta=c.rope_theta)
    if c.rope_original_block_size:
        numbers = {theirs: getattr(c, ours) for ours, (theirs, _) in LLAMA3_ROPE.items()}
        config["rope_scaling"] = dict(rope_type="llama3", factor=c.rope_factor) | numbers
    elif c.rope_factor != 1:
        config["rope_scaling"] = dict(rope_type="linear", factor=c.rope_factor)
    return config
