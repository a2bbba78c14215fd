"""log pi(token): the fused log-softmax/gather, and the head that never holds all logits.

    token_logprobs  logits in, log-probs out. Keeps for backward the logits it was given and one number a row.
    head_logprobs   hidden states in, log-probs out, a chunk of rows at a time; backward makes each chunk's logits again.
    head_loss       hidden states in, loss out: while a chunk's logits exist they are turned into their own gradient.

M tokens, C width, V vocabulary. All three visit rows of logits twice: forward_rows (log-prob, log-sum-exp and, on request,
entropy in one read) and backward_rows (the gradient, which may overwrite the logits). Both are a Triton kernel on CUDA, plain
torch elsewhere and in float64; both write into buffers that their caller allocated, so a meter or a planner sees every
tensor there is, and on fake tensors they do nothing. Accumulation is in float32, of float64 in float64.

Left out: ignore_index (select the rows beforehand), label smoothing, a vocabulary split over devices.
Test: pytest tests/test_logprobs.py tests/test_kernels.py (TRITON_INTERPRET=1 runs the kernels on a CPU). Time: python bench/logprobs.py.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # plain torch does it all
    triton = None

MIB = 2**20
SCRATCH = 2**19  # elements of the rows that plain torch works on at a time: 2 MiB of float32 stay in the cache from op to op


class Options(NamedTuple):
    temperature: float
    n_vocab: int  # ids from here on are padding: probability 0, gradient 0
    entropy: bool
    dtype: torch.dtype  # of the logits
    chunk_size: int = 0  # rows


# ----------------------------------------------------------------------------------------------------------------------
# Triton. Exponents are base 2, as the hardware has them: scale = log2(e) / temperature.

if triton is not None:
    LOG2E = tl.constexpr(1.4426950408889634)
    LN2 = tl.constexpr(0.6931471805599453)
    LOW = tl.constexpr(-1e30)  # below every logit and, unlike -inf, it can be subtracted from itself

    @triton.jit
    def forward_kernel(
        logits, targets, logprobs, lse, entropy, scale, width, n_vocab, row_stride,
        BLOCK: tl.constexpr, PADDED: tl.constexpr, ENTROPY: tl.constexpr,
    ):  # fmt: skip
        """One program a row. Each lane keeps the maximum and the sum of its own columns, so the loop has no barrier; of the
        two exponentials of the online update (Milakov and Gimelshein 2018, algorithm 3) one is always 1 and not computed."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        columns = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), LOW, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)  # sum of 2^(z - top)
        moment = tl.zeros((BLOCK,), tl.float32)  # sum of z 2^(z - top)
        ahead = tl.load(logits + columns, mask=columns < width, other=-float("inf"))
        for start in range(0, width, BLOCK):
            x = ahead  # the next block is on its way while this one is worked on
            ahead = tl.load(logits + start + BLOCK + columns, mask=start + BLOCK + columns < width, other=-float("inf"))
            z = x.to(tl.float32) * scale
            if PADDED:
                z = tl.where(start + columns < n_vocab, z, -float("inf"))
            smaller = tl.exp2(-tl.abs(z - top))
            rises = z > top
            total = tl.where(rises, total * smaller + 1, total + smaller)
            if ENTROPY:
                finite = tl.maximum(z, LOW)  # -inf * 0 is not a number
                moment = tl.where(rises, moment * smaller + finite, moment + finite * smaller)
            top = tl.maximum(top, z)

        best = tl.max(top, 0)
        share = tl.exp2(top - best)
        sum_all = tl.sum(total * share, 0)
        log_sum = tl.log2(sum_all)
        target = tl.load(targets + row)
        known = (target >= 0) & (target < n_vocab)
        z = tl.load(logits + target, mask=known, other=-float("inf")).to(tl.float32) * scale
        tl.store(logprobs + row, (z - best - log_sum) * LN2)
        tl.store(lse + row, (best + log_sum) * LN2)
        if ENTROPY:
            tl.store(entropy + row, (best + log_sum - tl.sum(moment * share, 0) / sum_all) * LN2)

    @triton.jit
    def backward_kernel(
        logits, targets, lse, coefficients, dlogits, scale, width, n_vocab, row_stride, out_row_stride, blocks,
        BLOCK: tl.constexpr, PADDED: tl.constexpr,
    ):  # fmt: skip
        """One program a block of a row, in the order of memory, as a copy would. dlogits may be logits."""
        row = (tl.program_id(0) // blocks).to(tl.int64)
        columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        c = tl.load(coefficients + row)  # already divided by the temperature
        z = tl.load(logits + row * row_stride + columns, mask=columns < width, other=0.0).to(tl.float32) * scale
        p = tl.exp2(z - tl.load(lse + row) * LOG2E)
        d = tl.where(columns == tl.load(targets + row), c - c * p, -c * p)
        if PADDED:
            d = tl.where(columns < n_vocab, d, 0.0)
        tl.store(dlogits + row * out_row_stride + columns, d.to(dlogits.dtype.element_ty), mask=columns < width)


def tile(width):
    """-> columns and warps of a program for rows of `width` columns.

    16 elements a lane: two 16-byte loads of bfloat16, and two more on their way, are in flight per lane; times the 32 warps
    for which 64 registers leave room on an SM, that is twice the bytes which cover an H200's latency. Eight warps for
    one row suffice; more would only make the last wave longer. Rows that do not begin at 16-byte addresses are loaded element by
    element, whose addresses and masks take registers too: 8 of them, else sm_80 spills. A short row is one block.
    """
    elements = 16 if width % 16 == 0 else 8
    block = min(256 * elements, max(128, 1 << (width - 1).bit_length()))
    return block, max(1, block // (32 * elements))


# ----------------------------------------------------------------------------------------------------------------------
# Plain torch: a few rows at a time, so that what one op leaves in the cache the next one finds there.


def slabs(M, width):
    rows = max(1, SCRATCH // width)
    return [slice(i, min(i + rows, M)) for i in range(0, M, rows)]


def forward_torch(logits, targets, options, logprobs, lse, entropy, scratch, in_place):
    """in_place: the softmax replaces the logits, which saves a copy here and the exponential in backward."""
    for rows in slabs(*logits.shape):
        x = logits[rows, : options.n_vocab]
        spare = None if scratch is None else scratch[: x.numel()].view(x.shape)
        z = x if in_place else spare.copy_(x)  # (m, n_vocab)
        if options.temperature != 1:
            z.mul_(1 / options.temperature)
        top = z.amax(-1, keepdim=True)
        chosen = z.sub_(top).gather(1, targets[rows, None])
        total = z.exp_().sum(-1, keepdim=True)
        logprobs[rows] = (chosen - total.log())[:, 0]
        lse[rows] = (top + total.log())[:, 0]
        if in_place or entropy is not None:
            z.div_(total)
        if entropy is not None:
            entropy[rows] = torch.special.entr(z, out=spare).sum(-1)  # -p log p, and 0 where p is 0


def backward_torch(logits, targets, options, lse, coefficients, dlogits, scratch, is_softmax):
    """is_softmax: forward_torch has left the softmax where the logits were. coefficients: divided by the temperature."""
    for rows in slabs(*logits.shape):
        x, d, c = logits[rows, : options.n_vocab], dlogits[rows, : options.n_vocab], coefficients[rows, None]
        p = d if d.dtype == lse.dtype else scratch[: x.numel()].view(x.shape)  # (m, n_vocab)
        if p.data_ptr() != x.data_ptr():
            p.copy_(x)
        if not is_softmax:
            if options.temperature != 1:
                p.mul_(1 / options.temperature)
            p.sub_(lse[rows, None]).exp_()
        p.mul_(-c).scatter_add_(1, targets[rows, None], c)
        if p is not d:
            d.copy_(p)
    dlogits[:, options.n_vocab :] = 0


# ----------------------------------------------------------------------------------------------------------------------
# One or the other, on buffers that the caller allocated.


def uses_triton(tensor):
    return triton is not None and tensor.dtype != torch.float64 and (tensor.is_cuda or triton.knobs.runtime.interpret)


def nothing_to_do(tensor):
    return tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel()


def forward_rows(logits, targets, options, logprobs, lse, entropy, scratch, in_place=False):
    """Fills logprobs, lse and entropy, each (m,), from logits (m, V) and targets (m,). in_place: may plain torch use up the logits?"""
    if nothing_to_do(logits):
        return
    if not uses_triton(logits):
        return forward_torch(logits, targets, options, logprobs, lse, entropy, scratch, in_place)
    (M, width), (block, warps) = logits.shape, tile(logits.shape[1])
    arguments = LOG2E.value / options.temperature, width, options.n_vocab, logits.stride(0)
    flags = dict(BLOCK=block, PADDED=options.n_vocab < width, ENTROPY=entropy is not None, num_warps=warps)
    with torch.cuda.device_of(logits):
        forward_kernel[(M,)](logits, targets, logprobs, lse, logprobs if entropy is None else entropy, *arguments, **flags)


def backward_rows(logits, targets, options, lse, coefficients, dlogits, scratch, is_softmax=False):
    """dlogits = coefficients * (onehot(targets) - softmax(logits / temperature)) / temperature; dlogits may be the logits."""
    if nothing_to_do(logits):
        return
    coefficients = coefficients / options.temperature
    if not uses_triton(logits):
        return backward_torch(logits, targets, options, lse, coefficients, dlogits, scratch, is_softmax)
    (M, width), (block, warps) = logits.shape, tile(logits.shape[1])
    blocks = -(-width // block)
    arguments = LOG2E.value / options.temperature, width, options.n_vocab, logits.stride(0), dlogits.stride(0), blocks
    flags = dict(BLOCK=block, PADDED=options.n_vocab < width, num_warps=warps)
    with torch.cuda.device_of(logits):
        backward_kernel[(M * blocks,)](logits, targets, lse, coefficients, dlogits, *arguments, **flags)


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_rows(M, options, device):
    """-> logprobs, lse, and entropy or None, each (M,)."""
    new = partial(torch.empty, M, dtype=accumulator(options.dtype), device=device)
    return new(), new(), new() if options.entropy else None


def new_scratch(logits):
    """-> what plain torch works in where it cannot work in the logits."""
    M, width = logits.shape
    size = 0 if uses_triton(logits) else min(M, max(1, SCRATCH // width)) * width
    return torch.empty(size, dtype=accumulator(logits.dtype), device=logits.device)


def check(M, width, targets, temperature, n_vocab):
    """-> n_vocab. Bad input is answered here, before a kernel reads out of bounds."""
    n_vocab = n_vocab or width
    if targets.shape != (M,) or not temperature > 0 or not 0 < n_vocab <= width:
        raise ValueError(
            f"{M} rows of {width} columns with targets {tuple(targets.shape)}, temperature={temperature}, n_vocab={n_vocab}: "
            "one target a row, a temperature above 0 and at most as many ids as columns are needed"
        )
    return n_vocab


# ----------------------------------------------------------------------------------------------------------------------
# Logits in.


def token_logprobs(logits, targets, temperature=1.0, entropy=False, n_vocab=None, inplace=False):
    """log softmax(logits / temperature)[target] of every row -> (M,) float32 [, entropy in nats (M,), without gradient].

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
        forward_rows(logits, targets, options, logprobs, lse, entropy, new_scratch(logits))
        ctx.options, ctx.inplace = options, inplace
        ctx.save_for_backward(logits, targets, lse)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, coefficients, _):
        logits, targets, lse = ctx.saved_tensors
        dlogits = logits if ctx.inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)  # whoever else saved them gets an error, not a wrong gradient
        backward_rows(logits, targets, ctx.options, lse, coefficients, dlogits, new_scratch(logits))
        return dlogits, None, None, None


# ----------------------------------------------------------------------------------------------------------------------
# Hidden states in.


def rows_per_chunk(n_vocab, itemsize, budget_mb=16.0):
    """Rows of logits that budget_mb MiB hold, plain torch's scratch included; at least one.

    The trade: a chunk's three matrix products read the whole head and its gradient, so a chunk of few rows is bound by
    memory, not arithmetic. 16 MiB are what a laptop can spare; with V = 50,257 in float32 that is 73 rows, and
    64 MiB are faster. An H200 does 184 FLOP in the time of a byte, so it wants 1,000 rows and more: 1,024 MiB at V = 128,256.
    """
    budget = budget_mb * MIB
    return max(1, int(budget - min(4 * SCRATCH, budget / 4)) // (n_vocab * itemsize))


def head_options(hidden, weight, targets, temperature, chunk_size, entropy, n_vocab, chunk_mb):
    """Under autocast the products run in its dtype, which the body of an autograd function does not do by itself."""
    dtype, device = hidden.dtype, hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(device)
    elif hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; only autocast mixes them")
    n_vocab = check(len(hidden), len(weight), targets, temperature, n_vocab)
    return Options(temperature, n_vocab, entropy, dtype, chunk_size or rows_per_chunk(len(weight), dtype.itemsize, chunk_mb))


class Chunks:
    """logits = hidden @ weight.T, a chunk of rows at a time, in one buffer that all chunks share."""

    def __init__(self, hidden, weight, options):
        """hidden (M, C), weight (V, C): cast once where the products run in another dtype."""
        (M, _), V = hidden.shape, len(weight)
        self.options, self.hidden, self.weight = options, hidden, weight.to(options.dtype)
        size = -(-M // max(1, -(-M // options.chunk_size)))  # as many chunks as needed, all but equally long
        self.slices = [slice(i, min(i + size, M)) for i in range(0, M, max(1, size))]
        # Rows that begin at 16-byte addresses are what both the kernels' loads and the tensor cores want: the buffer is
        # a padded vocabulary.
        width = -(-V // 16) * 16 if hidden.is_cuda else V
        self.buffer = torch.empty(size, width, dtype=options.dtype, device=hidden.device)
        # Plain torch works in the logits themselves if it can.
        self.in_place = options.dtype == accumulator(options.dtype) and not uses_triton(self.buffer)
        self.scratch = None if self.in_place and not options.entropy else new_scratch(self.buffer)

    def __iter__(self):
        """-> rows (a slice), their hidden states (m, C), their logits (m, V or more)."""
        for rows in self.slices:
            hidden = self.hidden[rows].to(self.weight.dtype)
            logits = self.buffer[: len(hidden)]
            torch.mm(hidden, self.weight.t(), out=logits[:, : len(self.weight)])
            yield rows, hidden, logits

    def forward(self, rows, logits, targets, logprobs, lse, entropy):
        """A chunk's rows of the last three, each (M,)."""
        entropy = None if entropy is None else entropy[rows]
        forward_rows(logits, targets[rows], self.options, logprobs[rows], lse[rows], entropy, self.scratch, self.in_place)

    def accumulate(self, dlogits, hidden, rows, dhidden, dweight):
        """dhidden[rows] = dlogits @ weight; dweight (V, C) += dlogits.T @ hidden; either may be None."""
        dlogits = dlogits[:, : len(self.weight)]
        if dhidden is not None and dhidden.dtype == dlogits.dtype:
            torch.mm(dlogits, self.weight, out=dhidden[rows])
        elif dhidden is not None:
            dhidden[rows] = dlogits @ self.weight
        if dweight is None:
            return
        if dweight.dtype == dlogits.dtype:
            dweight.addmm_(dlogits.t(), hidden)
        elif dweight.is_cuda and dweight.dtype == torch.float32:
            torch.addmm(dweight, dlogits.t(), hidden, out_dtype=torch.float32, out=dweight)
        else:  # a product in another dtype is a temporary: slabs of the vocabulary keep it small
            for ids in slabs(*dweight.shape):
                dweight[ids] += dlogits[:, ids].t() @ hidden


def head_logprobs(hidden, weight, targets, temperature=1.0, chunk_size=None, entropy=False, n_vocab=None, chunk_mb=16.0):
    """token_logprobs(hidden @ weight.T, ...) without the (M, V) logits -> (M,) float32 [, entropy (M,), without gradient].

    hidden (M, C), weight (V, C), targets (M,) int64. chunk_size: rows at a time; None: as many as chunk_mb MiB hold.
    Backward makes each chunk's logits again (8 M C V FLOP in all), so it suits losses that need all log-probs before any
    gradient, such as sequence-level ratios, and, without gradient, a reference model. Saved: the inputs and (M,) numbers.
    Backward's extra bytes: a chunk, dhidden, dweight. Under autocast also the cast weight. Raises ValueError.
    """
    options = head_options(hidden, weight, targets, temperature, chunk_size, entropy, n_vocab, chunk_mb)
    logprobs, entropies = HeadLogprobs.apply(hidden, weight, targets.contiguous(), options)
    return (logprobs, entropies) if entropy else logprobs


class HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, options):
        logprobs, lse, entropy = new_rows(len(hidden), options, hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = Chunks(hidden, weight, options)
            for rows, _, logits in chunks:
                chunks.forward(rows, logits, targets, logprobs, lse, entropy)
        ctx.options = options
        ctx.save_for_backward(hidden, weight, targets, lse)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, coefficients, _):
        hidden, weight, targets, lse = ctx.saved_tensors
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = Chunks(hidden, weight, ctx.options._replace(entropy=False))
            for rows, hidden_rows, logits in chunks:
                backward_rows(logits, targets[rows], ctx.options, lse[rows], coefficients[rows], logits, chunks.scratch)
                chunks.accumulate(logits, hidden_rows, rows, dhidden, dweight)
        return dhidden, dweight, None, None


def head_loss(hidden, weight, targets, token_loss, temperature=1.0, chunk_size=None, entropy=False, n_vocab=None, chunk_mb=16.0):
    """Loss and gradient in one visit -> (loss, logprobs (M,) [, entropy (M,)]), of which only the scalar loss is differentiable.

    As token_loss(head_logprobs(...)) for a loss that is a sum over tokens, at 6 M C V FLOP instead of 8. For each chunk
    token_loss(logprobs (m,), rows) -> scalar is called with gradients on; rows is the slice of the M that the chunk is.
    Its derivative is each token's coefficient, and with it the chunk's logits become their own gradient on the spot.

    dweight, if weight is a leaf (a parameter): added to weight.grad during the visit, before backward, in the dtype of
    .grad; other paths to the same weight (a tied embedding) add to it in backward as always. Hence, while gradients are on:
      - call loss.backward() exactly once, with gradient 1 (a RuntimeError otherwise): put scales into token_loss;
      - without a backward, or after a failed visit, .grad is dirty: zero it. torch.autograd.grad does not see dweight;
      - do not call it inside activation checkpointing, which would visit twice;
      - hooks on the gradient of a weight that has no other path do not fire.
    Any other weight, such as weight.view_as(weight), gets dweight through autograd, for one more (V, C) buffer; so does
    everything under a wrapper that counts on hooks. A frozen weight costs nothing.

    Extra bytes: a chunk, dhidden, (M,) numbers; on a CPU 2 MiB of scratch for entropy or a dtype below float32. Under autocast
    also the cast weight, a chunk's (m, C) and, on a CPU, 1 MiB. M = 0: zeros, token_loss is not called.
    """
    options = head_options(hidden, weight, targets, temperature, chunk_size, entropy, n_vocab, chunk_mb)
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    results = HeadLoss.apply(hidden, weight, targets.contiguous(), token_loss, options, with_gradient)
    return results if entropy else results[:2]


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, token_loss, options, with_gradient):
        logprobs, lse, entropy = new_rows(len(hidden), options, hidden.device)
        loss = torch.zeros((), dtype=logprobs.dtype, device=hidden.device)
        dhidden = torch.empty_like(hidden) if with_gradient and hidden.requires_grad else None
        dweight, ctx.into_grad = gradient_of(weight) if with_gradient and weight.requires_grad else (None, False)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = Chunks(hidden, weight, options)
            for rows, hidden_rows, logits in chunks:
                chunks.forward(rows, logits, targets, logprobs, lse, entropy)
                chunk_loss, coefficients = differentiate(token_loss, logprobs[rows], rows, with_gradient)
                loss += chunk_loss
                if with_gradient:
                    backward_rows(logits, targets[rows], options, lse[rows], coefficients, logits, chunks.scratch, chunks.in_place)
                    chunks.accumulate(logits, hidden_rows, rows, dhidden, dweight)
        ctx.save_for_backward(dhidden, None if ctx.into_grad else dweight)
        ctx.mark_non_differentiable(*(rows for rows in (logprobs, entropy) if rows is not None))
        return loss, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, *_):
        dhidden, dweight = ctx.saved_tensors
        scale = 1 if nothing_to_do(dloss) else dloss.item()
        if scale != 1 and ctx.into_grad:
            raise RuntimeError(
                f"head_loss has put its gradient into weight.grad already, so it cannot be multiplied by {scale:g} now: "
                "scale inside token_loss, or pass weight.view_as(weight)"
            )
        if scale != 1:
            dhidden, dweight = (None if d is None else d * scale for d in (dhidden, dweight))
        elif ctx.into_grad and dhidden is not None:
            torch.autograd.graph.increment_version(dhidden)  # a second backward, which would lack dweight, is refused
        return dhidden, dweight, None, None, None, None


def gradient_of(weight):
    """-> where dweight is to be added up, and whether that is weight.grad."""
    if not weight.is_leaf:
        return torch.zeros_like(weight), False
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad, True


def differentiate(token_loss, logprobs, rows, with_gradient):
    """-> token_loss(logprobs, rows), its derivative (m,) by the log-probs or None."""
    if not with_gradient:
        return token_loss(logprobs, rows), None
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        loss = token_loss(leaf, rows)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]
