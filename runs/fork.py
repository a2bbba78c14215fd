"""A run goes on from a checkpoint, with the same and with other options, for several seeds: branches in pairs.

    python -m runs.fork out/grpo_small --at=60 --learning_rate=6e-4 --seeds=3

Each pair begins with checkpoint-000060. The first pair here is out/grpo_small-at60/same-seed1 and
learning_rate=0.0006-seed1 beside it. This pair has the run's seed, so `same-seed1` samples what the run itself sampled.
The other pairs have the next seeds, so they see other prompts and draw other tokens. A branch is a run of its own; its
log begins with the run's log. OF_BOTH names the options that both branches of a pair get: how long they train, how they
log, where they run. A branch calls the run's on_iteration only if the command names it: on_iteration may end a run, but
a branch has to reach its end.

One branch trains after the other, in a process of grpo.py. The same command goes on where it was stopped.
Left out: several processes (torchrun); a comparison, which report.py makes. Tests: tests/test_fork.py.
"""

import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from runs.checkpoint import checkpoints, iteration_of
from runs.log import read_log
from runs.prepare import prepare
from settings import GRPOSettings, LogOptions
from snug.home import HOME, begun_in_the_clone, command
from snug.options import (
    SnugError,
    fields,
    friendly_errors,
    in_one_line,
    make_settings,
    option,
    read_settings,
)
from snug.options.progress import say

SCRIPT = [HOME / "grpo.py"] if begun_in_the_clone() else ["-m", "snug", "grpo"]
OF_BOTH = {"max_iters", "seed", "device", "kernels", "out_dir", *fields(LogOptions)}


@dataclass
class ForkSettings(GRPOSettings):
    """How a run goes on from a checkpoint, as it was and with the options that are given here."""

    usual = "at seeds max_iters out_dir"

    at: int = option(0, "branch after N iterations; 0: the newest checkpoint")
    seeds: int = option(6, "pairs of branches, each of another seed; the first is the run's", minimum=1)


def main(settings, given, folder: str):
    """Raises SnugError before anything is written if the run cannot go on like this."""
    if odd := given & {"probe", "plan", "resume"}:
        raise SnugError(f"a branch trains; leave out {', '.join(sorted(odd))}")
    own = sorted(given - {"at", "seeds"})
    changed = dict(on_iteration="") | {name: getattr(settings, name) for name in own}
    run = prepare(*make_settings(GRPOSettings, "", changed | {"resume": folder})).settings
    starts = {iteration_of(path): path for path in checkpoints(folder)}
    at = settings.at or max(starts)
    if at not in starts:
        raise SnugError(
            f"{folder} has no checkpoint after {at} iterations, but after {', '.join(map(str, starts))}"
        )
    if at >= run.max_iters:
        raise SnugError(f"{folder} ends after {run.max_iters} iterations; go on: --max_iters={at + 20}")

    of_both, other = [], []
    for name, value in changed.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        (of_both if name in OF_BOTH else other).append(f"{name}={text}")
    arms = {"same": of_both, ",".join(other).replace("/", "_") or "same": of_both + other}
    place = settings.out_dir if "out_dir" in given else f"{Path(folder)}-at{at}"
    for seed in range(run.seed, run.seed + settings.seeds):
        for name, options in arms.items():
            branch = Path(place, f"{name}-seed{seed}")
            train(starts[at], branch, [*options, f"seed={seed}", f"resume={branch}"], run.max_iters)
    patterns = [f"{shlex.quote(f'{place}/{name}')}-*" for name in arms]
    say(f"next: {command('report')} {' '.join(patterns)}")


def train(start, branch, options: list[str], end: int):
    """Train a branch from a copy of the checkpoint until iteration `end`, unless it is done. Exits if the training
    fails or is stopped."""
    if not (branch / "log.jsonl").exists():
        with in_one_line(f"{branch} cannot be written to"):
            shutil.copytree(start, branch / start.name, dirs_exist_ok=True)
            for name in ("log.jsonl", "settings.json"):
                shutil.copy(start.parent / name, branch)
    before, there = [
        [record for record in read_log(folder) if record["iter"] < iteration_of(start)]
        for folder in (start.parent, branch)
    ]
    if there != before:
        raise SnugError(f"{branch} is a branch of another run; move it away")
    if is_done(branch, end):
        return
    say(f"branch {branch}")
    signal.signal(signal.SIGINT, lambda *_: None)  # the branch gets the signal too, saves and ends
    code = subprocess.call([sys.executable, *SCRIPT, *(f"--{option}" for option in options)])
    if code or not is_done(branch, end):
        say("stopped; the same command goes on")
        sys.exit(code)


def is_done(branch, end: int):
    return iteration_of(checkpoints(branch)[-1]) >= end


if __name__ == "__main__":
    with friendly_errors():
        main(*read_settings(ForkSettings, sys.argv[1:], positional="run"))
