"""The child that scores: nothing that an executed answer does leaves it, and nothing that happens to it hangs or ends this process.

The scorer is tests/evil.py's, which executes whatever it is given. Each layer of the confinement is tried without the others, too.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from data.gym import sandbox
from data.gym.sandbox import LAYERS, Sandbox, SandboxError

with closing(Sandbox("evil:Evil", {})) as asked:
    asked.make([])
    SECCOMP = not asked.missing
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STRICT = [("audit",)] + [("seccomp",)] * SECCOMP + [LAYERS]  # each of these refuses what is not harmless
TIMEOUT = 0.5  # seconds; an honest answer takes milliseconds, a fork on a busy machine some hundredths of a second


@contextmanager
def evil(layers=LAYERS, **options):
    options = dict(timeout=TIMEOUT, memory_mb=512, layers=layers) | options
    with closing(Sandbox("evil:Evil", {}, **options)) as child:
        yield child


@pytest.fixture
def child():
    """Of all layers."""
    with evil() as child:
        yield child


@pytest.fixture
def place(tmp_path):
    """A folder in which anybody could write, nobody too: where nothing appears, something refused it."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    assert os.access(tmp_path, os.W_OK)
    return tmp_path


def processes(parent=None):
    """The numbers of this process's (or that one's) children that run data/gym/sandbox.py, and of all their forks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and sandbox.__file__.encode() in words and words[-2] == str(parent or os.getpid()).encode():
            found.append(int(folder.name))
    return sorted(found)


def wait_for(true):
    """What true() says when it is true at last; it has half a minute."""
    for _ in range(3000):
        said = true()
        if said:
            return said
        time.sleep(0.01)
    return None


# -----------------------------------------------------------------------------
# What answers do. {X} is a file that must not appear, or one that must not change

WRITES = {
    "a shell": "__import__('os').system('touch {X}')",
    "open": "open('{X}', 'w')",
    "open to append": "open('{X}', 'a').write('x')",
    "os.open": "__import__('os').open('{X}', 64 | 1)",
    "mkdir": "__import__('os').mkdir('{X}')",
    "subprocess": "__import__('subprocess').run(['touch', '{X}'])",
    "exec a program": "__import__('os').execvp('touch', ['touch', '{X}'])",
    "link": "__import__('os').symlink('/', '{X}')",
    "mkfifo": "__import__('os').mkfifo('{X}')",
    "a database": "__import__('sqlite3').connect('{X}').execute('create table x (y)')",
    "rename": "__import__('os').rename('{KEPT}', '{X}')",
    "remove": "__import__('os').remove('{KEPT}')",
    "truncate": "__import__('os').truncate('{KEPT}', 0)",
    "chmod": "__import__('os').chmod('{KEPT}', 0)",
    "a socket": "__import__('socket').socket(1).bind('{X}')",
    "a thread that writes": "__import__('threading').Thread(target=open, args=('{X}', 'w')).start()",
    "a fork that writes": "__import__('os').fork() or open('{X}', 'w')",
}
LATE = {
    "a loop": "[0 for _ in iter(int, 1)]",
    "a power": "9**9**9",
    "a regular expression": "__import__('re').match('(a|a)*b', 'a' * 60)",
}
ENDS = {
    "exit": "__import__('sys').exit()",
    "os._exit": "__import__('os')._exit(0)",
    "abort": "__import__('os').abort()",
    "KeyboardInterrupt": "(_ for _ in ()).throw(KeyboardInterrupt)",
    "kill the keeper": "__import__('os').kill(__import__('os').getppid(), 9)",
    "kill everybody": "__import__('os').killpg(__import__('os').getpgid(__import__('os').getppid()), 9)",
    "a bad pointer": "__import__('ctypes').string_at(0)",
    "close files": "__import__('os').closerange(0, 1000)",
    "a fork": "__import__('os').fork()",
    "parentheses": "(" * 100_000 + "1" + ")" * 100_000,
    "recursion": "(lambda f: f(f))(lambda f: f(f))",
    "recursion in C": "__import__('sys').setrecursionlimit(10**8) or (lambda f: f(f))(lambda f: f(f))",
    "print replies": "print('1.0\\n' * 10, '{{\"id\": 1, \"value\": 1.0}}', flush=True)",
    "write replies": "[__import__('os').write(fd, b'1.0\\n0 1.0\\n') for fd in range(3, 30) if __import__('os').path.exists(f'/dev/fd/{{fd}}')]",
    "too long a reply": "[__import__('os').write(fd, b'1' * 10**5) for fd in range(3, 30) if __import__('os').path.exists(f'/dev/fd/{{fd}}')]",
    "a text of 10 GB": "'a' * 10**10",
    "a list of 80 GB": "[0] * 10**10",
    "bytes of 10 GB": "bytearray(10**10)",
    "another hook": "__import__('sys').addaudithook(print)",
    "no number": "'x'",
    "nothing": "",
    "a null": "\0",
    "half a character": "'\ud800'",
    "the kernel": "__import__('ctypes').CDLL(None).system(b'true')",
}


def attack(child, place, kinds=("eval", "exec"), answers=None):
    """Every answer to every scorer, each beside an honest one, which must be scored rightly -> the answers that left something behind."""
    kept, wrong = place / "kept", []
    for name, text in (answers or WRITES | ENDS).items():
        kept.write_text("kept")
        kept.chmod(0o666)
        text = text.format(X=place / "X", KEPT=kept) if "{" in text else text
        answers = [(kind, text) for kind in kinds]
        scores = child.score([("plain", "4"), *answers, ("plain", "5"), ("exec", "score = 2 + 2 == 4")])
        if scores[1:-2] != [0.0] * len(kinds):
            wrong.append(f"{name}: scored {scores[1:-2]}")
        if [scores[0], *scores[-2:]] != [1.0, 0.0, 1.0]:
            wrong.append(f"{name}: others scored {scores}")
        if sorted(place.iterdir()) != [kept] or kept.read_text() != "kept" or kept.stat().st_mode & 0o777 != 0o666:
            wrong.append(f"{name}: files {sorted(place.iterdir())}")
            for path in place.iterdir():
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    return wrong


@LINUX
def test_nothing_is_left_by_what_answers_do(child, place):
    keeper = child.make(["pid"])[0]
    assert attack(child, place) == []
    assert child.make(["pid"]) == [keeper], "it was lost on the way"
    assert processes() == [keeper]
    Path(place / "kept").unlink()


@LINUX
@pytest.mark.parametrize("layers", [layers for layers in STRICT if layers != LAYERS], ids=str)
def test_each_of_the_strict_layers_is_enough(layers, place):
    """What writes, and what reaches for other processes. os.mkfifo is one of those that Python does not announce."""
    answers = {name: text for name, text in WRITES.items() if "seccomp" in layers or name != "mkfifo"}
    answers |= {name: ENDS[name] for name in ("kill the keeper", "kill everybody", "a fork", "the kernel")}
    with evil(layers) as child:
        keeper = child.make(["pid"])[0]
        assert attack(child, place, answers=answers) == []
        assert child.make(["pid"]) == [keeper] and processes() == [keeper]


@LINUX
def test_what_never_ends_is_ended(child, place):
    keeper = child.make(["pid"])[0]
    assert attack(child, place, ("eval",), LATE) == []
    loop = "while True:\n try:\n  while True: pass\n except BaseException: pass"
    assert attack(child, place, ("exec",), {"a loop": loop}) == []
    assert child.make(["pid"]) == [keeper] and processes() == [keeper]


def test_after_many_late_answers_the_others_have_less_time(monkeypatch):
    """Both halves of it: this process counts them, over requests too, and the keeper looks at the count."""
    counts = []
    monkeypatch.setattr(sandbox, "BATCH", 3)
    with evil(timeout=0.02) as child:
        send = child.send
        monkeypatch.setattr(child, "send", lambda request: counts.append(request["late"]) or send(request))
        assert child.score([("exec", "while True: pass")] * 4) == [0.0] * 4
    assert counts == [0, 3]
    with evil(timeout=3600) as child:  # which is not waited for
        send = child.send
        monkeypatch.setattr(child, "send", lambda request: send(request | dict(late=sandbox.PATIENCE)))
        assert child.score([("exec", "while True: pass"), ("plain", "4")]) == [0.0, 1.0]


@LINUX
def test_a_process_that_gets_away_is_killed_with_its_group(place):
    """With nothing that refuses a fork: whoever is still in the worker's group when it has answered is killed."""
    with evil(layers=()) as child:
        keeper = child.make(["pid"])[0]
        fork = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nscore = 1.0"
        assert child.score([("exec", fork), ("exec", fork), ("plain", "4")]) == [1.0, 1.0, 1.0]
        assert wait_for(lambda: processes() == [keeper])
        bomb = "import os\nfor _ in range(6): os.fork()\nwhile True: pass"
        assert child.score([("exec", bomb), ("plain", "4")]) == [0.0, 1.0]
        assert wait_for(lambda: processes() == [keeper])


