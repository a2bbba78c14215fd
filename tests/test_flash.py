"""The kernels of packed groups' attention against the dense oracle: values in the interpreter, and what is compiled.

As in test_kernels.py, the tests of values run again in Triton's interpreter, and on CUDA."""

import pytest
import torch

from helpers.kernels import ahead_of_time, attend_dense
from helpers.models import DEVICE
from interpreted import INTERPRETED, SHARED, compiles, in_kernels, long, resources_of, run_interpreted
from snug.device.host import Ledger
from snug.device.kinds import PlanningMode
from snug.kernels import flash, segments
from snug.kernels.segments import Segments, attend
from snug.memory.ledger import LiveBytes

pytest.importorskip("triton", reason="Triton is not installed")

RAGGED = [(5, [3, 0, 9, 1]), (1, [2]), (20, []), (18, [21, 3, 3, 3])]  # lengths; tiles have 16 tokens
TWO = [RAGGED[0], (18, [21, 3])]


@compiles
@pytest.mark.both
def test_values_in_the_interpreter(request):
    run_interpreted(__file__, 10, request)


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """16 tokens, the least that a product takes. Where kernels are tested plain torch must not stand in for them."""
    if request.function.__name__.startswith("test_kernel"):
        for module in (flash, segments):
            monkeypatch.setattr(module, "TILE", 16)
        for name in ("forward_torch", "backward_torch"):
            monkeypatch.setattr(segments, name, lambda *_: pytest.fail("plain torch ran"))


def make_row(groups, H, G, D, dtype=torch.float32, seed=0):
    """-> segments, and the output of a projection (1, T, H + 2 G, D)."""
    torch.manual_seed(seed)
    its = Segments(groups, DEVICE)
    return its, torch.randn(1, int(its.lengths.sum()), H + 2 * G, D, device=DEVICE).to(dtype)


def run(function, its, x, dy, H, window=0):
    """-> the output (1, H, T, D), and the gradient of x (1, T, H + 2 G, D)."""
    x = x.detach().requires_grad_()
    G = (x.shape[2] - H) // 2
    y = function(*x.transpose(1, 2).split([H, G, G], 1), its, window)
    y.backward(dy)
    return y.detach(), x.grad


LARGER = [(70, [40, 33]), (3, [5, 20])]  # larger tiles
PART = [(40, [35, 2, 3, 20]), (37, [])]
SINGLE, HALF = torch.float32, torch.float16


@in_kernels
@pytest.mark.parametrize(
    "groups, H, G, D, dtype, window, tolerance",
    [
        (RAGGED, 3, 1, 24, SINGLE, 0, 3e-6),
        (RAGGED[1:3] + TWO[1:], 6, 2, 16, HALF, 0, 4e-3),
        ([(1, [1])], 1, 1, 16, SINGLE, 0, 3e-6),
        ([(17, [1, 1, 1] * 6)], 2, 1, 40, HALF, 0, 4e-3),  # tiles of many completions
        ([(7, [33, 50])], 1, 1, 128, SINGLE, 0, 3e-6),
        (RAGGED, 2, 1, 16, SINGLE, 5, 3e-6),
        long(RAGGED, 2, 1, 16, SINGLE, 17, 3e-6),
        (PART, 1, 1, 24, SINGLE, 1, 3e-6),
        long(PART, 1, 1, 24, SINGLE, 38, 3e-6),
        # Gemma's heads: sums of 256 products, each with float32's error: sqrt(256 / 24) times that of 24
        long([(18, [21, 3])], 4, 1, 256, SINGLE, 0, 1e-5),
        ([(18, [21, 3])], 4, 1, 256, SINGLE, 20, 1e-5),
        # float32 takes half a tile of 64; parts of a tile behind its last token have nothing to do
        (LARGER, 1, 1, 16, SINGLE, 0, 3e-6),
    ],
)
def test_kernels_agree_with_the_dense_oracle(groups, H, G, D, dtype, window, tolerance, monkeypatch):
    if groups is LARGER:
        for module in (flash, segments):
            monkeypatch.setattr(module, "TILE", 64)
    its, x = make_row(groups, H, G, D, dtype)
    dy = torch.randn(1, H, x.shape[1], D, device=DEVICE).to(dtype)
    expected = run(attend_dense, its, x.double(), dy.double(), H, window)
    for ours, exact in zip(run(attend, its, x, dy, H, window), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)


@in_kernels
def test_kernels_of_a_window_skip_what_no_query_sees():
    """What is skipped may be NaN: keys that lie whole blocks before the window, and queries behind it."""
    for completions in ([70], [40, 40]):
        its, x = make_row([(80, completions)], 1, 1, 16)
        x[:, :64] = torch.nan
        dy = torch.randn(1, 1, x.shape[1], 16, device=DEVICE)
        y, _ = run(attend, its, x, dy, 1, 17)
        assert y[:, :, 80:].isfinite().all()


