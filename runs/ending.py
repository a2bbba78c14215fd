"""What a run prints at its end: what it reached, its peak memory and time, where things are, and the next command.

    GRPO is done: 80 iterations in 01:13, peak 38 MiB in train
      pass@1      0.048 -> 1.000 (sampled 0.214 -> 0.992)
      reward      0.281 -> 0.977
      log         out/grpo_small/log.jsonl, samples.jsonl, log.txt
      checkpoint  out/grpo_small/checkpoint-000080 (best: checkpoint-000060)
      next        python sample.py out/grpo_small --num_samples=4

All of it comes from the run's folder, so a resumed run tells of the iterations before it too.
Left out: tables and curves (report.py).
"""

import shlex
import sys
from pathlib import Path

from tqdm import tqdm

from runs.checkpoint import checkpoints
from runs.log import read_log, values_of
from settings import GRPOSettings, SFTSettings

SCORES = dict(eval_reward_mean="eval reward", pass_at_1="pass@1", reward_mean="reward", loss="loss")
PEAK = "mem_max_alloc_mb"


def ending(title: str, settings: SFTSettings | GRPOSettings, scored: bool, stopped: bool) -> list[str]:
    """-> lines. scored: are completions scored? stopped: a signal ended the run early."""
    records, folder = read_log(settings.out_dir), Path(settings.out_dir)
    seconds = sum(record["time_s"] for record in records)
    done = f"{len(records)} of {settings.max_iters}" if stopped else len(records)
    lines = [
        f"{title} is {'stopped' if stopped else 'done'}: {done} iterations in {tqdm.format_interval(seconds)}"
    ]
    if records:
        last = max(records, key=lambda record: record[PEAK])
        phase = max((name for name in last if name.startswith(f"{PEAK}_")), key=last.get)
        lines[0] += f", peak {last[PEAK]:,.0f} MiB in {phase.removeprefix(f'{PEAK}_')}"
    rows = [
        (text, first_and_last(records, name))
        for name, text in SCORES.items()
        if is_told(name, settings)
    ]
    rows += [
        ("log", f"{folder}/log.jsonl, samples.jsonl, log.txt"),
        ("checkpoint", newest_and_best(folder)),
    ]
    rows += zip(("next", "", ""), next_commands(settings, scored, stopped), strict=False)
    return lines + [f"  {name:11} {text}" for name, text in rows if text]


def is_told(name: str, settings: SFTSettings | GRPOSettings) -> bool:
    """The mean reward of an evaluation is pass@1 if the task scores; an SFT's loss falls, a policy's says little."""
    if name == "eval_reward_mean":
        return bool(settings.reward_funcs)
    return name != "loss" or isinstance(settings, SFTSettings)


def first_and_last(records: list[dict], name: str) -> str:
    """-> "0.048 -> 1.000", and the same of `name`_sampled in brackets if there is one; "" without such a figure.

    "0.048" if there is only one.
    """
    values = [value for _, value in values_of(records, name)]
    if not values:
        return ""
    sampled = first_and_last(records, f"{name}_sampled")
    both = [values[0], values[-1]] if len(values) > 1 else values
    return " -> ".join(f"{value:.3f}" for value in both) + (f" (sampled {sampled})" if sampled else "")


def newest_and_best(folder: Path) -> str:
    """Of several checkpoints `best` links to one."""
    found, best = checkpoints(folder), (folder / "best").resolve().name
    if not found:
        return ""
    return str(found[-1]) + (f" (best: {best})" if best in [path.name for path in found[:-1]] else "")


def next_commands(settings: SFTSettings | GRPOSettings, scored: bool, stopped: bool) -> list[str]:
    if stopped:
        again = shlex.join(word for word in sys.argv if word != "--resume=auto")
        start = (
            "python"
            if settings.parallel == "none"
            else f"torchrun --nproc_per_node={settings.num_processes}"
        )
        start = (
            "torchrun ..." if settings.processes_per_machine < settings.num_processes else start
        )  # the addresses of machines are not known here
        return [f"{start} {again} --resume=auto"]
    folder = shlex.quote(settings.out_dir)
    commands = [f"python sample.py {folder} --num_samples=4"]
    commands += [f"python evaluate.py {folder} --num_samples=8"] if scored else []
    compared = (Path(settings.init_from) / "log.jsonl").exists() if settings.init_from else False
    beside = f" {shlex.quote(settings.init_from)}" if compared else ""
    return [*commands, f"python report.py {folder}{beside}"]
