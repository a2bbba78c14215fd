"""config.json of published models, in tiny sizes: each key is changed, and left out, one at a time.

Then the logits are transformers', or snug or transformers refuses the file, or snug says that it does not know the key.
"""

import copy
import json
import math
import re
import warnings

import pytest
import torch

from helpers import HOME
from helpers.families import Float64
from helpers.runs import refused
from model import GPT
from snug.options import SnugError
from snug.pretrained import shapes
from snug.pretrained.shapes import read_shape

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")

PUBLISHED = json.loads((HOME / "tests/data/configs.json").read_text())
KINDS = ["sliding_attention", "full_attention"] * 2
LONGROPE = PUBLISHED["Phi-3-mini 128k"]["rope_scaling"]
# What a text or null may become
OTHERS = dict(hidden_act="gelu", hidden_activation="silu", activation_function="relu", model_type="mixtral")
OTHERS |= dict(type="dynamic", rope_type="dynamic", rope_scaling=dict(rope_type="linear", factor=2.0))
OTHERS |= dict(rope_parameters=OTHERS["rope_scaling"] | dict(rope_theta=1e4), sliding_window=7, head_dim=12)
OTHERS |= dict(final_logit_softcapping=3.0, attn_logit_softcapping=3.0, layer_types=KINDS[:2])
OTHERS |= dict(no_rope_layers=[0, 1, 1, 1, 0, 1, 1, 1])
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
        self.weights = model.state_dict()
        self.tokens = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(5))

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
            with torch.no_grad(), Float64():
                expected = theirs(self.tokens).logits
        except Exception:  # of any kind: a check, or a shape that does not fit
            return "transformers refuses"
        with torch.no_grad():
            found = ours.logits(ours(self.tokens))
        same = torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
        return "equal" if same else (found - expected).abs().max().item()


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
    "another kind of layer": ("Qwen3 8B", dict(layer_types=["full_attention", "linear_attention"]), "layer_types=['full_"),
    "full layers in a Mistral": ("Mistral 7B v0.1", dict(layer_types=["full_attention"] * 2), "full_every=1"),
    "the third period is another": ("OLMo 3 7B", dict(num_hidden_layers=12, layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2 + KINDS), "layer_types=["),
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
    assert said in refused(read_shape, tmp_path)


def test_keys_that_nobody_reads_are_said_once(tmp_path, capsys):
    """Also those in dicts, and those that only another family has; null says nothing."""
    shapes.note.cache_clear()
    more = dict(logit_scale=0.5, clip_qkv=None, query_pre_attn_scalar=99)
    more |= dict(rope_scaling=dict(rope_type="linear", factor=2.0, low=2, no=None))
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama 3.2 1B"] | more | {"a\x1b": 1}))
    for _ in range(2):
        read_shape(tmp_path)
    out, err = capsys.readouterr()
    said = "unknown to snug, and ignored: a\\x1b, logit_scale, low, query_pre_attn_scalar\n"
    assert out == "" and err.count("\n") == 1 and err.endswith(said)


def test_what_a_file_leaves_out_is_its_classs(tmp_path):
    """Numbers that no tensor's shape shows."""
    for name, config in PUBLISHED.items():
        left = {key: config[key] for key in config if key not in ("rms_norm_eps", "layer_norm_epsilon", "rope_theta")}
        (tmp_path / "config.json").write_text(json.dumps(left))
        shape, theirs = read_shape(tmp_path), transformers.AutoConfig.for_model(**copy.deepcopy(left)).get_text_config()
        assert shape["norm_eps"] == getattr(theirs, "rms_norm_eps", 1e-5), name
        rope = getattr(theirs, "rope_parameters", {})
        rope = rope.get("full_attention", rope)
        assert shape["rope_theta"] == rope.get("rope_theta", 1e4), name


HOSTILE = {  # the model's name, what config.json gets (a text: as JSON)
    "an original context of 1": ("Phi-3-mini 128k", dict(original_max_position_embeddings=1)),
    "heads that the keys' do not divide": ("Llama 2", dict(num_key_value_heads=3)),
    "eyes alone": ("Gemma 3 1B", '{"model_type": "gemma3", "hidden_sise": 3}'),
    "a rope that is a text": ("Llama 2", dict(rope_scaling="linear")),
    "a rope's kind that is a list": ("Llama 2", dict(rope_scaling=dict(rope_type=["linear"], factor=2.0))),
    "a window of 0": ("Mistral 7B v0.1", dict(sliding_window=0)),
    "as deep as it goes": ("Llama 2", '{"model_type": ' + "[" * 100_000),
    "more digits": ("Llama 2", '{"model_type": "llama", "hidden_size": %s}' % ("9" * 5000)),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_config_is_one_line(case, tmp_path):
    name, changes = HOSTILE[case]
    text = changes if isinstance(changes, str) else json.dumps(PUBLISHED[name] | changes)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path) in refused(read_shape, tmp_path)


SAID = re.compile("unknown to snug|is not read")


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_no_key_is_passed_over_in_silence(name, tmp_path, capsys):
    warnings.simplefilter("ignore")
    published, others = Published(PUBLISHED[name], tmp_path / "model"), []
    assert published.outcome(PUBLISHED[name]) == "equal"
    for key, config in variants(PUBLISHED[name]):
        outcome = published.outcome(config)
        err = "".join(line for line in capsys.readouterr().err.splitlines() if SAID.search(line))
        if err and (outcome == "equal" or isinstance(outcome, float)):
            assert "rope" in key or key.rpartition(".")[2].partition("_")[0] in err
        elif isinstance(outcome, float):
            others.append((key, config.get(key, "left out"), outcome))
    assert not others
