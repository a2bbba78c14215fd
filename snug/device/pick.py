"""The device of a run: what it must have, and torch's switches for it.

Left out: how its memory is counted and filled (memory/), what runs on it (kernels/).
"""

from dataclasses import replace

import torch

from snug.device.cpu import stays_float32
from snug.device.kinds import kind_planned
from snug.options import SnugError, first_line


def pick_device(name) -> torch.device:
    """ "auto" is CUDA if torch can use such a GPU, else MPS, else the CPU. Raises SnugError if it cannot be
    used. torch has the name "cuda" for AMD's GPUs, too."""
    try:
        device = torch.device(kind_planned(name) if name == "auto" else name)
        if device.type == "cpu":
            stays_float32()  # looks now, not in the middle of something that is measured
            return device
        if device.type == "cuda":
            torch.cuda.init()  # says why it cannot, and makes the allocator's counters
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        elif device.type != "mps":
            raise RuntimeError("snug runs on cpu, cuda and mps")
        torch.zeros(1, device=device).add_(1)
    except (RuntimeError, AssertionError) as error:
        # There is no such GPU, the driver is old, another process has the GPU, or torch has no kernel for it.
        raise SnugError(
            f"device={name!r}: {first_line(error)}; use another device, or --device=cpu"
        ) from None
    products = torch.backends.cuda.matmul
    # torch's older name: libraries could not read it any more after the newer one, fp32_precision="ieee".
    products.allow_tf32 = False
    # A product of few rows is a sum of partial sums. If these are rounded to bfloat16, the sampler, which has few rows,
    # differs more from the trainer.
    products.allow_bf16_reduced_precision_reduction = False
    # On Hopper and Blackwell torch prefers cuDNN's attention in bfloat16. It builds a plan for every new shape, which
    # takes 0.05 to 1 s, and keeps all plans in host memory. Flash attention, the next in line, needs no plans.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def with_dtype(settings, kind):
    """-> settings with a dtype and a param_dtype in place of "auto". kind: "cuda", "mps" or "cpu". A planned GPU has
    bfloat16. Weights that compute in bfloat16 on a GPU are in bfloat16: their casts are a third of a decode step.

    On MPS bfloat16 saves memory, but others saw no time saved, and an M1 does not compute in it: "auto" is float32.
    """
    dtype, weights = settings.dtype, settings.param_dtype
    if dtype == "auto":
        old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
        fast = kind == "cuda" and not old
        dtype = "bfloat16" if fast else weights.replace("auto", "float32")
    if weights == "auto":
        weights = dtype if kind == "cuda" else "float32"
    return replace(settings, dtype=dtype, param_dtype=weights)
