"""GSM8K: grade-school math word problems, 7,473 for training and 1,319 held out, read from the published files.

    curl --create-dirs --output-dir data/gsm8k --remote-name-all \\
        https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{train,test}.jsonl
    python grpo.py config/grpo_gsm8k.py --init_from=Qwen/Qwen2.5-0.5B-Instruct

    {"question": "Natalia sold clips ...", "answer": "... she sold 48/2 = <<48/2=24>>24 clips in May.\\n#### 72"}

The prompt is the question and an instruction. A completion is right if the number after its last #### (or in a later
\\boxed{}) equals the file's: data/answers.py says which texts are numbers. A demonstration is the file's answer
without the calculator annotations <<...>>. Without test_file one question in ten is held out.

Left out: the calculator, the Socratic version, few-shot examples in the prompt. Tests: tests/test_gsm8k.py.
"""

import re

from data.answers import number_after_marker
from data.rows import FileTask

INSTRUCTION = (
    "Reason step by step, and give the final answer on a line of its own, as #### and then one number."
)


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
