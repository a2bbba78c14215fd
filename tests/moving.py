"""Runs whose budget moves before every phase, by a draw that depends on the place in the run alone.

    python tests/moving.py FOLDER teacher 200               # a case, with moving budgets and without, side by side
    python tests/moving.py FOLDER teacher 6 phase 7         # the same run kills itself before phase 7 of its later ones
    python tests/moving.py FOLDER teacher 6 change 2        # or in the middle of change 2
    python tests/moving.py FOLDER teacher 6 resume          # and goes on

On a CPU a budget counts device and host together. Here they are apart, as on a GPU, so that moments, gradients and
frozen weights have somewhere to go.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import agents
import torch
from safetensors.torch import load_file

import grpo
import train_sft
from runs.checkpoint import newest
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings
from snug import lora
from snug.device.kinds import MIB
from snug.memory import Limits, MemoryMeter, fit
from training import yielding
from training.dry_run import DryRun

RUN = dict(digits=1, device="cpu", eval_prompts=4, eval_interval=3, batch_size=2, group_size=4, max_new_tokens=6)
RUN |= dict(n_layer=2, n_embd=32, block_size=40, learning_rate=1e-3, max_tokens_per_micro_batch=0)
CASES = {
    "reference": dict(
        beta=0.04, init_from="student", num_iterations=2, train_batch_size=4, importance_sampling_cap=2.0
    ),
    "lora": dict(beta=0.04, init_from="student", lora_rank=4),
    "teacher": dict(init_from="student", teacher="teacher", divergence="forward_kl", train_batch_size=4),
    "episodes": dict(reward_funcs=["agents:long"]),
}
WIDE = dict(n_layer=3, n_embd=48, norm="rmsnorm", position="rotary", mlp="swiglu", tie_embeddings=False, n_kv_head=2)


def letters(prompts, completions, **columns):
    return [sum(map(ord, c)) % 7 / 7 for c in completions]


def prepared_case(home, name, out, iterations, **changes):
    """The run of a case in float64, ready. What it begins from is made first."""
    home = Path(home)
    home.mkdir(exist_ok=True)
    options = RUN | CASES[name]
    if name == "episodes":
        options = agents.options(home, out, n_layer=2, eval_interval=3, **CASES[name])
    for folder, shape in (("student", {}), ("teacher", WIDE)):
        if folder in options.values() and not (home / folder).exists():
            made = {key: RUN[key] for key in ("digits", "device", "batch_size", "n_layer", "n_embd", "block_size")}
            made |= shape | dict(max_iters=1, eval_prompts=0, out_dir=str(home / folder))
            train_sft.main(prepare(SFTSettings(**made)))
    options = {key: str(home / value) if value in ("student", "teacher") else value for key, value in options.items()}
    options |= dict(max_iters=iterations, save_interval=1, out_dir=str(home / out), dtype="float32") | changes
    prepared = prepare(GRPOSettings(**options))
    prepared.settings.param_dtype = prepared.settings.optimizer_dtype = prepared.settings.dtype = "float64"
    if name != "episodes":
        prepared.reward_funcs = [letters]
    return prepared


class Moving:
    """The budgets of a run, and what the meter saw under them.

    peaks: (iteration, phase, bytes at the phase's peak, budget). kill: ("phase", n) or ("change", n): the process kills
    itself before phase n or inside change n, counted from 0, of those after the first iteration.
    """

    def __init__(self, prepared, kill=()):
        self.prepared, self.kill, self.seen = prepared, kill, Counter()
        self.peaks, self.line, self.seconds = [], None, 0.0
        self.asking, self.place, self.count = "start", None, 0
        self.dry_run = DryRun(prepared, grpo.iterate)
        # Bytes of the fastest options and of those that need least.
        self.most, self.least = (fit.fit(self.dry_run, prepared.settings, fit.Room(n))[1].peak for n in (1e15, 0))

    def room(self, *_):
        """A function of iteration, phase, and how often it was asked for there."""
        place = self.prepared.global_step, self.asking
        self.count = self.count + 1 if place == self.place else 0
        self.place = place
        # Some iterations have much throughout, so that the run goes back too.
        shares = random.Random(f"{place[0]}").random(), random.Random(f"{place} {self.count}").random()
        return fit.Room(self.least + (1.1 * self.most - self.least) * max(shares) ** 2)

    def die(self, what):
        if self.prepared.global_step:
            if self.kill == (what, self.seen[what]):
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen[what] += 1

    @contextmanager
    def moves(self):
        """Inside, runs of this process have the drawn budgets."""
        begin, meter_phase, follow = yielding.Yielding.begin_phase, MemoryMeter.phase, Limits.follow

        def begin_phase(held, name):
            self.die("phase")
            self.asking, started = name, time.perf_counter()
            begin(held, name)
            self.seconds += time.perf_counter() - started
            self.line = held.training.budgets[f"mem_budget_mb_{name}"] * MIB
            self.asking = f"after {name}"

        def follow_or_die(limits, settings):
            if isinstance(limits.begin_phase.__self__, yielding.Yielding):  # not those of a plan
                self.die("change")
            follow(limits, settings)

        @contextmanager
        def phase(meter, name):
            with meter_phase(meter, name):
                yield
            if type(meter) is MemoryMeter:  # not a planner's
                self.peaks.append((self.prepared.global_step, name, meter.peak_since_reset(), self.line))

        with (
            patch.object(yielding, "CALM", 1),
            patch.object(yielding, "room_for", self.room),
            patch.object(yielding.Yielding, "begin_phase", begin_phase),
            patch.object(Limits, "follow", follow_or_die),
            patch.object(MemoryMeter, "phase", phase),
        ):
            yield


def difference(one, other):
    """The largest absolute difference of the weights of two runs' last checkpoints."""
    one, other = (load_file(newest(folder) / "model.safetensors") for folder in (one, other))
    assert one.keys() == other.keys() and {weight.dtype for weight in one.values()} == {torch.float64}
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@contextmanager
def adapters_in_float64():
    """Adapters are float32 beside weights of any type; here all is float64."""
    add = lora.add

    def add_in_float64(model, *options):
        add(model, *options)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.double()

    with patch.object(lora, "add", add_in_float64):
        yield


def moved(home, name, out, iterations, kill=(), **changes):
    """Run a case with moving budgets in home/out -> its Moving."""
    with adapters_in_float64(), patch.object(fit, "APART", {"cpu", "cuda"}):
        moving = Moving(prepared_case(home, name, out, iterations, memory_budget_gb="1000", **changes), kill)
        with moving.moves():
            grpo.main(moving.prepared)
    return moving


def still(home, name, iterations):
    """Run a case without a budget in home/still."""
    with adapters_in_float64():
        grpo.main(prepared_case(home, name, "still", iterations))


def main(home, name, iterations, what="", number=0):
    if what:
        kill, resume = (what, int(number)), "auto" if what == "resume" else "never"
        moved(home, name, "killed", int(iterations), kill, resume=resume)
        return
    started = time.perf_counter()
    still(home, name, int(iterations))
    without, started = time.perf_counter() - started, time.perf_counter()
    moving = moved(home, name, "moved", int(iterations))
    found = dict(case=name, difference=difference(Path(home, "still"), Path(home, "moved")))
    found |= dict(phases=len(moving.peaks), over=[peak for peak in moving.peaks if peak[3] and peak[2] > peak[3]])
    found |= dict(plans=len(moving.dry_run.plans), seconds_without=without, asking_s=moving.seconds)
    print(json.dumps(found | dict(seconds=time.perf_counter() - started)))


if __name__ == "__main__":
    main(*sys.argv[1:])
