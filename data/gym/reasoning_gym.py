"""reasoning_gym: any generator of the package of that name (pip install reasoning_gym).

    --task=reasoning_gym --gym_dataset=leg_counting
    --task=reasoning_gym --gym_dataset=chain_sum --gym_config='{"max_terms": 3}'

    prompt      Find the Greatest Common Divisor (GCD) of these numbers: 297, 30. Give only the GCD as your final
                answer. End with your final answer inside <answer> </answer>.
    completion  ... <answer>3</answer>

The text in the last <answer> tags goes to the generator's own scorer: reward 1.0 if it returns 1, else 0.0; with
gym_partial_credit what it returns, between 0 and 1. Several generators take turns: rows 0, 1, 2, ... come from each.

Splits. An item is a function of its seed. Training seeds are below 2 * 10**9, drawn by --seed and the row's number;
tune's begin at 3 * 10**9, the test's at 4 * 10**9. Different seeds may give the same question, so a hash of the
question holds out one in ten. Test rows differ from each other, until a generator runs out of questions (the last 200
were known) or there are 10,000; then they repeat. A test row costs ten items, so use few eval_prompts with slow
generators: knight_swap, futoshiki, zebra_puzzles, puzzle24, intermediate_integration take 0.05 to 0.4 s an item.

Generators set no bounds on lengths. Questions and answers longer than gym_max_chars, or than the longest of 100
surveyed items, are skipped in all splits.

Safety. Scorers of binary_matrix, n_queens, spiral_matrix and string_insertion eval the answer; those of countdown,
intermediate_integration, polynomial_multiplication, puzzle24 and simple_integration do so through sympy's parse_expr.
So only a child process imports the package, and scorers run in confined forks of it: data/gym/sandbox.py says what this
protects from. In version 0.1.25 game_of_life_halting accepts any text, complex_arithmetic accepts nan and coin_flip
mostly accepts 0. The survey tries such answers on each generator and warns on stderr.

Left out: the package's curricula; its generators composite and codeio (see worker.py). Tests: tests/test_gym.py.
"""

import functools
import hashlib
import importlib.util
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from data.answers import in_answer_tags
from data.gym.sandbox import Sandbox, SandboxError
from data.rows import refuse_constant
from data.task import MAX_PROPOSALS, Task
from options import SnugError, option

SURVEY = 100  # items of each generator that are looked at first
CHECKED = 5  # of these, with which the scorer is tried
CHEATS = ("?", "nan", "0")  # answers that a scorer may wrongly accept
RIGHT = 1 - 1e-9  # a score
TRAINING = 2 * 10**9  # seeds; numpy requires all seeds below 2**32
START = {"tune": 3 * 10**9, "test": 4 * 10**9}
AHEAD = 32  # held-out items made at a time
RUN_OUT = 200  # after so many known questions in a row there are no more
HELD_OUT = 10_000  # held-out rows of a generator at most
MAX_ANSWER = 10_000  # characters that a scorer is given
REQUEST = "\nEnd with your final answer inside <answer> </answer>.\n"


@dataclass
class GymOptions:
    """task=reasoning_gym."""

    gym_dataset: str = option(
        "", "a generator of the package, or several, comma-separated; their prompts take turns"
    )
    gym_config: str = option(
        "",
        'options of the generator: {"max_terms": 3}; of several: {"chain_sum": {"max_terms": 3}, "gcd": ...}',
    )
    gym_max_chars: int = option(1000, "skip longer questions and answers", "UTF-8 bytes", minimum=1)
    gym_partial_credit: bool = option(
        False, "reward: the scorer's score from 0 to 1; false: 1 if the score is 1, else 0"
    )
    gym_timeout: float = option(5.0, "time to score an answer; a later score is 0", "s", minimum=0.01)
    gym_memory_mb: int = option(2048, "memory that a scorer can allocate", "MiB", minimum=64)


@dataclass
class HeldOut:
    """A generator's tune or test rows found so far, and where to continue."""

    next_seed: int
    rows: dict[str, dict] = field(default_factory=dict)  # by prompt
    repeats: int = 0  # known questions since the last new row
    useless: int = 0  # items since the last new row