@pytest.mark.parametrize("layers", [LAYERS, ("audit",), ()], ids=str)
def test_no_answer_changes_how_others_are_scored(layers):
    """What an executed answer does to its process dies with it."""
    traitors = [
        "import sys; sys.modules['evil'].Evil.score = lambda *_: 1.0; score = 1.0",
        "import evil, os; evil.Evil.score.__code__ = (lambda self, prepared, answer: 1.0).__code__; score = 1.0",
        "import builtins; builtins.float = lambda x: 1.0; score = 1.0",
        "import gc\nfor x in gc.get_objects():\n    if type(x) is list: x.clear()",
        "import os; os.write = os._exit = print; score = 0.5",
    ]
    with evil(layers) as child:
        for traitor in traitors:
            assert child.score([("plain", "4"), ("exec", traitor), ("plain", "5"), ("plain", "4")])[2:] == [0.0, 1.0]
        assert child.score([("eval", "__import__('evil').Evil.__setattr__"), ("plain", "5")]) == [0.0, 0.0]


def test_where_nothing_is_executed_a_process_goes_on():
    with evil() as child:
        answers = [("count", "")] * 3 + [("exec", "score = 1.0")] + [("count", "")] * 2
        assert child.score(answers) == [1.0, 2.0, 3.0, 1.0, 1.0, 2.0]
        assert child.score([("count", "")]) == [1.0]  # of another request
    with evil(layers=("limits",)) as child:  # without the hook nobody knows
        assert child.score([("count", "")] * 3) == [1.0] * 3


