"""Hugging Face folders in and out: *.safetensors <-> a GPT's parameters. shapes.py reads and writes config.json.

    model = load_pretrained("models/Qwen2.5-0.5B")
    save_pretrained(model, "export/mine", tokenizer)
    python -m tools.export out/grpo_gsm8k --to=export/mine      # a run's newest checkpoint, adapters merged

`entries` says which tensor holds which rows of which parameter, for both directions. `look_at_weights` checks names,
shapes and types by the files' headers. Then tensors are copied one by one and cast on the way.

Left out: pickles, quantised weights, YaRN, mixtures of experts. Tests: tests/test_pretrained.py.
"""

import hashlib
import json
import math
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from options import SnugError, in_one_line
from pretrained.shapes import ARCHITECTURES, config_of, family_of, read_config, read_shape

MAX_SHARD_BYTES = 2 * 2**30  # of a file written, and so of what is copied at a time
PREFIXES = dict.fromkeys(ARCHITECTURES, "model.") | {
    "gpt2": "transformer."
}  # of names but the head's; optional
TYPES = (
    "F32",
    "F16",
    "BF16",
    "F64",
)  # of weights; integers and 8-bit floats are quantized and need their scales
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
)  # older versions saved them with the weights


class Entry(NamedTuple):
    """A tensor of a folder, its shape there, and the rows of the parameter `ours` it holds: from `start`, or all."""

    name: str
    shape: tuple
    ours: str
    start: int | None = None
    transposed: bool = False  # GPT-2's matrices are (in, out)


def entries(shape: dict, family: str, vocab_size: int) -> list[Entry]:
    """Every tensor of a folder. shape: GPTConfig's keywords.

    q_proj, k_proj and v_proj are rows of attention.qkv: with 4 query and 2 key heads of size 8, rows 0, 32 and 48 on.
    """
    C, F, V, prefix, gpt2 = (
        shape["n_embd"],
        shape["n_hidden"],
        vocab_size,
        PREFIXES[family],
        family == "gpt2",
    )
    if gpt2:  # theirs, ours, out, in (0: a vector), bias, first row
        rows = [("wte", "embedding", V, C, False), ("wpe", "position", shape["block_size"], C, False)]
        rows += [("ln_f", "norm", C, 0, True)]
        block = [
            ("ln_1", "norm_1", C, 0, True),
            ("attn.c_attn", "attention.qkv", 3 * C, C, True),
            ("attn.c_proj", "attention.proj", C, C, True),
            ("ln_2", "norm_2", C, 0, True),
            ("mlp.c_fc", "mlp.up", F, C, True),
            ("mlp.c_proj", "mlp.down", C, F, True),
        ]
    else:
        D, bias, qkv_bias = shape["head_size"], shape["bias"], shape["bias"] or shape["qkv_bias"]
        Q, K = shape["n_head"] * D, shape["n_kv_head"] * D
        rows = [("embed_tokens", "embedding", V, C, False), ("norm", "norm", C, 0, False)]
        block = [
            ("input_layernorm", "norm_1", C, 0, False),
            ("self_attn.q_proj", "attention.qkv", Q, C, qkv_bias, 0),
            ("self_attn.k_proj", "attention.qkv", K, C, qkv_bias, Q),
            ("self_attn.v_proj", "attention.qkv", K, C, qkv_bias, Q + K),
            ("self_attn.o_proj", "attention.proj", C, Q, bias or shape["proj_bias"]),
            ("post_attention_layernorm", "norm_2", C, 0, False),
            ("mlp.gate_proj", "mlp.up", F, C, bias, 0),
            ("mlp.up_proj", "mlp.up", F, C, bias, F),
            ("mlp.down_proj", "mlp.down", C, F, bias),
        ]
        if shape["qk_norm"]:
            block += [
                (f"self_attn.{name}", f"attention.{name}", D, 0, False) for name in ("q_norm", "k_norm")
            ]
    for i in range(shape["n_layer"]):
        place = f"h.{i}" if gpt2 else f"layers.{i}"
        rows += [(f"{place}.{theirs}", f"blocks.{i}.{ours}", *rest) for theirs, ours, *rest in block]
    found = []
    for theirs, ours, out, into, bias, *first in rows:
        start, transposed = first[0] if first else None, gpt2 and bias and into > 0
        size = (out,) if not into else (into, out) if transposed else (out, into)
        found.append(Entry(f"{prefix}{theirs}.weight", size, f"{ours}.weight", start, transposed))
        if bias:
            found.append(Entry(f"{prefix}{theirs}.bias", (out,), f"{ours}.bias", start))
    if not shape["tie_embeddings"]:
        found.append(Entry("lm_head.weight", (V, C), "head.weight"))
    return found


