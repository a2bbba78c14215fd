"""Lookup: say the number that belongs to a key. It cannot be computed or remembered: only the tool `get` knows it.

    prompt      4821=
    completion  <get>4821</get><result>7310</result>7310

    python grpo.py config/grpo_lookup.py

The tool writes <result>7310</result>. Without it the model can only guess. A run without it shows that: --tools=
"""

import hashlib
import random

from snug import Task


def get(key: str) -> str:
    """Look up the number that belongs to a key.

    Args:
        key: four digits
    """
    return f"{int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10_000:04}"


class Lookup(Task):
    columns = ("answer",)

    def propose(self, rng: random.Random) -> dict:
        key = f"{rng.randrange(10_000):04}"
        return {"prompt": f"{key}=", "key": key, "answer": get(key)}

    def identity(self, row: dict) -> str:
        return row["key"]

    def demonstration(self, row: dict, rng: random.Random) -> str:
        if rng.random() < self.settings.demonstration_noise:
            return f"{rng.randrange(10_000):04}"
        return f"<get>{row['key']}</get><result>{row['answer']}</result>{row['answer']}"

    def is_right(self, completion: str, answer: str) -> bool:
        return completion == answer

    def longest_bytes(self):
        return len("9999="), len("<get>9999</get><result>9999</result>9999")
