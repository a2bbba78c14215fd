"""Families of models, beside transformers' own classes with random weights, and each property of a GPTConfig alone."""

from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode

from model import GPT

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")

SMALL = dict(vocab_size=97, hidden_size=32, intermediate_size=48, max_position_embeddings=256)
SMALL |= dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
NONE = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, original_max_position_embeddings=128)
LONGROPE |= dict(short_factor=[1.0, 1.5, 2.5], long_factor=[2.0, 3.0, 9.0])
CASES = {  # name: (transformers' config class, its keywords)
    "gemma3": ("Gemma3TextConfig", SMALL | NONE | dict(num_hidden_layers=7, head_dim=16, sliding_window=12, query_pre_attn_scalar=20, rope_scaling=dict(rope_type="linear", factor=8.0), rope_theta=1e5, rope_local_base_freq=1e3, tie_word_embeddings=True)),
    "smollm3": ("SmolLM3Config", SMALL | NONE | dict(rope_theta=5e4, tie_word_embeddings=True)),
    "phi4-mini": ("Phi3Config", SMALL | NONE | dict(rope_parameters=LONGROPE, original_max_position_embeddings=128, sliding_window=300)),
    "phi3 sliding": ("Phi3Config", SMALL | NONE | dict(partial_rotary_factor=0.5, sliding_window=12)),
    "olmo2": ("Olmo2Config", SMALL | NONE),
    "olmo3": ("Olmo3Config", SMALL | NONE | dict(sliding_window=12, rope_theta=5e5, rope_scaling=YARN | dict(attention_factor=1.2, beta_fast=8.0))),
    "qwen3 yarn": ("Qwen3Config", SMALL | NONE | dict(head_dim=16, rope_parameters=YARN | dict(rope_theta=1e4))),
    "mistral sliding": ("MistralConfig", SMALL | NONE | dict(sliding_window=12)),
}  # fmt: skip
ROPES = dict(full_attention="rotary", sliding_attention="sliding")
FAMILIES = pytest.mark.parametrize("case", CASES)


def their_model(case):
    """-> transformers' model, with weights far from those it begins with, norms too."""
    name, options = CASES[case]
    torch.manual_seed(3)
    config = getattr(transformers, name)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight_name, p in model.named_parameters():
            large = any(part in weight_name for part in ("emb", "head"))
            p.add_(torch.randn_like(p) * (0.3 if large else 0.1))
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """-> (transformers' model, the folder that it saved)."""
    folder = tmp_path_factory.mktemp("models") / "in"
    theirs = their_model(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder


def tokens_of(B, T):
    return torch.randint(97, (B, T), generator=torch.Generator().manual_seed(5))


class Exact(TorchFunctionMode):
    """Within it transformers' model is in float64. It computes norms and softmaxes in float32, whatever the weights are:
    here in float64. It has our rotary tables, because two float32 cosines of a number may differ by its last bit."""

    def __init__(self, theirs, ours):
        super().__init__()
        self.theirs, self.ours = theirs.double(), ours

    def __enter__(self):
        self.theirs.model.rotary_emb.forward = self.tables
        return super().__enter__()

    def __exit__(self, *error):
        del self.theirs.model.rotary_emb.forward
        self.theirs.float()
        return super().__exit__(*error)

    def tables(self, x, position_ids, layer_type="full_attention"):
        angles = self.ours.angles(position_ids, int(position_ids.max()) + 1)
        return [table[:, 0].double() for table in angles[ROPES[layer_type]]]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-10)])
def test_logits_are_transformers(pair, dtype, tolerance):
    """Far behind the window of 12 tokens, and behind the context before YaRN."""
    theirs, folder = pair
    ours, tokens = GPT.from_pretrained(folder, dtype=dtype), tokens_of(2, 100)
    with torch.no_grad(), Exact(theirs, ours) if dtype == "float64" else nullcontext():
        expected = theirs(tokens).logits
        found = ours.logits(ours(tokens))
    print(f"\n{type(theirs).__name__} {dtype}: {(found - expected).abs().max():.1e} of {expected.abs().max():.1f}")
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
