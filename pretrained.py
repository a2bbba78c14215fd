"""Hugging Face folders in and out: config.json and *.safetensors <-> a GPT. GPT-2, Llama, Qwen2 (and 2.5) and Qwen3.

    model = load_pretrained("models/Qwen2.5-0.5B")
    save_pretrained(model, "export/mine", tokenizer)
    python pretrained.py out/grpo_gsm8k --to=export/mine      # a run's newest checkpoint as such a folder, adapters merged

Which numbers of config.json make which shape, and which tensor is which rows of which parameter, is `read_shape` and `entries`;
one table serves both directions. Every name, shape and type is looked at before a byte of a tensor is read, without torch. Tensors
are copied one by one into the parameters, cast on the way. safetensors only: a folder that has pickles alone is refused.

Left out: quantised weights, sliding windows, YaRN, mixtures of experts, other architectures.
"""

import hashlib
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from settings import SnugError

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PREFIX = {"gpt2": "transformer."}  # of all names but the head's; "model." elsewhere. A folder may leave it out
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_SHARD_BYTES = 2 * 2**30  # what saving copies at a time
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # constants that older versions wrote beside the weights


def is_pretrained(folder):
    """Is it a folder as Hugging Face lays them out? A run's and a checkpoint's have no config.json."""
    return bool(folder) and (Path(folder) / "config.json").is_file()


# ----------------------------------------------------------------------------------------------------------------------
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
        raise SnugError(f"{path}: has quantization_config; quantised weights are not supported, take the folder with the bf16 ones")
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
            raise SnugError(f"{self.path}: {name}={value!r:.60} is not supported; only {' or '.join(map(repr, values))}")


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
    for name, only in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
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
        raise SnugError(f"{c.path}: layer_types has other layers than full_attention; sliding windows are not supported")
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


# ----------------------------------------------------------------------------------------------------------------------
# A shape -> config.json


def family_of(c):
    """The architecture that has a GPTConfig's parts. Raises SnugError where none has."""
    parts = c.norm, c.position, c.mlp
    if parts == ("layernorm", "learned", "gelu") and c.n_kv_head == c.n_head and c.head_size * c.n_head == c.n_embd and not c.qk_norm:
        return "gpt2"
    if parts == ("rmsnorm", "rotary", "swiglu") and not (c.bias and (c.qk_norm or c.qkv_bias)) and not (c.qk_norm and c.qkv_bias):
        return "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "llama"
    said = ", ".join(f"{name}={getattr(c, name)}" for name in ("norm", "position", "mlp", "bias", "qkv_bias", "qk_norm", "n_kv_head"))
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
        factors = dict(factor=c.rope_factor, low_freq_factor=c.rope_low_freq_factor, high_freq_factor=c.rope_high_freq_factor)
        own["rope_scaling"] = dict(rope_type="llama3", original_max_position_embeddings=c.rope_original_block_size) | factors
    elif c.rope_factor != 1:
        own["rope_scaling"] = dict(rope_type="linear", type="linear", factor=c.rope_factor)
    return shared | own


# ----------------------------------------------------------------------------------------------------------------------
# Which tensor is what


class Entry(NamedTuple):
    """A tensor of a folder: `shape` there, rows from `start` on of the parameter `ours` (None: all of it), transposed in GPT-2."""

    name: str
    shape: tuple
    ours: str
    start: int | None = None
    transposed: bool = False


