"""Tokens from logits: the uniforms and the inverse CDF."""

import numpy as np
import pytest
import torch

from helpers.models import DEVICE, make_model
from snug.decoding.draw import sample_tokens, uniforms


def test_uniforms_depend_on_seed_row_and_step_alone():
    grid = uniforms(7, range(50), range(40))
    assert grid.shape == (50, 40) and grid.dtype == np.float32
    np.testing.assert_array_equal(uniforms(7, [31, 4], range(20, 40)), grid[[31, 4], 20:])
    assert (uniforms(8, range(50), range(40)) != grid).mean() > 0.999
    assert len(np.unique(uniforms(0, range(1000), range(100)))) > 99_000
    big = uniforms(2**63 + 5, range(4000), range(50))
    assert 0 < big.min() and big.max() < 1
    counts = np.histogram(big, 100, (0, 1))[0]
    assert ((counts - 2000.0) ** 2 / 2000).sum() < 180  # 99 degrees of freedom: exceeded once in a million tries
    assert abs(np.corrcoef(big[:, :-1].ravel(), big[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(big[:-1].ravel(), big[1:].ravel())[0, 1]) < 0.01


def test_the_largest_uniform_never_picks_a_token_of_probability_zero():
    model = make_model("gpt2")
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.embedding.weight[[5, 6, 40]] = 50.0  # the others have e^-1600: 0 in float32
    hidden = model(torch.zeros(3, 1, dtype=torch.long, device=DEVICE))[:, 0]
    u = torch.tensor([0.0, 0.5, 1 - 2**-23], device=DEVICE)
    tokens, logprobs = sample_tokens(model, hidden, u, 1.0)
    assert tokens.tolist() == [5, 6, 40] and logprobs.tolist() == pytest.approx([-np.log(3)] * 3, abs=1e-6)
