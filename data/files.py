"""Files of rows. The ending says what is in one: .json (a list, or lines), .csv, .parquet, otherwise JSON lines.

    read_file("prompts.csv")  # -> [("prompts.csv:2", {"prompt": "2+2=", "answer": 4}), ...]

The first line of a CSV file names the columns. A column becomes numbers if all its cells are JSON numbers. If a row has
several lines, errors name the last. Left out: files that do not fit in memory. Tests: tests/test_jsonl.py.
"""

import csv
import json
import re
from importlib.util import find_spec

from options import SnugError, find_path, in_one_line

# JSON's, as long as Python reads them.
NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,999})(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def read_file(path: str, remedy: str = ""):
    """-> (where it is, what is there) for each row; a line of JSON is not parsed yet. Raises SnugError.

    remedy: what to do if the file cannot be read.
    """
    path = find_path(path)
    kind = path.suffix.lower()
    if kind == ".csv":
        return csv_rows(path)
    with in_one_line(f"{path}: cannot be read{remedy}"):
        if kind == ".parquet":
            if not find_spec("pyarrow"):
                raise SnugError("Parquet needs a package: pip install pyarrow")
            from pyarrow.parquet import read_table

            rows = read_table(path).to_pylist()
        else:
            content = path.read_bytes()
            if kind != ".json" or not content.lstrip().startswith(b"["):
                lines = enumerate(content.split(b"\n"), start=1)
                return [(f"{path}:{number}", line) for number, line in lines if line.strip()]
            rows = json.loads(content)
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, start=1)]


def csv_rows(path):
    with in_one_line(f"{path}: cannot be read"), open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        rows = [(f"{path}:{reader.line_num}", row) for row in reader]
    for place, row in rows:
        if None in [*row, *row.values()]:
            raise SnugError(f"{place}: has not as many cells as the first line; quote cells with commas")
    for name in rows and rows[0][1]:
        if all(NUMBER.fullmatch(row[name]) for _, row in rows):
            for _, row in rows:
                row[name] = json.loads(row[name])
    return rows