@in_kernels
def test_kernels_take_any_strides_of_heads_and_tokens():
    its, x = make_row([(5, [14, 3])], 2, 1, 16)
    q, k, v = x.transpose(1, 2).split([2, 1, 1], 1)
    dy = torch.randn(1, 2, x.shape[1], 16, device=DEVICE)
    leaves = [[part.detach().requires_grad_() for part in parts] for parts in ((q, k, v), map(torch.clone, (q, k, v)))]
    results = []
    for parts, upstream in zip(leaves, (dy, dy.transpose(2, 3).contiguous().transpose(2, 3)), strict=True):
        y = attend(*parts, its)
        y.backward(upstream)
        results.append([y.detach(), *(part.grad for part in parts)])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    assert leaves[0][0].stride() != leaves[1][0].stride()
    sums = torch.ones(1, 2, x.shape[1], 1, device=DEVICE).expand(-1, -1, -1, 16)  # as y.sum() returns it
    gradient = torch.autograd.grad(attend(*leaves[0], its), leaves[0], sums)
    assert gradient[2].equal(torch.autograd.grad(attend(*leaves[0], its), leaves[0], sums.contiguous())[2])


@in_kernels
def test_kernels_read_nothing_beside_the_row():
    """The row lies in a longer one of NaN, and so do the outputs: what is outside stays as it was."""
    its, x = make_row(TWO, 2, 1, 16)
    T = x.shape[1]
    long = torch.full((1, T + 200, 4, 16), torch.nan, device=DEVICE)
    inside = slice(100, 100 + T)
    long[:, inside] = x
    dy = torch.randn(1, 2, T, 16, device=DEVICE)
    q, k, v = long[:, inside].transpose(1, 2).split([2, 1, 1], 1)
    wide = [torch.full((1, T + 200, heads, 16), 7.0, device=DEVICE) for heads in (2, 2, 1, 1)]
    y, *gradients = (tensor[:, inside].transpose(1, 2) for tensor in wide)
    lse = torch.empty(1, 2, T, device=DEVICE)
    flash.forward(q, k, v, y, lse, its, 0)
    flash.backward(dy, q, k, v, y, lse, *gradients, its, 0)
    y_expected, dx_expected = run(attend, its, x, dy, 2)
    assert y.equal(y_expected) and torch.cat(gradients, 1).transpose(1, 2).equal(dx_expected)
    for whole in wide:
        assert (whole[:, :100] == 7).all() and (whole[:, 100 + T :] == 7).all()


@in_kernels
def test_kernels_with_large_scores():
    """One key takes all: exp of the scores themselves would be infinite.

    The largest score is 7,425, so float32 rounds a score by up to 4.4e-4, and by as much the logarithm of a probability.
    """
    its, x = make_row([(4, [20, 3])], 1, 1, 16)
    x[:, :, :2] *= 40
    dy = torch.randn(1, 1, x.shape[1], 16, device=DEVICE)
    for ours, exact in zip(run(attend, its, x, dy, 1), run(attend_dense, its, x.double(), dy.double(), 1), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-4, atol=4 * 4.4e-4)


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planned_row_keeps_the_output_and_a_sum_a_head(dtype):
    """Without data: nothing is launched; backward's scratch is one number a token and head."""
    with PlanningMode("cuda", Ledger()), LiveBytes() as live:
        its, x = Segments([(100, [30, 0, 50]), (3, [])]), torch.empty(1, 183, 4 + 2 * 2, 16, dtype=dtype)
        q, k, v = (part.detach().requires_grad_() for part in x.transpose(1, 2).split([4, 2, 2], 1))
        before = live.current
        y = attend(q, k, v, its)
        assert live.current - before == y.nbytes + 183 * 4 * 4 and y.shape == q.shape
        y.backward(torch.empty_like(y))
        assert [part.grad.shape for part in (q, k, v)] == [part.shape for part in (q, k, v)]


# As it trains: tiles of 64 tokens, in bfloat16. The interpreter cannot multiply bfloat16.

TRAINED = [(256, [200] * 8), (77, [31, 1, 64, 129]), (1, [3])]


def on_cuda(*values):
    return pytest.param(*values, marks=pytest.mark.skipif(DEVICE == "cpu", reason="a real model's shape: on CUDA only"))


