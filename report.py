"""See runs: a table of memory, time and scores on the console, and a page with charts and completions.

    python report.py out/grpo_small out/sft_small
    python report.py out/grpo_small --live

The first run's folder gets report.html, which works without network, and charts/ with a PNG of each chart. Memory is
shown beside what the planner says about the run's settings.json; config files and models that they name must still be
where they were. Only the runs' folders are written to.
"""

import time
from contextlib import suppress
from dataclasses import replace
from statistics import median

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from options import Parser, friendly_errors
    from page.runs import EVERY, first_runs, read_runs

    parser = Parser(
        usage="python report.py FOLDER [FOLDER ...] [--live]", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="+", help="a run's folder, such as out/grpo_small"
    )
    parser.add_argument(
        "--live", action="store_true", help=f"write the page again every {EVERY} s until the runs end"
    )
    with friendly_errors():
        arguments = parser.parse_args()
        runs = first_runs(arguments.folders) if arguments.live else read_runs(arguments.folders)

from options import SnugError, in_one_line
from page.charts import charts_of
from page.pictures import write_pictures
from page.runs import EVERY, read_runs
from page.write import write_page
from runs.log import values_of

PEAK = "mem_max_alloc_mb_"


def main(runs, live: bool) -> None:
    """The table, the page, and at last the pictures. Raises SnugError."""
    print("\n".join(table(runs)), flush=True)
    plans, page = [planned(run) for run in runs], runs[0].folder / "report.html"
    if live:
        print(f"page: {page}, written again every {EVERY} s until the runs end or Ctrl-C", flush=True)
    while True:
        for run, its in zip(runs, plans, strict=True):
            run.plan = its
        goes_on = live and not all(run.ended for run in runs)
        charts = charts_of(runs)
        write_page(page, runs, charts, cells_of(runs), EVERY if goes_on else 0)
        if not goes_on:
            break
        try:
            time.sleep(EVERY)
        except KeyboardInterrupt:
            live = False  # a last page, which does not load itself again
        with suppress(SnugError):  # a run that was started again has no iteration yet
            runs = read_runs([run.folder for run in runs])
    write_pictures(charts, runs[0].folder / "charts")
    print(f"page: {page}\na PNG of each chart: {runs[0].folder / 'charts'}")


def planned(run):
    """-> the Plan of a run's settings, or None and a line that says why there is none."""
    import grpo
    import train_sft
    from memory.plan import plan
    from runs.checkpoint import settings_of
    from runs.prepare import prepare
    from training.dry_run import DryRun

    try:
        if not run.settings:
            raise SnugError("settings.json is missing")
        with in_one_line("settings.json"):  # older, or edited
            settings = settings_of({"settings": run.settings})
            prepared = prepare(replace(settings, resume="never", device=run.device))
        loop, reference = (
            (grpo, grpo.make_reference) if run.kind == "GRPO" else (train_sft, lambda *_, **__: None)
        )
        return plan(DryRun(prepared, loop.iterate, reference), prepared.settings)
    except (SnugError, OSError) as error:
        print(f"{run.name}: the page has no planned memory ({error})")


def rows_of(records):
    """The log of one run -> {row name: cell}."""
    settled = (
        records[1:] or records
    )  # without the first iteration, which allocates the optimizer's moments
    rows = {"iterations": f"{len(records)}"}
    for name in ("mem_alloc_mb", "mem_reserved_mb", "mem_max_alloc_mb"):
        rows[name] = f"{max(record[name] for record in records):.1f}"
    phases = dict.fromkeys(
        key.removeprefix(PEAK) for record in records for key in record if key.startswith(PEAK)
    )
    for phase in phases:
        rows[f"  {PEAK}{phase}"] = f"{max(record.get(PEAK + phase, 0) for record in records):.1f}"
        seconds, key = [], f"time_{phase}_s"
        for chosen in (
            settled,
            records,
        ):  # all of them if no settled one has this phase, such as an evaluation
            seconds = seconds or [record[key] for record in chosen if key in record]
        rows[f"  {key} (median)"] = f"{median(seconds):.3f}" if seconds else "-"
    rows["time_s (median)"] = f"{median(record['time_s'] for record in settled):.3f}"
    rows["tokens_per_second (median)"] = (
        f"{median(record['tokens_per_second'] for record in settled):,.0f}"
    )
    for name in ("reward_mean", "eval_reward_mean", "pass_at_1", "pass_at_1_sampled", "task_pass_at_1"):
        values = [value for _, value in values_of(records, name)]
        if values:
            rows[name + " (first -> last)"] = f"{values[0]:.3f} -> {values[-1]:.3f}"
    return rows


def cells_of(runs) -> list[list[str]]:
    """Rows of cells: the first has the runs' names, the first of each row the figure's."""
    columns = [rows_of(run.records) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    last = ("time_s", "tokens_per", "reward", "eval", "pass", "task")
    names.sort(key=lambda name: (name.startswith(last), name.startswith("  time_")))
    cells = [["memory in MiB", *(run.name for run in runs)]]
    return cells + [[name, *(column.get(name, "-") for column in columns)] for name in names]


def table(runs) -> list[str]:
    """The lines of a table with one column per run."""
    cells = cells_of(runs)
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in cells]


if __name__ == "__main__":
    with friendly_errors():
        try:
            main(runs, arguments.live)
        except OSError as error:
            raise SnugError(
                f"{error.filename or runs[0].folder} cannot be written ({error.strerror})"
            ) from None
