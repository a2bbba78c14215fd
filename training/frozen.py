"""Forward passes of models that do not train. Left out: the log-probs of a reference or a teacher (grpo.py)."""

import torch

from batch import make_micro_batch
from model import autocast
from snug.device.host import borrowed, new_on_host
from snug.memory.ledger import component


def run_frozen(function, model, place, training, rollouts, cut):
    """function(model, rollouts, cut, settings). place: where the model's weights are.

    From the host they come now, and the micro-batches are larger, which hides the copies.
    """
    if place == "host":
        cut = cut.with_limit(
            training.limits.reference_batches * training.limits.max_tokens_per_micro_batch
        )
    with borrowed(model):
        return function(model, rollouts, cut, training.settings)


@component("teacher outputs")
@torch.no_grad()
def teacher_states(teacher, rollouts, cut, settings):
    """Hidden states of all sampled tokens -> (N, T_c, C_T), 0 elsewhere; where the teacher's weights are."""
    logprobs = rollouts.sampling_logprobs
    # A planner runs on some of an iteration's completions.
    N = max(len(logprobs), settings.sequences_per_rollout)
    dtype = teacher.lm_head_weight.dtype  # sharded, it makes no plain tensors
    empty = logprobs.new_empty(1, dtype=dtype).expand(N, logprobs.shape[1], teacher.config.n_embd)
    if settings.teacher_device == "host":
        outputs = new_on_host(empty, keep=True).zero_()
    else:
        outputs = torch.zeros_like(empty, memory_format=torch.contiguous_format)
    for indices in cut.mine(sum(cut.steps, []), teacher):
        micro = make_micro_batch(rollouts, indices, cut)
        with autocast(settings.dtype, teacher):
            hidden = micro.completion_hidden(teacher)
        write_states(outputs, cut, indices, micro.place, hidden)
        del hidden  # before the next forward
    return outputs


def write_states(outputs, cut, indices, places, hidden):
    """hidden (M, C_T) at places (M,) into outputs (N, T_c, C_T), a sequence at a time.

    The host does not wait for copies. The meter does, at the end of the phase, before the host reads outputs.
    """
    sizes = [len(cut.places[i]) for i in indices]
    for i, place, values in zip(indices, places.split(sizes), hidden.split(sizes), strict=True):
        row = hidden.new_zeros(outputs.shape[1:])
        row[place] = values
        outputs[i].copy_(row, non_blocking=True)
