"""Hugging Face folders in and out: *.safetensors <-> a GPT's parameters. shapes.py reads and writes config.json.

    read_weights(look_at_weights(folder), model)        # a model of this shape: GPT.from_pretrained
    save_pretrained(model, "export/mine", tokenizer)
    python -m runs.export out/grpo_gsm8k --to=export/mine      # a run's newest checkpoint, adapters merged

`entries` says which tensor holds which rows of which parameter, for both directions. `look_at_weights` checks names,
shapes and types once, by the files' headers, before there is memory for a model. Then `read_weights` copies tensors one
by one and casts them.

Left out: pickles, quantized weights, mixtures of experts. Tests: tests/test_pretrained.py.
"""

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from snug.options import SnugError, in_one_line
from snug.options.progress import counted
from snug.pretrained.shapes import (
    FAMILIES,
    TABLE,
    config_of,
    read_config,
    read_shape,
)
from snug.shape import CONVOLUTION, GPTConfig

TYPES = "F32", "F16", "BF16", "F64"  # integers and 8-bit floats are quantized and need scales
MAX_SHARD_BYTES = 2 * 2**30  # per written file, so at most this is copied at a time
# What the names of tensors begin with, except the head's; a file may leave it out.
PREFIXES = dict.fromkeys(FAMILIES, "model.") | {"gpt2": "transformer."}
# A vision-language model has eyes, and Qwen3.5 a head for drafts; they are not read.
EYES = "vision_tower.", "multi_modal_projector.", "visual.", "mtp."
PEFT = "base_model.model."  # what names of adapters begin with
# The head of a tied model, which a file may have, too.
HEAD = "lm_head.weight"
# Older versions of transformers saved these with the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Entry(NamedTuple):
    """A tensor of a folder, its shape there, and the parameter `ours` whose rows it holds, from `start` on."""

    name: str
    shape: tuple
    ours: str
    start: int = 0
    transposed: bool = False  # GPT-2's matrices are (in, out)


def entries(c: GPTConfig, family) -> list[Entry]:
    """Every tensor of a folder.

    q_proj, k_proj and v_proj are rows of attention.qkv: with 4 query and 2 key heads of size 8 they begin at rows 0, 32
    and 48.
    """
    C, F, V = c.n_embd, c.n_hidden, c.vocab_size
    gpt2 = family == "gpt2"
    result = []

    def add(theirs, ours, rows, columns=0, bias=gpt2, start=0):
        """A matrix, or a vector if it has no columns, and its bias if it has one."""
        name, size = PREFIXES[family] + theirs, (rows, columns) if columns else (rows,)
        transposed = gpt2 and bias and columns > 0
        there = size[::-1] if transposed else size
        result.append(Entry(f"{name}.weight", there, f"{ours}.weight", start, transposed))
        if bias:
            result.append(Entry(f"{name}.bias", (rows,), f"{ours}.bias", start))

    if gpt2:
        add("wte", "embedding", V, C, False)
        add("wpe", "position", c.block_size, C, False)
        add("ln_f", "norm", C)
        block = [
            ("ln_1", "norm_1", C),
            ("attn.c_attn", "attention.qkv", 3 * C, C),
            ("attn.c_proj", "attention.proj", C, C),
            ("ln_2", "norm_2", C),
            ("mlp.c_fc", "mlp.up", F, C),
            ("mlp.c_proj", "mlp.down", C, F),
        ]
    else:
        add("embed_tokens", "embedding", V, C)
        add("norm", "norm", C)
    for i in range(c.n_layer):
        if not gpt2:
            block = block_of(c, family, c.is_linear(i))
        for theirs, ours, *rest in block:
            add(f"{'h' if gpt2 else 'layers'}.{i}.{theirs}", f"blocks.{i}.{ours}", *rest)
        if c.is_linear(i):
            H = (c.linear_value_heads,)
            conv = c.linear_channels, 1, CONVOLUTION
            for name, size in ("A_log", H), ("dt_bias", H), ("conv1d.weight", conv):
                theirs = f"model.layers.{i}.linear_attn.{name}"
                ours = f"blocks.{i}.attention.{name}"
                result.append(Entry(theirs, size, ours))
    if not c.tie_embeddings:
        result.append(Entry(HEAD, (V, C), "head.weight"))
    return result


