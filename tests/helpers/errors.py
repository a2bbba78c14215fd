"""Exceptions of libraries that are awkward to tell of."""


class PanicException(BaseException):
    """As libraries in Rust have it."""
