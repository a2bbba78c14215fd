"""Runs side by side: what each phase took in memory and time, and how the score went. Reads the runs' folders, nothing else.

    python report.py out/sft_small out/grpo_small

Left out, so far: curves and the rollouts themselves, as a page.
"""

import sys
from pathlib import Path
from statistics import median

from options import SnugError, friendly_errors
from runs.log import read_log

PEAK, TIME = "mem_max_alloc_mb_", ("time_", "_s")


def rows_of(records):
    """The log of one run -> {row's name: what stands in its column}."""
    settled = records[1:] or records  # the first iteration makes the optimizer's moments
    rows = {"iterations": f"{len(records)}"}
    for name in ("mem_alloc_mb", "mem_reserved_mb", "mem_max_alloc_mb"):
        rows[name] = f"{max(record[name] for record in records):.1f}"
    phases = dict.fromkeys(key[len(PEAK) :] for record in records for key in record if key.startswith(PEAK))
    for phase in phases:
        rows[f"  {PEAK}{phase}"] = f"{max(record.get(PEAK + phase, 0) for record in records):.1f}"
    for phase in phases:
        rows[f"  time_{phase}_s (median)"] = (
            f"{median([r[f'time_{phase}_s'] for r in settled if f'time_{phase}_s' in r] or [0]):.3f}"
        )
    rows["time_s (median)"] = f"{median(record['time_s'] for record in settled):.3f}"
    rows["tokens_per_second (median)"] = f"{median(record['tokens_per_second'] for record in settled):,.0f}"
    for name in ("reward_mean", "pass_at_1", "pass_at_1_sampled"):
        values = [record[name] for record in records if name in record]
        if values:
            rows[name + " (first -> last)"] = f"{values[0]:.3f} -> {values[-1]:.3f}"
    return rows


def table(folders):
    """Folders of runs -> lines of text, a column a run. Raises SnugError."""
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
    names.sort(
        key=lambda name: (name.startswith(("time_s", "tokens_per", "reward", "pass")), name.startswith("  time_"))
    )
    cells = [["memory in MiB", *(Path(folder).name for folder in folders)]]
    cells += [[name, *(column.get(name, "-") for column in columns)] for name in names]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


if __name__ == "__main__":
    with friendly_errors():
        if not sys.argv[1:] or any(word in ("-h", "--help") for word in sys.argv[1:]):
            print("usage: python report.py FOLDER [FOLDER ...]\n\n" + __doc__)
            sys.exit(0 if sys.argv[1:] else 2)
        print("\n".join(table(sys.argv[1:])), flush=True)
