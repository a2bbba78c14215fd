"""What the two loops have in common: the run around their iterations, a micro-batch's way through the model, an optimizer step.

Left out: what an iteration is; grpo.py and train_sft.py say that, in `iterate` and, for a planner, in `rehearsal`.
"""

import math
import signal
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from evaluate import evaluate_if_due
from logprobs.head import head_logprobs, head_loss
from memory.fit import apply, halve_micro_batch, once_more, recall, show
from memory.meter import MemoryMeter, allocator_snapshot
from memory.oom import surviving
from model import GPT, autocast, make_model, pick_device
from runs.checkpoint import begin, configure, newest, read_state, trained
from runs.hints import hints
from runs.log import RunLog, prepare_folder
from runs.prepare import Prepared
from runs.saver import Saver, not_finite
from training.guard import Guard, columns_of
from training.optimizer import gradients_of, make_optimizer, optimizer_step


@dataclass
class Training:
    """What an iteration works with."""

    prepared: Prepared
    model: GPT
    reference: GPT | None
    optimizer: torch.optim.Optimizer
    meter: MemoryMeter
    log: RunLog
    guard: Guard
    saver: Saver
    evaluated: tuple = (0, {})  # iterations done, and the scores then
    told: set = field(default_factory=set)  # hints

    def evaluate_if_due(self, done):
        """After `done` iterations -> the evaluation's entries for the log, or {}."""
        p = self.prepared
        self.evaluated = (
            done,
            evaluate_if_due(done, self.model, p.task, p.tokenizer, p.settings, self.meter, self.log.say),
        )
        return dict(self.evaluated[1])

    def scores_at(self, done):
        return self.evaluated[1] if self.evaluated[0] == done else {}

    def save(self, done, **options):
        self.saver.save(done, self.model, self.optimizer, self.guard, self.scores_at(done), **options)

    def end_iteration(self, record, scores, samples=()):
        """Log it, and save, where it is time."""
        record |= (
            scores | self.meter.stats() | self.saver.stats() | {"dropped_steps": self.guard.health["dropped_steps"]}
        )
        found = hints(record)
        self.log.iteration(record | ({"hints": sorted(found)} if found else {}), samples)
        for name in sorted(found.keys() - self.told):
            self.log.say(f"hint: {found[name]}")
        self.told |= found.keys()
        self.log.memory(self.meter.lines(self.log.place(record["iter"])))
        done = record["iter"] + 1
        self.saver.after(done, self.model, self.optimizer, self.guard, self.scores_at(done))


def run(prepared, title, rehearsal, iterate, make_reference):
    """Iterate as the settings say, with a meter and a log; or only plan it, where that is what they say.

    iterate(iteration, training); make_reference(prepared, device) -> a model or None.
    -> False where it was stopped by a signal, after the iteration that was going on; the rest is for --resume=auto.
    """
    make_iteration, settings = partial(rehearsal, prepared), prepared.settings
    longest = sum(prepared.longest(settings))
    if settings.plan:
        print(show(make_iteration, settings, longest))
        return True
    device = pick_device(settings.device)
    settings = prepared.settings = apply(make_iteration, settings, longest, device, print)
    snapshot = allocator_snapshot(settings.out_dir, device) if settings.memory_snapshot else nullcontext()
    torch.manual_seed(settings.seed)
    with MemoryMeter(device) as meter:
        reference = make_reference(prepared, device)
        model, optimizer, start = begin(
            settings, prepared.shape, device
        )  # last, because it restores the random generators
        moved = prepare_folder(settings)
        with snapshot, RunLog(settings, title, start) as log:
            size, trains = (
                sum(p.numel() for p in parameters) for parameters in (model.parameters(), trained(model).values())
            )
            part = f", of which {trains:,} train," if trains < size else ""
            log.say(f"{title} on {settings.task}: {size:,} parameters{part} on {device}, {settings.out_dir}")
            if moved:
                log.say(f"an earlier run in {settings.out_dir} was moved to {moved}")
            state = read_state(newest(settings.out_dir)) if start else {}
            if start:
                log.say(f"resumed after {start} iterations{changes_since(state['settings'], settings)}")
                recall(settings, state, log.say)
            if start >= settings.max_iters:
                log.say(f"nothing is left to do: max_iters={settings.max_iters}; a larger one goes on")
            guard = Guard(settings, prepared.tokenizer, log.say, state.get("health"))
            saver = Saver(settings, prepared.tokenizer, device, log.say, start or None, prepared.task.fingerprint())
            log.memory([meter.line("after init")])
            return iterations(iterate, Training(prepared, model, reference, optimizer, meter, log, guard, saver))


