"""Write a Python function; the reward is how many of its tests it passes. Each row of a file has tests of its own:

    {"prompt": "def f(x):\\n ...", "entry_point": "f", "test": "def check(candidate): ...", ...}     HumanEval
    {"text": "Write a function ...", "test_list": ["assert f(1) == 2", ...], "code": "def f ...", ...}   MBPP
    {"prompt": "def f(x):\\n ...", "tests": ["assert f(1) == 2", ...]}                               your own

    python evaluate.py Qwen/Qwen2.5-Coder-0.5B-Instruct --task=examples.code:Code --chat --test_file=data/HumanEval.jsonl.gz

MBPP's sanitized rows have prompt for text. A prompt that is the beginning of a program is that of a base model, and
with chat it stands in a code block behind an instruction. Any other prompt stays as it is. A completion's program is
the last code block that parses and defines the function at its top level, or the last block, or the whole text; other
blocks come before it if they define or import what it needs. Without chat, behind a prompt of code, it ends at
HumanEval's stop sequences, unless it begins with a block.
The program is executed, behind the prompt's code. programs.py says what it can do and see there: no tests.

A demonstration is canonical_solution, or MBPP's code. samples.jsonl has the share of tests that each completion's
program passed, and its first error.

Left out: other languages; tests that need files or the network.
Tests: tests/test_code.py.
"""

import ast
import builtins
import re
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from symtable import symtable
from textwrap import dedent

from examples.programs import POOL, Program, is_test, judge, of_thread
from snug import FileOptions, FileTask, text_of
from snug.options import SnugError, option

# EvalPlus' (Liu et al. 2023), whose figures the models' reports have.
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:"
)
# Python's strings and comments, in which no block ends.
WHOLE = (
    r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|#[^\n]*|'
    r"'''(?:\\.|[^\\])*?'''|'(?:\\.|[^'\\\n])*'"
)
# Blocks that end at any fence, and blocks that end at a fence alone on its line, outside of strings.
BLOCKS = [
    re.compile(text, re.MULTILINE | re.DOTALL)
    for text in (
        r"(?<![`~])(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)",
        rf"(?<!\S)(`{{3,}}|~{{3,}})[ \t]*[\w+.-]*\s*?\n((?:{WHOLE}|.)*?)(?:^[ \t]*\1\s*?$|\Z)",
    )
]
# Where the function is over: HumanEval's stop sequences (Chen et al. 2021).
NEXT = re.compile(r"\n(?:class|def|#|if|print|@|```)")
MAX_PROGRAM = 50_000  # characters


@contextmanager
def unwarned():
    """Python warns of nothing in code of others."""
    with warnings.catch_warnings(action="ignore"):
        yield


@dataclass
class CodeOptions(FileOptions):
    """task=examples.code:Code."""

    code_reward: str = option(
        "share", "share: of the tests that pass; all: 1 if all pass", choices=("share", "all")
    )
    code_timeout: float = option(3.0, "seconds for a program and its tests", minimum=0.1)
    unconfined: bool = option(
        False, "execute programs even where the kernel has neither Landlock nor seccomp"
    )


