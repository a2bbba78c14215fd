"""What kind of device a tensor is on, and whether it is real or a planner's, which has a shape and no data. Inputs for
a device: lengths that repeat, and uploads for which the host does not wait.

Test: pytest tests/test_plan.py
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MIB = 2**20
MULTIPLE = 16  # tokens


class PlanningMode(FakeTensorMode):
    """Tensors made inside have shapes and no data. They stand for a device's of this kind: "cuda", "mps" or "cpu"."""

    def __init__(self, kind, host):
        super().__init__(allow_non_fake_inputs=True)
        self.kind, self.host = kind, host


def is_planned(tensor):
    """Has the tensor no data? Then kernels have nothing to do: their callers allocate all outputs."""
    return isinstance(tensor, FakeTensor)


def kind_of(tensor) -> str:
    """ "cuda", "mps" or "cpu": the kind of device a tensor is on, or is planned for."""
    mode = getattr(tensor, "fake_mode", None)
    return mode.kind if mode else tensor.device.type


def kind_planned(device: str):
    """The option `device` -> "cuda", "mps" or "cpu"."""
    if device != "auto":
        return device.partition(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def off_mps(tensor) -> torch.Tensor:
    """The tensor; if it is on MPS, a copy on the host, for float64 and for operations that MPS lacks. It waits."""
    return tensor.cpu() if kind_of(tensor) == "mps" else tensor


def padded(length: int, tokens: torch.Tensor) -> int:
    """How long a row of `tokens` is made: on a GPU a multiple of 16 tokens.

    So a run has few shapes: the allocator can reuse its blocks, and the libraries their choice of kernels, or on MPS
    their graphs.
    """
    return -(-length // MULTIPLE) * MULTIPLE if kind_of(tokens) != "cpu" else length


def upload(numbers, device, dtype=torch.long) -> torch.Tensor:
    """Numbers to the device; on CUDA from pinned memory, so that the host does not wait. On a CPU it may be a view.

    MPS has to wait: it reads memory that is not pinned later, when it may be free.
    """
    numbers = torch.as_tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def logits_budget(chunk_mb: float, kind, head_bytes=0):
    """The option logits_chunk_mb -> MiB for a chunk of logits and what is made of it; 0: the device's default.

    Each chunk reads the head of so many bytes, so the default is a quarter of them if that is more.
    """
    return chunk_mb or max(16 if kind == "cpu" else 256, head_bytes / 4 / MIB)
