"""Compare runs: a table of memory, time and scores, a verdict on the console, and a page with charts and completions.

    python report.py out/grpo_small out/sft_small

The first run's folder gets report.html, which works without network. The verdict (runs/verdict.py) says whether runs of
GRPO with other options are better.
"""

# First, because importing runs sets what Ctrl-C does.
from runs.log import FIGURES, change

# isort: split
import argparse
from statistics import median

from runs.page.runs import PHASES, logged, logged_names, read_runs
from runs.page.write import write_page
from runs.verdict import verdict
from snug.home import begun_as
from snug.options import friendly_errors, plain

LARGEST = ["mem_alloc_mb", "mem_reserved_mb", "mem_max_alloc_mb"]
LARGEST += [f"mem_max_alloc_mb_{phase}" for phase in PHASES]
MEDIAN = ["time_s", *[f"time_{phase}_s" for phase in PHASES], "tokens_per_second"]


def main(runs):
    """Print the table, then write report.html into the first run's folder. Raises SnugError."""
    print(plain("\n".join(table(runs) + verdict(runs))), flush=True)
    print(f"page: {write_page(runs, cells_of(runs), verdict(runs))}")


def cells_of(runs):
    """Rows of cells. The first row has the runs' names; other rows begin with a figure's name. "-": not logged."""
    figures = [name for _, _, names in FIGURES["charts"] for name in names]
    figures += logged_names(runs, "reward/") + logged_names(runs, "metric/")
    rows = [["memory in MiB", *[str(run.folder) for run in runs]]]
    rows.append(["iterations", *[str(len(run.records)) for run in runs]])
    rows += [[name, *[largest(run, name) for run in runs]] for name in LARGEST]
    rows += [[f"{name} (median)", *[middle(run, name) for run in runs]] for name in MEDIAN]
    rows += [
        [f"{name} (first -> last)", *[change(run.records, name) for run in runs]] for name in figures
    ]
    return [[cell or "-" for cell in row] for row in rows if any(row[1:])]


def largest(run, name) -> str:
    values = logged(run.records, name)
    return f"{max(values):.1f}" if values else ""


def middle(run, name) -> str:
    """The median without the first iteration, which allocates the optimizer's moments."""
    values = logged(run.records[1:], name) or logged(run.records, name)
    digits = 0 if name == "tokens_per_second" else 3
    return f"{median(values):,.{digits}f}" if values else ""


def table(runs) -> list[str]:
    """The lines of the console's table, with one column per run."""
    return [
        "  ".join([f"{name:40}", *(f"{value:>18}" for value in values)])
        for name, *values in cells_of(runs)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(begun_as(), description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", help="a run's folder, such as out/grpo_small")
    with friendly_errors():
        main(read_runs(parser.parse_args().folders))
