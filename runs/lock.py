"""One run at a time in a run's folder: a lock on `out_dir/lock`. The file also names the process that has it.

The lock is flock's, so the system releases it when the process ends, also after kill -9. On a file system without locks
the run goes on with a warning. Commands that only read a run take no lock. Tests: tests/test_lock.py.
"""

import fcntl
import os
import socket
import sys
from itertools import count
from pathlib import Path

from snug.options import SnugError


class FolderLock:
    """Holds the lock of a folder inside `with`. The folder is made if it is missing."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def __enter__(self):
        """Raises SnugError if another process has the lock, or if the folder cannot be written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.place = self.folder.absolute()
            self.descriptor = os.open(self.place, os.O_RDONLY)
            self.file = open(self.folder / "lock", "a+")
            self.lock()
            self.file.truncate(0)
            self.file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self.file.flush()
        except OSError as error:
            raise SnugError(f"out_dir={self.folder} cannot be written to: {error.strerror}") from None

    def __exit__(self, *error):
        os.close(self.descriptor)
        self.file.close()

    def lock(self):
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

    def is_lost(self) -> bool:
        """Was the folder moved or deleted? There may be another of its name."""
        return not (self.place.exists() and os.path.samefile(self.place, self.descriptor))

    def move_aside(self):
        """Rename the folder, with the earlier run in it, and lock a new one of its name -> the earlier run's folder.

        The new name is the first of <name>.1, <name>.2, ... that is free.
        """
        names = (f"{self.folder.name}.{n}" for n in count(1))
        free = next(path for path in map(self.folder.with_name, names) if not path.exists())
        moved = self.folder.rename(free)
        self.__exit__()
        (moved / "lock").unlink()
        self.__enter__()
        return moved