class ReasoningGym(Task):
    columns = ("item",)  # [generator, seed, the question's CRC-32]
    has_form = True

    def __init__(self, settings, demonstrations=False):
        super().__init__(settings, demonstrations)
        self.names = [name.strip() for name in settings.gym_dataset.split(",") if name.strip()]
        prefix = "task='reasoning_gym'"
        if not self.names:
            raise SnugError(
                f"{prefix} needs gym_dataset: one generator or several, such as --gym_dataset=leg_counting"
            )
        if len(set(self.names)) < len(self.names):
            raise SnugError(f"gym_dataset={settings.gym_dataset!r} names one twice")
        if importlib.util.find_spec("reasoning_gym") is None:
            raise SnugError(f"{prefix}: the package is not installed; pip install reasoning_gym")
        if self.demonstration_noise:
            noise = f"demonstration_noise={self.demonstration_noise}: {prefix}"
            raise SnugError(f"{noise} demonstrates the generator's own answers; leave it out")
        options = read_options(settings.gym_config, self.names)
        self.sandbox = open_sandbox(json.dumps(options), settings.gym_timeout, settings.gym_memory_mb)
        self.learns_answers = demonstrations
        self.partial_credit = settings.gym_partial_credit
        self.longest_question = self.longest_text = (
            settings.gym_max_chars
        )  # bytes, until the survey finds less
        self.held_out = {}  # (split, generator): HeldOut

    def row(self, split: str, number: int) -> dict:
        place, turn = divmod(number, len(self.names))
        name, place = self.names[turn], place % HELD_OUT
        if split == "train":
            rng = random.Random(f"ReasoningGym train {self.seed} {number}")
            tries = (self.rows_at(split, name, [rng.randrange(TRAINING)]) for _ in range(MAX_PROPOSALS))
            rows = next(filter(None, tries), [])  # one row
        else:
            rows = self.held_out_rows(split, name, place + 1)
        if not rows:
            tried = f"no {split} prompt of {name} in {MAX_PROPOSALS:,} tries"
            raise SnugError(f"task reasoning_gym: {tried}; raise gym_max_chars, or change gym_config")
        return rows[place % len(rows)]

    def held_out_rows(self, split: str, name: str, count: int) -> list[dict]:
        """At least `count` different rows, from consecutive seeds; fewer if no new ones come."""
        found = self.held_out.setdefault((split, name), HeldOut(START[split]))
        while len(found.rows) < count and found.repeats < RUN_OUT and found.useless < MAX_PROPOSALS:
            found.useless += AHEAD
            for row in self.rows_at(split, name, range(found.next_seed, found.next_seed + AHEAD)):
                found.repeats += 1
                if row["prompt"] not in found.rows:
                    found.rows[row["prompt"]] = row
                    found.repeats = found.useless = 0
            found.next_seed += AHEAD
        return list(found.rows.values())

    def rows_at(self, split: str, name: str, seeds: Iterable[int]) -> list[dict]:
        """The rows of these seeds that can be used and belong to the split."""
        items = [[name, seed] for seed in seeds]
        return [
            row
            for row in self.usable(items, self.ask(self.sandbox.make, items))
            if self.belongs(row, split)
        ]

    def usable(self, items: list, made: list[dict]) -> list[dict]:
        """The rows of the items that were made without error, are not too long and, for SFT, have an answer."""
        rows = []
        for item, entry in zip(items, made, strict=True):
            if "error" in entry or (entry["answer"] is None and self.learns_answers):
                continue
            question, answer = entry["question"], entry["answer"]
            if size(question) <= self.longest_question and size(answer or "") <= self.longest_text:
                rows.append(
                    {"prompt": question + REQUEST, "item": [*item, crc(question)], "answer": answer}
                )
        return rows

    def identity(self, row):
        return row["prompt"]

    def demonstration(self, row, rng):
        return f"<answer>{row['answer']}</answer>"

    def longest_prompt(self):
        return "?" * self.longest_question + REQUEST

    def longest_answer(self):
        return "<answer>" + "?" * self.longest_text + "</answer>"

    def answer_of(self, completion):
        """The text in the completion's last <answer> tags, stripped; None if there is none, or too much."""
        answer = in_answer_tags(completion)
        return answer if answer is not None and len(answer) <= MAX_ANSWER else None

    def rewards(self, prompts, completions, **columns):
        """As Task.rewards; all answers in one request, each different answer to an item once."""
        stopped = columns.get("stopped", [True] * len(completions))
        answers = [
            self.answer_of(text) if ended else None
            for text, ended in zip(completions, stopped, strict=True)
        ]
        asked = list(zip(map(tuple, columns["item"]), answers, strict=True))
        wanted = [pair for pair in dict.fromkeys(asked) if pair[1] is not None]
        known = dict(zip(wanted, self.ask(self.sandbox.score, wanted), strict=True))
        scores = [known.get(pair, 0.0) for pair in asked]
        return [
            min(max(score, 0.0), 1.0) if self.partial_credit else float(score >= RIGHT)
            for score in scores
        ]

    def is_right(self, completion, item):
        return self.rewards([""], [completion], item=[item])[0] == 1

    def survey(self):
        """Looks at SURVEY items of each generator: is it usable, and how long are its texts? Raises SnugError."""
        digest, rows = hashlib.sha256(), []
        for name in self.names:
            rng = random.Random(f"ReasoningGym survey {name}")
            items = [[name, rng.randrange(TRAINING)] for _ in range(SURVEY)]
            made = self.ask(self.sandbox.make, items)
            digest.update(json.dumps([name, made]).encode())
            self.refuse_unusable(name, made)
            found = self.usable(items, made)
            for split in self.splits:
                if not any(self.belongs(row, split) for row in found):
                    none = f"{name} leaves no {split} prompt among {SURVEY} items"
                    raise SnugError(f"task reasoning_gym: {none}; loosen gym_config")
            self.try_scorer(name, found[:CHECKED])
            rows += found
        if self.sandbox.missing:
            warn_once(
                f"scorers run without a seccomp filter ({self.sandbox.missing}), behind Python's audit hook only"
            )
        self.longest_question = max(size(row["prompt"]) for row in rows) - size(REQUEST)
        self.longest_text = max(size(row["answer"] or "") for row in rows)
        self.surveyed = digest.hexdigest()

    def refuse_unusable(self, name: str, made: list[dict]):
        items = [item for item in made if "error" not in item]
        if not items:
            raise SnugError(
                f"task reasoning_gym: {name} makes no items with this gym_config: {made[0]['error']}"
            )
        if self.learns_answers and all(item["answer"] is None for item in items):
            raise SnugError(
                f"gym_dataset={name!r}: its items have a scorer but no answer to learn from; use grpo.py"
            )
        sizes = sorted(max(size(item["question"]), size(item["answer"] or "")) for item in items)
        short = sum(most <= self.longest_question for most in sizes)
        if short < SURVEY // 10:
            raise SnugError(
                f"gym_max_chars={self.longest_question}: {short} of {len(items)} items of {name} have so few bytes; "
                f"half have up to {sizes[len(sizes) // 2]:,}, all up to {sizes[-1]:,}; raise it, or change gym_config"
            )

    def try_scorer(self, name: str, rows: list[dict]):
        """Refuses a scorer that accepts none of its generator's own answers; warns if it accepts a cheat mostly."""
        own = [(row["item"], row["answer"].strip()) for row in rows if row["answer"] is not None]
        if own and max(self.ask(self.sandbox.score, own)) < RIGHT:
            none = f"its scorer gives none of its own first {len(own)} answers a 1"
            raise SnugError(f"gym_dataset={name!r}: {none}; use another")
        for text in CHEATS:
            pairs = [(row["item"], text) for row in rows if row["answer"] != text]
            accepted = sum(score >= RIGHT for score in self.ask(self.sandbox.score, pairs))
            if len(pairs) > CHECKED // 2 and accepted > len(pairs) / 2:
                warn_once(
                    f"the scorer of {name} accepts the answer {text!r} to most questions; a policy will find that"
                )

    def fingerprint(self):
        return self.surveyed

    def ask(self, function: Callable, what: list) -> list:
        """function(what), of the sandbox; its error becomes a SnugError."""
        try:
            return function(what)
        except SandboxError as error:
            raise SnugError(f"task reasoning_gym: {error}") from None


