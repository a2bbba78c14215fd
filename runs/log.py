"""A run's folder: what happened, for people and for programs.

    settings.json   every option as it was resolved
    log.jsonl       one JSON object an iteration, a second one if an evaluation was repeated; NaN and infinity are null
    samples.jsonl   a group of completions of each iteration: rewards, advantages, and figures of each token
    log.txt         the console's lines, the error that ended the run, [MEM] lines: grep '^\\[MEM\\]' log.txt
    tensorboard/, wandb/    if report_to asks for them

The console shows a line every log_interval iterations and, in a terminal, a progress bar; without a bar the lines say
how much time is left. If nobody reads the console, the training waits (Ctrl-S), and if it is gone, it goes on. Threads
write to TensorBoard and W&B: if one raises or hangs, the training goes on. If the disk is full, the files' lines wait
in memory. What a run prints at its end is in ending.py. Left out: plots, which report.py makes.
"""

import errno
import json
import math
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from tqdm import tqdm

from options import SnugError, to_json, told
from settings import GRPOSettings, SFTSettings

IS_IT_BROKEN = """\
note: loss is 0 and ratio is 1: is it broken? No. Right after a rollout the policy is the sampler, so every ratio is 1.
      A group's advantages add up to 0, so over completions of equal length the loss does too (otherwise it is small and
      says little). The gradient is not 0: watch grad_norm and reward_mean."""

# What the console shows of a record.
CONSOLE = dict(
    reward_mean="  reward {:.3f}", reward_std=" ±{:.2f}", loss="  loss {:.4f}", kl="  kl {:.4f}"
)
CONSOLE |= dict(
    entropy="  entropy {:.3f}", grad_norm="  grad {:.2f}", completion_length_mean="  length {:.1f}"
)
CONSOLE |= dict(
    tokens_per_second="  {:,.0f} tok/s",
    mem_alloc_mb="  mem {:.0f}",
    mem_max_alloc_mb="  peak {:.0f} MiB",
)
CONSOLE |= dict(
    time_s="  {:.2f} s", dropped_steps="  dropped {}", skipped_steps="  steps with nothing to learn: {}"
)
CONSOLE |= dict(pass_at_1="  pass@1 {:.3f}", pass_at_1_sampled=" (sampled {:.3f})")
CONSOLE |= dict(eval_reward_mean="  eval reward {:.3f}", left_s="  left {}")


def console_line(record: dict, total: int) -> str:
    """`iter  12/60  reward 0.43 ±0.49  loss -0.0010 ...`"""
    hidden = {
        name for name, value in record.items() if value is None or name.endswith("_steps") and not value
    }
    if "left_s" in record:
        record = record | {"left_s": tqdm.format_interval(record["left_s"])}
    parts = [
        text.format(record[name]) for name, text in CONSOLE.items() if name in record.keys() - hidden
    ]
    place = (
        f"iter {record['iter']:>{len(str(total))}}/{total}" if "iter" in record else "before training"
    )
    return place + "".join(parts)


