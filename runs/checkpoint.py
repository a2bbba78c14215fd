"""Checkpoints on disk, without torch: find the newest whole one, verify it, read its state, write a new one.

    out/grpo_small/checkpoint-000040/
        model.safetensors       weights by parameter name; with LoRA only the adapters
        optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>; master.<name> if the optimizer keeps masters
        state.json              iteration, model shape, tokenizer, settings, generators, ...; with LoRA the base weights
        tokenizer.json, ...     if the model came with its own tokenizer
        manifest.json           length and SHA-256 of all the other files; written last

A checkpoint is written into a temporary folder, flushed to disk and renamed: a folder with the final name is complete.
If the disk damages it later, its checksums no longer fit; it is named on stderr, and the one before is used. No pickle.
Data order and the sampler's draws follow from (seed, iteration), so the iteration is their state.

`open_checkpoint` verifies and reads a checkpoint once. Left out: tensors (loading.py); when to save (saver.py).
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from options import SnugError, check_type, check_value, did_you_mean, fields, in_one_line
from options.typed import Fields
from pretrained.shapes import is_pretrained, read_shape
from pretrained.tensors import fingerprint, look_at_weights
from settings import GRPOSettings, ModelOptions, SFTSettings
from tokenizer import Tokenizer, get_tokenizer

PREFIX = "checkpoint-"
STATE = dict(
    iteration=int, optimizer_steps=int, extra_prompts=int, tokenizer=str, data=str
)  # types in state.json
STATE |= dict.fromkeys(["model_config", "settings", "generators", "health", "after_oom"], dict)


class Checkpoint(NamedTuple):
    """A verified checkpoint."""

    path: Path
    state: dict  # state.json


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    found = [
        p for p in Path(folder).glob(PREFIX + "*") if p.name[len(PREFIX) :].isdigit() and p.is_dir()
    ]
    return sorted(found, key=iteration_of)


def iteration_of(path: Path) -> int:
    """checkpoint-000040 -> 40, the iterations done."""
    return int(path.name[len(PREFIX) :])


def is_checkpoint(folder: str | Path) -> bool:
    """Is this a checkpoint's folder (or out/run/best, a link to one) and not a run's?"""
    return Path(folder).resolve().name.startswith(PREFIX) and Path(folder).is_dir()


def newest(folder: str | Path, whole: bool = True) -> Path:
    """A run's folder -> its newest undamaged checkpoint; a checkpoint's folder -> the same. Raises SnugError.

    whole: as for `damage`. Damaged checkpoints are passed over; with `whole` they are named on stderr.
    """
    folder = Path(folder)
    if is_checkpoint(folder):
        path = folder.resolve() if folder.is_symlink() else folder
        if wrong := damage(path, whole):
            raise SnugError(wrong)
        return path
    if not folder.is_dir():
        hint = did_you_mean(str(folder), [str(place) for place in folder.parent.glob("*/")])
        advice = "train_sft.py and grpo.py make runs; a model is a folder in Hugging Face's layout"
        raise SnugError(f"{folder}: there is no such run or model{hint or f'; {advice}'}")
    damaged = []
    for path in reversed(checkpoints(folder)):
        if wrong := damage(path, whole):
            damaged.append(wrong)
            continue
        for note in damaged if whole else ():
            print(f"note: {note}; {path.name} is used", file=sys.stderr, flush=True)
        return path
    if damaged:
        raise SnugError(f"{damaged[0]}; no checkpoint in {folder} is whole")
    raise SnugError(f"{folder}: has no checkpoint; was the run stopped before its first save?")


def damage(path: Path, whole: bool = True) -> str | None:
    """Compare every file of a checkpoint with the manifest -> what is wrong, or None.

    By length and SHA-256; whole=False: tensors, which may take a minute to read, by length alone.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, wanted in manifest.items():
            file = path / name
            read = whole or file.suffix != ".safetensors"
            if file.stat().st_size != wanted["bytes"] or read and sha256(file) != wanted["sha256"]:
                return f"checkpoint {path}: {name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"checkpoint {path}: cannot be read ({type(error).__name__}: {error})"
    return None


def sha256(file: Path) -> str:
    digest, block = (
        hashlib.sha256(),
        bytearray(2**24),
    )  # large blocks: this may run in a thread beside the training
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def read_state(path: Path) -> dict:
    """state.json of a verified checkpoint -> dict. Raises SnugError for values that no run has written."""
    file = path / "state.json"
    with in_one_line(f"{file}: cannot be read"):
        state = json.loads(file.read_text())
    read = Fields(state, file)
    for name, kind in STATE.items():
        read.get(name, kind, zero=True)
    cls, settings, shape = class_of(state), state["settings"], state["model_config"]
    for name in settings.keys() & fields(cls):
        check_type(cls, name, settings[name], f"{file}: settings: {name}")
    for name in fields(ModelOptions):
        check_value(ModelOptions, name, shape.get(name), f"{file}: model_config: {name}")
    if settings.get("lora_rank"):
        base = Fields(read.get("base", dict), f"{file}: base")
        for name in ("path", "from_run", "fingerprint"):
            base.get(name, str)
    return state


