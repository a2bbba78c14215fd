"""What the two loops have in common: the run around their iterations, a micro-batch's way through the model, an optimizer step.

Left out: what an iteration is; grpo.py and train_sft.py say that, in `iterate` and, for a planner, in `rehearsal`.
"""

import signal
import threading
from contextlib import nullcontext
from functools import partial

import torch

from checkpoint import begin, configure, make_model, newest, pick_device, read_state, save
from log import RunLog, prepare_folder
from logprobs import head_loss
from memory import MemoryMeter, allocator_snapshot, surviving
from model import autocast
from optimizer import make_optimizer, optimizer_step
from plan import apply, halve_micro_batch, once_more, recall, show


def run(prepared, title, rehearsal, iterate, make_reference):
    """Iterate as the settings say, with a meter and a log; or only plan it, where that is what they say.

    iterate(iteration, model, reference, optimizer, prepared, meter, log); make_reference(prepared, device) -> a model or None.
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
        model, optimizer, start = begin(settings, prepared.shape, device)  # last, because it restores the random generators
        moved = prepare_folder(settings)
        with snapshot, RunLog(settings, title, start) as log:
            size = sum(p.numel() for p in model.parameters())
            log.say(f"{title} on {settings.task}: {size:,} parameters on {device}, {settings.out_dir}")
            if moved:
                log.say(f"an earlier run in {settings.out_dir} was moved to {moved}")
            if start:
                state = read_state(newest(settings.out_dir))
                log.say(f"resumed after {start} iterations{changes_since(state['settings'], settings)}")
                recall(settings, state, log.say)
            log.memory([meter.line("after init")])
            with StopAfterIteration() as stop:
                for iteration in log.iterations():
                    iterate(iteration, model, reference, optimizer, prepared, meter, log)
                    if stop.by and iteration + 1 < settings.max_iters:
                        save(settings.out_dir, iteration + 1, model, optimizer, settings, prepared.tokenizer, settings.save_total_limit)
                        log.say(f"stopped by {stop.by} after iteration {iteration}, and saved; --resume=auto goes on")
                        return False
    return True


def changes_since(before, settings):
    """-> ", learning_rate was 0.001, is 0.0001", or nothing: what a resumed run does otherwise than it began."""
    told = {name for name in before if name not in ("resume", "out_dir", "plan") and hasattr(settings, name)}
    changed = {name for name in told if before[name] != getattr(settings, name)} - set(getattr(settings, "after_oom", {}))
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


def learn(model, micro, token_loss, settings, temperature=1.0):
    """Forward, head and backward of a MicroBatch -> loss (), log-probs (M,), entropies (M,), detached. The logits die in head_loss."""
    with autocast(settings.dtype, model):
        hidden = micro.completion_hidden(model(micro.tokens, micro.positions, mask=micro.mask))  # (M, C)
        options = dict(entropy=True, n_vocab=model.config.n_vocab, chunk_mb=settings.logits_chunk_mb)
        loss, logprobs, entropy = head_loss(hidden, model.lm_head_weight, micro.targets, token_loss, temperature, **options)
    loss.backward()
    model.after_backward()
    return loss.detach(), logprobs, entropy


def step(model, optimizer, accumulate, sequences, learning_rate, settings, meter, log):
    """One optimizer step on what accumulate() puts into the gradients -> (what it returned, the gradient's norm).

    After an out-of-memory it begins again, with smaller micro-batches of the same sequences.
    """

    def attempt():
        optimizer.zero_grad(set_to_none=True)  # of an attempt that failed half way
        return accumulate()

    with meter.phase("train"):
        result = surviving(attempt, partial(halve_micro_batch, settings, sequences, model, say=log.say))
    with meter.phase("optimizer"):
        update = partial(optimizer_step, model, optimizer, learning_rate, settings.grad_clip)
        return result, surviving(update, once_more(settings, model))


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
