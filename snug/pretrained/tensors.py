"""Hugging Face folders in and out: *.safetensors <-> a GPT's parameters. shapes.py reads and writes config.json.

    read_weights("models/Qwen2.5-0.5B", model)          # a model of this shape: GPT.from_pretrained makes it
    save_pretrained(model, "export/mine", tokenizer)
    python -m runs.export out/grpo_gsm8k --to=export/mine      # a run's newest checkpoint, adapters merged

`entries` says which tensor holds which rows of which parameter, for both directions. `look_at_weights` checks names
and shapes by the files' headers. Then tensors are copied one by one and cast.

Left out: pickles, quantized weights except NF4 (bitsandbytes.py), YaRN, mixtures of experts. Tests:
tests/test_pretrained.py.
"""

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from snug.options import SnugError, in_one_line
from snug.pretrained.bitsandbytes import read_matrix, tensors_of
from snug.pretrained.shapes import (
    ARCHITECTURES,
    config_of,
    double_quant,
    family_of,
    read_config,
    read_shape,
)

MAX_SHARD_BYTES = 2 * 2**30  # of a written file, and so of the tensors that are copied at a time
# What the names of tensors begin with, except the head's; a file may leave it out.
PREFIXES = dict.fromkeys(ARCHITECTURES, "model.") | {"gpt2": "transformer."}
MAX_LAYERS = 10_000
TYPES = "F32", "F16", "BF16", "F64"  # integers and 8-bit floats are quantized and need scales
# Older versions saved these with the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Entry(NamedTuple):
    """A tensor of a folder, its shape there, and which rows of the parameter `ours` it holds: from `start` on."""

    name: str
    shape: tuple
    ours: str
    start: int
    transposed: bool  # GPT-2's matrices are (in, out)
    types: tuple = TYPES

    @property
    def is_matrix(self):
        return self.ours.startswith("blocks.") and len(self.shape) == 2


def entries(shape: dict, family: str, vocab_size: int) -> list[Entry]:
    """Every tensor of a folder. shape: GPTConfig's keywords.

    q_proj, k_proj and v_proj are rows of attention.qkv: with 4 query and 2 key heads of size 8 they begin at rows 0, 32
    and 48.
    """
    C, F, V = shape["n_embd"], shape["n_hidden"], vocab_size
    gpt2, result = family == "gpt2", []

    def add(theirs, ours, size, bias=False, start=0):
        """A weight of this size, and its bias if it has one."""
        transposed = gpt2 and bias and len(size) == 2
        there = size[::-1] if transposed else size
        name = PREFIXES[family] + theirs
        result.append(Entry(f"{name}.weight", there, f"{ours}.weight", start, transposed))
        if bias:
            result.append(Entry(f"{name}.bias", size[:1], f"{ours}.bias", start, False))

    if gpt2:
        add("wte", "embedding", (V, C))
        add("wpe", "position", (shape["block_size"], C))
        add("ln_f", "norm", (C,), True)
    else:
        D, bias = shape["head_size"], shape["bias"]
        Q, K = shape["n_head"] * D, shape["n_kv_head"] * D
        qkv_bias, proj_bias = bias or shape["qkv_bias"], bias or shape["proj_bias"]
        add("embed_tokens", "embedding", (V, C))
        add("norm", "norm", (C,))
    for i in range(shape["n_layer"]):
        block = f"blocks.{i}"
        if gpt2:
            add(f"h.{i}.ln_1", f"{block}.norm_1", (C,), True)
            add(f"h.{i}.attn.c_attn", f"{block}.attention.qkv", (3 * C, C), True)
            add(f"h.{i}.attn.c_proj", f"{block}.attention.proj", (C, C), True)
            add(f"h.{i}.ln_2", f"{block}.norm_2", (C,), True)
            add(f"h.{i}.mlp.c_fc", f"{block}.mlp.up", (F, C), True)
            add(f"h.{i}.mlp.c_proj", f"{block}.mlp.down", (C, F), True)
            continue
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        add(f"layers.{i}.input_layernorm", f"{block}.norm_1", (C,))
        add(f"{attention}.q_proj", f"{block}.attention.qkv", (Q, C), qkv_bias, 0)
        add(f"{attention}.k_proj", f"{block}.attention.qkv", (K, C), qkv_bias, Q)
        add(f"{attention}.v_proj", f"{block}.attention.qkv", (K, C), qkv_bias, Q + K)
        add(f"{attention}.o_proj", f"{block}.attention.proj", (C, Q), proj_bias)
        if shape["qk_norm"]:
            add(f"{attention}.q_norm", f"{block}.attention.q_norm", (D,))
            add(f"{attention}.k_norm", f"{block}.attention.k_norm", (D,))
        add(f"layers.{i}.post_attention_layernorm", f"{block}.norm_2", (C,))
        add(f"{mlp}.gate_proj", f"{block}.mlp.up", (F, C), bias, 0)
        add(f"{mlp}.up_proj", f"{block}.mlp.up", (F, C), bias, F)
        add(f"{mlp}.down_proj", f"{block}.mlp.down", (C, F), bias)
    if not shape["tie_embeddings"]:
        result.append(Entry("lm_head.weight", (V, C), "head.weight", 0, False))
    return result


