"""Advantages, ratios, KL and their aggregation: pure functions of small tensors. docs/algorithm.md explains them.

P prompts, k completions of each. The M sampled tokens of a micro-batch's S sequences are concatenated, stop tokens too.
Every mean is a sum over a micro-batch divided by a count of the whole optimizer step, so micro-batches add up to the
same loss and gradient however the step was cut (except with bnpo). Names are TRL's.

Left out: models, sampling, anything of size V; critics and rewards of single tokens.
"""

import numpy as np
import torch

from settings import load_loss
from snug.device.kinds import off_mps, wide
from snug.options import SnugError


def group_advantages(rewards, scale_rewards="group", eps=1e-4):
    """rewards (P, k) -> advantages (P, k): how much better than its group was a completion? (DeepSeekMath, eq. 3.2.1)

    Centred by the group's mean, then divided by a standard deviation + eps, with Bessel's correction as in TRL: the
    group's (scale_rewards "group"), the whole batch's ("batch") or nothing ("none": Dr. GRPO). NaN means "not scored":
    it is left out of every mean and gets advantage 0. A group of one, or of equal rewards, gets 0. float64 stays
    float64; other types become float32.

        rewards [1, 0, 0, 1] -> centred [.5, -.5, -.5, .5], std 0.577 -> [.866, -.866, -.866, .866]
    """
    rewards = torch.as_tensor(rewards)
    dtype = wide(rewards.dtype)
    # float32 cannot tell rewards near 1e8 apart. In float64 the mean of equal float32 rewards is exact.
    rewards = rewards.double()
    scored = ~rewards.isnan()
    count = scored.sum(1, keepdim=True)  # (P, 1)
    centred = (rewards - rewards.nansum(1, keepdim=True) / count).masked_fill(~scored, 0)
    if scale_rewards == "group":
        scale = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    elif scale_rewards == "batch":
        distance = rewards - rewards.nansum() / scored.sum()
        scale = (distance.square().nansum() / (scored.sum() - 1).clamp(min=1)).sqrt()
    if scale_rewards != "none":
        centred = torch.where(centred == 0, 0, centred / (scale + eps))
    return centred.to(dtype)


def decoupled_advantages(by_function, k, weights):
    """F lists of P * k rewards, None: not scored -> advantages (P, k): GDPO (arXiv 2601.05242), as in TRL.

    Each function's own advantages are weighted, added, and scaled again over the whole batch.

        right [1, 0, 0, 1], points [10, 0, 10, 0]: [.866, -.866, -.866, .866] + [.866, -.866, .866, -.866]
        = [1.73, -1.73, 0, 0] -> [1.22, -1.22, 0, 0]. The plain sum [11, 0, 10, 1] gives [.95, -.95, .78, -.78]
    """
    rewards = torch.tensor(np.array(by_function, np.float32))  # (F, P * k); None becomes NaN
    each = group_advantages(rewards.view(-1, k)).view(rewards.shape)
    total = (each.T * torch.tensor(weights)).sum(1)
    total[rewards.isnan().all(0)] = torch.nan
    return group_advantages(total[None]).view(-1, k)


def kl_divergence(logprobs, ref_logprobs):
    """Estimates of KL(policy || reference) from tokens of the policy, (M,) each: r - 1 - log r, Schulman's k3 (2020),
    with log r = ref_logprob - logprob. Unbiased, never negative. Its mean gradient is KL(reference || policy)'s.

    policy_loss multiplies k3 by the ratio, which gives the gradient of KL(policy || reference), also for stale tokens
    (Tang & Munos 2025, DeepSeek-V3.2). With kl_estimator "k3_no_ratio" it does not (DeepSeekMath).
    """
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def sequence_sum(values, lengths):
    """values (M,), one sequence after the other, lengths (S,) -> the sum over each sequence (S,).

    It adds in a fixed order: `index_add` of floats would not, on CUDA. unsafe: the host does not check the lengths.

        values 1 2 3 4 5, lengths 3 2 -> 6 9
    """
    sums = torch.segment_reduce(off_mps(values), "sum", lengths=off_mps(lengths).long(), unsafe=True)
    return sums.to(values.device)


def sequence_ratio(log_ratio, sequence, lengths):
    """exp of the mean of a sequence's log ratios, at each of its tokens (M,). Gradients too add in a fixed order."""
    ratio = torch.exp(sequence_sum(log_ratio, lengths) / lengths)  # (S,)
    return torch.embedding(ratio[:, None], sequence).squeeze(1)


# Surrogates -> the loss of each token (M,), and whether clipping stopped its gradient (M,). policy_loss passes every
# argument by name, and a surrogate names those that it uses; **rest takes the others. lengths (S,), all others (M,).


def clipped_surrogate(ratio, advantages, options, **rest):
    """-min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A)      (PPO, eq. 7; epsilon_high: DAPO, eq. 10)"""
    high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    clipped = ratio.clamp(1 - options.epsilon, 1 + high) * advantages
    unclipped = ratio * advantages
    return -torch.min(unclipped, clipped), clipped < unclipped


def cispo_surrogate(ratio, logprobs, advantages, options, **rest):
    """-stop_gradient(min(ratio, epsilon_high)) A logprob: bounds a weight, stops no gradient    (MiniMax-M1, eq. 4)
    epsilon_high is the largest ratio itself, as in TRL, not its distance from 1: 0.28 would quarter every gradient.
    """
    weight = ratio.clamp(max=options.epsilon_high).detach()
    return -weight * advantages * logprobs, (ratio > options.epsilon_high) & (advantages != 0)


