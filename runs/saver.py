"""When a run's state is written, beside the training, and which checkpoints are kept.

    saver = Saver(settings, tokenizer, device, say)
    with saver.keeping(iteration, model, optimizer, guard):       # should the iteration fail: what was reached before it is saved
        ...
    saver.after(iteration + 1, model, optimizer, guard, scores)   # every save_interval, at a new best evaluation, and at the end

A save looks whether the state is finite and copies it to the host; then the training goes on, and a thread writes the copy. Where
the host has no room for one (or memory_budget_gb is for a CPU), the training waits for the writing; on CUDA safetensors
then holds a file's tensors on the host while it writes them. A save that fails is reported and tried again after 1, 2, 4,
... 64 iterations; only the last one ends the run with an error.

Kept are the newest save_total_limit checkpoints and the one with the best pass@1, to which out/<run>/best is a link. What is
not finite is never saved; and as finite weights can still be ruined ones, older checkpoints are deleted only when an
iteration from the new one was finite, or at the run's end.
"""

import json
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import torch

from memory.host import available_on_host, spare_copy
from memory.ledger import MIB
from memory.meter import tensor_bytes
from options import SnugError
from runs.checkpoint import PREFIX, checkpoints, generator_state, optimizer_steps, state_of, tensors_of, write


class Saver:
    def __init__(self, settings, tokenizer, device, say, start=None, data=""):
        """start: iterations done by the checkpoint that the run was resumed from; data: the task's fingerprint."""
        self.settings, self.tokenizer, self.device, self.say, self.data = settings, tokenizer, device, say, data
        self.folder = Path(settings.out_dir)
        self.best = self.best_saved = max((score_of(path) for path in checkpoints(self.folder)), default=-1.0)
        self.saved = self.pruned = (
            start  # iterations done by the newest checkpoint; and by the one after which older ones were deleted
        )
        self.due = False  # where its iteration's step was dropped, a save waits for the next that is taken
        self.thread = self.copy = self.failed = None
        self.failures = self.retry = 0  # in a row; after how many iterations to try again
        for left in self.folder.glob(f".tmp-{PREFIX}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    def after(self, done, model, optimizer, progress):
        """Save after `done` iterations, where it is time. Raises SnugError where the last save fails."""
        s, score, last = self.settings, progress["scores"].get("pass_at_1", -1.0), done == self.settings.max_iters
        self.due = self.due or score > self.best or bool(s.save_interval and done % s.save_interval == 0)
        self.poll()
        dropped = progress["health"]["dropped_in_a_row"]  # then no step has been taken since
        now = last or not dropped and (done >= self.retry if self.failed else self.due)
        if now:
            self.wait()
            self.poll()
        if not dropped and self.thread is None and self.saved != self.pruned:
            self.prune()
        if now:
            self.due, self.best = False, max(self.best, score)
            self.save(done, model, optimizer, progress, last)
            if last and not dropped:
                self.prune()

    def save(self, done, model, optimizer, progress, last=False, generators=None):
        """last: wait until it is written, and raise SnugError where it cannot be. generators: as they were, if not as they are."""
        self.wait()
        if self.saved == done:
            return
        generators = generators or generator_state(self.device)
        state = (
            state_of(done, model, optimizer, self.settings, self.tokenizer, generators)
            | progress
            | dict(data=self.data)
        )
        tensors = tensors_of(model, optimizer)
        bad = not_finite({name: tensor for named in tensors.values() for name, tensor in named.items()})
        if bad:
            self.failed = SnugError(f"{PREFIX}{done:06d} is not written: {bad}")
            self.failed.done = done
        else:
            self.copy = None if last else self.copied(tensors)
            self.thread = threading.Thread(target=self.publish, args=(state, self.copy or tensors), daemon=True)
            self.thread.start()
            if self.copy is None:
                self.wait()
        self.poll(last)

    def copied(self, tensors):
        """A copy of everything in the host's memory; None where there is no room to spare."""
        size = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
        planned = (
            self.settings.memory_budget_gb and self.device.type == "cpu"
        )  # then the budget is the host's, without a copy
        if planned or available_on_host() <= 2 * size:
            return None
        try:
            return {
                file: {name: spare_copy(tensor) for name, tensor in named.items()} for file, named in tensors.items()
            }
        except (RuntimeError, MemoryError):  # there was none after all
            return None

    def publish(self, state, tensors):
        """In the thread."""
        try:
            write(self.folder, state, tensors, self.tokenizer.files)
            self.saved, self.failed = state["iteration"], None
            self.best_saved = max(self.best_saved, state["scores"].get("pass_at_1", -1.0))
        except Exception as error:  # whatever it is, it is told where the training can hear it
            cause = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2] or type(error).__name__
            self.failed = SnugError(f"{PREFIX}{state['iteration']:06d} cannot be written into {self.folder} ({cause})")
            self.failed.done = state["iteration"]

    def stats(self):
        """For the log: the host memory of a copy that is being written."""
        return (
            {"mem_save_mb": round(tensor_bytes(t for named in self.copy.values() for t in named.values()) / MIB, 3)}
            if self.copy
            else {}
        )

    def prune(self):
        """Delete what need not be kept. A disk that refuses is told, and asked again after the next save."""
        self.pruned = self.saved
        try:
            prune(self.folder, self.saved, self.settings.save_total_limit)
        except OSError as error:
            self.say(f"warning: older checkpoints in {self.folder} cannot be deleted ({error.strerror})")

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = self.copy = None

    def poll(self, last=False):
        """Where the writing is over: let go of the copy; say that it failed, or raise, if it was the last."""
        if self.thread is not None and self.thread.is_alive():
            return
        self.wait()
        if self.failed is None:
            self.failures = 0
            return
        if last:
            raise SnugError(
                f"{self.failed}; the newest checkpoint is {newest_name(self.folder)}; make room, then --resume=auto"
            )
        if not hasattr(self.failed, "told"):
            self.failed.told, self.failures, self.best = True, self.failures + 1, self.best_saved
            self.retry = self.failed.done + 2 ** min(self.failures - 1, 6)
            self.say(f"warning: {self.failed}; the training goes on, the next try is after iteration {self.retry - 1}")

    @contextmanager
    def keeping(self, iteration, model, optimizer, progress):
        """Where what runs inside fails before it has taken an optimizer step, the state from before it is saved: nothing is lost."""
        generators, steps = generator_state(self.device), optimizer_steps(optimizer)
        try:
            yield
        except Exception as error:
            if iteration and optimizer_steps(optimizer) == steps and not getattr(error, "state_is_bad", False):
                try:
                    self.save(iteration, model, optimizer, progress, last=True, generators=generators)
                    self.say(
                        f"saved after iteration {iteration - 1}, before the error that follows; --resume=auto goes on from there"
                    )
                except Exception as another:  # the first is the one to report
                    self.say(f"warning: {another}")
            raise