def weight_files(folder: str | Path) -> list[Path]:
    """model.safetensors, or the files that the index names, sorted. Raises SnugError."""
    folder = Path(folder)
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if file.is_file():  # transformers prefers the one file, too
        return [file]
    if not index.is_file():
        raise SnugError(
            f"{folder}: has no model.safetensors and no model.safetensors.index.json; *.bin files are pickles, which "
            "are never loaded: convert them to safetensors"
        )
    with in_one_line(f"{index}: cannot be read"):
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if any(name != Path(name).name for name in names):
            raise ValueError("weight_map names files outside this folder")
    return sorted(folder / name for name in names)


def opened(file: Path, framework: str = "numpy") -> safe_open:
    """An open safetensors file; framework "pt": of torch tensors. Raises SnugError if it cannot be read."""
    with in_one_line(f"{file} cannot be read"):
        return safe_open(str(file), framework=framework)


def look_at_weights(folder: str | Path):
    """Every tensor that the config's shape needs -> its name and file, checked by the files' headers. Raises SnugError.

    Missing and surplus tensors, other shapes and other types are refused. BUFFERS and the head of a tied model may be
    there.
    """
    family, shape = read_config(folder)["model_type"], read_shape(folder)
    if shape["n_layer"] > MAX_LAYERS:  # too many to list their tensors
        raise SnugError(f"{folder}: config.json says {shape['n_layer']} layers; at most {MAX_LAYERS}")
    prefix, double = PREFIXES[family], double_quant(folder)
    whole = entries(shape, family, shape["vocab_size"])
    needed = [tensor for entry in whole for tensor in tensors_of(entry, double)]
    by_name = {entry.name.removeprefix(prefix): entry for entry in needed}
    places, surplus = {}, []
    for file in weight_files(folder):
        with opened(file) as tensors:
            for name in tensors.keys():
                bare, tensor = name.removeprefix(prefix), tensors.get_slice(name)
                size, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                if entry := by_name.get(bare):
                    places[entry] = name, file
                    if entry.shape and size != entry.shape:
                        raise SnugError(f"{file}: {name} has shape {size}, config.json says {entry.shape}")
                    if dtype not in entry.types:
                        raise SnugError(
                            f"{file}: {name} has the type {dtype}, not one of {entry.types}; "
                            "use the folder with the bfloat16 weights"
                        )
                elif not bare.endswith(BUFFERS) and bare != "lm_head.weight":
                    surplus.append(name)
    missing = [entry.name for entry in needed if entry not in places]
    if missing or surplus:
        raise SnugError(
            f"{folder}: config.json describes a {family} with other tensors than the files have: missing "
            f"{len(missing)} {missing[:3]}, surplus {len(surplus)} {surplus[:3]}"
        )
    return places