def weight_files(folder: str | Path) -> list[Path]:
    """The one file, or those of the index, sorted. Raises SnugError."""
    folder = Path(folder)
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if file.is_file():  # transformers prefers the one file, too
        return [file]
    if not index.is_file():
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        why = (
            f"; {pickles[0]} is a pickle, which is never loaded: convert it to safetensors"
            if pickles
            else ""
        )
        raise SnugError(f"{folder}: has no model.safetensors and no model.safetensors.index.json{why}")
    with in_one_line(f"{index}: cannot be read"):
        names = set(json.loads(index.read_text())["weight_map"].values())
        plain = all(name == Path(name).name and name.endswith(".safetensors") for name in names)
    if not plain:
        raise SnugError(f"{index}: weight_map may only name *.safetensors files of this folder")
    return sorted(folder / name for name in names)


def opened(file: Path, framework: str = "numpy") -> safe_open:
    """An open safetensors file; framework "pt": of torch tensors. Raises SnugError if it cannot be read."""
    with in_one_line(f"{file} cannot be read"):
        return safe_open(str(file), framework=framework)


def look_at_weights(folder: str | Path) -> dict[Entry, tuple[str, Path]]:
    """Every tensor that the config's shape needs -> its name and file, checked by the files' headers. Raises SnugError.

    Missing and surplus tensors, other shapes and other types are refused. BUFFERS and the head of a tied model may be
    there.
    """
    family, shape, held, found, surplus = (
        read_config(folder)["model_type"],
        read_shape(folder),
        {},
        {},
        [],
    )
    for file in weight_files(folder):
        with opened(file) as tensors:
            for name in tensors.keys():
                tensor = tensors.get_slice(name)
                held[name] = file, tuple(tensor.get_shape()), tensor.get_dtype()
    if shape["n_layer"] > len(held):  # do not list them all
        raise SnugError(
            f"{folder}: config.json says {shape['n_layer']} layers, the files have {len(held)} tensors"
        )
    prefix = PREFIXES[family]
    wanted = {
        entry.name.removeprefix(prefix): entry for entry in entries(shape, family, shape["vocab_size"])
    }
    for name, (file, its_shape, its_type) in held.items():
        bare = name.removeprefix(prefix)
        if entry := wanted.get(bare):
            found[entry] = name, file
            if its_shape != entry.shape:
                raise SnugError(f"{file}: {name} has shape {its_shape}, config.json says {entry.shape}")
            if its_type not in TYPES:
                advice = "use the folder with the bfloat16 weights"
                raise SnugError(
                    f"{file}: {name} has the type {its_type}, not one of {', '.join(TYPES)}; {advice}"
                )
        elif not bare.endswith(BUFFERS) and bare != "lm_head.weight":
            surplus.append(name)
    missing = [entry.name for entry in wanted.values() if entry not in found]
    if missing or surplus:
        named = [("missing", missing), ("surplus", surplus)]
        seen = ", ".join(
            f"{what} {len(names)} ({', '.join(names[:3])})" for what, names in named if names
        )
        raise SnugError(
            f"{folder}: its tensors are not those of the {family} of its config.json: {seen}"
        )
    return found


def fingerprint(folder: str | Path) -> str:
    """SHA-256 of config.json and of each weight file's length and 16 pieces of 64 KiB: other weights differ in all."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for piece in range(16):
                stream.seek(piece * size // 16)
                digest.update(stream.read(2**16))
    return digest.hexdigest()


def load_pretrained(folder: str | Path, device="cpu", dtype: str = "float32", **overrides):
    """A folder -> GPT on `device`, weights in `dtype`. overrides: GPTConfig's keywords (n_vocab). Raises SnugError."""
    from model import make_model

    look_at_weights(folder)  # before there is memory for a model of another size
    model = make_model(read_shape(folder) | overrides, device, dtype, initialise=False)
    read_weights(folder, model)
    return model


