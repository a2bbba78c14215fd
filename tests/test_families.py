"""Families of models, beside transformers' own classes with random weights."""

import copy
import dataclasses
import json
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

import grpo
from batch import Cut
from helpers.errors import assert_refused
from helpers.families import CASES, FAMILIES, NONE, SMALL, Float64, change_config, their_model, transformers
from helpers.models import add_adapters, logits_of
from helpers.rollouts import assert_naive, assert_same_gradient, gradient, make_rollouts, never_stop
from model import GPT
from padded import a_few, padded
from runs.log import read_log
from runs.prepare import prepare
from sample import sample_groups
from settings import GRPOSettings
from snug import lora
from snug.kernels.rotary import rotary_frequencies
from snug.memory.plan import MIB, plan
from snug.pretrained.adapters import find_base, save_adapters
from snug.pretrained.shapes import config_of, read_shape
from snug.pretrained.tensors import entries, look_at_weights, read_weights, rows_of, save_pretrained
from snug.shape import GPTConfig
from snug.tokenizer import get_tokenizer
from training.dry_run import DryRun

ROPES = dict(full_attention="rotary", sliding_attention="sliding")


def some(*names):
    """Run a test for these cases, and for the others with --long."""
    cases = [case if case in names else pytest.param(case, marks=pytest.mark.long) for case in FAMILIES]
    return pytest.mark.parametrize("pair", cases, indirect=True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """-> (transformers' model, the folder that it saved)."""
    folder = tmp_path_factory.mktemp("models") / "in"
    theirs = their_model(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder


def tokens_of(B, T):
    return torch.randint(97, (B, T), generator=torch.Generator().manual_seed(5))


class Exact(Float64):
    """Within it transformers' model is in float64, all of it. It has our rotary tables, because two float32 cosines of a number may differ by its last bit."""

    def __init__(self, theirs, ours):
        super().__init__()
        self.theirs, self.ours = copy.deepcopy(theirs).double(), ours

    def __enter__(self):
        self.theirs.model.rotary_emb.forward = self.tables
        embedding = self.theirs.model.embed_tokens
        if hasattr(embedding, "embed_scale"):
            embedding.embed_scale.fill_(embedding.scalar_embed_scale)  # it was rounded to float32
        super().__enter__()
        return self.theirs

    def tables(self, x, position_ids, layer_type="full_attention"):
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids  # in images: of time, row, column
        angles = self.ours.angles(position_ids, int(position_ids.max()) + 1)
        return [table[:, 0].double() for table in angles[ROPES[layer_type]]]


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_logits_are_transformers(pair):
    """Far behind the window of 12 tokens."""
    theirs, folder = pair
    ours, tokens = GPT.from_pretrained(folder), tokens_of(2, 100)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_gradients_are_transformers(pair):
    assert_transformers_gradients(*pair, 100)


@pytest.mark.parametrize("pair", ["qwen3.5"], indirect=True)
@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 200])
def test_around_a_chunk_of_64_tokens(pair, T):
    assert_transformers_gradients(*pair, T)


def assert_transformers_gradients(theirs, folder, T):
    """Of every weight, and logits, in float64."""
    ours, tokens = GPT.from_pretrained(folder, dtype="float64"), tokens_of(2, T)
    weights = torch.randn(2, T, ours.config.vocab_size, dtype=torch.float64) / T
    with Exact(theirs, ours) as theirs:
        logits = theirs(tokens).logits
        (logits * weights).sum().backward()
        expected = {name: p.grad for name, p in theirs.named_parameters()}
    found = ours.logits(ours(tokens))
    torch.testing.assert_close(found, logits, atol=1e-10, rtol=1e-10)
    (found * weights).sum().backward()
    found = dict(ours.named_parameters())
    places = entries(ours.config, config_of(ours.config, "float32")["model_type"])
    assert {entry.name for entry in places} == expected.keys()
    for entry in places:
        value = rows_of(found[entry.ours].grad, entry)
        torch.testing.assert_close(value, expected[entry.name], atol=1e-9, rtol=1e-9, msg=entry.name)


