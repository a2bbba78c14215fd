"""The side of task reasoning_gym that imports the package: it runs in the child of data/sandbox.py alone.

An item is [generator, index]. Its entry is what the generator makes of the seed `index`, every time and in every process: generators
that ask Python's or numpy's global random numbers instead get those seeded, and sets come in one order (PYTHONHASHSEED, in the child).
"""

import copy
import dataclasses
import difflib
import functools
import random
import zlib
from contextlib import suppress
from importlib.metadata import version

import numpy
from reasoning_gym.factory import DATASETS, create_dataset

SPAN = 10  # items of a dataset that lists all of them when it is made


CACHED = 4096  # entries


NOT_HERE = {
    "composite": "name its parts instead: gym_dataset takes several",
    "codeio": "its items come out of programs that draw unseeded random numbers, so that they are not the same twice",
}


class Gym:
    """datasets: {generator: {option: value}}. Raises ValueError, in one line."""

    def __init__(self, datasets):
        for name, options in datasets.items():
            refuse_unknown(name, options)
        self.options = datasets
        self.datasets = {name: self.dataset(name, 0, SPAN) for name in datasets}
        self.warm = set()
        self.entry = functools.lru_cache(CACHED)(self.generate)

    def dataset(self, name, seed, size):
        try:
            return create_dataset(name, seed=seed, size=size, **self.options[name])
        except Exception as error:
            raise ValueError(
                f"gym_config: {name} refuses {self.options[name]} ({type(error).__name__}: {error})"
            ) from None

    def generate(self, name, index):
        """Most generators make item i from the seed `seed + i`, whatever the size. Those that list theirs beforehand raise IndexError."""
        random.seed(index)
        numpy.random.seed(index)
        dataset = self.datasets[name]
        dataset.size = 2**32  # word_ladder looks
        try:
            return dataset[index]
        except IndexError:
            return self.dataset(name, index - index % SPAN, SPAN)[index % SPAN]

    def make(self, item):
        """[generator, index] -> {"question": text, "answer": text or None}, or {"error": what the generator raised}."""
        try:
            entry = self.entry(*item)
            answer = entry["answer"]
            return {"question": str(entry["question"]), "answer": answer if answer is None else str(answer)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:200]}

    def prepare(self, item):
        """[generator, index, the question's CRC-32] -> (generator, entry). The number is of the question that was asked."""
        name, index, check = item
        entry = self.entry(name, index)
        if zlib.crc32(str(entry["question"]).encode("utf-8", "surrogatepass")) != check:
            raise ValueError(f"{name} has made another item of the seed {index} than before; it cannot be scored")
        if (
            name not in self.warm
        ):  # so that imports it puts off are done before there are forks; the answer is the generator's own
            with suppress(Exception):
                self.datasets[name].score_answer(entry["answer"], copy.deepcopy(entry))
            self.warm.add(name)
        return name, entry

    def score(self, prepared, answer):
        name, entry = prepared
        return self.datasets[name].score_answer(answer, copy.deepcopy(entry))


def refuse_unknown(name, options):
    """The generator, and its options, by name."""
    if name in NOT_HERE:
        raise ValueError(f"gym_dataset={name!r}: {NOT_HERE[name]}")
    if name not in DATASETS:
        known = [other for other in DATASETS if other not in NOT_HERE]
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else f", such as {', '.join(sorted(known)[:5])}"
        raise ValueError(
            f"gym_dataset={name!r} is not one of the {len(known)} of reasoning_gym {version('reasoning_gym')}{hint}"
        )
    fields = [field for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    takes = ", ".join(f"{field.name}={default_of(field)!r:.40}" for field in fields) or "no options"
    for option in options:
        if option in ("seed", "size"):
            raise ValueError(f"gym_config: {option} of {name} is not yours to set: rows come from --seed, without end")
        if option not in [field.name for field in fields]:
            raise ValueError(f"gym_config: {name} has no option {option!r}; it takes {takes}")


def default_of(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
