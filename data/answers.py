"""Find the answer in a completion, and read it as a number.

Completions are untrusted: their length is limited first, they are searched once, and nothing in them is executed.

    #### 42   #### $1,000.50 a week.   \\boxed{-7\\%}       are numbers: "42", "1000.5", "-7"
    #### 84/2   #### 18 or 19   #### 1,00   #### 4e1      are none

Left out: fractions, exponents, digits other than 0 to 9, decimal commas, numbers in words. Words after the number
are ignored: 42 thousand is 42. Tests: tests/test_gsm8k.py.
"""

import re

MAX_COMPLETION = 200_000  # characters; longer completions have no answer
MAX_ANSWER = 200  # characters of the line after ####, or inside \boxed{}
NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?)(?:\\?[$€£¥] ?(?P<inner>[-+\u2212]?))?(?!0[xXbBoO])"  # -$5, $-5; \u2212 is a minus sign
    r"(?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)(?P<fraction>\.[0-9]+|)"  # a comma every three digits, or no comma
)
NUMERAL = re.compile(r"[0-9]+(?:[.,][0-9]+)*")  # the same read backwards
# A number begins with a sign that is no operator, a decimal point that ends no word, a currency or a digit,
BEGIN = re.compile(r"(?<![0-9A-Za-z_)\]}%+\u2212-])(?=[-+\u2212])|(?<![A-Za-z.])(?=\.)|(?=[\\$€£¥0-9])")
WHOLE = re.compile(
    r"(?<![/^])(?<![0-9][A-Za-z])(?<![0-9][eE][-+\u2212])"
)  # and not as the end of 1/2, 10^3, 4e1.
BESIDE_WORDS = set(
    ".,;:!?%'\"()/*\\{}$€£¥°-"
)  # may follow a number, like letters and spaces: \%, \text{ apples}


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
        text = in_braces(completion[box + 7 :]) if box >= 0 else None
    return read_number(text) if text and len(text) <= MAX_ANSWER else None


def last_number(completion: str) -> str | None:
    """The last number in a text, in the same spelling: "29 + 21 = 50." -> "50"; None if there is none.

        "It costs $1,000.50." -> "1000.5"    "x=-7" -> "-7"    "29+21=50" -> "50"    "3-5" -> "5"    "1/2" -> None

    A sign right before the number belongs to it, but after a digit, a letter or a closing bracket it is an operator.
    If the last digits are only part of a number (1/2, 10^3, 4e1, 5², 1.2.3, 1,00), the text has none.
    """
    numeral = NUMERAL.search(completion[::-1]) if len(completion) <= MAX_COMPLETION else None
    if not numeral or len(numeral[0]) > MAX_ANSWER:
        return None
    start, end = len(completion) - numeral.end(), len(completion) - numeral.start()
    for first in range(max(start - 6, 0), start + 1):  # a sign, \$, a space, a sign and a dot are six
        if BEGIN.match(completion, first) and (number := read_number(completion[first:end])):
            return (
                None
                if not WHOLE.match(completion, first) or completion[end : end + 1].isnumeric()
                else number
            )
    return None


def in_braces(text: str) -> str | None:
    """The text before the closing brace: "4{5}6} 7" -> "4{5}6"; None if there is none in MAX_ANSWER characters."""
    depth = 1
    for i, character in enumerate(text[: MAX_ANSWER + 1]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i].strip()
    return None


def read_number(text: str) -> str | None:
    """ "$1,000.50 a week" -> "1000.5"; None for anything else than a number and then words."""
    found = NUMBER.match(text)
    if not found or not found["whole"] + found["fraction"] or (found["sign"] and found["inner"]):
        return None
    rest = text[found.end() :]
    if not all(c.isspace() or c in BESIDE_WORDS or (c.isalpha() and not c.isnumeric()) for c in rest):
        return None
    whole, fraction = found["whole"].replace(",", "").lstrip("0") or "0", found["fraction"].rstrip("0")
    number = whole + (fraction if fraction != "." else "")
    negative = (found["sign"] or found["inner"] or "+") != "+" and number != "0"
    return "-" + number if negative else number


def in_answer_tags(completion: str) -> str | None:
    """The text in the last <answer>...</answer>, without surrounding spaces; None if there is none."""
    if len(completion) > MAX_COMPLETION:
        return None
    before = completion.rpartition("</answer>")[0]
    _, opened, text = before.rpartition("<answer>")
    return text.strip() if opened else None
