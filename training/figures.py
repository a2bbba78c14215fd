"""What the log says about an iteration's rollouts and optimizer steps."""

import math
from typing import NamedTuple

import torch

from data.rewards import repeat_columns
from loss import kl_divergence
from sample import Rollouts
from snug.device.kinds import off_mps

SAMPLES = 4  # completions of an iteration in samples.jsonl, in full groups
FIRST_STEPS = ("logprob_diff_mean", "logprob_diff_max", "mismatch_kl")


LISTS = "by_function", "columns", "episodes"  # of Scored: {name: N values} each


class Scored(NamedTuple):
    """Completions of P prompts, k each, and their rewards. N = P * k."""

    rollouts: Rollouts
    rewards: torch.Tensor  # (P, k) float32, NaN: not scored
    by_function: dict[str, list]  # {reward function: its N rewards, None: not scored}
    columns: dict[str, list]  # {name: N values} of the task's rows with their prompts, and of log_extra
    metrics: dict[str, list[float]]  # of log_metric
    episodes: dict[str, list]  # {name: N values} of Episodes.figures
    shared: int  # how many neighbours share a prompt: k, or 1

    def select(self, groups) -> "Scored":
        """The groups with these numbers, a tensor, in that order."""
        k = self.rewards.shape[1]
        sequences = (groups[:, None] * k + torch.arange(k)).flatten()  # (P * k,)
        rollouts = self.rollouts.select(sequences.to(self.rollouts.tokens.device))
        lists = {}
        for column in LISTS:
            named = getattr(self, column).items()
            lists[column] = {name: [values[i] for i in sequences] for name, values in named}
        return self._replace(rollouts=rollouts, rewards=self.rewards[groups], **lists)


def score(rollouts, episodes, prepared) -> Scored:
    """Decode the completions, call the reward functions, add up the rewards."""
    k, completions = episodes.k, episodes.finish(rollouts)
    scores = prepared.score(episodes.prompts, completions, episodes.columns(rollouts))
    totals = scores.totals or [math.nan] * len(completions)  # a teacher needs no reward functions
    rewards = torch.tensor(totals).view(-1, prepared.settings.group_size)
    columns = repeat_columns(episodes.rows, k) | scores.extra | dict(prompt=episodes.prompts)
    return Scored(rollouts, rewards, scores.by_function, columns, scores.metrics, episodes.figures(), k)


def join(parts) -> Scored:
    """Several Scored -> one, in their order."""
    if len(parts) == 1:
        return parts[0]
    return Scored(
        rollouts=Rollouts.joined([part.rollouts for part in parts]),
        rewards=torch.cat([part.rewards for part in parts]),
        shared=min(part.shared for part in parts),
        **{column: concatenated(parts, column) for column in (*LISTS, "metrics")},
    )


def concatenated(parts, column) -> dict[str, list]:
    """{name: the values of all parts}. Where a part lacks a name: None for each completion."""
    lists = {name: [] for part in parts for name in getattr(part, column)}
    for part in parts:
        none = [None] * part.rewards.numel()
        for name in lists:
            lists[name] += getattr(part, column).get(name, none)
    return lists


@torch.no_grad()
def metrics_of(loss, logprobs, entropy, micro, num_tokens):
    """A micro-batch's loss and, as token means over the step, its entropy and its distance to the sampler."""
    difference = (logprobs - micro.sampling_logprobs).abs()
    mismatch = kl_divergence(off_mps(micro.sampling_logprobs).double(), off_mps(logprobs).double())
    return dict(
        loss=loss.detach(),
        entropy=entropy.sum() / num_tokens,
        logprob_diff_mean=difference.sum() / num_tokens,
        logprob_diff_max=difference.max(),
        mismatch_kl=mismatch.sum() / num_tokens,
    )


def add_up(totals: dict, parts: list[dict]):
    """Add metrics to `totals`; for a name that ends with _max keep the largest."""
    for name, value in (item for metrics in parts for item in metrics.items()):
        before = totals.get(name, 0.0)
        totals[name] = value.clamp(min=before) if name.endswith("_max") else before + value


def moved(rollouts, device) -> Rollouts:
    """The same rollouts on another device."""
    return Rollouts(**{name: column.to(device) for name, column in rollouts.columns().items()})


