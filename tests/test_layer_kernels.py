"""The kernels of a layer, rotary, SwiGLU and RMS norm, against float64; NF4; residual adds; what a layer keeps for backward.

As in test_kernels.py, the tests of values run again in Triton's interpreter, and on CUDA."""

import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import interpreted
from helpers.kernels import Ops, ahead_of_time
from helpers.models import DEVICE, LLAMA, make_model
from interpreted import INTERPRETED, KERNELS, SHARED, in_kernels, in_the_interpreter, long, resources_of
from model import GPTConfig, rotary_table
from model import make_model as new_model
from snug import lora
from snug.device.host import Ledger
from snug.device.kinds import PlanningMode
from snug.kernels import gated, nf4, norm, rotary, triton
from snug.kernels import layers as lean
from snug.kernels.gated import GatedUnit
from snug.kernels.nf4 import NF4, Quantized
from snug.kernels.norm import Norm
from snug.kernels.rotary import Rotary, rotate
from snug.memory.ledger import LiveBytes

DEQUANTIZE_TORCH = nf4.dequantize_torch
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
test_values_in_the_interpreter = in_the_interpreter(__file__, 30)


@pytest.fixture(autouse=True)
def only_kernels(monkeypatch):
    interpreted.forbid_plain_torch(monkeypatch, (rotary, "rotate"), (gated, "rows_in_torch"), (norm, "norm_in_torch"))


def assert_rounded(value, exact, dtype):
    """`value` is `exact` (float64) rounded to dtype once, but for float32's rounding before that."""
    assert value.dtype == dtype and value.shape == exact.shape
    torch.testing.assert_close(value.double(), exact, rtol=rounding(dtype) + 1e-6, atol=1e-6)


def rounding(dtype):
    """The largest relative error of rounding. Triton's interpreter cuts to bfloat16 where a GPU rounds."""
    return (1.01 if INTERPRETED and dtype == torch.bfloat16 else 0.51) * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, T, sizes, D",
    [
        (2, 5, [4, 2, 2], 24),
        (3, 4, [14, 3, 2], 16),  # the last heads are a program of their own
        (1, 1, [3], 2),  # queries alone, as norms give them
    ],
)
def test_rotary_rotates_and_back(B, T, sizes, D, dtype):
    """float16: one table for all rows, else one per row; and heads before tokens, else tokens first."""
    layout = "heads first" if dtype == torch.float16 else "tokens first"
    config = GPTConfig(vocab_size=1, n_head=1, n_embd=D, position="rotary", rope_theta=50.0)
    rows = range(1 if dtype == torch.float16 else B)
    positions = torch.stack([torch.arange(T) * (i + 1) + i for i in rows]).to(DEVICE)
    tables = [table[positions][:, None] for table in rotary_table(config, 1 + int(positions.max()), DEVICE)]
    shape = (B, T, sum(sizes), D) if layout == "tokens first" else (B, sum(sizes), T, D)
    leaf = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
    x = (leaf * 1).transpose(1, 2) if layout == "tokens first" else leaf * 1
    exact = x.detach().double().clone().requires_grad_()
    parts = Rotary.apply(x, *tables, sizes)
    expected = [part if i == 2 else rotate(part, *tables) for i, part in enumerate(exact.split(sizes, 1))]
    assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)
    # Gradients as attention may return them: dense, dense in another order, one row for all.
    upstream = [torch.randn_like(part).to(dtype) for part in expected]
    if len(sizes) == 3:
        upstream[0] = upstream[0].transpose(1, 2).contiguous().transpose(1, 2)
        upstream[1] = upstream[1][..., :1].expand_as(upstream[1])
    torch.autograd.backward(expected, [part.double() for part in upstream])
    torch.autograd.backward(parts, upstream)
    for part, truth in zip(parts, expected, strict=True):
        assert_rounded(part.detach(), truth.detach(), dtype)
    assert_rounded(leaf.grad.transpose(1, 2) if layout == "tokens first" else leaf.grad, exact.grad, dtype)
    if len(sizes) == 3:
        assert parts[2].detach().double().equal(exact.detach().split(sizes, 1)[2])


