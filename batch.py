"""Sequences into optimizer steps and packed micro-batches, by token budget, for both loops.

A micro-batch is one row of tokens without padding. A group's prompt is in it once, and its completions behind it: each
sees the prompt and itself (kernels/segments.py). SFT's groups have one completion each.

Left out: prompts that share a beginning. Test: pytest tests/test_batch.py
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from device.cuda import padded, upload
from device.processes import OneProcess
from kernels.segments import Segments


@dataclass
class MicroBatch:
    """S completions with their prompts in one row of T tokens; M completion tokens, one completion after the other.

    A completion's last token predicts nothing, so it is a target and not in the row. The prompt's last state predicts
    the first token of each completion. Prompt (a b) with completions (x y .) and (z .), prompt (c) with (u .):

        row        0 1 2 3 4 5 6
        tokens     a b x y z c u     T = 7                 rows       1 2 3   1 4   5 6   the state that predicts it
        positions  0 1 2 3 2 0 1                           targets    x y .   z .   u .   M = 7
                                                           sequence   0 0 0   1 1   2 2   lengths  3 2 2
                                                           place      0 1 2   0 1   0 1
    """

    tokens: torch.Tensor  # (1, T)
    positions: torch.Tensor  # (1, T)
    mask: Segments  # which tokens each token sees
    rows: torch.Tensor  # (M,) of the row
    targets: torch.Tensor  # (M,)
    sequence: torch.Tensor  # (M,) in [0, S)
    place: torch.Tensor  # (M,) within its completion: 0 is its first token
    lengths: torch.Tensor  # (S,) completion tokens
    index: torch.Tensor  # (S,) which of the sequences these are
    advantages: torch.Tensor | None = None  # (S,)
    sampling_logprobs: torch.Tensor | None = None  # (M,)
    old_logprobs: torch.Tensor | None = None  # (M,)
    ref_logprobs: torch.Tensor | None = None  # (M,)

    def completion_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (1, T, C) -> (M, C), the states that predict completion tokens."""
        return hidden[0].index_select(0, self.rows)