def not_finite(named):
    """{name: tensor} -> "embedding.weight has NaN or infinity", or None. One pass and one look, without a copy."""
    names = [name for name, tensor in named.items() if tensor.numel() and tensor.is_floating_point()]
    ends = {}  # by device: what is on the host is not moved
    for name in names:
        low, high = named[name].aminmax()  # of which a NaN makes NaN
        ends.setdefault(named[name].device, []).append((name, (low - low) + (high - high)))
    for pairs in ends.values():
        sums = torch.stack([value.float() for _, value in pairs]).tolist()
        bad = [name for (name, _), value in zip(pairs, sums, strict=True) if value != 0]
        if bad:
            return f"{bad[0]} has NaN or infinity" + (f", and {len(bad) - 1} more tensors" if bad[1:] else "")
    return None


def score_of(path):
    """pass@1 of the evaluation when a checkpoint was written, or -1."""
    try:
        return float(json.loads((path / "state.json").read_text())["scores"]["pass_at_1"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1.0


def prune(folder, done, limit):
    """Delete the checkpoints that are neither among the newest `limit` up to `done` nor the best, to which best is made a link.

    Later ones than `done` are of a run that went on from an earlier one, because they are damaged.
    """
    paths = [p for p in checkpoints(folder) if int(p.name[len(PREFIX) :]) <= done]
    best = max(paths, key=lambda path: (score_of(path), path.name), default=None)
    if best is not None and score_of(best) >= 0:
        point(folder / "best", best.name)
    else:
        best = None
    for old in paths[:-limit]:
        if old != best:
            shutil.rmtree(old)


def point(link, name):
    """A link beside what it names; a file system that knows no links goes without."""
    new = link.with_name(".tmp-best")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(name)
        os.replace(new, link)
    except OSError:
        pass


def set_aside(folder, last_step):
    """Checkpoints that have the result of the step of iteration `last_step`, after which none could be taken, are renamed suspect-...

    -> what --resume=auto goes on from now, and what was renamed, in words. Raises nothing: who asks is about to stop.
    """
    suspects = [path for path in checkpoints(folder) if int(path.name[len(PREFIX) :]) > last_step]
    renamed = []
    for path in suspects:
        name, number = path.name.replace(PREFIX, "suspect-"), 1
        while path.with_name(name).exists():  # from an earlier time
            name, number = f"{path.name.replace(PREFIX, 'suspect-')}.{number}", number + 1
        try:
            path.rename(path.with_name(name))
            renamed.append(f"{path.name} is now {name}")
        except OSError as error:
            renamed.append(f"{path.name} should be, and cannot be renamed ({error.strerror}): delete it")
    if not renamed:
        return f"{newest_name(folder)}"
    return f"{newest_name(folder)}; made after the last step that was taken, and set aside: {', '.join(renamed)}"


def newest_name(folder):
    found = checkpoints(folder)
    return found[-1] if found else "the beginning, for there is no checkpoint"
