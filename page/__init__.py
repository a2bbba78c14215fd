"""A page about runs: charts, memory by phase, and a browser of the logged completions. `report.py` writes it.

runs.py       what a run's folder says            page.html    the template, with autoescape
charts.py     the figures, each described once    page.css     light and dark
pictures.py   a PNG of each, by matplotlib        charts.js    draws each with plotly
write.py      the page: one file, no network      rollouts.js  the browser of completions
"""
