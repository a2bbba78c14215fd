"""LoRA (Hu et al. 2021): frozen weights, and beside some of them two thin matrices that train.

    y = x W^T + b + (alpha / rank) * (x A^T) B^T        W (out, in) frozen, A (rank, in), B (out, rank); B begins at 0

    add(model, rank=16, alpha=32, targets=["qkv", "proj", "up", "down"])
    with adapters_off(model):       # the model before `add`, bit for bit: the reference needs no second copy
        ...
    merge(model)                    # W += (alpha / rank) * B A, and the adapters are gone

W may be in 4 bits (QLoRA, snug/kernels/nf4.py). Adapters are float32 beside weights of any type: they are small, and
bfloat16 would round their updates away. Left out: dropout, other initialisations, adapters of embeddings and norms.
snug/pretrained/adapters.py reads and writes PEFT's files. Test: pytest tests/test_lora.py
"""

import math
from contextlib import contextmanager

import torch
from torch import nn

from snug.device.cpu import linear
from snug.kernels.layers import Linear, add_product
from snug.kernels.nf4 import NF4, product, takes_product

# a block's matrices, and the half they are in
TARGETS = {"qkv": "attention", "proj": "attention", "up": "mlp", "down": "mlp"}


class LoRALinear(nn.Module):
    """An nn.Linear with an adapter: weight and bias under their names, lora_A (rank, in), lora_B (out, rank)."""

    def __init__(self, linear, rank: int, alpha: float):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.enabled, self.scale = True, alpha / rank
        self.cast = None  # (A, B) in the type of products, while the model samples
        rows, columns = linear.weight.shape
        options = dict(dtype=torch.float32, device=linear.weight.device)
        self.lora_A = nn.Parameter(torch.empty(rank, columns, **options))
        self.lora_B = nn.Parameter(torch.zeros(rows, rank, **options))
        # Uniform within 1 / sqrt(in), as nn.Linear draws its weight.
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x, residual=None):
        if not self.enabled:
            return Linear.forward(self, x, residual)
        A, B = self.cast or (self.lora_A.to(x.dtype), self.lora_B)
        h = linear(x, A)  # (..., rank)
        if takes_product(x, self.weight):
            return product(x, self.weight, self.bias, residual, h, B, self.scale)
        if residual is not None and residual.dtype != x.dtype:
            return residual + self.forward(x)  # autocast would round the sum
        return add_product(Linear.forward(self, x, residual), h, B.to(h.dtype), self.scale)


def add(model: nn.Module, rank: int, alpha: float, targets: list[str]):
    """Freeze the model and add adapters to these matrices of each block -> the model. A is drawn at random."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in targets:
            half = getattr(block, TARGETS[name])
            setattr(half, name, LoRALinear(getattr(half, name), rank, alpha))
    return model


def adapted(model):
    """-> the modules with adapters."""
    return [layer for layer in model.modules() if hasattr(layer, "lora_A")]


def trained(model) -> dict[str, nn.Parameter]:
    """{name: parameter} of those that train, which a checkpoint has: with LoRA the adapters, else all.

    If the model is sharded, these are the rows that this process has.
    """
    if hasattr(model, "shards"):
        return model.shards
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def adapters_off(model: nn.Module):
    """Within this context the model is the one before `add`. Without adapters it changes nothing."""
    for module in adapted(model):
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted(model):
            module.enabled = True


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Add the adapters' products to the weights, in float32 and rounded once, and remove them. All weights train.

    A matrix in NF4 becomes a parameter of the other weights' type.
    """
    for layer in model.modules():
        if isinstance(getattr(layer, "weight", None), NF4):
            layer.weight = nn.Parameter(layer.weight.dequantized(torch.float32))
        if hasattr(layer, "lora_A"):
            change = layer.lora_B @ layer.lora_A
            layer.weight.copy_(layer.weight.float().add_(change, alpha=layer.scale))
            del layer.lora_A, layer.lora_B
            layer.enabled = False
        if isinstance(layer, Linear | LoRALinear):
            layer.weight.data = layer.weight.to(model.embedding.weight.dtype)
    return model.requires_grad_(True)


@contextmanager
def cached_casts(model):
    """Keep bfloat16 copies from step to step: of adapters, and autocast's of frozen weights. Autocast does so only for
    weights that require a gradient, so here they do."""
    for layer in adapted(model):
        A, B = layer.lora_A.to(model.compute_dtype), layer.lora_B
        # The product of a matrix in NF4 casts B itself.
        layer.cast = A, B if isinstance(layer.weight, NF4) else B.to(A.dtype)
    casts = torch.is_autocast_enabled(model.device.type)
    frozen = [p for p in model.parameters() if casts and not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for layer in adapted(model):
            layer.cast = None
