"""Divide sequences into optimizer steps and packed micro-batches, by token budget, for both loops.

A micro-batch is one row of tokens without padding. It has a group's prompt once, then the group's completions. Each
completion sees the prompt and itself (snug/kernels/segments.py). SFT's groups have one completion each.

Left out: prompts that share a beginning. Test: pytest tests/test_batch.py
"""

from copy import copy
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from snug.device.kinds import padded, upload
from snug.device.processes import ONE_PROCESS
from snug.kernels.segments import Segments
from snug.options.progress import counted


@dataclass
class MicroBatch:
    """S completions with their prompts in one row of T tokens; M sampled tokens, one completion after the other.

    A completion's last token predicts nothing: it is a target only, not in the row. The prompt's last state predicts
    the first token of each completion. Prompt (a b) with completions (x y .) and (z .), prompt (c) with (u .):

        row        0 1 2 3 4 5 6
        tokens     a b x y z c u     T = 7                 targets    x y .   z .   u .   M = 7
        positions  0 1 2 3 2 0 1                           states     1 2 3   1 4   5 6   where it is predicted
                                                           sequence   0 0 0   1 1   2 2   lengths  3 2 2
                                                           place      0 1 2   0 1   0 1

    Only sampled tokens are targets. Of an episode x . r s y ., where r s is a reply, the row has x . r s y, and the
    targets are x . y . at the places 0 1 4 5: their states see the reply. Its length is 4.
    """

    tokens: Tensor  # (1, T)
    positions: Tensor  # (1, T)
    mask: Segments  # which tokens each token sees
    states: Tensor  # (M,) the place in the row whose state predicts the target
    targets: Tensor  # (M,)
    sequence: Tensor  # (M,) in [0, S)
    place: Tensor  # (M,) within its completion: 0 is its first token
    lengths: Tensor  # (S,) sampled tokens
    index: Tensor  # (S,) the number of each completion among all N sequences
    row: Tensor  # (M,) this number for each target: index[sequence]
    advantages: Tensor | None = None  # (S,)
    sampling_logprobs: Tensor | None = None  # (M,)
    old_logprobs: Tensor | None = None  # (M,)
    ref_logprobs: Tensor | None = None  # (M,)
    teacher_outputs: Tensor | None = None  # (M,) log-probs, or (M, C_T) hidden states

    def completion_hidden(self, model):
        """Forward, without the head -> (M, C), the states that predict completion tokens.

        A prompt's last state is repeated for each of its completions. `embedding` adds the gradients of the copies in a
        fixed order, which `index_select` would not do on CUDA.
        """
        hidden = model(self.tokens, self.positions, mask=self.mask)  # (1, T, C)
        return torch.embedding(hidden[0], self.states)


