"""Tasks: what a model is asked, and whether it answered rightly. One file a task.

A task is problems without end: row 17 of a split is computed from the number 17 (or looked up: jsonl), so there is nothing to
download, to shuffle or to remember. Which split a problem belongs to is a property of the problem itself: a hash of what identifies
it, so that no training prompt is ever a test prompt, whatever the seed. "tune" is a third split, a tenth of the training problems: with
eval_split=tune a run leaves them out and is evaluated on them, so that settings can be chosen without a look at the test.

    task = make_task(settings)
    rows = task.prompts("train", range(0, 64))
    text = task.demonstration(rows[0], rng)
    task.rewards([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])

Completions are untrusted input: a task reads them by a whitelist, bounds their length first, and never evaluates them.

Left out: partial credit, rewards by another model (write a function: `load_reward_function`).
"""

import difflib
import importlib
import os
import random
import sys
import zlib

from settings import SnugError

TEST_SHARE = 10  # one problem in ten is held out, and another while settings are chosen
SURVEY = 2_000  # proposals that make_task looks at, and
SURVEY_HITS = 10  # how many of them each split needs, so that
MAX_PROPOSALS = 20_000  # proposals find a row for every index: at a rate of 10 in 2,000 they miss with probability 1e-43


class Task:
    """A kind of problem. A subclass knows how to propose one, what identifies it, how it is demonstrated and scored."""

    columns = ()  # the columns of a row that `is_right` reads, in its order

    def __init__(self, settings):
        self.seed, self.tuning = settings.seed, settings.eval_split == "tune"
        self.demonstration_noise = settings.demonstration_noise

    # What a subclass writes

    def propose(self, rng):
        """A random problem: a row, {"prompt": text, column: value, ...}; or None where chance led nowhere."""
        raise NotImplementedError

    def identity(self, row):
        """The text that decides the row's split, the same for problems that are the same to a learner (1+2, 2+1)."""
        raise NotImplementedError

    def demonstration(self, row, rng):
        """A completion to learn from, without a stop token; it errs with probability demonstration_noise. rng: random.Random."""
        raise NotImplementedError

    def is_right(self, completion, *columns):
        """Does this text, written by a model, answer the problem? Must be quick and safe for every text."""
        raise NotImplementedError

    def longest_prompt(self):
        """A prompt, in ASCII, that no other is longer than. Its length bounds every prompt's tokens, for no token is less
        than a byte; its own tokens do not, for a tokenizer that merges: gpt2 reads 9999 as one token and 6025 as two.
        """
        raise NotImplementedError

    def longest_answer(self):
        """A text, in ASCII, that no demonstration is longer than; bounds tokens as `longest_prompt` does."""
        raise NotImplementedError

    scored = True  # can it say whether a completion is right?

    def fingerprint(self):
        """Of the data that the task was read from, so that a resumed run does not go on with other data; "" where there is none."""
        return ""

    # What it gets

    def longest(self, encode):
        """Bounds on the tokens of a prompt and of a demonstration. encode: text -> ids, for tasks that know all their texts."""
        return len(self.longest_prompt()), len(self.longest_answer())

    def prompts(self, split, index):
        """Rows number `index` (an iterable of ints) of "train", "tune" or "test": a list of dicts, each with its "prompt".

        A row depends on the task's options, the split, its number and, for train alone, settings.seed: runs with
        different seeds practise different problems and are compared on the same ones. Rows may repeat.
        """
        return [self.row(split, int(number)) for number in index]

    def row(self, split, number):
        stream = {"train": f"train {self.seed}", "tune": "tune", "test": "test"}[split]
        rng = random.Random(f"{type(self).__name__} {stream} {number}")
        for _ in range(MAX_PROPOSALS):
            row = self.propose(rng)
            if row and self.belongs(self.identity(row), split):
                return row
        raise SnugError(f"task {type(self).__name__.lower()}: no {split} prompt in {MAX_PROPOSALS:,} tries; loosen its options")

    def belongs(self, identity, split):
        found = split_of(identity)
        return found == split or (split == "train" and found == "tune" and not self.tuning)

    def rewards(self, prompts, completions, **columns):
        """1.0 for each right completion, 0.0 for each other, and for one that did not stop: a list of floats.

        Called as TRL calls reward functions: prompts and completions are lists of texts, columns lists of the same
        length, named as in the rows. `stopped`, a list of bools, says which completions ended with the stop token
        (missing: all did). Columns that the task does not know are ignored.
        """
        stopped = columns.get("stopped", [True] * len(completions))
        known = [columns[name] for name in self.columns]
        return [
            float(bool(ended) and self.is_right(completion, *values))
            for completion, ended, *values in zip(completions, stopped, *known, strict=True)
        ]

    def survey(self):
        """Raises SnugError where the options leave a split (nearly) empty, before anything else is done."""
        rng = random.Random(f"{type(self).__name__} survey")
        rows = [row for row in (self.propose(rng) for _ in range(SURVEY)) if row]
        for split in ("train", "tune", "test") if self.tuning else ("train", "test"):
            hits = sum(self.belongs(self.identity(row), split) for row in rows)
            if hits < SURVEY_HITS:
                raise SnugError(
                    f"task {type(self).__name__.lower()}: its options leave too few {split} prompts ({hits} in {SURVEY:,} tries); loosen them"
                )


def split_of(identity):
    """-> "train", "tune" or "test", by the text's CRC-32, which unlike hash() is the same in every process."""
    return {0: "test", 1: "tune"}.get(zlib.crc32(identity.encode()) % TEST_SHARE, "train")


def make_task(settings):
    """The task that settings.task names, with the TaskOptions and the seed of `settings` -> Task. Raises SnugError."""
    from data.addition import Addition  # here, because they import Task from this file
    from data.countdown import Countdown
    from data.jsonl import Jsonl
    from data.reasoning_gym import ReasoningGym

    tasks = {"addition": Addition, "countdown": Countdown, "jsonl": Jsonl, "reasoning_gym": ReasoningGym}
    if settings.task not in tasks:
        raise SnugError(f"task={settings.task!r} is not one of {', '.join(tasks)}")
    task = tasks[settings.task](settings)
    task.survey()
    return task


def load_reward_function(spec):
    """The function that "module:function" names: `f(prompts, completions, **columns) -> list[float | None]`, as `Task.rewards`.

    The module is found in the current directory too. Raises SnugError where there is no such module or function; what
    goes wrong inside the module keeps its traceback.
    """
    name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in [*name.split("."), function_name]):
        raise SnugError(f"reward_funcs={spec!r}: write module:function, such as my_rewards:is_short")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file there shadows nothing
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name + ".").startswith(error.name + "."):
            raise SnugError(f"reward_funcs={spec!r}: there is no module {error.name} in {os.getcwd()} or on the Python path") from None
        raise  # it is there, and something that it imports is not
    function = getattr(module, function_name, None)
    if function is None:
        near = difflib.get_close_matches(function_name, dir(module), 1)
        raise SnugError(f"reward_funcs={spec!r}: {name} has no {function_name}" + (f"; did you mean {near[0]}?" if near else ""))
    if not callable(function):
        raise SnugError(f"reward_funcs={spec!r}: {function_name} is not a function but {function!r:.40}")
    return function
