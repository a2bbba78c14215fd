"""Exceptions of libraries that are awkward to tell of, and ours, which are one line."""

from contextlib import contextmanager

import pytest

from snug.options import SnugError


class PanicException(BaseException):
    """As libraries in Rust have it."""


@contextmanager
def refusal(message):
    """Inside, a SnugError is raised: one line that has this, a regular expression."""
    with pytest.raises(SnugError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


def assert_refused(message, function, *arguments, **options):
    """The call raises a SnugError of one line that has this, a regular expression."""
    with refusal(message):
        function(*arguments, **options)
