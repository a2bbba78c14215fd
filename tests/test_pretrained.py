"""Hugging Face folders, in and out, beside transformers itself on random weights that it saved."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.errors import assert_refused
from helpers.families import YARN, change_config, their_model, transformers
from helpers.models import logits_of, make_model
from helpers.runs import refused
from model import GPT, GPTConfig
from runs.prepare import prepare
from settings import GRPOSettings
from snug.options import read_settings
from snug.pretrained import tensors
from snug.pretrained.shapes import read_shape
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    their_model("qwen2").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved_once, tmp_path):
    """-> a folder of a Qwen2 that a test may change."""
    return Path(shutil.copytree(saved_once, tmp_path / "model"))


def test_a_smaller_block_size_than_the_folders_limits_the_run(tmp_path):
    save_pretrained(make_model("gpt2", vocab_size=257), tmp_path / "model", get_tokenizer("bytes"))
    words = [f"--init_from={tmp_path}/model", f"--out_dir={tmp_path}/run", "--max_new_tokens=8", "--digits=2"]

    def shape(block_size):
        return prepare(*read_settings(GRPOSettings, [*words, f"--block_size={block_size}"])[:2]).shape

    theirs = read_shape(tmp_path / "model")["block_size"]
    assert shape(20)["block_size"] == shape(theirs)["block_size"] == theirs > 20
    assert_refused("more than block_size=13", shape, 13)
    assert_refused(f"block_size={theirs + 1}, but .* has {theirs}; leave block_size out", shape, theirs + 1)


def test_a_mistral_has_a_window_unless_its_file_says_no(tmp_path):
    """Without the key it is 4096."""
    their_model("mistral sliding").save_pretrained(tmp_path / "a")
    for window, expected in ((12, 12), (None, 0), ("gone", 4096)):
        change_config(tmp_path / "a", sliding_window=window, use_sliding_window=False)
        assert read_shape(tmp_path / "a")["sliding_window"] == expected


def test_older_files_are_read(tmp_path):
    """rope_theta and rope_scaling at the top; GPT-2's tensors without a prefix, with masks; a head that is the embedding."""
    theirs = their_model("llama 3")
    theirs.save_pretrained(tmp_path / "a")
    expected = read_shape(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=dict(rope, type=rope.pop("rope_type")))
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path / "a") == expected

    theirs = their_model("gpt2")
    theirs.save_pretrained(tmp_path / "b")
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    for i in range(2):
        tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128), f"h.{i}.attn.masked_bias": torch.tensor(-1e4)}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    tokens = torch.arange(20)[None]
    ours, expected = logits_of(GPT.from_pretrained(tmp_path / "b"), tokens), theirs(tokens).logits.detach()
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["qwen3 tied", "gpt2"])
def test_a_tied_model_with_another_head_is_refused(case, tmp_path, capsys):
    """transformers keeps this head and warns. With the config as both say it is an untied model's. An equal head is quiet."""
    their_model(case).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    parts = load_file(file)
    embedding = next(value for name, value in parts.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
    tied, tokens = logits_of(GPT.from_pretrained(tmp_path), torch.arange(20)[None]), torch.arange(20)[None]
    for same in (embedding.clone(), embedding.double()):
        save_file(parts | {"lm_head.weight": same}, file, metadata=dict(format="pt"))
        assert torch.equal(logits_of(GPT.from_pretrained(tmp_path), tokens), tied)
    last = embedding.clone()
    last[-1, -1] += 0.01
    for other in (torch.randn_like(embedding), last, embedding[:-1].clone()):
        save_file(parts | {"lm_head.weight": other}, file, metadata=dict(format="pt"))
        said = f"{file}.*lm_head.weight is not the embedding, .* tie_word_embeddings=true"
        assert_refused(said, GPT.from_pretrained, tmp_path)
    assert not capsys.readouterr().out
    save_file(parts | {"lm_head.weight": torch.randn_like(embedding)}, file, metadata=dict(format="pt"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    change_config(tmp_path, tie_word_embeddings=False)
    ours = GPT.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    assert (logits_of(ours, tokens) - tied).abs().max() > 0.1


def test_many_files_with_an_index_both_ways(tmp_path, monkeypatch):
    """In bfloat16, which is cast on the way in."""
    theirs = their_model("qwen3 tied").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "a", max_shard_size="5KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
    monkeypatch.setattr(tensors, "MAX_SHARD_BYTES", 10_000)
    save_pretrained(GPT.from_pretrained(tmp_path / "a", dtype="float32"), tmp_path / "b")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="float32")
    assert all(torch.equal(p, q.float()) for p, q in zip(again.parameters(), theirs.parameters(), strict=True))
    half = GPT.from_pretrained(tmp_path / "a", dtype="bfloat16").embedding.weight
    assert half.dtype == torch.bfloat16 and half.equal(theirs.get_input_embeddings().weight)


def test_a_model_from_scratch_is_a_gpt2(tmp_path):
    """Without biases there are some of 0; ids that no token has are left out, so that nobody samples them."""
    torch.manual_seed(1)
    ours = GPT(GPTConfig(vocab_size=64, n_vocab=57, block_size=32, n_layer=2, n_head=4, n_embd=32))
    save_pretrained(ours, tmp_path / "a")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, logits_of(ours, tokens)[..., :57], atol=1e-5, rtol=1e-5)


KINDS = ["full_attention", "sliding_attention"]
OLMO3 = dict(model_type="olmo3", sliding_window=8, layer_types=KINDS, rope_parameters="gone")
QUANTIZED = dict(quantization_config=dict(quant_method="bitsandbytes", load_in_4bit=True))
CONFIGS = {
    "model_type='gemma2' is not supported; only 'gpt2' or 'llama' or 'qwen2' or": dict(model_type="gemma2"),
    "final_logit_softcapping=30.0 is not supported": dict(final_logit_softcapping=30.0),
    "the weights are quantized; use the bfloat16 model, with --base_dtype=nf4 for 4 bits": QUANTIZED,
    "use_sliding_window=True": dict(use_sliding_window=True, sliding_window=64),
    "sliding_window=-1": dict(model_type="mistral", sliding_window=-1),
    f"layer_types={KINDS} is not supported": OLMO3,
    "attention_bias=True": dict(attention_bias=True),
    "mlp_bias=True": dict(model_type="llama", mlp_bias=True),
    "rope_type='dynamic'": dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)),
    "original_max_position_embeddings=None": dict(rope_parameters=dict(rope_type="yarn", factor=4.0)),
    "mscale_all_dim=1.0": dict(rope_parameters=YARN | dict(mscale_all_dim=1.0)),
    "factor=None": dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4)),
    "hidden_act='gelu'": dict(hidden_act="gelu"),
    "hidden_size=None": dict(hidden_size="gone"),
    "rms_norm_eps=nan is not a valid float": dict(rms_norm_eps=math.nan),
    " is F32 (97, 32), but must be one of ('F32', 'F16', 'BF16', 'F64') (1000000000000, 32)": dict(vocab_size=10**12),
    "missing 12": dict(num_hidden_layers=3, layer_types="gone"),  # a layer has 9 weights and 3 biases
    "surplus 12": dict(num_hidden_layers=1),
}