def block_of(c: GPTConfig, family, linear) -> list[tuple]:
    """What `entries` adds for each block of a family that came from Llama."""
    C, F, D, bias = c.n_embd, c.n_hidden, c.head_size, c.qkv_bias
    Q = c.n_head * D
    K = c.n_kv_head * D
    norms = TABLE["norms"]["with_post_norms" if c.post_norm else "without_post_norms"]
    block = [
        (theirs, ours, C) for theirs, ours in norms.items() if c.pre_norm or ours.startswith("post")
    ]
    block.append(("mlp.down_proj", "mlp.down", C, F))
    if family == "phi3":
        block.append(("mlp.gate_up_proj", "mlp.up", 2 * F, C))
        parts = dict(qkv_proj=Q + 2 * K)
    else:
        block += [
            ("mlp.gate_proj", "mlp.up", F, C),
            ("mlp.up_proj", "mlp.up", F, C, False, F),
        ]
        parts = dict(q_proj=Q * (1 + c.attention_gate), k_proj=K, v_proj=K)
    name = "self_attn"
    out = "o_proj", Q
    norms = {}
    if c.qk_norm:
        q, k = (Q, K) if c.qk_norm_joint else (D, D)
        norms = dict(q_norm=q, k_norm=k)
    if linear:
        H = c.linear_value_heads
        values = H * c.linear_value_size
        name = "linear_attn"
        out = "out_proj", values
        norms = dict(norm=c.linear_value_size)
        parts = dict(in_proj_qkv=c.linear_channels, in_proj_z=values, in_proj_b=H, in_proj_a=H)
    block.append((f"{name}.{out[0]}", "attention.proj", C, out[1]))
    block += [(f"{name}.{norm}", f"attention.{norm}", size) for norm, size in norms.items()]
    start = 0
    for part, rows in parts.items():
        block.append((f"{name}.{part}", "attention.qkv", rows, C, bias, start))
        start += rows
    return block


def weight_files(folder) -> list[Path]:
    """model.safetensors, or the files that the index names, sorted. Raises SnugError."""
    index = folder / "model.safetensors.index.json"
    file = folder / "model.safetensors"
    if file.is_file():  # transformers prefers the one file, too
        return [file]
    if not index.is_file():
        raise SnugError(f"{folder}: has no model.safetensors; convert *.bin files, which are pickles")
    with in_one_line(f"{index}: cannot be read"):
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return sorted(folder / name for name in names)


def opened(file, framework="numpy") -> safe_open:
    """An open safetensors file; framework "pt": of torch tensors. Raises SnugError if it cannot be read."""
    with in_one_line(f"{file} cannot be read"):
        return safe_open(str(file), framework=framework)


def look_at_weights(folder):
    """Each Entry that the config's shape needs -> (name, file) of its tensor. What `read_weights` takes.

    The files' headers are checked: missing and surplus tensors, other shapes and other types are refused. BUFFERS and
    the HEAD of a tied model may be there; `read_weights` compares this HEAD with the embedding. Raises SnugError.
    """
    family = read_config(folder)["model_type"]
    places = dict.fromkeys(entries(GPTConfig(**read_shape(folder)), family))
    surplus = []
    missing = {entry.name: entry for entry in places}
    embedding = next(iter(places))
    for file in weight_files(folder):
        with opened(file) as tensors:
            for name in tensors.keys():
                whole = name.replace("language_model.", "")
                whole = whole if whole in missing else PREFIXES[family] + whole
                if whole in missing:
                    entry = missing.pop(whole)
                    places[entry] = name, file
                    tensor = tensors.get_slice(name)
                    size, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                    if size != entry.shape or dtype not in TYPES:
                        raise SnugError(
                            f"{file}: {name} is {dtype} {size}, but must be one of {TYPES} {entry.shape}; use the "
                            "folder with the bfloat16 weights"
                        )
                elif whole.endswith(HEAD):
                    places[embedding._replace(name=HEAD)] = name, file
                elif not (name.endswith(BUFFERS) or is_of_eyes(name)):
                    surplus.append(name)
    if missing or surplus:
        raise SnugError(
            f"{folder}: its tensors are not those of this {family}: missing {len(missing)} {[*missing][:3]}, "
            f"surplus {len(surplus)} {surplus[:3]}"
        )
    return places


def is_of_eyes(name):
    return name.removeprefix("model.").startswith(EYES)


