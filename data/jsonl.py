"""Your own prompts, from a file of JSON lines.

    {"prompt": "What is 2+2?", "answer": "4"}
    {"prompt": "What is the capital of France?", "answer": "Paris", "demonstration": "It is Paris."}
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}], "answer": 4}

prompt: text, or messages, which are written in the tokenizer's chat template; one of the two in the whole file.
answer: text, a number or a boolean. The task's own reward is 1 if the completion is exactly that text (true, false).
With a number (5, not "5") it is 1 if the last number in the completion equals it: "29 + 21 = 50." is right for 50.
data/answers.py says what a number is. Leave the answer out if reward_funcs score. demonstration: what train_sft.py
learns, if not the answer. All other columns go to the reward functions. Every row has the same columns.

Without test_file one prompt in ten is held out. Left out: completions of several messages, tool calls.
Tests: tests/test_jsonl.py.
"""

import json
from decimal import Decimal

from data.answers import MAX_ANSWER, last_number
from data.rows import FileTask, has_texts, read_lines
from options import SnugError

NUMBERS = (int, float)  # bool is none
RESERVED = {"stopped", "completion_ids", "completions", "prompts"}  # arguments of reward functions


class Jsonl(FileTask):
    wanted = "name a file of JSON lines, such as --data_file=prompts.jsonl"

    def __init__(self, settings, demonstrations=False):
        super().__init__(settings, demonstrations)
        columns = self.rows["train"][0].keys()
        self.scored = "answer" in columns
        self.columns = ("answer",) if self.scored else ()
        self.only_numbers = all(
            type(row.get("answer")) in NUMBERS for rows in self.rows.values() for row in rows
        )
        if demonstrations and not columns & {"answer", "demonstration"}:
            missing = "no column demonstration, nor answer, to learn from"
            raise SnugError(f"data_file={settings.data_file} has {missing}; add one")

    def read(self, path, like=None):
        return read_lines(path, check_row, like)

    def identity(self, row):
        prompt = row["prompt"]
        return (
            prompt
            if isinstance(prompt, str)
            else json.dumps([[m["role"], m["content"]] for m in prompt])
        )

    def demonstration(self, row, rng):
        return row["demonstration"] if "demonstration" in row else text_of(row.get("answer", ""))

    def answer_of(self, completion):
        return last_number(completion) if self.only_numbers else super().answer_of(completion)

    def is_right(self, completion, answer=None):
        if type(answer) in NUMBERS:
            number = last_number(completion)
            return number is not None and number == last_number(text_of(answer))
        return answer is not None and completion.strip() == text_of(answer).strip()


def text_of(answer):
    if type(answer) in NUMBERS:
        return f"{Decimal(str(answer)):f}"  # without an exponent
    return answer if isinstance(answer, str) else json.dumps(answer)


def check_row(row, like):
    """Raises ValueError if a line's value is not a row, or has other columns than `like`."""
    if not isinstance(row, dict):
        raise ValueError(f'not an object but {json.dumps(row)[:40]}; write {{"prompt": ...}}')
    if "prompt" not in row:
        raise ValueError("has no prompt")
    check_prompt(row["prompt"])
    if not isinstance(row.get("answer", ""), str | int | float):
        raise ValueError(f"answer must be text, a number or a boolean, not {row['answer']!r:.40}")
    if type(row.get("answer")) in NUMBERS and last_number(text_of(row["answer"])) is None:
        raise ValueError(
            f"answer {row['answer']!r:.40} is no number of {MAX_ANSWER} digits or fewer; write it as text"
        )
    if not isinstance(row.get("demonstration", ""), str):
        raise ValueError(f"demonstration must be text, not {row['demonstration']!r:.40}")
    if row.keys() != like.keys():
        differences = [f"no {name}" for name in sorted(like.keys() - row.keys())]
        differences += [f"also {name}" for name in sorted(row.keys() - like.keys())]
        raise ValueError(f"other columns than the rows before: {', '.join(differences)}")
    if isinstance(row["prompt"], str) != isinstance(like["prompt"], str):
        kinds = ("text", "messages") if isinstance(row["prompt"], str) else ("messages", "text")
        raise ValueError(
            "a prompt of {} where the rows before have {}; use one of the two".format(*kinds)
        )
    for name in RESERVED & row.keys():
        raise ValueError(
            f"the column {name} has the name of an argument of reward functions; rename it"
        )


def check_prompt(prompt):
    """Raises ValueError unless it is text, or messages that the model continues."""
    if isinstance(prompt, str) and prompt:
        return
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"prompt must be text or messages, not {prompt!r:.40}")
    for message in prompt:
        if not has_texts(message, {"role", "content"}):
            raise ValueError(
                f'a message must be {{"role": text, "content": text}}, not {message!r:.40}'
            )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            "the last message is the assistant's, which the model has to write; move it to demonstration"
        )
