"""How snug uses a CPU: float32 products run on oneDNN where it is faster.

Left out: how many threads there are (OMP_NUM_THREADS), and how long they spin. Tests: tests/test_cpu.py.
"""

from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F

from snug.device.kinds import is_planned

PRODUCTS = torch.backends.mkldnn.matmul
# Multiplications of a large product: 0.2 ms of a core with MKL. oneDNN compiles code for each new shape in 0.3 ms.
LARGE = 2**23
# Numbers of a weight that waits for memory: then oneDNN is faster with any number of rows, with few up to 3 times.
LARGE_WEIGHT = 2**18
EXACT = 1e-5  # largest relative error of a float32 product; rounded to bfloat16 it has 2e-3


@contextmanager
def fast_products(x):
    """A context in which float32 products on a CPU run on oneDNN.

    It is twice as fast as MKL on AMD's processors with AVX-512. torch uses it only if float32 products may be rounded
    to bfloat16. oneDNN does that on processors with AMX or ARM's bfloat16, where `stays_float32` says no. Leave
    F.scaled_dot_product_attention outside: its many small products would be four times slower. It does nothing if x is
    on another device or a planner's tensor.
    """
    if x.device.type != "cpu" or is_planned(x) or not stays_float32():
        yield
        return
    PRODUCTS.fp32_precision = "bf16"
    try:
        yield
    finally:
        PRODUCTS.fp32_precision = "none"


@cache
def stays_float32() -> bool:
    """Is a float32 product by oneDNN as exact on this processor as float32 is? Tries one."""
    a, b = (torch.sin(torch.arange(128.0 * 128) * step).view(128, 128) for step in (1.1, 1.7))
    PRODUCTS.fp32_precision = "bf16"
    product = a @ b
    PRODUCTS.fp32_precision = "none"
    exact = a.double() @ b.double()
    return bool((product - exact).norm() < EXACT * exact.norm())


def linear(x, weight, bias=None):
    """F.linear, by fast products if large: x (..., in), weight (out, in), bias (out,) -> (..., out)."""
    on_cpu = (
        x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    )
    large = x.numel() * len(weight) >= LARGE or weight.numel() > LARGE_WEIGHT
    product = Linear.apply if on_cpu and large else F.linear
    return product(x, weight, bias)


class Linear(torch.autograd.Function):
    """y = x W^T + b; saved: x and W, as F.linear does. Backward: dx = dy W, dW = dy^T x, db = the sum of dy."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        with fast_products(x):
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        with fast_products(x):
            dx = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
            dweight = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None
