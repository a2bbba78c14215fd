"""When a run's state is saved, and which checkpoints are kept.

    saver = Saver(settings, tokenizer, model, optimizer, say)
    with saver.keeping(iteration, progress):      # if the iteration fails, save the state before it
        ...
    saver.after(iteration + 1, progress, scores)  # every save_interval, at a new best score, at the end

progress goes into state.json. The loop makes this dict, which JSON can hold:
{"health": {...}, "after_oom": {...}, "extra_prompts": int}. The score of a checkpoint is in the log.

A save checks that the state is finite and writes it; the training waits. If a save fails, the log says why, the
training goes on, and the next save tries again. If the last save fails, the run ends with an error.

The newest save_total_limit checkpoints are kept, and the one with the best score; out/<run>/best links to the latter.
"""

import shutil
from collections import ChainMap
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from runs.checkpoint import PREFIX, checkpoints, iteration_of, write
from runs.loading import generator_state, tensors_of
from runs.log import read_log
from snug.device.processes import ONE_PROCESS
from snug.memory.ledger import not_finite
from snug.options import SnugError
from snug.options.progress import phase


class UnsafeState(SnugError):
    """The run stops, and its state must not be saved: the weights may be ruined."""


class Saver:
    def __init__(
        self,
        settings,
        tokenizer,
        model,
        optimizer,
        say,
        start=None,
        processes=ONE_PROCESS,
        **constants,
    ):
        """say: writes a line. start: iterations done before this run.

        constants: `data` and, for LoRA, `base` of state.json. With several processes rank 0 decides and writes. The
        others make the same calls.
        """
        self.settings, self.tokenizer, self.say = settings, tokenizer, say
        self.model, self.optimizer, self.processes = model, optimizer, processes
        # Absolute: a tool or a reward function may change the working folder.
        self.folder, self.constants = Path(settings.out_dir).absolute(), constants
        self.saved = start  # iterations done by the newest checkpoint
        self.scores = {}  # iterations done -> score, None without an evaluation
        if self.processes.rank == 0:
            self.scores = {
                record["iter"] + 1: self.score_of(record) for record in read_log(self.folder)
            }
            for folder in self.folder.glob(f".tmp-{PREFIX}*"):  # a killed process left it
                shutil.rmtree(folder, ignore_errors=True)

    def score_of(self, record) -> float | None:
        """A line of the log -> its score: the mean held-out reward if the run has reward_funcs, else pass@1. Larger is
        better."""
        return record.get("eval_reward_mean" if self.settings.reward_funcs else "pass_at_1")

    def after(self, done, progress, scores):
        """Save after `done` iterations if it is time. scores: an evaluation's entries of the log, if there was one now.

        After a dropped step nothing is saved, except at the end. Raises SnugError if the last save fails.
        """
        score, interval = self.score_of(scores), self.settings.save_interval
        is_best = False
        if score is not None:
            best = best_of(checkpoints(self.folder), self.scores)
            is_best = best is None or score > self.scores[iteration_of(best)]
        self.scores[done] = score
        is_due = is_best or interval > 0 and done % interval == 0
        is_safe = progress["health"]["dropped_in_a_row"] == 0
        last = done == self.settings.max_iters
        if self.processes.first(last or is_due and is_safe):
            self.save(done, progress, last)

    def save(self, done, progress, last=False):
        """Save the state after `done` iterations. If saving fails, warn; with `last` raise SnugError."""
        if not self.processes.first(self.saved == done):
            self.write(done, progress, last)
        if self.processes.rank == 0:
            self.prune(done)  # also without a write: its score may be new

    @phase("saving")
    def write(self, done: int, progress: dict, last: bool):
        """Write the checkpoint. If writing fails, warn; with `last` raise SnugError."""
        tensors = self.processes.whole_tensors(tensors_of(self.model, self.optimizer))
        if self.processes.rank:
            return
        state = {
            "iteration": done,
            "optimizer_steps": self.optimizer.steps,
            "model_config": asdict(self.model.config),
            "tokenizer": self.tokenizer.name,
            "settings": asdict(self.settings),
            "generators": generator_state(),
            **self.constants,
            **progress,
        }
        try:
            if bad := not_finite(ChainMap(*tensors.values())):
                raise SnugError(f"{PREFIX}{done:06d} is not written: {bad}")
            write(self.folder, state, tensors, self.tokenizer.files)
        except SnugError as error:
            if last:
                raise
            self.say(f"warning: {error}; the training goes on, and the next save tries again")
            return
        self.saved = done

    def prune(self, done):
        """Keep the newest save_total_limit checkpoints and the best one, and link `best` to the best one.

        Checkpoints after `done` are damaged ones that the run did not resume from. They stay.
        """
        paths = [path for path in checkpoints(self.folder) if iteration_of(path) <= done]
        best = best_of(paths, self.scores)
        if best:
            link = self.folder / "best"
            with suppress(OSError):  # a file system without links
                link.unlink(missing_ok=True)
                link.symlink_to(best.name)
        for path in paths[: -self.settings.save_total_limit]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)  # if it stays, the next save tries again

    @contextmanager
    def keeping(self, iteration, progress):
        """If the block fails before its optimizer step, save the state from before the block, with this `progress`. A
        KeyboardInterrupt gets a text that says how to go on."""
        progress = progress | {"generators": generator_state()}
        steps = self.optimizer.steps
        try:
            yield
        except UnsafeState:
            raise
        except KeyboardInterrupt as error:
            error.args = (f"--resume=auto goes on from {newest_name(self.folder)}",)
            raise
        except Exception:
            unchanged = iteration > 0 and self.optimizer.steps == steps
            alone = self.processes.rank == 0 and not self.processes.sharded  # the others may be gone
            if unchanged and alone:
                with suppress(Exception):  # the error below is the one to raise
                    if self.saved != iteration:
                        self.write(iteration, progress, last=True)
                self.say(
                    f"before the error below: --resume=auto goes on from {newest_name(self.folder)}"
                )
            raise


def best_of(paths, scores) -> Path | None:
    """The checkpoint with the best score, the newest of equals. scores: {iterations done: score or None}."""
    scored = [path for path in paths if scores.get(iteration_of(path)) is not None]
    return max(scored, key=lambda path: (scores[iteration_of(path)], path.name), default=None)


def newest_name(folder) -> str:
    paths = checkpoints(folder)
    return str(paths[-1]) if paths else "the beginning"
