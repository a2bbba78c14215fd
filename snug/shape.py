"""GPTConfig: what a model has. A family of models is a set of its values (snug/pretrained/shapes.py), not a branch.

Each property works without the others. Left out: soft-capped logits (Gemma 2), mixtures of experts.
Test: pytest tests/test_model.py tests/test_families.py
"""

from dataclasses import dataclass
from functools import cached_property

CONVOLUTION = 4  # tokens that a linear layer's convolution sees, the newest included


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
    # 0: 4 C for gelu; 8/3 C for gated ones, which gives the same number of weights, rounded up to a multiple of 8
    n_hidden: int = 0
    norm: str = "layernorm"  # | "rmsnorm"
    norm_eps: float = 1e-5
    zero_centered_norm: bool = False  # RMS norms multiply by 1 + weight (Gemma)
    pre_norm: bool = True  # a norm before attention and before the MLP
    post_norm: bool = False  # a norm behind each, before the sum (OLMo 2: only these; Gemma 3: both)
    embedding_scale: float = 1.0  # what the embedding is multiplied by (Gemma: the root of C)
    query_scale: float = 1.0  # what queries are multiplied by, beside 1 / the root of head_size
    # > 0: a token sees so many tokens, itself included, except in every full_every-th layer, where it sees all
    sliding_window: int = 0
    full_every: int = 0  # 0: all layers slide, or all are linear
    # Heads of keys and queries; > 0: all layers but every full_every-th have a state instead of keys (snug/delta.py)
    linear_key_heads: int = 0
    # A key head is shared by linear_value_heads / linear_key_heads of them.
    linear_value_heads: int = 0
    # Of a key head. A value head's state is (linear_key_size, linear_value_size).
    linear_key_size: int = 0
    linear_value_size: int = 0
    position: str = "learned"  # | "rotary"
    nope_every: int = 0  # > 0: every such layer has no rotary positions (SmolLM3)
    rotary_fraction: float = 1.0  # of a head's numbers, those that turn (Phi-4-mini: 0.75)
    rope_theta: float = 10000.0
    # > 0: layers that slide have this base, and nothing else of what follows (Gemma 3, OLMo 3)
    rope_sliding_theta: float = 0.0
    # What is done with rope_factor: "" divides positions by it; "llama3", "yarn", "longrope": snug/kernels/rotary.py
    rope_type: str = ""
    rope_factor: float = 1.0
    rope_original_block_size: int = 0  # before the context was stretched
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_attention_factor: float = 1.0  # cos and sin are multiplied by it
    # longrope: what wavelengths are multiplied by, (rotary size / 2,) each. The long ones are for sequences longer
    # than rope_original_block_size, which snug does not have; it keeps them for others.
    rope_short_factor: tuple = ()
    rope_long_factor: tuple = ()
    mlp: str = "gelu"  # | "swiglu" | "geglu"
    bias: bool = False  # in linear layers and layer norms (GPT-2)
    qkv_bias: bool = False  # in the query/key/value projection alone (Qwen2)
    proj_bias: bool = False  # in attention's output projection (Llama's attention_bias: both)
    qk_norm: bool = False  # RMS norm of each query and key head (Qwen3)
    qk_norm_joint: bool = False  # the same of all heads of a token together (OLMo 2)
    # Each query head has a gate: attention's output times sigmoid(gate) (Qwen3.5). It needs qk_norm.
    attention_gate: bool = False
    tie_embeddings: bool = True

    def __post_init__(self):
        if not self.head_size and self.n_embd % self.n_head:
            raise ValueError(f"n_head={self.n_head} does not divide n_embd={self.n_embd}")
        gated = self.mlp != "gelu"
        derived = dict(
            # Checkpoints of earlier versions have only the number.
            rope_type="llama3" if self.rope_original_block_size else "",
            n_vocab=self.vocab_size,
            n_kv_head=self.n_head,
            head_size=self.n_embd // self.n_head,
            n_hidden=-(-self.n_embd * 8 // 24) * 8 if gated else 4 * self.n_embd,
        )
        values = {name: getattr(self, name) or value for name, value in derived.items()}
        for name in ("rope_short_factor", "rope_long_factor"):  # JSON has lists
            values[name] = tuple(getattr(self, name))
        for name in ("full_every", "nope_every"):
            if getattr(self, name) > self.n_layer:  # no layer is of this kind
                values[name] = 0
        vars(self).update(values)  # the dataclass is frozen
        if self.n_vocab > self.vocab_size:
            raise ValueError(f"n_vocab={self.n_vocab} is more than vocab_size={self.vocab_size}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}")
        size, longest = self.rotary_size, self.rope_original_block_size
        if self.position == "rotary" and (size % 2 or not 0 < size <= self.head_size):
            raise ValueError(f"rotary needs pairs, not {size} of a head's {self.head_size} numbers")
        factors = self.rope_short_factor, self.rope_long_factor
        if self.rope_type == "longrope":
            if {*map(len, factors)} != {size // 2}:
                raise ValueError(
                    f"longrope has {size // 2} short and long factors, not {factors!r:.60}"
                )
            if self.block_size > longest > 0:
                raise ValueError(
                    f"block_size={self.block_size} is more than longrope's original {longest}"
                )

    @property
    def rotary_size(self) -> int:
        """How many numbers of a head turn."""
        return int(self.head_size * self.rotary_fraction)

    def is_linear(self, layer: int):
        return self.linear_key_heads > 0 and not is_every(layer, self.full_every)

    @property
    def linear_channels(self) -> int:
        """What a linear layer's convolution runs over: all queries, keys and values of a token."""
        keys = self.linear_key_heads * self.linear_key_size
        return 2 * keys + self.linear_value_heads * self.linear_value_size

    def slides(self, layer: int):
        return self.sliding_window > 0 and not is_every(layer, self.full_every)

    @cached_property
    def windows(self) -> list[int]:
        """How many tokens a token sees in each layer that is not linear, itself included; 0: all before it."""
        return [
            self.sliding_window * self.slides(layer)
            for layer in range(self.n_layer)
            if not self.is_linear(layer)
        ]

    def rope(self, layer: int):
        """-> "" if the layer has no rotary positions, else "rotary", or "sliding" if its base is rope_sliding_theta."""
        if self.position != "rotary" or is_every(layer, self.nope_every) or self.is_linear(layer):
            return ""
        return "sliding" if self.slides(layer) and self.rope_sliding_theta else "rotary"


def is_every(layer: int, n: int):
    """Is it an n-th layer? With n = 4: layers 3, 7, 11 ... With 0 none is."""
    return n > 0 and (layer + 1) % n == 0
