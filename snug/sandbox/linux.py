"""What Python has no function for: prctl, capset, Landlock and seccomp filters of Linux.

The filter is a program of classic BPF, for x86_64 and aarch64: the kernel refuses all system calls that are not listed
in system_calls.toml, and opens files for reading only.
"""

import ctypes
import os
import platform
import tomllib
from pathlib import Path
from struct import pack

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's AUDIT_ARCH_...
ALLOWED = tomllib.loads(Path(__file__).with_name("system_calls.toml").read_text())
OPENING = {"x86_64": {2: 1, 257: 2}, "aarch64": {56: 2}}  # open, openat: which argument has the flags
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of classic BPF
PASS = (RETURN, 0, 0, 0x7FFF0000)  # SECCOMP_RET_ALLOW
REFUSE = (RETURN, 0, 0, 0x00050001)  # SECCOMP_RET_ERRNO | EPERM


def called(name, *arguments):
    """What a function of the C library returns. Raises OSError.

    The function is looked up each time: it must not be an attribute of a module, where code in a worker would find it.
    """
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name} is refused")
    return result


def drop_privileges():
    """This process and its children have no capabilities and gain none, whoever the user is."""
    called("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    called("capset", pack("Ii", 0x20080522, 0), bytes(24))  # version 3, this process, none


def landlock(folders):
    """From here on this process and its children read below these open folders, and open, make and remove nothing else.

    Needs drop_privileges() before. The rights are those of Landlock's first version; later ones have them too.
    """
    rules = called("syscall", 444, pack("Q", 2**13 - 1), 8, 0)  # landlock_create_ruleset
    for folder in folders:  # landlock_add_rule with LANDLOCK_ACCESS_FS_READ_FILE and ..._READ_DIR
        called("syscall", 445, rules, 1, pack("=Qi", 4 | 8, folder), 0)
    called("syscall", 446, rules, 0)  # landlock_restrict_self


def program():
    """(instruction, instructions to skip if true, if false, operand) each. Raises KeyError on an unknown machine.

    The program finds the number of the system call at offset 0, the machine at 4 and the low halves of the arguments at
    16, 24, 32, ...
    """
    machine = platform.machine()
    lines = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, MACHINES[machine]), REFUSE, (LOAD, 0, 0, 0)]
    for number in ALLOWED[machine].values():
        lines += [(EQUAL, 0, 1, number), PASS]
    for number, argument in OPENING[machine].items():
        lines += [(EQUAL, 0, 4, number), (LOAD, 0, 0, 16 + 8 * argument)]
        lines += [(ANY_BIT, 1, 0, WRITING), PASS, REFUSE]
    return [*lines, REFUSE]


def seccomp():
    """From here on the filter is in force, in this process and its children. Needs drop_privileges() before.

    Raises OSError if the kernel has no filters, KeyError on an unknown machine.
    """
    lines = program()
    buffer = ctypes.create_string_buffer(b"".join(pack("=HBBI", *line) for line in lines))
    header = pack("@HP", len(lines), ctypes.addressof(buffer))
    called("prctl", 22, 2, header)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
