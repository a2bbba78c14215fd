"""What an iteration works with, the end of an optimizer step and the end of an iteration, for both loops.

Left out: the run around the iterations (loop.py).
"""

import math
import time
from dataclasses import dataclass, field
from functools import partial

import torch

from data.scores import share_of
from evaluate import evaluate_run
from model import GPT
from runs.hints import hints
from runs.log import RunLog
from runs.prepare import Prepared
from runs.saver import Saver
from snug.memory import Limits, MemoryMeter
from snug.memory.ledger import not_finite
from training.figures import groups_of, sample_records
from training.guard import HEALTH, drop
from training.optimizer import gradients_of, learning_rate_at, optimizer_step


@dataclass
class Training:
    """What an iteration works with."""

    prepared: Prepared
    model: GPT
    reference: GPT | None
    optimizer: torch.optim.Optimizer
    meter: MemoryMeter
    log: RunLog
    saver: Saver
    limits: Limits
    teacher: GPT | None = None
    health: dict = field(default_factory=HEALTH.copy)
    # Dynamic sampling uses more than batch_size prompts an iteration: how many more in all. A checkpoint keeps this.
    extra_prompts: int = 0
    started: float = 0.0  # when the iteration began, as time.perf_counter() has it
    before: dict = field(default_factory=dict)  # scores before training; the first iteration logs them
    shown_hints: set = field(default_factory=set)

    def __post_init__(self):
        self.settings, self.processes = self.prepared.settings, self.limits.processes

    def attempt(self, phase: str, function, *arguments, cut=None, **options):
        """Call function(*arguments, **options) as a phase of the meter; after an out-of-memory error again, with less.

        cut: a batch.Cut that the function gets too, each time in micro-batches that are within the limit.
        """

        def in_phase(**pieces):
            # A module of reward functions may have switched gradients off.
            with self.meter.phase(phase), torch.enable_grad():
                self.optimizer.zero_grad()  # what a failed attempt has added
                return function(*arguments, **pieces, **options)

        return self.limits.retry(phase, in_phase, cut)

    def progress(self) -> dict:
        """What a checkpoint keeps beside the model, the optimizer and the settings."""
        return dict(
            health=dict(self.health),
            after_oom=dict(self.limits.halved),
            extra_prompts=self.extra_prompts,
        )

    def begin_iteration(self, iteration):
        """Start the meter and the clock; before the first iteration evaluate."""
        self.meter.reset()
        self.started = time.perf_counter()
        self.prepared.global_step = iteration
        scores = self.evaluate_if_due(0) if iteration == 0 else {}
        self.before = {f"before/{name}": score for name, score in scores.items()}
        if scores:
            self.log.scores(scores)

    def evaluate_if_due(self, done):
        """After `done` iterations -> the evaluation's entries for the log, or {}.

        Before the first iteration, every eval_interval and after the last."""
        settings, interval = self.settings, self.settings.eval_interval
        is_due = done == settings.max_iters or interval and done % interval == 0
        scored, held_out_loss = self.prepared.reward_funcs, self.prepared.held_out_loss
        if not is_due or not settings.eval_prompts or not (scored or held_out_loss):
            return {}
        self.prepared.global_step = done
        if not done:
            self.log.say(f"evaluating before training: {settings.eval_prompts:,} prompts")
        with self.saver.keeping(done, self.progress()):
            scores = held_out_loss(self) if held_out_loss else {}
            if scored:
                scores |= evaluate_run(self.model, self.prepared, self.meter, self.limits)
            return scores

    def take_step(self, metrics, iteration, sequences, indices):
        """The end of an optimizer step on these sequences: clip and update -> metrics with grad_norm.

        {} if the loss, the gradient or the batch is not finite: then nothing has changed, and the guard reported it.
        """
        model, optimizer, norm = self.model, self.optimizer, math.nan
        with self.meter.phase("train"):
            metrics = self.processes.add_up(model, optimizer, metrics)
        # The loss may be finite although the batch has an infinity.
        odd = not_finite(sequences.columns(indices))
        if math.isfinite(metrics["loss"]) and not odd:
            rate, clip = learning_rate_at(iteration, self.settings), self.settings.grad_clip
            with self.meter.phase("optimizer"):
                step = partial(optimizer_step, model, optimizer, rate, clip, self.processes.norm)
                norm = self.limits.retry("optimizer", step)
        if math.isfinite(norm):
            self.health["dropped_in_a_row"] = 0
            return metrics | {"grad_norm": norm}
        gradients = gradients_of(model, optimizer)
        with self.processes.whole(model) as whole:
            drop(self, iteration, whole, gradients, sequences, indices, metrics["loss"], norm)
        optimizer.zero_grad()
        return {}

    def samples(self, scored, entropies) -> list[dict]:
        """What samples.jsonl shows of an iteration."""
        return sample_records(scored, entropies, self.prepared.tokenizer, self.settings)

    def end_iteration(self, record, samples=()):
        """Evaluate if it is time, log, and save if it is time -> the line of the log."""
        done, scores = record["iter"] + 1, {}
        try:
            scores = self.evaluate_if_due(done)
        finally:  # an evaluation that fails loses no line of the log
            record |= self.before | scores | self.meter.stats()
            record["learning_rate"] = learning_rate_at(record["iter"], self.settings)
            record["time_s"] = time.perf_counter() - self.started
            record["dropped_steps"] = self.health["dropped_steps"]
            found = hints(record)
            self.log.iteration(record, samples)
            varied, groups = groups_of([record], self.settings)
            if done == 1 and groups:
                self.log.say(f"groups with different rewards: {share_of(varied, groups)}")
            for name in sorted(found.keys() - self.shown_hints):
                self.log.say(f"hint: {found[name]}")
            self.shown_hints |= found.keys()
            self.log.to_file("\n".join(self.meter.lines(self.log.place(record["iter"]))))
        self.saver.after(done, self.progress(), scores)
        return record
