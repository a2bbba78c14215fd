"""Saving; which checkpoints are kept; disks that are full, read-only or broken."""

import dataclasses
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from helpers.errors import assert_refused
from helpers.models import make_model
from helpers.runs import figures, progress, reward_that_draws, tiny, trained
from runs import checkpoint
from runs.saver import Saver, best_of
from settings import SFTSettings
from snug.tokenizer import get_tokenizer
from training.optimizer import make_optimizer, optimizer_step


class Run:
    """A small model, its optimizer and its Saver. `messages`: what the log says."""

    def __init__(self, folder, **changes):
        self.folder, self.messages = folder, []
        self.settings = SFTSettings(out_dir=str(folder), max_iters=99, **{"save_interval": 1} | changes)
        self.model = make_model()
        self.optimizer = make_optimizer(self.model, self.settings)
        self.dropped = 0
        self.saver = self.new_saver()

    def new_saver(self, start=None):
        tokenizer, say = get_tokenizer("bytes"), self.messages.append
        return Saver(self.settings, tokenizer, self.model, self.optimizer, say, start)

    def step(self, done):
        tokens = torch.arange(20, device=self.model.device).view(2, 10)
        self.model.logits(self.model(tokens)).logsumexp(-1).sum().backward()
        optimizer_step(self.model, self.optimizer, 1e-2, 1.0)
        self.dropped = 0

    def after(self, done, score=None):
        self.saver.after(done, progress(self.dropped), {} if score is None else {"pass_at_1": score})

    def iterations(self, *numbers, scores=()):
        for done in numbers:
            self.step(done)
            self.after(done, dict(scores).get(done))

    def save(self, done, last=True):
        self.saver.save(done, progress(self.dropped), last=last)

    def kept(self, name="checkpoint"):
        """The iterations of the folder's checkpoints."""
        return sorted(int(path.name[-6:]) for path in self.folder.glob(f"{name}-*"))

    def best(self):
        return int(os.readlink(self.folder / "best")[-6:])


def broken(number=5):
    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("limit, newest", [(2, [8, 10]), (3, [6, 8, 10])])
def test_the_newest_and_the_best_are_kept(limit, newest, tmp_path):
    (tmp_path / ".tmp-checkpoint-000003").mkdir(parents=True)  # a killed process left it
    run = Run(tmp_path, save_interval=2, save_total_limit=limit)
    assert not list(tmp_path.iterdir())
    run.iterations(*range(1, 12), scores={3: 0.5, 5: 0.9, 6: 0.7, 9: 0.9})
    # 5 was saved for its score alone; 9, no better than the best, was not
    assert run.kept() == [5, *newest] and run.best() == 5
    assert checkpoint.newest(tmp_path / "best").name == "checkpoint-000005"
    assert checkpoint.newest(tmp_path).name == "checkpoint-000010"


def test_of_equal_scores_the_newest_is_the_best(tmp_path):
    paths = [tmp_path / f"checkpoint-{done:06d}" for done in (2, 4, 6, 8)]
    assert best_of(paths, {2: 0.5, 4: 0.9, 6: 0.9, 8: None}) == best_of(paths[::-1], {4: 0.9, 6: 0.9}) == paths[2]
    assert best_of(paths, {2: 0.0}) == paths[0] and best_of(paths, {8: None}) is best_of([], {2: 0.5}) is None


def test_a_resumed_run_knows_the_scores_from_the_log(tmp_path):
    run, scores = Run(tmp_path, save_interval=2, save_total_limit=1), {2: 0.9, 4: 0.5}
    run.settings.max_iters = 8
    run.iterations(*range(1, 6), scores=scores)
    assert run.kept() == [2, 4] and run.best() == 2
    before = checkpoint.newest(tmp_path).stat().st_ino
    lines = [json.dumps({"iter": done - 1, "pass_at_1": score}) for done, score in scores.items()]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    run.saver = run.new_saver(start=4)
    assert run.saver.scores == scores
    with pytest.raises(ZeroDivisionError), run.saver.keeping(4, progress()):
        raise ZeroDivisionError
    assert checkpoint.newest(tmp_path).stat().st_ino == before  # what it was resumed from is not written again
    run.after(7, 0.9)
    run.after(8)
    assert run.best() == 2


@pytest.mark.parametrize("done, steps, kept", [(3, 0, [3]), (3, 1, []), (0, 0, [])])
def test_an_error_saves_the_state_before_it_if_no_step_was_taken(done, steps, kept, tmp_path):
    """Before the first iteration there is nothing to save."""
    run = Run(tmp_path)
    with pytest.raises(ZeroDivisionError), run.saver.keeping(done, progress()):
        run.saver.optimizer.steps += steps
        raise ZeroDivisionError
    assert run.kept() == kept


