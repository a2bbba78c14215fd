"""NF4: the format beside bitsandbytes', the layer beside float64, and a run, plan to export.

bitsandbytes 0.50.2 made tests/data/nf4.safetensors, of the matrix in it.
"""

import gc
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from batch import Cut
from helpers import HOME
from helpers.errors import assert_refused
from helpers.models import DEVICE, SHAPES, add_adapters, make_flat_model, make_model
from helpers.rollouts import WAYS, K, assert_same_gradient, gradient, make_rollouts
from helpers.runs import run_grpo
from model import GPT
from model import make_model as make_gpt
from padded import a_few, padded
from runs import export
from runs.checkpoint import find_run, newest, seal
from runs.loading import load_run, load_weights
from settings import ExportSettings, GRPOSettings
from snug import lora
from snug.device.kinds import PlanningMode
from snug.kernels import nf4, triton
from snug.kernels.layers import hold_in_nf4
from snug.kernels.nf4 import NF4, Quantized, quantize, takes_product, weights_of
from snug.memory import MemoryMeter
from snug.options import SnugError
from snug.pretrained.shapes import read_shape
from snug.pretrained.tensors import look_at_weights, read_weights, save_pretrained
from snug.tokenizer import get_tokenizer
from training import frozen

FIELDS = Quantized._fields


def values_of(q, shape, dtype=torch.float32):
    matrix = NF4(shape, "cpu")
    matrix.parts[0] = q
    return matrix.dequantized(dtype)


def weights_in(dtype, shape, seed=0):
    """Near normal, with a row of zeros and an outlier."""
    weight = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    weight[-1, -1] = 3
    return weight.to(dtype)


