"""The part of task reasoning_gym that imports the package. It runs only in the child process of data/gym/sandbox.py.

An item is [generator, seed]. Its entry is what the generator makes of the seed, the same in every process: Python's and
numpy's global random generators are seeded too, and sets have one order (PYTHONHASHSEED in the child).
"""

import copy
import functools
import random
import zlib
from contextlib import suppress
from importlib.metadata import version

import numpy
from reasoning_gym.factory import DATASETS, create_dataset

from options import did_you_mean

SPAN = 10  # items of a dataset that lists all of them when it is made
CACHED = 4096  # entries
NOT_HERE = {
    "composite": "name its parts instead: gym_dataset takes several",
    "codeio": "its items come from programs that draw unseeded random numbers, so they are not the same twice",
}


class Gym:
    """datasets: {generator: {option: value}}. Raises ValueError, in one line."""

    def __init__(self, datasets: dict[str, dict]):
        for name, options in datasets.items():
            refuse_unknown(name, options)
        self.options = datasets
        self.datasets = {name: self.dataset(name, 0, SPAN) for name in datasets}
        self.warm = set()
        self.entry = functools.lru_cache(CACHED)(self.generate)

    def dataset(self, name: str, seed: int, size: int):
        options = self.options[name]
        try:
            return create_dataset(name, seed=seed, size=size, **options)
        except Exception as error:
            raise ValueError(
                f"gym_config: {name} refuses {options} ({type(error).__name__}: {error})"
            ) from None

    def generate(self, name: str, seed: int) -> dict:
        """Most generators make item i from the dataset's seed + i, whatever its size. Listed items raise IndexError."""
        random.seed(seed)
        numpy.random.seed(seed)
        dataset = self.datasets[name]
        dataset.size = 2**32  # word_ladder looks at it
        try:
            return dataset[seed]
        except IndexError:
            return self.dataset(name, seed - seed % SPAN, SPAN)[seed % SPAN]

    def make(self, item: list) -> dict:
        """[generator, seed] -> {"question": text, "answer": text or None}, or {"error": what the generator raised}."""
        try:
            entry = self.entry(*item)
            answer = entry["answer"]
            return {
                "question": str(entry["question"]),
                "answer": answer if answer is None else str(answer),
            }
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:200]}

    def prepare(self, item: list) -> tuple[str, dict]:
        """[generator, seed, CRC-32 of the question that was asked] -> (generator, entry)."""
        name, seed, check = item
        entry = self.entry(name, seed)
        if zlib.crc32(str(entry["question"]).encode()) != check:
            raise ValueError(
                f"{name} has made another item of the seed {seed} than before; it cannot be scored"
            )
        if (
            name not in self.warm
        ):  # score the generator's own answer once, so that late imports are done before forks
            with suppress(Exception):
                self.datasets[name].score_answer(entry["answer"], copy.deepcopy(entry))
            self.warm.add(name)
        return name, entry

    def score(self, prepared: tuple[str, dict], answer: str) -> float:
        name, entry = prepared
        return self.datasets[name].score_answer(answer, copy.deepcopy(entry))


def refuse_unknown(name: str, options: dict):
    if name in NOT_HERE:
        raise ValueError(f"gym_dataset={name!r}: {NOT_HERE[name]}")
    if name not in DATASETS:
        known = [other for other in DATASETS if other not in NOT_HERE]
        hint = did_you_mean(name, known) or f", such as {', '.join(sorted(known)[:5])}"
        package = f"the {len(known)} of reasoning_gym {version('reasoning_gym')}"
        raise ValueError(f"gym_dataset={name!r} is not one of {package}{hint}")
    defaults = {
        option: value
        for option, value in vars(DATASETS[name][1]()).items()
        if option not in ("seed", "size")
    }
    takes = ", ".join(f"{option}={value!r:.40}" for option, value in defaults.items()) or "no options"
    for option in options:
        if option not in defaults:
            raise ValueError(f"gym_config: {name} has no option {option!r}; it takes {takes}")
