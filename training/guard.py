"""An optimizer step that must not be taken, because its loss or its gradient is not finite: dropped, named, kept for replay, counted.

    out/<run>/dropped-000012/
        batch.safetensors     the sequences it would have learned from, by the names of Rollouts (or Sequences)
        model.safetensors     the weights that it met
        dropped.json          what was not finite; the settings; which of the sequences

python -m tools.replay out/<run>/dropped-000012 takes the step again and says where it went wrong. After max_dropped_steps in
a row the run stops. Finite weights may be what ruined them: a checkpoint made after the last step that was taken is set
aside, and --resume=auto goes on from the one before.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from options import SnugError
from runs.saver import not_finite, set_aside

KEPT = 10  # steps of a run that are written; the rest are counted


class Guard:
    """health: steps dropped, how many of them in a row now, the iteration of the last step that was taken, and the prompts that
    were used beyond batch_size an iteration; a checkpoint has it."""

    def __init__(self, settings, tokenizer, say, health=None):
        self.settings, self.tokenizer, self.say = settings, tokenizer, say
        self.before = None  # where the weights of the last dropped step are, if no step was taken since
        self.health = {"dropped_steps": 0, "dropped_in_a_row": 0, "last_step": -1} | (health or {})

    def taken(self, iteration):
        """A step of this iteration was taken."""
        self.health |= {"dropped_in_a_row": 0, "last_step": iteration}
        self.before = None

    def drop(self, iteration, model, gradients, sequences, select, loss, norm):
        """gradients: {name: tensor}; select: which of the sequences. Raises SnugError where it was one too many."""
        self.health |= {name: self.health[name] + 1 for name in ("dropped_steps", "dropped_in_a_row")}
        found = culprit(model, gradients, sequences, select, loss, norm)
        where = self.keep(iteration, model, sequences, select, found, loss, norm)
        in_a_row, most = self.health["dropped_in_a_row"], self.settings.max_dropped_steps
        if in_a_row < most:
            self.say(f"warning: a step of iteration {iteration} is dropped, {in_a_row} in a row: {found}; {where}")
            return
        newest = set_aside(Path(self.settings.out_dir), self.health["last_step"])
        error = SnugError(
            f"{in_a_row} optimizer steps in a row were not finite, the last in iteration {iteration}: {found}; {where}; lower learning_rate "
            f"(now {self.settings.learning_rate:g}), then --resume=auto goes on from {newest}"
        )
        error.state_is_bad = True
        raise error

    def keep(self, iteration, model, sequences, select, found, loss, norm):
        """Write what a replay needs -> where it is, in words."""
        if self.health["dropped_steps"] > KEPT:
            return f"not written, for there are {KEPT}"
        folder = Path(self.settings.out_dir) / f"dropped-{iteration:06d}"
        number = 1
        while folder.exists():  # another step of the iteration
            folder, number = folder.with_name(f"dropped-{iteration:06d}.{number}"), number + 1
        record = dict(iteration=iteration, found=found, loss=repr(loss), grad_norm=repr(norm), select=list(select))
        record |= dict(model_config=asdict(model.config), tokenizer=self.tokenizer.name, settings=asdict(self.settings))
        try:
            folder.mkdir(parents=True)
            copies = {
                name: tensor.clone() for name, tensor in columns_of(sequences).items()
            }  # old_logprobs may be sampling_logprobs itself
            save_file(copies, folder / "batch.safetensors")
            self.keep_weights(folder, model)
            (folder / "dropped.json").write_text(json.dumps(record, indent=1) + "\n")
        except Exception as error:  # a full disk: the step is dropped all the same
            shutil.rmtree(folder, ignore_errors=True)
            return f"it cannot be written ({type(error).__name__}: {str(error).strip().splitlines()[:1]})"
        return f"python -m tools.replay {folder}"

    def keep_weights(self, folder, model):
        """Once for all the steps in a row, for they met the same weights."""
        file = folder / "model.safetensors"
        if self.before is not None and self.before.exists():
            os.link(self.before, file)
        else:
            save_file({name: p.detach() for name, p in model.named_parameters()}, file)
        self.before = file


def columns_of(sequences, select=slice(None)):
    """Rollouts or Sequences -> {name: tensor}; of those in `select`, a range."""
    part = slice(select.start, select.stop)
    return {name: tensor[part] for name, tensor in vars(sequences).items() if isinstance(tensor, torch.Tensor)}


def culprit(model, gradients, sequences, select, loss, norm):
    """Name what is not finite, the earliest in the way data takes."""
    for what, named in (
        ("the weights", dict(model.named_parameters())),
        ("the batch", columns_of(sequences, select)),
        ("the gradient", gradients),
    ):
        bad = not_finite({name: tensor.detach() for name, tensor in named.items()})
        if bad:
            return f"{what}: {bad} (loss {loss:g}, gradient norm {norm:g})"
    return f"loss {loss:g}, gradient norm {norm:g}; every gradient by itself is finite"
