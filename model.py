"""The GPT: blocks and per-block checkpointing.

One class spells GPT-2 (layer norm, learned positions, GELU, biases) and the Llama/Qwen shape (RMS norm, rotary
positions, SwiGLU, grouped-query attention): the differences are values of `GPTConfig`. `forward` returns hidden
states, never logits: a (B, T, V) tensor is made only by who asks for it, at the rows that are needed (logprobs.py).

Left out: dropout (the sampler and the trainer must be the same function), sliding windows, mixtures of experts.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memory.host import to_device, to_host
from memory.lean import Embed, LeanRMSNorm
from memory.ledger import kind_of
from options import SnugError


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int  # rows of the embedding and of the head
    n_vocab: int = 0  # ids that the tokenizer has; from there on rows are padding and have probability 0. 0: vocab_size
    block_size: int = 1024  # longest sequence, tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # C
    n_kv_head: int = 0  # 0: n_head
    head_size: int = 0  # 0: n_embd / n_head
    n_hidden: int = 0  # 0: 4 C for gelu; for swiglu 8/3 C, which has as many weights, rounded up to a multiple of 8
    norm: str = "layernorm"  # | "rmsnorm"
    norm_eps: float = 1e-5
    position: str = "learned"  # | "rotary"
    rope_theta: float = 10000.0
    rope_factor: float = (
        1.0  # positions count 1 / so much: all of them, or Llama 3.1's rule where there is an original block size
    )
    rope_original_block_size: int = 0
    rope_low_freq_factor: float = 1.0  # wavelengths above original / low are stretched in full,
    rope_high_freq_factor: float = 4.0  # those below original / high not at all, those between in between
    mlp: str = "gelu"  # | "swiglu"
    bias: bool = False  # in linear layers and layer norms (GPT-2)
    qkv_bias: bool = False  # in the query/key/value projection alone (Qwen2)
    qk_norm: bool = False  # RMS norm of each query and key head (Qwen3)
    tie_embeddings: bool = True

    def __post_init__(self):
        self.check_types()
        swiglu = -(-self.n_embd * 8 // 24) * 8
        derived = dict(
            n_vocab=self.vocab_size,
            n_kv_head=self.n_head,
            head_size=self.n_embd // self.n_head,
            n_hidden=swiglu if self.mlp == "swiglu" else 4 * self.n_embd,
        )
        for name, value in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if not 0 < self.n_vocab <= self.vocab_size:
            raise ValueError(f"n_vocab={self.n_vocab} is more than vocab_size={self.vocab_size}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}")

    def check_types(self):
        """A shape may come from a file. Raises TypeError, ValueError."""
        kinds = {"int": int, "str": str, "float": (float, int), "bool": bool}
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, kinds[f.type.__name__]) or isinstance(value, bool) != (f.type is bool):
                raise TypeError(f"{f.name}={value!r:.40} must be of type {f.type.__name__}")
            least = 0 if f.default == 0 else 1
            if f.type is int and not least <= value < (10_000 if f.name == "n_layer" else 2**31):
                raise ValueError(f"{f.name}={value!r:.40} is out of range")
        for name, choices in (
            ("norm", ("layernorm", "rmsnorm")),
            ("position", ("learned", "rotary")),
            ("mlp", ("gelu", "swiglu")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r:.40} is not one of {', '.join(choices)}")
        if self.n_embd < self.n_head or not 0 < self.norm_eps < 1 or not 1 <= self.rope_theta < math.inf:
            raise ValueError("n_embd is below n_head, or norm_eps or rope_theta is out of range")
        if (
            not 1 <= self.rope_factor < math.inf
            or not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor < math.inf
        ):
            raise ValueError("rope_factor, rope_low_freq_factor or rope_high_freq_factor is out of range")


def autocast(dtype, model):
    """dtype="bfloat16": matmuls in bfloat16 over float32 weights; bfloat16 weights, or "float32": as they are. A context manager."""
    return torch.autocast(
        model.device.type, torch.bfloat16, enabled=dtype == "bfloat16" and model.lm_head_weight.dtype == torch.float32
    )


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, whose fused kernel is CUDA's; elsewhere, where PyTorch keeps several float32 copies of x, one that keeps x."""

    def forward(self, x):
        if x.is_cuda or x.dtype == torch.float64:
            return super().forward(x)
        return LeanRMSNorm.apply(x, self.weight, self.eps)


def make_norm(config, size=None):
    size = size or config.n_embd
    if config.norm == "rmsnorm":
        return RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)


