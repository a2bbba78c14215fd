"""Compare runs: a table of memory, time and scores on the console, and a page with charts and completions.

    python report.py out/grpo_small out/sft_small

The first run's folder gets report.html, which works without network.
"""

from pathlib import Path
from statistics import median

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from runs.page.runs import read_runs
    from snug.options import Parser, friendly_errors

    usage = "python report.py FOLDER [FOLDER ...]"
    parser = Parser(usage=usage, description=__doc__.partition("\n")[0])
    about = "a run's folder, such as out/grpo_small"
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help=about)
    with friendly_errors():
        runs = read_runs(parser.parse_args().folders)

from runs.log import change
from runs.page.charts import charts_of
from runs.page.runs import Run, logged, logged_names
from runs.page.write import write_page
from snug.memory.meter import PHASES
from snug.options import SnugError, plain

MEMORY = ["mem_alloc_mb", "mem_reserved_mb", "mem_max_alloc_mb"]
SCORES = [
    "reward_mean",
    "eval_reward_mean",
    "pass_at_1",
    "pass_at_1_sampled",
    "task_pass_at_1",
    "tool_calls",
    "tool_errors",
]


def main(runs: list[Run]):
    """Print the table, then write the page. Raises SnugError."""
    print(plain("\n".join(table(runs))), flush=True)
    print(f"page: {make_page(runs)}")


def make_page(runs: list[Run]) -> Path:
    """Write report.html into the first run's folder -> its path. Raises SnugError."""
    page = runs[0].folder / "report.html"
    try:
        write_page(page, runs, charts_of(runs), cells_of(runs))
    except OSError as error:
        raise SnugError(f"{page} cannot be written ({error.strerror})") from None
    return page


def cells_of(runs: list[Run]) -> list[list[str]]:
    """Rows of cells. The first row has the runs' names; other rows begin with a figure's name. "-": not logged."""
    rows = [["memory in MiB", *[run.name for run in runs]]]

    def add(name, cell_of, *arguments):
        cells = [cell_of(run, *arguments) for run in runs]
        if any(cell != "-" for cell in cells):
            rows.append([name, *cells])

    add("iterations", lambda run: str(len(run.records)))
    for name in MEMORY + [f"  mem_max_alloc_mb_{phase}" for phase in PHASES]:
        add(name, largest, name.strip())
    for name in ["time_s", *[f"  time_{phase}_s" for phase in PHASES], "tokens_per_second"]:
        add(f"{name} (median)", middle, name.strip())
    for name in SCORES + logged_names(runs, "reward/") + logged_names(runs, "metric/"):
        add(f"{name} (first -> last)", lambda run, name: change(run.records, name) or "-", name)
    return rows


def largest(run: Run, name: str) -> str:
    values = logged(run.records, name)
    return f"{max(values):.1f}" if values else "-"


def middle(run: Run, name: str) -> str:
    """The median without the first iteration, which allocates the optimizer's moments."""
    values = logged(run.records[1:], name) or logged(run.records, name)
    digits = 0 if name == "tokens_per_second" else 3
    return f"{median(values):,.{digits}f}" if values else "-"


def table(runs: list[Run]) -> list[str]:
    """The lines of the console's table, with one column per run."""
    cells = cells_of(runs)
    width, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(width), *map(str.rjust, row[1:], widths)]) for row in cells]


if __name__ == "__main__":
    with friendly_errors():
        main(runs)
