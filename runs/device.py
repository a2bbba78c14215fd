"""The device of a run: what it has to have, how torch is told to use it, and what a user should know about it.

Left out: how its memory is counted and filled (memory/), what runs on it (kernels/).
"""

import os
import re
import sys
import warnings
from glob import glob
from pathlib import Path

import torch

from kernels import why_no_kernels
from memory.cpu import share_cores, stays_float32
from options import SnugError, first_line

GPU_FILES = ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so.1")  # a GPU of Linux; in WSL, one of Windows
LOADED_DRIVER = "/proc/driver/nvidia/version"
OLDEST_DRIVER = {"12": 525, "13": 580}  # by CUDA's version: docs.nvidia.com/deploy/cuda-compatibility


def pick_device(name: str, tf32: bool = False) -> torch.device:
    """ "auto" is CUDA if there is a GPU, else the CPU. tf32: the option. Raises SnugError if it cannot be used."""
    warnings.filterwarnings("ignore", "CUDA initialization")  # torch's longer words for what is said below
    try:
        has_gpu = torch.cuda.is_available() or finds_gpu()
        device = torch.device(("cuda" if has_gpu else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise SnugError(f"device={name!r}: {first_line(error)}") from None
    if device.type == "cpu":
        stays_float32()  # looks now, not in the middle of something that is measured
        share_cores()
        return device
    if device.type != "cuda":
        raise SnugError(f"device={name!r}: snug runs on cpu and cuda")
    if not torch.cuda.is_available():
        raise SnugError(f"device={name!r}: {why_no_cuda()}; use --device=cpu")
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        raise SnugError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    try:
        torch.cuda.set_device(device)  # also initialises CUDA, so that the allocator's counters exist
        torch.zeros(1, device=device).add_(1)
    except RuntimeError as error:
        raise SnugError(f"device={name!r}: {why_it_fails(error)}; use another device, or --device=cpu") from None
    configure_cuda(tf32)
    warn_without_kernels()
    return device


def warn_without_kernels():
    if why := why_no_kernels():
        print(f"warning: kernels are off, sampling has no CUDA graphs, all is slower: {why}", file=sys.stderr)


def configure_cuda(tf32: bool):
    """torch's switches for products and attention."""
    products = torch.backends.cuda.matmul
    products.allow_tf32 = tf32  # torch's older name: after fp32_precision="tf32" libraries could not read this one
    # A product of few rows is a sum of parts. If they are rounded to bfloat16, the sampler, which has few rows, differs
    # more from the trainer.
    products.allow_bf16_reduced_precision_reduction = False
    # On Hopper and Blackwell torch prefers cuDNN's attention in bfloat16. That builds a plan for every new shape, which
    # takes 0.05 to 1 s, and keeps all plans in host memory. Flash attention, the next in line, needs none.
    torch.backends.cuda.enable_cudnn_sdp(False)


def finds_gpu() -> bool:
    """Is there an NVIDIA GPU, a torch built for CUDA, and nothing that hides the one from the other?"""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")  # a number or an id; "", -1 or NoDevFiles hide all
    return torch.version.cuda is not None and bool(re.match(r"\d|GPU-|MIG-", visible)) and any(map(glob, GPU_FILES))


def why_no_cuda() -> str:
    """Why torch sees no CUDA device."""
    if not finds_gpu():
        return "this torch sees no CUDA device"
    try:
        loaded = re.search(r"\d{3,}\.[\d.]+", Path(LOADED_DRIVER).read_text())
    except OSError:  # in WSL Windows has the driver
        loaded = None
    try:
        torch.cuda.init()
        said = ""
    except (RuntimeError, AssertionError) as error:
        said = f"; torch says: {first_line(error).partition('. ')[0]}"
    oldest, unusable = OLDEST_DRIVER.get(torch.version.cuda.partition(".")[0]), "there is a GPU that torch cannot use"
    if loaded and oldest and int(loaded[0].partition(".")[0]) >= oldest:
        why = f"although its driver {loaded[0]} is new enough: a container, a job or CUDA_VISIBLE_DEVICES hides it"
        return f"{unusable}, {why}{said}"
    needs = f"CUDA {torch.version.cuda} needs NVIDIA's driver {oldest or 'of its own age'} or newer"
    return f"{unusable}; {needs}, loaded is {loaded[0] if loaded else 'an unknown one'}{said}"


def why_it_fails(error: Exception) -> str:
    """The error of the first operation on a GPU -> one line."""
    line = first_line(error)
    if "no kernel image" in line:
        line += f": this torch is built for {' '.join(torch.cuda.get_arch_list())}; pytorch.org has others"
    return line


def notes(device: torch.device, settings) -> list[str]:
    """Lines for a run's log: what its GPU cannot do in settings.dtype, or could do faster."""
    if device.type != "cuda":
        return []
    major, minor = torch.cuda.get_device_capability(device)
    gpu = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if settings.dtype == "bfloat16" and major < 8:
        lacks = "neither bfloat16 units nor fused attention in bfloat16"
        costs = "attention's memory grows with the square of the length, which --plan does not count"
        return [f"warning: {gpu} has {lacks}: {costs}; use --dtype=float32 --param_dtype=float32"]
    if settings.dtype == "float32" and major >= 8 and not settings.tf32:
        gains = "multiplies float32 on tensor cores, faster, with relative errors near 1e-3 instead of 1e-7"
        return [f"hint: on {gpu} --tf32=true {gains}"]
    return []
