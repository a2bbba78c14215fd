"""A child process for code that this one should not run: it is killed when it is late, and confined where it touches what a model wrote.

    sandbox = Sandbox("data.gym.worker:Gym", {"datasets": {"gcd": {}}})
    sandbox.make([["gcd", 7]])                      # [{"question": "Find the Greatest ...", "answer": "3"}]
    sandbox.score([(["gcd", 7, None], "3")])        # [1.0]

Three processes, of which the first never imports the target, "module:function":

    this one     asks by JSON lines on a socket pair that has no other users; a request has a number, and a reply repeats it.
    the keeper   runs this file, in a session of its own. It calls function(**arguments) for an object with three methods: make(item) and
                 prepare(item), which run here, and score(prepared, answer), which does not: nothing that a model wrote runs here.
    a worker     a fork of the keeper, confined before it looks at its first answer, and killed with its group after its last.

An executed answer can leave anything behind in its process, a changed scorer too. So a worker says on its pipe that code is about to be
executed before it is (the "exec" event of Python's audit hooks, which eval and exec raise), and the keeper takes one more score from it
and kills it: an answer is only ever scored by a process in which no other was executed. A fork costs milliseconds; where nothing is
executed a worker goes on to the next answer. Whatever becomes of a worker (too late, dead, out of memory), its answer has 0.0.

What confines a worker, each of them enough to stop most things on its own:

    user      run as root, it becomes the user nobody, if that user may read the files that Python and the target are in
    limits    memory, CPU time, no files of more than 0 bytes, few open ones, no processes, no core dumps
    audit     a Python audit hook: reading files, importing, compiling and executing; nothing else that Python announces. It does not
              announce everything, os.mkfifo and what subprocess is made of, for example
    seccomp   a filter in the kernel (Linux, x86_64 and aarch64): the system calls listed below and no others; files open for reading only.
              `missing` says why, where there is none

Left out, so do not rely on it: executed code can read the files that its user can read, can see the reference answer in its own memory, and
can talk its own process into a score for its own answer (it knows its scorer's name; only other answers are out of its reach). Without
seccomp, code that gets around Python's own hooks can do what `user` and `limits` allow, which for anyone but root is all that this process
may do to files and other processes of its user. Not for several threads at a time.
"""

import atexit
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
import tempfile
import time
from contextlib import contextmanager, suppress

LAYERS = ("user", "limits", "audit", "seccomp")


START_LIMIT = 120.0  # seconds that imports may take


SLACK = 60.0  # seconds that the keeper may take beyond an answer's own; for making an item too


BATCH = 64  # answers a request, and so the most that a worker sees


PATIENCE, HURRIED = 10, 0.25  # after so many late answers of a call the others have so many seconds each


MAX_REPLY = 2**22  # bytes of one reply


NOBODY = 65534


class SandboxError(Exception):
    """The child cannot do what it is asked, in one line."""


class Lost(Exception):
    """The child is late, dead, or talks nonsense."""


# This process


