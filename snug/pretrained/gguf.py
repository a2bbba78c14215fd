"""A GGUF file -> a Hugging Face folder, tensor by tensor. The package gguf knows its names and unpacks its weights.

    convert("SmolLM2-135M-Instruct.Q4_1.gguf", Path("models/smollm2"), "float32")

`entries` (tensors.py) says which tensors a model of this shape has: a file with others, or with other shapes, is
refused. A file is untrusted: what ends behind its end or overlaps is an error. The package's own reader needs seconds
and 500 MiB for a vocabulary, and goes on as far as a damaged count says.

Left out: writing GGUF, other architectures, YaRN, big-endian files, several files of one model.
Tests: tests/test_from_gguf.py.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGUFValueType as Kind

from snug.options import SnugError
from snug.options.progress import counted
from snug.options.typed import Fields
from snug.pretrained.shapes import ARCHITECTURES, NAMES, ROPES, shape_of
from snug.pretrained.tensors import entries, look_at_weights, write_json
from snug.tokenizer.gguf import save_tokenizer

KEYS = {  # the file's, which begin with the architecture, and GPTConfig's
    "context_length": "block_size",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "attention.head_count_kv": "n_kv_head",
    "embedding_length": "n_embd",
    "attention.key_length": "head_size",
    "feed_forward_length": "n_hidden",
    "attention.layer_norm_epsilon": "norm_eps",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
}
# llama.cpp's names and config.json's
FAMILIES = dict(gpt2="gpt2", llama="llama", qwen2="qwen2", qwen3="qwen3", gemma3="gemma3_text")
LLAMA3 = 8192, 1.0, 4.0  # ROPES["llama3"] in all published models; a file has only what follows from it
PIECE = 2**21  # bytes of the file that are unpacked at a time


class Stream:
    """What a file has, one after the other. Raises ValueError behind its end, and for an unknown type."""

    def __init__(self, file):
        self.data, self.at = memoryview(np.memmap(file, mode="r")), 0

    def take(self, size):
        self.at += size
        if self.at > len(self.data):
            raise ValueError(
                f"the file is cut off or damaged: it has {len(self.data)} bytes, not {self.at}"
            )
        return self.data[self.at - size : self.at]

    def numbers(self, dtype, count=1):
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype).tolist()

    def text(self):
        return str(self.take(*self.numbers("u8")), "utf-8")

    def value(self):
        kind = Kind(*self.numbers("u4"))
        if kind == Kind.ARRAY:
            return self.values(Kind(*self.numbers("u4")), *self.numbers("u8"))
        return self.values(kind, 1)[0]

    def values(self, kind, count):
        if kind == Kind.STRING:
            return [self.text() for _ in range(count)]
        return self.numbers(gguf.GGUFReader.gguf_scalar_to_np[kind], count)


class Tensor(NamedTuple):
    """kind: gguf's type. shape: rows first. stored: the shape of the bytes in the file, from `start` on."""

    kind: gguf.GGMLQuantizationType
    shape: list
    stored: tuple
    start: int


@np.errstate(all="ignore")  # weights may be infinite
def convert(file, folder: Path, dtype: str):
    """Write config.json, model.safetensors and a tokenizer. Raises SnugError, or what a library does."""
    metadata, tensors = read(file)
    config = config_of(file, metadata, tensors)
    family, shape = config["model_type"], shape_of(Fields(config, "its metadata"))
    places = places_of(family, shape, tensors)
    write_json(folder / "config.json", config | dict(torch_dtype=dtype))
    save_tokenizer(metadata, folder)
    # As gguf and safetensors name them
    kind = gguf.GGMLQuantizationType["F32" if dtype == "float32" else "BF16"]
    head_size = shape["head_size"] if family == "llama" else 0
    with open(folder / "model.safetensors", "wb") as out:
        write_header(out, places, tensors, kind)
        look_at_weights(folder)
        for name, entry in counted(places.items(), "tensors", "converting"):
            for piece in pieces(file, tensors[name], entry, head_size):
                if family == "gemma3_text" and entry.name.endswith("norm.weight"):
                    piece = piece - 1  # llama.cpp adds it
                out.write(gguf.quantize(piece, kind).data)


