"""The small functions of data/functions.jsonl: the files are what examples/functions.py writes, and their tests are right."""

import ast
import json

import pytest

from examples.families import TRAINING
from examples.functions import body_of, choices_of, files, head_of, row_of, siblings_of
from examples.held_out import HELD_OUT

FILES = files()
TRAIN, TEST = ([json.loads(line) for line in text.splitlines()] for text in FILES.values())


def failed(code, tests):
    """-> the tests that this code of ours does not pass."""
    names, bad = {}, []
    exec(code, names)
    for test in tests:
        try:
            exec(test, names)
        except Exception:
            bad.append(test)
    return bad


def is_plain(value):
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return type(value) in (int, str, bool, type(None), list, tuple, dict) and all(map(is_plain, inner))


def test_the_files_are_what_the_example_writes():
    for path, text in FILES.items():
        assert path.read_text() == text, f"python -m examples.functions writes another {path.name}"


def test_solutions_pass_tests_of_plain_values():
    for row in TRAIN + TEST:
        assert not failed(row["prompt"] + row["canonical_solution"], row["tests"]), row
        assert 6 <= len(set(row["tests"])) == len(row["tests"]) <= 8
        results = set()
        for test in row["tests"]:
            compare = ast.parse(test).body[0].test
            assert compare.left.func.id == row["entry_point"]
            values = [ast.literal_eval(each) for each in (*compare.left.args, *compare.comparators)]
            assert is_plain(values)
            results.add(repr(values[-1]))
        assert len(results) > 1, f"a constant passes {row}"


@pytest.mark.parametrize("family", TRAINING + HELD_OUT, ids=lambda family: family.signature)
def test_siblings_fail(family):
    """One that reads past a twist of the docstring does not pass."""
    for choice in choices_of(family)[::5]:
        row = row_of(family, choice)
        for sibling in siblings_of(family, choice):
            assert failed(head_of(family) + body_of(family, sibling), row["tests"]), (choice, sibling)


def test_no_family_is_in_both_files():
    assert not {row["family"] for row in TRAIN} & {row["family"] for row in TEST}
    assert len({row["prompt"] for row in TRAIN + TEST}) == len(TRAIN + TEST) == 477
