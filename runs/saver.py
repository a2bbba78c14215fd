"""When a run's state is written, beside the training, and which checkpoints are kept.

    saver = Saver(settings, tokenizer, device, say)
    with saver.keeping(iteration, model, optimizer, progress):    # if the iteration fails, save the state before it
        ...
    saver.after(iteration + 1, model, optimizer, progress, scores)  # every save_interval, at a new best score, last

progress goes into state.json beside model and optimizer, a JSON-able dict made by the loop:
{"health": guard.health, "after_oom": {...}, "extra_prompts": int}, never changed. A checkpoint's score is the one that
the log has for its iteration.

A save checks that the state is finite and copies it to the host; a thread writes the copy while the training goes on.
Without room for a copy (or with memory_budget_gb on a CPU), the training waits. A save that fails is reported and
repeated after 1, 2, 4, ... 64 iterations; only the last save ends the run with an error.

The newest save_total_limit checkpoints are kept, and the one with the best score. out/<run>/best is a link to that.
Finite weights can still be ruined, so older checkpoints are deleted only after a later finite iteration, or at the end.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch.optim import Optimizer

from device.host import available_on_host, spare_copy
from device.kinds import MIB
from device.processes import OneProcess
from memory.meter import tensor_bytes
from model import GPT
from options import SnugError
from runs import free_name
from runs.checkpoint import PREFIX, checkpoints, damage, iteration_of, write
from runs.loading import generator_state, optimizer_steps, tensors_of
from runs.log import read_log


class UnsafeState(SnugError):
    """The run stops, and its state must not be saved: it may be ruined."""


class Saver:
    def __init__(
        self,
        settings,
        tokenizer,
        device,
        say: Callable[[str], None],
        start=None,
        processes=None,
        **constants,
    ):
        """start: iterations done before this run. constants: `data` and, for LoRA, `base` of state.json.

        Of several processes rank 0 decides and writes; the others take the same calls.
        """
        self.settings, self.tokenizer, self.device, self.say = settings, tokenizer, device, say
        self.processes = processes or OneProcess()
        self.folder, self.constants = Path(settings.out_dir), {"data": ""} | constants
        self.saved = start  # iterations done by the newest checkpoint
        self.scores = {} if self.processes.rank else self.scores_in_log()  # iterations done -> score
        self.pruned = (
            start  # iterations done by the checkpoint after which older ones were last deleted
        )
        self.due = False  # a save waits for the next iteration whose step is not dropped
        self.thread = self.copy = None  # the writing thread, and the tensors it writes
        self.failure = None  # (iterations done, message) of a write that failed and is not reported yet
        self.failures, self.retry_at = 0, 0  # failures in a row; iterations done before the next try
        left = [] if self.processes.rank else self.folder.glob(f".tmp-{PREFIX}*")
        for folder in left:  # from a process that was killed
            shutil.rmtree(folder, ignore_errors=True)

    def scores_in_log(self) -> dict[int, float]:
        """{iterations done: score} of the checkpoints. The best of them is verified: a damaged one has no score."""
        log = read_log(self.folder) if (self.folder / "log.jsonl").exists() else []
        scores = {record["iter"] + 1: self.score_of(record) for record in log}
        scores = {done: score for done, score in scores.items() if score is not None}
        while (
            (best := best_of(self.folder, scores))
            and iteration_of(best) != self.saved
            and (wrong := damage(best))
        ):
            self.say(f"warning: {wrong}; it is not the best any more")
            del scores[iteration_of(best)]
        return scores

    def score_of(self, record: dict) -> float | None:
        """What is largest in the best checkpoint: the mean held-out reward if the run has reward_funcs, else pass@1."""
        return record.get("eval_reward_mean" if self.settings.reward_funcs else "pass_at_1")

    def after(self, done: int, model: GPT, optimizer: Optimizer, progress: dict, scores: dict) -> None:
        """Save after `done` iterations if it is time. scores: the log's, of an evaluation now. Raises SnugError if the
        last save fails."""
        s, last, score = self.settings, done == self.settings.max_iters, self.score_of(scores)
        if self.thread and not self.thread.is_alive():
            self.wait()
        best = best_of(self.folder, self.scores)
        new_best = score is not None and (best is None or score > self.scores[iteration_of(best)])
        if score is not None:
            self.scores[done] = score
        self.due = self.due or new_best or bool(s.save_interval and done % s.save_interval == 0)
        dropped = progress["health"]["dropped_in_a_row"] > 0  # then the state is not known to be good
        now = self.processes.first(last or self.due and not dropped and done >= self.retry_at)
        if now:
            self.wait()
        if not dropped and self.thread is None and self.saved != self.pruned:
            self.prune()
        if now:
            self.due = False
            self.save(done, model, optimizer, progress, last)
            if last and not dropped:
                self.prune()

    def save(
        self, done: int, model: GPT, optimizer: Optimizer, progress: dict, last: bool = False
    ) -> None:
        """Save the state after `done` iterations. last: wait until it is written, and raise SnugError if that fails."""
        self.wait()
        if not self.processes.first(self.saved == done):
            self.write(done, model, optimizer, progress, last)

    def write(self, done, model, optimizer, progress, last):
        tensors = self.processes.gathered(model, tensors_of(model, optimizer))
        if self.processes.rank:
            return
        state = dict(
            iteration=done,
            optimizer_steps=optimizer_steps(optimizer),
            model_config=asdict(model.config),
        )
        state |= dict(tokenizer=self.tokenizer.name, settings=asdict(self.settings))
        state |= {"generators": generator_state(self.device)} | self.constants | progress
        if bad := not_finite(
            {name: tensor for named in tensors.values() for name, tensor in named.items()}
        ):
            self.failure = done, f"{PREFIX}{done:06d} is not written: {bad}"
        elif not last and (copy := self.copied(tensors)):
            self.copy = copy
            self.thread = threading.Thread(target=self.publish, args=(state, copy), daemon=True)
            self.thread.start()
            return
        else:
            self.publish(state, tensors)
        if last and self.failure:
            (_, message), newest, self.failure = self.failure, newest_name(self.folder), None
            raise SnugError(
                f"{message}; the newest checkpoint is {newest}; make room, then --resume=auto"
            )
        self.wait()

    def copied(self, tensors: dict) -> dict | None:
        """Copies of all tensors in host memory, or None if there is no room to spare."""
        size = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
        planned = (
            self.settings.memory_budget_gb and self.device.type == "cpu"
        )  # the budget has no room for a copy
        if planned or available_on_host() <= 2 * size:
            return None
        return {
            file: {name: spare_copy(tensor) for name, tensor in named.items()}
            for file, named in tensors.items()
        }

    def publish(self, state: dict, tensors: dict) -> None:
        """Write a checkpoint; runs in the thread. Any error goes to `failure`."""
        done = state["iteration"]
        try:
            write(self.folder, state, tensors, self.tokenizer.files)
            self.saved, self.failures = done, 0
        except Exception as error:
            cause = (
                getattr(error, "strerror", None)
                or str(error).rpartition("I/O error: ")[2]
                or type(error).__name__
            )
            self.failure = done, f"{PREFIX}{done:06d} cannot be written into {self.folder} ({cause})"

    def wait(self) -> None:
        """Wait until nothing is being written; report a failure and set the time of the next try."""
        if self.thread:
            self.thread.join()
            self.thread = self.copy = None
        if self.failure:
            done, message = self.failure
            self.retry_at = done + 2 ** min(self.failures, 6)
            self.failure, self.failures, self.due = None, self.failures + 1, True
            self.say(
                f"warning: {message}; the training goes on, the next try is after iteration {self.retry_at - 1}"
            )

    def stats(self) -> dict:
        """For the log: host memory of the copy that is being written."""
        if not self.copy:
            return {}
        return {
            "mem_save_mb": round(
                tensor_bytes(t for named in self.copy.values() for t in named.values()) / MIB, 3
            )
        }

    def prune(self) -> None:
        """Delete old checkpoints. If that fails, warn and retry after the next save."""
        self.pruned = self.saved
        if self.processes.rank:
            return
        try:
            prune(self.folder, self.saved, self.settings.save_total_limit, self.scores)
        except OSError as error:
            self.say(
                f"warning: older checkpoints in {self.folder} cannot be deleted ({error.strerror})"
            )

    @contextmanager
    def keeping(
        self, iteration: int, model: GPT, optimizer: Optimizer, progress: dict
    ) -> Iterator[None]:
        """If the block fails before its optimizer step, save the state from before it, with this `progress`."""
        progress, steps = (
            progress | {"generators": generator_state(self.device)},
            optimizer_steps(optimizer),
        )
        try:
            yield
        except UnsafeState:
            raise
        except Exception:
            alone = not self.processes.rank and not self.processes.sharded  # others may be gone
            if iteration and optimizer_steps(optimizer) == steps and alone:
                try:
                    self.wait()
                    if self.saved != iteration:
                        self.write(iteration, model, optimizer, progress, last=True)
                    self.say(
                        f"saved after iteration {iteration - 1}, before the error below; --resume=auto goes on"
                    )
                except Exception as another:  # the first error is the one to raise
                    self.say(f"warning: {another}")
            raise


def not_finite(named: dict[str, torch.Tensor]) -> str | None:
    """{name: tensor} -> "embedding.weight has NaN or infinity", or None. One pass, one transfer a device, no copies."""
    by_device = {}
    for name, tensor in named.items():
        if tensor.numel() and tensor.is_floating_point():
            low, high = tensor.aminmax()  # NaN if any element is
            by_device.setdefault(low.device, []).append(
                (name, (low - low) + (high - high))
            )  # 0 if both are finite
    for pairs in by_device.values():
        sums = torch.stack([value.float() for _, value in pairs]).tolist()
        bad = [name for (name, _), value in zip(pairs, sums, strict=True) if value != 0]
        if bad:
            return f"{bad[0]} has NaN or infinity" + (
                f", and {len(bad) - 1} more tensors" if bad[1:] else ""
            )
    return None


def best_of(folder: Path, scores: dict[int, float]) -> Path | None:
    """The checkpoint with the best score, the newest of equals. scores: {iterations done: score}."""
    scored = [path for path in checkpoints(folder) if iteration_of(path) in scores]
    return max(scored, key=lambda path: (scores[iteration_of(path)], path.name), default=None)


def prune(folder: Path, done: int, limit: int, scores: dict[int, float]) -> None:
    """Of the checkpoints up to `done`, keep the newest `limit` and the best, and link `best` to that. Raises OSError.

    Checkpoints later than `done` are damaged ones that the run did not resume from; they are left alone.
    """
    paths = [path for path in checkpoints(folder) if iteration_of(path) <= done]
    if best := best_of(folder, {i: score for i, score in scores.items() if i <= done}):
        new = folder / ".tmp-best"
        with suppress(OSError):  # a file system without links
            new.unlink(missing_ok=True)
            new.symlink_to(best.name)
            os.replace(new, folder / "best")
    for old in paths[:-limit]:
        if old != best:
            shutil.rmtree(old)


def set_aside(folder: Path, last_step: int) -> str:
    """Rename checkpoints written after the step of iteration `last_step` to suspect-...: a resume does not take them.

    -> what --resume=auto goes on from now, and what was renamed, in words.
    """
    renamed = []
    for path in checkpoints(folder):
        if iteration_of(path) > last_step:
            new = path.rename(free_name(path.with_name(path.name.replace(PREFIX, "suspect-"))))
            renamed.append(f"{path.name} is now {new.name}")
    after = (
        f"; made after the last step that was taken, and set aside: {', '.join(renamed)}"
        if renamed
        else ""
    )
    return f"{newest_name(folder)}{after}"


def newest_name(folder: Path) -> str:
    found = checkpoints(folder)
    return str(found[-1]) if found else "the beginning, for there is no checkpoint"
