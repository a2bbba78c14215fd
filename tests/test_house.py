"""The map of the house: every import goes down, none goes in a circle, and each room keeps to its size.

The table of CONTRIBUTING.md has the rooms, the lowest first. An import inside a function counts as any other.
"""

import ast
import re
import shutil
import subprocess
import tokenize
import tomllib
from tokenize import COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL, STRING

from packaging.requirements import Requirement

import mutants
from helpers import HOME
from helpers.files import our_files, source_files

ROWS = re.findall(r"^\| `([\w/]+?)(?:/|\.py)` \|", (HOME / "CONTRIBUTING.md").read_text(), re.MULTILINE)
TEXTS = [HOME / "README.md", *HOME.glob("docs/*.md")]
FLOORS = [row.replace("/", ".") for row in ROWS]
FSTRING_START, FSTRING_END = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
NO_CODE = {NEWLINE, INDENT, DEDENT, ENCODING, ENDMARKER}
FILE_LINES = {"settings.py": 650}  # all others 450
FACES = {"snug", "snug.__main__"}
STUDENT = "data/addition.py model.py sample.py batch.py loss.py grpo.py train_sft.py".split()


def test_files_of_a_user_do_not_count(tmp_path):
    for name in ("a.py", "room/__init__.py", "room/b.py", "config/c.py", ".venv/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert set(source_files(tmp_path)) == {"a", "room", "room.b"}
    if shutil.which("git"):
        for words in (["init", "-q"], ["add", "a.py", "room/__init__.py", "config"]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
        assert set(source_files(tmp_path)) == {"a", "room"}
        assert {path.name for path in our_files(tmp_path)} == {"a.py", "__init__.py", "c.py"}


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


def floor_of(module):
    """-> how high a module is on the map: 0 is the lowest. Raises ValueError if it is in no row."""
    parts = module.split(".")
    row = ".".join(parts[:2]) if parts[0] == "snug" else parts[0]
    return FLOORS.index(row)


def test_every_module_is_on_the_map():
    floors = {floor_of(name) for name in source_files() if name not in FACES}
    assert floors == set(range(len(FLOORS)))


def test_imports_go_down():
    modules, upward = source_files(), []
    for name, path in ((name, modules[name]) for name in {*modules} - FACES):
        higher = [other for other in imports_of(name, path, modules) if floor_of(other) > floor_of(name)]
        upward += [f"{name} -> {other}" for other in higher]
    assert not upward, ", ".join(sorted(upward))


def test_what_the_algorithm_stands_on_imports_nothing_of_the_rest():
    modules = source_files()
    for name in modules:
        if name.partition(".")[0] == "snug":
            others = imports_of(name, modules[name], modules)
            assert all(other.startswith("snug.") for other in others), f"{name} imports {others}"


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


def test_no_test_file_imports_another():
    tests = {path.stem: path for path in (HOME / "tests").rglob("*.py")}
    files = {name: path for name, path in tests.items() if name.startswith("test_") or name == "conftest"}
    found = {name: imports_of(name, path, files) for name, path in tests.items()}
    assert not any(found.values()), {name: others for name, others in found.items() if others}


def tokens(paths):
    """-> (tokens of code in these files, lines of code, characters of the tokens, with those in strings): without
    comments, docstrings, newlines and indents."""
    count, code_lines, characters = 0, 0, 0
    for path in paths:
        with path.open("rb") as file:
            stream = [token for token in tokenize.tokenize(file.readline) if token.type not in (COMMENT, NL)]
        f_strings = 0  # from Python 3.12 on an f-string is several tokens; before it is one, and here too
        for before, token, after in zip(stream, stream[1:], stream[2:], strict=False):
            f_strings -= token.type == FSTRING_END
            docstring = token.type == STRING and before.type in NO_CODE and after.type in NO_CODE
            if token.type not in NO_CODE and not docstring:
                count += not f_strings and token.type != FSTRING_END
                characters += len(token.string)
                code_lines += token.start[0] != before.end[0] or before.type in NO_CODE
                code_lines += token.end[0] - token.start[0]
            f_strings += token.type == FSTRING_START
    return count, code_lines, characters


def lines_of(path):
    return len(path.read_text().splitlines())


def test_the_house_keeps_to_its_size():
    everything = [*source_files().values(), *(path for path in our_files() if path.parent == HOME / "config")]
    count, code_lines, characters = tokens(everything)
    pages = [path for path in our_files(HOME, "toml", "js", "css", "html") if path.name != "ruff.toml"]
    beside = sum(len(path.read_text()) for path in pages)
    tests = sum(map(lines_of, (HOME / "tests").rglob("*.py")))
    limits = {  # what, how much, at most
        ("tokens", count, 103_200),
        ("tokens a line", count / code_lines, 9.4),
        ("characters", characters, 372_100),
        ("characters, with TOML and the page", characters + beside, 421_000),
        ("tokens of bench/", tokens((HOME / "bench").glob("*.py"))[0], 18_900),
        ("lines of tests/", tests, 20_680),
        ("files at the top", len([path for path in our_files() if path.parent == HOME]), 9),
        ("lines of README", lines_of(HOME / "README.md"), 200),
        ("words of README and docs/", sum(len(path.read_text().split()) for path in TEXTS), 27_000),
        ("lines of the algorithm in an evening", sum(map(lines_of, (HOME / name for name in STUDENT))), 1500),
        *((f"lines of {path.name}", lines_of(path), FILE_LINES.get(path.name, 450)) for path in everything),
    }
    passed = [f"{what}: {now:,.7g}, at most {most:,}" for what, now, most in sorted(limits) if now > most]
    assert not passed, "; ".join(passed)
    folders = {path.relative_to(HOME).parts[0] for path in our_files() if path.parent != HOME}
    assert folders == set("bench config data examples runs snug tests training".split())  # docs/ has no module
    numbered = [(path, *line) for path in everything for line in enumerate(path.read_text().splitlines(), start=1)]
    wide = [f"{path.name}:{number}" for path, number, line in numbered if len(line) > 120]
    assert not wide, ", ".join(wide)


def anchors_of(text):
    """-> the names that GitHub gives a text's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def dead_links(file):
    """-> the relative links of a Markdown file that lead nowhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        place, _, anchor = link.partition("#")
        target = file.parent / place if place else file
        if not link.startswith(("http:", "https:")) and (
            not target.exists() or anchor and anchor not in anchors_of(target.read_text())
        ):
            yield f"{file.name}: {link}"


def test_every_link_of_the_texts_leads_somewhere(tmp_path):
    texts = [*HOME.glob("*.md"), *HOME.glob("docs/*.md")]
    dead = [link for file in texts for link in dead_links(file)]
    assert len(texts) > 8 and not dead, ", ".join(dead)
    text = "# A `b`, [c](a.md)!\n```\n# d\n```\n" + " ".join(f"[x]({to})" for to in ("#a-b-c", "#d", "b", "a.md#a-b-c"))
    (tmp_path / "a.md").write_text(text)
    assert [*dead_links(tmp_path / "a.md")] == ["a.md: #d", "a.md: b"]


def test_functions_fit_the_screen():
    for path in source_files().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"


def test_the_pins_are_within_the_ranges():
    """requirements.txt pins each dependency of pyproject.toml, and Triton, which comes with torch's CUDA build."""
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    ranges = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    pins = [line.partition(";")[0].strip().split("==") for line in (HOME / "requirements.txt").read_text().splitlines()]
    assert {name for name, _ in pins} == ranges.keys() | {"triton"}
    assert all(version in ranges[name] for name, version in pins if name in ranges)


def test_each_planted_bug_has_its_place():
    """mutants.py plants a bug where a file has a text once, and runs test files. Nothing is planted here."""
    sources = {file: (HOME / file).read_text() for _, file, *_ in mutants.MUTANTS}
    astray = [name for name, file, text, *_ in mutants.MUTANTS if sources[file].count(text) != 1]
    astray += [name for name, _, text, becomes, _ in mutants.MUTANTS if text == becomes]
    killers = {name: tests.split() for name, *_, tests in mutants.MUTANTS}
    astray += [name for name, tests in killers.items() if not all((HOME / "tests" / t).exists() for t in tests)]
    assert not astray
