"""A child process for scorers that execute what they score: killed when late, confined where it sees a model's text.

    sandbox = Sandbox("data.gym.worker:Gym", {"datasets": {"gcd": {}}})
    sandbox.make([["gcd", 7]])                      # [{"question": "Find the Greatest ...", "answer": "3"}]
    sandbox.score([(["gcd", 7, None], "3")])        # [1.0]

Three processes. Only the other two import the target, "module:function":

    this one    sends requests and gets replies as JSON lines on a socket pair.
    the keeper  runs this file in its own session. It calls make(item) and prepare(item) of the object that
                function(**arguments) returns, but not score(prepared, answer): no text of a model is run here.
    a worker    a fork of the keeper: confined before its first answer, killed with its process group after its last.

Executed code may change anything in its process, the scorer too. So a worker writes "!" on its pipe before code is
executed (Python's "exec" audit event). The keeper then takes one more score from it and kills it: no process scores an
answer after executing another. If nothing is executed, a worker scores one answer after the other, because a fork costs
milliseconds. If a worker is late, dies or runs out of memory, its answer scores 0.0.

The layers that confine a worker; each stops most attacks alone:

    user      root becomes the user nobody, if nobody can read the files of Python and the target
    limits    memory, CPU time, empty files only, few open files, no processes, no core dumps
    audit     a Python audit hook allows reading files, importing, compiling and executing; it misses os.mkfifo
    seccomp   a kernel filter (Linux on x86_64 and aarch64) allows the system calls listed below, and only reading files

Left out, so do not rely on it: executed code can read the files that its user can read, can find the reference answer
in its memory, and can fake the score of its own answer (never of another). Without seccomp, code that gets around the
audit hook can do what `user` and `limits` allow: if the user is not root, anything to that user's files and processes.
Not thread-safe. Tests: tests/test_sandbox.py, with the exploits.
"""

import ctypes
import gc
import importlib
import json
import math
import os
import platform
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

LAYERS = ("user", "limits", "audit", "seccomp")
START_LIMIT = 120.0  # seconds that imports may take
SLACK = 60.0  # seconds for making an item, and for a score beyond the scorer's own timeout
BATCH = 64  # answers a request, so at most as many a worker
PATIENCE, HURRIED = (
    10,
    0.25,
)  # after 10 late answers of a call, the others have at most 0.25 seconds each
MAX_REPLY = 2**22  # bytes
NOBODY = 65534


class SandboxError(Exception):
    """The child cannot do what it is asked, in one line."""


class Lost(Exception):
    """The child is late, dead, or talks nonsense."""


