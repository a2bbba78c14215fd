"""Schedules by example; AdamW, clipping and decay against arithmetic."""

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from helpers.models import DEVICE, make_model, tensor_bytes
from settings import SFTSettings
from snug.device.kinds import PlanningMode
from snug.memory.ledger import LiveBytes
from snug.memory.plan import PlanMeter, Recorder
from streams import COMPUTE, fake_streams
from training import optimizer as optimizer_module
from training.optimizer import RING, learning_rate_at, make_optimizer, optimizer_step


def test_schedules():
    ends = dict(constant=[1, 1, 1], linear=[0.75, 0.5, 0.25], cosine=[0.853553, 0.5, 0.146447])
    for schedule, end in ends.items():
        settings = SFTSettings(learning_rate=1.0, warmup_iters=2, max_iters=6, lr_schedule=schedule)
        assert [learning_rate_at(i, settings) for i in range(6)] == pytest.approx([0.5, 1, 1, *end], abs=1e-6)


def test_two_steps_equal_the_formula():
    """AdamW (Loshchilov & Hutter), with the gradient scaled to norm 1 first; vectors do not decay."""
    model = make_model("gpt2", dtype=torch.float64)
    settings = SFTSettings(weight_decay=0.1, adam_beta2=0.95)
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


BF16 = dict(param_dtype="bfloat16", dtype="bfloat16")
OPTIONS = {"on the host": dict(optimizer_device="host"), "gradients on the host": dict(grad_offload=True)}
OPTIONS["both on the host"] = dict(optimizer_device="host", grad_offload=True)


def train(model, settings, steps, micro_batches=2):
    """Steps on gradients that come in two micro-batches, through autograd -> the optimizer."""
    optimizer = make_optimizer(model, settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(micro_batches):
            slopes = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in model.parameters()]
            sum((p * slope).sum() for p, slope in zip(model.parameters(), slopes, strict=True)).backward()
        optimizer_step(model, optimizer, 1e-2, 1.0)
    return optimizer


def test_gradients_leave_the_device_as_soon_as_they_are_made():
    model = make_model("gpt2", n_layer=8, n_embd=64)
    optimizer = make_optimizer(model, SFTSettings(grad_offload=True))
    tokens = torch.arange(20, device=DEVICE)[None]
    largest = max(p.nbytes for p in model.parameters())
    for _ in range(2):
        with LiveBytes() as live:
            for p in model.parameters():
                live.follow(p)
            loss = model(tokens).sum()
            before = live.current
            loss.backward()
        assert live.peak - before < 4 * largest + 10**5 < 0.5 * tensor_bytes(model.parameters())
        optimizer.gradients()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "options, size",
    [
        (dict(BF16, optimizer_dtype="bfloat16"), 0),
        (dict(optimizer_dtype="bfloat16"), 0),
        (BF16, 0),
        (dict(optimizer_device="host"), 4 + 4),
        (dict(BF16, optimizer_device="host", grad_offload=True), 4 + 4 + 4 + 2),
        (dict(BF16, optimizer_dtype="bfloat16", optimizer_device="host"), 2 + 2),
        (dict(grad_offload=True), 4),
    ],
)
def test_on_cuda_a_step_allocates_its_ring_and_no_more(options, size, monkeypatch):
    """As planned. size: bytes of a weight that come from the host."""
    monkeypatch.setattr(optimizer_module, "SLAB", 2000)
    settings = SFTSettings(**options)
    with PlanningMode("cuda", Recorder()) as planned, PlanMeter(planned.host) as meter:
        live, dtype = meter.live, getattr(torch, settings.param_dtype)
        model = torch.nn.ParameterList([torch.ones(100, 100, dtype=dtype), torch.ones(100, dtype=dtype)])
        model.device = model[0].device
        optimizer = make_optimizer(model, settings)
        for p in model:
            p.grad = torch.ones_like(p)
        optimizer.gradients()  # those that move to the host are there
        live.reset_peak()
        before = live.current
        optimizer_step(model, optimizer, 1e-3, 0.5)
    assert 0 <= live.peak - before - RING * 2000 * size < 100


# What is on the host is copied beside compute. tests/streams.py raises Race where a GPU might be too early.


@pytest.fixture
def races(monkeypatch):
    monkeypatch.setattr(optimizer_module, "SLAB", 100)
    with fake_streams() as races:
        yield races


STREAMED = OPTIONS | {"halved": dict(BF16, **OPTIONS["both on the host"])}


def small_model(options):
    return make_model("gpt2", n_layer=1, dtype=getattr(torch, options.get("param_dtype", "float32")))


@pytest.mark.parametrize("name", STREAMED)
def test_copies_beside_compute_change_nothing(name, races):
    options = STREAMED[name]
    with _disable_current_modes():
        expected = small_model(options)
        its = train(expected, SFTSettings(**options), 2)
    model = small_model(options)
    optimizer = train(model, SFTSettings(**options), 2)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.equal(q) and all(x.equal(its.state[q][key]) for key, x in optimizer.state[p].items())
    assert COMPUTE not in {op.stream for op in races.log if op.name == "addcdiv_"}
