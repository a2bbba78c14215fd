"""Typed reads of a JSON object from a file that may be wrong. Tests: tests/test_pretrained.py."""

import json
from pathlib import Path
from typing import Any

from snug.options import SnugError, in_one_line


def read_object(file: Path) -> dict:
    """The JSON object in a file. Raises SnugError."""
    with in_one_line(f"{file}: cannot be read"):
        return {**json.loads(file.read_bytes())}


class Fields:
    """Reads an object's values; `read` has their names. Raises SnugError, with file and name, for a wrong type or an
    unsupported value."""

    def __init__(self, values: dict, path: Path | str):
        """path: the file, for error messages."""
        self.values, self.path, self.read = values, path, set()

    def get(self, name: str, kind: type, default: Any = None):
        """-> the value of `name`, or `default` if it is missing. An integer may become a float."""
        self.read.add(name)
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or kind in (int, float) and not value > 0:
            raise SnugError(
                f"{self.path}: {name}={value!r:.40} is not a valid {kind.__name__}; numbers are above 0"
            )
        return value

    def want(self, name: str, *supported):
        """Raises SnugError if the value is none of `supported`. A missing one is fine."""
        self.read.add(name)
        value = self.values.get(name)
        if value is not None and value not in supported:
            raise SnugError(
                f"{self.path}: {name}={value!r:.60} is not supported; only {' or '.join(map(repr, supported))}"
            )
