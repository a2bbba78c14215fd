"""A CPU that is shared: seconds of an iteration of grpo_small alone and beside one busy process.

    python train_sft.py config/sft_small.py     # once: its warm start
    python bench/neighbour.py [--rounds=3] [--iterations=8]

With device/cpu.py as it is, and without its two parts: float32 products by MKL alone, and OpenMP's threads spinning as
they do by default. The six take turns, each in its own process. A figure is the median of a process's iterations
without the first two.

Prints a table and, last, one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path.insert(0, str(HOME))

ARMS = {"snug": (), "products by MKL": ("mkl",), "spinning": ("spin",)}


def arm(without, iterations):
    """In a process of its own: -> seconds of an iteration, and the process's resident MiB."""
    from options import read_settings
    from runs.prepare import prepare
    from settings import GRPOSettings

    with tempfile.TemporaryDirectory() as folder:
        words = [f"--out_dir={folder}/run", f"--max_iters={iterations}", "--eval_prompts=0", "--device=cpu"]
        prepared = prepare(*read_settings(GRPOSettings, [str(HOME / "config/grpo_small.py"), *words])[:2])
        import device.pick
        import grpo
        from device import cpu

        if "mkl" in without:
            cpu.stays_float32 = lambda: False
        if "spin" in without:
            device.pick.share_cores = lambda: None
        with open(os.devnull, "w") as sys.stdout:
            grpo.main(prepared)
        sys.stdout = sys.__stdout__
        lines = [json.loads(line) for line in open(f"{folder}/run/log.jsonl")][2:]
    seconds = statistics.median(line["time_s"] for line in lines)
    print(json.dumps([seconds, lines[-1]["mem_reserved_mb"]]))


def measured(without, iterations, busy):
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        words = [sys.executable, __file__, f"--iterations={iterations}", f"--without={','.join(without) or 'nothing'}"]
        run = subprocess.run(words, capture_output=True, text=True, cwd=HOME)
    finally:
        if neighbour:
            neighbour.kill()
    if run.returncode:
        raise SystemExit(run.stderr[-2000:])
    return json.loads(run.stdout.splitlines()[-1])


def main(arguments):
    import torch

    found = {name: {"alone": [], "beside": []} for name in ARMS}
    for _ in range(arguments.rounds):
        for name, without in ARMS.items():
            for place in ("alone", "beside"):
                found[name][place].append(measured(without, arguments.iterations, place == "beside"))
    rows = {}
    for name, places in found.items():
        alone, beside = ([seconds for seconds, _ in places[place]] for place in ("alone", "beside"))
        slower = [b / a for a, b in zip(alone, beside, strict=True)]
        row = {"alone s": alone, "beside s": beside, "times slower": slower, "MiB": [mib for _, mib in places["alone"]]}
        rows[name] = {key: [round(f(v), 3) for f in (statistics.median, min, max)] for key, v in row.items()}
        shown = (f"{key} {median} ({low} to {high})" for key, (median, low, high) in rows[name].items())
        print(f"{name:<16}", "   ".join(shown), flush=True)
    about = dict(machine=platform.machine(), torch=torch.__version__, threads=torch.get_num_threads())
    print(json.dumps(about | dict(load=os.getloadavg()[0], rows=rows)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An iteration alone and beside one busy process.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8, help="of a process; the first two are not counted")
    parser.add_argument("--without", help="used by the bench itself")
    arguments = parser.parse_args()
    arm(arguments.without.split(","), arguments.iterations) if arguments.without else main(arguments)