class Sandbox:
    """target: "module:function"; arguments: its keywords, as JSON has them; timeout: seconds an answer; memory_mb: MiB an answer may take.

    The child starts with the first request, and again with the first one after it was lost. It dies with this process, however that
    ends. missing: why there is no seccomp, once it has started; "" where there is.
    """

    def __init__(self, target, arguments, timeout=5.0, memory_mb=2048, layers=LAYERS):
        timeout, memory_mb = min(timeout, 10.0**6), min(memory_mb, 2**30)  # what clocks and limits can hold
        self.config = dict(
            target=target, arguments=arguments, timeout=timeout, memory_mb=memory_mb, layers=list(layers)
        )
        self.process, self.number, self.missing = None, 0, ""
        atexit.register(self.stop)

    def make(self, items):
        """items: a list of what JSON has -> what the target's make says of each. Raises SandboxError."""
        replies = []
        with self.stopped_by_errors():
            try:
                self.send("make", items)
                for _ in items:
                    replies.append(self.receive(SLACK))
            except Lost as why:
                raise SandboxError(f"the item {json.dumps(items[len(replies)])}: {why}") from None
        return replies

    def score(self, pairs):
        """pairs: [(item, answer), ...] -> a finite float each, 0.0 for an answer that the child was lost with. Raises SandboxError.

        After PATIENCE late answers the others have HURRIED seconds each: a thousand late ones are not to take hours.
        """
        scores, late = [], 0
        while len(scores) < len(pairs):
            batch = pairs[len(scores) : len(scores) + BATCH]
            with suppress(Lost), self.stopped_by_errors():
                self.send("score", batch, late)
                for _ in batch:
                    score = self.receive(self.config["timeout"] + SLACK)
                    late += score is None
                    scores.append(float(score) if type(score) in (int, float) and math.isfinite(score) else 0.0)
                continue
            scores.append(0.0)
        return scores

    @contextmanager
    def stopped_by_errors(self):
        """Whatever interrupts a request, Ctrl-C too, leaves a child whose next line answers no one."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def send(self, verb, items, late=0):
        if self.process is None or self.process.poll() is not None:  # somebody may have killed it since
            self.stop()
            self.start()
        self.number += 1
        self.write({"id": self.number, "verb": verb, "items": items, "late": late})

    def start(self):
        """The child sees none of the environment but HOME, nothing of this process, and a working directory that is no longer there."""
        self.socket, theirs = socket.socketpair()
        self.buffer = b""
        command = [sys.executable, "-P", os.path.abspath(__file__), str(theirs.fileno()), str(os.getpid())]
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}  # a fork copies one thread alone
        environment = {
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "1",
            "MPLBACKEND": "agg",
        } | threads
        folder = None
        try:
            folder = tempfile.mkdtemp()
            quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            fds = [theirs.fileno()]
            self.process = subprocess.Popen(
                command, pass_fds=fds, cwd=folder, env=environment, start_new_session=True, **quiet
            )
        except OSError as error:
            raise SandboxError(f"the child does not start: {error}") from None
        finally:
            theirs.close()
            if folder is not None:
                os.rmdir(folder)
        self.number += 1
        try:
            self.write({"id": self.number, "path": [os.path.abspath(place) for place in sys.path]} | self.config)
            self.missing = self.receive(START_LIMIT)
        except Lost as why:
            raise SandboxError(f"the child does not start: {why}") from None

    def write(self, message):
        try:
            self.socket.settimeout(SLACK)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(f"it does not listen ({error})") from None

    def receive(self, seconds):
        """-> the value of the next reply. Raises Lost; SandboxError where the child says what is wrong."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Lost(f"it took longer than {seconds:g} seconds")
            try:
                self.socket.settimeout(left)
                read = self.socket.recv(2**16)
            except TimeoutError:
                continue
            except OSError as error:
                raise Lost(f"it cannot be heard ({error})") from None
            if not read:
                raise Lost("it ended")
            self.buffer += read
            if len(self.buffer) > MAX_REPLY:
                raise Lost(f"its reply has more than {MAX_REPLY:,} bytes")
        line, _, self.buffer = self.buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or reply.get("id") != self.number:
            raise Lost("its reply is to nothing that was asked")
        if "error" in reply:
            raise SandboxError(str(reply["error"])[:1000].replace("\n", " "))
        return reply.get("value")

    def stop(self):
        """Kill the child and whatever is in its group. It starts again when it is asked for something."""
        process, self.process = self.process, None
        if process is not None:
            self.socket.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self):
        self.stop()
        atexit.unregister(self.stop)


# The keeper


