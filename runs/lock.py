"""One run at a time in a run's folder: a lock on the file .<folder>.lock beside it, which names the process that has it.

The lock is flock's, so the system releases it when the process ends, also after kill -9. It goes with the folder's name,
also if the folder is moved or deleted meanwhile. On a file system without locks the run goes on with a warning. Commands
that only read a run take no lock. Tests: tests/test_lock.py.
"""

import fcntl
import os
import socket
import sys
from itertools import count
from pathlib import Path

from snug.options import SnugError, in_one_line


class FolderLock:
    """Holds the lock of a folder inside `with`. The folder is made if it is missing."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def __enter__(self):
        """Raises SnugError if another process has the lock, or if the folder cannot be written to."""
        with in_one_line(f"out_dir={self.folder} cannot be written to"):
            self.folder.mkdir(parents=True, exist_ok=True)
            place = self.folder.resolve()
            self.file = open(place.with_name(f".{place.name}.lock"), "a+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            raise SnugError(
                f"{self.folder} is in use by {self.file.read()}; choose another out_dir"
            ) from None
        except OSError as error:
            print(
                f"warning: {self.file.name} cannot be locked ({error.strerror}); start no second run here",
                file=sys.stderr,
            )
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.file.flush()

    def __exit__(self, *error):
        self.file.close()

    def move_aside(self):
        """Rename the folder, with the earlier run in it, and make a new one of its name -> the earlier run's folder.

        The new name is the first of <name>.1, <name>.2, ... that is free.
        """
        names = (f"{self.folder.name}.{n}" for n in count(1))
        free = next(path for path in map(self.folder.with_name, names) if not path.exists())
        moved = self.folder.rename(free)
        self.folder.mkdir()
        return moved
