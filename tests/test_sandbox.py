"""A Sandbox: nothing that an executed text does leaves its process, and nothing that happens there hangs or ends this one.

The target is tests/evil.py, which executes whatever it gets. Each layer of the confinement is tried without the others, too.
"""

import os
import platform
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from attacks import ALWAYS, ATTACKS, ELSEWHERE, MISSED, secrets
from helpers import HOME
from helpers.boxes import ENDS, LATE, LINUX, OTHERS, WRITES, processes, wait_for
from helpers.commands import python
from snug import sandbox
from snug.sandbox import LAYERS, Result, Sandbox, SandboxError, linux

with closing(Sandbox("evil:Evil")) as first:
    first.call("echo", [[1]])
    MISSING = first.missing
SECCOMP = [("seccomp",)] * ("seccomp" not in MISSING)
STRICT = [("audit",), *SECCOMP, LAYERS]  # each of these refuses harmful code
TIMEOUT = 0.5  # seconds; an honest task takes milliseconds, a fork on a busy machine some hundredths of a second


@contextmanager
def evil(layers=LAYERS, **options):
    with closing(Sandbox("evil:Evil", **dict(timeout=TIMEOUT, memory_mb=512, layers=layers) | options)) as box:
        yield box


@pytest.fixture
def box():
    with evil() as box:
        yield box


def values(box, *tasks):
    """tasks: (method, text) -> the values of a run, None for a task that has none."""
    return [result.value for result in box.run("any", tasks)]


def pid(box):
    return box.call("pid", [[]])[0]


@pytest.fixture(autouse=True)
def others():
    """Sandboxes that tests of other files left in this process do not count: those of the tool `python` stay."""
    OTHERS.clear()
    OTHERS.update(processes())


# What texts do. {X} is a file that must not appear, {KEPT} one that must not change


def attack(box, place, texts, kinds=("evaluate", "execute")):
    """Run every text between honest tasks, whose values must be right -> the texts that left something behind."""
    kept, wrong = place / "kept", []
    for name, text in texts.items():
        kept.write_text("kept")
        kept.chmod(0o666)
        text = text.format(X=place / "X", KEPT=kept) if "{" in text else text
        honest = [("plain", "5"), ("execute", "result = 2 + 2"), ("plain", "4")]
        result = values(box, ("plain", "4"), *((kind, text) for kind in kinds), *honest)
        if [result[0], *result[-3:]] != [True, False, 4, True]:
            wrong.append(f"{name}: honest tasks got {result}")
        if sorted(place.iterdir()) != [kept] or kept.read_text() != "kept" or kept.stat().st_mode & 0o777 != 0o666:
            wrong.append(f"{name}: files {sorted(place.iterdir())}")
            for path in place.iterdir():
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    return wrong


@LINUX
@pytest.mark.parametrize("layers", STRICT, ids=str)
def test_nothing_is_left_by_what_texts_do(layers, place):
    """Each strict layer is enough for what writes, and what reaches for others. Python does not announce os.mkfifo."""
    texts = {name: text for name, text in WRITES.items() if "seccomp" in layers or name != "mkfifo"}
    reaching = "kill the keeper", "kill everybody", "a fork", "the kernel"
    texts |= ENDS if layers == LAYERS else {name: ENDS[name] for name in reaching}
    with evil(layers) as box:
        keeper = pid(box)
        assert attack(box, place, texts) == []
        assert pid(box) == keeper and processes() == [keeper]


@LINUX
def test_what_never_ends_is_ended(box, place):
    keeper = pid(box)
    assert attack(box, place, LATE, ("evaluate",)) == []
    loop = "while True:\n try:\n  while True: pass\n except BaseException: pass"
    assert box.run("execute", [[loop]]) == [Result(None, "took longer than 0.5 seconds")]
    assert pid(box) == keeper and processes() == [keeper]


def test_a_task_has_one_time_limit_however_it_writes(monkeypatch):
    """A byte now and then does not lengthen it, nor does code that is executed late."""
    monkeypatch.setattr(sandbox, "LIMIT", 20.0)
    drip = "import os, time\nwhile os.write(3, b' '): time.sleep(0.05)"
    sleep = "import time; time.sleep(0.4)"  # sleepy has slept as long before
    with evil() as box:
        results = box.run("any", [("execute", drip), ("sleepy", sleep), ("plain", "4")])
    assert results == [Result(None, "took longer than 0.5 seconds")] * 2 + [Result(True, "")]


