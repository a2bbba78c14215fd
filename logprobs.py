"""log pi(token): the fused log-softmax/gather, and the head that never holds all logits.

    token_logprobs  logits in, log-probs out. Keeps for backward the logits it was given and one number a row.
    head_logprobs   hidden states in, log-probs out, a chunk of rows at a time; backward makes each chunk's logits again.
    head_loss       hidden states in, loss out: while a chunk's logits exist they are turned into their own gradient.

M tokens, C width, V vocabulary. Two functions touch rows of logits. forward_rows: log-prob, log-sum-exp and, on request,
entropy in one read; on request also d logprob / d logits, left where the logits were. backward_rows: the gradient, where the
upstream one came later, and of the entropy. Both are a Triton kernel on CUDA, plain torch elsewhere and in float64; both write into buffers that
their caller allocated, so a meter or a planner sees every tensor there is, and on fake tensors they do nothing.
Accumulation is in float32, of float64 in float64.

Left out: ignore_index (select the rows beforehand), label smoothing, a vocabulary split over devices.
Test: pytest tests/test_logprobs.py tests/test_kernels.py (TRITON_INTERPRET=1 runs the kernels on a CPU). Time: python bench/logprobs.py.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from memory import MIB, kind_of

try:
    import triton
    import triton.language as tl
except ImportError:  # plain torch does it all
    triton = None

SCRATCH = 2**19  # elements of the rows that plain torch works on at a time: 2 MiB of float32 stay in the cache from op to op
LOWEST = -1e30  # below every logit and, unlike -inf, it can be subtracted from itself and multiplied by 0


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
    LOW = tl.constexpr(LOWEST)

    @triton.jit
    def forward_kernel(
        logits, targets, logprobs, lse, entropy, scale, slope, width, n_vocab, row_stride,
        BLOCK: tl.constexpr, PADDED: tl.constexpr, ENTROPY: tl.constexpr, GRADIENT: tl.constexpr,
    ):  # fmt: skip
        """One program a row. Each lane keeps the maximum and the sum of its own columns, so the loop has no barrier; of the
        two exponentials of the online update (Milakov and Gimelshein 2018, algorithm 3) one is always 1 and not computed.

        GRADIENT: slope * (onehot - softmax) replaces the logits, which come from the L2 cache the second time (`tile`)."""
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

        target = tl.load(targets + row)
        known = (target >= 0) & (target < n_vocab)
        chosen = tl.load(logits + target, mask=known, other=-float("inf")).to(tl.float32) * scale
        best = tl.max(top, 0)
        share = tl.exp2(top - best)
        sum_all = tl.sum(total * share, 0)
        log_sum = tl.log2(sum_all)
        tl.store(logprobs + row, (chosen - best - log_sum) * LN2)
        tl.store(lse + row, (best + log_sum) * LN2)
        if ENTROPY:
            tl.store(entropy + row, (best + log_sum - tl.sum(moment * share, 0) / sum_all) * LN2)
        if GRADIENT:
            tl.debug_barrier()  # `chosen` is read before any lane overwrites it
            for start in range(0, width, BLOCK):
                here = start + columns
                x = tl.load(logits + here, mask=here < width, other=-float("inf"), eviction_policy="evict_first")
                p = tl.exp2(x.to(tl.float32) * scale - best - log_sum)
                d = tl.where(here == target, slope - slope * p, -slope * p)
                if PADDED:
                    d = tl.where(here < n_vocab, d, 0.0)
                tl.store(logits + here, d.to(logits.dtype.element_ty), mask=here < width)

    @triton.jit
    def backward_kernel(
        logits, targets, lse, entropy, coefficients, dentropy, dlogits, scale, width, n_vocab, row_stride, out_row_stride, blocks,
        BLOCK: tl.constexpr, PADDED: tl.constexpr, ENTROPY: tl.constexpr,
    ):  # fmt: skip
        """One program a block of a row, in the order of memory, as a copy would. dlogits may be logits."""
        row = (tl.program_id(0) // blocks).to(tl.int64)
        columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        c = tl.load(coefficients + row)  # already divided by the temperature, as dentropy is
        z = tl.load(logits + row * row_stride + columns, mask=columns < width, other=0.0).to(tl.float32) * scale
        z -= tl.load(lse + row) * LOG2E
        p = tl.exp2(z)
        share = c
        if ENTROPY:  # dH / dz = -p (log p + H)
            share += tl.load(dentropy + row) * (tl.maximum(z, LOW) * LN2 + tl.load(entropy + row))
        d = tl.where(columns == tl.load(targets + row), c - share * p, -share * p)
        if PADDED:
            d = tl.where(columns < n_vocab, d, 0.0)
        tl.store(dlogits + row * out_row_stride + columns, d.to(dlogits.dtype.element_ty), mask=columns < width)


def tile(width, itemsize=2, gradient=False):
    """-> columns and warps of a program for rows of `width` columns.

    16 elements a lane: two 16-byte loads of bfloat16, and two more on their way, are in flight per lane; times the 32 warps
    for which 64 registers leave room on an SM, that is twice the bytes which cover an H200's latency. Eight warps for
    one row suffice; more would only make the last wave longer. Rows that do not begin at 16-byte addresses are loaded element by
    element, whose addresses and masks take registers too: 8 of them, else sm_80 spills. A short row is one block.

    gradient: the second read of a row finds it in the L2 cache if all rows in flight fit there together. 40 MB over 132 SMs
    are 300 KB an SM (H200; A100: 40 MB over 108). Of programs with 33 to 64 registers an SM holds 32 warps: long rows take 16
    or all 32 of them, so that 2 rows or 1 are in flight (sm_90's leanest variant, without entropy and padding, needs
    only 32 registers, and twice as many are). More than 8 elements a lane would spill.
    """
    elements = 16 if width % 16 == 0 and not gradient else 8
    warps = 8
    while gradient and warps < 32 and width * itemsize * (32 // warps) > 300_000:
        warps *= 2
    block = min(32 * warps * elements, max(128, 1 << (width - 1).bit_length()))
    return block, max(1, block // (32 * elements))


# ----------------------------------------------------------------------------------------------------------------------
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


# ----------------------------------------------------------------------------------------------------------------------
# One or the other, on buffers that the caller allocated.


def uses_triton(tensor):
    if triton is None or tensor.dtype == torch.float64:
        return False
    return kind_of(tensor) == "cuda" or triton.knobs.runtime.interpret


def nothing_to_do(tensor):
    return tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel()


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
    flags = dict(BLOCK=block, PADDED=options.n_vocab < width, ENTROPY=entropy is not None, GRADIENT=gradient, num_warps=warps)
    with torch.cuda.device_of(logits):
        entropy = logprobs if entropy is None else entropy  # a pointer that is not written to
        forward_kernel[(M,)](logits, targets, logprobs, lse, entropy, *scales, width, options.n_vocab, logits.stride(0), **flags)


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
        backward_kernel[(M * blocks,)](logits, targets, lse, entropy, coefficients, dentropy, dlogits, *arguments, **flags)


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


# ----------------------------------------------------------------------------------------------------------------------
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
            torch.autograd.graph.increment_version(logits)  # whoever else saved them gets an error, not a wrong gradient
        scratch = new_scratch(logits, logits.dtype != accumulator(logits.dtype), dentropy is not None)
        backward_rows(logits, targets, ctx.options, lse, coefficients, dlogits, scratch, entropy, dentropy)
        return dlogits, None, None, None


# ----------------------------------------------------------------------------------------------------------------------
# Hidden states in.


def logits_budget(chunk_mb, device_type):
    """chunk_mb, or where it is 0 the default of the device -> MiB that logits and what is made of them may take."""
    return chunk_mb or (256 if device_type == "cuda" else 16)


def rows_per_chunk(n_vocab, itemsize, chunk_mb=0, device_type="cpu"):
    """Rows of logits that chunk_mb MiB hold, plain torch's scratch included; at least one.

    The trade: a chunk's products read the whole head and add to its whole gradient, so a chunk of few rows is bound by memory,
    not arithmetic. 0: 16 MiB on a CPU, what a laptop can spare: 73 rows at V = 50,257 in float32; 64 MiB are a tenth faster.
    256 MiB on CUDA: 876 rows at V = 151,936 in bfloat16. An H200 does 165 FLOP in the time of a byte; the products of
    hidden states take 165 rows to be bound by arithmetic, the one that adds to dweight 330. 1,024 MiB leave nothing to gain.
    """
    budget = logits_budget(chunk_mb, device_type) * MIB
    return max(1, int(budget - min(4 * SCRATCH, budget / 4)) // (n_vocab * itemsize))


def head_options(hidden, weight, targets, temperature, chunk_size, entropy, n_vocab, chunk_mb):
    """Under autocast the products run in its dtype, which the body of an autograd function does not do by itself."""
    dtype, device = hidden.dtype, hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(device)
    elif hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; only autocast mixes them")
    n_vocab = check(len(hidden), len(weight), targets, temperature, n_vocab)
    return Options(
        temperature, n_vocab, entropy, dtype, chunk_size or rows_per_chunk(len(weight), dtype.itemsize, chunk_mb, kind_of(hidden))
    )


class Chunks:
    """logits = hidden @ weight.T, a chunk of rows at a time, in one buffer that all chunks share."""

    def __init__(self, hidden, weight, options, keep=False):
        """hidden (M, C), weight (V, C): cast once where the products run in another dtype. keep: `forward` leaves the logits as they are."""
        (M, _), V = hidden.shape, len(weight)
        self.options, self.hidden, self.weight = options, hidden, weight.to(options.dtype)
        size = -(-M // max(1, -(-M // options.chunk_size)))  # as many chunks as needed, all but equally long
        self.slices = [slice(i, min(i + size, M)) for i in range(0, M, max(1, size))]
        # Rows that begin at 16-byte addresses are what both the kernels' loads and the tensor cores want: the buffer is
        # a padded vocabulary.
        width = -(-V // 16) * 16 if kind_of(hidden) == "cuda" else V
        self.buffer = torch.empty(size, width, dtype=options.dtype, device=hidden.device)
        # Plain torch works in the logits themselves if it can.
        self.in_place = not keep and options.dtype == accumulator(options.dtype) and not uses_triton(self.buffer)
        self.scratch = new_scratch(self.buffer, not self.in_place, options.entropy)

    def __iter__(self):
        """-> rows (a slice), their hidden states (m, C), their logits (m, V or more)."""
        for rows in self.slices:
            hidden = self.hidden[rows].to(self.weight.dtype)
            logits = self.buffer[: len(hidden)]
            torch.mm(hidden, self.weight.t(), out=logits[:, : len(self.weight)])
            yield rows, hidden, logits

    def forward(self, rows, logits, targets, logprobs, lse, entropy, gradient=False):
        """A chunk's rows of the last three, each (M,); gradient: see forward_rows."""
        entropy = None if entropy is None else entropy[rows]
        forward_rows(logits, targets[rows], self.options, logprobs[rows], lse[rows], entropy, self.scratch, self.in_place, gradient)

    def backward(self, rows, logits, targets, lse, coefficients, entropy, dentropy):
        """The logits that `forward` left become their gradient, coefficients included."""
        given = targets[rows], self.options, lse[rows], coefficients[rows]
        backward_rows(logits, *given, logits, self.scratch, entropy[rows], dentropy[rows])

    def accumulate(self, gradient, hidden, rows, coefficients, dhidden, dweight):
        """dhidden[rows] = c * gradient @ weight; dweight (V, C) += gradient.T @ (c * hidden); either may be None.

        gradient (m, V) of the log-probs, which `forward` left; c = coefficients (m,): C columns are scaled instead of V.
        """
        gradient, c = gradient[:, : len(self.weight)], coefficients[:, None]
        if dweight is not None:
            if hidden.dtype != self.hidden.dtype:
                scaled = hidden  # this chunk's own copy
            else:  # dhidden's rows are free until their product is made
                scaled = torch.empty_like(hidden) if dhidden is None else dhidden[rows]
            self.add_product(dweight, gradient, torch.mul(hidden, c, out=scaled))
        if dhidden is not None and dhidden.dtype == gradient.dtype:
            torch.mm(gradient, self.weight, out=dhidden[rows]).mul_(c)
        elif dhidden is not None:
            torch.mul(gradient @ self.weight, c, out=dhidden[rows])

    @staticmethod
    def add_product(dweight, gradient, hidden):
        """dweight += gradient.T @ hidden, in the dtype of dweight."""
        if dweight.dtype == gradient.dtype:
            dweight.addmm_(gradient.t(), hidden)
        elif kind_of(dweight) == "cuda" and nothing_to_do(dweight):
            pass  # the next line, which a CPU cannot do, makes no tensor
        elif dweight.is_cuda and dweight.dtype == torch.float32:
            torch.addmm(dweight, gradient.t(), hidden, out_dtype=torch.float32, out=dweight)
        else:  # a product in another dtype is a temporary: slabs of the vocabulary keep it small
            for ids in slabs(*dweight.shape):
                dweight[ids] += gradient[:, ids].t() @ hidden


