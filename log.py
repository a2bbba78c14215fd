"""A run's folder: what happened, for people and for programs.

    settings.json   every option as it was resolved
    log.jsonl       one JSON object an iteration
    samples.jsonl   a few completions of each iteration with their rewards
    log.txt         the console's lines and the [MEM] lines: grep '^\\[MEM\\]' log.txt

The console gets one line an iteration and, in a terminal, a progress bar below them. Left out: TensorBoard, W&B, plots.
"""

import json
import os
import sys
from pathlib import Path

from tqdm import tqdm

from settings import SnugError, to_json

IS_IT_BROKEN = (
    "note: loss is 0 and ratio is 1: is it broken? No. Right after a rollout the policy is the sampler, so every ratio is 1, and a\n"
    "      group's advantages add up to 0, so over completions of equal length the loss does too (over others it is small and says\n"
    "      little). The gradient is not 0: watch grad_norm and reward_mean."
)


def prepare_folder(settings):
    """Make the run's folder. What an earlier run left there is moved aside, never overwritten -> where to, or None."""
    folder, moved = Path(settings.out_dir), None
    if folder.exists() and not folder.is_dir():
        raise SnugError(f"out_dir={settings.out_dir} is a file; name a folder")
    resumes = settings.resume == "auto" and any(folder.glob("checkpoint-*"))
    if (folder / "log.jsonl").exists() and not resumes:
        number = 1
        while (moved := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(moved)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnugError(f"out_dir={settings.out_dir} cannot be made: {error.strerror}") from None
    return moved


class RunLog:
    """The open files of a run's folder. A context manager; `iterations` drives the loop and the bar."""

    def __init__(self, settings, title, start=0):
        """title: "GRPO" or "SFT"; start: the first iteration, to which the .jsonl files of a resumed run are cut back."""
        self.folder, self.title, self.settings, self.start = Path(settings.out_dir), title, settings, start
        for name in ("log.jsonl", "samples.jsonl"):
            keep_before(self.folder / name, start)
        self.files = {name: open(self.folder / name, "a", buffering=1) for name in ("log.jsonl", "samples.jsonl", "log.txt")}
        (self.folder / "settings.json").write_text(to_json(settings))
        self.bar = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.bar is not None:
            self.bar.close()
        for file in self.files.values():
            file.close()

    def iterations(self):
        """The numbers of the iterations, with a progress bar where the console is a terminal."""
        self.bar = tqdm(
            total=self.settings.max_iters, initial=self.start, unit="it", disable=None, leave=False, dynamic_ncols=True, desc=self.title
        )
        for iteration in range(self.start, self.settings.max_iters):
            yield iteration
            self.bar.update()

    def show(self, phase):
        """What is going on, in the bar."""
        if self.bar is not None:
            self.bar.set_postfix_str(phase)

    def say(self, text):
        """A line for log.txt and the console."""
        self.note(text)
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except OSError:  # a pipe that nobody reads any more must not end the training; log.txt has the line
            sys.stdout = open(os.devnull, "w")

    def note(self, text):
        """A line for log.txt alone."""
        self.files["log.txt"].write(text + "\n")

    def memory(self, lines):
        for line in lines:
            self.note(line)

    def place(self, iteration):
        """`[GRPO step 000/079]`"""
        return f"[{self.title} step {iteration:03d}/{self.settings.max_iters - 1:03d}]"

    def iteration(self, record, samples=()):
        """One iteration's record (a dict with "iter") into log.jsonl, its samples into samples.jsonl, a line to the console."""
        self.files["log.jsonl"].write(json.dumps(record) + "\n")
        for sample in samples:
            self.files["samples.jsonl"].write(json.dumps({"iter": record["iter"]} | sample) + "\n")
        self.say(console_line(record, self.settings.max_iters))


SHOWN = (  # name in the record, what stands before and after it, format
    ("reward_mean", "reward ", "", ".3f"),
    ("reward_std", "±", "", ".2f"),
    ("loss", "loss ", "", ".4f"),
    ("kl", "kl ", "", ".4f"),
    ("entropy", "entropy ", "", ".3f"),
    ("grad_norm", "grad ", "", ".2f"),
    ("completion_length_mean", "length ", "", ".1f"),
    ("tokens_per_second", "", " tok/s", ",.0f"),
    ("mem_alloc_mb", "mem ", "", ".0f"),
    ("mem_max_alloc_mb", "peak ", " MiB", ".0f"),
    ("time_s", "", " s", ".2f"),
    ("pass_at_1", "pass@1 ", "", ".3f"),
    ("pass_at_1_sampled", "(sampled ", ")", ".3f"),
)


def console_line(record, total):
    """`iter  12/60  reward 0.43 ±0.49  loss -0.0010 ...`"""
    parts = [f"{before}{record[name]:{form}}{after}" for name, before, after, form in SHOWN if record.get(name) is not None]
    return f"iter {record['iter']:>{len(str(total))}}/{total}  " + "  ".join(parts).replace("  ±", " ±").replace("  (", " (")


def keep_before(path, start):
    """Cut a JSON-lines file back to the iterations before `start`: what a resumed run does again is not there twice."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["iter"] < start:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            break  # cut off while it was written
    whole = path.with_suffix(".tmp")
    whole.write_text("".join(line + "\n" for line in kept))
    os.replace(whole, path)


def read_log(folder):
    """log.jsonl of a run's folder -> list of dicts; a last line that was cut off is left out."""
    records = []
    for line in (Path(folder) / "log.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