def entries(shape, family, vocab_size):
    """Every tensor of a folder -> list of Entry. shape: GPTConfig's numbers, by name, all of them given but n_vocab.

    q_proj, k_proj and v_proj are rows of attention.qkv: with 4 query heads, 2 key heads and a head_size of 8, rows 0, 32 and 48 on.
    """
    C, F, D = shape["n_embd"], shape["n_hidden"], shape.get("head_size") or shape["n_embd"] // shape["n_head"]
    prefix, found = PREFIX.get(family, "model."), []

    def add(name, ours, out, into, bias=False, start=None, transposed=False):
        size = (into, out) if transposed else (out, into)
        found.append(Entry(f"{prefix}{name}.weight", size if into else (out,), f"{ours}.weight", start, transposed))
        if bias:
            found.append(Entry(f"{prefix}{name}.bias", (out,), f"{ours}.bias", start))

    def gpt2_block(i):
        theirs, ours = f"h.{i}", f"blocks.{i}"
        add(f"{theirs}.ln_1", f"{ours}.norm_1", C, 0, True)
        add(f"{theirs}.attn.c_attn", f"{ours}.attention.qkv", 3 * C, C, True, transposed=True)
        add(f"{theirs}.attn.c_proj", f"{ours}.attention.proj", C, C, True, transposed=True)
        add(f"{theirs}.ln_2", f"{ours}.norm_2", C, 0, True)
        add(f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", F, C, True, transposed=True)
        add(f"{theirs}.mlp.c_proj", f"{ours}.mlp.down", C, F, True, transposed=True)

    def llama_block(i):
        theirs, ours, bias = f"layers.{i}", f"blocks.{i}", shape["bias"]
        queries, keys = shape["n_head"] * D, (shape.get("n_kv_head") or shape["n_head"]) * D
        add(f"{theirs}.input_layernorm", f"{ours}.norm_1", C, 0)
        for name, size, start in (("q", queries, 0), ("k", keys, queries), ("v", keys, queries + keys)):
            add(f"{theirs}.self_attn.{name}_proj", f"{ours}.attention.qkv", size, C, bias or shape["qkv_bias"], start)
        add(f"{theirs}.self_attn.o_proj", f"{ours}.attention.proj", C, queries, bias)
        for name in ("q", "k") if shape["qk_norm"] else ():
            add(f"{theirs}.self_attn.{name}_norm", f"{ours}.attention.{name}_norm", D, 0)
        add(f"{theirs}.post_attention_layernorm", f"{ours}.norm_2", C, 0)
        add(f"{theirs}.mlp.gate_proj", f"{ours}.mlp.up", F, C, bias, 0)
        add(f"{theirs}.mlp.up_proj", f"{ours}.mlp.up", F, C, bias, F)
        add(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", C, F, bias)

    gpt2 = family == "gpt2"
    add("wte" if gpt2 else "embed_tokens", "embedding", vocab_size, C)
    if gpt2:
        add("wpe", "position", shape["block_size"], C)
    for i in range(shape["n_layer"]):
        (gpt2_block if gpt2 else llama_block)(i)
    add("ln_f" if gpt2 else "norm", "norm", C, 0, gpt2)
    if not shape["tie_embeddings"]:
        found.append(Entry("lm_head.weight", (vocab_size, C), "head.weight"))
    return found


def weight_files(folder):
    """-> {tensor's name: its file}, by the index, or of the one file. Raises SnugError."""
    folder = Path(folder)
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file() and not file.is_file():  # transformers prefers the one file, too
        try:
            where = json.loads(index.read_text())["weight_map"]
            plain = all(isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors") for file in where.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SnugError(f"{index}: cannot be read ({type(error).__name__}: {error})") from None
        if not plain:
            raise SnugError(f"{index}: weight_map names something else than *.safetensors files of this folder")
        return {name: folder / file for name, file in where.items()}
    if not file.is_file():
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        why = f"; {pickles[0]} is a pickle, which is never loaded: convert it to safetensors" if pickles else ""
        raise SnugError(f"{folder}: has no model.safetensors and no model.safetensors.index.json{why}")
    with opened(file) as tensors:
        return dict.fromkeys(tensors.keys(), file)


def opened(file, framework="numpy"):
    try:
        return safe_open(str(file), framework=framework)
    except (OSError, ValueError, SafetensorError) as error:  # a name that is no file's is a ValueError
        raise SnugError(f"{file.parent}: {file.name!a} cannot be read ({error}); fetch it again") from None


def look_at_weights(folder):
    """Has the folder every tensor of its config's shape, in that shape and a known type, and no other? -> {Entry: (name, file)}.

    Names may lack the prefix. Surplus are tensors that nobody would miss: not those constants that older versions wrote, nor the
    head's where the embedding is the head. Raises SnugError, naming what is missing or surplus.
    """
    family, shape, where = read_config(folder)["model_type"], read_shape(folder), weight_files(folder)
    prefix = PREFIX.get(family, "model.")
    bare = {name.removeprefix(prefix): name for name in where}
    wanted = {entry.name.removeprefix(prefix): entry for entry in entries(shape, family, shape["vocab_size"])}
    ignored = {name for name in bare if name.endswith(BUFFERS) or name == "lm_head.weight" and shape["tie_embeddings"]}
    missing = [wanted[name].name for name in wanted if name not in bare]
    surplus = [bare[name] for name in sorted(bare) if name not in wanted and name not in ignored]
    if missing or surplus or len(bare) < len(where):
        parts = [f"{what} {len(names)} ({', '.join(names[:3])})" for what, names in (("missing", missing), ("surplus", surplus)) if names]
        raise SnugError(f"{folder}: its tensors are not those of a {family} of its config.json: {', '.join(parts) or 'names twice'}")
    found = {}
    for file in sorted(set(where.values())):
        with opened(file) as tensors:
            there = set(tensors.keys())
            for name, entry in wanted.items():
                if where[bare[name]] == file:
                    if bare[name] not in there:
                        raise SnugError(f"{file}: has no {bare[name]}, which the index says is there")
                    look_at_tensor(tensors.get_slice(bare[name]), entry, bare[name], file)
                    found[entry] = bare[name], file
    return found


def look_at_tensor(tensor, entry, name, file):
    if tuple(tensor.get_shape()) != entry.shape:
        raise SnugError(f"{file}: {name} has shape {tuple(tensor.get_shape())}, config.json says {entry.shape}")
    if tensor.get_dtype() not in DTYPES:
        raise SnugError(f"{file}: {name} is of type {tensor.get_dtype()}; supported are {', '.join(DTYPES.values())}")


# ----------------------------------------------------------------------------------------------------------------------
# Weights in


def load_pretrained(folder, device="cpu", dtype="float32", **overrides):
    """A folder -> GPT on `device`, its weights in `dtype`. overrides: of the shape, such as n_vocab. Raises SnugError."""
    from checkpoint import make_model

    look_at_weights(folder)
    model = make_model(read_shape(folder) | overrides, device, dtype)
    read_weights(folder, model)
    return model


def read_weights(folder, model):
    """Copy a folder's tensors into the parameters of a GPT of its shape, one by one, cast to their type. Raises SnugError."""
    import torch

    found, parameters = look_at_weights(folder), dict(model.named_parameters())
    refuse_other_shapes(folder, found, parameters)
    for file in sorted({file for _, file in found.values()}):
        with opened(file, "pt") as tensors, torch.no_grad():
            for entry, (name, its_file) in found.items():
                if its_file == file:
                    tensor = tensors.get_tensor(name)
                    part(parameters[entry.ours], entry).copy_(tensor.t() if entry.transposed else tensor)


def part(parameter, entry):
    """The rows of a parameter that an entry is."""
    size = entry.shape[1] if entry.transposed else entry.shape[0]
    return parameter if entry.start is None else parameter[entry.start : entry.start + size]


def refuse_other_shapes(folder, found, parameters):
    names = {entry.ours for entry in found}
    if names != set(parameters):
        raise SnugError(f"{folder}: has other parameters than the model: {', '.join(sorted(names ^ set(parameters))[:3])}")
    for entry in found:
        theirs = entry.shape[::-1] if entry.transposed else entry.shape
        ours = tuple(part(parameters[entry.ours], entry).shape)
        if ours != theirs:
            raise SnugError(f"{folder}: {entry.name} is {theirs}, the model's {entry.ours} {ours}")


def fingerprint(folder):
    """SHA-256 of config.json and of each weight file's length and 16 pieces of 64 KiB: other weights differ everywhere."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for file in sorted(set(weight_files(folder).values())):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for piece in range(16):
                stream.seek(piece * size // 16)
                digest.update(stream.read(2**16))
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Weights out


def save_pretrained(model, folder, tokenizer=None, dtype=None):
    """Write a folder that transformers' AutoModelForCausalLM (and AutoTokenizer, given a Tokenizer) load. Raises SnugError.

    dtype: "float32" or "bfloat16"; default: the weights' own. The folder must not exist, or be empty; it appears whole, or not at all.
    Models of GPT-2's parts without biases get biases of 0. Files are of at most 2 GiB, which is also what the copy takes.
    """
    import torch

    from lora import adapted

    if adapted(model):
        raise SnugError("the model has adapters, and such a folder has none: lora.merge(model) first")
    folder = new_folder(folder)
    dtype = getattr(torch, dtype) if dtype else model.embedding.weight.dtype
    config = config_of(model.config, str(dtype).removeprefix("torch."))
    if tokenizer is not None:
        config |= dict(eos_token_id=tokenizer.stop_token)
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_weights(model, temporary, dtype)
        if tokenizer is not None:
            tokenizer.save(temporary)
            if not (temporary / "generation_config.json").exists():
                (temporary / "generation_config.json").write_text(json.dumps(dict(eos_token_id=list(tokenizer.stop_tokens))) + "\n")
        if folder.exists():
            folder.rmdir()
        os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise SnugError(f"{folder}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def new_folder(folder):
    """-> its Path. Raises SnugError where there is something already."""
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SnugError(f"{folder}: is there already; name a new folder")
    if folder.name.startswith("checkpoint-"):
        raise SnugError(f"{folder}: a folder of that name is taken for a run's checkpoint; name another")
    return folder


def write_weights(model, folder, dtype):
    from safetensors.torch import save_file

    shape = vars(model.config) | dict(bias=family_of(model.config) == "gpt2" or model.config.bias)
    shards, room = [], 0
    for entry in entries(shape, family_of(model.config), model.config.n_vocab):
        size = math.prod(entry.shape) * dtype.itemsize
        if size > room:
            shards, room = [*shards, []], max(MAX_SHARD_BYTES, size)
        shards[-1].append(entry)
        room -= size
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)] if shards[1:] else ["model.safetensors"]
    parameters, where = dict(model.named_parameters()), {}
    for name, shard in zip(names, shards, strict=True):
        save_file(
            {entry.name: tensor_of(entry, parameters, model.config, dtype) for entry in shard}, folder / name, metadata={"format": "pt"}
        )
        where |= {entry.name: name for entry in shard}
    if shards[1:]:
        total = sum(math.prod(entry.shape) * dtype.itemsize for shard in shards for entry in shard)
        index = dict(metadata=dict(total_size=total), weight_map=where)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def tensor_of(entry, parameters, config, dtype):
    """An entry's tensor, a copy on the host; zeros for a bias that the model has not, no rows for ids that the tokenizer has not."""
    import torch

    if entry.ours not in parameters:
        return torch.zeros(entry.shape, dtype=dtype)
    value = part(parameters[entry.ours].detach(), entry)
    if entry.ours in ("embedding.weight", "head.weight"):
        value = value[: config.n_vocab]
    return (value.t() if entry.transposed else value).to("cpu", dtype, copy=True).contiguous()


def main(settings, folder):
    from checkpoint import load_run
    from lora import merge

    new_folder(settings.to)  # before the work
    run = load_run(folder, "cpu")
    if settings.dtype == "float32":
        run.model.float()  # before adapters are merged into it and rounded
    save_pretrained(merge(run.model), settings.to, run.tokenizer, settings.dtype or None)
    print(f"{run.path} is now {settings.to}, for transformers' AutoModelForCausalLM and whatever else reads such folders")


if __name__ == "__main__":
    from settings import ExportSettings, friendly_errors, read_settings

    with friendly_errors():
        settings, _, folder = read_settings(ExportSettings, sys.argv[1:], positional="folder")
        main(settings, folder)
