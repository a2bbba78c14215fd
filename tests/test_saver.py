"""Saving beside the training; which checkpoints are kept; disks that are full, read-only or broken."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import make_model
from test_checkpoint import figures, progress, reward_that_draws
from test_grpo import tiny

import grpo
import train_sft
from device.host import HOST
from options import SnugError
from runs import checkpoint, loading
from runs import saver as saving
from runs.log import read_log
from runs.prepare import prepare
from runs.saver import Saver, not_finite
from settings import SFTSettings
from tokenizer import get_tokenizer
from training.guard import Guard
from training.optimizer import make_optimizer, optimizer_step
from training.state import Training

HOME = Path(__file__).parent.parent


def trained(tmp_path, **changes):
    """-> model, optimizer, a function that takes a step, a Saver, a Guard, what was said."""
    settings, said = SFTSettings(out_dir=str(tmp_path), max_iters=99, **{"save_interval": 1} | changes), []
    model = make_model()
    optimizer = make_optimizer(model, settings)
    saver, guard = (
        Saver(settings, get_tokenizer("bytes"), model.device, said.append),
        Guard(settings, said.append),
    )

    def step(done):
        model.logits(model(torch.arange(20, device=model.device).view(2, 10))).logsumexp(-1).sum().backward()
        optimizer_step(model, optimizer, 1e-2, 1.0)
        guard.taken(done - 1)

    return model, optimizer, step, saver, guard, said


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def test_what_is_saved_is_the_state_at_the_save(tmp_path, monkeypatch):
    """The writing is held up; the training goes on; what is written in the end is what there was."""
    model, optimizer, step, saver, guard, _ = trained(tmp_path)
    step(1)
    go, original = threading.Event(), checkpoint.seal
    monkeypatch.setattr(checkpoint, "seal", lambda folder: go.wait(60) and original(folder))
    before = {name: t.clone() for named in loading.tensors_of(model, optimizer).values() for name, t in named.items()}
    on_host = HOST.current
    saver.after(1, model, optimizer, progress(guard), {})
    assert not checkpoint.checkpoints(tmp_path) and saver.stats()["mem_save_mb"] > 0
    assert HOST.current <= on_host  # the copy is in no ledger
    step(2)
    guard.health["dropped_steps"] = 7
    go.set()
    saver.wait()
    assert saver.stats() == {}
    path = checkpoint.newest(tmp_path)
    for file in ("model.safetensors", "optimizer.safetensors"):
        for name, tensor in safetensors.torch.load_file(path / file).items():
            assert tensor.equal(before.pop(name).cpu())
    state = checkpoint.read_state(path)
    assert (
        not before
        and state["optimizer_steps"] == 1
        and state["health"] == {"dropped_steps": 0, "dropped_in_a_row": 0, "last_step": 0}
    )


@pytest.mark.parametrize("spare", [0, 1])
def test_where_there_is_no_room_for_a_copy_the_training_waits(tmp_path, monkeypatch, spare):
    """There is room for a copy if as much again stays free."""
    model, optimizer, step, saver, guard, _ = trained(tmp_path)
    step(1)
    size = sum(tensor.nbytes for named in loading.tensors_of(model, optimizer).values() for tensor in named.values())
    monkeypatch.setattr(saving, "available_on_host", lambda: 2 * size + spare)
    saver.after(1, model, optimizer, progress(guard), {})
    assert (saver.thread is not None) == bool(spare)
    saver.wait()
    assert checkpoint.newest(tmp_path).name == "checkpoint-000001"


def test_the_newest_and_the_best_are_kept(tmp_path):
    model, optimizer, step, saver, guard, _ = trained(tmp_path, save_interval=2, save_total_limit=2)
    scores = {3: 0.5, 5: 0.9, 6: 0.7, 9: 0.9}
    for done in range(1, 12):
        step(done)
        saver.after(done, model, optimizer, progress(guard), {"pass_at_1": scores[done]} if done in scores else {})
        saver.wait()
    # 5 was saved for its score alone; 9, no better than the best, was not; 10 has had a step since
    assert names(tmp_path) == ["best", "checkpoint-000005", "checkpoint-000008", "checkpoint-000010"]
    assert (
        checkpoint.newest(tmp_path / "best").name == "checkpoint-000005"
        and checkpoint.newest(tmp_path).name == "checkpoint-000010"
    )


def test_a_damaged_best_one_is_not_the_best(tmp_path):
    """A resumed run knows the scores from the log. The same score, computed again, is saved."""
    model, optimizer, step, saver, guard, said = trained(tmp_path, save_interval=2, save_total_limit=1)
    saver.settings.max_iters, scores = 8, {2: 0.9, 4: 0.5}
    for done in range(1, 6):
        step(done)
        saver.after(done, model, optimizer, progress(guard), {"pass_at_1": scores[done]} if done in scores else {})
        saver.wait()
    assert names(tmp_path) == ["best", "checkpoint-000002", "checkpoint-000004"]
    (tmp_path / "log.jsonl").write_text("".join(f'{{"iter": {i - 1}, "pass_at_1": {x}}}\n' for i, x in scores.items()))
    for harm, scored in (
        (lambda content: content, {2: 0.9, 4: 0.5}),
        (lambda content: content[:-8] + bytes(8), {4: 0.5}),
    ):
        weights = tmp_path / "checkpoint-000002/model.safetensors"
        weights.write_bytes(harm(weights.read_bytes()))
        again = Saver(saver.settings, saver.tokenizer, model.device, said.append, start=4)
        assert again.scores == scored
    assert "checkpoint-000002: model.safetensors is not what was written; it is not the best any more" in said[-1]
    again.after(7, model, optimizer, progress(guard), {"pass_at_1": 0.9})
    again.after(8, model, optimizer, progress(guard), {})
    assert checkpoint.newest(tmp_path / "best").name == "checkpoint-000007"


def test_older_ones_go_only_after_a_step_from_the_new_one(tmp_path):
    model, optimizer, step, saver, guard, _ = trained(tmp_path, save_total_limit=1)
    for done, kept in ((1, [1]), (2, [1, 2]), (3, [2, 3])):
        step(done)
        saver.after(done, model, optimizer, progress(guard), {})
        saver.wait()
        assert [int(name[-6:]) for name in names(tmp_path)] == kept


def test_a_disk_slower_than_the_training_keeps_no_more(tmp_path, monkeypatch):
    """Every write outlasts its iteration: what is not kept is deleted all the same."""
    model, optimizer, step, saver, guard, _ = trained(tmp_path, save_total_limit=1)
    original = checkpoint.seal
    monkeypatch.setattr(checkpoint, "seal", lambda folder: time.sleep(0.1) or original(folder))
    for done in range(1, 8):
        step(done)
        saver.after(done, model, optimizer, progress(guard), {})
        assert saver.thread is not None and len(checkpoint.checkpoints(tmp_path)) <= 2


def test_a_disk_that_deletes_nothing_does_not_end_the_run(tmp_path, monkeypatch):
    model, optimizer, step, saver, guard, said = trained(tmp_path, save_total_limit=1)
    original = saving.shutil.rmtree

    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy")
        original(path, ignore_errors=True)

    monkeypatch.setattr(saving.shutil, "rmtree", rmtree)
    monkeypatch.setattr(Path, "symlink_to", lambda *names: (_ for _ in ()).throw(OSError(1, "no links here")))
    for done in range(1, 4):
        step(done)
        saver.after(done, model, optimizer, progress(guard), {"pass_at_1": 0.1})
        saver.wait()
    assert f"warning: older checkpoints in {tmp_path} cannot be deleted (Device or resource busy)" in said
    assert len(checkpoint.checkpoints(tmp_path)) == 3


def test_a_save_that_falls_on_a_dropped_step_is_made_up_for(tmp_path):
    model, optimizer, step, saver, guard, _ = trained(tmp_path, save_interval=4)
    for done in range(1, 7):
        if done in (4, 5):
            guard.health["dropped_in_a_row"] += 1
        else:
            step(done)
        saver.after(done, model, optimizer, progress(guard), {})
        saver.wait()
    assert names(tmp_path) == ["checkpoint-000006"]


def test_a_best_that_could_not_be_saved_is_not_the_best(tmp_path, monkeypatch):
    model, optimizer, step, saver, guard, _ = trained(tmp_path, save_interval=0)
    original = os.rename
    for done, score in enumerate((0.5, 0.9, 0.1, 0.7), start=1):
        step(done)
        monkeypatch.setattr(
            os, "rename", original if done != 2 else lambda *paths: (_ for _ in ()).throw(OSError(5, "broken"))
        )
        saver.after(done, model, optimizer, progress(guard), {"pass_at_1": score})
        saver.wait()
    step(5)
    saver.after(5, model, optimizer, progress(guard), {})
    assert checkpoint.newest(tmp_path / "best").name == "checkpoint-000004"


def test_a_resumed_run_does_not_write_what_it_was_resumed_from(tmp_path):
    model, optimizer, step, saver, guard, _ = trained(tmp_path)
    saver.save(3, model, optimizer, progress(guard), last=True)
    before = checkpoint.newest(tmp_path).stat().st_ino
    again = Saver(saver.settings, saver.tokenizer, model.device, print, start=3)
    with pytest.raises(ZeroDivisionError), again.keeping(3, model, optimizer, progress(guard)):
        raise ZeroDivisionError
    assert checkpoint.newest(tmp_path).stat().st_ino == before


def test_a_damaged_later_one_does_not_push_out_the_good(tmp_path):
    """Limit 1, checkpoint 4 is damaged, the run went on from 2: 3 is saved and stays."""
    model, optimizer, step, saver, guard, _ = trained(tmp_path, save_total_limit=1, save_interval=1)
    for done in (2, 4):
        saver.save(done, model, optimizer, progress(guard), last=True)
    (tmp_path / "checkpoint-000004/model.safetensors").write_bytes(b"")
    for done in (3, 4):
        step(done)
        saver.after(done, model, optimizer, progress(guard), {})
        saver.wait()
        assert checkpoint.newest(tmp_path).name == f"checkpoint-{done:06d}"


def test_what_a_killed_process_left_is_cleared(tmp_path):
    (tmp_path / ".tmp-checkpoint-000003").mkdir(parents=True)
    trained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_not_finite_is_not_published(tmp_path):
    model, optimizer, step, saver, guard, said = trained(tmp_path)
    step(1)
    saver.save(1, model, optimizer, progress(guard), last=True)
    optimizer.state[model.blocks[1].mlp.down.weight]["exp_avg"][3, 4] = float("nan")
    saver.save(2, model, optimizer, progress(guard))
    assert (
        "checkpoint-000002 is not written: exp_avg.blocks.1.mlp.down.weight has NaN or infinity; the training goes on"
        in said[0]
    )
    with pytest.raises(
        SnugError, match="checkpoint-000003 is not written.*the newest checkpoint is .*checkpoint-000001"
    ):
        saver.save(3, model, optimizer, progress(guard), last=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_not_finite_finds_one_among_many(dtype):
    named = {f"t{i}": torch.full((50,), 1e30 if dtype != torch.float64 else 1e300, dtype=dtype) for i in range(4)}
    assert not_finite(named | {"whole": torch.ones(3, dtype=torch.long), "empty": torch.ones(0)}) is None
    named["t2"][7] = float("nan")
    assert not_finite(named) == "t2 has NaN or infinity"
    named["t3"][49] = -float("inf")
    assert not_finite(named) == "t2 has NaN or infinity, and 1 more tensors"


def test_a_save_that_fails_is_tried_again(tmp_path, monkeypatch):
    """After 1, 2, 4 iterations; and the training goes on."""
    model, optimizer, step, saver, guard, said = trained(tmp_path, save_interval=5)
    tries = []

    def rename(*paths):
        tries.append(int(str(paths[1])[-6:]))
        if len(tries) < 4:
            raise OSError(28, "No space left on device")
        original(*paths)

    original = os.rename
    monkeypatch.setattr(checkpoint.os, "rename", rename)
    for done in range(1, 15):
        step(done)
        saver.after(done, model, optimizer, progress(guard), {})
        saver.wait()
    assert tries == [5, 6, 8, 12] and checkpoint.newest(tmp_path).name == "checkpoint-000012"
    assert (
        len(said) == 3
        and f"checkpoint-000008 cannot be written into {tmp_path} (No space left on device); the training goes on"
        in said[2]
    )
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize(
    "where, number", [("mkdir", 30), ("save_file", 28), ("write_text", 28), ("fsync", 5), ("rename", 13)]
)
def test_whatever_fails_in_a_save_leaves_the_one_before(tmp_path, monkeypatch, where, number):
    model, optimizer, step, saver, guard, _ = trained(tmp_path)
    saver.save(1, model, optimizer, progress(guard), last=True)
    before = {path: path.read_bytes() for path in checkpoint.newest(tmp_path).iterdir()}

    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    owner = {"mkdir": Path, "save_file": safetensors.torch, "write_text": Path, "fsync": os, "rename": os}[where]
    monkeypatch.setattr(owner, where, fail)
    with pytest.raises(
        SnugError,
        match=rf"checkpoint-000002 cannot be written into .*{os.strerror(number)}.*newest checkpoint is .*000001",
    ):
        saver.save(2, model, optimizer, progress(guard), last=True)
    monkeypatch.undo()
    assert (
        checkpoint.newest(tmp_path).name == "checkpoint-000001"
        and {path: path.read_bytes() for path in before} == before
    )
    saver.save(2, model, optimizer, progress(guard), last=True)
    assert checkpoint.newest(tmp_path).name == "checkpoint-000002"


def train_in_a_process(folder, *words, setup="", **options):
    """train_sft.py with `words`, after `setup` -> the finished process."""
    code = f"import sys; sys.argv[1:] = {list(words)!r}; sys.path.insert(0, {str(HOME)!r})\n{setup}\nimport runpy; runpy.run_path({str(HOME / 'train_sft.py')!r}, run_name='__main__')"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    small = ["--device=cpu", "--eval_prompts=0", "--batch_size=4", f"--out_dir={folder}"]
    code = code.replace("sys.argv[1:] = [", f"sys.argv[1:] = [*{small!r}, ")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, **options)


def test_a_file_system_that_takes_no_more(tmp_path):
    """The kernel refuses files above 300 kB, which a checkpoint is: a real error in the middle of a real write."""
    settings = SFTSettings(out_dir=str(tmp_path / "run"), device="cpu", eval_prompts=0, batch_size=4, max_iters=2)
    train_sft.main(prepare(settings))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    child = train_in_a_process(tmp_path / "run", "--max_iters=9", "--save_interval=1", "--resume=auto", setup=limit)
    assert child.returncode == 2 and child.stderr.count("\n") == 1, child.stderr
    assert (
        "error: checkpoint-000009 cannot be written" in child.stderr and "checkpoint-000002; make room" in child.stderr
    )
    assert "warning: checkpoint-000003 cannot be written into" in child.stdout and "File too large" in child.stdout
    assert len(read_log(tmp_path / "run")) == 9  # it trained to the end
    train_sft.main(prepare(dataclasses.replace(settings, max_iters=9, resume="auto")))
    assert checkpoint.newest(tmp_path / "run").name == "checkpoint-000009"


def in_a_mount(folder, commands):
    """Run shell commands where `folder` is a file system of 3 MiB of their own -> the finished process; skips where none may be mounted."""
    mount = f"mount -t tmpfs -o size=3m tmpfs {folder}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} && {commands}"],
        capture_output=True,
        text=True,
        cwd=HOME,
        env=environment,
    )


TRAIN = f"{sys.executable} train_sft.py --device=cpu --eval_prompts=0 --batch_size=4"


def test_a_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    train = f"{TRAIN} --max_iters=30 --save_interval=1 --save_total_limit=50 --out_dir={disk}/run"
    child = in_a_mount(
        disk,
        f"{train}; echo code $?; cp {disk}/run/log.jsonl {tmp_path}; cp -r {disk}/run/checkpoint-000002 {tmp_path}",
    )
    assert (
        "code 2\n" in child.stdout
        and "No space left on device" in child.stderr
        and "checkpoint-000002; make room" in child.stderr
    )
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["iter"] for record in records] == list(range(30))
    assert checkpoint.damage(tmp_path / "checkpoint-000002") is None


def test_a_log_on_a_disk_that_is_full_waits(tmp_path):
    """Not a byte is left for log.jsonl, then there is again: no line is missing, and none is cut."""
    disk = tmp_path / "disk"
    disk.mkdir()
    code = f"""
