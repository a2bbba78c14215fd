"""The kernel of AdamW and its twin: against each other, against float64, and where their random bits come from."""

import re

import pytest
import torch

from helpers.kernels import BF16, F32, ahead_of_time
from helpers.models import DEVICE
from interpreted import INTERPRETED, in_kernels, in_the_interpreter, long, resources_of
from snug.kernels import adamw as module
from snug.kernels.adamw import BLOCK, key_of, mix, mix_, new_scratch, numbers_of

pytest.importorskip("triton", reason="Triton is not installed")
# What settings allow: weights and gradients; moments; masters.
KINDS = [(F32, F32, None), (BF16, F32, F32), (BF16, BF16, None), (F32, BF16, None)]
GROUP = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
# Numbers for which float32 is exact, in any order and with fused products too: exp_avg becomes the gradient * scale,
# exp_avg_sq its square (rounded once), the weight 0 - exp_avg.
EXACT = dict(scale=1 + 2**-10, share1=1.0, share2=1.0, decay=1.0, rate=1.0, correction=0.0, eps=1.0)


def make(n, kind, seed=0):
    """-> weight, gradient, exp_avg, exp_avg_sq, master as after some steps."""
    dtype, state, master = kind
    generator = torch.Generator().manual_seed(seed)
    w, g, m, v = torch.randn(4, n, generator=generator).to(DEVICE).unbind()
    tensors = w.to(dtype), g.to(dtype), (0.1 * m).to(state), (0.1 * v * v).to(state)
    return *tensors, None if master is None else w.clone()


def adamw(weight, *rest):
    module.adamw(weight, *rest, new_scratch(weight))


def copies(tensors):
    return [None if x is None else x.clone() for x in tensors]


test_values_in_the_interpreter = in_the_interpreter(__file__, 12)


@pytest.fixture
def twin(monkeypatch):
    """The twin; it must not stand in for the kernel."""
    original = module.adamw_torch

    def twin(*arguments):
        *tensors, numbers, key, first = arguments
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "uses_triton", lambda *_: False)
            kept = tensors[0] if tensors[4] is None else tensors[4]
            original(*tensors[:4], kept, tuple(numbers), key, first, new_scratch(kept))

    monkeypatch.setattr(module, "adamw_torch", lambda *_: pytest.fail("plain torch ran"))
    return twin


@in_kernels
@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("first, key", [(7, 2**31 - 1), (2**31 - 5, 2**31), (2**32 - 3000, 2**32 - 1)])
def test_kernel_has_the_random_bits_of_its_twin(first, key, kind, twin):
    """Bit for bit, on numbers that float32 has no choice about."""
    gradient = torch.randn(2500, generator=torch.Generator().manual_seed(1)).to(DEVICE, kind[0])
    ours = torch.zeros_like(gradient), gradient, *torch.zeros(2, 2500, dtype=kind[1], device=DEVICE), None
    theirs = copies(ours)
    adamw(*ours, EXACT.values(), key, first)
    twin(*theirs, EXACT.values(), key, first)
    for a, b in zip(ours[:4], theirs[:4], strict=True):
        assert a.equal(b) and a.abs().sum() > 0


# Of the kernel in the interpreter's process and on CUDA, of the twin elsewhere.