def head_logprobs(hidden, weight, targets, temperature=1.0, chunk_size=None, entropy=False, n_vocab=None, chunk_mb=0):
    """token_logprobs(hidden @ weight.T, ...) without the (M, V) logits -> (M,) float32 [, entropy (M,)].

    hidden (M, C), weight (V, C), targets (M,) int64. chunk_size: rows at a time; None: see rows_per_chunk.
    Backward makes each chunk's logits again (8 M C V FLOP in all), so it suits losses that need all log-probs before any
    gradient (sequence-level ratios) or a gradient of the entropy, and, without gradient, a reference model. Saved: the inputs.
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
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, coefficients, dentropy):
        hidden, weight, targets = ctx.saved_tensors
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        options = ctx.options._replace(entropy=dentropy is not None)
        logprobs, lse, entropy = new_rows(len(hidden), options, hidden.device)  # once more
        coefficients = torch.zeros_like(lse) if coefficients is None else coefficients
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = Chunks(hidden, weight, options, keep=options.entropy)
            for rows, hidden_rows, logits in chunks:
                chunks.forward(rows, logits, targets, logprobs, lse, entropy, gradient=not options.entropy)
                if options.entropy:
                    chunks.backward(rows, logits, targets, lse, coefficients, entropy, dentropy)
                c = torch.ones_like(lse[rows]) if options.entropy else coefficients[rows]
                chunks.accumulate(logits, hidden_rows, rows, c, dhidden, dweight)
        return dhidden, dweight, None, None


def head_loss(hidden, weight, targets, token_loss, temperature=1.0, chunk_size=None, entropy=False, n_vocab=None, chunk_mb=0):
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
                chunks.forward(rows, logits, targets, logprobs, lse, entropy, with_gradient)
                chunk_loss, coefficients = differentiate(token_loss, logprobs[rows], rows, with_gradient)
                loss += chunk_loss
                if with_gradient:
                    chunks.accumulate(logits, hidden_rows, rows, coefficients, dhidden, dweight)
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
