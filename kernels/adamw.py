"""One step of AdamW (Loshchilov and Hutter 2019) on a piece of a parameter, in place: one kernel, and its twin.

Moments and weights in bfloat16 that have no float32 master are rounded stochastically: to one of the two neighbours,
the nearer one more likely, so that the result is right on average. Rounding to nearest would lose every change below
1/512 of a number. The random bits are a hash of (seed, step, parameter, index of the weight), alike on every device.

Test: pytest tests/test_adamw_kernel.py
"""

import torch

from kernels import nothing_to_do, triton, uses_triton
from memory.ledger import is_planned

CHUNK = 2**16  # weights at a time in plain torch: its temporaries stay in a CPU core's cache
BLOCK, WARPS = 1024, 4  # of the kernel: 8 weights a lane
MASK = 2**32 - 1


def adamw(weight, gradient, exp_avg, exp_avg_sq, master, numbers, key: int, first: int) -> None:
    """One step of n weights, at most 2**30. All tensors are (n,), contiguous, and changed in place, but for gradient.

    gradient: in weight's dtype. exp_avg, exp_avg_sq: float32, or bfloat16 (rounded stochastically). master: None, or
    float32: the weights before they were rounded. numbers: from numbers_of; key: from key_of; first: the index of the
    first of these weights in their parameter.
    """
    n = len(weight)
    if not uses_triton(weight):
        for start in range(0, min(CHUNK, n) if is_planned(weight) else n, CHUNK):  # a planner needs only one
            part = slice(start, start + CHUNK)
            tensors = (x if x is None else x[part] for x in (weight, gradient, exp_avg, exp_avg_sq, master))
            adamw_torch(*tensors, *numbers, key, first + start)
    elif not nothing_to_do(weight):
        adamw_kernel[(triton.cdiv(n, BLOCK),)](
            weight, gradient, exp_avg, exp_avg_sq, weight if master is None else master, *numbers, key, first, n,
            HAS_MASTER=master is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def numbers_of(group: dict, steps: int, scale: float) -> tuple:
    """The numbers in the formula of a parameter group's step, the first being steps = 1.

    scale: what gradients are multiplied by, to clip them.
    """
    (beta1, beta2), rate = group["betas"], group["lr"]
    decay, rate, correction = 1 - rate * group["weight_decay"], rate / (1 - beta1**steps), 1 / (1 - beta2**steps)
    return scale, 1 - beta1, 1 - beta2, decay, rate, correction, group["eps"]


def adamw_torch(
    weight, gradient, exp_avg, exp_avg_sq, master, scale, share1, share2, decay, rate, correction, eps, key, first
):
    """The kernel's twin. In float64 where weights are."""
    dtype, kept = torch.promote_types(weight.dtype, torch.float32), weight if master is None else master
    g, m, v, w = (x.to(dtype) for x in (gradient, exp_avg, exp_avg_sq, kept))
    g = g * scale
    m = m + share1 * (g - m)
    v = v + share2 * (g * g - v)
    w = w * decay - rate * m / (torch.sqrt(v * correction) + eps)
    if exp_avg.dtype == torch.bfloat16:
        noises = noise(key, torch.arange(first, first + len(w), device=w.device))
        m, v = rounded(m, noises[0]), rounded(v, noises[1])
        w = rounded(w, noises[2]) if kept.dtype == torch.bfloat16 else w
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    kept.copy_(w)
    if master is not None:
        weight.copy_(w)


def rounded(x, bits):
    """x, float32, rounded to bfloat16: up if 16 random bits carry out of the 16 that are cut off."""
    return ((x.view(torch.int32) + bits.to(torch.int32)) & -(2**16)).view(torch.float32)


def noise(key: int, index) -> tuple:
    """16 random bits each for exp_avg, exp_avg_sq and weight number `index`, (n,) int64."""
    bits = mix((mix(index ^ key) + key) & MASK)
    return bits & 0xFFFF, bits >> 16, mix(bits ^ key) & 0xFFFF


def mix(x):
    """A hash of 32 bits, Python's or in int64: lowbias32, Chris Wellons, github.com/skeeto/hash-prospector, 2018."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK  # int64 wraps around; the lower 32 bits are right
    return x ^ (x >> 16)


def key_of(seed: int, steps: int, parameter: int) -> int:
    """-> 32 bits, others for each step and parameter."""
    key = 0
    for number in (seed, steps, parameter):
        key = mix((key + number) & MASK)
    return key


if triton is None:
    adamw_kernel = None
else:
    import triton.language as tl

    @triton.jit
    def mix_bits(x):
        """`mix`, of uint32."""
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def put(to, x, bits, mask):
        """Store x, float32: `rounded` if it goes into bfloat16."""
        if to.dtype.element_ty == tl.bfloat16:
            x = ((x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
        tl.store(to, x.to(to.dtype.element_ty), mask)

    @triton.jit(do_not_specialize=["key", "first"])
    def adamw_kernel(
        weight, gradient, exp_avg, exp_avg_sq, kept, scale, share1, share2, decay, rate, correction, eps,
        key: tl.uint32, first: tl.uint32, n, HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program a block of weights. kept: master, or weight if there is none."""
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        g = tl.load(gradient + at, mask).to(tl.float32) * scale
        m = tl.load(exp_avg + at, mask).to(tl.float32)
        v = tl.load(exp_avg_sq + at, mask).to(tl.float32)
        w = tl.load(kept + at, mask).to(tl.float32)
        m = m + share1 * (g - m)
        v = v + share2 * (g * g - v)
        w = w * decay - rate * m / (tl.sqrt(v * correction) + eps)
        key = key.to(tl.uint32)
        index = at.to(tl.uint32) + first.to(tl.uint32)
        bits = mix_bits(mix_bits(index ^ key) + key)
        put(exp_avg + at, m, bits & 0xFFFF, mask)
        put(exp_avg_sq + at, v, bits >> 16, mask)
        put(kept + at, w, mix_bits(bits ^ key) & 0xFFFF, mask)
        if HAS_MASTER:
            tl.store(weight + at, w.to(weight.dtype.element_ty), mask)
