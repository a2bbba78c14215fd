"""Ctrl-C ends a command with one line and exit code 130, also while torch is imported.

Whatever a command imports first imports this file first. In a run training/loop.py handles the signals, and saver.py
says how the run can go on.
"""

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def end(kind, error, trace):
    """Python calls this if a command ends with an error. The arguments of a KeyboardInterrupt say how to go on."""
    if kind is not KeyboardInterrupt:
        return sys.__excepthook__(kind, error, trace)
    print("; ".join(["stopped", *error.args]), file=sys.stderr)
    sys.exit(130)


PLACES = HOME, os.path.join(HOME, "runs")
if sys.argv[0] == "-m" or os.path.dirname(os.path.realpath(sys.argv[0])) in PLACES:  # no user's script
    sys.excepthook = end
