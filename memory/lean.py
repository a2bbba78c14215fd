"""TODO"""

import torch
import torch.nn.functional as F


class LeanRMSNorm(torch.autograd.Function):
    """y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps), in float32; saved: x and rstd (..., 1)."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        unit, dy = x.float() * rstd, dy.float()
        dweight = (dy * unit).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        dy = dy * weight
        dx = (dy - unit * (dy * unit).mean(-1, keepdim=True)).mul_(rstd)
        return dx.to(x.dtype), None if dweight is None else dweight.to(weight.dtype), None


class Embed(torch.autograd.Function):
    """F.embedding whose backward adds to weight.grad itself: only the rows of tokens that are there, no second (V, C).

    Hooks on the weight's gradient do not fire for it. Each token's share is summed in float32 first and rounded once.
    """

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, dx):
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        ids, order = tokens.flatten().sort()  # tokens 7 3 7: ids 3 7 7
        bins = torch.cat(
            [ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)]
        )  # 0 1 1: as many as there are tokens will do
        wide = dx.flatten(0, -2)[order].to(torch.promote_types(dx.dtype, torch.float32))
        sums = torch.ops.aten.embedding_dense_backward(
            wide, bins, len(ids), -1, False
        )  # its order of sums does not vary
        rows = torch.arange(len(ids), device=ids.device) % len(
            weight
        )  # what is left over adds zeros, each to another row
        rows.index_copy_(0, bins, ids)  # 3 7 2
        weight.grad.index_add_(0, rows, sums.to(weight.dtype))
        return None, None
