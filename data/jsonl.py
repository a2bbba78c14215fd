"""Your own prompts, from a file of JSON lines.

    {"prompt": "What is 2+2?", "answer": "4"}
    {"prompt": "What is the capital of France?", "answer": "Paris", "demonstration": "It is Paris."}

prompt: text. answer: text, a number or a boolean, for the task's own reward, which wants the completion to be just that;
leave it out where reward_funcs score; then nothing is evaluated. demonstration: what train_sft.py learns, if it is not the answer. Any other
column goes to the reward functions. Every row has the same columns.

Without test_file one prompt in ten is held out, by the prompt itself. Every line is looked at before anything else is done:
what is wrong is said with file and line. Left out: files that do not fit in memory, chat messages.
"""

import hashlib
import json
import random
from pathlib import Path

from data import Task, split_of
from settings import SnugError

SHOWN = 5  # bad rows that are named; the rest are counted


class Jsonl(Task):
    def __init__(self, settings):
        super().__init__(settings)
        if not settings.data_file:
            raise SnugError("task='jsonl' reads data_file: name a file of JSON lines, such as --data_file=prompts.jsonl")
        if settings.demonstration_noise:
            raise SnugError(f"demonstration_noise={settings.demonstration_noise}: demonstrations of task='jsonl' are as the file has them")
        rows = read_rows(settings.data_file)
        if settings.test_file:
            self.rows = {"test": read_rows(settings.test_file, like=rows[0])}
            both = {row["prompt"] for row in rows} & {row["prompt"] for row in self.rows["test"]}
            if both:
                raise SnugError(
                    f"test_file={settings.test_file} has {len(both)} prompts of data_file, such as {min(both)!r:.60}; take them out"
                )
        else:
            self.rows = {"test": [row for row in rows if split_of(row["prompt"]) == "test"]}
        left = rows if settings.test_file else [row for row in rows if split_of(row["prompt"]) != "test"]
        self.rows["tune"] = [row for row in left if self.tuning and split_of(row["prompt"]) == "tune"]
        self.rows["train"] = [row for row in left if not (self.tuning and split_of(row["prompt"]) == "tune")]
        for split, found in self.rows.items():
            if not found and (split != "tune" or self.tuning):
                remedy = "leave out eval_split=tune" if split == "tune" else "name a test_file"
                raise SnugError(f"data_file={settings.data_file}: none of its {len(rows)} rows falls to the {split} split; {remedy}")
        self.scored = "answer" in rows[0]
        if not self.scored and not getattr(settings, "reward_funcs", ["SFT"]):
            raise SnugError(f"data_file={settings.data_file} has no column answer to score completions by; add it, or reward_funcs")
        if not self.scored and "demonstration" not in rows[0] and not hasattr(settings, "reward_funcs"):
            raise SnugError(f"data_file={settings.data_file} has no column demonstration, nor answer, to learn from; add one")
        self.columns = ("answer",) if self.scored else ()
        self.order, self.known = (None, []), None  # of the epoch that was asked for last; what `longest` found

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

    def demonstration(self, row, rng):
        return demonstration(row)

    def is_right(self, completion, answer=None):
        return answer is not None and completion.strip() == text_of(answer).strip()

    def longest(self, encode):
        if self.known is None:  # a run has one tokenizer
            rows = [row for split in self.rows.values() for row in split]
            self.known = max(len(encode(row["prompt"])) for row in rows), max(len(encode(demonstration(row))) for row in rows)
        return self.known

    def fingerprint(self):
        text = json.dumps([self.rows["train"], self.rows["test"]] + [self.rows["tune"]] * self.tuning, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def survey(self):
        """Its rows were counted when they were read."""


def demonstration(row):
    return row["demonstration"] if "demonstration" in row else text_of(row.get("answer", ""))


def text_of(answer):
    return answer if isinstance(answer, str) else json.dumps(answer)


def read_rows(path, like=None):
    """A file of JSON lines -> its rows. like: a row whose columns they must have too; else the first one's. Raises SnugError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SnugError(f"{path}: cannot be read ({error.strerror})") from None
    rows, bad = [], []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode(), parse_constant=refuse_constant)
            wrong = wrong_with(row, like or row)
        except (ValueError, RecursionError) as error:  # of which not being UTF-8 is one
            wrong = f"not JSON ({str(error) or type(error).__name__})"
        if wrong:
            bad.append(f"{path}:{number}: {wrong}")
        else:
            rows.append(row)
            like = like or row
    if bad:
        raise SnugError("; ".join(bad[:SHOWN]) + (f"; and {len(bad) - SHOWN} more bad rows" if len(bad) > SHOWN else ""))
    if not rows:
        raise SnugError(f"{path}: has no rows")
    return rows


def refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


def wrong_with(row, like):
    """What is wrong with a row, in words, or None."""
    if not isinstance(row, dict):
        return f'not an object but {json.dumps(row)[:40]}; write {{"prompt": ...}}'
    if not isinstance(row.get("prompt"), str) or not row["prompt"]:
        return f"prompt must be text, not {row.get('prompt')!r:.40}" if "prompt" in row else "has no prompt"
    if not isinstance(row.get("answer", ""), str | int | float):
        return f"answer must be text, a number or a boolean, not {row['answer']!r:.40}"
    if not isinstance(row.get("demonstration", ""), str):
        return f"demonstration must be text, not {row['demonstration']!r:.40}"
    missing, surplus = sorted(set(like) - set(row)), sorted(set(row) - set(like))
    if missing or surplus:
        return "other columns than the rows before: " + ", ".join([f"no {name}" for name in missing] + [f"also {name}" for name in surplus])
    for name in ("stopped", "completion_ids", "completions", "prompts"):
        if name in row:
            return f"the column {name} has the name of one that reward functions get from the sampler; rename it"
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "text with half a surrogate pair, which no tokenizer takes"
    return None
