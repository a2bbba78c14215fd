"""Optimizer steps with a loss or gradient that is not finite: they are dropped, explained in log.txt, and counted.

The line in the log has the iteration, the seed, the sequences and the loss. With these and an earlier checkpoint you
can reach the step again. After MAX_DROPPED_STEPS in a row the run stops, and its state is not saved: the weights may be
ruined although they are finite.
"""

from pathlib import Path

from runs.saver import UnsafeState, newest_name
from snug.memory.ledger import not_finite

MAX_DROPPED_STEPS = 5


HEALTH = {"dropped_steps": 0, "dropped_in_a_row": 0}  # of a run; dropped_in_a_row: the last ones


def drop(training, iteration, model, gradients, sequences, select, loss, norm):
    """Count and report a step on a range `select` of sequences. Raises UnsafeState after MAX_DROPPED_STEPS in a row.

    gradients: {name: tensor}; sequences: Rollouts or Sequences; norm: the gradient's norm.
    """
    health, settings = training.health, training.settings
    health["dropped_steps"] += 1
    health["dropped_in_a_row"] += 1
    in_a_row = health["dropped_in_a_row"]
    what = (
        f"a step of iteration {iteration}, seed {settings.seed}, "
        f"sequences {select.start} to {select.stop - 1}"
    )
    # The first tensor that is not finite, in the order of computation
    named = {f"the weights: {name}": p for name, p in model.named_parameters()}
    named |= {f"the batch: {name}": x for name, x in sequences.columns(select).items()}
    named |= {f"the gradient: {name}": x for name, x in gradients.items()}
    found = not_finite(named) or "every tensor by itself is finite"
    found += f" (loss {loss:g}, gradient norm {norm:g})"
    if in_a_row < MAX_DROPPED_STEPS:
        training.log.say(f"warning: {what} is dropped, {in_a_row} in a row: {found}")
        return
    raise UnsafeState(
        f"{in_a_row} optimizer steps in a row were not finite; the last was {what}: {found}; "
        f"lower learning_rate (now {settings.learning_rate:g}), "
        f"then --resume=auto goes on from {newest_name(Path(settings.out_dir))}; "
        "if that fails too, delete this checkpoint"
    )
