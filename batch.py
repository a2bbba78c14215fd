"""Sequences into optimizer steps and packed micro-batches, by token budget, for both loops.

A micro-batch is one row of tokens without padding. A group's prompt is in it once, and its completions behind it: each
sees the prompt and itself (snug/kernels/segments.py). SFT's groups have one completion each.

Left out: prompts that share a beginning. Test: pytest tests/test_batch.py
"""

from copy import copy
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from snug.device.cuda import padded, upload
from snug.device.processes import ONE_PROCESS
from snug.kernels.segments import Segments
from snug.memory.ledger import COMPONENTS
from snug.options.progress import counted

COMPONENTS[__name__] = "micro-batch"  # the name in --plan's table


@dataclass
class MicroBatch:
    """S completions with their prompts in one row of T tokens; M sampled tokens, one completion after the other.

    A completion's last token predicts nothing, so it is a target and not in the row. The prompt's last state predicts
    the first token of each completion. Prompt (a b) with completions (x y .) and (z .), prompt (c) with (u .):

        row        0 1 2 3 4 5 6
        tokens     a b x y z c u     T = 7                 targets    x y .   z .   u .   M = 7
        positions  0 1 2 3 2 0 1                           states     1 2 3   1 4   5 6   where it is predicted
                                                           sequence   0 0 0   1 1   2 2   lengths  3 2 2
                                                           place      0 1 2   0 1   0 1

    Only sampled tokens are targets. Of an episode x . r s y ., where r s is a reply, the row has x . r s y, and the
    targets are x . y . at the places 0 1 4 5: their states see the reply. Its length is 4.
    """

    tokens: torch.Tensor  # (1, T)
    positions: torch.Tensor  # (1, T)
    mask: Segments  # which tokens each token sees
    states: torch.Tensor  # (M,) the place in the row whose state predicts the target
    targets: torch.Tensor  # (M,)
    sequence: torch.Tensor  # (M,) in [0, S)
    place: torch.Tensor  # (M,) within its completion: 0 is its first token
    lengths: torch.Tensor  # (S,) sampled tokens
    index: torch.Tensor  # (S,) which of the sequences these are
    row: torch.Tensor  # (M,) the same of each target's: index[sequence]
    advantages: torch.Tensor | None = None  # (S,)
    sampling_logprobs: torch.Tensor | None = None  # (M,)
    old_logprobs: torch.Tensor | None = None  # (M,)
    ref_logprobs: torch.Tensor | None = None  # (M,)
    teacher_outputs: torch.Tensor | None = None  # (M,) log-probs, or (M, C_T) hidden states

    def completion_hidden(self, model):
        """Forward, without the head -> (M, C), the states that predict completion tokens.

        A prompt's last state is there for each of its completions. Their gradients are added in a fixed order, which
        `index_select` would not do on CUDA.
        """
        hidden = model(self.tokens, self.positions, mask=self.mask)  # (1, T, C)
        return torch.embedding(hidden[0], self.states)


