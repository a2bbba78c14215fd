"""Checkpoints on disk, without torch: find the newest undamaged one, read its state, write a new one.

    out/grpo_small/checkpoint-000040/
        model.safetensors       weights by parameter name; with LoRA only the adapters
        optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>; master.<name> if the optimizer keeps masters
        state.json              iteration, model shape, tokenizer, settings, generators, ...; with LoRA the base weights
        tokenizer.json, ...     if the model came with its own tokenizer
        manifest.json           SHA-256 of all the other files; written last

A checkpoint is written into a temporary folder, flushed to disk and renamed: a folder with the final name is complete.
If the disk damages a checkpoint later, its checksums differ: a note on stderr names it, and the checkpoint before it is
used. If they agree, the values are trusted. No pickle. Data order and the sampler's draws follow from seed and
iteration.

`find_run` compares all bytes of all files; for a plan, which needs no tensors, it skips the files of tensors. Left out:
tensors (loading.py); when to save (saver.py).
"""

import hashlib
import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import NamedTuple

from settings import PRETRAINED_LENGTH, GRPOSettings, SFTSettings
from snug.options import SnugError, described, did_you_mean, fields, find_path, note
from snug.options.progress import phase
from snug.pretrained.adapters import find_base
from snug.pretrained.hub import hub_name, local_folder
from snug.pretrained.shapes import is_pretrained, read_shape
from snug.pretrained.tensors import appearing, fingerprint, look_at_weights, write_json
from snug.tokenizer import Tokenizer, get_tokenizer

PREFIX = "checkpoint-"
# Files of tensors, which are large: those that will be read are compared with their checksums. A plan reads none.
WEIGHTS = ("model.safetensors",)
OF_A_RUN = (*WEIGHTS, "optimizer.safetensors")  # a resumed run reads both
OLDER = tomllib.loads(Path(__file__).with_name("older_runs.toml").read_text())
GONE, MOVED = OLDER["gone"], OLDER["moved"]


class Checkpoint(NamedTuple):
    """A checkpoint, or a Hugging Face folder."""

    path: Path
    state: dict  # state.json; for a Hugging Face folder what snug knows of it


def checkpoints(folder) -> list[Path]:
    """The checkpoints in a run's folder, oldest first; none if there is no such folder."""
    if not os.path.isdir(folder):  # False also for a name that is too long
        return []
    paths = [p for p in Path(folder).glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()]
    return sorted(paths, key=iteration_of)


def iteration_of(path):
    """checkpoint-000040 -> 40, the iterations done."""
    return int(path.name.removeprefix(PREFIX))


def newest(folder: str | Path, tensors: tuple = WEIGHTS):
    """A run's folder -> its newest undamaged checkpoint; a checkpoint's folder -> itself. Raises SnugError.

    stderr names the damaged checkpoints that are passed over.
    """
    folder = Path(folder)
    refuse_missing(folder)
    paths = checkpoints(folder)
    if folder.resolve().name.startswith(PREFIX):  # out/run/best is a link to one
        paths = [folder.resolve() if folder.is_symlink() else folder]
    if not paths:
        raise SnugError(f"{folder}: has no checkpoint; if it is a run, start it again")
    for path in reversed(paths):
        problem = damage(path, tensors)
        if not problem:
            return path
        if path != paths[0]:
            note(f"note: {problem}; the one before is used")
    raise SnugError(f"{problem}; {folder} has no undamaged checkpoint")


def refuse_missing(folder):
    """Raises SnugError if there is no such folder."""
    if not folder.is_dir():
        hint = did_you_mean(str(folder), map(str, folder.parent.glob("*/")))
        advice = "; train it first, or name a folder, or owner/name on the hub"
        raise SnugError(f"{folder}: there is no such run or model{hint or advice}")


def damage(path, tensors):
    """Compare a checkpoint's files, with only these files of tensors, with its manifest -> what is wrong, or None."""
    unread = {*OF_A_RUN} - {*tensors}
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, expected in manifest.items():
            file = path / name
            if name not in unread and sha256(file) != expected["sha256"]:
                return f"checkpoint {path}: {name} is not what was written"
    except Exception as error:
        return f"checkpoint {path}: cannot be read ({described(error)})"
    return None


def sha256(file) -> str:
    with open(file, "rb") as stream, phase(f"checking {file}"):
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_state(path) -> dict:
    """state.json of a checkpoint that `newest` has found."""
    state = json.loads((path / "state.json").read_text())
    settings = state["settings"]
    settings["task"] = MOVED.get(settings["task"], settings["task"])
    settings["tools"] = [MOVED.get(tool, tool) for tool in settings.get("tools", [])]
    settings.setdefault("assistant_turns", "last")  # of older SFT runs
    return state


