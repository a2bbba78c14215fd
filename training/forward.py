"""Forward passes over a rollout's completions without gradient: by the trainer, the reference and the teacher.

N completions, T_c the longest; M completion tokens of a micro-batch. Left out: the pass that trains (grpo.py).
"""

import torch

from batch import gather
from model import autocast
from snug.device.host import borrowed, new_on_host
from snug.logprobs import head_logprobs
from snug.lora import adapters_off
from snug.memory.ledger import component


@component("rollouts")
@torch.no_grad()
def trainer_logprobs(model, rollouts, cut, settings):
    """log pi(token) of every completion token, by the forward pass of training -> (N, T_c) float32, 0 after the end.

    Each process fills in the sequences that it ran.
    """
    logprobs = torch.zeros_like(rollouts.sampling_logprobs)
    for _, micro, hidden in states(model, rollouts, cut, settings):
        with autocast(settings.dtype, model):
            values = head_logprobs(  # (M,)
                hidden,
                model.lm_head_weight,
                micro.targets,
                settings.temperature,
                n_vocab=model.config.n_vocab,
                chunk_mb=settings.logits_chunk_mb,
            )
        logprobs[micro.row, micro.place] = values.to(logprobs.dtype)
        del hidden  # before the next forward
    return logprobs


def states(model, rollouts, cut, settings):
    """Yield each micro-batch, as numbers and tensors, and the states (M, C) that predict its completion tokens."""
    for indices in cut.dealt(sum(cut.steps, []), model):
        micro = gather(rollouts, indices, cut)
        with autocast(settings.dtype, model):
            hidden = model(micro.tokens, micro.positions, mask=micro.mask)  # (1, T, C)
            hidden = micro.completion_hidden(hidden)
        yield indices, micro, hidden
        del hidden


@component("reference")
def reference_logprobs(training, rollouts, cut):
    """The same of the reference: the model without its adapters, or a model whose weights may wait on the host."""
    settings, reference = training.settings, training.reference or training.model
    with adapters_off(reference), borrowed(reference):
        cut = wider(cut, settings.reference, training.limits)
        return trainer_logprobs(reference, rollouts, cut, settings)


def wider(cut, place, limits):
    """The cut for a model whose weights are on the host: larger micro-batches, which hide the copies."""
    if place == "device":
        return cut
    return cut.again(limits.reference_batches * limits.max_tokens_per_micro_batch)


@component("teacher outputs")
def teacher_outputs(training, rollouts, cut):
    """The teacher's log-probs of all sampled tokens (N, T_c); for an exact divergence its hidden states (N, T_c, C_T).

    From the states the head makes the teacher's logits again, a chunk at a time (snug/logprobs/divergence.py). They are
    where the teacher's weights are.
    """
    settings, teacher = training.settings, training.teacher
    with borrowed(teacher):
        cut = wider(cut, settings.teacher_device, training.limits)
        run = trainer_logprobs if settings.divergence == "sampled" else teacher_states
        return run(teacher, rollouts, cut, settings)


@torch.no_grad()
def teacher_states(teacher, rollouts, cut, settings):
    """Hidden states of all sampled tokens -> (N, T_c, C_T), 0 elsewhere."""
    logprobs = rollouts.sampling_logprobs
    # A planner runs on some of an iteration's completions.
    N = max(len(logprobs), settings.sequences_per_rollout)
    dtype = teacher.lm_head_weight.dtype  # sharded, it makes no plain tensors
    empty = logprobs.new_empty(1, dtype=dtype).expand(N, logprobs.shape[1], teacher.config.n_embd)
    if settings.teacher_device == "host":
        outputs = new_on_host(empty, keep=True).zero_()
    else:
        outputs = torch.zeros_like(empty, memory_format=torch.contiguous_format)
    for indices, micro, hidden in states(teacher, rollouts, cut, settings):
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
