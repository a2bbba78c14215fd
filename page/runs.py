"""What a run's folder says: log.jsonl, samples.jsonl, the [MEM] lines of log.txt, settings.json.

Nothing here imports torch: a wrong folder is answered at once. Left out: checkpoints.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from options import SnugError
from runs.log import read_lines, read_log

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
    samples: list[dict]  # samples.jsonl
    memory: dict  # iteration -> {phase: (MiB allocated after it, reserved, at its peak)}
    settings: dict  # settings.json; {} if it is missing
    plan: object = None  # memory.plan.Plan, once report.py has made it

    @property
    def ended(self) -> bool:
        return self.records[-1]["iter"] + 1 >= self.settings.get("max_iters", 0)


def read_runs(folders: list[str]) -> list[Run]:
    """Raises SnugError if a folder has no log or its log no iteration."""
    names = [Path(folder).resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [read_run(Path(f), name if unique else str(f)) for f, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    try:
        records = read_log(folder)
    except OSError as error:
        raise SnugError(f"{folder}: log.jsonl cannot be read ({error.strerror}); is it a run's folder?") from None
    if not records:
        raise SnugError(f"{folder}: log.jsonl has no iteration yet")
    text = text_of(folder / "log.txt")
    kind = "GRPO" if any("reward_mean" in record for record in records) else "SFT"
    device = "cuda" if re.search(r"^\w+ on .* parameters.* on cuda", text, re.MULTILINE) else "cpu"
    samples = read_lines(folder / "samples.jsonl") if (folder / "samples.jsonl").exists() else []
    memory = {}
    for step, phase, *sizes in MEMORY_LINE.findall(text):  # a resumed run repeats iterations: the last counts
        memory.setdefault(int(step), {})[phase] = tuple(map(float, sizes))
    settings = json.loads(text_of(folder / "settings.json") or "{}")
    return Run(folder, name, kind, device, records, samples, memory, settings)


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
