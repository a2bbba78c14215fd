"""Files of rows. The ending says what is in one: .csv, .tsv, .parquet; otherwise JSON, packed if it is .gz.

    read_file(Path("prompts.csv"))  # -> [("prompts.csv:2", {"prompt": "2+2=", "answer": 4}), ...]

JSON: lines, one list of rows, or {"data": a list of rows}.

The first line of a CSV file names the columns. If it has more semicolons or tabs than commas, these separate the cells.
A column becomes numbers if all its cells are JSON numbers. If a row of CSV has several lines, errors name the last.

Left out: files that do not fit in memory. Tests: tests/test_jsonl.py.
"""

import csv
import gzip
import io
import json
import re
from contextlib import suppress
from pathlib import Path

from snug.options import SnugError, in_one_line

# JSON's, as long as Python reads them.
NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,999})(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def read_file(path: Path, remedy: str = ""):
    """-> (where it is, what is there) for each row. Raises SnugError.

    remedy: what to do if the file cannot be read.
    """
    kind = path.suffix.lower()
    with in_one_line(f"{path}: cannot be read{remedy}"):
        if kind == ".parquet":
            from pyarrow.parquet import read_table

            return numbered(path, read_table(path).to_pylist())
        content = path.read_bytes()
        if kind == ".gz":
            content = gzip.decompress(content)
    try:
        text = content.decode(json.detect_encoding(content))  # UTF-8, or UTF-16 as Windows writes it
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        advice = f"if it is Latin-1: iconv -f latin1 -t utf-8 {str(path)!r} > utf8{kind}"
        raise SnugError(f"{path}:{line}: is not UTF-8; {advice}") from None
    if kind in (".csv", ".tsv"):
        return csv_rows(path, text)
    if text.lstrip().startswith("["):
        with in_one_line(f"{path}: not JSON"):
            return numbered(path, json.loads(text))
    with suppress(ValueError, RecursionError):  # lines
        match json.loads(text):
            case {"data": [*rows], **others} if not others:
                return numbered(path, rows)
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with in_one_line(f"{path}:{number}: not JSON"):
                rows.append((f"{path}:{number}", json.loads(line)))
    return rows


def numbered(path, rows):
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, start=1)]


def csv_rows(path, text):
    separator = max(",;\t", key=text.partition("\n")[0].count)
    with in_one_line(f"{path}: cannot be read"):
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        rows = [(f"{path}:{reader.line_num}", row) for row in reader]
    for place, row in rows:
        row.pop("", None)  # Excel writes commas after the last column
        if None in row or None in row.values():
            raise SnugError(
                f"{place}: has not as many cells as the first line; quote cells with commas"
            )
    for name in {*(reader.fieldnames or ())} - {""}:
        if all(NUMBER.fullmatch(row[name]) for _, row in rows):
            for _, row in rows:
                row[name] = json.loads(row[name])
    return rows