@some("gemma3", "phi4-mini")
@pytest.mark.parametrize("way", ["none", "block", "selective"])
def test_packed_rows_are_padded_ones(pair, way):
    """Prompts and completions up to 21 tokens, where the window has 12."""
    model, rollouts = GPT.from_pretrained(pair[1], dtype="float64"), make_rollouts()
    options = GRPOSettings(max_new_tokens=12, beta=0.1)
    with padded(poison=7):
        oracle = gradient(model, rollouts, a_few(Cut(rollouts), 4), options)
    model.checkpoint_blocks = way
    for budget in (0, 14):
        assert_same_gradient(gradient(model, rollouts, Cut(rollouts, 0, budget, 3), options), oracle)


@pytest.mark.parametrize("count, longest", [(2, 24), pytest.param(4, 44, marks=pytest.mark.long)])
@pytest.mark.parametrize("replies", [False, True])
def test_the_sampler_is_the_naive_one(pair, count, longest, replies):
    """Ragged prompts, slots that get new sequences, completions behind the window of 12, also behind replies."""
    model = GPT.from_pretrained(pair[1], dtype="float64")
    prompts, options = [list(range(3, 8)), list(range(40, 62))], dict(seed=1, stop_token=(5, 17, 30))
    if replies:
        options["respond"] = lambda row, ids: [7] * (5 + row) if len(ids) < 20 else None
    rollouts = sample_groups(model, prompts, count, longest, max_batch=count + 1, **options)
    assert replies or len({len(ids) for ids in rollouts.completions()}) > 1
    assert_naive(rollouts, model, prompts, longest, **options)


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_an_export_is_the_folder_again(pair, tmp_path):
    theirs, folder = pair
    save_pretrained(GPT.from_pretrained(folder), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens_of(2, 100)).logits, theirs(tokens_of(2, 100)).logits)
    assert again.config.model_type in (theirs.config.model_type, "llama")  # a Mistral without a window
    assert read_shape(tmp_path / "out") == read_shape(folder)


