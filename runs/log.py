"""A run's folder: what happened, for people and for programs.

    settings.json   every option as it was resolved
    log.jsonl       one JSON object an iteration; what is not finite is null
    samples.jsonl   a few completions of each iteration with their rewards
    log.txt         the console's lines and the [MEM] lines: grep '^\\[MEM\\]' log.txt
    tensorboard/, wandb/    where report_to asks for them

The console gets one line an iteration and, in a terminal, a progress bar below them. Console, TensorBoard and W&B are spoken to by
threads of their own (`Aside`): one that raises or hangs is left behind, and the training goes on. The files are written
line by line, whole; what a full disk refuses waits in memory.

Left out: plots (report.py); samples as tables in W&B.
"""

import io
import json
import math
import os
import queue
import sys
import threading
import uuid
from pathlib import Path

from tqdm import tqdm

from options import SnugError, to_json

IS_IT_BROKEN = (
    "note: loss is 0 and ratio is 1: is it broken? No. Right after a rollout the policy is the sampler, so every ratio is 1, and a\n"
    "      group's advantages add up to 0, so over completions of equal length the loss does too (over others it is small and says\n"
    "      little). The gradient is not 0: watch grad_norm and reward_mean."
)


def prepare_folder(settings):
    """Make the run's folder. What an earlier run left there is moved aside, never overwritten -> where to, or None."""
    folder, moved = Path(settings.out_dir), None
    if folder.exists() and not folder.is_dir():
        raise SnugError(f"out_dir={settings.out_dir} is a file; name a folder")
    resumes = settings.resume == "auto" and any(folder.glob("checkpoint-*"))
    if (folder / "log.jsonl").exists() and not resumes:
        number = 1
        while (moved := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(moved)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnugError(f"out_dir={settings.out_dir} cannot be made: {error.strerror}") from None
    return moved


class Lines:
    """A file that only ever grows by whole lines. A line that cannot be written waits, in order, for the next attempt."""

    MOST = 100_000  # lines that wait; then the oldest are given up

    def __init__(self, path):
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.waiting, self.error, self.lock = [], None, threading.Lock()

    def write(self, line):
        with self.lock:
            self.waiting = [*self.waiting[1 - self.MOST :], line] if self.waiting else [line]
            self.flush()

    def flush(self):
        try:
            while self.waiting:
                self.append((self.waiting[0] + "\n").encode(errors="replace"))
                self.waiting.pop(0)
            self.error = None
        except OSError as error:
            self.error = error.strerror

    def append(self, data):
        end = os.fstat(self.handle).st_size
        written = os.write(
            self.handle, data
        )  # in one call: kill -9 leaves all of it, or at worst a part, which a resumed run cuts off
        if written < len(data):
            os.ftruncate(self.handle, end)
            raise OSError(28, "No space left on device")

    def close(self):
        """-> lines that could not be written to the end."""
        with self.lock:
            self.flush()
            os.close(self.handle)
            self.handle = -1  # of no file: what comes now waits for ever
            return len(self.waiting)


class Aside:
    """Calls that may raise or never come back, made one after the other in a thread of their own.

    After an exception none is made any more, and `tell` is told once. While one hangs, up to MOST wait; later ones are lost.
    """

    MOST, PATIENCE = 10_000, 10.0  # PATIENCE: seconds that `close` waits

    def __init__(self, name, tell):
        self.name, self.tell, self.broken, self.lost = name, tell, False, 0
        self.queue = queue.Queue(self.MOST)
        self.thread = threading.Thread(
            target=self.work, daemon=True
        )  # of which the end of the process is not kept waiting
        self.thread.start()

    def __call__(self, function, *arguments):
        if not self.broken:
            try:
                self.queue.put_nowait((function, arguments))
            except queue.Full:
                self.lost += 1

    def work(self):
        for function, arguments in iter(self.queue.get, None):
            try:
                if not self.broken:
                    function(*arguments)
            except BaseException as error:  # SystemExit too: this thread must go on taking from the queue
                self.broken = True
                self.tell(f"warning: {self.name} failed ({type(error).__name__}: {error}); going on without it")

    def close(self):
        """Wait for what is waiting, but not for ever."""
        try:
            self.queue.put(None, timeout=self.PATIENCE)
            self.thread.join(self.PATIENCE)
        except queue.Full:
            pass
        if self.thread.is_alive():
            self.tell(f"warning: {self.name} hangs; {self.queue.qsize() + self.lost} calls to it are lost")


class Console:
    """stdout, and the bar on stderr; called in a thread of its own. Unbuffered, so that no exit waits for a reader that is gone."""

    def __init__(self, title, start, total):
        self.out, self.err = (
            stream if stream not in ORIGINAL else unbuffered(stream) for stream in (sys.stdout, sys.stderr)
        )
        if self.out.isatty() and self.err.isatty():
            self.out = self.err  # tqdm takes its bar away while it writes to the bar's own stream
        options = dict(unit="it", disable=None, leave=False, dynamic_ncols=True, desc=title, file=self.err)
        self.bar = tqdm(total=total, initial=start, **options)

    def say(self, text):
        tqdm.write(text, file=self.out)
        self.out.flush()

    def show(self, phase):
        self.bar.set_postfix_str(phase)

    def step(self):
        self.bar.update()

    def close(self):
        self.bar.close()


ORIGINAL = (sys.__stdout__, sys.__stderr__)


def unbuffered(stream):
    stream.flush()
    raw = open(stream.fileno(), "wb", buffering=0, closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, "replace", write_through=True)


class TensorBoard:
    """Numbers as scalars in <run>/tensorboard."""

    def __init__(self, settings, title, start):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(Path(settings.out_dir) / "tensorboard", purge_step=start or None)

    def log(self, record):
        for name, value in record.items():
            self.writer.add_scalar(name, value, record["iter"])
        self.writer.flush()

    def close(self):
        self.writer.close()


class WandB:
    """Numbers in a W&B run, which a resumed run goes on with; its own environment variables (WANDB_PROJECT, WANDB_MODE) hold."""

    def __init__(self, settings, title, start):
        import wandb

        folder = Path(settings.out_dir)
        file = folder / "wandb.txt"  # the run's id there
        if not start or not file.exists():
            file.write_text(uuid.uuid4().hex[:12])
        options = dict(
            project=os.environ.get("WANDB_PROJECT", "snug"),
            name=folder.name,
            job_type=title,
            dir=str(folder),
            config=vars(settings),
        )
        self.run = wandb.init(id=file.read_text(), resume="allow", settings=wandb.Settings(console="off"), **options)

    def log(self, record):
        self.run.log(record, step=record["iter"])

    def close(self):
        self.run.finish()


SERVICES = {"tensorboard": TensorBoard, "wandb": WandB}


class RunLog:
    """The open files of a run's folder, the console and the services. A context manager; `iterations` drives the loop and the bar."""

    def __init__(self, settings, title, start=0):
        """title: "GRPO" or "SFT"; start: the first iteration, to which the .jsonl files of a resumed run are cut back. Raises SnugError."""
        self.folder, self.title, self.settings, self.start = Path(settings.out_dir), title, settings, start
        try:
            for name in ("log.jsonl", "samples.jsonl"):
                keep_before(self.folder / name, start)
            self.files = {name: Lines(self.folder / name) for name in ("log.jsonl", "samples.jsonl", "log.txt")}
            (self.folder / "settings.json").write_text(to_json(settings))
        except OSError as error:
            raise SnugError(f"out_dir={settings.out_dir} cannot be written to: {error.strerror}") from None
        self.console, self.aside = Console(title, start, settings.max_iters), Aside("the console", self.note)
        self.services, self.refused = {}, set()
        for name in settings.report_to:
            self.services[name] = {}
            self.services[name]["aside"] = aside = Aside(name, self.say)
            aside(self.begin, name)

    def begin(self, name):
        """In the service's thread: importing and starting it may take long."""
        self.services[name]["service"] = SERVICES[name](self.settings, self.title, self.start)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for service in self.services.values():
            service["aside"](lambda service=service: service["service"].close())
            service["aside"].close()
        self.tell_refusals()
        self.aside(self.console.close)
        self.aside.close()
        for name, file in self.files.items():
            if lost := file.close():
                print(f"warning: {lost} lines of {self.folder / name} are lost ({file.error})", file=sys.stderr)

    def iterations(self):
        """The numbers of the iterations, with a progress bar where the console is a terminal."""
        for iteration in range(self.start, self.settings.max_iters):
            yield iteration
            self.aside(self.console.step)

    def show(self, phase):
        """What is going on, in the bar."""
        self.aside(self.console.show, phase)

    def say(self, text):
        """A line for log.txt and the console."""
        self.note(text)
        self.aside(self.console.say, text)

    def note(self, text):
        """A line for log.txt alone."""
        self.files["log.txt"].write(text)

    def memory(self, lines):
        for line in lines:
            self.note(line)

    def place(self, iteration):
        """`[GRPO step 000/079]`"""
        return f"[{self.title} step {iteration:03d}/{self.settings.max_iters - 1:03d}]"

    def iteration(self, record, samples=()):
        """One iteration's record (a dict with "iter") into log.jsonl, its samples into samples.jsonl, a line to the console."""
        record = finite(record)
        self.files["log.jsonl"].write(json.dumps(record, allow_nan=False))
        for sample in samples:
            self.files["samples.jsonl"].write(json.dumps(finite({"iter": record["iter"]} | sample), allow_nan=False))
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        for service in self.services.values():
            service["aside"](lambda service=service: service["service"].log(numbers))
        self.say(console_line(record, self.settings.max_iters))
        self.tell_refusals()

    def tell_refusals(self):
        """Of a full disk, say, once: on the console, because log.txt is on it too."""
        for name, file in self.files.items():
            if file.error and name not in self.refused:
                text = f"warning: {self.folder / name} cannot be written ({file.error}); its lines wait in memory"
                self.aside(self.console.say, text)
        self.refused = {name for name, file in self.files.items() if file.error}


def finite(record):
    """NaN and infinity are no JSON."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


SHOWN = (  # name in the record, what stands before and after it, format
    ("reward_mean", "reward ", "", ".3f"),
    ("reward_std", "±", "", ".2f"),
    ("loss", "loss ", "", ".4f"),
    ("kl", "kl ", "", ".4f"),
    ("entropy", "entropy ", "", ".3f"),
    ("grad_norm", "grad ", "", ".2f"),
    ("completion_length_mean", "length ", "", ".1f"),
    ("tokens_per_second", "", " tok/s", ",.0f"),
    ("mem_alloc_mb", "mem ", "", ".0f"),
    ("mem_max_alloc_mb", "peak ", " MiB", ".0f"),
    ("time_s", "", " s", ".2f"),
    ("dropped_steps", "dropped ", "", "d"),
    ("skipped_steps", "nothing to learn in ", " steps", "d"),
    ("pass_at_1", "pass@1 ", "", ".3f"),
    ("pass_at_1_sampled", "(sampled ", ")", ".3f"),
)


def console_line(record, total):
    """`iter  12/60  reward 0.43 ±0.49  loss -0.0010 ...`"""
    parts = [
        f"{before}{record[name]:{form}}{after}" for name, before, after, form in SHOWN if worth_showing(record, name)
    ]
    return f"iter {record['iter']:>{len(str(total))}}/{total}  " + "  ".join(parts).replace("  ±", " ±").replace(
        "  (", " ("
    )


def worth_showing(record, name):
    return record.get(name) is not None and (name not in ("dropped_steps", "skipped_steps") or record[name])


def keep_before(path, start):
    """Cut a JSON-lines file back to the iterations before `start`: what a resumed run does again is not there twice."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["iter"] < start:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            break  # cut off while it was written
    whole = path.with_suffix(".tmp")
    whole.write_text("".join(line + "\n" for line in kept))
    os.replace(whole, path)


def read_log(folder):
    """log.jsonl of a run's folder -> list of dicts; a last line that was cut off is left out."""
    records = []
    for line in (Path(folder) / "log.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
