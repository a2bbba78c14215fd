"""Tasks whose problems are the lines of a file: splits, epochs, and checks of each line.

data_file has the training rows and test_file the held-out rows. Without test_file, a hash of each row's identity holds
out one in ten of data_file's rows. Every line is checked before anything else; errors name file and line.

Left out: files that do not fit in memory. Tests: tests/test_jsonl.py.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data.task import Task, split_of
from options import SnugError, option

SHOWN = 5  # bad rows that an error names; it counts the rest


@dataclass
class FileOptions:
    """task=gsm8k, task=jsonl."""

    data_file: str = option(
        "", 'jsonl: a file of JSON lines, {"prompt": ..., "answer": ...}; gsm8k: its train.jsonl'
    )
    test_file: str = option("", "held-out prompts; empty: one in ten rows of data_file")


class FileTask(Task):
    """A subclass reads a file, and identifies, demonstrates and scores a row."""

    wanted = ""  # what data_file should be, for the error message if there is none

    def read(self, path: str, like: dict | None = None) -> list[dict]:
        """A file -> its rows, at least one. like: a row of data_file, when test_file is read. Raises SnugError."""
        raise NotImplementedError

    def __init__(self, settings, demonstrations=False):
        super().__init__(settings, demonstrations)
        task, path, noise = settings.task, settings.data_file, settings.demonstration_noise
        if not path:
            raise SnugError(f"task={task!r} reads data_file: {self.wanted}")
        if noise:
            source = "takes its demonstrations from the file"
            raise SnugError(f"demonstration_noise={noise}: task={task!r} {source}; leave it out")
        rows = self.read(path)
        tests = self.read(settings.test_file, rows[0]) if settings.test_file else []
        shared = {self.identity(row) for row in rows} & {self.identity(row) for row in tests}
        if shared:
            example = f"{len(shared)} prompts of data_file, such as {min(shared)!r:.60}"
            raise SnugError(f"test_file={settings.test_file} has {example}; remove them")
        self.rows = {"test": tests, "tune": [], "train": []}
        for row in rows:
            split = split_of(self.identity(row))
            held_out = split in self.splits and not (split == "test" and settings.test_file)
            self.rows[split if held_out else "train"].append(row)
        for split in self.splits:
            if not self.rows[split]:
                remedy = "leave out eval_split=tune" if split == "tune" else "name a test_file"
                raise SnugError(
                    f"data_file={path}: none of its {len(rows)} rows is in the {split} split; {remedy}"
                )
        self.epoch, self.order = (
            None,
            [],
        )  # number of the last epoch asked for, and the order of its rows
        self.bounds = None  # result of `longest`

    def row(self, split, number):
        """Training rows come epoch by epoch, each in another order; test rows in the file's order, again and again."""
        epoch, place = divmod(number, len(self.rows[split]))
        if split == "train":
            if self.epoch != epoch:
                self.epoch, self.order = epoch, list(range(len(self.rows[split])))
                random.Random(f"{self.seed} {epoch}").shuffle(self.order)
            place = self.order[place]
        return self.rows[split][place]

    def size(self, split):
        return len(self.rows[split])

    def longest(self, encode):
        if self.bounds is None:  # a run has one tokenizer
            rows = [row for split in self.rows.values() for row in split]
            prompts = max(len(encode(self.asked(row["prompt"]))) for row in rows)
            self.bounds = prompts, max(len(encode(self.demonstration(row, None))) for row in rows)
        return self.bounds

    def fingerprint(self):
        text = json.dumps([self.rows[split] for split in self.splits], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def survey(self):
        """The rows were counted when they were read."""


def read_lines(path: str, check_row: Callable, like=None, remedy: str = "") -> list:
    """A file of JSON lines -> its values, at least one. Raises SnugError that names the bad lines.

    check_row(value, first): raises ValueError if a line's value is wrong; first: `like` or the file's first good value.
    remedy: what to do if there is no such file.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        remedy = f"; {remedy}" if remedy and isinstance(error, FileNotFoundError) else ""
        raise SnugError(f"{path}: cannot be read ({error.strerror}){remedy}") from None
    rows, bad = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_line(line)
            check_row(row, like or row)
        except ValueError as error:
            bad.append(f"{path}:{number}: {error}")
        else:
            rows.append(row)
            like = like or row
    if bad:
        more = f"; and {len(bad) - SHOWN} more bad rows" if len(bad) > SHOWN else ""
        raise SnugError("; ".join(bad[:SHOWN]) + more)
    if not rows:
        raise SnugError(f"{path}: has no rows")
    return rows


def parse_line(line: bytes):
    """Raises ValueError for bytes that are not JSON, and for text that cannot be encoded (half a surrogate pair)."""
    try:
        row = json.loads(line.decode(), parse_constant=refuse_constant)
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    return row


def has_texts(value, names: set[str]) -> bool:
    """Is it an object with exactly these names, each a text?"""
    return (
        isinstance(value, dict)
        and set(value) == names
        and all(isinstance(text, str) for text in value.values())
    )


def refuse_constant(name):
    raise ValueError(f"{name} is no JSON")
