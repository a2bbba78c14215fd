"""Hugging Face folders in and out: config.json and *.safetensors <-> a GPT. GPT-2, Llama, Qwen2 (and 2.5) and Qwen3.

    model = load_pretrained("models/Qwen2.5-0.5B")
    save_pretrained(model, "export/mine", tokenizer)
    python -m tools.export out/grpo_gsm8k --to=export/mine      # a run's newest checkpoint as such a folder, adapters merged

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
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from options import SnugError
from pretrained.shapes import config_of, family_of, read_config, read_shape

PREFIX = {"gpt2": "transformer."}  # of all names but the head's; "model." elsewhere. A folder may leave it out


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


MAX_SHARD_BYTES = 2 * 2**30  # what saving copies at a time


BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
)  # constants that older versions wrote beside the weights


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
            plain = all(
                isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")
                for file in where.values()
            )
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
        parts = [
            f"{what} {len(names)} ({', '.join(names[:3])})"
            for what, names in (("missing", missing), ("surplus", surplus))
            if names
        ]
        raise SnugError(
            f"{folder}: its tensors are not those of a {family} of its config.json: {', '.join(parts) or 'names twice'}"
        )
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


# Weights in


def load_pretrained(folder, device="cpu", dtype="float32", **overrides):
    """A folder -> GPT on `device`, its weights in `dtype`. overrides: of the shape, such as n_vocab. Raises SnugError."""
    from model import make_model

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
        raise SnugError(
            f"{folder}: has other parameters than the model: {', '.join(sorted(names ^ set(parameters))[:3])}"
        )
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


# Weights out


def save_pretrained(model, folder, tokenizer=None, dtype=None):
    """Write a folder that transformers' AutoModelForCausalLM (and AutoTokenizer, given a Tokenizer) load. Raises SnugError.

    dtype: "float32" or "bfloat16"; default: the weights' own. The folder must not exist, or be empty; it appears whole, or not at all.
    Models of GPT-2's parts without biases get biases of 0. Files are of at most 2 GiB, which is also what the copy takes.
    """
    import torch

    from pretrained.lora import adapted

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
                (temporary / "generation_config.json").write_text(
                    json.dumps(dict(eos_token_id=list(tokenizer.stop_tokens))) + "\n"
                )
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
    names = (
        [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        if shards[1:]
        else ["model.safetensors"]
    )
    parameters, where = dict(model.named_parameters()), {}
    for name, shard in zip(names, shards, strict=True):
        save_file(
            {entry.name: tensor_of(entry, parameters, model.config, dtype) for entry in shard},
            folder / name,
            metadata={"format": "pt"},
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
