"""Supervised fine-tuning on a task's demonstrations: GRPO's warm start, and what its memory is compared with.

    python train_sft.py config/sft_small.py

The loop of grpo.py without its rollouts: the same micro-batches, the same head, the same log.
Left out: data sets on disk, packing.
"""

import random
import sys
import time
from contextlib import nullcontext
from functools import partial
from itertools import islice

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from prepare import prepare
    from settings import SFTSettings, friendly_errors, read_settings

    with friendly_errors():
        prepared = prepare(*read_settings(SFTSettings, sys.argv[1:])[:2])

import torch

from batch import Sequences, limits, micro_batches
from checkpoint import begin, configure, make_model, newest, pick_device, read_state, save_if_due
from evaluate import evaluate_if_due, rehearse_evaluation
from log import RunLog, prepare_folder
from logprobs import head_loss
from memory import MemoryMeter, allocator_snapshot, surviving
from model import autocast
from optimizer import learning_rate_at, make_optimizer, number, optimizer_step
from plan import apply, halve_micro_batch, once_more, recall, show
from sample import Numbers


def main(prepared):
    """Train, log and save as the settings say."""
    settings, task, tokenizer = prepared.settings, prepared.task, prepared.tokenizer
    make_iteration, longest = partial(rehearsal, prepared), sum(prepared.longest(settings))
    if settings.plan:
        return print(show(make_iteration, settings, longest))
    device = pick_device(settings.device)
    settings = prepared.settings = apply(make_iteration, settings, longest, device, print)
    snapshot = allocator_snapshot(settings.out_dir, device) if settings.memory_snapshot else nullcontext()
    torch.manual_seed(settings.seed)
    with MemoryMeter(device) as meter:
        model, optimizer, start = begin(settings, prepared.shape, device)
        moved = prepare_folder(settings)
        with snapshot, RunLog(settings, "SFT", start) as log:
            log.say(f"SFT on {settings.task}: {sum(p.numel() for p in model.parameters()):,} parameters on {device}, {settings.out_dir}")
            if moved:
                log.say(f"an earlier run in {settings.out_dir} was moved to {moved}")
            if start:
                recall(settings, read_state(newest(settings.out_dir)), log.say)
            log.memory([meter.line("after init")])
            for iteration in log.iterations():
                iterate(iteration, model, optimizer, task, tokenizer, settings, meter, log)


def iterate(iteration, model, optimizer, task, tokenizer, settings, meter, log):
    """One optimizer step with its log line; whatever is large dies in here."""
    meter.reset()
    started = time.perf_counter()
    learning_rate = learning_rate_at(iteration, settings)
    scores = evaluate_if_due(0, model, task, tokenizer, settings, meter, log.say) if iteration == 0 else {}
    log.show("train")
    batch = demonstrations(task, tokenizer, settings, iteration, model.device)  # some kilobytes

    def attempt():
        optimizer.zero_grad(set_to_none=True)  # of an attempt that failed half way
        return train_step(model, batch, settings)

    with meter.phase("train"):
        loss, entropy, num_tokens = surviving(attempt, partial(halve_micro_batch, settings, batch, model, say=log.say))
    with meter.phase("optimizer"):
        step = partial(optimizer_step, model, optimizer, learning_rate, settings.grad_clip)
        grad_norm = surviving(step, once_more(settings, model))
    scores |= evaluate_if_due(iteration + 1, model, task, tokenizer, settings, meter, log.say)
    stats = meter.stats()
    record = dict(iter=iteration, loss=loss, entropy=entropy, grad_norm=grad_norm, learning_rate=learning_rate)
    record["completion_length_mean"] = num_tokens / settings.batch_size
    record["tokens_per_second"] = num_tokens / (stats["time_train_s"] + stats["time_optimizer_s"])
    record["time_s"] = time.perf_counter() - started
    log.iteration(record | scores | stats)
    log.memory(meter.lines(log.place(iteration)))
    save_if_due(iteration + 1, model, optimizer, settings, tokenizer)


def demonstrations(task, tokenizer, settings, iteration, device):
    """The batch of an iteration, a function of (seed, iteration) -> Sequences. The stop token is learned too."""
    first = iteration * settings.batch_size
    rows = task.prompts("train", range(first, first + settings.batch_size))
    rng = random.Random(f"demonstrations {settings.seed} {iteration}")
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    answers = [tokenizer.encode(task.demonstration(row, rng)) + [tokenizer.stop_token] for row in rows]
    return Sequences.from_lists(prompts, answers, device)


def train_step(model, batch, settings, most=None):
    """Accumulate the gradient of the mean negative log-prob of completion tokens -> (loss, mean entropy, number of tokens).

    most: micro-batches looked at, for a planner.
    """
    num_tokens = sum(batch.completion_lengths.tolist())
    loss = entropy = 0.0
    for micro in islice(micro_batches(batch, *limits(settings, len(batch.tokens))), most):
        share, token_entropy = train_micro_batch(model, micro, lambda logprobs, rows: -logprobs.sum() / num_tokens, settings)
        loss, entropy = loss + share, entropy + token_entropy / num_tokens
    return number(loss), number(entropy), num_tokens


def train_micro_batch(model, micro, token_loss, settings):
    """Forward, head, backward -> (loss, sum of entropies), detached. The logits live and die inside head_loss."""
    with autocast(settings.dtype, model):
        hidden = micro.completion_hidden(model(micro.tokens, micro.positions, mask=micro.mask))  # (M, C)
        loss, _, entropy = head_loss(
            hidden,
            model.lm_head_weight,
            micro.targets,
            token_loss,
            entropy=True,
            n_vocab=model.config.n_vocab,
            chunk_mb=settings.logits_chunk_mb,
        )
    loss.backward()
    model.after_backward()
    return loss.detach(), entropy.sum()


def rehearsal(prepared, settings):
    """What plan.py runs on fake tensors -> a function of a meter: init, and an iteration in which every length is the longest."""

    def iteration(meter):
        device = torch.device("cpu")
        (prompt, completion), N = prepared.longest(settings), settings.batch_size
        model = configure(make_model(prepared.shape, device, settings.param_dtype), settings)
        optimizer = make_optimizer(model, settings)
        meter.label("weights", model.named_parameters())
        rehearse_evaluation(model, prompt, completion, settings, meter)
        batch = Sequences(torch.zeros(N, prompt + completion, dtype=torch.long), Numbers([prompt] * N), Numbers([completion] * N))
        with meter.phase("train"):
            train_step(model, batch, settings, most=2)
        meter.label("gradients", ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None))
        with meter.phase("optimizer"):
            optimizer_step(model, optimizer, settings.learning_rate, settings.grad_clip)

    return iteration


if __name__ == "__main__":
    with friendly_errors():
        main(prepared)
