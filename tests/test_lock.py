"""runs/lock.py: two runs in one folder."""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import grpo
from helpers import HOME
from helpers.errors import assert_refused, refusal
from helpers.runs import PROMPTS, SMALL, disk
from runs.checkpoint import newest
from runs.loading import load_run
from runs.lock import locked, move_aside
from snug.options import SnugError

RUN = """grpo.py --task=addition --beta=0 --n_layer=1 --n_head=1 --n_embd=8 --batch_size=2 --group_size=2
--eval_prompts=0 --save_interval=50 --save_total_limit=999 --max_new_tokens=4"""


def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(tmp_path):
    folder = tmp_path / "run"
    words = [sys.executable, *RUN.split(), f"--out_dir={folder}", "--max_iters=100000"]
    first = subprocess.Popen(words, cwd=HOME, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not any(folder.glob("checkpoint-*")):
            time.sleep(0.05)
        said = f"{folder} is in use by process {first.pid} on {socket.gethostname()}; choose another out_dir"
        assert_refused(said, grpo.train, resume=str(folder))
        assert load_run(folder).iteration and first.poll() is None
    finally:
        first.kill()
        first.wait()
    assert grpo.train(out_dir=str(folder), **SMALL | dict(max_iters=1)).finished  # a killed process holds nothing
    assert (tmp_path / "run.1/log.jsonl").exists() and len((folder / "log.jsonl").read_text().splitlines()) == 1


def test_the_lock_goes_with_the_name_of_the_folder_and_names_its_last_holder_alone(tmp_path):
    """The earlier run is moved away, and its folder is free."""
    folder, file = tmp_path / "run", tmp_path / ".run.lock"
    file.write_text("process 12345678901234567890 on another machine")
    with locked(folder), pytest.raises(SnugError, match="is in use by process"), locked(folder):
        pass
    (tmp_path / "link").symlink_to(folder)
    with locked(folder), pytest.raises(SnugError, match="link is in use by process"), locked(tmp_path / "link"):
        pass
    with locked(folder):
        assert file.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        moved = move_aside(folder)
        assert moved == tmp_path / "run.1"
        with locked(moved), pytest.raises(SnugError, match="is in use by process"), locked(folder):
            pass
        assert move_aside(folder) == tmp_path / "run.2"
    with locked(folder):
        pass


@pytest.mark.parametrize("room", [0, 100])
def test_a_disk_that_is_full_before_the_first_iteration_is_one_line(tmp_path, capsys, room):
    """Without room the lock fails, and with a little settings.json."""
    options = SMALL | dict(max_iters=1, eval_prompts=0, out_dir=str(tmp_path / "run"))
    for prompts, what in ((None, f"out_dir={tmp_path}/run cannot be written to"), (PROMPTS, "jsonl cannot be written")):
        with refusal(what + " .OSError: .* File too large"), disk(room):
            grpo.train(prompts=prompts, **options)
    assert grpo.train(**options).finished


def test_an_earlier_run_that_cannot_be_moved_is_named(tmp_path, monkeypatch):
    """A folder that is a disk of its own has no other name."""
    monkeypatch.setattr(Path, "rename", lambda *paths: os.rmdir("/"))
    assert_refused(f"the earlier run in {tmp_path} cannot be moved aside; choose another out_dir", move_aside, tmp_path)


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, capsys):
    def unsupported(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path):
        assert "lock cannot be locked (No locks available); start no second run here" in capsys.readouterr().err


@pytest.mark.parametrize("delete", [False, True])
def test_a_run_whose_folder_is_moved_or_deleted_keeps_its_name_and_saves_there(tmp_path, delete):
    folder, moved = tmp_path / "run", tmp_path / "moved"

    def moving(completions, trainer_state, **columns):
        if trainer_state.global_step == 1:
            shutil.rmtree(folder) if delete else folder.rename(moved)
            assert_refused("is in use by process", locked(folder).__enter__)
        return [float(len(text)) for text in completions]

    run = grpo.train(out_dir=str(folder), **SMALL | dict(max_iters=3, eval_prompts=0, reward_funcs=[moving]))
    assert run.finished and newest(folder).name == "checkpoint-000003"
    assert delete or len((moved / "log.jsonl").read_text().splitlines()) == 3
