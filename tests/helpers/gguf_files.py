"""GGUF files of small models, as llama.cpp writes them. What imports this is skipped without gguf and transformers."""

import numpy as np
import pytest
import regex

from helpers.families import model_of
from helpers.models import SMALL
from helpers.tokenizers import STOP, llama2_like, qwen_like, smollm2_like

gguf = pytest.importorskip("gguf", reason="pip install -r requirements-gguf.txt")

SMALL = SMALL | dict(intermediate_size=64, max_position_embeddings=512, rope_theta=5e3)
GEMMA = dict(head_dim=16, sliding_window=12, rope_local_base_freq=1e4)
CASES = {  # architecture: (transformers' config class, its keywords, tokenizer, how it cuts text)
    "llama": ("LlamaConfig", dict(head_dim=8), smollm2_like, "smollm"),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True), qwen_like, "qwen2"),
    "gemma3": ("Gemma3TextConfig", GEMMA, llama2_like, "default"),
}
KINDS = gguf.GGMLQuantizationType
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


def names_of(spec):
    """-> every token by its id; ids without a token have a name as llama.cpp's converter gives it."""
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    known = {i: token for token, i in ids.items()}
    return [known.get(i, f"[PAD{i}]") for i in range(1 + max(known))]


def write_tokenizer(writer, spec, names, cut, stop):
    kinds = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    if spec["model"]["byte_fallback"]:
        kinds |= {i: 6 for i, name in enumerate(names) if regex.fullmatch("<0x..>", name)}
        kinds[names.index("<unk>")] = 2
        ranks = {"".join(pair): -rank for rank, pair in reversed([*enumerate(spec["model"]["merges"])])}
        writer.add_token_scores([float(ranks.get(name, -1e4 - i)) for i, name in enumerate(names)])
        writer.add_bos_token_id(names.index("<s>"))
        writer.add_unk_token_id(names.index("<unk>"))
    else:
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_tokenizer_model("llama" if spec["model"]["byte_fallback"] else "gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(names)
    writer.add_token_types([kinds.get(i, 1) for i in range(len(names))])
    writer.add_eos_token_id(names.index(stop))
    writer.add_chat_template(TEMPLATE)


def write_numbers(writer, config):
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5e3)
    if head_size := getattr(config, "head_dim", None):
        writer.add_key_length(head_size)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


def theirs_as_ggufs(architecture, model):
    """-> {name in the file: array}, as llama.cpp's converter writes them."""
    known, config = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2), model.config
    result = {}
    for name, value in model.state_dict().items():
        value, part = value.numpy(), name.split(".")[-2]
        heads = dict(q_proj=config.num_attention_heads, k_proj=config.num_key_value_heads).get(part)
        if architecture == "llama" and heads:  # llama.cpp rotates neighbours, where Hugging Face rotates halves
            value = value.reshape(heads, 2, -1, config.hidden_size).swapaxes(1, 2).reshape(value.shape)
        if architecture == "gemma3" and part.endswith("norm"):
            value = value + 1
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            result[known.get_name(name, (".weight", ".bias"))] = np.ascontiguousarray(value)
    return result


def write(path, architecture="llama", spec=None, kind=KINDS.F32, more=(), **metadata):
    """Write a GGUF file -> its model in transformers, its tokenizer.json as an object. more: tensors; kind: of matrices."""
    name, options, family, cut = CASES[architecture]
    spec, stop = spec or family(), STOP[family]
    names, writer = names_of(spec), gguf.GGUFWriter(path, architecture)
    model = model_of(name, SMALL | options | dict(vocab_size=len(names)))
    write_numbers(writer, model.config)
    write_tokenizer(writer, spec, names, cut, stop)
    for key, value in metadata.items():
        writer.kv_data[0].pop(key, None)  # the library refuses a second value
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, value in (theirs_as_ggufs(architecture, model) | dict(more)).items():
        its_kind = kind if value.ndim > 1 else KINDS.F32
        writer.add_tensor(name, gguf.quantize(value, its_kind), raw_dtype=its_kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return model, spec
