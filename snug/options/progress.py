"""Signs of life: how far a command is and how long it will take.

    with phase("eval"):                                        # what may take long
        for batch in counted(batches, "batches"): ...          # its count

In a terminal a count is a bar on stderr, an inner one after 3 seconds. Of several processes rank 0 shows it.
Left out: signs of life in a pipe or a file; the log's lines are there. Tests: tests/test_progress.py
"""

import os
import sys
from contextlib import contextmanager, redirect_stdout

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

PHASES = []  # bars of what goes on; each is a part of the one before
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
    options = {} if visible else dict(file=NOWHERE, position=99)
    options |= dict(delay=3 if PHASES else 0, leave=False, dynamic_ncols=True, smoothing=0)
    bar = tqdm(desc=name, total=total, unit=f" {unit}", initial=done, **options)
    depth = len(PHASES)
    if depth == 1 and not total:
        PHASES[0].set_postfix_str(f"{name:9}")  # as wide as most, so that the bar stands still
    PHASES.append(bar)
    # What the user's code prints goes above the bars, a line at a time.
    above = visible and sys.stdout.isatty() and DummyTqdmFile(sys.stderr)
    try:
        with redirect_stdout(above or sys.stdout):
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


def say(text: str):
    """A line above the bars. Raises OSError or ValueError if the console is gone or closed."""
    tqdm.write(text)
    sys.stdout.flush()
