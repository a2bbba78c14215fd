"""The Triton kernels without a GPU: their values in Triton's interpreter, and what the compiler makes of them.

Here are the kernels that draw tokens (draw.py) and decode (kvcache.py), and the compiled kernels of log-probs, whose
values are in test_logprobs.py.

The interpreter has to be chosen before the kernels are imported, so one test runs this file again in a process with
TRITON_INTERPRET=1. The tests of values run there, and on CUDA.
"""

import os
import re

import numpy as np
import pytest
import torch

import interpreted
from helpers.kernels import LONG_ROWS, RAGGED, ahead_of_time, assert_near, make_cache, make_rows, run_rows
from helpers.models import DEVICE, make_flat_model
from helpers.rollouts import assert_naive
from interpreted import INTERPRETED, SHARED, compiles, in_kernels, in_the_interpreter, long, resources_of
from sample import sample_groups
from snug.decoding import attention, draw, kvcache
from snug.decoding import decode_batch as sample
from snug.decoding.draw import sample_tokens
from snug.kernels import triton
from snug.logprobs import rows
from snug.logprobs.rows import tile

pytest.importorskip("triton", reason="Triton is not installed")
test_values_in_the_interpreter = in_the_interpreter(__file__, 9)


@compiles
@pytest.mark.long
@pytest.mark.parametrize("name, at_least", [("draw", 2), ("kvcache", 9)])
def test_the_tests_of_plain_torch_in_the_interpreter(name, at_least):
    interpreted.run_interpreted(f"tests/test_{name}.py", at_least)


@pytest.fixture(autouse=True)
def only_kernels(request, monkeypatch):
    """In the interpreter's process and on CUDA plain torch must not stand in for a kernel."""
    if request.function.__name__.startswith("test_kernel"):
        monkeypatch.setattr(draw, "draw_torch", lambda *_: pytest.fail("plain torch ran"))
        monkeypatch.setattr(kvcache.torch, "baddbmm", lambda *_: pytest.fail("plain torch ran"))


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
def test_kernel_draws_no_unlikely_token(monkeypatch):
    """Three stretches; and no number out of range from a row with a NaN. 256 tokens are likely; those at the end have
    1e-23 together, and the uniforms are near 1."""
    logits = torch.tensor(np.random.default_rng(0).normal(50, 3, (6, 3 * 4096)), dtype=torch.float32, device=DEVICE)
    logits[:, 256:] /= 30
    u = 1 - 2**-24 * torch.arange(1, 7, device=DEVICE)
    tokens, values = sample_tokens(Head(logits, logits.shape[1]), torch.eye(6, device=DEVICE), u, 0.9)
    assert (tokens < 256).all()
    assert_near(values, torch.log_softmax(logits.double() / 0.9, -1).gather(1, tokens[:, None])[:, 0], 2e-5)
    # The interpreter's argmax, as of Triton 3.9, refuses a row of NaN. A GPU's gives some entry.
    monkeypatch.setattr(np, "nanargmax", lambda x, **axis: np.argmax(np.nan_to_num(x, nan=-np.inf), **axis))
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
            programs.append(x * y)
            order[:] = random.permutation(x).tolist()
            set_dim(x, y, z)

        monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_idx(order[x], y, z))
    return programs


THREE = [moment[:3] for moment in LONG_ROWS]  # slots


