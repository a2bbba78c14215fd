"""The Triton kernels without a GPU: their values in Triton's interpreter, and what the compiler makes of them.

Of log-probs, of tokens drawn from logits (draw.py) and of decode attention (kvcache.py).

The interpreter has to be chosen before the kernels are imported, so one test runs this file again in a process of its
own with TRITON_INTERPRET=1; the tests of values are those that run there, and on CUDA.
"""

import re
import sys

import numpy as np
import pytest
import torch
from conftest import make_flat_model
from interpreted import CAPABILITIES, INTERPRETED, compiles, in_kernels, run_interpreted
from interpreted import cubin_resources as resources
from test_draw import rows_with_an_unlikely_end
from test_kvcache import RAGGED, make_cache, run_rows, step
from test_logprobs import DEVICE, assert_near, make_head, make_rows, plain

from decoding import attention, draw, kvcache
from decoding import decode_batch as sample
from decoding.draw import sample_tokens
from kernels import triton
from logprobs import kernels, rows
from logprobs.head import head_logprobs, head_loss
from logprobs.kernels import tile
from logprobs.rows import token_logprobs
from sample import generate_naive, sample_groups

pytest.importorskip("triton", reason="Triton is not installed")


@compiles
def test_values_in_the_interpreter(request):
    assert run_interpreted(__file__, request) >= 20


@compiles
@pytest.mark.long
@pytest.mark.parametrize("name", ["draw", "kvcache", "logprobs", "sample"])
def test_the_tests_of_plain_torch_in_the_interpreter(name, request):
    assert run_interpreted(f"tests/test_{name}.py", request) >= 9


@pytest.fixture(autouse=True)
def only_kernels(request, monkeypatch):
    """In the interpreter's process and on CUDA plain torch must not stand in for a kernel."""
    if request.function.__name__.startswith("test_kernel"):
        for name in ("forward_torch", "backward_torch"):
            monkeypatch.setattr(rows, name, lambda *_: pytest.fail("plain torch ran"))
        monkeypatch.setattr(draw, "draw_torch", lambda *_: pytest.fail("plain torch ran"))
        monkeypatch.setattr(kvcache.torch, "baddbmm", lambda *_: pytest.fail("plain torch ran"))


# ----------------------------------------------------------------------------------------------------------------------
# Values.


