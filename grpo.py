"""GRPO in one process: sample groups from the model's own weights, score them, look at the reference, update.

    python grpo.py config/grpo_small.py
    python grpo.py config/grpo_small.py --learning_rate=1e-4 --out_dir=out/slower --seed=3

An iteration is `iterate`, below: rollout -> reward -> reference -> train -> optimizer -> log. The phases have those
names in the log and in the [MEM] lines too. What is large is born and dies inside one of the functions it calls.

Left out: an inference server, a reward model, a critic.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from itertools import islice

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from prepare import prepare
    from settings import GRPOSettings, friendly_errors, read_settings

    with friendly_errors():
        prepared = prepare(*read_settings(GRPOSettings, sys.argv[1:])[:2])

import torch

import loop
import train_sft
from batch import limits, micro_batches
from checkpoint import load_weights, make_model, newest
from evaluate import columns_of, rehearse_evaluation
from log import IS_IT_BROKEN
from logprobs import head_logprobs
from loss import group_advantages, policy_loss
from memory import borrowed, stream_from_host, surviving
from model import autocast
from optimizer import learning_rate_at, number
from plan import halve_micro_batch, halve_rollout_batch
from reward import total_rewards
from sample import decode_batch, rehearse_groups, sample_groups


def main(prepared):
    """Make the warm start where it is missing; then train, log and save as the settings say."""
    if prepared.warm_start and not prepared.settings.plan:
        print(
            f"{prepared.settings.init_from} is missing or not finished: making it first, as {prepared.settings.init_config} says",
            flush=True,
        )
        if not train_sft.main(prepared.warm_start):
            return False  # stopped by a signal
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # nothing of it is alive; its cached blocks would count as reserved here
    return loop.run(prepared, "GRPO", rehearsal, iterate, make_reference)


def make_reference(prepared, device, weights=True):
    """The weights of init_from, frozen, on the device or the host -> GPT; None where beta is 0. weights False: random ones."""
    settings = prepared.settings
    if not settings.beta:
        return None
    reference = make_model(prepared.shape, device, settings.param_dtype).requires_grad_(False)
    if weights:
        load_weights(newest(settings.init_from), reference)
    if settings.reference == "host":
        stream_from_host(reference, reference.blocks, device)
    return reference


def iterate(iteration, training):
    """One rollout, learned from, with its log line."""
    model, reference, prepared, meter, log = (getattr(training, name) for name in ("model", "reference", "prepared", "meter", "log"))
    settings, task, tokenizer = prepared.settings, prepared.task, prepared.tokenizer
    meter.reset()
    started = time.perf_counter()
    scores = training.evaluate_if_due(0) if iteration == 0 else {}
    log.show("rollout")
    decoded = settings.batch_size, settings.group_size, settings.max_new_tokens, settings.max_rollout_batch, settings.kv_cache_mb
    rows = decode_batch(model, prepared.longest(settings)[0], *decoded)
    smaller = partial(halve_rollout_batch, settings, rows, model, say=log.say)
    with meter.phase("rollout"):
        rows, rollouts = surviving(partial(rollout, iteration, model, task, tokenizer, settings), smaller)
    with meter.phase("reward"):
        rewards, samples = score(rollouts, rows, prepared)
        rollouts.advantages = group_advantages(rewards, settings.scale_rewards, settings.advantage_eps).flatten().to(model.device)
    if reference is not None:
        log.show("reference")
        with meter.phase("reference"):
            smaller = partial(halve_micro_batch, settings, rollouts, model, say=log.say)
            rollouts.ref_logprobs = surviving(partial(reference_logprobs, reference, rollouts, settings, model.device), smaller)
    log.show("train")
    learning_rate = learning_rate_at(iteration, settings)
    metrics = update(training, rollouts, learning_rate, iteration)
    metrics |= rollout_metrics(rollouts, rewards) | {"learning_rate": learning_rate}
    del rollouts, smaller  # before the evaluation's are made
    scores |= training.evaluate_if_due(iteration + 1)
    metrics["tokens_per_second"] = metrics["completion_length_mean"] * rewards.numel() / meter.stats()["time_rollout_s"]
    metrics["time_s"] = time.perf_counter() - started
    training.end_iteration({"iter": iteration} | metrics, scores, samples)
    if iteration == 0:
        log.say(IS_IT_BROKEN)


def rollout(iteration, model, task, tokenizer, settings):
    """The iteration's prompts and their completions -> (rows of the task, Rollouts)."""
    first = iteration * settings.batch_size
    rows = task.prompts("train", range(first, first + settings.batch_size))
    with autocast(settings.dtype, model):
        rollouts = sample_groups(
            model,
            [tokenizer.encode(row["prompt"])[-settings.max_prompt_length :] for row in rows],
            settings.group_size,
            settings.max_new_tokens,
            temperature=settings.temperature,
            stop_token=tokenizer.stop_token,
            seed=settings.seed * 2**32 + iteration,
            **decode_options(settings),
        )
    return rows, rollouts


