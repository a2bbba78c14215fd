"""reasoning_gym: any generator of the package of that name, by name (pip install reasoning_gym).

    --task=reasoning_gym --gym_dataset=leg_counting
    --task=reasoning_gym --gym_dataset=chain_sum,gcd --gym_config=chain_sum.max_terms=3,gcd.max_numbers=3

    prompt      Find the Greatest Common Divisor (GCD) of these numbers: 297, 30. Give only the GCD as your final answer.
                End with your final answer inside <answer> </answer>.
    completion  ... <answer>3</answer>

What stands in the last <answer> tags of a completion is given to the generator's own scorer: 1.0 where that says 1, else 0.0, or with
gym_partial_credit whatever it says, between 0 and 1. Of several generators, rows number 0, 1, 2, ... come from each in turn.

Splits. An item is a function of its seed, a number on one line. Training rows are drawn from the first 2 * 10**9 places by --seed and the
row's number, tune's stand from 3 * 10**9 on and the test's from 4 * 10**9 on. Other seeds may give the same question, so what decides
is the question: a hash of its text holds out one in ten, as in every task. Test rows are also different from each other, until a
generator has run out of questions (200 of the test's in a row were known) or there are 10,000 of it: then they begin again at the first.
A test row costs the making of ten items, so take fewer eval_prompts of slow generators: knight_swap, futoshiki, zebra_puzzles, puzzle24 and
intermediate_integration take 0.05 to 0.4 s for one.

Lengths. Generators have no bounds, so questions and answers that are longer than the longest of a survey of 100 items, or than
gym_max_chars, are passed over in all splits.

Safety. Scorers of binary_matrix, n_queens, spiral_matrix and string_insertion give the answer to eval; those of countdown,
intermediate_integration, polynomial_multiplication, puzzle24 and simple_integration give it to sympy's parse_expr, which is the same; and
what others do with odd text is nobody's promise. So everything that imports the package runs in a child process that can be killed, and
scorers in confined forks of it: data/sandbox.py says against what, and what it does not protect from. An answer that takes longer than
gym_timeout has 0.0.

Not all scorers are sound. In version 0.1.25 game_of_life_halting says 1 of any text, complex_arithmetic of nan and coin_flip mostly of 0.
The survey tries such answers on each generator and says on stderr where they are taken.

Left out: the package's curricula; its generators composite and codeio (data/gym/worker.py says why).
"""

import functools
import hashlib
import importlib.util
import json
import random
import sys
import zlib

from data.answers import in_answer_tags
from data.gym.sandbox import Sandbox, SandboxError
from data.rows import refuse_constant
from data.task import MAX_PROPOSALS, Task
from options import SnugError

SURVEY = 100  # items of each generator that are looked at before anything else


CHECKED = 5  # of these, with which the scorer is tried


CHEATS = ("?", "nan", "0")  # answers that a scorer may fall for


RIGHT = 1 - 1e-9  # a score


TRAINING = 2 * 10**9  # places; below 2**32 everywhere, because numpy's seeds are


START = {"tune": 3 * 10**9, "test": 4 * 10**9}


AHEAD = 32  # held-out items made at a time


RUN_OUT = 200  # held-out questions in a row that were known: there are no more


HELD_OUT = 10_000  # held-out rows of a generator at most


MAX_ANSWER = 10_000  # characters that a scorer is given


REQUEST = "\nEnd with your final answer inside <answer> </answer>.\n"


