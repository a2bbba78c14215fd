"""Which device a run gets, what stops it, and what it is told. Drivers and GPUs are faked."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import grpo
import training.loop
from helpers.errors import refusal
from helpers.models import DEVICE
from helpers.runs import refused
from runs.prepare import prepare
from settings import GRPOSettings
from snug import kernels
from snug.device import cuda
from snug.device.cpu import stays_float32
from snug.device.kinds import MIB, kind_planned, upload
from snug.device.pick import pick_device, with_dtype
from snug.logprobs.head import ALREADY_ADDED
from snug.memory import MemoryMeter, fit
from snug.options import SnugError
from training.dry_run import DryRun

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a real GPU answers otherwise than the faked ones")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update it"
SMALL = dict(digits=1, n_layer=1, n_embd=16, batch_size=2, eval_prompts=0)


@pytest.fixture
def h100(monkeypatch):
    """A CUDA device that torch can use. Its tensors are on the CPU."""
    zeros, (products, attention) = torch.zeros, switches()
    answers = dict(is_available=True, init=None, device_count=1, set_device=None, get_device_name="NVIDIA H100")
    for name, answer in (answers | dict(get_device_capability=(9, 0))).items():
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=answer))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    yield monkeypatch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.enable_cudnn_sdp(attention)


def switches():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cuda.cudnn_sdp_enabled()


BUSY = "CUDA error: all CUDA-capable devices are busy or unavailable"
NOT_COMPILED = "Torch not compiled with CUDA enabled"


@pytest.mark.parametrize(
    "device, name, error, said",
    [
        ("cuda", "init", RuntimeError(f"{TOO_OLD}\nmore"), f"{TOO_OLD}; use another device, or --device=cpu"),
        ("cuda:0", "init", AssertionError(NOT_COMPILED), f"{NOT_COMPILED};"),
        ("auto", "set_device", RuntimeError(BUSY), f"{BUSY};"),
        ("xpu", "init", None, "snug runs on cpu, cuda and mps; use another device, or"),
        ("gpu", "init", None, ""),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_with_the_reason_of_torch(h100, device, name, error, said):
    h100.setattr(torch.cuda, name, Mock(side_effect=error))
    assert refused(pick_device, device).startswith(f"device='{device}': {said}")


def test_cudnn_attention_and_tf32_are_off(h100):
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert pick_device("auto") == torch.device("cuda", 0)
    assert switches() == ("ieee", False)
    stays_float32.__wrapped__()  # which changes how a CPU multiplies, and back
    assert switches() == ("ieee", False) and torch.backends.mkldnn.matmul.fp32_precision == "none"
    assert not torch.backends.cuda.matmul.allow_tf32  # torch's older names, which libraries read, still work
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize("capability, fast", [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_the_default_dtype_is_what_the_device_is_fast_in(h100, capability, fast):
    h100.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    half = GRPOSettings(param_dtype="bfloat16")
    assert with_dtype(GRPOSettings(), "cuda").dtype == fast and with_dtype(GRPOSettings(), "cpu").dtype == "float32"
    assert with_dtype(half, "cuda").dtype == with_dtype(half, "cpu").dtype == "bfloat16"
    for chosen in ("float32", "bfloat16"):
        assert with_dtype(GRPOSettings(dtype=chosen), "cuda").dtype == chosen
        auto = GRPOSettings(dtype=chosen, param_dtype="auto")
        auto.check()
        found = [with_dtype(auto, kind).param_dtype for kind in ("cuda", "cpu", "mps")]
        assert found == [chosen, "float32", "float32"]
    auto.dtype = "auto"
    assert with_dtype(auto, "cuda").param_dtype == fast and with_dtype(auto, "cpu").dtype == "float32"
    assert with_dtype(GRPOSettings(), "mps").dtype == "float32" and with_dtype(half, "mps").dtype == "bfloat16"


# Apple's MPS. How the loops run on it: tests/test_fake_mps.py


@pytest.fixture
def mac(monkeypatch):
    """A Mac: torch has MPS, whose tensors are on the CPU here. `mac.asked`: what was asked of torch.mps."""
    zeros, mps = torch.zeros, SimpleNamespace(asked=[])
    answers = dict(synchronize=None, empty_cache=None, driver_allocated_memory=5 * MIB)
    for name, answer in (answers | dict(recommended_max_memory=100 * MIB)).items():
        monkeypatch.setattr(torch.mps, name, lambda name=name, answer=answer: mps.asked.append(name) or answer)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    monkeypatch.setattr(fit, "available_on_host", Mock(side_effect=OSError("macOS has no /proc")))
    return mps


def test_auto_is_mps_where_there_is_no_cuda(mac, h100):
    assert kind_planned("auto") == "cuda" and pick_device("auto").type == "cuda"
    h100.setattr(torch.cuda, "is_available", lambda: False)
    assert kind_planned("auto") == "mps" and pick_device("auto") == pick_device("mps") == torch.device("mps")
    assert kind_planned("cpu") == "cpu"


def test_without_mps_it_is_refused():
    assert refused(pick_device, "mps").endswith("; use another device, or --device=cpu")
    with pytest.raises(SnugError, match="memory_budget_gb='auto' needs device=mps here"):
        fit.room_for(GRPOSettings(device="mps", memory_budget_gb="auto"), "mps")


def test_the_meter_of_mps_counts_tensors_and_waits_for_them(mac):
    with MemoryMeter("mps") as meter:
        with meter.phase("rollout"):
            kept, gone = torch.empty(2**18), torch.empty(2**19)
            del gone
            assert "synchronize" not in mac.asked
        assert mac.asked[-2:] == ["synchronize", "driver_allocated_memory"]
        stats = meter.stats()
    assert stats["mem_max_alloc_mb_rollout"] == 3 and stats["mem_alloc_mb"] == 1 and stats["mem_reserved_mb"] == 5
    assert len(kept)
    cuda.empty_cache()
    assert mac.asked[-1] == "empty_cache"


def test_a_budget_on_mps_is_a_share_of_what_metal_recommends(mac):
    settings = GRPOSettings(memory_budget_gb="auto")
    assert fit.room_for(settings, torch.device("mps")).device == 95 * MIB
    assert "teacher_device" in fit.ladder(replace(settings, teacher="t"), "cuda", 3, 5)
    steps = fit.ladder(replace(settings, teacher="t"), "mps", 3, 5)
    assert not {"reference", "teacher_device", "optimizer_device", "grad_offload", "activation_offload"} & steps.keys()
    prepared = prepare(GRPOSettings(**SMALL, memory_budget_gb="auto"))
    said = []
    fit.apply(DryRun(prepared, grpo.iterate), with_dtype(prepared.settings, "mps"), torch.device("mps"), said.append)
    assert said[-1].startswith("planned: peak_gib=0.0")


def test_the_mps_that_auto_chose_refuses_what_it_cannot_do(mac):
    settings = GRPOSettings(digits=1, optimizer_device="host", plan=True)
    with refusal("^device=mps does not support optimizer_device=host; use --optimizer_device=device,"):
        training.loop.run(prepare(settings), grpo.iterate)


def test_any_machine_plans_for_mps(capsys):
    training.loop.run(prepare(GRPOSettings(**SMALL, device="mps", plan=True)), grpo.iterate)
    said = capsys.readouterr()
    assert "planned for mps" in said.err + said.out and "warning" not in said.err


def test_mps_waits_for_uploads_that_are_not_pinned(monkeypatch):
    """torch copied memory to MPS that was already free (pytorch/pytorch issue 139550)."""
    seen = []
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, **options: seen.append((device.type, options)) or x)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: seen.append("pinned") or x)
    for kind in ("cpu", "mps", "cuda"):
        upload([1, 2], torch.device(kind))
    assert seen == [("cpu", {}), ("mps", {}), "pinned", ("cuda", dict(non_blocking=True))]


def test_amd_gets_no_option_that_its_triton_lacks(monkeypatch):
    """Nor more lanes than a program may have: a warp of CDNA has 64."""
    seen = []
    kernel = {(1,): lambda *arguments, **options: seen.append(options)}
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    for hip in (None, "6.4"):
        monkeypatch.setattr(torch.version, "hip", hip)
        fused = dict(num_warps=8, num_stages=1, enable_fp_fusion=False)
        for options in (dict(maxnreg=64, M=2), dict(num_warps=32), fused):
            kernels.launch(kernel, (1,), torch.empty(1), **options)
    assert seen[:3] == [dict(maxnreg=64, M=2), dict(num_warps=32), seen[2]]
    assert seen[3:] == [dict(M=2, num_warps=4), dict(num_warps=16), seen[2]]
    if kernels.triton is not None:
        from triton.backends.amd.compiler import HIPOptions

        assert seen[3].keys() | seen[5].keys() <= HIPOptions.__dataclass_fields__.keys() | {"M"}


def test_a_message_from_the_device_is_short_enough():
    """torch._assert_async refuses longer ones, on CUDA only."""
    assert len(ALREADY_ADDED) < 255
