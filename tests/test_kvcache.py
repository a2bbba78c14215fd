"""The cache's attention against a softmax over [prompt, own tokens] of each row by itself, in float64."""

import numpy as np
import pytest
import torch

from helpers.kernels import LONG_ROWS, RAGGED, expected_row, make_cache, run_rows, step
from helpers.models import DEVICE
from interpreted import INTERPRETED
from snug.decoding.attention import split_columns
from snug.decoding.kvcache import tiles_of

A_ROW_A_PROMPT = dict(slots=3, group_size=1)
EVEN = [[(s, s, t) for s in range(3)] for t in range(6)]
# In the prompts' order, then with a row that begins later, then out of order.
LATER = EVEN[:3] + [[(0, 0, t), (3, 1, t - 3), (2, 2, t)] for t in (3, 4)]
LATER += [[(4, 2, t), (3, 1, t + 2), (5, 0, t)] for t in (0, 1)]
CASES = [(dict(kv_heads=heads), RAGGED, rotary) for heads in (1, 2, 4) for rotary in (False, True)]
CASES += [(A_ROW_A_PROMPT | dict(lengths=lengths), LATER, False) for lengths in ((9, 9, 9), (9, 4, 1))]
# Windows within a completion, and those that begin in the prompt. In the last all slots write the same column, so
# nothing but the window hides anything.
CASES += [(dict(T_c=16, sliding_window=window), LONG_ROWS, True) for window in (1, 2, 5, 12, 14, 30)]
CASES += [(A_ROW_A_PROMPT | dict(lengths=(9, 9, 9), sliding_window=8), EVEN, False)]


@pytest.mark.parametrize("shape, schedule, rotary", CASES)
def test_attention_over_prompt_and_own_tokens(shape, schedule, rotary):
    cache, config, prompts = make_cache(**shape)
    assert run_rows(cache, config, prompts, schedule, 1e-12, rotary) == sum(map(len, schedule))


def test_slots_and_places_that_are_kept_keep_their_tokens():
    cache, config, prompts = make_cache()
    run_rows(cache, config, prompts, RAGGED[:2], 1e-12)
    before, columns = cache.completions.clone(), 2
    cache.compact(np.array([0, 2, 4]), np.array([0, 2]), columns)
    assert cache.completions[1, :, :3, :, :columns].equal(before[1][:, [0, 2, 4], :, :columns])
    assert cache.prompt.equal(prompts[:, :, [0, 2]]) and cache.prompt_lengths.tolist() == [9, 1]
    kept = [(0, 0), (2, 1), (4, 1)]  # row, place now
    q, k, v = (torch.randn(3, heads, 1, 8, dtype=torch.float64, device=DEVICE) for heads in (4, 2, 2))
    y = step(cache, [place for _, place in kept], [2] * 3, q, k, v)
    for slot, (old, place) in enumerate(kept):
        keys = [*before[1, 0, old, :, :columns].unbind(1), k[slot, :, 0]]
        values = [*before[1, 1, old, :, :columns].unbind(1), v[slot, :, 0]]
        expected = expected_row(prompts[:, :, [0, 2]], place, [9, 1][place], keys, values, q[slot, :, 0])
        torch.testing.assert_close(y[slot, :, 0], expected, atol=1e-12, rtol=0)


