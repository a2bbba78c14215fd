"""Turns: where a completion's turn ends on the host, and the reply that is written behind it.

With `is_over` a stop string ends a turn too; with `ask` a reply follows. The device knows stop tokens alone.

Left out: slots, and how a reply is read (decode_batch.py). Test: pytest tests/test_episodes.py
"""

import numpy as np
import torch


class Turns:
    """The turns of N sequences.

    written  (N + 1, max_new_tokens)  True: a reply's token, not drawn; None without `ask`
    begin    (N + 1,)  the tokens of a sequence before this turn
    checked  (N + 1,)  how many of its tokens were looked at for an end
    ends     {sequence: (its length, not cut off?)} of those that are over
    waiting  {sequence: (its length, the Future of its reply)}
    """

    def __init__(self, shape: tuple[int, int], stop_tokens: tuple[int, ...], is_over, ask, device):
        """shape: of `written`. is_over(ids of a turn) -> does it end here? ask(sequence, ids of its turn) -> a concurrent.futures.Future of
        the reply's ids, or of None: the sequence is over."""
        self.stop_tokens, self.is_over, self.ask = stop_tokens, is_over, ask
        rows, self.max_new_tokens = shape
        self.written = torch.zeros(shape, dtype=torch.bool, device=device) if ask else None
        self.begin = np.zeros(rows, dtype=np.int64)
        self.checked = np.zeros_like(self.begin)
        self.ends, self.waiting = {}, {}

    def ended(self, sequence: int, ids: list[int]) -> bool:
        """ids: all of the sequence so far. Has its turn ended since the last call? Then it is over, or waits."""
        begin = self.begin[sequence]
        for n in range(self.checked[sequence] + 1, len(ids) + 1):
            if ids[n - 1] in self.stop_tokens or self.is_over and self.is_over(ids[begin:n]):
                if self.ask:
                    self.waiting[sequence] = n, self.ask(sequence, ids[begin:n])
                else:
                    self.ends[sequence] = n, True
                return True
        self.checked[sequence] = len(ids)
        if len(ids) < self.max_new_tokens:
            return False
        self.ends[sequence] = len(ids), False
        return True

    def replies(self) -> list:
        """Wait for all replies -> [(sequence, its length, reply)] of those that go on. The others are over: `respond`
        said so, or no room is left."""
        replies = []
        for sequence, (length, future) in self.waiting.items():
            reply = future.result()
            if reply is not None and length + len(reply) < self.max_new_tokens:
                replies.append((sequence, length, reply))
            else:
                self.ends[sequence] = length, reply is None
        self.waiting.clear()
        return replies
