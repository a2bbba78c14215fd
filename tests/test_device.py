"""Which device a run gets, what stops it, and what it is told. Drivers and GPUs are faked."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, HOME
from interpreted import compiles, cubin_resources

import runs.loading
import train_sft
import training.loop
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings
from snug import kernels
from snug.device.cpu import stays_float32
from snug.device.host import Ledger
from snug.device.kinds import PlanningMode
from snug.device.pick import pick_device, with_dtype
from snug.kernels import uses_triton, why_no_kernels
from snug.logprobs.head import ALREADY_ADDED
from snug.options import SnugError

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a real GPU answers otherwise than the faked ones")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update it\nmore"


def failing(message, kind=RuntimeError):
    def fail(*args, **options):
        raise kind(message)

    return fail


def refused(name):
    """The message of the SnugError: one line."""
    with pytest.raises(SnugError) as caught:
        pick_device(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def h100(monkeypatch):
    """A CUDA device that torch can use. Its tensors are on the CPU."""
    zeros, (products, attention) = torch.zeros, switches()
    why_no_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    yield monkeypatch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.enable_cudnn_sdp(attention)
    why_no_kernels.cache_clear()


def switches():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cuda.cudnn_sdp_enabled()


# ----------------------------------------------------------------------------------------------------------------------
# A GPU that cannot be used


def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason_of_torch(h100):
    h100.setattr(torch.cuda, "init", failing(TOO_OLD))
    first_line = TOO_OLD.partition("\n")[0]
    assert refused("cuda") == f"device='cuda': {first_line}; use another device, or --device=cpu"
    h100.setattr(torch.cuda, "init", failing("Torch not compiled with CUDA enabled", AssertionError))
    assert refused("cuda:0").startswith("device='cuda:0': Torch not compiled with CUDA enabled;")
    h100.setattr(torch.cuda, "init", lambda: None)
    h100.setattr(torch.cuda, "set_device", failing("CUDA error: all CUDA-capable devices are busy or unavailable"))
    assert refused("auto").startswith("device='auto': CUDA error: all CUDA-capable devices are busy or unavailable;")


def test_a_command_ends_with_one_line_and_2(tmp_path):
    command = [sys.executable, "train_sft.py", "--digits=1", "--device=cuda", f"--out_dir={tmp_path}/run"]
    end = subprocess.run(command, cwd=HOME, capture_output=True, text=True)
    assert end.returncode == 2 and end.stderr.count("\n") == 1
    assert end.stderr.startswith("error: device='cuda': ") and end.stderr.endswith("or --device=cpu\n")
    assert not (tmp_path / "run").exists()


def test_other_devices_are_refused(h100):
    assert "snug runs on cpu and cuda; use another device, or" in refused("mps")
    assert refused("gpu").startswith("device='gpu': ")


# ----------------------------------------------------------------------------------------------------------------------
# How torch is told to use it


def test_cudnn_attention_is_off_and_tf32_as_asked(h100):
    for tf32, products in ((True, "tf32"), (False, "ieee")):
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert pick_device("auto", tf32) == torch.device("cuda", 0)
        assert switches() == (products, False)
        stays_float32.__wrapped__()  # which changes how a CPU multiplies, and back
        assert switches() == (products, False) and torch.backends.mkldnn.matmul.fp32_precision == "none"
        assert torch.backends.cuda.matmul.allow_tf32 == tf32  # torch's older names, which libraries read, still work
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_without_a_gpu_auto_is_the_cpu_which_leaves_the_switches_alone():
    before = switches()
    assert pick_device("auto", tf32=True).type == "cpu"
    assert switches() == before


@pytest.mark.parametrize("capability, fast", [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_the_default_dtype_is_what_the_device_is_fast_in(h100, capability, fast):
    h100.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    half = GRPOSettings(param_dtype="bfloat16")
    assert with_dtype(GRPOSettings(), "cuda").dtype == fast and with_dtype(GRPOSettings(), "cpu").dtype == "float32"
    assert with_dtype(half, "cuda").dtype == with_dtype(half, "cpu").dtype == "bfloat16"
    for chosen in ("float32", "bfloat16"):
        assert with_dtype(GRPOSettings(dtype=chosen), "cuda").dtype == chosen


def test_a_run_asks_for_its_tf32(tmp_path, monkeypatch):
    asked = []
    for module in (training.loop, runs.loading):
        monkeypatch.setattr(module, "pick_device", lambda *args: asked.append(args) or torch.device("cpu"))
    shape = dict(digits=1, n_layer=1, n_embd=16, max_iters=1, batch_size=2, eval_prompts=0)
    train_sft.main(prepare(SFTSettings(**shape, tf32=True, out_dir=str(tmp_path / "run"))))
    runs.loading.load_run(tmp_path / "run", "cuda")
    assert asked == [("auto", True), ("cuda", True)]


# ----------------------------------------------------------------------------------------------------------------------
# Kernels that cannot be built


@pytest.fixture
def triton_driver(h100, tmp_path):
    """Triton builds its launcher anew, as on a new machine."""
    from triton.backends.nvidia import driver

    h100.setenv("TRITON_CACHE_DIR", str(tmp_path))
    h100.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    yield h100
    driver.libcuda_dirs.cache_clear()
    driver.library_dirs.cache_clear()


@pytest.mark.skipif(kernels.triton is None, reason="without Triton nothing is built")
@pytest.mark.parametrize("compiler", ["/bin/false", "nowhere"])
def test_what_keeps_triton_from_its_first_kernel_is_told_in_one_line(triton_driver, compiler):
    triton_driver.setenv("CC", compiler)
    why = why_no_kernels()
    assert compiler in why and why.endswith("headers: apt install gcc python3-dev)") and "\n" not in why


def test_without_kernels_plain_torch_runs_and_is_planned(h100, capsys):
    h100.setattr(kernels, "why_no_kernels", lambda: "Triton needs a C compiler")
    kernels.warn_without_kernels()
    said = capsys.readouterr().err
    assert said.startswith("warning: kernels are off") and said.endswith(": Triton needs a C compiler\n")
    h100.setattr(kernels, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False))))
    with PlanningMode("cuda", Ledger()):
        planned = torch.empty(3)
    for why in ("", "Triton needs a C compiler"):
        h100.setattr(kernels, "why_no_kernels", lambda why=why: why)
        assert uses_triton(planned) == (why == "") and not uses_triton(torch.empty(3))


def test_a_machine_without_a_gpu_plans_with_kernels(monkeypatch):
    why_no_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "triton", SimpleNamespace())
    assert why_no_kernels() == ""
    why_no_kernels.cache_clear()
    monkeypatch.setattr(kernels, "triton", None)
    assert why_no_kernels() == "Triton is missing (pip install triton)"
    why_no_kernels.cache_clear()


def test_a_message_from_the_device_is_short_enough():
    """torch._assert_async refuses longer ones, on CUDA only."""
    assert len(ALREADY_ADDED) < 255


@compiles
@pytest.mark.skipif(kernels.triton is None, reason="nothing to compile with")
def test_the_smallest_kernel_compiles(tmp_path):
    resources, _ = cubin_resources(kernels.smallest_kernel, 90, {}, {}, [], 1, tmp_path)
    assert resources["REG"] > 0
