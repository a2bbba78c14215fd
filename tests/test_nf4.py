"""NF4: the format beside bitsandbytes', the layer beside float64, and a run from folders of both kinds, plan to export.

tests/data/nf4.safetensors and the folders beside it were made by bitsandbytes 0.50.2 and transformers 5.23:
`python tests/test_nf4.py` writes them again.
"""

import hashlib
import json
import math
import shutil

import pytest
import torch
from conftest import HOME
from safetensors.torch import load_file, save_file

from kernels import nf4
from kernels.nf4 import NF4, Quantized, dynamic_map, quantize, scales_of

DATA = HOME / "tests/data"
GOLDEN, FOLDERS = DATA / "nf4.safetensors", {True: DATA / "nf4_double", False: DATA / "nf4_single"}
FIELDS = Quantized._fields


# ----------------------------------------------------------------------------------------------------------------------
# The format


def values_of(q, shape, dtype=torch.float32):
    matrix = NF4(shape, "cpu")
    return matrix.copy_(q).dequantized(dtype)


def their_quantize(weight, double):
    """bitsandbytes' quantize_4bit, with its kernels for any device -> Quantized."""
    import bitsandbytes.functional as theirs

    codes, state = theirs.quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    if not double:
        return Quantized(codes.flatten(), state.absmax)
    offset, numbers = state.absmax.mean(), theirs.create_dynamic_map()
    kernel = torch.ops.bitsandbytes.quantize_blockwise.default
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return Quantized(
        codes.flatten(), *swapped(kernel._op_dk(key, state.absmax - offset, numbers, 256), numbers), offset
    )


def swapped(pair, numbers):
    return pair[0], numbers, pair[1]


def weights_in(dtype, shape, seed=0):
    """Near normal, with a row of zeros and an outlier."""
    weight = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    weight[-1, -1] = 3
    return weight.to(dtype)


def assert_same(ours, theirs):
    for name, a, b in zip(FIELDS, ours, theirs, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b)), name


