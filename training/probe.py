"""--probe: will this run learn something, and how long will it take? A minute or a few, before hours.

    python grpo.py config/grpo_small.py --probe

The run's own first iterations, with learning_rate 0: its weights, prompts, template, tools, rewards and limits, and
every pass that training makes. The report goes to the console and to probe.json in out_dir; nothing else is written.
data/rates.py estimates the share of groups that will teach something. What holds of runs/hints.toml says what to
change, the likeliest cause first. Exit code 0: go; 3: no go, because hardly a group would teach something.

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

from data.rates import SIZES, others, share_teaching
from data.scores import pass_at, powers, wilson
from evaluate import is_right, pass_reward
from runs.hints import hints, unused_template
from runs.log import finite, write_whole
from runs.page.runs import PHASES, logged
from snug.memory.plan import plan
from snug.options import in_one_line, plain
from snug.options.progress import counted, say
from training.dry_run import DryRun
from training.state import Training

PROMPTS = 32  # at least
LEAST = (
    0.03  # of the groups must teach; a run that learned began with 0.08, and one probe of it said 0.046
)
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
    k = settings.group_size
    groups = [completions[i : i + k] for i in range(0, len(completions), k)]
    means = means_of(probing.records) | signs(completions, prepared)
    planned = plan(DryRun(prepared, iterate), settings)
    rates = rates_of(groups, prepared)
    teaching, *_ = rates.get(f"groups of {k} that teach", [0.0])
    report = dict(
        rates=rates,
        means=means,
        seconds=(settings.max_iters - first) * means["time_s"],
        plan=planned.line(),
        verdict=list(hints(means).values()),
        go=bool(settings.teacher) or teaching >= LEAST,
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


def rates_of(groups: list[list[dict]], prepared) -> dict[str, list[float]]:
    """-> {name: [a share of the completions, of the groups or of the prompts, low, high]}."""
    rates = {}
    k = len(groups[0])
    completions = sum(groups, [])
    scored = any(reward is not None for reward in column(completions, "reward"))
    if scored:
        least = pass_reward(prepared)
        right = [sum(is_right(each["reward"], least) for each in group) for group in groups]
        for size in powers(k):
            rates[f"pass@{size}"] = fmean(pass_at(size, k, count) for count in right)
        for name in completions[0]["rewards"]:
            varied = []
            for group in groups:
                x, _ = others([rewards[name] for rewards in column(group, "rewards")])
                varied.append(x > 0)
            rates[f"groups in which {name} varies"] = fmean(varied)
    stopped = column(completions, "stopped")
    rates["cut off"] = 1 - fmean(stopped)
    texts = [each.get("messages", each["completion"]) for each in completions]
    answers = prepared.task.answers_of(texts, stopped)
    rates["no answer"] = answers.count(None) / len(answers)
    # Completions of a prompt are alike: the interval counts prompts.
    P = len(groups)
    for name, rate in rates.items():
        rates[name] = [rate, *wilson(rate, P)]
    if scored and k > 1:
        counts = [others(column(group, "reward")) for group in groups]
        for size in sorted({k, *SIZES}):
            rates[f"groups of {size} that teach"] = share_teaching(counts, size)
    return rates


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


def screen(completions, rates, means, seconds, plan, verdict, go) -> list[str]:
    """The report -> lines."""
    lines = [f"{len(completions)} completions, none of them learned from; 95 % intervals"]
    width = max(map(len, rates))
    for name, (rate, low, high) in rates.items():
        lines.append(f"  {name:<{width}}   {rate:.3f}   {low:.3f} to {high:.3f}")
    spent = [f"{name} {means[f'time_{name}_s']:.2f}" for name in PHASES if f"time_{name}_s" in means]
    lines += [
        f"  an iteration takes {means['time_s']:.2f} s ({', '.join(spent)}); all of them "
        f"{tqdm.format_interval(seconds)}, without evaluations and dynamic sampling",
        f"  memory {means['mem_max_alloc_mb']:,.0f} MiB; planned for the longest: {plan}",
    ]
    scored = [each for each in completions if each["reward"] is not None]
    for which in (max, min) if scored else ():
        each = which(scored, key=lambda each: each["reward"])
        text = " ".join(each["completion"].split())
        lines.append(f"  reward {each['reward']:.3g}: {text[:WIDTH]}")
    says = "go" if go else f"no go: fewer than {LEAST:.0%} of the groups would teach something"
    if verdict:
        says += "; the likeliest cause is first:"
    return [*lines, says, *(f"  {line}" for line in verdict)]
