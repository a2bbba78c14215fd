"""The package snug in another project, as a wheel brings it; and files of a user that have names of ours."""

import re
import shutil
import subprocess
import sys

import pytest

from helpers import HOME

# A foreign model and its data, around the README's example; beside it the same ten steps in plain torch.
PROJECT = """
import copy
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
twin = copy.deepcopy(model)
tokens, advantages = torch.randint(500, (4, 16)), torch.rand(64)
targets = torch.randint(500, (64,))
optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
losses = []
for step in range(10):
    exec(EXAMPLE)
    plain = twin.head(twin(tokens)).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, plain.detach(), atol=1e-4, rtol=1e-4)
    expected = -(advantages * plain).sum() / len(targets)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
from snug.logprobs import head_logprobs
assert losses[9] < losses[0] - 0.01, losses
sizes = []
head_loss(model(tokens), model.head.weight, targets, lambda logprobs, rows: sizes.append(len(logprobs)) or logprobs.sum(), chunk_size=24)
assert max(sizes) <= 24 and sum(sizes) == 64, sizes
import snug.kernels.gated, snug.decoding.decode_batch, snug.lora, snug.pretrained.tensors, snug.sandbox, snug.tokenizer
print(snug.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what `pip install .` installs."""
    source, folder = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    shutil.copytree(HOME / "snug", source / "snug", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "model.py", "settings.py"):
        shutil.copy(HOME / name, source)
    (source / "data").mkdir()
    shutil.copy(HOME / "data/__init__.py", source / "data")
    pip = [sys.executable, "-m", "pip", "-q"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", source, source], check=True)
    (wheel,) = source.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", folder, wheel], check=True)
    return folder


def test_a_wheel_holds_the_package_snug_and_nothing_else(installed):
    names = {path.name for path in installed.iterdir()}
    assert names == {"snug", "snug-0.1.0.dist-info"}
    ours = {path.relative_to(HOME / "snug") for path in (HOME / "snug").rglob("*.*")}
    there = {path.relative_to(installed / "snug") for path in (installed / "snug").rglob("*.*")}
    assert {path for path in ours if path.suffix != ".pyc"} == {path for path in there if path.suffix != ".pyc"}


def test_a_foreign_model_learns_with_the_parts_of_snug(installed, tmp_path):
    """The README's example."""
    readme = (HOME / "README.md").read_text()
    example = re.search(r"## Use its parts\n.*?```python\n(.*?)```", readme, re.DOTALL)[1]
    script = tmp_path / "mine.py"
    script.write_text(f"EXAMPLE = {example!r}\n{PROJECT}")
    environment = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *peaks, place = ran.stdout.split()
    assert place == str(installed / "snug/__init__.py") and len(peaks) == 10
