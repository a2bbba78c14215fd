"""Compare runs: memory and time of each phase, and the scores. Reads only the runs' folders.

    python report.py out/sft_small out/grpo_small

Left out: curves, and the completions themselves.
"""

import sys
from pathlib import Path
from statistics import median

from options import SnugError, friendly_errors
from runs.log import read_log

PEAK = "mem_max_alloc_mb_"


def rows_of(records):
    """The log of one run -> {row name: cell}."""
    settled = records[1:] or records  # without the first iteration, which allocates the optimizer's moments
    rows = {"iterations": f"{len(records)}"}
    for name in ("mem_alloc_mb", "mem_reserved_mb", "mem_max_alloc_mb"):
        rows[name] = f"{max(record[name] for record in records):.1f}"
    phases = dict.fromkeys(key.removeprefix(PEAK) for record in records for key in record if key.startswith(PEAK))
    for phase in phases:
        rows[f"  {PEAK}{phase}"] = f"{max(record.get(PEAK + phase, 0) for record in records):.1f}"
        seconds = [record[f"time_{phase}_s"] for record in settled if f"time_{phase}_s" in record]
        rows[f"  time_{phase}_s (median)"] = f"{median(seconds or [0]):.3f}"
    rows["time_s (median)"] = f"{median(record['time_s'] for record in settled):.3f}"
    rows["tokens_per_second (median)"] = f"{median(record['tokens_per_second'] for record in settled):,.0f}"
    for name in ("reward_mean", "eval_reward_mean", "pass_at_1", "pass_at_1_sampled", "task_pass_at_1"):
        values = [record[name] for record in records if record.get(name) is not None]
        if values:
            rows[name + " (first -> last)"] = f"{values[0]:.3f} -> {values[-1]:.3f}"
    return rows


def table(folders):
    """Folders of runs -> lines of a table with one column per run. Raises SnugError."""
    columns = []
    for folder in folders:
        try:
            records = read_log(folder)
        except OSError as error:
            raise SnugError(f"{folder}: log.jsonl cannot be read ({error.strerror}); is it a run's folder?") from None
        if not records:
            raise SnugError(f"{folder}: log.jsonl has no iteration yet")
        columns.append(rows_of(records))
    names = list(dict.fromkeys(name for column in columns for name in column))
    last = ("time_s", "tokens_per", "reward", "eval", "pass", "task")
    names.sort(key=lambda name: (name.startswith(last), name.startswith("  time_")))
    cells = [["memory in MiB", *(Path(folder).name for folder in folders)]]
    cells += [[name, *(column.get(name, "-") for column in columns)] for name in names]
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in cells]


if __name__ == "__main__":
    with friendly_errors():
        if not sys.argv[1:] or any(word in ("-h", "--help") for word in sys.argv[1:]):
            print("usage: python report.py FOLDER [FOLDER ...]\n\n" + __doc__)
            sys.exit(0 if sys.argv[1:] else 2)
        print("\n".join(table(sys.argv[1:])), flush=True)
