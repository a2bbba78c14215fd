"""Addition of two numbers, column by column.

    prompt      6025+3528=
    completion  13,05,05,09>09553

First the sums of the columns, from the right, each with the carry from the one before it, then the answer, padded with
zeros to one digit more than the numbers have. Sums of two digits are easy to learn; the carries are what demonstrations
may get wrong and what reinforcement can put right. Only what follows the last `>` is scored.

Left out: credit for right column sums, more than two numbers, negative ones.
"""

from data.task import Task
from options import SnugError

MAX_DIGITS = 1000  # Python itself refuses to print numbers of more than 4,300


class Addition(Task):
    columns = ("answer",)

    def __init__(self, settings):
        super().__init__(settings)
        self.digits = settings.digits
        if self.digits > MAX_DIGITS:
            raise SnugError(f"digits={self.digits} is above {MAX_DIGITS}")

    def propose(self, rng):
        """Two numbers of exactly `digits` digits: {"prompt": "6025+3528=", "numbers": [6025, 3528], "answer": 9553}."""
        smallest = 0 if self.digits == 1 else 10 ** (self.digits - 1)
        a, b = (rng.randrange(smallest, 10**self.digits) for _ in range(2))
        return {"prompt": f"{a}+{b}=", "numbers": [a, b], "answer": a + b}

    def identity(self, row):
        low, high = sorted(row["numbers"])
        return f"{low}+{high}"

    def demonstration(self, row, rng):
        """The worked sum. Each carry is forgotten with probability demonstration_noise, and what follows is added without it.

        58+67= is "15,12>125"; without the first carry it is "15,11>115", without the second "15,12>025".
        """
        columns, carry = [], 0
        for x, y in zip(*(reversed(str(number)) for number in row["numbers"]), strict=True):
            columns.append(int(x) + int(y) + carry)
            carry = columns[-1] // 10 if rng.random() >= self.demonstration_noise else 0
        answer = str(carry) + "".join(str(column % 10) for column in reversed(columns))
        return ",".join(f"{column:02d}" for column in columns) + f">{answer}"

    def answer_of(self, completion):
        """The digits after the last `>`, if nothing else is there, without the zeros before them: "13,05,05,09>09553" -> "9553"."""
        _, arrow, text = completion.rpartition(">")
        is_number = len(text) <= self.digits + 1 and text.isascii() and text.isdigit()
        return str(int(text)) if arrow and is_number else None

    def is_right(self, completion, answer):
        return self.answer_of(completion) == str(answer)

    def longest_prompt(self):
        return f"{'9' * self.digits}+{'9' * self.digits}="

    def longest_answer(self):
        return ",".join(["19"] * self.digits) + ">" + "9" * (self.digits + 1)
