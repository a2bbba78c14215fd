"""One step of AdamW (Loshchilov and Hutter 2019) on a slab of a parameter, in place: a kernel, and plain torch.

Moments in bfloat16, and weights in bfloat16 without a float32 master, are rounded stochastically: to one of the two
neighbours, more often to the nearer one, so that the result is right on average. Rounding to nearest would lose every
change below 1/512 of a number. The random bits are a hash of (seed, step, parameter, index of the weight), the same on
every device.

Test: pytest tests/test_adamw_kernel.py
"""

import torch

from snug.device.kinds import is_planned
from snug.kernels import constexpr, launch, tl, triton, uses_triton
from snug.memory.ledger import COMPONENTS

COMPONENTS[__name__] = "optimizer's buffers"

CHUNK = 2**16  # weights at a time in plain torch: its scratch stays in a CPU core's cache
BLOCK, WARPS = 1024, 4  # of the kernel: 8 weights per lane
MASK = 2**32 - 1
ROUNDS = (16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)


def adamw(weight, gradient, exp_avg, exp_avg_sq, master, numbers, key, first):
    """Update n weights, at most 2**30. All tensors are (n,) and contiguous; all but gradient are changed in place.

    gradient: in weight's dtype. exp_avg, exp_avg_sq: float32, or bfloat16 (rounded stochastically). master: None, or
    float32, the weights before they were rounded. numbers, key: from numbers_of, key_of. first: the index of the first
    of these weights in their parameter.
    """
    n = len(weight)
    tensors = weight, gradient, exp_avg, exp_avg_sq, weight if master is None else master
    if uses_triton(weight):
        constants = dict(HAS_MASTER=master is not None, BLOCK=BLOCK, num_warps=WARPS)
        launch(adamw_kernel, (triton.cdiv(n, BLOCK),), *tensors, *numbers, key, first, n, **constants)
        return
    stop = min(CHUNK, n) if is_planned(weight) else n  # a planner needs one chunk: all are alike
    for start in range(0, stop, CHUNK):
        chunk = (tensor[start : start + CHUNK] for tensor in tensors)
        adamw_torch(*chunk, numbers, key, first + start)


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


def adamw_torch(weight, gradient, exp_avg, exp_avg_sq, kept, numbers, key, first):
    """The kernel's formula in plain torch; in float64 if the weights are. kept: master, or weight if there is none.

    Its temporaries are of a chunk. On a side stream, where the optimizer allocates nothing else, it runs only if a GPU
    has no kernels.
    """
    scale, share1, share2, decay, rate, correction, eps = numbers
    dtype = torch.promote_types(weight.dtype, torch.float32)
    g = gradient.to(dtype) * scale
    m = torch.lerp(exp_avg.to(dtype), g, share1)  # m + share1 * (g - m)
    v = torch.lerp(exp_avg_sq.to(dtype), g.square_(), share2)
    root = torch.mul(v, correction, out=g).sqrt_().add_(eps)
    w = (kept.to(dtype) * decay).addcdiv_(m, root, value=-rate)  # w - rate * m / root
    if exp_avg.dtype == torch.bfloat16:
        rounded = (m, v, w) if kept.dtype == torch.bfloat16 else (m, v)
        for x, random in zip(rounded, noises(key, first, len(w), w.device), strict=False):
            # Add 16 random bits, then cut off the lower 16 bits: a carry rounds up.
            x.view(torch.int32).add_(random.int()).bitwise_and_(-(2**16))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    kept.copy_(w)
    weight.copy_(w)


def noises(key, first, n, device):
    """-> 16 random bits for each of n exp_avg, for each exp_avg_sq, and for each weight, from number `first` on."""
    bits = mix(mix(torch.arange(first, first + n, device=device) ^ key) + key & MASK)
    return bits & 0xFFFF, bits >> 16, mix(bits ^ key) & 0xFFFF


def mix(x):
    """A hash of 32 bits: lowbias32, Chris Wellons, github.com/skeeto/hash-prospector, 2018.

    x: an int, or a tensor of int64. A product that overflows wraps around, and its lower 32 bits are right.
    """
    for shift, factor in ROUNDS:
        x = (x ^ (x >> shift)) * factor & MASK
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
        tl.store(to, x.to(to.dtype.element_ty), mask)

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
            tl.store(weight + at, w.to(weight.dtype.element_ty), mask)