@functools.cache
def open_sandbox(options: str, timeout: float, memory_mb: int) -> Sandbox:
    """All tasks of this process with the same options share one child."""
    return Sandbox("data.gym.worker:Gym", {"datasets": json.loads(options)}, timeout, memory_mb)


@functools.cache
def warn_once(text: str):
    print(f"reasoning_gym: {text}", file=sys.stderr)


def crc(text: str) -> int:
    return zlib.crc32(text.encode())


def size(text: str) -> int:
    return len(text.encode())


def read_options(text: str, names: list[str]) -> dict[str, dict]:
    """JSON -> {generator: {option: value}}: {"max_terms": 3}, or of several {"chain_sum": {...}}. Raises SnugError."""
    try:
        given = json.loads(text or "{}", parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        advice = 'write options such as {"max_terms": 3}'
        raise SnugError(f"gym_config={text!r:.80} is no JSON object ({error}); {advice}") from None
    options = given if len(names) > 1 else {names[0]: given}
    parts = [options, *options.values()] if isinstance(options, dict) else [options]
    if not all(isinstance(part, dict) for part in parts) or options.keys() - set(names):
        example = f'{{"{names[0]}": {{"max_terms": 3}}}}' if len(names) > 1 else '{"max_terms": 3}'
        raise SnugError(
            f"gym_config={text!r:.80} is not of {', '.join(names)}; write options such as {example}"
        )
    return {name: options.get(name, {}) for name in names}
