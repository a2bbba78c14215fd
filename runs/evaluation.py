"""What evaluate.py evaluates, checked before torch is imported: a run or a Hugging Face model, with the options of the
command; or two such models."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryFile

from runs.checkpoint import Checkpoint, find_run, settings_of
from runs.prepare import prepare
from settings import GRPOSettings, RewardOptions, SFTSettings
from snug.options import SnugError, in_one_line, merge_options
from snug.pretrained.hub import SNAPSHOT
from snug.pretrained.shapes import is_pretrained

# An evaluation is a run that begins from `folder` and does not train.
UNTRAINED = dict(
    beta=0.0,
    teacher="",
    on_iteration="",
    lora_rank=0,
    base_dtype="",
    resume="never",
    max_iters=0,
)


def prepare_evaluation(
    options,
    given,
    folder,
    functions: Mapping[str, Callable] = {},
    source: Checkpoint | None = None,
):
    """-> (a Prepared with the command's options and the checkpoint as `origin`; the file for samples). Raises
    SnugError.

    given: names of the options that the user gave. folder: a run's, a checkpoint's or a Hugging Face model's.
    functions: as for `prepare`. Importing the run's reward functions runs their code: evaluate only runs that you
    trust. source: the run that gives task and options; default: the run in `folder`.
    """
    found = source or find_run(folder, tensors=())
    run = settings_of(found)
    settings = evaluation_settings(options, given, run)
    if not settings.task:
        raise SnugError(f"{folder} has no task of its own; name one, such as --task=addition")
    settings.check_rewards()
    settings.init_from = str(folder)
    settings.out_dir = f"{found.path}/evaluation"  # nothing is written there
    # If a run gives these two, they hold for whichever model is evaluated.
    chosen = given | {"task", "max_new_tokens"} if run.task else given
    prepared = prepare(settings, chosen, functions)
    prepared.settings.tokenizer = prepared.tokenizer.name
    path = prepared.origin.path
    place = path.parent
    if is_pretrained(path):  # a model's folder is not ours, nor is the hub's cache
        place = Path("out", Path(SNAPSHOT.sub(r"\2", os.path.abspath(path))).name)
    return prepared, samples_file(
        options, place / f"evaluation-{settings.task.rpartition(':')[2]}-test.jsonl"
    )


def prepare_pair(options, given, first, second):
    """Two models -> the Prepared of each. Both get the task and the options of the second model if it is a run, else
    those of the first. Raises SnugError."""
    if options.samples_file:
        raise SnugError("samples_file needs one model, not two; leave it out")
    options = replace(options, samples_file="none")
    source = find_run(second, tensors=())
    if not settings_of(source).task:
        source = find_run(first, tensors=())
    return [prepare_evaluation(options, given, folder, source=source)[0] for folder in (first, second)]


def evaluation_settings(options, given, run: SFTSettings | GRPOSettings):
    """The run's settings with the options that are given. Another task begins with the defaults of its options.

    If reward functions are given, the run's other reward options do not apply. -> GRPOSettings, also for an SFT run.
    Raises SnugError if the run has a test_file and the user gives another data_file, but no test_file.
    """
    task, changes = options.task or run.task, {}
    if task != run.task:
        new = GRPOSettings(task=task)
        changes = {name: getattr(new, name) for name in new.of_task()} | dict(max_prompt_length=0)
        changes["max_new_tokens"] = 0 if run.task else new.max_new_tokens  # of a Hugging Face model
    elif getattr(run, "test_file", "") and "data_file" in given and "test_file" not in given:
        raise SnugError(
            f"data_file={options.data_file}: the run trained on all of its file; give --test_file"
        )
    if task != run.task or "reward_funcs" in given:
        changes |= asdict(RewardOptions())
    changes |= UNTRAINED | dict(task=task, eval_prompts=options.num_prompts)
    return merge_options(GRPOSettings, run, options, given - {"task"}, **changes)


def samples_file(options, default: Path) -> Path | None:
    """Where the samples go; None for --samples_file=none. Raises SnugError if nothing can be written there."""
    if options.samples_file == "none":
        return None
    file = Path(options.samples_file or default)
    with in_one_line(f"samples_file={file} cannot be written; name another, or --samples_file=none"):
        if file.is_dir():
            raise SnugError("it is a folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(buffering=0, dir=file.parent) as trial:  # before hours of sampling
            trial.write(b" ")
    return file
