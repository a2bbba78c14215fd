"""Tasks whose problems are the lines of a file: which are held out, the order of an epoch, and what is wrong with a line.

data_file has the training rows and test_file the held-out ones; without it one in ten of data_file's is held out, by what
identifies it. Every line is looked at before anything else is done: what is wrong is said with file and line.

Left out: files that do not fit in memory.
"""

import hashlib
import json
import random
from pathlib import Path

from data.task import Task, split_of
from options import SnugError

SHOWN = 5  # bad rows that are named; the rest are counted


class FileTask(Task):
    """A subclass knows how to read a file, and what identifies, demonstrates and answers a row."""

    wanted = ""  # what data_file should be, for whoever named none

    def read(self, path, like=None):
        """A file -> its rows, at least one. like: a row of data_file, where test_file is read. Raises SnugError."""
        raise NotImplementedError

    def __init__(self, settings):
        super().__init__(settings)
        if not settings.data_file:
            raise SnugError(f"task={settings.task!r} reads data_file: {self.wanted}")
        if settings.demonstration_noise:
            raise SnugError(
                f"demonstration_noise={settings.demonstration_noise}: demonstrations of task={settings.task!r} are as the file has them"
            )
        rows = self.read(settings.data_file)
        splits = [split_of(self.identity(row)) for row in rows]
        if settings.test_file:
            self.rows = {"test": self.read(settings.test_file, rows[0])}
            self.refuse_shared(settings, rows)
        else:
            self.rows = {"test": [row for row, split in zip(rows, splits, strict=True) if split == "test"]}
        left = [(row, split) for row, split in zip(rows, splits, strict=True) if settings.test_file or split != "test"]
        self.rows["tune"] = [row for row, split in left if self.tuning and split == "tune"]
        self.rows["train"] = [row for row, split in left if not (self.tuning and split == "tune")]
        for split, found in self.rows.items():
            if not found and (split != "tune" or self.tuning):
                remedy = "leave out eval_split=tune" if split == "tune" else "name a test_file"
                raise SnugError(
                    f"data_file={settings.data_file}: none of its {len(rows)} rows falls to the {split} split; {remedy}"
                )
        self.order, self.known = (None, []), None  # of the epoch that was asked for last; what `longest` found

    def refuse_shared(self, settings, rows):
        both = {self.identity(row) for row in rows} & {self.identity(row) for row in self.rows["test"]}
        if both:
            raise SnugError(
                f"test_file={settings.test_file} has {len(both)} prompts of data_file, such as {min(both)!r:.60}; take them out"
            )

    def row(self, split, number):
        """Training rows come epoch by epoch, each in an order of its own; test rows as the file has them. Both begin again at the end."""
        epoch, place = divmod(number, len(self.rows[split]))
        if split == "train":
            if self.order[0] != epoch:
                order = list(range(len(self.rows[split])))
                random.Random(f"{self.seed} {epoch}").shuffle(order)
                self.order = epoch, order
            place = self.order[1][place]
        return self.rows[split][place]

    def longest(self, encode):
        if self.known is None:  # a run has one tokenizer
            rows = [row for split in self.rows.values() for row in split]
            prompts = max(len(encode(self.asked(row["prompt"]))) for row in rows)
            self.known = prompts, max(len(encode(self.demonstration(row, None))) for row in rows)
        return self.known

    def fingerprint(self):
        text = json.dumps([self.rows["train"], self.rows["test"]] + [self.rows["tune"]] * self.tuning, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def survey(self):
        """Its rows were counted when they were read."""


def read_lines(path, wrong_with, like=None, remedy=""):
    """A file of JSON lines -> its values, at least one. Raises SnugError, which names the lines that are bad.

    wrong_with: (value, the first one that was right, or `like`) -> what is wrong with it, in words, or None.
    remedy: what to do where there is no such file.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        remedy = f"; {remedy}" if remedy and isinstance(error, FileNotFoundError) else ""
        raise SnugError(f"{path}: cannot be read ({error.strerror}){remedy}") from None
    rows, bad = [], []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode(), parse_constant=refuse_constant)
            wrong = wrong_with(row, like or row) or wrong_text(row)
        except (ValueError, RecursionError) as error:  # of which not being UTF-8 is one
            wrong = f"not JSON ({str(error) or type(error).__name__})"
        if wrong:
            bad.append(f"{path}:{number}: {wrong}")
        else:
            rows.append(row)
            like = like or row
    if bad:
        raise SnugError(
            "; ".join(bad[:SHOWN]) + (f"; and {len(bad) - SHOWN} more bad rows" if len(bad) > SHOWN else "")
        )
    if not rows:
        raise SnugError(f"{path}: has no rows")
    return rows


def refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


def wrong_text(row):
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "text with half a surrogate pair, which no tokenizer takes"
    return None
