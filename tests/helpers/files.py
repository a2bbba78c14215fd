"""The project's files."""

import shutil
import subprocess

from helpers import HOME


def our_files(home=HOME, *endings):
    """The project's files with these endings, by default Python's. git knows them, so that a user's own files beside
    them do not count."""
    wanted, known = [f"*.{ending}" for ending in endings or ["py"]], ""
    if shutil.which("git"):
        known = subprocess.run(["git", "ls-files", *wanted], cwd=home, capture_output=True, text=True).stdout
    files = [home / name for name in known.splitlines()]
    files = files or [path for pattern in wanted for path in home.rglob(pattern)]  # a copy without git
    return [path for path in files if path.exists() and not path.relative_to(home).parts[0].startswith(".")]


def source_files(home=HOME):
    """-> {dotted name: path} of every module outside tests, bench, docs and config."""
    files = our_files(home)
    rooms = {home} | {path.parent for path in files if path.name == "__init__.py"} - {home / "tests/helpers"}
    return {dotted(path, home): path for path in files if path.parent in rooms}


def dotted(path, home=HOME):
    parts = list(path.relative_to(home).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