def rotary_frequencies(config, device=None):
    """-> radians a position (head_size / 2,), float32, in Hugging Face's order of operations: positions multiply what rounding leaves.

    With rope_original_block_size they are scaled as Llama 3.1's are: slow ones divided by rope_factor, fast ones as they were.
    """
    exponent = torch.arange(0, config.head_size, 2, device=device, dtype=torch.float32) / config.head_size
    frequency = 1.0 / config.rope_theta**exponent
    if not config.rope_original_block_size:
        return frequency / config.rope_factor
    wavelength = 2 * math.pi / frequency
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = (config.rope_original_block_size / wavelength - low) / (high - low)
    kept = kept.clamp(0, 1)
    return (1 - kept) * (frequency / config.rope_factor) + kept * frequency


def rotary_table(config, length, device):
    """-> cos, sin (length, head_size), float32: RoFormer's rotation in Llama's half-split layout."""
    angle = torch.arange(length, device=device)[:, None] * rotary_frequencies(config, device)  # (T, D/2)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x (B, H, T, D); cos, sin (B, 1, T, D) -> x with each pair (i, i + D/2) turned by its position's angle."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        c, self.sizes = config, [config.n_head, config.n_kv_head, config.n_kv_head]
        self.qkv = nn.Linear(c.n_embd, sum(self.sizes) * c.head_size, bias=config.bias or config.qkv_bias)
        self.proj = nn.Linear(c.n_head * c.head_size, c.n_embd, bias=c.bias)
        self.q_norm, self.k_norm = (make_norm(c, c.head_size), make_norm(c, c.head_size)) if c.qk_norm else (None, None)

    def forward(self, x, rotary=None, cache=None, mask=None):
        """x (B, T, C) -> (B, T, C). With a cache: prompts go in first, then one token a row and call."""
        B, T, _ = x.shape
        q, k, v = (
            self.qkv(x).view(B, T, -1, self.config.head_size).transpose(1, 2).split(self.sizes, 1)
        )  # (B, heads, T, D)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cache is not None and cache.filling is None:
            y = cache.attend(self.layer, q, k, v, rotary)
        else:
            if rotary is not None:
                q, k = rotate(q, *rotary), rotate(k, *rotary)
            if cache is not None:
                cache.fill(self.layer, k, v)
            # Right padding needs no mask: a causal row never looks at what comes after it.
            grouped = self.config.n_kv_head != self.config.n_head
            if (
                grouped and q.dtype == torch.float32 and kind_of(q) == "cuda"
            ):  # no fused kernel there shares heads in float32
                k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.up = nn.Linear(config.n_embd, config.n_hidden * (2 if self.gated else 1), bias=config.bias)
        self.down = nn.Linear(config.n_hidden, config.n_embd, bias=config.bias)

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x, approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.norm_1, self.attention = make_norm(config), Attention(config, layer)
        self.norm_2, self.mlp = make_norm(config), MLP(config)

    def forward(self, x, rotary=None, cache=None, mask=None, last=None):
        """x (B, T, C) -> (B, T, C); or, where last is a row of each sequence, (B,), those alone: (B, 1, C)."""
        x = x + self.attention(self.norm_1(x), rotary, cache, mask)
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last][:, None]
        return x + self.mlp(self.norm_2(x))


