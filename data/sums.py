"""Sums for a pretrained model, as a file for task=jsonl.

    python -m data.sums > data/sums.jsonl

Each unordered pair of numbers from 2 to 49 is in one sum: no sum of the test split is a training sum turned round.
"""

import json
import random

if __name__ == "__main__":
    rng = random.Random(0)
    for x in range(2, 50):
        for y in range(2, x + 1):
            a, b = rng.sample((x, y), 2)
            print(json.dumps({"prompt": f"{a} + {b} = ?", "answer": a + b}))
