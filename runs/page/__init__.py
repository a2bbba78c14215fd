"""A page about runs: charts, memory by phase, and a browser of the logged completions. `report.py` writes it.

runs.py       what a run's folder says            page.html    the template, with autoescape
charts.py     the charts, each described once     page.css     light and dark
write.py      the page: one file, no network      charts.js    draws each chart with plotly
                                                  rollouts.js  the browser of completions
"""
