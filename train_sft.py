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
    from prepare import prepare
    from settings import SFTSettings, friendly_errors, read_settings

    with friendly_errors():
        prepared = prepare(*read_settings(SFTSettings, sys.argv[1:])[:2])

import torch

import loop
from batch import Sequences, limits, micro_batches
from checkpoint import save_if_due
from evaluate import evaluate_if_due, rehearse_evaluation
from optimizer import learning_rate_at, number
from sample import Numbers


def main(prepared):
    """Train, log and save as the settings say -> False where a signal stopped it."""
    return loop.run(prepared, "SFT", rehearsal, iterate, lambda *_: None)


def iterate(iteration, model, _, optimizer, prepared, meter, log):
    """One optimizer step with its log line; whatever is large dies in here."""
    settings, task, tokenizer = prepared.settings, prepared.task, prepared.tokenizer
    meter.reset()
    started = time.perf_counter()
    learning_rate = learning_rate_at(iteration, settings)
    scores = evaluate_if_due(0, model, task, tokenizer, settings, meter, log.say) if iteration == 0 else {}
    log.show("train")
    batch = demonstrations(task, tokenizer, settings, iteration, model.device)  # some kilobytes
    gradient = partial(train_step, model, batch, settings)
    (loss, entropy, num_tokens), grad_norm = loop.step(model, optimizer, gradient, batch, learning_rate, settings, meter, log)
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
        share, _, entropies = loop.learn(model, micro, lambda logprobs, rows: -logprobs.sum() / num_tokens, settings)
        loss, entropy = loss + share, entropy + entropies.sum() / num_tokens
    return number(loss), number(entropy), num_tokens


def rehearsal(prepared, settings):
    """What plan.py runs on fake tensors -> a function of a meter: init, and an iteration in which every length is the longest."""

    def iteration(meter):
        (prompt, completion), N = prepared.longest(settings), settings.batch_size
        model, optimizer = loop.rehearse_init(prepared, settings, meter)
        rehearse_evaluation(model, prompt, completion, settings, meter)
        batch = Sequences(torch.zeros(N, prompt + completion, dtype=torch.long), Numbers([prompt] * N), Numbers([completion] * N))
        loop.rehearse_step(model, optimizer, partial(train_step, model, batch, settings, most=2), settings, meter)

    return iteration


if __name__ == "__main__":
    with friendly_errors():
        main(prepared)
