"""Run a function on untrusted text, such as code that a model wrote, in confined processes.

Names for others: Sandbox, Result, SandboxError, LAYERS, LONGEST. Left out: what a target does with the text; Windows.

    class Calculator:                                   # in calculator.py
        def evaluate(self, text):
            return eval(text)

    sandbox = Sandbox("calculator:Calculator", timeout=1.0)
    sandbox.run("evaluate", [["2+2"], ["1/0"], ["9**9**9"]])
    # [Result(4, ""), Result(None, "ZeroDivisionError: division by zero"), Result(None, "took longer than 1 seconds")]

There are three processes. Only the keeper and the workers import the target:

    this one    sends requests to the keeper and receives replies. This file.
    the keeper  makes the target: it calls "module:function" once. `call` runs the target's methods here, without any
                confinement, on trusted arguments. child.py.
    a worker    a fork of the keeper for one task, which confines itself (confine.py) first. `run` runs the target's
                methods here. A task that is late, dies or runs out of memory has no value.

Code that a task executes may change anything in its process. So each task has a worker of its own, which is killed
behind it; a fork costs some milliseconds. What a process says in a `conversation` is no more to be trusted than what it
executes.

The layers of the confinement. Each stops most attacks alone:

    user      root becomes the user nobody, if nobody can read the folders below: a Python in /root cannot have it
    limits    memory, empty files only, few open files, no processes, no core dumps
    audit     a Python audit hook allows importing, compiling, executing and reading in the folders below; it misses
              what Python does not announce: os.mkfifo, files that C code opens (readline, Tcl, packages)
    landlock  the kernel (Linux since 5.13, where it is enabled) opens files in the folders below only
    seccomp   a kernel filter (Linux on x86_64 and aarch64) allows a list of system calls, and opens files to read only

Executed code reads files of Python, of packages and of shared libraries: `lib` of Python and of the system, the time
zones, and the folders of sys.path with the name site-packages or dist-packages. It can import what lies there.

On Linux a worker has no capabilities, even if it stays root. The keeper and the process that opens a Sandbox cannot be
traced by their own user from then on, so code cannot read their memory and environment by way of /proc. This costs
core dumps, and a debugger or profiler that attaches to them, such as py-spy, needs root.

A layer that does not work here is left out, and the first start prints a note with its name.

What this does not stop: executed code can ask for the size, the date and the link of any path that it knows, can find
secrets in the memory of its process, such as the right answer, and can fake the result of its task (of no other task).
Without seccomp and landlock, code that gets around the audit hook can do what `user` and `limits` allow; if the user is
not root, it can read and change all that this user can. A Sandbox is not thread-safe.
Tests: tests/test_sandbox.py, with tests/attacks.py.
"""

import os
import signal
import socket
import sys
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, Popen
from typing import NamedTuple

from snug.options import note
from snug.sandbox import linux
from snug.sandbox.channel import LONGEST, Channel, Lost, SandboxError

LAYERS = ("user", "limits", "audit", "landlock", "seccomp")
LIMIT = 120.0  # seconds for imports and for a trusted task; for an untrusted one beyond its timeout


class Result(NamedTuple):
    value: str | float | bool | None  # what the method returned
    error: str  # why there is no value, in one line; "" if there is one


class Sandbox:
    """target: "module:function", arguments: its keywords, timeout: seconds for a task, memory_mb: MiB that it may take.

    The keeper starts with the first request, and again if it was lost. It dies with this process. `missing`: names of
    the layers that do not work here, known after the start.
    """

    def __init__(self, target: str, arguments=None, timeout=5.0, memory_mb=2048, layers=LAYERS):
        self.config = target, arguments or {}, timeout, memory_mb, layers
        self.timeout, self.process, self.missing = timeout, None, []

    def call(self, method: str, tasks: list) -> list:
        """Run a method of the target on each list of arguments, not confined -> what it returns: JSON values.

        No argument may come from a model. Raises SandboxError if the method raises or the keeper is lost.
        """
        values = []
        self.request("call", method, tasks, values)
        return values

    def run(self, method: str, tasks: list, kind="run") -> list[Result]:
        """Run a method of the target on each list of arguments, confined -> a Result for each.

        The method returns text, a number, a boolean or None. Raises SandboxError if the keeper cannot confine workers.
        """
        replies = []
        while len(replies) < len(tasks):
            try:
                self.request(kind, method, tasks[len(replies) :], replies)
            except Lost as error:
                replies.append([None, str(error)])
        return [Result(*reply) for reply in replies]

    @contextmanager
    def conversation(self, method):
        """Run method(first message, ask) of the target in a confined process of its own, beside this one.

        -> a function: message, as JSON has it -> Result of the text that the process answers with. `ask` does the same
        on the other side. timeout is that of the conversation as a whole; afterwards the process is killed.
        """
        try:
            yield lambda message: self.run(method, [message], "ask")[0]
        finally:
            self.run(method, [None], "end")

    def request(self, kind, method, tasks, replies):
        """Append a reply for each task to `replies`. After an error the keeper is killed: it may still send replies."""
        try:
            if self.process is None or self.process.poll() is not None:
                self.start()
            self.channel.send([kind, method, tasks])
            for _ in tasks:
                replies.append(self.reply())
        except BaseException:
            self.close()
            raise

    def reply(self):
        value, error = self.channel.receive()
        if error:
            raise SandboxError(error)
        return value

    def start(self):
        """Start the keeper. It gets sys.path, but no environment and no open files. Raises SandboxError."""
        self.close()
        if sys.platform == "linux":
            linux.called("prctl", 4, 0)  # PR_SET_DUMPABLE
        environment = dict(
            PYTHONPATH=os.pathsep.join(map(os.path.abspath, sys.path)),
            PYTHONHASHSEED="0",
            PYTHONUTF8="1",
            OMP_NUM_THREADS="1",
        )
        end, theirs = socket.socketpair()
        self.channel = Channel(end, self.timeout + LIMIT)
        command = [
            sys.executable,
            "-P",
            "-m",
            "snug.sandbox.child",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        try:
            with theirs:
                self.process = Popen(
                    command,
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    env=environment,
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self.channel.send(self.config)
            self.missing = self.reply()
        except (OSError, Lost) as error:
            raise SandboxError(f"the sandbox does not start: {error}") from None
        if self.missing:
            note(
                f"note: the sandbox runs without {', '.join(self.missing)}: see snug/sandbox/__init__.py"
            )

    def close(self):
        """Kill the keeper and its process group. The next request starts another keeper."""
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.channel.close()