def relative_error(value, exact):
    return float((value - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "groups, R, G, D",
    [
        ([(3, [9, 1]), (2, [3])], 2, 1, 16),
        on_cuda(TRAINED, 6, 2, 128),
        on_cuda(TRAINED, 7, 2, 64),
        on_cuda(TRAINED, 1, 8, 40),
    ],
)
def test_errors_are_those_of_pytorchs_own_attention(groups, R, G, D, dtype):
    """At most twice as large. In 16 bits the interpreter's are 1.25 (output) to 1.6 times (gradients) what rounding the
    exact results costs, which is the least that PyTorch's can be. Bit for bit the same again, and beside NaN."""
    dtype = torch.float16 if INTERPRETED and dtype == torch.bfloat16 else dtype
    H = R * G
    its, x = make_row(groups, H, G, D, dtype)
    dy = torch.randn(1, H, x.shape[1], D, device=DEVICE).to(dtype)
    y, dx = run(attend, its, x, dy, H)
    exact = run(attend_dense, its, x.double(), dy.double(), H)
    for name, ours, plain, right in zip("yx", (y, dx), run(attend_dense, its, x, dy, H), exact, strict=True):
        axis, parts = (1, [H]) if name == "y" else (2, [H, G, G])  # dx: of queries, keys, values
        for a, b, c in zip(*(tensor.split(parts, axis) for tensor in (ours, plain, right)), strict=True):
            assert relative_error(a, c) <= 2 * relative_error(b, c)
    assert all(map(torch.equal, run(attend, its, x, dy, H), (y, dx)))
    for i in range(len(groups)):
        first, end = (sum(prompt + sum(lengths) for prompt, lengths in groups[:n]) for n in (i, i + 1))
        own, others = slice(first, end), (torch.full_like(x, torch.nan), torch.full_like(dy, torch.nan))
        others[0][:, own], others[1][:, :, own] = x[:, own], dy[:, :, own]
        y_again, dx_again = run(attend, its, *others, H)
        assert y_again[:, :, own].equal(y[:, :, own]) and dx_again[:, own].equal(dx[:, own])


FORWARD = dict(dy=None, dq=None, delta=None)
KERNELS = [("queries_kernel", FORWARD), ("queries_kernel", {}), ("keys_kernel", {}), ("sum_kernel", {})]


@ahead_of_time
@pytest.mark.parametrize(
    "R, G, D, dtype",
    [
        (7, 2, 64, "bf16"),  # Qwen2.5's 0.5B
        long(6, 2, 128, "bf16"),  # and 1.5B
        long(7, 2, 64, "fp32"),
        long(6, 2, 128, "fp32"),
        long(1, 8, 40, "bf16"),  # no multiple of 16: loaded number by number
        long(8, 1, 96, "bf16"),
        (4, 1, 256, "bf16"),  # Gemma 3's 1B
    ],
)
@pytest.mark.parametrize("window", [0, long(512)])
def test_compiled_attention_stays_in_registers(capability, window, R, G, D, dtype, tmp_path, monkeypatch):
    """sm_75 multiplies outside of tensor cores and spills hundreds of bytes: it is right and slow there."""
    monkeypatch.setattr(flash, "has_tensor_cores", lambda _: capability >= 80)
    q, k = (torch.empty(1, n, 1, D, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16) for n in (R * G, G))
    for name, constants in KERNELS:
        kernel, shape = getattr(flash, name), flash.kernel_shape(q, k, name in ("keys_kernel", "sum_kernel"))
        shape = {constant: value for constant, value in shape.items() if constant != "N" or name != "sum_kernel"}
        options = {option: shape.pop(option) for option in ("num_warps", "num_stages")}
        types = dict.fromkeys(("dy", "q", "k", "v", "y", "dq", "dk", "dv"), "*" + dtype)
        types |= dict.fromkeys(("lse", "delta", "dk_shares", "dv_shares"), "*fp32")
        types |= dict.fromkeys(("position", "start", "tiles"), "*i64")
        ones = {"G": 1} if G == 1 and "G" in kernel.arg_names else {}  # the launcher makes it a constant
        strides = [arg for arg in kernel.arg_names if arg.endswith(("_head", "_time"))]
        constants = shape | ones | constants
        if name != "sum_kernel":
            constants["WINDOW"] = window
        if name == "keys_kernel" and not window:
            constants["position"] = None
        pointers = {arg: types[arg] for arg in types if arg in kernel.arg_names and arg not in constants}
        its = pointers, constants, strides if D % 16 == 0 else [], options.pop("num_warps"), tmp_path
        used, ptx = resources_of(kernel, capability, *its, **options)
        assert used["LOCAL"] == 0 and used["SHARED"] <= SHARED[capability]
        products = capability >= 80 and dtype != "fp32" and name != "sum_kernel"
        assert any(word in ptx for word in ("mma", "tcgen05")) == products
        assert used["LOOP"] == 0 or capability == 75
        # Eight addresses may wait outside of the innermost loop.
        most = 1024 if capability == 75 else 64 if dtype == "fp32" or D % 16 or capability == 120 else 0
        assert used["STACK"] <= most
