"""Where grpo.py, data/ and the other files of the clone are, and how they are imported from a user's own repository.

A script of the clone imports `data` and `model`, since Python looks in the script's folder first. In a user's own
repository these names may be the user's. There the same files are modules below this one: snug.home.data,
snug.home.model. What they import by the short names, they get from here; what the user's modules import, they get as
ever. A wheel carries the files in snug/clone/.

    snug grpo CONFIG --name=value       # python grpo.py CONFIG --name=value
    from snug import train              # grpo.train, in a script or a notebook

Tests: tests/test_package.py.
"""

import builtins
import sys
from importlib import import_module
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
HOME = HERE / "clone" if (HERE / "clone").exists() else HERE.parent
SCRIPTS = {
    "grpo": "grpo.py",
    "sft": "train_sft.py",
    "sample": "sample.py",
    "evaluate": "evaluate.py",
    "report": "report.py",
    "fork": "runs/fork.py",
    "export": "runs/export.py",
}
OURS = {path.stem for path in HOME.glob("*.py")} | {path.parent.name for path in HOME.glob("*/*.py")}
OURS -= {"snug"}
__path__ = [str(HOME)]  # what makes this module a package


def import_ours(name, globals=None, locals=None, fromlist=(), level=0):
    """`import` and `from ... import` in the files of the clone. The arguments are those of builtins.__import__."""
    top = name.partition(".")[0]
    if top not in OURS:
        return builtins.__import__(name, globals, locals, fromlist, level)
    module = builtins.__import__(f"{__name__}.{name}", globals, locals, fromlist)
    return module if fromlist else sys.modules[f"{__name__}.{top}"]


# Python takes __import__ from the builtins of the module that imports.
BUILTINS = vars(builtins) | {"__import__": import_ours}


class Loader(SourceFileLoader):
    def exec_module(self, module):
        module.__builtins__ = BUILTINS
        super().exec_module(module)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name.startswith(f"{__name__}.") else None
        if spec and spec.origin:
            spec.loader = Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)


def begun_in_the_clone() -> bool:
    """Are the files imported by their short names here? Every script of the clone imports runs first."""
    return "runs.ctrl_c" in sys.modules


def ours(module: str):
    """The module of the clone that has this short name."""
    return import_module(module if begun_in_the_clone() else f"{__name__}.{module}")


def command(name: str) -> str:
    """What a user types for a script: "snug report", or in the clone "python report.py"."""
    if not begun_in_the_clone():
        return f"snug {name}"
    script = SCRIPTS[name]
    return f"python -m runs.{name}" if "/" in script else f"python {script}"


def begun_as() -> str:
    """What this command's own usage line begins with."""
    names = {str(HOME / script): name for name, script in SCRIPTS.items()}
    name = None if begun_in_the_clone() else names.get(sys.argv[0])
    return f"snug {name}" if name else f"python {sys.argv[0]}"


def main():
    name = "".join(sys.argv[1:2])
    if name not in SCRIPTS:
        print(
            f"usage: snug {{{','.join(SCRIPTS)}}} ...; "
            "snug grpo grpo_small is a first run, snug grpo --help lists options"
        )
        sys.exit(0 if name in ("--help", "-h") else 2)
    script = HOME / SCRIPTS[name]
    sys.argv[:2] = [str(script)]
    # Without __file__: a process that multiprocessing spawns would run the script by this name, and not find our files.
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__builtins__ = BUILTINS
    exec(compile(script.read_bytes(), script, "exec"), vars(module))
