"""Advantages, ratios, KL and their aggregation: pure functions of small tensors. docs/algorithm.md explains them with numbers.

P prompts, k completions of each; S sequences and M completion tokens of a micro-batch, flat, the stop token included.
Every mean is a sum over a micro-batch divided by a count of the whole optimizer step, so micro-batches add up to the
same loss and gradient however the step was cut (but for bnpo, which is defined otherwise). Names are TRL's.

Left out: models, sampling, anything of size V; critics and rewards of single tokens.
"""

import torch

# ----------------------------------------------------------------------------------------------------------------------
# From rewards to advantages.


def group_advantages(rewards, scale_rewards="group", eps=1e-4, baseline="mean"):
    """rewards (P, k) -> advantages (P, k): how much better than its group a completion did (DeepSeekMath, eq. 3.2.1).

    Centred by the group's mean ("mean") or by the mean of the k - 1 others ("leave_one_out": RLOO, Ahmadian et al. 2024, eq. 9),
    then divided by a standard deviation + eps, with Bessel's correction as in TRL: the group's ("group"), the whole batch's
    ("batch") or nothing ("none", Dr. GRPO). NaN is "not scored": out of every mean, advantage 0. A group of one, or of equal
    rewards: 0. float64 stays float64; anything else becomes float32.

        rewards [1, 0, 0, 1] -> centred [.5, -.5, -.5, .5], std 0.577 -> [.866, -.866, -.866, .866]
                         leave_one_out [.667, -.667, -.667, .667]: k / (k - 1) times as much
    """
    rewards = torch.as_tensor(rewards)
    dtype = rewards.dtype if rewards.dtype == torch.float64 else torch.float32
    rewards = rewards.double()  # rewards 1e8 apart from 0 differ by less than float32 can tell
    scored = ~rewards.isnan()
    count = scored.sum(1, keepdim=True)  # (P, 1)
    centred = (rewards - rewards.nansum(1, keepdim=True) / count).masked_fill(~scored, 0)
    # A mean of equal rewards can be off by one rounding, which a standard deviation near 0 would blow up.
    first = rewards.gather(1, scored.int().argmax(1, keepdim=True))
    centred[((rewards == first) | ~scored).all(1)] = 0
    if scale_rewards == "group":
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    elif scale_rewards == "batch":
        std = rewards[scored].std() if scored.sum() > 1 else 0.0
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards={scale_rewards!r} is not one of group, batch, none")
    if baseline == "leave_one_out":
        centred = centred * count / (count - 1).clamp(min=1)
    elif baseline != "mean":
        raise ValueError(f"baseline={baseline!r} is not one of mean, leave_one_out")
    if scale_rewards != "none":
        centred = torch.where(centred == 0, 0, centred / (std + eps))
    return centred.to(dtype)


