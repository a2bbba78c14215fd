"""Addition of two numbers, column by column.

    prompt      6025+3528=
    completion  13,05,05,09>09553

The completion has the column sums from the right, each with the carry of the column before, then `>` and the answer.
The answer has one digit more than the numbers. Adding two digits is easy to learn. Demonstrations may forget carries,
and GRPO can correct this habit. Only the text after the last `>` is scored.
"""

from dataclasses import dataclass

from data.task import Task
from snug.options import option


@dataclass
class AdditionOptions:
    """task=addition."""

    digits: int = option(4, "digits of each number", minimum=1, maximum=1000)


class Addition(Task):
    options = AdditionOptions
    columns = ("answer",)

    def propose(self, rng):
        """Two numbers of exactly `digits` digits: {"prompt": "6025+3528=", "numbers": [6025, 3528], "answer": 9553}."""
        digits = self.settings.digits
        smallest = 0 if digits == 1 else 10 ** (digits - 1)
        a, b = (rng.randrange(smallest, 10**digits) for _ in range(2))
        return {"prompt": f"{a}+{b}=", "numbers": [a, b], "answer": a + b}

    def identity(self, row):
        low, high = sorted(row["numbers"])
        return f"{low}+{high}"

    def demonstration(self, row, rng):
        """The worked sum. Each carry is forgotten with probability demonstration_noise; the next column then lacks it.

        58+67= is "15,12>125"; without the first carry it is "15,11>115", without the second "15,12>025".
        """
        columns, carry = [], 0
        for x, y in zip(*(reversed(str(number)) for number in row["numbers"]), strict=True):
            columns.append(int(x) + int(y) + carry)
            carry = columns[-1] // 10 if rng.random() >= self.settings.demonstration_noise else 0
        answer = str(carry) + "".join(str(column % 10) for column in reversed(columns))
        return ",".join(f"{column:02d}" for column in columns) + f">{answer}"

    def answer_of(self, completion):
        """The digits after the last `>`, without leading zeros: ">09553" -> "9553"; None if anything else is there."""
        _, arrow, text = completion.rpartition(">")
        is_number = len(text) <= self.settings.digits + 1 and text.isascii() and text.isdigit()
        return str(int(text)) if arrow and is_number else None

    def is_right(self, completion, answer):
        return self.answer_of(completion) == str(answer)

    def longest_bytes(self):
        """-> bytes of the longest prompt, 9999+9999=, and of the longest demonstration, 19,19,19,19>99999."""
        return 2 * self.settings.digits + 2, 4 * self.settings.digits + 1
