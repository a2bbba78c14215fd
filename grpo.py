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
    from options import friendly_errors, read_settings
    from runs.prepare import prepare
    from settings import GRPOSettings

    with friendly_errors():
        prepared = prepare(*read_settings(GRPOSettings, sys.argv[1:])[:2])

import torch

import train_sft
from batch import limits, micro_batches
from data.rewards import total_rewards
from decoding.decode_batch import decode_batch
from evaluate import columns_of as task_columns
from evaluate import rehearse_evaluation
from logprobs.head import head_logprobs
from loss import group_advantages, kl_divergence, overlong_punishment, policy_loss, truncated_importance
from memory.fit import halve_micro_batch, halve_rollout_batch
from memory.host import borrowed, stream_from_host
from memory.oom import surviving
from model import autocast, make_model
from pretrained.lora import adapters_off
from runs.checkpoint import load_weights, origin
from runs.log import IS_IT_BROKEN
from runs.saver import not_finite
from sample import Rollouts, rehearse_groups, sample_groups
from training import loop
from training.guard import columns_of
from training.optimizer import learning_rate_at, number


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
    return dict(
        max_batch=settings.max_rollout_batch, chunk_mb=settings.logits_chunk_mb, kv_cache_mb=settings.kv_cache_mb
    )


def score(rollouts, rows, prepared):
    """Decode, ask the reward functions, add up -> (rewards (P, k) float32, each function's answers, a few samples for the log)."""
    settings, k = prepared.settings, prepared.settings.group_size
    completions = rollouts.completions()
    texts = [prepared.tokenizer.decode(completion) for completion in completions]
    prompts = [row["prompt"] for row in rows for _ in range(k)]
    columns = task_columns(rows, k) | {"stopped": rollouts.stopped.tolist(), "completion_ids": completions}
    totals, parts = total_rewards(
        prepared.reward_funcs, prompts, texts, columns, settings.reward_timeout, prepared.reward_weights
    )
    shown = range(min(settings.samples_per_iteration, len(texts)))
    samples = [
        dict(prompt=prompts[i], completion=texts[i], reward=totals[i], stopped=columns["stopped"][i]) for i in shown
    ]
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
    """The weights of init_from, frozen, on the device or the host -> GPT; None where beta is 0, or where the model without its
    adapters is the reference. weights False: any will do."""
    settings = prepared.settings
    if not settings.beta or settings.lora_rank:
        return None
    reference = make_model(prepared.shape, device, settings.param_dtype, initialise=not weights)
    if weights:
        load_weights(origin(settings.init_from), reference)
    reference.requires_grad_(False)
    if settings.reference == "host":
        stream_from_host(reference, reference.blocks, device)
    return reference


def iterate(iteration, training):
    """One rollout, learned from, with its log line."""
    model, meter, log, settings = training.model, training.meter, training.log, training.prepared.settings
    meter.reset()
    started = time.perf_counter()
    scores = training.evaluate_if_due(0) if iteration == 0 else {}
    rollouts, rewards, samples, metrics = collect(iteration, training)
    log.show("reference")
    prepare_logprobs(training, rollouts)
    if settings.use_kl_in_reward:
        rewards = rewards - settings.beta * sequence_kl(rollouts, settings).view(rewards.shape)
    advantages = group_advantages(rewards, settings.scale_rewards, settings.advantage_eps, settings.baseline)
    rollouts.advantages = advantages.flatten().to(model.device)
    log.show("train")
    learning_rate = learning_rate_at(iteration, settings)
    metrics = update(training, rollouts, learning_rate, iteration) | metrics | {"learning_rate": learning_rate}
    training.guard.health["extra_prompts"] += (metrics["gen_batches"] - 1) * settings.batch_size
    del rollouts  # before the evaluation's are made
    scores |= training.evaluate_if_due(iteration + 1)
    stats = meter.stats()
    metrics["tokens_per_second"] = metrics.pop("tokens") / stats["time_rollout_s"]
    metrics["time_s"] = time.perf_counter() - started
    training.end_iteration({"iter": iteration} | metrics, scores, samples)
    if iteration == 0:
        log.say(IS_IT_BROKEN)


def prepare_logprobs(training, rollouts):
    """Fill in old_logprobs and, where there is a reference, ref_logprobs. The sampler is the model, so its log-probs are the old
    ones without a forward; importance_sampling_cap, which corrects for their difference, wants the trainer's."""
    settings, model, reference = training.prepared.settings, training.model, training.reference or training.model
    smaller = partial(halve_micro_batch, settings, rollouts, model, say=training.log.say)
    rollouts.old_logprobs = rollouts.sampling_logprobs
    if not settings.beta and settings.importance_sampling_cap is None:
        return
    with training.meter.phase("reference"):
        if settings.importance_sampling_cap is not None:
            rollouts.old_logprobs = surviving(partial(trainer_logprobs, model, rollouts, settings), smaller)
        if settings.beta:
            rollouts.ref_logprobs = surviving(
                partial(reference_logprobs, reference, rollouts, settings, model.device), smaller
            )


def sequence_kl(rollouts, settings):
    """The KL to the reference, summed over each completion -> (N,) on the host."""
    kl = kl_divergence(rollouts.sampling_logprobs, rollouts.ref_logprobs, settings.kl_estimator)
    return (kl * rollouts.mask).sum(1).cpu()


