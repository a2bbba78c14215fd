"""The GPT: blocks, and activation checkpointing by block.

One class covers GPT-2 (layer norm, learned positions, GELU, biases) and the Llama/Qwen family (RMS norm, rotary
positions, SwiGLU, grouped-query attention): a `GPTConfig` says which. `forward` returns hidden states, never logits: a
(B, T, V) tensor would be the largest in GRPO, so callers compute logits only for the rows that they need (logprobs/).

Left out: dropout (the sampler and the trainer must be the same function), sliding windows, mixture of experts.
Test: pytest tests/test_model.py
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from snug.device import cpu
from snug.kernels.layers import BlockInputs, Embed, Linear, RMSNorm, Undrawn, hold_in_nf4
from snug.kernels.rotary import Rotary, rotary_table
from snug.kernels.segments import Segments, attend
from snug.kernels.swiglu import SwiGLU
from snug.memory.ledger import COMPONENTS, component
from snug.options import in_one_line
from snug.pretrained.hub import local_folder
from snug.pretrained.shapes import read_shape
from snug.pretrained.tensors import look_at_weights, read_weights, save_pretrained

COMPONENTS[__name__] = "activations"  # the name in --plan's table


@dataclass(frozen=True)
class GPTConfig:
    """A model's shape. Raises ValueError for numbers that do not fit together; their readers check each value."""

    vocab_size: int  # rows of the embedding and of the head
    # Ids of the tokenizer; ids from n_vocab on are padding and have probability 0. 0: vocab_size
    n_vocab: int = 0
    block_size: int = 1024  # longest sequence, tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # C
    n_kv_head: int = 0  # key/value heads, each shared by n_head / n_kv_head query heads. 0: n_head
    head_size: int = 0  # 0: n_embd / n_head
    # 0: 4 C for gelu; 8/3 C for swiglu, which gives the same number of weights, rounded up to a multiple of 8
    n_hidden: int = 0
    norm: str = "layernorm"  # | "rmsnorm"
    norm_eps: float = 1e-5
    position: str = "learned"  # | "rotary"
    # > 0: a token sees so many tokens, itself included, except in every full_every-th layer, where it sees all
    sliding_window: int = 0
    full_every: int = 0  # 0: all layers slide
    rope_theta: float = 10000.0
    rope_factor: float = 1.0  # positions are divided by it: all of them, or by Llama 3.1's rule, below
    # > 0: Llama 3.1's rule. Wavelengths longer than original / low are stretched, wavelengths shorter than original /
    # high are not, others are interpolated.
    rope_original_block_size: int = 0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    mlp: str = "gelu"  # | "swiglu"
    bias: bool = False  # in linear layers and layer norms (GPT-2)
    qkv_bias: bool = False  # in the query/key/value projection alone (Qwen2)
    proj_bias: bool = False  # in attention's output projection (Llama's attention_bias: both)
    qk_norm: bool = False  # RMS norm of each query and key head (Qwen3)
    tie_embeddings: bool = True

    def __post_init__(self):
        if not self.head_size and self.n_embd % self.n_head:
            raise ValueError(f"n_head={self.n_head} does not divide n_embd={self.n_embd}")
        derived = dict(
            n_vocab=self.vocab_size,
            n_kv_head=self.n_head,
            head_size=self.n_embd // self.n_head,
            n_hidden=-(-self.n_embd * 8 // 24) * 8 if self.mlp == "swiglu" else 4 * self.n_embd,
        )
        for name, value in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.n_vocab > self.vocab_size:
            raise ValueError(f"n_vocab={self.n_vocab} is more than vocab_size={self.vocab_size}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}")
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if low >= high:
            raise ValueError(f"rope_low_freq_factor={low} must be below rope_high_freq_factor={high}")

    def window(self, layer: int) -> int:
        """-> how many tokens a token sees in this layer, itself included; 0: all before it."""
        full = self.full_every and (layer + 1) % self.full_every == 0
        return 0 if full else self.sliding_window


def autocast(dtype: str, model: "GPT") -> torch.autocast:
    """dtype="bfloat16": matmuls in bfloat16 over float32 weights. With "float32" or bfloat16 weights: no casts."""
    enabled = dtype == "bfloat16" and model.lm_head_weight.dtype == torch.float32
    return torch.autocast(model.device.type, torch.bfloat16, enabled=enabled)


def make_norm(config: GPTConfig, size: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        c = self.config = config
        self.layer = layer
        self.heads = [c.n_head, c.n_kv_head, c.n_kv_head]
        self.qkv = Linear(c.n_embd, sum(self.heads) * c.head_size, bias=c.bias or c.qkv_bias)
        self.proj = Linear(c.n_head * c.head_size, c.n_embd, bias=c.bias or c.proj_bias)
        self.q_norm = make_norm(c, c.head_size) if c.qk_norm else None
        self.k_norm = make_norm(c, c.head_size) if c.qk_norm else None

    def forward(self, x, residual, rotary=None, cache=None, mask=None):
        """x, residual (B, T, C) -> residual + attention of x.

        A KVCache takes prompts of T tokens, then one token per step."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.config.head_size).transpose(1, 2)
        q, k, v = qkv.split(self.heads, 1)  # (B, heads, T, D)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cache is not None and cache.prefill_slots is None:
            y = cache.attend(self.layer, q, k, v, rotary)
        else:
            if rotary is not None and self.q_norm is None:
                q, k, v = Rotary.apply(qkv, *rotary, self.heads)  # in place: attention keeps no copies
            elif rotary is not None:
                q, k = (Rotary.apply(x, *rotary, x.shape[1:2])[0] for x in (q, k))
            if cache is not None:
                cache.write_prompts(self.layer, k, v)
            y = attend(q, k, v, mask, self.config.window(self.layer))
        return self.proj(y.transpose(1, 2).reshape(B, T, -1), residual)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.up = Linear(config.n_embd, config.n_hidden * (2 if self.gated else 1), bias=config.bias)
        self.down = Linear(config.n_hidden, config.n_embd, bias=config.bias)

    def forward(self, x, residual):  # (B, T, C) each -> residual + MLP of x
        x = self.up(x)
        return self.down(SwiGLU.apply(x) if self.gated else F.gelu(x, approximate="tanh"), residual)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.norm_1, self.attention = make_norm(config, config.n_embd), Attention(config, layer)
        self.norm_2, self.mlp = make_norm(config, config.n_embd), MLP(config)

    def forward(self, x, rotary=None, cache=None, mask=None, last=None):
        """x (B, T, C) -> (B, T, C); with last (B,), row last[b] of sequence b alone: (B, 1, C)."""
        x = self.attention(self.norm_1(x), x, rotary, cache, mask)
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last][:, None]
        return self.mlp(self.norm_2(x), x)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # | "block" | "selective": what backward computes again (`run_block`)
        self.checkpoint_blocks = "none"
        # When checkpointing, keep the blocks' inputs in host memory until backward.
        self.activation_offload = False
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        learned = config.position == "learned"
        self.position = nn.Embedding(config.block_size, config.n_embd) if learned else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config, config.n_embd)
        tied = config.tie_embeddings
        self.head = None if tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.rotary = None  # cos, sin of the positions used so far (`extend_rotary`); not saved
        self.init_weights()

    def init_weights(self):
        """Draw the weights as GPT-2 does: with a deviation of 0.02 at its width of 768, else 0.02 sqrt(768 / width)."""
        std = 0.02 * math.sqrt(768 / self.config.n_embd)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                # What is added to the residual stream is scaled down, so that the sum does not grow with depth.
                residual = name.endswith(("proj.weight", "down.weight"))
                scale = math.sqrt(2 * self.config.n_layer) if residual else 1
                nn.init.normal_(weight, std=std / scale)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, device="cpu", dtype: str = "float32", **overrides
    ) -> "GPT":
        """A Hugging Face folder, or owner/name[@revision] on the hub -> its GPT, weights in `dtype`.

        overrides: GPTConfig's keywords. Raises SnugError.
        """
        folder = local_folder(name)
        places = look_at_weights(folder)  # before there is memory for a model of another size
        model = make_model(read_shape(folder) | overrides, device, dtype, initialise=False)
        read_weights(places, model)
        return model

    save_pretrained = save_pretrained

    @property
    def lm_head_weight(self) -> nn.Parameter:
        """(V, C)"""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def device(self) -> torch.device:
        # runs_on: set where weights wait on the host
        return getattr(self, "runs_on", self.embedding.weight.device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of matmuls: autocast's inside autocast, else the weights'."""
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return self.embedding.weight.dtype

    def forward(self, tokens, positions=None, cache=None, mask=None, last=None):
        """tokens (B, T) -> hidden (B, T, C), after the last norm.

        positions (B, T), or (1, T) for all rows; default 0, 1, 2, ... mask: what each token sees; Segments of a packed
        row (B = 1), or boolean, broadcast to (B, n_head, T, T); default causal. last (B,): return only this row of each
        sequence, (B, 1, C).
        cache: a KVCache (snug/decoding/kvcache.py); a prefill takes prompts (P, T_p), a step one token a row (n, 1).
        Raises ValueError if T is longer than block_size.
        """
        T, block_size = tokens.shape[1], self.config.block_size
        if positions is None:
            if T > block_size:
                raise ValueError(f"a sequence of {T} tokens is longer than block_size={block_size}")
            positions = torch.arange(T, device=tokens.device)[None]  # (1, T)
        weight = self.embedding.weight
        if torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf:
            x = Embed.apply(tokens, weight)  # (B, T, C)
        else:  # a streamed model's embedding may be on the host
            x = self.embedding(tokens.to(weight.device)).to(tokens.device)
        rotary = None
        if self.position is not None:
            x = x + self.position(positions)
        else:
            length = T if cache is None else cache.max_length
            length = mask.longest if isinstance(mask, Segments) else length
            self.extend_rotary(length, tokens.device)
            rotary = [table[positions][:, None] for table in self.rotary]  # (B, 1, T, D) each
        inputs = BlockInputs()
        for block in self.blocks:
            block_last = last if block is self.blocks[-1] else None
            x = self.run_block(block, x, rotary, cache, mask, block_last, inputs)
        return self.norm(x)

    def extend_rotary(self, length: int, device):
        """Make the rotary tables for positions below `length`. For a block_size of 131,072 they would take 64 MiB."""
        if self.rotary is None or len(self.rotary[0]) < length or self.rotary[0].device != device:
            length = min(self.config.block_size, 2 ** math.ceil(math.log2(length)))
            with torch.inference_mode(False):  # training reads the tables that sampling makes
                self.rotary = rotary_table(self.config, length, device)

    def run_block(self, block, x, rotary, cache, mask, last, inputs):
        """x (B, T, C) -> (B, T, C). "block" keeps a block's input for backward, "selective" also attention."""
        if self.checkpoint_blocks == "none" or not torch.is_grad_enabled():
            return block(x, rotary, cache, mask, last)
        if self.checkpoint_blocks == "selective" and isinstance(mask, Segments):
            mask = mask.keeping()
        # There is no dropout, so there is no generator to restore.
        options = dict(use_reentrant=False, preserve_rng_state=False)
        with inputs.hooks(x) if self.activation_offload else nullcontext():
            return checkpoint(block, x, rotary, cache, mask, last, **options)

    def logits(self, hidden):
        """hidden (..., C) -> (..., V), -inf for padded ids. Mind the size: select rows first."""
        logits = cpu.linear(hidden, self.lm_head_weight)
        if self.config.n_vocab < self.config.vocab_size:
            logits[..., self.config.n_vocab :] = -math.inf
        return logits


@component("weights")
def make_model(
    shape: dict, device, dtype: str = "float32", initialise: bool = True, base_dtype: str = ""
) -> GPT:
    """GPTConfig's keywords -> a GPT; with initialise=False its weights are empty memory, to load. Raises SnugError.

    base_dtype="nf4": the blocks' matrices are in NF4.
    """
    with in_one_line("not the shape of a model"):
        config = GPTConfig(**shape)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        # Matrices that will be in NF4 take no memory before.
        place = "meta" if base_dtype and not initialise else device
        with torch.device(place), nullcontext() if initialise else Undrawn():
            model = GPT(config)
        if base_dtype:
            hold_in_nf4(model, device, empty=not initialise)
        return model.to_empty(device=device) if place == "meta" else model
    finally:
        torch.set_default_dtype(default)
