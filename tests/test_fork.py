"""Branches of a tiny run: what they share with it and with each other, what is refused, and that they go on."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import grpo
import train_sft
from helpers.errors import assert_refused, refusal
from helpers.runs import disk, figures, tiny
from runs import export, fork
from runs.log import read_log
from runs.prepare import prepare
from settings import ExportSettings, GRPOSettings
from snug.options import read_settings

pytestmark = pytest.mark.usefixtures("one_thread")
RATES = "same", "learning_rate=0.01"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of four iterations with the checkpoints 2, 3 and 4."""
    folder = tmp_path_factory.mktemp("made")
    changes = dict(save_interval=1, save_total_limit=3, seed=3, reward_funcs=["helpers.tasks:letters"])
    sft, settings = tiny(folder, device="cpu", **changes)
    train_sft.main(prepare(dataclasses.replace(sft, device="cpu", eval_prompts=0)))
    prepared = prepare(dataclasses.replace(settings, eval_interval=4, on_iteration="builtins:bool"))
    prepared.on_iteration = None  # it would end this run, and a branch
    grpo.main(prepared)
    shutil.rmtree(f"{settings.out_dir}/checkpoint-000001", ignore_errors=True)  # the best one is kept
    return folder / "grpo"


@pytest.fixture
def started(monkeypatch):
    """Branches are trained in this process -> the names of those that were started."""
    names, before = [], signal.getsignal(signal.SIGINT)

    def call(words):
        names.append(Path(words[-1].partition("=")[2]).name)
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # the branch saves, and then it ends
        grpo.main(prepare(*read_settings(GRPOSettings, list(map(str, words[2:])))[:2]))
        return 0

    monkeypatch.setattr(fork.subprocess, "call", call)
    yield names
    signal.signal(signal.SIGINT, before)


def branches(run, *words):
    fork.main(*read_settings(fork.ForkSettings, [str(run), *words], positional="run"))


def test_pairs_share_their_luck_and_the_first_has_the_runs(made, started, capsys):
    branches(made, "--at=2", "--learning_rate=0.01", "--seeds=2")
    assert started == [f"{arm}-seed{seed}" for seed in (3, 4) for arm in RATES]
    place, run = made.with_name("grpo-at2"), figures(made)
    same, changed, again, changed_again = (figures(place / name) for name in started)
    assert same == run and len(run) == 4
    names, folders = ("model.safetensors", "optimizer.safetensors"), (made, place / started[0], place / started[1])
    weights = [folder / "checkpoint-000004" / name for folder in folders for name in names]
    assert weights[0].read_bytes() == weights[2].read_bytes() != weights[4].read_bytes()
    assert weights[1].read_bytes() == weights[3].read_bytes()
    # Before its first step a branch has the same weights as its pair, so the same luck is the same reward.
    rewards = [[record["reward_mean"] for record in log] for log in (same, changed, again, changed_again)]
    assert rewards[0][:3] == rewards[1][:3] and rewards[2][:3] == rewards[3][:3] and rewards[0][3] != rewards[1][3]
    assert rewards[0][:2] == rewards[2][:2] and rewards[0][2] != rewards[2][2]
    for name, seed, rate in zip(started, (3, 3, 4, 4), (0.001, 0.01) * 2, strict=True):
        settings = json.loads((place / name / "settings.json").read_text())
        assert (settings["seed"], settings["learning_rate"]) == (seed, rate)
    assert f"report.py {place}/same-* {place}/learning_rate=0.01-*\n" in capsys.readouterr().out


def test_a_fork_goes_on_where_it_stopped(made, started, tmp_path, monkeypatch, capsys):
    run, call = tmp_path / "run", fork.subprocess.call
    shutil.copytree(made, run)
    words = ["--learning_rate=0.01", "--seeds=1", "--max_iters=6", "--eval_interval=1", f"--out_dir={tmp_path}/x"]
    # An error, and a branch that a signal stopped
    for name, code in zip(RATES, (2, 0), strict=True):
        monkeypatch.setattr(fork.subprocess, "call", lambda words, code=code: started.append(code) or code)
        with pytest.raises(SystemExit) as ended:
            branches(run, *words)
        assert ended.value.code == code and not (tmp_path / "x" / f"{name}-seed3/checkpoint-000006").exists()
        monkeypatch.setattr(fork.subprocess, "call", call)
        (tmp_path / "x" / f"{name}-seed3/log.jsonl").unlink()  # copying was stopped, too
        if name == "same":
            branches(run, *words[1:])
    branches(run, *words)
    branches(run, *words)
    assert started == [2, "same-seed3", 0, "learning_rate=0.01-seed3"]
    for name in RATES:  # of both
        log = read_log(tmp_path / "x" / f"{name}-seed3")
        assert [record["iter"] for record in log if "pass_at_1" in record] == [3, 4, 5]


@pytest.mark.parametrize(
    "words, said",
    {
        "--digits=3": "cannot go on with other options: digits was 2, is 3; restore them",
        "--at=2 --plan": "a branch trains; leave out plan$",
        "--at=1": "grpo has no checkpoint after 1 iterations, but after 2, 3, 4$",
        "--learning_rate=0.01": "grpo ends after 4 iterations; go on: --max_iters=24$",
        "--at=2 --epsilon_hihg=1": "unknown option --epsilon_hihg; did you mean epsilon_high?",
        "--at=2 --group_size=1": "group_size=1 does not support reward_coef=1.0",
    }.items(),
)
def test_what_cannot_be_is_refused_before_anything_is_written(made, words, said, tmp_path):
    assert_refused(said.replace("?", r"\?"), branches, made, *words.split(), f"--out_dir={tmp_path}/x")
    assert not (tmp_path / "x").exists()


def test_branches_and_exports_on_a_full_disk_are_one_line(tmp_path, capsys, made):
    words = "--at=2", "--seeds=1", f"--out_dir={tmp_path}/x"
    with refusal("x/same-seed3 cannot be written to .*File too large"), disk(0):
        branches(made, *words)
    with refusal("export: cannot be written .*File too large"), disk(0):
        export.main(ExportSettings(to=str(tmp_path / "export")), str(made))
    assert not (tmp_path / "export").exists()


def test_ctrl_c_lets_the_branch_save_first(made, tmp_path, monkeypatch, capsys):
    """Both processes get the signal. Here the branch ends after it without an error, as grpo.py does."""
    script = "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(0.3)\n"
    (tmp_path / "script.py").write_text(f"{script}print('saved', flush=True)\n")
    monkeypatch.setattr(fork, "SCRIPT", [tmp_path / "script.py"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        branches(made, "--at=2", f"--out_dir={tmp_path}/x")
    signal.signal(signal.SIGINT, before)
    assert not ended.value.code and capsys.readouterr().out.endswith("stopped; the same command goes on\n")
    assert os.listdir(tmp_path / "x") == ["same-seed3"]
