"""A run's folder: what happened, for people and for programs.

    settings.json   every option as it was resolved, the number of parameters, where the run was started
    log.jsonl       one JSON object an iteration; NaN and infinity are null
    samples.jsonl   a group of completions of each iteration: rewards, advantages, and figures of each token
    log.txt         the console's lines, the error that ended the run, [MEM] lines: grep '^\\[MEM\\]' log.txt
    tensorboard/, wandb/    if report_to asks for them

The console shows a line for every iteration of GRPO, and about 25 of SFT. Between two lines snug/options/progress.py
shows a bar there, which log.txt does not get. If the console is gone, a file cannot be written or a
service fails, the log warns once and the training goes on. figures.toml says how people see each figure. Left out:
plots, which report.py makes.
"""

import json
import os
import sys
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from traceback import format_exception

from snug.options import SnugError, described, in_one_line, plain, started_in, told
from snug.options.progress import say

FIGURES = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())


def console_line(record: dict, total: int) -> str:
    """`iter  12/60  reward 0.430 (sd 0.49)  loss -0.0010 ...`"""
    line = "before training"
    if "iter" in record:
        line = f"iter {record['iter']:>{len(str(total))}}/{total}"
    means = [
        f"{name[7:]} {mean:.2f}"
        for name, mean in record.items()
        if name[:7] == "reward/" and mean is not None
    ]
    record |= dict(rewards=" ".join(means) or None)
    for name, text in FIGURES["console"].items():
        value = record.get(name)
        if value is not None and (value or not name.endswith(("_steps", "_errors"))):
            line += text.format(value)
    return line


class RunLog:
    """The open files of a run's folder and the services."""

    def __init__(self, settings, start: int = 0, **facts):
        """settings: SFTSettings or GRPOSettings.

        start: the first iteration; its lines and later ones are cut from the .jsonl files. facts: more entries of
        settings.json. Raises SnugError if the folder cannot be written to.
        """
        self.title, self.start, self.max_iters = settings.loop, start, settings.max_iters
        self.every = 1 if self.title == "GRPO" else max(1, settings.max_iters // 25)
        # Without reward_funcs the mean reward of an evaluation is pass@1.
        self.not_shown = {} if settings.reward_funcs else {"eval_reward_mean": None}
        self.files, self.warned = {}, set()
        folder = Path(settings.out_dir)
        with in_one_line(f"out_dir={settings.out_dir} cannot be written to"):
            for name in ("log.jsonl", "samples.jsonl"):
                # A resumed run repeats the iterations from `start` on.
                kept = [record for record in read_lines(folder / name) if record["iter"] < start]
                write_whole(folder / name, "".join(json.dumps(record) + "\n" for record in kept))
            for name in ("log.jsonl", "samples.jsonl", "log.txt"):
                # A line is written at once, in one piece.
                self.files[name] = open(
                    folder / name, "a", buffering=1, encoding="utf-8", errors="replace"
                )
            place = [*(started_in(folder) if start else ()), os.getcwd()][0]
            options = vars(settings) | facts | dict(started_in=str(place))
            write_whole(folder / "settings.json", json.dumps(options, indent=2) + "\n")
        self.services = {name: SERVICES[name](settings, start) for name in settings.report_to}
        self.call_services("send", None)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind, error, trace):
        if error:
            self.to_file(
                told(error) if isinstance(error, SnugError) else "".join(format_exception(error))
            )
        self.call_services("close")
        for file in self.files.values():
            with suppress(OSError):  # `append` has warned
                file.close()

    def say(self, text: str):
        """A line for log.txt and the console."""
        text = plain(text)
        self.to_file(text)
        self.show_line(text)

    def show_line(self, text: str):
        """A line for the console alone."""
        try:
            say(text)
        except (OSError, ValueError) as error:  # its reader is gone, as in `| head`; or it is closed
            sys.stdout = open(os.devnull, "w")  # Python flushes it again at exit
            self.to_file(f"warning: the console failed ({described(error)}); going on without it")

    def to_file(self, text: str):
        """Lines for log.txt alone."""
        self.append("log.txt", text)

    def append(self, name: str, line: str):
        """A line for a file of the folder. Where that fails, warn once and go on."""
        try:
            self.files[name].write(line + "\n")
        except OSError as error:
            if name not in self.warned:
                self.warned.add(name)
                self.show_line(f"warning: {name} cannot be written ({error.strerror}); lines are lost")

    def call_services(self, method: str, *arguments):
        """Call this method of each service, a generator such as `tensorboard`. A service that fails is not called
        again."""
        for name, service in list(self.services.items()):
            try:
                getattr(service, method)(*arguments)
            except (Exception, SystemExit) as error:
                del self.services[name]
                self.say(f"warning: {name} failed ({described(error)}); going on without it")

    def place(self, iteration: int) -> str:
        """`[GRPO step 000/079]`"""
        return f"[{self.title} step {iteration:03d}/{self.max_iters - 1:03d}]"

    def iteration(self, record: dict, samples: Iterable[dict] = ()):
        """Log one iteration: record (with "iter") to log.jsonl and services, samples to samples.jsonl.

        The console shows every iteration of GRPO, about 25 of SFT, the first, the last, and those with an evaluation.
        """
        record, done = finite(record), record["iter"] + 1
        self.append("log.jsonl", json.dumps(record))
        for sample in samples:
            self.append("samples.jsonl", json.dumps(finite({"iter": record["iter"]} | sample)))
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self.call_services("send", numbers)
        regular = done in (self.start + 1, self.max_iters) or done % self.every == 0
        if regular or record.keys() & {"eval_reward_mean", "eval_loss"}:
            self.scores(record)

    def scores(self, record: dict):
        """A console line for these figures of the log. Without "iter" they are about the model before training."""
        self.say(console_line(record | self.not_shown, self.max_iters))


