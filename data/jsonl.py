"""Your own prompts, from a file of JSON lines.

    {"prompt": "What is 2+2?", "answer": "4"}
    {"prompt": "What is the capital of France?", "answer": "Paris", "demonstration": "It is Paris."}
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}], "answer": 4}

prompt: text, or messages, which are written as the template beside the tokenizer has them; a file has prompts of one of the two kinds.
answer: text, a number or a boolean, for the task's own reward, which wants the completion to be just that; leave it out where
reward_funcs score; then nothing is evaluated. demonstration: what train_sft.py learns, if it is not the answer. Any other
column goes to the reward functions. Every row has the same columns.

Without test_file one prompt in ten is held out, by the prompt itself. Left out: completions of several messages, calls of tools.
"""

import json

from data.rows import FileTask, read_lines
from options import SnugError


class Jsonl(FileTask):
    wanted = "name a file of JSON lines, such as --data_file=prompts.jsonl"

    def __init__(self, settings):
        super().__init__(settings)
        row = self.rows["train"][0]
        self.scored = "answer" in row
        if not self.scored and not getattr(settings, "reward_funcs", ["SFT"]):
            raise SnugError(
                f"data_file={settings.data_file} has no column answer to score completions by; add it, or reward_funcs"
            )
        if not self.scored and "demonstration" not in row and not hasattr(settings, "reward_funcs"):
            raise SnugError(
                f"data_file={settings.data_file} has no column demonstration, nor answer, to learn from; add one"
            )
        self.columns = ("answer",) if self.scored else ()

    def read(self, path, like=None):
        return read_rows(path, like)

    def identity(self, row):
        prompt = row["prompt"]
        return (
            prompt
            if isinstance(prompt, str)
            else json.dumps([[message["role"], message["content"]] for message in prompt])
        )

    def demonstration(self, row, rng):
        return row["demonstration"] if "demonstration" in row else text_of(row.get("answer", ""))

    def is_right(self, completion, answer=None):
        return answer is not None and completion.strip() == text_of(answer).strip()


def text_of(answer):
    return answer if isinstance(answer, str) else json.dumps(answer)


def read_rows(path, like=None):
    """A file of JSON lines -> its rows. like: a row whose columns they must have too; else the first one's. Raises SnugError."""
    return read_lines(path, wrong_with, like)


def wrong_with(row, like):
    """What is wrong with a row, in words, or None."""
    if not isinstance(row, dict):
        return f'not an object but {json.dumps(row)[:40]}; write {{"prompt": ...}}'
    if "prompt" not in row:
        return "has no prompt"
    if wrong := wrong_with_prompt(row["prompt"]):
        return wrong
    if not isinstance(row.get("answer", ""), str | int | float):
        return f"answer must be text, a number or a boolean, not {row['answer']!r:.40}"
    if not isinstance(row.get("demonstration", ""), str):
        return f"demonstration must be text, not {row['demonstration']!r:.40}"
    missing, surplus = sorted(set(like) - set(row)), sorted(set(row) - set(like))
    if missing or surplus:
        return "other columns than the rows before: " + ", ".join(
            [f"no {name}" for name in missing] + [f"also {name}" for name in surplus]
        )
    if isinstance(row["prompt"], str) != isinstance(like["prompt"], str):
        kinds = ("text", "messages") if isinstance(row["prompt"], str) else ("messages", "text")
        return "a prompt of {} where the rows before have {}; take one of the two".format(*kinds)
    for name in ("stopped", "completion_ids", "completions", "prompts"):
        if name in row:
            return f"the column {name} has the name of one that reward functions get from the sampler; rename it"
    return None


def wrong_with_prompt(prompt):
    """It is text, or messages of which the model is to write the next."""
    if isinstance(prompt, str) and prompt:
        return None
    if not isinstance(prompt, list) or not prompt:
        return f"prompt must be text or messages, not {prompt!r:.40}"
    for message in prompt:
        if (
            not isinstance(message, dict)
            or set(message) != {"role", "content"}
            or not all(isinstance(v, str) for v in message.values())
        ):
            return f'a message must be {{"role": text, "content": text}}, not {message!r:.40}'
    if prompt[-1]["role"] == "assistant":
        return "the last message is the assistant's, which is for the model to write; put it into demonstration"
    return None
