"""Drafts: which tokens a sequence may draw next, guessed from what its group has written.

A step of few rows waits for the weights, so a few more tokens in it cost little. Such a step also reads guessed tokens
behind a sequence's latest one. Each draw has a uniform number of its own, so the draws are those of plain steps: a
guess counts if the draw gives it, and the first draw that differs is a token too. Drafts change no completion.

The guess stands where the sequence's last tokens (three, two or one) stood last in its group, prompt included. Its
latest tokens are x y; the group's texts have x y z z and later x y w: the guess is w, and what follows there.

How many tokens are guessed depends on counts alone, never on time, so that a run can be repeated bit for bit.

Left out: a second model that guesses; completions of earlier iterations, which a checkpoint would have to keep; CUDA,
whose kernel reads one token per slot. Test: pytest tests/test_drafts.py
"""

import numpy as np

from snug.kernels import uses_triton

LONGEST = 3  # tokens that are looked up
MOST = 7  # tokens guessed for a sequence at a time
MOST_ROWS = 64  # of a step: latest tokens and guesses
CACHED = 2**25  # bytes of weights that stay in a CPU's caches, so that no step waits for them
# In a step of plain torch so many rows take as long as the reading of the weights (bench/sampling.py). With more slots
# more than half of the guesses would have to be right, and none is read.
ROWS = 24


def may_pay(model) -> bool:
    """Does a step wait for the model's weights? And is it plain torch? The kernels read one token per slot."""
    waits = sum(p.nbytes for p in model.parameters()) > CACHED
    plain = not uses_triton(model.lm_head_weight)
    return waits and plain


class Drafts:
    """The texts of the groups that go on, and how many guesses were right: kept of tried, by the tokens found.

    A text is a prompt and what one of its sequences has drawn.
    """

    def __init__(self, prompts: list[list[int]], k: int):
        self.prompts, self.k = prompts, k
        self.texts = {}  # sequence -> its text
        self.places = {}  # prompt -> {some tokens: (a sequence, the place behind them in its text)}
        self.kept = np.zeros(LONGEST + 1)
        self.tried = np.zeros(LONGEST + 1)
        self.asked = []  # (tokens found, guess) of the last guesses

    def follow(self, sequence: int, tokens: list[int]):
        """Take up what the sequence has drawn; tokens: all of it."""
        prompt = sequence // self.k
        places = self.places.setdefault(prompt, {})
        begin = len(self.texts.get(sequence, [0]))  # nothing is before a first token
        text = self.texts[sequence] = self.prompts[prompt] + tokens
        for place in range(begin, len(text)):
            most = min(LONGEST, place)
            for n in range(1, most + 1):
                found = tuple(text[place - n : place])
                places[found] = sequence, place

    def find(self, sequence: int) -> tuple[int, list[int]]:
        """-> (how many of the sequence's last tokens stood in the group before, what followed there)."""
        text = self.texts[sequence]
        places = self.places[sequence // self.k]
        for n in range(LONGEST, 0, -1):
            last = tuple(text[-n:])
            if last in places:
                other, place = places[last]
                return n, self.texts[other][place : place + MOST]
        return 0, []

    def guess(self, room: dict[int, int]) -> list[list[int]]:
        """-> a guess for each of these sequences, of at most `room` tokens, perhaps of none.

        Of all guessed tokens those are read that are likeliest to count, as long as they promise more tokens for the
        cost of the step. If a guess's tokens are right with the chance p each, its m-th counts with the chance p^m.
        """
        found = []
        for sequence, most in room.items():
            n, guess = self.find(sequence)
            found.append((n, guess[:most]))
        chances = (self.kept + 1) / (self.tried + 2)
        row, value = [], []  # of each guessed token
        for i, (n, guess) in enumerate(found):
            row += [i] * len(guess)
            value += [chances[n] ** m for m in range(1, len(guess) + 1)]
        value = np.array(value)
        likeliest = np.argsort(-value, kind="stable")[: MOST_ROWS - len(found)]
        tokens = len(found) + np.append(0, value[likeliest]).cumsum()
        rows = len(found) + np.arange(len(tokens))
        speeds = tokens / (1 + rows / ROWS)
        best = speeds.argmax()
        read = likeliest[:best]
        row = np.array(row, dtype=int)
        lengths = np.bincount(row[read], minlength=len(found))
        self.asked = []
        for (n, guess), m in zip(found, lengths, strict=True):
            self.asked.append((n, guess[:m]))
        return [guess for _, guess in self.asked]

    def count(self, kept: list[int]):
        """So many of the last guesses were drawn."""
        for (n, guess), right in zip(self.asked, kept, strict=True):
            self.kept[n] += min(right, len(guess))
            self.tried[n] += min(right + 1, len(guess))
