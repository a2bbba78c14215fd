"""State that a run can be taken up from: safetensors for what is large, JSON for the rest. No pickle, nothing executed.

    out/grpo_small/checkpoint-000040/
        model.safetensors       weights, by parameter name; with LoRA the adapters alone
        optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>; master.<name> where there are masters
        state.json              iteration, the model's shape, tokenizer, settings, generators; with LoRA which weights it goes with
        tokenizer.json, ...     where the model came with its own
        manifest.json           length and SHA-256 of the others, written last

A checkpoint is written into a temporary folder, flushed to the disk and renamed into place. So one that has its name is
whole, unless the disk has damaged it since: then it is named, and the one before is used. The data's order and the
sampler's draws follow from (seed, iteration), so the iteration is their state.

torch is imported where it is needed: a missing or damaged checkpoint is reported before that costs its seconds.
Left out: when one is written, and which are kept (saver.py); Hugging Face's layout of a folder (pretrained.py).
"""

import hashlib
import json
import os
import random
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors import SafetensorError, safe_open

from options import SnugError, check_value, fields
from pretrained.shapes import is_pretrained, read_shape, stored_dtype
from pretrained.tensors import fingerprint, look_at_weights, read_weights
from settings import GRPOSettings, SFTSettings, check_adapters

PREFIX = "checkpoint-"


def checkpoints(folder):
    """The checkpoints of a run's folder, oldest first -> list of Path."""
    found = [p for p in Path(folder).glob(PREFIX + "*") if p.name[len(PREFIX) :].isdigit() and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name[len(PREFIX) :]))


def is_checkpoint(folder):
    """Is it a checkpoint's folder, rather than a run's?"""
    return Path(folder).resolve().name.startswith(PREFIX) and Path(folder).is_dir()


def newest(folder):
    """A run's folder, or one of its checkpoints -> Path of that, or of the newest whole, checkpoint. Raises SnugError where there is none.

    out/run/best is a link to the one with the best evaluation.

    A damaged one is named on stderr, and the one before is taken.
    """
    if is_checkpoint(folder):
        path = Path(folder).resolve() if Path(folder).is_symlink() else Path(folder)
        wrong = damage(path)
        if wrong:
            raise SnugError(wrong)
        return path
    if not Path(folder).is_dir():
        raise SnugError(
            f"{folder}: there is no such run; runs are folders under out/, made by train_sft.py and grpo.py"
        )
    found = checkpoints(folder)
    if not found:
        raise SnugError(f"{folder}: has no checkpoint; was the run stopped before its first save?")
    damaged = []
    for path in reversed(found):
        wrong = damage(path)
        if not wrong:
            for note in damaged:
                if note not in told:
                    print(f"note: {note}; {path.name} is used", file=sys.stderr, flush=True)
            told.update(damaged)
            return path
        damaged.append(wrong)
    raise SnugError(f"{damaged[0]}; no checkpoint in {folder} is whole")


told = set()  # notes that were printed already


checked = {}  # path -> (what its manifest says, what was found): a checkpoint is read once by a process, not at every look


def damage(path):
    """What is wrong with a checkpoint, in words, or None: every file has to have its length and SHA-256."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if path in checked and checked[path][0] == manifest:
            return checked[path][1]
        found = None
        for name in {"model.safetensors", "optimizer.safetensors", "state.json"} | {
            Path(name).name for name in manifest
        }:
            file = path / name
            if file.stat().st_size != manifest[name]["bytes"] or sha256(file) != manifest[name]["sha256"]:
                found = f"checkpoint {path}: {name} is not what was written"
                break
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"checkpoint {path}: cannot be read ({type(error).__name__}: {error})"
    checked[path] = manifest, found
    return found


def sha256(file):
    digest, block = (
        hashlib.sha256(),
        bytearray(2**24),
    )  # large: beside a training the interpreter is waited for once a block
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def seal(folder):
    """Flush a checkpoint's files to the disk, and write their lengths and checksums beside them, last."""
    manifest = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(folder.iterdir())
        if file.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for file in [*folder.iterdir(), folder]:
        flush(file)


def flush(path):
    """What was written to a file, or renamed in a folder, is on the disk and not only in the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_state(path):
    """state.json of the checkpoint `path` -> dict; the tensor files' headers and lengths are looked at too. Raises SnugError."""
    try:
        state = json.loads((path / "state.json").read_text())
        wrong = wrong_with(state)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        wrong = f"cannot be read ({type(error).__name__}: {error})"
    if wrong:
        raise SnugError(f"checkpoint {path}: state.json {wrong}; delete the folder to use the one before")
    for name in ("model.safetensors", "optimizer.safetensors"):
        with opened(path / name):
            pass
    return state


KINDS = dict(iteration=int, optimizer_steps=int, model_config=dict, tokenizer=str, settings=dict, generators=dict)