WRITTEN = {  # a case, what changes: the properties that are named, or none
    "gemma3 without a window": ("gemma3", dict(sliding_window=0, full_every=0), "sliding_window=0, full_every=0"),
    "gemma3, all layers slide": ("gemma3", dict(full_every=0), ""),
    "gemma3, every third is full": ("gemma3", dict(full_every=3), ""),
    "gemma3, a period longer than the model": ("gemma3", dict(full_every=9), ""),
    "gemma3, embeddings as they are": ("gemma3", dict(embedding_scale=1.0), "embedding_scale=1.0"),
    "gemma3, another width": ("gemma3", dict(n_embd=64), "embedding_scale=5.65"),
    "gemma3, an odd scale of queries": ("gemma3", dict(query_scale=0.7), "query_scale=0.7"),
    "gemma3, one base": ("gemma3", dict(rope_sliding_theta=0.0), "rope_sliding_theta=0.0"),
    "olmo3, all layers slide": ("olmo3", dict(full_every=0), ""),
    "olmo3, other bases": ("olmo3", dict(rope_theta=2e3, rope_sliding_theta=3e2), ""),
    "olmo3 without a window": ("olmo3", dict(sliding_window=0, full_every=0, rope_sliding_theta=0.0), ""),
    "olmo2 with a window": ("olmo2", dict(sliding_window=5), "sliding_window=5"),
    "olmo2 with a window and its base": ("olmo2", dict(sliding_window=5, rope_sliding_theta=1e4), ""),
    "a factor of attention": (
        "mistral sliding",
        dict(rope_factor=2.0, rope_attention_factor=1.5),
        "rope_attention_factor",
    ),
    "smollm3, every second": ("smollm3", dict(nope_every=2), ""),
    "smollm3, none": ("smollm3", dict(nope_every=9), ""),
    "gpt2 with a window": ("gpt2", dict(sliding_window=5), "sliding_window=5"),
    "gpt2 with two": ("gpt2", dict(embedding_scale=2.0, query_scale=0.5), "embedding_scale=2.0, query_scale=0.5"),
    "gpt2 without biases": ("gpt2", dict(bias=False), ""),
    "gpt2 with another norm": ("gpt2", dict(norm="rmsnorm"), "norm=rmsnorm"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_the_shape_or_is_refused_by_name(name, tmp_path):
    """transformers' model of the new folder has our logits."""
    case, changes, said = WRITTEN[name]
    shape = dict(vocab_size=97, block_size=256, n_layer=2, n_head=4, n_embd=32, bias=True)
    if case != "gpt2":
        their_model(case).config.save_pretrained(tmp_path / "in")
        shape = read_shape(tmp_path / "in")
    torch.manual_seed(1)
    model = GPT(GPTConfig(**shape | changes))
    if said:
        assert_refused(f"nearest architecture, cannot have {re.escape(said)}", save_pretrained, model, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    save_pretrained(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        ours, expected = model.logits(model(tokens_of(2, 60))), theirs(tokens_of(2, 60)).logits
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_an_export_says_what_classes_would_assume(tmp_path):
    """transformers' classes have windows of their own where a file says nothing."""
    their_model("phi3 sliding").save_pretrained(tmp_path / "in")
    save_pretrained(GPT(GPTConfig(**read_shape(tmp_path / "in") | dict(sliding_window=0))), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["sliding_window"] is None and "layer_types" not in config


def with_eyes():
    """A Gemma 3 with eyes, as transformers has it."""
    text = dict(CASES["gemma3"][1], num_hidden_layers=2)
    eyes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    eyes |= dict(image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text, vision_config=eyes, mm_tokens_per_image=4)
    torch.manual_seed(3)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def qwen_with_eyes():
    """The same for Qwen3.5, without a head for drafts, which transformers leaves out."""
    eyes = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, num_position_embeddings=4)
    config = transformers.Qwen3_5Config(text_config=CASES["qwen3.5"][1], vision_config=eyes)
    torch.manual_seed(3)
    return transformers.Qwen3_5ForConditionalGeneration(config).eval()


def test_a_qwen_is_read_without_eyes_and_without_drafts(tmp_path):
    """In float64."""
    qwen_with_eyes().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any("model.visual." in name for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    ours, tokens = GPT.from_pretrained(tmp_path, dtype="float64"), tokens_of(2, 100)
    with torch.no_grad(), Exact(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), ours) as theirs:
        torch.testing.assert_close(ours.logits(ours(tokens)), theirs(tokens).logits, atol=1e-10, rtol=1e-10)


def test_a_gemma_with_eyes_is_read_without_them(tmp_path):
    """Its config.json has the text model's inside, and leaves out what the class has."""
    theirs = with_eyes()
    theirs.save_pretrained(tmp_path / "in")
    ours, tokens = GPT.from_pretrained(tmp_path / "in"), tokens_of(2, 40)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, token_type_ids=torch.zeros_like(tokens)).logits
        torch.testing.assert_close(ours.logits(ours(tokens)), expected, atol=1e-5, rtol=1e-5)
    save_pretrained(ours, tmp_path / "out")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "gemma3_text"


def test_what_a_file_leaves_out_is_the_classs(tmp_path):
    """Gemma 3 4B's config.json."""
    file = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024)
    file |= dict(model_type="gemma3_text", rope_scaling=dict(rope_type="linear", factor=8.0))
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gemma3", text_config=file)))
    shape, theirs = read_shape(tmp_path), transformers.Gemma3TextConfig(**file)
    assert (shape["n_head"], shape["n_kv_head"], shape["head_size"]) == (8, 4, 256)
    assert (shape["vocab_size"], shape["block_size"]) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert shape["rope_theta"] == theirs.rope_parameters["full_attention"]["rope_theta"] and shape["rope_factor"] == 8
    assert shape["rope_sliding_theta"] == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    assert [GPTConfig(**shape).slides(i) for i in range(34)] == [kind[0] == "s" for kind in theirs.layer_types]


ROPE_RULES = {  # heads of 64 numbers, a context that was stretched from 4096
    "yarn": dict(rope_type="yarn", factor=4.0),
    "yarn's range": dict(rope_type="yarn", factor=4.0, beta_fast=16.0, beta_slow=2.0),
    "yarn for attention": dict(rope_type="yarn", factor=8.0, attention_factor=1.1),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "linear": dict(rope_type="linear", factor=8.0),
    "longrope": dict(rope_type="longrope", short_factor=[1.0 + i / 8 for i in range(32)], long_factor=[2.0] * 32),
}
ROPE_RULES["longrope's factor"] = ROPE_RULES["longrope"] | dict(factor=16.0)
ROPE_RULES["longrope for attention"] = ROPE_RULES["longrope"] | dict(factor=16.0, attention_factor=1.3)


@pytest.mark.parametrize("rule", ROPE_RULES)
def test_a_ropes_rule_is_transformers(rule, tmp_path):
    """Frequencies and the factor of attention, at a published size: what the file leaves out matters there."""
    rope, family = dict(ROPE_RULES[rule], rope_theta=1e4), "phi3" if "longrope" in rule else "llama"
    if rule != "linear":
        rope["original_max_position_embeddings"] = 4096
    config = SMALL | dict(model_type=family, hidden_size=256, max_position_embeddings=131072, rope_parameters=rope)
    (tmp_path / "config.json").write_text(json.dumps(config))
    c, theirs = GPTConfig(**read_shape(tmp_path)), transformers.AutoConfig.for_model(**copy.deepcopy(config))
    frequencies, attention = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    torch.testing.assert_close(rotary_frequencies(c, "cpu"), frequencies, rtol=1e-6, atol=0)
    assert c.rope_attention_factor == pytest.approx(attention)


@pytest.mark.parametrize("pair", ["phi4-mini"], indirect=True)
def test_longrope_ends_at_the_original_context(pair):
    """Behind it transformers has other factors for all tokens."""
    c = GPT.from_pretrained(pair[1]).config
    assert c.block_size == c.rope_original_block_size == 128
    with pytest.raises(ValueError, match="129 tokens is longer than block_size=128"):
        GPT(c)(tokens_of(1, 129))
    assert_refused("block_size=129 is more than longrope's original 128", GPT.from_pretrained, pair[1], block_size=129)


def test_deepseeks_yarn(tmp_path):
    """attn_factor takes back what YaRN does to attention by itself. An export says what it comes to."""
    theirs = their_model("qwen3 yarn")
    theirs.save_pretrained(tmp_path / "in")
    rope = theirs.config.rope_parameters | dict(attn_factor=0.8782488562869419)  # 1 / (0.1 ln 4 + 1)
    change_config(tmp_path / "in", rope_parameters=rope)
    assert read_shape(tmp_path / "in")["rope_attention_factor"] == pytest.approx(1)
    save_pretrained(GPT.from_pretrained(tmp_path / "in"), tmp_path / "out")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert again.rope_parameters["attention_factor"] == pytest.approx(1)


def trained_adapters(folder, targets):
    """-> a model with adapters that do something."""
    return add_adapters(GPT.from_pretrained(folder), 3, 6.0, targets, std=0.3)


def assert_there_and_back(theirs, folder, targets, to):
    """The adapters' names, shapes and targets are those of transformers' modules; read again they do the same."""
    model = trained_adapters(folder, targets)
    save_adapters(model, to, folder, GRPOSettings(lora_rank=3, lora_alpha=6.0))
    config = json.loads((to / "adapter_config.json").read_text())
    modules = dict(theirs.named_modules())
    named = {name.removeprefix("base_model.model.")[:-14] for name in load_file(to / "adapter_model.safetensors")}
    assert named == {*config["target_modules"]} <= modules.keys() and not any("vision" in name for name in named)
    expected = sum(
        len(getattr(getattr(b, lora.TARGETS[target]), target).weight) for b in model.blocks for target in targets
    )
    assert sum(modules[name].weight.shape[0] for name in named) == expected
    base, *adapters = find_base(to)
    again = GPT.from_pretrained(base)
    read_weights(look_at_weights(base), again, *adapters)
    for (name, ours), value in zip(lora.merge(model).named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours, value, atol=1e-6, rtol=1e-6, msg=name)


def test_adapters_there_and_back(pair, tmp_path):
    """As PEFT names them: of a Phi, one for the fused matrix."""
    assert_there_and_back(*pair, list(lora.TARGETS), tmp_path / "adapters")


OTHERS = {  # models whose shape is another family's, or a part of the model
    "eyes": with_eyes, "qwen3.5": qwen_with_eyes, "phi4 14B": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, **NONE)),
    "phi3 mini 4k": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, **NONE, sliding_window=12)),
}  # fmt: skip


