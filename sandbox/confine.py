"""The confinement of a worker: another user, limits, an audit hook and a seccomp filter."""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable

from sandbox import seccomp

PIPE = 3  # a worker's socket, its only open file besides the standard streams
EXECUTED = "executed"  # what the audit hook writes there
NOBODY = 65534
LIMITS = dict(RLIMIT_FSIZE=0, RLIMIT_NOFILE=32, RLIMIT_CORE=0, RLIMIT_NPROC=0)


class Confinement:
    """The keeper makes it once, each worker applies it to itself.

    layers: names of the layers in force. missing: why seccomp is not, "" if it is or was not wanted. Raises OSError.
    """

    def __init__(self, layers: list[str], memory_mb: int):
        self.keeper = os.getpid()
        self.memory = memory_mb * 2**20
        self.layers = set(layers)
        self.missing = ""
        if "user" in layers and not (os.geteuid() == 0 and works(nobody_can_read)):
            self.layers.remove("user")
        if "seccomp" in layers and not works(seccomp.refuses_to_write):
            self.layers.remove("seccomp")
            self.missing = f"{sys.platform} takes no seccomp filter on this machine"
        if not works(lambda: self.apply(0) is None):
            raise OSError("no process can be confined here")

    def apply(self, file: int):
        """Confine this process for good. `file` becomes the file PIPE. Raises if a layer cannot be applied."""
        os.setpgid(0, 0)
        os.dup2(file, PIPE)
        os.closerange(PIPE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        address_space = taken() + self.memory
        if "user" in self.layers:
            become_nobody()
        die_with(self.keeper)  # after the change of user, which resets it
        if "limits" in self.layers:
            for name, most in (LIMITS | {"RLIMIT_AS": address_space}).items():
                limit(getattr(resource, name), most)
        if "seccomp" in self.layers:
            seccomp.install(seccomp.program())
        if "audit" in self.layers:  # last, because it refuses what the others do
            sys.addaudithook(make_hook())


def works(attempt: Callable[[], bool]) -> bool:
    """Does attempt() return true? It runs in a fork, so it changes nothing in this process."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if attempt() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def die_with(parent: int):
    """The kernel kills this process when its parent ends."""
    if sys.platform == "linux":
        seccomp.libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)  # it has ended already


# The user


def become_nobody():
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def nobody_can_read() -> bool:
    """Can the user nobody read the files of all imported modules?"""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    become_nobody()
    return all(os.access(file, os.R_OK) for file in files if file)


# The limits


def limit(kind: int, most: int):
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def taken() -> int:
    """Bytes of this process's address space; a guess where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**30


# The audit hook

HARMLESS = frozenset(
    "import compile marshal.loads builtins.id os.listdir os.scandir sys._getframe sys._getframemodulename".split()
)


def make_hook() -> Callable:
    """A hook that refuses all that is not harmless, and writes EXECUTED to PIPE before the first code is executed."""
    executed = False
    message = json.dumps(EXECUTED).encode() + b"\n"

    def hook(event, arguments, harmless=HARMLESS, write=os.write):  # code may change the globals
        nonlocal executed
        if event == "exec":
            if not executed:
                executed = True
                write(PIPE, message)
        elif event == "open":
            if not isinstance(arguments[2], int) or arguments[2] & seccomp.WRITING:
                raise PermissionError("files are open for reading only")
        elif event not in harmless and not event.startswith("object."):
            raise PermissionError(f"{event} is refused")

    return hook
