"""Memory, files and threads of a process over many iterations of fixed lengths: do they grow?

    python bench/steady.py [--iterations=1000]

GRPO on addition with a reference. It saves every 20 iterations and evaluates every 100. No completion may stop early, so
every iteration has the same shapes. The first tenth is left out, because allocators fill. The bench compares the medians
of the second tenth and of the last tenth.
"""

import argparse
import os
import tempfile
import threading
from statistics import median

from common import result

import grpo
import sample
import train_sft
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings
from snug.device.kinds import MIB
from snug.memory.meter import resident_bytes


def main(iterations, folder):
    """-> one dict per iteration"""
    common = dict(digits=3, n_layer=2, n_embd=64, block_size=40, device="cpu", eval_prompts=64)
    sft = SFTSettings(**common, out_dir=f"{folder}/sft", max_iters=20, batch_size=32)
    options = dict(beta=0.04, batch_size=4, group_size=8, max_new_tokens=12, max_iters=iterations)
    options |= dict(eval_interval=100, save_interval=20, learning_rate=1e-4)
    records = []

    def iterate(iteration, training):
        original(iteration, training)
        records.append(
            {
                "allocated, MiB": training.meter.allocated() / MIB,
                "peak, MiB": training.meter.stats()["mem_max_alloc_mb_train"],
                "resident, MiB": resident_bytes() / MIB,
                "files": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(),
            }
        )

    original, grpo.iterate = grpo.iterate, iterate
    sampler = sample.sample_groups
    sample.sample_groups = lambda *arguments, stop_token, **rest: sampler(*arguments, stop_token=None, **rest)
    train_sft.main(prepare(sft))
    prepared = prepare(GRPOSettings(**common, **options, init_from=sft.out_dir, out_dir=f"{folder}/grpo"))
    prepared.reward_funcs = [lambda prompts, completions, **columns: [sum(map(ord, c)) % 7 / 7 for c in completions]]
    grpo.main(prepared)
    return records


def compare(records):
    """Print the median of the second tenth and of the last, and the change."""
    tenth = len(records) // 10
    for name in records[0]:
        early = median(record[name] for record in records[tenth : 2 * tenth])
        late = median(record[name] for record in records[-tenth:])
        result(name, late, early=early, change=f"{late / early - 1:.2%}" if early else late)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory, files and threads over many iterations.")
    parser.add_argument("--iterations", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(main(arguments.iterations, folder))
