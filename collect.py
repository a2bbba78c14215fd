"""The groups that an iteration learns from: prompts, their completions, and what reward functions say of them.

One rollout, or with max_num_gen_batches as many as it takes until no group's rewards are all equal (DAPO's dynamic sampling).
Left out: advantages, which are loss.py's; anything with a gradient.
"""

from functools import partial

import torch

from evaluate import columns_of
from loss import overlong_punishment
from memory import surviving
from model import autocast
from plan import halve_rollout_batch
from reward import total_rewards
from sample import Rollouts, decode_batch, sample_groups


def collect(iteration, training):
    """Groups to learn from, and their rewards -> (Rollouts, rewards (P, k), samples for the log, metrics of all that was sampled).

    One rollout of P = batch_size prompts; or, with max_num_gen_batches, as many as it takes to have P groups whose rewards are
    not all equal, up to that. Then the P first such groups are kept, in their order, and where they are too few, others.
    """
    prepared, meter, log = training.prepared, training.meter, training.log
    settings, P, k = prepared.settings, prepared.settings.batch_size, prepared.settings.group_size
    decoded = P, k, settings.max_new_tokens, settings.max_rollout_batch, settings.kv_cache_mb
    rows_at_once = decode_batch(training.model, prepared.longest(settings)[0], *decoded)
    smaller = partial(halve_rollout_batch, settings, rows_at_once, training.model, say=log.say)
    rounds, extra = [], training.guard.health["extra_prompts"]
    for turn in range(settings.max_num_gen_batches):
        log.show("rollout" if turn == 0 else f"rollout {turn + 1}")
        with meter.phase("rollout"):
            rows, rollouts = surviving(partial(rollout, iteration, training.model, prepared, turn, extra), smaller)
        with meter.phase("reward"):
            rounds.append((rollouts, *score(rollouts, rows, prepared)))
        rewards = torch.cat([scored[1] for scored in rounds])  # (rounds * P, k)
        varied = has_variance(rewards)  # before lengths are punished: an answer's, not its length's
        if varied.sum() >= P:
            break
    rollouts = Rollouts.joined([scored[0] for scored in rounds]) if rounds[1:] else rollouts
    if settings.soft_punish_cache:
        lengths = rollouts.completion_lengths.cpu().view(-1, k)
        rewards = rewards + overlong_punishment(lengths, settings.max_new_tokens, settings.soft_punish_cache)
    metrics = rollout_metrics(rollouts, rewards, [scored[2] for scored in rounds]) | dict(
        frac_reward_zero_std=float((~varied).float().mean())
    )
    if rounds[1:]:
        kept = torch.cat([varied.nonzero(), (~varied).nonzero()])[:P, 0].sort().values  # (P,) groups
        rollouts = rollouts.select((kept[:, None] * k + torch.arange(k)).flatten().to(rollouts.tokens.device))
        rewards = rewards[kept]
    return rollouts, rewards, rounds[0][3], metrics


def rollout(iteration, model, prepared, turn=0, extra_prompts=0):
    """The iteration's prompts and their completions -> (rows of the task, Rollouts).

    turn: which of this iteration's rollouts; extra_prompts: how many more than batch_size each the iterations before have used.
    """
    settings, tokenizer = prepared.settings, prepared.tokenizer
    P, k = settings.batch_size, settings.group_size
    first = (iteration + turn) * P + extra_prompts
    rows = prepared.task.prompts("train", range(first, first + P))
    with autocast(settings.dtype, model):
        rollouts = sample_groups(
            model,
            [tokenizer.encode_prompt(row["prompt"])[-settings.max_prompt_length :] for row in rows],
            k,
            settings.max_new_tokens,
            temperature=settings.temperature,
            stop_token=tokenizer.stop_tokens,
            seed=settings.seed * 2**32 + iteration,
            first_row=turn * P * k,
            is_over=tokenizer.stopper(settings.stop_string),
            enforce_eager=settings.enforce_eager,
            progress=True,
            **decode_options(settings),
        )
    return rows, rollouts


def decode_options(settings):
    return dict(max_batch=settings.max_rollout_batch, chunk_mb=settings.logits_chunk_mb, kv_cache_mb=settings.kv_cache_mb)


def score(rollouts, rows, prepared):
    """Decode, ask the reward functions, add up -> (rewards (P, k) float32, each function's answers, a few samples for the log)."""
    settings, k = prepared.settings, prepared.settings.group_size
    completions = rollouts.completions()
    texts = [prepared.tokenizer.decode(completion) for completion in completions]
    prompts = [row["prompt"] for row in rows for _ in range(k)]
    columns = columns_of(rows, k) | {"stopped": rollouts.stopped.tolist(), "completion_ids": completions}
    totals, parts = total_rewards(prepared.reward_funcs, prompts, texts, columns, settings.reward_timeout, prepared.reward_weights)
    shown = range(min(settings.samples_per_iteration, len(texts)))
    samples = [dict(prompt=prompts[i], completion=texts[i], reward=totals[i], stopped=columns["stopped"][i]) for i in shown]
    return torch.tensor(totals).view(-1, k), parts, samples


def has_variance(rewards):
    """rewards (P, k) -> (P,): are some of the group's rewards different? NaN is no reward."""
    return rewards.nan_to_num(nan=-torch.inf).amax(1) > rewards.nan_to_num(nan=torch.inf).amin(1)


def rollout_metrics(rollouts, rewards, parts):
    """What the log says of all rollouts of an iteration, their rewards (groups, k), and their parts: [{function's name: answers}]."""
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
