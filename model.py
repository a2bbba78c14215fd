"""The GPT: blocks, and activation checkpointing by block.

One class covers GPT-2 (layer norm, learned positions, GELU, biases) and the families after Llama (RMS norm, rotary
positions, gated MLPs, grouped-query attention): a `GPTConfig` (snug/shape.py) says what a model has. `forward` returns
hidden states, never logits: a (B, T, V) tensor would be the largest in GRPO, so callers compute logits only for the
rows that they need (snug/logprobs/).

Left out: dropout (the sampler and the trainer must be the same function), mixture of experts.
Test: pytest tests/test_model.py
"""

import math
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from snug.delta import DeltaNet
from snug.device import cpu
from snug.kernels.gated import GatedUnit
from snug.kernels.layers import Embed, Linear, RMSNorm, hold_in_nf4, offloaded
from snug.kernels.rotary import Rotary, rotary_table
from snug.kernels.segments import Segments, attend
from snug.memory.ledger import component
from snug.options import in_one_line
from snug.pretrained.hub import local_folder
from snug.pretrained.shapes import read_shape
from snug.pretrained.tensors import look_at_weights, read_weights, save_pretrained
from snug.shape import GPTConfig


def autocast(dtype: str, model: "GPT") -> torch.autocast:
    """dtype="bfloat16": matmuls in bfloat16 over float32 weights. With "float32" or bfloat16 weights: no casts."""
    enabled = dtype == "bfloat16" and model.lm_head_weight.dtype == torch.float32
    return torch.autocast(model.device.type, torch.bfloat16, enabled=enabled)


