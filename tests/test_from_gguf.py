"""GGUF files of random models and of tokenizers trained here, as a Hugging Face folder: the weights and ids that went in."""

import copy
import json

import pytest
import torch
from test_pretrained import SMALL, logits_of
from test_tokenizer import STOP, folder_of, llama3_like, qwen_like, smollm2_like, texts

from model import GPT
from runs import from_gguf
from settings import FromGGUFSettings
from snug.options import SnugError, read_settings
from snug.tokenizer import get_tokenizer

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")
gguf = pytest.importorskip("gguf", reason="pip install -r requirements-dev.txt")
pytest.importorskip("accelerate", reason="pip install -r requirements-dev.txt")

CASES = {  # architecture: (transformers' config class, tokenizer, how it cuts text)
    "llama": ("LlamaConfig", smollm2_like, "smollm"),
    "qwen2": ("Qwen2Config", qwen_like, "qwen2"),
    "qwen3": ("Qwen3Config", llama3_like, "llama-bpe"),
}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


def write(path, architecture="llama", cut=None, more=(), leave_out=(), rename=(), **metadata):
    """Write a GGUF file -> its model in transformers, its tokenizer.json as an object. more: extra tensors; rename: names."""
    config, family, its_cut = CASES[architecture]
    spec = copy.deepcopy(family())
    del spec["model"]["merges"][-9:]  # words that merges do not make, as Llama 3 has them
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    names = [f"[PAD{i}]" for i in range(1 + max(ids.values()))]
    for token, i in ids.items():
        names[i] = token
    options = SMALL | dict(vocab_size=len(names), max_position_embeddings=512, rope_theta=5e3)
    options["head_dim"] = 128 if architecture == "qwen3" else 8  # as all of them have it; transformers reads no other
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)

    writer = gguf.GGUFWriter(path, architecture)
    numbers = dict(block_count=2, context_length=512, embedding_length=32, feed_forward_length=48)
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": options["head_dim"]}
    for name, value in numbers.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 5e3)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    kinds = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut or its_cut)
    writer.add_token_list(names)
    writer.add_token_types([kinds.get(i, 1) for i in range(len(names))])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_eos_token_id(ids[STOP[family]])
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    for name, value in model.state_dict().items():
        value, heads = value.numpy(), dict(q=4, k=2).get(name.split(".")[-2].removesuffix("_proj"))
        if architecture == "llama" and heads:  # llama.cpp rotates neighbours, where Hugging Face rotates halves
            value = value.reshape(heads, 2, 4, -1).swapaxes(1, 2).reshape(value.shape)
        name = known.get_name(name, (".weight", ".bias"))
        if name not in leave_out:
            writer.add_tensor(dict(rename).get(name, name), value)
    for name, shape in more:
        writer.add_tensor(name, torch.ones(shape).numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return model, spec


def convert(file, folder, *words):
    settings, _, place = read_settings(FromGGUFSettings, [str(file), f"--to={folder}", *words], positional="file")
    from_gguf.main(settings, place)


@pytest.mark.parametrize("architecture", CASES)
def test_weights_and_ids_are_those_that_went_in(architecture, tmp_path, capsys):
    theirs, spec = write(tmp_path / "a.gguf", architecture)
    (tmp_path / "config.json").write_text("{")  # what lies beside the file does not matter
    convert(tmp_path / "a.gguf", tmp_path / "out")
    assert f"a.gguf is now {tmp_path}/out; next: python sample.py" in capsys.readouterr().out
    tokens = torch.randint(1000, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(logits_of(GPT.from_pretrained(tmp_path / "out"), tokens), expected, atol=1e-5, rtol=1e-5)
    ours, family = get_tokenizer(str(tmp_path / "out")), CASES[architecture][1]
    original = get_tokenizer(folder_of(tmp_path / "in", spec, tokenizer_config=dict(eos_token=STOP[family])))
    alone = [original.decode([i]) for i in range(original.n_vocab)]
    for text in [*texts(500), *alone, "a  1\n\n2", "e\u0301 1234"]:
        if "<tool" in text:  # the token <tool é> is not written in a GGUF's alphabet
            continue
        for special in (True, False):
            assert ours.encode(text, special) == original.encode(text, special), text
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert ours.stop_tokens == original.stop_tokens and set(ours.special) >= set(original.special) - {"<tool é>"}
    assert ours.chat.source == TEMPLATE


def test_bfloat16_and_several_stop_tokens(tmp_path):
    write(tmp_path / "a.gguf", **{"tokenizer.ggml.eot_token_id": 2})
    convert(tmp_path / "a.gguf", tmp_path / "out", "--dtype=bfloat16")
    assert {p.dtype for p in GPT.from_pretrained(tmp_path / "out", dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert get_tokenizer(str(tmp_path / "out")).stop_tokens == (0, 2)
    with pytest.raises(SnugError, match="is there already"):
        convert(tmp_path / "a.gguf", tmp_path / "out")


REFUSED = {  # what is said: how the file differs
    "its 22 tensors are not those of a llama of its shape; use": dict(more=[("rope_freqs.weight", 4)]),
    "a llama of its shape; use": dict(more=[("blk.0.attn_q.bias", 32)]),
    "its 20 tensors are ": dict(leave_out=["blk.1.ffn_up.weight"]),
    "(no tensor is model.layers.1.mlp.up_proj.weight)": dict(rename={"blk.1.ffn_up.weight": "blk.1.ffn_pu.weight"}),
    "its 21 tensors are": {"llama.block_count": 2**31 - 1},
    "21 tensors are not": {"llama.feed_forward_length": 2**31 - 1},
    "tokenizer.ggml.pre='starcoder' is not supported": dict(cut="starcoder"),
    "llama.rope.scaling.type='yarn' is not supported": {"llama.rope.scaling.type": "yarn"},
    "llama.attention.sliding_window=64 is not supported": {"llama.attention.sliding_window": 64},
    "model_type='gemma2' is not supported": {"general.architecture": "gemma2"},
    "is requirements-gguf.txt installed? (ValueError: GGUF model with architecture rwkv": {
        "general.architecture": "rwkv"
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_would_be_left_out_in_silence_is_refused(said, tmp_path, monkeypatch):
    changes = REFUSED[said]
    add = gguf.GGUFWriter.add_key_value

    def once(self, key, value, kind, *rest):
        """A key that is there already gets the new value: GGUFWriter refuses it."""
        self.kv_data[0].pop(key, None)
        add(self, key, value, kind, *rest)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", once)
    write(tmp_path / "a.gguf", **changes)
    with pytest.raises(SnugError) as error:
        convert(tmp_path / "a.gguf", tmp_path / "out")
    assert said in str(error.value) and "\n" not in str(error.value) and str(tmp_path / "a.gguf") in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_what_is_no_gguf_file(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"\x80\x04." * 20)
    for name, said in (("a.gguf", "not a GGUF file"), ("b", "b: is not there; name a GGUF file"), ("", "is not there")):
        with pytest.raises(SnugError, match=said):
            convert(tmp_path / name, tmp_path / "out")
    with pytest.raises(SnugError, match="name the new folder: --to="):
        read_settings(FromGGUFSettings, ["a.gguf"], positional="file")
