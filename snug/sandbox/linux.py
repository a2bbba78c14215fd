"""What Python has no function for: prctl, capset and Landlock of Linux."""

import ctypes
import struct


def called(name: str, *arguments) -> int:
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
    called("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # version 3, this process, none


def landlock(folders: list[int]):
    """From here on this process and its children read below these open folders, and open, make and remove nothing else.

    Needs drop_privileges() before. The rights are those of Landlock's first version; later ones have them too.
    """
    rules = called("syscall", 444, struct.pack("Q", 2**13 - 1), 8, 0)  # landlock_create_ruleset
    for folder in folders:  # landlock_add_rule with LANDLOCK_ACCESS_FS_READ_FILE and ..._READ_DIR
        called("syscall", 445, rules, 1, struct.pack("=Qi", 4 | 8, folder), 0)
    called("syscall", 446, rules, 0)  # landlock_restrict_self
