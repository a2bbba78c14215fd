"""Small functions to write, with tests: the prompts of `config/grpo_code.py`.

A family (families.py, held_out.py) is a docstring and a body with holes, such as "Return how many are $bound `t`". A
hole has several fillings: the words for the docstring, the code for the body. A row is one choice for each hole. Its
siblings differ in one hole. The tests tell it from every sibling: who reads past a word of the docstring does not pass.
Families are held out whole: no test prompt has a relative in training.

    python -m examples.functions            # writes data/functions.jsonl and data/functions_test.jsonl

The files are always the same, byte for byte. Columns: prompt, canonical_solution and entry_point as in HumanEval, tests
(a list of asserts), family. Left out: floats, sets, input and output.
Test: pytest tests/test_functions.py
"""

import json
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from string import Template
from textwrap import dedent, indent, wrap

from examples.families import TRAINING
from examples.held_out import HELD_OUT

DATA = Path(__file__).parent.parent / "data"
VARIANTS = 10  # rows of a family
POOL = 300  # inputs from which tests are chosen
TESTS = 6  # of a row; more where it has siblings that no test has told from it yet
WORDS = ["ant", "Bee", "cat", "Dog", "bear", "Crow", "eel", "Ape", "a", "Ox", "owl", "newt"]


def numbers(random):
    return [random.randint(-3, 9) for _ in range(random.choice([0, 1, 2, 3, 4, 5, 6]))]


def words(random):
    return random.choices(WORDS, k=random.choice([0, 1, 2, 3, 4, 5]))


def characters(letters, longest):
    return lambda random: "".join(random.choices(letters, k=random.randint(0, longest)))


def integers(low, high):
    return lambda random: random.randint(low, high)


def scores(random):
    return {word: random.randint(0, 5) for word in random.sample(WORDS, random.randint(0, 4))}


def mirrored(random):
    """Often the same from both ends, or nearly."""
    half = "".join(random.choices("abC", k=random.randint(0, 3)))
    middle, end = random.choice(["", "", " ", "-"]), random.choice(["", "", "", " ", "a"])
    return random.choice([half, half.lower(), half.upper()]) + middle + half[::-1] + end


def grid(random):
    width = random.randint(1, 3)
    return [[random.randint(-3, 9) for _ in range(width)] for _ in range(random.randint(0, 3))]


# What a parameter is, by its name: its annotation, and a function that draws a value
INPUTS = {
    "values": ("list[int]", numbers),
    "others": ("list[int]", numbers),
    "words": ("list[str]", words),
    "text": ("str", characters("aAbBeEi 12-", 8)),
    "string": ("str", characters("aaAbb", 7)),
    "letters": ("str", characters("aAbByYzZ-", 6)),
    "phrase": ("str", mirrored),
    "sentence": ("str", lambda random: " ".join(words(random))),
    "brackets": ("str", characters("(()))[", 8)),
    "letter": ("str", lambda random: random.choice("aAbe-")),
    "scores": ("dict[str, int]", scores),
    "grid": ("list[list[int]]", grid),
    "t": ("int", integers(-2, 7)),
    "k": ("int", integers(1, 4)),
    "n": ("int", integers(0, 12)),
    "number": ("int", integers(-999, 9999)),
    "low": ("int", integers(-3, 4)),
    "high": ("int", integers(2, 9)),
}


def name_of(family):
    return family.signature.split("(")[0]


def parameters_of(family):
    """The names of the parameters: "f(values, t)" -> ["values", "t"]."""
    return family.signature.split("(")[1].rstrip(")").split(", ")


def call_of(family, arguments):
    return f"{name_of(family)}({', '.join(map(repr, arguments))})"


def choices_of(family):
    """Every way to fill the holes -> [{hole: words}]."""
    return [dict(zip(family.holes, each, strict=True)) for each in product(*family.holes.values())]


def siblings_of(family, choice):
    """The choices that differ from this one in one hole."""
    return [
        {**choice, hole: words}
        for hole, fillings in family.holes.items()
        for words in fillings
        if words != choice[hole]
    ]


def head_of(family):
    """The line with `def`."""
    parameters = [f"{name}: {INPUTS[name][0]}" for name in parameters_of(family)]
    return f"def {name_of(family)}({', '.join(parameters)}):\n"


def body_of(family, choice):
    """The code of a choice, indented."""
    code = {hole: family.holes[hole][words] for hole, words in choice.items()}
    return indent(Template(dedent(family.body).strip("\n")).substitute(code), "    ") + "\n"


def function_of(family, choice):
    """The function itself. Where it fails, as a sibling may, it returns the error's name."""
    names = {}
    exec(head_of(family) + body_of(family, choice), names)  # code of our own files

    def outcome(arguments):
        try:
            return names[name_of(family)](*arguments)
        except (LookupError, TypeError, ValueError) as error:
            return f"raises {type(error).__name__}"

    return outcome


def inputs_of(family, random):
    """Different arguments, drawn at random -> [[value of each parameter]]."""
    pool = []
    for _ in range(POOL):
        arguments = [INPUTS[name][1](random) for name in parameters_of(family)]
        if arguments not in pool:
            pool.append(arguments)
    return pool


def worth(function, siblings, results, arguments):
    """How good a test is: how many siblings it tells from the function; then, whether its result is a new one."""
    result = function(arguments)
    return sum(sibling(arguments) != result for sibling in siblings), result not in results


def choose_tests(function, siblings, pool):
    """-> the arguments of the tests, first those of an empty input, and their results."""
    chosen, results = [], []
    while len(chosen) < TESTS or siblings:
        empty = [arguments for arguments in pool if not arguments[0] and not chosen]
        best = max(empty[:1] or pool, key=partial(worth, function, siblings, results))
        pool.remove(best)
        chosen.append(best)
        results.append(function(best))
        siblings = [sibling for sibling in siblings if sibling(best) == results[-1]]
    return chosen, results


def row_of(family, choice):
    """A line of the file. Raises ValueError where no input tells a sibling from the function."""
    function = function_of(family, choice)
    siblings = [function_of(family, each) for each in siblings_of(family, choice)]
    pool = inputs_of(family, Random(f"{family.signature} {choice}"))
    example = next(arguments for arguments in pool if arguments[0])
    pool.remove(example)
    chosen, results = choose_tests(function, siblings, pool)
    text = " ".join(Template(family.doc).substitute(choice).split())
    lines = [*wrap(text, 88), f">>> {call_of(family, example)}", repr(function(example))]
    return {
        "prompt": head_of(family) + indent('"""' + "\n".join(lines) + '\n"""\n', "    "),
        "canonical_solution": body_of(family, choice),
        "entry_point": name_of(family),
        "tests": [
            f"assert {call_of(family, arguments)} == {result!r}"
            for arguments, result in zip(chosen, results, strict=True)
        ],
        "family": name_of(family),
    }


def rows_of(families):
    rows = []
    for family in families:
        choices = choices_of(family)
        Random(family.signature).shuffle(choices)
        rows += [row_of(family, choice) for choice in choices[:VARIANTS]]
    return rows


def files():
    """-> {path: text} of both files."""
    halves = {"functions.jsonl": TRAINING, "functions_test.jsonl": HELD_OUT}
    return {
        DATA / name: "".join(json.dumps(row) + "\n" for row in rows_of(families))
        for name, families in halves.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(f"{path}: {text.count(chr(10))} rows, {len(text):,} bytes")
