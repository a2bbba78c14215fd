"""Rows of logits to log-probs and back: the fused log-softmax and gather, by a Triton kernel or in plain torch.

    forward_rows    logits -> log-prob, log-sum-exp and, on request, entropy, in one read; on request the gradient
                    d logprob / d logits overwrites the logits
    backward_rows   the gradient if the upstream one comes later, and that of the entropy
    token_logprobs  both, as a differentiable function of logits

The kernels run on CUDA, plain torch elsewhere and in float64. All write into buffers that their caller allocated, so
that a meter or the planner sees every tensor; on fake tensors they do nothing. Sums are float32, for float64 logits
float64.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from kernels import LOG2_OF_E, LOWEST, nothing_to_do, uses_triton
from logprobs.kernels import backward_kernel, forward_kernel, tile

SCRATCH = (
    2**19
)  # elements that plain torch works on at a time: 2 MiB of float32 stay in the cache from op to op


class Options(NamedTuple):
    temperature: float
    n_vocab: int  # ids from here on are padding: probability 0, gradient 0
    entropy: bool
    dtype: torch.dtype  # of the logits
    chunk_size: int = 0  # rows


def slab_rows(width: int, buffers: int = 1) -> int:
    """Rows that plain torch works on at a time, so that each op finds in the cache what the one before left there."""
    return max(1, SCRATCH // (max(1, buffers) * width))


def slabs(M: int, width: int, buffers: int = 1) -> list[slice]:
    rows = slab_rows(width, buffers)
    return [slice(i, min(i + rows, M)) for i in range(0, M, rows)]


def forward_torch(logits, targets, options, logprobs, lse, entropy, scratch, in_place, gradient):
    """in_place: overwrite the logits, which saves a copy. scratch: see new_scratch."""
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
            z.scatter_(
                1, targets[rows, None], z.gather(1, targets[rows, None]) + 1 / options.temperature
            )
            if not in_place:
                x.copy_(z)
    if gradient:
        logits[:, options.n_vocab :] = 0


def backward_torch(logits, targets, options, lse, entropy, coefficients, dentropy, dlogits, scratch):
    """coefficients and dentropy are already divided by the temperature."""
    for rows in slabs(*logits.shape, len(scratch)):
        x, d, c = (
            logits[rows, : options.n_vocab],
            dlogits[rows, : options.n_vocab],
            coefficients[rows, None],
        )
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


def forward_rows(
    logits, targets, options, logprobs, lse, entropy, scratch, in_place=False, gradient=False
):
    """Fill logprobs, lse and entropy or None, each (m,), from logits (m, V) and targets (m,).

    in_place: plain torch may overwrite the logits. gradient: the logits become d logprob / d logits, which is
    (onehot(targets) - softmax(logits / temperature)) / temperature.
    """
    if nothing_to_do(logits):
        return
    if not uses_triton(logits):
        return forward_torch(
            logits, targets, options, logprobs, lse, entropy, scratch, in_place, gradient
        )
    (M, width), (block, warps) = logits.shape, tile(logits.shape[1], logits.element_size(), gradient)
    scales = LOG2_OF_E / options.temperature, 1 / options.temperature
    pointers = (
        logits,
        targets,
        logprobs,
        lse,
        logprobs if entropy is None else entropy,
    )  # None: not written to
    flags = dict(PADDED=options.n_vocab < width, ENTROPY=entropy is not None, GRADIENT=gradient)
    with torch.cuda.device_of(logits):
        forward_kernel[(M,)](
            *pointers,
            *scales,
            width,
            options.n_vocab,
            logits.stride(0),
            BLOCK=block,
            num_warps=warps,
            **flags,
        )


def backward_rows(
    logits, targets, options, lse, coefficients, dlogits, scratch, entropy=None, dentropy=None
):
    """dlogits = (coefficients * (onehot(targets) - p) - dentropy * p * (log p + entropy)) / temperature.

    p = softmax(logits / temperature). coefficients, dentropy (m,): the upstream gradients of the log-probs and, if not
    None, of the entropies. dlogits may be the logits.
    """
    if nothing_to_do(logits):
        return
    coefficients = coefficients / options.temperature
    dentropy = None if dentropy is None else dentropy / options.temperature
    if not uses_triton(logits):
        return backward_torch(
            logits, targets, options, lse, entropy, coefficients, dentropy, dlogits, scratch
        )
    (M, width), (block, warps) = logits.shape, tile(logits.shape[1])
    blocks = -(-width // block)
    arguments = (
        LOG2_OF_E / options.temperature,
        width,
        options.n_vocab,
        logits.stride(0),
        dlogits.stride(0),
        blocks,
    )
    flags = dict(
        BLOCK=block, PADDED=options.n_vocab < width, ENTROPY=dentropy is not None, num_warps=warps
    )
    if dentropy is None:
        entropy = dentropy = lse  # pointers that are not read
    pointers = logits, targets, lse, entropy, coefficients, dentropy, dlogits
    with torch.cuda.device_of(logits):
        backward_kernel[(M * blocks,)](*pointers, *arguments, **flags)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of sums, log-probs and entropies."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_rows(M: int, options: Options, device):
    """-> empty logprobs, lse, and entropy or None, each (M,)."""
    logprobs, lse = (torch.empty(M, dtype=accumulator(options.dtype), device=device) for _ in range(2))
    return logprobs, lse, torch.empty_like(lse) if options.entropy else None


def new_scratch(logits, copy: bool, entropy: bool = False) -> torch.Tensor:
    """-> (buffers, size): plain torch's work space. copy: a buffer for a copy of the logits. entropy: one for that."""
    M, width = logits.shape
    buffers = 0 if uses_triton(logits) else copy + entropy
    size = min(M, slab_rows(width, buffers)) * width
    return torch.empty(buffers, size, dtype=accumulator(logits.dtype), device=logits.device)


