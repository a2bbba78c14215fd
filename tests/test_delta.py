"""Linear layers: chunks beside single tokens, packed rows beside each sequence alone. tests/test_families.py has transformers."""

import pytest
import torch

from helpers.models import make_model
from snug.delta import delta_rule
from snug.kernels.segments import Segments


def recurrent(q, k, v, g, beta, S):
    """`delta_rule`, token by token."""
    y = []
    for query, key, value, gate, rate in zip(*(x.split(1, 2) for x in (q, k, v, g, beta)), strict=True):
        S = S * gate.exp()
        S = S + key.mT @ (rate * (value - key @ S))
        y.append(query @ S)
    return torch.cat(y, 2), S


@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 200])
def test_chunks_are_the_recurrent_rule(T):
    """From a state, with all six gradients; one head forgets almost all at each token."""
    torch.manual_seed(T)
    new = lambda *shape: torch.randn(2, 3, *shape, dtype=torch.float64)  # noqa: E731
    q, k = (torch.nn.functional.normalize(new(T, 16), dim=-1) for _ in range(2))
    g = -new(T, 1).abs() * torch.tensor([0.1, 1, 500])[:, None, None]
    inputs = [x.requires_grad_() for x in (q, k, new(T, 8), g, new(T, 1).sigmoid(), new(16, 8))]
    results = delta_rule(inputs[:5], inputs[5], T), recurrent(*inputs)
    weights = [torch.randn_like(x) for x in results[0]]
    found, expected = (
        [*result, *torch.autograd.grad([(x * w).sum() for x, w in zip(result, weights, strict=True)], inputs)]
        for result in results
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


# Prompts of 1, 2, 5, 66 and 130 tokens; completions of none, of one and of a chunk and more; a prompt alone
GROUPS = [(5, [4, 1, 0, 70]), (2, [3, 2]), (1, [1, 4]), (130, [5]), (66, [64, 65, 3]), (1, [])]


def test_packed_rows_are_each_sequence_alone():
    """Values and all gradients: nothing crosses a border, and completions add up what they want of their prompt."""
    model, segments = make_model("linear", dtype=torch.float64, block_size=300, n_layer=3), Segments(GROUPS)
    T = len(segments.start)
    row, weights = torch.randint(67, (T,)), torch.randn(T, model.config.n_embd, dtype=torch.float64)
    alone, begin = torch.zeros_like(weights), 0
    for prompt, completions in GROUPS:
        at = begin + prompt
        for length in completions or [0]:
            place = torch.cat([torch.arange(begin, begin + prompt), torch.arange(at, at + length)])
            share = torch.ones(len(place), 1, dtype=torch.float64)
            share[:prompt] /= max(1, len(completions))  # of the prompt, which is read once for each completion
            alone = alone.index_add(0, place, model(row[place][None])[0] * share)
            at += length
        begin = at
    expected = torch.autograd.grad((alone * weights).sum(), list(model.parameters()), allow_unused=True)
    for way in ("none", "block", "selective"):
        model.checkpoint_blocks = way
        model.zero_grad()
        packed = model(row[None], segments.positions[None], mask=segments)[0]
        torch.testing.assert_close(packed, alone, atol=1e-11, rtol=1e-11)
        (packed * weights).sum().backward()
        for (name, p), gradient in zip(model.named_parameters(), expected, strict=True):
            if name.startswith(("blocks", "norm")):  # the embedding's backward adds to its gradient itself
                torch.testing.assert_close(p.grad, gradient, atol=1e-10, rtol=1e-10, msg=name)


def test_a_bfloat16_model_computes_the_rules_numbers_in_float32():
    layer = make_model("linear", dtype=torch.bfloat16).blocks[0].attention
    inputs = [torch.randn(shape).bfloat16() for shape in [(4, 1, 9, layer.sizes[0]), (1, 9, 4), (1, 9, 4)]]
    found, right = layer.prepare(*inputs), layer.double().prepare(*(x.double() for x in inputs))
    for ours, theirs in zip(found, right, strict=True):
        assert ours.dtype == torch.float32 and theirs.dtype == torch.float64
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)
