"""Folders of adapters as PEFT writes them: read, merged, refused, resumed; each is a model wherever a folder is one."""

import gc
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import evaluate
import sample
from helpers.errors import assert_refused
from helpers.models import make_model
from helpers.runs import LORA, ONE_DIGIT, refused, run_grpo
from model import GPT
from model import make_model as make_gpt
from runs import export
from runs.checkpoint import find_run, newest
from runs.loading import load_run
from settings import EvaluateSettings, ExportSettings, SampleSettings
from snug import lora
from snug.memory import MemoryMeter
from snug.options import SnugError, read_settings
from snug.pretrained.adapters import find_base
from snug.pretrained.shapes import read_shape
from snug.pretrained.tensors import look_at_weights, read_weights, save_pretrained
from snug.tokenizer import get_tokenizer

TOKENS = torch.arange(20)[None]
MODULE = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
pytestmark = pytest.mark.usefixtures("one_thread")


def make_base(folder, shape="llama", **changes):
    of_qwen = dict(qk_norm=False, proj_bias=False) if shape == "llama" else {}
    save_pretrained(make_model(shape, vocab_size=257, **of_qwen | changes).cpu(), folder, get_tokenizer("bytes"))
    return folder


def make_adapters(folder, base, *targets, r=4, **changes):
    """A folder as PEFT writes it, for the base's matrices of these names; B is random."""
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(targets) and weight.dim() == 2:
            rows, columns = weight.shape[::-1] if "transformer." in name else weight.shape
            for letter, size in dict(A=(r, columns), B=(rows, r)).items():
                tensors[f"base_model.model.{module}.lora_{letter}.weight"] = 0.1 * torch.randn(size)
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=str(base), revision=None, r=r)
    config |= dict(lora_alpha=8, bias="none", target_modules=list(targets), fan_in_fan_out="c_attn" in targets)
    config |= dict(use_rslora=False, use_dora=False, modules_to_save=None, rank_pattern={}, alpha_pattern={})
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config | dict(init_lora_weights=True) | changes))
    return folder