class Sandbox:
    """target: "module:function"; arguments: its keywords, JSON values; timeout: seconds; memory_mb: MiB for an answer.

    The child starts with the first request, and again after it was lost or closed. It dies with this process.
    missing: why there is no seccomp, known once it has started; "" if there is.
    """

    def __init__(
        self, target: str, arguments: dict, timeout=5.0, memory_mb=2048, layers: Sequence[str] = LAYERS
    ):
        self.config = dict(
            target=target, arguments=arguments, timeout=timeout, memory_mb=memory_mb, layers=layers
        )
        self.process, self.missing = None, ""

    def make(self, items: list) -> list:
        """What the target's make returns for each item, all of them JSON values. Raises SandboxError."""
        values = []
        try:
            self.request(dict(verb="make", items=items), SLACK, values)
        except Lost as why:
            raise SandboxError(f"the item {json.dumps(items[len(values)])}: {why}") from None
        return values

    def score(self, pairs: list[tuple]) -> list[float]:
        """[(item, answer), ...] -> a finite score each, 0.0 for an answer that lost the child. Raises SandboxError."""
        scores = []
        while len(scores) < len(pairs):
            batch = pairs[len(scores) : len(scores) + BATCH]
            request = dict(verb="score", items=batch, late=scores.count(None))
            try:
                self.request(request, self.config["timeout"] + SLACK, scores)
            except Lost:
                scores.append(0.0)
        return [score if score is not None and math.isfinite(score) else 0.0 for score in scores]

    def request(self, request: dict, seconds: float, values: list):
        """Append a reply for each item to `values`. If interrupted, kill the child: its late replies answer nothing."""
        try:
            self.send(request)
            for _ in request["items"]:
                values.append(self.receive(seconds))
        except BaseException:
            self.close()
            raise

    def send(self, request: dict):
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.start()
        self.write(request)

    def start(self):
        """The child gets nothing of this process but sys.path, and of the environment only HOME."""
        self.socket, theirs = socket.socketpair()
        self.replies = self.socket.makefile("rb")
        command = [
            sys.executable,
            "-P",
            os.path.abspath(__file__),
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        environment = dict(
            HOME=os.environ.get("HOME", "/"), PYTHONHASHSEED="0", PYTHONUTF8="1", MPLBACKEND="agg"
        )
        environment |= {
            f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")
        }  # a fork has one thread
        options = dict(pass_fds=[theirs.fileno()], cwd="/", env=environment, start_new_session=True)
        options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        try:
            with theirs:
                self.process = subprocess.Popen(command, **options)
            self.write({"path": [os.path.abspath(place) for place in sys.path]} | self.config)
            self.missing = self.receive(START_LIMIT)
        except (OSError, Lost) as error:
            raise SandboxError(f"the child does not start: {error}") from None

    def write(self, message: dict):
        try:
            self.socket.settimeout(SLACK)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(f"it does not listen ({error})") from None

    def receive(self, seconds: float):
        """-> the value of the next reply. Raises Lost, or SandboxError with the error that the child replies."""
        self.socket.settimeout(seconds)
        try:
            line = self.replies.readline(MAX_REPLY)
        except TimeoutError:
            raise Lost(f"it took longer than {seconds:g} seconds") from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise Lost(f"its reply has more than {MAX_REPLY:,} bytes" if line else "it ended")
        kind, value = json.loads(line)
        if kind == "error":
            raise SandboxError(value)
        return value

    def close(self):
        """Kill the child and its process group. It starts again with the next request."""
        process, self.process = self.process, None
        if process is not None:
            self.socket.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# The keeper


def keep(fd: int, parent: int):
    """Reply to requests until the socket closes: ["value", what was asked for] or ["error", text]."""
    die_with(parent)
    connection = socket.socket(fileno=fd)
    requests = connection.makefile("rb")
    config = json.loads(next(requests))

    def reply(kind, value):
        connection.sendall(json.dumps([kind, value]).encode() + b"\n")

    try:
        sys.path[:] = config["path"]
        module, _, function = config["target"].partition(":")
        target = getattr(importlib.import_module(module), function)(**config["arguments"])
        confinement = Confinement(config)
        gc.collect()
        gc.freeze()  # the collector does not write to these objects any more, so forks share their memory
        Worker(target.score, [], confinement).kill()  # fails now if a worker cannot be confined
        reply("value", confinement.missing)
    except Exception as error:
        return reply("error", in_words(error))
    for line in requests:
        request = json.loads(line)
        try:
            items, make = request["items"], request["verb"] == "make"
            for value in (
                map(target.make, items)
                if make
                else scores_of(target, items, request["late"], confinement)
            ):
                reply("value", value)
        except OSError:
            raise  # no fork, for now: this child ends and another is started
        except Exception as error:
            reply("error", in_words(error))


def in_words(error: Exception) -> str:
    """One line; a ValueError is the target's own message."""
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return text[:1000].replace("\n", " ")


def scores_of(
    target, pairs: list[tuple], late: int, confinement: "Confinement"
) -> Iterator[float | None]:
    """A score for each (item, answer), None for a late one. late: how many there have been before."""
    tasks = [(target.prepare(item), answer) for item, answer in pairs]
    while tasks:
        worker, used_up = Worker(target.score, tasks, confinement), False
        try:
            while tasks and not used_up:
                seconds = confinement.timeout if late < PATIENCE else min(confinement.timeout, HURRIED)
                score, used_up = worker.answer(seconds)
                tasks, late = tasks[1:], late + (score is None)
                yield score
        finally:
            worker.kill()


class Worker:
    """A confined fork that scores [(prepared, answer), ...] in order. Raises OSError if it cannot be confined."""

    def __init__(self, score: Callable, tasks: list[tuple], confinement: "Confinement"):
        self.reusable = (
            "audit" in confinement.layers
        )  # without the hook nothing announces executed code
        self.buffer, self.nonce = (
            b"",
            secrets.token_hex(8),
        )  # lines without the nonce are not the worker's
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            work(score, tasks if self.reusable else tasks[:1], end, self.nonce, confinement)
        os.close(end)
        with suppress(OSError):  # the worker does it too: the first one wins
            os.setpgid(self.pid, self.pid)
        said = self.line(SLACK)
        if said != f"{self.nonce} ready":
            self.kill()
            raise OSError(f"a worker cannot be confined: {said}")

    def answer(self, seconds: float) -> tuple[float | None, bool]:
        """-> (score or None, is this process used up?). The line is "<nonce> 0.5", after a "!" if code was executed."""
        line = self.line(seconds)
        if line is None:
            return None, True
        mark, nonce, text = line.rpartition(self.nonce + " ")
        try:
            return (float(text) if nonce else 0.0), bool(mark) or not nonce or not self.reusable
        except ValueError:
            return 0.0, True

    def line(self, seconds: float) -> str | None:
        """The next line of the worker; None if it is late, "" if it has ended or the line is too long."""
        deadline, ready = time.monotonic() + seconds, select.poll()
        ready.register(self.pipe, select.POLLIN)
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.poll(left * 1000):
                return None
            read = os.read(self.pipe, 1000)
            if not read or len(self.buffer) > 1000:
                return ""
            self.buffer += read
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode(errors="replace")

    def kill(self):
        """Until waitpid it is a zombie, so no other process can have its number."""
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)


