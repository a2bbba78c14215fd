"""bench/all.py without a GPU: its steps, a dry run. bench/iteration.py: what it compares."""

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from helpers import HOME
from helpers.commands import python
from snug.device.pick import pick_device


def summary(tmp_path):
    return json.loads((tmp_path / "here.json").read_text())["steps"]


@pytest.fixture
def bench(monkeypatch):
    """-> bench/all.py, with bench/ on the path, after the project: both have a `logprobs` and a `memory`."""
    monkeypatch.syspath_prepend(HOME / "bench")
    monkeypatch.syspath_prepend(HOME)
    return importlib.import_module("all")


def test_without_a_gpu_it_says_so(tmp_path):
    result = python("bench/all.py", "--device=cuda", f"--folder={tmp_path}/here", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2 and "sees no CUDA device" in result.stderr and not [*tmp_path.iterdir()]


def test_every_test_of_a_kernel_runs_on_a_gpu(bench):
    """Files with tests that run in the interpreter, or on CUDA alone."""
    marks = re.compile("INTERPRETED|in_kernels|skipif\\(DEVICE == .cpu.")
    files = [path for path in HOME.glob("tests/test_*.py") if path != Path(__file__)]
    needed = {path.stem.removeprefix("test_") for path in files if marks.search(path.read_text())}
    assert len(needed) > 6 and needed <= set(bench.TESTS)
    assert all((HOME / f"tests/test_{name}.py").exists() for name in bench.TESTS)


def test_what_overruns_is_cut_and_said_and_the_table_says_where_to_look(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    row = dict(step="slow", name="speed", value=3.0, unit="ms", reached=False, look="the kernels")
    first, late = json.dumps(row), json.dumps(row | dict(value=4.0))
    slow = f"import os, time; put = open(os.environ['BENCH_RESULTS'], 'a', 1).write; put('{first}\\n'); time.sleep(20); put('{late}\\n')"
    steps = [("slow", ["-c", slow], 5, {}), ("next", ["-c", "print('done')"], 60, {})]
    assert bench.main(["--dry-run", f"--folder={tmp_path}/here"], lambda *_: steps) == 1
    states = {name: (step["state"], step["results"]) for name, step in summary(tmp_path).items()}
    assert states == dict(slow=("stopped after 5 s", [row]), next=("ok", []))
    assert re.search("slow +speed +3 ms +LOOK: the kernels\nnext +ok .* done\n", capsys.readouterr().out)


# The aims of a step in a dry run.
AIMS = dict(main=4, iteration=2, decode=1, nf4=2, train=11, visit=1, cards=2)
AIMS |= dict(sampling=4, logprobs=3, memory=11, sanitizer=4)


@pytest.mark.long
def test_plans_of_one_device_are_a_table_and_a_layer_has_the_launches_that_the_texts_say():
    """All other benches are steps of a dry run."""
    output = python("bench/sizing.py", "--shapes=tiny", "--only=1").stdout
    assert output.splitlines()[2].startswith("| tiny | 1 | 0.1 rollout | ")
    assert re.search("decode step, 64 rows +8 .*\ntrain, 4096 tokens +34 ", python("bench/layers.py").stdout)


def test_every_bench_is_run_by_a_test(bench, tmp_path):
    steps = bench.make_steps("cuda", True, tmp_path)
    run = {Path(word).stem for _, words, *_ in steps for word in words if word.startswith("bench/")}
    programs = {path.stem for path in HOME.glob("bench/*.py")}
    assert programs == run | {"all", "common", "layers", "sizing"}


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("logprobs", "sampling", "iteration", "train", "cards")]


@pytest.mark.parametrize("name", [*LONG, "decode", "nf4", "visit"])
def test_a_bench_runs(name, tmp_path, monkeypatch, bench):
    """A command of make bench-gpu, with tiny shapes: imports, options, every aim, and the device set up as in a run."""
    devices = []
    (words,) = [words for step, words, *_ in bench.make_steps("cuda", True, tmp_path) if step == name]
    path = tmp_path / "results.jsonl"
    monkeypatch.setenv("BENCH_RESULTS", str(path))
    monkeypatch.setenv("BENCH_STEP", name)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(bench.common, "pick_device", lambda name: devices.append(name) or pick_device(name))
    runpy.run_path(str(HOME / words[0]), run_name="__main__")
    results = bench.results_of(name, path)
    assert sum("look" in row for row in results if "aim" in row) == AIMS[name] and bench.common.DEVICE in devices


def test_logs_are_drawn(bench, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"iter": 0, "reward_mean": 1, "divergence": 1, "completion_length_mean": 9}\n')
    runpy.run_path(str(HOME / "bench/learning.py"))["draw_logs"]([tmp_path], tmp_path / "drawn.png")


@pytest.mark.long
def test_every_bench_runs(tmp_path):
    output = python("bench/all.py", "--dry-run", "--seconds=1500", f"--folder={tmp_path}/here").stdout
    aims_of = AIMS | dict(tests=0, learning=0, phases=int(bool(importlib.util.find_spec("trl"))))
    steps = summary(tmp_path)
    assert {name: step["state"] for name, step in steps.items()} == dict.fromkeys(aims_of, "ok"), output
    aims = {(name, row["name"]) for name, step in steps.items() for row in step["results"] if "aim" in row}
    assert len(aims) == sum(aims_of.values())
    assert int(re.search(r"(\d+)/\d+ tests collected", output)[1]) >= 800
    runs = "sft_countdown", "grpo_countdown_dapo", "more_sft_countdown"
    assert {row["name"] for row in steps["learning"]["results"]} == {f"{run}_1: held-out pass@1" for run in runs}
