"""Typed reads of a JSON object from a file that may be wrong. Tests: tests/test_pretrained.py."""

from pathlib import Path
from typing import Any

from snug.options import SnugError

LIMIT = 2**63  # what torch can count


class Fields:
    """Reads an object's values. Raises SnugError, with file and name, for a wrong type or an unsupported value."""

    def __init__(self, values: dict, path: Path | str):
        """path: the file, for error messages. Raises SnugError if `values` is not an object."""
        if type(values) is not dict:
            raise SnugError(f"{path}: {values!r:.40} is not an object")
        self.values, self.path = values, path
        self.read, self.parts = set(), {}

    def part(self, name: str) -> "Fields":
        """The object `name`, empty if it is missing."""
        values = self.get(name, dict, {})
        return self.parts.setdefault(name, Fields(values, f"{self.path}: {name}"))

    def unread(self) -> set:
        """-> the names that nobody asked for, also those in parts; not those that are null."""
        names = {name for name, value in self.values.items() if value is not None} - self.read
        for name, part in self.parts.items():
            names |= {f"{name}.{inner}" for inner in part.unread()}
        return names

    def get(self, name: str, kind: type, default: Any = None):
        """-> the value of `name`, or `default` if it is missing. An integer may become a float."""
        self.read.add(name)
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        fits = type(value) is kind or kind is float and type(value) is int
        if fits and kind in (int, float):
            fits = 0 < value < LIMIT
        if not fits:
            raise SnugError(
                f"{self.path}: {name}={value!r:.40} is not a valid {kind.__name__}; numbers are above 0 and below 2**63"
            )
        return float(value) if kind is float else value

    def want(self, name: str, *supported):
        """Raises SnugError if the value is none of `supported`. A missing one is fine."""
        self.read.add(name)
        value = self.values.get(name)
        if value is not None and value not in supported:
            only = " or ".join(map(repr, supported))
            raise SnugError(f"{self.path}: {name}={value!r:.60} is not supported; only {only}")