def sapo_surrogate(ratio, advantages, options, **rest):
    """-sigmoid(t (ratio - 1)) 4 / t A, t = sapo_temperature_pos or _neg by A's sign             (arXiv 2511.20347)"""
    t = torch.where(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
    return -torch.sigmoid(t * (ratio - 1)) * 4 / t * advantages, torch.zeros_like(ratio)


def own_surrogate(logprobs, options, **rest):
    """The user's function (loss_type). Raises SnugError if it does not return a loss for each token."""
    values = load_loss(options.loss_type, options.out_dir)(logprobs=logprobs, options=options, **rest)
    shape = getattr(values, "shape", None)
    if shape != logprobs.shape or logprobs.requires_grad and not values.requires_grad:
        raise SnugError(
            f"loss_type={options.loss_type} must return a loss for each token, a tensor [{len(logprobs)}] with a "
            f"gradient, not {type(values).__name__} {list(shape or [])}"
        )
    return values, 0 * logprobs.detach()


SURROGATES = dict(
    clipped=clipped_surrogate, cispo=cispo_surrogate, sapo=sapo_surrogate, own=own_surrogate
)


def token_weights(sequence, lengths, options, num_tokens, num_sequences, num_micro_batches=1):
    """The factor of each token's loss in the sum: (M,), or a number if all are alike. By options.loss.average:

    token        1 / num_tokens                        every token of the step counts alike (DAPO, eq. 8)
    sequence     1 / (num_sequences * its length)      every sequence counts alike (DeepSeekMath, eq. 3)
    sum          1 / num_sequences                     a sequence counts by its length (LUSPO, arXiv 2602.05261)
    constant     1 / (num_sequences * max_new_tokens)  a constant, so length earns nothing (Dr. GRPO, sec. 3.1)
    micro-batch  1 / (M * num_micro_batches)           BNPO: a mean of micro-batches' means, which depends on the cut
    """
    average = options.loss.average
    if average == "sequence":
        return 1 / (num_sequences * lengths[sequence])
    if average == "sum":
        return 1 / num_sequences
    if average == "constant":
        return 1 / (num_sequences * options.max_new_tokens)
    if average == "micro-batch":
        return 1 / (lengths.sum() * num_micro_batches)
    return 1 / num_tokens


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    sequence,
    lengths,
    ref_logprobs=None,
    *,
    options,
    num_tokens,
    num_sequences,
    num_micro_batches=1,
    sampling_logprobs=None,
    teacher_logprobs=None,
    divergence=None,
):
    """The sum over tokens of token_weights * (min(pi_trainer / pi_sampler, cap) * surrogate + beta * KL
    + teacher_coef * divergence) -> (loss, metrics): the step's share.

    logprobs, old_logprobs, ref_logprobs, sampling_logprobs (M,); advantages, lengths (S,); sequence (M,) in [0, S).
    teacher_logprobs (M,): each token's advantage gets teacher_coef * (teacher_logprob - old_logprob). Or divergence
    (M,) from the teacher, over the vocabulary, with a gradient. options: settings.GRPOSettings. num_...: counts of the
    whole optimizer step, known before any forward pass.

    The (M,) arguments may have a chunk of the micro-batch's tokens (not if options.needs_whole_sequences); lengths and
    counts have all. Right after a rollout every ratio is 1. If a group's completions are equally long, its loss is then
    0, because its advantages add up to 0; the gradient is not 0.
    metrics: `kl`, `divergence`, `clip_fraction`, token means over the step, without gradient; the shares of
    micro-batches add up.
    """
    lengths = lengths.to(logprobs.dtype)
    token_advantages = advantages[sequence]  # (M,)
    if teacher_logprobs is not None:
        token_advantages = token_advantages + options.teacher_coef * (teacher_logprobs - old_logprobs)
    # How much likelier a token has become since the rollout (PPO, eq. 6), or the tokens of its sequence (GSPO, eq. 7).
    if options.importance_sampling_level == "sequence":
        ratio = sequence_ratio(logprobs - old_logprobs, sequence, lengths)
    else:
        ratio = torch.exp(logprobs - old_logprobs)
    columns = dict(logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, ratio=ratio)
    columns |= dict(advantages=token_advantages, sequence=sequence, lengths=lengths, options=options)
    surrogate = SURROGATES[options.loss.surrogate]
    per_token, clipped = surrogate(**columns, num_tokens=num_tokens, num_sequences=num_sequences)
    if options.importance_sampling_cap is not None:
        correction = torch.exp(old_logprobs - sampling_logprobs)  # Yao et al. 2025
        per_token = per_token * correction.clamp(max=options.importance_sampling_cap)
    metrics = {"clip_fraction": clipped.sum() / num_tokens}
    if ref_logprobs is not None:
        kl = kl_divergence(logprobs, ref_logprobs)
        metrics["kl"] = kl.detach().sum() / num_tokens
        if options.kl_estimator == "k3":
            kl = kl * ratio
        per_token = per_token + options.beta * kl
    if teacher_logprobs is not None:
        metrics["divergence"] = (logprobs.detach() - teacher_logprobs).sum() / num_tokens
    if divergence is not None:
        metrics["divergence"] = divergence.detach().sum() / num_tokens
        per_token = per_token + options.teacher_coef * divergence
    weights = token_weights(sequence, lengths, options, num_tokens, num_sequences, num_micro_batches)
    return (per_token * weights).sum(), metrics