def fingerprint(folder) -> str:
    """SHA-256 of config.json and of the length and 16 pieces of 64 KiB of each weight file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for piece in range(16):
                stream.seek(piece * size // 16)
                digest.update(stream.read(2**16))
    return digest.hexdigest()


def read_weights(places, model, rank=0, adapters=None, scale=0.0):
    """Copy a folder's matrices, one at a time, into the weights of a GPT of its shape. Raises SnugError.

    places: `look_at_weights` of the folder.
    adapters: a file for these weights, from adapters.find_base. Each pair is merged into its matrix, W + scale * B A,
    in float32 and rounded once.
    """
    import torch

    from snug.kernels.nf4 import NF4, weights_of

    weights, theirs = weights_of(model), {}
    if adapters:  # a vision-language model's names -> a text model's
        theirs = {
            name.replace("language_model.", ""): name
            for name in opened(adapters).keys()
            if not is_of_eyes(name.removeprefix(PEFT))
        }
    for entry, (name, file) in counted(places.items(), "tensors", "loading"):
        ours = weights[entry.ours]
        with torch.no_grad(), in_one_line(f"{file}: {name} cannot be read"):
            value = read_tensor(name, file)
            value = value.t() if entry.transposed else value
            if isinstance(ours, NF4):
                ours.copy_(value, entry.start)
                continue
            if (entry.name, entry.ours) == (HEAD, "embedding.weight"):
                if not torch.equal(value.to(ours), ours):
                    raise SnugError(
                        f"{HEAD} is not the embedding, but config.json says tie_word_embeddings=true: write false there"
                    )
                continue
            pair = [f"{PEFT}{entry.name[:-6]}lora_{half}.weight" for half in "AB"]
            if theirs.keys() >= {*pair}:
                A, B = (read_tensor(theirs.pop(name), adapters) for name in pair)
                needed = (rank, value.shape[1]), (value.shape[0], rank)
                floats = all(x.is_floating_point() and x.itemsize > 1 for x in (A, B))
                if (A.shape, B.shape) != needed or not floats:
                    raise SnugError(
                        f"{adapters}: {pair[0]} and B are {A.dtype} {tuple(A.shape)} and {B.dtype} {tuple(B.shape)}, "
                        f"not numbers of 2 bytes or more in {needed}"
                    )
                value = value.float()
                value.add_(B.to(value) @ A.to(value), alpha=scale)
            rows_of(ours, entry).copy_(value)
    if theirs:
        raise SnugError(
            f"{adapters}: {len(theirs)} tensors have no place in the base, such as {[*theirs][0]}"
        )


def read_tensor(name, file):
    with opened(file, "pt") as tensors:
        return tensors.get_tensor(name)


def rows_of(parameter, entry):
    """The rows of a parameter that an entry holds."""
    return parameter[entry.start : entry.start + entry.shape[entry.transposed]]


def save_pretrained(model, folder: str | Path, tokenizer=None):
    """Write a folder that transformers' AutoModelForCausalLM (and AutoTokenizer, with a Tokenizer) load.

    The folder must be new or empty, and appears complete or not at all. A GPT-2 without biases gets biases of 0: the
    architecture has them. Raises SnugError.
    """
    from snug.lora import adapted

    if adapted(model):
        raise SnugError("the model has adapters: call lora.merge(model) first")
    dtype = model.embedding.weight.dtype
    config = config_of(model.config, str(dtype).removeprefix("torch."))
    with appearing(folder) as temporary:
        write_weights(model, config["model_type"], temporary, dtype)
        if tokenizer is not None:
            config["eos_token_id"] = tokenizer.stop_token
            tokenizer.save(temporary)  # with generation_config.json, if there are more stop tokens
        write_json(temporary / "config.json", config)


def write_json(file, value):
    file.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def appearing(folder):
    """A new folder, complete or not at all: yields a temporary one beside it, which gets the name at the end."""
    folder = new_folder(folder)
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with in_one_line(f"{folder}: cannot be written"):
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.iterdir():  # safetensors writes files that only their owner can read
                shutil.copymode(next(temporary.glob("*.json")), file)
            os.rename(temporary, folder)  # or over an empty one
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def new_folder(folder):
    """-> the absolute path. Raises SnugError if there is something in it."""
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SnugError(f"{folder}: is there already; name a new folder")
    return folder


def write_weights(model, family, folder, dtype):
    """Files of at most MAX_SHARD_BYTES (unless one tensor is larger), with an index if there are several."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    parameters = dict(model.named_parameters())
    tensors = {}
    for entry in entries(replace(model.config, vocab_size=model.config.n_vocab), family):
        if entry.ours in parameters:
            value = rows_of(parameters[entry.ours].detach(), entry).to(dtype)
            tensors[entry.name] = value.t() if entry.transposed else value
        else:  # a bias of GPT-2
            tensors[entry.name] = torch.zeros(entry.shape, dtype=dtype)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=MAX_SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        copies = {name: tensors[name].to("cpu", copy=True).contiguous() for name in names}
        save_file(copies, folder / file, metadata={"format": "pt"})
        del copies  # before the next file's are made
    if split.is_sharded:
        write_json(
            folder / "model.safetensors.index.json",
            dict(metadata=split.metadata, weight_map=split.tensor_to_filename),
        )
