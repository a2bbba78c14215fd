"""Tasks whose problems are the rows of a file: splits, epochs, and checks of each row.

data_file has the training rows and test_file the held-out rows. Without test_file, a hash of each row's identity holds
out one in ten of data_file's rows; with eval_prompts=0 none. In a small file, the next rows in the order of their
hashes are held out too, until these are a fifth or ENOUGH: of 30 rows with one in the tenth, 5 more. An environment
makes several problems of one prompt: there other columns decide too.

Every row is checked before anything else; errors name file and line. files.py says what a file may be.
Tests: tests/test_jsonl.py.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from functools import lru_cache

from data.files import read_file
from data.task import Task, hash_of, split_of
from snug.options import SnugError, find_path, in_one_line, option
from snug.options.progress import counted, phase

ENOUGH = 20  # test rows


@dataclass
class FileOptions:
    """Options of every task whose rows are in a file."""

    data_file: str = option(
        "",
        'jsonl: JSON lines, {"prompt": ..., "answer": ...}, or .json, .parquet; gsm8k: its train.jsonl',
    )
    test_file: str = option(
        "", "held-out prompts; empty: a tenth of data_file's rows, more of a small file"
    )
    drop_long_prompts: bool = option(
        False,
        "drop rows whose prompt is longer than max_prompt_length or, if that is 0, leaves no room in block_size for "
        "its completion",
    )


class Row(dict):
    """A row of a file."""

    place = ""  # such as prompts.jsonl:3


class FileTask(Task):
    """A subclass checks, identifies, demonstrates and scores a row."""

    options = FileOptions
    remedy = ""  # what to do if it cannot be read

    def row_of(self, value) -> dict:
        """What a file has for a row -> the row. Raises ValueError if it is wrong."""
        raise NotImplementedError

    def earlier(self, row: Row) -> list[Row]:
        """What SFT learns of a training row besides. What is held out is not learned as a part of another row."""
        return []

    def problem(self, row) -> str:
        """The text whose hash decides the split."""
        others = {name: row[name] for name in row if name not in ("prompt", "demonstration")}
        return self.identity(row) + json.dumps(others, sort_keys=True) * bool(self.settings.environment)

    @phase("reading the data")
    def read(self, path: str):
        """A file -> its rows, at least one. Raises SnugError."""
        rows = []
        for place, value in read_file(find_path(path, self.settings.out_dir), self.remedy):
            with in_one_line(f"{place}: not JSON"):
                # Not possible with a date, or with half of a surrogate pair.
                json.dumps(value, ensure_ascii=False).encode()
            try:
                row = Row(self.row_of(value))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
                raise SnugError(f"{place}: {error}") from None
            row.place = place
            rows.append(row)
        if not rows:
            raise SnugError(f"{path}: has no rows")
        return rows

    def __init__(self, settings, demonstrations=False):
        super().__init__(settings, demonstrations)
        path = settings.data_file
        if settings.test_file and not settings.max_iters:
            if not find_path(path, settings.out_dir).is_file():
                path = settings.test_file  # nothing is trained, and the training file is somewhere else
        if not path:
            raise SnugError(
                f"task={settings.task!r} needs data_file, such as --data_file=prompts.jsonl{self.remedy}"
            )
        rows = train = self.read(path)
        test = []
        if settings.test_file:
            test = self.read(settings.test_file)
            shared = {*map(self.problem, train)} & {*map(self.problem, test)}
            if shared and (settings.max_iters or path != settings.test_file):
                raise SnugError(
                    f"test_file={settings.test_file} has {len(shared)} prompts of data_file, such as "
                    f"{min(shared)!r:.60}; remove them"
                )
        elif settings.eval_prompts:
            ranks = [(split_of(text), hash_of(text)) for text in map(self.problem, rows)]  # test first
            held_out = {*sorted(ranks)[: min(len(rows) // 5, ENOUGH)]} | {
                rank for rank in ranks if rank[0] == "test"
            }
            ranked = [*zip(rows, ranks, strict=True)]
            train = [row for row, rank in ranked if rank not in held_out]
            test = [row for row, rank in ranked if rank in held_out]
        tested = {*map(self.problem, test)}
        earlier = [part for row in train for part in self.earlier(row)]
        train = train + [part for part in earlier if self.problem(part) not in tested]
        self.rows = {"train": train, "test": test}
        # A row has None where it lacks a column of others.
        self.blank = dict.fromkeys(name for row in rows + test for name in row)
        self.data = dict(self.rows)  # for the fingerprint, with the rows that are dropped later
        self.file = path

    def drop_long(self, encode, settings):
        """drop_long_prompts. A completion has max_new_tokens or, for SFT, the demonstration and a stop token."""
        if not settings.drop_long_prompts:
            return
        room = settings.max_prompt_length or settings.block_size - (settings.max_new_tokens or 1)
        parts = 1 if settings.max_new_tokens else 2
        count = 0
        for split, rows in self.data.items():
            self.rows[split] = [row for row in rows if sum(self.tokens(row, encode)[:parts]) <= room]
            count += len(rows) - len(self.rows[split])
        self.dropped = f", {count:,} too long and dropped"
        self.survey()

    def tokens(self, row, encode):
        """-> how many its prompt and its demonstration have."""
        answer = encode(self.demonstration(row, None), special=False)
        return len(encode(self.as_prompt(row["prompt"]))), len(answer)

    def row(self, split, number):
        """Training rows come epoch by epoch, each in another order; test rows in the file's order, again and again."""
        rows = self.rows[split]
        if not rows:  # sample.py after a run without evaluations
            raise SnugError(f"data_file={self.file}: no row is held out; give --prompt=...")
        epoch, place = divmod(number, len(rows))
        if split == "train":
            place = shuffled(len(rows), f"{self.settings.seed} {epoch}")[place]
        return self.blank | rows[place]

    def size(self, split):
        return len(self.rows[split])

    def longest(self, encode):
        if not self.prompt_lengths:  # a run has one tokenizer
            rows = self.rows["train"] + self.rows["test"]
            counts = [self.tokens(row, encode) for row in counted(rows, "prompts", "reading")]
            self.longest_row = max(map(sum, counts))
            prompts, self.answer_lengths = zip(*counts, strict=True)
            self.longest_at = rows[prompts.index(max(prompts))].place
            self.prompt_lengths = prompts
        return max(self.prompt_lengths), max(self.answer_lengths)

    def fingerprint(self):
        return hashlib.sha256(json.dumps([*self.data.values()], sort_keys=True).encode()).hexdigest()

    def survey(self):
        for split, rows in self.rows.items():
            if not rows and (split == "train" or self.settings.eval_prompts):
                problems = {*map(self.problem, sum(self.data.values(), []))}
                raise SnugError(
                    f"{self.file}: no row is in the {split} split{self.dropped} (different prompts: {len(problems)}); "
                    "name a test_file, or eval_prompts=0"
                )


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def shuffled(count: int, seed: str) -> list[int]:
    """The numbers below `count` in random order."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers
