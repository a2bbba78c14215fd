"""The page about runs shows the log's figures, and completions stay text. The browser's tests need Chromium."""

import json
import re
from pathlib import Path

import pytest

import report
from helpers.errors import assert_refused
from helpers.pages import CHROMIUM, make_run, make_samples, page_of
from helpers.runs import refused
from runs.page.charts import charts_of
from runs.page.runs import read_run, read_runs
from runs.page.write import shown
from settings import GRPOSettings
from snug.options import HIDDEN, plain

HOSTILE = ["</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>", "<!--<script>"]
HOSTILE += ["\u2028 & \" ' ` ${window.hacked = 1} \u202e gnihton", "<b>bold</b>\n\ttwo lines"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def chart(charts, title):
    """-> {name: Series} of the chart with this title."""
    (match,) = [chart for chart in charts if chart.title == title]
    return {series.name: series for series in match.series}


def island_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_charts_have_the_logs_figures():
    runs = read_runs([make_run(Path("a")), make_run(Path("warm"), kind="SFT", iterations=3)])
    charts = charts_of(runs)
    reward = chart(charts, "Reward, GRPO")["training, sampled"]
    assert (reward.x, reward.y) == ([0, 1, 2, 3], [0, 0.1, 0.2, 0.3])
    kl = chart(charts, "KL to the reference, GRPO")["a"]
    assert (kl.x, kl.y) == ([0, 2, 3], [0, 0.02, 0.03])  # null is no point
    assert chart(charts, "pass@1, GRPO")["sampled"].x == [0, 2]
    assert chart(charts, "Loss, SFT")["training"].y == [1, 1 / 2, 1 / 3]
    timeline = chart(charts, "Memory timeline, a")
    assert (timeline["train"].y, timeline["rollout"].x) == ([30, 31, 32, 33], [0, 1, 2, 3])
    assert timeline["train"].x == pytest.approx([0.6, 1.6, 2.6, 3.6]) and timeline["train"].width == 0.2
    assert "Reward, SFT" not in [chart.title for chart in charts]
    runs[0].records[2]["mem_max_alloc_mb_eval"] = 5.0
    timeline = chart(charts_of(runs), "Memory timeline, a")
    assert timeline["eval"].y == [5] and timeline["eval"].x == pytest.approx([2 + 5 / 6])
    both = charts_of(read_runs([make_run(Path("b")), make_run(Path("c"), iterations=2)]))
    assert {name: s.y for name, s in chart(both, "Entropy").items()} == {"b": [0.5] * 4, "c": [0.5] * 2}
    assert set(chart(both, "pass@1")) == {"b, greedy", "b, sampled", "c, greedy", "c, sampled"}


def test_each_function_has_a_line_and_each_metric_a_chart():
    runs = read_runs([make_run(Path("a"), iterations=3), make_run(Path("b"), iterations=2)])
    assert not any("function" in chart.title for chart in charts_of(runs))
    for run in runs:
        for i, record in enumerate(run.records):
            record |= {"reward/exact": i / 4, "reward/short": None if i else 0.5, "reward/judge": 1.0}
    runs[1].records[1]["metric/<i>words"] = 7.0
    one = chart(charts_of(runs[:1]), "Reward by function")
    drawn = {name: (s.x, s.y, s.color) for name, s in one.items()}
    exact, judge = ([0, 1, 2], [0, 0.25, 0.5], 0), ([0, 1, 2], [1, 1, 1], 2)
    assert drawn == {"exact": exact, "short": ([0], [0.5], 1), "judge": judge}
    both = chart(charts_of(runs), "Reward by function")
    assert list(both) == [f"{run}, {name}" for run in "ab" for name in ("exact", "short", "judge")]
    assert len({(s.color, s.style) for s in both.values()}) == 6
    (metric,) = chart(charts_of(runs), "metric/<i>words").values()
    assert (metric.name, metric.x, metric.y) == ("b", [1], [7])
    rows = {name: cells for name, *cells in report.cells_of(runs)}
    assert rows["reward/exact (first -> last)"] == ["0.000 -> 0.500", "0.000 -> 0.250"]
    assert rows["metric/<i>words (first -> last)"] == ["-", "7.000"]


def test_the_top_says_what_is_not_default():
    defaults = {name: value for name, value in vars(GRPOSettings()).items() if name != "max_iters"}
    other = dict(init_from="models/<b>x", learning_rate=2.0, reward_funcs=["a.py:<i>"], out_dir="b")
    folders = [make_run(Path("a"), **defaults | dict(n_layer=3)), make_run(Path("b"), **defaults | other)]
    sft = dict(max_iters=4, out_dir="out/grpo", gym_size=3, device="auto", eval_prompts=500)
    folders.append(make_run(Path("warm"), kind="SFT", **sft))
    text = page_of(folders).read_text()
    top = re.search(r'<div class="scroll options">(.*?)</div>', text, re.DOTALL)[1]
    assert sorted(re.findall("<t[hd]>(.*?)</t[hd]>", row) for row in top.split("<tr>")[1:]) == [
        ["", "a", "b", "warm"],
        ["gym_size", "-", "-", "3"],
        ["init_from", "", "models/&lt;b&gt;x", "-"],
        ["learning_rate", "0.001", "2.0", "-"],
        ["max_iters", *["4"] * 3],
        ["n_layer", "3", "2", "-"],
        ["out_dir", "out/grpo", "b", "out/grpo"],
        ["parameters", *["1234"] * 3],
        ["reward_funcs", "[]", "[&#34;a.py:&lt;i&gt;&#34;]", "-"],
    ]


def test_the_table():
    folders = [make_run(Path("a"), iterations=5), make_run(Path("warm"), kind="SFT", iterations=3)]
    runs = read_runs(folders)
    records = runs[0].records
    records[-1] |= dict(mem_max_alloc_mb=1.0, mem_max_alloc_mb_train=1.0)  # the largest is not the last
    records[0] |= dict(time_s=99.0, time_eval_s=3.0, mem_max_alloc_mb_eval=5.0)  # slow; and the first evaluation
    for record in records[1:3]:
        record["time_s"] = 50.0
    rows = {name.strip(): cells for name, *cells in report.cells_of(runs)}
    assert rows["memory in MiB"] == ["a", "warm"] and rows["iterations"] == ["5", "3"]
    assert rows["mem_max_alloc_mb_train"] == ["33.0", "2.0"] and rows["time_train_s (median)"] == ["4.000", "1.000"]
    assert rows["reward_mean (first -> last)"] == ["0.000 -> 0.400", "-"] and "mem_max_alloc_mb_eval" in rows
    assert rows["pass_at_1 (first -> last)"] == ["0.000 -> 0.800", "0.000 -> 0.400"]
    assert rows["time_s (median)"] == ["30.000", "10.000"] and rows["time_eval_s (median)"] == ["3.000", "-"]
    assert "eval_reward_mean (first -> last)" not in rows


def test_a_completion_ends_no_script_and_the_page_needs_no_network():
    samples = make_samples(2, texts=HOSTILE)
    text = page_of([make_run(Path("<script>alert(1)<script>"), samples=samples)]).read_text()
    assert island_of(text)["rollouts"][0]["samples"] == shown(samples) and "window.hacked" in text
    assert not any(tag in text for tag in ("<script>window", "<img", "<script>alert", "<script src"))
    top = text.partition("<style>")[0]
    assert "default-src 'none'" in top and not re.search(r"(src|href)=.?(https?:|//)", top)
    island = re.search(r'<script type="application/json" id="data">(.*)</script>\n', text)[1]
    assert "window.hacked" in island and "<" not in island


def test_no_text_of_a_page_turns_its_order_or_hides():
    """In a completion, its tokens, columns and figures, in the names of folders, models and metrics; emoji stay whole."""
    sly, seen = "a\u202eb\u2028c\u2066\u200f\x1b\ufeff", r"a\u202eb\u2028c\u2066\u200f\x1b\ufeff"
    family = "👩\u200d👧 \n\t می\u200cخواهم \u3000"
    samples = make_samples(2, texts=[sly, family])
    for sample in samples:
        sample |= {"columns": {sly: [sly]}, "rewards": {sly: 1.0}}
    folder = make_run(Path("a\u202e"), samples=samples, init_from=f"m/{sly}")
    runs = read_runs([folder])
    runs[0].records[0][f"metric/{sly}"] = 7.0
    text = report.write_page(runs, report.cells_of(runs), report.verdict(runs)).read_text()
    top, _, rest = text.partition("<style>")
    body = rest.partition("</style>")[2].partition('<script type="application/json"')[0]
    for part in (top, body, json.dumps(island_of(text), ensure_ascii=False)):
        assert not HIDDEN.search(part) and r"\u202e" in part
    sample = island_of(text)["rollouts"][0]["samples"][0]
    assert sample["tokens"][:2] == [seen, family] and sample["columns"] == {seen: [seen]}
    titles = [chart["title"] for chart in island_of(text)["charts"]]
    assert sample["rewards"] == {seen: 1.0} and f"m/{seen}" in body and any(seen in title for title in titles)


def test_runs_that_are_not_finished_or_empty():
    folder = make_run(Path("a"), max_iters=9)
    (run,) = read_runs([folder])
    assert not run.ended and "not finished" in page_of([folder]).read_text()
    with open(f"{folder}/log.jsonl", "a") as file:
        file.write('{"iter": 4, "lo')
    assert len(read_runs([folder])[0].records) == 4
    (Path("a/log.jsonl")).write_text("")
    assert_refused("log.jsonl has no iteration yet", read_runs, [folder])


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("settings.json", '{"max_iters": 4, "ta', "(JSONDecodeError"),
        ("log.jsonl", "{}\n", "(KeyError: 'iter')"),
        ("samples.jsonl", '{"iter": 0}\n{"group": 0}\n', "(KeyError: 'iter')"),
    ],
)
def test_a_damaged_file_is_one_line(name, text, message):
    folder = make_run(Path("a"))
    Path("a", name).write_text(text)
    said = f"a: log.jsonl, settings.json or samples.jsonl cannot be read {message}"
    assert said in refused(page_of, [folder])


