"""config.json of published models, in tiny sizes: each key is changed, and left out, one at a time.

Then the logits are transformers', or snug or transformers refuses the file, or snug says that it does not know the key.
"""

import copy
import functools
import json
import math
import re
import warnings

import pytest
import torch

import sample
from model import GPT
from runs.checkpoint import find_run
from settings import SampleSettings
from snug.options import SnugError, friendly_errors
from snug.pretrained import shapes
from snug.pretrained.shapes import read_shape
from snug.tokenizer import get_tokenizer

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")

GPT2 = dict(
    architectures=["GPT2LMHeadModel"],
    model_type="gpt2",
    activation_function="gelu_new",
    attn_pdrop=0.1,
    bos_token_id=50256,
    embd_pdrop=0.1,
    eos_token_id=50256,
    initializer_range=0.02,
    layer_norm_epsilon=1e-5,
    n_ctx=64,
    n_embd=32,
    n_head=4,
    n_layer=2,
    n_positions=64,
    resid_pdrop=0.1,
    summary_activation=None,
    summary_first_dropout=0.1,
    summary_proj_to_labels=True,
    summary_type="cls_index",
    summary_use_proj=True,
    task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    vocab_size=61,
)
BASE = dict(
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=32,
    initializer_range=0.02,
    intermediate_size=40,
    max_position_embeddings=256,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
    vocab_size=61,
)
QWEN = BASE | dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    max_window_layers=1,
    sliding_window=12,
    use_sliding_window=False,
    rope_theta=1e6,
)
QWEN3 = QWEN | dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, head_dim=16, rope_scaling=None
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
QWEN_YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA = BASE | dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    attention_bias=False,
    mlp_bias=False,
    pretraining_tp=1,
    rope_scaling=None,
    rms_norm_eps=1e-5,
)
LLAMA3 = dict(
    factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=64, rope_type="llama3"
)
MISTRAL = BASE | dict(architectures=["MistralForCausalLM"], model_type="mistral", rms_norm_eps=1e-5)
PHI = BASE | dict(
    architectures=["Phi3ForCausalLM"],
    model_type="phi3",
    attention_bias=False,
    auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
    _name_or_path="Phi-3-mini-4k-instruct",
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    original_max_position_embeddings=64,
    pad_token_id=5,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    num_key_value_heads=4,
    sliding_window=12,
)
LONGROPE = dict(long_factor=[1.0, 2.0, 3.0, 9.0], short_factor=[1.0, 1.1, 1.5, 2.0], type="longrope")
OLMO2 = BASE | dict(
    architectures=["Olmo2ForCausalLM"],
    model_type="olmo2",
    attention_bias=False,
    pad_token_id=3,
    rope_scaling=None,
    rope_theta=500000,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
)
OLMO3 = OLMO2 | dict(
    architectures=["Olmo3ForCausalLM"],
    model_type="olmo3",
    dtype="bfloat16",
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
    num_hidden_layers=8,
    sliding_window=12,
    rope_scaling=dict(
        attention_factor=1.2079441541679836,
        beta_fast=32.0,
        beta_slow=1.0,
        factor=8.0,
        original_max_position_embeddings=32,
        rope_type="yarn",
    ),
)
GEMMA = {name: value for name, value in BASE.items() if name not in ("hidden_act", "tie_word_embeddings")} | dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    attention_bias=False,
    attn_logit_softcapping=None,
    cache_implementation="hybrid",
    final_logit_softcapping=None,
    head_dim=16,
    hidden_activation="gelu_pytorch_tanh",
    num_hidden_layers=4,
    pad_token_id=0,
    query_pre_attn_scalar=16,
    rope_local_base_freq=10000,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=12,
    sliding_window_pattern=2,
)
KINDS = ["sliding_attention", "full_attention"] * 2
GEMMA5 = {
    name: value
    for name, value in GEMMA.items()
    if name not in ("rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern")
} | dict(
    _sliding_window_pattern=2,
    dtype="bfloat16",
    layer_types=KINDS,
    use_bidirectional_attention=False,
    rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=1000000.0),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
    ),
)
SMOLLM3 = BASE | dict(
    architectures=["SmolLM3ForCausalLM"],
    model_type="smollm3",
    attention_bias=False,
    layer_types=["full_attention"] * 8,
    max_window_layers=28,
    mlp_bias=False,
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 2,
    num_hidden_layers=8,
    pad_token_id=4,
    pretraining_tp=2,
    rope_scaling=None,
    rope_theta=5000000.0,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
)
PUBLISHED = {
    "GPT-2": GPT2,
    "GPT-2 untied": GPT2 | dict(n_inner=40, tie_word_embeddings=False, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False, use_cache=True, gradient_checkpointing=False),
    "Llama 2": LLAMA | dict(num_key_value_heads=4, max_position_embeddings=128),
    "Llama 3.2 1B": LLAMA | dict(head_dim=8, rope_theta=500000.0, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "Llama, heads of their own size": LLAMA | dict(head_dim=12),
    "Llama, head_dim null": LLAMA | dict(head_dim=None),
    "Llama, linear": LLAMA | dict(rope_scaling=dict(type="linear", factor=2.0)),
    "Llama, transformers 5": {name: value for name, value in LLAMA.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")} | dict(dtype="bfloat16", head_dim=8, pad_token_id=None, rope_parameters=LLAMA3 | dict(rope_theta=500000.0)),
    "SmolLM2": LLAMA | dict(is_llama_config=True, rope_interleaved=False, rope_theta=100000, tie_word_embeddings=True, **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    "R1-Distill-Llama": LLAMA | dict(rope_theta=500000.0, rope_scaling=LLAMA3 | dict(factor=8.0)),
    "Qwen2.5": QWEN | dict(tie_word_embeddings=True),
    "Qwen2.5, YaRN": QWEN | dict(rope_scaling=QWEN_YARN),
    "Qwen2.5, YaRN's numbers": QWEN | dict(rope_scaling=YARN | dict(beta_fast=16.0, beta_slow=2.0, attention_factor=1.1)),
    "R1-Distill-Qwen": QWEN | dict(sliding_window=40, rope_theta=10000, use_mrope=False),
    "Qwen3 0.6B": QWEN3 | dict(sliding_window=None, tie_word_embeddings=True),
    "Qwen3 8B": QWEN3 | dict(sliding_window=None),
    "Qwen3, YaRN": QWEN3 | dict(rope_scaling=YARN),
    "R1-0528-Qwen3-8B": QWEN3 | dict(sliding_window=None, rope_scaling=YARN | dict(attn_factor=0.8782488562869419)),
    "Mistral 7B v0.1": MISTRAL | dict(sliding_window=12),
    "Mistral 7B v0.3": MISTRAL | dict(sliding_window=None, rope_theta=1000000.0),
    "Mistral Nemo": MISTRAL | dict(sliding_window=None, head_dim=16, rope_theta=1000000.0),
    "Phi-3-mini 4k": PHI,
    "Phi-3-mini 128k": PHI | dict(rope_scaling=LONGROPE, sliding_window=262144),
    "Phi-4-mini": PHI | dict(rope_scaling=LONGROPE | dict(long_factor=[1.0, 2.0, 9.0], short_factor=[1.0, 1.5, 2.0]), partial_rotary_factor=0.75, sliding_window=262144, tie_word_embeddings=True, num_key_value_heads=2, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False),
    "OLMo 2 1B": OLMO2,
    "OLMo 2 32B": OLMO2 | dict(num_key_value_heads=2),
    "OLMo 3 7B": OLMO3,
    "Gemma 3 1B": GEMMA,
    "Gemma 3 270M": GEMMA | dict(_sliding_window_pattern=2, layer_types=KINDS, use_bidirectional_attention=False),
    "Gemma 3 12B": GEMMA | dict(rope_scaling=dict(factor=8.0, rope_type="linear")),
    "Gemma 3, transformers 5": GEMMA5,
    "SmolLM3": SMOLLM3,
    "SmolLM3, YaRN": SMOLLM3 | dict(rope_scaling=YARN | dict(factor=2.0)),
}  # fmt: skip
OTHERS = {  # what a text or null may become
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "activation_function": "relu",
    "model_type": "mixtral",
    "type": "dynamic",
    "rope_type": "dynamic",
    "rope_scaling": dict(rope_type="linear", factor=2.0),
    "rope_parameters": dict(rope_type="linear", factor=2.0, rope_theta=1e4),
    "sliding_window": 7,
    "head_dim": 12,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [0, 1, 1, 1, 0, 1, 1, 1],
}
# What files of other models have, added to each
ADDED = dict(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, add_cross_attention=True, sliding_window=7, layer_types=KINDS, use_sliding_window=True, sliding_window_pattern=3, no_rope_layers=[1, 0] * 4, no_rope_layer_interval=2, partial_rotary_factor=0.5, attention_bias=True, mlp_bias=True, final_logit_softcapping=3.0, attn_logit_softcapping=3.0, query_pre_attn_scalar=99, rope_local_base_freq=100.0, head_dim=16, attention_multiplier=3.0, residual_multiplier=0.5, logit_scale=0.5, num_experts=4, attention_chunk_size=8, original_max_position_embeddings=48, rope_theta=77.0, rms_norm_eps=0.1, qk_norm=True, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=77.0), tie_word_embeddings=True, clip_qkv=1.0)  # fmt: skip


def changed(name, value):
    """-> other values of a key: texts, numbers, lists and booleans that a file might have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1, None]
    if isinstance(value, float):
        return [value * 1.5, value / 4, None]
    if isinstance(value, list):
        return [value[::-1], value[:1], value[1:] + value[:1]]
    return [OTHERS[name]] if name in OTHERS else []


def variants(config):
    """-> (the key, the file with this key changed or left out), also of keys in dicts in it."""
    for name, value in config.items():
        yield name, {key: config[key] for key in config if key != name}
        for other in changed(name, value):
            yield name, config | {name: other}
        if isinstance(value, dict):
            for inner, part in variants(value):
                yield f"{name}.{inner}", config | {name: part}
    if "model_type" in config:
        for name, value in ADDED.items():
            # OLMo 3's class passes it over; in older exports it is there beside equal rope_parameters
            if name not in config and (name, config["model_type"]) != ("rope_local_base_freq", "olmo3"):
                yield name, config | {name: value}


class Published:
    """A model of transformers for a config, saved, and its weights."""

    def __init__(self, config, folder):
        self.config, self.folder = config, folder
        torch.manual_seed(3)
        model = self.theirs(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.3)
        model.save_pretrained(folder)
        self.weights, self.tokens = (
            model.state_dict(),
            torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(5)),
        )

    def theirs(self, config):
        values = copy.deepcopy(config)
        rope = values.get("rope_scaling") or {}
        if "attn_factor" in rope:  # transformers ignores it
            rope["attention_factor"] = rope.pop("attn_factor") * (0.1 * math.log(rope["factor"]) + 1)
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().double()
        if hasattr(embedding := model.get_input_embeddings(), "embed_scale"):
            embedding.embed_scale.fill_(embedding.scalar_embed_scale)  # it was rounded
        return model

    def outcome(self, config):
        """-> "equal", "refused", "transformers refuses", or how far the logits are apart."""
        (self.folder / "config.json").write_text(json.dumps(config))
        shapes.note.cache_clear()
        try:
            ours = GPT.from_pretrained(self.folder, dtype="float64")
        except SnugError as error:
            assert "\n" not in str(error)
            return "refused"
        try:
            theirs = self.theirs(config)
            theirs.load_state_dict(self.weights)
            with torch.no_grad():
                expected = theirs(self.tokens).logits
        except Exception:  # of any kind: a check, or a shape that does not fit
            return "transformers refuses"
        with torch.no_grad():
            found = ours.logits(ours(self.tokens))
        return (
            "equal" if torch.allclose(found, expected, atol=1e-4, rtol=1e-4) else (found - expected).abs().max().item()
        )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_without_a_word(name, tmp_path, capsys):
    shapes.note.cache_clear()
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    read_shape(tmp_path)
    assert capsys.readouterr() == ("", "")


def test_the_original_context_at_the_top_of_a_file_wins(tmp_path):
    """As in transformers, whose own files have it there."""
    inside = LONGROPE | dict(original_max_position_embeddings=64)
    for top in (16, 32):
        config = PUBLISHED["Phi-3-mini 128k"] | dict(rope_scaling=inside, original_max_position_embeddings=top)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_shape(tmp_path)["rope_original_block_size"] == top
        theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
        assert theirs["original_max_position_embeddings"] == top


# A file that names a model, its change, and what the error names
OTHER_MODELS = {
    "EXAONE 4's windows": ("Llama 2", dict(sliding_window=12, layer_types=KINDS[:2]), "a llama with full_every=2"),
    "layers with windows, but no window": ("Llama 2", dict(layer_types=KINDS[:2]), "layer_types has windows"),
    "another kind of layer": ("Qwen3 8B", dict(layer_types=["full_attention", "linear_attention"]), "layer_types=['full_"),
    "full layers in a Mistral": ("Mistral 7B v0.1", dict(layer_types=["full_attention"] * 2), "full_every=1"),
    "the third period is another": ("OLMo 3 7B", dict(num_hidden_layers=12, layer_types=OLMO3["layer_types"] + KINDS), "layer_types=["),
    "too few layers": ("SmolLM3", dict(no_rope_layers=[1, 1, 1, 0]), "no_rope_layers=[1, 1, 1, 0]"),
    "layers without positions": ("Qwen2.5", dict(no_rope_layers=[1, 0]), "a qwen2 with nope_every=2"),
    "part of each head": ("Llama 2", dict(partial_rotary_factor=0.5), "a llama with rotary_fraction=0.5"),
    "scores that are not scaled": ("GPT-2", dict(scale_attn_weights=False), "scale_attn_weights=False"),
    "cross attention": ("GPT-2", dict(add_cross_attention=True), "add_cross_attention=True"),
    "numbers that turn in pairs of neighbours": ("SmolLM2", dict(rope_interleaved=True), "rope_interleaved=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_refused_by_name(name, tmp_path):
    base, changes, said = OTHER_MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[base] | changes))
    with pytest.raises(SnugError) as error:
        read_shape(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_keys_that_nobody_reads_are_said_once(tmp_path, capsys):
    """Also those in dicts, and those that only another family has; null says nothing."""
    shapes.note.cache_clear()
    more = dict(logit_scale=0.5, clip_qkv=None, query_pre_attn_scalar=99, rope_scaling=LLAMA3 | dict(low=2, no=None))
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama 3.2 1B"] | more | {"a\x1b": 1}))
    for _ in range(2):
        read_shape(tmp_path)
    out, err = capsys.readouterr()
    said = "unknown to snug, and ignored: a\\x1b, logit_scale, query_pre_attn_scalar, rope_scaling.low\n"
    assert out == "" and err.count("\n") == 1 and err.endswith(said)


def test_what_a_file_leaves_out_is_its_classs(tmp_path):
    """Numbers that no tensor's shape shows."""
    for name, config in PUBLISHED.items():
        left = {key: config[key] for key in config if key not in ("rms_norm_eps", "layer_norm_epsilon", "rope_theta")}
        (tmp_path / "config.json").write_text(json.dumps(left))
        shape, theirs = read_shape(tmp_path), transformers.AutoConfig.for_model(**copy.deepcopy(left))
        assert shape["norm_eps"] == getattr(theirs, "rms_norm_eps", 1e-5), name
        rope = getattr(theirs, "rope_parameters", {})
        rope = rope.get("full_attention", rope)
        assert shape.get("rope_theta", 0) == rope.get("rope_theta", 0), name


YARN5 = YARN | dict(rope_theta=1e6)
DEEP = "[" * 500 + "]" * 500
HOSTILE = {  # the model's name, what config.json gets (a text: as JSON)
    "layers": ("Llama 2", dict(num_hidden_layers=30_000_000)),
    "layers of GPT-2": ("GPT-2", dict(n_layer=30_000_000)),
    "layers and a list": ("SmolLM3", dict(num_hidden_layers=2**62)),
    "layers by an interval": ("SmolLM3", dict(num_hidden_layers=2**62, no_rope_layers=None, layer_types=None)),
    "an original context of 1": ("Phi-3-mini 128k", dict(original_max_position_embeddings=1)),
    "a tiny factor": ("Phi-3-mini 128k", dict(rope_scaling=LONGROPE | dict(factor=1e-9))),
    "yarn's tiny factor": ("Qwen3, YaRN", dict(rope_scaling=YARN | dict(factor=1e-9))),
    "a huge original context": ("Phi-3-mini 128k", dict(original_max_position_embeddings=2**62)),
    "factors of text": ("Phi-3-mini 128k", dict(rope_scaling=LONGROPE | dict(short_factor=["a"] * 4))),
    "factors of lists": ("Phi-3-mini 128k", dict(rope_scaling=LONGROPE | dict(long_factor=[[1.0]] * 4))),
    "a factor of 0": ("Phi-3-mini 128k", dict(rope_scaling=LONGROPE | dict(long_factor=[1.0, 1.0, 0.0, 1.0]))),
    "a factor that is no number": ("Phi-3-mini 128k", dict(rope_scaling=LONGROPE | dict(short_factor=[1.0, float("nan")] * 2))),
    "an infinite factor": ("Phi-3-mini 128k", dict(rope_scaling=LONGROPE | dict(short_factor=[1.0, float("inf")] * 2))),
    "one factor": ("Phi-3-mini 128k", dict(rope_scaling=LONGROPE | dict(short_factor=[1.0]))),
    "five long factors": ("Phi-3-mini 128k", dict(rope_scaling=LONGROPE | dict(long_factor=[1.0] * 5))),
    "yarn with a base of 1": ("Qwen3, YaRN", dict(rope_theta=1.0)),
    "heads of 1": ("Llama 2", dict(head_dim=1)),
    "heads of 3": ("Llama 2", dict(head_dim=3)),
    "more heads than numbers": ("Llama 2", dict(num_attention_heads=64)),
    "a part of a head that is odd": ("Phi-4-mini", dict(partial_rotary_factor=0.4, rope_scaling=None)),
    "more than a head turns": ("Phi-4-mini", dict(partial_rotary_factor=1.5, rope_scaling=None)),
    "heads that the keys' do not divide": ("Llama 2", dict(num_key_value_heads=3)),
    "eyes alone": ("Gemma 3 1B", '{"model_type": "gemma3", "hidden_sise": 3}'),
    "a text model that is a list": ("Gemma 3 1B", '{"model_type": "gemma3", "text_config": [1]}'),
    "a family that is a list": ("Llama 2", dict(model_type=["llama"])),
    "no family": ("Llama 2", dict(model_type=None)),
    "a rope that is a text": ("Llama 2", dict(rope_scaling="linear")),
    "a rope's kind that is a list": ("Llama 2", dict(rope_scaling=dict(rope_type=["linear"], factor=2.0))),
    "kinds of layers that are ropes": ("Gemma 3, transformers 5", dict(rope_parameters=dict(full_attention=[]))),
    "layers that are a number": ("OLMo 3 7B", dict(layer_types=8)),
    "layers that are lists": ("OLMo 3 7B", dict(layer_types=[["full_attention"]] * 8)),
    "a window of 0": ("Mistral 7B v0.1", dict(sliding_window=0)),
    "NaN": ("Llama 2", dict(rms_norm_eps=float("nan"))),
    "Infinity": ("Llama 2", dict(rope_theta=float("inf"))),
    "deep": ("Llama 2", f'{{"model_type": "llama", "hidden_size": {DEEP}}}'),
    "deeper": ("Llama 2", f'{{"model_type": "llama", "rope_scaling": {{"rope_type": {DEEP}}}}}'),
    "as deep as it goes": ("Llama 2", '{"model_type": ' + "[" * 100_000),
    "digits": ("Llama 2", '{"model_type": "llama", "hidden_size": %s}' % ("9" * 4000)),
    "more digits": ("Llama 2", '{"model_type": "llama", "hidden_size": %s}' % ("9" * 5000)),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """-> {name: the bytes of its weights}."""

    @functools.cache
    def save(name):
        return (
            Published(PUBLISHED[name], tmp_path_factory.mktemp("a") / "model").folder / "model.safetensors"
        ).read_bytes()

    return save


def refused(folder):
    with pytest.raises(SnugError) as error:
        GPT.from_pretrained(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_config_is_one_line(case, saved, tmp_path):
    name, changes = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(saved(name))
    text = changes if isinstance(changes, str) else json.dumps(PUBLISHED[name] | changes)
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path)


NUMBERS = ["Llama 2", "GPT-2", "Phi-4-mini", "Qwen2.5, YaRN's numbers", "Gemma 3 12B", "SmolLM3"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("wrong", ["2", True, -2, 0, 2**70, float("nan"), [2], {}], ids=repr)
def test_a_number_that_is_none_is_one_line(name, wrong, saved, tmp_path):
    """Each number that matters, also those of ropes."""
    config = PUBLISHED[name]
    (tmp_path / "model.safetensors").write_bytes(saved(name))
    known = {
        *shapes.NAMES["gpt2" if name == "GPT-2" else "llama"].values(),
        "rope_theta",
        "original_max_position_embeddings",
    }
    known |= {"query_pre_attn_scalar", "rope_local_base_freq", "no_rope_layer_interval", "partial_rotary_factor"}
    places = [config | {key: wrong} for key, value in config.items() if key in known and not isinstance(value, bool)]
    if rope := config.get("rope_scaling"):
        inner = [key for key, value in rope.items() if isinstance(value, (int, float))]
        places += [config | dict(rope_scaling=rope | {key: wrong}) for key in inner]
    for changed in places:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        refused(tmp_path)


def test_a_command_ends_with_one_line(saved, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.safetensors").write_bytes(saved("Llama 2"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(num_hidden_layers=30_000_000)))
    get_tokenizer("bytes").save(tmp_path)
    with pytest.raises(SystemExit) as stopped, friendly_errors():
        sample.main(SampleSettings(prompt="hi"), set(), find_run(str(tmp_path)))
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert "config.json: not the shape of a model (ValueError: n_layer=30000000 is" in err and err.count("\n") == 1


SAID = re.compile("unknown to snug|is not read")


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_no_key_is_passed_over_in_silence(name, tmp_path, capsys):
    warnings.simplefilter("ignore")
    published, counts, others = Published(PUBLISHED[name], tmp_path / "model"), {}, []
    assert published.outcome(PUBLISHED[name]) == "equal"
    for key, config in variants(PUBLISHED[name]):
        outcome = published.outcome(config)
        err = "".join(line for line in capsys.readouterr().err.splitlines() if SAID.search(line))
        if err and (outcome == "equal" or isinstance(outcome, float)):
            assert key.partition("_")[0] in err
            outcome = "said"
        if isinstance(outcome, float):
            others.append((key, config.get(key, "left out"), outcome))
            outcome = "other"
        counts[outcome] = counts.get(outcome, 0) + 1
    print(f"\n{name}: {len(PUBLISHED[name])} keys, {counts}")
    assert not others
