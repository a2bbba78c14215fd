"""How long a report takes to open in Chromium: until its completions are painted, and until all charts are drawn.

    python grpo.py config/grpo_small.py --samples_per_iteration=64 --out_dir=out/many       # 5,120 completions
    python report.py out/many
    python bench/page.py out/many/report.html [--rounds=7]

Needs playwright and Chromium (CONTRIBUTING.md). A new browser each time, the window 1400 x 900; medians.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright

WATCH = """
  window.times = {};
  const note = (name) => times[name] ??= performance.now() / 1000;
  new MutationObserver(() => {
    if (!document.querySelector("#list .row, #nothing:not([hidden])")) return;
    requestAnimationFrame(() => setTimeout(() => note("completions painted")));
    const plots = [...document.querySelectorAll(".plot")];
    if (plots.some((plot) => plot.querySelector(".main-svg"))) note("first chart");
    if (plots.every((plot) => plot.querySelector(".main-svg"))) note("all charts");
  }).observe(document, { childList: true, subtree: true });
"""


def main(path, count):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    rounds = []
    with sync_playwright() as playwright:
        for _ in range(count):
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            tab = browser.new_page(viewport=dict(width=1400, height=900))
            tab.add_init_script(WATCH)
            tab.goto(path.resolve().as_uri())
            while "all charts" not in (times := tab.evaluate("times")):
                tab.wait_for_timeout(200)
            rounds.append(times)
            version = browser.version
            browser.close()
    times = {name: round(median(times[name] for times in rounds), 2) for name in rounds[0]}
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, seconds in Chromium {version}")
    print(json.dumps(times))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Seconds until Chromium shows a report.")
    options.add_argument("page", type=Path, help="a run's report.html")
    options.add_argument("--rounds", type=int, default=7, help="browsers, one after the other")
    arguments = options.parse_args()
    main(arguments.page, arguments.rounds)
