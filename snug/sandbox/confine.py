"""The confinement of a worker: another user, limits, an audit hook, Landlock and a seccomp filter."""

import os
import resource
import signal
import sys

from snug.sandbox import linux

PIPE = 3  # a worker's socket, its only open file besides the standard streams
NOBODY = 65534
LIMITS = dict(RLIMIT_FSIZE=0, RLIMIT_NOFILE=32, RLIMIT_CORE=0, RLIMIT_NPROC=0)


class Confinement:
    """The keeper makes it once, each worker applies it to itself.

    layers: names of the layers in force. missing: names of those that do not work here. Raises OSError.
    """

    def __init__(self, layers, memory_mb):
        self.keeper, self.memory, self.folders = os.getpid(), memory_mb * 2**20, readable()
        self.missing = [
            name
            for name in ("user", "landlock", "seccomp")
            if name in layers and not self.works([name])
        ]
        self.layers = set(layers) - set(self.missing)
        if not self.works(self.layers):
            raise OSError("no process can be confined here")

    def works(self, layers):
        """Can this process be confined with these layers? Tries it in a fork."""
        pid = os.fork()
        if pid == 0:
            try:
                self.apply(0, layers)
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitpid(pid, 0)[1] == 0

    def apply(self, file, layers):
        """Confine this process for good, with the layers named. `file` becomes the file PIPE. Raises if one fails."""
        os.setpgid(0, 0)
        # No limit is -1
        address_space = min(taken() + self.memory, resource.getrlimit(resource.RLIMIT_AS)[1] % 2**64)
        if "user" in layers and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        # This raises an error if the user nobody cannot read them.
        folders = [os.open(folder, os.O_RDONLY) for folder in self.folders]
        die_with(self.keeper)  # after the change of user, which resets it
        if sys.platform == "linux":
            linux.drop_privileges()
        if "landlock" in layers:
            linux.landlock(folders)
        os.dup2(file, PIPE)
        os.closerange(PIPE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if "limits" in layers:
            for name, most in (LIMITS | {"RLIMIT_AS": address_space}).items():
                resource.setrlimit(getattr(resource, name), (most, most))
        if "seccomp" in layers:
            linux.seccomp()
        if "audit" in layers:  # last, because it refuses what the others do
            sys.addaudithook(make_hook(self.folders))


def die_with(parent):
    """The kernel kills this process when its parent ends. Others of its user cannot look into it."""
    if sys.platform == "linux":
        linux.called("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        linux.called("prctl", 4, 0)  # PR_SET_DUMPABLE
    if os.getppid() != parent:
        os._exit(0)  # it has ended already


def readable():
    """All that executed code may read: folders of Python, its packages and shared libraries, each with a "/" behind."""
    places = [
        f"{sys.base_prefix}/lib",
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/usr/share/zoneinfo",
    ]
    places += [place for place in sys.path if place.endswith(("/site-packages", "/dist-packages"))]
    return tuple(f"{place}/" for place in places if os.access(place, os.R_OK))


def taken():
    """Bytes of this process's address space; a guess where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**30


# The audit hook

HARMLESS = frozenset(
    """import compile exec marshal.loads marshal.dumps builtins.id sys._getframe sys._getframemodulename array.__new__
    function.__new__ os.putenv os.unsetenv time.sleep""".split()
)


def make_hook(folders):
    """A hook that refuses all that is not harmless.

    Code may change globals and builtins, so what decides is among the hook's defaults. Paths are not resolved: links
    below these folders are Python's own, and any others are not below them.
    """

    def hook(
        event,
        arguments,
        harmless=HARMLESS,
        folders=folders,
        writing=linux.WRITING,
        type=type,
        text=str,
    ):
        if event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]  # a number, bytes or an object are refused
            inside = type(path) is text and "/.." not in path and f"{path}/".startswith(folders)
            if not inside or event == "open" and arguments[2] & writing:
                raise PermissionError("only files of Python and its packages can be opened, to read")
        elif event not in harmless and not event.startswith("object."):
            raise PermissionError(f"{event} is refused")

    return hook
