"""GSM8K: grade-school math word problems, 7,473 for training and 1,319 held out, read from the published files.

    curl --create-dirs --output-dir data/gsm8k --remote-name-all \\
        https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{train,test}.jsonl
    python grpo.py config/grpo_gsm8k.py --init_from=Qwen/Qwen2.5-0.5B-Instruct

    {"question": "Natalia sold clips ...", "answer": "... she sold 48/2 = <<48/2=24>>24 clips in May.\\n#### 72"}

The prompt is the question and an instruction. A completion is right if the number after its last #### (or in a later
\\boxed{}) equals the file's. A demonstration is the file's answer without the calculator annotations <<...>>. Without
test_file one question in ten is held out.

    #### 42   #### **$1,000.50** a week.   \\boxed{-7\\%}   are numbers: "42", "1000.5", "-7"
    #### 84/2   #### 18 or 19   #### 1,00   #### 4e1      are none

Words after the number are ignored: 42 thousand is 42. snug's last_number says which texts are numbers.

Left out: the calculator, the Socratic version, few-shot examples in the prompt. Tests: tests/test_gsm8k.py.
"""

import re

from snug import FileTask, last_number

INSTRUCTION = (
    "Reason step by step, and give the final answer on a line of its own, as #### and then one number."
)
MAX_COMPLETION = 200_000  # characters; longer completions have no answer
MAX_ANSWER = 200  # characters of the line after ####, or inside \boxed{}
RUN = re.compile(r"(?:(?<![A-Za-z.])\.)?[0-9]+(?:[.,][0-9]+)*")
MARKS = r"(?:[*_`$€£¥₹]|\\[$(]|[^\S\n])*"  # what may surround a number
MINUS = r"(?:[\-\u2010-\u2013\u2212\ufe63\uff0d]|(?<![A-Za-z])(?i:minus|negative))"
BEGIN = re.compile(rf"{MARKS}(?:{MINUS}|\+)?{MARKS}")
BOX = re.compile(r"((?:[^{}]|{[^{}]*})*)}")  # the content of \boxed{}: 42 \text{ apples}


class GSM8K(FileTask):
    columns = ("answer",)
    remedy = "; config/grpo_gsm8k.py has the command that downloads it"

    def row_of(self, value):
        """-> {"prompt", "question", "answer": the number as text, "demonstration": the worked answer}"""
        match value:
            case {"question": str(question), "answer": str(worked)}:
                number = number_after_marker(worked)
            case _:
                raise ValueError(f'must be {{"question": text, "answer": text}}, not {value!r:.60}')
        if number is None:
            raise ValueError(f"its answer has no number after ####: {worked[-40:]!r}")
        # Without messages a newline separates the answer from the prompt.
        ending = "" if self.settings.chat else "\n"
        return {
            "prompt": f"{question}\n{INSTRUCTION}{ending}",
            "question": question,
            "answer": number,
            "demonstration": re.sub("<<[^<>]*>>", "", worked),
        }

    def identity(self, row):
        return " ".join(row["question"].split()).casefold()

    def demonstration(self, row, rng):
        return row["demonstration"]

    def answer_of(self, completion):
        return number_after_marker(completion)

    def is_right(self, completion, answer):
        return number_after_marker(completion) == answer


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
    run = RUN.search(text) if len(text) <= MAX_ANSWER else None
    if not run or any(character.isnumeric() for character in text[run.end() :]):
        return None
    before = text[: run.start()]
    return last_number(before + run[0]) if BEGIN.fullmatch(before) else None
