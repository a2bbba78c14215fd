"""The task Countdown: reach a target with all of some numbers, each used once.

    prompt      3 5 7=22:
    completion  5*3+7

    python grpo.py config/grpo_countdown.py

The file has what a task of your own may have: options, prompts, demonstrations, a verifier of untrusted completions.

The completion must be the expression alone: 5*3+7=22 is refused. The generator countdown of examples/gym.py asks in
words, for an answer in tags.

A problem is made from a random expression over the numbers, so it has a solution. Every intermediate value of it is a
positive integer of at most 9999. A completion may use fractions and negative values, which are computed exactly. Python
parses a completion (ast.parse), after its length, characters and numbers were checked, but never executes it.

Left out: reward for coming close, leaving numbers out, several solutions to a problem.
"""

import ast
import math
import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from snug import Task
from snug.options import SnugError, option

MAX_VALUE = 9999  # of a target and of the intermediate values of a solution
MAX_CHARS = 200  # of an expression, bounds the recursion; a solution with ten numbers of four digits has at most 65

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NODES = dict(zip((ast.Add, ast.Sub, ast.Mult, ast.Div), ARITHMETIC.values(), strict=True))


@dataclass
class CountdownOptions:
    """task=examples.countdown:Countdown."""

    countdown_numbers: str = option("3-4", "how many numbers to combine: 3, or from 3 to 4: 3-4")
    countdown_max_number: int = option(20, "largest number to combine", minimum=2, maximum=MAX_VALUE)
    countdown_operators: str = option("+-*/", "allowed operators, as one word")


class Countdown(Task):
    options = CountdownOptions
    columns = ("numbers", "target")

    def __init__(self, settings, demonstrations=False):
        super().__init__(settings, demonstrations)
        first, _, last = settings.countdown_numbers.partition("-")
        last = last or first
        if not (first + last).isdecimal() or not 2 <= int(first or 0) <= int(last) <= 10:
            raise SnugError(
                f"countdown_numbers={settings.countdown_numbers!r}: write a number from 2 to 10, such as 3, or a "
                "range, such as 3-4"
            )
        self.counts = range(int(first), int(last) + 1)
        self.max_number = settings.countdown_max_number
        self.operators = settings.countdown_operators
        if not self.operators or set(self.operators) - set(ARITHMETIC):
            raise SnugError(
                f"countdown_operators={self.operators!r}: choose from + - * /, such as --countdown_operators=+-"
            )

    def propose(self, rng):
        """{"prompt": "3 5 7=22:", "numbers": [3, 5, 7], "target": 22, "solution": "5*3+7"}, or None (see `join`)."""
        numbers = [rng.randint(1, self.max_number) for _ in range(rng.choice(self.counts))]
        # Two random expressions are joined until one over all numbers is left.
        left = [Expression(float(number), str(number), 3) for number in numbers]
        while len(left) > 1:
            a, b = (left.pop(rng.randrange(len(left))) for _ in range(2))
            left.append(join(a, rng.choice(self.operators), b))
        [(value, solution, _)] = left
        if math.isnan(value):
            return None
        prompt = " ".join(map(str, numbers)) + f"={int(value)}:"
        return dict(prompt=prompt, numbers=numbers, target=int(value), solution=solution)

    def identity(self, row):
        return f"{sorted(row['numbers'])}={row['target']}"

    def demonstration(self, row, rng):
        """The solution; with probability demonstration_noise the numbers in order, joined by the first operator: 3+5+7.

        A model that imitates this can find most solutions, but its most likely answer is often the lazy, wrong one.
        """
        if rng.random() < self.settings.demonstration_noise:
            return self.operators[0].join(map(str, row["numbers"]))
        return row["solution"]

    def is_right(self, completion, numbers, target):
        return evaluate(completion, numbers, self.operators) == target

    def longest_bytes(self):
        """Of 20 20 20 20=9999: and 20-(20-(20-20)). Every operation but the outermost may need parentheses."""
        numbers, pairs = self.counts[-1], self.counts[-1] - 2
        characters = numbers * len(f"{self.max_number}+")
        return characters + len(f"{MAX_VALUE}:"), characters - 1 + 2 * pairs


class Expression(NamedTuple):
    value: float  # NaN: an intermediate value is not an integer from 1 to MAX_VALUE
    text: str
    binding: int  # precedence of the outermost operator; a number has 3


def join(a: Expression, symbol: str, b: Expression):
    """7, "-", 3*5 -> 3*5-7: the larger value comes first, so that fewer differences are negative and rejected."""
    binding = 2 if symbol in "*/" else 1
    if b.value > a.value:
        a, b = b, a
    value = ARITHMETIC[symbol](a.value, b.value)  # exact, or not near an integer
    if not (value.is_integer() and 1 <= value <= MAX_VALUE):
        value = math.nan
    left = f"({a.text})" if a.binding < binding else a.text
    # a-(b+c) and a/(b*c) need the parentheses; a+(b-c) and a*(b/c) do not
    needed = b.binding < binding or (b.binding == binding and symbol in "-/")
    right = f"({b.text})" if needed else b.text
    return Expression(value, left + symbol + right, binding)


def evaluate(text: str, numbers: list[int], operators: str) -> Fraction | None:
    """The exact value of an expression that uses each of `numbers` once and only `operators`.

    None for any other text, and for a division by zero.

    >>> evaluate("(3 + 5) / 7", [3, 5, 7], "+-*/")
    Fraction(8, 7)

    The cost is bounded first: at most MAX_CHARS characters, and no arithmetic before the text is known to have
    `numbers`.
    """
    if len(text) > MAX_CHARS:
        return None
    tokens = re.findall(rf"[0-9]+|[(){re.escape(operators)}]", text)
    used = sorted(filter(str.isdigit, tokens)) == sorted(map(str, numbers))
    if not used or "".join(tokens) != text.replace(" ", ""):
        return None  # it has other numbers, or a character that is not in an expression
    try:
        return value_of(ast.parse(text.strip(" "), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def value_of(node: ast.expr) -> Fraction:
    """Raises ValueError for what is neither a number nor one of the operations."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in NODES:
        raise ValueError
    return Fraction(NODES[type(node.op)](value_of(node.left), value_of(node.right)))