def change(folder, **changes):
    """Values of adapter_config.json."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def logits_of(model):
    model.double()
    return model.logits(model(TOKENS)).detach()


@pytest.mark.parametrize("shape, options", [("gpt2", []), ("llama", ["--lora_target_modules=qkv,down"])])
def test_what_snug_wrote_is_read(shape, options, tmp_path, varied_rewards):
    """In float64 the logits are those of the run's own model, its adapters merged. The base's folder is named whole."""
    base = make_base(tmp_path / "mine@home/base", shape)
    run_grpo(base, tmp_path / "run", *LORA, *options, "--reward_funcs=lora_rewards:varied")
    export.main(ExportSettings(to=str(tmp_path / "peft"), adapters=True), str(tmp_path / "run"))
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["fan_in_fan_out"] == (shape == "gpt2")
    assert (config["base_model_name_or_path"], config["revision"]) == (str(base), None)
    run = load_run(tmp_path / "run", "cpu").model
    assert all(module.lora_B.any() for module in lora.adapted(run))
    ours = load_run(tmp_path / "peft", "cpu").model
    assert not lora.adapted(ours)
    torch.testing.assert_close(logits_of(ours), logits_of(lora.merge(run)), rtol=0, atol=1e-12)


TARGETS = {  # PEFT's defaults, all, one of two of a fused matrix; an untied head has adapters, too
    "llama": [("q_proj", "v_proj"), ("gate_proj", "down_proj", "o_proj"), ("k_proj", "lm_head")],
    "gpt2": [("c_attn",), ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")],
}


@pytest.mark.parametrize("shape, targets", [(shape, targets) for shape in TARGETS for targets in TARGETS[shape]])
def test_each_matrix_gets_its_product(shape, targets, tmp_path):
    """W + scale * B A in float64, matrix by matrix, from the files."""
    rslora = len(targets) == 2
    base = make_base(tmp_path / "base", shape)
    before = (base / "model.safetensors").read_bytes()
    begun = "gaussian" if rslora else False  # other ways to begin, which leave the base as it is
    adapters = make_adapters(tmp_path / "peft", base, *targets, use_rslora=rslora, init_lora_weights=begun)
    tensors, pairs = load_file(base / "model.safetensors"), load_file(adapters / "adapter_model.safetensors")
    for name in [name for name in pairs if "lora_A" in name]:
        product = pairs[name.replace("lora_A", "lora_B")].double() @ pairs[name].double() * (4.0 if rslora else 2.0)
        theirs = name.removeprefix("base_model.model.").replace("lora_A.", "")
        product = product.t() if "transformer." in name else product
        assert product.abs().max() > 0.01
        tensors[theirs] = (tensors[theirs].double() + product).float()
    shutil.copytree(base, tmp_path / "merged")
    save_file(tensors, tmp_path / "merged/model.safetensors")
    ours = dict(load_run(adapters, "cpu").model.named_parameters())
    for name, value in GPT.from_pretrained(tmp_path / "merged").named_parameters():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)
    assert (base / "model.safetensors").read_bytes() == before


def test_the_sum_is_rounded_once(tmp_path):
    """A base in bfloat16: the sum is float32 until the parameter's type rounds it."""
    make_base(tmp_path / "base")
    save_pretrained(GPT.from_pretrained(tmp_path / "base", dtype="bfloat16"), tmp_path / "half")
    adapters = make_adapters(tmp_path / "peft", tmp_path / "half", "q_proj", lora_alpha=0.04)
    base, *rest = find_base(adapters)
    models = [make_gpt(read_shape(base), "cpu", dtype, initialise=False) for dtype in ("float32", "bfloat16")]
    for model in models:
        read_weights(look_at_weights(base), model, *rest)
    exact, rounded = (model.blocks[1].attention.qkv.weight for model in models)
    before = GPT.from_pretrained(base).blocks[1].attention.qkv.weight
    assert not torch.equal(exact[:32], exact[:32].bfloat16()) and torch.equal(exact[32:], before[32:])
    assert torch.equal(exact.bfloat16(), rounded)


def test_loading_holds_no_second_model(tmp_path):
    shape = dict(n_layer=8, n_embd=256, n_head=4)
    base = make_base(tmp_path / "base", **shape)
    adapters = make_adapters(tmp_path / "peft", base, "_proj")
    whole = sum(tensor.nbytes for tensor in load_file(base / "model.safetensors").values())
    gc.collect()
    with MemoryMeter("cpu") as meter:
        held = make_gpt(read_shape(base), "cpu", "float32", initialise=False)
        weights, *rest = find_base(adapters)
        read_weights(look_at_weights(weights), held, *rest)
        after, peak = meter.figures()["current"], meter.figures()["peak"]
    assert len(load_file(adapters / "adapter_model.safetensors")) == 8 * 7 * 2
    assert after < 1.01 * whole and peak < after + 5 * 4 * 4 * 256 * 256 < 2 * whole


def tensor(**named):
    """A change of the file: with `half` as a new or another tensor of the first q_proj; None: gone."""

    def changed(tensors):
        for half, value in named.items():
            tensors.pop(f"{MODULE}{half}.weight", None)
            if value is not None:
                tensors[f"{MODULE}{half}.weight"] = value
        return tensors

    return changed


def add(*names):
    return lambda tensors: tensors | {f"base_model.model.{name}": torch.ones(4, 32) for name in names}


