"""Models of transformers' families with random weights. What imports this is skipped without transformers."""

import json

import pytest
import torch
from torch.overrides import TorchFunctionMode

from helpers import models

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")

SMALL = models.SMALL | dict(max_position_embeddings=256, num_hidden_layers=4, tie_word_embeddings=False)
NONE = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, original_max_position_embeddings=128)
LONGROPE |= dict(short_factor=[1.0, 1.5, 2.5], long_factor=[2.0, 3.0, 9.0])
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64, rope_theta=5e3)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=1e4)
TWO = SMALL | NONE | dict(num_hidden_layers=2, max_position_embeddings=512, rope_theta=5e3)
GPT2 = dict(vocab_size=97, n_positions=128, n_embd=32, n_layer=2, n_head=4)
FAMILIES = {  # name: (transformers' config class, its keywords)
    "gemma3": ("Gemma3TextConfig", SMALL | NONE | dict(num_hidden_layers=7, sliding_window_pattern=3, head_dim=16, sliding_window=12, query_pre_attn_scalar=20, rope_scaling=dict(rope_type="linear", factor=8.0), rope_theta=1e5, rope_local_base_freq=1e3, tie_word_embeddings=True)),
    "smollm3": ("SmolLM3Config", SMALL | NONE | dict(no_rope_layer_interval=2, rope_theta=5e4, tie_word_embeddings=True)),
    "phi4-mini": ("Phi3Config", SMALL | NONE | dict(rope_parameters=LONGROPE, original_max_position_embeddings=128, sliding_window=300)),
    "phi3 sliding": ("Phi3Config", SMALL | NONE | dict(partial_rotary_factor=0.5, sliding_window=12)),
    "olmo2": ("Olmo2Config", SMALL | NONE),
    "olmo3": ("Olmo3Config", SMALL | NONE | dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=12, rope_theta=5e5, rope_scaling=YARN | dict(attention_factor=1.2, beta_fast=8.0))),
    "qwen3 yarn": ("Qwen3Config", SMALL | NONE | dict(head_dim=16, rope_parameters=YARN | dict(rope_theta=1e4))),
    "qwen3.5": ("Qwen3_5TextConfig", SMALL | NONE | dict(head_dim=16, layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 2]))),
    "mistral sliding": ("MistralConfig", SMALL | NONE | dict(sliding_window=12)),
}  # fmt: skip
CASES = FAMILIES | {
    "gpt2": ("GPT2Config", GPT2), "gpt2 untied": ("GPT2Config", GPT2 | dict(n_inner=40, tie_word_embeddings=False)),
    "llama tied": ("LlamaConfig", TWO | dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama 3": ("LlamaConfig", TWO | dict(rope_parameters=LLAMA3, head_dim=16, rms_norm_eps=1e-5)),
    "llama linear": ("LlamaConfig", TWO | dict(rope_parameters=LINEAR)),
    "mistral": ("MistralConfig", TWO | dict(sliding_window=None, head_dim=16)), "qwen2": ("Qwen2Config", TWO),
    "qwen3 tied": ("Qwen3Config", TWO | dict(head_dim=16, tie_word_embeddings=True)),
}  # fmt: skip


def their_model(case):
    """-> transformers' model, with weights far from those it begins with, norms and biases too."""
    return model_of(*CASES[case])


def model_of(name, options):
    torch.manual_seed(3)
    config = getattr(transformers, name)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight_name, p in model.named_parameters():
            large = any(part in weight_name for part in ("emb", "wte", "head"))
            p.add_(torch.randn_like(p) * (0.2 if large else 0.1))
    return model


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    changed = {name: value for name, value in (config | changes).items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(changed))


class Float64(TorchFunctionMode):
    """transformers computes norms, softmaxes and states in float32, whatever the weights are: within it in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)
