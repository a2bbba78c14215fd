"""What an evaluation asks, and where its file goes: settled, or refused, before torch is imported.

The task is the run's, with the run's options where the command gives no other; or another task, with the defaults. A Hugging Face
folder has no task of its own, so that one has to be named. The tokenizer, the precision, the decode batch and the stop string are the
run's always: they are the model's.

Left out: prompts that do not fit into the model, which evaluate.py sees when it has encoded them.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from data import make_task
from data.task import Task
from options import SnugError, fields
from pretrained.shapes import is_pretrained
from runs.checkpoint import find_run, settings_of, tokenizer_of
from runs.log import finite
from runs.prepare import refuse_contradictions
from settings import TaskOptions, check_common


@dataclass
class Exam:
    settings: SimpleNamespace  # the run's, with the task that is asked; max_new_tokens 0: the task's longest answer
    task: Task
    rows: list  # of the task, one a prompt
    file: Path | None  # where the samples go


def prepare_exam(settings, given, folder):
    """EvaluateSettings, the names of those the user gave, and a run's folder, checkpoint or Hugging Face model -> Exam. Raises SnugError."""
    path, state = find_run(folder)
    tokenizer = tokenizer_of(path, state)
    refuse_contradictions(settings, given, {}, tokenizer.name, path)
    asked = settings_asked(settings, given, settings_of(state), folder)
    asked.tokenizer = tokenizer.name
    task = make_task(asked)
    if not task.scored:
        raise SnugError(
            f"task={asked.task!r} of {folder} cannot be scored: its data_file has no column answer to score completions by"
        )
    place = path if is_pretrained(path) else path.parent
    file = file_for(settings.samples_file, place / f"evaluation-{asked.task}-{asked.eval_split}.jsonl")
    return Exam(asked, task, task.prompts(asked.eval_split, range(settings.num_prompts)), file)


def settings_asked(settings, given, run, folder):
    """`run`, a run's settings, with the task that `settings` ask for; max_new_tokens and max_prompt_length of a GRPO run, or 0. Raises SnugError."""
    own = settings.task in ("run", run.task)
    if own and not run.task:
        raise SnugError(f"{folder} is no run with a task of its own; name one, such as --task=countdown")
    options = fields(TaskOptions).keys() - {"task", "eval_split", "tokenizer"}
    asked = SimpleNamespace(**{"max_new_tokens": 0, "max_prompt_length": 0} | vars(run) | {"report_to": []})
    if not own:
        vars(asked).update(asdict(TaskOptions()), task=settings.task, max_new_tokens=0, max_prompt_length=0)
    vars(asked).update({name: getattr(settings, name) for name in options & given})
    asked.max_new_tokens = settings.max_new_tokens or asked.max_new_tokens
    if settings.eval_split != "run":
        asked.eval_split = settings.eval_split
    if own:
        refuse_what_was_trained_on(asked, given, run, folder)
    if options & given:
        check_common(asked)
    return asked


def refuse_what_was_trained_on(asked, given, run, folder):
    if asked.eval_split == "tune" != run.eval_split:
        raise SnugError(
            f"{folder} was trained on the prompts of the tune split; only runs with eval_split=tune leave them out"
        )
    learned = {Path(name).resolve() for name in [run.data_file] if name and run.test_file}
    if learned & {Path(name).resolve() for name in [asked.test_file or asked.data_file] if name}:
        raise SnugError(
            f"{folder} was trained on all of data_file={run.data_file}; without a test_file nothing of it is held out"
        )
    if run.test_file and "data_file" in given and "test_file" not in given:
        raise SnugError(
            f"data_file={asked.data_file} is given, but what is asked is the run's test_file={asked.test_file}; give --test_file too"
        )


# The file that is left


def file_for(name, default):
    """--samples_file -> Path, or None. It is tried whether a file can be made there, so that this is known before anything is sampled."""
    if name == "none":
        return None
    path = Path(name or default)
    try:
        if path.exists() and not path.is_file():
            raise SnugError(f"samples_file={path} is there and is not a file; name another, or --samples_file=none")
        with open(temporary(path), "w"):
            pass
        temporary(path).unlink()
    except OSError as error:
        raise SnugError(
            f"samples_file={path} cannot be written ({error.strerror}); name another, or --samples_file=none"
        ) from None
    return path


def temporary(path):
    return path.with_name(f".tmp-{os.getpid()}-{path.name}")


def write_lines(path, records):
    """Dicts as JSON lines, whole or not at all, in place of what was there. Raises SnugError."""
    try:
        with open(temporary(path), "w") as file:
            file.writelines(json.dumps(finite(record), default=str) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary(path), path)
    except OSError as error:
        raise SnugError(f"{path} cannot be written ({error.strerror})") from None
    finally:
        temporary(path).unlink(missing_ok=True)
