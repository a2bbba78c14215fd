"""Read the number at the end of a completion.

    29 + 21 = 50.   It costs **$1,000.50**   x=-7   are numbers: "50", "1000.5", "-7"
    84/2   10^3   1,00   4e1                        are none

Completions are untrusted: their length is limited first, they are searched once, and nothing in them is executed. Left
out: fractions, exponents, digits other than 0 to 9, decimal commas, numbers in words.

A minus sign is a hyphen, U+2212, an en dash or another dash, but not the long one, or `minus` or `negative`. Between it
and its number may be spaces, a currency and marks such as **. It is the number's unless it is an operator or a bullet:

    is -5   is - 5   = –5   = - $5   **-5**   is negative 5   3 -5              -5
    3-5   3 - 5   x - 5   (3) - 5   50% - 5   top-5   12 minus 5   3+-5          5
    - 5 at the start of a line, behind another line                              5

Tests: tests/test_gsm8k.py.
"""

import re

MAX_COMPLETION = 200_000  # characters; longer completions have no answer
MAX_ANSWER = 200  # characters of a number
NEAR = 60  # characters before a number that say whether it has a sign
RUN = re.compile(r"(?:(?<![A-Za-z.])\.)?[0-9]+(?:[.,][0-9]+)*")
NUMBER = re.compile(r"([1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]+))?")
DASH = r"\-\u2010-\u2013\u2212\ufe63\uff0d"
MARKS = r"(?:[*_`$€£¥₹]|\\[$(]|[^\S\n])*"  # what may surround a number
MINUS = rf"(?:[{DASH}]|(?<![A-Za-z])(?i:minus|negative))"
# A minus is an operator, group 1, right behind a number, a letter, a bracket, a sign. Apart from its number it is one
# also behind spaces and a number or a single letter, not a word; at the start of a line it is a bullet.
OPERAND = r"(?:[0-9)\]}%°²³$€]|[0-9]\*\*|(?<![A-Za-z'’])[B-HJ-Zb-z])[^\S\n]+|\n[^\S\n]*"
SIGN = re.compile(
    rf"((?:[0-9A-Za-z_)\]}}%{DASH}+]|(?:{OPERAND})(?={MINUS}\S*\s)){MINUS})?(?:(?(1)|{MINUS})){MARKS}\Z"
)
# What stands before a run that is only the end of a number: 1/2, 10^3, 4e1, 4e-1, \frac{1}{2}
PART = re.compile(rf"(?:(?:[/^]{{?|}}{{)[{DASH}+]?(?:\\?[$] ?)?|[0-9][A-Za-z]|[0-9][eE][{DASH}+])\Z")


def last_number(completion: str):
    """The last number in a text, in the same spelling: "29 + 21 = 50." -> "50"; None if there is none.

        "It costs $1,000.50." -> "1000.5"    "x=-7" -> "-7"    "29+21=50" -> "50"    "3-5" -> "5"    "1/2" -> None

    If the last digits are only part of a number (1/2, 10^3, 4e1, 5², 1.2.3, 1,00), the text has none.
    """
    run = None
    if len(completion) <= MAX_COMPLETION:
        run = max(RUN.finditer(completion), key=re.Match.end, default=None)
    if not run or completion[run.end() : run.end() + 1].isnumeric():
        return None
    before = completion[max(run.start() - NEAR, 0) : run.start()]
    return None if PART.search(before) else spell(before, run[0])


def spell(before: str, run: str):
    """ "is -$", "1,000.50" -> "-1000.5"; None for 1,00 and 1.2.3."""
    number = NUMBER.fullmatch(run)
    if not number or len(run) > MAX_ANSWER:
        return None
    whole, fraction = number.groups("")
    digits = whole.replace(",", "").lstrip("0") or "0"
    text = f"{digits}.{fraction}".rstrip("0").rstrip(".")
    sign = SIGN.search(before)
    return "-" + text if sign and not sign[1] and text != "0" else text
