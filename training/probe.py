"""--probe: will this run learn something, and how long will it take? A minute or a few, before hours.

    python grpo.py config/grpo_small.py --probe

The run's own first iterations, with learning_rate 0: its weights, prompts, template, tools, rewards and limits, and
every pass that training makes. The report goes to the console and to probe.json in out_dir; nothing else is written.
What holds of runs/hints.toml says what to change, the likeliest cause first. Exit code 0: go; 3: no go, because no
group has different rewards. One of 32 is enough: of a run that learned, 0.08 of the groups had them.

Left out: what a model learns meanwhile; dynamic sampling, which throws groups away. Tests: tests/test_probe.py.
"""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from data.scores import share_of
from runs.hints import hints, unused_template
from runs.log import finite, write_whole
from runs.page.runs import PHASES, logged
from snug.options import in_one_line, plain
from snug.options.progress import counted, say
from training.figures import groups_of
from training.state import Training

PROMPTS = 32  # at least
WIDTH = 90  # of an example's text, in characters


class Probing(Training):
    """A Training that keeps what it would log, and neither evaluates nor saves."""

    def evaluate_if_due(self, done):
        return {}

    def end_iteration(self, record, samples=()):
        record |= dict(time_s=time.perf_counter() - self.started)
        self.records.append(finite(record | self.meter.stats()))
        self.completions += map(finite, samples)


def probe(iterate, training: Training):
    """Print and write the report. Raises SystemExit, with the exit code."""
    prepared, first = training.prepared, training.log.start
    settings = prepared.settings
    prepared.settings = replace(
        settings,
        learning_rate=0.0,
        max_num_gen_batches=1,
        samples_per_iteration=settings.sequences_per_rollout,  # all
    )
    training.log.show_line = say  # warnings
    probing = Probing(**vars(training))
    probing.records, probing.completions = [], []
    number = max(2, -(-PROMPTS // settings.batch_size))
    for iteration in counted(range(first, first + number), "iterations", "probe"):
        iterate(iteration, probing)
    completions = probing.completions
    means = means_of(probing.records) | signs(completions, prepared)
    varied, groups = groups_of(probing.records, settings)
    report = dict(
        varied=varied,
        groups=groups,
        means=means,
        seconds=(settings.max_iters - first) * means["time_s"],
        verdict=list(hints(means).values()),
        go=bool(settings.teacher or varied),
    )
    if not training.processes.rank:
        say(plain("\n".join(screen(completions, **report))))
        file = Path(settings.out_dir) / "probe.json"
        with in_one_line(f"{file} cannot be written"):
            write_whole(file, json.dumps(report, indent=2) + "\n")
    sys.exit(0 if report["go"] else 3)


def means_of(records: list[dict]) -> dict[str, float]:
    """The log's figures: means, but the most memory, and times without the first iteration, which is slow."""
    means = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = logged(records[1:] if name.startswith("time_") else records, name)
        average = max if name.startswith("mem_") else fmean
        if values:
            means[name] = average(values)
    return means


def column(completions: list[dict], name: str) -> list:
    return [each[name] for each in completions]


def signs(completions: list[dict], prepared) -> dict[str, float]:
    """Figures that only hints.toml reads: what a wrong template, tool, stop string or reward function leaves."""
    settings, signs = prepared.settings, {}
    if settings.stop_string:
        signs["stop_string_seen"] = fmean(
            settings.stop_string in each["completion"] for each in completions
        )
    signs |= unused_template(prepared.tokenizer, completions)
    turns = [turn for each in completions for turn in each.get("messages", ())]
    calls = sum(len(turn.get("tool_calls", ())) for turn in turns)
    if calls:
        signs["failed_calls"] = sum(column(completions, "tool_errors")) / calls
    answers = [str(row.get("answer", "")) for row in column(completions, "columns")]
    if all(answers):
        found = []
        for answer, each in zip(answers, completions, strict=True):
            word = rf"(?<!\w){re.escape(answer)}(?!\w)"
            seen = re.search(word, each["completion"])
            found.append(bool(seen) and not each["reward"])
        signs["answer_unrewarded"] = fmean(found)
    return signs


def screen(completions, varied, groups, means, seconds, verdict, go) -> list[str]:
    """The report -> lines."""
    lines = [
        f"{len(completions):,} completions, none of them learned from; in brackets a 95 % interval"
    ]
    if groups:
        lines.append(f"  groups with different rewards: {share_of(varied, groups)}")
    if "reward_mean" in means:
        each = [f"{name[7:]} {mean:.3f}" for name, mean in means.items() if name.startswith("reward/")]
        lines.append("  mean reward: " + ", ".join([f"{means['reward_mean']:.3f}", *each]))
    spent = [f"{name} {means[f'time_{name}_s']:.2f}" for name in PHASES if f"time_{name}_s" in means]
    lines += [
        f"  cut off: {100 * means['truncated_fraction']:.0f} % of the completions",
        f"  an iteration takes {means['time_s']:.2f} s ({', '.join(spent)}); all of them "
        f"{tqdm.format_interval(seconds)}, without evaluations and dynamic sampling",
        f"  memory: {means['mem_max_alloc_mb']:,.0f} MiB",
    ]
    scored = [each for each in completions if each["reward"] is not None]
    for which in (max, min) if scored else ():
        each = which(scored, key=lambda each: each["reward"])
        text = " ".join(each["completion"].split())
        lines.append(f"  reward {each['reward']:.3g}: {text[:WIDTH]}")
    says = "go" if go else f"no go: none of {groups} groups has different rewards"
    if verdict:
        says += "; the likeliest cause is first:"
    return [*lines, says, *(f"  {line}" for line in verdict)]
