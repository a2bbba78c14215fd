"""The project's files."""

import shutil
import subprocess

from helpers import HOME


def our_files(home=HOME):
    """Every Python file of the project. git knows them, so that a user's own files beside them do not count."""
    listed = ""
    if shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "*.py"], cwd=home, capture_output=True, text=True).stdout
    files = [home / name for name in listed.splitlines()] or home.rglob("*.py")  # a copy without git
    return [path for path in files if path.exists() and not path.relative_to(home).parts[0].startswith(".")]


def source_files(home=HOME):
    """-> {dotted name: path} of every module outside tests, bench, docs and config."""
    files = our_files(home)
    rooms = {home} | {path.parent for path in files if path.name == "__init__.py"} - {home / "tests/helpers"}
    return {dotted(path, home): path for path in files if path.parent in rooms}


def dotted(path, home=HOME):
    parts = list(path.relative_to(home).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
