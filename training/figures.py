"""What the log says about an iteration's rollouts and optimizer steps."""

import torch


def as_floats(totals: dict) -> dict[str, float]:
    """{name: number or scalar tensor} -> {name: float}, in one transfer: the host waits for the device once."""
    device = next((value.device for value in totals.values() if isinstance(value, torch.Tensor)), "cpu")
    values = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in totals.values()]
    return dict(zip(totals, torch.stack(values).tolist(), strict=True))


def rollout_metrics(rollouts, rewards, parts):
    """The log's figures of an iteration's rollouts. rewards (groups, k); parts: {function: answers}, one a rollout."""
    scored = rewards[~rewards.isnan()]
    metrics = dict(
        reward_mean=float(scored.mean()),
        reward_std=float(scored.std()) if len(scored) > 1 else 0.0,
        completion_length_mean=float(rollouts.completion_lengths.float().mean()),
        truncated_fraction=float((~rollouts.stopped).float().mean()),
        tokens=int(rollouts.completion_lengths.sum()),
        gen_batches=len(parts),
    )
    for name in parts[0] if len(parts[0]) > 1 else ():
        said = [answer for part in parts for answer in part[name] if answer is not None]
        metrics[f"reward/{name}"] = sum(said) / len(said) if said else None
    return metrics


def mean_of_steps(steps):
    """Metrics of optimizer steps -> their means over the steps that were taken. steps: a dict a step; None if dropped.

    The difference between sampler and trainer is the first step's: later ones have other weights.
    """
    taken = [metrics for metrics in steps if metrics is not None]
    means = {name: sum(metrics[name] for metrics in taken) / len(taken) for name in (taken[0] if taken else ())}
    first = steps[0] if steps and steps[0] else {}
    return means | {name: first[name] for name in ("logprob_diff_mean", "logprob_diff_max", "mismatch_kl") if first}