def assert_same(ours, theirs):
    for name, a, b in zip(FIELDS, ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


def test_the_numbers_are_bitsandbytes_own():
    """Without bitsandbytes: what it made of a matrix."""
    golden = load_file(HOME / "tests/data/nf4.safetensors")
    weight, theirs = golden["weight"], Quantized(*(golden[f"True.{name}"] for name in FIELDS))
    assert_same(quantize(weight), theirs)
    assert len(theirs.scales) > 256 and len(theirs.scales) % 256
    for dtype in (torch.float32, torch.bfloat16):
        expected = golden[f"True.{dtype}"]
        assert torch.equal(values_of(theirs, weight.shape, dtype)[: len(expected)], expected)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitsandbytes_agrees(dtype):
    """Bit for bit, what is quantized and what comes back; its CPU kernel of scales chooses other numbers nearby."""
    theirs = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    numbers = torch.tensor(nf4.DYNAMIC_MAP, dtype=torch.float32)  # of the scales
    assert torch.equal(numbers, theirs.create_dynamic_map())
    assert torch.equal(torch.tensor(nf4.TABLE), theirs.get_4bit_type("nf4", "cpu"))
    kernel = torch.ops.bitsandbytes.quantize_blockwise.default
    key = torch._C.DispatchKey.CompositeExplicitAutograd  # for any device
    for shape in ((192, 576), (64, 64), (100, 192), (48, 100)):
        weight = weights_in(dtype, shape)
        codes, state = theirs.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
        offset = state.absmax.mean()
        scales, largest = kernel._op_dk(key, state.absmax - offset, numbers, 256)
        assert_same(quantize(weight), Quantized(codes.flatten(), scales, numbers, largest, offset))
        codes, state = theirs.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        parts = codes.flatten(), state.absmax, state.state2.code, state.state2.absmax, state.offset
        ours, there = (numbers[scales.int()] for scales in (quantize(weight).scales, state.absmax))
        assert (ours - there).abs().max() < 0.0142 and (ours != there).float().mean() < 0.05
        for out in (torch.float32, torch.bfloat16, torch.float16):
            state.dtype = out
            expected = theirs.dequantize_4bit(codes, state).view(shape)
            assert torch.equal(values_of(Quantized(*parts), shape, out), expected)


def test_pieces_are_the_whole(monkeypatch):
    q, shape = quantize(weights_in(torch.bfloat16, (48, 100))), (48, 100)
    whole = values_of(q, shape)
    monkeypatch.setattr(nf4, "PIECE", 2)
    assert torch.equal(values_of(q, shape), whole)


def test_a_model_in_bfloat16_has_scales_in_float32():
    """It is made with another default type."""
    model = make_gpt(SHAPES["gpt2"], "cpu", "bfloat16", base_dtype="nf4")
    assert {t.dtype for t in model.blocks[0].mlp.up.weight.parts[0][2:]} == {torch.float32}
    assert model.blocks[0].norm_1.weight.dtype == torch.bfloat16


def test_a_matrix_of_several_parts():
    """q, k and v of different sizes: each has its own mean and its own last block."""
    parts = [weights_in(torch.float32, (rows, 48), seed) for seed, rows in enumerate((20, 4, 8))]
    matrix = NF4((32, 48), "cpu")
    for start, part in zip((24, 0, 20), (parts[2], parts[0], parts[1]), strict=True):
        matrix.copy_(part, start)
    expected = torch.cat([values_of(quantize(part), part.shape) for part in parts])
    assert torch.equal(matrix.dequantized(torch.float32), expected) and matrix.numel() == 32 * 48


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("capability, taken", [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_without_units_for_bfloat16_dequantizes(capability, taken, monkeypatch):
    """There the product's kernel has 704 bytes of stack. Tensors are fake: there may be no GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with PlanningMode("cuda", None), torch.no_grad():
        x = torch.empty(4, 128, dtype=torch.bfloat16, device="cuda")
        assert takes_product(x, NF4((64, 128), "cuda")) == taken
        assert not takes_product(x.float(), NF4((64, 128), "cuda"))


def pair_of_models(shape, dtype=torch.float64, make=make_flat_model, **changes):
    """-> a model in NF4, and a plain one whose matrices have the same values; both with the same adapters."""
    models = [make(shape, dtype=dtype, **changes) for _ in range(2)]
    hold_in_nf4(models[0], DEVICE)
    with torch.no_grad():
        for name, weight in weights_of(models[0]).items():
            if isinstance(weight, NF4):
                models[1].get_parameter(name).copy_(weight.dequantized(dtype))
    for model in models:
        torch.manual_seed(5)
        add_adapters(model).to(dtype)
    return models


@pytest.mark.parametrize("shape, way", [("gpt2", "none"), ("llama", "selective, offload"), ("gpt2", "block")])
def test_gradients_are_those_of_the_same_values_in_float64(shape, way):
    """Packed in two ways and padded, with the KL to a reference; to 1e-10."""
    ours, plain = pair_of_models(shape, n_layer=3)
    rollouts, options = make_rollouts(), GRPOSettings(max_new_tokens=12, beta=0.1)
    training = SimpleNamespace(settings=options, reference=None, limits=None)
    references = []
    for training.model in (ours, plain):
        references.append(frozen.reference_logprobs(training, rollouts, Cut(rollouts, 0, 14, K)))
    torch.testing.assert_close(*references, rtol=0, atol=1e-12)
    rollouts.ref_logprobs = references[0]
    with padded():
        oracle = gradient(plain, rollouts, a_few(Cut(rollouts), 6), options)
    assert len(oracle[1]) == 3 * 4 * 2 and all(value.abs().max() > 1e-6 for value in oracle[1].values())
    for name, value in WAYS[way].items():
        setattr(ours, name, value)
    for budget in (0, 14):
        assert_same_gradient(gradient(ours, rollouts, Cut(rollouts, 0, budget, K), options), oracle)


@pytest.mark.parametrize("shape, cast", [("gpt2", False), ("llama", True)])
def test_in_float32_and_autocast_it_is_the_plain_layer(shape, cast, monkeypatch):
    ours, plain = pair_of_models(shape, torch.float32, make_model)
    dequantized, dtypes = NF4.dequantized, []
    monkeypatch.setattr(NF4, "dequantized", lambda weight, dtype: dtypes.append(dtype) or dequantized(weight, dtype))
    tokens, found = torch.arange(40, device=DEVICE).view(2, 20), []
    for model in (ours, plain):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=cast):
            logits = model.logits(model(tokens))
        logits.float().square().mean().backward()
        gradients = [p.grad for module in lora.adapted(model) for p in (module.lora_A, module.lora_B)]
        with torch.no_grad(), lora.adapters_off(model):
            found.append([logits, model(tokens), *gradients])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    expected = torch.bfloat16 if cast else torch.float32
    assert found[0][0].dtype == expected == dtypes[0]  # no more bytes than the products need


def test_nothing_of_a_matrix_is_kept_for_backward():
    ours, plain = pair_of_models("llama", torch.float32, n_embd=64)
    tokens, kept = torch.arange(10, device=DEVICE)[None], []
    for model in (ours, plain):
        named, shapes = weights_of(model).items(), []
        matrices = {weight.shape for name, weight in named if "lora" not in name and "block" in name}
        pack = lambda t, shapes=shapes: shapes.append(t.shape) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(tokens)
        shapes = [tuple(shape) for shape in shapes if len(shape) == 2]
        kept.append(sum(shape in matrices and min(shape) >= 64 or shape[::-1] in matrices for shape in shapes))
    assert kept[0] == 0 < kept[1]


@pytest.mark.parametrize("shape, parts", [("gpt2", {}), ("llama", {"qkv": [32, 16, 16], "up": [64, 64]})])
def test_a_plain_folder_becomes_what_bitsandbytes_makes_of_each_matrix(shape, parts, tmp_path):
    """Of each matrix of the folder, here a part of ours; GPT-2's are turned."""
    model = make_model(shape, **dict(n_hidden=64, qk_norm=False, proj_bias=False) if shape == "llama" else {})
    save_pretrained(model, tmp_path / "plain")
    ours = make_gpt(read_shape(tmp_path / "plain"), "cpu", initialise=False, base_dtype="nf4")
    read_weights(look_at_weights(tmp_path / "plain"), ours)
    for name, weight in weights_of(ours).items():
        there = model.get_parameter(name).detach()
        values = weight.dequantized(torch.float32) if isinstance(weight, NF4) else weight
        if isinstance(weight, NF4):
            matrices = there.split(parts.get(name.split(".")[-2], len(there)))
            there = torch.cat([values_of(quantize(matrix), matrix.shape) for matrix in matrices])
        assert torch.equal(values, there), name


def test_a_whole_model_is_never_there_at_once(tmp_path, monkeypatch):
    """Nor on the host: at the peak of loading there are the 4 bits, the other weights and one matrix of a folder, in
    bfloat16 and as codes of a byte, twice; it is quantized in pieces."""
    monkeypatch.setattr(nf4, "PIECE", 8)
    model = make_model("llama", dtype=torch.bfloat16, n_layer=8, n_embd=256, n_head=4, qk_norm=False, proj_bias=False)
    save_pretrained(model, tmp_path / "plain")
    whole = sum(p.nbytes for p in model.parameters())
    largest = max(p.numel() for p in model.blocks.parameters()) // 2  # gate, of gate and up
    del model
    gc.collect()
    with MemoryMeter("cpu") as meter:
        held = make_gpt(read_shape(tmp_path / "plain"), "cpu", "bfloat16", initialise=False, base_dtype="nf4")
        read_weights(look_at_weights(tmp_path / "plain"), held)
        after, peak = meter.figures()["current"], meter.figures()["peak"]
    assert after < 0.35 * whole and peak < after + 5 * largest < whole


LORA = ["--lora_rank=4", "--lora_alpha=8", "--base_dtype=nf4"]
HALF = ["--dtype=bfloat16", "--param_dtype=bfloat16"]


def values_in(model):
    """{name: the matrix's or the parameter's values} in float32."""
    weights = weights_of(model).items()
    return {n: w.dequantized(torch.float32) if isinstance(w, NF4) else w.detach().float() for n, w in weights}


@pytest.mark.parametrize("half", [[], HALF])
def test_a_run_moves_adapters_alone(half, sft, tmp_path, varied_rewards):
    """The sampler and the trainer round alike, as without quantization; the base stays, bit for bit."""
    options = ["--reward_funcs=lora_rewards:varied", "--max_iters=3", *half]
    log = run_grpo(sft, tmp_path / "run", *LORA, *options)
    plain = run_grpo(sft, tmp_path / "plain", *LORA[:2], *options)
    assert log[0]["kl"] == pytest.approx(0, abs=1e-3 if half else 0) and log[-1]["kl"] > 0
    assert all(record["grad_norm"] > 0 for record in log)
    for ours, theirs in zip(log, plain, strict=True):
        assert ours["logprob_diff_max"] < (2 * theirs["logprob_diff_max"] if half else 1e-5)
    weights = load_file(newest(tmp_path / "run") / "model.safetensors")
    assert len(weights) == 16 and all("lora" in name for name in weights)
    run, base = load_run(tmp_path / "run").model, load_run(sft).model
    names = {name for name, weight in weights_of(run).items() if isinstance(weight, NF4)}
    assert len(names) == 8
    trained, values = values_in(run), values_in(base)
    for name, value in values.items():
        expected = values_of(quantize(value), value.shape) if name in names else value
        if half == HALF and name not in names:
            expected = value.bfloat16().float()
        assert torch.equal(trained[name], expected), name
    assert all(module.lora_B.any() for module in lora.adapted(run))
    with pytest.raises(SnugError, match="base_dtype was 'nf4', is ''; restore them"):
        run_grpo(sft, tmp_path / "run", *LORA, *options, "--resume=auto", "--base_dtype=")


def test_export_is_the_model_that_trained(sft, tmp_path, varied_rewards):
    run_grpo(sft, tmp_path / "run", *LORA, "--lora_target_modules=qkv,up", "--reward_funcs=lora_rewards:varied")
    export.main(ExportSettings(to=str(tmp_path / "export"), dtype="float32"), str(tmp_path / "run"))
    model, tokens = load_run(tmp_path / "run", "cpu").model, torch.arange(20)[None]
    expected = model.logits(model(tokens))
    exported = GPT.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(exported.logits(exported(tokens)), expected, atol=1e-5, rtol=1e-5)
    with lora.adapters_off(model):
        assert (model.logits(model(tokens)) - expected).abs().max() > 1e-3
    for folder, said in ((tmp_path / "run", "is no Hugging Face folder; leave"), (sft, "has no adapters; leave")):
        assert_refused(said, export.main, ExportSettings(to=str(tmp_path / "peft"), adapters=True), str(folder))


@pytest.mark.both
def test_adapters_are_exported_as_peft_has_them(tmp_path, varied_rewards):
    """PEFT's logits beside the base, here dequantized. test_adapters.py reads an export again."""
    save_pretrained(make_model("gpt2", vocab_size=257), tmp_path / "base", get_tokenizer("bytes"))
    options = ["--lora_target_modules=qkv,down", "--reward_funcs=lora_rewards:varied"]
    run_grpo(tmp_path / "base", tmp_path / "run", *LORA, *options)
    export.main(ExportSettings(to=str(tmp_path / "exported"), adapters=True), str(tmp_path / "run"))
    model, tokens = load_run(tmp_path / "run", "cpu").model, torch.arange(20)[None]
    expected = model.logits(model(tokens)).detach()
    with lora.adapters_off(model):
        assert (model.logits(model(tokens)) - expected).abs().max() > 1e-3
    peft = pytest.importorskip("peft", reason="pip install peft")
    transformers = pytest.importorskip("transformers")
    for module in lora.adapted(model):  # of the 4-bit values, in float32
        module.lora_B.data.zero_()
    save_pretrained(lora.merge(model), tmp_path / "dequantized")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized")
    there = peft.PeftModel.from_pretrained(there, tmp_path / "exported").eval()
    torch.testing.assert_close(there(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_plain_run_goes_on_from_it(sft, tmp_path, varied_rewards):
    """From the dequantized weights with the adapters added, which are its reference, too. 4 bits would round them away."""
    run_grpo(sft, tmp_path / "run", *LORA, "--reward_funcs=lora_rewards:varied", "--lora_target_modules=qkv,up")
    log = run_grpo(tmp_path / "run", tmp_path / "plain", "--reward_funcs=lora_rewards:varied")
    assert log[0]["kl"] == 0
    merged = lora.merge(load_run(tmp_path / "run", "cpu").model)
    begin = make_gpt(vars(merged.config), "cpu", initialise=False)
    load_weights(find_run(tmp_path / "run"), begin)
    assert all(torch.equal(p, q) for p, q in zip(values_in(begin).values(), values_in(merged).values(), strict=True))
    with pytest.raises(SnugError, match="has adapters, which would be rounded to 4 bits; name its base weights"):
        run_grpo(tmp_path / "run", tmp_path / "second", *LORA)


def test_what_is_broken_on_the_way_in_is_one_line(sft, tmp_path):
    """A weight of the SFT run is NaN, with checksums that fit."""
    path = Path(shutil.copytree(sft, tmp_path / "sft")) / newest(sft).name
    weights = load_file(path / "model.safetensors")
    weights["blocks.0.mlp.up.weight"][0, 0] = math.nan
    save_file(weights, path / "model.safetensors")
    seal(path)
    with pytest.raises(SnugError, match="blocks.0.mlp.up.weight cannot be read .*NaN or infinity"):
        run_grpo(tmp_path / "sft", tmp_path / "run", *LORA)