import os, sys
sys.path.insert(0, {str(HOME)!r})
from runs.log import Lines
lines = Lines("{disk}/log.jsonl", print)
lines.write("first")
with open("{disk}/big", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
for i in range(3):
    lines.write(str(i) * 3000)
print(lines.error, len(lines.waiting))
print({{len(line) for line in open("{disk}/log.jsonl").read().splitlines()}} <= {{5, 3000}}, open("{disk}/log.jsonl").read().endswith("\\n"))
os.remove("{disk}/big")
lines.write("last")
print(lines.error, [line[:5] for line in open("{disk}/log.jsonl").read().splitlines()])
"""
    (tmp_path / "code.py").write_text(code)
    child = in_a_mount(disk, f"{sys.executable} {tmp_path}/code.py")
    warning, state, *rest = child.stdout.splitlines()
    assert rest == ["True True", "None ['first', '00000', '11111', '22222', 'last']"], child.stderr
    assert warning.endswith("cannot be written (No space left on device); its lines wait in memory")
    assert state.startswith("No space left on device ")


def test_a_folder_that_is_read_only(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    child = in_a_mount(disk, f"mount -o remount,ro {disk} && {TRAIN} --max_iters=2 --out_dir={disk}; echo code $?")
    assert "code 2\n" in child.stdout and child.stderr.count("\n") == 1, child.stderr
    assert f"error: out_dir={disk} cannot be " in child.stderr and "Read-only file system" in child.stderr


def test_an_iteration_that_fails_before_its_step_loses_nothing(tmp_path):
    """A reward function fails in iteration 3: what iterations 0 to 2 did is saved, and the run goes on as if nothing had been."""
    sft, settings = tiny(tmp_path, init_from="", beta=0.0, max_iters=6, eval_prompts=0, save_interval=0)

    def trained(settings, reward):
        prepared = prepare(settings)
        prepared.reward_funcs = [reward]
        grpo.main(prepared)

    random.seed(3), np.random.seed(3)
    trained(settings, reward_that_draws)
    calls = []

    def fails(prompts, completions, **columns):
        calls.append(1)
        rewards = reward_that_draws(prompts, completions, **columns)
        if len(calls) >= 4:
            raise ZeroDivisionError("none")
        return rewards

    broken = dataclasses.replace(settings, out_dir=str(tmp_path / "broken"))
    random.seed(3), np.random.seed(3)
    with pytest.raises(SnugError, match="fails raised ZeroDivisionError: 'none'"):
        trained(broken, fails)
    assert checkpoint.newest(broken.out_dir).name == "checkpoint-000003"
    assert "saved after iteration 2" in (tmp_path / "broken/log.txt").read_text()
    trained(dataclasses.replace(broken, resume="auto"), reward_that_draws)
    assert figures(broken.out_dir) == figures(settings.out_dir)


def test_saving_an_error_twice_hides_nothing(tmp_path, monkeypatch):
    """The iteration fails, and so does the save: the first error is the one that is raised."""
    sft, _ = tiny(tmp_path)
    original = Training.update
    steps = []

    def step(*arguments):
        steps.append(1)
        if len(steps) == 3:
            monkeypatch.setattr(os, "rename", lambda *paths: (_ for _ in ()).throw(OSError(5, "broken disk")))
            raise RuntimeError("the device is gone")
        return original(*arguments)

    monkeypatch.setattr(Training, "update", step)
    with pytest.raises(RuntimeError, match="the device is gone"):
        train_sft.main(prepare(dataclasses.replace(sft, save_interval=0, eval_prompts=0)))
    assert "warning: checkpoint-000002 cannot be written" in (Path(sft.out_dir) / "log.txt").read_text()
