"""Your own prompts, from a file of JSON lines. A JSON list or Parquet may have the same columns: files.py.

    {"prompt": "What is 2+2?", "answer": "4"}
    {"prompt": "What is the capital of France?", "answer": "Paris", "demonstration": "It is Paris."}
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}], "answer": 4}

prompt: text, or messages, which the tokenizer's chat template writes. The content of a message is text, or one part
of text: [{"type": "text", "text": ...}]. If the last message is the assistant's, completions go on behind it; SFT of a
row without another demonstration learns it. A column messages is the prompt if there is no column prompt; such a last
message of it is the demonstration. SFT learns the assistant's earlier messages too, each as a row of its own, behind
what the chat template writes of the messages before it (assistant_turns=last: only the last). Of a held-out row it
reads the last one.
answer: text, a number or a boolean. The task's own reward is 1 if the completion is exactly that text (true, false).
With a number (5, not "5") it is 1 if the last number in the completion equals it: "29 + 21 = 50." is right for 50.
data/answers.py says what a number is. If reward_funcs score, the answer may be anything, or missing.
demonstration: what train_sft.py learns, if not the answer; TRL's completion, text or one message, is the same. All
other columns go to the reward functions.
prompt_column and answer_column name the first two if they have other names in your file. Reward functions get these
columns under both names. A message's role is system, developer, user, assistant or tool.

Without test_file one prompt in ten is held out, or more of a small file: rows.py.
Left out: completions of several messages, tool calls.
Tests: tests/test_jsonl.py.
"""

import json
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from data.answers import MAX_ANSWER, last_number
from data.rewards import ARGUMENTS
from data.rows import FileOptions, FileTask, Row
from data.task import split_beginning
from snug.options import SnugError, option

NUMBERS = (int, float)  # bool is none
ROLES = "system", "developer", "user", "assistant", "tool"


@dataclass
class JsonlOptions(FileOptions):
    """task=jsonl."""

    prompt_column: str = option("prompt", "the files' column with the prompt")
    answer_column: str = option("answer", "the files' column with the answer")


class Jsonl(FileTask):
    options = JsonlOptions
    columns = ("answer",)

    def __init__(self, settings, demonstrations=False):
        self.names = dict(prompt=settings.prompt_column, answer=settings.answer_column)
        self.free = bool(settings.reward_funcs or settings.environment)  # the answers are not for us
        self.demonstrates = demonstrations
        self.all_turns = demonstrations and settings.assistant_turns == "all"
        super().__init__(settings, demonstrations)
        rows = self.rows["train"] + self.rows["test"]
        for row in rows:
            problem = problem_of(row.get("answer"))
            scores = "answer" in self.blank and not self.free
            needed = not row.get("demonstration") if demonstrations else scores
            if problem and needed:
                raise SnugError(f"{row.place}: answer {problem}")
            self.scored &= not problem
        self.only_numbers = all(type(row.get("answer")) in NUMBERS for row in rows)

    def row_of(self, value):
        """A file's column may have another name than ours: prompt_column, answer_column, messages."""
        if not isinstance(value, dict):
            raise ValueError(f'not an object but {json.dumps(value)[:40]}; write {{"prompt": ...}}')
        row = dict(value)
        match value:
            case {"completion": str(text) | [{"role": "assistant", "content": str(text)}]}:
                row["demonstration"] = row.get("demonstration") or text
        for name, column in self.names.items():
            if column == "prompt" and "prompt" not in row and "messages" in row:
                column = "messages"
            if column in value:
                row[name] = value[column]
                if column in ARGUMENTS:
                    row.pop(column, None)
            elif name == "prompt" or column != "answer" and not self.free:
                raise ValueError(
                    f"has no column {column}; it has {', '.join(value)}; name it with --{name}_column=NAME"
                )
            else:
                row.pop(name, None)  # the file's own, if another is named
        prompt = row["prompt"]
        if isinstance(prompt, list):
            row["prompt"] = prompt = list(map(as_message, prompt))
            roles = [message["role"] for message in prompt]
            if self.demonstrates and ("assistant", "assistant") in pairwise(roles):
                raise ValueError("two messages of the assistant follow each other; join them")
            asked, last = split_beginning(prompt)
            learned = self.demonstrates and not row.get("demonstration") and row.get("answer") is None
            if last and (learned or self.names["prompt"] not in value):
                row["prompt"] = prompt = asked
                self.answered += not self.demonstrates
                row["demonstration"] = row.get("demonstration") or last
        if not prompt or not isinstance(prompt, str | list):
            raise ValueError(f"prompt must be text or messages, not {prompt!r:.40}")
        if taken := ARGUMENTS & row.keys():
            raise ValueError(
                f"column {min(taken)} has the name of an argument of reward functions; rename it"
            )
        return row

    def earlier(self, row):
        turns = []
        if self.all_turns and "messages" in row:
            for n, message in enumerate(row["prompt"]):
                match message:
                    case {"role": "assistant", "content": str(text)} if n and text:
                        turns.append(Row(row | dict(prompt=row["prompt"][:n], demonstration=text)))
                        turns[-1].place = row.place
        return turns

    def identity(self, row):
        prompt, _ = split_beginning(row["prompt"])
        if isinstance(prompt, str):
            return prompt
        return json.dumps([[*message.values()] for message in prompt])

    def demonstration(self, row, rng):
        return text_of(row.get("demonstration") or row.get("answer", ""))

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


def problem_of(answer) -> str:
    """Why this task cannot score by this answer; "" if it can."""
    if not isinstance(answer, str | int | float):
        return (
            f"must be text, a number or a boolean, not {answer!r:.40}; rows need an answer, or "
            "--answer_column=NAME, or else a demonstration (SFT), or reward_funcs (GRPO)"
        )
    if type(answer) in NUMBERS and last_number(text_of(answer)) is None:
        return f"{answer!r:.40} is no number of at most {MAX_ANSWER} digits; write it as text"
    return ""


def as_message(message) -> dict:
    """A message of a file -> {"role": text, "content": text}.

    Content may be one part, [{"type": "text", "text": text}]. Other keys must be empty: Arrow adds such keys. Raises
    ValueError.
    """
    match message:
        case {"role": str(role), "content": str(text) | [{"text": str(text)}], **others}:
            if role not in ROLES:
                raise ValueError(f"{role!r:.40} is no role of a message; write {', '.join(ROLES)}")
            if not any(others.values()):
                return dict(role=role, content=text)
    raise ValueError(f'a message must be {{"role": text, "content": text}}, not {message!r:.40}')
