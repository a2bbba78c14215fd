"""What a device does, in one command: on a GPU the main job, the tests that need one, then speed and memory.

    make bench            or, in the virtual environment, python bench/all.py --device=cpu [--only=head,memory]
    make bench-gpu        or python3 bench/all.py --device=cuda: eight minutes; then, with time left, the other steps:
    python3 bench/all.py --device=cuda --only=cards,logprobs,memory,sampling
    python bench/all.py --dry-run        all steps of a GPU with tiny shapes, on a CPU too; tests are only collected

Nothing is installed: it runs on a machine without a network, with torch, Triton, transformers and pytest. On one that is
lent for a quarter of an hour: OUT comes back; a folder out/sft_small that is carried there saves the main job its SFT.

    nvidia-smi; python3 bench/all.py --device=cuda --seconds=480 --folder=$OUT/gpu

The steps run one after the other, the most valuable first, each in a process group of its own, which is killed at the
step's limit or on Ctrl-C. AFTER says which run with --only alone.
bench/results/<device>.json gets device, versions, commit and, after each step, its results and the GPU's clocks,
temperature and power. With --only, steps that ran before at the same commit with the same versions stay.
bench/results/<device>/ gets log.txt (what the steps print) and results.jsonl (a line for each result, as soon as it is
known). A table comes last: each figure, its aim, its share of it, and where to look first if it misses it.
Peers that are not installed (TRL, Liger, cut-cross-entropy) are left out, and the results say so: their version is null.
Exit code 1 if a step failed or was stopped, 2 without the device, 130 after Ctrl-C.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
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
# Of a GPU's kernels, graphs and copies first, then what stands on them.
TESTS = "trust flash kernels layer_kernels adamw_kernel kvcache draw replay graphs teacher logprobs sample".split()
TESTS += "delta_step model packed batch episodes nf4 lora grpo optimizer streams loss collect ladder memory".split()
TESTS += "checkpoint evaluate guard oom sft models agents probe fork adapters pretrained device saver".split()
AFTER = "cards sampling logprobs memory sanitizer phases learning".split()  # with --only, and in dry runs
HOST_OPTIONS = "host reference,activation offload,host optimizer,grad offload"


def make_steps(device, dry_run, scratch):
    """-> (name, command's words, seconds it may take, environment) of each step. A dry run has no limits."""
    return cpu_steps() if device == "cpu" and not dry_run else cuda_steps(dry_run, scratch)


def cpu_steps():
    steps = [
        ("head", ["bench/logprobs.py", "--only=head"], 110),
        ("sampling", ["bench/sampling.py", "--rounds=15", "--only=2 x 64"], 110),
        ("iteration", ["bench/iteration.py", "--rounds=5", "--only=short"], 240),
        ("memory", ["bench/memory.py", "--only=small"], 90),
    ]
    environment = {"CUDA_VISIBLE_DEVICES": "", "BENCH_ITERATIONS": "15"}  # short iterations: the median of more
    return [(name, [*words, "--shapes=cpu"], limit, environment) for name, words, limit in steps]


def cuda_steps(dry_run, scratch):
    tests = [f"tests/test_{name}.py" for name in TESTS]
    pytest = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", *tests]
    pytest += ["-k", "not compiled and not interpreter"]  # those need no GPU
    pytest += ["--continue-on-collection-errors"]  # a file may need a package that is not there
    pytest += (
        ["--collect-only"] if dry_run else ["-n", str(min(8, os.cpu_count()))] if installed("pytest-xdist") else []
    )
    learning = ["bench/learning.py", "--only=countdown", "--seeds=1", "--jobs=1", f"--out_dir={scratch}"]
    learning += ["--seconds=500"]
    shapes = [f"--shapes={'tiny' if dry_run else 'cuda'}"]
    sanitizer = {} if dry_run and common.DEVICE == "cpu" else {"TORCH_CUDA_SANITIZER": "1"}
    steps = [  # those before AFTER take 480 s at most
        ("main", ["bench/job.py", *shapes], 110, {}),
        ("tests", pytest, 130, {}),
        ("iteration", ["bench/memory.py", "--only=1.5B", *shapes], 60, {}),
        ("decode", ["bench/gpu.py", "--only=decode", *shapes], 45, {}),
        ("nf4", ["bench/gpu.py", "--only=nf4,nf4_decode", *shapes], 45, {}),
        ("train", ["bench/gpu.py", "--only=attention,ceilings,train,optimizer,mismatch", *shapes], 65, {}),
        ("visit", ["bench/logprobs.py", "--only=loss", *shapes], 25, {}),
        ("cards", ["bench/memory.py", "--only=GB card", *shapes], 150, {}),
        ("sampling", ["bench/sampling.py", "--rounds=2", *shapes], 130, {}),
        ("logprobs", ["bench/logprobs.py", *shapes], 120, {}),
        ("memory", ["bench/memory.py", "--only=tiny,GPT-2,0.5B", *shapes], 90, {}),
        ("sanitizer", ["bench/memory.py", "--shapes=tiny", f"--only={HOST_OPTIONS}"], 45, sanitizer),
        ("phases", ["bench/iteration.py", "--rounds=1", "--only=GPT-2,uniform", *shapes], 80, {}),
        ("learning", [*learning, *shapes], 590, {}),
    ]
    return [(name, words, math.inf if dry_run else limit, extra) for name, words, limit, extra in steps]


def run_step(words, seconds, environment, log):
    """Run `python words` and append the output to `log` -> "ok", or why not. Ends all processes of its group."""
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
    """Run the steps, within `seconds` for all of them, and write the summary after each."""
    end, log, results = time.monotonic() + seconds, folder / "log.txt", folder / "results.jsonl"
    environment = {"BENCH_RESULTS": str(results), "PYTHONUNBUFFERED": "1"}
    environment |= {"OMP_NUM_THREADS": "1"} if summary["shapes"] == "tiny" and common.DEVICE == "cpu" else {}
    for name, words, limit, extra in steps:
        started = time.monotonic()
        limit = max(0.0, min(limit, end - started))
        print(f"{name}: at most {limit:.0f} s", flush=True)
        with open(log, "a") as file:
            file.write(f"\n===== {name}: {' '.join(words)}\n")
        before = log.stat().st_size
        step = summary["steps"][name] = dict(state="interrupted")
        try:
            step["state"] = run_step(words, limit, environment | extra | {"BENCH_STEP": name}, log)
        finally:
            step["seconds"] = round(time.monotonic() - started, 1)
            step["last"] = (log.read_bytes()[before:].decode(errors="replace").strip().splitlines() or [""])[-1]
            step["results"] = results_of(name, results)
            step |= gpu_state()
            file_of(folder).write_text(json.dumps(summary, indent=1) + "\n")


def gpu_state():
    """-> {"gpu": driver, clocks, temperature and power as nvidia-smi says them}, or {} where it is not installed."""
    if not shutil.which("nvidia-smi"):
        return {}
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    values = subprocess.run(command, capture_output=True, text=True).stdout.split(", ")
    return dict(gpu=dict(zip(fields.split(","), map(str.strip, values), strict=False)))


def results_of(step, path):
    """-> the step's results so far, the last one of each name."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # a killed process may leave half a line
    return list({row["name"]: row for row in rows if row["step"] == step}.values())


def file_of(folder):
    """bench/results/<device>.json of bench/results/<device>/."""
    return folder.with_name(folder.name + ".json")


def steps_before(summary, folder):
    """-> the steps of an earlier run on this device, if commit and versions were the same."""
    if not file_of(folder).exists():
        return {}
    before = json.loads(file_of(folder).read_text())
    return before["steps"] if before | {"steps": {}} == summary | {"steps": {}} else {}


def print_table(summary):
    """Steps with their state, and their figures, those with an aim alone if there are any: ok, or where to look first."""
    for name, step in summary["steps"].items():
        rows = [row for row in step["results"] if "reached" in row]
        last = "" if rows and step["state"] == "ok" else step["last"][:80]
        print(f"{name:10} {step['state']:20} {step['seconds']:6.1f} s  {last}")
        for row in rows or step["results"]:
            verdict = {True: "ok", False: f"LOOK: {row.get('look', 'log.txt')}"}.get(row.get("reached"), "")
            print(f"{name:10} {common.in_words(row)}  {verdict}")


def cpu_name():
    """-> `AMD EPYC, 2 threads`"""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    return f"{name[1].strip() if name else platform.machine()}, {torch.get_num_threads()} threads"


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(words, make_steps=make_steps):
    """-> the exit code"""
    options = argparse.ArgumentParser(description="The benches of a device, and on a GPU the tests that need one.")
    options.add_argument(
        "--device", choices=("cuda", "cpu"), default=common.DEVICE, help="default: cuda if there is one"
    )
    options.add_argument("--only", default="", help="steps, comma-separated; empty: all")
    options.add_argument("--dry-run", action="store_true", help="tiny shapes; no GPU needed")
    options.add_argument("--seconds", type=float, default=590, help="limit for all steps together")
    options.add_argument("--folder", default="", help="for log.txt and results.jsonl; empty: bench/results/<device>")
    arguments = options.parse_args(words)
    if arguments.device == "cuda" and common.DEVICE == "cpu" and not arguments.dry_run:
        print("error: this torch sees no CUDA device; --dry-run runs tiny shapes on a CPU", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if arguments.device == "cuda" == common.DEVICE else cpu_name()
    commit = common.commit()
    name = re.sub(r"[^a-z0-9]+", "-", f"{'dry run ' if arguments.dry_run else ''}{device}".lower()).strip("-")
    folder = Path(arguments.folder or HOME / "bench/results" / name)
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("log.txt", "results.jsonl"):
        (folder / old).unlink(missing_ok=True)
    summary = dict(device=device, commit=commit, python=platform.python_version(), cuda=torch.version.cuda)
    summary |= dict(shapes="tiny" if arguments.dry_run else arguments.device)
    summary |= dict(versions={package: installed(package) for package in PACKAGES}, steps={})
    if arguments.only:
        summary["steps"] = steps_before(summary, folder)
    print(f"not installed: {', '.join(name for name in PACKAGES if not installed(name)) or 'nothing'}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # both end in the table of what there is
        signal.signal(number, signal.default_int_handler)
    interrupted = False
    with tempfile.TemporaryDirectory() as scratch:
        steps = make_steps(arguments.device, arguments.dry_run, scratch)
        all_steps = [step[0] for step in steps if step[0] not in AFTER or arguments.dry_run]
        only = arguments.only.split(",") if arguments.only else all_steps
        if unknown := set(only) - {step[0] for step in steps}:
            sys.exit(f"error: no step is called {', '.join(unknown)}; there are {', '.join(step[0] for step in steps)}")
        try:
            steps = [step for step in steps if step[0] in only]
            run_steps(steps, summary, folder, arguments.seconds)
        except KeyboardInterrupt:
            interrupted = True
    print(f"\n{device}, torch {torch.__version__}, commit {commit}; everything is in {file_of(folder)}")
    if arguments.dry_run:
        print("A dry run: the shapes are tiny, and the figures say nothing.")
    print_table(summary)
    return 130 if interrupted else int(any(step["state"] != "ok" for step in summary["steps"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
