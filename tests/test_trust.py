"""Kernels that raise, write nothing, are off by a hundredth or are right, on a GPU that is faked; and without kernels.

As in test_kernels.py, what needs kernels runs in Triton's interpreter. It cannot multiply in bfloat16."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo
import training.loop
from helpers.models import DEVICE, LINEAR, LLAMA
from helpers.pages import page_of
from helpers.runs import tiny
from interpreted import INTERPRETED, in_the_interpreter
from runs import loading
from runs.prepare import prepare
from settings import GRPOSettings
from snug import kernels, trust
from snug.decoding import draw, kvcache
from snug.device.host import Ledger
from snug.device.kinds import PlanningMode
from snug.device.processes import ONE_PROCESS
from snug.kernels import OFF, adamw, delta_step, flash, gated, launch, nf4, norm, rotary, uses_triton
from snug.logprobs import rows
from snug.options import SnugError

MODULES = dict(adamw=adamw, attention=flash, decode=kvcache, draw=draw, gated=gated, nf4=nf4, nf4_product=nf4)
MODULES |= dict(norm=norm, rotary=rotary, rows=rows, delta=delta_step)
# Windows and layers that see all, heads that are shared, partly rotated, a geglu.
SHAPE = LLAMA | dict(n_layer=6, full_every=2, sliding_window=20, n_embd=64, mlp="geglu", rotary_fraction=0.5)
SETTINGS = GRPOSettings(dtype="float32", lora_rank=5, base_dtype="nf4", group_size=3, init_from="x")
test_kernels_in_the_interpreter = in_the_interpreter(__file__, 45)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")
elsewhere = pytest.mark.skipif(INTERPRETED, reason="runs without kernels")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU whose tensors are on the CPU, and Triton's cache."""
    knobs = SimpleNamespace(cache=SimpleNamespace(dir=str(tmp_path)), runtime=SimpleNamespace(interpret=INTERPRETED))
    for module in (trust, kernels):
        monkeypatch.setattr(module, "triton", SimpleNamespace(__version__="3.7.1", knobs=knobs))
    for name, answer in dict(is_available=True, get_device_name="NVIDIA H100", synchronize=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    monkeypatch.setattr(trust, "empty_cache", lambda: None)
    monkeypatch.setattr(trust, "DEVICE", "cpu")
    yield monkeypatch
    OFF.clear()


def raises(*_, **__):
    raise RuntimeError("no kernel image\nis available")


def off_by_a_hundredth(kernel, grid, *arguments, **constants):
    tensors = [x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]
    before = [x.clone() for x in tensors]
    launch(kernel, grid, *arguments, **constants)
    for x, was in zip(tensors, before, strict=True):
        if not x.equal(was):
            x.mul_(1.01)


def faults_of(gpu, *wanted, dtype="float32"):
    """Try the cases of these kernels."""
    cases = trust.cases
    with gpu.context() as patch:
        patch.setattr(trust, "cases", lambda *about: (case for case in cases(*about) if case[0] in wanted))
        torch.use_deterministic_algorithms(True)  # new memory has NaN, not what an earlier case left there
        shape = LINEAR if "delta" in wanted else SHAPE
        faults = trust.try_kernels(replace(SETTINGS, dtype=dtype), shape)
        torch.use_deterministic_algorithms(False)
    return faults


@interpreted
@pytest.mark.parametrize("kernel", MODULES)
@pytest.mark.parametrize(
    "planted, said",
    [(launch, ""), (raises, "RuntimeError: no kernel image is available (Triton needs gcc and python3-dev)"),
     (lambda *_, **__: None, "off by "), (off_by_a_hundredth, "off by ")],
)  # fmt: skip
def test_what_is_wrong_is_found_and_what_is_right_is_not(kernel, planted, said, gpu):
    launches = []
    gpu.setattr(MODULES[kernel], "launch", lambda *a, **o: launches.append(a[0]) or planted(*a, **o))
    dtype = "float16" if kernel == "nf4_product" else "float32"
    faults = faults_of(gpu, kernel, dtype=dtype)
    assert launches and faults.keys() == ({kernel} if said else set())
    assert all(fault.startswith(said) and "\n" not in fault for fault in faults.values())
    before = launches.count(launches[0])
    assert faults_of(gpu, kernel, dtype=dtype) == faults  # now plain torch replaces it
    assert launches.count(launches[0]) == before


@interpreted
@pytest.mark.parametrize("kernel", ["attention", "gated", "nf4", "norm", "rotary", "rows"])
def test_what_is_wrong_in_backward_alone_is_found(kernel, gpu):
    in_backward = []

    def planted(*arguments, **options):
        in_backward.append(torch._C._current_graph_task_id() >= 0)
        (off_by_a_hundredth if in_backward[-1] else launch)(*arguments, **options)

    gpu.setattr(MODULES[kernel], "launch", planted)
    assert faults_of(gpu, kernel)[kernel].startswith("off by ") and not all(in_backward)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_this_gpu_has_no_wrong_kernel(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels.triton.knobs.cache, "dir", str(tmp_path))
    assert trust.try_kernels(replace(SETTINGS, dtype=dtype), SHAPE) == {}


# What a run tries, what it says, what it remembers


@pytest.fixture
def run(gpu):
    """A GPU with three kernels. `run.wrong` names the wrong ones: {name: what the kernel does to a right result}."""
    run = SimpleNamespace(wrong={}, tried=[], said=[], patch=gpu)

    def cases(settings, config):
        assert config.n_layer == 2 and config.head_size == 16 and max(config.windows) <= 1000
        for name in ("rows", "decode", "draw"):
            run.tried.append(name)
            wrong = run.wrong.get(name, lambda x: x)
            yield name, lambda x, wrong=wrong: x * 3 if x.dtype == torch.float64 else wrong(x * 3), (4, 4)

    gpu.setattr(trust, "cases", cases)
    return run


def choose(run, processes=ONE_PROCESS, **changes):
    run.tried.clear(), run.said.clear()
    return trust.choose_kernels(replace(SETTINGS, **changes), SHAPE, "cuda", run.said.append, processes)


@elsewhere
@pytest.mark.parametrize("share", [0.0, 1.01, torch.nan])
def test_a_wrong_kernel_is_replaced_and_one_line_says_so(share, run):
    run.wrong = dict(decode=lambda x: x.detach() * share)
    assert [choose(run)] == run.said and run.tried == ["rows", "decode", "draw"]
    assert run.said == [
        "warning: plain torch in place of kernels (decode) and no CUDA graphs, which is slower: off by "
        f"{abs(share - 1):.1%} on NVIDIA H100 (driver 13000, torch {torch.__version__}, Triton 3.7.1)"
    ]
    with PlanningMode("cuda", Ledger()):
        x = torch.empty(2)
    assert not uses_triton(x, "decode") and uses_triton(x, "draw") and not uses_triton(x.double(), "draw")
    # It may be mended: gcc is installed, for instance.
    run.wrong = {}
    assert choose(run) is None and run.tried and uses_triton(x, "decode") and run.said == []
    long = SHAPE | dict(sliding_window=2**18)  # Phi's, with 4,096 tokens
    assert trust.choose_kernels(SETTINGS, long, "cuda", run.said.append) is None


@elsewhere
def test_reasons_are_said_once_graphs_only_where_they_go_and_ranks_do_the_same(run):
    two = SimpleNamespace(from_all_ranks=lambda work: [dict(decode="off by 7.0% on NVIDIA L4"), work()])
    run.wrong = dict(rows=raises, draw=raises)
    choose(run)
    assert run.said[0].count("no kernel image") == 1 and "kernels (rows, draw), which" in run.said[0]
    choose(run, two)
    assert OFF.keys() == {"rows", "draw", "decode"} and "and no CUDA graphs" in run.said[0] and "L4" in run.said[0]
    run.patch.setattr(torch.cuda, "synchronize", raises)
    with pytest.raises(SnugError, match="^rows: .*start again with --device=cpu, a run also [^\n]*$"):
        choose(run)


@elsewhere
def test_what_is_right_is_remembered_for_this_machine_these_sources_and_such_runs(run, tmp_path):
    others = dict(group_size=4), dict(lora_rank=8), dict(base_dtype=""), dict(dtype="bfloat16")
    assert all(choose(run, **changes) is None and run.tried for changes in ({}, *others))
    assert choose(run, seed=7, learning_rate=1.0) is None and not run.tried
    for module, name, value in (
        (torch.cuda, "get_device_name", lambda: "NVIDIA L4"),
        (torch._C, "_cuda_getDriverVersion", lambda: 12080),
        (torch, "__version__", "2.12.0"),
        (trust.triton, "__version__", "3.8.0"),
        (trust, "__file__", str(tmp_path / "trust.py")),
    ):
        run.patch.setattr(module, name, value)
        assert choose(run) is None and run.tried, name
        assert choose(run) is None and not run.tried
    (tmp_path / "kernel.py").write_text("x = 1")
    assert choose(run) is None and run.tried


@elsewhere
def test_without_triton_and_by_option_all_are_replaced(run):
    assert choose(run, kernels="torch") and not run.tried
    assert run.said[0].endswith("kernels (all) and no CUDA graphs, which is slower: --kernels=torch")
    with PlanningMode("cuda", Ledger()):
        assert not any(uses_triton(torch.empty(2), kernel) for kernel in MODULES)
    run.patch.setattr(trust, "triton", None)
    assert "Triton is missing (pip install triton)" in choose(run) and not run.tried
    assert trust.choose_kernels(SETTINGS, SHAPE, "cpu", pytest.fail) is None and not OFF


@elsewhere
def test_a_plan_without_kernels_says_so_and_is_another(gpu, capsys):
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    shape = dict(n_layer=1, mlp="swiglu", position="rotary", norm="rmsnorm", n_head=4, n_embd=32, block_size=48)
    settings = GRPOSettings(digits=2, device="cuda", eval_prompts=0, plan=True, **shape)
    plans = []
    for settings.kernels in ("auto", "torch"):
        training.loop.run(prepare(settings), grpo.iterate)
        plans.append(capsys.readouterr().out.splitlines())
    assert plans[1][0].startswith("warning: plain torch in place of kernels (all) and no CUDA graphs")
    assert "warning" not in plans[0][0] and plans[0][-1] != plans[1][-1]


@elsewhere
def test_a_run_says_it_in_its_log_and_on_its_page_and_learns_the_same(tmp_path, monkeypatch, capsys):
    settings = tiny(tmp_path, max_iters=2)[1]
    settings.init_from, settings.beta, folders = "", 0.0, [tmp_path / "auto", tmp_path / "torch"]
    for folder in folders:
        settings.kernels, settings.out_dir = folder.name, str(folder)
        training.loop.run(prepare(settings), grpo.iterate)
        monkeypatch.setattr(training.loop, "choose_kernels", lambda *_: "warning: slow")
    a, b = (next(folder.rglob("model.safetensors")).read_bytes() for folder in folders)
    assert a == b
    assert ["warning: slow\n" in (folder / "log.txt").read_text() for folder in folders] == [False, True]
    assert pytest.importorskip("plotly") and page_of(folders[1:]).read_text().count("warning: slow<") == 1
    monkeypatch.setattr(loading, "choose_kernels", lambda settings, shape, kind, say: say(f"{settings.kernels} {kind}"))
    loading.load_run(folders[1], "cpu")
    assert "torch cpu\n" in capsys.readouterr().err
