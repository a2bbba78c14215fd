"""Attention of packed groups on a CPU: against the dense mask, the mask against the words, what is kept; windows."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.kernels import attend_dense
from snug.kernels import segments as module
from snug.kernels.segments import Segments, attend

EXAMPLE = [(2, [2, 1]), (1, [1])]  # the docstring's: (a b | x y | z) and (c | u)
GROUPS = {
    "the example": EXAMPLE, "one token": [(1, [])], "a prompt alone": [(9, [])],
    "no tokens of their own": [(4, [0, 0, 0])], "some without tokens": [(1, [0, 3, 0]), (5, [0]), (2, [1, 0])],
    "long prompts": [(40, [1, 2, 3]), (33, [5])], "long completions": [(1, [40, 33, 7]), (2, [31])],
    "similar lengths": [(20, [19, 16, 20, 15, 18]), (17, [20, 19]), (16, [])],
    "groups without completions": [(3, []), (7, [5, 6]), (4, []), (64, [])],
    "one of each": [(1, [1]), (1, [0]), (6, [6]), (3, [65])],
}  # fmt: skip
some_groups = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=4)


def segments_of(groups):
    """Row -> (group, segment) of each token, the long way; segment 0 is the prompt."""
    found = []
    for g, (prompt, completions) in enumerate(groups):
        for s, length in enumerate([prompt, *completions]):
            found += [(g, s)] * length
    return found


def words(groups):
    """The mask, token by token: I see my group's prompt, and my segment up to myself."""
    row = segments_of(groups)
    return [[a[0] == b[0] and b[1] in (0, a[1]) and j <= i for j, b in enumerate(row)] for i, a in enumerate(row)]


@given(some_groups)
def test_the_mask_is_what_the_words_say(groups):
    assert Segments(groups).mask().tolist() == words(groups)


@given(some_groups, st.sampled_from([1, 2, 3, 8]))
def test_start_and_tiles_say_the_same(groups, tile):
    """Of each tile: its tokens, the prompt they see beside their own segments, and the last token that sees them."""
    segments, sees = Segments(groups), np.array(words(groups))
    row, start = segments_of(groups), segments.start
    joined = [(g, s if len(groups[g][1]) > 1 else 0) for g, s in row]  # a prompt with one completion is one segment
    assert [joined.index(token) for token in joined] == start.tolist()
    assert segments.longest == max(prompt + max(completions, default=0) for prompt, completions in groups)
    with patch.object(module, "TILE", tile):
        tiles = segments.tiles().tolist()
    assert sorted(t for first, end, *_ in tiles for t in range(first, end)) == list(range(len(row)))
    for first, end, begin, middle, seen_until in tiles:
        assert 1 <= end - first <= tile
        for i in range(first, end):
            assert set(np.flatnonzero(sees[i])) == {*range(begin, middle), *range(start[i], i + 1)}
        assert seen_until == 1 + max(np.flatnonzero(sees[:, first:end].any(1)))


@given(some_groups, st.integers(1, 20))
def test_a_window_is_what_the_words_say(groups, window):
    """I see nothing that is `window` or more tokens before me in my sequence."""
    lengths = [length for prompt, completions in groups for length in (prompt, *completions)]
    behind = [at for prompt, completions in groups for at in (0, *[prompt] * len(completions))]
    place = [at + i for at, length in zip(behind, lengths, strict=True) for i in range(length)]
    segments = Segments(groups)
    assert segments.positions.tolist() == place
    near = lambda i, line: [yes and place[i] - place[j] < window for j, yes in enumerate(line)]  # noqa: E731
    sees = [near(*row) for row in enumerate(words(groups))]
    assert segments.mask(window).tolist() == sees
    if window >= segments.longest:
        assert sees == words(groups)


@given(some_groups, st.sampled_from([0, 3, 256]), st.sampled_from([0.5, 0.75, 1.0]))
def test_batches_have_each_segment_once_and_few_others(groups, alone, similar):
    with patch.multiple(module, ALONE=alone, SIMILAR=similar):
        segments = Segments(groups)
        batches = segments.batches
    tokens = [t for batch in batches for t in batch.tokens.tolist()]
    assert sorted(tokens) == list(range(segments.lengths.sum()))
    for batch in batches:
        n, longest = batch.shape
        assert n == 1 or longest <= alone
        assert len(batch.padding) <= (1 - similar) * n * longest


