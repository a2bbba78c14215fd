"""Adapters: what they compute, what trains, what the reference is, and what is left of them in a checkpoint and an export."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.errors import assert_refused
from helpers.models import DEVICE, add_adapters, make_model
from helpers.runs import LORA, run_grpo
from model import make_model as make_gpt
from runs.checkpoint import find_run, newest
from runs.loading import load_run, load_weights
from sample import sample_groups
from snug import lora
from snug.options import SnugError
from snug.pretrained.tensors import save_pretrained


def with_adapters(shape, dtype=torch.float32):
    """-> a model whose adapters do something."""
    return add_adapters(make_model(shape, dtype=dtype), 3, 6.0, lora.TARGETS, std=0.3)


def logits_of(model, tokens):
    return model.logits(model(tokens)).float()


@pytest.fixture
def tokens():
    return torch.randint(67, (3, 20), generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_adapters_are_the_formula(shape, tokens):
    """Against the same model in float64 whose weights are W + alpha / rank * B A, values and gradients of A and B."""
    model = with_adapters(shape, dtype=torch.float64)
    plain = make_model(shape, dtype=torch.float64)
    pairs = {name: module for name, module in model.named_modules() if isinstance(module, lora.LoRALinear)}
    assert len(pairs) == 8
    products = {}
    for name, module in pairs.items():
        a, b = (p.detach().double().requires_grad_() for p in (module.lora_A, module.lora_B))
        products[name] = a, b
    with_product = lambda name, a, b: plain.get_submodule(name).weight.detach() + 2.0 * (b @ a)  # noqa: E731
    weights = {f"{name}.weight": with_product(name, *pair) for name, pair in products.items()}
    hidden = torch.func.functional_call(plain, weights, (tokens,))
    expected = plain.logits(hidden)
    actual = model.logits(model(tokens))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)  # adapters are float32, also here
    actual.square().mean().backward()
    gradients = torch.autograd.grad(expected.square().mean(), [p for pair in products.values() for p in pair])
    ours = [p.grad for module in pairs.values() for p in (module.lora_A, module.lora_B)]
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-4)
        assert theirs.abs().max() > 1e-4


@pytest.mark.parametrize("shape, dtype", [("gpt2", torch.float32), ("llama", torch.bfloat16)])
def test_off_is_the_model_that_was_there_bit_for_bit(shape, dtype, tokens):
    before = logits_of(make_model(shape, dtype=dtype), tokens)
    model = with_adapters(shape, dtype=dtype)
    with pytest.raises(KeyError), lora.adapters_off(model):
        assert torch.equal(logits_of(model, tokens), before)
        raise KeyError
    assert not torch.equal(logits_of(model, tokens), before)  # on again, also after an error


def test_a_run_moves_adapters_alone_and_keeps_them_alone(sft, tmp_path, varied_rewards):
    log = run_grpo(sft, tmp_path / "run", *LORA, "--reward_funcs=lora_rewards:varied", "--max_iters=3")
    assert log[0]["kl"] == 0 and log[-1]["kl"] > 0 and all(record["grad_norm"] > 0 for record in log)
    path = newest(tmp_path / "run")
    weights, moments = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    matrices = "attention.qkv", "attention.proj", "mlp.up", "mlp.down"
    names = {f"blocks.{i}.{matrix}.lora_{letter}" for i in range(2) for matrix in matrices for letter in "AB"}
    assert set(weights) == names
    assert set(moments) == {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names}
    run, base = load_run(tmp_path / "run"), load_run(sft)
    for name, p in base.model.named_parameters():
        assert torch.equal(dict(run.model.named_parameters())[name], p)  # frozen: bit for bit
    assert all(module.lora_B.any() for module in lora.adapted(run.model))


def test_adapters_go_on_from_adapters(sft, tmp_path, varied_rewards):
    """A second run begins from the first's merged weights, which are its reference, too."""
    run_grpo(sft, tmp_path / "first", *LORA, "--reward_funcs=lora_rewards:varied")
    log = run_grpo(tmp_path / "first", tmp_path / "second", *LORA, "--reward_funcs=lora_rewards:varied")
    assert log[0]["kl"] == 0
    first, second = (load_run(tmp_path / name, "cpu").model for name in ("first", "second"))
    lora.merge(first)
    assert torch.equal(first.blocks[0].mlp.up.weight, second.blocks[0].mlp.up.weight)
    whole = make_gpt(vars(second.config), "cpu")
    load_weights(find_run(tmp_path / "second"), whole)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(logits_of(whole, tokens), logits_of(second, tokens), atol=1e-5, rtol=1e-5)


