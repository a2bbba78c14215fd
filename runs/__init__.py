"""A run's folder: its log and checkpoints, when they are written, and what is refused before torch is imported."""

from itertools import chain, count
from pathlib import Path


def free_name(path: Path) -> Path:
    """-> the first of path, path.1, path.2, ... that does not exist."""
    names = chain([path.name], (f"{path.name}.{n}" for n in count(1)))
    return next(p for p in map(path.with_name, names) if not p.exists())
