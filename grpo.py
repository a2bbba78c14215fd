"""GRPO: sample groups from the model's own weights, score them, look at a reference, update the weights.

With a teacher this is on-policy distillation, alone or beside the rewards.

    python grpo.py config/grpo_small.py
    python grpo.py config/grpo_small.py --learning_rate=1e-4 --out_dir=out/slower --seed=3

`iterate` is the algorithm, top to bottom. P prompts, k completions of each, N = P * k; M completion tokens of a
micro-batch, T_c the longest completion. The functions that it calls make and free the large tensors.

Left out: an inference server, a reward model, a critic.
"""

import sys
from contextlib import nullcontext
from functools import partial

from runs.checkpoint import find_run
from runs.prepare import prepare_from
from settings import LOSSES, GRPOSettings
from snug.options import friendly_errors
from snug.options.progress import say, speak

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    with friendly_errors():
        speak()
        prepared = prepare_from(GRPOSettings, sys.argv[1:])

import torch

import train_sft
from batch import Cut, make_micro_batch
from loss import decoupled_advantages, group_advantages, policy_loss
from model import autocast
from sample import sample_episodes
from snug.device.cuda import empty_cache
from snug.device.host import borrowed
from snug.logprobs import Teacher, head_loss, head_loss_in_two_visits
from snug.memory.ledger import component, not_finite
from training import notebook
from training.figures import add_up, join, mean_of, metrics_of, rollout_metrics, score
from training.frozen import add_logprobs
from training.loop import run
from training.parallel import score_together


def main(prepared):
    """Make the warm start if it is missing; then train as the settings say -> False if it was stopped."""
    settings = prepared.settings
    if prepared.warm_start and not settings.plan:
        say(f"{settings.init_from} is missing or not finished: making it first")
        if not train_sft.main(prepared.warm_start):
            return False
        prepared.origin = find_run(settings.init_from)
        empty_cache()  # the warm start's cached blocks would count as reserved here
    return run(prepared, iterate)


def train(config="", *, prompts=None, reward_funcs=None, **options):
    """From Python -> notebook.FinishedRun. prompts: rows such as {"prompt": ..., "answer": ...}. Raises SnugError.

    reward_funcs: functions, or "module:function". options: as in a config, and functions and classes instead of
    their names.
    """
    return notebook.train(GRPOSettings, main, config, prompts, reward_funcs, options)


@component("rollouts")  # the name in --plan's table
def iterate(iteration, training, collect=None):
    """One iteration: sample a rollout and learn from it -> (its line for the log, its samples).

    collect: a planner's stand-in for `collect_groups`.
    """
    settings, model, teacher = training.settings, training.model, training.teacher

    # 1. Sample k completions of each of P prompts from the model's own weights. 2. Score them.
    scored, metrics = (collect or collect_groups)(iteration, training)
    rollouts = scored.rollouts  # N completions

    # 3. Cut them into optimizer steps. `attempt` cuts steps into micro-batches, smaller ones after an out-of-memory.
    cut = Cut(rollouts, settings.train_batch_size, 0, scored.shared, training.processes)

    # 4. Log-probs before the first step: the sampler's, the reference's, the teacher's.
    add_logprobs(rollouts, cut, training)

    # 5. Advantages: how much better than its group was each completion?
    rollouts.advantages = advantages_of(scored, training).to(model.device)  # (N,)

    # 6. Learn, num_iterations times over. Skip a step that teaches nothing: moments and decay would move the weights.
    taken = []
    entropies = torch.zeros_like(rollouts.sampling_logprobs)  # (N, T_c), for the log
    gradient = partial(
        accumulate_gradient, model, rollouts, settings=settings, entropies=entropies, teacher=teacher
    )
    for _ in range(settings.num_iterations):
        for step, indices in enumerate(cut.step_indices):
            if not teaches(rollouts, indices, settings):
                continue
            # 7. Forward, head and loss, backward, a micro-batch at a time.
            sums = training.attempt("train", gradient, cut=cut, step=step)
            # 8. Add up over processes, clip, update. A step whose loss or gradient is not finite is dropped: {}.
            taken.append(training.take_step(sums, iteration, rollouts, indices))

    # 9. What the log says.
    training.processes.add(entropies)
    record = {"iter": iteration} | mean_of(taken) | metrics
    record["skipped_steps"] = settings.num_iterations * len(cut.steps) - len(taken)
    return record, training.samples(scored, entropies)