class Cut:
    """Optimizer steps of equally many sequences, each cut into micro-batches.

    Made once for all passes over the sequences, from numbers on the host. Sequences with the same i // group_size have
    the same prompt. step_indices[i]: the sequences of optimizer step i. steps[i][j]: the sequences of its micro-batch
    j, groups together. rank_of[i]: the process that takes sequence i. places[i]: where in completion i the sampled
    tokens are. longest, largest: tokens in the row of the longest sequence and of the largest micro-batch.

        a prompt of 4, completions of 3 and 5; a prompt of 2, completions of 9 and 1; one step
        tokens in the row: 4 + 2 + 4 = 10, and 2 + 8 + 0 = 10
        max_tokens 0 or 20: [[[0, 1, 2, 3]]]    10: [[[0, 1], [2, 3]]]    8: [[[2], [1], [0, 3]]], prompts repeated
    """

    def __init__(self, sequences, step_size=0, max_tokens=0, group_size=1, processes=ONE_PROCESS):
        """sequences: Rollouts or Sequences, N of them. step_size: sequences of an optimizer step; 0: N."""
        self.prompt_lengths = sequences.prompt_lengths.tolist()
        self.completion_lengths = sequences.completion_lengths.tolist()
        if getattr(sequences, "mask", None) is None:
            self.places = list(map(np.arange, self.completion_lengths))
        else:
            masks = zip(sequences.mask.cpu().numpy(), self.completion_lengths, strict=True)
            self.places = [np.flatnonzero(mask[:length]) for mask, length in masks]
        N = len(self.prompt_lengths)
        self.group_size, self.step_size = group_size, step_size or N
        self.step_indices = [range(N)[i : i + self.step_size] for i in range(0, N, self.step_size)]
        self.processes = processes
        self.longest = max(map(sum, zip(self.prompt_lengths, self.completion_lengths, strict=True))) - 1
        self.make_micro_batches(max_tokens)

    def with_limit(self, max_tokens: int) -> "Cut":
        """The same steps in micro-batches of at most max_tokens, or of one sequence. 0: one micro-batch a step."""
        other = copy(self)
        other.make_micro_batches(max_tokens)
        return other

    def make_micro_batches(self, max_tokens: int):
        self.steps, self.rank_of, self.largest = [], {}, 0
        for indices in self.step_indices:
            packs = self.pack(indices, max_tokens)
            self.steps.append([pack.indices for pack in packs])
            self.largest = max(self.largest, *(pack.tokens for pack in packs))
            self.rank_of |= {i: pack.rank for pack in packs for i in pack.indices}

    def pack(self, indices: range, max_tokens: int) -> list["Pack"]:
        """Each group, the largest first, goes to the process with the fewest tokens, into its first pack with room."""
        loads, packs = [0] * self.processes.size, []
        share = -(-sum(group.tokens for group in self.split_groups(indices, 0)) // len(loads))
        groups = self.split_groups(indices, min(max_tokens or share, share))
        for group in sorted(groups, key=lambda group: -group.tokens):
            group.rank = loads.index(min(loads))
            loads[group.rank] += group.tokens
            for pack in packs:
                if pack.rank == group.rank and not 0 < max_tokens < pack.tokens + group.tokens:
                    pack.tokens += group.tokens
                    pack.indices += group.indices
                    break
            else:
                packs.append(group)
        return packs

    def split_groups(self, indices, max_tokens):
        """Yield each group as a Pack. A group of more than max_tokens becomes several, each with the prompt."""
        for group in self.groups(indices):
            pack = Pack(self.prompt_lengths[group[0]])
            for i in group:
                length = self.completion_lengths[i] - 1  # in the row: the last token is only a target
                if pack.indices and 0 < max_tokens < pack.tokens + length:
                    yield pack
                    pack = Pack(self.prompt_lengths[i])
                pack.indices.append(i)
                pack.tokens += length
            yield pack

    def groups(self, indices) -> list[list[int]]:
        """Neighbours that have the same prompt."""
        return [list(group) for _, group in groupby(indices, key=lambda i: i // self.group_size)]

    def mine(self, micro_batches: list[list[int]], model):
        """The micro-batches that this process runs the model on."""
        mine = self.processes.dealt(micro_batches, self.rank_of, model)
        return counted(mine, "micro-batches", total=-(-len(micro_batches) // self.processes.size))


@dataclass
class Pack:
    """A micro-batch in the making, or a group that goes into one."""

    tokens: int  # in the row
    indices: list[int] = field(default_factory=list)
    rank: int = 0


def make_micro_batch(sequences, indices: list[int], cut: Cut) -> MicroBatch:
    """The MicroBatch of the sequences `indices`, groups together. It has new tensors: make one at a time.

    sequences: tokens (N, width) and, if the loss needs them, advantages (N,), sampling_logprobs, old_logprobs,
    ref_logprobs (N, T_c), teacher_outputs (N, T_c) or (N, T_c, C_T), perhaps on the host. The tables are made on the
    host, which knows the lengths, and uploaded together.
    """
    tokens, device = sequences.tokens.flatten(), sequences.tokens.device
    groups = cut.groups(indices)
    sizes = [(cut.prompt_lengths[g[0]], [cut.completion_lengths[i] - 1 for i in g]) for g in groups]
    T = sum(prompt + sum(lengths) for prompt, lengths in sizes)
    sizes += [(1, [])] * (padded(T, tokens) - T)  # prompts of one token, without completions
    mask = Segments(sizes, device)
    host = tables_of(groups, sizes, cut.places, sequences.tokens.shape[1])
    host |= dict(start=mask.start, tiles=mask.tiles().ravel())
    together = upload(np.concatenate(list(host.values())), device)
    tables = dict(zip(host, together.split(list(map(len, host.values()))), strict=True))
    mask.tables = tables.pop("start"), tables.pop("tiles").view(-1, 5)
    mask.positions = tables["positions"]
    micro = MicroBatch(
        tokens=tokens[tables.pop("source")][None],
        positions=tables.pop("positions")[None],
        targets=tokens[tables.pop("target")],
        mask=mask,
        **tables,
    )
    for name in ("sampling_logprobs", "old_logprobs", "ref_logprobs", "teacher_outputs"):
        if (values := getattr(sequences, name, None)) is not None:
            if values.device == device:
                values = values[micro.row, micro.place]
            else:  # values and tables are on the host, so nothing waits for the device
                values = upload(values[host["row"], host["place"]], device, values.dtype)
            setattr(micro, name, values)
    if (advantages := getattr(sequences, "advantages", None)) is not None:
        micro.advantages = advantages[micro.index]
    return micro


def tables_of(groups, sizes, places, width: int) -> dict:
    """sizes: (length of a prompt, lengths of its completions without their last tokens) a group -> {name: table}.

    The comments have the numbers of MicroBatch's example. The row consists of segments, each prompt and then its
    completions: a b | x y | z | c | u. A segment copies neighbouring tokens of one sequence. sizes may end
    with prompts of one token, which fill the row up. source and target are places in the flattened tokens (N, width).
    """
    more = groups[0][:1] * (len(sizes) - len(groups))
    copied = np.array([i for group in groups for i in (group[0], *group)] + more)  # 0 0 1 2 2
    first = np.array(
        [place for prompt, lengths in sizes for place in (0, *[prompt] * len(lengths))]
    )  # 0 2 2 0 1
    spans = np.array([span for prompt, lengths in sizes for span in (prompt, *lengths)])  # 2 2 1 1 1
    begins = spans.cumsum() - spans  # 0 2 4 5 6
    positions = np.arange(spans.sum()) - (begins - first).repeat(spans)  # 0 1 2 3 2 0 1
    # Of the S completions: the segments that do not copy a sequence's beginning
    completion = first > 0  # no yes yes no yes
    index = copied[completion]  # 0 1 2
    prompt = first[completion]  # 2 2 1
    prompt_end = (begins + spans)[~completion][: len(groups)].repeat(list(map(len, groups)))  # 2 2 6
    lengths = np.array([len(places[i]) for i in index])  # 3 2 2
    # Of the M targets: a first token is predicted at its prompt's end, any other at the token before it
    sequence = np.arange(len(index)).repeat(lengths)  # 0 0 0 1 1 2 2
    place = np.concatenate([places[i] for i in index])  # 0 1 2 0 1 0 1
    row = index[sequence]  # 0 0 0 1 1 2 2
    states = (
        np.where(place == 0, prompt_end[sequence], begins[completion][sequence] + place) - 1
    )  # 1 2 3 1 4 5 6
    return dict(
        source=copied.repeat(spans) * width + positions,
        positions=positions,
        target=row * width + prompt[sequence] + place,
        states=states,
        sequence=sequence,
        place=place,
        lengths=lengths,
        index=index,
        row=row,
    )


@dataclass
class Sequences:
    """N prompts with completions, right-padded: what SFT learns from."""

    tokens: Tensor  # (N, T)
    prompt_lengths: Tensor  # (N,)
    completion_lengths: Tensor  # (N,)

    @classmethod
    def from_lists(cls, prompts, completions, device="cpu"):
        """Lists of lists of ids -> Sequences. Completions carry their stop token."""
        rows = [torch.tensor(p + c) for p, c in zip(prompts, completions, strict=True)]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        lengths = [torch.tensor(list(map(len, part)), device=device) for part in (prompts, completions)]
        return cls(tokens, *lengths)

    def columns(self, rows=slice(None)) -> dict[str, Tensor]:
        """{name: tensor} of the columns that are there. rows: a range, of these sequences alone."""
        return {name: x[rows.start : rows.stop] for name, x in vars(self).items() if x is not None}
