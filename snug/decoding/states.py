"""What linear layers (snug/delta.py) keep of a prompt and of a completion: a state and the convolution's last inputs.

Both have the same size however long a sequence is. But a column of the KV cache that holds nonsense is written again
before it is read; a state that has read a wrong token stays wrong. So every forward says which of its tokens are real:
what lies behind a row's end, and a step's token of an idle slot, change nothing.

Test: pytest tests/test_sample.py tests/test_episodes.py
"""

from itertools import chain

import torch

from snug.device.kinds import wide
from snug.kernels.segments import CONVOLUTION
from snug.memory.ledger import component


@component("states")
class States:
    """`slots` of completions, after the tokens that they have read, and behind these the prompt slots, at their
    prompts' ends. `held` has for each linear layer:

    inputs   (slots + prompt slots, 3, channels)
    S        (slots + prompt slots, value heads, K, V) float32

    Before a forward: `begin`. Then each linear layer calls `read`, uses `real`, and calls `write`.
    """

    def __init__(self, config, prompt_slots, slots, dtype, device):
        self.first_prompt = slots
        kinds = (
            (CONVOLUTION - 1, config.linear_channels, dtype),
            (
                config.linear_value_heads,
                config.linear_key_size,
                config.linear_value_size,
                wide(dtype),
            ),
        )
        self.held = {
            layer: [
                torch.zeros(slots + prompt_slots, *size, dtype=kind, device=device)
                for *size, kind in kinds
            ]
            for layer in filter(config.is_linear, range(config.n_layer))
        }

    def begin(self, at, lengths, width):
        """Prepare the next forward, of B rows with `width` tokens. lengths (B,): how many of a row's tokens are real.

        at: the rows' slots, as numbers. A slice: the forward is a step, and lengths says which slots are active."""
        self.at = at
        self.is_step = isinstance(at, slice)
        self.real = torch.arange(width, device=lengths.device) < lengths[:, None]  # (B, width)
        last = torch.arange(CONVOLUTION - 1, device=lengths.device)
        self.ends = last[:, None] + lengths[:, None, None]

    def begin_prefill(self, prompt_slots, lengths, width):
        """The next forward reads prompts, from nothing. lengths: of each prompt slot's."""
        self.begin(self.first_prompt + prompt_slots, lengths[prompt_slots], width)
        for tensor in chain(*self.held.values()):
            tensor[self.at] = 0

    def read(self, layer):
        """-> inputs (B, 3, channels), S (B, heads, K, V), from which each row goes on."""
        return [tensor[self.at] for tensor in self.held[layer]]

    def write(self, layer, inputs, S):
        """inputs (B, 3 + T, channels): those of `read` and of the row's tokens. S: after a row's last real token; None:
        a step has changed the one of `read`."""
        old_inputs, old_S = self.held[layer]
        old_inputs[self.at] = inputs.take_along_dim(self.ends, 1)  # the three before each row's end
        if S is not None:
            old_S[self.at] = S

    def move(self, source, target):
        """Slots `target` go on from slots `source`."""
        for tensor in chain(*self.held.values()):
            tensor[target] = tensor[source]