def make_norm(config: GPTConfig, size: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(size, eps=config.norm_eps, zero_centered=config.zero_centered_norm)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        c = self.config = config
        self.layer = sum(not c.is_linear(i) for i in range(layer))  # of those with keys
        queries = c.n_head * (1 + c.attention_gate)  # each head is followed by its gate
        self.heads = [queries, c.n_kv_head, c.n_kv_head]
        self.qkv = Linear(c.n_embd, sum(self.heads) * c.head_size, bias=c.bias or c.qkv_bias)
        self.proj = Linear(c.n_head * c.head_size, c.n_embd, bias=c.bias or c.proj_bias)
        q_size, k_size = (c.n_head, c.n_kv_head) if c.qk_norm_joint else (1, 1)
        self.q_norm = make_norm(c, q_size * c.head_size) if c.qk_norm else None
        self.k_norm = make_norm(c, k_size * c.head_size) if c.qk_norm else None

    def forward(self, x, residual=None, rotary=None, cache=None, mask=None):
        """x, residual (B, T, C) -> attention of x, + residual if there is one.

        A KVCache takes prompts of T tokens, then one token per step."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.config.head_size).transpose(1, 2)
        q, k, v = qkv.split(self.heads, 1)  # (B, heads, T, D)
        if self.config.attention_gate:
            q, gate = q[:, ::2], q[:, 1::2]
        decodes = cache is not None and cache.prefill_slots is None
        if self.q_norm is not None:
            q, k = norm_heads(self.q_norm, q), norm_heads(self.k_norm, k)
        elif rotary is not None and not decodes:
            q, k, v = Rotary.apply(qkv, *rotary, self.heads)  # within qkv: no second q, k for backward
            rotary = None
        if self.config.query_scale != 1:
            q = q * self.config.query_scale
        if decodes:
            y = cache.attend(self.layer, q, k, v, rotary)
        else:
            if rotary is not None:
                q, k = (Rotary.apply(x, *rotary, x.shape[1:2])[0] for x in (q, k))
            if cache is not None:
                cache.write_prompts(self.layer, k, v)
            y = attend(q, k, v, mask, self.config.windows[self.layer])
        if self.config.attention_gate:
            y = y * gate.sigmoid()
        return self.proj(y.transpose(1, 2).reshape(B, T, -1), residual)


def norm_heads(norm, x):
    """Normalize each head of x (B, heads, T, D); if the norm has heads * D numbers, all heads of a token together."""
    x = x.transpose(1, 2)  # (B, T, heads, D)
    return norm(x.reshape(*x.shape[:2], -1, len(norm.weight))).view(x.shape).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.kind, gated = config.mlp, config.mlp != "gelu"
        self.up = Linear(config.n_embd, config.n_hidden * (2 if gated else 1), bias=config.bias)
        self.down = Linear(config.n_hidden, config.n_embd, bias=config.bias)

    def forward(self, x, residual=None):  # (B, T, C) each -> MLP of x, + residual if there is one
        x = self.up(x)
        if self.kind == "gelu":
            return self.down(nn.functional.gelu(x, approximate="tanh"), residual)
        return self.down(GatedUnit.apply(x, self.kind == "geglu"), residual)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()

        def norm_if(present):
            return make_norm(config, config.n_embd) if present else None

        kind = DeltaNet if config.is_linear(layer) else Attention
        self.norm_1, self.attention = norm_if(config.pre_norm), kind(config, layer)
        self.norm_2, self.mlp = norm_if(config.pre_norm), MLP(config)
        self.post_norm_1, self.post_norm_2 = norm_if(config.post_norm), norm_if(config.post_norm)

    def forward(self, x, rotary=None, cache=None, mask=None, last=None):
        """x (B, T, C) -> (B, T, C); with last (B,) only row last[b] of sequence b: (B, 1, C)."""
        x = add(self.attention, self.norm_1, self.post_norm_1, x, rotary, cache, mask)
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last][:, None]
        return add(self.mlp, self.norm_2, self.post_norm_2, x)


def add(half, norm, post_norm, x, *context):
    """-> x + half of a block, with a norm before it, behind it, or both."""
    y = x if norm is None else norm(x)
    if post_norm is None:
        return half(y, x, *context)  # its last Linear adds x
    return x + post_norm(half(y, None, *context))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.checkpoint_blocks = "none"  # | "block" | "selective" (`run_block`)
        self.activation_offload = False  # blocks' inputs wait in host memory for backward
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        learned = config.position == "learned"
        self.position = nn.Embedding(config.block_size, config.n_embd) if learned else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config, config.n_embd)
        tied = config.tie_embeddings
        self.head = None if tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.rotary = {}  # {kind of rope: cos, sin of the positions used so far}; not saved
        self.ropes = [config.rope(layer) for layer in range(config.n_layer)]
        self.init_weights()

    def init_weights(self):
        """Draw the weights as GPT-2 does: with a deviation of 0.02 at its width of 768, else 0.02 sqrt(768 / width)."""
        std = 0.02 * math.sqrt(768 / self.config.n_embd)
        for name, weight in self.named_parameters():
            if name.endswith(".bias"):
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
        places = look_at_weights(folder)  # refuses wrong tensors before memory is allocated
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
        if self.config.embedding_scale != 1:
            x.mul_(torch.tensor(self.config.embedding_scale, dtype=x.dtype))  # rounds as x does
        if self.position is not None:
            x = x + self.position(positions)
        length = T if cache is None else cache.max_length
        length = mask.longest if isinstance(mask, Segments) else length
        angles = self.angles(positions, length)
        for block, kind in zip(self.blocks, self.ropes, strict=True):
            block_last = last if block is self.blocks[-1] else None
            x = self.run_block(block, x, angles.get(kind), cache, mask, block_last)
        return self.norm(x)

    def angles(self, positions, length: int) -> dict:
        """positions (B, T) below length -> {kind of rope: cos, sin (B, 1, T, rotary size)}.

        Tables grow as needed: for a whole block_size of 131,072 they would take 64 MiB."""
        kinds = {*self.ropes} - {""}
        for kind in kinds:
            cos = self.rotary.get(kind, [()])[0]
            if len(cos) < length or cos.device != positions.device:
                size = min(self.config.block_size, 2 ** math.ceil(math.log2(length)))
                with torch.inference_mode(False):  # training reads the tables that sampling makes
                    self.rotary[kind] = rotary_table(self.config, size, positions.device, kind)
        return {kind: [table[positions][:, None] for table in self.rotary[kind]] for kind in kinds}

    def run_block(self, block, x, rotary, cache, mask, last):
        """x (B, T, C) -> (B, T, C). "block" keeps a block's input for backward, "selective" also attention's output."""
        if self.checkpoint_blocks == "none" or not torch.is_grad_enabled():
            return block(x, rotary, cache, mask, last)
        packed = isinstance(mask, Segments) and isinstance(block.attention, Attention)
        if self.checkpoint_blocks == "selective" and packed:
            mask = mask.keeping()
        # There is no dropout, so there is no generator to restore.
        options = dict(use_reentrant=False, preserve_rng_state=False)
        with offloaded(x) if self.activation_offload else nullcontext():
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
        with torch.device(device if initialise else "meta"):  # meta tensors have no data
            model = GPT(config)
        if base_dtype:
            hold_in_nf4(model, device, empty=not initialise)
        return model if initialise else model.to_empty(device=device)
    finally:
        torch.set_default_dtype(default)
