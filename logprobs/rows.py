"""TODO"""

from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from logprobs.kernels import LOG2E, LOWEST, backward_kernel, forward_kernel, nothing_to_do, tile, uses_triton

SCRATCH = (
    2**19
)  # elements of the rows that plain torch works on at a time: 2 MiB of float32 stay in the cache from op to op


class Options(NamedTuple):
    temperature: float
    n_vocab: int  # ids from here on are padding: probability 0, gradient 0
    entropy: bool
    dtype: torch.dtype  # of the logits
    chunk_size: int = 0  # rows


# Plain torch: a few rows at a time, so that what one op leaves in the cache the next one finds there.


def slab_rows(width, buffers=1):
    return max(1, SCRATCH // (max(1, buffers) * width))


def slabs(M, width, buffers=1):
    rows = slab_rows(width, buffers)
    return [slice(i, min(i + rows, M)) for i in range(0, M, rows)]


def forward_torch(logits, targets, options, logprobs, lse, entropy, scratch, in_place, gradient):
    """in_place: the logits are used up, which saves a copy. scratch: as many buffers as are needed, which may be none."""
    for rows in slabs(*logits.shape, len(scratch)):
        x = logits[rows, : options.n_vocab]
        spare = [buffer[: x.numel()].view(x.shape) for buffer in scratch]
        z = x if in_place else spare[0].copy_(x)  # (m, n_vocab)
        if options.temperature != 1:
            z.mul_(1 / options.temperature)
        top = z.amax(-1, keepdim=True)
        chosen = z.sub_(top).gather(1, targets[rows, None])
        if entropy is not None:
            deviation = torch.clamp(z, min=LOWEST, out=spare[-1])
        total = z.exp_().sum(-1, keepdim=True)
        logprobs[rows] = (chosen - total.log())[:, 0]
        lse[rows] = (top + total.log())[:, 0]
        if entropy is not None:  # - sum p log p, where log p = deviation - log total
            entropy[rows] = total.log()[:, 0] - deviation.mul_(z).sum(-1) / total[:, 0]
        if gradient:
            z.mul_(-1 / (options.temperature * total))
            z.scatter_(1, targets[rows, None], z.gather(1, targets[rows, None]) + 1 / options.temperature)
            if not in_place:
                x.copy_(z)
    if gradient:
        logits[:, options.n_vocab :] = 0


def backward_torch(logits, targets, options, lse, entropy, coefficients, dentropy, dlogits, scratch):
    """coefficients, dentropy: divided by the temperature."""
    for rows in slabs(*logits.shape, len(scratch)):
        x, d, c = logits[rows, : options.n_vocab], dlogits[rows, : options.n_vocab], coefficients[rows, None]
        p = d if d.dtype == lse.dtype else scratch[0][: x.numel()].view(x.shape)  # (m, n_vocab)
        if p.data_ptr() != x.data_ptr():
            p.copy_(x)
        if options.temperature != 1:
            p.mul_(1 / options.temperature)
        p.sub_(lse[rows, None])
        share = c
        if dentropy is not None:  # dH / dz = -p (log p + H)
            share = torch.clamp(p, min=LOWEST, out=scratch[-1][: x.numel()].view(x.shape))
            share.add_(entropy[rows, None]).mul_(dentropy[rows, None]).add_(c)
        p.exp_().mul_(share).neg_().scatter_add_(1, targets[rows, None], c)
        if p is not d:
            d.copy_(p)
    dlogits[:, options.n_vocab :] = 0


def forward_rows(logits, targets, options, logprobs, lse, entropy, scratch, in_place=False, gradient=False):
    """Fills logprobs, lse and entropy, each (m,), from logits (m, V) and targets (m,). in_place: may plain torch use up the logits?

    gradient: the logits become (onehot(targets) - softmax(logits / temperature)) / temperature, d logprob / d logits.
    """
    if nothing_to_do(logits):
        return
    if not uses_triton(logits):
        return forward_torch(logits, targets, options, logprobs, lse, entropy, scratch, in_place, gradient)
    (M, width), (block, warps) = logits.shape, tile(logits.shape[1], logits.element_size(), gradient)
    scales = LOG2E.value / options.temperature, 1 / options.temperature
    flags = dict(
        BLOCK=block, PADDED=options.n_vocab < width, ENTROPY=entropy is not None, GRADIENT=gradient, num_warps=warps
    )
    with torch.cuda.device_of(logits):
        entropy = logprobs if entropy is None else entropy  # a pointer that is not written to
        forward_kernel[(M,)](
            logits, targets, logprobs, lse, entropy, *scales, width, options.n_vocab, logits.stride(0), **flags
        )


def backward_rows(logits, targets, options, lse, coefficients, dlogits, scratch, entropy=None, dentropy=None):
    """dlogits = (coefficients * (onehot(targets) - p) - dentropy * p * (log p + entropy)) / temperature, p = softmax(logits / temperature).

    coefficients, dentropy (m,): the upstream gradients of the log-probs and, where there is one, of the entropies. dlogits may be the logits.
    """
    if nothing_to_do(logits):
        return
    coefficients = coefficients / options.temperature
    dentropy = None if dentropy is None else dentropy / options.temperature
    if not uses_triton(logits):
        return backward_torch(logits, targets, options, lse, entropy, coefficients, dentropy, dlogits, scratch)
    (M, width), (block, warps) = logits.shape, tile(logits.shape[1])
    blocks = -(-width // block)
    arguments = LOG2E.value / options.temperature, width, options.n_vocab, logits.stride(0), dlogits.stride(0), blocks
    flags = dict(BLOCK=block, PADDED=options.n_vocab < width, ENTROPY=dentropy is not None, num_warps=warps)
    if dentropy is None:
        entropy = dentropy = lse  # pointers that are not read
    with torch.cuda.device_of(logits):
        backward_kernel[(M * blocks,)](
            logits, targets, lse, entropy, coefficients, dentropy, dlogits, *arguments, **flags
        )


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_rows(M, options, device):
    """-> logprobs, lse, and entropy or None, each (M,)."""
    new = partial(torch.empty, M, dtype=accumulator(options.dtype), device=device)
    return new(), new(), new() if options.entropy else None


def new_scratch(logits, copy, entropy=False):
    """-> the buffers that plain torch works in: for a copy of the logits, where it cannot work in them, and for entropy."""
    M, width = logits.shape
    buffers = 0 if uses_triton(logits) else copy + entropy
    size = min(M, slab_rows(width, buffers)) * width
    return torch.empty(buffers, size, dtype=accumulator(logits.dtype), device=logits.device)


def check(M, width, targets, temperature, n_vocab):
    """-> n_vocab. Bad input is answered here, before a kernel reads out of bounds."""
    n_vocab = n_vocab or width
    if targets.shape != (M,) or not temperature > 0 or not 0 < n_vocab <= width:
        raise ValueError(
            f"{M} rows of {width} columns with targets {tuple(targets.shape)}, temperature={temperature}, n_vocab={n_vocab}: "
            "one target a row, a temperature above 0 and at most as many ids as columns are needed"
        )
    return n_vocab


# Logits in.


def token_logprobs(logits, targets, temperature=1.0, entropy=False, n_vocab=None, inplace=False):
    """log softmax(logits / temperature)[target] of every row -> (M,) float32 [, entropy in nats (M,)].

    logits (M, V), copied only if a row is not contiguous; targets (M,) int64. Saved for backward: the logits, (M,) numbers.
    n_vocab: ids from there on are padding, with probability and gradient 0.
    inplace: backward writes the gradient over the logits, which nobody may need any more (autograd raises if one does).
    A target outside [0, n_vocab): RuntimeError in plain torch, -inf from the kernel, which cannot raise.
    Raises ValueError for shapes, a temperature or an n_vocab that cannot be.
    """
    M, V = logits.shape
    options = Options(temperature, check(M, V, targets, temperature, n_vocab), entropy, logits.dtype)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    logprobs, entropies = TokenLogprobs.apply(logits, targets.contiguous(), options, inplace)
    return (logprobs, entropies) if entropy else logprobs


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, options, inplace):
        logprobs, lse, entropy = new_rows(len(logits), options, logits.device)
        forward_rows(logits, targets, options, logprobs, lse, entropy, new_scratch(logits, True, options.entropy))
        ctx.options, ctx.inplace = options, inplace
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs backward nothing
        ctx.save_for_backward(logits, targets, lse, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, coefficients, dentropy):
        logits, targets, lse, entropy = ctx.saved_tensors
        coefficients = torch.zeros_like(lse) if coefficients is None else coefficients
        dlogits = logits if ctx.inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        if ctx.inplace:
            torch.autograd.graph.increment_version(
                logits
            )  # whoever else saved them gets an error, not a wrong gradient
        scratch = new_scratch(logits, logits.dtype != accumulator(logits.dtype), dentropy is not None)
        backward_rows(logits, targets, ctx.options, lse, coefficients, dlogits, scratch, entropy, dentropy)
        return dlogits, None, None, None
