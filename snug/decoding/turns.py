"""Turns: where a completion's turn ends on the host, and the reply that follows.

With `is_over` a stop string ends a turn too; with `ask` a reply follows. The device knows only stop tokens.

Left out: slots, and how a reply is read (decode_batch.py). Test: pytest tests/test_episodes.py
"""

from collections import defaultdict


class Turns:
    """What is known of each sequence, by its number:

    begin    how many tokens it had before this turn
    checked  how many of its tokens were searched for an end of the turn
    ends     if it is over: its length; False if it was cut off, else True
    waiting  if it waits for a reply: its length; the Future of the reply
    """

    def __init__(self, max_new_tokens: int, stop_tokens: tuple[int, ...], is_over, ask):
        """is_over(ids of a turn) -> does it end here? ask(sequence, ids of its turn) -> a concurrent.futures.Future of
        the reply's ids, or of None: the sequence is over."""
        self.max_new_tokens, self.stop_tokens = max_new_tokens, stop_tokens
        self.is_over, self.ask = is_over, ask
        self.begin, self.checked = defaultdict(int), defaultdict(int)
        self.ends, self.waiting = {}, {}

    def ended(self, sequence: int, ids: list[int]) -> bool:
        """ids: all of the sequence so far. Has its turn ended since the last call? Then it is over, or waits."""
        begin, checked = self.begin[sequence], self.checked[sequence]
        self.checked[sequence] = len(ids)
        for n in range(checked + 1, len(ids) + 1):
            if ids[n - 1] in self.stop_tokens or self.is_over and self.is_over(ids[begin:n]):
                if self.ask:
                    self.waiting[sequence] = n, self.ask(sequence, ids[begin:n])
                else:
                    self.ends[sequence] = n, True
                return True
        if len(ids) == self.max_new_tokens:
            self.ends[sequence] = len(ids), False
        return sequence in self.ends

    def replies(self):
        """Wait for all replies. Yields (sequence, its length, reply) for each sequence that goes on. The others are
        over: `respond` said so, or no room is left."""
        for sequence, (length, future) in self.waiting.items():
            reply = future.result()
            if reply is not None and length + len(reply) < self.max_new_tokens:
                self.begin[sequence] = self.checked[sequence] = length + len(reply)
                yield sequence, length, reply
            else:
                self.ends[sequence] = length, reply is None
        self.waiting = {}
