"""One run at a time in a run's folder: a lock on the file .<folder>.lock beside the folder. The file names the process
that holds the lock.

The lock is flock's, so the system releases it when the process ends, also after kill -9. The lock belongs to the
folder's name, even if the folder is moved or deleted meanwhile. On a file system without locks the run goes on with a
warning. Commands that only read a run take no lock. Tests: tests/test_lock.py.
"""

import fcntl
import os
import socket
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from snug.options import SnugError, in_one_line


@contextmanager
def locked(folder):
    """Hold the lock of a folder, which is made if it is missing.

    Raises SnugError if another process has the lock, or if the folder cannot be written to.
    """
    problem = f"out_dir={folder} cannot be written to"
    with in_one_line(problem):
        place = Path(folder).resolve()
        place.mkdir(parents=True, exist_ok=True)
        # Without a buffer: on a full disk writing it would fail once more when the file is closed.
        file = open(place.with_name(f".{place.name}.lock"), "ab+", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise SnugError(
                f"{folder} is in use by {file.read().decode()}; choose another out_dir"
            ) from None
        except OSError as error:
            problem = f"{file.name} cannot be locked ({error.strerror}); start no second run here"
            print(f"warning: {problem}", file=sys.stderr)
        with in_one_line(problem):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def move_aside(folder):
    """Rename the folder, with the earlier run in it, and make a new one of its name -> the earlier run's folder.

    The new name is the first of <name>.1, <name>.2, ... that is free. Raises SnugError.
    """
    names = (folder.with_name(f"{folder.name}.{n}") for n in count(1))
    with in_one_line(f"the earlier run in {folder} cannot be moved aside; choose another out_dir"):
        moved = folder.rename(next(path for path in names if not path.exists()))
        folder.mkdir()
    return moved