def test_a_conversation_has_one_time_limit():
    with evil(timeout=2) as box, box.conversation("slow") as tell:
        assert [tell("a"), tell("b")] == [Result("a", ""), Result(None, "took longer than 2 seconds")]


@LINUX
def test_a_process_that_gets_away_is_killed_with_its_group():
    """With nothing that refuses a fork: all that is still in the group of a worker is killed when it has answered."""
    with evil(layers=()) as box:
        keeper = pid(box)
        fork = ("execute", "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nresult = 1")
        assert values(box, fork, fork, ("plain", "4")) == [1, 1, True]
        assert wait_for(lambda: processes() == [keeper])
        bomb = ("execute", "import os\nfor _ in range(6): os.fork()\nwhile True: pass")
        assert values(box, bomb, ("plain", "4")) == [None, True]
        assert wait_for(lambda: processes() == [keeper])


@pytest.mark.parametrize("layers", [LAYERS, ("audit",), ()], ids=str)
def test_no_task_runs_where_code_was_executed(layers):
    """What executed code changes in its process dies with it; the result of this task alone can be false."""
    traitors = [
        "import evil; evil.Evil.plain = lambda *_: True; result = 1",
        "import evil; evil.Evil.plain.__code__ = (lambda self, text: True).__code__; result = 1",
        "import json; json.dumps = lambda x: '[true, \"\"]'; result = 1",
        "import gc\nfor x in gc.get_objects():\n    if type(x) is list: x.clear()",
        'import os; os.write(3, b\'[1, ""]\\n[true, ""]\\n[true, ""]\\n[true, ""]\\n\'); result = 1',
    ]
    with evil(layers) as box:
        for traitor in traitors:
            tasks = [("plain", "4"), ("execute", traitor), ("plain", "5"), ("plain", "4")]
            assert values(box, *tasks)[2:] == [False, True], traitor
        assert values(box, *[("count", "")] * 3) == [1] * 3


def test_limits():
    with evil(layers=("limits",)) as box:
        names = ["RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_NPROC", "RLIMIT_NOFILE"]
        code = "import resource; result = resource.getrlimit(resource.{})[1]"
        assert values(box, *(("execute", code.format(name)) for name in names)) == [0, 0, 0, 32]
        code = "import mmap; x = mmap.mmap(-1, {} * 2**20); result = 1"  # of 512 MiB, beyond what it starts with
        assert values(box, *(("execute", code.format(size)) for size in (256, 768))) == [1, None]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_becomes_nobody(monkeypatch):
    """If nobody can read what was imported: /usr/bin/python3 and these files. Otherwise it stays root."""
    code = "import os; result = os.{}() if not os.getgroups() else -1"
    tasks = [("execute", code.format(name)) for name in ("getuid", "geteuid", "getgid", "getegid")]
    system = "/usr/bin/python3"
    code_of_version = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not Path(system).exists() or subprocess.run([system, "-c", code_of_version]).returncode:
        pytest.skip(f"there is no {system} of version 3.11")
    if closed := [folder for folder in Path(__file__).parents if not folder.stat().st_mode & 0o1]:
        pytest.skip(f"the user nobody cannot enter {closed[0]}")
    monkeypatch.setattr(sandbox.sys, "executable", system)
    monkeypatch.setattr(sandbox.sys, "path", [str(HOME / "tests"), str(HOME)])
    with evil(layers=("user",)) as box:
        assert values(box, *tasks) == [65534] * 4


# What texts read


def revealed(layers, place):
    """-> names of the attacks whose result has what it should not have."""
    with evil(layers, timeout=60) as box, secrets(place, pid(box)) as (before, marks):
        results = box.run("execute", [[f"{before}{code}\nresult = str(result)"] for code in ATTACKS.values()])
    texts = {name: f"{result.value}{result.error}" for name, result in zip(ATTACKS, results, strict=True)}
    return {name for name, text in texts.items() if any(mark in text for mark in marks)}


@LINUX
@pytest.mark.parametrize("layers, most", [(LAYERS, {}), (["audit"], MISSED), (["landlock"], {"a socket"})])
def test_layers_stop_attacks_on_files(layers, most, place):
    """All of them together; the audit hook alone those that Python announces."""
    if layers == ["landlock"] and "landlock" in MISSING:
        pytest.skip("this kernel has no Landlock")
    assert revealed(layers, place) <= {*most}


