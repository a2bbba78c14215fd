"""Countdown: reach a target with all of some numbers, each used once.

    prompt      3 5 7=22:
    completion  5*3+7

With countdown_form=tags the task is put in words, as the field has it, and the answer stands in tags:

    prompt      Make 22 from the numbers 3, 5, 7. Write an expression ...
    completion  <think>5*3 is 15, and 7 more is 22.</think> <answer>5*3+7</answer>

The expression in the last <answer></answer> is scored, and has to be the expression alone: 5*3+7=22 is refused. The field's
numbers go up to 99 and its targets too: countdown_max_number=99, countdown_max_target=99.

A problem is made backwards, from a random expression over the numbers, so that it has a solution; every value on the
way to the target is a positive whole number of at most 9999. A completion may go through fractions and below zero: it
is worked out exactly, by the small parser below, and is never handed to Python's.

Left out: credit for coming close, leaving numbers out, several solutions to a problem.
"""

import operator
import re
from collections import namedtuple
from fractions import Fraction

from data.answers import in_answer_tags
from data.task import Task
from options import SnugError

MAX_VALUE = 9999  # of a target and of everything on the way to it
MAX_NUMBERS = 10
MAX_CHARS = 200  # of an expression; a solution of ten numbers of four digits takes 65
MAX_PARENTHESES = 20  # pairs, so that nesting is bounded before the parser recurses

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
EXPRESSION = re.compile(r"[-+*/() ]*[0-9][-+*/()0-9 ]*")  # of the right characters, and no more than that
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}  # how tightly an operator binds; a number binds at 3

IN_WORDS = """Make {target} from the numbers {numbers}. Write an expression that uses each of them exactly once, with {operators} and \
parentheses. Think in <think> </think> first, then give the expression alone in <answer> </answer>, such as <answer>{example}</answer>."""


class Countdown(Task):
    columns = ("numbers", "target")

    def __init__(self, settings):
        super().__init__(settings)
        self.min_numbers = settings.countdown_min_numbers
        self.max_numbers = settings.countdown_max_numbers
        self.max_number = settings.countdown_max_number
        self.max_target = settings.countdown_max_target
        self.operators = settings.countdown_operators
        self.tags = settings.countdown_form == "tags"
        if self.max_numbers > MAX_NUMBERS:
            raise SnugError(f"countdown_max_numbers={self.max_numbers} is above {MAX_NUMBERS}")
        if self.max_number > MAX_VALUE:
            raise SnugError(f"countdown_max_number={self.max_number} is above {MAX_VALUE}")
        if self.max_target > MAX_VALUE:
            raise SnugError(f"countdown_max_target={self.max_target} is above {MAX_VALUE}")

    def propose(self, rng):
        """{"prompt": "3 5 7=22:", "numbers": [3, 5, 7], "target": 22, "solution": "5*3+7"}, or None: see `join`."""
        count = rng.randint(self.min_numbers, self.max_numbers)
        numbers = [rng.randint(1, self.max_number) for _ in range(count)]
        expression = random_expression(numbers, self.operators, rng)
        if expression.value is None or expression.value > self.max_target:
            return None
        target = int(expression.value)
        return {
            "prompt": self.prompt_of(numbers, target),
            "numbers": numbers,
            "target": target,
            "solution": expression.text,
        }

    def prompt_of(self, numbers, target):
        if not self.tags:
            return " ".join(map(str, numbers)) + f"={target}:"
        operators = " ".join(dict.fromkeys(self.operators))
        example = f"(1 {self.operators[0]} 2) {self.operators[-1]} 3"
        text = IN_WORDS.format(
            target=target, numbers=", ".join(map(str, numbers)), operators=operators, example=example
        )
        return (
            text if self.chat else text + "\n"
        )  # an answer begins on a line of its own; a message of its own is enough

    def identity(self, row):
        return f"{sorted(row['numbers'])}={row['target']}"

    def demonstration(self, row, rng):
        """The solution; with probability demonstration_noise the numbers as they come, joined by the first operator: 3+5+7.

        Who imitates that teacher knows most solutions, and yet is likeliest to give the lazy answer, mostly a wrong one.
        """
        lazy = rng.random() < self.demonstration_noise
        return self.written(self.operators[0].join(map(str, row["numbers"])) if lazy else row["solution"])

    def written(self, expression):
        return f"<answer>{expression}</answer>" if self.tags else expression

    def expression_in(self, completion):
        """What has to be the expression -> text; None where there are no tags."""
        return in_answer_tags(completion) if self.tags else completion

    def is_right(self, completion, numbers, target):
        text = self.expression_in(completion)
        try:
            return text is not None and evaluate(text, numbers, self.operators) == target
        except (Refused, ZeroDivisionError):
            return False

    def answer_of(self, completion):
        """The expression without its spaces, if the characters are an expression's: "( 3*5 ) + 7" -> "(3*5)+7"."""
        text = self.expression_in(completion)
        if text is None or len(text) > MAX_CHARS or not EXPRESSION.fullmatch(text) or re.search("[0-9] +[0-9]", text):
            return None
        return text.replace(" ", "")

    def reward_functions(self):
        return self.in_parts() if self.tags else super().reward_functions()

    def longest_prompt(self):
        return self.prompt_of([self.max_number] * self.max_numbers, self.max_target)

    def longest_answer(self):
        """20-(20-(20-20)): each pair of operands but the outermost may need parentheses."""
        pairs = self.max_numbers - 2
        return self.written(f"{self.max_number}-(" * pairs + f"{self.max_number}-{self.max_number}" + ")" * pairs)