def keep_attention(context, op, *args, **kwargs):
    """Selective checkpointing: attention's outputs are kept, all else in a block is computed again."""
    return CheckpointPolicy.MUST_SAVE if "scaled_dot_product" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def host_hooks(x):
    """What autograd keeps of `x` is kept on the host; the tables of positions, which all blocks share, stay where they are."""
    storage, device = id(x.untyped_storage()), x.device

    def pack(tensor):
        return (to_host(tensor), True) if id(tensor.untyped_storage()) == storage else (tensor, False)

    def unpack(packed):
        tensor, moved = packed
        return to_device(tensor, device) if moved else tensor

    return pack, unpack


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.checkpoint_blocks = "none"  # | "block" | "selective": what of a block is kept for backward
        self.activation_offload = (
            False  # what "block" and "selective" keep as a block's input goes to the host until backward
        )
        self.base = None  # of adapters (lora.py): which weights they go with, {"path": ..., "fingerprint": ...}
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.rotary = (
            None  # made as far as it is needed, on the device it is needed on; follows from the config, so not saved
        )
        self.init_weights()

    def init_weights(self):
        """GPT-2's: 0.02 at its width of 768, which has to grow as 1 / sqrt(width) where the width is smaller."""
        std = 0.02 * math.sqrt(768 / self.config.n_embd)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                residual = name.endswith(
                    ("proj.weight", "down.weight")
                )  # their sum down the layers must not grow with depth
                nn.init.normal_(weight, std=std / math.sqrt(2 * self.config.n_layer) if residual else std)

    @property
    def lm_head_weight(self):
        """(V, C)"""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def device(self):
        return self.embedding.weight.device

    @property
    def compute_dtype(self):
        """What matmuls run in here and now: the autocast type inside autocast, else the weights'."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.embedding.weight.dtype

    def forward(self, tokens, positions=None, cache=None, mask=None, last=None):
        """tokens (B, T) -> hidden (B, T, C), after the last norm.

        positions (B, T), or (1, T) for all rows: default 0, 1, 2, ... mask: boolean, broadcast to (B, n_head, T, T), True where a
        row may look; default causal. last (B,): only this row of each sequence is wanted, -> (B, 1, C). cache: a KVCache (kvcache.py), which takes the prompts (P, T_p) first, then one token a row, (n, 1).
        """
        B, T = tokens.shape
        if positions is None:
            if T > self.config.block_size:
                raise ValueError(f"a sequence of {T} tokens is longer than block_size={self.config.block_size}")
            positions = torch.arange(T, device=tokens.device)[None]
        weight = self.embedding.weight
        into_grad = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf
        x = Embed.apply(tokens, weight) if into_grad else self.embedding(tokens)  # (B, T, C)
        rotary = None
        if self.position is not None:
            x = x + self.position(positions)
        else:
            self.reach(T if cache is None else cache.reach, tokens.device)
            rotary = [table[positions][:, None] for table in self.rotary]  # (B, 1, T, D) each
        for block in self.blocks:
            x = self.run_block(block, x, rotary, cache, mask, last if block is self.blocks[-1] else None)
        return self.norm(x)

    def reach(self, length, device):
        """Have tables for positions below `length`, where they are rotary. A folder's block_size may be 131,072, whose tables are 64 MiB at 64 a head."""
        if self.config.position == "rotary" and (
            self.rotary is None or len(self.rotary[0]) < length or self.rotary[0].device != device
        ):
            with torch.inference_mode(False):  # training will read what sampling may make here
                self.rotary = rotary_table(
                    self.config, min(self.config.block_size, 2 ** math.ceil(math.log2(length))), device
                )

    def run_block(self, block, x, rotary, cache, mask, last):
        if self.checkpoint_blocks == "none" or not torch.is_grad_enabled():
            return block(x, rotary, cache, mask, last)
        contexts = (
            {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}
            if self.checkpoint_blocks == "selective"
            else {}
        )
        with saved_tensors_hooks(*host_hooks(x)) if self.activation_offload else nullcontext():
            return checkpoint(
                block, x, rotary, cache, mask, last, use_reentrant=False, preserve_rng_state=False, **contexts
            )

    def outside_blocks(self):
        """-> the modules that are not blocks."""
        return [module for module in (self.embedding, self.position, self.norm, self.head) if module is not None]

    def logits(self, hidden):
        """hidden (..., C) -> (..., V), -inf for padded ids. Mind the size: select rows first."""
        logits = F.linear(hidden, self.lm_head_weight)
        if self.config.n_vocab < self.config.vocab_size:
            logits[..., self.config.n_vocab :] = -math.inf
        return logits


def make_model(shape, device, dtype="float32", initialise=True):
    """GPTConfig's keywords -> a GPT of random weights, or, where they are to be loaded, of any. Raises SnugError where a state.json has them wrong."""
    try:
        config = GPTConfig(**shape)
    except (TypeError, ValueError) as error:
        raise SnugError(f"not the shape of a model: {error}") from None
    made_as = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(
            device if initialise else "meta"
        ):  # made where it is to live: never a second copy, in float32, on the host
            model = GPT(config)
        return model if initialise else model.to_empty(device=device)
    finally:
        torch.set_default_dtype(made_as)


def pick_device(name):
    """ "auto" -> cuda where there is one, else cpu. Raises SnugError for what torch has not got."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise SnugError(f"device={name!r}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise SnugError(f"device={name!r}: snug runs on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SnugError(f"device={name!r}: this torch sees no CUDA device; use --device=cpu")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise SnugError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
        torch.cuda.set_device(device)  # which also starts CUDA, so that the allocator's counters are there
    return device
