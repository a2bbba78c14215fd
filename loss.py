"""Advantages, ratios, KL and their aggregation: pure functions of small tensors.

P prompts, k completions of each; S sequences and M completion tokens of a micro-batch, flat, the stop token included.
Every mean is a sum over a micro-batch divided by a count of the whole optimizer step, so micro-batches add up to the
same loss and gradient however the step was cut. Names are TRL's. Left out: models, sampling, anything of size V.
"""

import torch


def group_advantages(rewards, scale_rewards="group", eps=1e-4):
    """rewards (P, k) -> advantages (P, k): how much better than its group a completion did (DeepSeekMath, eq. 3.2.1).

    centred by the group's mean and divided by a standard deviation + eps, with Bessel's correction as in TRL: the
    group's ("group"), the whole batch's ("batch") or nothing ("none", Dr. GRPO). A group of one, or of equal rewards: 0.

        rewards [1, 0, 0, 1] -> centred [.5, -.5, -.5, .5], std 0.577 -> [.866, -.866, -.866, .866]
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    if rewards.shape[1] < 2:
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean(1, keepdim=True)
    # A mean of equal rewards can be off by one rounding, which a standard deviation near 0 would blow up.
    centred[(rewards == rewards[:, :1]).all(1)] = 0
    if scale_rewards == "group":
        return centred / (rewards.std(1, keepdim=True) + eps)
    if scale_rewards == "batch":
        return centred / (rewards.std() + eps)
    return centred


def k3(logprobs, ref_logprobs):
    """Schulman's k3 estimate of KL(policy || reference), token by token: r - log r - 1 with r = p_ref / p. Never negative."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def token_weights(sequence, lengths, *, num_tokens, num_sequences, loss_type, max_new_tokens=None):
    """What each token's loss is multiplied by before the sum: (M,), or a number where all are alike.

    dapo     1 / num_tokens                              every token of the step counts alike (DAPO, eq. 8)
    grpo     1 / (num_sequences * its sequence's length) every sequence counts alike (DeepSeekMath, eq. 3)
    dr_grpo  1 / (num_sequences * max_new_tokens)        a constant, so that length earns nothing (Dr. GRPO)
    """
    if loss_type == "dapo":
        return 1 / num_tokens
    if loss_type == "grpo":
        return 1 / (num_sequences * lengths[sequence])
    if loss_type == "dr_grpo":
        return 1 / (num_sequences * max_new_tokens)
    raise ValueError(f"loss_type={loss_type!r} is not one of dapo, grpo, dr_grpo")


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    sequence,
    lengths,
    ref_logprobs=None,
    *,
    num_tokens,
    num_sequences,
    loss_type="dapo",
    beta=0.0,
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
    importance_sampling_level="token",
    max_new_tokens=None,
):
    """The clipped surrogate of GRPO with its KL penalty -> (loss, metrics), both shares of the whole optimizer step.

    logprobs, old_logprobs, ref_logprobs (M,); advantages, lengths (S,); sequence (M,) in [0, S).
    num_tokens, num_sequences: of the whole step, known before any forward.

        ratio = exp(logprob - old_logprob)
        loss  = -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A) + beta k3     (PPO, eq. 7; DeepSeekMath, eq. 3)
        delta bounds the unclipped ratio from above, which matters where A < 0            (INTELLECT-2's two-sided clipping)

    On the first step after a rollout the ratio is 1 up to rounding and a group's advantages add up to 0, so the surrogate
    is 0 where a group's completions are equally long, and with loss_type="grpo" always; its gradient is not.
    importance_sampling_level: "token", the one there is so far.
    metrics: `kl`, `clip_fraction`: token means over the step, without gradient; shares of micro-batches add up.
    """
    if importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level={importance_sampling_level!r} is not token")
    A = advantages[sequence]  # (M,)
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    per_token = -torch.min(bounded * A, clipped * A)  # (M,)
    with torch.no_grad():
        metrics = {"clip_fraction": (clipped * A < bounded * A).sum() / num_tokens}
    if ref_logprobs is not None:
        kl = k3(logprobs, ref_logprobs)
        metrics["kl"] = kl.detach().sum() / num_tokens
        if beta:
            per_token = per_token + beta * kl
    weights = token_weights(
        sequence,
        lengths.to(logprobs.dtype),
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        loss_type=loss_type,
        max_new_tokens=max_new_tokens,
    )
    return (per_token * weights).sum(), metrics
