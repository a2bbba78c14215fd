"""A run from Python, for notebooks and scripts. grpo.train and train_sft.train call it.

    from snug import train

    def short(completions, **columns):
        return [1 - len(completion) / 50 for completion in completions]

    run = train("config/grpo_small.py", prompts=[{"prompt": "2+3=", "answer": "5"}], reward_funcs=[short], beta=0.0)
    run.log                                 # a dict an iteration
    run.sample("2+3=", n=4)                 # texts
    run.evaluate(num_samples=8)             # scores of held-out prompts

`train` does what the command does, with the same folder. At an interrupt (Ctrl-C) the run finishes its iteration, saves
and ends: train(resume=run.folder, reward_funcs=[short]) goes on. Left out: several processes. Tests:
tests/test_notebook.py.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path

from data.calls import name_of
from evaluate import main as evaluate
from evaluate import prepare_evaluation
from runs.loading import Run, load_run
from runs.log import read_log, write_whole
from runs.prepare import prepare
from sample import complete
from settings import EvaluateSettings, SampleSettings
from snug.options import SnugError, in_one_line, make_settings


def train(cls, main, config, prompts, reward_funcs, options):
    """-> FinishedRun. cls: GRPOSettings or SFTSettings. main(prepared) trains. The other arguments: see grpo.train."""
    functions = {}

    def name(value):
        """The name of a function or class in the settings."""
        if not callable(value):
            return value
        spec = f"{value.__module__}:{name_of(value)}"
        while functions.setdefault(spec, value) is not value:
            spec += "+"
        return spec

    if reward_funcs is not None:
        options["reward_funcs"] = [reward_funcs] if callable(reward_funcs) else reward_funcs
    for option, value in options.items():
        options[option] = list(map(name, value)) if isinstance(value, list | tuple) else name(value)
    if prompts is not None:
        options = dict(task="jsonl", test_file="") | options
        out_dir = make_settings(cls, config, options)[0].out_dir
        options["data_file"] = write_prompts(prompts, out_dir)
    try:
        prepared = prepare(*make_settings(cls, config, options), functions=functions)
        finished = main(prepared)
    except SnugError as error:
        # A notebook would keep the error's frames, and the model in them.
        raise error.with_traceback(None) from None
    except SystemExit:
        if not prepared.settings.probe:
            raise
        finished = False
    return FinishedRun(prepared.settings, functions, finished)


def write_prompts(prompts: list[dict], out_dir: str) -> str:
    """Write rows to a file beside out_dir, named after its content; a resumed run and evaluations read it."""
    text = ""
    for n, row in enumerate(prompts, 1):
        with in_one_line(f'prompts: row {n} must be {{"prompt": ...}}, of values that JSON can hold'):
            text += json.dumps(dict(row)) + "\n"
    file = Path(f"{out_dir}.prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl")
    with in_one_line(f"{file} cannot be written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    return str(file)


class FinishedRun:
    """A run's folder, its log and its newest checkpoint, which is loaded when it is needed."""

    def __init__(self, settings, functions, finished):
        """functions: {name in the settings: function or class}. finished: False if it was stopped."""
        self.settings, self.functions, self.finished = settings, functions, finished
        self.folder = settings.out_dir

    @property
    def log(self) -> list[dict]:
        return read_log(self.folder)

    @cached_property
    def loaded(self) -> Run:
        return load_run(self.folder, self.settings.device)

    def sample(self, prompt: str = "", n: int = 1, **options) -> list[str]:
        """n completions of a prompt, or of a held-out one. options: as for sample.py. Raises SnugError."""
        values = dict(prompt=prompt, num_samples=n) | options
        return complete(*make_settings(SampleSettings, "", values), self.loaded, self.functions)[1]

    def evaluate(self, **options) -> dict[str, float]:
        """Print the table of evaluate.py -> {score: value}. options: as for evaluate.py. Raises SnugError."""
        settings, given = make_settings(
            EvaluateSettings, "", dict(task=self.settings.task, samples_file="none") | options
        )
        prepared = prepare_evaluation(settings, given, self.folder, self.functions)
        return evaluate(settings, *prepared, self.loaded)[0]["scores"]