class ReasoningGym(Task):
    columns = ("item",)

    def __init__(self, settings):
        super().__init__(settings)
        self.names = [name.strip() for name in settings.gym_dataset.split(",") if name.strip()]
        if not self.names:
            raise SnugError(
                "task='reasoning_gym' practises gym_dataset: name one or several, such as --gym_dataset=leg_counting"
            )
        if len(set(self.names)) < len(self.names):
            raise SnugError(f"gym_dataset={settings.gym_dataset!r} names one twice")
        if importlib.util.find_spec("reasoning_gym") is None:
            raise SnugError("task='reasoning_gym': the package is not installed; pip install reasoning_gym")
        if self.demonstration_noise:
            raise SnugError(
                f"demonstration_noise={self.demonstration_noise}: demonstrations of task='reasoning_gym' are the generator's own"
            )
        options = read_options(settings.gym_config, self.names)
        self.sandbox = open_sandbox(json.dumps(options), settings.gym_timeout, settings.gym_memory_mb)
        self.learns_answers = not hasattr(settings, "reward_funcs")  # SFT
        self.partial_credit = settings.gym_partial_credit
        self.longest_question = self.longest_text = settings.gym_max_chars  # until the survey has found less
        self.found = {}  # (split, generator): Found

    # Rows

    def row(self, split, number):
        place, turn = divmod(number, len(self.names))
        name = self.names[turn]
        if split != "train":
            return self.held_out_row(split, name, place % HELD_OUT)
        rng = random.Random(f"ReasoningGym train {self.seed} {number}")
        for _ in range(MAX_PROPOSALS):
            row = self.rows_at(name, [rng.randrange(TRAINING)])[0]
            if row and self.belongs(self.identity(row), "train"):
                return row
        raise self.no_rows(split, name)

    def held_out_row(self, split, name, place):
        """Looks on along the line of seeds until there are so many different rows, or no new ones."""
        found = self.found.setdefault((split, name), Found(START[split]))
        while len(found.rows) <= place and found.known < RUN_OUT and found.barren < MAX_PROPOSALS:
            for row in self.rows_at(name, range(found.next, found.next + AHEAD)):
                found.take(row if row and self.belongs(self.identity(row), split) else None)
            found.next += AHEAD
        if not found.rows:
            raise self.no_rows(split, name)
        return found.rows[place % len(found.rows)]

    def no_rows(self, split, name):
        return SnugError(
            f"task reasoning_gym: no {split} prompt of {name} in {MAX_PROPOSALS:,} tries; raise gym_max_chars, or change gym_config"
        )

    def rows_at(self, name, places):
        """Items at these places of the seeds' line -> rows; None where there is none, or one that is too long."""
        return [
            self.row_of(name, place, made)
            for place, made in zip(places, self.ask("make", [[name, place] for place in places]), strict=True)
        ]

    def row_of(self, name, place, made):
        if "error" in made or (made["answer"] is None and self.learns_answers):
            return None
        question, answer = made["question"], made["answer"]
        if size(question) > self.longest_question or size(answer or "") > self.longest_text:
            return None
        return {"prompt": question + REQUEST, "item": [name, place, crc(question)], "answer": answer}

    def identity(self, row):
        return row["prompt"]

    def demonstration(self, row, rng):
        return f"<answer>{row['answer']}</answer>"

    def longest_prompt(self):
        return "?" * self.longest_question + REQUEST

    def longest_answer(self):
        return "<answer>" + "?" * self.longest_text + "</answer>"

    # Rewards

    def answer_of(self, completion):
        """The text in the completion's last <answer> tags, without the spaces around it; None where there is none, or too much."""
        answer = in_answer_tags(completion)
        return answer if answer is not None and len(answer) <= MAX_ANSWER else None

    def rewards(self, prompts, completions, **columns):
        """What Task.rewards does, all answers in one request; an answer that is given twice to an item is scored once."""
        stopped = columns.get("stopped", [True] * len(completions))
        asked = [
            (json.dumps(item), self.answer_of(completion) if ended else None)
            for completion, ended, item in zip(completions, stopped, columns["item"], strict=True)
        ]
        wanted = [pair for pair in dict.fromkeys(asked) if pair[1] is not None]
        scores = self.ask("score", [(json.loads(item), answer) for item, answer in wanted])
        known = dict(zip(wanted, scores, strict=True))
        return [self.reward_of(known.get(pair, 0.0)) for pair in asked]

    def reward_functions(self):
        return self.in_parts()

    def reward_of(self, score):
        return min(max(score, 0.0), 1.0) if self.partial_credit else float(score >= RIGHT)

    def is_right(self, completion, item):
        return self.rewards([""], [completion], item=[item])[0] == 1

    # Before anything else

    def survey(self):
        """Looks at SURVEY items of each generator: can it be practised at all, and how long are its texts?"""
        digest, rows = hashlib.sha256(), []
        for name in self.names:
            rng = random.Random(f"ReasoningGym survey {name}")
            places = [rng.randrange(TRAINING) for _ in range(SURVEY)]
            made = self.ask("make", [[name, place] for place in places])
            digest.update(json.dumps([name, made]).encode())
            self.refuse_unusable(name, made)
            found = [row for row in map(functools.partial(self.row_of, name), places, made) if row]
            for split in ("train", "tune", "test") if self.tuning else ("train", "test"):
                if not any(self.belongs(self.identity(row), split) for row in found):
                    raise SnugError(
                        f"task reasoning_gym: {name} leaves no {split} prompt among {SURVEY} items; loosen gym_config"
                    )
            self.try_scorer(name, found[:CHECKED])
            rows += found
        if self.sandbox.missing:
            say_once(
                f"reasoning_gym: the child that scores has no seccomp filter ({self.sandbox.missing}); Python's audit hook stands alone"
            )
        self.longest_question = max(size(row["prompt"]) for row in rows) - size(REQUEST)
        self.longest_text = max(size(row["answer"] or "") for row in rows)
        self.surveyed = digest.hexdigest()

    def refuse_unusable(self, name, made):
        items = [item for item in made if "error" not in item]
        if not items:
            raise SnugError(f"task reasoning_gym: {name} makes no items with this gym_config: {made[0]['error']}")
        if self.learns_answers and all(item["answer"] is None for item in items):
            raise SnugError(
                f"gym_dataset={name!r}: its items have no answer to learn from, only a scorer; practise it with grpo.py"
            )
        sizes = sorted(max(size(item["question"]), size(item["answer"] or "")) for item in items)
        short = sum(most <= self.longest_question for most in sizes)
        if short < SURVEY // 10:
            raise SnugError(
                f"gym_max_chars={self.longest_question}: {short} of {len(items)} items of {name} have so few bytes; half have up to "
                f"{sizes[len(sizes) // 2]:,}, all up to {sizes[-1]:,}; raise it, or change gym_config"
            )

    def try_scorer(self, name, rows):
        """Refuses one that finds none of its generator's own answers right, and tells of one that finds a text right whatever is asked."""
        own = [(row["item"], row["answer"].strip()) for row in rows if row["answer"] is not None]
        cheats = [(row["item"], text) for text in CHEATS for row in rows if row["answer"] != text]
        right = [score >= RIGHT for score in self.ask("score", own + cheats)]
        if own and not any(right[: len(own)]):
            raise SnugError(
                f"gym_dataset={name!r}: its scorer gives none of its own first {len(own)} answers a 1; practise another"
            )
        for text in CHEATS:
            taken = [yes for yes, (_, cheat) in zip(right[len(own) :], cheats, strict=True) if cheat == text]
            if len(taken) > CHECKED // 2 and sum(taken) > len(taken) / 2:
                say_once(
                    f"reasoning_gym: the scorer of {name} says 1 of the answer {text!r}, whatever was asked; a policy will find that"
                )

    def fingerprint(self):
        return self.surveyed

    def ask(self, verb, what):
        try:
            return getattr(self.sandbox, verb)(what)
        except SandboxError as error:
            raise SnugError(f"task reasoning_gym: {error}") from None