@pytest.mark.parametrize("targets", [["qkv"], ["proj", "up"], ["down", "up", "qkv"]], ids=" ".join)
@pytest.mark.parametrize("case", OTHERS)
def test_adapters_have_the_names_of_their_base(case, targets, tmp_path):
    OTHERS[case]().save_pretrained(tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert_there_and_back(theirs, tmp_path / "base", targets, tmp_path / "adapters")


@pytest.mark.long
@pytest.mark.parametrize("targets", [["qkv"], ["proj", "up"], list(lora.TARGETS)], ids=" ".join)
@pytest.mark.parametrize("case", OTHERS)
def test_peft_beside_the_base_is_our_model(case, targets, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    OTHERS[case]().save_pretrained(tmp_path / "base")
    model = trained_adapters(tmp_path / "base", targets)
    save_adapters(model, tmp_path / "adapters", tmp_path / "base", GRPOSettings(lora_rank=3, lora_alpha=6.0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    exact = Exact(theirs, model.double()) if case == "qwen3.5" else nullcontext()
    theirs, tolerance = getattr(exact, "theirs", theirs), 1e-10 if case == "qwen3.5" else 1e-4
    with warnings.catch_warnings(action="error", category=UserWarning):
        both = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters").eval()
    tokens = tokens_of(2, 40)
    more = dict(token_type_ids=torch.zeros_like(tokens)) if case == "eyes" else {}
    with torch.no_grad(), exact:
        expected = both(input_ids=tokens, **more).logits
        torch.testing.assert_close(model.logits(model(tokens)), expected, atol=tolerance, rtol=tolerance)
        with both.disable_adapter():
            before = both(input_ids=tokens, **more).logits
    assert (expected - before).abs().max() > 0.1


@some()  # test_plan.py has the other shapes
@pytest.mark.parametrize("options", [dict(beta=0.04), dict(lora_rank=4, base_dtype="nf4")], ids=["reference", "QLoRA"])
def test_a_run_takes_what_was_planned(pair, options, tmp_path, monkeypatch):
    """Training, sampling beyond a window of 8 tokens, the reference; within 0.1 % of the meter, or 0.03 MiB."""
    never_stop(monkeypatch)
    config = GPT.from_pretrained(pair[1]).config
    config = dataclasses.replace(config, vocab_size=257, n_vocab=257, n_embd=128, n_hidden=256)
    if config.embedding_scale != 1:
        config = dataclasses.replace(config, embedding_scale=128**0.5)
    if config.sliding_window:
        config = dataclasses.replace(config, sliding_window=8)
    if config.full_every:  # the plan runs 3 and 5 blocks
        config = dataclasses.replace(config, n_layer=7, full_every=2)
    save_pretrained(GPT(config), tmp_path / "model", get_tokenizer("bytes"))
    options |= dict(init_from=str(tmp_path / "model"), out_dir=str(tmp_path / "run"), digits=4, device="cpu")
    options |= dict(batch_size=6, group_size=4, max_new_tokens=24, max_iters=2, eval_prompts=0, save_interval=0)
    settings = GRPOSettings(max_tokens_per_micro_batch=306, **options)
    prepared = prepare(settings)
    prepared.reward_funcs = [lambda prompts, completions, **columns: [float(i % 2) for i in range(len(prompts))]]
    planned = plan(DryRun(prepared, grpo.iterate), settings).peak / MIB
    grpo.main(prepared)
    measured = read_log(settings.out_dir)[-1]["mem_max_alloc_mb"]
    assert planned == pytest.approx(measured, rel=1e-3, abs=0.03)
