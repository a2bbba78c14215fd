"""The figures of a report, each described once: pictures.py and charts.js draw the same Charts.

Learning and memory over the iterations compare runs of a kind. By phase, all runs stand side by side. Left out: figures
that no run has logged.
"""

from dataclasses import dataclass, field
from statistics import mean

from memory.meter import PHASES
from memory.plan import MIB
from runs.log import values_of

# At least 3 : 1 on the page's light and on its dark cards.
PALETTE = ["#4f7df0", "#c9821a", "#8b6fe0", "#e2685a", "#3fa67c", "#8793a8", "#c76aa8", "#3a9ab5"]
SHOWN = 10  # iterations of a memory timeline that are seen at first
MOST = 200  # iterations of a memory timeline
POINTS = 2000  # of a line
PARTS = 7  # components of a plan that have a colour of their own

# section, title, unit, {figure of the log: name}
FIGURES = [
    (
        "Learning",
        "Reward",
        "reward",
        dict(reward_mean="training, sampled", eval_reward_mean="held out, greedy"),
    ),
    (
        "Learning",
        "pass@1",
        "share of held-out prompts",
        dict(pass_at_1="greedy", pass_at_1_sampled="sampled"),
    ),
    ("Learning", "KL to the reference", "nats per token", dict(kl="")),
    ("Learning", "Entropy", "nats per token", dict(entropy="")),
    ("Learning", "Length of completions", "tokens", dict(completion_length_mean="")),
    ("Learning", "Loss", "loss", dict(loss="")),
    ("Learning", "Gradient norm", "norm before clipping", dict(grad_norm="")),
    ("Learning", "Groups without variance", "share of groups", dict(frac_reward_zero_std="")),
    (
        "Memory",
        "Memory of each iteration",
        "MiB",
        dict(mem_max_alloc_mb="peak", mem_alloc_mb="allocated after it"),
    ),
    ("Time", "Speed", "tokens per second", dict(tokens_per_second="")),
]


@dataclass
class Series:
    """style: line, dashed, block (a bar from x to x + width), area and stack (on top of those before), bar, mark,
    hidden (a line that shows after a click on its name)."""

    name: str
    x: list
    y: list
    style: str = "line"
    color: int = 0  # of PALETTE, around again
    labels: list = field(default_factory=list)  # of the points; instead of x
    width: float = 0.0


@dataclass
class Chart:
    section: str  # Learning, Memory or Time
    title: str
    x: str
    y: str
    series: list[Series]
    window: tuple | None = None  # of x: what is seen at first
    top: float | None = None  # of y
    wide: bool = False


def charts_of(runs) -> list[Chart]:
    """Of all kinds of figures, those that the runs have."""
    several = len({run.kind for run in runs}) > 1
    charts = [
        Chart(section, f"{title}, {kind}" if several else title, "iteration", unit, series)
        for kind in dict.fromkeys(run.kind for run in runs)
        for section, title, unit, names in FIGURES
        if (series := figure([run for run in runs if run.kind == kind], names))
    ]
    timelines = [timeline(run) for run in runs if run.memory]
    top = max((max(s.y) for chart in timelines for s in chart.series if s.style != "hidden"), default=0)
    for chart in timelines:
        chart.top = 1.05 * top  # the same, to compare
    planned = [planned_parts(run, largest_parts(runs)) for run in runs if run.plan]
    charts += [
        *timelines,
        peaks(runs),
        *planned,
        seconds(runs),
        *[seconds_over_time(run) for run in runs],
    ]
    order = ["Learning", "Memory", "Time"]
    return sorted(charts, key=lambda chart: (order.index(chart.section), not chart.wide))


def figure(runs, names) -> list[Series]:
    """A line for each run and figure. [] if no run has the first figure: SFT has no reward but the held-out one."""
    series = []
    if not any(record.get(next(iter(names))) is not None for run in runs for record in run.records):
        return series
    for number, run in enumerate(runs):
        for place, (key, name) in enumerate(names.items()):
            points = spread(values_of(run.records, key))
            if points:
                x, y = map(list, zip(*points, strict=True))
                label = (
                    ", ".join(part for part in (run.name if len(runs) > 1 else "", name) if part)
                    or run.name
                )
                color = number if len(runs) > 1 else place
                series.append(Series(label, x, y, "dashed" if place else "line", color))
    return series