A_FEW = dict(heads=4, D=8, slots=7, T_c=6, lengths=(9, 4, 1))
QWEN = dict(heads=12, D=128, T_p=300, slots=40, T_c=150, group_size=16, lengths=(300, 77, 1))
on_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="a real model's shape: on CUDA only")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [A_FEW, pytest.param(QWEN, marks=on_cuda)])
def test_errors_are_those_of_rounding(shape, dtype):
    """Bit for bit the same again, and beside a slot of NaN. The kernel rounds probabilities too, hence the 2."""
    dtype = torch.float16 if INTERPRETED and dtype == torch.bfloat16 else dtype  # it has no products of bfloat16
    cache, config, prompts = make_cache(dtype, **shape)
    assert shape is A_FEW or cache.kernel["M"] == (16 if dtype == torch.float32 else 32)
    own, n = cache.completions.normal_().clone(), shape["slots"]
    cache.cleared = shape["T_c"]
    place, t = [s % 3 for s in range(n)], [5 * s % shape["T_c"] for s in range(n)]
    q, k, v = (torch.randn(n, heads, 1, shape["D"], dtype=dtype, device=DEVICE) for heads in (shape["heads"], 2, 2))
    y = step(cache, place, t, q, k, v)
    rows = []
    for s in range(n):
        past = own[1, :, s, :, : t[s]].transpose(1, 2)  # (2, t, G, D)
        keys, values = ([*old, new[s, :, 0]] for old, new in zip(past, (k, v), strict=True))
        length = shape["lengths"][place[s]]
        rows.append(expected_row(prompts, place[s], length, keys, values, q[s, :, 0]))
    exact = torch.stack(rows)[:, :, None]
    rounding = 1e-6 if dtype == torch.float32 else 2 * float((exact.to(dtype) - exact).norm() / exact.norm())
    assert float((y - exact).norm() / exact.norm()) <= rounding
    assert step(cache, place, t, q, k, v).equal(y)
    q[0], k[0], v[0] = (torch.nan,) * 3
    assert step(cache, place, t, q, k, v)[1:].equal(y[1:])


def test_keys_of_another_type_than_the_caches():
    """As CUDA's autocast leaves them behind a norm of queries and keys, in prompts and in steps."""
    cache, config, prompts = make_cache(torch.float16, kv_heads=1)  # the interpreter has no products of bfloat16
    for layer in range(config.n_layer):
        cache.write_prompts(layer, prompts[layer, 0].float(), prompts[layer, 1])
    assert cache.prompt.equal(prompts)
    q, k, v = (torch.randn(3, heads, 1, 8, dtype=torch.float16, device=DEVICE) for heads in (4, 1, 1))
    expected = step(cache, [0, 1, 1], [0, 0, 0], q, k, v)
    y = step(cache, [0, 1, 1], [0, 0, 0], q.float(), k.float(), v)
    assert y.equal(expected) and y.dtype == torch.float16


def test_idle_slots_do_not_widen_the_rectangle():
    """Ten slots that once read a place do not widen the rectangle of those that do."""
    cache, _, _ = make_cache(slots=12)
    cache.assign(np.array([1] + [-1] * 10 + [2]))
    assert len(cache.pair_of_entry) == 2 * 2 and cache.prompts_in_use == slice(1, 3)


def test_columns_are_split_where_programs_are_few():
    assert split_columns(500, 1000, 64) == (1, 512)
    assert split_columns(500, 1, 64) == (4, 128)
    assert split_columns(1, 1, 16) == (1, 16)
    for width in (1, 63, 64, 65, 300, 4097):
        for programs in (1, 7, 100, 263, 264, 1000):
            splits, columns = split_columns(width, programs, 32)
            assert splits <= 16  # one program joins them
            assert (splits - 1) * columns < width <= splits * columns and columns % 32 == 0


def test_tiles_name_each_slot_once_beside_its_prompt():
    random = np.random.default_rng(0)
    for n, prompts, tile in ((1, 1, 1), (1, 1, 4), (7, 3, 4), (12, 12, 4), (64, 16, 4), (64, 5, 16), (30, 30, 1)):
        for readers in (random.integers(0, prompts, n), np.zeros(n, int), np.arange(n) % prompts):
            table = tiles_of(readers, prompts, tile)
            assert table.shape == tiles_of(np.zeros(n, int), prompts, tile).shape  # a CUDA graph keeps its grid
            line, place = np.nonzero(table[:, 1:] >= 0)
            slots = table[line, 1 + place]
            assert sorted(slots) == list(range(n)) and (readers[slots] == table[line, 0]).all()
            assert set(np.flatnonzero(table[:, 0] >= 0)) == set(line)  # a line without slots ends at once
