"""Optimizer steps with a loss or gradient that is not finite: they are dropped, explained, kept for replay, counted.

    out/<run>/dropped-000012/
        batch.safetensors     the sequences of the step, by the names of Rollouts (or Sequences)
        model.safetensors     the weights before the step
        dropped.json          what was not finite; the settings; which of the sequences

`python -m tools.replay out/<run>/dropped-000012` repeats the step and says where it went wrong. After max_dropped_steps
in a row the run stops. The last weights may be the cause although they are finite, so a checkpoint made after the last
good step is set aside, and --resume=auto goes on from the one before.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from batch import Sequences
from model import GPT
from runs import free_name
from runs.saver import UnsafeState, not_finite, set_aside
from sample import Rollouts

MOST_KEPT = 10  # dropped steps of a run that are written to disk


class Guard:
    """health goes into checkpoints: steps dropped, steps dropped in a row, the iteration of the last good step."""

    def __init__(self, settings, tokenizer, say: Callable[[str], None], health: dict | None = None, writes=True):
        self.settings, self.tokenizer, self.say, self.writes = settings, tokenizer, say, writes
        self.weights_file = None  # the weights of the last dropped step, if there was no good step since
        self.health = {"dropped_steps": 0, "dropped_in_a_row": 0, "last_step": -1} | (health or {})

    def taken(self, iteration: int) -> None:
        """A step of this iteration was good."""
        self.health |= {"dropped_in_a_row": 0, "last_step": iteration}
        self.weights_file = None

    def drop(self, iteration: int, model: GPT, gradients, sequences, select: range, loss: float, norm: float) -> None:
        """Count and report a step on the sequences `select`. Raises UnsafeState after max_dropped_steps in a row.

        gradients: {name: tensor}; sequences: Rollouts or Sequences; norm: of the gradient.
        """
        self.health |= {name: self.health[name] + 1 for name in ("dropped_steps", "dropped_in_a_row")}
        found = culprit(model, gradients, sequences, select, loss, norm)
        where = self.keep(iteration, model, sequences, select, found, loss, norm)
        in_a_row = self.health["dropped_in_a_row"]
        if in_a_row < self.settings.max_dropped_steps:
            self.say(f"warning: a step of iteration {iteration} is dropped, {in_a_row} in a row: {found}; {where}")
            return
        newest = set_aside(Path(self.settings.out_dir), self.health["last_step"]) if self.writes else "a checkpoint"
        advice = f"lower learning_rate (now {self.settings.learning_rate:g}), then --resume=auto goes on from {newest}"
        last = f"{in_a_row} optimizer steps in a row were not finite, the last in iteration {iteration}"
        raise UnsafeState(f"{last}: {found}; {where}; {advice}")

    def keep(self, iteration, model, sequences, select, found, loss, norm) -> str:
        """Write what a replay needs -> how to replay it, or why that is not possible."""
        if not self.writes:
            return "written by rank 0"
        if self.health["dropped_steps"] > MOST_KEPT:
            return f"not written: {MOST_KEPT} are kept"
        folder = free_name(Path(self.settings.out_dir) / f"dropped-{iteration:06d}")
        record = dict(iteration=iteration, found=found, loss=repr(loss), grad_norm=repr(norm), select=list(select))
        record |= dict(model_config=asdict(model.config), tokenizer=self.tokenizer.name, settings=asdict(self.settings))
        try:
            folder.mkdir(parents=True)
            # Copies, because old_logprobs may be the same tensor as sampling_logprobs, which safetensors refuses.
            save_file({n: t.clone() for n, t in columns_of(sequences).items()}, folder / "batch.safetensors")
            if self.weights_file is not None and self.weights_file.exists():
                os.link(self.weights_file, folder / "model.safetensors")  # steps dropped in a row have the same weights
            else:
                save_file({n: p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors")
            self.weights_file = folder / "model.safetensors"
            (folder / "dropped.json").write_text(json.dumps(record, indent=1) + "\n")
        except (OSError, SafetensorError) as error:  # such as a full disk
            shutil.rmtree(folder, ignore_errors=True)
            return f"it cannot be written ({error})"
        return f"python -m tools.replay {folder}"


def columns_of(sequences: Rollouts | Sequences, select: range | slice = slice(None)) -> dict[str, torch.Tensor]:
    """{name: tensor} of the sequences `select`."""
    part = slice(select.start, select.stop)
    return {name: tensor[part] for name, tensor in vars(sequences).items() if isinstance(tensor, torch.Tensor)}


def culprit(model, gradients, sequences, select, loss, norm) -> str:
    """Name the first tensor that is not finite, in the order of computation."""
    weights, batch = dict(model.named_parameters()), columns_of(sequences, select)
    for what, named in (("the weights", weights), ("the batch", batch), ("the gradient", gradients)):
        if bad := not_finite({name: tensor.detach() for name, tensor in named.items()}):
            return f"{what}: {bad} (loss {loss:g}, gradient norm {norm:g})"
    return f"loss {loss:g}, gradient norm {norm:g}; every gradient by itself is finite"
