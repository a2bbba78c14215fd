"""The keeper and its workers: the processes that import the target of a Sandbox.

`python -m snug.sandbox.child SOCKET PARENT` is a keeper: the number of its socket's file, and the process that it
serves.
"""

import gc
import json
import os
import pkgutil
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial

from snug.options import described
from snug.sandbox.channel import LONGEST, Channel, Lost
from snug.sandbox.confine import PIPE, Confinement, die_with


def keep(file, parent):
    """Reply to requests until the socket closes: [value, ""] for each task. A [None, error] is the last reply."""
    die_with(parent)
    channel = Channel(socket.socket(fileno=file))
    try:
        name, arguments, timeout, memory_mb, layers = channel.receive()
        target = pkgutil.resolve_name(name)(**arguments)
        confinement = Confinement(layers, memory_mb)
        gc.collect()
        gc.freeze()  # the collector does not write to these objects any more, so forks share their memory
        channel.send([confinement.missing, ""])
        talker = None
        while True:
            kind, name, tasks = channel.receive()
            method = getattr(target, name)
            if kind == "call":
                values = (method(*task) for task in tasks)
            elif kind == "run":
                values = results(method, tasks, timeout, confinement)
            elif kind == "ask":
                talker = talker or Worker(partial(talk, method), timeout, confinement)
                values = map(talker.answer, tasks)
            else:
                talker, values = talker and talker.end(), [[None, ""]]
            for value in values:
                channel.send([value, ""])
    except Exception as error:
        channel.send([None, described(error)])


def results(method, tasks, seconds, confinement):
    """Yield [value, error] for each task. What a task changes in its worker dies with it."""
    for task in tasks:
        worker = Worker(partial(work, method, task), seconds, confinement)
        result = worker.result()
        worker.end()
        yield result


class Worker:
    """A fork of the keeper that confines itself, calls function() and ends. seconds: of a task, or of a talk."""

    def __init__(self, function, seconds, confinement):
        end, theirs = socket.socketpair()
        self.channel, self.deadline = Channel(end, seconds), time.monotonic() + seconds
        self.pid = os.fork()
        if self.pid == 0:
            try:
                confinement.apply(theirs.fileno(), confinement.layers)
                function()
            finally:
                os._exit(0)
        theirs.close()

    def result(self):
        """-> [value, error]: what it says next, in the time that is left."""
        try:
            value, error = self.channel.receive(LONGEST, self.deadline)
            if isinstance(value, str | float | int | None) and isinstance(error, str):
                return [value, error]
            problem = "the result is no text, number, boolean or None"
        except (Lost, TypeError, ValueError) as error:  # or the message is no pair
            problem = str(error)
        return [None, problem]

    def answer(self, message):
        """-> [what it says to a message, error]."""
        with suppress(Lost):  # then it has ended, and says nothing
            self.channel.send(message)
        return self.result()

    def end(self):
        """Kill it and its process group. Until waitpid no other process can have its number."""
        for send in (os.killpg, os.kill):
            with suppress(OSError):
                send(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.channel.close()


def work(method, task):
    """What the worker of a task does."""
    try:
        say([method(*task), ""])
    except Exception as error:  # SystemExit and KeyboardInterrupt end the process
        say([None, described(error)])


def talk(method):
    """What the worker of a conversation does."""
    method(heard(), ask)


def ask(text):
    """A worker's text for the process that opened the conversation -> the next message."""
    say([text, ""])
    return heard()


def say(result):
    os.write(PIPE, json.dumps(result).encode() + b"\n")


def heard():
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(PIPE, 2**16) or os._exit(0)
    return json.loads(line)


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]))
