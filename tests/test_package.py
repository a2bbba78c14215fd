"""The package snug in another project, as a wheel brings it; and files of a user that have names of ours."""

import re
import shutil
import subprocess
import sys

import pytest

from helpers import HOME

ROOMS = ["snug", "config", "data", "examples", "runs", "training"]

# A foreign model and its data, around the example of docs/parts.md.
PROJECT = """
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(500, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 500, bias=False)

    def forward(self, tokens):
        return self.rnn(self.embedding(tokens))[0].flatten(0, 1)

torch.manual_seed(0)
device, model = "cpu", Recurrent()
tokens, advantages, targets = torch.randint(500, (4, 16)), torch.rand(64), torch.randint(500, (64,))
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
for step in range(10):
    exec(EXAMPLE)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[9] < losses[0] - 0.01, losses
import snug.kernels.gated, snug.decoding.decode_batch, snug.lora, snug.pretrained.tensors, snug.sandbox, snug.tokenizer
print(snug.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what `pip install .` installs."""
    source, folder = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    for place in ROOMS:
        shutil.copytree(HOME / place, source / place, ignore=shutil.ignore_patterns("__pycache__"))
    for place in [*HOME.glob("*.py"), HOME / "pyproject.toml"]:
        shutil.copy(place, source)
    pip = [sys.executable, "-m", "pip", "-q"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", source, source], check=True)
    (wheel,) = source.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", folder, wheel], check=True)
    return folder


def files(folder):
    paths = (path for path in folder.rglob("*.*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)) for path in paths}


def test_a_wheel_holds_the_files_of_the_clone(installed):
    assert {path.name for path in installed.iterdir()} == {"snug", "bin", "snug-0.1.0.dist-info"}
    ours = files(HOME / "snug") | {f"clone/{path.name}" for path in HOME.glob("*.py")}
    for room in ROOMS[1:]:
        ours |= {f"clone/{room}/{name}" for name in files(HOME / room) if not re.match("gsm8k/|math/|.*ipynb$", name)}
    assert files(installed / "snug") == ours


# Names of ours in a user's folder: his scripts and his reward functions see his.
MINE = {
    "data.py": "LONGEST = 3\n",
    "model.py": "raise RuntimeError('the wrong model')\n",
    "settings.py": "raise RuntimeError('the wrong settings')\n",
    "my_tasks.py": """
from dataclasses import dataclass
import data
from snug import Task
from snug.options import option

@dataclass
class MirrorOptions:
    letters: int = option(data.LONGEST, "letters of a word", minimum=1)

class Mirror(Task):
    options, columns = MirrorOptions, ("word",)
    def propose(self, rng):
        word = "".join(rng.choices("abc", k=self.settings.letters))
        return {"prompt": f"{word}=", "word": word}
    def is_right(self, completion, word):
        return completion == word[::-1]
    def longest_bytes(self):
        return self.settings.letters + 1, self.settings.letters

def distinct(completions, **columns):
    import data
    return [len(set(completion)) / data.LONGEST for completion in completions]

def spawned(completions, **columns):
    from multiprocessing import get_context
    with get_context("spawn").Pool(1) as pool:
        return pool.map(float, map(len, completions))
""",
    "loss/mine.py": "def zero(completions, **columns):\n    return [0.0] * len(completions)\n",
    "examples/mine.py": "def one(completions, **columns):\n    return [1.0] * len(completions)\n",
    "script.py": """
import sys
import data
from my_tasks import Mirror, distinct
from snug import train
run = train(task=Mirror, letters=2, reward_funcs=distinct, out_dir="out/script", init_from="out/mine", max_iters=1, SMALL)
assert run.settings.task == "my_tasks:Mirror" and len(run.log) == 1 and data.LONGEST == 3
assert "data" in sys.modules and "grpo" not in sys.modules and "snug.home.grpo" in sys.modules
""",
}
SMALL = dict(n_layer=1, n_head=1, n_embd=8, batch_size=2, group_size=2, max_new_tokens=4, eval_prompts=2)
SMALL |= dict(beta=0.0, device="cpu")
OPTIONS = [f"--{name}={value}" for name, value in SMALL.items()]
GRPO = ["-m", "snug", "grpo"]
FUNCTIONS = "my_tasks:distinct,my_tasks:spawned,loss.mine:zero,examples.mine:one"
LINES = {
    "grpo": [*GRPO, "--task=my_tasks:Mirror", f"--reward_funcs={FUNCTIONS}", "--max_iters=1", "--out_dir=out/mine", *OPTIONS],
    "train": ["script.py"],
    "resume": [*GRPO, "--resume=out/mine", "--max_iters=2"],
    "shipped": [*GRPO, "grpo_lookup", "--tools=", "--init_from=", "--max_iters=1", "--reward_funcs=my_tasks:distinct", *OPTIONS],
    "evaluate": ["-m", "snug", "evaluate", "out/mine", "--num_prompts=2"],
    "export": ["-m", "snug", "export", "out/mine", "--to=export"],
    "fork": ["-m", "snug", "fork", "out/mine", "--at=1", "--seeds=1", "--max_iters=2"],
    "report": ["-m", "snug", "report", "out/mine"],
}  # fmt: skip


@pytest.mark.both
def test_commands_and_train_in_a_users_repository(installed, tmp_path, request):
    """Each command of the wheel, where files of the user have names of ours."""
    small = ", ".join(f"{key}={value!r}" for key, value in SMALL.items())
    for name, text in MINE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace("SMALL", small))
    environment = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "PATH": ""}
    for name in LINES if request.config.getoption("long") else ("grpo", "train"):
        command = [sys.executable, *LINES[name]]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, f"{name}: {ran.stdout}{ran.stderr}"
        if name in ("grpo", "resume"):
            assert ran.stdout.endswith("GRPO is done; next: snug report out/mine\n")
    wrong = subprocess.run([sys.executable, "-m", "snug", "nope"], env=environment, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout[:22]) == (2, "usage: snug {grpo,sft,")


def test_a_foreign_model_learns_with_the_parts_of_snug(installed, tmp_path):
    """The example of docs/parts.md."""
    text = (HOME / "docs/parts.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    script = tmp_path / "mine.py"
    script.write_text(f"EXAMPLE = {example!r}\n{PROJECT}")
    environment = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *peaks, place = ran.stdout.split()
    assert place == str(installed / "snug/__init__.py") and len(peaks) == 10


def test_an_example_can_be_copied():
    """What it imports is snug's, or lies beside it; `data` may be the user's there."""
    for path in (HOME / "examples").glob("*.py"):
        assert not re.search(r"^from (data|runs|settings)\b", path.read_text(), re.MULTILINE), path
