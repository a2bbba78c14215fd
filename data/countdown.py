"""Countdown: reach a target with all of some numbers, each used once.

    prompt      3 5 7=22:
    completion  5*3+7

With countdown_form=tags, as in other GRPO projects, the problem is in words and the answer in tags:

    prompt      Make 22 from the numbers 3, 5, 7. Write an expression ...
    completion  <think>5*3 is 15, and 7 more is 22.</think> <answer>5*3+7</answer>

The last <answer></answer> is scored. It must have the expression alone: 5*3+7=22 is refused. Other projects use
countdown_max_number=99, countdown_max_target=99.

A problem is made from a random expression over the numbers, so it has a solution. Every intermediate value of it is a
positive integer of at most 9999. A completion may use fractions and negative values, which are computed exactly. Python
parses a completion (ast.parse), after its length, characters and numbers were checked, but never executes it.

Left out: reward for coming close, leaving numbers out, several solutions to a problem.
"""

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from data.answers import in_answer_tags
from data.task import Task
from options import SnugError, option

MAX_VALUE = 9999  # of a target and of the intermediate values of a solution
MAX_CHARS = 200  # of an expression; a solution with ten numbers of four digits has at most 65
MAX_PARENTHESES = 20  # pairs; bounds the recursion

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
EXPRESSION = re.compile(
    r"[-+*/() ]*[0-9][-+*/()0-9 ]*"
)  # has the characters of an expression; may still be malformed
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}  # operator precedence; a number has 3


@dataclass
class CountdownOptions:
    """task=countdown."""

    countdown_form: str = option(
        "terse",
        "terse: 3 5 7=22: -> 5*3+7; tags: words -> <answer>5*3+7</answer>",
        choices=("terse", "tags"),
    )
    countdown_min_numbers: int = option(3, "fewest numbers to combine", minimum=2)
    countdown_max_numbers: int = option(4, "most numbers to combine", minimum=2, maximum=10)
    countdown_max_number: int = option(20, "largest number to combine", minimum=2, maximum=MAX_VALUE)
    countdown_max_target: int = option(
        MAX_VALUE, "largest number to reach", minimum=1, maximum=MAX_VALUE
    )
    countdown_operators: str = option("+-*/", "allowed operators, as one word")


class Countdown(Task):
    columns = ("numbers", "target")

    def __init__(self, settings, demonstrations=False):
        super().__init__(settings, demonstrations)
        self.min_numbers, self.max_numbers = (
            settings.countdown_min_numbers,
            settings.countdown_max_numbers,
        )
        self.max_number, self.max_target = settings.countdown_max_number, settings.countdown_max_target
        self.operators, self.has_form = settings.countdown_operators, settings.countdown_form == "tags"
        if self.min_numbers > self.max_numbers:
            limit = f"countdown_max_numbers={self.max_numbers}"
            raise SnugError(f"countdown_min_numbers={self.min_numbers} is above {limit}")
        if not self.operators or set(self.operators) - set(ARITHMETIC):
            example = "choose from + - * /, such as --countdown_operators=+-"
            raise SnugError(f"countdown_operators={self.operators!r}: {example}")

    def propose(self, rng):
        """{"prompt": "3 5 7=22:", "numbers": [3, 5, 7], "target": 22, "solution": "5*3+7"}, or None (see `join`)."""
        count = rng.randint(self.min_numbers, self.max_numbers)
        numbers = [rng.randint(1, self.max_number) for _ in range(count)]
        value, solution, _ = random_expression(numbers, self.operators, rng)
        if value is None or value > self.max_target:
            return None
        target = int(value)
        return dict(
            prompt=self.prompt_of(numbers, target), numbers=numbers, target=target, solution=solution
        )

    def prompt_of(self, numbers, target):
        if not self.has_form:
            return " ".join(map(str, numbers)) + f"={target}:"
        given, first, last = ", ".join(map(str, numbers)), self.operators[0], self.operators[-1]
        text = (
            f"Make {target} from the numbers {given}. Write an expression that uses each of them exactly once, with "
            f"{' '.join(dict.fromkeys(self.operators))} and parentheses. Think in <think> </think> first, then give "
            f"the expression alone in <answer> </answer>, such as <answer>(1 {first} 2) {last} 3</answer>."
        )
        return (
            text if self.chat else text + "\n"
        )  # without messages, a newline separates the answer from the prompt

    def identity(self, row):
        return f"{sorted(row['numbers'])}={row['target']}"

    def demonstration(self, row, rng):
        """The solution; with probability demonstration_noise the numbers in order, joined by the first operator: 3+5+7.

        A model that imitates this can find most solutions, but its most likely answer is often the lazy, wrong one.
        """
        lazy = rng.random() < self.demonstration_noise
        return self.in_form(
            self.operators[0].join(map(str, row["numbers"])) if lazy else row["solution"]
        )

    def in_form(self, expression):
        return f"<answer>{expression}</answer>" if self.has_form else expression

    def expression_in(self, completion):
        """The part of a completion that must be the expression; "" if the tags are missing."""
        return in_answer_tags(completion) or "" if self.has_form else completion

    def is_right(self, completion, numbers, target):
        try:
            return evaluate(self.expression_in(completion), numbers, self.operators) == target
        except (Refused, ZeroDivisionError):
            return False

    def answer_of(self, completion):
        """The expression without spaces, "( 3*5 ) + 7" -> "(3*5)+7"; None if it has other characters."""
        text = self.expression_in(completion)
        if len(text) > MAX_CHARS or not EXPRESSION.fullmatch(text) or re.search("[0-9] +[0-9]", text):
            return None
        return text.replace(" ", "")

    def longest_prompt(self):
        return self.prompt_of([self.max_number] * self.max_numbers, self.max_target)

    def longest_answer(self):
        """20-(20-(20-20)): every operation but the outermost may need parentheses."""
        pairs = self.max_numbers - 2
        return self.in_form(
            f"{self.max_number}-(" * pairs + f"{self.max_number}-{self.max_number}" + ")" * pairs
        )


