"""A CPU that is shared: seconds of an iteration of grpo_small alone and beside one busy process.

    python train_sft.py config/sft_small.py     # once: the warm start
    python bench/neighbour.py [--rounds=3] [--iterations=8]

With snug/device/cpu.py as it is, and with all float32 products by MKL. The four cases take turns, each in a process. A process's figure is the median of its iterations without the first two.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile

from common import in_a_process, median_result, ratio_result

import grpo
from runs.log import read_log
from runs.prepare import prepare
from settings import GRPOSettings
from snug.device import cpu
from snug.options import read_settings

ARMS = {"snug": "nothing", "products by MKL": "mkl"}


def arm(without, iterations):
    """-> [seconds of an iteration, the process's resident MiB]"""
    if without == "mkl":
        cpu.stays_float32 = lambda: False
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--out_dir={folder}/run", f"--max_iters={iterations}", "--eval_prompts=0", "--device=cpu"]
        prepared = prepare(*read_settings(GRPOSettings, ["config/grpo_small.py", *words])[:2])
        with contextlib.redirect_stdout(io.StringIO()):
            grpo.main(prepared)
        lines = read_log(f"{folder}/run")[2:]
    return [statistics.median(line["time_s"] for line in lines), lines[-1]["mem_reserved_mb"]]


def measured(without, iterations, busy):
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        return in_a_process(__file__, f"--iterations={iterations}", f"--without={without}")
    finally:
        if neighbour:
            neighbour.kill()


def main(arguments):
    alone, beside = {name: [] for name in ARMS}, {name: [] for name in ARMS}
    for _ in range(arguments.rounds):
        for name, without in ARMS.items():
            alone[name].append(measured(without, arguments.iterations, busy=False))
            beside[name].append(measured(without, arguments.iterations, busy=True))
    for name in ARMS:
        (quiet, resident), (busy, _) = (zip(*rounds[name], strict=True) for rounds in (alone, beside))
        median_result(f"{name}: alone", quiet, "s")
        median_result(f"{name}: beside a busy process", busy, "s")
        ratio_result(f"{name}: times slower", busy, quiet)
        median_result(f"{name}: resident", resident, "MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An iteration alone and beside one busy process.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8, help="of a process; the first two are not counted")
    parser.add_argument("--without", help="used by the bench itself")
    arguments = parser.parse_args()
    if arguments.without:
        print(json.dumps(arm(arguments.without, arguments.iterations)))
    else:
        main(arguments)
