"""GSM8K in programs: the model completes a function, and what the function returns is compared with the file's number.

    python grpo.py config/distill_code.py --task=examples.gsm8k_program:GSM8KProgram \\
        --data_file=data/gsm8k/train.jsonl --test_file=data/gsm8k/test.jsonl

A coder of 0.5B parameters is right more often this way than in words: Python does the arithmetic. The questions are in
the files that examples/gsm8k.py downloads; code.py executes the programs.
Test: pytest tests/test_gsm8k.py
"""

from examples.code import Code
from examples.gsm8k import number_after_marker

FORM = '''Please complete the following function in a markdown code block:
```python
def solution():
    """Returns the answer to the question."""
```'''


class GSM8KProgram(Code):
    remedy = "; config/grpo_gsm8k.py has the command that downloads it"

    def row_of(self, value):
        """-> code.py's row of {"question": text, "answer": worked answer}, with "question" and "answer", the number."""
        match value:
            case {"question": str(question), "answer": str(worked)} if number := number_after_marker(
                worked
            ):
                test = f"assert abs(float(solution()) - {number}) < 1e-4"
                row = super().row_of(dict(prompt=f"{question}\n\n{FORM}", tests=[test]))
                return row | dict(question=question, answer=number)
        raise ValueError(
            f'must be {{"question": text, "answer": text with #### and a number}}, not {value!r:.60}'
        )
