"""What a run prints at its end: what it reached, its peak memory and time, where things are, and the next command.

    GRPO is done: 80 iterations in 01:40, peak 39 MiB in train
      pass@1      0.048 -> 1.000 (sampled 0.214 -> 0.992)
      reward      0.281 -> 0.977
      log         out/grpo_small/log.jsonl, samples.jsonl, log.txt
      checkpoint  out/grpo_small/checkpoint-000080 (best: checkpoint-000060)
      next        python sample.py out/grpo_small --num_samples=4

All of it comes from the run's folder, so a resumed run counts the iterations before it too.
Left out: tables and curves (report.py).
"""

import shlex
from pathlib import Path

from tqdm import tqdm

from runs.checkpoint import checkpoints
from runs.log import change, read_log
from settings import SFTSettings

PEAK = "mem_max_alloc_mb"


def ending(title: str, settings, scored: bool, stopped: bool):
    """-> lines. scored: are completions scored? stopped: a signal ended the run early."""
    records, folder = read_log(settings.out_dir), Path(settings.out_dir)
    seconds = tqdm.format_interval(sum(record["time_s"] for record in records))
    done = f"stopped: {len(records)} of {settings.max_iters}" if stopped else f"done: {len(records)}"
    first = f"{title} is {done} iterations in {seconds}"
    if records:  # they are elsewhere if the folder was moved
        highest = max(records, key=lambda record: record[PEAK])
        phase = max((name for name in highest if name.startswith(f"{PEAK}_")), key=highest.get)
        first += f", peak {highest[PEAK]:,.0f} MiB in {phase.removeprefix(f'{PEAK}_')}"
    scores = {"pass@1": "pass_at_1", "reward": "reward_mean"}
    if settings.reward_funcs:  # without them the mean reward of an evaluation is pass@1
        scores = {"eval reward": "eval_reward_mean"} | scores
    if isinstance(settings, SFTSettings):  # its loss falls; the loss of a policy says little
        scores["loss"] = "loss"
    rows = []
    for text, name in scores.items():
        reached, sampled = change(records, name), change(records, f"{name}_sampled")
        rows.append((text, f"{reached} (sampled {sampled})" if sampled else reached))
    rows.append(("log", f"{folder}/log.jsonl, samples.jsonl, log.txt"))
    newest, best = checkpoints(folder)[-1], (folder / "best").resolve().name
    is_other = best not in ("best", newest.name)
    rows.append(("checkpoint", f"{newest} (best: {best})" if is_other else str(newest)))
    rows += zip(["next", "", ""], next_commands(settings, scored, stopped), strict=False)
    return [first, *[f"  {name:11} {text}" for name, text in rows if text]]


def next_commands(settings, scored: bool, stopped: bool) -> list[str]:
    folder = shlex.quote(settings.out_dir)
    if stopped:
        start = "python" if settings.parallel == "none" else "torchrun ..."
        script = "train_sft.py" if isinstance(settings, SFTSettings) else "grpo.py"
        return [f"{start} {script} --resume={folder}"]
    commands = [f"python sample.py {folder} --num_samples=4"]
    if scored:
        commands.append(f"python evaluate.py {folder} --num_samples=8")
    compare = f"python report.py {folder}"
    if settings.init_from and (Path(settings.init_from) / "log.jsonl").exists():
        compare += f" {shlex.quote(settings.init_from)}"
    return [*commands, compare]
