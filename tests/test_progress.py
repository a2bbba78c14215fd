"""Signs of life of real commands, in a pipe and in a terminal."""

import os
import re
import runpy
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from helpers import HOME
from helpers.models import make_chat_model, make_flat_model
from sample import sample_groups
from snug.options import progress
from snug.options.progress import PHASES, counted, phase, say, shown, speak


class Waits:
    """An event that was set in these waits. A run that has no more of them ends the thread."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    def wait(self, seconds):
        self.calls.append(seconds)
        if not self.answers:
            raise ValueError
        return self.answers.pop(0)

    def set(self):
        self.calls.append("set")

    def clear(self):
        self.calls.append("clear")


class Now:
    """A thread that does its work at once."""

    def __init__(self, target, daemon):
        self.start = target


def test_a_command_that_says_something_gets_no_line(monkeypatch, capsys):
    waits = Waits(True, False, False, True)
    monkeypatch.setattr(progress, "SAID", waits)
    monkeypatch.setattr(progress, "Thread", Now)
    speak()
    assert capsys.readouterr().out == "starting\n" * 2
    said = [progress.EVERY, "clear"]
    assert waits.calls == [progress.FIRST, "clear", *said, *said, progress.EVERY, "clear", progress.EVERY]
    waits.answers = [False]
    speak(sys.stderr)  # sample.py, whose completions are on stdout
    assert capsys.readouterr() == ("", "starting\n")
    monkeypatch.setattr(progress, "IS_FIRST", False)
    waits.answers = [False]
    speak()
    assert capsys.readouterr().out == "" and waits.answers
    say("a line")
    assert capsys.readouterr().out == "a line\n" and waits.calls[-1] == "set"


def test_how_far_a_phase_is_and_what_is_left():
    """A resumed run has done 2 of 12 before; the two since took 20 seconds, so eight more take 80."""
    with phase("GRPO", 12, "iterations", 2) as bar, phase("train") as train:
        bar.update(2)
        bar.start_t -= 20
        train.start_t -= 3700
        assert [*map(shown, PHASES)] == ["GRPO 4/12 iterations (00:20, 01:20 left)", "train (1:01:40)"]
        for number, _ in enumerate(counted("abc", "micro-batches")):
            assert shown(PHASES[2]) == f"{number}/3 micro-batches (00:00, {'00:00' if number else '?'} left)"
        with phase("sampling", 5, "iterations") as outer:  # of the same unit: a part of the count outside
            assert outer is not bar
        with phase("more", 5, "prompts") as prompts, phase("of them", 3, "prompts") as same:
            assert same is prompts
        assert not [*counted(iter(()), "micro-batches", total=0)]  # what torchrun left for this process
    assert not PHASES


def test_an_error_ends_the_loops_inside_a_phase():
    def work():
        batches = counted([1, 2], "micro-batches")
        for _ in batches:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error, phase("train"):
        work()
    assert not PHASES and error.tb  # which holds the loop


@pytest.mark.parametrize("max_batch", [None, 3])
def test_the_count_of_completions_rises_to_all_of_them(monkeypatch, max_batch):
    """Those that go on count with their tokens' share of the longest: 4 completions of 8 tokens, 2 after 4 tokens."""
    counts, update = [], progress.tqdm.update
    noted = lambda bar, n=1: (counts.append((bar.unit, bar.n + n)), update(bar, n))  # noqa: E731
    monkeypatch.setattr(progress.tqdm, "update", noted)
    sample_groups(make_flat_model(), [[1, 2], [3]], 2, 8, max_batch=max_batch)
    counts = [count for unit, count in counts if unit == " completions"]
    if max_batch is None:
        assert counts == [1, 1, 2, 2, 3, 3, 4, 4]
    assert counts == sorted(counts) and counts[-1] == 4 and len(set(counts)) > 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("progress")
    make_chat_model(folder / "model")
    rows = "".join(f'{{"prompt": "{i} + 1 = ?", "answer": {i + 1}}}\n' for i in range(20))
    (folder / "prompts.jsonl").write_text(rows)
    slow = "def slow(completions, **columns):\n    return [float(i % 3) for i in range(len(completions))]\n"
    (folder / "my_rewards.py").write_text(slow)
    return folder


COMMON = "--device=cpu --task=jsonl --data_file=prompts.jsonl --chat --max_new_tokens=6"
TRAIN = f"{HOME}/grpo.py {COMMON} --init_from=model --reward_funcs=my_rewards:slow --batch_size=2 --group_size=4 --max_iters=2 "
TRAIN += "--eval_prompts=3 --save_interval=1 --max_tokens_per_micro_batch=40"


MAKING = "making the model", "making the model; loading tensors"
OF_RUN = "eval; evaluation completions", "rollout; sampling completions", "reward", "train; micro-batches", "saving"
COMMANDS = {  # the command: what takes long in it
    "train": (TRAIN, {*MAKING, *(f"GRPO iterations; {step}" for step in OF_RUN)}),
    "plan": (f"{TRAIN} --plan --memory_budget_gb=0.00001", {"planning", "planning; options"}),
    "evaluate": (f"{HOME}/evaluate.py model {COMMON} --num_prompts=3 --num_samples=2", {"evaluation completions"}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_each_long_step_is_named(folder, name, monkeypatch):
    named, (line, steps) = set(), COMMANDS[name]

    class Noted(list):
        def append(self, bar):
            super().append(bar)
            named.add("; ".join(f"{each.desc}{each.unit}".strip() for each in self))

    monkeypatch.setattr(progress, "PHASES", Noted())
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", line.split())
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert steps <= named, named


QUICK = f"{HOME}/train_sft.py --device=cpu --batch_size=4 --max_iters=30 --eval_prompts=0 --save_interval=0"
# Runs a command that speaks ten times a second. The import of torch waits for a line on stdin.
SPEAKING = """
import runpy, sys
from snug.options import progress
progress.FIRST = progress.EVERY = 0.1

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.stdin.readline()

sys.meta_path.insert(0, Finder())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("console", ["terminal", "pipe"])
def test_a_terminal_has_the_bar_a_pipe_has_the_lines(tmp_path, console):
    """Bars are on stderr, here always a terminal. A bar inside another one waits for 3 seconds."""
    import pty

    try:
        main, terminal = pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal: {error}")
    termios.tcsetwinsize(terminal, (40, 80))
    environment = os.environ | dict(PYTHONPATH=str(HOME), OMP_NUM_THREADS="1")
    environment.pop("COLUMNS", None)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE if console == "pipe" else terminal, stderr=terminal)
    words = [sys.executable, "-c", SPEAKING, *QUICK.split()]
    child = subprocess.Popen(words, cwd=tmp_path, env=environment, text=True, **pipes)
    os.close(terminal)
    seen, lines = b"", child.stdout and child.stdout.readline()
    child.stdin.write("\n")
    child.stdin.flush()
    with suppress(OSError):  # the terminal's end
        while data := os.read(main, 65536):
            seen += data
    text = seen.decode()
    assert child.wait(timeout=600) == 0 and re.search(r"SFT: +\d+%.* \d+/30 \[.*train", text)
    assert "starting" not in text and "micro-batches" not in text and "left)" not in text
    if console == "pipe":
        assert lines == "starting\n" and "\x1b" not in child.stdout.read()