class Code(FileTask):
    options = CodeOptions

    def __init__(self, settings, demonstrations=False):
        super().__init__(settings, demonstrations)
        for row in self.rows["train"] + self.rows["test"] if demonstrations else ():
            if not row["solution"]:
                raise SnugError(f"{row.place}: has no canonical_solution, from which SFT learns")
        if not demonstrations and not settings.unconfined:
            refuse_unconfined()

    @unwarned()
    def row_of(self, value):
        """-> what a file has, and prompt; head: its code; solution; names, setup, tests: of `judge`."""
        names, text = [], ""
        match value:
            case {"prompt": str(prompt), "entry_point": str(name), "test": str(test)}:
                setup, argument, tests = opened(test)
                tests.insert(0, f"{argument} = {name}")
                names = [name]
            case {"test_list": [str(first), *_] as tests} if text := of(value, "text") or of(
                value, "prompt"
            ):
                setup = of(value, "test_setup_code") or "\n".join(of(value, "test_imports", list))
                prompt = f'"""\n{text}\n{first}\n"""\n'
            case {"prompt": str(prompt), "tests": [str(_), *_] as tests}:
                setup = of(value, "setup")
            case _:
                own = '{"prompt": text, "tests": ["assert f(1) == 2"]}'
                raise ValueError(f"must be a row of HumanEval, of MBPP or {own}, not {value!r:.60}")
        head = prompt if functions(prompt) else ""
        names = names or functions(head)[-1:] or sorted(names_in("\n".join([setup, *tests]))[2])
        setup = f"{whole(head)}\n{setup}"
        for code in (setup, *tests):
            compile(code, "the row's code", "exec")
        if not names or not any(map(is_test, tests)):
            raise ValueError("its tests call no function, or have no assert")
        if (head or text) and self.settings.chat:
            prompt = f"{INSTRUCTION}\n```python\n{prompt.strip()}\n```"
        row = value | dict(prompt=prompt, head=head, setup=setup, names=names, tests=tests)
        return row | dict(solution=of(value, "canonical_solution") or of(value, "code"))

    def demonstration(self, row, rng):
        if self.settings.chat:
            return f"```python\n{row['head']}{row['solution']}\n```"
        return row["solution"]

    def program(self, completion: str, head: str, names: list[str]) -> str:
        text = completion[:MAX_PROGRAM]
        if head and not self.settings.chat and not text.lstrip().startswith(("```", "~~~")):
            return head + NEXT.split(text)[0]
        blocks = [found[2] for kind in BLOCKS for found in kind.finditer(text)]
        parts = [(code, *names_in(code)) for code in map(dedent, blocks)]  # in a list it is indented
        bodies = [block for block in blocks if head and block[:1].isspace()]
        ours = [code for code, made, _, _ in parts if made & {*names}]
        program = f"{whole(head)}\n{[text, *blocks, *bodies, *ours][-1]}"
        _, given, missing = names_in(program)
        for code, _, gives, needs in reversed(parts):
            if gives & (missing | {*names}) - given:
                program, given, missing = f"{code}\n{program}", given | gives, missing | needs
        return program

    def rewards(self, prompts, completions, log_extra=None, **columns):
        """The share of its tests that each completion passes; with code_reward=all 1.0 or 0.0. With chat 0.0 for one
        that was cut off: a model that earned for it wrote ever more behind its program."""
        row = [columns[name] for name in ("setup", "names", "tests")]
        texts = map(text_of, completions)
        programs = map(self.program, texts, columns["head"], columns["names"])
        seconds = [self.settings.code_timeout] * len(prompts)
        verdicts = list(POOL.map(judge, programs, *row, seconds))
        for name in verdicts[0] if log_extra else ():
            log_extra(name, [verdict[name] for verdict in verdicts])
        # Without chat the end of the function is the end, so a base model need not stop.
        stopped = columns.get("stopped") if self.settings.chat else None
        pairs = zip(verdicts, stopped or [True] * len(prompts), strict=True)
        shares = [verdict["passed"] * ended for verdict, ended in pairs]
        return shares if self.settings.code_reward == "share" else [float(s == 1) for s in shares]


def refuse_unconfined():
    """Raises SnugError where the kernel confines no program."""
    box = of_thread(Program, 1.0)
    box.start()
    if {"landlock", "seccomp"} <= {*box.missing}:
        raise SnugError(
            "task='examples.code:Code' executes what a model writes, and this system has neither Landlock nor seccomp to confine it; "
            "use a Linux with one of them, or take the risk: --unconfined"
        )


def functions(prompt: str) -> list[str]:
    """Names of the functions that a prompt begins or defines; none if it is no code."""
    with suppress(SyntaxError):
        statements = ast.parse(whole(prompt)).body
        return [node.name for node in statements if isinstance(node, ast.FunctionDef)]
    return []


def whole(code: str) -> str:
    """The code of a prompt with a body for its last function, if that has none."""
    with suppress(SyntaxError):
        ast.parse(code)
        return code
    return f"{code}\n    pass\n"


def opened(test: str) -> tuple[str, str, list[str]]:
    """HumanEval's test -> (what stands around its function check, check's argument, its statements)."""
    module = ast.parse(test)
    for node in module.body:
        match node:
            case ast.FunctionDef("check", ast.arguments(args=[ast.arg(argument)]), body):
                module.body.remove(node)
                return ast.unparse(module), argument, list(map(ast.unparse, body))
    raise ValueError("its test has no function check(candidate)")


def of(row, column: str, kind=str):
    """What a row has in a column, or an empty one. Raises ValueError if it is of another kind."""
    value = row.get(column) or kind()
    if not isinstance(value, kind):
        raise ValueError(f"{column} must be {'a list' if kind is list else 'text'}, not {value!r:.60}")
    return value


def names_in(code: str) -> tuple[set, set, set]:
    """-> names that code defines at its top level, these and what it imports there, and what it lacks.

    Python's own names are not lacking. All are empty if the code does not parse.
    """
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), unwarned():
        tables = [symtable(code, "program", "exec")]
        top = tables[0].get_symbols()
        made = {symbol.get_name() for symbol in top if symbol.is_assigned()}
        given = made | {symbol.get_name() for symbol in top if symbol.is_imported()}
        for table in tables:
            tables += table.get_children()
        used = {each.get_name() for table in tables for each in table.get_symbols() if each.is_global()}
        return made, given, used - given - {*dir(builtins)}
    return set(), set(), set()
