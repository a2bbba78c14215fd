"""One decode step of the gated delta rule (snug/delta.py). The state, by far the largest, is read and written once.

`step` has its twin in plain torch beside it. Sizes of heads are powers of 2, as in all published models.
Left out: prompts and training, which are plain torch in chunks; the convolution and the gates of a step.
Test: pytest tests/test_delta_step.py
"""

import torch

from snug.kernels import constexpr, launch, tl, triton, uses_triton

if triton is not None:

    @triton.jit
    def step_kernel(q, k, v, g, beta, S, y, K: constexpr, V: constexpr):
        """One program per slot and head."""
        head = tl.program_id(0).to(tl.int64)
        i = tl.arange(0, K)
        d = tl.arange(0, V)
        at = S + head * K * V + i[:, None] * V + d[None, :]
        key = tl.load(k + head * K + i)[:, None]
        state = tl.load(at) * tl.exp(tl.load(g + head))
        new = tl.load(v + head * V + d) - tl.sum(state * key, 0)
        state += key * (tl.load(beta + head) * new)[None, :]
        tl.store(at, state)
        tl.store(y + head * V + d, tl.sum(state * tl.load(q + head * K + i)[:, None], 0))


def step(q, k, v, g, beta, S):
    """`delta_rule` of one token: q, k (n, H, 1, K), v (n, H, 1, V), g, beta (n, H, 1, 1) -> y like v. S (n, H, K, V)
    changes in place; where g and beta are 0 it stays."""
    if not uses_triton(S, "delta"):
        S *= g.exp()
        S += k.mT @ (beta * (v - k @ S))
        return q @ S
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    inputs = [x.contiguous() for x in (q, k, v, g, beta)]
    n, H, K, V = S.shape
    launch(step_kernel, (n * H,), *inputs, S, y, K, V)  # 4 warps: two programs fit on a multiprocessor
    return y