def test_a_best_that_could_not_be_saved_is_not_the_best(tmp_path, monkeypatch):
    run = Run(tmp_path, save_interval=0)
    run.iterations(1, scores={1: 0.5})
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", broken())
        run.iterations(2, scores={2: 0.9})
    run.iterations(3, 4, 5, scores={3: 0.1, 4: 0.7})
    assert run.kept() == [1, 4] and run.best() == 4


def test_a_disk_that_deletes_nothing_and_has_no_links_does_not_end_the_run(tmp_path, monkeypatch):
    """The next save deletes what stayed."""
    run = Run(tmp_path, save_total_limit=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", broken(16))
        patch.setattr(Path, "symlink_to", broken(1))
        run.iterations(1, 2, 3, scores={3: 0.1})
    assert run.kept() == [1, 2, 3] and run.messages == [] and not (tmp_path / "best").exists()
    run.iterations(4)
    assert run.kept() == [3, 4] and run.best() == 3


def test_after_a_dropped_step_nothing_is_saved_but_at_the_end(tmp_path):
    """The weights may be ruined although they are finite."""
    run = Run(tmp_path, save_interval=2)
    run.settings.max_iters = 8
    run.iterations(1, 2, 3)
    run.dropped = 1
    run.after(4, 0.9)
    assert run.kept() == [2]
    run.iterations(5, 6, 7)
    run.dropped = 1
    run.after(8)
    assert run.kept() == [6, 8]


def test_a_damaged_later_one_does_not_push_out_the_good(tmp_path):
    """Limit 1, checkpoint 4 is damaged, the run went on from 2: 3 is saved and stays."""
    run = Run(tmp_path, save_total_limit=1)
    run.save(4), run.save(2)
    (tmp_path / "checkpoint-000004/model.safetensors").write_bytes(b"")
    for done in (3, 4):
        run.iterations(done)
        assert checkpoint.newest(tmp_path).name == f"checkpoint-{done:06d}"


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    run = Run(tmp_path)
    run.iterations(1)
    run.optimizer.state[run.model.blocks[1].mlp.down.weight]["exp_avg"][3, 4] = float("nan")
    run.save(2, last=False)
    bad = "checkpoint-000002 is not written: exp_avg.blocks.1.mlp.down.weight has NaN or infinity; the training goes on"
    assert bad in run.messages[0]
    assert_refused("checkpoint-000003 is not written", run.save, 3)


@pytest.mark.parametrize(
    "owner, name, number",
    [(Path, "mkdir", 30), (safetensors.torch, "save_file", 28), (Path, "write_text", 28), (os, "fsync", 5)]
    + [(os, "rename", 13)],
)
def test_whatever_fails_in_a_save_leaves_the_one_before(tmp_path, monkeypatch, owner, name, number):
    run = Run(tmp_path)
    run.save(1)
    before = {path: path.read_bytes() for path in checkpoint.newest(tmp_path).iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken(number))
        assert_refused(f"checkpoint-000002:? cannot be .*{os.strerror(number)}", run.save, 2)
    assert run.kept() == [1] and {path: path.read_bytes() for path in before} == before
    run.save(2)
    assert checkpoint.newest(tmp_path).name == "checkpoint-000002"


def test_an_iteration_that_fails_before_its_step_loses_nothing(tmp_path):
    """A reward function fails in iteration 3: what iterations 0 to 2 did is saved, and the run goes on as if nothing had been."""
    _, settings = tiny(tmp_path, init_from="", beta=0.0, max_iters=6, eval_prompts=0, save_interval=0)
    random.seed(3), np.random.seed(3)
    trained(settings, reward_that_draws)
    calls = []

    def fails(prompts, completions, **columns):
        calls.append(1)
        rewards = reward_that_draws(prompts, completions, **columns)
        if len(calls) >= 4:
            raise ZeroDivisionError("none")
        return rewards

    stopped = dataclasses.replace(settings, out_dir=str(tmp_path / "stopped"))
    random.seed(3), np.random.seed(3)
    assert_refused("fails raised ZeroDivisionError: 'none'", trained, stopped, fails)
    assert checkpoint.newest(stopped.out_dir).name == "checkpoint-000003"
    assert "stopped/checkpoint-000003\n" in (tmp_path / "stopped/log.txt").read_text()
    trained(dataclasses.replace(stopped, resume="auto"), reward_that_draws)
    assert figures(stopped.out_dir) == figures(settings.out_dir)