def test_the_numbers_are_bitsandbytes_own():
    """Without bitsandbytes: what it made of a matrix, with and without double quantization."""
    golden = load_file(GOLDEN)
    weight = golden["weight"]
    for double in (True, False):
        theirs = Quantized(**{name: golden[f"{double}.{name}"] for name in FIELDS if f"{double}.{name}" in golden})
        assert_same(quantize(weight, double), theirs)
        assert len(theirs.scales) > 256 and len(theirs.scales) % 256
        for dtype in (torch.float32, torch.bfloat16):
            expected = golden[f"{double}.{dtype}"]
            assert torch.equal(values_of(theirs, weight.shape, dtype)[: len(expected)], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitsandbytes_agrees(dtype):
    """Bit for bit, what is quantized and what comes back; its CPU kernel of scales chooses a neighbour now and then."""
    theirs = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    assert torch.equal(dynamic_map(), theirs.create_dynamic_map())
    assert torch.equal(torch.tensor(nf4.TABLE), theirs.get_4bit_type("nf4", "cpu"))
    for shape in ((192, 576), (64, 64), (100, 192), (37, 100), (3, 62)):
        weight = weights_in(dtype, shape)
        for double in (True, False):
            if math.prod(shape) % 64 == 0:  # its kernel for any device divides the rest of a block, others multiply
                assert_same(quantize(weight, double), their_quantize(weight, double))
            codes, state = theirs.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
            parts = [codes.flatten(), state.absmax]
            if double:
                parts += [state.state2.code, state.state2.absmax, state.offset]
                neighbours = (quantize(weight).scales.int() - state.absmax.int()).abs()
                assert neighbours.max() <= 1 and neighbours.float().mean() < 0.05
            for out in (torch.float32, torch.bfloat16, torch.float16):
                state.dtype = out
                expected = theirs.dequantize_4bit(codes, state).view(shape)
                assert torch.equal(values_of(Quantized(*parts), shape, out), expected)


@pytest.mark.parametrize("shape", [(5, 64), (64, 48), (37, 33), (300, 64), (1, 3)])
@pytest.mark.parametrize("double", [True, False])
def test_value_by_value(shape, double):
    """The slow twin: each value to the nearest number times its block's scale; each scale likewise."""
    weight = weights_in(torch.float32, shape)
    q, flat = quantize(weight, double), weight.flatten()
    assert len(q.codes) == math.ceil(len(flat) / 2) and len(q.scales) == math.ceil(len(flat) / 64)
    exact = torch.stack([block.abs().max() for block in flat.split(64)])
    scales = scales_of(q)
    if double:
        blocks = (exact - exact.mean()).split(256)
        for block, approximate in zip(blocks, scales.split(256), strict=True):
            unit = dynamic_map()[(block[:, None] / block.abs().max() - dynamic_map()).abs().argmin(1)]
            torch.testing.assert_close(approximate, unit * block.abs().max() + exact.mean(), atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(scales, exact)
    table = torch.tensor(nf4.TABLE)
    nibbles = torch.stack([q.codes >> 4, q.codes & 15], 1).flatten()[: len(flat)].int()
    unit = flat / exact.clamp(min=1e-30).repeat_interleave(64)[: len(flat)]
    distance = (unit[:, None] - table).abs()
    assert (distance.gather(1, nibbles[:, None].long())[:, 0] - distance.min(1)[0]).max() < 1e-6
    expected = table[nibbles] * scales.repeat_interleave(64)[: len(flat)]
    assert torch.equal(values_of(q, shape), expected.view(shape))


def test_pieces_are_the_whole(monkeypatch):
    q, shape = quantize(weights_in(torch.bfloat16, (37, 100))), (37, 100)
    whole = values_of(q, shape)
    monkeypatch.setattr(nf4, "PIECES", {"cpu": 128})
    assert torch.equal(values_of(q, shape), whole)


def test_a_matrix_of_several_parts():
    """q, k and v of different sizes: each has its own mean and its own last block."""
    parts = [weights_in(torch.float32, (rows, 33), seed) for seed, rows in enumerate((20, 6, 7))]
    matrix = NF4((33, 33), "cpu")
    for start, part in zip((26, 0, 20), (parts[2], parts[0], parts[1]), strict=True):
        matrix.copy_(part, start)
    expected = torch.cat([values_of(quantize(part), part.shape) for part in parts])
    assert torch.equal(matrix.dequantized(torch.float32), expected) and matrix.numel() == 33 * 33


def test_bytes():
    """4.127 bits a value, and 4.5 without double quantization."""
    weight = torch.randn(1024, 1024)
    bits = [
        8 * sum(t.nbytes for t in quantize(weight, double) if t is not None) / weight.numel()
        for double in (True, False)
    ]
    assert bits == [pytest.approx(4.127 + 8 * 1028 / 2**20, abs=1e-3), 4.5]


def test_nan_is_refused():
    weight = torch.ones(64, 64)
    for value in (math.nan, math.inf):
        weight[3, 5] = value
        with pytest.raises(ValueError, match="NaN or infinity"):
            NF4((64, 64), "cpu").copy_(weight)


# ----------------------------------------------------------------------------------------------------------------------
# Written by bitsandbytes


def write_golden():
    """Needs bitsandbytes and transformers."""
    import transformers

    weight = weights_in(torch.bfloat16, (96, 192))
    golden = {"weight": weight}
    import bitsandbytes.functional as theirs

    for double in (True, False):
        q = their_quantize(weight, double)
        golden |= {f"{double}.{name}": value for name, value in zip(FIELDS, q, strict=True) if value is not None}
        state = theirs.QuantState(q.scales, weight.shape, blocksize=64, quant_type="nf4", offset=q.offset)
        if double:
            state.state2 = theirs.QuantState(q.scale_scales, code=q.scale_map, blocksize=256, dtype=torch.float32)
            state.nested = True
        for dtype, rows in ((torch.float32, 8), (torch.bfloat16, 32)):
            state.dtype = dtype
            golden[f"{double}.{dtype}"] = theirs.dequantize_4bit(q.codes[:, None], state)[:rows].clone()
    save_file(golden, GOLDEN)
    shape = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
    shape |= dict(num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).bfloat16()
    plain.save_pretrained(DATA / "plain")
    for double, folder in FOLDERS.items():
        options = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
        config = transformers.BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.bfloat16)
        loaded = dict(quantization_config=config, dtype=torch.bfloat16, device_map="cpu")
        model = transformers.AutoModelForCausalLM.from_pretrained(DATA / "plain", **loaded)
        model.save_pretrained(folder)
        matrices = {}
        for name, layer in model.named_modules():
            if "proj" in name:
                codes, state = layer.weight.data, layer.weight.quant_state
                matrices[f"{name}.weight"] = digest(theirs.dequantize_4bit(codes.view(-1, 1), state))
        (folder / "dequantized.json").write_text(json.dumps(matrices, indent=1) + "\n")
        (folder / "generation_config.json").unlink()
    shutil.rmtree(DATA / "plain")
    for file in [GOLDEN, *DATA.glob("nf4_*/*")]:
        file.chmod(0o644)


def digest(matrix):
    return hashlib.sha256(matrix.contiguous().view(torch.uint8).numpy()).hexdigest()


if __name__ == "__main__":
    write_golden()