def spread(points: list) -> list:
    """Every n-th point and the last one, so that POINTS are left."""
    every = -(-len(points) // POINTS) or 1
    return points[:-1:every] + points[-1:]


def timeline(run) -> Chart:
    """Each phase of each iteration is a block as high as its peak."""
    iterations = sorted(run.memory)[-MOST:]
    phases = [phase for phase in PHASES if any(phase in run.memory[i] for i in iterations)]
    width, series = 1 / len(phases), []
    for number, phase in enumerate(phases):
        its = [i for i in iterations if phase in run.memory[i]]
        x, y = [i + number * width for i in its], [run.memory[i][phase][2] for i in its]
        labels = [f"iteration {i}, peak of {phase}" for i in its]
        series.append(Series(phase, x, y, "block", PHASES.index(phase), labels, width))
    places = [
        (i, n, phase) for i in iterations for n, phase in enumerate(phases) if phase in run.memory[i]
    ]
    x, labels = (
        [i + (n + 1) * width for i, n, _ in places],
        [f"iteration {i}, after {phase}" for i, _, phase in places],
    )
    allocated, reserved = ([run.memory[i][phase][part] for i, _, phase in places] for part in (0, 1))
    series.append(Series("allocated", x, allocated, "line", 7, labels))
    name = "reserved" if run.device == "cuda" else "resident"  # of the process
    above = max(reserved) > 2 * max(
        run.memory[i][phase][2] for i, _, phase in places
    )  # it would flatten the others
    series.append(Series(name, x, reserved, "hidden" if above else "line", 5, labels))
    if run.plan:
        ends = [iterations[0], iterations[-1] + 1]
        series.append(Series("planned peak", ends, [run.plan.peak / MIB] * 2, "dashed", 6))
    window = max(iterations[0], iterations[-1] + 1 - SHOWN), iterations[-1] + 1
    title = f"Memory timeline, {run.name}"
    return Chart("Memory", title, "iteration", "MiB", series, window, wide=True)


def peaks(runs) -> Chart:
    """A bar for each run and phase, and what the planner says."""
    series = []
    for number, run in enumerate(runs):
        found = {
            p: [r[key] for r in run.records if (key := f"mem_max_alloc_mb_{p}") in r] for p in PHASES
        }
        found = {phase: max(sizes) for phase, sizes in found.items() if sizes}
        series.append(Series(run.name, list(found), list(found.values()), "bar", number))
    for number, run in enumerate(runs):
        if run.plan:
            sizes = [size / MIB for size, _ in run.plan.phases.values()]
            series.append(Series(f"{run.name}, planned", list(run.plan.phases), sizes, "mark", number))
    return Chart("Memory", "Peak of each phase", "", "MiB", series)


def largest_parts(runs) -> list[str]:
    """The components that have a colour of their own, the same in all runs."""
    sizes = {}
    for parts in (parts for run in runs if run.plan for _, parts in run.plan.phases.values()):
        for name, size in parts.items():
            sizes[name] = max(size, sizes.get(name, 0))
    return sorted(sizes, key=sizes.get, reverse=True)[:PARTS]


def planned_parts(run, largest: list[str]) -> Chart:
    """What the planner finds at each phase's peak. largest: the components to name."""
    phases = [phase for phase in PHASES if phase in run.plan.phases]
    parts = [run.plan.phases[phase][1] for phase in phases]
    rows = {name: [part.get(name, 0) / MIB for part in parts] for name in largest}
    rows["other"] = [
        sum(size for name, size in part.items() if name not in largest) / MIB for part in parts
    ]
    series = [
        Series(name, phases, sizes, "stack", n)
        for n, (name, sizes) in enumerate(rows.items())
        if any(sizes)
    ]
    return Chart("Memory", f"Planned parts of each peak, {run.name}", "", "MiB", series)


def seconds_of(run) -> dict[str, list[float]]:
    """-> {phase: seconds in each iteration}; "other" is the rest: saving, the log."""
    phases = [phase for phase in PHASES if any(f"time_{phase}_s" in record for record in run.records)]
    found = {phase: [record.get(f"time_{phase}_s", 0.0) for record in run.records] for phase in phases}
    rest = [r["time_s"] - sum(s[i] for s in found.values()) for i, r in enumerate(run.records)]
    return found | {"other": [max(0.0, s) for s in rest]}


def seconds(runs) -> Chart:
    """A column for each run."""
    found, names = [seconds_of(run) for run in runs], [run.name for run in runs]
    series = [
        Series(phase, names, [mean(its.get(phase, [0.0])) for its in found], "stack", number)
        for number, phase in enumerate([*PHASES, "other"])
        if any(phase in its for its in found)
    ]
    return Chart("Time", "Mean seconds of an iteration", "", "seconds", series)


def seconds_over_time(run) -> Chart:
    x = spread([record["iter"] for record in run.records])
    found, order = seconds_of(run), [*PHASES, "other"]
    series = [Series(phase, x, spread(its), "area", order.index(phase)) for phase, its in found.items()]
    return Chart("Time", f"Seconds of each iteration, {run.name}", "iteration", "seconds", series)
