"""One step of AdamW (Loshchilov and Hutter 2019) on a slab of a parameter, in place: a kernel, and plain torch.

Moments in bfloat16, and weights in bfloat16 without a float32 master, are rounded stochastically: to one of the two
neighbours, more often to the nearer one, so that the result is right on average. Rounding to nearest would lose every
change below 1/512 of a number. The random bits are a hash of (seed, step, parameter, index of the weight), the same on
every device.

Test: pytest tests/test_adamw_kernel.py
"""

import torch

from snug.device.kinds import is_planned, wide
from snug.kernels import constexpr, launch, tl, triton, uses_triton

CHUNK = 2**16  # weights at a time in plain torch: its scratch stays in a CPU core's cache
BLOCK = 1024  # of the kernel: with 4 warps 8 weights per lane
MASK = 2**32 - 1
ROUNDS = (16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)


def adamw(weight, gradient, exp_avg, exp_avg_sq, master, numbers, key, first, scratch):
    """Update n weights, at most 2**30. All tensors are (n,) and contiguous; all but gradient are changed in place.

    gradient: in weight's dtype. exp_avg, exp_avg_sq: float32, or bfloat16 (rounded stochastically). master: None, or
    float32, the weights before they were rounded. numbers, key, scratch: from numbers_of, key_of, new_scratch. first:
    the index of the first of these weights in their parameter.
    """
    n = len(weight)
    tensors = weight, gradient, exp_avg, exp_avg_sq, weight if master is None else master
    if scratch is None:
        launch(
            adamw_kernel,
            (triton.cdiv(n, BLOCK),),
            *tensors,
            *numbers,
            key,
            first,
            n,
            HAS_MASTER=master is not None,
            BLOCK=BLOCK,
        )
        return
    # A planner needs one chunk: all are alike.
    for start in range(0, CHUNK if is_planned(weight) else n, CHUNK):
        chunk = (tensor[start : start + CHUNK] for tensor in tensors)
        adamw_torch(*chunk, numbers, key, first + start, scratch)


def new_scratch(weight):
    """-> buffers for plain torch, or None for the kernel. A step allocates nothing: it may run on a side stream."""
    if uses_triton(weight, "adamw"):
        return None
    dtype = wide(weight.dtype)
    n = min(CHUNK, weight.numel())
    numbers = weight.new_empty(4, n, dtype=dtype)
    bits = weight.new_empty(2, n, dtype=torch.int64)
    return *numbers, *bits, bits.new_empty(n, dtype=torch.int32)


def numbers_of(group, steps, scale):
    """-> the numbers in the formula: scale, share1, share2, decay, rate, correction, eps.

    group: an optimizer's parameter group. steps: 1 for the first step. scale: gradients are multiplied by it, which
    clips them.
    """
    beta1, beta2 = group["betas"]
    decay = 1 - group["lr"] * group["weight_decay"]
    rate = group["lr"] / (1 - beta1**steps)
    correction = 1 / (1 - beta2**steps)
    return scale, 1 - beta1, 1 - beta2, decay, rate, correction, group["eps"]


def adamw_torch(weight, gradient, exp_avg, exp_avg_sq, kept, numbers, key, first, scratch):
    """The kernel's formula in plain torch; in float64 if the weights are. kept: master, or weight if there is none."""
    scale, share1, share2, decay, rate, correction, eps = numbers
    g, m, v, w, bits, spare, noise = (x[: len(weight)] for x in scratch)
    g.copy_(gradient).mul_(scale)
    m.copy_(exp_avg).lerp_(g, share1)  # m + share1 * (g - m)
    v.copy_(exp_avg_sq).lerp_(g.square_(), share2)
    torch.mul(v, correction, out=g).sqrt_().add_(eps)
    w.copy_(kept).mul_(decay).addcdiv_(m, g, value=-rate)  # w - rate * m / g
    if exp_avg.dtype == torch.bfloat16:
        rounded = (m, v, w) if kept.dtype == torch.bfloat16 else (m, v)
        for x, random in zip(rounded, noises(key, first, bits, spare), strict=False):
            # Add 16 random bits, then cut off the lower 16 bits: a carry rounds up.
            x.view(torch.int32).add_(noise.copy_(random)).bitwise_and_(-(2**16))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    kept.copy_(w)
    weight.copy_(w)


def noises(key, first, bits, spare):
    """Yield 16 random bits for each exp_avg, then for each exp_avg_sq, then for each weight, from number `first` on.

    bits, spare: scratch, (n,) int64. What is yielded lies there.
    """
    torch.arange(first, first + len(bits), out=bits)
    mix_(bits.bitwise_xor_(key), spare)
    mix_(bits.add_(key).bitwise_and_(MASK), spare)
    yield torch.bitwise_and(bits, 0xFFFF, out=spare)
    yield torch.bitwise_right_shift(bits, 16, out=spare)
    yield mix_(bits.bitwise_xor_(key), spare).bitwise_and_(0xFFFF)


def mix(x) -> int:
    """A hash of 32 bits: lowbias32, Chris Wellons, github.com/skeeto/hash-prospector, 2018."""
    for shift, factor in ROUNDS:
        x = (x ^ (x >> shift)) * factor & MASK
    return x


def mix_(x, spare):
    """`mix` in place; int64. A product that overflows wraps around, and its lower 32 bits are right."""
    for shift, factor in ROUNDS:
        x.bitwise_xor_(torch.bitwise_right_shift(x, shift, out=spare)).mul_(factor).bitwise_and_(MASK)
    return x


def key_of(seed, steps, parameter):
    """-> 32 bits, different for each step and parameter."""
    key = 0
    for number in (seed, steps, parameter):
        key = mix((key + number) & MASK)
    return key


if triton is not None:

    @triton.jit
    def mix_bits(x):
        """`mix` of uint32."""
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def put(to, x, bits, mask):
        """Store x, float32. Into bfloat16 it is rounded as in `adamw_torch`."""
        if to.dtype.element_ty == tl.bfloat16:
            up = ((x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
            x = tl.where(x == x, up, x)  # CUDA's NaN would become -0.0
        tl.store(to, x, mask)

    @triton.jit(do_not_specialize=["key", "first"])
    def adamw_kernel(
        weight,
        gradient,
        exp_avg,
        exp_avg_sq,
        kept,
        scale,
        share1,
        share2,
        decay,
        rate,
        correction,
        eps,
        key: tl.uint32,
        first: tl.uint32,
        n,
        HAS_MASTER: constexpr,
        BLOCK: constexpr,
    ):
        """One program per block of weights. kept: master, or weight if there is none."""
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
            tl.store(weight + at, w, mask)