def decode_options(settings):
    return dict(max_batch=settings.max_rollout_batch, chunk_mb=settings.logits_chunk_mb, kv_cache_mb=settings.kv_cache_mb)


def score(rollouts, rows, prepared):
    """Decode, ask the reward functions, add up -> (rewards (P, k) float32, a few samples for the log)."""
    settings, k = prepared.settings, prepared.settings.group_size
    completions = rollouts.completions()
    texts = [prepared.tokenizer.decode(completion) for completion in completions]
    prompts = [row["prompt"] for row in rows for _ in range(k)]
    columns = columns_of(rows, k) | {"stopped": rollouts.stopped.tolist(), "completion_ids": completions}
    totals = total_rewards(prepared.reward_funcs, prompts, texts, columns, settings.reward_timeout)
    shown = range(min(settings.samples_per_iteration, len(texts)))
    samples = [dict(prompt=prompts[i], completion=texts[i], reward=totals[i], stopped=columns["stopped"][i]) for i in shown]
    return torch.tensor(totals).view(-1, k), samples


def reference_logprobs(reference, rollouts, settings, device, most=None):
    """The same of a reference that may be on the host, whence its blocks come one by one and the rest for as long as this takes."""
    with borrowed(reference.outside_blocks() if settings.reference == "host" else [], device):
        return trainer_logprobs(reference, rollouts, settings, most)


@torch.no_grad()
def trainer_logprobs(model, rollouts, settings, most=None):
    """log pi(token) of every completion token, by the forward pass that training uses -> (N, T_c) float32, 0 after the end.

    most: micro-batches looked at, for a planner."""
    logprobs = torch.zeros_like(rollouts.sampling_logprobs)
    step = settings.train_batch_size or len(rollouts.tokens)
    for micro in islice(micro_batches(rollouts, *limits(settings, step)), most):
        with autocast(settings.dtype, model):
            hidden = micro.completion_hidden(model(micro.tokens, micro.positions, mask=micro.mask))  # (M, C)
            options = dict(n_vocab=model.config.n_vocab, chunk_mb=settings.logits_chunk_mb)
            values = head_logprobs(hidden, model.lm_head_weight, micro.targets, settings.temperature, **options)
        logprobs[micro.index[micro.sequence], micro.place] = values
    return logprobs


def update(training, rollouts, learning_rate, iteration):
    """Learn from the rollouts: num_iterations times over, an optimizer step every train_batch_size completions.

    -> metrics: token means of the steps that were taken, averaged over them; logprob_diff_* is |trainer - sampler| before the first.
    """
    settings, N = training.prepared.settings, len(rollouts.tokens)
    size = settings.train_batch_size or N
    if rollouts.old_logprobs is None:
        rollouts.old_logprobs = rollouts.sampling_logprobs  # the sampler is the model: no forward for them
    history = []
    for _ in range(settings.num_iterations):
        for first in range(0, N, size):
            select = range(first, first + size)
            gradient = partial(accumulate, training.model, rollouts, select, settings)
            history.append(loop.step(training, gradient, rollouts, learning_rate, iteration, select))
    taken = [metrics for metrics in history if metrics is not None]
    averages = {name: sum(metrics[name] for metrics in taken) / len(taken) for name in (taken[0] if taken else ())}
    return averages | {name: history[0][name] for name in ("logprob_diff_mean", "logprob_diff_max") if history[0]}


