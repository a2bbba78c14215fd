"""What a run's folder says: settings.json, log.jsonl, samples.jsonl.

Nothing here imports torch, so a wrong folder is refused at once. Left out: what is in checkpoints.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from runs.checkpoint import refuse_missing
from runs.log import read_lines, read_log
from settings import GRPOSettings
from snug.options import SnugError, in_one_line

PHASES = ("rollout", "reward", "reference", "teacher", "train", "optimizer", "eval")  # of an iteration
MOST_BYTES = 40_000_000  # of samples.jsonl in a page


@dataclass
class Run:
    folder: Path  # as it was given: the run's name
    settings: dict  # settings.json
    records: list[dict]  # log.jsonl; never empty
    samples: list[dict]  # samples.jsonl: every n-th iteration and the last one
    every: int  # this n

    @property
    def kind(self) -> str:
        return "GRPO" if "group_size" in self.settings else "SFT"

    @property
    def ended(self) -> bool:
        return self.records[-1]["iter"] + 1 >= self.settings["max_iters"]


def read_runs(folders):
    """Raises SnugError if a folder has no log, if a log has no iteration, or if a file is damaged."""
    return [read_run(Path(folder), MOST_BYTES // len(folders)) for folder in folders]


def read_run(folder, most_bytes: int) -> Run:
    """most_bytes: of samples.jsonl. A larger file is thinned to every n-th iteration."""
    refuse_missing(folder)
    with in_one_line(f"{folder}: log.jsonl, settings.json or samples.jsonl cannot be read"):
        records = read_log(folder)
        if not records:
            raise SnugError("log.jsonl has no iteration yet")
        settings = json.loads((folder / "settings.json").read_text())
        file, last = folder / "samples.jsonl", records[-1]["iter"]
        every = max(1, -(-file.stat().st_size // most_bytes))
        samples = [s for s in read_lines(file) if s["iter"] % every == 0 or s["iter"] == last]
    return Run(folder, settings, records, samples, every)


def logged(records, name):
    """The values of a figure, without the iterations that lack it."""
    return [record[name] for record in records if record.get(name) is not None]


def options_of(runs):
    """Rows of cells, one for each run: what differs in any run from a GRPO run's defaults."""
    defaults, rows = vars(GRPOSettings()), []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        default = defaults.get(name)
        if any(run.settings.get(name, default) != default for run in runs):
            values = [run.settings.get(name, "-") for run in runs]
            rows.append([name, *[v if isinstance(v, str) else json.dumps(v) for v in values]])
    return rows


def logged_names(runs, start: str):
    """The figures whose names begin so."""
    names = dict.fromkeys(name for run in runs for record in run.records for name in record)
    return [name for name in names if name.startswith(start)]
