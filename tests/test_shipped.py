"""What is shipped runs: every config, and every command line of the texts, with tiny models and without a network.

The folder `work` is a user's: commands look there for configs first, and find copies of ours whose last lines shrink the
run. It has a model, a hub's cache, and the files that the texts name. A run's folder in out/ that a command reads is
made by the command that makes it in the texts.
"""

import glob
import gzip
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from huggingface_hub import constants
from torch.distributed.run import get_args_parser

from helpers import HOME
from helpers.commands import CONFIGS, block_with, command_of, commands_in, docstring_of, shrunk, tidy, values_of
from helpers.files import source_files
from helpers.hub import put
from helpers.models import make_chat_model
from helpers.tasks import HUMAN_EVAL, MBPP, is_installed
from helpers.tokenizers import HERMES
from runs.log import read_lines, read_log
from runs.prepare import Prepared

TEXTS = [HOME / "README.md", HOME / "CONTRIBUTING.md", *sorted(HOME.glob("docs/*.md"))]
SOURCES = [*CONFIGS, *source_files().values(), *sorted(HOME.glob("bench/*.py"))]
pytestmark = pytest.mark.usefixtures("one_thread")

# Runs that the texts name without the command that makes them.
MAKERS = {
    "out/sft_two_digits": "python train_sft.py config/sft_small.py --digits=2",
    "out/short_answers": "python grpo.py config/grpo_chat.py --data_file=prompts.jsonl --reward_funcs=my_rewards:short",
    "out/my-sft-lora": "python train_sft.py --task=gsm8k --chat --data_file=data/gsm8k/train.jsonl --lora_rank=2 "
    "--test_file=data/gsm8k/test.jsonl --init_from=models/smollm2-135m-instruct",
    "out/tiny": "python grpo.py config/grpo_small.py --digits=2",
    "out/tiny-at4": "python -m runs.fork out/tiny --learning_rate=6e-4",
    "out/X": "python train_sft.py config/sft_small.py",
}
NOT_RUN = {  # what a command begins with: why it does not run here. Its file and its options must exist.
    "python -m pytest": "the tests themselves", "python tests/": "long forms of the tests",
    "python bench/": "test_bench.py runs them", "python -m snug grpo": "test_package.py runs it",
    "python -m snug.sandbox.child": "Sandbox starts it, with a socket",
    "python -m runs.export": "a name within a sentence; others have arguments",
    "make ": "installs packages; what it runs afterwards is here",
}  # fmt: skip
GONE = {"python tests/kill.py --kills=200 --seed=12": "of an old commit, and the text says so"}


def found_commands():
    """-> {command line: the text that has it}"""
    texts = {path: path.read_text() for path in TEXTS}
    texts |= {path: docstring_of(path) for path in SOURCES}
    if shutil.which("make"):
        recipes = ["make", "-n", "run", "real", "tools", "code", "distill", "math"]
        texts[HOME / "Makefile"] = subprocess.run(recipes, cwd=HOME, capture_output=True, text=True).stdout
    found = {}
    for path, text in texts.items():
        for line in commands_in(text):
            found.setdefault(line, str(path.relative_to(HOME)))
    return found


def is_only_named(line):
    first = next((first for first in NOT_RUN if line.startswith(first)), None)
    return first and (first != "python -m runs.export" or line == first) and line not in GONE


FOUND = found_commands()
WORDS = {word.partition("=")[2] or word for line in FOUND for word in shlex.split(line)}
NAMED = [line for line in FOUND if is_only_named(line)]
SEVERAL = [line for line in FOUND if line.startswith("torchrun")]
RUN = [line for line in FOUND if line not in [*NAMED, *SEVERAL, *GONE]]
FORKS = [
    line for line in RUN if line.startswith("python -m runs.fork ") or "report.py out/tiny-at4" in line
]  # each starts two runs, or needs one of these; test_fork.py has short ones
ON_HUB = sorted(word for word in WORDS if re.fullmatch(r"[A-Z]\w+/[\w.-]+", word))


def test_the_texts_have_commands_of_every_kind():
    for script in ("grpo.py", "train_sft.py", "evaluate.py", "sample.py", "report.py", "-m runs.export"):
        assert any(line.startswith(f"python {script} ") for line in FOUND), script
    assert len(RUN) > 50 and len(SEVERAL) > 3 and GONE.keys() <= FOUND.keys()
    assert all(any(line.startswith(first) for line in NAMED) for first in NOT_RUN)
    assert "Qwen/Qwen2.5-0.5B-Instruct" in ON_HUB
    assert tidy('python a.py --x=1 [--y=2] [--z=a|b] "c  d"     [a remark] # why') == "python a.py --x=1 --y=2 'c  d'"