def rollout_metrics(scored) -> dict[str, float]:
    """What the log says of an iteration's rollouts."""
    rollouts, rewards = scored.rollouts, scored.rewards[~scored.rewards.isnan()]
    metrics = {}
    if scored.by_function:  # not with a teacher alone
        metrics["reward_mean"] = float(rewards.mean())
        metrics["reward_std"] = float(rewards.std()) if len(rewards) > 1 else 0.0
        metrics["scored_fraction"] = len(rewards) / scored.rewards.numel()
    metrics |= dict(
        completion_length_mean=float(rollouts.completion_lengths.float().mean()),
        truncated_fraction=float((~rollouts.stopped).float().mean()),
    )
    if scored.episodes:
        metrics |= episode_metrics(scored)
    lists = {f"metric/{name}": values for name, values in scored.metrics.items()}
    if len(scored.by_function) > 1:
        lists |= {f"reward/{name}": values for name, values in scored.by_function.items()}
    for name, values in lists.items():
        numbers = [number for number in values if number is not None]
        metrics[name] = sum(numbers) / len(numbers) if numbers else None
    return metrics


def episode_metrics(scored) -> dict[str, float]:
    """Means per completion, and the share of tokens that tools wrote."""
    messages, rollouts = scored.episodes["messages"], scored.rollouts
    turns = [message for each in messages for message in each if message["role"] == "assistant"]
    N, calls = len(messages), sum(len(turn.get("tool_calls", ())) for turn in turns)
    return dict(
        turns=len(turns) / N,
        tool_calls=calls / N,
        tool_errors=sum(scored.episodes["tool_errors"]) / N,
        written_fraction=1 - float(rollouts.mask.sum() / rollouts.completion_lengths.sum()),
    )


def mean_of(steps):
    """Metrics of optimizer steps -> their means over the steps that were taken. steps: a dict a step; {} if dropped.

    FIRST_STEPS, the difference between sampler and trainer, is the first step's: later steps have other weights.
    """
    taken = list(filter(None, steps))
    if not taken:
        return {}
    means = {name: sum(metrics[name] for metrics in taken) / len(taken) for name in taken[0]}
    if steps[0]:
        means |= {name: steps[0][name] for name in FIRST_STEPS}
    return means


def sample_records(scored, entropies, tokenizer, settings) -> list[dict]:
    """Records for samples.jsonl: a dict for each completion of the first groups. entropies (N, T_c): of the last steps.

    reward: the total from which the advantage was computed; rewards: each function's, before weights. question: the
    last message of a prompt of messages. For an episode: messages, tool_errors, mask (0: a token that a tool wrote).
    tokens, logprobs, ref_logprobs, teacher_logprobs, entropies: one entry a token, the stop token included; no
    entropies if no step used the completion.
    """
    k, records = settings.group_size, []
    number = -(-SAMPLES // k) * k
    shown = scored.rollouts.select(slice(number))
    if settings.divergence != "sampled":
        shown.teacher_outputs = None  # hidden states
    shown = moved(shown, "cpu")
    per_token = dict(
        logprobs=shown.sampling_logprobs,
        ref_logprobs=shown.ref_logprobs,
        teacher_logprobs=shown.teacher_outputs,
        entropies=entropies[:number],
    )
    rewards = scored.rewards.flatten().tolist()
    for i, completion in enumerate(shown.completions()):
        prompt = shown.tokens[i, : shown.prompt_lengths[i]].tolist()
        columns = {name: values[i] for name, values in scored.columns.items()}
        asked = columns.pop("prompt", "")
        record = dict(
            group=i // k,
            prompt=tokenizer.decode(prompt),
            completion=tokenizer.decode(completion),
            reward=rewards[i],
            rewards={name: values[i] for name, values in scored.by_function.items()},
            columns=columns,
            advantage=float(shown.advantages[i]),
            stopped=bool(shown.stopped[i]),
            tokens=texts_of(completion, tokenizer.decode),
        )
        record |= {name: values[i] for name, values in scored.episodes.items()}
        if scored.episodes:
            record["mask"] = shown.mask[i, : len(completion)].tolist()
        if isinstance(asked, list):
            record["question"] = asked[-1]["content"]
        for name, values in per_token.items():
            numbers = [] if values is None else values[i, : len(completion)].tolist()
            if any(numbers) or (numbers and name != "entropies"):
                record[name] = [round(x, 4) if math.isfinite(x) else None for x in numbers]
        records.append(record)
    return records


def texts_of(ids, decode) -> list[str]:
    """The text of each id. If several ids make up a character, the last id has it and the others are empty."""
    texts, begin = [], 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[begin:end])
        # A character has at most four bytes in UTF-8.
        waits = text.endswith("\ufffd") and end - begin < 4 and end < len(ids)
        texts.append("" if waits else text)
        begin = begin if waits else end
    return texts


def groups_of(records, settings):
    """Lines of the log -> (how many groups have different rewards, how many were sampled); 0 of 0 without rewards."""
    varied, groups = 0, 0
    for record in records:
        if "frac_reward_zero_std" in record:
            sampled = settings.batch_size * record["gen_batches"]
            groups += sampled
            varied += sampled - round(sampled * record["frac_reward_zero_std"])
    return varied, groups