@in_kernels
@pytest.mark.parametrize(
    "M, V, temperature, dtype",
    [
        (0, 67, 1.0, torch.float32),
        (1, 1, 1.0, torch.float32),
        (7, 67, 0.7, torch.bfloat16),
        (5, 128, 1.0, torch.float16),
        (3, 1000, 0.7, torch.float32),
        (2, 5000, 1.0, torch.bfloat16),
        (2, 8192, 0.7, torch.float16),
    ],
)
def test_kernel_values_and_gradients(M, V, temperature, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-5
    logits, targets, upstream = make_rows(M, V, dtype)
    reference = logits.double().requires_grad_()
    expected, expected_entropy = plain(reference, targets, temperature)
    gradient = torch.autograd.grad((expected * upstream).sum(), reference, retain_graph=True)[0]
    (expected * upstream + expected_entropy * upstream.flip(0)).sum().backward()
    logits.requires_grad_()
    logprobs, entropy = token_logprobs(logits, targets, temperature, entropy=True)
    assert torch.equal(logprobs, token_logprobs(logits, targets, temperature))  # entropy changes nothing else
    without = torch.autograd.grad((logprobs * upstream).sum(), logits, retain_graph=True)[0]
    assert_near(without, gradient, max(5e-6, 4 * torch.finfo(dtype).eps))  # rounded once
    (logprobs * upstream + entropy * upstream.flip(0)).sum().backward()
    assert_near(logprobs, expected, tolerance)
    assert_near(entropy, expected_entropy, 2 * tolerance)
    assert_near(logits.grad, reference.grad, max(5e-6, 4 * torch.finfo(dtype).eps))  # rounded once


@in_kernels
def test_kernel_strides_and_padding():
    wide, targets, upstream = make_rows(20, 140)
    for view in (
        wide[::2, :67],
        wide[:10, 5:72],
        wide[:1, :67].expand(10, 67),
        wide[:10, 0:134:2],
        wide[:10, :67].t().contiguous().t(),
    ):
        for n_vocab in (67, 50):
            logits, reference = view.detach().requires_grad_(), view.double().requires_grad_()
            ids = targets[:10] % n_vocab
            (expected, _), values = plain(reference, ids, 1.0, n_vocab), token_logprobs(logits, ids, n_vocab=n_vocab)
            assert_near(values, expected, 1e-5)
            gradient = torch.autograd.grad((values * upstream[:10]).sum(), logits)[0]
            assert_near(gradient, torch.autograd.grad((expected * upstream[:10]).sum(), reference)[0], 5e-6)
            assert (gradient[:, n_vocab:] == 0).all()


@in_kernels
def test_kernel_backward_in_place():
    logits, targets, upstream = make_rows(9, 5000)
    leaf = logits.requires_grad_()
    expected = torch.autograd.grad((token_logprobs(leaf, targets) * upstream).sum(), leaf)[0]
    made = leaf * 1
    (token_logprobs(made, targets, inplace=True) * upstream).sum().backward()
    assert torch.equal(made.detach(), expected) and torch.equal(leaf.grad, expected)
    made = leaf * 1
    other = (made * made).sum()  # a second user of the logits
    token_logprobs(made, targets, inplace=True).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        other.backward()


@in_kernels
def test_kernel_extremes():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 2.0, 1.0], [88.0, 89.0, -200.0]], device=DEVICE)
    targets = torch.tensor([0, 1, 1], device=DEVICE)
    values, entropy = token_logprobs(logits, targets, entropy=True)
    exact = torch.log_softmax(logits.double(), -1)
    assert_near(values, exact.gather(1, targets[:, None])[:, 0], 1e-5)
    assert_near(entropy, torch.special.entr(exact.exp()).sum(-1), 1e-4)
    assert token_logprobs(logits, torch.tensor([3, -1, 7], device=DEVICE)).isneginf().all()  # outside: nothing is read
    logits[0, 1] = torch.nan
    assert token_logprobs(logits, targets).isnan().tolist() == [True, False, False]


@in_kernels
@pytest.mark.parametrize("V, n_vocab, chunk_size", [(67, 60, 4), (5000, 4999, 100), (8192, 8192, 4)])
def test_kernel_heads(chunk_size, V, n_vocab):
    hidden, weight, targets, upstream = make_head(13, 8, V, torch.float32)
    targets = targets % n_vocab
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected, expected_entropy = plain(exact[0] @ exact[1].T, targets, 0.7, n_vocab)
    (expected * upstream).sum().backward()
    values = head_logprobs(hidden, weight, targets, 0.7, chunk_size, n_vocab=n_vocab)
    gradients = torch.autograd.grad((values * upstream).sum(), (hidden, weight))
    loss, again, entropy = head_loss(
        hidden,
        weight,
        targets,
        lambda q, rows: (q * upstream[rows]).sum(),
        0.7,
        chunk_size,
        entropy=True,
        n_vocab=n_vocab,
    )
    loss.backward()
    assert_near(loss, (expected * upstream).sum(), 1e-4)
    assert_near(again, expected, 2e-5)
    assert_near(entropy, expected_entropy, 2e-5)
    for ours, other, truth in zip((hidden.grad, weight.grad), gradients, exact, strict=True):
        assert_near(ours, truth.grad, 1e-4)
        assert_near(other, truth.grad, 1e-4)
    assert (weight.grad[n_vocab:] == 0).all()
    bonus = torch.autograd.grad(plain(exact[0] @ exact[1].T, targets, 0.7, n_vocab)[1].sum(), exact)
    _, entropy = head_logprobs(hidden, weight, targets, 0.7, chunk_size, True, n_vocab)
    for ours, truth in zip(torch.autograd.grad(entropy.sum(), (hidden, weight)), bonus, strict=True):
        assert_near(ours, truth, 1e-4)


