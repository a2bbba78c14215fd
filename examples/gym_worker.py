"""The class that imports reasoning_gym. It lives in the processes of a Sandbox.

An item is a generator's name and a seed. It is the same in every process: Python's and numpy's global random generators
are seeded before it is made, and sets have one order (PYTHONHASHSEED of the sandbox).
"""

import copy
import functools
import random
from contextlib import suppress

import numpy
from reasoning_gym.factory import DATASETS, create_dataset

from snug.options import SnugError, described, did_you_mean, in_one_line

SPAN = 10  # items of a dataset that makes a list of them at once
CACHED = 4096  # items
LEFT_OUT = {"composite", "codeio"}  # the items of codeio come from unseeded random numbers


class Gym:
    """datasets: {generator: {option: value}}. Raises SnugError."""

    def __init__(self, datasets: dict[str, dict]):
        self.options = datasets
        self.datasets = {name: self.dataset(name, 0, SPAN) for name in datasets}
        self.item = functools.lru_cache(CACHED)(self.make_item)
        for (
            name
        ) in datasets:  # score an answer, so that late imports are done before this process forks
            with suppress(Exception):
                self.score(name, 0, self.item(name, 0)["answer"])

    def dataset(self, name: str, seed: int, size: int):
        known = sorted(DATASETS.keys() - LEFT_OUT)
        if name not in known:
            hint = did_you_mean(name, known)
            raise SnugError(
                f"gym_dataset={name!r} is not one of the {len(known)} of reasoning_gym{hint}"
            )
        options = self.options[name]
        with in_one_line(f"gym_config: {name} refuses {options}"):
            return create_dataset(name, seed=seed, size=size, **options)

    def make_item(self, name: str, seed: int) -> dict:
        """Most generators make item i from the dataset's seed + i. A generator with a list raises IndexError."""
        random.seed(seed)
        numpy.random.seed(seed)
        dataset = self.datasets[name]
        dataset.size = 2**32  # word_ladder looks at it
        try:
            return dataset[seed]
        except IndexError:
            return self.dataset(name, seed - seed % SPAN, SPAN)[seed % SPAN]

    def make(self, name: str, seed: int):
        """-> {"question": text, "answer": text or None}, or {"error": what the generator raised}."""
        try:
            item = self.item(name, seed)
        except Exception as error:
            return {"error": described(error)[:200]}
        answer = item["answer"]
        return {"question": str(item["question"]), "answer": None if answer is None else str(answer)}

    def score(self, name: str, seed: int, answer: str) -> float:
        return float(self.datasets[name].score_answer(answer, copy.deepcopy(self.item(name, seed))))
