"""Sequences into micro-batches by token budget, for both loops.

A micro-batch is flat where it matters: `rows` picks the hidden states that predict completion tokens, and everything
per token is (M,). Nothing after it may assume padding. Left out: packing several sequences into a row.
"""

from dataclasses import dataclass

import torch


@dataclass
class MicroBatch:
    """S = B sequences, right-padded to the longest; M completion tokens, sequence after sequence.

    Prompt of 2 and completion of 3 (a b | x y .), prompt of 1 and completion of 2 (c | z .):

        tokens     a b x y .     B = 2, T = 5            rows       1 2 3   5 6     position before each target, in (B*T,)
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
    count: int = 1  # micro-batches of this optimizer step
    mask: torch.Tensor | None = None  # what attention may see; None: causal
    advantages: torch.Tensor | None = None  # (S,)
    sampling_logprobs: torch.Tensor | None = None  # (M,)
    old_logprobs: torch.Tensor | None = None  # (M,)
    ref_logprobs: torch.Tensor | None = None  # (M,)

    def completion_hidden(self, hidden):
        """hidden (B, T, C) -> (M, C): the states that predict completion tokens; prompts and padding never reach the head."""
        return hidden.flatten(0, 1)[self.rows]


def cut(lengths, max_tokens=0, max_sequences=0):
    """lengths (N,), tokens of each whole sequence -> lists of indices, longest first.

    A list padded to its longest holds at most max_tokens, or is a single sequence; and at most max_sequences of them.
    0: no limit. Longest first, so that what does not fit shows at once.

        lengths [3, 9, 4, 8], max_tokens 18 -> [[1, 3], [2, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    cuts = []
    for i in order:
        fits = cuts and (not max_tokens or lengths[cuts[-1][0]] * (len(cuts[-1]) + 1) <= max_tokens)
        if fits and (not max_sequences or len(cuts[-1]) < max_sequences):
            cuts[-1].append(i)
        else:
            cuts.append([i])
    return cuts


def limits(settings, count):
    """-> (max_tokens, max_sequences) of a micro-batch, where an optimizer step is `count` sequences."""
    if settings.max_tokens_per_micro_batch:
        return settings.max_tokens_per_micro_batch, 0
    return 0, count // settings.gradient_accumulation_steps


def micro_batches(sequences, max_tokens=0, max_sequences=0, select=None):
    """Yield the MicroBatches of some sequences one by one, so that the copies in them are never all alive.

    sequences: anything with tokens (N, T), prompt_lengths (N,), completion_lengths (N,) and, where wanted, advantages (N,)
    and sampling_logprobs, old_logprobs, ref_logprobs (N, T_c): Rollouts, or Sequences. select: numbers of those to use.
    Which tokens go where is worked out on numbers, so the device is asked twice and a planner's tensors need no values.
    """
    prompts, completions = sequences.prompt_lengths.tolist(), sequences.completion_lengths.tolist()
    select = range(len(prompts)) if select is None else select
    totals = [prompts[i] + completions[i] for i in select]
    pieces = cut(totals, max_tokens, max_sequences)
    for indices in pieces:
        index = [select[i] for i in indices]
        yield gather(sequences, index, [prompts[i] for i in index], [completions[i] for i in index], len(pieces))


def gather(sequences, index, prompts, completions, count):
    """The MicroBatch of the sequences `index`: S numbers, as are their prompts' and their completions' lengths; one of `count`."""
    device, M, T = sequences.tokens.device, sum(completions), max(map(sum, zip(prompts, completions, strict=True)))
    index, prompt, lengths = (torch.tensor(numbers, device=device) for numbers in (index, prompts, completions))  # (S,)
    tokens = sequences.tokens[index, :T]  # (B, T)
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
        count=count,
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
