"""The head without all logits: hidden states in, log-probs or a loss out, a chunk of rows at a time.

    head_logprobs   log-probs; backward computes each chunk's logits again
    head_loss       a loss; while a chunk's logits exist, their gradient overwrites them

With a Teacher a chunk has its logits too, and both functions also know each token's divergence from it: divergence.py.

M tokens, C width, V vocabulary, m rows of a chunk. What happens to a row of logits is in rows.py.

Left out: ignore_index (select the rows before), label smoothing, a vocabulary split over devices.
Test: pytest tests/test_logprobs.py tests/test_kernels.py. Time: python bench/logprobs.py
"""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from snug.device.cpu import fast_products
from snug.device.kinds import MIB, is_planned, kind_of, logits_budget, off_mps, wide
from snug.kernels import has_tensor_cores, nothing_to_do
from snug.logprobs.divergence import divergence_rows
from snug.logprobs.rows import SCRATCH, Options, check, forward_rows, slabs
from snug.memory.ledger import component

ALREADY_ADDED = (  # CUDA takes 254 characters
    "head_loss has added its gradient to weight.grad and cannot scale it: scale inside token_loss, or pass "
    "weight.view_as(weight)"
)


def rows_per_chunk(n_vocab, itemsize, chunk_mb=0, device_type="cpu", n_embd=0):
    """-> rows of logits that fit chunk_mb MiB together with plain torch's scratch; at least one.

    The products of a chunk read the whole head and add to its whole gradient, so with few rows they are bound by
    memory, not arithmetic. The default on a CPU is what a laptop can spare: 16 MiB, 73 rows at V = 50,257 in float32,
    or a quarter of the head. A head of 260 MiB is a third faster with 65 MiB. 256 MiB on a GPU: 876 rows at V = 151,936
    in bfloat16. An H200 does 165 FLOP in the time of a byte; products that give hidden states take 165 rows to be bound
    by arithmetic, the one that adds to dweight 330.
    """
    budget = logits_budget(chunk_mb, device_type, n_vocab * n_embd * itemsize) * MIB
    return max(1, int(budget - min(4 * SCRATCH, budget / 4)) // (n_vocab * itemsize))


def head_options(
    hidden,
    weight,
    targets,
    temperature=1.0,
    chunk_size=None,
    entropy=False,
    n_vocab=None,
    chunk_mb=0,
    teacher=None,
) -> Options:
    """Check the arguments and fill in defaults. Raises ValueError.

    entropy: give entropies, too. n_vocab: ids from n_vocab on are padding, with probability and gradient 0.
    chunk_size: rows at a time; default: as fit chunk_mb MiB, see rows_per_chunk. teacher: a Teacher, whose logits share
    the chunk's memory.
    Under autocast the products run in its dtype; autocast does not reach into an autograd function by itself.
    """
    dtype, device = hidden.dtype, hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(device)
    elif hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}; use one dtype, or autocast"
        )
    n_vocab = check(len(hidden), len(weight), targets, temperature, n_vocab)
    chunk_size = chunk_size or rows_per_chunk(
        len(weight) + (len(teacher.weight) if teacher else 0),
        dtype.itemsize,
        chunk_mb,
        kind_of(hidden),
        weight.shape[1],
    )
    return Options(temperature, n_vocab, dtype, chunk_size, entropy, teacher)


