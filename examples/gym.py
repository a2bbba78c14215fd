"""The task ReasoningGym: any generator of the package reasoning_gym (pip install reasoning_gym).

    python grpo.py --task=examples.gym:ReasoningGym --gym_dataset=chain_sum,gcd --chat \
        --init_from=Qwen/Qwen2.5-0.5B-Instruct --learning_rate=1e-6 --max_new_tokens=400

--gym_config='{"chain_sum": {"max_terms": 3}}' has options of generators. A base model has no chat template: leave --chat
out.

    prompt      Find the Greatest Common Divisor (GCD) of these numbers: 297, 30. Give only the GCD as your final
                answer. End with your final answer inside <answer> </answer>.
    completion  ... <answer>3</answer>

The generator's own scorer gets the text in the last <answer> tags. The reward is 1.0 if the score is 1, else 0.0.

An item is a function of a generator and a seed, and a row's number gives both. Different seeds may give the same
question, so a hash of the question decides the split. A test row costs about ten items: use few eval_prompts with slow
generators. knight_swap, futoshiki, sokoban, puzzle24 and zebra_puzzles take 0.2 to 0.9 s an item.

Generators set no bounds on lengths. The longest question and the longest answer of 100 items of each generator are the
bounds; longer ones are skipped.

Scorers of binary_matrix, n_queens, spiral_matrix and string_insertion eval the answer; those of countdown,
intermediate_integration, polynomial_multiplication, puzzle24 and simple_integration do so through sympy's parse_expr.
So only the processes of a Sandbox import the package: gym_worker.py. In version 0.1.25 game_of_life_halting accepts any
text, complex_arithmetic accepts nan, and coin_flip mostly accepts 0: a policy will find that.

Left out: the package's curricula; scores between 0 and 1; its generators composite (gym_dataset takes several names)
and codeio (its items differ between processes). Tests: tests/test_gym.py.
"""

import hashlib
import importlib.util
import json
import operator
import random
from dataclasses import dataclass

from snug import Task
from snug.options import SnugError, option
from snug.sandbox import Sandbox

SEEDS = 2**32  # numpy requires smaller ones
SURVEY = 100  # items of each generator that are looked at first
TIMEOUT = 5.0  # seconds to score an answer; after that it is wrong
RIGHT = 1 - 1e-9  # a score
MAX_COMPLETION = 200_000  # characters; longer completions have no answer
REQUEST = "\nEnd with your final answer inside <answer> </answer>.\n"


@dataclass
class GymOptions:
    """task=examples.gym:ReasoningGym."""

    gym_dataset: list[str] = option([], "generators of the package; each prompt is of a random one")
    gym_config: dict = option({}, 'JSON, options of generators: {"chain_sum": {"max_terms": 3}}')


class ReasoningGym(Task):
    options = GymOptions
    columns = ("item",)  # [generator, seed]

    def __init__(self, settings, demonstrations=False):
        super().__init__(settings, demonstrations)
        self.names = settings.gym_dataset
        if not self.names or settings.gym_config.keys() - {*self.names}:
            raise SnugError(
                f"gym_dataset={','.join(self.names)} must name generators, such as leg_counting, also those of "
                f"gym_config={json.dumps(settings.gym_config)}"
            )
        if importlib.util.find_spec("reasoning_gym") is None:
            raise SnugError("the package reasoning_gym is missing; pip install reasoning_gym")
        options = {"datasets": {name: settings.gym_config.get(name, {}) for name in self.names}}
        self.sandbox = Sandbox(f"{__name__}_worker:Gym", options, TIMEOUT)
        self.needs_answers = demonstrations

    def propose(self, rng):
        """{"prompt": text, "item": ["gcd", 7], "answer": text or None}; None if it cannot be used or is too long."""
        item = [rng.choice(self.names), rng.randrange(SEEDS)]
        row = self.row_of(item, self.sandbox.call("make", [item])[0])
        return row if row and all(map(operator.le, self.sizes(row), self.bounds)) else None

    def sizes(self, row):
        """-> bytes of its prompt and of its demonstration"""
        return len(row["prompt"].encode()), len(self.demonstration(row, None).encode())

    def row_of(self, item: list, made: dict) -> dict | None:
        """A row; None if the generator raised an error, or if SFT would have no answer to learn."""
        if "error" in made or made["answer"] is None and self.needs_answers:
            return None
        return {"prompt": made["question"] + REQUEST, "item": item, "answer": made["answer"]}

    def demonstration(self, row, rng):
        return f"<answer>{row['answer']}</answer>"

    def longest_bytes(self):
        return self.bounds

    def answer_of(self, completion):
        """The text in the last <answer>...</answer>, without surrounding spaces."""
        before = completion.rpartition("</answer>")[0]
        _, opened, text = before.rpartition("<answer>")
        return text.strip() if opened and len(completion) <= MAX_COMPLETION else None

    def are_right(self, completions, stopped, items):
        """The sandbox scores all answers in one request, equal answers to an item once."""
        pairs = zip(items, self.answers_of(completions, stopped), strict=True)
        tasks = [(*item, answer) for item, answer in pairs]  # (generator, seed, answer)
        asked = list({task for task in tasks if task[-1] is not None})
        results = self.sandbox.run("score", asked)
        scores = {task: result.value for task, result in zip(asked, results, strict=True)}
        # Code in an answer may fake a score, of any type.
        return [type(score) is float and score >= RIGHT for score in map(scores.get, tasks)]

    def survey(self):
        """Look at SURVEY items of each generator. Raises SnugError if it cannot be used."""
        surveyed, rows = [], []
        for name in self.names:
            rng = random.Random(f"ReasoningGym survey {name}")
            items = [[name, rng.randrange(SEEDS)] for _ in range(SURVEY)]
            made = self.sandbox.call("make", items)
            usable = list(filter(None, map(self.row_of, items, made)))
            if not usable:
                problem = made[0].get("error", "its items have no answer to learn; use grpo.py")
                raise SnugError(f"gym_dataset={name!r}: none of {SURVEY} items can be used: {problem}")
            surveyed += made
            rows += usable
        self.digest = hashlib.sha256(json.dumps(surveyed).encode()).hexdigest()
        self.bounds = tuple(map(max, zip(*map(self.sizes, rows), strict=True)))
        super().survey()

    def fingerprint(self):
        return self.digest