@pytest.mark.parametrize("said", CONFIGS)
def test_configs_that_do_not_fit_are_named(said, folder):
    change_config(folder, **CONFIGS[said])
    assert said in refused(GPT.from_pretrained, folder)


def test_a_broken_config_is_one_line(folder):
    """A mark at its start, as an editor on Windows writes it, breaks nothing."""
    shape, file = read_shape(folder), folder / "config.json"
    file.write_bytes(file.read_text().encode("utf-8-sig"))
    assert read_shape(folder) == shape
    for text in ("", "[]", "{", '{"model_type": "gpt2", "vocab_size": 1e99}'):
        file.write_text(text)
        assert_refused("config.json", GPT.from_pretrained, folder)


def test_broken_weights_are_one_line(folder):
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for change, said in (
        ({name: None}, f"missing 1 [{name!r}]"), ({"model.extra": torch.zeros(1)}, "surplus 1 ['model.extra']"),
        ({name: torch.zeros(48, 33)}, f"{name} is F32 (48, 33), but must be"),
        ({name: whole[name].to(torch.int8)}, f"{name} is I8"),
        ({name: whole[name].to(torch.float8_e4m3fn)}, f"{name} is F8_E4M3"),
    ):  # fmt: skip
        left = {key: value for key, value in (whole | change).items() if value is not None}
        save_file(left, folder / "model.safetensors")
        assert said in refused(GPT.from_pretrained, folder)
    (folder / "model.safetensors").write_bytes(b"\x80\x04pickle")
    assert_refused("cannot be read", GPT.from_pretrained, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_refused("convert .*bin files, which are pickles", GPT.from_pretrained, folder)


def test_an_index_that_names_no_file_is_one_line(folder):
    (folder / "model.safetensors").unlink()
    for file, said in ((7, "index.json: cannot be read"), ("gone.safetensors", "gone.safetensors cannot be read")):
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=dict(a=file))))
        assert_refused(said, GPT.from_pretrained, folder)


def test_a_folder_that_is_there_is_not_overwritten(folder):
    before = sorted(p.name for p in folder.iterdir())
    assert_refused("is there already", save_pretrained, GPT.from_pretrained(folder), folder)
    assert sorted(p.name for p in folder.iterdir()) == before