class RunLog:
    """The open files of a run's folder, the progress bar and the services. `iterations` drives the loop and the bar."""

    def __init__(self, settings: SFTSettings | GRPOSettings, title: str, start: int = 0):
        """title: "GRPO" or "SFT"; start: the first iteration; later lines of the .jsonl files are cut off.

        Raises SnugError if the folder cannot be written to.
        """
        folder, self.title, self.start, self.max_iters = (
            Path(settings.out_dir),
            title,
            start,
            settings.max_iters,
        )
        self.log_interval = settings.log_interval or max(1, settings.max_iters // 25)
        self.began, self.dropped_steps = (
            0.0,
            0,
        )  # began: when the second iteration did, as time.monotonic() has it
        self.not_shown = (
            {} if settings.reward_funcs else {"eval_reward_mean": None}
        )  # the task's: pass@1 says it
        try:
            for name in ("log.jsonl", "samples.jsonl"):
                keep_before(folder / name, start)
            # If the disk with log.txt is full, only the console can say so.
            names = ("log.jsonl", "samples.jsonl", "log.txt")
            self.files = {name: Lines(folder / name, self.show_line) for name in names}
            write_whole(folder / "settings.json", to_json(settings))
            before = [record for record in read_log(folder) if record["iter"] == start - 1]
            self.has_scores = bool(
                before and "eval_reward_mean" in before[0]
            )  # of the evaluation before `start`
        except OSError as error:
            raise SnugError(
                f"out_dir={settings.out_dir} cannot be written to: {error.strerror}"
            ) from None
        options = dict(
            unit="it", disable=None, leave=False, dynamic_ncols=True, desc=title, smoothing=0
        )
        self.bar = tqdm(total=self.max_iters, initial=start, **options)
        services = {
            name: partial(SERVICES[name], settings, title, start) for name in settings.report_to
        }
        self.services = [BackgroundWriter(name, make, self.say) for name, make in services.items()]

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, SnugError):
            self.memory([told(error)])
        for service in self.services:
            service.close()
        self.bar.close()
        for file in self.files.values():
            if lost := file.close():
                print(f"warning: {lost} lines of {file.path} are lost ({file.error})", file=sys.stderr)

    def iterations(self) -> Iterator[int]:
        """The numbers of the iterations; the bar moves after each."""
        for iteration in range(self.start, self.max_iters):
            yield iteration
            self.bar.update()

    def show(self, phase: str) -> None:
        """Name the current phase in the bar."""
        self.bar.set_postfix_str(phase)

    def say(self, text: str) -> None:
        """A line for log.txt and the console."""
        self.memory([text])
        self.show_line(text)

    def show_line(self, text: str) -> None:
        """A line for the console alone."""
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except OSError as error:  # its reader is gone, as in `| head`
            sys.stdout = open(os.devnull, "w")  # Python flushes it again at exit
            self.memory([f"warning: the console failed ({error.strerror}); going on without it"])

    def memory(self, lines: Iterable[str]) -> None:
        """Lines for log.txt alone."""
        for line in lines:
            self.files["log.txt"].write(line)

    def place(self, iteration: int) -> str:
        """`[GRPO step 000/079]`"""
        return f"[{self.title} step {iteration:03d}/{self.max_iters - 1:03d}]"

    def iteration(self, record: dict, samples: Iterable[dict] = ()) -> None:
        """Log one iteration: record (with "iter") to log.jsonl, console and services, samples to samples.jsonl."""
        record = finite(record)
        self.files["log.jsonl"].write(json.dumps(record, allow_nan=False))
        for sample in samples:
            self.files["samples.jsonl"].write(
                json.dumps(finite({"iter": record["iter"]} | sample), allow_nan=False)
            )
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        for service in self.services:
            service("log", numbers)
        if self.is_shown(record):
            self.scores(record | self.left(record["iter"] + 1))

    def scores(self, record: dict) -> None:
        """A console line for these figures of the log. Without "iter" they are of the model before training."""
        self.say(console_line(record | self.not_shown, self.max_iters))

    def is_shown(self, record: dict) -> bool:
        """Every log_interval iterations, the first and the last, and those with an evaluation or a dropped step."""
        done, dropped = record["iter"] + 1, record.get("dropped_steps", 0)
        before, self.dropped_steps = self.dropped_steps, dropped  # it counts those of the whole run
        ends = done in (self.start + 1, self.max_iters)
        return ends or done % self.log_interval == 0 or "eval_reward_mean" in record or dropped > before

    def left(self, done: int) -> dict:
        """-> {"left_s": seconds}, if the bar does not tell it. The first iteration, which is slower, does not count."""
        count, now = done - self.start - 1, time.monotonic()
        if count < 1:
            self.began = now
        if count < 1 or done == self.max_iters or not self.bar.disable:
            return {}
        return {"left_s": (now - self.began) / count * (self.max_iters - done)}


class NoLog(RunLog):
    """The same for a process that writes nothing: of several only rank 0 does. Also for a planner."""

    def __init__(self, settings: SFTSettings | GRPOSettings, title: str = "", start: int = 0):
        self.title, self.start, self.max_iters, self.has_scores = (
            title,
            start,
            settings.max_iters,
            False,
        )
        self.bar, self.services, self.files = tqdm(disable=True), [], {}

    def scores(self, record: dict) -> None:
        pass

    def show_line(self, text: str) -> None:
        pass

    def memory(self, lines: Iterable[str]) -> None:
        pass

    def iteration(self, record: dict, samples: Iterable[dict] = ()) -> None:
        pass


class Lines:
    """A file that grows by whole lines. Lines that cannot be written wait for the next `write` or `close`."""

    def __init__(self, path: Path, warn: Callable[[str], None]):
        self.path, self.warn = path, warn
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.waiting, self.error, self.lock = (
            [],
            None,
            threading.RLock(),
        )  # services' threads write warnings

    def write(self, line: str) -> None:
        with self.lock:
            self.waiting.append((line + "\n").encode(errors="replace"))
            self.flush()

    def flush(self) -> None:
        """One system call a line: kill -9 leaves all of it or nothing. A part that a full disk took is cut off."""
        try:
            while self.waiting:
                end = os.fstat(self.handle).st_size
                if os.write(self.handle, self.waiting[0]) < len(self.waiting[0]):
                    os.ftruncate(self.handle, end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.waiting.pop(0)
            self.error = None
        except OSError as error:
            if not self.error:
                self.warn(
                    f"warning: {self.path} cannot be written ({error.strerror}); its lines wait in memory"
                )
            self.error = error.strerror

    def close(self) -> int:
        """-> lines that could not be written. Later lines are lost."""
        with self.lock:
            self.flush()
            os.close(self.handle)
            self.handle = -1  # not a descriptor that another file may get
            return len(self.waiting)


def finite(record: dict) -> dict:
    """Replace NaN and infinity by None: they are not JSON."""
    return {
        name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()
    }


def keep_before(path: Path, start: int) -> None:
    """Cut a JSON-lines file back to the iterations before `start`, because a resumed run repeats the others."""
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in read_lines(path) if record["iter"] < start]
        write_whole(path, "".join(kept))


