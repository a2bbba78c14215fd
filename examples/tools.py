"""Two tools: `calc` and `python`, as you would write your own.

    python grpo.py config/grpo_chat.py --data_file=prompts.jsonl --tools=examples.tools:calc,examples.tools:python

A tool has type hints and a docstring with "Args:", which the model reads. It may have a function `start`, which a run
calls before its first completion. `calc` parses untrusted text and never executes it. `python` executes code in a
confined process (snug/sandbox/).

Left out: state; an environment has some (docs/tools.md). Tests: tests/test_tools.py.
"""

import ast
import io
import operator
import re
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from fractions import Fraction

from snug.sandbox import Sandbox

MAX_CHARS = 200  # of an expression, bounds the recursion
OPERATORS = {  # of `calc`
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
PYTHON_SECONDS = 5.0  # for the code of one call
MAX_OUTPUT = 10_000  # characters that the code prints
MAX_ERROR = 500  # characters of an error


def calc(expression: str) -> str:
    """Compute an expression of numbers.

    Args:
        expression: numbers with + - * / and parentheses, such as (1 + 2) / 4
    """
    try:
        if len(expression) > MAX_CHARS or not re.fullmatch(r"[-+*/(). 0-9]+", expression):
            raise ValueError
        value = value_of(ast.parse(expression.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"
    except (SyntaxError, ValueError, ArithmeticError):
        raise ValueError(
            f"no expression of numbers and + - * / ( ), up to {MAX_CHARS} characters, or a division by zero"
        ) from None


def value_of(node: ast.expr) -> Fraction:
    """Raises ValueError for what is neither a number nor one of the operations."""
    if isinstance(node, ast.Constant):
        return Fraction(repr(node.value))  # 0.1 is a tenth
    if type(getattr(node, "op", None)) not in OPERATORS:
        raise ValueError
    children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return Fraction(OPERATORS[type(node.op)](*map(value_of, children)))


def python(code: str) -> str:
    """Run Python code and return what it prints.

    Args:
        code: the code; it can import installed packages, and cannot use other files, processes or the network
    """
    [(printed, error)] = POOL.submit(lambda: interpreter().run("run", [[code]])).result()
    if error:
        raise ValueError(error)
    return printed


def interpreter():
    """This thread's: a sandbox is not thread-safe, and dies with the thread that started it."""
    if not hasattr(THREAD, "sandbox"):
        THREAD.sandbox = Sandbox(f"{__name__}:Interpreter", timeout=PYTHON_SECONDS)
    return THREAD.sandbox


THREAD = threading.local()
POOL = ThreadPoolExecutor(16)
# Where there is no sandbox, the run ends before it begins.
python.start = lambda: POOL.submit(lambda: interpreter().start()).result()


class Interpreter:
    """Lives in the processes of a sandbox."""

    def run(self, code: str) -> str:
        """-> what it prints, and the error that ends it."""
        printed, problem = io.StringIO(), ""
        try:
            with redirect_stdout(printed):
                exec(code, {"__name__": "__main__"})
        except BaseException as error:
            problem = traceback.format_exception_only(error)[-1]
        return printed.getvalue()[:MAX_OUTPUT] + problem[:MAX_ERROR]
