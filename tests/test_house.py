"""The map of the house: every import goes down, none goes in a circle, and each part keeps to its size.

The order below is CONTRIBUTING's. An import inside a function counts as any other.
"""

import ast
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

HOME = Path(__file__).parent.parent
FLOORS = """options memory kernels logprobs model batch loss pretrained tokenizer data settings runs decoding sample evaluate training
train_sft grpo page report tools""".split()
STUDENT = "data/addition.py model.py sample.py batch.py loss.py grpo.py train_sft.py".split()


def source_files():
    """-> {dotted name: path} of every module outside tests, bench, docs and config."""
    files = [*HOME.glob("*.py")]
    for face in HOME.glob("*/__init__.py"):
        files += face.parent.rglob("*.py")
    return {dotted(path): path for path in files}


def dotted(path):
    parts = list(path.relative_to(HOME).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name, path, modules):
    """-> the project's modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return {module for module in found if module in modules and module != name}


def test_every_module_is_on_the_map():
    assert {name.partition(".")[0] for name in source_files()} == set(FLOORS)


def test_imports_go_down():
    modules, upward = source_files(), []
    for name, path in modules.items():
        room = name.partition(".")[0]
        for other in imports_of(name, path, modules):
            if FLOORS.index(other.partition(".")[0]) > FLOORS.index(room):
                upward.append(f"{name} -> {other}")
    assert not upward, ", ".join(sorted(upward))


def test_no_module_imports_itself_by_way_of_others():
    modules = source_files()
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}
    done, going = set(), []

    def visit(name):
        assert name not in going, " -> ".join([*going[going.index(name) :], name])
        if name not in done:
            going.append(name)
            for other in sorted(graph[name]):
                visit(other)
            done.add(going.pop())

    for name in sorted(graph):
        visit(name)


def lines(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_house_keeps_to_its_size():
    top, everything = list(HOME.glob("*.py")), [*source_files().values(), *HOME.glob("config/*.py")]
    assert len(top) <= 10 and lines(top) <= 2400
    assert lines(HOME / name for name in STUDENT) <= 1400
    assert lines(everything) <= 13_300
    numbered = [(path, *line) for path in everything for line in enumerate(path.read_text().splitlines(), start=1)]
    wide = [f"{path.name}:{number}" for path, number, line in numbered if len(line) > 120]
    assert not wide, ", ".join(wide)


def test_the_pins_are_within_the_ranges():
    """requirements.txt pins each dependency of pyproject.toml, and Triton, which comes with torch's CUDA build."""
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    ranges = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    pins = [line.partition(";")[0].strip().split("==") for line in (HOME / "requirements.txt").read_text().splitlines()]
    assert {name for name, _ in pins} == ranges.keys() | {"triton"}
    assert all(version in ranges[name] for name, version in pins if name in ranges)
