"""What an evaluation asks and where its samples go, settled or refused before torch is imported.

The task is the run's, with the run's options unless the command gives others; or another task, with the defaults. For a
Hugging Face folder the command has to name a task. The run's own task is scored by the run's reward functions, and
these are imported: evaluate only runs that you trust. Tokenizer, precision, decode batch and stop string are the run's,
because they belong to the model. Left out: prompts too long for the model (evaluate.py). Tests: tests/test_evaluate.py.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from data import make_task
from data.rewards import Scoring
from options import SnugError, fields
from pretrained.shapes import is_pretrained
from runs.checkpoint import Checkpoint, find_run, settings_of, tokenizer_of
from runs.log import finite
from runs.prepare import refuse_contradictions, rewards_of
from settings import EvaluateSettings, GRPOSettings, RewardOptions, SFTSettings, TaskOptions


@dataclass
class Questions:
    settings: SFTSettings | GRPOSettings  # the run's, with the options of the task that is asked
    scoring: Scoring  # and the task
    rows: list[dict]  # of the task, one a prompt
    file: Path | None  # where the samples go
    checkpoint: Checkpoint | None = None  # whose answers are asked


def prepare_questions(settings: EvaluateSettings, given: set[str], folder: str | Path) -> Questions:
    """given: names of the options given; folder: of a run, a checkpoint or a Hugging Face model. Raises SnugError."""
    checkpoint = path, state = find_run(folder)
    tokenizer = tokenizer_of(path, state)
    refuse_contradictions(settings, given, {}, tokenizer.name, path)
    run = replace(settings_of(state), tokenizer=tokenizer.name)
    asked, rewards = settings_asked(settings, given, run, folder), rewards_asked(settings, given, run)
    task = make_task(asked)
    functions, weights = rewards_of(rewards, task)
    if not functions:
        missing = f"task={asked.task!r} of {folder}: its data_file has no column answer to score completions by"
        raise SnugError(f"{missing}; add it, or --reward_funcs=my_rewards:is_short")
    place = path if is_pretrained(path) else path.parent
    file = samples_file(settings.samples_file, place / f"evaluation-{asked.task}-test.jsonl")
    settings.num_prompts = min(settings.num_prompts, task.size("test") or settings.num_prompts)
    rows = task.prompts("test", range(settings.num_prompts))
    scoring = Scoring(task, functions, weights, rewards, asked.sequences_per_rollout)
    return Questions(asked, scoring, rows, file, checkpoint)


def settings_asked(
    settings: EvaluateSettings, given: set[str], run: SFTSettings | GRPOSettings, folder: str | Path
):
    """The run's settings with the task that the command asks for. Another task has no limits on lengths."""
    own = settings.task in ("run", run.task)
    if own and not run.task:
        raise SnugError(f"{folder} has no task of its own; name one, such as --task=countdown")
    changes = {} if own else asdict(TaskOptions()) | dict(task=settings.task, tokenizer=run.tokenizer)
    if not own and isinstance(run, GRPOSettings):
        changes |= dict(max_new_tokens=0, max_prompt_length=0)
    options = given & (fields(TaskOptions).keys() - {"task", "tokenizer"})
    changes |= {name: getattr(settings, name) for name in options}
    asked = replace(run, **changes)
    if own:
        refuse_training_data(asked, given, run, folder)
    return asked


def rewards_asked(
    settings: EvaluateSettings, given: set[str], run: SFTSettings | GRPOSettings
) -> RewardOptions:
    """The options of the reward that are given; others as the run has them, for its own task and its own functions."""
    own = settings.task in ("run", run.task) and "reward_funcs" not in given
    its, names = (
        run if own and isinstance(run, RewardOptions) else RewardOptions(),
        fields(RewardOptions),
    )
    rewards = RewardOptions(
        **{name: getattr(settings if name in given else its, name) for name in names}
    )
    rewards.check_rewards()
    return rewards


def refuse_training_data(asked, given: set[str], run, folder: str | Path):
    """Raises SnugError if the run was trained on the prompts to evaluate."""
    asked_file = asked.test_file or asked.data_file
    if run.test_file and asked_file and Path(asked_file).resolve() == Path(run.data_file).resolve():
        seen = f"{folder} was trained on all of data_file={run.data_file}"
        raise SnugError(f"{seen}; give a --test_file with other prompts")
    if run.test_file and "data_file" in given and "test_file" not in given:
        seen = (
            f"data_file={asked.data_file} is given, but the run's test_file={asked.test_file} is asked"
        )
        raise SnugError(f"{seen}; give --test_file too")


def samples_file(name: str, default: Path) -> Path | None:
    """--samples_file -> its path; None for "none". Raises SnugError now if it cannot be written, not after hours."""
    if name == "none":
        return None
    path = Path(name or default)
    advice = "name another, or --samples_file=none"
    if path.is_dir():
        raise SnugError(f"samples_file={path} is a folder; {advice}")
    try:
        temporary(path).touch()
        temporary(path).unlink()
    except OSError as error:
        raise SnugError(f"samples_file={path} cannot be written ({error.strerror}); {advice}") from None
    return path


def temporary(path: Path) -> Path:
    return path.with_name(f".tmp-{os.getpid()}-{path.name}")


def write_lines(path: Path, records: list[dict]):
    """Replace a file by dicts as JSON lines, whole or not at all. Raises SnugError."""
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