@pytest.mark.parametrize("n", [1, BLOCK + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_formula_in_float64(n, kind):
    """AdamW as its paper has it, from the same state; bfloat16 gets one of the two neighbours."""
    tensors = make(n, kind)
    w, g, m, v, master = (None if x is None else x.double() for x in tensors)
    w, (beta1, beta2), steps = w if master is None else master, GROUP["betas"], 3
    m = beta1 * m + (1 - beta1) * 0.7 * g
    v = beta2 * v + (1 - beta2) * (0.7 * g) ** 2
    w = w - GROUP["lr"] * GROUP["weight_decay"] * w
    w = w - GROUP["lr"] * (m / (1 - beta1**steps)) / ((v / (1 - beta2**steps)).sqrt() + GROUP["eps"])
    adamw(*tensors, numbers_of(GROUP, steps, 0.7), 11, 0)
    for ours, exact in zip(tensors, (w, None, m, v, None if master is None else w), strict=True):
        if ours is not None and exact is not None:
            torch.testing.assert_close(ours.double(), exact, rtol=1e-6 if ours.dtype == F32 else 2**-7, atol=2e-7)
    if master is not None and not INTERPRETED:
        assert tensors[0].equal(tensors[4].to(BF16))


@pytest.mark.parametrize("value", [3e-4, -123.456, 0.0])
def test_rounding_is_right_on_average_and_picks_a_neighbour(value):
    n = 40_000
    gradient = torch.full((n,), value, device=DEVICE).to(BF16)
    weight, exp_avg, exp_avg_sq = torch.zeros(3, n, dtype=BF16, device=DEVICE)
    adamw(weight, gradient, exp_avg, exp_avg_sq, None, EXACT.values(), 3, 0)
    m = torch.tensor(value).to(BF16).float() * EXACT["scale"]
    for result, exact in ((exp_avg, m), (exp_avg_sq, m * m), (weight, -m)):
        bits = exact.view(torch.int32) & -(2**16)
        low, high = sorted(float((bits + more).view(torch.float32)) for more in (0, 2**16))
        assert low <= float(result.min()) and float(result.max()) <= high
        assert result.unique().numel() == 1 + (value != 0)
        assert float(result.double().mean()) == pytest.approx(float(exact), rel=1e-4)


def test_pieces_of_a_parameter_have_the_random_bits_of_the_whole(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 700)
    whole = make(2000, KINDS[2])
    pieces = copies(whole)
    numbers = numbers_of(GROUP, 1, 1.0)
    adamw(*whole, numbers, 9, 0)
    for part in (slice(0, 1), slice(1, 1100), slice(1100, 2000)):
        adamw(*(None if x is None else x[part] for x in pieces), numbers, 9, part.start)
    for a, b in zip(whole[:4], pieces[:4], strict=True):
        assert a.equal(b)


def test_the_hash_is_the_published_one():
    """Values of lowbias32 computed by the C of its author, with 32-bit arithmetic."""

    def lowbias32(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    numbers = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1, *range(10**9, 10**9 + 1000)]
    x = torch.tensor(numbers)
    assert mix_(x, x.clone()).tolist() == [mix(x) for x in numbers] == [lowbias32(x) for x in numbers]


def test_steps_parameters_and_seeds_have_keys_of_their_own():
    keys = {key_of(*three) for three in torch.cartesian_prod(*[torch.arange(20)] * 3).tolist()}
    assert len(keys) >= 8000 - 2 and all(0 <= key < 2**32 for key in keys)


@ahead_of_time
@pytest.mark.parametrize("n", ["aligned", "odd", long(1)])
@pytest.mark.parametrize("kind", [KINDS[0], long(KINDS[1]), KINDS[2], long(KINDS[3])])
def test_the_compiled_kernel_stays_in_registers(capability, kind, n, tmp_path):
    weights, state, master = ("*fp32" if dtype == F32 else "*bf16" for dtype in kind)
    kinds = dict(weight=weights, gradient=weights, exp_avg=state, exp_avg_sq=state, key="u32", first="u32")
    kinds |= dict(kept="*fp32" if kind[2] else weights) | dict.fromkeys(EXACT, "fp32")
    constants = dict(HAS_MASTER=kind[2] is not None, BLOCK=BLOCK) | ({"n": 1} if n == 1 else {})
    aligned = ["n"] if n == "aligned" else []
    used, ptx = resources_of(module.adamw_kernel, capability, kinds, constants, aligned, 4, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 64  # 8 programs of 4 warps on an SM
    assert bool(re.search(r"st\.global[.\w:]*\.v4", ptx)) == (n == "aligned")  # 16 bytes at a time
