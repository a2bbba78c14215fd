"""AdamW, clipping and the learning rate's schedule.

The fused AdamW of PyTorch: one pass over weights, gradients and moments in place, no second copy of the parameters.
Left out, so far: moments on the host or in bfloat16.
"""

import math

import torch

from settings import SnugError


def make_optimizer(model, settings):
    """AdamW over the parameters that train; matrices and embeddings decay, vectors (norms, biases) do not, as in nanoGPT."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.adam_beta1, settings.adam_beta2), fused=True)


def learning_rate_at(iteration, settings):
    """The learning rate of iteration 0, 1, ...: a linear warmup that is over at warmup_iters, then lr_schedule.

    learning_rate 1, warmup_iters 2, linear, max_iters 6 -> 0.5, 1, 1, 0.75, 0.5, 0.25
    """
    if iteration < settings.warmup_iters:
        return settings.learning_rate * (iteration + 1) / settings.warmup_iters
    done = (iteration - settings.warmup_iters) / max(1, settings.max_iters - settings.warmup_iters)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[settings.lr_schedule]
    return settings.learning_rate * factor


def optimizer_step(model, optimizer, learning_rate, grad_clip):
    """Clip, step, and let go of the gradients -> the gradient's norm before clipping, a float. grad_clip 0: not clipped.

    Raises SnugError, with the weights as they were, where the norm is not finite.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf))
    if not math.isfinite(norm):
        raise SnugError(
            f"the gradient's norm is {norm}; lower learning_rate (now {learning_rate:g}) and take up the run with --resume=auto"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # freed: no gradient is alive during the next rollout
    return norm
