"""What the two loops have in common: the run around their iterations, a micro-batch's way through the model, an optimizer step.

Left out: what an iteration is; grpo.py and train_sft.py say that, in `iterate` and, for a planner, in `rehearsal`.
"""

from contextlib import nullcontext
from functools import partial

import torch

from checkpoint import begin, configure, make_model, newest, pick_device, read_state
from log import RunLog, prepare_folder
from logprobs import head_loss
from memory import MemoryMeter, allocator_snapshot, surviving
from model import autocast
from optimizer import make_optimizer, optimizer_step
from plan import apply, halve_micro_batch, once_more, recall, show


def run(prepared, title, rehearsal, iterate, make_reference):
    """Iterate as the settings say, with a meter and a log; or only plan it, where that is what they say.

    iterate(iteration, model, reference, optimizer, prepared, meter, log); make_reference(prepared, device) -> a model or None.
    """
    make_iteration, settings = partial(rehearsal, prepared), prepared.settings
    longest = sum(prepared.longest(settings))
    if settings.plan:
        return print(show(make_iteration, settings, longest))
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
                recall(settings, read_state(newest(settings.out_dir)), log.say)
            log.memory([meter.line("after init")])
            for iteration in log.iterations():
                iterate(iteration, model, reference, optimizer, prepared, meter, log)


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
