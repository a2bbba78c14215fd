"""Micro-batches the long way, an oracle for the packed ones: a sequence a row, right-padded, causal attention.

    with padded(poison=7):
        grpo.accumulate_gradient(model, rollouts, a_few(cut, 4), 0, settings, entropies)

Every token of every sequence is computed: a prompt once for each of its completions, and last tokens too.
"""

from contextlib import contextmanager
from copy import copy
from functools import partial
from unittest.mock import patch

import torch

import grpo
import train_sft
from batch import MicroBatch
from training import frozen


class PaddedBatch(MicroBatch):
    """As MicroBatch, but tokens are (S, T), positions and mask None: 0, 1, 2, ... and causal."""

    def completion_hidden(self, model):
        return model(self.tokens).flatten(0, 1)[self.states]


def make_micro_batch(sequences, indices, cut, poison=0):
    """batch.make_micro_batch's arguments -> PaddedBatch. poison: the id that stands in the padding."""
    prompts, completions = sequences.prompt_lengths.tolist(), sequences.completion_lengths.tolist()
    mask = sequences.mask == 1
    T = max(prompts[i] + completions[i] for i in indices)
    tokens = torch.full((len(indices), T), poison)
    states, targets, sequence, place = [], [], [], []
    for s, i in enumerate(indices):
        end = prompts[i] + completions[i]
        tokens[s, :end] = sequences.tokens[i, :end]
        for t in mask[i].nonzero()[:, 0].tolist():
            target = prompts[i] + t
            states.append(s * T + target - 1)
            targets.append(int(tokens[s, target]))
            sequence.append(s)
            place.append(t)
    lengths = [int(mask[i].sum()) for i in indices]
    numbers = (torch.tensor(x, device=sequences.tokens.device) for x in (states, targets, sequence, place, lengths))
    index = torch.tensor(indices)
    rows = index[sequence].to(sequences.tokens.device)
    micro = PaddedBatch(tokens.to(sequences.tokens.device), None, None, *numbers, index, rows)
    if getattr(sequences, "advantages", None) is not None:
        micro.advantages = sequences.advantages[indices]
    for name in ("sampling_logprobs", "old_logprobs", "ref_logprobs", "teacher_outputs"):
        if (value := getattr(sequences, name, None)) is not None:
            setattr(micro, name, torch.cat([value[i, mask[i].to(value.device)] for i in indices]).to(mask.device))
    return micro


def a_few(cut, n):
    """The same optimizer steps in micro-batches of n sequences in their order, whatever their groups."""
    other = copy(cut)
    steps = list(map(list, cut.step_indices))
    other.steps = [[step[first : first + n] for first in range(0, len(step), n)] for step in steps]
    return other


@contextmanager
def padded(poison=0):
    """Within this context the loops gather padded micro-batches."""
    other = partial(make_micro_batch, poison=poison)
    first, second, third = (patch.object(module, "make_micro_batch", other) for module in (grpo, train_sft, frozen))
    with first, second, third:
        yield
