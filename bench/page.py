"""How long a report takes to open in Chromium: until its completions are painted, and until all charts are drawn.

    python grpo.py config/grpo_small.py --samples_per_iteration=64 --out_dir=out/many       # 5,120 completions
    python report.py out/many
    python bench/page.py out/many/report.html

Needs playwright and Chromium (CONTRIBUTING.md). A new browser each time, the window 1400 x 900; medians.
"""

import json
import shutil
import sys
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright

ROUNDS = 7
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


def main(path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    rounds = []
    with sync_playwright() as playwright:
        for _ in range(ROUNDS):
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
    main(Path(sys.argv[1]))
