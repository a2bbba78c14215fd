"""Tasks and their rows."""

import importlib.util
import json

import pytest

from data import make_task
from settings import GRPOSettings

COUNTDOWN = "examples.countdown:Countdown"


def task_of(**options):
    return make_task(GRPOSettings(**options))


def rewards(task, rows, completions, **more):
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    return task.rewards([row["prompt"] for row in rows], completions, **columns, **more)


def letters(prompts, completions, **columns):
    """A reward that even an untrained model earns unevenly."""
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]


def written(tmp_path, rows, name="data.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return str(path)


HEAD = 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef f(x: int) -> int:\n    """Return x + 1."""\n'
BODY = "    return x + 1\n"


CHECK = "def check(candidate):\n    import math\n    assert True\n    for i in range(3):\n        assert candidate(i) == i + 1\n"
CHECK = f"LIMIT = 5\n\n{CHECK}    y = candidate(half(2))\n    assert y == math.floor(2.5)\n    assert f(LIMIT) == 6\n"
HUMAN_EVAL = dict(task_id="T/0", prompt=HEAD, entry_point="f", canonical_solution=BODY, test=CHECK)
MBPP = dict(
    text="Add one.", code=f"def f(x):\n{BODY}", test_list=["assert f(1) == 2", "assert floor(f(4)) == 5"],
    test_setup_code="from math import floor",
)  # fmt: skip


is_installed = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not is_installed, reason="reasoning_gym is not installed")