@in_kernels
@pytest.mark.parametrize(
    "shape, dtype, rotary, stretch, schedule, programs",
    [
        (dict(kv_heads=1), torch.float16, False, 2, RAGGED, 3 * 5 + 5 * 3),
        long(dict(heads=2, kv_heads=2, group_size=1), torch.float32, True, None, RAGGED, 2 * (5 + 5)),
        long(dict(D=24, group_size=16), torch.float32, True, 3, RAGGED, 2 * (3 * 3 + 5 * 2)),
        (dict(D=16, heads=6, T_p=70, lengths=(70, 66, 3)), torch.float32, False, None, RAGGED, 2 * (3 + 5)),
        (dict(T_c=16, sliding_window=1), torch.float16, True, 3, THREE[:3], None),
        (dict(T_c=16, sliding_window=5, kv_heads=1, rotary_fraction=0.5), torch.float32, True, 3, THREE[:7], None),
        long(dict(T_c=16, sliding_window=14, D=24, rotary_fraction=0.75), torch.float32, True, 4, THREE, None),
        (dict(T_c=16, sliding_window=20, T_p=70, lengths=(34, 33, 70)), torch.float32, True, None, THREE, None),
    ],
)
def test_kernel_attends(shape, dtype, rotary, stretch, schedule, programs, launches, monkeypatch):
    """One launch a step; stretches of a few columns, so that each column is once the new one at a stretch's end.

    Also where a window begins in the prompt: a block behind its begin, for one slot of a program and not yet for
    another. All of a head's numbers turn, or half, or 18 of 24.

    bfloat16 has no products in the interpreter; its cubins are compiled below, and CUDA runs it in test_sample.py."""
    if stretch:
        monkeypatch.setattr(attention, "split_columns", lambda width, *_: (-(-width // stretch), stretch))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    cache, config, prompts = make_cache(dtype, **shape)
    assert run_rows(cache, config, prompts, schedule, tolerance, rotary) == sum(map(len, schedule))
    assert programs is None or launches == [programs] * len(RAGGED) * INTERPRETED
    assert not cache.counters.any()  # a replay finds them as the recording did


@in_kernels
@pytest.mark.parametrize(
    "shape, changes, own",
    [
        long("gpt2", {}, {}),
        ("llama", {}, {}),
        long("llama", dict(n_layer=2, sliding_window=4, full_every=2), {}),
        long("gpt2", dict(vocab_size=24, n_vocab=16), dict(temperature=1.5)),
        long("llama", {}, dict(stop_token=(3, 9), is_over=lambda ids: ids[-2:] == [5, 5])),
    ],
)
def test_kernel_rows_are_those_of_the_naive_generator(shape, changes, own, monkeypatch):
    """Slots that are filled again and leave, with every kernel of a step. What a recorded graph reads and writes stays
    where it is, whatever rows come and go, as long as there are so many slots. With few rows: the interpreter takes
    minutes for test_sample.py's."""
    addresses, original = {}, sample.DecodeBatch.forward_step

    def forward_step(batch):
        buffers = [batch.sequences, batch.t, batch.token, batch.prompt_length, batch.tokens, batch.logprobs, batch.u]
        cache = batch.cache
        buffers += [cache.completions, cache.prompt, cache.prompt_lengths, cache.tiles, cache.counters]
        addresses.setdefault(len(batch.sequences), set()).add(tuple(buffer.data_ptr() for buffer in buffers))
        original(batch)
        assert batch.cache.t.data_ptr() == batch.t.data_ptr()

    monkeypatch.setattr(sample.DecodeBatch, "forward_step", forward_step)
    monkeypatch.setitem(sample.SHRINK_ABOVE, DEVICE, 1)
    model, prompts = make_flat_model(shape, **dict(n_layer=1) | changes), [[1, 2, 3], [4]]
    options = dict(stop_token=3, seed=3) | own
    rollouts = sample_groups(model, prompts, 3, 5, max_batch=4, **options)
    assert_naive(rollouts, model, prompts, 5, **options)
    assert len(addresses) > 1 and all(len(found) == 1 for found in addresses.values())


# Ahead of time, for devices that are not here: at the blocks and warps that the shape rule picks.


MAIN_DTYPE = ["bf16", long("fp32")]


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


@ahead_of_time
@pytest.mark.parametrize("dtype", MAIN_DTYPE)
@pytest.mark.parametrize("V", [*map(long, [1, 67, 1000, 50257]), 151936])
def test_compiled_kernels_do_not_spill(capability, V, dtype, tmp_path):
    itemsize = 2 if dtype == "bf16" else 4
    types = {"logits": "*" + dtype, "targets": "*i64", "logprobs": "*fp32", "entropy": "*fp32"}
    for name in ("forward", "entropy", "gradient", "entropy, gradient"):
        gradient, absent = "gradient" in name, [] if "entropy" in name else ["entropy"]
        width = -(-V // 16) * 16 if gradient else V  # the head's buffer has aligned rows
        block, warps = tile(width, itemsize, gradient)
        integers = dict(width=width, n_vocab=V, row_stride=width)
        # padding costs registers as well
        constants = {"BLOCK": block, "PADDED": "entropy" in name, "GRADIENT": gradient}
        constants |= dict.fromkeys(absent) | ones(**integers)
        pointers = {argument: kind for argument, kind in types.items() if argument not in absent}
        multiples = aligned(width=width, row_stride=width)
        used, ptx = resources_of(rows.rows_kernel, capability, pointers, constants, multiples, warps, tmp_path)
        # An address may wait for the end of the loop, but not where most runs are.
        assert used["STACK"] <= (0 if dtype == "bf16" and capability in (80, 90) else 8)
        assert used["LOOP"] == used["LOCAL"] == 0
        assert used["REG"] <= min(128, 2048 // warps)  # else the program does not fit on an SM
        by_16_bytes = width % 16 == 0 and (width > 128 or dtype == "fp32")  # where addresses allow
        assert bool(re.search(r"ld\.global[.\w:]*\.v4", ptx)) == by_16_bytes


@ahead_of_time
@pytest.mark.parametrize("dtype", MAIN_DTYPE)
@pytest.mark.parametrize("width, n_vocab", [*(long(n, n) for n in (1, 67, 50257, 151936)), (151936, 151665)])
def test_compiled_draws_do_not_spill(capability, width, n_vocab, dtype, tmp_path):
    """151,665 of 151,936 ids are Qwen2.5's; it is read 16 bytes at a time all the same."""
    length, shape = draw.stretches(width, n_vocab)
    warps = shape.pop("num_warps")
    pointers = {"logits": "*" + dtype, "u": "*fp32", "tokens": "*i64", "logprobs": "*fp32"}
    integers = dict(width=width, n_vocab=n_vocab, row_stride=width, length=length)
    its = pointers, shape | ones(**integers), aligned(**integers), warps, tmp_path
    used, ptx = resources_of(draw.draw_kernel, capability, *its)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 128 and used["SHARED"] <= SHARED[capability]
    assert bool(re.search(r"ld\.global[.\w:]*\.v4", ptx)) == (width == 151936)
    assert "fma.rn.f32" in ptx and "TRITON_DEFAULT_FP_FUSION" in os.environ


@ahead_of_time
@pytest.mark.parametrize("dtype", MAIN_DTYPE)
@pytest.mark.parametrize(
    "H, G, D, group_size, turning, window",
    [long(12, 12, 64, 16, 0, 0), (12, 2, 128, 16, 128, 0), long(12, 2, 128, 1, 128, 0), (8, 1, 64, 4, 0, 0),
     long(32, 8, 128, 8, 128, 0), long(14, 2, 64, 8, 64, 0), (4, 1, 256, 16, 256, 512), long(4, 1, 256, 16, 256, 0),
     long(8, 4, 256, 8, 256, 1024), long(24, 8, 128, 16, 96, 0), long(32, 32, 96, 8, 96, 2047),
     long(32, 8, 128, 16, 128, 4096)],
)  # fmt: skip
def test_compiled_attention_stays_in_registers(capability, H, G, D, group_size, turning, window, dtype, tmp_path):
    """GPT-2, Qwen2.5-1.5B, one key head, Llama 3.1 8B, Qwen2.5-0.5B; Gemma 3 1B and 4B, Phi-4-mini, Phi-3-mini, Mistral.
    q and k are float32, as autocast's norms leave them beside values in bfloat16.

    sm_75 has no products of bfloat16. Triton multiplies in float32 there, with hundreds of bytes of spilled registers:
    such a run is right and slow. float32, which is the default of --dtype, leaves a few words, as elsewhere."""
    shape = attention.kernel_shape(H, G, D, 2 if dtype == "bf16" else 4, group_size)
    pointers = dict.fromkeys(("q", "k", "cos", "sin", "parts", "tops", "totals"), "*fp32")
    pointers |= dict.fromkeys(("v", "prompt_k", "prompt_v", "completion_k", "completion_v", "y"), "*" + dtype)
    pointers |= {"tiles": "*i32", "counters": "*i32", "lengths": "*i64", "t": "*i64"}
    rows = ["D", "prompt_chunk", "completion_chunk", "q_row", "k_row", "v_row"]
    constants = shape | dict(ROTARY=turning > 0, PART=turning % D, WINDOW=window)
    its, most = (pointers, constants, rows, 4, tmp_path), attention.REGISTERS
    used, ptx = resources_of(attention.attend_kernel, capability, *its, maxnreg=most)
    assert used["LOCAL"] == 0 and used["REG"] <= most and used["SHARED"] <= SHARED[capability]
    if (capability, dtype) == (75, "bf16"):
        assert "mma" not in ptx
    else:
        assert used["STACK"] <= (32 if dtype == "fp32" else 0)
        assert ("mma" in ptx) == (dtype == "bf16")
        assert capability < 80 or "cp.async" in ptx  # the next blocks are read while one is multiplied
    # All threads store their parts, then the counter releases them; it acquires the others' parts, then all threads read.
    order = r"st\.global\S*|bar\.sync|atom\S*|ld\.global\S*|cp\.async\.c\S*"
    found = " ".join(op.split(".")[0] if op != "bar.sync" else "bar" for op in re.findall(order, ptx))
    assert len(re.findall("st (?:bar )+atom (?:bar )+ld", found)) == ptx.count("atom.global.gpu.acq_rel") == 1