class Cut:
    """Which sequences go together: optimizer steps of equally many, each cut into micro-batches.

    Made once, for every pass over the sequences, on the host's numbers. After an out-of-memory `into` cuts them again.
    Sequences i with the same i // group_size have the same prompt. steps[i][j]: the numbers of the sequences in
    micro-batch j of optimizer step i, groups together. rank_of[i]: which process takes them.

        a prompt of 4, completions of 3 and 5; a prompt of 2, completions of 9 and 1; one step
        tokens in the row: 4 + 2 + 4 = 10, and 2 + 8 + 0 = 10
        max_tokens 0 or 20: [[[0, 1, 2, 3]]]    10: [[[0, 1], [2, 3]]]    8: [[[2], [1], [0, 3]]], prompts repeated
    """

    def __init__(
        self, sequences, step_size: int = 0, max_tokens: int = 0, group_size: int = 1, processes=None
    ):
        """sequences: Rollouts or Sequences, N of them. step_size: sequences of an optimizer step; 0: N."""
        self.prompts, self.completions = (
            sequences.prompt_lengths.tolist(),
            sequences.completion_lengths.tolist(),
        )
        self.group_size, self.step_size = group_size, step_size or len(self.prompts)
        self.processes = processes or OneProcess()
        self.longest = (
            max(map(sum, zip(self.prompts, self.completions, strict=True))) - 1
        )  # tokens of one, in the row
        self.into(max_tokens)

    def into(self, max_tokens: int):
        """Cut into micro-batches of max_tokens at most, or of one sequence. 0: a step is one micro-batch.

        The largest groups first, each to the process with the fewest tokens, there to the first micro-batch with room.
        """
        self.steps, self.largest, self.rank_of = [], 0, {}
        for first in range(0, len(self.prompts), self.step_size):
            sequences, loads, step = range(first, first + self.step_size), [0] * self.processes.size, []
            share = -(
                -sum(size for size, _ in self.parts(sequences, 0)) // len(loads)
            )  # tokens of a process
            parts = self.parts(sequences, min(max_tokens or share, share))
            for size, part in sorted(parts, key=lambda part: -part[0]):
                rank = loads.index(min(loads))
                room = (
                    m for m in step if m[0] == rank and (not max_tokens or m[1] + size <= max_tokens)
                )
                if (found := next(room, None)) is None:
                    step.append(found := [rank, 0, []])
                found[1], found[2], loads[rank] = found[1] + size, found[2] + part, loads[rank] + size
                self.rank_of |= dict.fromkeys(part, rank)
            self.steps.append([numbers for _, _, numbers in step])
            self.largest = max(
                self.largest, *(size for _, size, _ in step)
            )  # tokens of the largest micro-batch

    def own(self, batches, model):
        """Those of some micro-batches that this process runs the model on."""
        return self.processes.own(batches, self.rank_of, model)

    def parts(self, sequences, max_tokens):
        """-> (tokens, numbers of the sequences) of each group, or of its parts where it is too large."""
        for group in self.groups(sequences):
            part, size = [], self.prompts[group[0]]
            for i in group:
                own = self.completions[i] - 1
                if part and max_tokens and size + own > max_tokens:
                    yield size, part
                    part, size = [], self.prompts[i]
                part.append(i)
                size += own
            yield size, part

    def groups(self, sequences) -> list[list[int]]:
        """The numbers of neighbours that have the same prompt."""
        return [list(group) for _, group in groupby(sequences, key=lambda i: i // self.group_size)]

    def sequences(self, step: int) -> range:
        """The numbers of an optimizer step's sequences."""
        return range(step * self.step_size, (step + 1) * self.step_size)


def gather(sequences, indices: list, cut: Cut) -> MicroBatch:
    """The MicroBatch of some sequences, groups together. Its copies live as long as it does: make one at a time.

    sequences: tokens (N, width) and, where wanted, advantages (N,), sampling_logprobs, old_logprobs, ref_logprobs
    (N, T_c). The tables are made on the host, which knows the lengths, and uploaded together.
    """
    width, groups = sequences.tokens.shape[1], cut.groups(indices)
    sizes = [(cut.prompts[group[0]], [cut.completions[i] - 1 for i in group]) for group in groups]
    which = [
        i for group in groups for i in (group[0], *group)
    ]  # of each segment of the row: from which sequence,
    first = [
        p for prompt, own in sizes for p in (0, *[prompt] * len(own))
    ]  # and from which position on
    T = sum(prompt + sum(own) for prompt, own in sizes)
    pad = padded(T, sequences.tokens) - T  # prompts of one token, without completions
    sizes, which, first = sizes + [(1, [])] * pad, which + indices[:1] * pad, first + [0] * pad
    mask = Segments(sizes, sequences.tokens.device)
    which, first, spans = map(
        np.array, (which, first, [n for prompt, own in sizes for n in (prompt, *own)])
    )
    begins = spans.cumsum() - spans
    positions = np.arange(spans.sum()) - (begins - first).repeat(spans)
    source = which.repeat(spans) * width + positions  # of the flattened tokens

    own = first > 0
    index, prompt, lengths = which[own], first[own], spans[own] + 1  # (S,) each
    sequence = np.arange(len(index)).repeat(lengths)  # (M,)
    place = np.arange(len(sequence)) - (lengths.cumsum() - lengths)[sequence]
    prompt_end = np.repeat((begins + spans)[~own][: len(groups)], [len(group) for group in groups])
    rows = np.where(place == 0, prompt_end[sequence], begins[own][sequence] + place) - 1
    tables = [
        source,
        positions,
        mask.start(),
        mask.tiles().ravel(),
        rows,
        sequence,
        place,
        lengths,
        index,
    ]
    tables.append(index[sequence] * width + prompt[sequence] + place)
    flat = upload(np.concatenate(tables), sequences.tokens.device).split(
        [len(table) for table in tables]
    )
    source, positions, start, tiles, rows, sequence, place, lengths, index, target = flat
    mask.tables = start, tiles.view(-1, 5)
    tokens = sequences.tokens.flatten()
    columns = {
        n: getattr(sequences, n, None) for n in ("sampling_logprobs", "old_logprobs", "ref_logprobs")
    }
    columns = {
        name: value[index[sequence], place] for name, value in columns.items() if value is not None
    }
    if (advantages := getattr(sequences, "advantages", None)) is not None:
        columns["advantages"] = advantages[index]
    row = tokens[source][None], positions[None], mask, rows
    return MicroBatch(*row, tokens[target], sequence, place, lengths, index, **columns)


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
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = [
            torch.tensor([len(x) for x in part], device=device) for part in (prompts, completions)
        ]
        return cls(tokens.to(device), *lengths)
