"""Bars: what they count, and that a real command shows them in a terminal."""

import os
import re
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from helpers import HOME
from helpers.models import make_flat_model
from sample import sample_groups
from snug.options import progress
from snug.options.progress import PHASES, counted, phase


def test_a_phase_counts_what_is_in_it():
    """A resumed run has done 2 of 12 before."""
    with phase("GRPO", 12, "iterations", 2) as bar, phase("train"):
        bar.update(2)
        assert bar.n == 4
        for number, _ in enumerate(counted("abc", "micro-batches")):
            assert PHASES[-1].n == number and PHASES[-1].total == 3
        with phase("sampling", 5, "iterations") as outer:  # of the same unit: a part of the count outside
            assert outer is not bar
        with phase("more", 5, "prompts") as prompts, phase("of them", 3, "prompts") as same:
            assert same is prompts
        assert not [*counted(iter(()), "micro-batches", total=0)]  # what torchrun left for this process
    assert not PHASES


def test_an_error_ends_the_loops_inside_a_phase():
    with pytest.raises(ZeroDivisionError) as error, phase("train"):
        for _ in counted([1, 2], "micro-batches"):
            raise ZeroDivisionError
    assert not PHASES and error.tb  # which holds the loop


@pytest.mark.parametrize("max_batch", [None, 3])
def test_the_count_of_completions_rises_to_all_of_them(monkeypatch, max_batch):
    """Those that go on count with their tokens' share of the longest: 4 completions of 8 tokens, 2 after 4 tokens."""
    counts, update = [], progress.tqdm.update
    monkeypatch.setattr(
        progress.tqdm, "update", lambda bar, n=1: (counts.append((bar.unit, bar.n + n)), update(bar, n))
    )
    sample_groups(make_flat_model(), [[1, 2], [3]], 2, 8, max_batch=max_batch)
    counts = [count for unit, count in counts if unit == " completions"]
    if max_batch is None:
        assert counts == [1, 1, 2, 2, 3, 3, 4, 4]
    assert counts == sorted(counts) and counts[-1] == 4 and len(set(counts)) > 3


QUICK = f"{HOME}/train_sft.py --device=cpu --batch_size=4 --max_iters=30 --eval_prompts=0 --save_interval=0"


def test_a_terminal_has_the_bar(tmp_path):
    """Bars are on stderr. A bar inside another one waits for 3 seconds."""
    import pty

    try:
        main, terminal = pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal: {error}")
    termios.tcsetwinsize(terminal, (40, 80))
    words = [sys.executable, *QUICK.split(), f"--out_dir={tmp_path}/run"]
    child = subprocess.Popen(words, stderr=terminal, stdout=terminal)
    os.close(terminal)
    seen = b""
    with suppress(OSError):  # the terminal's end
        while data := os.read(main, 65536):
            seen += data
    text = seen.decode()
    assert child.wait(timeout=600) == 0 and re.search(r"SFT: +\d+%.* \d+/30 \[.*train", text)
    assert "micro-batches" not in text