def read(file):
    """-> (the metadata, {name: Tensor})."""
    stream, metadata, heads, tensors = Stream(file), {}, [], {}
    magic, version = stream.numbers("u4", 2)
    if magic != gguf.GGUF_MAGIC or version not in (2, 3):
        raise SnugError("it is no little-endian GGUF file of version 2 or 3")
    num_tensors, num_keys = stream.numbers("u8", 2)
    for _ in range(num_keys):
        name = stream.text()
        metadata[name] = stream.value()
    for _ in range(num_tensors):
        name, shape = stream.text(), stream.numbers("u8", *stream.numbers("u4"))
        kind = gguf.GGMLQuantizationType(*stream.numbers("u4"))
        heads.append((*stream.numbers("u8"), name, shape[::-1], kind))
    stream.at += -stream.at % metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    first = stream.at
    for offset, name, shape, kind in sorted(heads):
        if first + offset < stream.at:
            raise SnugError(f"{name} overlaps another tensor")
        stream.at = first + offset
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        tensors[name] = Tensor(kind, shape, stored, stream.at)
        stream.take(math.prod(stored))
    return metadata, tensors


def config_of(file, metadata, tensors) -> dict:
    """The content of config.json. Takes rope_freqs.weight out of `tensors`. Raises SnugError."""
    name = metadata["general.architecture"]
    values = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    fields = Fields(values, "its metadata")
    fields.want("general.architecture", *FAMILIES)
    family = FAMILIES[name]
    if family != "gemma3_text":
        fields.want("attention.sliding_window", 0)
    fields.want("rope.scaling.type", "none", "linear")
    table = NAMES.get(family, NAMES["llama"])
    config = {table.get(ours, ours): values[key] for key, ours in KEYS.items() if key in values}
    config["architectures"], config["model_type"] = [ARCHITECTURES[family]], family
    config["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
    if factor and values.get("rope.scaling.type", "linear") == "linear":  # as llama.cpp reads it
        config["rope_scaling"] = dict(rope_type="linear", factor=factor)
    if scaled := tensors.pop("rope_freqs.weight", None):
        divisors = np.memmap(file, np.float32, "r", scaled.start, tuple(scaled.shape))
        config["rope_scaling"] = llama3_rule(divisors, config["rope_theta"])
    return config


def llama3_rule(divisors, theta) -> dict:
    """What the frequencies of a head are divided by -> config.json's rope_scaling. Raises SnugError for another rule.

    The longest waves have the factor, the shortest 1; between them 1 / divisor is interpolated.
    """
    original, low, high = LLAMA3
    waves = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    kept = ((original / waves - low) / (high - low)).clip(0, 1)
    factor = float(divisors[-1])
    if not np.allclose(divisors * (kept + (1 - kept) / factor), 1, rtol=1e-4):
        raise SnugError("rope_freqs.weight is not by Llama 3's rule, which is not supported")
    names = ROPES["llama3"].values()
    return dict(rope_type="llama3", factor=factor) | dict(zip(names, LLAMA3, strict=True))


def places_of(family, shape, tensors) -> dict:
    """{name in the file: Entry} of every tensor. Raises SnugError if the file has others."""
    layers = min(shape["n_layer"], len(tensors))  # a damaged file may say millions
    architecture = family.removesuffix("_text").upper()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], layers)
    every = entries(shape | dict(n_layer=layers), family, shape["vocab_size"])
    places = {names.get_name(entry.name, (".weight", ".bias")): entry for entry in every}
    if odd := sorted(places.keys() ^ tensors.keys()):
        raise SnugError(f"missing or surplus in a {family} of its shape: {odd[:3]}")
    return places


def write_header(out, places, tensors, kind):
    """A safetensors file without its weights. kind: their type."""
    header, end = {"__metadata__": dict(format="pt")}, 0
    for name, entry in places.items():
        shape = tensors[name].shape
        shape = shape[::-1] if entry.transposed else shape
        start, end = end, end + math.prod(shape) * gguf.GGML_QUANT_SIZES[kind][1]
        header[entry.name] = dict(dtype=kind.name, shape=shape, data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    out.truncate(out.tell() + end)
    out.flush()


def pieces(file, tensor, entry, head_size):
    """Yields the rows of a matrix, or a vector, in float32, a few at a time.

    head_size: not 0 if llama.cpp rotates neighbours of queries and keys, where Hugging Face rotates halves. The rows 0,
    2, 4, 1, 3, 5 of a head of size 6 are those of the folder.
    """
    stored = np.memmap(file, np.uint8, "r", tensor.start, tensor.stored).reshape(-1, tensor.stored[-1])
    if head_size and entry.name.endswith(("q_proj.weight", "k_proj.weight")):
        order = np.arange(len(stored)).reshape(-1, head_size // 2, 2).swapaxes(1, 2)
        stored = stored[order.ravel()]
    rows = len(stored) if entry.transposed else max(1, PIECE // stored.shape[1])
    for start in range(0, len(stored), rows):
        values = gguf.dequantize(stored[start : start + rows], tensor.kind)
        yield np.ascontiguousarray(values.T if entry.transposed else values)