KINDS |= dict(after_oom=dict, scores=dict, health=dict, data=str)


def wrong_with(state):
    """What is wrong with what state.json says, in words, or None. Its shape is looked at by GPTConfig, its generators by who restores them."""
    if not isinstance(state, dict):
        return "is not an object"
    for name, kind in KINDS.items():
        if type(state.get(name)) is not kind:
            return f"has no {name}" if name not in state else f"has {name}={state[name]!r:.40}"
    counts = [
        state["iteration"],
        state["optimizer_steps"],
        *(state["model_config"].get(name, -1) for name in ("vocab_size", "block_size")),
    ]
    counts += [state["health"].get(name, -2) + 1 for name in ("dropped_steps", "dropped_in_a_row", "last_step")]
    counts += [state["health"].get("extra_prompts", 0)]
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        return f"counts what cannot be: {counts!r:.60}"
    pairs = state["after_oom"].items()
    if not all(
        name in AFTER_OOM and isinstance(v, list) and len(v) == 2 and all(type(x) in (int, float) for x in v)
        for name, v in pairs
    ):
        return f"has after_oom={state['after_oom']!r:.60}"
    cls = GRPOSettings if "group_size" in state["settings"] else SFTSettings
    try:
        for name in set(state["settings"]) & set(fields(cls)):
            check_value(cls, name, state["settings"][name], f"{name}")
        restored = [
            name for name in ("max_iters", "seed", "task", "dtype", "param_dtype") if name not in state["settings"]
        ]
        if state["settings"].get("lora_rank"):
            base = state.get("base")
            if not isinstance(base, dict) or not all(
                isinstance(base.get(name), str) for name in ("path", "from_run", "fingerprint")
            ):
                return f"has adapters and base={base!r:.60}"
            check_adapters(SimpleNamespace(**vars(cls()) | state["settings"]))
            if state["settings"]["lora_rank"] > state["model_config"].get("n_embd", 0):
                return f"has lora_rank={state['settings']['lora_rank']!r:.40}, which is above n_embd"
    except SnugError as error:
        return f"has settings that cannot be: {error}"
    return f"has settings without {restored[0]}" if restored else None


AFTER_OOM = ("max_rollout_batch", "max_tokens_per_micro_batch")  # what plan.py makes smaller


def opened(path, framework="numpy"):
    """A safetensors file, open. Raises SnugError where it is missing, cut off or something else (a pickle, say)."""
    try:
        return safe_open(str(path), framework=framework)
    except (OSError, SafetensorError) as error:
        raise SnugError(
            f"{path}: cannot be read ({error}); delete the checkpoint's folder to use the one before"
        ) from None


def state_of(iteration, model, optimizer, settings, tokenizer, generators):
    """What state.json says. iteration: how many are done."""
    steps = optimizer_steps(optimizer)
    base = {"base": model.base} if model.base else {}
    state = dict(
        iteration=iteration, optimizer_steps=steps, model_config=asdict(model.config), tokenizer=tokenizer.name
    )
    state |= dict(settings=asdict(settings), generators=for_json(generators))
    return state | base


def optimizer_steps(optimizer):
    """How many steps it has taken."""
    return (
        optimizer.steps if hasattr(optimizer, "steps") else next((int(s["step"]) for s in optimizer.state.values()), 0)
    )


def tensors_of(model, optimizer):
    """-> {file's name: {tensor's name: tensor}}, as they are, not copies."""
    weights = {name: p.detach() for name, p in trained(model).items()}
    return {"model.safetensors": weights, "optimizer.safetensors": moments(model, optimizer)}


def write(folder, state, tensors, files=None):
    """Write checkpoint-<iteration> into a run's folder: whole, or not at all -> its Path. Raises OSError, SafetensorError.

    files: {name: bytes}, which go beside the tensors as they are."""
    from safetensors.torch import save_file

    final = Path(folder) / f"{PREFIX}{state['iteration']:06d}"
    temporary = Path(folder) / f".tmp-{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name, named in tensors.items():
            save_file(named, temporary / name)
        for name, content in (files or {}).items():
            (temporary / name).write_bytes(content)
        (temporary / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        seal(temporary)
        if final.exists():  # it is damaged, or the run would have been resumed from it
            shutil.rmtree(final)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk gets its room back
        raise
    flush(final.parent)
    checked.pop(final, None)
    return final


def generator_state(device):
    """Every generator's state. snug draws nothing from them after the weights are made; a user's reward function may."""
    import torch

    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return dict(cpu=torch.get_rng_state(), cuda=cuda, python=random.getstate(), numpy=np.random.get_state())


def for_json(generators):
    state = {kind: bytes(generators[kind].tolist()).hex() for kind in ("cpu", "cuda") if generators[kind] is not None}
    kind, words, *rest = generators["numpy"]
    return state | {"python": generators["python"], "numpy": [kind, words.tolist(), *rest]}


def restore_generators(state, device):
    """What for_json made. Raises SnugError where it is something else."""
    import torch

    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, words, *rest = state["numpy"]
        np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
        values = {
            kind: torch.tensor(list(bytes.fromhex(state[kind])), dtype=torch.uint8)
            for kind in ("cpu", "cuda")
            if kind in state
        }
        torch.set_rng_state(values["cpu"])
        if "cuda" in values and device.type == "cuda":
            torch.cuda.set_rng_state(values["cuda"], device)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError, IndexError) as error:
        raise SnugError(f"the generators in state.json cannot be restored ({type(error).__name__}: {error})") from None


