"""Supervised fine-tuning on a task's demonstrations: the warm start of GRPO, and the yardstick for GRPO's memory.

    python train_sft.py config/sft_small.py

The loop of grpo.py without its rollouts: the same micro-batches, the same head, the same log. Left out: data on disk.
"""

import sys

from runs.prepare import prepare_from
from settings import SFTSettings
from snug.options import friendly_errors
from snug.options.progress import speak

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    with friendly_errors():
        speak()
        prepared = prepare_from(SFTSettings, sys.argv[1:])

import random
from functools import partial

import torch

from batch import Cut, Sequences, make_micro_batch
from model import autocast
from snug.logprobs import head_loss
from snug.memory.ledger import component
from training import notebook
from training.loop import run


def main(prepared):
    """Train, log and save as the settings say -> False if it was stopped."""
    prepared.held_out_loss = held_out_loss
    return run(prepared, iterate)


def train(config="", *, prompts=None, **options):
    """From Python, as grpo.train."""
    return notebook.train(SFTSettings, main, config, prompts, None, options)


def iterate(iteration, training, make_batch=None):
    """One optimizer step -> (its line for the log, no samples). make_batch: a planner's `demonstrations`."""
    settings, model = training.settings, training.model

    # 1. Demonstrations, which `attempt` cuts into micro-batches.
    batch = (make_batch or demonstrations)(iteration, training)
    cut = Cut(batch, processes=training.processes)

    # 2. Forward, head and loss, backward, a micro-batch at a time. After an out-of-memory the step starts again.
    sums = training.attempt("train", accumulate_gradient, model, batch, cut=cut, settings=settings)

    # 3. Add up over processes, clip, update. A step whose loss or gradient is not finite is dropped: {}.
    metrics = training.take_step(sums, iteration, batch, cut.step_indices[0])

    # 4. What the log says.
    stats, num_tokens = training.meter.stats(), sum(map(len, cut.places))
    record = {"iter": iteration} | metrics
    record["completion_length_mean"] = num_tokens / settings.batch_size
    seconds = stats["time_train_s"] + stats.get("time_optimizer_s", 0.0)
    record["tokens_per_second"] = num_tokens / seconds
    return record, ()


def demonstrations(iteration, training, split="train", size=0) -> Sequences:
    """The batch of an iteration, which depends on (seed, iteration) only. size: number of rows; 0: batch_size. The stop
    token is a target too."""
    task, tokenizer = training.prepared.task, training.prepared.tokenizer
    P, seed = size or training.settings.batch_size, training.settings.seed
    rows = task.prompts(split, range(iteration * P, (iteration + 1) * P))
    rng = random.Random(f"demonstrations {seed} {iteration}")
    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in rows]
    answers = [tokenizer.encode(task.demonstration(row, rng)) + [tokenizer.stop_token] for row in rows]
    return Sequences.from_lists(prompts, answers, training.model.device)


@torch.no_grad()
def held_out_loss(training) -> dict:
    """-> the mean loss of the tokens of held-out demonstrations, in batches as large as those of training."""
    settings = training.settings
    batch = demonstrations(0, training, "test", settings.eval_prompts)
    cut = Cut(batch, settings.batch_size, processes=training.processes)
    forward = partial(accumulate_gradient, training.model, batch, settings=settings)
    with training.meter.phase("eval"):
        loss = training.limits.retry("train", forward, cut)["loss"]
    return {"eval_loss": sum(training.processes.from_all_ranks(lambda: loss))}


@component("backward")  # the name in --plan's table: autograd's tensors while backward runs
def accumulate_gradient(model, batch, cut, settings):
    """The gradient of the mean negative log-prob of M completion tokens -> {"loss", "entropy": its token mean}."""
    loss, entropy, num_tokens = 0.0, 0.0, sum(map(len, cut.places))
    options = dict(n_vocab=model.config.n_vocab, chunk_mb=settings.logits_chunk_mb, entropy=True)

    def token_loss(logprobs, chunk):
        return -logprobs.sum() / num_tokens

    for indices in cut.mine(sum(cut.steps, []), model):
        micro = make_micro_batch(batch, indices, cut)
        with autocast(settings.dtype, model):
            hidden = micro.completion_hidden(model)
            share, _, entropies = head_loss(
                hidden, model.lm_head_weight, micro.targets, token_loss, **options
            )
        if share.requires_grad:  # held_out_loss needs no gradient
            share.backward()
        loss, entropy = loss + share.detach(), entropy + entropies.sum() / num_tokens
    return dict(loss=float(loss), entropy=float(entropy))


if __name__ == "__main__":
    with friendly_errors():
        main(prepared)