def test_adapters_whose_weights_changed_broke_or_went_are_refused(sft, tmp_path):
    shutil.copytree(sft, tmp_path / "base")
    run_grpo(tmp_path / "base", tmp_path / "run", *LORA)
    path = newest(tmp_path / "base")
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(manifest + " ")
    others = "has adapters for the weights in .*base/checkpoint-000010, which .* does not have"
    assert_refused(others, load_run, tmp_path / "run")
    (path / "manifest.json").write_text(manifest)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100] + bytes(100))
    assert_refused("model.safetensors is not what was written", load_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "base")
    assert_refused("base/checkpoint-000010 does not have; put them back", load_run, tmp_path / "run")


def test_a_base_is_found_where_it_went(sft, tmp_path, monkeypatch, varied_rewards):
    """From another working directory; moved together with the run; and somewhere else, if init_from says where. Another
    model there is refused."""
    options = [*LORA, "--reward_funcs=lora_rewards:varied"]
    (tmp_path / "a").mkdir()
    shutil.copytree(sft, tmp_path / "a" / "base")
    monkeypatch.chdir(tmp_path / "a")
    run_grpo("base", Path("run"), *options)
    monkeypatch.chdir("/")
    load_run(tmp_path / "a" / "run")
    (tmp_path / "a").rename(tmp_path / "b")
    load_run(tmp_path / "b" / "run")
    (tmp_path / "b" / "base").rename(tmp_path / "elsewhere")
    assert_refused("does not have", load_run, tmp_path / "b" / "run")
    run_grpo(sft, tmp_path / "other", "--max_iters=1")
    again = tmp_path / "b" / "run", *options, "--resume=auto", "--max_iters=3"
    with pytest.raises(SnugError, match=f"has adapters for the weights in .*, which {tmp_path}/other does not have"):
        run_grpo(tmp_path / "other", *again)
    run_grpo(tmp_path / "elsewhere", *again)
    run_grpo(sft, tmp_path / "whole", *options, "--max_iters=3")
    resumed, whole = (load_file(newest(run) / "model.safetensors") for run in (again[0], tmp_path / "whole"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert any(tensor.any() for name, tensor in whole.items() if "lora_B" in name)  # they have learned


def test_other_adapters_are_another_run(sft, tmp_path):
    run_grpo(sft, tmp_path / "run", *LORA, "--max_iters=1")
    for change, said in (
        ("--lora_rank=8", "lora_rank was 4, is 8"), ("--lora_alpha=80", "lora_alpha was 8.0, is 80.0"),
        ("--lora_target_modules=qkv", "lora_target_modules was"), ("--lora_rank=0", "lora_rank was 4, is 0"),
    ):  # fmt: skip
        assert_refused(said, run_grpo, sft, tmp_path / "run", *LORA, "--resume=auto", change)
    assert_refused("is in out_dir", run_grpo, newest(tmp_path / "run"), tmp_path / "run", *LORA)


def test_live_adapters_are_not_left_out_of_an_export(tmp_path):
    assert_refused("lora.merge", save_pretrained, with_adapters("gpt2"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


class Casts(TorchDispatchMode):
    """Counts casts of these tensors to bfloat16."""

    def __init__(self, tensors):
        super().__init__()
        self.places, self.count = {tensor.data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        casts = torch.ops.aten._to_copy, torch.ops.aten.to  # the second in inference mode
        if func.overloadpacket in casts and result.dtype == torch.bfloat16:
            self.count += args[0].data_ptr() in self.places
        return result


@pytest.mark.parametrize("weights, length", [(torch.float32, 9), (torch.bfloat16, 2)])
def test_weights_are_cast_once_in_a_rollout(length, weights):
    """However many steps there are, frozen weights under autocast, too; afterwards the copies of adapters are gone."""
    model = with_adapters("llama", dtype=weights)
    adapters = [p for p in model.parameters() if p.requires_grad]
    frozen = [layer.weight for layer in lora.adapted(model)]
    inside = torch.autocast(DEVICE, torch.bfloat16, enabled=weights == torch.float32)
    with inside, Casts([*adapters, *frozen]) as casts:
        sample_groups(model, [[1, 2]], 2, length)
    assert casts.count == 16 + 8 * (weights == torch.float32)
    assert not any(layer.cast for layer in lora.adapted(model))