def write_whole(path: Path, text: str) -> None:
    """Write a file that nobody sees half written."""
    whole = path.with_suffix(".tmp")
    whole.write_text(text, encoding="utf-8")
    os.replace(whole, path)


def read_lines(path: Path) -> Iterator[dict]:
    """The objects of a JSON-lines file, up to a line that was cut off by a crash."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def read_log(folder: str | Path) -> list[dict]:
    """log.jsonl of a run's folder, a record an iteration.

    A second line of an iteration adds what the first one lacks: the scores of an evaluation that failed, and that the
    resumed run made up for.
    """
    return merged(read_lines(Path(folder) / "log.jsonl"))


def merged(lines: Iterable[dict]) -> list[dict]:
    records = {}
    for line in lines:
        records[line["iter"]] = line | records.get(line["iter"], {})
    return list(records.values())


def values_of(records: list[dict], name: str) -> list[tuple[int, float]]:
    """-> [(iteration, value)] of a figure, where there is one. A score before training has the iteration -1."""
    first = [(-1, records[0].get(f"before/{name}"))] if records else []
    return [
        (i, value)
        for i, value in first + [(r["iter"], r.get(name)) for r in records]
        if value is not None
    ]


class BackgroundWriter:
    """Calls an object's methods in a thread. If one raises, warn and skip the rest; if one hangs, MOST calls wait."""

    MOST, PATIENCE = 10_000, 10.0  # PATIENCE: seconds that `close` waits for the object

    def __init__(self, name: str, make: Callable[[], object], warn: Callable[[str], None]):
        """make: makes the object, in the thread, because importing and starting a service may take long."""
        self.name, self.make, self.warn, self.failed, self.lost = name, make, warn, False, 0
        self.queue = queue.Queue(self.MOST)
        self.thread = threading.Thread(
            target=self.work, daemon=True
        )  # a daemon must not delay the process's exit
        self.thread.start()

    def __call__(self, method: str, *arguments) -> None:
        try:
            if not self.failed:
                self.queue.put_nowait((method, arguments))
        except queue.Full:
            self.lost += 1

    def work(self) -> None:
        method = None
        try:
            target = self.make()
            while method != "close":
                method, arguments = self.queue.get()
                getattr(target, method)(*arguments)
        except BaseException as error:  # SystemExit too
            self.failed = True
            self.warn(
                f"warning: {self.name} failed ({type(error).__name__}: {error}); going on without it"
            )

    def close(self) -> None:
        """Close the object after the waiting calls; give up after PATIENCE seconds."""
        self("close")
        self.thread.join(self.PATIENCE)
        if self.thread.is_alive():
            self.warn(
                f"warning: {self.name} hangs; {self.queue.qsize() + self.lost} calls to it are lost"
            )


class TensorBoard:
    """Numbers as scalars in <run>/tensorboard."""

    def __init__(self, settings: SFTSettings | GRPOSettings, title: str, start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(Path(settings.out_dir) / "tensorboard", purge_step=start or None)
        self.close = self.writer.close

    def log(self, record: dict) -> None:
        for name, value in record.items():
            self.writer.add_scalar(name, value, record["iter"])
        self.writer.flush()


class WandB:
    """Numbers in a W&B run, continued on resume. W&B's environment variables (WANDB_PROJECT, WANDB_MODE) hold."""

    def __init__(self, settings: SFTSettings | GRPOSettings, title: str, start: int):
        import wandb

        folder = Path(settings.out_dir)
        id_file = folder / "wandb.txt"
        if not start or not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        names = dict(
            project=os.environ.get("WANDB_PROJECT", "snug"), id=id_file.read_text(), name=folder.name
        )
        names |= dict(job_type=title, dir=str(folder), config=vars(settings), resume="allow")
        self.run = wandb.init(**names, settings=wandb.Settings(console="off"))
        self.close = self.run.finish

    def log(self, record: dict) -> None:
        self.run.log(record, step=record["iter"])


SERVICES = {"tensorboard": TensorBoard, "wandb": WandB}