def read_weights(folder: str | Path, model):
    """Copy a folder's tensors, one at a time, into the parameters of a GPT of its shape. Raises SnugError."""
    import torch

    found = look_at_weights(folder)
    parameters = dict(model.named_parameters())
    for file in sorted({file for _, file in found.values()}):
        with opened(file, "pt") as tensors, torch.no_grad():
            for entry, (name, its_file) in found.items():
                if its_file == file:
                    tensor = tensors.get_tensor(name)
                    rows_of(parameters[entry.ours], entry).copy_(
                        tensor.t() if entry.transposed else tensor
                    )


def rows_of(parameter, entry: Entry):
    """The rows of a parameter that an entry holds."""
    size = entry.shape[1] if entry.transposed else entry.shape[0]
    return parameter if entry.start is None else parameter[entry.start : entry.start + size]


def save_pretrained(model, folder: str | Path, tokenizer=None, dtype: str | None = None):
    """Write a folder that transformers' AutoModelForCausalLM (and AutoTokenizer, given a Tokenizer) load.

    dtype: "float32" or "bfloat16"; default: the weights' own. The folder must be new or empty; it appears whole or not
    at all. A GPT-2 without biases gets biases of 0, because the architecture has them. Raises SnugError.
    """
    import torch

    from lora import adapted

    if adapted(model):
        raise SnugError(
            "the model has adapters, which such a folder cannot hold: call lora.merge(model) first"
        )
    dtype = getattr(torch, dtype) if dtype else model.embedding.weight.dtype
    config = config_of(model.config, str(dtype).removeprefix("torch."))
    with appearing(folder) as temporary:
        write_weights(model, temporary, dtype)
        if tokenizer is not None:
            config["eos_token_id"] = tokenizer.stop_token
            tokenizer.save(temporary)
            generation = (
                temporary / "generation_config.json"
            )  # the tokenizer's own folder may have had one
            if not generation.exists():
                generation.write_text(json.dumps(dict(eos_token_id=list(tokenizer.stop_tokens))) + "\n")
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def appearing(folder: str | Path):
    """A new folder, whole or not at all: yields a temporary one beside it, which gets the name at the end."""
    folder = new_folder(folder)
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():  # safetensors writes files that only their owner can read
            shutil.copymode(temporary / "config.json", file)
        os.rename(temporary, folder)  # or over an empty one
    except (OSError, SafetensorError) as error:
        raise SnugError(f"{folder}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def new_folder(folder: str | Path) -> Path:
    """-> its absolute path. Raises SnugError if it has anything in it."""
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SnugError(f"{folder}: is there already; name a new folder")
    return folder


def write_weights(model, folder: Path, dtype):
    """Files of at most MAX_SHARD_BYTES (unless one tensor is larger), with an index if there are several."""
    from safetensors.torch import save_file

    parameters, shards, room, total, where = dict(model.named_parameters()), [], 0, 0, {}
    for entry in entries(vars(model.config), family_of(model.config), model.config.n_vocab):
        size = math.prod(entry.shape) * dtype.itemsize
        if size > room:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(entry)
        room, total = room - size, total + size
    for i, shard in enumerate(shards, start=1):
        name = (
            f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        tensors = {entry.name: tensor_of(entry, parameters, model.config, dtype) for entry in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        del tensors  # before the next shard is copied
        where |= {entry.name: name for entry in shard}
    if len(shards) > 1:
        index = dict(metadata=dict(total_size=total), weight_map=where)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def tensor_of(entry: Entry, parameters: dict, config, dtype):
    """An entry's tensor, a copy on the host: zeros for a bias the model does not have, no rows for padding ids."""
    import torch

    if entry.ours not in parameters:
        return torch.zeros(entry.shape, dtype=dtype)
    value = rows_of(parameters[entry.ours].detach(), entry)
    if entry.ours in ("embedding.weight", "head.weight"):
        value = value[: config.n_vocab]
    return (value.t() if entry.transposed else value).to("cpu", dtype, copy=True).contiguous()
