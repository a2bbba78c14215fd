"""JSON lines on one end of a socket pair, with a time limit."""

import json
import socket

from options import SnugError


class SandboxError(SnugError):
    """The sandbox cannot do what this process wants. One line."""


class Lost(SandboxError):
    """The process at the other end is late, has ended, or sent something that is no JSON line."""


class Channel:
    """seconds: the time limit of a read; None: no limit. A message may be several reads."""

    def __init__(self, end: socket.socket, seconds: float | None = None):
        end.settimeout(seconds)
        self.seconds = seconds
        self.socket = end
        self.lines = end.makefile("rb")

    def send(self, message):
        """Raises Lost."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(f"the process does not listen ({error})") from None

    def receive(self, longest: int = -1):
        """The next message, of at most `longest` bytes (-1: any). Raises Lost; then nothing more can be received."""
        try:
            line = self.lines.readline(longest)
        except TimeoutError:
            raise Lost(f"took longer than {self.seconds:g} seconds") from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise Lost("the process ended, or its message is too long")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Lost(f"the process sent no JSON ({error})") from None

    def close(self):
        self.lines.close()
        self.socket.close()