def test_on_mps_no_group_has_the_scores_of_another():
    shapes, real = [], torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(1, 2, 29, 4)

    def attention(q, k, v, attn_mask, **options):
        shapes.append((q.shape[2], *attn_mask.shape))
        return real(q, k, v, attn_mask=attn_mask, **options)

    fused = patch.object(torch.nn.functional, "scaled_dot_product_attention", attention)
    with patch.object(module, "kind_of", lambda x: "mps"), fused:
        attend(q, q, q, Segments([(3, [5] * 4), (2, [1]), (3, [])]))
    assert shapes == [(23, 23, 23), (3, 3, 3), (3, 3, 3)]


def inputs(groups, dtype, heads=(4, 2), size=8, seed=0):
    """-> q (1, H, T, D), k, v (1, G, T, D), views of one tensor as in the model, and dy."""
    draw, (H, G) = torch.Generator().manual_seed(seed), heads
    T = len(segments_of(groups))
    qkv = torch.randn(1, T, H + 2 * G, size, generator=draw, dtype=torch.float64).to(dtype).transpose(1, 2)
    dy = torch.randn(1, T, H, size, generator=draw, dtype=torch.float64).to(dtype).transpose(1, 2)
    return *qkv.split([H, G, G], 1), dy


def with_gradients(function, given, dy, segments, window=0):
    """-> y, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in given]
    y = function(*leaves, segments, window)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def assert_attention(groups, dtype, rtol, atol, window=0, **options):
    *given, dy = inputs(groups, dtype, **options)
    expected = with_gradients(attend_dense, [x.double() for x in given], dy.double(), Segments(groups), window)
    found = with_gradients(attend, given, dy, Segments(groups), window)
    for value, exact, like in zip(found, expected, [dy, *given], strict=True):
        assert value.dtype == dtype and value.shape == like.shape
        torch.testing.assert_close(value.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("heads, window", [((4, 4), 0), ((3, 1), 0), *(((4, 2), n) for n in (1, 2, 7, 33, 64))])
@pytest.mark.parametrize("groups", GROUPS)
def test_attention_is_the_dense_one(groups, heads, window):
    assert_attention(GROUPS[groups], torch.float64, 1e-12, 1e-12, window, heads=heads)
    assert_attention(GROUPS[groups], torch.float32, 1e-5, 1e-5, window, heads=heads)
    with patch.object(module, "kind_of", lambda x: "mps"):  # group by group
        assert_attention(GROUPS[groups], torch.float64, 1e-12, 1e-12, window, heads=heads)


def test_attention_is_exact_where_one_part_has_nearly_all():
    """Scores of about 60 and -60 decide between the prompt and a completion's own tokens: no overflow, no 0 / 0."""
    groups = [(3, [4, 4]), (5, [2])]
    for seed in range(3):
        q, k, v, dy = inputs(groups, torch.float64, seed=seed)
        given = 12 * q, 5 * k, v
        expected = with_gradients(attend_dense, given, dy, Segments(groups))
        for value, exact in zip(with_gradients(attend, given, dy, Segments(groups)), expected, strict=True):
            torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_without_segments_is_a_band(window):
    """Causal, and with a mask for each sequence."""
    *given, dy = inputs([(8, [])], torch.float64)
    index = torch.arange(8)
    band = (index <= index[:, None]) & (index[:, None] - index < window)
    hidden = torch.ones(1, 1, 8, 8).tril().bool()
    hidden[..., 4:, 1] = False
    for mask, expected in ((None, band), (hidden, hidden & band)):
        ours, exact = with_gradients(attend, given, dy, mask, window), with_gradients(attend, given, dy, expected)
        for value, right in zip(ours, exact, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12)


def test_a_token_that_sees_nothing_of_its_prompt_is_as_without_it():
    """Whatever its scores with the prompt would be. The rest of its completion teaches the prompt."""
    groups = [(6, [9, 9])]
    q, k, v, dy = inputs(groups, torch.float32)
    k[:, :, :6] *= 1e4
    y, dq, dk, dv = with_gradients(attend, (q, k, v), dy, Segments(groups), 4)
    assert all(x.isfinite().all() for x in (y, dq, dk, dv))
    k[:, :, :6], v[:, :, :6] = 7, -7
    y_again, dq_again, *_ = with_gradients(attend, (q, k, v), dy, Segments(groups), 4)
    behind = [6 + 9 * i + j for i in range(2) for j in range(3, 9)]  # from a completion's fourth token on
    assert y_again[:, :, behind].equal(y[:, :, behind]) and dq_again[:, :, behind].equal(dq[:, :, behind])
    assert not y_again[:, :, 8].equal(y[:, :, 8])
    dy[:, :, :6] = 0
    *_, dk, dv = with_gradients(attend, (q, k, v), dy, Segments(groups), 4)
    assert not dk[:, :, :3].any() and not dv[:, :, :3].any() and dv[:, :, 3:6].all()