# A user's folder


MODULES = {  # the user's: where the texts have them
    "my_rewards": ("README.md", "def short("), "my_tools": ("docs/tools.md", "def search("),
    "my_game": ("docs/tools.md", "class Game"), "my_tasks": ("CONTRIBUTING.md", "class Letters("),
    "my_losses": ("docs/algorithm.md", "def tight("),
}  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    for name in ("config", "models", "data/gsm8k", "data/math", "hub"):
        (folder / name).mkdir(parents=True)
    for config in CONFIGS:
        (folder / "config" / config.name).write_text(shrunk(config))
    model = make_chat_model(folder / "models/smollm2-135m-instruct", HERMES, brief=True)
    teacher = make_chat_model(folder / "models/teacher", HERMES)  # other weights: there is something to learn
    for name in ON_HUB:
        put(folder / "hub", teacher if "1.5B" in name else model, "a" * 40, name)
    lines = (HOME / "tests/gsm8k_sample.jsonl").read_text().splitlines(keepends=True)
    (folder / "data/gsm8k/train.jsonl").write_text("".join(lines[:10]))
    (folder / "data/gsm8k/test.jsonl").write_text("".join(lines[10:]))
    (folder / "data/HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMAN_EVAL).encode()))
    (folder / "mbpp.jsonl").write_text(json.dumps(MBPP))
    for name, offset in {"train": 0, "test": 9}.items():
        rows = [dict(problem=f"{n + offset}?", answer="1", solution="\\boxed{1}") for n in range(9)]
        (folder / f"data/math/{name}.json").write_text(json.dumps(rows))
    rows = [f'{{"prompt": "What is {a} + 3?", "answer": {a + 3}}}\n' for a in range(60)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    for name, place in MODULES.items():
        (folder / f"{name}.py").write_text(block_with(*place))
    return folder


@pytest.fixture
def there(work, monkeypatch):
    """The user is in the folder. There is no network."""
    monkeypatch.chdir(work)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(work / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield work
    for name in MODULES:
        sys.modules.pop(name, None)
    shutil.rmtree(work / "out", ignore_errors=True)  # so that the order of the tests does not matter


def last_words(script, words):
    """Options that shrink a command: of two that are equal the last one counts."""
    if script == "evaluate.py":
        return ["--num_prompts=2", "--num_samples=2", "--max_new_tokens=8", "--device=cpu"]
    if script == "sample.py":
        return ["--num_samples=2", "--max_new_tokens=8", "--device=cpu"]
    if script == "runs.fork":
        return ["--at=0", "--max_iters=2", "--seeds=1"]
    if script not in ("grpo.py", "train_sft.py") or "--help" in words:
        return []
    small, start = ["--max_iters=1"], words[0]
    if start.startswith("--") and not start.startswith("--resume="):
        small += ["--batch_size=2", "--eval_prompts=2", "--device=cpu"]
        small += ["--group_size=2", "--max_new_tokens=8"] if script == "grpo.py" else []
        if "--init_from" not in " ".join(words):
            small += ["--n_layer=1", "--n_embd=16"]
    if "--train_batch_size" in " ".join(words):
        small += ["--train_batch_size=2"]
    return small


def run(line, monkeypatch):
    """Run `python script words` in this process -> its exit code. The runs that it reads are made first."""
    module, script, words = re.fullmatch(r"python (-m )?(\S+) ?(.*)", line).groups()
    words = shlex.split(words)
    places = [word.removeprefix(f"--{name}=") for word in words for name in ("init_from", "teacher", "resume")]
    if words and words[0].endswith(".py"):
        places += [values_of(HOME / words[0]).get(name, "") for name in ("init_from", "teacher")]
    if "--adapters" in words:  # whichever command made the run last
        shutil.rmtree(words[0], ignore_errors=True)
        maker = f"python grpo.py config/grpo_gsm8k.py --init_from={ON_HUB[0]} --lora_rank=2 --out_dir={words[0]}"
        assert run(maker, monkeypatch) == 0, maker
    for place in places:
        need(place, monkeypatch)
    words = [each for word in words for each in sorted(glob.glob(word)) or [word]]
    for word in words:
        if word.endswith(".gguf") and not os.path.exists(word):
            importlib.import_module("helpers.gguf_files").write(word)
        elif word.startswith("--to="):
            shutil.rmtree(word.removeprefix("--to="), ignore_errors=True)
    monkeypatch.setattr(sys, "argv", [script, *words, *last_words(script, words)])
    path = f"{script.replace('.', '/')}.py" if module else script
    try:
        runpy.run_path(str(HOME / path), run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


def need(place, monkeypatch):
    """If it is in a run's folder that is missing, make the run."""
    folder = re.match(r"(out/[^/]+)|", place)[1]
    if not folder or os.path.isdir(folder):
        return
    of_texts = {line.partition("--out_dir=")[2]: line for line in reversed(FOUND)}
    of_configs = {values_of(config).get("out_dir"): command_of(config) for config in CONFIGS}
    maker = (of_texts | of_configs | MAKERS)[folder]
    if os.path.isdir(f"made/{folder}"):
        shutil.copytree(f"made/{folder}", "out", dirs_exist_ok=True)
        return
    assert run(f"{maker} --out_dir={folder}", monkeypatch) == 0, maker
    shutil.copytree("out", f"made/{folder}")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_config_trains_and_evaluates(config, there, monkeypatch, capsys):
    """With rewards of 0 and 1 in every group, so that a step is taken."""
    score = Prepared.score
    rewarded = lambda *of: score(*of)._replace(totals=[i % 2 * 1.0 for i in range(len(of[1]))])  # noqa: E731
    monkeypatch.setattr(Prepared, "score", rewarded)
    code = run(f"{command_of(config)} --out_dir=out/of_config", monkeypatch)
    assert code == 0, capsys.readouterr().err
    [record] = [record for record in read_log("out/of_config") if record["iter"] == 0]
    assert record["pass_at_1"] >= 0 and record["grad_norm"] > 0
    if "chat" in values_of(config):
        samples = list(read_lines(there / "out/of_config/samples.jsonl"))
        assert any(sample["stopped"] for sample in samples)  # tasks look at these alone


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=pytest.mark.long) if line in FORKS else line for line in RUN], ids=str
)
def test_every_command_of_the_texts_runs(line, there, monkeypatch, capsys):
    if "gym" in line and not is_installed:
        pytest.skip("reasoning_gym is not installed")
    code = run(line, monkeypatch)
    no_go = "--probe" in line and code == 3  # for a model that hardly trained
    assert code == 0 or no_go, f"{FOUND[line]}: {capsys.readouterr().err}"


@pytest.mark.parametrize("line", SEVERAL, ids=str)
def test_every_command_with_several_processes_wants_them(line, there, monkeypatch, capsys):
    """torchrun's options are read by its own parser; all of the run's options are good, and only processes are missing."""
    options = get_args_parser().parse_args(shlex.split(line)[1:])
    code = run(f"python {options.training_script} {shlex.join(options.training_script_args)}", monkeypatch)
    wanted = "and 0 processes of torchrun do not fit; start several with torchrun"
    assert code == 2 and wanted in capsys.readouterr().err, FOUND[line]


@pytest.mark.parametrize("line", NAMED, ids=str)
def test_what_other_commands_name_exists(line):
    """Files, targets, and options, which stand in the file or in what benches share."""
    first, *words = shlex.split(line)
    if first == "make":
        targets = re.findall(r"^([\w/.-]+):", (HOME / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets
        return
    files = [HOME / word for word in words if word.endswith(".py")]
    if words[0] == "-m" and "." in words[1]:
        files = [HOME / f"{words[1].replace('.', '/')}.py"]
    assert all(file.exists() for file in files), files
    options = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    known = "".join(file.read_text() for file in [*files, HOME / "bench/common.py", HOME / "tests/conftest.py"])
    assert all(re.search(rf'"--{option}"|\b{option}=', known) for option in options), options


@pytest.mark.parametrize(
    "config", [path for path in CONFIGS if "--plan" in path.read_text()], ids=lambda path: path.name
)
def test_the_plan_of_a_config_for_a_gpu_is_what_the_texts_say(config, there, monkeypatch, capsys):
    assert run(f"python grpo.py {config} --plan --device=cuda", monkeypatch) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    peak = float(re.match(r"peak_gib=(\S+) host_gib=\S+ phase=train$", line)[1])
    assert f"planned peak {peak:.1f} GiB" in config.read_text()
    for path in TEXTS:
        shown = re.findall(rf"{config.name} --plan --device=cuda.*\n(peak_gib.*)", path.read_text())
        assert all(each == line for each in shown), path


def test_the_readmes_python_trains_samples_and_evaluates(there, monkeypatch, capsys):
    others = ", ".join(f'{{"prompt": "What is {a} + 3?"}}' for a in range(60))
    names = {}
    exec(block_with("README.md", "def short("), names)
    exec(block_with("README.md", "from snug import train").replace("…", others), names)
    assert names["run"].finished and len(names["run"].log) == 1
