"""Charts as PNGs, by matplotlib: plotly needs a browser for that."""

import re
from pathlib import Path

from page.charts import PALETTE, Chart


def write_pictures(charts: list[Chart], folder: Path) -> None:
    """A PNG of each chart in a folder, named by its title."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    matplotlib.rcParams["text.parse_math"] = False  # a $ in a run's name is one
    folder.mkdir(exist_ok=True)
    for chart in charts:
        picture(chart, folder / f"{re.sub(r'[^a-z0-9_.]+', '-', chart.title.lower()).strip('-')}.png")


def picture(chart: Chart, path: Path) -> None:
    from matplotlib import pyplot as plt

    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure, axes = plt.subplots(figsize=(9 if chart.wide else 5.5, 3.4), layout="constrained")
        draw(chart, axes)
        axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        if len(chart.series) > 1:
            columns = 4 if max(len(series.name) for series in chart.series) < 16 else 2
            figure.legend(loc="outside lower center", ncols=columns, frameon=False)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw(chart: Chart, axes) -> None:
    """`hidden` series are left out."""
    bars = [series for series in chart.series if series.style == "bar"]
    places = list(
        dict.fromkeys(x for series in chart.series for x in series.x)
    )  # of the bars, if x are names
    below = dict.fromkeys(places, 0.0)  # what is stacked so far
    for series in chart.series:
        look = dict(color=PALETTE[series.color % len(PALETTE)], label=series.name)
        if series.style in ("line", "dashed"):
            marker = "o" if 2 < len(series.x) < 30 else None
            axes.plot(
                series.x,
                series.y,
                "--" if series.style == "dashed" else "-",
                marker=marker,
                ms=3,
                **look,
            )
        elif series.style == "block":
            axes.bar(series.x, series.y, series.width, align="edge", **look)
        elif series.style == "area":
            start = [below[x] for x in series.x]
            below |= {x: below[x] + y for x, y in zip(series.x, series.y, strict=True)}
            axes.fill_between(series.x, start, [below[x] for x in series.x], linewidth=0, **look)
        elif series.style == "stack":
            x = [places.index(x) for x in series.x]
            axes.bar(x, series.y, 0.6, bottom=[below[x] for x in series.x], **look)
            below |= {x: below[x] + y for x, y in zip(series.x, series.y, strict=True)}
        elif series.style == "bar":
            width = 0.8 / len(bars)
            left = bars.index(series) * width - 0.4
            axes.bar([places.index(x) + left for x in series.x], series.y, width, align="edge", **look)
        elif series.style == "mark":  # on the bars of its colour
            width = 0.8 / len(bars)
            middle = ([bar.color for bar in bars].index(series.color) + 0.5) * width - 0.4
            axes.plot([places.index(x) + middle for x in series.x], series.y, "_", ms=18, mew=2, **look)
    if places and isinstance(places[0], str):
        axes.set_xticks(range(len(places)), places)
    axes.set_xlim(chart.window)
    lowest = min((y for series in chart.series for y in series.y), default=0)
    axes.set_ylim(0 if lowest >= 0 else None, chart.top)
