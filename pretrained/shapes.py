"""TODO"""

import json
from pathlib import Path

from options import SnugError

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def is_pretrained(folder):
    """Is it a folder as Hugging Face lays them out? A run's and a checkpoint's have no config.json."""
    return bool(folder) and (Path(folder) / "config.json").is_file()


# config.json -> a shape


def read_config(folder):
    """config.json -> dict, of a supported architecture. Raises SnugError."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SnugError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(config, dict):
        raise SnugError(f"{path}: is not an object")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        named = f"model_type={family!r:.40}, architectures={config.get('architectures')!r:.60}"
        raise SnugError(f"{path}: {named} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if config.get("quantization_config") is not None:
        raise SnugError(
            f"{path}: has quantization_config; quantised weights are not supported, take the folder with the bf16 ones"
        )
    return config


def stored_dtype(folder):
    """What config.json says that the weights are in, such as "bfloat16", or None."""
    config = read_config(folder)
    return config.get("dtype", config.get("torch_dtype"))


class Fields:
    """Looks into a config, refusing what has the wrong type or a value that the model would not do."""

    def __init__(self, config, path):
        self.config, self.path = config, path

    def get(self, name, kind, default=None):
        value = self.config.get(name)
        value = default if value is None else value
        right = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not right or kind is int and not 0 < value < 2**31 or kind is float and not 0 < value < 1e30:
            raise SnugError(
                f"{self.path}: {name}={value!r:.40} is not {dict(int='a count', float='a positive number').get(kind.__name__, kind.__name__)}"
            )
        return value

    def want(self, name, *values):
        """Only these values of an option are supported, the first of them where it is not given."""
        value = self.config.get(name)
        if value is not None and value not in values:
            raise SnugError(
                f"{self.path}: {name}={value!r:.60} is not supported; only {' or '.join(map(repr, values))}"
            )


def read_shape(folder):
    """A folder's config.json -> GPTConfig's keywords, without torch. Raises SnugError."""
    config, path = read_config(folder), Path(folder) / "config.json"
    c = Fields(config, path)
    shape = gpt2_shape(c) if config["model_type"] == "gpt2" else llama_shape(c, config["model_type"])
    if shape["n_embd"] % shape["n_head"] and not shape.get("head_size"):
        raise SnugError(f"{path}: hidden size {shape['n_embd']} is no multiple of {shape['n_head']} heads")
    if shape["position"] == "rotary" and shape["head_size"] % 2:
        raise SnugError(f"{path}: heads of {shape['head_size']} numbers cannot be turned in pairs")
    if shape["n_layer"] >= 10_000:
        raise SnugError(f"{path}: {shape['n_layer']} layers are too many")
    return shape


def gpt2_shape(c):
    c.want("activation_function", "gelu_new", "gelu_pytorch_tanh")
    for name, only in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        c.want(name, only)
    n_embd = c.get("n_embd", int, 768)
    return dict(
        vocab_size=c.get("vocab_size", int),
        block_size=c.get("n_positions", int, 1024),
        n_layer=c.get("n_layer", int, 12),
        n_head=c.get("n_head", int, 12),
        n_embd=n_embd,
        n_hidden=c.get("n_inner", int, 4 * n_embd),
        norm="layernorm",
        norm_eps=c.get("layer_norm_epsilon", float, 1e-5),
        position="learned",
        mlp="gelu",
        bias=True,
        tie_embeddings=c.get("tie_word_embeddings", bool, True),
    )


def llama_shape(c, family):
    c.want("hidden_act", "silu")
    c.want("use_sliding_window", False)
    if any(kind != "full_attention" for kind in c.get("layer_types", list, [])):
        raise SnugError(
            f"{c.path}: layer_types has other layers than full_attention; sliding windows are not supported"
        )
    biases = family == "qwen2", c.get("attention_bias", bool, False), c.get("mlp_bias", bool, False)
    if biases[1] != biases[2] or family != "llama" and biases[1]:
        raise SnugError(f"{c.path}: attention_bias={biases[1]} with mlp_bias={biases[2]} is not supported in {family}")
    n_head, n_embd = c.get("num_attention_heads", int), c.get("hidden_size", int)
    return dict(
        vocab_size=c.get("vocab_size", int),
        block_size=c.get("max_position_embeddings", int, 2048),
        n_layer=c.get("num_hidden_layers", int),
        n_head=n_head,
        n_kv_head=c.get("num_key_value_heads", int, n_head if family == "llama" else 32),
        n_embd=n_embd,
        head_size=c.get("head_dim", int, 128 if family == "qwen3" else max(1, n_embd // n_head)),
        n_hidden=c.get("intermediate_size", int),
        norm="rmsnorm",
        norm_eps=c.get("rms_norm_eps", float, 1e-6),
        position="rotary",
        mlp="swiglu",
        bias=biases[1],
        qkv_bias=biases[0],
        qk_norm=family == "qwen3",
        tie_embeddings=c.get("tie_word_embeddings", bool, False),
        **rope_shape(c),
    )


def rope_shape(c):
    """rope_theta and rope_scaling at the top, as older versions have them, or both in rope_parameters."""
    found = c.get("rope_parameters", dict, {}) or c.get("rope_scaling", dict, {})
    rope = Fields(found, f"{c.path}: rope scaling")
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise SnugError(f"{c.path}: rope_type={kind!r:.40} is not supported; only default, linear and llama3")
    shape = dict(rope_theta=float(rope.get("rope_theta", float, c.get("rope_theta", float, 10000.0))))
    if kind == "default":
        return shape
    shape["rope_factor"] = float(rope.get("factor", float))
    if kind == "llama3":
        shape["rope_original_block_size"] = rope.get("original_max_position_embeddings", int)
        shape["rope_low_freq_factor"] = float(rope.get("low_freq_factor", float))
        shape["rope_high_freq_factor"] = float(rope.get("high_freq_factor", float))
    return shape


# A shape -> config.json


def family_of(c):
    """The architecture that has a GPTConfig's parts. Raises SnugError where none has."""
    parts = c.norm, c.position, c.mlp
    if (
        parts == ("layernorm", "learned", "gelu")
        and c.n_kv_head == c.n_head
        and c.head_size * c.n_head == c.n_embd
        and not c.qk_norm
    ):
        return "gpt2"
    if (
        parts == ("rmsnorm", "rotary", "swiglu")
        and not (c.bias and (c.qk_norm or c.qkv_bias))
        and not (c.qk_norm and c.qkv_bias)
    ):
        return "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "llama"
    said = ", ".join(
        f"{name}={getattr(c, name)}" for name in ("norm", "position", "mlp", "bias", "qkv_bias", "qk_norm", "n_kv_head")
    )
    raise SnugError(f"no architecture of {', '.join(ARCHITECTURES)} has {said}")


