"""JSON lines on one end of a socket pair, with a time limit."""

import json
import time
from contextlib import suppress

from snug.options import SnugError

LONGEST = 2**20  # bytes of a worker's message


class SandboxError(SnugError):
    """The sandbox cannot do what this process wants. One line."""


class Lost(SandboxError):
    """The process at the other end is late, has ended, or sent something that is no JSON line."""


class Channel:
    """end: a socket. seconds: the time limit of a message, however many pieces it comes in."""

    def __init__(self, end, seconds=1e6):
        self.seconds = seconds
        self.socket = end
        self.lines = end.makefile("rb")

    def send(self, message):
        """Raises Lost."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, RecursionError) as error:  # json reads deeper nesting than it writes
            raise Lost(f"the process does not listen ({error})") from None

    def receive(self, longest=2**62, deadline=None):
        """The next message, of at most `longest` bytes. Raises Lost; then nothing more can be received.

        deadline: of several messages together, by time.monotonic().
        """
        deadline = deadline or time.monotonic() + self.seconds
        line, piece = b"", b"?"
        with suppress(OSError):
            while piece and not line.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
                self.socket.settimeout(left)
                # peek waits for the first byte only.
                piece = self.lines.readline(min(len(self.lines.peek()), longest - len(line)))
                line += piece
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            if time.monotonic() >= deadline:
                raise Lost(f"took longer than {self.seconds:g} seconds") from None
            raise Lost("the process ended, or its message is too long or no JSON") from None

    def close(self):
        self.lines.close()
        self.socket.close()
