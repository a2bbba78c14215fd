"""Small models of random weights, of both shapes and as folders."""

import json

import torch

from model import GPT, GPTConfig
from snug import lora
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT2 = dict(vocab_size=67, block_size=32, n_layer=2, n_head=4, n_embd=32, bias=True)
LLAMA = dict(n_kv_head=2, norm="rmsnorm", position="rotary", mlp="swiglu", qk_norm=True, tie_embeddings=False)
LLAMA = GPT2 | LLAMA | dict(bias=False, qkv_bias=True, proj_bias=True)
# As Qwen3.5: linear layers, and a full one each third layer, with a gate
LINEAR = dict(linear_key_heads=2, linear_value_heads=4, linear_key_size=8, linear_value_size=16)
LINEAR = (
    LLAMA | LINEAR | dict(n_layer=6, full_every=3, zero_centered_norm=True, rotary_fraction=0.25, attention_gate=True)
)
SHAPES = {"gpt2": GPT2, "llama": LLAMA, "linear": LINEAR}
QWEN = dict(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, n_hidden=48, mlp="swiglu", qkv_bias=True)
QWEN |= dict(norm="rmsnorm", norm_eps=1e-6, position="rotary", rope_theta=1e6, vocab_size=272, block_size=32768)
CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def make_model(shape="gpt2", seed=0, dtype=torch.float32, **changes):
    """A random model whose predictions are far from uniform."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SHAPES[shape] | changes)).to(DEVICE, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += 0.1 * torch.randn_like(weight)
            if name.endswith(("embedding.weight", "head.weight")):
                weight *= 3
    return model


def make_linear_model(path):
    """Write a small model with a linear layer and a full one, and the tokenizer "bytes"."""
    torch.manual_seed(2)
    shape = LINEAR | dict(vocab_size=257, n_layer=2, full_every=2, qkv_bias=False, proj_bias=False)
    save_pretrained(GPT(GPTConfig(**shape)), path, get_tokenizer("bytes"))
    return str(path)


def make_flat_model(shape="gpt2", **changes):
    """One whose 16 tokens are all sampled often, the stop token too, so that lengths are ragged."""
    model = make_model(shape, **{"vocab_size": 16} | changes)
    with torch.no_grad():
        model.norm.weight *= 0.3
    return model


def make_chat_model(path, template=CHATML, brief=False):
    """Write a Qwen2.5 of random weights: more rows than ids, <|im_end|> as the end and <|endoftext|> beside it.

    brief: <|im_end|> is the likeliest token, about one in four.
    """
    torch.manual_seed(2)
    model = GPT(GPTConfig(**QWEN))
    if brief:
        with torch.no_grad():  # the first coordinate is the largest by far, behind all tokens
            model.embedding.weight *= 0.02
            model.embedding.weight[:, 0] = 1
            model.embedding.weight[258, 0] = 1.8
    save_pretrained(model, path, get_tokenizer("bytes"))
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    spec = json.loads((path / "tokenizer.json").read_text())
    added = spec["added_tokens"][0]
    spec["added_tokens"] = [added | dict(id=256 + i, content=text) for i, text in enumerate(tokens)]
    (path / "tokenizer.json").write_text(json.dumps(spec))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= dict(eos_token="<|im_end|>", chat_template=template)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[258, 256])))
    return path


def add_adapters(model, rank=4, alpha=8.0, targets=tuple(lora.TARGETS), std=0.1):
    """-> the model, with adapters that do something."""
    for layer in lora.adapted(lora.add(model, rank, alpha, list(targets))):
        torch.nn.init.normal_(layer.lora_B, std=std)
    return model


def tensor_bytes(tensors):
    """Bytes of the distinct storages of some tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


SMALL = dict(vocab_size=97, hidden_size=32, intermediate_size=48)
SMALL |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def logits_of(model, tokens):
    with torch.no_grad():
        return model.logits(model(tokens))