def open_checkpoint(folder: str | Path, whole: bool = True) -> Checkpoint:
    """Verify and read a run's `newest` checkpoint, or the checkpoint that `folder` is. Raises SnugError."""
    path = newest(folder, whole)
    return Checkpoint(path, read_state(path))


def open_weights(folder: str | Path, whole: bool = True) -> Checkpoint | Path:
    """A run or checkpoint -> opened; a Hugging Face folder -> its path, its tensors checked. Raises SnugError."""
    if not is_pretrained(folder):
        return open_checkpoint(folder, whole)
    look_at_weights(folder)
    return Path(folder)


def find_run(folder: str | Path) -> Checkpoint:
    """`open_weights`; for a Hugging Face folder the state has what is known. Raises SnugError."""
    if not folder:
        raise SnugError("name a run's folder, such as out/grpo_small, or a Hugging Face model's")
    found = open_weights(folder)
    if isinstance(found, Checkpoint):
        return found
    settings = vars(GRPOSettings(task=""))
    state = dict(
        iteration=0, model_config=read_shape(folder), tokenizer="tokenizer.json", settings=settings
    )
    return Checkpoint(found, state)


def class_of(state: dict) -> type:
    return GRPOSettings if "group_size" in state["settings"] else SFTSettings


def settings_of(state: dict) -> SFTSettings | GRPOSettings:
    """The run's settings. Options that are gone are ignored; newer ones have their defaults."""
    cls = class_of(state)
    return cls(**{name: value for name, value in state["settings"].items() if name in fields(cls)})


def tokenizer_of(path: Path, state: dict) -> Tokenizer:
    """The run's tokenizer: by its name, or from the tokenizer.json beside the weights. Raises SnugError."""
    name = state["tokenizer"]
    return get_tokenizer(str(path) if name.startswith("tokenizer.json") else name)


def base_record(base: Checkpoint | Path, out_dir: str) -> dict:
    """What state.json says about the base weights of a LoRA run, so that `base_of` can find them again."""
    path = base if isinstance(base, Path) else base.path
    return dict(path=str(path), from_run=os.path.relpath(path, out_dir), fingerprint=identity(base))


def base_of(checkpoint: Checkpoint, init_from: str = "", whole: bool = True) -> Checkpoint | Path:
    """Open the weights that a checkpoint's adapters belong to. Raises SnugError if they are missing, others, damaged.

    Looks where they were, as seen from here and from the run's folder, and where init_from says now.
    """
    base, gone = checkpoint.state["base"], "are not there"
    for place in (
        Path(base["path"]),
        checkpoint.path.parent / base["from_run"],
        Path(init_from or base["path"]),
    ):
        if place.exists():
            weights, gone = open_weights(place, whole), "are others now"
            if identity(weights) == base["fingerprint"]:
                return weights
    seen = f"checkpoint {checkpoint.path} has adapters for the weights in {base['path']}, which {gone}"
    raise SnugError(f"{seen}; put them back")


def identity(weights: Checkpoint | Path) -> str:
    """A fingerprint of the weights in a checkpoint or a Hugging Face folder."""
    return fingerprint(weights) if isinstance(weights, Path) else sha256(weights.path / "manifest.json")


def write(folder: Path, state: dict, tensors: dict, files: dict[str, bytes] | None = None) -> Path:
    """Write checkpoint-<iteration> into a run's folder, completely or not at all -> its path.

    tensors: {file name: {tensor name: tensor}}; files: such as the tokenizer's. Raises OSError, SafetensorError.
    """
    from safetensors.torch import save_file

    final = folder / f"{PREFIX}{state['iteration']:06d}"
    temporary = folder / f".tmp-{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name, named in tensors.items():
            save_file(named, temporary / name)
        for name, content in (files or {}).items():
            (temporary / name).write_bytes(content)
        (temporary / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        seal(temporary)
        if final.exists():  # a damaged one: otherwise the run would have resumed from it
            shutil.rmtree(final)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # free the space on a full disk
        raise
    flush(folder)
    return final


def seal(folder: Path) -> None:
    """Write the manifest and flush every file to disk."""
    files = sorted(file for file in folder.iterdir() if file.name != "manifest.json")
    manifest = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for file in files:  # safetensors writes files that only their owner can read
        shutil.copymode(folder / "manifest.json", file)
    for file in [*folder.iterdir(), folder]:
        flush(file)


def flush(path: Path) -> None:
    """Move a file's content, or a folder's names, from the page cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
