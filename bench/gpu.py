"""What is measured on a GPU, in one command of at most ten minutes: the tests that need one, then the benches.

    make bench-gpu        or, in the virtual environment, python bench/gpu.py [--only=tests,sampling]
    python bench/gpu.py --dry-run        the same benches with tiny shapes, on a CPU too; tests are only collected

The steps run one after the other, the most valuable first, each in a process group of its own, which is killed at the
step's limit or on Ctrl-C. bench/results/<device>-<commit>/ gets log.txt (what the steps print), results.jsonl (a line
for each result, as soon as it is known) and, after each step, summary.json. A table of the aims comes last.
Exit code 1 if a step failed or was stopped, 2 where there is no GPU, 130 after Ctrl-C.
"""

import argparse
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import common
import torch

HOME = Path(__file__).parent.parent
PACKAGES = "torch triton transformers pytest pytest-xdist trl liger-kernel cut-cross-entropy".split()
TESTS = (
    "kernels layer_kernels adamw_kernel kvcache draw sample logprobs model optimizer streams loss trajectory".split()
)
RESUME = "tests/test_checkpoint.py::test_a_resumed_run_is_the_uninterrupted_one"
HOST_OPTIONS = "host reference,activation offload,host optimizer,grad offload"


def make_steps(dry_run, scratch):
    """-> (name, command's words, seconds it may take, environment) of each step; a dry run's has no limit"""
    tests = [f"tests/test_{name}.py" for name in TESTS]
    pytest = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", *tests]
    pytest += [RESUME, "-k", "not compiled and not interpreter"]  # those need no GPU
    pytest += ["--collect-only"] if dry_run else ["-n", "4"] if installed("pytest-xdist") else []
    learning = ["bench/learning.py", "--only=countdown", "--seeds=1", "--jobs=1", f"--out_dir={scratch}"]
    shapes = [f"--shapes={'tiny' if dry_run else 'cuda'}"]
    sanitizer = {} if dry_run and common.DEVICE == "cpu" else {"TORCH_CUDA_SANITIZER": "1"}
    steps = [
        ("tests", pytest, 140, {}),
        ("logprobs", ["bench/logprobs.py", *shapes], 90, {}),
        ("sampling", ["bench/sampling.py", "--rounds=2", *shapes], 100, {}),
        ("iteration", ["bench/memory.py", "--only=1.5B", *shapes], 50, {}),
        ("memory", ["bench/memory.py", "--only=tiny,GPT-2,0.5B", *shapes], 90, {}),
        ("learning", [*learning, "--seconds=65", *shapes], 80, {}),
        ("sanitizer", ["bench/memory.py", "--shapes=tiny", f"--only={HOST_OPTIONS}"], 45, sanitizer),
    ]
    return [(name, words, math.inf if dry_run else limit, extra) for name, words, limit, extra in steps]


def run_step(words, seconds, environment, log):
    """Run `python words`, its output to the end of `log` -> "ok", or why not. No process of its group is left."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=HOME, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
            return "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:  # after Ctrl-C, too
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def run_steps(steps, summary, folder, seconds):
    """Run the steps within so many seconds in all, and write summary.json after each."""
    end, log, results = time.monotonic() + seconds, folder / "log.txt", folder / "results.jsonl"
    environment = {"BENCH_RESULTS": str(results), "PYTHONUNBUFFERED": "1"}
    environment |= {"OMP_NUM_THREADS": "1"} if common.DEVICE == "cpu" else {}
    for name, words, limit, extra in steps:
        started, limit = time.monotonic(), min(limit, end - time.monotonic())
        step = summary["steps"][name] = dict(state="no time left", seconds=0.0, last="", results=[])
        if limit > 0:
            print(f"{name}: at most {limit:.0f} s", flush=True)
            with open(log, "a") as file:
                file.write(f"\n===== {name}: {' '.join(words)}\n")
            before, step["state"] = log.stat().st_size, "interrupted"
            try:
                step["state"] = run_step(words, limit, environment | extra | {"BENCH_STEP": name}, log)
            finally:
                step["seconds"] = round(time.monotonic() - started, 1)
                step["last"] = (log.read_bytes()[before:].decode(errors="replace").strip().splitlines() or [""])[-1]
                step["results"] = results_of(name, results)
                write(summary, folder)
        write(summary, folder)


def results_of(step, path):
    """-> the step's results so far, the last one of each name."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # a killed process may leave half a line
    return list({row["name"]: row for row in rows if row["step"] == step}.values())


def write(summary, folder):
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def print_table(summary):
    for name, step in summary["steps"].items():
        aims = [row for row in step["results"] if "aim" in row]
        print(f"{name:10} {step['state']:20} {step['seconds']:6.1f} s  {'' if aims else step['last'][:80]}")
        rows = aims or step["results"]
        for row in rows:
            print(f"    {common.in_words(row)} {'' if row.get('reached', True) else '  MISSED'}")


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(words, make_steps=make_steps):
    """-> the exit code"""
    options = argparse.ArgumentParser(description="The tests that need a GPU and every bench of one.")
    options.add_argument("--only", default="", help="steps, comma-separated; empty: all")
    options.add_argument("--dry-run", action="store_true", help="tiny shapes; no GPU needed")
    options.add_argument("--seconds", type=float, default=590, help="that all steps may take together")
    options.add_argument("--folder", default="", help="where results go; empty: bench/results/<device>-<commit>")
    arguments = options.parse_args(words)
    if common.DEVICE == "cpu" and not arguments.dry_run:
        print("error: this torch sees no CUDA device; --dry-run runs tiny shapes on a CPU", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if common.DEVICE == "cuda" else f"CPU {platform.machine()}"
    commit = common.commit()
    name = re.sub(r"[^a-z0-9]+", "-", f"{'dry run ' if arguments.dry_run else ''}{device} {commit}".lower())
    folder = Path(arguments.folder or HOME / "bench/results" / name)
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("log.txt", "results.jsonl"):
        (folder / old).unlink(missing_ok=True)
    summary = dict(device=device, commit=commit, python=platform.python_version(), cuda=torch.version.cuda)
    summary |= dict(versions={package: installed(package) for package in PACKAGES}, steps={})
    print(f"not installed: {', '.join(name for name in PACKAGES if not installed(name)) or 'nothing'}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # both end in the table of what there is
        signal.signal(number, signal.default_int_handler)
    interrupted = False
    with tempfile.TemporaryDirectory() as scratch:
        steps = make_steps(arguments.dry_run, scratch)
        try:
            steps = [step for step in steps if not arguments.only or step[0] in arguments.only.split(",")]
            run_steps(steps, summary, folder, arguments.seconds)
        except KeyboardInterrupt:
            interrupted = True
    print(f"\n{device}, torch {torch.__version__}, commit {commit}; all of it is in {folder}")
    if arguments.dry_run:
        print("A dry run: the shapes are tiny, and the figures say nothing.")
    print_table(summary)
    return 130 if interrupted else int(any(step["state"] != "ok" for step in summary["steps"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
