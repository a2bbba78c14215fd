"""Exceptions of libraries that are awkward to tell of, and ours, which are one line."""

import re
from contextlib import contextmanager

import pytest

from snug.options import SnugError


class PanicException(BaseException):
    """As libraries in Rust have it."""


@contextmanager
def refusal(message):
    """Inside, a SnugError is raised: one line that has this, a regular expression."""
    with pytest.raises(SnugError) as caught:
        yield caught
    said = str(caught.value)  # without its notes
    assert re.search(message, said) and "\n" not in said, said


def assert_refused(message, function, *arguments, **options):
    """The call raises a SnugError of one line that has this, a regular expression."""
    with refusal(message):
        function(*arguments, **options)
