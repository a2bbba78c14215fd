"""Files of rows: lines of JSON, or one JSON list, perhaps packed (.gz); or Parquet (.parquet).

    read_file(Path("prompts.jsonl"))  # -> [("prompts.jsonl:1", {"prompt": "2+2=", "answer": 4}), ...]

Left out: files that do not fit in memory; CSV, which has no types. Tests: tests/test_jsonl.py.
"""

import gzip
import json
from pathlib import Path

from snug.options import in_one_line


def read_file(path: Path, remedy: str = ""):
    """-> (where it is, what is there) for each row. Raises SnugError.

    remedy: what to do if the file cannot be read.
    """
    with in_one_line(f"{path}: cannot be read{remedy}"):
        if path.suffix == ".parquet":
            from pyarrow.parquet import read_table

            return numbered(path, read_table(path).to_pylist())
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    if text.lstrip().startswith("["):
        with in_one_line(f"{path}: not JSON"):
            return numbered(path, json.loads(text))
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with in_one_line(f"{path}:{number}: not JSON"):
                rows.append((f"{path}:{number}", json.loads(line)))
    return rows


def numbered(path, rows):
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, start=1)]
