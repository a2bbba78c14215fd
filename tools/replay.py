"""Take a dropped step again, on the same weights and sequences, and say where it stops being finite.

    python -m tools.replay out/grpo_small/dropped-000012 [--device=cpu]

What it names, in the order data takes: a weight, a column of the batch (and which sequence), the first module whose output is
not finite (and for which sequences), the log-probs, the gradients. Nothing is learned. What a grad_offload, an optimizer
or another device's rounding did is not repeated. Left out: the sampler; the batch has what it drew.
"""

import sys

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from options import friendly_errors, read_settings
    from settings import ReplaySettings

    with friendly_errors():
        settings, _, folder = read_settings(ReplaySettings, sys.argv[1:], positional="folder")

import json
from functools import partial
from pathlib import Path

import torch

import grpo
import train_sft
from batch import Sequences
from model import make_model, pick_device
from options import SnugError
from options import fields as options_of
from runs.checkpoint import configure, load_into, opened
from runs.saver import not_finite
from sample import Rollouts
from settings import GRPOSettings, SFTSettings


def read_dropped(folder, device):
    """-> (dropped.json, settings, model, sequences). Raises SnugError."""
    folder = Path(folder or ".")
    try:
        record = json.loads((folder / "dropped.json").read_text())
        grpo_run = "group_size" in record["settings"]
        cls = GRPOSettings if grpo_run else SFTSettings
        settings = cls(**{name: value for name, value in record["settings"].items() if name in options_of(cls)})
        shape, _ = record["model_config"], list(record["select"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnugError(
            f"{folder}: dropped.json cannot be read ({type(error).__name__}: {error}); name out/<run>/dropped-<iteration>"
        ) from None
    model = configure(make_model(shape, device, settings.param_dtype), settings)
    load_into(
        folder / "model.safetensors", dict(model.named_parameters())
    )  # all of them, also where adapters alone train
    with opened(folder / "batch.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}
    try:
        return record, settings, model, (Rollouts if grpo_run else Sequences)(**tensors)
    except TypeError as error:
        raise SnugError(f"{folder}: batch.safetensors has other columns ({error})") from None


def replay(folder, device):
    """-> lines of text: what was found."""
    record, settings, model, sequences = read_dropped(folder, device)
    lines = [
        f"{folder}: iteration {record['iteration']}, {len(record['select'])} sequences",
        f"in the run: {record['found']}",
    ]
    weights = not_finite({name: p.detach() for name, p in model.named_parameters()})
    lines.append(f"weights: {weights or 'finite'}")
    lines += [f"batch: {found}" for found in columns(sequences)] or ["batch: finite"]
    seen = []
    watch(model, seen)
    step = grpo.accumulate if isinstance(sequences, Rollouts) else train_sft.train_step
    options = (record["select"], settings) if isinstance(sequences, Rollouts) else (settings,)
    metrics = step(model, sequences, *options)
    lines.append(f"forward: {seen[0]}" if seen else "forward: every module's output is finite")
    lines.append("metrics: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items()))
    gradients = not_finite({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return [*lines, f"gradient: {gradients or 'finite'}"]


def columns(sequences):
    """-> "sampling_logprobs of sequence 5", one a column that is not finite."""
    found = []
    for name, value in vars(sequences).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not_finite({name: value}):
            rows = (~value.isfinite()).flatten(1).any(1) if value.dim() > 1 else ~value.isfinite()
            found.append(f"{name} of sequence {', '.join(map(str, rows.nonzero().flatten().tolist()[:8]))}")
    return found


def watch(model, seen):
    """Note the first modules whose output is not finite, with the rows of the micro-batch."""

    def look(name, module, arguments, output):
        if isinstance(output, torch.Tensor) and not seen and not_finite({name: output.detach()}):
            rows = (~output.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
            seen.append(
                f"{name or 'the model'} ({type(module).__name__}) is the first that is not finite, rows {rows[:8]} of its micro-batch"
            )

    for name, module in model.named_modules():
        module.register_forward_hook(partial(look, name))


if __name__ == "__main__":
    with friendly_errors():
        print("\n".join(replay(folder, pick_device(settings.device))))