def test_a_large_file_of_completions_is_thinned():
    folder = Path("a")
    make_run(folder, iterations=20, samples=make_samples(20))
    size = (folder / "samples.jsonl").stat().st_size
    for most_bytes, kept in ((size, [*range(20)]), (size / 6, [0, 6, 12, 18, 19]), (1, [0, 19])):
        run = read_run(folder, most_bytes)
        assert [sample["iter"] for sample in run.samples[::8]] == kept and len(run.samples) == 8 * len(kept)


@pytest.fixture(scope="module")
def chromium():
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium; apt-get install chromium")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(chromium, path):
    """-> the tab, and a list that gets its errors, dialogs and requests to a network."""
    tab, wrong = chromium.new_page(viewport=dict(width=1400, height=900)), []
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("dialog", lambda dialog: wrong.append(dialog.message) or dialog.dismiss())
    tab.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url))
    tab.goto(f"file://{path.resolve()}")
    tab.wait_for_selector("#list .row")
    return tab, wrong


def rewards(tab):
    return [float(text) for text in tab.locator("#list .row:not(.group) .reward").all_inner_texts()]


def test_the_browser_draws_the_charts(chromium):
    folders = [make_run(Path("<b>a"), samples=make_samples(1)), make_run(Path("warm"), kind="SFT")]
    tab, wrong = opened(chromium, page_of(folders))
    tab.locator(".chart").last.locator(".main-svg").first.wait_for()
    plots = "[...document.querySelectorAll('.chart')].find(c => c.textContent.startsWith('Reward'))"
    assert tab.evaluate(f"{plots}.querySelector('.plot').data[0].y") == [0, 0.1, 0.2, 0.3]
    assert tab.evaluate(f"{plots}.querySelector('.js-line').getAttribute('d').split('L').length") > 1
    assert tab.locator(".plot .main-svg .xy").count() > 15
    blocks = tab.locator(".chart", has_text="Memory timeline, <b>a").locator(".barlayer .point path")
    assert blocks.count() == 4 * 5 and tab.locator("h1 b").count() == 0
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before and wrong == []