@in_kernels
@pytest.mark.parametrize(
    "M, width, n_vocab, temperature, dtype",
    [
        (1, 16, 1, 1.0, torch.float32),
        (7, 80, 67, 0.7, torch.float32),
        (7, 80, 67, 0.7, torch.bfloat16),
        (3, 5008, 5000, 1.0, torch.float16),
        (2, 8192, 8192, 0.7, torch.bfloat16),
    ],
)
def test_kernel_leaves_the_gradient_in_place_of_the_logits(dtype, M, width, n_vocab, temperature):
    logits, targets, _ = make_rows(M, width, dtype)
    logits[:, n_vocab:] = torch.nan  # what a buffer's padding happens to hold
    targets = targets % n_vocab
    exact = logits.double()
    expected, expected_entropy = plain(exact, targets, temperature, n_vocab)
    softmax = torch.nn.functional.pad(torch.softmax(exact[:, :n_vocab] / temperature, -1), (0, width - n_vocab))
    gradient = torch.nn.functional.one_hot(targets, width) - softmax
    options = rows.Options(temperature, n_vocab, True, dtype)
    values, lse, entropy = rows.new_rows(M, options, DEVICE)
    rows.forward_rows(logits, targets, options, values, lse, entropy, None, gradient=True)
    assert_near(values, expected, 2e-5)
    assert_near(entropy, expected_entropy, 4e-5)
    assert_near(logits, gradient / temperature, max(2e-6, torch.finfo(dtype).eps / temperature))  # rounded once


class Head:
    """What sample_tokens takes of a model: logits are the rows of a matrix."""

    def __init__(self, logits, n_vocab):
        self.lm_head_weight = logits.T.contiguous()
        self.config = type("Config", (), dict(vocab_size=logits.shape[1], n_vocab=n_vocab))


@in_kernels
@pytest.mark.parametrize(
    "N, width, n_vocab, temperature, dtype",
    [
        (1, 1, 1, 1.0, torch.float32),
        (40, 67, 67, 1.0, torch.float16),
        (40, 80, 67, 0.7, torch.float32),
        (6, 5000, 4999, 0.7, torch.float16),
        (6, 20_000, 20_000, 1.0, torch.float32),
    ],
)
def test_kernel_draws_by_inverse_cdf(dtype, N, width, n_vocab, temperature):
    """Token i for u between the float64 sums before and after it, of the whole; 0 and 1 - 2^-23 are among them."""
    logits, _, _ = make_rows(N, width, dtype)
    logits[:, n_vocab:] = 50.0  # padding
    logits[:, : n_vocab // 2 : 3] = -60000.0 if dtype == torch.float16 else -1e9  # probability 0
    u = torch.linspace(0, 1 - 2**-23, N, device=DEVICE)
    tokens, values = sample_tokens(Head(logits, n_vocab), torch.eye(N, dtype=dtype, device=DEVICE), u, temperature)
    exact = torch.softmax(logits[:, :n_vocab].double() / temperature, -1)
    after = exact.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    p = exact.gather(1, tokens[:, None])[:, 0]
    assert (p > 0).all() and (u <= after + 1e-6).all() and (u >= after - p - 1e-6).all()
    assert_near(values, p.log(), 2e-5)


@in_kernels
def test_kernel_draws_no_unlikely_token():
    """Three stretches; and no number out of range from a row with a NaN."""
    logits, u = (torch.tensor(x[:6], device=DEVICE) for x in rows_with_an_unlikely_end(3 * 4096))
    tokens, values = sample_tokens(Head(logits, logits.shape[1]), torch.eye(6, device=DEVICE), u, 0.9)
    assert (tokens < 256).all()
    assert_near(values, torch.log_softmax(logits.double() / 0.9, -1).gather(1, tokens[:, None])[:, 0], 2e-5)
    logits[0, 5000], logits[1], logits[2, 7] = torch.nan, torch.nan, torch.inf
    tokens, values = sample_tokens(Head(logits, 12_000), torch.eye(6, device=DEVICE)[:3], u[:3], 0.9)
    assert values.isnan().all() and (tokens >= 0).all() and (tokens < 12_000).all()


@pytest.fixture
def launches(monkeypatch):
    """-> the programs of each launch. In the interpreter they run in a random order: any may be the last one."""
    programs, order, random = [], [], np.random.default_rng(0)
    if INTERPRETED:
        builder = triton.runtime.interpreter.interpreter_builder
        set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx

        def set_grid_dim(x, y, z):
            programs.append(x)
            order[:] = random.permutation(x).tolist()
            set_dim(x, y, z)

        monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_idx(order[x], y, z))
    return programs


