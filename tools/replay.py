"""Repeat a dropped optimizer step on the same weights and sequences, and say where it stops being finite.

    python -m tools.replay out/grpo_small/dropped-000012 [--device=cpu]

It names, in the order of computation: a weight; a column of the batch, and which sequences; the first module with an
output that is not finite, and which rows; the metrics; the gradients. Nothing is learned.
Left out: the sampler (the batch has what it drew); effects of grad_offload, the optimizer or another device's rounding.
"""

import sys
from pathlib import Path

from options import SnugError, friendly_errors, in_one_line, read_settings
from settings import ReplaySettings

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    with friendly_errors():
        settings, _, folder = read_settings(ReplaySettings, sys.argv[1:], positional="folder")
        if not (Path(folder) / "dropped.json").is_file():
            raise SnugError(f"{folder or '.'}: has no dropped.json; name a folder such as out/<run>/dropped-000012")

import json
from functools import partial

import torch

import grpo
import train_sft
from batch import Cut, Sequences
from model import GPT, make_model
from pretrained.tensors import opened
from runs.checkpoint import settings_of
from runs.device import pick_device
from runs.loading import configure, load_into
from runs.saver import not_finite
from sample import Rollouts
from training.guard import columns_of


def read_dropped(folder: Path, device: torch.device):
    """-> (dropped.json, settings, model, Rollouts or Sequences). Raises SnugError."""
    with in_one_line(f"{folder}: dropped.json cannot be read"):
        record = json.loads((folder / "dropped.json").read_text())
        settings = settings_of(record)
        model = configure(make_model(record["model_config"], device, settings.param_dtype), settings)
    load_into(folder / "model.safetensors", dict(model.named_parameters()))  # all of them, even if only adapters train
    with opened(folder / "batch.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}
    return record, settings, model, (Rollouts if "group_size" in record["settings"] else Sequences)(**tensors)


def replay(folder: Path, device: torch.device) -> list[str]:
    """-> lines of text: what was found."""
    record, settings, model, sequences = read_dropped(folder, device)
    select = record["select"]
    lines = [f"{folder}: iteration {record['iteration']}, {len(select)} sequences", f"in the run: {record['found']}"]
    lines.append(f"weights: {not_finite({name: p.detach() for name, p in model.named_parameters()}) or 'finite'}")
    lines += [f"batch: {found}" for found in bad_columns(sequences)] or ["batch: finite"]
    seen = watch(model)
    metrics = repeat_step(settings, model, sequences, select)
    lines.append(f"forward: {seen[0]}" if seen else "forward: every module's output is finite")
    lines.append("metrics: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items()))
    gradients = not_finite({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return [*lines, f"gradient: {gradients or 'finite'}"]


def repeat_step(settings, model: GPT, sequences: Rollouts | Sequences, select: list[int]) -> dict[str, float]:
    """Forward and backward of the step on the sequences `select` -> its metrics. The gradient is in each .grad."""
    cut = Cut(sequences, len(select), settings.max_tokens_per_micro_batch, settings.group_size)
    if isinstance(sequences, Rollouts):
        return grpo.accumulate_gradient(model, sequences, cut, select[0] // len(select), settings)
    return train_sft.accumulate_gradient(model, sequences, cut, settings)


def bad_columns(sequences: Rollouts | Sequences) -> list[str]:
    """-> "sampling_logprobs of sequence 5", one for each column that is not finite."""
    found = []
    for name, value in columns_of(sequences).items():
        rows = (~value.isfinite()).view(len(value), -1).any(1).nonzero().flatten().tolist()
        if rows:
            found.append(f"{name} of sequence {', '.join(map(str, rows[:8]))}")
    return found


def watch(model: GPT) -> list[str]:
    """-> a list; the forward pass adds the first module with an output that is not finite, and which tokens."""
    seen = []

    def look(name, module, arguments, output):
        if isinstance(output, torch.Tensor) and not seen and not_finite({name: output.detach()}):
            tokens = (~output.isfinite()).any(-1).flatten().nonzero().flatten().tolist()
            what = f"{name or 'the model'} ({type(module).__name__})"
            seen.append(f"{what} is the first that is not finite, tokens {tokens[:8]} of its micro-batch")

    for name, module in model.named_modules():
        module.register_forward_hook(partial(look, name))
    return seen


if __name__ == "__main__":
    with friendly_errors():
        print("\n".join(replay(Path(folder), pick_device(settings.device))))
