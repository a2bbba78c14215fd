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

from snug.options import described
from snug.sandbox.channel import Channel, Lost
from snug.sandbox.confine import EXECUTED, PIPE, Confinement, die_with

LONGEST = 2**20  # bytes of a result


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
        while True:
            kind, name, tasks = channel.receive()
            method = getattr(target, name)
            if kind == "call":
                values = (method(*task) for task in tasks)
            else:
                values = results(method, tasks, timeout, confinement)
            for value in values:
                channel.send([value, ""])
    except Exception as error:
        channel.send([None, described(error)])


def results(method, tasks, seconds, confinement):
    """Yield [value, error] for each task. A worker runs tasks in order until one of them executes code or fails."""
    most = len(tasks) if "audit" in confinement.layers else 1  # nothing else announces executed code
    while tasks:
        batch, used_up = tasks[:most], False
        end, theirs = socket.socketpair()
        channel = Channel(end, seconds)
        pid = os.fork()
        if pid == 0:
            work(method, batch, theirs.fileno(), confinement)
        theirs.close()
        try:
            while batch and not used_up:
                result, used_up = result_of(channel)
                del batch[0], tasks[0]
                yield result
        finally:
            kill(pid)
            channel.close()


def result_of(channel):
    """-> ([value, error] of a worker's next task, must the worker end?)."""
    deadline = time.monotonic() + channel.seconds  # of the task as a whole
    try:
        message = channel.receive(LONGEST, deadline)
        executed = message == json.loads(EXECUTED)
        if executed:
            message = channel.receive(LONGEST, deadline)
        value, error = message
        if isinstance(value, str | float | int | None) and isinstance(error, str):
            return [value, error], executed
        problem = "the result is no text, number, boolean or None"
    except (Lost, TypeError, ValueError) as error:  # or the message is no pair
        problem = str(error)
    return [None, problem], True


def kill(worker):
    """Kill a worker and its process group. Until waitpid no other process can have its number."""
    for send in (os.killpg, os.kill):
        with suppress(OSError):
            send(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


def work(method, tasks, file, confinement):
    """What a worker does: it writes [value, error] for each task. Never returns."""
    try:
        confinement.apply(file, confinement.layers)
        for task in tasks:
            try:
                line = json.dumps([method(*task), ""])
            except Exception as error:  # SystemExit and KeyboardInterrupt end the process
                line = json.dumps([None, described(error)])
            os.write(PIPE, line.encode() + b"\n")
    finally:
        os._exit(0)


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]))