def test_the_browser_filters_and_finds_completions(chromium):
    samples = make_samples(3) + make_samples(3, texts=HOSTILE, group=1)
    for sample in samples:
        sample["reward"] = 0.5 if sample["iter"] == 1 else sample["reward"]
    samples[8]["reward"] = None
    tab, wrong = opened(chromium, page_of([make_run(Path("a"), samples=samples)]))
    # Two groups of the last iteration, the best completions first
    assert tab.inner_text("#iteration") == "2" and tab.locator(".row.group").count() == 2
    assert rewards(tab)[:8] == [0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0, 0]
    tab.evaluate("step.value = 0; step.dispatchEvent(new Event('input'))")
    assert tab.inner_text("#iteration") == "0" and "prompt 0 one" in tab.inner_text("#list")
    shown = {"above": [0.75, 0.75, 0.5, 0.5] * 2, "cut": [0, 0], "below": [0.25, 0.25, 0, 0] * 2}
    for name, wanted in shown.items():
        tab.select_option("#filter", name)
        assert rewards(tab) == wanted and f"{len(wanted)} of 48" in tab.inner_text("#count")
    tab.evaluate("step.value = 1; step.dispatchEvent(new Event('input'))")
    assert rewards(tab) == [] and tab.inner_text("#list") == "No completion matches."  # all rewards are equal
    tab.select_option("#filter", "all")
    assert "–" in tab.inner_text("#list")  # one has no reward
    # Only the rows in view are drawn; a completion is text, also in the search
    tab.check("#all")
    assert "48 of 48" in tab.inner_text("#count") and tab.locator("#list .row").count() < 40  # of 54
    tab.evaluate("list.scrollTop = list.scrollHeight")
    tab.wait_for_selector("#list .row.group >> text=iteration 2")
    tab.fill("#search", HOSTILE[1].upper())
    assert "24 of 48" in tab.inner_text("#count") and tab.evaluate("window.hacked") is None
    completion = tab.locator("#detail .tokens").text_content()
    assert all(plain(text).replace("\n", "↵\n") in completion for text in HOSTILE) and completion.endswith("0■")
    assert tab.locator("#rollouts img, #rollouts .tokens b, #rollouts script").count() == 0
    # Colours: log-prob -1 of -4, entropy 0.25 of 2, -1 to the reference's -1.5, advantage 0.375 of 2, each of 50 %
    shade = "document.querySelector('#detail .tokens span').style.background"
    shades = dict(logprobs="accent) 13%", entropies="accent) 6%", change="good) 13%", advantage="good) 9%")
    for name, wanted in shades.items():
        tab.select_option("#colour", name)
        assert f"var(--{wanted}" in tab.evaluate(shade)
    # Keys
    tab.focus("#list")
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#list .row").nth(2).get_attribute("aria-selected") == "true"
    tab.locator("#detail .tokens span").first.hover()
    assert tab.inner_text("#token").startswith("token 1: log-prob −1.000, probability 0.368, entropy 0.250")
    assert tab.locator("#detail .at").count() == 1 and wrong == []