@LINUX
def test_without_the_layers_the_attacks_reveal_what_they_should(place):
    """So they are real ones. Memory and environment of other processes are protected without any layer."""
    found = revealed((), place)
    assert ATTACKS.keys() - ALWAYS.keys() - found <= ELSEWHERE and not found & ALWAYS.keys()


@pytest.mark.parametrize("layers", STRICT, ids=str)
def test_packages_and_the_library_are_imported(layers):
    """The library announces a sleep from Python 3.13 on; from 3.14 on functions, which a dataclass makes of lazy
    annotations; and modules that have no .pyc file."""
    code = "import colorsys, json.tool, numpy; result = float(numpy.linalg.norm([3, 4]))"
    read = "import os; result = 'os.py' in os.listdir(os.path.dirname(os.__file__)) and open(os.__file__).read(4)"
    make = "import types; result = types.FunctionType((lambda: 4).__code__, {})()"
    dump = "import marshal; result = marshal.loads(marshal.dumps(5))"
    sleep = "import time; result = time.sleep(0) or 6"
    with evil(layers, timeout=60, memory_mb=2048) as box:
        assert values(box, *[("execute", text) for text in (code, read, make, dump, sleep)]) == [5.0, 'r"""', 4, 5, 6]


@LINUX
def test_a_worker_has_no_capabilities_even_as_root_and_gains_none_by_a_program():
    own = "result = open('/proc/self/status').read()"
    program = "import subprocess; result = subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout"
    with evil(layers=(), timeout=60) as box:
        for text in values(box, ("execute", own), ("execute", program)):
            words = text.split()
            assert [int(words[words.index(f"Cap{name}:") + 1], 16) for name in ("Inh", "Prm", "Eff", "Amb")] == [0] * 4
            assert words[words.index("NoNewPrivs:") + 1] == "1"


@LINUX
def test_this_process_the_keeper_and_workers_are_not_dumpable():
    code = "from snug.sandbox import linux; result = linux.called('prctl', 3)"  # PR_GET_DUMPABLE
    with evil(layers=()) as box:
        assert box.call("any", [["execute", code]]) == [0] and values(box, ("execute", code)) == [0]
    assert linux.called("prctl", 3) == 0


PROGRAM = """
import sys
sys.path[:0] = ["tests", "."]
from snug.sandbox import linux

def refuse(*lines):
    linux.program = lambda: [*lines, linux.REFUSE, linux.PASS]
    linux.seccomp()

linux.called("prctl", 38, 1, 0, 0, 0)
load, equal = linux.LOAD, linux.EQUAL
refuse((load, 0, 0, 0), (equal, 0, 1, 444))  # landlock_create_ruleset
refuse((load, 0, 0, 0), (equal, 0, 3, 157), (load, 0, 0, 16), (equal, 0, 1, 22))  # prctl PR_SET_SECCOMP
from data.tools import load_tools
from examples.tools import python
load_tools(["examples.tools:python"])
print("loaded", file=sys.stderr)
print(python("print(1)"), end="")
"""


@LINUX
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it has the numbers of x86_64")
@pytest.mark.skipif(bool({"landlock", "seccomp"} & set(MISSING)), reason="this machine has not all layers")
def test_each_layer_that_is_missing_is_named_once():
    """On a kernel that has neither Landlock nor filters, as seen from behind a filter."""
    done = python("-c", PROGRAM)
    layers = ", ".join(["user"] * ("user" in MISSING) + ["landlock", "seccomp"])
    note = f"note: the sandbox runs without {layers}: see snug/sandbox/__init__.py"
    assert done.stderr == f"{note}\nloaded\n"
    assert done.stdout == "1\n" and done.returncode == 0


@pytest.mark.parametrize(
    "kind, text, value, error",
    [
        ("evaluate", "'é' * 3", "ééé", ""),
        ("evaluate", "1 / 0", None, "ZeroDivisionError: division by zero"),
        ("evaluate", "'a' * 2**20", None, "the process ended, or its message is too long or no JSON"),
        ("evaluate", "[1]", None, "the result is no text, number, boolean or None"),
        ("evaluate", "exit()", None, "the process ended, or its message is too long or no JSON"),
        ("number", "0.25", 0.25, ""),
        ("plain", "\ud800\0é" * 3000, False, ""),
    ],
)
def test_results(box, kind, text, value, error):
    assert box.run("any", [(kind, text)]) == [Result(value, error)]