class Chunks:
    """logits = hidden @ weight.T, a chunk of rows at a time, in one buffer that all chunks share.

    logprobs (M,), entropy (M,) or None, divergence (M,), or None without a teacher: `visit` fills them.
    """

    def __init__(self, hidden, weight, targets, options):
        """hidden (M, C), weight (V, C): cast once if the products run in another dtype. targets (M,)."""
        M, V = len(hidden), len(weight)
        self.hidden = hidden
        self.weight = weight.to(options.dtype)
        self.targets = targets
        self.options = options
        self.logprobs = hidden.new_empty(M, dtype=wide(options.dtype))
        self.entropy = torch.empty_like(self.logprobs) if options.entropy else None
        chunks = max(1, -(-M // options.chunk_size))
        size = -(-M // chunks)  # chunks of about equal length
        self.slices = [slice(i, i + size) for i in range(0, M, max(1, size))]
        if is_planned(hidden):
            self.slices = self.slices[:2]  # a planner's chunks are all alike
        self.buffer = self.new_buffer(size, V)
        self.divergence = None
        if teacher := options.teacher:
            self.teacher_weight = teacher.weight.to(options.dtype)
            self.teacher_buffer = self.new_buffer(size, len(teacher.weight))
            self.divergence = torch.empty_like(self.logprobs)

    def new_buffer(self, size, V):
        """(size, V or more): the kernels' loads and tensor cores want rows that begin at 16-byte addresses."""
        width = -(-V // 16) * 16 if kind_of(self.hidden) == "cuda" else V
        return self.hidden.new_empty(size, width, dtype=self.options.dtype)

    def visit(self, gradient=False):
        """Fill the numbers of each chunk -> rows (a slice of the M), their hidden states (m, C), their logits (m, V or
        more); with `gradient` that of the log-probs is in the logits' place."""
        for rows in self.slices:
            hidden = self.hidden[rows].to(self.weight.dtype)
            logits = self.buffer[: len(hidden)]
            torch.mm(hidden, self.weight.t(), out=logits[:, : len(self.weight)])
            if self.divergence is not None:
                # Until the next chunk the teacher's buffer has the divergence's gradient for the logits.
                states = self.options.teacher.hidden[rows].to(self.weight.dtype)
                teacher_logits = self.teacher_buffer[: len(states)]
                torch.mm(
                    states,
                    self.teacher_weight.t(),
                    out=teacher_logits[:, : len(self.teacher_weight)],
                )
                divergence_rows(logits, teacher_logits, self.options, self.divergence[rows])
            forward_rows(
                logits,
                self.targets[rows],
                self.options,
                self.logprobs[rows],
                None if self.entropy is None else self.entropy[rows],
                overwrite=True,
                gradient=gradient,
            )
            yield rows, hidden, logits

    def accumulate(self, gradient, hidden, rows, coefficients, dhidden, dweight, of_divergence=None):
        """dhidden[rows] = c * gradient @ weight; dweight (V, C) += gradient.T @ (c * hidden); either may be None.

        gradient (m, V) of the log-probs; c = coefficients (m,): to scale C columns is cheaper than to scale V.
        of_divergence (m,): the divergence's coefficients; then both gradients are scaled and added up.
        """
        if of_divergence is not None:
            n_vocab = self.options.n_vocab
            more = self.teacher_buffer[: len(gradient), :n_vocab].mul_(of_divergence[:, None])
            gradient[:, :n_vocab].mul_(coefficients[:, None]).add_(more)
            coefficients = torch.ones_like(coefficients)
        gradient = gradient[:, : len(self.weight)]
        c = coefficients[:, None]
        if dweight is not None:
            add_product(dweight, gradient, torch.mul(hidden, c, out=torch.empty_like(hidden)))
        if dhidden is not None:
            torch.mul(gradient @ self.weight, c, out=dhidden[rows])


def add_product(dweight, gradient, hidden):
    """dweight += gradient.T @ hidden, in the dtype of dweight."""
    if dweight.dtype == gradient.dtype:
        dweight.addmm_(gradient.t(), hidden)
    elif kind_of(dweight) == "cuda" and nothing_to_do(dweight):
        pass  # a planner's fake CUDA tensor: a CPU cannot run the next line, which allocates nothing
    elif dweight.dtype == torch.float32 and dweight.is_cuda and has_tensor_cores(dweight):
        torch.addmm(dweight, gradient.t(), hidden, out_dtype=torch.float32, out=dweight)
    else:  # a product in another dtype is a temporary: slabs of the vocabulary keep it small
        for ids in slabs(*dweight.shape):
            dweight[ids] += gradient[:, ids].t() @ hidden


def head_logprobs(hidden, weight, targets, *others, **more):
    """token_logprobs(hidden @ weight.T, ...) without the (M, V) logits -> (M,) float32 [, entropy in nats (M,)].

    With a teacher -> (log-probs, entropies or None, divergences), each (M,). The entropies have no gradient.
    hidden (M, C), weight (V, C), targets (M,) int64. others, more: temperature=1.0, chunk_size, entropy=False and what
    else head_options takes. Backward computes each chunk's logits again (8 M C V FLOP in all). Use it for losses that
    need all log-probs before any gradient (sequence-level ratios) and, without gradient, for a reference model. Saved:
    the inputs. Backward's extra bytes: a chunk, dhidden, dweight; under autocast also the cast weight. Raises
    ValueError.
    """
    options = head_options(hidden, weight, targets, *others, **more)
    results = HeadLogprobs.apply(hidden, weight, targets.contiguous(), options)
    if options.teacher:
        return results
    return results[:2] if options.entropy else results[0]


class HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, options):
        with torch.autocast(hidden.device.type, enabled=False), fast_products(hidden):
            chunks = Chunks(hidden, weight, targets, options)
            for _ in chunks.visit():
                pass
        ctx.options = options
        ctx.save_for_backward(hidden, weight, targets)
        if options.entropy:
            ctx.mark_non_differentiable(chunks.entropy)
        return chunks.logprobs, chunks.entropy, chunks.divergence

    @staticmethod
    @once_differentiable
    def backward(ctx, coefficients, _, ddivergence):
        hidden, weight, targets = ctx.saved_tensors
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        options = ctx.options._replace(entropy=False)
        with torch.autocast(hidden.device.type, enabled=False), fast_products(hidden):
            chunks = Chunks(hidden, weight, targets, options)
            for rows, hidden_rows, logits in chunks.visit(gradient=True):
                more = None if ddivergence is None else ddivergence[rows]
                chunks.accumulate(logits, hidden_rows, rows, coefficients[rows], dhidden, dweight, more)
        return dhidden, dweight, None, None


def head_loss(
    hidden,
    weight,
    targets,
    token_loss: Callable[..., torch.Tensor],
    *others,
    **more,
):
    """Loss and gradient in one visit -> (loss, logprobs (M,) [, entropy (M,)]); only the loss is differentiable.

    It is token_loss(head_logprobs(...)) for a loss that is a sum over tokens, at 6 M C V FLOP instead of 8. For each
    chunk token_loss(logprobs (m,), rows) -> scalar is called with gradients on; rows is the chunk's slice of the M. Its
    derivative is each token's coefficient; with it the chunk's logits become their gradient on the spot. With a teacher
    it is token_loss(logprobs, rows, divergences (m,)). others, more: as for head_logprobs.

    If weight is a leaf (a parameter), dweight is added to weight.grad during the visit, before backward, in the dtype
    of .grad. Other paths to the same weight (a tied embedding) add to it in backward as always. So, while gradients are
    on:
      - call loss.backward() exactly once, with gradient 1 (else a RuntimeError): put scales into token_loss;
      - without a backward, or after a failed visit, zero .grad; torch.autograd.grad does not see dweight;
      - do not call it inside activation checkpointing, which would visit twice;
      - hooks on the gradient of a weight that has no other path do not fire.
    Any other weight, such as weight.view_as(weight), gets dweight through autograd, for one more (V, C) buffer; use
    that under a wrapper that relies on hooks. A frozen weight costs nothing.

    Extra bytes: a chunk and twice its (m, C), dhidden, (M,) numbers; on a CPU 2 MiB of scratch for entropy or a dtype
    below float32. Under autocast also the cast weight and, on a CPU, 1 MiB. M = 0: zeros, token_loss is not called.
    """
    options = head_options(hidden, weight, targets, *others, **more)
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    results = HeadLoss.apply(hidden, weight, targets.contiguous(), token_loss, options, with_gradient)
    return results if options.entropy else results[:2]


def head_loss_in_two_visits(hidden, weight, targets, token_loss, **options):
    """head_loss with entropies for a loss that needs all log-probs at once, as a sequence's ratio does.

    -> loss, log-probs (M,), entropies (M,). Backward makes the logits again.
    """
    logprobs, entropy, *divergence = head_logprobs(hidden, weight, targets, entropy=True, **options)
    return token_loss(logprobs, slice(None), *divergence), logprobs, entropy


class HeadLoss(torch.autograd.Function):
    @staticmethod
    @component("gradients")
    def forward(ctx, hidden, weight, targets, token_loss, options, with_gradient):
        dhidden = torch.empty_like(hidden) if with_gradient and hidden.requires_grad else None
        trains = with_gradient and weight.requires_grad
        ctx.into_grad = trains and weight.is_leaf
        dweight = weight.grad if ctx.into_grad else None
        if trains and dweight is None:
            dweight = torch.zeros_like(weight)
        if ctx.into_grad:
            weight.grad = dweight
        with torch.autocast(hidden.device.type, enabled=False), fast_products(hidden):
            chunks = Chunks(hidden, weight, targets, options)
            logprobs, entropy = chunks.logprobs, chunks.entropy
            loss = logprobs.new_zeros(())
            for rows, hidden_rows, logits in chunks.visit(with_gradient):
                values = [logprobs[rows]] + ([chunks.divergence[rows]] if options.teacher else [])
                with torch.set_grad_enabled(with_gradient):
                    leaves = [value.detach().requires_grad_(with_gradient) for value in values]
                    chunk_loss = token_loss(leaves[0], rows, *leaves[1:])
                if with_gradient:
                    c, *more = torch.autograd.grad(chunk_loss, leaves)
                    chunks.accumulate(logits, hidden_rows, rows, c, dhidden, dweight, *more)
                loss += chunk_loss.detach()
        ctx.save_for_backward(dhidden, None if ctx.into_grad else dweight)
        ctx.mark_non_differentiable(*([logprobs] if entropy is None else [logprobs, entropy]))
        return loss, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, *_):
        dhidden, dweight = ctx.saved_tensors
        if ctx.into_grad:
            # On CUDA the device checks this, and the host does not wait.
            torch._assert_async(off_mps(dloss) == 1, ALREADY_ADDED)
            if dhidden is not None:
                # A second backward would lack dweight. With another version autograd raises.
                torch.autograd.graph.increment_version(dhidden)
        else:
            dhidden, dweight = (None if d is None else d * dloss for d in (dhidden, dweight))
        return dhidden, dweight, None, None, None, None
