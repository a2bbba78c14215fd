"""What a task is: prompts, demonstrations, and which completions are right.

Row 17 of a split is computed from the number 17 (jsonl, gsm8k: looked up); nothing is downloaded or remembered.
A hash of the problem decides its split, so no training prompt is a test prompt, whatever the seed.

    task = make_task(settings)
    rows = task.prompts("train", range(0, 64))
    text = task.demonstration(rows[0], random.Random(0))
    task.rewards([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])

A prompt is text or, with settings.chat, messages: [{"role": "user", "content": text}]. Completions are untrusted text:
a task limits their length and parses them by a whitelist, or executes them in confined processes (snug/sandbox).

Left out: conversations of several turns; reward models (write a function). Tests: tests/test_data.py.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from snug.options import SnugError

TEST_SHARE = 10  # one problem in 10 is a test problem
MAX_PROPOSALS = 20_000  # to find one row
MARGIN = 16  # tokens, see `longest`


@dataclass
class NoOptions:
    """Of a task without options of its own."""


class Task:
    """A kind of problem. A subclass proposes, identifies, demonstrates and scores problems."""

    options: type = (
        NoOptions  # a dataclass whose fields are snug.options.option: self.settings has them, too
    )
    columns: tuple[str, ...] = ()  # columns of a row that `is_right` takes, in its order
    scored = True  # can the task say whether a completion is right?
    longest_at = ""  # file and line of the longest prompt, once `longest` has seen it
    longest_row = 0  # tokens of its longest prompt with its demonstration, from then on
    prompt_lengths = ()  # tokens of each of a file's prompts, from then on
    answered = 0  # conversations of a file whose last message is the assistant's, which is left out
    dropped = ""  # how many rows were too long, in words: drop_long_prompts

    def __init__(self, settings, demonstrations: bool = False):
        """settings: of settings.py. demonstrations=True: every row must have a demonstration."""
        self.settings = settings

    # A subclass defines these

    def propose(self, rng: Random) -> dict | None:
        """A random problem as a row: {"prompt": text, column: value, ...}; None if the draw gave no valid problem."""
        raise NotImplementedError

    def identity(self, row: dict) -> str:
        """The text whose hash decides the split; equal for problems that are the same to a learner (1+2, 2+1)."""
        return row["prompt"]

    def demonstration(self, row: dict, rng: Random) -> str:
        """A completion to learn from, without a stop token; wrong with probability demonstration_noise."""
        raise NotImplementedError

    def is_right(self, completion: str, *columns) -> bool:
        """Does the completion answer the problem? Must be fast and safe for any text."""
        raise NotImplementedError

    def answer_of(self, completion: str) -> str | None:
        """The completion's answer in one spelling, for majority votes; None: no answer. Fast and safe for any text.

        Two completions with the same answer to a problem are both right or both wrong.
        """
        return completion.strip() or None

    def longest_bytes(self) -> tuple[int, int]:
        """-> at least the bytes of any prompt, and of any demonstration (maybe fewer tokens: gpt2 reads 9999 as
        one)."""
        raise SnugError(f"task={self.settings.task} has no longest_bytes")

    def size(self, split: str) -> int | None:
        """How many prompts a split has before they repeat; None: not known, or no end."""
        return None

    def fingerprint(self) -> str:
        """A hash of the files or packages that the rows come from: a resumed run must not continue with other data."""
        return ""

    # Callers use these

    def longest(self, encode: Callable):
        """-> (most tokens of a prompt, most tokens of a demonstration): upper bounds. encode: text or messages -> ids.

        No token has less than a byte, so bytes bound tokens. With chat the template adds tokens: as many as to the
        content "x", and fewer than MARGIN more. Because other content may change how neighbouring template text
        ("user\\n", " [/INST]") is tokenized, and that text has fewer than MARGIN bytes up to the next special token.
        """
        prompt, answer = self.longest_bytes()
        if self.settings.chat:
            prompt += len(encode(self.as_prompt("x"))) + MARGIN
        return prompt, answer

    def prompts(self, split: str, index: Iterable[int]) -> list[dict]:
        """Rows number `index` of the split "train" or "test", each with its "prompt". Rows may repeat.

        A row depends on the task's options, the split and its number; a training row also on settings.seed. So runs
        with different seeds train on different problems and are evaluated on the same ones.
        """
        rows = [self.row(split, int(number)) for number in index]
        return [row | {"prompt": self.as_prompt(row["prompt"])} for row in rows]

    def as_prompt(self, prompt: str | list[dict]) -> str | list[dict]:
        """A row's prompt as the model gets it: text, unless settings.chat is on or it is messages already."""
        if self.settings.chat or not isinstance(prompt, str):
            return as_messages(prompt, self.settings.system_prompt)
        return prompt

    def row(self, split: str, number: int) -> dict:
        stream = {"train": f"train {self.settings.seed}", "test": "test"}[split]
        rng = Random(f"{type(self).__name__} {stream} {number}")
        for _ in range(MAX_PROPOSALS):
            row = self.propose(rng)
            if row and split_of(self.identity(row)) == split:
                return row
        raise SnugError(
            f"task={self.settings.task}: no {split} prompt in {MAX_PROPOSALS:,} tries; loosen its options"
        )

    def rewards(self, prompts: list, completions: list, **columns: list) -> list[float]:
        """1.0 for each right completion that stopped, else 0.0.

        A reward function as any other (data/rewards.py): `columns` are named as in the rows.
        Column `stopped`: which completions ended with the stop token (missing: all). Unknown columns are ignored.
        """
        texts = list(map(text_of, completions))
        stopped = columns.get("stopped", [True] * len(texts))
        right = self.are_right(texts, stopped, *(columns[name] for name in self.columns))
        return list(map(float, right))

    def are_right(self, completions: list[str], stopped: list[bool], *columns):
        """-> a boolean for each completion: stopped and right? columns: lists of the columns in `self.columns`."""
        return [
            ended and self.is_right(text, *answer)
            for text, ended, *answer in zip(completions, stopped, *columns, strict=True)
        ]

    def answers_of(self, completions: list, stopped: list[bool]) -> list[str | None]:
        """The answer of each completion; None if there is none or the completion did not stop."""
        return [
            self.answer_of(text_of(each)) if ended else None
            for each, ended in zip(completions, stopped, strict=True)
        ]

    def drop_long(self, encode: Callable, settings):
        """A task of a file drops rows that are too long, if asked to: data/rows.py."""

    def survey(self):
        """Raises SnugError if the options leave a split empty. Called before anything else."""
        for split in ("train", "test"):
            self.row(split, 0)


def split_beginning(prompt: str | list[dict]):
    """A prompt of messages that ends with the beginning of an answer -> (the messages before, this text); else ""."""
    match prompt:
        case [*asked, {"role": "assistant", "content": str(begun)}]:
            return asked, begun
    return prompt, ""


def text_of(completion: str | list[dict]) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def hash_of(identity: str) -> int:
    """CRC-32, which unlike hash() is the same in every process."""
    return zlib.crc32(identity.encode())


def split_of(identity: str):
    """-> "train" or "test"."""
    return "test" if hash_of(identity) % TEST_SHARE == 0 else "train"


def as_messages(prompt: str | list[dict], system_prompt: str) -> list[dict]:
    """Text becomes a user message. A system_prompt comes first, unless there is a system message already."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages
