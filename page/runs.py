"""What a run's folder says: log.jsonl, samples.jsonl, the [MEM] lines of log.txt, settings.json.

Nothing here imports torch: a wrong folder is answered at once. Left out: checkpoints.
"""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from options import SnugError, in_one_line
from options.typed import Fields
from runs.log import merged, read_lines

EVERY = 10  # seconds from one page of report.py --live to the next
MOST_TOKENS = 1_000_000  # of the completions in a page: about 40 MB
FIGURES = [
    "iter",
    "time_s",
    "tokens_per_second",
    "mem_alloc_mb",
    "mem_reserved_mb",
    "mem_max_alloc_mb",
]  # of a record
MEMORY_LINE = re.compile(
    r"\[MEM\] \[\w+ step (\d+)/\d+\] after (\w+): current=([\d.]+)MiB reserved=([\d.]+)MiB peak_since_reset=([\d.]+)MiB"
)


@dataclass
class Run:
    folder: Path
    name: str  # the folder's, or the whole path if runs have the same
    kind: str  # "GRPO" or "SFT"
    device: str  # "cuda" or "cpu"
    records: list[dict]  # log.jsonl; never empty
    samples: list[dict]  # samples.jsonl, or every n-th iteration of it
    left_out: int  # iterations of samples.jsonl that are not in `samples`
    memory: dict  # iteration -> {phase: (MiB allocated after it, reserved, at its peak)}
    settings: dict  # settings.json; {} if it is missing
    plan: object = None  # memory.plan.Plan, once report.py has made it

    @property
    def ended(self) -> bool:
        return self.records[-1]["iter"] + 1 >= self.settings.get("max_iters", 0)


def read_runs(folders: list[str]) -> list[Run]:
    """Raises SnugError if a folder has no log, its log no iteration, or a file is damaged."""
    names = [Path(folder).resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    most = MOST_TOKENS // len(names)
    return [
        read_run(Path(f), name if unique else str(f), most)
        for f, name in zip(folders, names, strict=True)
    ]


def first_runs(folders: list[str]) -> list[Run]:
    """`read_runs` once all have an iteration. Raises SnugError if a folder is missing."""
    for folder in folders:
        while not (log := Path(folder) / "log.jsonl").exists() or not log.stat().st_size:
            if not log.parent.is_dir():
                raise SnugError(f"{folder}: there is no such folder")
            print(f"{folder}: waiting for its first iteration", flush=True)
            time.sleep(EVERY)
    return read_runs(folders)


def read_run(folder: Path, name: str, most_tokens: int) -> Run:
    try:
        records = merged(checked(folder / "log.jsonl", FIGURES))
    except OSError as error:
        raise SnugError(
            f"{folder}: log.jsonl cannot be read ({error.strerror}); is it a run's folder?"
        ) from None
    if not records:
        raise SnugError(f"{folder}: log.jsonl has no iteration yet")
    text = text_of(folder / "log.txt")
    kind = "GRPO" if any("reward_mean" in record for record in records) else "SFT"
    device = "cuda" if re.search(r"^\w+ on .* parameters.* on cuda", text, re.MULTILINE) else "cpu"
    logged = folder / "samples.jsonl"
    samples = thinned(checked(logged, ["iter"]), most_tokens) if logged.exists() else ([], 0)
    memory = {}
    for step, phase, *sizes in MEMORY_LINE.findall(
        text
    ):  # a resumed run repeats iterations: the last counts
        if int(step) <= records[-1]["iter"]:
            memory.setdefault(int(step), {})[phase] = tuple(map(float, sizes))
    with in_one_line(f"{folder}/settings.json: cannot be read"):
        settings = json.loads(text_of(folder / "settings.json") or "{}")
    Fields(settings, f"{folder}/settings.json").get("max_iters", int, 1)
    return Run(folder, name, kind, device, records, *samples, memory, settings)


def checked(path: Path, names: Iterable[str]) -> Iterable[dict]:
    """The objects of a JSON-lines file. Raises SnugError if an iteration's first one lacks a number of these names."""
    last = None
    for number, record in enumerate(read_lines(path), start=1):
        fields = Fields(record, f"{path}:{number}")
        for name in names if last is None or record.get("iter") != last else ():
            fields.get(name, float, zero=True)
        last = record["iter"]
        yield record


def thinned(samples: Iterable[dict], most_tokens: int) -> tuple[list[dict], int]:
    """The completions of every n-th iteration and of the last one, as they are read -> those, iterations left out.

    n is a power of two, the least that leaves most_tokens.
    """
    kept, tokens, every, number, last = (
        {},
        0,
        1,
        -1,
        [],
    )  # kept: number of an iteration -> its completions
    for number, (_, its) in enumerate(groupby(samples, key=lambda sample: sample["iter"])):
        last = list(its)
        if number % every == 0:
            kept[number] = last
            tokens += tokens_of(last)
        while tokens > most_tokens and len(kept) > 1:
            every *= 2
            kept = {n: its for n, its in kept.items() if n % every == 0}
            tokens = sum(map(tokens_of, kept.values()))
    if last:
        kept[number] = last
    return [sample for its in kept.values() for sample in its], number + 1 - len(kept)


def tokens_of(samples: list[dict]) -> int:
    return sum(len(sample.get("tokens", ())) for sample in samples)


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
