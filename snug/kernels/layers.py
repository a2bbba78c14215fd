"""Layers that keep fewer bytes than PyTorch's: linear layers that add, RMS norm, the embedding; offloaded block
inputs.

Test: pytest tests/test_model.py tests/test_layer_kernels.py
"""

import torch
from torch import nn

from snug.device import cpu
from snug.device.host import new_on_host
from snug.device.kinds import kind_of, off_mps, wide
from snug.kernels.nf4 import NF4, NF4Linear, product, takes_product
from snug.kernels.norm import Norm
from snug.memory.ledger import component


class Linear(nn.Linear):
    """A linear layer that can add its product to a residual."""

    def forward(self, x, residual=None):
        """x (..., in), residual (..., out) or None -> (..., out). Without gradients it may overwrite the residual."""
        if isinstance(self.weight, NF4):
            if takes_product(x, self.weight):
                return product(x, self.weight, self.bias, residual)
            y = NF4Linear.apply(x, self.weight, self.bias)
        elif (
            residual is None
            or self.bias is not None
            or kind_of(x) != "cuda"
            or x.dtype != residual.dtype
        ):
            y = cpu.linear(x, self.weight, self.bias)
        else:  # on CUDA the product adds, and rounds once
            return add_product(residual, x, self.weight)
        return y if residual is None else residual + y


def add_product(y, x, weight, alpha=1.0):
    """-> y + alpha x W^T; without gradients in y. With them in a copy, as the norm keeps a residual."""
    addmm = torch.addmm if torch.is_grad_enabled() else torch.Tensor.addmm_
    return addmm(y.flatten(0, -2), x.flatten(0, -2), weight.t(), alpha=alpha).view_as(y)


@torch.no_grad()
def hold_in_nf4(model, device, empty=False):
    """Hold the weights of all `Linear` layers in NF4, on `device`. empty: without values, to load."""
    for layer in model.modules():
        if isinstance(layer, Linear) and not isinstance(layer.weight, NF4):
            weight = layer.weight
            del layer.weight  # the parameter
            layer.weight = NF4(weight.shape, device)
            if not empty:
                layer.weight.copy_(weight)


class RMSNorm(nn.RMSNorm):
    """zero_centered: x is multiplied by 1 + weight, which begins at 0."""

    def __init__(self, size, eps, zero_centered=False):
        super().__init__(size, eps)
        self.zero_centered = zero_centered
        if zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, x):
        return Norm.apply(x, self.weight, self.eps, self.zero_centered)


class Embed(torch.autograd.Function):
    """F.embedding whose backward adds to weight.grad itself, only the rows of its tokens: no second (V, C) buffer.

    Hooks on the weight's gradient do not fire for it. A token's gradients are summed in float32 and rounded once.
    """

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return torch.embedding(weight, tokens)

    @staticmethod
    @component("gradients")
    def backward(ctx, dx):
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        # Tokens 7 3 7: ids 3 7 7. On the host, for MPS has sorted 64-bit numbers wrongly on some versions of macOS.
        ids, order = (x.to(dx.device) for x in off_mps(tokens).flatten().sort())
        # The bin of each token: 0 1 1
        bins = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)])
        dx = dx.flatten(0, -2)[order].to(wide(dx.dtype))
        # There are as many bins as tokens; some may be empty. This operation adds in a fixed order.
        sums = torch.ops.aten.embedding_dense_backward(dx, bins, len(ids), -1, False)
        # Empty bins add zeros, each to another row of the weight.
        rows = torch.arange(len(ids), device=ids.device) % len(weight)
        rows.index_copy_(0, bins, ids)  # 3 7 2
        weight.grad.index_add_(0, rows, sums.to(weight.dtype))
        return None, None


def offloaded(x):
    """The context of a checkpointed block with input x, which waits in host memory until backward.

    Other saved tensors (rotary tables) stay on the device. On CUDA the copies run in order with compute, and the host
    does not wait for them, as it would in torch.autograd.graph.save_on_cpu.
    """
    storage = id(x.untyped_storage())  # `pack` lives until backward: it must not hold x

    @component("block inputs")
    def pack(tensor):
        if id(tensor.untyped_storage()) != storage:
            return tensor
        return new_on_host(tensor).copy_(tensor, non_blocking=True), tensor.device

    @component("block inputs")
    def unpack(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        host, device = kept
        return torch.empty_like(host, device=device).copy_(host, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
