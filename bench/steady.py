"""Does a run stay as it is? Memory, files and threads of a process over many iterations of fixed lengths.

    python bench/steady.py [--iterations=1000] [--report_to=tensorboard]

GRPO on addition with a reference, saving every 20 iterations and evaluating every 100. No completion may stop early, so
every iteration has the same shapes. The first tenth is left out, because allocators fill. The medians of the second
tenth and of the last are compared.
Prints a table; its last line is JSON.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import grpo
import train_sft
from device.kinds import MIB
from memory.meter import resident_bytes
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings


def main(iterations, report_to):
    folder = tempfile.mkdtemp()
    common = dict(digits=3, n_layer=2, n_embd=64, block_size=40, device="cpu", eval_prompts=64)
    sft = SFTSettings(**common, out_dir=f"{folder}/sft", max_iters=20, batch_size=32)
    options = dict(
        init_from=sft.out_dir, beta=0.04, batch_size=4, group_size=8, max_new_tokens=12, max_iters=iterations
    )
    options |= dict(eval_interval=100, save_interval=20, report_to=report_to, learning_rate=1e-4)
    seen = []

    def iterate(iteration, training):
        original(iteration, training)
        seen.append(
            {
                "allocated MiB": training.meter.allocated() / MIB,
                "peak MiB": training.meter.stats()["mem_max_alloc_mb_train"],
                "resident MiB": resident_bytes() / MIB,
                "files": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
            }
        )

    original, grpo.iterate = grpo.iterate, iterate
    sampler = grpo.sample_groups
    grpo.sample_groups = lambda *arguments, stop_token, **rest: sampler(*arguments, stop_token=None, **rest)
    try:
        train_sft.main(prepare(sft))
        prepared = prepare(GRPOSettings(**common, **options, out_dir=f"{folder}/grpo"))
        prepared.reward_funcs = [
            lambda prompts, completions, **columns: [sum(map(ord, c)) % 7 / 7 for c in completions]
        ]
        grpo.main(prepared)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return seen


def compare(seen):
    """-> {name: (median of the second tenth, of the last, last / second - 1)}."""
    tenth = len(seen) // 10
    result = {}
    for name in seen[0]:
        early, late = (median(record[name] for record in part) for part in (seen[tenth : 2 * tenth], seen[-tenth:]))
        result[name] = early, late, late / early - 1 if early else float(late > 0)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory, files and threads over many iterations.")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--report_to", default="")
    arguments = parser.parse_args()
    result = compare(main(arguments.iterations, [arguments.report_to] if arguments.report_to else []))
    print(
        f"\n{arguments.iterations} iterations, torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"{'':28}{'early':>10}{'late':>10}{'change':>9}")
    for name, (early, late, change) in result.items():
        print(f"{name:28}{early:10.2f}{late:10.2f}{change:9.2%}")
    print(json.dumps({name: round(change, 5) for name, (_, _, change) in result.items()}))
