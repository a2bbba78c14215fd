"""What kind of device a tensor is on, and whether it is real or a planner's, which has a shape and no data.

Test: pytest tests/test_plan.py
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MIB = 2**20


class PlanningMode(FakeTensorMode):
    """Tensors made inside have shapes and no data. They stand for a device's of this kind: "cuda", "mps" or "cpu"."""

    def __init__(self, kind: str, host):
        super().__init__(allow_non_fake_inputs=True)
        self.kind, self.host = kind, host


def planning_mode(tensor: torch.Tensor) -> PlanningMode | None:
    return getattr(tensor, "fake_mode", None)


def is_planned(tensor: torch.Tensor) -> bool:
    """Has the tensor no data? Then kernels have nothing to do: their callers allocate all outputs."""
    return isinstance(tensor, FakeTensor)


def kind_of(tensor: torch.Tensor) -> str:
    """ "cuda", "mps" or "cpu": the kind of device a tensor is on, or is planned for."""
    mode = planning_mode(tensor)
    return mode.kind if mode else tensor.device.type


def kind_planned(device: str) -> str:
    """The option `device` -> "cuda", "mps" or "cpu"."""
    if device != "auto":
        return device.partition(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def off_mps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; if it is on MPS, a copy on the host, for float64 and for operations that MPS lacks. It waits."""
    return tensor.cpu() if kind_of(tensor) == "mps" else tensor


def logits_budget(chunk_mb: float, kind: str, head_bytes: int = 0):
    """The option logits_chunk_mb -> MiB for a chunk of logits and what is made of it; 0: the device's default.

    Each chunk reads the head of so many bytes, so the default is a quarter of them if that is more.
    """
    return chunk_mb or max(16 if kind == "cpu" else 256, head_bytes / 4 / MIB)
