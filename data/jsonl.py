"""Your own prompts, from a file of JSON lines. A JSON list, CSV or Parquet may have the same columns: data/files.py.

    {"prompt": "What is 2+2?", "answer": "4"}
    {"prompt": "What is the capital of France?", "answer": "Paris", "demonstration": "It is Paris."}
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}], "answer": 4}

prompt: text, or messages, which the tokenizer's chat template writes.
answer: text, a number or a boolean. The task's own reward is 1 if the completion is exactly that text (true, false).
With a number (5, not "5") it is 1 if the last number in the completion equals it: "29 + 21 = 50." is right for 50.
data/answers.py says what a number is. Leave the answer out if reward_funcs score. demonstration: what train_sft.py
learns, if not the answer. All other columns go to the reward functions. Every row has the same columns.
prompt_column and answer_column name the first two if they have other names in your file.

Without test_file one prompt in ten is held out. Left out: completions of several messages, tool calls.
Tests: tests/test_jsonl.py.
"""

import json
from decimal import Decimal

from data.answers import MAX_ANSWER, last_number
from data.rewards import ARGUMENTS
from data.rows import FileTask, has_texts
from options import SnugError

NUMBERS = (int, float)  # bool is none


class Jsonl(FileTask):
    wanted = "name a file of prompts, such as --data_file=prompts.jsonl"

    def __init__(self, settings, demonstrations=False):
        self.names = dict(prompt=settings.prompt_column, answer=settings.answer_column)
        super().__init__(settings, demonstrations)
        rows = self.rows["train"] + self.rows["test"]
        self.scored = "answer" in rows[0]
        self.columns = ("answer",) if self.scored else ()
        self.only_numbers = all(type(row.get("answer")) in NUMBERS for row in rows)
        if demonstrations and not self.scored and "demonstration" not in rows[0]:
            missing = "no column demonstration and no column answer to learn"
            raise SnugError(f"data_file={settings.data_file} has {missing}; add one")

    def row_of(self, value, like):
        """A file's column may have another name than ours: prompt_column, answer_column."""
        if not isinstance(value, dict):
            raise ValueError(f'not an object but {json.dumps(value)[:40]}; write {{"prompt": ...}}')
        row = dict(value)
        for name, column in self.names.items():
            if column in row:
                row[name] = row.pop(column)
            elif column != "answer":  # without one, reward_funcs score
                other = next((name for name in value if name not in self.names.values()), "NAME")
                raise ValueError(
                    f"has no column {column}; it has {', '.join(value)}; name it with --{name}_column={other}"
                )
        check_prompt(row["prompt"])
        if not isinstance(row.get("answer", ""), str | int | float):
            raise ValueError(f"answer must be text, a number or a boolean, not {row['answer']!r:.40}")
        if type(row.get("answer")) in NUMBERS and last_number(text_of(row["answer"])) is None:
            raise ValueError(
                f"answer {row['answer']!r:.40} is no number of at most {MAX_ANSWER} digits; write it as text"
            )
        if not isinstance(row.get("demonstration", ""), str):
            raise ValueError(f"demonstration must be text, not {row['demonstration']!r:.40}")
        if like and row.keys() != like.keys():
            raise ValueError(
                f"has the columns {', '.join(row)}, and the rows before have {', '.join(like)}"
            )
        for name in sorted(ARGUMENTS & row.keys()):
            raise ValueError(
                f"the column {name} has the name of an argument of reward functions; rename it"
            )
        return row

    def identity(self, row):
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return prompt
        return json.dumps([[message["role"], message["content"]] for message in prompt])

    def demonstration(self, row, rng):
        return row["demonstration"] if "demonstration" in row else text_of(row.get("answer", ""))

    def answer_of(self, completion):
        return last_number(completion) if self.only_numbers else super().answer_of(completion)

    def is_right(self, completion, answer):
        if type(answer) in NUMBERS:
            return last_number(completion) == last_number(text_of(answer))
        return completion.strip() == text_of(answer).strip()


def text_of(answer):
    if type(answer) in NUMBERS:
        return f"{Decimal(str(answer)):f}"  # without an exponent
    return answer if isinstance(answer, str) else json.dumps(answer)


def check_prompt(prompt):
    """Raises ValueError unless it is text, or messages that the model continues."""
    if isinstance(prompt, str) and prompt:
        return
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"prompt must be text or messages, not {prompt!r:.40}")
    for message in prompt:
        if not has_texts(message, {"role", "content"}):
            raise ValueError(f'a message must be {{"role": text, "content": text}}, not {message!r:.40}')
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            "the last message is the assistant's; the model writes it: move it to demonstration"
        )
