"""One run at a time in a run's folder: a lock on `out_dir/lock`, which also names the process that holds it.

The lock is flock's, so the system releases it when the process ends, also after kill -9. On a file system without locks
the run goes on with a warning. Commands that only read a run take no lock. Tests: tests/test_lock.py.
"""

import fcntl
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from options import SnugError
from runs import free_name


class FolderLock:
    """Holds the lock of a folder inside `with`. The folder is made if it is missing."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def __enter__(self) -> "FolderLock":
        """Raises SnugError if another process has the lock, or if the folder cannot be written to."""
        try:
            self.file = self.take()
        except OSError as error:
            raise SnugError(f"out_dir={self.folder} cannot be written to: {error.strerror}") from None
        return self

    def __exit__(self, *error) -> None:
        with suppress(OSError, ValueError):  # the folder, or the lock in move_aside, is gone
            self.file.truncate(0)  # its holder's name
            if os.listdir(self.folder) == ["lock"]:  # the run was refused before it wrote anything
                (self.folder / "lock").unlink()
                self.folder.rmdir()
        self.file.close()

    def move_aside(self) -> Path:
        """Rename the folder, with the earlier run in it, and lock a new one of its name -> the earlier run's folder."""
        moved = self.folder.rename(free_name(self.folder))
        self.file.close()
        (moved / "lock").unlink()
        self.__enter__()
        return moved

    def take(self):
        """-> the open file. Raises OSError, and SnugError if another process has it."""
        path = self.folder / "lock"
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise SnugError(
                    f"{self.folder} is in use by {file.read()}; choose another out_dir"
                ) from None
            except OSError as error:
                print(
                    f"warning: {path} cannot be locked ({error.strerror}); start no second run here",
                    file=sys.stderr,
                )
            if path.exists() and os.path.samestat(
                path.stat(), os.fstat(file.fileno())
            ):  # nobody moved the folder
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                return file