# -----------------------------------------------------------------------------
# Making expressions

# A value is a Fraction, or None once it left the positive whole numbers up to MAX_VALUE. binding: of its outermost operator.
Expression = namedtuple("Expression", "value text binding")


def random_expression(numbers, operators, rng):
    """Joins two of the numbers, then two of what there is now, until one Expression over all of them is left."""
    parts = [Expression(Fraction(number), str(number), 3) for number in numbers]
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(join(a, rng.choice(operators), b))
    return parts[0]


def join(a, symbol, b):
    """7, "-", 3*5 -> 3*5-7: the larger value comes first, so that fewer differences are lost to being negative."""
    value = None
    if a.value is not None and b.value is not None:
        a, b = (b, a) if b.value > a.value else (a, b)
        value = ARITHMETIC[symbol](a.value, b.value)
        value = value if value.denominator == 1 and 1 <= value <= MAX_VALUE else None
    binding = BINDING[symbol]
    left = f"({a.text})" if a.binding < binding else a.text
    # a-(b+c) and a/(b*c) need theirs; a+(b-c) and a*(b/c) are the same without
    right = f"({b.text})" if b.binding < binding or (b.binding == binding and symbol in "-/") else b.text
    return Expression(value, left + symbol + right, binding)


# -----------------------------------------------------------------------------
# Reading what a model wrote


class Refused(Exception):
    """Not an expression over the numbers."""


def evaluate(text, numbers, operators):
    """The exact value, a Fraction, of an expression that uses each of `numbers` once and no operator but `operators`.

    sum = product {(+ | -) product};  product = atom {(* | /) atom};  atom = number | ( sum ).  Spaces may separate these.
    Raises Refused for any other text and ZeroDivisionError for a division by zero.

    >>> evaluate("(3 + 5) / 7", [3, 5, 7], "+-*/")
    Fraction(8, 7)

    The cost is bounded before any work is done: at most MAX_CHARS characters, MAX_PARENTHESES pairs, and no
    arithmetic until the numbers are known to be the ones that were given.
    """
    if len(text) > MAX_CHARS or text.count("(") > MAX_PARENTHESES:
        raise Refused("too long")
    tokens = re.findall(r"[0-9]+|[-+*/()]", text)
    if "".join(tokens) != text.replace(" ", ""):
        raise Refused("a character that has no place here")
    if sorted(token for token in tokens if token.isdigit()) != sorted(map(str, numbers)):
        raise Refused("other numbers than the given ones, each once")
    if not set(tokens) & set(ARITHMETIC) <= set(operators):
        raise Refused("an operator that is not allowed")
    tokens.reverse()  # the next one is the last of the list
    value = read_sum(tokens)
    if tokens:
        raise Refused("more after the expression")
    return value


def read_sum(tokens):
    value = read_product(tokens)
    while tokens and tokens[-1] in "+-":
        value = ARITHMETIC[tokens.pop()](value, read_product(tokens))
    return value


def read_product(tokens):
    value = read_atom(tokens)
    while tokens and tokens[-1] in "*/":
        value = ARITHMETIC[tokens.pop()](value, read_atom(tokens))
    return value


def read_atom(tokens):
    token = tokens.pop() if tokens else "the end"
    if token.isdigit():
        return Fraction(token)
    if token != "(":
        raise Refused(f"a number or ( should stand where {token} is")
    value = read_sum(tokens)
    if not tokens or tokens.pop() != ")":
        raise Refused("a ( is not closed")
    return value