def overlong_punishment(lengths, max_new_tokens, soft_punish_cache):
    """lengths (N,), stop tokens included -> (N,) in [-1, 0], to be added to the rewards (DAPO, eq. 13: soft overlong punishment).

    0 up to max_new_tokens - soft_punish_cache, then down to -1 at max_new_tokens. 32 and 8: 0 at 24, -0.5 at 28, -1 at 32.
    """
    return -((lengths - (max_new_tokens - soft_punish_cache)) / soft_punish_cache).clamp(0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Pieces of the loss.


def kl_divergence(logprobs, ref_logprobs, estimator="k3"):
    """Schulman's estimates of KL(policy || reference) from tokens of the policy, each (M,), with log r = ref_logprob - logprob.

    k1  -log r              unbiased, may be negative. Its gradient has mean 0: of use in a reward, of none in a loss
    k2  (log r)^2 / 2       biased, but its gradient is that of the KL, in the mean
    k3  r - 1 - log r       unbiased and never negative; its gradient is that of KL(reference || policy), in the mean
    times the ratio         (use_bias_correction_kl) k1 and k3 have the gradient of the KL, and k2 has not; stale tokens are weighed too

    verl calls them kl, mse and low_var_kl. (Schulman 2020, "Approximating KL divergence"; gradients: Tang & Munos 2025; the ratio: DeepSeek-V3.2.)
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"kl_estimator={estimator!r} is not one of k1, k2, k3")


def sequence_mean(values, sequence, lengths):
    """values, sequence (M,), lengths (S,) -> the mean of each sequence (S,)."""
    return values.new_zeros(len(lengths)).index_add(0, sequence, values) / lengths


def importance_ratio(logprobs, old_logprobs, sequence, lengths, level="token"):
    """How much likelier a token has become since the rollout, (M,).

    token     exp(logprob - old_logprob)                                                  (PPO, eq. 6)
    sequence  exp of the mean of that difference over the token's sequence, at each token  (GSPO, eq. 7)
    """
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        return torch.exp(sequence_mean(log_ratio, sequence, lengths))[sequence]
    if level != "token":
        raise ValueError(f"importance_sampling_level={level!r} is not one of token, sequence")
    return torch.exp(log_ratio)


def truncated_importance(old_logprobs, sampling_logprobs, cap):
    """min(pi_trainer / pi_sampler, cap) before the first step, (M,): multiplies the surrogate (Yao et al. 2025, truncated importance sampling)."""
    return torch.exp(old_logprobs - sampling_logprobs).clamp(max=cap)


def surrogate(ratio, logprobs, advantages, loss_type="dapo", epsilon=0.2, epsilon_high=None, delta=None):
    """-> what is to be minimised at each token (M,), and whether its gradient is cut there (M,). All arguments (M,).

        -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A)       (PPO, eq. 7; epsilon_high: DAPO, eq. 10)
        delta bounds the unclipped ratio from above, which matters where A < 0   (INTELLECT-2: two-sided clipping)
        cispo: -stop_gradient(min(ratio, epsilon_high)) A logprob            (MiniMax-M1, eq. 4)

    Clipping stops a token's gradient; CISPO's never stops, its weight is bounded. Mind the bound: for cispo epsilon_high is the
    largest ratio itself, as in TRL, not its distance from 1; 0.28 there would shrink every gradient to a fourth.
    """
    if loss_type == "cispo":
        return -ratio.clamp(max=epsilon_high).detach() * advantages * logprobs, (ratio > epsilon_high) & (
            advantages != 0
        )
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)) * advantages
    bounded = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    cut = clipped < bounded
    return -torch.min(bounded, clipped), cut if delta is None else cut | ((ratio > delta) & (advantages < 0))


def token_weights(sequence, lengths, *, num_tokens, num_sequences, loss_type, max_new_tokens=None, num_micro_batches=1):
    """What each token's loss is multiplied by before the sum: (M,), or a number where all are alike.

    dapo, cispo  1 / num_tokens                              every token of the step counts alike (DAPO, eq. 8)
    grpo         1 / (num_sequences * its sequence's length) every sequence counts alike (DeepSeekMath, eq. 3): short ones' tokens weigh more
    dr_grpo      1 / (num_sequences * max_new_tokens)        a constant, so that length earns nothing (Dr. GRPO, sec. 3.1): gradients
                                                             shrink with completions much shorter than that
    bnpo         1 / (M * num_micro_batches)                 a mean of micro-batches' means: depends on how the step was cut
    """
    if loss_type in ("dapo", "cispo"):
        return 1 / num_tokens
    if loss_type == "grpo":
        return 1 / (num_sequences * lengths[sequence])
    if loss_type == "dr_grpo":
        return 1 / (num_sequences * max_new_tokens)
    if loss_type == "bnpo":
        return 1 / (lengths.sum() * num_micro_batches)
    raise ValueError(f"loss_type={loss_type!r} is not one of dapo, grpo, bnpo, dr_grpo, cispo")


# ----------------------------------------------------------------------------------------------------------------------
# The loss.


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
    kl_estimator="k3",
    use_bias_correction_kl=False,
    correction=None,
    num_micro_batches=1,
):
    """sum of token_weights * (correction * surrogate + beta * KL) -> (loss, metrics), both shares of the whole optimizer step.

    logprobs, old_logprobs, ref_logprobs, correction (M,); advantages, lengths (S,); sequence (M,) in [0, S).
    num_tokens, num_sequences, num_micro_batches: of the whole step, known before any forward.
    correction: `truncated_importance`, where the sampler is not quite the trainer. The other options are those of the functions above.

    A part of the tokens will do, with the lengths and counts of all, at level "token"; a sequence's ratio needs all of its tokens.
    On the first step after a rollout the ratio is 1 up to rounding and a group's advantages add up to 0, so the surrogate
    is 0 where a group's completions are equally long, and with loss_type="grpo" always; its gradient is not.
    metrics: `kl`, `clip_fraction`: token means over the step, without gradient; shares of micro-batches add up.
    """
    lengths = lengths.to(logprobs.dtype)
    A = advantages[sequence]  # (M,)
    ratio = importance_ratio(logprobs, old_logprobs, sequence, lengths, importance_sampling_level)
    per_token, cut = surrogate(ratio, logprobs, A, loss_type, epsilon, epsilon_high, delta)
    if correction is not None:
        per_token = per_token * correction
    metrics = {"clip_fraction": cut.sum() / num_tokens}
    if ref_logprobs is not None:
        metrics["kl"] = kl_divergence(logprobs.detach(), ref_logprobs).sum() / num_tokens
        if beta:
            kl = kl_divergence(logprobs, ref_logprobs, kl_estimator)
            per_token = per_token + beta * (kl * ratio if use_bias_correction_kl else kl)
    counts = dict(num_tokens=num_tokens, num_sequences=num_sequences, num_micro_batches=num_micro_batches)
    weights = token_weights(sequence, lengths, **counts, loss_type=loss_type, max_new_tokens=max_new_tokens)
    return (per_token * weights).sum(), metrics