def iterations(iterate, training):
    """-> False where a signal stopped them."""
    log, saver, max_iters = training.log, training.saver, training.prepared.settings.max_iters
    try:
        with StopAfterIteration() as stop:
            for iteration in log.iterations():
                with saver.keeping(iteration, training.model, training.optimizer, training.guard):
                    iterate(iteration, training)
                if stop.by and iteration + 1 < max_iters:
                    training.save(iteration + 1, last=True)
                    log.say(f"stopped by {stop.by} after iteration {iteration}, and saved; --resume=auto goes on")
                    return False
    finally:
        saver.wait()
    return True


def changes_since(before, settings):
    """-> ", learning_rate was 0.001, is 0.0001", or nothing: what a resumed run does otherwise than it began."""
    told = {name for name in before if name not in ("resume", "out_dir", "plan") and hasattr(settings, name)}
    changed = {name for name in told if before[name] != getattr(settings, name)} - set(
        getattr(settings, "after_oom", {})
    )
    return "".join(f", {name} was {before[name]!r}, is {getattr(settings, name)!r}" for name in sorted(changed))


class StopAfterIteration:
    """While it is entered, SIGTERM and the first Ctrl-C only say so in `by`; a second Ctrl-C interrupts at once."""

    def __init__(self):
        self.by, self.before = None, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # Python takes handlers from no other
            self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number, frame):
        if self.by and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name


def learn(model, micro, token_loss, settings, temperature=1.0, whole=False, entropy_weight=0.0):
    """Forward, head and backward of a MicroBatch -> loss (), log-probs (M,), entropies (M,), detached. The logits die in the head.

    token_loss(logprobs (m,), rows) -> a sum over those of the M tokens. whole: it wants them all at once, so that each chunk of
    logits is made twice; so does entropy_weight, which each token's entropy is multiplied by and taken from the loss.
    """
    with autocast(settings.dtype, model):
        hidden = micro.completion_hidden(model(micro.tokens, micro.positions, mask=micro.mask))  # (M, C)
        options = dict(entropy=True, n_vocab=model.config.n_vocab, chunk_mb=settings.logits_chunk_mb)
        head = hidden, model.lm_head_weight, micro.targets
        if whole or entropy_weight:
            logprobs, entropy = head_logprobs(*head, temperature, **options)
            loss = token_loss(logprobs, slice(None))
            if entropy_weight:
                loss = loss - entropy_weight * entropy.sum()
        else:
            loss, logprobs, entropy = head_loss(*head, token_loss, temperature, **options)
    loss.backward()
    model.after_backward()
    return loss.detach(), logprobs.detach(), entropy.detach()


def step(training, accumulate, sequences, learning_rate, iteration, select):
    """One optimizer step on what accumulate() -> metrics, with "loss", puts into the gradients, from the sequences `select`.

    -> the metrics with grad_norm; None where something was not finite: then nothing has changed, and guard.py has told it.
    After an out-of-memory the step begins again, with smaller micro-batches of the same sequences.
    """
    model, optimizer, settings = training.model, training.optimizer, training.prepared.settings

    def attempt():
        optimizer.zero_grad(set_to_none=True)  # of an attempt that failed half way
        if not_finite(columns_of(sequences, select)):  # an infinity in the batch need not show in the loss
            return {"loss": math.nan}
        return accumulate()

    with training.meter.phase("train"):
        metrics = surviving(attempt, partial(halve_micro_batch, settings, sequences, model, say=training.log.say))
    norm = math.nan
    with training.meter.phase("optimizer"):
        if math.isfinite(metrics["loss"]):
            update = partial(optimizer_step, model, optimizer, learning_rate, settings.grad_clip)
            norm = surviving(update, once_more(settings, model))
    if training.guard.passes(iteration, metrics["loss"], norm):
        return metrics | {"grad_norm": norm}
    training.saver.wait()  # the drop may have to set the newest checkpoint aside
    training.guard.drop(iteration, model, gradients_of(model, optimizer), sequences, select, metrics["loss"], norm)
    optimizer.zero_grad(set_to_none=True)
    return None


def rehearse_init(prepared, settings, meter):
    """A planner's model and optimizer, on fake tensors, with their names."""
    model = configure(make_model(prepared.shape, torch.device("cpu"), settings.param_dtype), settings)
    optimizer = make_optimizer(model, settings)
    meter.label("weights", model.named_parameters())
    return model, optimizer


def rehearse_step(model, optimizer, accumulate, settings, meter):
    """A planner's optimizer step."""
    with meter.phase("train"):
        accumulate()
    meter.label("gradients", ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None))
    with meter.phase("optimizer"):
        optimizer_step(model, optimizer, settings.learning_rate, settings.grad_clip)
