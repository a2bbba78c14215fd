"""Schedules by example; AdamW, clipping and decay against arithmetic."""

import pytest
import torch
from conftest import make_model

from memory import LiveBytes, tensor_bytes
from optimizer import learning_rate_at, make_optimizer, optimizer_step
from settings import SFTSettings


@pytest.mark.parametrize(
    "schedule, expected",
    [("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]), ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447])],
)
def test_schedules(schedule, expected):
    settings = SFTSettings(learning_rate=1.0, warmup_iters=2, max_iters=6, lr_schedule=schedule)
    assert [learning_rate_at(i, settings) for i in range(6)] == pytest.approx(expected, abs=1e-6)


def test_two_steps_equal_the_formula():
    """AdamW (Loshchilov & Hutter), with the gradient scaled to norm 1 first; vectors do not decay."""
    model = make_model("gpt2", dtype=torch.float64)
    settings = SFTSettings(weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95)
    optimizer = make_optimizer(model, settings)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in expected.items()}
    for step, rate in ((1, 1e-2), (2, 5e-3)):
        grads = {name: torch.randn_like(p) for name, p in expected.items()}
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        assert optimizer_step(model, optimizer, rate, 1.0) == pytest.approx(float(norm))
        for name, p in expected.items():
            m, v = moments[name]
            g = grads[name] / (norm + 1e-6)  # PyTorch's clipping adds 1e-6
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.95).add_(0.05 * g**2)
            p -= rate * (0.1 if p.dim() >= 2 else 0.0) * p
            p -= rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=0, atol=1e-10)
        assert p.grad is None


def test_a_step_makes_no_second_copy_of_the_parameters():
    model = make_model("gpt2", n_layer=8, n_embd=64)
    optimizer = make_optimizer(model, SFTSettings())
    size = tensor_bytes(model.parameters())
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with LiveBytes() as live:
            optimizer_step(model, optimizer, 1e-3, 0.5)
    assert live.peak < 0.02 * size
