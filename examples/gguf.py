"""A GGUF file of a Llama, a Qwen2 or a Gemma 3 as a Hugging Face folder, which all commands read.

    python -m examples.gguf SmolLM2-135M-Instruct.Q4_1.gguf --to=models/smollm2 [--dtype=bfloat16]

Installed, it is snug.clone.examples.gguf. It needs `pip install -r requirements-gguf.txt`. Weights are unpacked, and
keep the rounding of the quantization; memory holds all of them. What these three do not have, such as scaled positions
or another rule of cutting text, is refused.
Test: pytest tests/test_gguf.py
"""

import argparse
import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from snug.options import SnugError, friendly_errors, in_one_line
from snug.pretrained.tensors import appearing

FAMILIES = {  # general.architecture: config.json's model_type and architecture
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
SIZES = {  # the file's names, behind the architecture's, and config.json's
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "embedding_length": "hidden_size",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
}
TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OF_GEMMA = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {"smollm": [r"\p{N}", GPT2], "qwen2": [QWEN2]}  # each cuts the pieces of the one before
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # tokenizer.ggml.token_type
SPECIAL = {  # tokenizer_config.json's names and the file's
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def convert(file: Path, folder: Path, dtype: torch.dtype):
    """Write config.json, model.safetensors and a tokenizer. Raises SnugError for what is not supported."""
    reader = gguf.GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    name = metadata["general.architecture"]
    if name not in FAMILIES:
        raise SnugError(f"general.architecture={name} is not one of {', '.join(FAMILIES)}")
    values = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    weights = {}
    for tensor in reader.tensors:
        theirs, value = weight_of(tensor, name, values)
        weights[theirs] = torch.from_numpy(value).to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(name, values) | {
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_tokenizer(metadata, folder)


def config_of(name: str, values: dict) -> dict:
    """values: the metadata without the architecture's name in front."""
    for key in ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"):
        if values.get(key, "none") != "none":
            raise SnugError(f"{key}={values[key]} is not supported")
    if name != "gemma3" and values.get("attention.sliding_window"):
        raise SnugError(f"a {name} with a sliding window is not supported")
    model_type, architecture = FAMILIES[name]
    config = {theirs: values[key] for key, theirs in SIZES.items() if key in values}
    config["architectures"], config["model_type"] = [architecture], model_type
    config["vocab_size"] = len(values["tokenizer.ggml.tokens"])
    return config


def weight_of(tensor, name: str, values: dict):
    """A tensor of the file -> its name and its values in a Hugging Face folder.

    llama.cpp rotates neighbours of a Llama's queries and keys, Hugging Face rotates halves: the rows 0, 2, 4, 1, 3, 5 of
    a head of size 6 are those of the folder. It adds 1 to Gemma's norms.
    """
    *block, part, kind = tensor.name.split(".")  # blk.3.attn_q.weight
    known = TENSORS | OF_GEMMA if name == "gemma3" else TENSORS
    if part not in known:
        raise SnugError(f"{tensor.name}: a {name} with this tensor is not supported")
    value = gguf.dequantize(tensor.data, tensor.tensor_type)
    if name == "llama" and part in ("attn_q", "attn_k"):
        heads = values["attention.head_count" if part == "attn_q" else "attention.head_count_kv"]
        value = value.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
    if name == "gemma3" and part.endswith("norm"):
        value = value - 1
    place = ["model", "layers", block[1]] if block else ["model"] * (part != "output")
    return ".".join([*place, known[part], kind]), value.copy()


def save_tokenizer(metadata: dict, folder: Path):
    """Tokens of the types control and unknown are special; those that the user defined are found in a text before it is
    cut."""
    c = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model, cut = c["model"], c.get("pre")
    if model == "llama":
        backend = sentencepiece(c)
    elif model == "gpt2" and cut in CUTS:
        backend = byte_level(c)
    else:
        raise SnugError(f"tokenizer.ggml.model={model} with tokenizer.ggml.pre={cut} is not supported")
    names = {name: c["tokens"][c[key]] for name, key in SPECIAL.items() if key in c}
    for token, kind in zip(c["tokens"], c["token_type"], strict=True):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or token in names.values():
            backend.add_tokens([AddedToken(token, special=kind != USER_DEFINED, normalized=False)])
    bos = names.get("bos_token")
    if bos and c.get("add_bos_token", model == "llama"):
        special = [(bos, c["bos_token_id"])]
        backend.post_processor = processors.TemplateProcessing([bos, "$A"], special_tokens=special)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    stops = dict.fromkeys(c[key] for key in ("eos_token_id", "eot_token_id") if key in c)
    files = {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps(config | names, indent=1),
        "generation_config.json": json.dumps({"eos_token_id": [*stops]}),
    }
    if "tokenizer.chat_template" in c:
        files["chat_template.jinja"] = c["tokenizer.chat_template"]
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())


def byte_level(c: dict) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(c["tokens"])}
    backend = Tokenizer(models.BPE(vocab, [tuple(pair.split(" ")) for pair in c["merges"]]))
    if c["pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [Split(Regex(split), "isolated") for split in CUTS[c["pre"]]]
    backend.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece(c: dict) -> Tokenizer:
    """A space is "▁" in tokens; a character without a token is bytes, <0x00> to <0xFF>.

    Merges are all pairs of tokens that make a token, the best score first. With the tokens a, b, c, ab (-1), bc (-2),
    abc (-3): (a, b), (b, c), (a, bc), (ab, c).
    """
    vocab, merges = {token: i for i, token in enumerate(c["tokens"])}, []
    for token, score, kind in zip(c["tokens"], c["scores"], c["token_type"], strict=True):
        if kind == NORMAL:
            halves = [(token[:i], token[i:]) for i in range(1, len(token))]
            merges += [(-score, pair) for pair in halves if vocab.keys() >= {*pair}]
    merges.sort(key=lambda merge: merge[0])
    unknown = c["tokens"][c["unknown_token_id"]] if "unknown_token_id" in c else None
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(vocab, [pair for _, pair in merges], **options))
    spaces = [normalizers.Replace(" ", "▁")]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if c.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        parts.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(spaces), decoders.Sequence(parts)
    return backend


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="the new folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args(words)
    with appearing(options.to) as folder, in_one_line(f"{options.file}: cannot become a folder"):
        convert(options.file, folder, getattr(torch, options.dtype))
    print(f"{options.file} is now {options.to}, a folder for --init_from")


if __name__ == "__main__":
    with friendly_errors():
        main()
