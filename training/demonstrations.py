"""What SFT learns from: a task's demonstrations, and in conversations all turns of the assistant, as TRL's
assistant_only_loss. Tests: tests/test_sft.py."""

import random

import torch

from batch import Sequences


def demonstrations(iteration, training, split="train", P=0) -> Sequences:
    """The batch of an iteration, a function of (seed, iteration). The stop token is learned too.

    A completion begins with the first turn that is learned; its mask is 0 between turns. P: batch_size if 0.
    """
    settings, task, tokenizer = training.settings, training.prepared.task, training.prepared.tokenizer
    P, parts = P or settings.batch_size, []
    rng = random.Random(f"demonstrations {settings.seed} {iteration}")
    for row in task.prompts(split, range(iteration * P, (iteration + 1) * P)):
        ids = tokenizer.encode_prompt(row["prompt"])
        whole = ids + tokenizer.encode(task.demonstration(row, rng)) + [tokenizer.stop_token]
        turns = tokenizer.turns(row["prompt"]) if settings.assistant_turns == "all" else []
        learned = {*turns, *range(len(ids), len(whole))}
        first = min(learned)
        mask = torch.tensor([place in learned for place in range(first, len(whole))])
        parts.append((whole[:first], whole[first:], mask))
    *lists, masks = zip(*parts, strict=True)
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    return Sequences.from_lists(*lists, training.model.device, mask)
