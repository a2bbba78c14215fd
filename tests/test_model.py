"""The promises of the model's parts. test_families.py compares it with transformers."""

import gc

import pytest
import torch
import torch.nn.functional as F

from helpers.models import DEVICE, make_model
from model import GPTConfig
from snug.device.host import HOST
from snug.kernels import segments
from snug.kernels.layers import Embed
from snug.kernels.segments import Segments
from snug.memory.ledger import LiveBytes


@pytest.mark.parametrize("shape, kind", [("gpt2", "block"), ("llama", "selective")])
def test_block_inputs_wait_on_the_host(shape, kind):
    """The gradient bit for bit, a copy of each block's input on the host until backward, none on the device."""
    tokens = torch.arange(32, device=DEVICE).repeat(4, 1)
    results, kept = [], []
    for offload in (False, True):
        model = make_model(shape, n_layer=6)
        model.checkpoint_blocks, model.activation_offload = kind, offload
        gc.collect()
        before = HOST.current
        with LiveBytes() as live:
            total = model(tokens).square().sum()
            kept.append((live.current, HOST.current - before))
            total.backward()
        assert HOST.current == before
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    assert all(gradient.equal(results[1][name]) for name, gradient in results[0].items())
    size = 4 * 32 * 32 * 4
    assert kept[0][1] == 0 and kept[1][1] == 6 * size and kept[0][0] - kept[1][0] >= 5 * size


def test_checkpointing_keeps_less(monkeypatch):
    """Of a packed row. "selective" keeps what attention returns, so that backward does not attend again."""
    where, name = (segments.flash, "forward") if DEVICE == "cuda" else (segments, "forward_torch")
    calls, forward = [], getattr(where, name)
    monkeypatch.setattr(where, name, lambda *arguments: calls.append(kind) or forward(*arguments))
    tokens, kept = torch.zeros(1, 1024, dtype=torch.long, device=DEVICE), {}
    positions = torch.arange(1024, device=DEVICE)[None] % 256
    for kind in ("none", "selective", "block"):
        model = make_model(n_layer=6, block_size=256)
        model.checkpoint_blocks = kind
        with LiveBytes() as live:
            hidden = model(tokens, positions, mask=Segments([(256, [256, 256, 256])], DEVICE))
            kept[kind] = live.current
            hidden.sum().backward()
            del hidden
    assert kept["block"] < kept["selective"] < 0.5 * kept["none"]
    assert [calls.count(kind) for kind in kept] == [6, 6, 12]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tokens", [[[7, 3, 7], [0, 0, 7]], [[5]], [[1] * 300]])
def test_embedding_adds_to_its_gradient(tokens, dtype):
    """Against F.embedding, beside what is in .grad already; many of one token are not lost in bfloat16."""
    tokens = torch.tensor(tokens, device=DEVICE)
    weight = torch.nn.Parameter(torch.randn(9, 4, device=DEVICE, dtype=dtype))
    slope = torch.rand(*tokens.shape, 4, device=DEVICE, dtype=dtype)
    exact = weight.detach().double().requires_grad_()
    (F.embedding(tokens, exact) * slope.double()).sum().backward()
    for times in (1, 2):
        (Embed.apply(tokens, weight) * slope).sum().backward()
        tolerance = 1e-12 if dtype == torch.float64 else float(times * exact.grad.abs().max()) * 2**-7
        torch.testing.assert_close(weight.grad.double(), times * exact.grad, rtol=0, atol=tolerance)
    with LiveBytes() as live:
        wide = torch.nn.Parameter(torch.zeros(10_000, 4, device=DEVICE))
        wide.grad = torch.zeros_like(wide)
        before = live.current
        Embed.apply(torch.arange(10, device=DEVICE), wide).sum().backward()
        assert live.peak - before < 0.1 * wide.nbytes


def test_config_is_filled_in():
    config = GPTConfig(vocab_size=10, n_head=4, n_embd=64, mlp="swiglu")
    sizes = config.n_vocab, config.n_kv_head, config.head_size, config.n_hidden
    assert sizes == (10, 4, 16, 176)  # 8/3 * 64 = 170.7, a multiple of 8
