"""The page: one file that works from a disk, without network.

The charts and the completions are one JSON island. A completion is untrusted text: the island escapes `<`, the scripts
show completions as text only, and the page's policy runs no other script. Characters that would turn the order of a
line, or hide, are text too (`plain`).
"""

import secrets
from dataclasses import asdict
from pathlib import Path

from runs.log import FIGURES, write_whole
from runs.page.charts import charts_of
from runs.page.runs import options_of
from snug.options import in_one_line, plain


def write_page(runs, cells, verdict):
    """Write report.html into the first run's folder -> its path. cells: the console's table; verdict: its lines below.

    Raises SnugError."""
    import jinja2
    from jinja2.utils import htmlsafe_json_dumps
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=loader, autoescape=True, finalize=shown)
    charts = charts_of(runs)
    rollouts = [
        dict(run=str(run.folder), samples=run.samples, every=run.every) for run in runs if run.samples
    ]
    data = dict(palette=FIGURES["palette"], charts=list(map(asdict, charts)), rollouts=rollouts)
    text = templates.get_template("page.html").render(
        plotly=Markup(get_plotlyjs()),
        island=htmlsafe_json_dumps(shown(data)),  # no text in it can end <script>
        nonce=secrets.token_urlsafe(16),
        runs=runs,
        sections=list(dict.fromkeys(chart.section for chart in charts)),
        options=options_of(runs),
        cells=cells,
        verdict=verdict,
    )
    page = runs[0].folder / "report.html"
    with in_one_line(f"{page} cannot be written"):
        write_whole(page, text)
    return page


def shown(value):
    """A value with its texts `plain`; Markup is ours."""
    if isinstance(value, dict):
        return {plain(name): shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return list(map(shown, value))
    return plain(str(value)) if type(value) is str or isinstance(value, Path) else value