def find_run(folder: str | Path, tensors: tuple = WEIGHTS) -> Checkpoint:
    """A run's `newest` checkpoint, or a Hugging Face folder whose tensors have the right names and shapes.

    A folder of adapters comes with its base, which has the shape; the tokenizer may be beside the adapters.
    A model on the hub is downloaded; with tensors=() perhaps without its weights. Raises SnugError.
    """
    if not folder:
        raise SnugError("name a run, such as out/grpo_small, or a model, such as Qwen/Qwen3-0.6B")
    found = find_path(folder)
    path = found if found.is_dir() else local_folder(folder, bool(tensors))
    if not is_pretrained(path):
        path = newest(path, tensors)
        return Checkpoint(path, read_state(path))
    weights = base, rank, *_ = find_base(path, bool(tensors))
    settings = GRPOSettings(task="", max_new_tokens=PRETRAINED_LENGTH, lora_rank=rank)
    state = {
        "iteration": 0,
        "model_config": read_shape(base),
        "weights": weights,
        "places": look_at_weights(base) if tensors else None,  # what read_weights takes, with `weights`
        "tokenizer": str(path if (path / "tokenizer.json").is_file() else base),
        "settings": vars(settings),
    }
    return Checkpoint(path, state)


def settings_of(checkpoint, goes_on=False) -> SFTSettings | GRPOSettings:
    """The run's settings. Options that are newer than the run have their defaults. Options that snug no longer has are
    ignored. If one of them had an effect, a note says so, and for a run that goes on SnugError is raised."""
    values = checkpoint.state["settings"]
    lost = {name: value for name, value in values.items() if value not in (None, GONE.get(name, value))}
    if lost and goes_on:
        raise SnugError(f"the run has options that are gone, {lost}: use the version that made it")
    if lost:
        note(f"note: {checkpoint.path} has options that are gone, ignored: {lost}")
    cls = GRPOSettings if "group_size" in values else SFTSettings
    known = fields(cls.with_task(values["task"], checkpoint.path))
    return cls(**{name: value for name, value in values.items() if name in known})


def class_of_runs(cls, folders):
    """-> cls with the options of the task of a run, or of the last run of two. Raises SnugError."""
    for folder in reversed(folders):
        run = find_run(folder, tensors=())
        if task := run.state["settings"]["task"]:
            return cls.with_task(task, run.path)
    return cls


def tokenizer_of(checkpoint) -> Tokenizer:
    """The run's tokenizer: by its name, or from the tokenizer.json beside the weights. Raises SnugError."""
    name = checkpoint.state["tokenizer"]
    return get_tokenizer(str(checkpoint.path) if name.startswith("tokenizer.json") else name)


def base_record(base) -> dict:
    """What state.json says about the base weights of a LoRA run, so that `base_of` can find them again."""
    return dict(path=hub_name(base.path), fingerprint=identity(base))


def base_of(checkpoint, init_from: str = "") -> Checkpoint:
    """Find the weights that a checkpoint's adapters belong to. Raises SnugError if they are missing, changed or
    damaged.

    Looks at their old place, also relative to folders above the run, or on the hub; for another init_from only there.
    """
    base = checkpoint.state["base"]
    place = find_path(base["path"], checkpoint.path)
    if init_from not in ("", checkpoint.state["settings"]["init_from"]):
        place = Path(init_from)
    if "@" in str(place) or place.exists():
        weights = find_run(place)
        if identity(weights) == base["fingerprint"]:
            return weights
    raise SnugError(
        f"checkpoint {checkpoint.path} has adapters for the weights in {base['path']}, which {place} does not have; "
        "put them back, or name their place: --resume=RUN --init_from=NEW"
    )


def identity(weights) -> str:
    """A fingerprint of the weights in a checkpoint or a Hugging Face folder; for a folder of adapters of both parts."""
    path = weights.path
    if not is_pretrained(path):
        return sha256(path / "manifest.json")
    adapters = sorted(path.glob("adapter_*.*"))
    return fingerprint(weights.state["weights"][0]) + "".join(map(sha256, adapters))


def write(folder: Path, state: dict, tensors: dict, files: dict[str, bytes]):
    """Write checkpoint-<iteration> into a run's folder, completely or not at all.

    tensors: {file name: {tensor name: tensor}}; files: the tokenizer's. Raises SnugError.
    """
    from safetensors.torch import save_file

    final = folder / f"{PREFIX}{state['iteration']:06d}"
    # If there is one, it is damaged: otherwise the run would have resumed from it.
    shutil.rmtree(final, ignore_errors=True)
    with appearing(final) as temporary:
        for name, named in tensors.items():
            save_file(named, temporary / name)
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        write_json(temporary / "state.json", state)
        seal(temporary)
    flush(folder)


def seal(folder):
    """Write the manifest and flush every file to disk."""
    files = sorted(file for file in folder.iterdir() if file.name != "manifest.json")
    manifest = {file.name: {"sha256": sha256(file)} for file in files}
    write_json(folder / "manifest.json", manifest)
    for file in [*folder.iterdir(), folder]:
        flush(file)


def flush(path):
    """Move a file's content, or a folder's names, from the page cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
