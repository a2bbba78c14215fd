"""The main job, as a user starts it: config/grpo_small.py. What it learned, and each phase's seconds and memory.

    python bench/job.py [--shapes=cuda|cpu|tiny]        out/sft_small is used if it is there

Then five iterations with and without CUDA graphs: the same tokens, losses and gradients.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import DEVICE, HOME, begin, parser, result

TINY = ["--init_from=", "--max_iters=2", "--batch_size=2", "--group_size=2", "--beta=0", "--max_new_tokens=8"]
TINY += ["--eval_prompts=2"]
SAME = ("reward_mean", "loss", "grad_norm", "completion_length_mean", "mismatch_kl")


def run(folder, *words):
    """-> the records of a run's log."""
    command = [sys.executable, "grpo.py", "config/grpo_small.py", f"--device={DEVICE}", f"--out_dir={folder}", *words]
    if subprocess.run(command, cwd=HOME).returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def different(these, those):
    """-> the figures, as "iteration.name", that differ between two logs."""
    pairs = zip(these, those, strict=True)
    return [f"{a['iter']}.{name}" for a, b in pairs for name in SAME if a.get(name) != b.get(name)]


def main():
    arguments = parser("The main job: what it learns, seconds and memory.").parse_args()
    begin(arguments)
    small = TINY if arguments.shapes == "tiny" else []
    with tempfile.TemporaryDirectory() as scratch:
        records = run(f"{scratch}/job", *small)
        first, last = records[0], records[-1]
        warning = json.loads(Path(f"{scratch}/job/settings.json").read_text()).get("kernels_warning")
        result("plain torch in place of a kernel", int(bool(warning)), at_most=0, look=warning)
        if "pass_at_1" in last:
            result(
                "pass@1", last["pass_at_1"], before=first.get("before/pass_at_1"), at_least=0.95,
                look="the same with --dtype=float32, then with --kernels=torch",
            )  # fmt: skip
        result("an iteration", sum(record["time_s"] for record in records) / len(records), "s", number=len(records))
        kl, largest = last.get("mismatch_kl", 0.0), last.get("logprob_diff_max")
        result("sampler / trainer: KL", kl, at_most=0.01, largest=largest, look="mismatch, in the step train")
        for phase in [key.removeprefix("mem_max_alloc_mb_") for key in last if key.startswith("mem_max_alloc_mb_")]:
            memory = {f"{kind}_mib": last[f"mem_{kind}_mb_{phase}"] for kind in ("max_alloc", "alloc", "reserved")}
            result(phase, last[f"time_{phase}_s"], "s", **memory)
        few = [*small, "--eval_prompts=0", "--max_iters=5"]
        graphs = run(f"{scratch}/graphs", *few)
        eager = run(f"{scratch}/eager", *few, "--enforce_eager")
        names = different(graphs, eager)
        which = ", ".join(names[:6]) or None
        look = "compare the hidden states of one step, recorded and with --enforce_eager"
        result("figures that differ without graphs", len(names), at_most=0, which=which, look=look)


if __name__ == "__main__":
    main()
