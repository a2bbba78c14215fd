"""What the log says about an iteration's rollouts and optimizer steps."""

import math
from typing import NamedTuple

import torch

from sample import Rollouts


class Scored(NamedTuple):
    """Completions of P prompts, k each, and what they earned."""

    rollouts: Rollouts  # N = P * k
    rewards: torch.Tensor  # (P, k) float32, NaN: not scored
    by_function: dict[str, list]  # {reward function: its N rewards, None: not scored}


def as_floats(totals: dict) -> dict[str, float]:
    """{name: number or scalar tensor} -> {name: float}, in one transfer: the host waits for the device once."""
    device = next((value.device for value in totals.values() if isinstance(value, torch.Tensor)), "cpu")
    values = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in totals.values()]
    return dict(zip(totals, torch.stack(values).tolist(), strict=True))


def rollout_metrics(rollouts, rewards, rounds: list[Scored]) -> dict[str, float]:
    """What the log says of an iteration's rollouts. rewards (groups, k) of all rounds, lengths punished."""
    scored = rewards[~rewards.isnan()]
    metrics = dict(
        reward_mean=float(scored.mean()),
        reward_std=float(scored.std()) if len(scored) > 1 else 0.0,
        completion_length_mean=float(rollouts.completion_lengths.float().mean()),
        truncated_fraction=float((~rollouts.stopped).float().mean()),
        tokens=int(rollouts.completion_lengths.sum()),
        gen_batches=len(rounds),
    )
    functions = rounds[0].by_function
    for name in functions if len(functions) > 1 else ():
        numbers = [
            number for scored in rounds for number in scored.by_function[name] if number is not None
        ]
        metrics[f"reward/{name}"] = sum(numbers) / len(numbers) if numbers else None
    return metrics


def mean_of_steps(steps):
    """Metrics of optimizer steps -> their means over the steps that were taken. steps: a dict a step; None if dropped.

    The difference between sampler and trainer is the first step's: later ones have other weights.
    """
    taken = [metrics for metrics in steps if metrics is not None]
    means = {
        name: sum(metrics[name] for metrics in taken) / len(taken)
        for name in (taken[0] if taken else ())
    }
    first = steps[0] if steps and steps[0] else {}
    return means | {
        name: first[name] for name in ("logprob_diff_mean", "logprob_diff_max", "mismatch_kl") if first
    }


def sample_records(rollouts, rewards, entropies, tokenizer, settings):
    """The first groups for samples.jsonl, a dict a completion. entropies (N, T_c): those of the last optimizer steps.

    The reward is the one that the advantage was computed from. tokens, logprobs, ref_logprobs, entropies: one entry a
    token, the stop token included; without entropies if no step was taken on the completion.
    """
    k, rewards = settings.group_size, rewards.flatten().tolist()
    shown = range(min(-(-settings.samples_per_iteration // k) * k, len(rewards)))
    columns = dict(
        logprobs=rollouts.sampling_logprobs, ref_logprobs=rollouts.ref_logprobs, entropies=entropies
    )
    columns = {
        name: value[: len(shown)].tolist() for name, value in columns.items() if value is not None
    }
    advantages, tokens = (
        values[: len(shown)].tolist() for values in (rollouts.advantages, rollouts.tokens)
    )
    completions, records = rollouts.select(shown).completions(), []
    lengths = zip(rollouts.prompt_lengths.tolist(), rollouts.completion_lengths.tolist(), strict=True)
    for i, (p, c) in zip(shown, lengths, strict=False):
        record = dict(
            group=i // k,
            prompt=tokenizer.decode(tokens[i][:p]),
            completion=tokenizer.decode(completions[i]),
        )
        record |= dict(reward=rewards[i], advantage=advantages[i], stopped=bool(rollouts.stopped[i]))
        record["tokens"] = texts_of(tokens[i][p : p + c], tokenizer.decode)
        figures = {
            name: [round(x, 4) if math.isfinite(x) else None for x in v[i][:c]]
            for name, v in columns.items()
        }
        records.append(
            record | {name: its for name, its in figures.items() if name != "entropies" or any(its)}
        )
    return records


def texts_of(tokens, decode):
    """Ids -> the text of each. If tokens share a character, the last of them has it and the others are empty."""
    texts, waiting = [], []
    for token in tokens:
        waiting.append(token)
        text = decode(waiting)
        whole = len(waiting) == 4 or not text.endswith(
            "\ufffd"
        )  # a character has at most four bytes in UTF-8
        texts.append(text if whole else "")
        waiting = [] if whole else waiting
    return texts[:-1] + [decode(waiting)] if waiting else texts