def test_it_sees_nothing_of_this_process(box, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    names = set(box.call("environment", [[]])[0]) - {"LC_CTYPE"}
    assert names == {"PYTHONPATH", "PYTHONHASHSEED", "PYTHONUTF8", "OMP_NUM_THREADS"}
    assert sys.platform != "linux" or box.call("streams", [[]]) == [["/dev/null"] * 3]
    files = "import os; result = sum(os.path.exists(f'/dev/fd/{file}') for file in range(3, 200))"
    assert values(box, ("execute", files)) == [1]  # the socket
    assert "torch" not in box.call("modules", [[]])[0] and "evil" not in sys.modules


def test_a_lost_keeper_is_followed_by_another(box):
    """It starts with the first request, and a close kills it."""
    assert box.process is None
    keeper, process = pid(box), box.process
    os.kill(keeper, signal.SIGKILL)
    box.process.wait()
    assert values(box, ("plain", "4"), ("plain", "5")) == [True, False]
    before = pid(box)
    with pytest.raises(SandboxError, match="the process ended"):
        box.call("exit", [[]])
    assert box.call("echo", [["x"]]) == ["x"] and pid(box) != before
    if sys.platform == "linux":
        assert processes() == [pid(box)]
    box.close()
    assert process.returncode == -signal.SIGKILL and box.process is None


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
def test_a_keeper_that_dies_or_hangs_costs_one_result(monkeypatch, how):
    """With all layers it does not come to this."""
    kill = f"import os, signal; os.kill(os.getppid(), signal.{how}); import time; time.sleep(0.2)"
    monkeypatch.setattr(sandbox, "LIMIT", 3.0)
    with evil(layers=(), timeout=1.0) as box:
        results = box.run("any", [("plain", "4"), ("execute", kill), ("plain", "4")])
        assert [result.value for result in results] == [True, None, True], results


class Late(BaseException):
    """Like OutOfTime of data/rewards.py, or a Ctrl-C."""


def test_an_interrupted_request_leaves_no_replies_to_the_next(box):
    def ring(*_):
        raise Late

    before, old = pid(box), signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Late):
            box.call("sleep", [[]])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert values(box, ("plain", "4"), ("plain", "5")) == [True, False]
    assert pid(box) != before and (sys.platform != "linux" or processes() == [pid(box)])


@LINUX
def test_it_dies_with_its_parent_and_no_ctrl_c_reaches_it():
    """The parent is killed while a worker is in a loop; before that the terminal's group is interrupted."""
    program = """
import os, signal, sys
sys.path[:0] = ["tests", "."]
from snug.sandbox import Sandbox
box = Sandbox("evil:Evil", {}, timeout=1000)
signal.signal(signal.SIGINT, signal.SIG_IGN)
keeper = box.call("pid", [[]])
os.killpg(0, signal.SIGINT)
assert box.call("pid", [[]]) == keeper
print(keeper[0], flush=True)
box.run("execute", [["while True: pass"]])
"""
    command = [sys.executable, "-c", program]
    parent = subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, text=True, start_new_session=True)
    keeper = int(parent.stdout.readline())
    assert wait_for(lambda: len(processes(parent.pid)) == 2) and keeper in processes(parent.pid)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not processes(parent.pid))
    parent.stdout.close()


@pytest.mark.parametrize(
    "target, arguments, message",
    [
        ("evil:Evil", {"wrong": "one line\nthat says why"}, "^one line that says why$"),
        ("evil:Evil", {"other": 1}, "TypeError: .*other"),
        ("no_such_module:f", {}, "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_target_that_refuses(target, arguments, message):
    with closing(Sandbox(target, arguments)) as box:
        for _ in range(2):
            with pytest.raises(SandboxError, match=message):
                box.run("plain", [["4"]])


def test_what_cannot_start_or_confine_is_an_error(monkeypatch):
    with evil(memory_mb=-(2**50)) as box, pytest.raises(SandboxError, match="OSError: no process can be confined"):
        box.run("plain", [["4"]])
    with evil() as box, pytest.raises(SandboxError, match="AttributeError: .*no_such_method"):
        box.run("no_such_method", [["4"]])
    monkeypatch.setattr(sandbox.sys, "executable", "/no/such/python")
    with evil() as box, pytest.raises(SandboxError, match="the sandbox does not start"):
        box.call("echo", [[1]])
