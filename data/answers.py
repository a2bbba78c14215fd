"""Find the answer in a completion, and read it as a number.

Completions are untrusted: their length is limited first, they are searched once, and nothing in them is executed.

    #### 42   #### $1,000.50 a week.   \\boxed{-7\\%}       are numbers: "42", "1000.5", "-7"
    #### 84/2   #### 18 or 19   #### 1,00   #### 4e1      are none

Words after the number are ignored: 42 thousand is 42. Left out: fractions, exponents, digits other than 0 to 9, decimal
commas, numbers in words, currencies other than $. Tests: tests/test_gsm8k.py.
"""

import re

MAX_COMPLETION = 200_000  # characters; longer completions have no answer
MAX_ANSWER = 200  # characters of the line after ####, or inside \boxed{}; of any number
# A run of digits, dots and commas, after a sign that is no operator (3-5) and a dollar. \u2212 is a minus sign.
RUN = re.compile(
    r"(?:(?<![0-9A-Za-z_)\]}%+\u2212-])[-+\u2212])?(?:\\?\$ ?)?(?:(?<![A-Za-z.])\.)?[0-9]+(?:[.,][0-9]+)*"
)
NUMBER = re.compile(r"([-+\u2212]?)\\?\$? ?([1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]+))?")
# What stands before a run that is only the end of a number: 1/2, 10^3, 4e1, 4e-1
PART = re.compile(r"(?:[/^]|[0-9][A-Za-z]|[0-9][eE][-+\u2212])\Z")
BOX = re.compile(r"((?:[^{}]|{[^{}]*})*)}")  # the content of \boxed{}: 42 \text{ apples}


def number_after_marker(completion: str) -> str | None:
    """The number after the last #### or in the last \\boxed{}, whichever comes later, as text: "-1000.5"; or None.

    The number comes first there, and only words may follow on its line: a completion with two numbers has no answer.
    Equal numbers give equal texts: no plus sign, no separators, no superfluous zeros.
    """
    if len(completion) > MAX_COMPLETION:
        return None
    hashes, box = completion.rfind("####"), completion.rfind("\\boxed{")
    if hashes > box:
        text = completion[hashes + 4 :].lstrip().partition("\n")[0].rstrip()
    else:
        inside = BOX.match(completion, box + 7) if box >= 0 else None
        text = inside[1].strip() if inside else ""
    run = RUN.match(text) if len(text) <= MAX_ANSWER else None
    if not run or any(character.isnumeric() for character in text[run.end() :]):
        return None
    return spell(run[0])


def last_number(completion: str):
    """The last number in a text, in the same spelling: "29 + 21 = 50." -> "50"; None if there is none.

        "It costs $1,000.50." -> "1000.5"    "x=-7" -> "-7"    "29+21=50" -> "50"    "3-5" -> "5"    "1/2" -> None

    A sign right before the number belongs to it, but after a digit, a letter or a closing bracket it is an operator.
    If the last digits are only part of a number (1/2, 10^3, 4e1, 5², 1.2.3, 1,00), the text has none.
    """
    run = None
    if len(completion) <= MAX_COMPLETION:
        run = max(RUN.finditer(completion), key=re.Match.end, default=None)
    if not run or completion[run.end() : run.end() + 1].isnumeric():
        return None
    if PART.search(completion[max(run.start() - 3, 0) : run.start()]):
        return None
    return spell(run[0])


def spell(run: str):
    """ "-$1,000.50" -> "-1000.5"; None for 1,00 and 1.2.3."""
    number = NUMBER.fullmatch(run)
    if not number or len(run) > MAX_ANSWER:
        return None
    sign, whole, fraction = number.groups("")
    digits = whole.replace(",", "").lstrip("0") or "0"
    text = f"{digits}.{fraction}".rstrip("0").rstrip(".")
    return "-" + text if sign in ("-", "\u2212") and text != "0" else text


def in_answer_tags(completion: str) -> str | None:
    """The text in the last <answer>...</answer>, without surrounding spaces; None if there is none."""
    before = completion.rpartition("</answer>")[0]
    _, opened, text = before.rpartition("<answer>")
    return text.strip() if opened and len(completion) <= MAX_COMPLETION else None
