"""--probe: will this run learn something, and how long will it take? A minute or a few, before hours.

    python grpo.py config/grpo_small.py --probe

The run's own first iterations, with learning_rate 0: its weights, prompts, template, tools, rewards and limits, and
every pass that training makes. Nothing is written. Notes and hints (runs/hints.toml) say what to change, the
likeliest cause first. Exit code 0: go; 3: no go, because all groups have equal rewards. One group in 32 with
different rewards is enough: in a run that learned, only 8 % of the groups had them.

Left out: what a model learns meanwhile; dynamic sampling, which throws groups away. Tests: tests/test_probe.py.
"""

import sys
import time
from dataclasses import replace
from statistics import fmean

from tqdm import tqdm

from data.scores import share_of
from runs.hints import hints
from runs.log import finite
from runs.notes import notes
from runs.page.runs import logged
from snug.options import fields, plain
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
        self.records.append(finite(record | dict(time_s=time.perf_counter() - self.started)))
        self.completions += samples


def probe(iterate, training: Training):
    """Print what the first iterations show. Raises SystemExit with the exit code."""
    prepared, first = training.prepared, training.log.start
    settings = prepared.settings
    prepared.settings = replace(settings, learning_rate=0.0, max_num_gen_batches=1)
    training.log.show_line = say  # warnings
    probing = Probing(**{name: getattr(training, name) for name in fields(Training)})
    records, examples = [], []
    probing.records, probing.completions = records, examples
    number = max(2, -(-PROMPTS // settings.batch_size))
    for iteration in counted(range(first, first + number), "iterations", "probe"):
        probing.begin_iteration(iteration)
        probing.end_iteration(*iterate(iteration, probing))

    names = {name for record in records for name in record}
    means = {name: fmean(values) for name in names if (values := logged(records, name))}
    varied, groups = groups_of(records, settings)
    go = settings.teacher or varied
    seconds = fmean(logged(records[1:], "time_s"))  # without the first iteration, which is slow
    duration = tqdm.format_interval((settings.max_iters - first) * seconds)
    lines = [f"{number} iterations without learning; in brackets a 95 % interval"]
    if groups:
        lines.append(f"  groups with different rewards: {share_of(varied, groups)}")
    if "reward_mean" in means:
        lines.append(f"  mean reward: {means['reward_mean']:.3f}")
    lines += [
        f"  cut off: {100 * means['truncated_fraction']:.0f} % of the completions",
        f"  an iteration takes {seconds:.2f} s; all of them {duration}, without evaluations and dynamic sampling",
    ]
    for each in examples[:2]:
        lines.append(f"  reward {each['reward']}: {' '.join(each['completion'].split())[:WIDTH]}")
    lines.append("go" if go else f"no go: none of {groups} groups has different rewards")
    lines += [f"  note: {note}" for note in notes(prepared)]
    lines += [f"  hint: {hint}" for hint in hints(means).values()]
    say(plain("\n".join(lines)))
    sys.exit(0 if go else 3)