# ----------------------------------------------------------------------------------------------------------------------
# 1 and 2: sample and score


def collect_groups(iteration, training):
    """Sample groups and score them -> (Scored, metrics; these also count the groups that are not kept).

    One rollout of P = batch_size prompts. With max_num_gen_batches (DAPO's dynamic sampling) up to that many rollouts,
    until P groups have rewards that are not all equal. The first P such groups are kept, in their order. If there are
    fewer, groups with equal rewards fill the gap.
    """
    settings, parts = training.settings, []
    for number in range(settings.max_num_gen_batches):
        parts.append(sample_and_score(iteration, number, training))
        rewards = torch.cat([scored.rewards for scored in parts])  # (rollouts * P, k)
        # Do a group's rewards differ? NaN is "not scored" and does not count.
        most = rewards.nan_to_num(nan=-torch.inf).amax(1)
        varied = most > rewards.nan_to_num(nan=torch.inf).amin(1)  # (rollouts * P,)
        if varied.sum() >= settings.batch_size:
            break
    training.extra_prompts += (len(parts) - 1) * settings.batch_size
    scored = join(parts)
    metrics = rollout_metrics(scored) | dict(gen_batches=len(parts))
    seconds = training.meter.stats()["time_rollout_s"]
    metrics["tokens_per_second"] = int(scored.rollouts.completion_lengths.sum()) / seconds
    if scored.by_function and settings.group_size > 1:
        metrics["frac_reward_zero_std"] = float((~varied).float().mean())
    if len(parts) > 1:
        # Prefer groups with different rewards; keep the order in which they were sampled.
        first = (~varied).int().argsort(stable=True)[: settings.batch_size]
        scored = scored.select(first.sort().values)
    return scored, metrics


def sample_and_score(iteration, number, training):
    """Rollout `number` of an iteration, of batch_size prompts -> Scored. Each process samples some of the groups."""
    prepared, P = training.prepared, training.settings.batch_size
    mine = training.processes.part(P)
    first_prompt = (iteration + number) * P + training.extra_prompts
    rows = prepared.task.prompts("train", range(first_prompt, first_prompt + P)[mine])
    prompts_before = number * P + mine.start

    def sample():
        with training.processes.whole(training.model) as model:
            max_batch = training.limits.max_rollout_batch
            return sample_rows(model, prepared, rows, iteration, prompts_before, max_batch)

    rollouts, episodes = training.attempt("rollout", sample)
    with training.meter.phase("reward"):
        if training.processes.size > 1:
            return score_together(training.processes, rollouts, episodes, prepared)
        return score(rollouts, episodes, prepared)


def sample_rows(model, prepared, rows, iteration, prompts_before=0, max_batch=0):
    """k completions of each row's prompt -> (Rollouts, Episodes). prompts_before: how many the iteration had before."""
    settings, k = prepared.settings, prepared.settings.group_size
    return sample_episodes(
        model,
        prepared,
        rows,
        k,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        # Evaluations and evaluate.py use seeds below 2**32. Runs with different seeds share none.
        seed=(settings.seed or 2**31) * 2**32 + iteration,
        first_row=prompts_before * k,
        max_batch=max_batch,
    )


# ----------------------------------------------------------------------------------------------------------------------
# 5: compare


def advantages_of(scored, training):
    """-> (N,), times reward_coef. GDPO compares the rewards of each function, other recipes compare their sums."""
    settings = training.settings
    if settings.multi_objective_aggregation == "normalize_then_sum":
        weights = training.prepared.reward_weights
        advantages = decoupled_advantages([*scored.by_function.values()], settings.group_size, weights)
    else:
        advantages = group_advantages(scored.rewards, settings.scale_rewards)  # (P, k)
    return settings.reward_coef * advantages.flatten()


# ----------------------------------------------------------------------------------------------------------------------
# 6 and 7: the gradient of one optimizer step


