"""Answers that attack a sandbox, and what they leave."""

import os
import sys
import time
from pathlib import Path

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def processes(parent=None):
    """The numbers of the keepers of this process (or of that one), and of all their forks."""
    numbers = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and b"snug.sandbox.child" in words and words[-2] == str(parent or os.getpid()).encode():
            numbers.append(int(folder.name))
    return sorted(set(numbers) - OTHERS)


OTHERS = set()


def wait_for(true):
    """What true() returns when it is true at last; it has half a minute."""
    for _ in range(3000):
        value = true()
        if value:
            return value
        time.sleep(0.01)
    return None


WRITES = {
    "a shell": "__import__('os').system('touch {X}')", "open": "open('{X}', 'w')",
    "os.open": "__import__('os').open('{X}', 64 | 1)",
    "exec a program": "__import__('os').execvp('touch', ['touch', '{X}'])",
    "link": "__import__('os').symlink('/', '{X}')", "mkfifo": "__import__('os').mkfifo('{X}')",
    "a database": "__import__('sqlite3').connect('{X}').execute('create table x (y)')",
    "rename": "__import__('os').rename('{KEPT}', '{X}')", "remove": "__import__('os').remove('{KEPT}')",
    "truncate": "__import__('os').truncate('{KEPT}', 0)", "chmod": "__import__('os').chmod('{KEPT}', 0)",
    "a socket": "__import__('socket').socket(1).bind('{X}')",
    "a thread that writes": "__import__('threading').Thread(target=open, args=('{X}', 'w')).start()",
    "a fork that writes": "__import__('os').fork() or open('{X}', 'w')",
}  # fmt: skip
LATE = {"a power": "9**9**9", "a regular expression": "__import__('re').match('(a|a)*b', 'a' * 60)"}
ENDS = {
    "exit": "__import__('sys').exit()", "os._exit": "__import__('os')._exit(0)",
    "kill the keeper": "__import__('os').kill(__import__('os').getppid(), 9)",
    "kill everybody": "__import__('os').killpg(__import__('os').getpgid(__import__('os').getppid()), 9)",
    "a bad pointer": "__import__('ctypes').string_at(0)", "close files": "__import__('os').closerange(0, 1000)",
    "a fork": "__import__('os').fork()", "parentheses": "(" * 100_000 + "1" + ")" * 100_000,
    "recursion": "(lambda f: f(f))(lambda f: f(f))", "print replies": "print('[1.0, \"\"]\\n' * 10, flush=True)",
    "write no JSON": "__import__('os').write(3, b'1.0\\n0 1.0\\n')",
    "too long a reply": "__import__('os').write(3, b'1' * 10**8)", "a text of 10 GB": "'a' * 10**10",
    "another hook": "__import__('sys').addaudithook(print)", "nothing": "", "half a character": "\ud800",
    "the kernel": "__import__('ctypes').CDLL(None).system(b'true')",
}  # fmt: skip