class Found:
    """A generator's tune or test rows so far, all different, and where to look on.

    known: rows in a row that were there already; barren: items in a row that brought nothing new.
    """

    def __init__(self, start):
        self.rows, self.prompts, self.next, self.known, self.barren = [], set(), start, 0, 0

    def take(self, row):
        """row: what the next item is, or None where it is not one of the split's."""
        self.barren += 1
        if row and row["prompt"] in self.prompts:
            self.known += 1
        elif row:
            self.rows.append(row)
            self.prompts.add(row["prompt"])
            self.known = self.barren = 0


@functools.cache
def open_sandbox(options, timeout, memory_mb):
    """One child for all tasks of this process that want the same of it."""
    return Sandbox("data.gym.worker:Gym", {"datasets": json.loads(options)}, timeout, memory_mb)


@functools.cache
def say_once(text):
    print(text, file=sys.stderr)


def crc(text):
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def size(text):
    return len(text.encode("utf-8", "surrogatepass"))


def read_options(text, names):
    """gym_config, '{"max_terms": 3}' or "max_terms=3,chain_sum.min_terms=2", -> {generator: {option: value}}. Raises SnugError."""
    example = 'such as max_terms=3,min_terms=2 or {"max_terms": 3}'
    if text.strip().startswith("{"):
        try:
            given = json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise SnugError(f"gym_config={text!r:.80} is no JSON object ({error}); write options {example}") from None
    else:
        parts = [part.partition("=") for part in text.split(",") if part.strip()]
        if not all(name.strip() and equals for name, equals, _ in parts):
            raise SnugError(f"gym_config={text!r:.80} is neither JSON nor name=value: write options {example}")
        given = {name.strip(): literal(value.strip()) for name, _, value in parts}
    options = {name: {} for name in names}
    for key, value in given.items():
        owner, dot, option = key.rpartition(".")
        if not dot and len(names) > 1:
            raise SnugError(f"gym_config: {key} of which of {', '.join(names)}? write {names[0]}.{key}")
        if dot and owner not in options:
            raise SnugError(f"gym_config: {key} is of {owner!r}, which gym_dataset does not name")
        options[owner or names[0]][option] = value
    return options


def literal(text):
    """3, 0.5, true, null or a word in JSON's quotes as JSON reads them; any other text is text."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return text