def keep(fd, parent):
    """Answer requests until there are no more. What goes wrong with the target is said; the parent takes any other end as a loss."""
    die_with(parent)
    connection = socket.socket(fileno=fd)
    requests = connection.makefile("rb")
    config = json.loads(next(requests))

    def reply(**said):
        connection.sendall(json.dumps({"id": number} | said).encode() + b"\n")

    number = config["id"]
    try:
        sys.path[:] = config["path"]
        module, _, function = config["target"].partition(":")
        target = getattr(importlib.import_module(module), function)(**config["arguments"])
        missing = why_no_seccomp() if "seccomp" in config["layers"] else ""
        confine = Confinement([layer for layer in config["layers"] if layer != "seccomp" or not missing], config)
        gc.collect()
        gc.freeze()  # what is never collected is never written to, and stays shared by all forks
        Worker(target.score, [], confine).kill()  # if one cannot be confined, it is said now
        reply(value=missing)
    except Exception as error:
        return reply(error=f"{error}" if type(error) is ValueError else f"{type(error).__name__}: {error}")
    for line in requests:
        request = json.loads(line)
        number = request["id"]
        try:
            making = request["verb"] == "make"
            for value in (
                map(target.make, request["items"])
                if making
                else scores_of(target, request["items"], request["late"], confine)
            ):
                reply(value=value)
        except OSError:
            raise  # no fork, for now: the child is lost, and another is tried
        except Exception as error:
            reply(error=f"{error}" if type(error) is ValueError else f"{type(error).__name__}: {error}")


def scores_of(target, pairs, late, confine):
    """Yields a number for each (item, answer), None for one that is late. late: how many have been before."""
    tasks = [(target.prepare(item), answer) for item, answer in pairs]
    while tasks:
        worker = Worker(target.score, tasks, confine)
        try:
            spent = False
            while tasks and not spent:
                score, spent = worker.answer(confine.timeout if late < PATIENCE else min(confine.timeout, HURRIED))
                tasks, late = tasks[1:], late + (score is None)
                yield score
        finally:
            worker.kill()


class Worker:
    """A confined fork that scores tasks, [(prepared, answer), ...], in their order."""

    def __init__(self, score, tasks, confine):
        self.buffer, self.nonce = b"", secrets.token_hex(8)
        self.reusable = "audit" in confine.layers  # else nobody says that code was executed
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            work(score, tasks if self.reusable else tasks[:1], end, self.nonce, confine)
        os.close(end)
        with suppress(OSError):  # it does so itself, too: who comes first
            os.setpgid(self.pid, self.pid)
        said = self.line(SLACK)
        if said != f"{self.nonce} ready":
            self.kill()
            raise OSError(f"a worker cannot be confined: {said}")

    def answer(self, seconds):
        """-> (score or None, is this process used up?). The line is "nonce 0.5", with a ! before it where code was executed."""
        line = self.line(seconds)
        if line is None:
            return None, True
        mark, nonce, text = line.rpartition(self.nonce + " ")
        try:
            return (float(text) if nonce else 0.0), bool(mark) or not nonce or not self.reusable
        except ValueError:
            return 0.0, True

    def line(self, seconds):
        """The next line that the worker writes; None if it is late, "" if there is none any more, or no end of it."""
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
        """It is a zombie until waitpid, so nobody else has its number."""
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)


# A worker


def work(score, tasks, pipe, nonce, confine):
    """What a fork does: never returns."""
    try:
        try:
            confine(pipe)
        except Exception as error:
            os.write(pipe, f"{type(error).__name__}: {error}\n".encode())
            raise
        os.write(pipe, f"{nonce} ready\n".encode())
        for prepared, answer in tasks:
            try:
                value = float(score(prepared, answer))
            except Exception:  # what is none, an exit or a KeyboardInterrupt, ends the process
                value = 0.0
            os.write(pipe, f"{nonce} {value!r}\n".encode())
    finally:
        os._exit(0)


class Confinement:
    """Made once by the keeper, called by each worker. Raises where something is refused that should not be."""

    def __init__(self, layers, config):
        self.layers, self.timeout, self.keeper = layers, config["timeout"], os.getpid()
        self.user = "user" in layers and nobody_can_read()
        self.filter = seccomp_filter() if "seccomp" in layers else None
        seconds = int((self.timeout + 1) * BATCH) + 1
        self.limits = dict(RLIMIT_CPU=seconds, RLIMIT_FSIZE=0, RLIMIT_NOFILE=32, RLIMIT_CORE=0, RLIMIT_NPROC=0)
        self.memory = config["memory_mb"] * 2**20  # bytes, beyond what is taken already

    def __call__(self, pipe):
        os.setpgid(0, 0)
        limits = self.limits | {"RLIMIT_AS": address_space() + self.memory} if "limits" in self.layers else {}
        if self.user:
            become_nobody()
        die_with(self.keeper)  # after the change of user, which forgets it
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


