"""runs/lock.py: two runs in one folder."""

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_grpo import tiny
from test_notebook import SMALL, weights

import grpo
import train_sft
from runs.lock import FolderLock
from runs.prepare import prepare
from snug.options import SnugError

HOME = Path(__file__).parent.parent
RUN = """grpo.py --task=addition --beta=0 --n_layer=1 --n_head=1 --n_embd=8 --batch_size=2 --group_size=2
--eval_prompts=0 --save_interval=50 --save_total_limit=999 --max_new_tokens=4"""


@pytest.fixture
def command():
    """Start a run in a folder -> its process. A failed test leaves none behind."""
    started = []

    def command(folder, *words):
        words = [sys.executable, *RUN.split(), f"--out_dir={folder}", *words]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(subprocess.Popen(words, cwd=HOME, text=True, **pipes))
        return started[-1]

    yield command
    for process in started:
        process.kill()


def wait_for(condition):
    while not condition():
        time.sleep(0.05)


def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(tmp_path, command):
    folder = tmp_path / "run"
    first = command(folder, "--max_iters=100000")
    wait_for(lambda: any(folder.glob("checkpoint-*")))
    second = command(folder, "--max_iters=3")
    error = second.communicate()[1]
    assert second.returncode == 2 and error.count("\n") == 1
    assert f"{folder} is in use by process {first.pid} on {socket.gethostname()}; choose another out_dir" in error
    read = subprocess.run([sys.executable, "sample.py", str(folder), "--device=cpu"], cwd=HOME, capture_output=True)
    assert read.returncode == 0
    assert not (tmp_path / "run.1").exists() and first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    third = command(folder, "--max_iters=2")  # a killed process holds nothing
    assert third.wait() == 0 and (tmp_path / "run.1/log.jsonl").exists() and not (tmp_path / "run.1/lock").exists()
    assert len((folder / "log.jsonl").read_text().splitlines()) == 2


def test_the_lock_goes_with_the_name_of_the_folder(tmp_path):
    """It is taken again where the earlier run was moved away, and the moved folder is free."""
    folder = tmp_path / "run"
    lock = FolderLock(folder)
    with lock:
        moved = lock.move_aside()
        assert moved == tmp_path / "run.1"
        with FolderLock(moved), pytest.raises(SnugError, match="is in use by process"), FolderLock(folder):
            pass
        assert lock.move_aside() == tmp_path / "run.2"
    with FolderLock(folder):
        pass


def test_the_lock_names_its_last_holder_alone(tmp_path):
    (tmp_path / "lock").write_text("process 12345678901234567890 on another machine")
    with FolderLock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, capsys):
    def unsupported(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with FolderLock(tmp_path):
        assert "lock cannot be locked (No locks available); start no second run here" in capsys.readouterr().err


def test_an_earlier_run_is_deleted_where_that_is_asked_for(tmp_path, capsys):
    sft, _ = tiny(tmp_path, max_iters=1, eval_prompts=0)
    for overwrite in (False, True):
        train_sft.main(prepare(replace(sft, overwrite=overwrite)))
    assert "was deleted" in capsys.readouterr().out and not Path(f"{sft.out_dir}.1").exists()


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_run_whose_folder_is_gone_stops_and_writes_nothing(tmp_path, how):
    """Its lock is void: a second run may be there, which stays as it is. A lock file that is deleted stops no run."""
    folder, moved = tmp_path / "run", tmp_path / "moved"

    def moving(completions, trainer_state, **columns):
        (folder / "lock").unlink(missing_ok=True)
        if trainer_state.global_step == 1 and how:
            shutil.rmtree(folder) if how == "deleted" else folder.rename(moved)
            if how == "replaced":
                folder.mkdir()
                (folder / "lock").touch()
        return [float(len(text)) for text in completions]

    options = SMALL | dict(max_iters=3, save_interval=1, eval_prompts=0, reward_funcs=[moving])
    said = (
        f"out_dir={folder} was moved or deleted, so checkpoint-000002 is not written; --resume=<its new place> goes on"
    )
    with pytest.raises(SnugError, match=re.escape(said)):
        grpo.train(out_dir=str(folder), **options)
    assert [path.name for path in folder.glob("*")] == (["lock"] if how == "replaced" else [])
    if how == "moved":
        assert said in (moved / "log.txt").read_text()
        how = ""
        resumed = grpo.train(resume=str(moved), reward_funcs=[moving])
        whole = grpo.train(out_dir=str(folder), **options)
        assert len(resumed.log) == 3 and weights(whole.folder) == weights(resumed.folder)