def accumulate(model, rollouts, select, settings, most=None):
    """The gradient of one optimizer step over the completions `select`, micro-batch by micro-batch -> metrics.

    most: micro-batches looked at, for a planner.
    """
    lengths = rollouts.completion_lengths.tolist()
    counts = dict(num_tokens=sum(lengths[i] for i in select), num_sequences=len(select))
    totals = {}
    for micro in islice(micro_batches(rollouts, *limits(settings, len(select)), select), most):
        for name, value in train_micro_batch(model, micro, counts, settings).items():
            totals[name] = torch.maximum(totals[name], value) if name.endswith("max") and name in totals else totals.get(name, 0) + value
    return {name: number(value) for name, value in totals.items()}


def train_micro_batch(model, micro, counts, settings):
    """Forward, head, backward -> metrics, this micro-batch's shares of the optimizer step's means, without gradient."""
    metrics = {}

    def token_loss(logprobs, rows):  # (m,) of the M tokens: differentiated by head_loss while the chunk's logits are still there
        loss, parts = policy_loss(
            logprobs,
            micro.old_logprobs[rows],
            micro.advantages,
            micro.sequence[rows],
            micro.lengths,
            None if micro.ref_logprobs is None else micro.ref_logprobs[rows],
            loss_type=settings.loss_type,
            beta=settings.beta,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high,
            delta=settings.delta,
            max_new_tokens=settings.max_new_tokens,
            **counts,
        )
        for name, value in parts.items():
            metrics[name] = metrics.get(name, 0) + value
        return loss

    loss, logprobs, entropy = loop.learn(model, micro, token_loss, settings, settings.temperature)
    difference = (logprobs - micro.sampling_logprobs).abs()
    metrics |= dict(loss=loss, entropy=entropy.sum() / counts["num_tokens"])
    return metrics | dict(logprob_diff_mean=difference.sum() / counts["num_tokens"], logprob_diff_max=difference.max())


def rehearsal(prepared, settings):
    """What plan.py runs on fake tensors -> a function of a meter: init, and an iteration in which every length is the longest."""

    def iteration(meter):
        device = torch.device("cpu")
        (prompt, completion), P, k = prepared.longest(settings), settings.batch_size, settings.group_size
        reference = make_reference(replace(prepared, settings=settings), device, weights=False)
        meter.label("reference", reference.named_parameters() if reference else ())
        model, optimizer = loop.rehearse_init(prepared, settings, meter)
        rehearse_evaluation(model, prompt, completion, settings, meter)
        with meter.phase("rollout"), autocast(settings.dtype, model):
            rollouts = rehearse_groups(model, prompt, P, k, completion, **decode_options(settings))
        rollouts.advantages, rollouts.old_logprobs = torch.zeros(P * k), rollouts.sampling_logprobs
        if reference is not None:
            with meter.phase("reference"):
                rollouts.ref_logprobs = reference_logprobs(reference, rollouts, settings, device, most=2)
        select = range(settings.train_batch_size or P * k)
        loop.rehearse_step(model, optimizer, partial(accumulate, model, rollouts, select, settings, most=2), settings, meter)

    return iteration


def rollout_metrics(rollouts, rewards):
    """What the log says of a rollout and its rewards (P, k)."""
    return dict(
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        frac_reward_zero_std=float((rewards == rewards[:, :1]).all(1).float().mean()),
        completion_length_mean=float(rollouts.completion_lengths.float().mean()),
        truncated_fraction=float((~rollouts.stopped).float().mean()),
    )


if __name__ == "__main__":
    with friendly_errors():
        main(prepared)
