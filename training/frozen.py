"""Log-probs before the first step, by forward passes without gradient: the trainer's, a reference's, a teacher's."""

import torch

from batch import make_micro_batch
from model import autocast
from snug.device.host import borrowed, new_on_host
from snug.logprobs import head_logprobs
from snug.lora import adapters_off
from snug.memory.ledger import component


def add_logprobs(rollouts, cut, training):
    """Give the rollouts the columns (N, T_c) that the loss compares with.

    The model itself samples, so the sampler's log-probs are the old log-probs, without a forward pass.
    importance_sampling_cap corrects for the difference between sampler and trainer: then the old are the trainer's.
    """
    settings = training.settings

    def of_all(phase, function, *arguments, **options):
        """Each process fills in its own sequences."""
        values = training.attempt(phase, function, *arguments, cut=cut, **options)
        training.processes.add(values)
        return values

    rollouts.old_logprobs = rollouts.sampling_logprobs
    if settings.importance_sampling_cap is not None:
        rollouts.old_logprobs = of_all(
            "reference", trainer_logprobs, training.model, rollouts, settings=settings
        )
    if settings.beta:
        rollouts.ref_logprobs = of_all("reference", reference_logprobs, training, rollouts)
    if settings.teacher:
        rollouts.teacher_outputs = of_all("teacher", teacher_outputs, training, rollouts)


@component("rollouts")
@torch.no_grad()
def trainer_logprobs(model, rollouts, cut, settings):
    """log pi(token) of every completion token, by the forward pass of training -> (N, T_c) float32.

    0 after a completion's end, and in the sequences of other processes.
    """
    logprobs = torch.zeros_like(rollouts.sampling_logprobs)
    for indices in cut.mine(sum(cut.steps, []), model):
        micro = make_micro_batch(rollouts, indices, cut)
        with autocast(settings.dtype, model):
            hidden = micro.completion_hidden(model)
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


def reference_logprobs(training, rollouts, cut):
    """trainer_logprobs of the reference: the model without its adapters, or one whose weights may be on the host."""
    reference = training.reference or training.model
    with adapters_off(reference):
        return run_frozen(trainer_logprobs, reference, training, rollouts, cut)


def teacher_outputs(training, rollouts, cut):
    """trainer_logprobs of the teacher; unless divergence is "sampled" hidden states (N, T_c, C_T), where it is.

    From these states the head computes the teacher's logits again, a chunk at a time (snug/logprobs/divergence.py).
    """
    outputs = trainer_logprobs if training.settings.divergence == "sampled" else teacher_states
    return run_frozen(outputs, training.teacher, training, rollouts, cut)


def run_frozen(function, model, training, rollouts, cut):
    """function(model, rollouts, cut, settings).

    A model whose weights are on the host gets them now, and larger micro-batches, which hide the copies.
    """
    if hasattr(model, "streamed"):
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
    dtype = teacher.lm_head_weight.dtype  # a sharded weight itself makes no plain tensors
    empty = logprobs.new_empty(1, dtype=dtype).expand(N, logprobs.shape[1], teacher.config.n_embd)
    if settings.teacher_device == "host":
        outputs = new_on_host(empty, keep=True).zero_()
    else:
        outputs = torch.zeros_like(empty, memory_format=torch.contiguous_format)
    for indices in cut.mine(sum(cut.steps, []), teacher):
        micro = make_micro_batch(rollouts, indices, cut)
        with autocast(settings.dtype, teacher):
            hidden = micro.completion_hidden(teacher)
        # The host does not wait for the copies. The meter waits, at the phase's end, before the host reads outputs.
        sizes = [len(cut.places[i]) for i in indices]
        for i, place, values in zip(
            indices, micro.place.split(sizes), hidden.split(sizes), strict=True
        ):
            row = hidden.new_zeros(outputs.shape[1:])  # (T_c, C_T)
            row[place] = values
            outputs[i].copy_(row, non_blocking=True)
        del hidden, values, row  # before the next forward
    return outputs