def load_into(path, tensors, optional=None, look=False):
    """Copy a safetensors file into {name: tensor}, one at a time, in place. Names and shapes have to match. Raises SnugError.

    optional: the beginning of names that either may lack. look: only see whether they match.
    """
    import torch

    with opened(path, "pt") as file, torch.no_grad():
        both = set(file.keys()) & set(tensors)
        surplus, missing = (
            sorted(name for name in names if name not in both and not (optional and name.startswith(optional)))
            for names in (file.keys(), tensors)
        )
        if surplus or missing:
            raise SnugError(
                f"{path}: does not fit the model; missing {missing[:3] or 'nothing'}, surplus {surplus[:3] or 'nothing'}"
            )
        for name in both:
            shape = tuple(file.get_slice(name).get_shape())
            if shape != tuple(tensors[name].shape):
                raise SnugError(f"{path}: {name} has shape {shape}, the model {tuple(tensors[name].shape)}")
            if not look:
                tensors[name].copy_(file.get_tensor(name))


def trained(model):
    """-> {name: parameter} of what trains: the adapters where there are some (lora.py), else everything. What a checkpoint has."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def origin(folder):
    """What init_from names -> the Path that has the weights: a Hugging Face folder, or a checkpoint. Raises SnugError."""
    return Path(folder) if is_pretrained(folder) else newest(folder)


def load_weights(path, model):
    """The weights of an `origin` into a GPT without adapters; of a checkpoint that has adapters, those merged into what they go with."""
    if is_pretrained(path):
        return read_weights(path, model)
    state = read_state(path)
    if not state["settings"].get("lora_rank"):
        return load_into(path / "model.safetensors", trained(model))
    from pretrained import lora

    load_weights(base_of(path, state), model)
    load_into(path / "model.safetensors", trained(give_adapters(model, settings_of(state))))
    lora.merge(model)


def look_at_shapes(path, shape, named=""):
    """Are the weights of an `origin` those of a model of this shape? Asked before any memory is taken for it. named: see base_of. Raises SnugError."""
    if is_pretrained(path):
        look_at_weights(path)  # with its own config.json, of which `shape` is
        return
    from model import make_model

    state, model = read_state(path), make_model(shape, "meta")
    if state["settings"].get("lora_rank"):
        look_at_shapes(base_of(path, state, named), shape)
        model = give_adapters(model, settings_of(state))
    load_into(path / "model.safetensors", trained(model), look=True)


def base_of(path, state, named=""):
    """-> the Path of the weights that a checkpoint's adapters go with: where they were, as seen from here or from the run's folder, or
    what `named` (init_from) says now. Raises SnugError where they are not there, are others, or are damaged."""
    base, found = state["base"], False
    for place in (Path(base["path"]), path.parent / base["from_run"], Path(named or base["path"])):
        try:
            place = origin(place) if place.exists() else place
            if place.exists() and identity(place) == base["fingerprint"]:
                if not is_pretrained(place) and (wrong := damage(place)):
                    raise SnugError(wrong)
                return place
            found = found or place.exists()
        except OSError:  # a part of it is gone
            found = True
    gone = "are others now" if found else "are not there"
    raise SnugError(f"checkpoint {path} has adapters for the weights in {base['path']}, which {gone}; put them back")


def identity(path):
    """A fingerprint of an `origin`."""
    return fingerprint(path) if is_pretrained(path) else sha256(path / "manifest.json")


def give_adapters(model, settings):
    from pretrained import lora

    return lora.add(model, settings.lora_rank, settings.lora_alpha, settings.lora_target_modules)


def moments(model, optimizer):
    """{name: tensor} of what an optimizer keeps of each parameter."""
    named = [(name, optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state]
    return {f"{key}.{name}": state[key] for name, state in named for key in state if key != "step"}


def load_optimizer(path, model, optimizer):
    """The moments of the checkpoint `path` into a new optimizer."""
    steps = read_state(path)["optimizer_steps"]
    load_into(
        path / "optimizer.safetensors", moments(model, optimizer), optional="master."
    )  # those are the weights, if need be
    if hasattr(optimizer, "steps"):
        optimizer.steps = steps
    else:
        for state in optimizer.state.values():
            state["step"].fill_(steps)


def resume_path(settings):
    """The checkpoint to continue from, or None."""
    return newest(settings.out_dir) if settings.resume == "auto" and checkpoints(settings.out_dir) else None


def begin(settings, shape, device):
    """-> (model, optimizer, first iteration): taken up from out_dir, or from init_from, or from random weights."""
    from model import make_model
    from training.optimizer import make_optimizer

    path, adapters = resume_path(settings), settings.lora_rank
    source = path
    if path and adapters:
        source = base_of(path, read_state(path), settings.init_from)
    elif not path and settings.init_from:
        source = origin(settings.init_from)
    for place in {path, source} - {None}:
        look_at_shapes(place, shape, settings.init_from)
    model = make_model(shape, device, settings.param_dtype, initialise=source is None)
    if source is not None:
        load_weights(source, model)
    model = configure(model, settings)
    if adapters:
        model.base = dict(
            path=str(source), from_run=os.path.relpath(source, settings.out_dir), fingerprint=identity(source)
        )
    if path and adapters:
        load_into(path / "model.safetensors", trained(model))
    optimizer = make_optimizer(model, settings)  # after the weights, of which it may keep masters
    if path is None:
        return model, optimizer, 0
    load_optimizer(path, model, optimizer)
    state = read_state(path)
    restore_generators(state["generators"], device)
    return model, optimizer, state["iteration"]


def configure(model, settings):
    """What of the settings a model has to know to train, its adapters among it -> the model."""
    if settings.lora_rank:
        give_adapters(model, settings)
    model.checkpoint_blocks, model.activation_offload = settings.checkpoint_blocks, settings.activation_offload
    return model


@dataclass
class Run:
    model: object  # GPT
    tokenizer: object
    settings: SimpleNamespace  # as the run resolved them
    iteration: int
    path: Path


def find_run(folder):
    """A run's folder, or one of its checkpoints -> (the checkpoint's path, its state). Imports no torch. Raises SnugError.

    A Hugging Face folder -> (its path, a state that says what can be known of it)."""
    if not folder:
        raise SnugError("name a run's folder, such as out/grpo_small, or a Hugging Face model's")
    if is_pretrained(folder):
        look_at_weights(folder)
        return Path(folder), dict(
            iteration=0, model_config=read_shape(folder), settings=vars(GRPOSettings()) | {"task": ""}
        )
    path = newest(folder)
    return path, read_state(path)


def load_run(folder, device="auto"):
    """The newest checkpoint of a run's folder, or that very checkpoint, ready to use -> Run. Raises SnugError."""
    from model import make_model, pick_device

    path, state = find_run(folder)
    settings, device = settings_of(state), pick_device(device)
    if is_pretrained(path) and device.type == "cuda" and stored_dtype(path) == "bfloat16":
        settings.dtype = settings.param_dtype = "bfloat16"
    look_at_shapes(path, state["model_config"])
    tokenizer = tokenizer_of(path, state)
    if tokenizer.n_vocab > state["model_config"]["vocab_size"]:
        raise SnugError(
            f"{path}: its tokenizer has {tokenizer.n_vocab} ids, its model {state['model_config']['vocab_size']}"
        )
    shape = state["model_config"] | {"n_vocab": tokenizer.n_vocab}
    model = make_model(shape, device, settings.param_dtype, initialise=False)
    if settings.lora_rank:  # the very function that was trained
        load_weights(base_of(path, state), model)
        load_into(path / "model.safetensors", trained(give_adapters(model, settings)))
    else:
        load_weights(path, model)
    return Run(model, tokenizer, settings, state["iteration"], path)


def settings_of(state):
    """What state.json says of the settings; options that came later have their defaults."""
    cls = GRPOSettings if "group_size" in state["settings"] else SFTSettings
    return SimpleNamespace(**vars(cls()) | state["settings"])


def tokenizer_of(path, state):
    """The Tokenizer of a checkpoint, by its name or from the tokenizer.json beside it; or of a Hugging Face folder. Raises SnugError."""
    from tokenizer import get_tokenizer

    name = state.get("tokenizer", "tokenizer.json")
    tokenizer = get_tokenizer(str(path) if name.startswith("tokenizer.json") else name)
    if name not in (tokenizer.name, "tokenizer.json"):
        raise SnugError(
            f"checkpoint {path}: its tokenizer is {tokenizer.name}, not {name}, which the model was trained with"
        )
    size = state["model_config"].get("n_vocab") or tokenizer.n_vocab
    if size != tokenizer.n_vocab:
        raise SnugError(
            f"checkpoint {path}: its tokenizer has {tokenizer.n_vocab} ids, and the model was trained with {size}"
        )
    return tokenizer
