"""Supervised fine-tuning on a task's demonstrations: GRPO's warm start, and what its memory is compared with.

    python train_sft.py config/sft_small.py

The loop of grpo.py without its rollouts: the same micro-batches, the same head, the same log.
Left out: data sets on disk, packing.
"""

import random
import sys
import time
from functools import partial
from itertools import islice

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from options import friendly_errors, read_settings
    from runs.prepare import prepare
    from settings import SFTSettings

    with friendly_errors():
        prepared = prepare(*read_settings(SFTSettings, sys.argv[1:])[:2])

import torch

from batch import Sequences, limits, micro_batches
from evaluate import rehearse_evaluation
from sample import Numbers
from training import loop
from training.optimizer import learning_rate_at, number


def main(prepared):
    """Train, log and save as the settings say -> False where a signal stopped it."""
    return loop.run(prepared, "SFT", rehearsal, iterate, lambda *_: None)


def iterate(iteration, training):
    """One optimizer step with its log line; whatever is large dies in here."""
    prepared, model = training.prepared, training.model
    settings, task, tokenizer = prepared.settings, prepared.task, prepared.tokenizer
    training.meter.reset()
    started = time.perf_counter()
    learning_rate = learning_rate_at(iteration, settings)
    scores = training.evaluate_if_due(0) if iteration == 0 else {}
    training.log.show("train")
    batch = demonstrations(task, tokenizer, settings, iteration, model.device)  # some kilobytes
    gradient = partial(train_step, model, batch, settings)
    metrics = loop.step(training, gradient, batch, learning_rate, iteration, range(settings.batch_size))
    scores |= training.evaluate_if_due(iteration + 1)
    stats, num_tokens = training.meter.stats(), sum(batch.completion_lengths.tolist())
    record = {"iter": iteration} | (metrics or {}) | {"learning_rate": learning_rate}
    record["completion_length_mean"] = num_tokens / settings.batch_size
    record["tokens_per_second"] = num_tokens / (stats["time_train_s"] + stats["time_optimizer_s"])
    record["time_s"] = time.perf_counter() - started
    training.end_iteration(record, scores)


def demonstrations(task, tokenizer, settings, iteration, device):
    """The batch of an iteration, a function of (seed, iteration) -> Sequences. The stop token is learned too."""
    first = iteration * settings.batch_size
    rows = task.prompts("train", range(first, first + settings.batch_size))
    rng = random.Random(f"demonstrations {settings.seed} {iteration}")
    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in rows]
    answers = [tokenizer.encode(task.demonstration(row, rng)) + [tokenizer.stop_token] for row in rows]
    return Sequences.from_lists(prompts, answers, device)


def train_step(model, batch, settings, most=None):
    """Accumulate the gradient of the mean negative log-prob of completion tokens -> {"loss": ..., "entropy": its token mean}.

    most: micro-batches looked at, for a planner.
    """
    num_tokens = sum(batch.completion_lengths.tolist())
    loss = entropy = 0.0
    for micro in islice(micro_batches(batch, *limits(settings, len(batch.tokens))), most):
        share, _, entropies = loop.learn(model, micro, lambda logprobs, rows: -logprobs.sum() / num_tokens, settings)
        loss, entropy = loss + share, entropy + entropies.sum() / num_tokens
    return dict(loss=number(loss), entropy=number(entropy))


def rehearsal(prepared, settings):
    """What plan.py runs on fake tensors -> a function of a meter: init, and an iteration in which every length is the longest."""

    def iteration(meter):
        (prompt, completion), N = prepared.longest(settings), settings.batch_size
        model, optimizer = loop.rehearse_init(prepared, settings, meter)
        rehearse_evaluation(model, prompt, completion, settings, meter)
        batch = Sequences(
            torch.zeros(N, prompt + completion, dtype=torch.long), Numbers([prompt] * N), Numbers([completion] * N)
        )
        loop.rehearse_step(model, optimizer, partial(train_step, model, batch, settings, most=2), settings, meter)

    return iteration


if __name__ == "__main__":
    with friendly_errors():
        main(prepared)