class NoLog(RunLog):
    """The log of a process that writes nothing: a planner, and every process of a run but rank 0."""

    def __init__(self, settings, start: int = 0, **facts):
        self.title, self.start, self.max_iters = settings.loop, start, settings.max_iters
        self.services, self.files = {}, {}

    def ignore(self, *arguments):
        pass

    scores = show_line = to_file = iteration = ignore


def finite(record: dict) -> dict:
    """The record in a form for JSON: NaN and infinity become None, at any depth."""
    return json.loads(json.dumps(record, default=str), parse_constant=lambda name: None)


def write_whole(path: Path, text: str):
    """Write a file that nobody sees half written. Raises OSError."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[dict]:
    """The objects of a JSON-lines file, without a line that a crash or a full disk cut off; none if there is no
    file."""
    if not path.exists():
        return
    with open(path, encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)


def read_log(folder: str | Path) -> list[dict]:
    """log.jsonl of a run's folder: a record an iteration."""
    return list(read_lines(Path(folder) / "log.jsonl"))


def values_of(records: list[dict], name: str):
    """-> [(iteration, value)] of a figure, where there is one. A score before training has the iteration -1."""
    values = [(-1, record.get(f"before/{name}")) for record in records[:1]]
    values += [(record["iter"], record.get(name)) for record in records]
    return [(iteration, value) for iteration, value in values if value is not None]


def change(records: list[dict], name: str) -> str:
    """The first and the last value of a figure: "0.048 -> 1.000"; "0.048" if there is only one; "" if there is none."""
    values = [f"{value:.3f}" for _, value in values_of(records, name)]
    return " -> ".join(values[:1] + values[1:][-1:])


# Services are generators: the first `send` starts one, each later `send` gives it a record, and `close` ends it.


def tensorboard(settings, start: int):
    """Numbers as scalars in <run>/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(Path(settings.out_dir) / "tensorboard", purge_step=start or None) as writer:
        while record := (yield):
            for name, value in record.items():
                writer.add_scalar(name, value, record["iter"])
            writer.flush()


def wandb(settings, start: int, service="wandb"):
    """Numbers in a run of W&B or Trackio, continued on resume. Environment variables (WANDB_MODE) work."""
    module, folder = import_module(service), Path(settings.out_dir)
    id_file = folder / f"{service}.txt"
    if not start or not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    own = dict(name=f"{folder.name}-{id_file.read_text()}")  # Trackio knows a run by its name
    if service == "wandb":
        console = module.Settings(console="off")
        own = dict(name=folder.name, id=id_file.read_text(), dir=str(folder), settings=console)
    run = module.init(
        project=os.environ.get(f"{service.upper()}_PROJECT", "snug"),
        config=vars(settings),
        resume="allow",
        **own,
    )
    try:
        while record := (yield):
            run.log(record, step=record["iter"])
    finally:
        run.finish()


SERVICES = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": partial(wandb, service="trackio"),
}