def reference_logprobs(reference, rollouts, settings, device, most=None):
    """The same of a reference: the model with its adapters off, or one that may be on the host, whence its blocks come one by one and
    the rest for as long as this takes."""
    with adapters_off(reference), borrowed(reference.outside_blocks() if settings.reference == "host" else [], device):
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

    Where there is nothing to learn no step is taken, so that moments and weight decay do not move the weights either.
    -> metrics: token means of the steps that were taken, averaged over them; of |trainer - sampler|, before the first.
    """
    settings, N = training.prepared.settings, len(rollouts.tokens)
    size = settings.train_batch_size or N
    history, skipped = [], 0
    for _ in range(settings.num_iterations):
        for first in range(0, N, size):
            select = range(first, first + size)
            if teaches(rollouts, select, settings):
                gradient = partial(accumulate, training.model, rollouts, select, settings)
                history.append(loop.step(training, gradient, rollouts, learning_rate, iteration, select))
            else:
                skipped += 1
    taken = [metrics for metrics in history if metrics is not None]
    averages = {name: sum(metrics[name] for metrics in taken) / len(taken) for name in (taken[0] if taken else ())}
    of_the_first = {
        name: history[0][name]
        for name in ("logprob_diff_mean", "logprob_diff_max", "mismatch_kl")
        if history and history[0]
    }
    return averages | of_the_first | {"skipped_steps": skipped}


def trainable(rollouts, select, settings):
    """-> those of the completions `select` whose tokens are learned from."""
    if not settings.mask_truncated_completions:
        return select
    stopped = rollouts.stopped.tolist()
    return [i for i in select if stopped[i]]


def teaches(rollouts, select, settings):
    """Can the gradient be anything but 0? What is not finite is not passed over: the step will say so."""
    rows = trainable(rollouts, select, settings)
    always = settings.entropy_coef or (settings.beta and not settings.use_kl_in_reward)
    return bool(rows and (always or rollouts.advantages[list(rows)].any())) or bool(
        not_finite(columns_of(rollouts, select))
    )


def accumulate(model, rollouts, select, settings, most=None):
    """The gradient of one optimizer step over the completions `select`, micro-batch by micro-batch -> metrics.

    most: micro-batches looked at, for a planner.
    """
    lengths, rows = rollouts.completion_lengths.tolist(), trainable(rollouts, select, settings)
    counts = dict(num_tokens=sum(lengths[i] for i in rows), num_sequences=len(select))
    totals = {}
    for micro in islice(micro_batches(rollouts, *limits(settings, len(select)), rows), most):
        for name, value in train_micro_batch(model, micro, counts, settings).items():
            totals[name] = (
                torch.maximum(totals[name], value)
                if name.endswith("max") and name in totals
                else totals.get(name, 0) + value
            )
    return {name: number(value) for name, value in totals.items()}


def loss_options(settings):
    return dict(
        loss_type=settings.loss_type,
        importance_sampling_level=settings.importance_sampling_level,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        delta=settings.delta,
        beta=0.0 if settings.use_kl_in_reward else settings.beta,
        kl_estimator=settings.kl_estimator,
        use_bias_correction_kl=settings.use_bias_correction_kl,
        max_new_tokens=settings.max_new_tokens,
    )


def train_micro_batch(model, micro, counts, settings):
    """Forward, head, backward -> metrics, this micro-batch's shares of the optimizer step's means, without gradient."""
    metrics, cap = {}, settings.importance_sampling_cap

    def token_loss(
        logprobs, rows
    ):  # (m,) of the M tokens: differentiated by head_loss while the chunk's logits are still there
        old, sampling = micro.old_logprobs[rows], micro.sampling_logprobs[rows]
        loss, parts = policy_loss(
            logprobs,
            old,
            micro.advantages,
            micro.sequence[rows],
            micro.lengths,
            None if micro.ref_logprobs is None else micro.ref_logprobs[rows],
            correction=None if cap is None else truncated_importance(old, sampling, cap),
            num_micro_batches=micro.count,
            **counts,
            **loss_options(settings),
        )
        for name, value in parts.items():
            metrics[name] = metrics.get(name, 0) + value
        return loss

    tokens = len(micro.targets) * micro.count if settings.loss_type == "bnpo" else counts["num_tokens"]
    whole = settings.importance_sampling_level == "sequence"
    loss, logprobs, entropy = loop.learn(
        model, micro, token_loss, settings, settings.temperature, whole, settings.entropy_coef / tokens
    )
    difference = (logprobs - micro.sampling_logprobs).abs()
    means = dict(
        entropy=entropy,
        logprob_diff_mean=difference,
        mismatch_kl=kl_divergence(micro.sampling_logprobs.double(), logprobs.double()),
    )
    metrics |= {name: values.sum() / counts["num_tokens"] for name, values in means.items()}
    return metrics | dict(loss=loss, logprob_diff_max=difference.max())


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
            most = settings.max_num_gen_batches
            rounds = [rehearse_groups(model, prompt, P, k, completion, **decode_options(settings)) for _ in range(most)]
            rollouts = rounds[-1]
            if rounds[1:]:  # they, all of them in one, and those that are kept
                joined = [
                    torch.cat([getattr(r, name) for r in rounds]) for name in ("tokens", "mask", "sampling_logprobs")
                ]
                joined += [columns[: P * k].clone() for columns in joined]
                del joined
            del rounds
        rollouts.advantages, rollouts.old_logprobs = torch.zeros(P * k), rollouts.sampling_logprobs
        if settings.importance_sampling_cap is not None:
            with meter.phase("reference"):
                rollouts.old_logprobs = trainer_logprobs(model, rollouts, settings, most=2)
        if settings.beta:
            with meter.phase("reference"):
                rollouts.ref_logprobs = reference_logprobs(reference or model, rollouts, settings, device, most=2)
        select = range(settings.train_batch_size or P * k)
        loop.rehearse_step(
            model, optimizer, partial(accumulate, model, rollouts, select, settings, most=2), settings, meter
        )

    return iteration


if __name__ == "__main__":
    with friendly_errors():
        main(prepared)
