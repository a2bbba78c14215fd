"""Optimizer steps with a loss or gradient that is not finite: they are dropped, explained in log.txt, and counted.

The line in the log has the iteration, the seed, the sequences and the loss. An earlier checkpoint and these are enough
to reach the step again. After MAX_DROPPED_STEPS in a row the run stops, and its state is not saved: the weights may be
ruined although they are finite.
"""

from pathlib import Path

from runs.saver import UnsafeState, newest_name, not_finite

MAX_DROPPED_STEPS = 5


class Guard:
    """health goes into checkpoints: how many steps were dropped, and how many in a row up to now."""

    def __init__(self, settings, say, health=None):
        self.settings, self.say = settings, say
        self.health = health or {"dropped_steps": 0, "dropped_in_a_row": 0}

    def drop(self, iteration, model, gradients, sequences, select, loss, norm):
        """Count and report a step on a range `select` of sequences. Raises UnsafeState after MAX_DROPPED_STEPS.

        gradients: {name: tensor}; sequences: Rollouts or Sequences; norm: of the gradient.
        """
        self.health["dropped_steps"] += 1
        self.health["dropped_in_a_row"] += 1
        found = culprit(model, gradients, sequences, select) or "every tensor by itself is finite"
        found += f" (loss {loss:g}, gradient norm {norm:g})"
        what = (
            f"a step of iteration {iteration}, seed {self.settings.seed}, "
            f"sequences {select.start} to {select.stop - 1}"
        )
        in_a_row = self.health["dropped_in_a_row"]
        if in_a_row < MAX_DROPPED_STEPS:
            self.say(f"warning: {what} is dropped, {in_a_row} in a row: {found}")
            return
        raise UnsafeState(
            f"{in_a_row} optimizer steps in a row were not finite; the last was {what}: {found}; "
            f"lower learning_rate (now {self.settings.learning_rate:g}), "
            f"then --resume=auto goes on from {newest_name(Path(self.settings.out_dir))}; "
            "if that fails too, delete this checkpoint to go on from the one before"
        )


def columns_of(sequences, select):
    """Rollouts or Sequences -> {name: tensor} of the sequences `select`, a range."""
    part = slice(select.start, select.stop)
    return {name: tensor[part] for name, tensor in vars(sequences).items() if tensor is not None}


def finite_columns(sequences, select) -> bool:
    """Are all figures of the sequences `select` finite?"""
    return not not_finite(columns_of(sequences, select))


def culprit(model, gradients, sequences, select):
    """Name the first tensor that is not finite, in the order of computation, or None."""
    weights, batch = dict(model.named_parameters()), columns_of(sequences, select)
    for what, named in (("the weights", weights), ("the batch", batch), ("the gradient", gradients)):
        if bad := not_finite(named):
            return f"{what}: {bad}"
