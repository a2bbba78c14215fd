"""The page: one file that works from a disk, without network.

The figures and the completions are one JSON island. A completion may hold anything: `<` is escaped in it, the scripts
show it as text only, and the page's policy runs no script but its own.
"""

import json
import secrets
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from page.charts import PALETTE, Chart
from page.runs import Run
from runs.log import values_of, write_whole

HERE = Path(__file__).parent


def write_page(
    path: Path, runs: list[Run], charts: list[Chart], cells: list[list[str]], refresh: int = 0
) -> None:
    """cells: the table of the console. refresh: seconds until the browser loads the page again; 0: never."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    loader = jinja2.FileSystemLoader(HERE)
    template = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    page = template.get_template("page.html").render(
        plotly=Markup(get_plotlyjs()),
        island=Markup(island(content(runs, charts))),
        css=Markup((HERE / "page.css").read_text()),
        scripts=[Markup((HERE / name).read_text()) for name in ("charts.js", "rollouts.js")],
        nonce=secrets.token_urlsafe(16),
        runs=runs,
        sections=list(dict.fromkeys(chart.section for chart in charts)),
        tiles=tiles(runs[0]),
        cells=cells,
        refresh=refresh,
    )
    write_whole(path, page)


def content(runs: list[Run], charts: list[Chart]) -> dict:
    """What the scripts read."""
    rollouts = [
        dict(run=run.name, samples=run.samples, left_out=run.left_out) for run in runs if run.samples
    ]
    return dict(palette=PALETTE, charts=[asdict(chart) for chart in charts], rollouts=rollouts)


def island(data) -> str:
    """JSON that stands inside <script>: no text in it can end the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def tiles(run: Run) -> list[tuple[str, str]]:
    """(name, value) of the figures at the head of the page."""
    found = [
        (
            "iterations",
            f"{len(run.records):,}" + ("" if run.ended else f" of {run.settings['max_iters']:,}"),
        )
    ]
    for name, key in (("reward", "reward_mean"), ("pass@1", "pass_at_1"), ("loss", "loss")):
        values = [value for _, value in values_of(run.records, key)]
        if values and (name != "loss" or run.kind == "SFT"):
            found.append((name, f"{values[0]:.3f} → {values[-1]:.3f}"))
    peak = max(record["mem_max_alloc_mb"] for record in run.records)
    planned = f", planned {run.plan.peak / 2**20:,.0f}" if run.plan else ""
    found.append(("peak memory", f"{peak:,.0f} MiB{planned}"))
    return [*found, ("time", tqdm.format_interval(sum(record["time_s"] for record in run.records)))]
