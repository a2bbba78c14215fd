"""MATH (Hendrycks et al. 2021): competition problems whose answers are LaTeX. math-verify compares them.

    pip install math-verify==0.9.0
    curl --create-dirs --output data/math/train.json \\
        https://raw.githubusercontent.com/rasbt/math_full_minus_math500/refs/heads/main/math_full_minus_math500.json
    curl --output data/math/test.json \\
        https://raw.githubusercontent.com/rasbt/reasoning-from-scratch/main/ch03/01_main-chapter-code/math500_test.json

    {"problem": "What is $1 + \\\\frac12$?", "answer": "\\\\frac{3}{2}", "solution": "It is $\\\\boxed{\\\\frac{3}{2}}$."}

The first file has the 12,000 problems that are not in MATH-500, the second has MATH-500. A completion is right if its
last \\boxed{} and the answer have the same value: \\boxed{1.5} is right for \\frac{3}{2}. A completion without one is
wrong. math-verify parses both answers as LaTeX, executes nothing, and gives up after 5 seconds.

The prompt is that of the book "Build a Reasoning Model (From Scratch)", for a base model, so that figures compare.
Tests: tests/test_competition_math.py.
"""

from math_verify import LatexExtractionConfig, parse, verify

from snug import FileTask

PROMPT = (
    "You are a helpful math assistant.\nAnswer the question and write the final result on a new line as:\n"
    "\\boxed{{ANSWER}}\n\nQuestion:\n{problem}\n\nAnswer:"
)
LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
MAX_ANSWER = 500  # characters inside \boxed{}


class CompetitionMath(FileTask):
    columns = ("answer",)
    remedy = "; examples/competition_math.py has the commands that download both files"

    def row_of(self, value):
        """-> {"prompt", "problem", "answer": LaTeX, "solution": the demonstration}"""
        match value:
            case {"problem": str(problem), "answer": str(answer), "solution": str(solution)}:
                prompt = PROMPT.format(problem=problem)
                return {"prompt": prompt, "problem": problem, "answer": answer, "solution": solution}
        raise ValueError(
            f'must be {{"problem": text, "answer": text, "solution": text}}, not {value!r:.60}'
        )

    def identity(self, row):
        return row["problem"]

    def demonstration(self, row, rng):
        return row["solution"]

    def answer_of(self, completion):
        return boxed(completion)

    def is_right(self, completion, answer):
        given = boxed(completion)
        if given is None:
            return False
        both = (parse(f"\\boxed{{{text}}}", extraction_config=LATEX) for text in (answer, given))
        return bool(verify(*both))


def boxed(completion: str) -> str | None:
    """What the last \\boxed{} has between its braces; None without one, or if it has more than MAX_ANSWER characters."""
    _, found, text = completion.rpartition("\\boxed{")
    depth = 1
    for i, character in enumerate(text[: MAX_ANSWER + 1]):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:i].strip() if found else None
    return None