def check(M: int, width: int, targets, temperature: float, n_vocab: int | None) -> int:
    """-> n_vocab. Raises ValueError before a kernel would read out of bounds."""
    n_vocab = n_vocab or width
    if targets.shape != (M,) or not temperature > 0 or not 0 < n_vocab <= width:
        raise ValueError(
            f"{M} rows of {width} columns with targets {tuple(targets.shape)}, temperature={temperature}, "
            f"n_vocab={n_vocab}: needed are one target a row, a temperature above 0, and n_vocab in 1 to {width}"
        )
    return n_vocab


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    n_vocab: int | None = None,
    inplace: bool = False,
):
    """log softmax(logits / temperature)[target] of every row -> (M,) float32 [, entropy in nats (M,)].

    logits (M, V), copied only if a row is not contiguous; targets (M,) int64. Saved for backward: the logits, (M,)
    numbers. n_vocab: ids from n_vocab on are padding, with probability and gradient 0. inplace: backward overwrites the
    logits with their gradient; autograd raises if another op needs them. A target outside [0, n_vocab): RuntimeError in
    plain torch, -inf from the kernel, which cannot raise. Raises ValueError for shapes that do not fit, a temperature
    not above 0, or an n_vocab above V.
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
        forward_rows(
            logits, targets, options, logprobs, lse, entropy, new_scratch(logits, True, options.entropy)
        )
        ctx.options, ctx.inplace = options, inplace
        ctx.set_materialize_grads(
            False
        )  # without a gradient of the entropy, backward gets None and skips it
        ctx.save_for_backward(logits, targets, lse, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, coefficients, dentropy):
        logits, targets, lse, entropy = ctx.saved_tensors
        coefficients = torch.zeros_like(lse) if coefficients is None else coefficients
        dlogits = (
            logits if ctx.inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        )
        if ctx.inplace:
            torch.autograd.graph.increment_version(
                logits
            )  # another op that saved them raises in its backward
        scratch = new_scratch(logits, logits.dtype != accumulator(logits.dtype), dentropy is not None)
        backward_rows(
            logits, targets, ctx.options, lse, coefficients, dlogits, scratch, entropy, dentropy
        )
        return dlogits, None, None, None
