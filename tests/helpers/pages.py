"""Runs and samples for the page, and the page."""

import json
import shutil

import report
from runs.page import runs as page_runs
from runs.page.runs import read_runs

PHASES = [phase for phase in page_runs.PHASES if phase != "teacher"]


def make_run(folder, iterations=4, samples=(), kind="GRPO", **settings):
    """A run's folder with figures that are easy to foresee."""
    folder.mkdir(parents=True)
    records = []
    phases = PHASES[:5] if kind == "GRPO" else ("train", "optimizer")
    for i in range(iterations):
        record = dict(iter=i, loss=1 / (i + 1), entropy=0.5, grad_norm=2.0 + i, tokens_per_second=1000.0, time_s=10.0)
        record |= dict(reward_mean=i / 10, kl=None if i == 1 else i / 100) if kind == "GRPO" else {}
        record |= dict(pass_at_1=i / 5, pass_at_1_sampled=i / 6) if i % 2 == 0 else {}
        record |= dict(mem_alloc_mb=1.0, mem_reserved_mb=900.0, mem_max_alloc_mb=50.0)
        for n, phase in enumerate(phases):
            record |= {f"mem_max_alloc_mb_{phase}": 10.0 * n + i, f"time_{phase}_s": 1.0 + n}
            record |= {f"mem_alloc_mb_{phase}": n + 0.5, f"mem_reserved_mb_{phase}": 900.0}
        records.append(record)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    common = dict(max_iters=iterations, task="addition", device="cpu", parameters=1234, seed=1, eval_prompts=99)
    settings = common | settings | (dict(group_size=16) if kind == "GRPO" else {})
    (folder / "settings.json").write_text(json.dumps(settings))
    return str(folder)


def make_samples(iterations, k=8, texts=("one", " two"), group=0):
    """A group of k completions for each iteration. Rewards in their order: 0, .25, .5, .75, and again."""
    samples = []
    for i in range(iterations):
        for j in range(k):
            tokens = [*texts, str(i), ""]
            sample = dict(iter=i, group=group, prompt=f"prompt {i} {texts[0]}", completion="".join(tokens))
            sample |= dict(reward=j % 4 / 4, advantage=j % 4 / 4 - 0.375, stopped=j > 0, tokens=tokens)
            figures = {name: [value] * len(tokens) for name, value in (("logprobs", -1.0), ("ref_logprobs", -1.5))}
            samples.append(sample | figures | dict(entropies=[0.25] * len(tokens)))
    return samples


def page_of(folders):
    runs = read_runs(folders)
    return report.write_page(runs, report.cells_of(runs), report.verdict(runs))


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