class Cut:
    """Which sequences go together: optimizer steps of equally many, each cut into micro-batches.

    Made once, for every pass over the sequences, on the host's numbers; `within` gives the same in other micro-batches.
    Sequences i with the same i // group_size have the same prompt. steps[i][j]: the numbers of the sequences in
    micro-batch j of optimizer step i, groups together. rank_of[i]: which process takes them.
    longest, largest: tokens in the row of the longest sequence and of the largest micro-batch.
    places[i]: of the sampled tokens of sequence i within its completion.

        a prompt of 4, completions of 3 and 5; a prompt of 2, completions of 9 and 1; one step
        tokens in the row: 4 + 2 + 4 = 10, and 2 + 8 + 0 = 10
        max_tokens 0 or 20: [[[0, 1, 2, 3]]]    10: [[[0, 1], [2, 3]]]    8: [[[2], [1], [0, 3]]], prompts repeated
    """

    def __init__(self, sequences, step_size=0, max_tokens=0, group_size=1, processes=ONE_PROCESS):
        """sequences: Rollouts or Sequences, N of them. step_size: sequences of an optimizer step; 0: N."""
        self.prompt_lengths = sequences.prompt_lengths.tolist()
        self.completion_lengths = sequences.completion_lengths.tolist()
        self.places = places_of(sequences)
        self.group_size, self.step_size = group_size, step_size or len(self.prompt_lengths)
        self.processes = processes
        self.longest = max(map(sum, zip(self.prompt_lengths, self.completion_lengths, strict=True))) - 1
        self.fill(max_tokens)

    def within(self, max_tokens: int) -> "Cut":
        """The same sequences and steps, in micro-batches of max_tokens at most, or of one sequence. 0: one a step."""
        if max_tokens == self.max_tokens:
            return self
        other = copy(self)
        other.fill(max_tokens)
        return other

    def fill(self, max_tokens: int):
        """Make the micro-batches, for the constructor and `within`."""
        self.max_tokens, self.steps, self.largest, self.rank_of = max_tokens, [], 0, {}
        for first in range(0, len(self.prompt_lengths), self.step_size):
            bins = self.packed(range(first, first + self.step_size), max_tokens)
            self.steps.append([bin.sequences for bin in bins])
            self.largest = max(self.largest, *(bin.tokens for bin in bins))
            self.rank_of |= {i: bin.rank for bin in bins for i in bin.sequences}

    def packed(self, sequences: range, max_tokens: int) -> list["Bin"]:
        """The largest groups first, each to the process with the fewest tokens, there to the first bin with room."""
        loads, bins = [0] * self.processes.size, []
        share = -(-sum(group.tokens for group in self.groups_within(sequences, 0)) // len(loads))
        groups = self.groups_within(sequences, min(max_tokens or share, share))
        for group in sorted(groups, key=lambda group: -group.tokens):
            group.rank = loads.index(min(loads))
            loads[group.rank] += group.tokens
            for bin in bins:
                if bin.rank == group.rank and not 0 < max_tokens < bin.tokens + group.tokens:
                    bin.tokens += group.tokens
                    bin.sequences += group.sequences
                    break
            else:
                bins.append(group)
        return bins

    def groups_within(self, sequences, max_tokens):
        """Yield each group as a Bin; in several, with the prompt repeated, where it has more than max_tokens."""
        for group in self.groups(sequences):
            bin = Bin(self.prompt_lengths[group[0]])
            for i in group:
                length = self.completion_lengths[i] - 1  # in the row: the last token is only a target
                if bin.sequences and 0 < max_tokens < bin.tokens + length:
                    yield bin
                    bin = Bin(self.prompt_lengths[i])
                bin.sequences.append(i)
                bin.tokens += length
            yield bin

    def groups(self, sequences) -> list[list[int]]:
        """The numbers of neighbours that have the same prompt."""
        return [list(group) for _, group in groupby(sequences, key=lambda i: i // self.group_size)]

    def sequences(self, step: int) -> range:
        """The numbers of an optimizer step's sequences."""
        return range(step * self.step_size, (step + 1) * self.step_size)

    def dealt(self, micro_batches: list[list[int]], model):
        """The micro-batches that this process runs the model on."""
        dealt = self.processes.dealt(micro_batches, self.rank_of, model)
        return counted(dealt, "micro-batches", total=-(-len(micro_batches) // self.processes.size))


def places_of(sequences) -> list[np.ndarray]:
    """Without a mask all tokens of a completion are sampled."""
    lengths = sequences.completion_lengths.tolist()
    if getattr(sequences, "mask", None) is None:
        return list(map(np.arange, lengths))
    masks = zip(sequences.mask.cpu().numpy(), lengths, strict=True)
    return [np.flatnonzero(mask[:length]) for mask, length in masks]


@dataclass
class Bin:
    """A micro-batch that is being filled, or a group that goes into one."""

    tokens: int  # in its row
    sequences: list[int] = field(default_factory=list)
    rank: int = 0


def make_micro_batch(sequences, indices: list[int], cut: Cut) -> MicroBatch:
    """The MicroBatch of the sequences `indices`, groups together. It copies: make one at a time.

    sequences: tokens (N, width) and, where wanted, advantages (N,), sampling_logprobs, old_logprobs, ref_logprobs
    (N, T_c), teacher_outputs (N, T_c) or (N, T_c, C_T), perhaps on the host. The tables are made on the host, which
    knows the lengths, and uploaded together.
    """
    width, groups = sequences.tokens.shape[1], cut.groups(indices)
    sizes = [(cut.prompt_lengths[g[0]], [cut.completion_lengths[i] - 1 for i in g]) for g in groups]
    T = sum(prompt + sum(lengths) for prompt, lengths in sizes)
    padding = padded(T, sequences.tokens) - T  # prompts of one token, without completions
    sizes += [(1, [])] * padding
    # The row is made of segments: each prompt, then its completions. A segment copies a sequence from `first` on.
    copied_from = np.array([i for group in groups for i in (group[0], *group)] + indices[:1] * padding)
    first = np.array(
        [position for prompt, lengths in sizes for position in (0, *[prompt] * len(lengths))]
    )
    spans = np.array([span for prompt, lengths in sizes for span in (prompt, *lengths)])
    begins = spans.cumsum() - spans
    positions = np.arange(spans.sum()) - (begins - first).repeat(spans)
    source = copied_from.repeat(spans) * width + positions  # of the flattened tokens
    mask = Segments(sizes, sequences.tokens.device)
    completion = first > 0  # segments that are completions: S
    index, prompt = copied_from[completion], first[completion]  # (S,)
    places = [cut.places[i] for i in index]
    lengths = np.array(list(map(len, places)))  # (S,)
    sequence = np.arange(len(index)).repeat(lengths)  # (M,)
    place, row = np.concatenate(places), index[sequence]  # (M,)
    prompt_end = (begins + spans)[~completion][: len(groups)].repeat([len(group) for group in groups])
    states = np.where(place == 0, prompt_end[sequence], begins[completion][sequence] + place) - 1
    target = row * width + prompt[sequence] + place  # of the flattened tokens
    tables = dict(source=source, positions=positions, start=mask.start(), tiles=mask.tiles().ravel())
    tables |= dict(target=target, states=states, sequence=sequence, place=place, lengths=lengths)
    tables |= dict(index=index, row=row)
    table = upload(np.concatenate(list(tables.values())), sequences.tokens.device)
    on_device = dict(zip(tables, table.split(list(map(len, tables.values()))), strict=True))
    mask.tables = on_device.pop("start"), on_device.pop("tiles").view(-1, 5)
    tokens = sequences.tokens.flatten()
    micro = MicroBatch(
        tokens=tokens[on_device.pop("source")][None],
        positions=on_device.pop("positions")[None],
        targets=tokens[on_device.pop("target")],
        mask=mask,
        **on_device,
    )
    for name in ("sampling_logprobs", "old_logprobs", "ref_logprobs", "teacher_outputs"):
        if (values := getattr(sequences, name, None)) is not None:
            if values.device == tokens.device:
                values = values[micro.row, micro.place]
            else:  # the host has all three, and so waits for none
                values = upload(values[row, place], tokens.device, values.dtype)
            setattr(micro, name, values)
    if (advantages := getattr(sequences, "advantages", None)) is not None:
        micro.advantages = advantages[micro.index]
    return micro


@dataclass
class Sequences:
    """N prompts with completions, right-padded: what SFT learns from."""

    tokens: torch.Tensor  # (N, T)
    prompt_lengths: torch.Tensor  # (N,)
    completion_lengths: torch.Tensor  # (N,)

    @classmethod
    def from_lists(cls, prompts, completions, device="cpu"):
        """Lists of lists of ids -> Sequences. Completions carry their stop token."""
        rows = [torch.tensor(p + c) for p, c in zip(prompts, completions, strict=True)]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        lengths = [torch.tensor(list(map(len, part)), device=device) for part in (prompts, completions)]
        return cls(tokens, *lengths)