def fingerprint(folder: str | Path) -> str:
    """SHA-256 of config.json and of the length and 16 pieces of 64 KiB of each weight file."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for piece in range(16):
                stream.seek(piece * size // 16)
                digest.update(stream.read(2**16))
    return digest.hexdigest()


def read_weights(folder: str | Path, model, adapters=None, rank=0, scale=0.0):
    """Copy a folder's matrices, one at a time, into the weights of a GPT of its shape. Raises SnugError.

    A matrix in NF4 gets what the folder has in NF4, or quantizes what it has. A parameter gets it dequantized.
    adapters: a file for these weights, as adapters.find_base has it; each becomes part of its matrix: W + scale * B A,
    in float32 and rounded once.
    """
    import torch

    from snug.kernels.nf4 import NF4, weights_of

    weights, shape, double = weights_of(model), read_shape(folder), double_quant(folder)
    places = {entry.name: place for entry, place in look_at_weights(folder).items()}
    if adapters:
        places |= {name: (name, adapters) for name in opened(adapters).keys()}

    def tensor(name):
        there, file = places.pop(name)
        with opened(file, "pt") as tensors:
            return tensors.get_tensor(there)

    for entry in entries(shape, read_config(folder)["model_type"], shape["vocab_size"]):
        ours, packed = weights[entry.ours], double is not None and entry.is_matrix
        with torch.no_grad(), in_one_line(f"{folder}: {entry.name} cannot be read"):
            value = read_matrix(entry, tensor, double, ours.device) if packed else tensor(entry.name)
            value = value.t() if entry.transposed else value
            if isinstance(ours, NF4):
                ours.copy_(value, entry.start)
                continue
            if packed:
                value = NF4(entry.shape, ours.device).copy_(value).dequantized(torch.float32)
            pair = [f"base_model.model.{entry.name[:-6]}lora_{half}.weight" for half in "AB"]
            if pair[0] in places:
                value = value.float()
                A, B = (tensor(name).to(value) for name in pair)
                value.add_(B @ A, alpha=scale)
                if len(A) != rank or not value.isfinite().all():
                    raise ValueError(f"in {adapters} it has r={len(A)}, not {rank}, or NaN or infinity")
            rows_of(ours, entry).copy_(value)
    if places:
        raise SnugError(f"{adapters}: {folder} has no place for {len(places)} tensors, {[*places][:3]}")


def rows_of(parameter, entry: Entry):
    """The rows of a parameter that an entry holds."""
    size = entry.shape[1] if entry.transposed else entry.shape[0]
    return parameter[entry.start : entry.start + size]


def save_pretrained(model, folder: str | Path, tokenizer=None):
    """Write a folder that transformers' AutoModelForCausalLM (and AutoTokenizer, with a Tokenizer) load.

    The folder must be new or empty, and appears complete or not at all. A GPT-2 without biases gets biases of 0: the
    architecture has them. Raises SnugError.
    """
    from snug.lora import adapted

    if adapted(model):
        raise SnugError(
            "the model has adapters, which such a folder cannot hold: call lora.merge(model) first"
        )
    dtype = model.embedding.weight.dtype
    config = config_of(model.config, str(dtype).removeprefix("torch."))
    with appearing(folder) as temporary:
        write_weights(model, temporary, dtype)
        if tokenizer is not None:
            config["eos_token_id"] = tokenizer.stop_token
            tokenizer.save(temporary)
            generation = temporary / "generation_config.json"
            if not generation.exists():  # the tokenizer may have brought one
                write_json(generation, dict(eos_token_id=list(tokenizer.stop_tokens)))
        write_json(temporary / "config.json", config)


def write_json(file: Path, value: dict):
    file.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def appearing(folder: str | Path):
    """A new folder, complete or not at all: yields a temporary one beside it, which gets the name at the end."""
    folder = new_folder(folder)
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():  # safetensors writes files that only their owner can read
            shutil.copymode(next(temporary.glob("*config.json")), file)
        os.rename(temporary, folder)  # or over an empty one
    except (OSError, SafetensorError) as error:
        raise SnugError(f"{folder}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def new_folder(folder: str | Path):
    """-> the absolute path. Raises SnugError if there is something in it."""
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SnugError(f"{folder}: is there already; name a new folder")
    return folder


def write_weights(model, folder: Path, dtype):
    """Files of at most MAX_SHARD_BYTES (unless one tensor is larger), with an index if there are several."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    config, parameters = model.config, dict(model.named_parameters())
    family = family_of(config)
    by_name = {entry.name: entry for entry in entries(vars(config), family, config.n_vocab)}
    sizes = {name: torch.empty(entry.shape, dtype=dtype, device="meta") for name, entry in by_name.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=MAX_SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: tensor_of(by_name[name], parameters, dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors  # before the next file's are copied
    if split.is_sharded:
        index = dict(metadata=split.metadata, weight_map=split.tensor_to_filename)
        write_json(folder / "model.safetensors.index.json", index)


def tensor_of(entry: Entry, parameters: dict, dtype):
    """An entry's tensor, a copy on the host: zeros for a bias that the model does not have."""
    import torch

    if entry.ours not in parameters:
        return torch.zeros(entry.shape, dtype=dtype)
    value = rows_of(parameters[entry.ours].detach(), entry)
    return (value.t() if entry.transposed else value).to("cpu", dtype, copy=True).contiguous()