class Expression(NamedTuple):
    value: Fraction | None  # None: an intermediate value is not an integer from 1 to MAX_VALUE
    text: str
    binding: int  # of the outermost operator


def random_expression(numbers, operators, rng) -> Expression:
    """Joins two random parts until one expression over all numbers is left."""
    parts = [Expression(Fraction(number), str(number), 3) for number in numbers]
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(join(a, rng.choice(operators), b))
    return parts[0]


def join(a: Expression, symbol: str, b: Expression) -> Expression:
    """7, "-", 3*5 -> 3*5-7: the larger value comes first, so that fewer differences are negative and rejected."""
    value = None
    if a.value is not None and b.value is not None:
        a, b = (b, a) if b.value > a.value else (a, b)
        value = ARITHMETIC[symbol](a.value, b.value)
        value = value if value.denominator == 1 and 1 <= value <= MAX_VALUE else None
    binding = BINDING[symbol]
    left = f"({a.text})" if a.binding < binding else a.text
    # a-(b+c) and a/(b*c) need the parentheses; a+(b-c) and a*(b/c) do not
    right = (
        f"({b.text})" if b.binding < binding or (b.binding == binding and symbol in "-/") else b.text
    )
    return Expression(value, left + symbol + right, binding)


class Refused(Exception):
    """The text is not an expression over the given numbers."""


def evaluate(text: str, numbers: list[int], operators: str) -> Fraction:
    """The exact value of an expression that uses each of `numbers` once and only `operators`.

    Raises Refused for any other text, ZeroDivisionError for a division by zero.

    >>> evaluate("(3 + 5) / 7", [3, 5, 7], "+-*/")
    Fraction(8, 7)

    The cost is bounded first: at most MAX_CHARS characters and MAX_PARENTHESES pairs, and no arithmetic before
    the numbers are known to be the given ones.
    """
    if len(text) > MAX_CHARS or text.count("(") > MAX_PARENTHESES:
        raise Refused("too long")
    tokens = re.findall(r"[0-9]+|[-+*/()]", text)
    if "".join(tokens) != text.replace(" ", ""):
        raise Refused("a character that does not belong here")
    if sorted(token for token in tokens if token.isdigit()) != sorted(map(str, numbers)):
        raise Refused("other numbers than the given ones, each once")
    if not set(tokens) & set(ARITHMETIC) <= set(operators):
        raise Refused("an operator that is not allowed")
    try:
        return value_of(ast.parse(text.strip(" "), mode="eval").body)
    except SyntaxError:
        raise Refused("not an expression") from None


def value_of(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in NODES:
        raise Refused(f"{type(node).__name__} is not one of the four operations")
    return ARITHMETIC[NODES[type(node.op)]](value_of(node.left), value_of(node.right))