def nobody_can_read():
    """Is this root, and can nobody read what Python and the target were imported from?"""
    files = [module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]

    def attempt():
        become_nobody()
        return all(os.access(file, os.R_OK) for file in files)

    return os.geteuid() == 0 and works(attempt)


def works(attempt):
    """Does attempt() return true, in a fork, where it does no harm?"""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if attempt() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def address_space():
    """Bytes of this process's address space, as Linux counts them."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**30


def die_with(parent):
    """Have the kernel kill this process when its parent ends, whose number is `parent`."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)  # it has ended already


# Python's audit hook

HARMLESS = {
    "import",
    "compile",
    "marshal.loads",
    "builtins.id",
    "os.listdir",
    "os.scandir",
    "sys._getframe",
    "sys._getframemodulename",
}


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def make_hook(pipe):
    """-> a hook that refuses what Python announces, but for what is harmless, and marks the pipe before the first code is executed."""
    spent = False

    def hook(event, arguments, harmless=frozenset(HARMLESS), write=os.write):
        nonlocal spent
        if event == "exec":
            if not spent:
                spent = True
                write(pipe, b"!")
        elif event == "open":
            if not isinstance(arguments[2], int) or arguments[2] & WRITING:
                raise PermissionError("files are open for reading only")
        elif event not in harmless and not event.startswith("object."):
            raise PermissionError(f"{event} is refused")

    return hook


# The kernel's filter

libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as the kernel's audit names them


ALLOWED = """
    read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216,
    madvise 28 233, pread64 17 67, readv 19 65, writev 20 66, stat 4 -, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -,
    faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17,
    dup 32 23, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, nanosleep 35 101, clock_nanosleep 230 115,
    clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -, futex 202 98, sched_yield 24 124,
    sched_getaffinity 204 123, getcpu 309 168, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132,
    getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getrandom 318 278,
    getrusage 98 165, getrlimit 97 163, uname 63 160, sysinfo 99 179, times 100 153, restart_syscall 219 128, membarrier 324 283,
    exit 60 93, exit_group 231 94, rseq 334 293"""  # name, number on x86_64, on aarch64


OPENING = [("open", 2, None, 1), ("openat", 257, 56, 2)]  # name, its numbers, which argument has the flags


LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # the 4 instructions of a classic BPF program that are needed


PASS, REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM


def seccomp_filter():
    """-> the program, a list of (instruction, operand, instructions to skip if true, if false); None on an unknown machine.

    It sees a system call's number at offset 0, the machine at 4 and the low halves of the arguments at 16, 24, 32, ...
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        return None
    column = list(MACHINES).index(machine)
    program = [(LOAD, 4, 0, 0), (EQUAL, MACHINES[machine], 1, 0), (RETURN, REFUSE, 0, 0), (LOAD, 0, 0, 0)]
    for line in ALLOWED.split(","):
        number = line.split()[1 + column]
        if number != "-":
            program += [(EQUAL, int(number), 0, 1), (RETURN, PASS, 0, 0)]
    for _, *numbers, argument in OPENING:
        if numbers[column] is not None:
            program += [(EQUAL, numbers[column], 0, 4), (LOAD, 16 + 8 * argument, 0, 0), (ANY_BIT, WRITING, 1, 0)]
            program += [(RETURN, PASS, 0, 0), (RETURN, REFUSE, 0, 0)]
    return program + [(RETURN, REFUSE, 0, 0)]


def install(program):
    """From here on the filter decides. Raises OSError where the kernel has none."""
    code = b"".join(
        struct.pack("=HBBI", instruction, true, false, operand) for instruction, operand, true, false in program
    )
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(
        22, 2, header, 0, 0
    ):  # PR_SET_NO_NEW_PRIVS; PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "the kernel takes no filter")


def why_no_seccomp():
    """-> "" where there is."""
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
