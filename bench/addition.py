"""What GRPO adds to its warm start, seed by seed: pass@1 on 500 held-out additions after SFT, after GRPO, and after going on
with SFT on the same noisy demonstrations for as long as GRPO took.

    python bench/addition.py --seeds=1,2,3,4,5 --out_dir=out/addition

Runs train_sft.py and grpo.py as a user would, reads their logs, prints a table and, last, one JSON object.
A seed that is done is not run again.
"""

import json
import platform
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path.insert(0, str(HOME))

from log import read_log  # noqa: E402


def run(script, config, folder, **options):
    """A training run, unless its folder is there -> its log and the seconds it took, start-up and evaluations included."""
    done = folder / "seconds"
    if not done.exists():
        words = [f"--{name}={value}" for name, value in (options | {"out_dir": folder}).items()]
        started = time.perf_counter()
        subprocess.run([sys.executable, script, config, *words], cwd=HOME, check=True, stdout=subprocess.DEVNULL)
        done.write_text(f"{time.perf_counter() - started:.1f}")
    return read_log(folder), float(done.read_text())


def one_seed(seed, out):
    """-> the row of the table."""
    sft, sft_seconds = run("train_sft.py", "config/sft_small.py", out / f"sft_{seed}", seed=seed)
    grpo, grpo_seconds = run("grpo.py", "config/grpo_small.py", out / f"grpo_{seed}", seed=seed, init_from=out / f"sft_{seed}")
    iterations = round(len(sft) * grpo_seconds / sft_seconds)
    options = dict(seed=seed + 1000, init_from=out / f"sft_{seed}", max_iters=iterations, eval_interval=0)  # fresh demonstrations
    more, more_seconds = run("train_sft.py", "config/sft_small.py", out / f"more_sft_{seed}", **options)
    row = {"seed": seed}
    for name, log, seconds in (("sft", sft, sft_seconds), ("grpo", grpo, grpo_seconds), ("more_sft", more, more_seconds)):
        row |= {f"{name}_{key}": log[-1][key] for key in ("pass_at_1", "pass_at_1_sampled")} | {f"{name}_seconds": seconds}
    row["logprob_diff_max"] = max(record["logprob_diff_max"] for record in grpo)
    row |= {f"{name}_peak_mb": max(r["mem_max_alloc_mb"] for r in log) for name, log in (("sft", sft), ("grpo", grpo))}
    return row


def main():
    options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
    seeds = [int(seed) for seed in options.get("seeds", "1,2,3,4,5").split(",")]
    out = Path(options.get("out_dir", "out/addition")).absolute()
    rows = []
    print("seed | SFT greedy (sampled) | GRPO greedy (sampled) | more SFT greedy (sampled) | seconds SFT + GRPO, more SFT")
    for seed in seeds:
        r = one_seed(seed, out)
        rows.append(r)
        scores = [f"{r[f'{name}_pass_at_1']:.3f} ({r[f'{name}_pass_at_1_sampled']:.3f})" for name in ("sft", "grpo", "more_sft")]
        print(
            f"{seed:4} | {' | '.join(scores)} | {r['sft_seconds']:.0f} + {r['grpo_seconds']:.0f}, {r['more_sft_seconds']:.0f}", flush=True
        )
    import torch

    versions = dict(torch=torch.__version__, python=platform.python_version(), threads=torch.get_num_threads())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HOME, capture_output=True, text=True).stdout.strip()
    print(json.dumps(dict(rows=rows, commit=commit, machine=platform.machine(), **versions)))


if __name__ == "__main__":
    main()