def test_limits():
    """Each of them alone: what a process may take, and which user it is."""
    with evil(layers=("limits",)) as child:
        asked = ["RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_CPU"]
        code = "import resource; score = resource.getrlimit(resource.{})[1]"
        seconds = 1 + int((TIMEOUT + 1) * sandbox.BATCH)
        assert child.score([("exec", code.format(name)) for name in asked]) == [0, 0, 0, 32, seconds]
        sizes = [("exec", f"import mmap; x = mmap.mmap(-1, {size} * 2**20); score = 1.0") for size in (256, 768)]
        assert child.score(sizes) == [1.0, 0.0]  # of 512 MiB, beyond what it starts with


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_becomes_nobody(monkeypatch):
    """Where nobody can read what was imported, /usr/bin/python3 and tests/evil.py; else it stays root, and can still score."""
    code = "import os; score = os.{}() if not os.getgroups() else -1"
    asked = [("exec", code.format(name)) for name in ("getuid", "geteuid", "getgid", "getegid")]
    system = "/usr/bin/python3"
    code_of_version = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not Path(system).exists() or subprocess.run([system, "-c", code_of_version]).returncode:
        pytest.skip(f"there is no {system} of version 3.11")
    if closed := [folder for folder in Path(__file__).parents if not folder.stat().st_mode & 0o1]:
        pytest.skip(f"the user nobody cannot enter {closed[0]}")
    monkeypatch.setattr(sandbox.sys, "executable", system)
    monkeypatch.setattr(sandbox.sys, "path", [str(Path(__file__).parent)])
    with evil(layers=("user",)) as child:
        assert child.score(asked) == [65534] * 4


def test_a_file_of_more_than_no_bytes(place):
    with evil(layers=("limits",)) as child:
        assert child.score([("exec", f"file = open('{place / 'X'}', 'wb', 0); file.write(b'x'); score = 1.0")]) == [0.0]
    assert (place / "X").stat().st_size == 0


# -----------------------------------------------------------------------------
# The child itself