# A worker


def work(score: Callable, tasks: list[tuple], pipe: int, nonce: str, confinement: "Confinement"):
    """What a fork does. Never returns."""
    try:
        confinement.apply(pipe)
        os.write(pipe, f"{nonce} ready\n".encode())
        for prepared, answer in tasks:
            try:
                value = float(score(prepared, answer))
            except Exception:  # SystemExit and KeyboardInterrupt end the process
                value = 0.0
            os.write(pipe, f"{nonce} {value!r}\n".encode())
    except Exception as error:  # of `apply`: the keeper reports it
        os.write(pipe, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(0)


class Confinement:
    """Made once by the keeper, applied by each worker to itself. Raises if a layer cannot be applied."""

    def __init__(self, config: dict):
        self.layers, self.timeout, self.keeper = config["layers"], config["timeout"], os.getpid()
        self.user = "user" in self.layers and nobody_can_read()
        self.missing = why_no_seccomp() if "seccomp" in self.layers else ""
        self.filter = seccomp_filter() if "seccomp" in self.layers and not self.missing else None
        seconds = int((self.timeout + 1) * BATCH) + 1
        self.limits = dict(
            RLIMIT_CPU=seconds, RLIMIT_FSIZE=0, RLIMIT_NOFILE=32, RLIMIT_CORE=0, RLIMIT_NPROC=0
        )
        self.memory = config["memory_mb"] * 2**20  # bytes, beyond what is taken already

    def apply(self, pipe: int):
        os.setpgid(0, 0)
        limits = (
            self.limits | {"RLIMIT_AS": address_space() + self.memory}
            if "limits" in self.layers
            else {}
        )
        if self.user:
            become_nobody()
        die_with(self.keeper)  # after the change of user, which resets it
        os.closerange(3, pipe)
        os.closerange(pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        for name, most in limits.items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        if self.filter is not None:
            install(self.filter)
        if "audit" in self.layers:  # last, because it refuses what the others do
            sys.addaudithook(make_hook(pipe))


def become_nobody():
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def nobody_can_read() -> bool:
    """Is this root, and can the user nobody read the files that were imported?"""
    files = [
        module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)
    ]

    def attempt():
        become_nobody()
        return all(os.access(file, os.R_OK) for file in files)

    return os.geteuid() == 0 and works(attempt)


def works(attempt: Callable[[], bool]) -> bool:
    """Does attempt() return true? It runs in a fork, so it changes nothing here."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if attempt() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def address_space() -> int:
    """Bytes of this process's address space, where Linux says so."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**30


def die_with(parent: int):
    """The kernel kills this process when its parent ends."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)  # it has ended already


# The audit layer

HARMLESS = frozenset(
    "import compile marshal.loads builtins.id os.listdir os.scandir sys._getframe sys._getframemodulename".split()
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def make_hook(pipe: int) -> Callable:
    """-> a hook that refuses all that is not harmless, and marks the pipe before the first code is executed."""
    executed = False

    def hook(
        event, arguments, harmless=HARMLESS, write=os.write
    ):  # executed code may replace the globals
        nonlocal executed
        if event == "exec":
            if not executed:
                executed = True
                write(pipe, b"!")
        elif event == "open":
            if not isinstance(arguments[2], int) or arguments[2] & WRITING:
                raise PermissionError("files are open for reading only")
        elif event not in harmless and not event.startswith("object."):
            raise PermissionError(f"{event} is refused")

    return hook


# The seccomp layer

libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's AUDIT_ARCH_...
ALLOWED = """
    read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214,
    mremap 25 216, madvise 28 233, pread64 17 67, readv 19 65, writev 20 66, stat 4 -, lstat 6 -, newfstatat 262 79,
    statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -,
    getdents64 217 61, getcwd 79 17, dup 32 23, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
    nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169,
    time 201 -, futex 202 98, sched_yield 24 124, sched_getaffinity 204 123, getcpu 309 168, rt_sigaction 13 134,
    rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, getpid 39 172, gettid 186 178, getppid 110 173,
    getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getrandom 318 278, getrusage 98 165,
    getrlimit 97 163, uname 63 160, sysinfo 99 179, times 100 153, restart_syscall 219 128, membarrier 324 283,
    exit 60 93, exit_group 231 94, rseq 334 293"""  # name, number on x86_64, on aarch64
OPENING = [
    ("open", 2, None, 1),
    ("openat", 257, 56, 2),
]  # name, its numbers, which argument has the flags
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of classic BPF
PASS, REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM


def seccomp_filter() -> list[tuple[int, int, int, int]] | None:
    """The program: (instruction, operand, instructions to skip if true, if false) each; None on an unknown machine.

    It sees a system call's number at offset 0, the machine at 4 and the low halves of the arguments at 16, 24, 32, ...
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        return None
    column = list(MACHINES).index(machine)
    program = [
        (LOAD, 4, 0, 0),
        (EQUAL, MACHINES[machine], 1, 0),
        (RETURN, REFUSE, 0, 0),
        (LOAD, 0, 0, 0),
    ]
    for line in ALLOWED.split(","):
        number = line.split()[1 + column]
        if number != "-":
            program += [(EQUAL, int(number), 0, 1), (RETURN, PASS, 0, 0)]
    for _, *numbers, argument in OPENING:
        if numbers[column] is not None:
            program += [
                (EQUAL, numbers[column], 0, 4),
                (LOAD, 16 + 8 * argument, 0, 0),
                (ANY_BIT, WRITING, 1, 0),
            ]
            program += [(RETURN, PASS, 0, 0), (RETURN, REFUSE, 0, 0)]
    return program + [(RETURN, REFUSE, 0, 0)]


def install(program: list[tuple[int, int, int, int]]):
    """The filter is in force from here on. Raises OSError if the kernel has none."""
    code = b"".join(
        struct.pack("=HBBI", kind, true, false, operand) for kind, operand, true, false in program
    )
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    no_new_privileges = libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if no_new_privileges or libc.prctl(22, 2, header, 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "the kernel takes no filter")


def why_no_seccomp() -> str:
    """Why there is no filter; "" if there is one."""
    program = seccomp_filter()
    if program is None:
        return f"no filter is written for {sys.platform} on {platform.machine()}"

    def attempt():
        install(program)
        try:
            os.open("/dev/null", os.O_WRONLY)
        except PermissionError:
            return True

    return "" if works(attempt) else "the kernel takes no filter"


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]))
