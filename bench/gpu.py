"""Everything that is to be measured on a GPU, in one go of at most a quarter of an hour: the tests, then every bench at GPU sizes.

    make bench-gpu        or, in the virtual environment, python bench/gpu.py [--only=tests,sampling]

Each bench is a script whose last line is one JSON object. What they print goes into bench/results/<device>-<commit>/, with
device, versions and commit in summary.json; a short table comes last. A bench that fails or runs out of time is named and
the others go on. Exit code 1 if anything failed, 2 where there is no GPU.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HOME = Path(__file__).parent.parent
STEPS = (  # name, command, seconds it may take
    ("tests", ["-m", "pytest", "-q", "-p", "no:cacheprovider"], 240),
    ("sampling", ["bench/sampling.py", "--rounds=3"], 240),
    ("logprobs", ["bench/logprobs.py"], 150),
    ("memory", ["bench/memory.py"], 140),
    ("saving", ["bench/saving.py"], 60),
    (
        "addition",
        ["bench/learning.py", "--only=addition dapo", "--seeds=1", "--jobs=1", "--out_dir=out/bench_addition"],
        70,
    ),
)


def run_step(words, seconds, path):
    """Run one step, its output into `path` -> {"seconds", "ok", "last": its last line}."""
    started = time.perf_counter()
    try:
        result = subprocess.run([sys.executable, *words], cwd=HOME, capture_output=True, text=True, timeout=seconds)
        text, ok = result.stdout + result.stderr, result.returncode == 0
    except subprocess.TimeoutExpired as end:
        text, ok = (end.stdout or b"").decode(errors="replace") + f"\nstopped after {seconds} s", False
        result = None
    path.write_text(text)
    lines = (result.stdout if result else text).strip().splitlines() or [""]
    return {"seconds": round(time.perf_counter() - started, 1), "ok": ok, "last": lines[-1]}


def installed(names):
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main(only):
    import torch

    if not torch.cuda.is_available():
        print(
            "error: this torch sees no CUDA device; python bench/logprobs.py runs reduced shapes on a CPU",
            file=sys.stderr,
        )
        sys.exit(2)
    device = torch.cuda.get_device_name()
    commit = (
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HOME, capture_output=True, text=True).stdout.strip()
        or "unknown"
    )
    folder = HOME / "bench/results" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-').lower()}-{commit}"
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"device": device, "commit": commit, "python": platform.python_version(), "cuda": torch.version.cuda}
    summary["versions"] = installed(("torch", "triton", "trl", "liger-kernel", "cut-cross-entropy", "transformers"))
    summary["steps"] = {}
    for name, words, seconds in [step for step in STEPS if not only or step[0] in only.split(",")]:
        print(f"{name}: at most {seconds} s", flush=True)
        step = run_step(words, seconds, folder / f"{name}.txt")
        try:
            step["result"] = json.loads(step["last"])
        except ValueError:
            pass
        summary["steps"][name] = step
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\n{device}, torch {torch.__version__}, commit {commit}; everything in {folder.relative_to(HOME)}")
    for name, step in summary["steps"].items():
        print(
            f"{name:10} {'ok' if step['ok'] else 'FAILED':6} {step['seconds']:7.1f} s  {step['last'] if 'result' not in step else ''}"
        )
    sys.exit(0 if all(step["ok"] for step in summary["steps"].values()) else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The tests and every bench on a GPU.")
    parser.add_argument("--only", default="", help=f"some of {','.join(name for name, *_ in STEPS)}; empty: all")
    main(parser.parse_args().only)
