"""The charts of a page. Each is described once here, and charts.js draws it.

A chart compares runs of one kind, GRPO or SFT, over their iterations. A figure that no run has logged has no chart.
"""

from dataclasses import dataclass

from runs.log import FIGURES, values_of
from runs.page.runs import PHASES, logged, logged_names

SHOWN = 20  # a memory timeline has the last iterations
STYLES = "solid", "dash", "dot", "dashdot"  # plotly's

MEMORY = {"mem_max_alloc_mb": "peak", "mem_alloc_mb": "allocated after it"}


@dataclass
class Series:
    """style: one of STYLES, or block (a bar from x to x + width)."""

    name: str
    x: list
    y: list
    style: str
    color: int = 0  # index into the palette; it starts again after the last
    width: float = 0.0


@dataclass
class Chart:
    section: str  # Learning, Memory or Time
    title: str
    unit: str  # of y
    series: list[Series]


def charts_of(runs):
    """All charts, in the page's order."""
    functions = {name: name.removeprefix("reward/") for name in logged_names(runs, "reward/")}
    figures = [*FIGURES["charts"], ("Reward by function", "mean before reward_weights", functions)]
    figures += [(name, "mean", {name: ""}) for name in logged_names(runs, "metric/")]
    learning = [chart for figure in figures for chart in by_kind("Learning", *figure, runs)]
    memory = [timeline(run) for run in runs]
    memory += by_kind("Memory", "Memory of each iteration", "MiB", MEMORY, runs)
    time = by_kind("Time", "Speed", "tokens per second", {"tokens_per_second": ""}, runs)
    return learning + memory + time


def by_kind(section, title, unit, names, runs):
    """One chart for each kind of runs that has logged a figure."""
    kinds = list(dict.fromkeys(run.kind for run in runs))
    charts = []
    for kind in kinds:
        series = lines([run for run in runs if run.kind == kind], names)
        if series:
            full_title = f"{title}, {kind}" if len(kinds) > 1 else title
            charts.append(Chart(section, full_title, unit, series))
    return charts


def lines(runs, names):
    """One line for each run and figure. names: {figure of the log: name of the line, or "" for the run's name}."""
    series = []
    for number, run in enumerate(runs):
        for place, (figure, name) in enumerate(names.items()):
            points = values_of(run.records, figure)
            label, color = name or str(run.folder), place
            if len(runs) > 1:
                label, color = f"{run.folder}, {name}".removesuffix(", "), number
            if points:
                x, y = map(list, zip(*points, strict=True))
                series.append(Series(label, x, y, STYLES[place % len(STYLES)], color))
    return series


def timeline(run):
    """A block for each phase of an iteration, as high as the phase's peak."""
    records = run.records[-SHOWN:]
    phases = [phase for phase in PHASES if logged(records, f"mem_max_alloc_mb_{phase}")]
    width, blocks = 1 / len(phases), []
    for place, phase in enumerate(phases):
        points = values_of(records, f"mem_max_alloc_mb_{phase}")
        x = [iteration + place * width for iteration, _ in points]
        peaks = [peak for _, peak in points]
        blocks.append(Series(phase, x, peaks, "block", PHASES.index(phase), width))
    return Chart("Memory", f"Memory timeline, {run.folder}", "MiB", blocks)