@in_kernels
@pytest.mark.parametrize(
    "shape, dtype, rotary, stretch, programs",
    [
        (dict(kv_heads=1), torch.float16, False, 2, 3 * 5 + 5 * 3),
        (dict(heads=2, kv_heads=2, group_size=1), torch.float32, True, None, 2 * (5 + 5)),
        (dict(D=24, group_size=16), torch.float32, True, 3, 2 * (3 * 3 + 5 * 2)),
        (dict(D=16, heads=6, T_p=70, lengths=(70, 66, 3)), torch.float32, False, None, 2 * (3 + 5)),
    ],
)
def test_kernel_attends_to_prompt_and_own_tokens(shape, dtype, rotary, stretch, programs, launches, monkeypatch):
    """One launch a step; stretches of a few columns, so that each column is once the new one at a stretch's end.

    bfloat16 has no products in the interpreter; its cubins are compiled below, and CUDA runs it in test_sample.py."""
    if stretch:
        monkeypatch.setattr(attention, "split_columns", lambda width, *_: (-(-width // stretch), stretch))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    cache, config, prompts = make_cache(dtype, **shape)
    assert run_rows(cache, config, prompts, RAGGED, tolerance, rotary) == 25
    assert launches == [programs] * len(RAGGED) * INTERPRETED
    assert not cache.counters.any()  # a replay finds them as the recording did


@in_kernels
def test_kernel_takes_queries_and_keys_of_another_type():
    """As autocast leaves them behind a norm of queries and keys."""
    cache, _, _ = make_cache(torch.float16, kv_heads=1)
    q, k, v = (torch.randn(3, heads, 1, 8, dtype=torch.float16, device=DEVICE) for heads in (4, 1, 1))
    expected = step(cache, [0, 1, 1], [0, 0, 0], q, k, v)
    y = step(cache, [0, 1, 1], [0, 0, 0], q.float(), k.float(), v)
    assert y.equal(expected) and y.dtype == torch.float16


@in_kernels
@pytest.mark.parametrize("shape", [pytest.param("gpt2", marks=pytest.mark.long), "llama"])
def test_kernel_rows_are_those_of_the_naive_generator(shape, monkeypatch):
    """Slots that are filled again and leave, with every kernel of a step. What a recorded graph reads and writes stays
    where it is, whatever rows come and go, as long as there are so many slots."""
    addresses, original = {}, sample.DecodeBatch.forward_step

    def forward_step(batch):
        buffers = [batch.rows, batch.t, batch.token, batch.prompt_length, batch.tokens, batch.logprobs, batch.u]
        buffers += [
            batch.cache.own,
            batch.cache.prompt,
            batch.cache.prompt_lengths,
            batch.cache.tiles,
            batch.cache.counters,
        ]
        addresses.setdefault(len(batch.rows), set()).add(tuple(buffer.data_ptr() for buffer in buffers))
        original(batch)
        assert batch.cache.t is batch.t

    monkeypatch.setattr(sample.DecodeBatch, "forward_step", forward_step)
    monkeypatch.setitem(sample.SHRINK_ABOVE, DEVICE, 1)
    model, prompts = make_flat_model(shape, n_layer=1), [[1, 2, 3], [4]]
    rollouts = sample_groups(model, prompts, 3, 7, stop_token=3, seed=3, max_batch=4)
    for i, (row, p, c) in enumerate(
        zip(rollouts.tokens, rollouts.prompt_lengths, rollouts.completion_lengths, strict=True)
    ):
        ids, values = generate_naive(model, prompts[i // 3], 7, stop_token=3, seed=3, row=i)
        assert row[p : p + c].tolist() == ids
        assert rollouts.sampling_logprobs[i, :c].tolist() == pytest.approx(values, abs=1e-5)
    assert len(addresses) > 1 and all(len(found) == 1 for found in addresses.values())


@pytest.mark.skipif(DEVICE == "cpu", reason="4 GiB of logits: on CUDA only")
def test_kernel_beyond_2_to_the_31_elements_and_65535_rows():
    M, V = 70_000, 32_000
    logits = torch.zeros(M, V, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, 5] = 10.0
    targets = torch.full((M,), 5, device=DEVICE)
    values = token_logprobs(logits.requires_grad_(), targets, inplace=True)
    expected, _ = plain(logits.detach()[-1:], targets[-1:])
    assert_near(values[-1:], expected, 2e-5)
    assert_near(values[:1], plain(logits.detach()[:1], targets[:1])[0], 2e-5)
    values.sum().backward()
    assert abs(float(logits.grad[-1].float().sum())) < 0.01 and float(logits.grad[-1, 5]) > 0.5


# ----------------------------------------------------------------------------------------------------------------------
# Ahead of time, for devices that are not here: at the blocks and warps that the shape rule picks.


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


MAIN_DTYPE = ["bf16", long("fp32")]
linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton ships its assembler for Linux")


def aligned(**integers):
    return [name for name, value in integers.items() if value % 16 == 0]


def ones(**integers):
    """Those that the launcher makes constants."""
    return {name: 1 for name, value in integers.items() if value == 1}


def test_the_shape_rule():
    for width in (1, 67, 128, 1000, 50257, 50272, 151936):
        block, warps = tile(width)
        assert block & (block - 1) == 0 and warps & (warps - 1) == 0  # Triton takes powers of two
        assert block >= min(width, 2048) and 1 <= warps <= 8 and 4 <= block / (32 * warps) <= 16


@compiles
def test_stretches_cover_a_row():
    for width in (1, 67, 4096, 4097, 50257, 128256, 151936, 262144):
        for n_vocab in {width, max(width - 271, 1)}:
            length, shape = draw.stretches(width, n_vocab)
            assert length <= shape["BLOCK"] and length % (shape["BLOCK"] // shape["STRETCHES"]) == 0
            assert length * shape["STRETCHES"] >= n_vocab


@compiles
@linux
@pytest.mark.parametrize("dtype", MAIN_DTYPE)
@pytest.mark.parametrize("V", [*map(long, [1, 67, 1000, 50257]), 151936])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernels_do_not_spill(capability, V, dtype, tmp_path):
    itemsize = 2 if dtype == "bf16" else 4
    numbers = dict.fromkeys(("logprobs", "lse", "entropy", "coefficients", "dentropy"), "*fp32") | {"targets": "*i64"}
    variants = [(False, False), (True, False), (False, True), (True, True)]
    for entropy, gradient in variants:  # padding costs registers as well
        width = -(-V // 16) * 16 if gradient else V  # the head's buffer has aligned rows
        block, warps = tile(width, itemsize, gradient)
        pointers = {"logits": "*" + dtype} | {name: numbers[name] for name in ("targets", "logprobs", "lse", "entropy")}
        constants = {"BLOCK": block, "PADDED": entropy, "ENTROPY": entropy, "GRADIENT": gradient}
        integers = dict(width=width, n_vocab=V, row_stride=width)
        used, ptx = resources(
            kernels.forward_kernel, capability, pointers, constants | ones(**integers),
            aligned(width=width, row_stride=width), warps, tmp_path,
        )  # fmt: skip
        print(
            f"sm_{capability} V={V} {dtype} forward entropy={entropy} gradient={gradient} block={block} warps={warps}",
            used,
        )
        spilled = 16 if capability in (75, 120) else 0  # bytes, in variants with entropy
        assert used["STACK"] <= spilled and used["LOCAL"] == 0
        assert used["REG"] <= min(128, 2048 // warps)  # else the program does not fit on an SM
        assert bool(re.search(r"ld\.global[.\w:]*\.v4", ptx)) == (
            width % 16 == 0 and (width > 128 or dtype == "fp32")
        )  # 16 bytes at a time where addresses allow
    block, warps = tile(V)
    pointers = {"logits": "*" + dtype, "dlogits": "*" + dtype}
    pointers |= {name: numbers[name] for name in ("targets", "lse", "entropy", "coefficients", "dentropy")}
    integers = dict(width=V, row_stride=V, out_row_stride=V)
    for entropy in (False, True):
        constants = {"BLOCK": block, "PADDED": True, "ENTROPY": entropy}
        constants |= ones(**integers, n_vocab=V, blocks=-(-V // block))
        used, ptx = resources(
            kernels.backward_kernel, capability, pointers, constants, aligned(**integers), warps, tmp_path
        )
        print(f"sm_{capability} V={V} {dtype} backward entropy={entropy} block={block} warps={warps}", used)
        assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 64
        assert ("st.global.v4" in ptx) == (V % 16 == 0)


@compiles
@linux
@pytest.mark.parametrize("dtype", MAIN_DTYPE)
@pytest.mark.parametrize(
    "width, n_vocab", [long(1, 1), long(67, 67), long(50257, 50257), long(151936, 151936), (151936, 151665)]
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_draws_do_not_spill(capability, width, n_vocab, dtype, tmp_path):
    """151,665 of 151,936 ids are Qwen2.5's; it is read 16 bytes at a time all the same."""
    length, shape = draw.stretches(width, n_vocab)
    warps = shape.pop("num_warps")
    pointers = {"logits": "*" + dtype, "u": "*fp32", "tokens": "*i64", "logprobs": "*fp32"}
    integers = dict(width=width, n_vocab=n_vocab, row_stride=width, length=length)
    used, ptx = resources(
        draw.draw_kernel, capability, pointers, shape | ones(**integers), aligned(**integers), warps, tmp_path
    )
    print(f"sm_{capability} V={width} {dtype} draw {shape} warps={warps}", used)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 128 and used["SHARED"] <= SHARED[capability]
    assert bool(re.search(r"ld\.global[.\w:]*\.v4", ptx)) == (width == 151936)


SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may ask for
SHARED = {capability: kib * 1024 for capability, kib in SHARED.items()}


@compiles
@linux
@pytest.mark.parametrize("dtype", MAIN_DTYPE)
@pytest.mark.parametrize(
    "H, G, D, group_size, rotary, small",
    [
        long(12, 12, 64, 16, False, ()),
        (12, 2, 128, 16, True, ()),
        long(12, 2, 128, 1, True, ()),
        (8, 1, 64, 4, False, ("G",)),
        long(32, 8, 128, 8, True, ()),
        long(14, 2, 64, 8, True, ()),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_attention_stays_in_registers(capability, H, G, D, group_size, rotary, small, dtype, tmp_path):
    """GPT-2, Qwen2.5-1.5B, one key head, Llama 3.1 8B, Qwen2.5-0.5B. q and k are float32, as autocast's
    norms leave them beside values in bfloat16.

    sm_75 has no products of bfloat16. Triton multiplies in float32 there, with hundreds of bytes of spilled registers:
    such a run is right and slow. float32, which is the default of --dtype, leaves a few words, as elsewhere."""
    shape = attention.kernel_shape(H, G, D, 2 if dtype == "bf16" else 4, group_size)
    pointers = dict.fromkeys(("q", "k", "cos", "sin", "parts", "tops", "totals"), "*fp32")
    pointers |= dict.fromkeys(("v", "prompt_k", "prompt_v", "own_k", "own_v", "y"), "*" + dtype)
    pointers |= {"tiles": "*i32", "counters": "*i32", "lengths": "*i64", "t": "*i64"}
    rows = ["D", "prompt_chunk", "own_chunk", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head"]
    used, ptx = resources(
        attention.attend_kernel, capability, pointers, shape | {"ROTARY": rotary} | dict.fromkeys(small, 1), rows, 4,
        tmp_path, maxnreg=attention.REGISTERS,
    )  # fmt: skip
    print(f"sm_{capability} {H}/{G} x {D} {dtype} {shape} {small}", used)
    assert used["LOCAL"] == 0 and used["REG"] <= attention.REGISTERS and used["SHARED"] <= SHARED[capability]
    if (capability, dtype) == (75, "bf16"):
        assert "mma" not in ptx
    else:
        assert used["STACK"] <= (32 if dtype == "fp32" else 0)
        assert ("mma" in ptx) == (dtype == "bf16")
    # In each half of the kernel: all threads store their parts, then the counter releases them; it acquires the others'
    # parts, then all threads read.
    order = r"st\.global\S*|bar\.sync|atom\S*|ld\.global\S*|cp\.async\.c\S*"
    found = " ".join(op.split(".")[0] if op != "bar.sync" else "bar" for op in re.findall(order, ptx))
    assert len(re.findall("st bar atom bar(?: bar)* ld", found)) == ptx.count("atom.global.gpu.acq_rel") == 2
