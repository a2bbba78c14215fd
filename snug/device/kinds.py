"""What kind of device a tensor is on, and whether it is real or a planner's, which has a shape and no data.

Test: pytest tests/test_plan.py
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MIB = 2**20


class PlanningMode(FakeTensorMode):
    """Tensors made inside have shapes and no data. They stand for a device's of this kind, "cuda" or "cpu"."""

    def __init__(self, kind: str, host):
        super().__init__(allow_non_fake_inputs=True)
        self.kind, self.host = kind, host


def planning_mode(tensor: torch.Tensor) -> PlanningMode | None:
    return getattr(tensor, "fake_mode", None)


def is_planned(tensor: torch.Tensor) -> bool:
    """Has the tensor no data? Then kernels have nothing to do: their callers allocate all outputs."""
    return isinstance(tensor, FakeTensor)


def kind_of(tensor: torch.Tensor) -> str:
    """ "cuda" or "cpu": the kind of device a tensor is on, or is planned for."""
    mode = planning_mode(tensor)
    return mode.kind if mode else tensor.device.type


def kind_planned(device: str) -> str:
    """The option `device` -> "cuda" or "cpu"."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]


def logits_budget(chunk_mb: float, kind: str, head_bytes: int = 0):
    """The option logits_chunk_mb -> MiB for a chunk of logits and what is made of it; 0: the device's default.

    Each chunk reads the head of so many bytes, so the default is a quarter of them if that is more.
    """
    return chunk_mb or max(256 if kind == "cuda" else 16, head_bytes / 4 / MIB)
