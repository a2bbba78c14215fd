"""Signs of life: what a command does, how far it is and how long it will take.

    speak()                                                    # a command, at its start
    with phase("eval"):                                        # what may take long
        for batch in counted(batches, "batches"): ...          # its count

In a terminal a count is a bar on stderr, after 3 seconds. If the console is a pipe or a file, a thread prints a line

    GRPO 3/80 iterations (05:10, 2:12:40 left); train (00:20); 3/12 micro-batches (00:20, 01:00 left)

when nothing was said for EVERY seconds; at the start, while torch is imported, for FIRST. A fast run says enough by
itself and gets no such line. It is a thread because one step (an import, a prefill, a user's reward function) may take
longer than EVERY: a loop that reports between its steps would be late.

Of several processes rank 0 speaks. Left out: lines where no command called `speak`, such as in a notebook.
Tests: tests/test_progress.py
"""

import os
import sys
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from threading import Event, Thread

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

FIRST, EVERY = 3, 30  # seconds
PHASES = []  # bars of what goes on; each is a part of the one before
SAID = Event()
NOWHERE = open(os.devnull, "w")
IS_FIRST = os.environ.get("RANK", "0") == "0"  # of torchrun's processes


@contextmanager
def phase(name, total=0, unit="", done=0):
    """Inside, this goes on. Yields the bar to update, if there is a total: an outer one that counts the same units, or
    its own. Without a total the outermost bar shows its name."""
    if total and PHASES and PHASES[-1].unit == f" {unit}":
        yield PHASES[-1]
        return
    visible = total and IS_FIRST and sys.stderr.isatty()
    hidden = {} if visible else dict(file=NOWHERE, position=99)
    bar = tqdm(
        desc=name,
        total=total,
        unit=f" {unit}",
        initial=done,
        delay=3 if PHASES else 0,
        leave=False,
        dynamic_ncols=True,
        smoothing=0,
        **hidden,
    )
    depth = len(PHASES)
    if depth == 1 and not total:
        PHASES[0].set_postfix_str(f"{name:9}")  # as wide as most, so that the bar stands still
    PHASES.append(bar)
    # What the user's code prints goes above the bars, a line at a time.
    above = visible and sys.stdout.isatty() and DummyTqdmFile(sys.stderr)
    try:
        with redirect_stdout(above) if above else nullcontext():
            yield bar
    finally:
        while len(PHASES) > depth:  # an error may have left loops over `counted`
            PHASES.pop().close()


def counted(things, unit, name="", total=None):
    """Yield the things, as a phase. total: how many, if they have no length."""
    total = len(things) if total is None else total
    with phase(name, total, unit) as bar:
        for thing in things:
            yield thing
            bar.update()


def shown(bar: tqdm) -> str:
    """`3/12 micro-batches (00:20, 01:00 left)`: those left take as long as those done, on average."""
    form = "{desc} ({elapsed})"
    if bar.total:
        form = "{desc} {n_fmt}/{total_fmt}{unit} ({elapsed}, {remaining} left)"
    return bar.format_meter(**bar.format_dict | dict(bar_format=form)).strip()


def say(text: str):
    """A line above the bars. Raises OSError or ValueError if the console is gone or closed."""
    tqdm.write(text)
    sys.stdout.flush()
    SAID.set()


def speak(console=None):
    """From now on a thread says what goes on, unless the console is a terminal. console: default sys.stdout."""

    def say_what_goes_on():
        wait = FIRST
        with suppress(OSError, ValueError):  # the reader is gone: the command goes on
            while True:
                if not SAID.wait(wait):
                    print("; ".join(map(shown, PHASES)) or "starting", file=console, flush=True)
                SAID.clear()
                wait = EVERY

    if IS_FIRST and not (console or sys.stdout).isatty():
        Thread(target=say_what_goes_on, daemon=True).start()
