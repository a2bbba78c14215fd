"""Rows for the kernels, and plain torch to compare with."""

import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.models import DEVICE, make_model
from interpreted import CAPABILITIES, compiles
from model import rotary_table
from snug.decoding.kvcache import KVCache
from snug.kernels import triton
from snug.kernels.rotary import rotate
from snug.kernels.segments import attend


def ahead_of_time(test):
    """It compiles a kernel for each device, none of which has to be here."""
    away = pytest.mark.skipif(triton is None or sys.platform != "linux", reason="Triton's assembler is for Linux")
    return compiles(away(pytest.mark.parametrize("capability", CAPABILITIES)(test)))


class Ops(TorchDispatchMode):
    """The names of all ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def make_cache(
    dtype=torch.float64, heads=4, kv_heads=2, D=8, prompt_slots=3, T_p=9, slots=7, T_c=6, group_size=3, lengths=(9, 4, 1),
    **shape,
):  # fmt: skip
    """-> a cache with its prompts read and garbage in own columns, its config, the prompts' keys and values."""
    config = make_model("llama", n_head=heads, n_kv_head=kv_heads, n_embd=heads * D, **shape).config
    cache = KVCache(config, prompt_slots, T_p, slots, T_c, dtype, DEVICE, group_size)
    cache.completions.fill_(float("nan"))  # what was in the memory
    torch.manual_seed(1)
    cache.begin_prefill(list(range(prompt_slots)), list(lengths))
    prompts = torch.randn(config.n_layer, 2, prompt_slots, kv_heads, T_p, D, dtype=dtype, device=DEVICE)
    for layer in range(config.n_layer):
        cache.write_prompts(layer, *prompts[layer])
    return cache, config, prompts


def step(cache, place, t, q, k, v, rotary=None):
    cache.assign(np.array(place))
    cache.begin_step(torch.tensor(t, device=DEVICE), max(t) + 1, len(set(t)) == 1)
    return cache.attend(1, q, k, v, rotary)


def expected_row(prompts, place, length, keys, values, q, window=0):
    """q (H, D), keys and values lists of (G, D) -> (H, D), query by query. window: the last tokens that it sees."""
    rows = []
    for h, query in enumerate(q):
        g = h // (len(q) // prompts.shape[3])
        k = torch.cat([prompts[1, 0, place, g, :length], torch.stack([key[g] for key in keys])]).double()
        v = torch.cat([prompts[1, 1, place, g, :length], torch.stack([value[g] for value in values])]).double()
        k, v = k[-window:], v[-window:]
        rows.append(torch.softmax(query.double() @ k.T * k.shape[1] ** -0.5, 0) @ v)
    return torch.stack(rows)


def run_rows(cache, config, prompts, schedule, tolerance, rotary=False):
    """schedule: lists of {slot: (row, place, t)}; every step of every row is compared. -> comparisons made."""
    history, compared, dtype = {}, 0, cache.dtype
    tables = [table.to(dtype) for table in rotary_table(config, config.block_size, DEVICE)] if rotary else None
    for moment in schedule:
        n = len(moment)
        q, k, v = (torch.randn(n, heads, 1, config.head_size, dtype=dtype, device=DEVICE) for heads in
                   (config.n_head, config.n_kv_head, config.n_kv_head))  # fmt: skip
        place, t = [moment[s][1] for s in range(n)], [moment[s][2] for s in range(n)]
        turn = None if tables is None else [table[torch.tensor(t, device=DEVICE)][:, None, None] for table in tables]
        y = step(cache, place, t, q, k, v, turn)
        q, k = (q, k) if turn is None else (rotate(q, *turn), rotate(k, *turn))
        for slot in range(n):
            row = moment[slot][0]
            keys, values = history.setdefault(row, ([], []))
            keys.append(k[slot, :, 0])
            values.append(v[slot, :, 0])
            assert len(keys) == t[slot] + 1
            length = int(cache.prompt_lengths[place[slot]])
            expected = expected_row(prompts, place[slot], length, keys, values, q[slot, :, 0], config.windows[1])
            torch.testing.assert_close(y[slot, :, 0].double(), expected, atol=tolerance, rtol=0)
            compared += 1
    return compared


# (row, place, t) a slot: all begin together; two rows give way to others, whose columns hold what was there; a place
# loses all its rows
RAGGED = [
    [(0, 0, 0), (1, 0, 0), (2, 2, 0), (3, 1, 0), (4, 2, 0)], [(0, 0, 1), (1, 0, 1), (2, 2, 1), (3, 1, 1), (4, 2, 1)],
    [(0, 0, 2), (5, 2, 0), (2, 2, 2), (6, 0, 0), (4, 2, 2)], [(0, 0, 3), (5, 2, 1), (2, 2, 3), (6, 0, 1), (4, 2, 3)],
    [(0, 0, 4), (5, 2, 2), (2, 2, 4), (6, 0, 2), (4, 2, 4)],
]  # fmt: skip


# Behind RAGGED: four rows go on; the fifth gives way once more.
FIFTH = {t: (4, 2, t) if t < 9 else (7, 1, t - 9) for t in range(5, 16)}
LONG_ROWS = RAGGED + [[(0, 0, t), (5, 2, t - 2), (2, 2, t), (6, 0, t - 2), row] for t, row in FIFTH.items()]


def plain(logits, targets, temperature=1.0, n_vocab=None):
    """The oracle: (M, V) -> log-probs, entropies (M,), by log_softmax + gather in float64."""
    logprobs = torch.log_softmax(logits.double()[:, :n_vocab] / temperature, -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def make_rows(M, V, dtype=torch.float32, seed=0):
    """Logits of a confident model, targets at both edges among them, and something to weigh each token by."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(M, V, generator=generator)).to(DEVICE, dtype)
    targets = torch.randint(V, (M,), generator=generator)
    targets[:2] = torch.tensor([V - 1, 0])[:M]
    return logits, targets.to(DEVICE), torch.randn(M, generator=generator).to(DEVICE)


def assert_near(actual, expected, tolerance):
    assert actual.shape == expected.shape
    if actual.numel():
        assert float((actual.detach().double() - expected.detach().double()).abs().max()) <= tolerance


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def tolerance(dtype):
    return {F64: 1e-12, F32: 1e-5}.get(dtype, 2e-5)


def attend_dense(q, k, v, segments, window=0):
    """The oracle."""
    return attend(q, k, v, segments.mask(window))