def config_of(c, dtype):
    """GPTConfig -> config.json's dict, which transformers 4 and 5 read alike. Ids from n_vocab on, which have probability 0, are left out."""
    family = family_of(c)
    shared = dict(architectures=[ARCHITECTURES[family]], model_type=family, torch_dtype=dtype, vocab_size=c.n_vocab)
    shared["tie_word_embeddings"] = c.tie_embeddings
    if family == "gpt2":
        own = dict(n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, n_inner=c.n_hidden)
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return shared | own | dropout | dict(layer_norm_epsilon=c.norm_eps, activation_function="gelu_new")
    own = dict(
        hidden_size=c.n_embd,
        intermediate_size=c.n_hidden,
        num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head,
        num_key_value_heads=c.n_kv_head,
        head_dim=c.head_size,
        max_position_embeddings=c.block_size,
        rms_norm_eps=c.norm_eps,
        hidden_act="silu",
        rope_theta=c.rope_theta,
    )
    if family == "llama":
        own |= dict(attention_bias=c.bias, mlp_bias=c.bias)
    if c.rope_original_block_size:
        factors = dict(
            factor=c.rope_factor, low_freq_factor=c.rope_low_freq_factor, high_freq_factor=c.rope_high_freq_factor
        )
        own["rope_scaling"] = (
            dict(rope_type="llama3", original_max_position_embeddings=c.rope_original_block_size) | factors
        )
    elif c.rope_factor != 1:
        own["rope_scaling"] = dict(rope_type="linear", type="linear", factor=c.rope_factor)
    return shared | own
