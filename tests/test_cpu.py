"""snug/device/cpu.py: float32 products by oneDNN."""

import pytest
import torch
import torch.nn.functional as F

from snug.device import cpu


def product_and_gradients(function, x, weight, bias):
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves)
    (y * torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)).sum().backward()
    return [y.detach(), *(t.grad for t in leaves if t is not None)]


@pytest.mark.parametrize("shape", [(96, 64), (3, 32, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_f_linear_with_its_gradients(shape, biased, monkeypatch):
    monkeypatch.setattr(cpu, "LARGE", 1)
    x, weight, bias = torch.randn(shape), torch.randn(48, 64), torch.randn(48) if biased else None
    exact = product_and_gradients(F.linear, *(None if t is None else t.double() for t in (x, weight, bias)))
    for ours, theirs in zip(product_and_gradients(cpu.linear, x, weight, bias), exact, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_linear_makes_no_gradient_that_nobody_wants(monkeypatch):
    monkeypatch.setattr(cpu, "LARGE", 1)
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16)
    cpu.linear(x, weight).sum().backward()
    assert weight.grad is None and torch.allclose(x.grad, weight.sum(0).expand(8, 16))
    assert not cpu.linear(x.detach(), weight).requires_grad


def test_only_large_float32_products_leave_f_linear(monkeypatch):
    taken = []
    monkeypatch.setattr(cpu.Linear, "apply", lambda *args: taken.append(args))
    rows, weight = 2 * cpu.LARGE // 2**16, torch.randn(256, 256)
    large = torch.randn(rows, 256)
    cpu.linear(large[: rows // 4], weight)
    cpu.linear(large.double(), weight.double())
    with torch.autocast("cpu", torch.bfloat16):
        cpu.linear(large, weight)
    assert not taken
    cpu.linear(large, weight)
    assert len(taken) == 1
    for rows in (512, 513):  # of a weight that stays in a cache, and of one that does not
        cpu.linear(large[:1], torch.randn(2 * rows, 256))
    assert len(taken) == 2


def test_products_rounded_to_bfloat16_are_refused(monkeypatch):
    """As on a processor with AMX: then the switch is never set."""
    real = torch.Tensor.__matmul__
    lossy = lambda a, b: real(a.bfloat16().float(), b) if a.dtype == torch.float32 else real(a, b)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "__matmul__", lossy)
    cpu.stays_float32.cache_clear()
    try:
        assert not cpu.stays_float32()
        with cpu.fast_products(torch.zeros(1)):
            assert cpu.PRODUCTS.fp32_precision == "none"
    finally:
        monkeypatch.undo()
        cpu.stays_float32.cache_clear()


def test_the_switch_is_off_again_also_after_an_error():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), cpu.fast_products(torch.zeros(1)):
        assert not cpu.stays_float32() or torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        raise ZeroDivisionError
    assert torch.backends.mkldnn.matmul.fp32_precision == before
