"""The page: one file that works from a disk, without network.

The charts and the completions are one JSON island. A completion is untrusted text: the island escapes `<`, the scripts
show completions as text only, and the page's policy runs no other script.
"""

import json
import secrets
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from runs.log import values_of, write_whole
from runs.page.charts import PALETTE, Chart
from runs.page.runs import Run, logged, options_of

HERE = Path(__file__).parent


def write_page(path: Path, runs: list[Run], charts: list[Chart], cells: list[list[str]]):
    """cells: the table of the console."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    loader = jinja2.FileSystemLoader(HERE)
    template = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    options, same = options_of(runs)
    rollouts = [dict(run=r.name, samples=r.samples, every=r.every) for r in runs if r.samples]
    data = dict(palette=PALETTE, charts=[asdict(chart) for chart in charts], rollouts=rollouts)
    page = template.get_template("page.html").render(
        plotly=Markup(get_plotlyjs()),
        island=Markup(island(data)),
        css=Markup((HERE / "page.css").read_text()),
        scripts=[Markup((HERE / name).read_text()) for name in ("charts.js", "rollouts.js")],
        nonce=secrets.token_urlsafe(16),
        runs=runs,
        sections=list(dict.fromkeys(chart.section for chart in charts)),
        tiles=tiles(runs[0]),
        options=options,
        same=same,
        cells=cells,
    )
    write_whole(path, page)


def island(data) -> str:
    """JSON inside <script>. No text in it can end the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def tiles(run: Run) -> list[tuple[str, str]]:
    """(name, value) of the figures at the top of the page."""
    iterations = f"{len(run.records):,}"
    if not run.ended:
        iterations += f" of {run.settings['max_iters']:,}"
    figures = {"reward": "reward_mean", "pass@1": "pass_at_1"}
    if run.kind == "SFT":
        figures["loss"] = "loss"
    tiles = [("iterations", iterations)]
    for name, figure in figures.items():
        values = [value for _, value in values_of(run.records, figure)]
        if values:
            tiles.append((name, f"{values[0]:.3f} → {values[-1]:.3f}"))
    peak = f"{max(logged(run.records, 'mem_max_alloc_mb')):,.0f} MiB"
    seconds = sum(logged(run.records, "time_s"))
    return [*tiles, ("peak memory", peak), ("time", tqdm.format_interval(seconds))]
