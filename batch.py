"""Sequences into optimizer steps and micro-batches, by token budget, for both loops.

A micro-batch is flat: `rows` picks the hidden states that predict completion tokens, and everything per token is (M,).
Nothing after it may assume how far it is padded. Left out: packing several sequences into a row.
"""

from dataclasses import dataclass

import torch

from memory.cuda import padded, upload


@dataclass
class MicroBatch:
    """S = B sequences, right-padded to the longest; M completion tokens, one sequence after the other.

    Prompt of 2 and completion of 3 (a b | x y .), prompt of 1 and completion of 2 (c | z .):

        tokens     a b x y .     B = 2, T = 5            rows       1 2 3   5 6     the position before each target
                   c z . 0 0                             targets    x y .   z .     M = 5
        positions  0 1 2 3 4     (1, T): rows are alike  sequence   0 0 0   1 1     lengths  3 2
                                                 place      0 1 2   0 1
    """

    tokens: torch.Tensor  # (B, T)
    positions: torch.Tensor  # (B, T), or (1, T) where all rows are alike
    rows: torch.Tensor  # (M,) of the flattened hidden (B * T, C)
    targets: torch.Tensor  # (M,)
    sequence: torch.Tensor  # (M,) in [0, S)
    place: torch.Tensor  # (M,) within its completion: 0 is its first token
    lengths: torch.Tensor  # (S,) completion tokens
    index: torch.Tensor  # (S,) which of the sequences these are
    mask: torch.Tensor | None = None  # True where attention may look; None: causal
    advantages: torch.Tensor | None = None  # (S,)
    sampling_logprobs: torch.Tensor | None = None  # (M,)
    old_logprobs: torch.Tensor | None = None  # (M,)
    ref_logprobs: torch.Tensor | None = None  # (M,)

    def completion_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (B, T, C) -> (M, C), the states that predict completion tokens: no prompt, no padding."""
        return hidden.flatten(0, 1)[self.rows]


class Cut:
    """Which sequences go together: optimizer steps of equally many, each cut into micro-batches.

    Made once, for every pass over the sequences, on the host's numbers. After an out-of-memory `into` cuts them again.
    steps[i][j]: the numbers of the sequences in micro-batch j of optimizer step i, longest first.

        tokens of the sequences 3 9 4 8, one step, max_tokens 18 -> steps [[[1, 3], [2, 0]]]
    """

    def __init__(self, sequences, step_size: int = 0, max_tokens: int = 0, block_size: int = 0):
        """sequences: Rollouts or Sequences, N of them. step_size: sequences of an optimizer step; 0: N."""
        prompts, self.completions = sequences.prompt_lengths.tolist(), sequences.completion_lengths.tolist()
        lengths = map(sum, zip(prompts, self.completions, strict=True))
        self.lengths = [padded(length, sequences.tokens, block_size) for length in lengths]
        self.step_size, self.longest = step_size or len(self.lengths), max(self.lengths)
        self.into(max_tokens)

    def into(self, max_tokens: int):
        """Cut into micro-batches that, padded to their longest sequence, hold max_tokens at most, or one sequence.

        0: a step is one micro-batch.
        """
        self.steps = []
        for first in range(0, len(self.lengths), self.step_size):
            step = []
            # Longest first: what does not fit into memory fails at once.
            for i in sorted(range(first, first + self.step_size), key=lambda i: -self.lengths[i]):
                if step and (not max_tokens or self.lengths[step[-1][0]] * (len(step[-1]) + 1) <= max_tokens):
                    step[-1].append(i)
                else:
                    step.append([i])
            self.steps.append(step)

    def sequences(self, step: int) -> range:
        """The numbers of an optimizer step's sequences."""
        return range(step * self.step_size, (step + 1) * self.step_size)


def gather(sequences, indices: list, cut: Cut) -> MicroBatch:
    """The MicroBatch of some sequences. Its copies live as long as it does: make one at a time.

    sequences: tokens (N, T) and, where wanted, advantages (N,), sampling_logprobs, old_logprobs, ref_logprobs (N, T_c).
    """
    M, T = sum(cut.completions[i] for i in indices), max(cut.lengths[i] for i in indices)
    device, index = sequences.tokens.device, upload(indices, sequences.tokens.device)
    prompt, lengths = sequences.prompt_lengths[index], sequences.completion_lengths[index]  # (B,) each
    tokens = torch.nn.functional.pad(sequences.tokens[index, :T], (0, max(0, T - sequences.tokens.shape[1])))  # (B, T)
    sequence = torch.repeat_interleave(torch.arange(len(index), device=device), lengths, output_size=M)  # (M,)
    place = torch.arange(M, device=device) - (lengths.cumsum(0) - lengths)[sequence]  # (M,) within its completion
    target = sequence * T + prompt[sequence] + place  # (M,) of the flattened tokens
    per_token = {
        name: value[index[sequence], place]
        for name in ("sampling_logprobs", "old_logprobs", "ref_logprobs")
        if (value := getattr(sequences, name, None)) is not None
    }
    advantages = getattr(sequences, "advantages", None)
    return MicroBatch(
        tokens=tokens,
        positions=torch.arange(T, device=device)[None],
        rows=target - 1,
        targets=tokens.flatten()[target],
        sequence=sequence,
        place=place,
        lengths=lengths,
        index=index,
        advantages=None if advantages is None else advantages[index],
        **per_token,
    )


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
        lengths = [torch.tensor([len(x) for x in part], device=device) for part in (prompts, completions)]
        return cls(tokens.to(device), *lengths)