def test_it_sees_nothing_of_this_process(child, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    with evil() as other:
        environment = other.make(["environment"])[0]
        assert sys.platform != "linux" or other.make(["streams"]) == [["/dev/null"] * 3]
        assert set(environment) - {"LC_CTYPE"} == {
            "HOME", "PYTHONHASHSEED", "PYTHONUTF8", "MPLBACKEND", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"
        }  # fmt: skip
        fds = "import os; score = sum(os.path.exists(f'/dev/fd/{fd}') for fd in range(3, 200))"
        assert other.score([("exec", fds)]) == [1.0]  # the pipe
    assert "torch" not in child.make(["modules"])[0] and "torch" in sys.modules
    assert "evil" not in sys.modules


def test_numbers_that_are_none(child):
    much = "import os\nfor fd in range(3, 30):\n try: os.write(fd, b'1' * {})\n except OSError: pass\nscore = 1.0"
    assert child.score([("exec", much.format(size)) for size in (2000, 10**8, 0)]) == [0.0, 0.0, 1.0]
    answers = ["nan", "inf", "-inf", "1e999", "-3", "0.25", "1_0", "0x10", "1" * 5000]
    assert child.score([("number", answer) for answer in answers]) == [0.0, 0.0, 0.0, 0.0, -3.0, 0.25, 10.0, 0.0, 0.0]
    assert child.score([]) == [] and child.make([]) == []
    assert child.score([("plain", "\ud800\0é" * 3000), ("plain", "4")]) == [0.0, 1.0]


def test_a_child_that_is_lost_is_followed_by_another(child):
    keeper = child.make(["pid"])[0]
    os.kill(keeper, signal.SIGKILL)
    child.process.wait()
    assert child.score([("plain", "4"), ("plain", "5")]) == [1.0, 0.0]
    for item, message in (("exit", "it ended"), ("long", "more than 4,194,304 bytes")):
        before = child.make(["pid"])[0]
        with pytest.raises(SandboxError, match=f'the item "{item}": .*{message}'):
            child.make(["print", item])
        assert child.make(["print"]) == ["print"] and child.make(["pid"]) != [before]
    if sys.platform == "linux":
        assert processes() == child.make(["pid"])


def test_a_child_that_dies_or_hangs_with_answers_has_them_score_nothing(monkeypatch):
    """The keeper, that is; with all layers it does not come to this."""
    kill = "import os, signal; os.kill(os.getppid(), signal.{}); import time; time.sleep(0.2)"
    monkeypatch.setattr(sandbox, "SLACK", 1.0)
    with evil(layers=(), timeout=0.3) as unprotected:
        for how in ("SIGKILL", "SIGSTOP"):
            answers = [("plain", "4"), ("exec", kill.format(how)), ("plain", "4"), ("plain", "5")]
            assert unprotected.score(answers) == [1.0, 0.0, 1.0, 0.0]


class Late(BaseException):
    """Like OutOfTime of data/rewards.py, or a Ctrl-C."""


def test_an_interrupted_request_leaves_no_answers_to_the_next(child):
    def ring(*_):
        raise Late

    before, old = child.make(["pid"])[0], signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Late):
            child.make(["sleep"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert child.score([("plain", "4"), ("plain", "5")]) == [1.0, 0.0]
    assert child.make(["pid"]) != [before] and (sys.platform != "linux" or processes() == child.make(["pid"]))


@LINUX
def test_it_dies_with_its_parent_and_a_ctrl_c_is_not_its_own():
    """The parent is killed while a worker is in a loop; and before that the terminal's group is interrupted."""
    program = """
import os, signal, sys
sys.path[:0] = ["tests", "."]
from data.gym.sandbox import Sandbox
child = Sandbox("evil:Evil", {}, timeout=1000)
signal.signal(signal.SIGINT, signal.SIG_IGN)
keeper = child.make(["pid"])[0]
os.killpg(0, signal.SIGINT)
assert child.make(["pid"]) == [keeper]
print(keeper, flush=True)
child.score([("exec", "while True: pass")])
"""
    home = Path(sandbox.__file__).parent.parent.parent
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=home, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    keeper = int(parent.stdout.readline())
    assert wait_for(lambda: len(processes(parent.pid)) == 2) and keeper in processes(parent.pid)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not processes(parent.pid))
    parent.stdout.close()


def test_it_starts_with_the_first_request_and_is_killed():
    with evil() as child:
        assert child.process is None
        child.make(["print"])
        process = child.process
    assert process.returncode == -signal.SIGKILL and child.process is None


def test_a_target_that_refuses():
    for target, arguments, message in (
        ("evil:Evil", {"wrong": "one line that says why"}, "^one line that says why$"),
        ("evil:Evil", {"other": 1}, "TypeError: .*other"),
        ("no_such_module:f", {}, "ModuleNotFoundError: No module named 'no_such_module'"),
    ):
        with closing(Sandbox(target, arguments)) as child:
            for _ in range(2):
                with pytest.raises(SandboxError, match=message):
                    child.score([("plain", "4")])


def test_what_does_not_start_is_said_at_once(monkeypatch):
    with evil(memory_mb=0.5) as child, pytest.raises(SandboxError, match="a worker cannot be confined: TypeError: "):
        child.make(["print"])
    monkeypatch.setattr(sandbox.sys, "executable", "/no/such/python")
    with evil() as child, pytest.raises(SandboxError, match="the child does not start"):
        child.make(["print"])


@LINUX
def test_the_filter_knows_other_machines(monkeypatch):
    """Its numbers are looked up for each of them, and a machine that it does not know has none."""
    programs = {}
    for machine in ("x86_64", "aarch64", "riscv64"):
        monkeypatch.setattr(sandbox.platform, "machine", lambda machine=machine: machine)
        programs[machine] = sandbox.seccomp_filter()
    assert programs["riscv64"] is None and "riscv64" in sandbox.why_no_seccomp()
    for machine, (read, openat) in {"x86_64": (0, 257), "aarch64": (63, 56)}.items():
        compared = [operand for instruction, operand, _, _ in programs[machine] if instruction == sandbox.EQUAL]
        assert compared[0] == sandbox.MACHINES[machine] and read in compared and openat in compared
        assert len(set(compared)) == len(compared) and len(programs[machine]) < 4096
        assert programs[machine][-1] == (sandbox.RETURN, sandbox.REFUSE, 0, 0)


def run_filter(program, number, arguments=(0,) * 6, machine=sandbox.MACHINES["x86_64"]):
    """What the kernel would do: a BPF machine of the four instructions."""
    data = {0: number, 4: machine} | {16 + 8 * i: argument & 0xFFFFFFFF for i, argument in enumerate(arguments)}
    place, accumulator = 0, 0
    while True:
        instruction, operand, true, false = program[place]
        place += 1
        if instruction == sandbox.LOAD:
            accumulator = data[operand]
        elif instruction == sandbox.RETURN:
            return operand
        else:
            yes = accumulator == operand if instruction == sandbox.EQUAL else accumulator & operand
            place += true if yes else false


def test_the_filter_step_by_step(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "linux")
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "x86_64")
    program = sandbox.seccomp_filter()
    allowed = {number for number in range(1000) if run_filter(program, number) == sandbox.PASS}
    listed = {int(line.split()[1]) for line in sandbox.ALLOWED.split(",") if line.split()[1] != "-"}
    assert allowed == listed | {2, 257}  # open and openat, with flags 0
    forbidden = dict(fork=57, clone=56, clone3=435, execve=59, kill=62, socket=41, unlink=87, prctl=157, ptrace=101)
    forbidden |= dict(fcntl=72, ioctl=16, prlimit64=302, io_uring_setup=425, openat2=437, creat=85)
    assert not allowed & set(forbidden.values())
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_RDWR | os.O_CLOEXEC):
        assert run_filter(program, 257, (0, 0, flags, 0, 0, 0)) == sandbox.REFUSE
        assert run_filter(program, 2, (0, flags, 0, 0, 0, 0)) == sandbox.REFUSE
    assert run_filter(program, 257, (1, 1, os.O_CLOEXEC | os.O_DIRECTORY, 1, 0, 0)) == sandbox.PASS
    assert run_filter(program, 0, machine=sandbox.MACHINES["aarch64"]) == sandbox.REFUSE
    assert run_filter(program, 0x40000000) == sandbox.REFUSE  # x32's read
