"""GSM8K: grade-school mathematics in words, 7,473 problems to learn from and 1,319 held out, read as they were published.

    python -m data.gsm8k prepare                      fetches both files into data/gsm8k and checks them
    python grpo.py --task=gsm8k --data_file=data/gsm8k/train.jsonl --test_file=data/gsm8k/test.jsonl

    {"question": "Natalia sold clips ...", "answer": "... she sold 48/2 = <<48/2=24>>24 clips in May.\\n#### 72"}

The prompt is the question and a line that says how to answer. A completion is right where the number after its last #### (or in
a \\boxed{} after it) equals the file's: `data/answers.py` says which texts are numbers. A demonstration is the file's own answer
without what a calculator was to do, <<...>>. Without test_file one question in ten is held out.

Left out: the calculator, the Socratic version, examples in the prompt.
"""

import hashlib
import http.client
import os
import re
import sys
import urllib.request
from pathlib import Path

from data.answers import number_after_marker
from data.rows import FileTask, read_lines
from options import SnugError, friendly_errors

INSTRUCTION = "Reason step by step, and give the final answer on a line of its own, as #### and then one number."
SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
FILES = {  # name: (rows, SHA-256)
    "train.jsonl": (7473, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "test.jsonl": (1319, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
}
FOLDER = "data/gsm8k"
TIMEOUT = 30.0  # seconds that the server may be silent
MAX_BYTES = 2**26  # of a file that is fetched; the longer of the two has 4 MB
FETCH = "python -m data.gsm8k prepare fetches it"


class GSM8K(FileTask):
    columns = ("answer",)
    wanted = f"name GSM8K's train.jsonl; {FETCH}"

    def read(self, path, like=None):
        """-> [{"prompt", "question", "answer": the number as text, "demonstration": the worked answer}]"""
        ending = "" if self.chat else "\n"  # an answer begins on a line of its own; a message of its own is enough
        return [
            {
                "prompt": f"{row['question']}\n{INSTRUCTION}{ending}",
                "question": row["question"],
                "answer": number_after_marker(row["answer"]),
                "demonstration": re.sub("<<[^<>]*>>", "", row["answer"]),
            }
            for row in read_lines(path, wrong_with, remedy=FETCH)
        ]

    def identity(self, row):
        return " ".join(row["question"].split()).casefold()

    def demonstration(self, row, rng):
        return row["demonstration"]

    def answer_of(self, completion):
        return number_after_marker(completion)

    def is_right(self, completion, answer):
        return answer is not None and number_after_marker(completion) == answer

    def reward_functions(self):
        return self.in_parts()


def wrong_with(row, like):
    """What is wrong with a line's value, in words, or None."""
    if (
        not isinstance(row, dict)
        or set(row) != {"question", "answer"}
        or not all(isinstance(text, str) for text in row.values())
    ):
        return f'must be {{"question": text, "answer": text}}, not {row!r:.60}'
    if not row["question"].strip():
        return "has no question"
    if number_after_marker(row["answer"]) is None:
        return f"its answer has no number after ####: {row['answer'][-40:]!r}"
    return None


# -----------------------------------------------------------------------------
# Fetching it


def prepare(folder=FOLDER):
    """Both files in `folder`, fetched where they are missing; says a line of each. Raises SnugError, and leaves files alone that are wrong."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnugError(f"{folder}: cannot be made ({error.strerror})") from None
    for name, (rows, expected) in FILES.items():
        path = Path(folder) / name
        if path.exists():
            check(contents(path), rows, expected, path, "move it away, or name another folder")
            print(f"{path}: {rows:,} rows, was there")
        else:
            data = fetch(SOURCE + name)
            check(data, rows, expected, SOURCE + name, "nothing was written; try again")
            write(path, data)
            print(f"{path}: {rows:,} rows, fetched")


def contents(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise SnugError(f"{path}: cannot be read ({error.strerror})") from None


def check(data, rows, expected, source, remedy):
    """Are these bytes the published ones?"""
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise SnugError(f"{source}: its {len(data):,} bytes have SHA-256 {found}, and should have {expected}; {remedy}")
    if data.count(b"\n") != rows:
        raise SnugError(f"{source}: has {data.count(10)} rows, and should have {rows}; {remedy}")


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return response.read(MAX_BYTES)
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
    ) as error:  # no network, an HTTP status, silence; half an answer; no such URL
        raise SnugError(
            f"{url}: cannot be fetched ({type(error).__name__}: {error}); try again, or put the file where it should be"
        ) from None


def write(path, data):
    """As a whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        raise SnugError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        part.unlink(missing_ok=True)


def main(words):
    if not 1 <= len(words) <= 2 or words[0] != "prepare" or words[-1].startswith("-"):
        raise SnugError(
            f"usage: python -m data.gsm8k prepare [folder], not {' '.join(words)!r:.60}; the folder is {FOLDER} if none is named"
        )
    prepare(*words[1:])


if __name__ == "__main__":
    with friendly_errors():
        main(sys.argv[1:])