REFUSED = {  # what is said: changes of the config, or of the tensors
    "peft_type='LOHA' is not supported; only 'LORA'": dict(peft_type="LOHA"),
    "use_dora=True is not supported": dict(use_dora=True),
    "init_lora_weights='pissa' is not supported": dict(init_lora_weights="pissa"),
    "lora_alpha=nan is not a valid float": dict(lora_alpha=math.nan),
    "use_rslora='yes' is not a valid bool": dict(use_rslora="yes"),
    "nowhere/config.json: cannot be read": dict(base_model_name_or_path="nowhere"),
    "1 tensors have no place in the base, such as base_model.model.lm_head.lora_A.weight": add("lm_head.lora_A.weight"),
    "1 tensors have no place in the base, such as base_model.model.embed.lora_emb": add("embed.lora_embedding_A"),
    f"1 tensors have no place in the base, such as {MODULE}A.weight": tensor(B=None),
    f"1 tensors have no place in the base, such as {MODULE}B.weight": tensor(A=None),
    f"{MODULE}A.weight and B are torch.float32 (3, 32)": tensor(A=torch.ones(3, 32)),
    "and torch.float32 (16, 4), not numbers": tensor(B=torch.ones(16, 4)),
    "and torch.int8 (32, 4), not numbers": tensor(B=torch.ones(32, 4, dtype=torch.int8)),
    f"{MODULE}A.weight and B are torch.float32 (8, 32)": tensor(A=torch.ones(8, 32), B=torch.ones(32, 8)),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_would_load_wrongly_is_one_line(said, tmp_path):
    base = make_base(tmp_path / "base", tie_embeddings=True)
    adapters, wrong = make_adapters(tmp_path / "peft", base, "q_proj"), REFUSED[said]
    load_run(adapters, "cpu")
    if callable(wrong):
        file = adapters / "adapter_model.safetensors"
        save_file(wrong(load_file(file)), file)
    else:
        change(adapters, **wrong)
    assert said in refused(load_run, adapters, "cpu")


def test_damaged_folders_are_one_line(tmp_path):
    base = make_base(tmp_path / "base", tie_embeddings=True)
    adapters = make_adapters(tmp_path / "peft", base, "q_proj")
    file, config = adapters / "adapter_model.safetensors", adapters / "adapter_config.json"
    before = config.read_text()
    for text in ("[]", "{", ""):
        config.write_text(text)
        assert_refused("adapter_config.json: cannot be read", find_run, adapters)
    config.write_text(before)
    file.write_bytes(file.read_bytes()[:-100])
    for _ in range(2):
        assert_refused("adapter_model.safetensors cannot be read", load_run, adapters, "cpu")
        file.unlink(missing_ok=True)


@pytest.fixture
def folders(tmp_path):
    """-> a base and adapters for it."""
    base = make_base(tmp_path / "base")
    return base, make_adapters(tmp_path / "peft", base, "q_proj", "v_proj")


@pytest.mark.parametrize("options", [[], LORA])
def test_a_run_begins_from_it(options, folders, tmp_path, varied_rewards):
    """Its reference is the base with the adapters; so is the base of its own adapters."""
    base, adapters = folders
    log = run_grpo(adapters, tmp_path / "run", *options, "--reward_funcs=lora_rewards:varied")
    assert log[0]["kl"] == pytest.approx(0, abs=1e-6) and log[1]["kl"] > 1e-5
    if options:
        run, begin = load_run(tmp_path / "run", "cpu").model, load_run(adapters, "cpu").model
        for name, value in begin.named_parameters():
            assert torch.equal(run.get_parameter(name), value), name
    with pytest.raises(SnugError, match="has adapters, which would be rounded to 4 bits; name its base weights"):
        run_grpo(adapters, tmp_path / "second", *LORA, "--base_dtype=nf4")


def test_stopped_and_resumed_is_the_same_run(folders, tmp_path, varied_rewards):
    """A change of the adapters, or of their base, is noticed."""
    base, adapters = folders
    options = [*LORA, "--reward_funcs=lora_rewards:varied"]
    run_grpo(adapters, tmp_path / "whole", *options, "--max_iters=2")
    run_grpo(adapters, tmp_path / "halves", *options, "--max_iters=1")
    run_grpo(adapters, tmp_path / "halves", *options, "--max_iters=2", "--resume=auto")
    whole, halves = (load_file(newest(tmp_path / name) / "model.safetensors") for name in ("whole", "halves"))
    assert whole and all(torch.equal(whole[name], halves[name]) for name in whole)
    again = [*options, "--max_iters=3", "--resume=auto"]
    for file in (adapters / "adapter_model.safetensors", base / "model.safetensors"):
        before = file.read_bytes()
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(SnugError, match="has adapters for the weights in .*peft, which .*peft does not have"):
            run_grpo(adapters, tmp_path / "halves", *again)
        file.write_bytes(before)
    change(adapters, lora_alpha=9)
    assert_refused("which .* does not have; put them back", load_run, tmp_path / "halves", "cpu")
    change(adapters, lora_alpha=8)
    assert len(run_grpo(adapters, tmp_path / "halves", *again)) == 3


def test_every_command_takes_it(folders, tmp_path, monkeypatch, capsys):
    """Beside the merged model as a plain folder: the same samples, scores and teacher."""
    base, adapters = folders
    monkeypatch.chdir(tmp_path)
    export.main(ExportSettings(to="merged"), "peft")
    assert "merged" in capsys.readouterr().out and (tmp_path / "merged/tokenizer.json").exists()
    found, texts = [], []
    for name in ("peft", "merged"):
        settings, given, _ = read_settings(SampleSettings, [name, "--prompt=1+2=", "--max_new_tokens=9"], "folder")
        sample.main(settings, given, find_run(name))
        texts.append(capsys.readouterr().out)
        words = [name, *ONE_DIGIT[2:], "--task=addition", "--num_prompts=4", "--max_new_tokens=4"]
        options, given, _ = read_settings(EvaluateSettings, words, "folder")
        prepared, file = evaluate.prepare_evaluation(options, given, name)
        evaluate.main(options, prepared, file)
        log = run_grpo(base, tmp_path / f"taught_{name}", f"--teacher={name}", "--max_iters=1", "--beta=0")
        scores = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  pass_at_")]
        found.append([scores, log[0]["grad_norm"], log[0]["divergence"]])
    assert texts[0] == texts[1]
    assert found[0][0] == found[1][0] != [] and found[0][2] > 0
    assert found[0][1:] == pytest.approx(found[1][1:], rel=1e-4)
    assert list(Path("out/peft").glob("evaluation*")) and not list(base.glob("evaluation*"))


def test_a_tokenizer_beside_the_adapters_wins(folders):
    base, adapters = folders
    assert find_run(adapters).state["tokenizer"] == str(base)
    get_tokenizer("bytes").save(adapters)
    (adapters / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_run(adapters, "cpu").tokenizer.chat and not load_run(base, "cpu").tokenizer.chat


PEFT_CASES = {"gpt2": dict(shape="gpt2", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)}
PEFT_CASES |= {"llama, PEFT's default": dict(shape="llama")}
PEFT_CASES |= {"llama, all": dict(shape="llama", target_modules="all-linear", use_rslora=True)}
PEFT_CASES |= {"llama, head": dict(shape="llama", target_modules=["k_proj", "lm_head", "up_proj"])}


@pytest.mark.long
@pytest.mark.parametrize("case", PEFT_CASES)
def test_peft_agrees(case, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    transformers = pytest.importorskip("transformers")
    options = dict(PEFT_CASES[case])
    base = make_base(tmp_path / "base", options.pop("shape"))
    torch.manual_seed(3)
    there = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = there(TOKENS).logits.detach()
    there = peft.get_peft_model(there, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options)).eval()
    for name, value in there.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    there.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    expected, ours = there(TOKENS).logits.detach(), load_run(tmp_path / "peft", "cpu").model
    assert (expected - before).abs().max() > 0.1
    difference = (ours.logits(ours(TOKENS)).detach() - expected).abs().max()
    assert difference < 1e-5