@pytest.mark.parametrize("dtype, gelu", [*((each, False) for each in DTYPES), *((each, True) for each in DTYPES[-2:])])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1500), (0, 8)])
def test_a_gated_unit_and_its_gradient(shape, dtype, gelu):
    *rows, n = shape
    leaf = torch.randn(*rows, 2 * n, device=DEVICE).mul_(3)
    if leaf.numel():
        leaf.view(-1, 2, n)[0, 0, : n // 2 : 3] = 80.0
        leaf.view(-1, 2, n)[-1, 0, 1 : n // 2 : 3] = -80.0
    leaf = leaf.to(dtype).requires_grad_()
    exact, dy = leaf.detach().double().requires_grad_(), torch.randn(*rows, n, device=DEVICE).to(dtype)
    gate, up = exact.chunk(2, -1)
    z = 2 * (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3) if gelu else gate
    expected, y = gate * torch.sigmoid(z) * up, GatedUnit.apply(leaf, gelu)
    expected.backward(dy.double())
    y.backward(dy.transpose(0, -1).contiguous().transpose(0, -1))
    rounded = 1 if KERNELS else 3  # plain torch rounds silu, too, and what it is multiplied by
    tolerance = dict(rtol=rounded * rounding(dtype) + 2e-6, atol=2e-6 if rounded == 1 else 2e-3)
    if dtype == torch.float64:
        tolerance = dict(rtol=1e-12, atol=1e-12)
    for ours, truth in ((y.detach(), expected.detach()), (leaf.grad, exact.grad)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), truth, **tolerance)


NORMS = [
    ((3, 2, 2560), False), ((1, 1, 320), True), ((2, 3, 5, 24), True), ((1, 4, 2, 1152), False), ((2, 0, 16), True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, centered", NORMS)
def test_an_rms_norm_and_its_gradients(shape, centered, dtype, monkeypatch):
    """Rows that share a program in backward; heads with gaps between them, and a weight of another type."""
    n, other = shape[-1], torch.bfloat16 if dtype == torch.float32 else torch.float32
    monkeypatch.setattr(norm, "SUMS", 2 ** n.bit_length())
    weight = torch.randn(n, device=DEVICE).to(other if len(shape) == 4 else dtype).requires_grad_()
    x = torch.randn(*shape[:-2], shape[-2] + 1, n + 8, device=DEVICE).to(dtype).requires_grad_()[..., :-1, :n]
    dy = torch.randn(shape, device=DEVICE).to(dtype).transpose(1, -2).contiguous().transpose(1, -2)
    exact, w = (part.detach().double().requires_grad_() for part in (x, weight))
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (w + int(centered))
    expected.backward(dy.double())
    y, frozen = (
        Norm.apply(x if len(shape) == 4 else x.contiguous(), each, 1e-6, centered) for each in (weight, weight.detach())
    )
    dx, dweight = torch.autograd.grad(y, [x, weight], dy)
    assert frozen.equal(y) and torch.autograd.grad(frozen, x, dy)[0].equal(dx)
    assert_rounded(y.detach(), expected.detach(), dtype)
    for ours, truth, its in ((dx, exact.grad, dtype), (dweight, w.grad, weight.dtype)):
        torch.testing.assert_close(
            ours.double(), truth, rtol=rounding(its) + 1e-6, atol=1e-5 if its != torch.float64 else 1e-13
        )
    assert Norm.apply(x[:, :1], weight, 1e-6, centered).equal(y[:, :1])  # a row does not depend on the others


def nf4_matrix(rows, columns):
    """One matrix of several parts, as q, k and v are, whose scales differ."""
    matrix, start = NF4((sum(rows), columns), DEVICE), 0
    for n in rows:
        matrix.copy_(torch.randn(n, columns) * torch.rand(n, 1) + 3.0 * (torch.arange(columns) % 64 == 0), start)
        start += n
    return matrix


@in_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[1], [17, 300, 2]])
def test_nf4_is_its_twin_bit_for_bit(rows, dtype, monkeypatch):
    """The last program of each part has blocks beyond its end."""
    matrix = nf4_matrix(rows, 64)
    for q in matrix.parts.values():
        q.codes[:32] = torch.arange(32, device=DEVICE) * 8 + torch.arange(32, device=DEVICE) % 16
        assert len(q.scales) < 16 or q.scales.min() < 128 < q.scales.max()
    expected = [torch.empty(n, 64, device=DEVICE) for n in rows]
    for part, q in zip(expected, matrix.parts.values(), strict=True):
        DEQUANTIZE_TORCH(q, matrix.pairs, part)
    monkeypatch.setattr(nf4, "dequantize_torch", lambda *_: pytest.fail("plain torch ran"))
    out = torch.full((sum(rows) + 16, 64), 7.0, dtype=dtype, device=DEVICE)
    monkeypatch.setattr(nf4.torch, "empty", lambda shape, **_: out[: shape[0]])
    values = matrix.dequantized(dtype)
    monkeypatch.undo()
    expected = torch.cat(expected)
    if INTERPRETED and dtype == torch.bfloat16:  # which the interpreter does not round, but cuts
        expected = (expected.view(torch.int32) & -(2**16)).view(torch.float32)
    assert values.equal(expected.to(dtype)) and (out[sum(rows) :] == 7).all()


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_planned_nf4_matrix_takes_pieces_without_kernels_alone(kind):
    """6 bytes a value of a piece, and the scales in float32."""
    with PlanningMode(kind, Ledger()), LiveBytes() as live:
        matrix = NF4((4096, 1024), "cpu")
        parts = torch.empty(2**21), torch.empty(2**16), torch.empty(256), torch.empty(256), torch.empty(())
        matrix.parts[0] = Quantized(parts[0].to(torch.uint8), parts[1].to(torch.uint8), *parts[2:])
        del parts
        before = live.peak = live.current
        matrix.dequantized(torch.bfloat16)
    taken = live.peak - before - 2 * 2**22
    assert taken == 0 if kind == "cuda" or INTERPRETED else 6 * 2**20 < taken < 7 * 2**20


def random(*shape, dtype=torch.float16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


# Rows of x, of W's parts, columns, rank: parts of a tile and several, rows split among programs and not, a short last
# stretch, two batches of x.
PRODUCTS = [(1, [40], 64, 0), (5, [17, 3, 9], 1088, 3), (64, [33], 1600, 16), (70, [140], 192, 40), (128, [64], 64, 16)]


@in_kernels
@pytest.mark.parametrize("programs", [nf4.PROGRAMS, 1])
@pytest.mark.parametrize("n, rows, columns, rank", PRODUCTS)
def test_nf4_product_is_exact_but_for_one_rounding(n, rows, columns, rank, programs, monkeypatch):
    """Against float64 with W in float16: the sum in float32 is off by columns * 2^-24 of its size, then it is rounded."""
    monkeypatch.setattr(nf4, "PROGRAMS", programs)
    matrix, out = nf4_matrix(rows, columns), sum(rows)
    x, bias, h, B = random(n, columns), random(out), random(n, rank), random(out, rank)
    half, single = random(n, out), random(n, out, dtype=torch.float32)
    W = torch.empty(matrix.shape, dtype=x.dtype, device=DEVICE)
    for start, end, part in matrix.by_rows():
        DEQUANTIZE_TORCH(part, matrix.pairs, W[start:end])
    adapter = [h, B, 0.5] if rank else []
    for options in ([], [bias, half], [None, single], [bias, None, *adapter], [None, half, *adapter]):
        exact, size = x.double() @ W.double().t(), x.double().abs() @ W.double().abs().t()
        if len(options) > 2 and rank:
            exact += 0.5 * h.double() @ B.double().t()
            size += 0.5 * h.double().abs() @ B.double().abs().t()
        for added in options[:2]:
            if added is not None:
                exact, size = exact + added.double(), size + added.double().abs()
        y = nf4.product(x, matrix, *options)
        dtype = torch.float32 if options[1:] and options[1] is single else torch.float16
        assert y.dtype == dtype and not matrix.counters.any()
        bound = torch.finfo(dtype).eps / 2 * exact.abs() + (columns + rank + 2) * 2.0**-24 * size + 2.0**-24
        assert ((y.double() - exact).abs() <= bound).all()


@in_kernels
@pytest.mark.parametrize("rows", [[65], [129, 1]], ids=str)
def test_nf4_product_uses_its_own_counters_alone(rows):
    """What lies behind them is not zero, and stays as it is."""
    matrix = nf4_matrix(rows, 1024)
    memory = torch.full((len(matrix.counters) + 64,), 7, dtype=torch.int32, device=DEVICE)
    matrix.counters, behind = memory[: len(matrix.counters)].zero_(), memory[len(matrix.counters) :]
    W = matrix.dequantized(torch.float16)
    for n in (33, nf4.FEW):
        x = random(n, 1024)
        torch.testing.assert_close(nf4.product(x, matrix), x @ W.t(), rtol=3e-3, atol=0.1)
        assert (behind == 7).all() and not matrix.counters.any()


@in_kernels
def test_few_rows_without_gradients_take_the_product(monkeypatch):
    """With adapters and without: the values of the twin, which rounds three times. Also inside autocast."""
    taken, product = [], nf4.product
    for module in (lean, lora):
        monkeypatch.setattr(module, "product", lambda *args: taken.append(args) or product(*args))
    layer = lean.Linear(64, 48, device=DEVICE, dtype=torch.float16)
    lean.hold_in_nf4(layer, DEVICE)
    adapted = lora.LoRALinear(layer, rank=4, alpha=8)
    adapted.lora_B.data.normal_()
    x, residual = random(3, 64), random(3, 48)
    for module in (layer, adapted):
        for rest in ((), (residual,)):
            expected = module(x, *rest)
            assert not taken
            with torch.no_grad():
                torch.testing.assert_close(module(x, *rest), expected, rtol=3e-3, atol=3e-2)
                assert len(taken) == 1
                module(random(nf4.FEW + 1, 64)), module.float()(x.float()), module.half()
                assert len(taken) == 1
                with torch.autocast(DEVICE, torch.float16):
                    inside = module(x.float(), *(added.float() for added in rest))
                    torch.testing.assert_close(inside.half(), expected, rtol=3e-3, atol=3e-2)
                assert len(taken) == 2 and inside.dtype == (torch.float32 if rest else torch.float16)
            taken.clear()


@pytest.mark.parametrize("shape, checkpoint_blocks", [("gpt2", "none"), ("llama", "none"), ("llama", "block")])
def test_products_that_add_are_the_model_that_adds(shape, checkpoint_blocks, monkeypatch):
    """gpt2 has biases, for which they do not add; half of llama's do."""
    model, tokens = make_model(shape, n_layer=1, proj_bias=False), torch.randint(67, (2, 6), device=DEVICE)
    model.checkpoint_blocks = checkpoint_blocks
    results = []
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(lean, "kind_of", lambda _, kind=kind: kind)
        last = torch.tensor([2, 5], device=DEVICE)
        with torch.no_grad():
            hidden = model(tokens)
            torch.testing.assert_close(model(tokens, last=last)[:, 0], hidden[range(2), last], rtol=1e-5, atol=1e-5)
        model.zero_grad()
        loss = (model(tokens) * torch.linspace(-1, 1, hidden.shape[-1], device=DEVICE)).square().mean()
        loss.backward()
        results.append([hidden, loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for b, a in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()) + 1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_adds_in_place_without_gradients_alone(bias, monkeypatch):
    monkeypatch.setattr(lean, "kind_of", lambda _: "cuda")
    layer, x = lean.Linear(6, 4, bias=bias).to(DEVICE), torch.randn(2, 3, 6, device=DEVICE)
    residual = torch.randn(2, 3, 4, device=DEVICE)
    before, expected = residual.clone(), residual + F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x, residual), expected)
    assert residual.equal(before)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        y = layer(x.bfloat16(), residual)  # the residual stays in float32
        assert y.dtype == torch.float32 and residual.equal(before)
    with torch.no_grad():
        y = layer(x, residual)
    torch.testing.assert_close(y, expected)
    assert (y.data_ptr() == residual.data_ptr()) != bias and residual.equal(before) == bias


@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_add_to_products_that_add(autocast, monkeypatch):
    """Off, or with B = 0, they leave the model as it was bit for bit; without autocast in bfloat16."""
    monkeypatch.setattr(lean, "kind_of", lambda _: "cuda")
    tokens, dtype = torch.randint(67, (2, 6), device=DEVICE), torch.float32 if autocast else torch.bfloat16
    adapted = lora.add(make_model("llama", n_layer=1, dtype=dtype, proj_bias=False), 3, 6.0, list(lora.TARGETS))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                before, drawn = make_model("llama", n_layer=1, dtype=dtype, proj_bias=False)(tokens), adapted(tokens)
                assert before.dtype == drawn.dtype == dtype and drawn.equal(before)
                with lora.adapters_off(adapted):
                    assert adapted(tokens).equal(before)
        for module in lora.adapted(adapted):
            torch.nn.init.normal_(module.lora_B, std=0.3)
        hidden = adapted(tokens)
        assert not hidden.equal(before)
        monkeypatch.undo()
        torch.testing.assert_close(adapted(tokens), hidden, rtol=0.1, atol=0.1 if dtype == torch.bfloat16 else 0.02)


def planned_forward(kind, dtype, autocast=False, **changes):
    """A model without data -> (its config, bytes kept for backward, names of all ops)."""
    shape = LLAMA | dict(vocab_size=8, n_head=6, n_kv_head=2, n_embd=96, proj_bias=False) | changes
    with PlanningMode(kind, Ledger()), LiveBytes() as live, Ops() as ops:
        model, tokens = new_model(shape, "cpu", dtype), torch.zeros(2, 16, dtype=torch.long)
        model.angles(tokens, 16)
        before = live.current
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = model(tokens)
        kept = live.current - before
        del hidden
    return model.config, kept, ops.names


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_planned_layer_keeps_what_the_mathematics_needs(kind):
    """In bfloat16, without norms of heads: two norms' inputs and outputs, qkv, attention's output, up, down's input."""
    if kind == "cuda" and triton is None:
        pytest.skip("Triton is not installed")
    depths = [planned_forward(kind, "bfloat16", n_layer=n, qk_norm=False) for n in (1, 2)]
    c, BT, D = depths[0][0], 32, 16
    C, heads = c.n_embd, c.n_head + 2 * c.n_kv_head
    numbers = 4 * C + heads * D + c.n_head * D + 3 * c.n_hidden
    assert depths[1][1] - depths[0][1] == BT * (2 * numbers + 4 * c.n_head)  # and softmax's sums


def test_norms_of_heads_cost_their_outputs_alone_under_autocast():
    """Queries and keys stay in the compute type, so that CUDA's fused attention shares key heads."""
    kept = {}
    for qk_norm in (False, True):
        depths = [planned_forward("cuda", "float32", autocast=True, n_layer=n, qk_norm=qk_norm) for n in (1, 2)]
        assert "clone" not in depths[1][2]
        kept[qk_norm] = depths[1][1] - depths[0][1]
    heads, BT, D = 6 + 2, 32, 16
    assert kept[True] - kept[False] == BT * heads * 2 * D
    # In float32 keys and values are repeated.
    assert planned_forward("cuda", "float32", n_layer=1)[2].count("clone") == 2


@ahead_of_time
@pytest.mark.parametrize("dtype", ["bf16", long("fp32")])
def test_compiled_kernels_stay_in_registers(capability, dtype, tmp_path):
    """At Qwen2.5-1.5B's shape, and with what a step of one row and one token leaves at 1."""
    x = dict.fromkeys(("out", "x", "dy", "weight"), "*" + dtype) | dict.fromkeys(("cos", "sin", "sums"), "*fp32")
    x, rows = x | dict(eps="fp32"), {"x_token", "x_head", "n"}
    strides = {"x_batch", "x_head", "x_time", "table_batch", "table_time"}
    for kernel, constants, ones, aligned, most in (
        (rotary.rotary_kernel, dict(M=16, DP=64, BACK=False), ("T",), strides | {"D"}, 128),
        (rotary.rotary_kernel, dict(M=16, DP=64, BACK=True), ("T",), strides | {"D", "heads"}, 128),
        (rotary.rotary_kernel, dict(M=1, DP=64, BACK=True), ("T", "heads"), strides | {"D"}, 128),
        (gated.gated_kernel, dict(BLOCK=1024, dy=None, GELU=False), ("blocks",), {"n"}, 64),
        (gated.gated_kernel, dict(BLOCK=1024, GELU=False), ("blocks",), {"n"}, 64),
        (gated.gated_kernel, dict(BLOCK=1024, GELU=True), ("blocks",), {"n"}, 64),
        (norm.norm_kernel, dict(BLOCK=4096, CENTERED=True, dy=None, sums=None), ("heads",), rows, 64),
        (norm.norm_kernel, dict(BLOCK=4096, CENTERED=True), ("heads",), rows, 80),
        (norm.norm_kernel, dict(BLOCK=256, CENTERED=True), ("heads",), rows, 80),
    ):
        for equal_to_one in ((), ones):
            chosen = constants | {name: 1 for name in equal_to_one if name in kernel.arg_names}
            pointers = {name: kind for name, kind in x.items() if name in kernel.arg_names and name not in chosen}
            its = pointers, chosen, aligned - set(chosen), 4 if kernel != norm.norm_kernel else chosen["BLOCK"] // 256
            used, ptx = resources_of(kernel, capability, *its, tmp_path)
            assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= most
            if constants.get("M") != 1:  # 16 bytes at a time; of one head there are not enough for all threads
                assert "ld.global.v4" in ptx and "st.global.v4" in ptx


@ahead_of_time
@pytest.mark.parametrize("dtype", ["bf16", long("fp32"), long("fp16")])
def test_compiled_nf4_rounds_as_its_twin(capability, dtype, tmp_path, monkeypatch):
    """It multiplies, rounds, adds and rounds: there is no fused product in the binary, as there is without the option
    that the launch gives. That GPUs round alike is not tested without one."""
    options, out, kernel = {}, torch.empty(32, 64), nf4.dequantize_kernel
    monkeypatch.setattr(nf4, "uses_triton", lambda *_: True)
    monkeypatch.setattr(nf4, "launch", lambda kernel, grid, *_, **given: options.update(given, grid=grid))
    matrix = NF4((32, 64), "cpu")
    matrix.copy_(torch.randn(32, 64))
    nf4.dequantize(matrix.parts[0], matrix.pairs, out)
    assert options.pop("grid") == (2,)
    pointers = dict(codes="*u8", scales="*u8", scale_map="*fp32", scale_scales="*fp32", offset="*fp32", pairs="*fp32")
    pointers, constants = pointers | dict(out="*" + dtype), dict(ROWS=nf4.ROWS)
    fused = []
    for chosen in (options, {}):
        used, ptx = resources_of(kernel, capability, pointers, constants, ["blocks"], 4, tmp_path, **chosen)
        assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 40
        assert len(re.findall("ld.global.b8", ptx)) <= 2 and "st.global.v4" in ptx  # 16 bytes at a time
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "-sass", tmp_path / "kernel.cubin"]
        fused.append("FFMA" in subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert fused == [False, True]


@ahead_of_time
@pytest.mark.parametrize("n, rank", [(1, 16), long(32, 64), long(16, 64), long(64, 16), (64, 64)])
def test_compiled_nf4_product_stays_in_registers(capability, n, rank, tmp_path, monkeypatch):
    """With the constants that a launch gives, for 3,584 rows and columns, split among programs."""
    if capability == 75:
        pytest.skip("sm_75 has no products of bfloat16")
    options, kernel = {}, nf4.product_kernel
    monkeypatch.setattr(nf4, "launch", lambda kernel, grid, *args, **given: options.update(given, args=args))
    matrix, B = NF4((3584, 3584), "cpu"), torch.empty(3584, rank)
    matrix.parts[0] = Quantized(*[None] * 5)
    x, h = torch.empty(n, 3584, dtype=torch.bfloat16), torch.empty(n, rank, dtype=torch.bfloat16)
    nf4.product(x, matrix, None, x, h, B)
    constants = dict(zip(("M", "ROWS", "RANK"), options.pop("args")[-3:], strict=True))
    warps = options.pop("num_warps")
    pointers = dict.fromkeys(("x", "bias", "residual", "h", "y"), "*bf16") | dict(codes="*u8", scales="*u8")
    pointers |= dict.fromkeys(("B", "scale_map", "scale_scales", "offset", "pairs", "parts"), "*fp32")
    pointers |= dict(alpha="fp32", counters="*i32")
    aligned = ["rows", "all_rows", "columns", "rank"]
    used, ptx = resources_of(kernel, capability, pointers, constants, aligned, warps, tmp_path, **options)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] * 32 * warps <= 65536
    assert used["SHARED"] <= SHARED[capability] // 2 and ("mma" in ptx or "tcgen05" in ptx)
