"""Moves a checkpoint's tensors to and from a model, its optimizer and the generators; loads a whole run, ready to use.

    model, tokenizer, settings, iteration, path = load_run("out/grpo_small")

The order matters: weights; adapters (`configure`); the optimizer, which may keep masters of the weights; generators.
training/loop.py does this for a run that begins or resumes. Left out: finding checkpoints (checkpoint.py).
"""

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from model import GPT, make_model
from runs.checkpoint import Checkpoint, base_of, find_run, settings_of, tokenizer_of
from settings import GRPOSettings, SFTSettings
from snug import lora
from snug.device.host import stream_from_host
from snug.device.kinds import is_planned
from snug.device.pick import pick_device, with_dtype
from snug.kernels.layers import hold_in_nf4
from snug.kernels.nf4 import weights_of
from snug.lora import trained
from snug.options import SnugError, in_one_line, note
from snug.options.progress import counted
from snug.pretrained.shapes import is_pretrained, stored_dtype
from snug.pretrained.tensors import opened, read_weights
from snug.tokenizer import Tokenizer
from snug.trust import choose_kernels


class Run(NamedTuple):
    model: GPT
    tokenizer: Tokenizer
    settings: SFTSettings | GRPOSettings
    iteration: int
    path: Path


def load_run(run: str | Path | Checkpoint, device: str = "auto") -> Run:
    """A run's folder, a checkpoint's, a Hugging Face model's, or what `find_run` returned -> Run. Raises SnugError.

    A Hugging Face model computes in the dtype in which it would train here. If this and its file are bfloat16, its
    weights stay bfloat16.
    """
    checkpoint = run if isinstance(run, Checkpoint) else find_run(run)
    path, state = checkpoint.path, checkpoint.state
    settings, tokenizer = settings_of(checkpoint), tokenizer_of(checkpoint)
    device = pick_device(device)
    settings = with_dtype(settings, device.type)
    if is_pretrained(path) and settings.dtype == stored_dtype(state["weights"][0]) == "bfloat16":
        settings.param_dtype = "bfloat16"
    shape = state["model_config"] | {"n_vocab": tokenizer.n_vocab}
    choose_kernels(settings, shape, device.type, note)
    model = make_model(
        shape, device, settings.param_dtype, initialise=False, base_dtype=settings.base_dtype
    )
    load_with_adapters(checkpoint, model)
    return Run(model, tokenizer, settings, state["iteration"], path)


def load_with_adapters(checkpoint, model):
    """Load a checkpoint or a Hugging Face folder into a plain model. A checkpoint's adapters are added, not merged."""
    if is_pretrained(checkpoint.path):
        _, *adapters = checkpoint.state["weights"]
        return read_weights(checkpoint.state["places"], model, *adapters)
    settings, file = settings_of(checkpoint), checkpoint.path / "model.safetensors"
    if not settings.lora_rank:
        return load_into(file, weights_of(model))
    if settings.base_dtype:
        hold_in_nf4(model, model.device, empty=True)
    load_weights(base_of(checkpoint), model)
    configure(model, settings)
    load_into(file, trained(model))


def load_weights(weights, model):
    """`load_with_adapters`, and merge the adapters if there are any. Raises SnugError."""
    load_with_adapters(weights, model)
    if lora.adapted(model):
        lora.merge(model)


def load_reference(prepared, device) -> GPT | None:
    """The frozen weights of init_from, on the device or the host.

    None if beta is 0, or with LoRA: then the reference is the model without adapters.
    """
    settings = prepared.settings
    if not settings.needs_reference:
        return None
    return load_frozen(
        prepared.shape, prepared.origin, device, settings.param_dtype, settings.reference
    )


def load_teacher(prepared, device) -> GPT | None:
    """The teacher's frozen weights, in the dtype of forward passes, on the device or the host. None without a
    teacher."""
    settings = prepared.settings
    if not settings.teacher:
        return None
    shape = prepared.teacher.state["model_config"] | {"n_vocab": prepared.tokenizer.n_vocab}
    return load_frozen(shape, prepared.teacher, device, settings.dtype, settings.teacher_device)


def load_frozen(shape, origin: Checkpoint | None, device, dtype, place: str) -> GPT:
    """A model that does not train. Without origin its weights are random. In a plan they have no values.

    place: "device" or "host". On the host each tensor is loaded, then pinned; the blocks are streamed to the device.
    """
    on_host = place == "host"
    fresh = not origin or is_planned(torch.empty(0))
    model = make_model(shape, "cpu" if on_host else device, dtype, initialise=fresh)
    if not fresh:
        load_weights(origin, model)
    model.requires_grad_(False)
    if on_host:
        stream_from_host(model, device)
    return model


def configure(model, settings):
    """Add adapters, if any, and set the model's memory options -> the model."""
    if settings.lora_rank:
        lora.add(model, settings.lora_rank, settings.lora_alpha, settings.lora_target_modules)
    model.checkpoint_blocks = settings.checkpoint_blocks
    model.activation_offload = settings.activation_offload
    return model


def load_into(path, tensors: dict[str, torch.Tensor], rows: dict | None = None):
    """Copy a safetensors file into {name: tensor} in place, one tensor at a time. rows: {parameter: slice} of a shard.

    Raises SnugError if names differ. Masters may be missing on either side: the optimizer makes them from the weights.
    """
    with opened(path, "pt") as file, torch.no_grad():
        names = set(file.keys())
        differ = sorted(name for name in names ^ tensors.keys() if not name.startswith("master."))
        if differ:
            raise SnugError(f"{path}: only the file or only the model has {', '.join(differ[:3])}")
        for name in counted(names & tensors.keys(), "tensors", "loading"):
            shard = (rows or {}).get(name.partition(".")[2])
            value = file.get_slice(name)[shard] if shard else file.get_tensor(name)
            with in_one_line(f"{path}: {name} cannot be read"):
                tensors[name].copy_(value)


def tensors_of(model, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """{file name: {tensor name: tensor}} of a checkpoint: the live tensors, not copies."""
    weights = {name: p.detach() for name, p in trained(model).items()}
    return {"model.safetensors": weights, "optimizer.safetensors": moments(model, optimizer)}


def moments(model, optimizer) -> dict[str, torch.Tensor]:
    """{"exp_avg.<parameter>": tensor, ...}: all that the optimizer keeps for each parameter, except the step count."""
    named = [(name, optimizer.state[p]) for name, p in trained(model).items() if p in optimizer.state]
    return {f"{key}.{name}": state[key] for name, state in named for key in state if key != "step"}


def load_optimizer(checkpoint, model, optimizer):
    """Load moments and step count into a new optimizer."""
    file, rows = checkpoint.path / "optimizer.safetensors", getattr(model, "rows", {})
    tensors = moments(model, optimizer)
    masters = {name[7:]: each for name, each in tensors.items() if name.startswith("master.")}
    if masters and not rows:  # a run whose weights were float32 kept none
        load_into(checkpoint.path / "model.safetensors", masters)
    load_into(file, tensors, rows)
    optimizer.steps = checkpoint.state["optimizer_steps"]


# Random generators. snug draws from them for the initial weights only; a user's reward function may draw at any time.


def generator_state() -> dict:
    """The state of Python's, NumPy's and torch's generators on the CPU, in a form for JSON."""
    kind, words, *rest = np.random.get_state()
    cpu = torch.get_rng_state().numpy().tobytes().hex()
    return dict(cpu=cpu, python=random.getstate(), numpy=[kind, words.tolist(), *rest])


def restore_generators(state):
    """The inverse of `generator_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cpu"]), dtype=torch.uint8))