def trainable(rollouts, indices, settings) -> list[int]:
    """The completions among `indices` whose tokens are learned from."""
    if not settings.mask_truncated_completions:
        return list(indices)
    stopped = rollouts.stopped.tolist()
    return [i for i in indices if stopped[i]]


def teaches(rollouts, indices, settings) -> bool:
    """Can the gradient be anything but 0? True if a number is not finite: `take_step` drops that step and says so."""
    sequences = trainable(rollouts, indices, settings)
    always = settings.teacher or settings.beta or settings.loss_type not in LOSSES
    learns = sequences and (always or rollouts.advantages[sequences].any())
    return bool(learns or not_finite(rollouts.columns(indices)))


@component("backward")  # autograd's tensors while backward runs
def accumulate_gradient(model, rollouts, cut, step, settings, entropies, teacher=None):
    """Forward, head and loss, backward of optimizer step number `step` -> its metrics, token means over the step.

    It adds to the parameters' .grad, which `attempt` has cleared. It divides by counts of the whole step, so the
    gradient does not depend on how the step was cut into micro-batches. entropies (N, T_c) gets the entropy at each
    token. teacher: its model.
    """
    kept = (trainable(rollouts, indices, settings) for indices in cut.steps[step])
    micro_batches = list(filter(None, kept))
    counts = dict(
        num_tokens=sum(len(cut.places[i]) for indices in micro_batches for i in indices),
        num_sequences=cut.step_size,
        num_micro_batches=len(micro_batches),
    )
    totals = dict(loss=0.0)  # of a step without a micro-batch, too
    entropies[cut.step_indices[step]] = 0  # an attempt that ran out of memory may have written some
    by_head = teacher is not None and settings.divergence != "sampled"
    with borrowed(teacher) if by_head else nullcontext():
        for indices in cut.mine(micro_batches, model):
            micro = make_micro_batch(rollouts, indices, cut)
            outputs = micro.teacher_outputs
            head = Teacher(outputs, teacher.lm_head_weight) if by_head else None
            # Forward. Only the hidden states that predict completion tokens go on: (M, C)
            with autocast(settings.dtype, model):
                hidden = micro.completion_hidden(model)
                # Head and loss. The gradient of a chunk of logits overwrites the chunk.
                loss, logprobs, entropy, metrics = loss_of_head(
                    model, hidden, micro, counts, settings, head
                )
            # Backward, through the blocks.
            loss.backward()
            metrics.append(metrics_of(loss, logprobs, entropy, micro, counts["num_tokens"]))
            add_up(totals, metrics)
            entropies[micro.row, micro.place] = entropy.detach().to(entropies.dtype)
    return {name: float(total) for name, total in totals.items()}


def loss_of_head(model, hidden, micro, counts, settings, teacher):
    """-> loss, logprobs (M,), entropy (M,), policy_loss's metrics of each chunk; only the loss has a gradient.

    teacher: its states and its head, for a divergence over the vocabulary.
    """
    metrics_of_chunks = []

    def token_loss(logprobs, chunk, divergence=None):
        """-> the loss of a chunk, a slice of the M tokens. The head calls this while the chunk's logits exist."""
        by_samples = settings.teacher and teacher is None
        loss, metrics = policy_loss(
            logprobs,
            micro.old_logprobs[chunk],
            micro.advantages,
            micro.sequence[chunk],
            micro.lengths,
            None if micro.ref_logprobs is None else micro.ref_logprobs[chunk],
            options=settings,
            sampling_logprobs=micro.sampling_logprobs[chunk],
            teacher_logprobs=micro.teacher_outputs[chunk] if by_samples else None,
            divergence=divergence,
            **counts,
        )
        metrics_of_chunks.append(metrics)
        return loss

    head = partial(head_loss, entropy=True)
    if settings.needs_whole_sequences:  # a second look at the logits
        head = head_loss_in_two_visits
    results = head(
        hidden,
        model.lm_head_weight,
        micro.targets,
        token_loss,
        temperature=settings.temperature,
        n_vocab=model.config.n_vocab,
        chunk_mb=settings.logits_chunk_mb,
        teacher=teacher,
    )
    return *results, metrics_of_chunks


if __name__ == "__main__":
    with friendly_errors():
        main(prepared)
