"""How well a model answers a task's held-out prompts: pass@k, majority votes, and their confidence intervals.

    python evaluate.py out/grpo_small --num_prompts=500
    python evaluate.py out/X --task=addition --num_samples=16 --num_prompts=200
    python evaluate.py out/sft_small out/grpo_small --num_samples=4

The second samples 16 completions of each prompt beside the greedy one, on another task than the run's, and writes them
to out/X/evaluation-addition-test.jsonl. The third says whether the second model is better (data/pairs.py), and writes
no file. The loops call `evaluate_run`: the greedy completion and one sampled one. All score as the
training does, with its reward functions. data/scores.py computes the scores.

Left out: top-k, top-p and min-p (the scores are the policy's own). Tests: tests/test_evaluate.py, tests/test_pairs.py.
"""

# First, because importing runs sets what Ctrl-C does.
from runs.log import finite, write_whole

# isort: split
import json
import math
import sys
from functools import partial
from itertools import islice
from operator import add
from pathlib import Path
from statistics import fmean

from runs.checkpoint import class_of_runs
from runs.evaluation import prepare_evaluation, prepare_pair
from runs.notes import notes
from runs.prepare import Prepared
from settings import EvaluateSettings
from snug.options import friendly_errors, in_one_line, plain, read_settings
from snug.options.progress import phase, say, speak
from snug.pretrained.hub import hub_name

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    with friendly_errors():
        speak()
        options, given, folders = read_settings(
            EvaluateSettings, sys.argv[1:], positional="folders", class_of_runs=class_of_runs
        )
        prepare = prepare_pair if folders[1:] else prepare_evaluation
        prepared = prepare(options, given, *folders)

from data.pairs import comparison, verdict
from data.scores import pass_rates, reward_means, summarize, table
from runs.loading import generator_state, load_run, restore_generators
from sample import sample_episodes
from snug.device.kinds import off_mps
from snug.memory import Limits

ROUNDING = 1e-6  # a reward of 0.9 may be 0.8999999762 (float32), a sum of weights 0.30000000000000004
LARGEST = 8192  # completions of a call: the device has tables of their tokens
AT_ONCE = 64  # completions that are decoded, if a batch of the run had not more prompts

# ----------------------------------------------------------------------------------------------------------------------
# Completions and their rewards


def sample_held_out(model, prepared, limits, n=1, temperature=1.0, seed=0):
    """This process's held-out prompts -> (greedy samples, n samples of each prompt at this temperature, if not 0).

    Up to LARGEST are sampled in one call, so that only its end has idle slots. An environment has one completion at a
    time, and stays: then about as many are sampled together as in training.
    """
    settings, longest = prepared.settings, prepared.longest()[1]
    numbers = range(settings.eval_prompts)[limits.processes.part(settings.eval_prompts)]
    rows = prepared.task.prompts("test", numbers)

    def sample(group_size, temperature):
        samples, size = [], max(1, LARGEST // group_size)
        if settings.environment:
            size = max(1, settings.sequences_per_rollout // group_size)
        for first in range(0, len(rows), size):
            samples += sample_and_score(
                model,
                prepared,
                rows[first : first + size],
                group_size,
                max_new_tokens=longest,
                temperature=temperature,
                max_batch=limits.max_eval_batch,
                seed=seed,
                first_row=(numbers.start + first) * group_size,
            )
        return samples

    with phase("evaluation", len(rows) * (1 + n * bool(temperature)), "completions"):
        return sample(1, 0.0), sample(n, temperature) if temperature else []


def sample_and_score(model, prepared, rows, group_size, **options):
    """`group_size` completions of each task row's prompt -> a sample each, groups adjacent, in the rows' order.

    options: of sample_groups. A sample is a dict: prompt, completion; answer: what a majority vote counts, None if
    there is none or the completion was cut off; right, reward and more of `score`; stopped; length in tokens, with the
    stop token; greedy; logprob: natural, of the completion at this temperature (greedy: at 1).
    """
    rollouts, episodes = sample_episodes(model, prepared, rows, group_size, **options)
    prompts, completions = episodes.prompts, episodes.finish(rollouts)
    columns = episodes.columns(rollouts)
    ids, stopped = columns["completion_ids"], columns["stopped"]
    figures = dict(
        prompt=prompts,
        completion=list(map(add, episodes.begun, map(prepared.tokenizer.decode, ids))),
        answer=prepared.task.answers_of(completions, stopped),
        **score(prepared, prompts, completions, columns, group_size),
        **episodes.figures(),
        stopped=stopped,
        length=rollouts.completion_lengths.tolist(),
        greedy=[options["temperature"] == 0] * len(ids),
        logprob=off_mps(rollouts.sampling_logprobs).double().sum(1).tolist(),
    )
    return [dict(zip(figures, values, strict=True)) for values in zip(*figures.values(), strict=True)]


def score(prepared, prompts, completions, columns, group_size=1):
    """About as many completions at a time as in training, because reward_timeout is meant for that many.

    -> {"right": booleans, "reward": totals, "reward/<function>": its rewards, "task_reward": the task's, ...}.

    right: has it the total that all functions give at 1? A reward is None if the completion was not scored. task_reward
    and reward/<function> exist only with reward_funcs.
    """
    size, totals, rewards = group_size, [], {}
    size *= max(1, prepared.settings.sequences_per_rollout // group_size)
    for first in range(0, len(prompts), size):
        piece = slice(first, first + size)
        some = {name: values[piece] for name, values in columns.items()}
        scores = prepared.score(prompts[piece], completions[piece], some)
        totals += scores.totals
        for name, values in scores.by_function.items():
            rewards.setdefault(f"reward/{name}", []).extend(values)
    least = sum(prepared.reward_weights)
    right = [total >= least - ROUNDING * abs(least) for total in totals]  # NaN is wrong
    totals = [None if math.isnan(total) else total for total in totals]
    if not prepared.settings.reward_funcs:  # the task or the environment says what is right
        rewards = {}
    elif prepared.task.scored:
        rewards["task_reward"] = prepared.task.rewards(prompts, completions, **columns)
    return dict(right=right, reward=totals) | rewards


# ----------------------------------------------------------------------------------------------------------------------
# The evaluations of a run that trains


def evaluate_run(model, prepared, meter, limits) -> dict[str, float]:
    """The scores of the model that a run trains, as entries of the log."""

    def sample():
        with meter.phase("eval"), limits.processes.whole(model) as sampler:
            return sample_held_out(sampler, prepared, limits)

    # A reward function may draw random numbers. What the run draws afterwards must not depend on it.
    generators = generator_state()
    samples = limits.retry("eval", sample)
    restore_generators(generators)
    return run_scores(limits.processes.from_all_ranks(lambda: samples))


def run_scores(of_processes: list[tuple[list[dict], list[dict]]]):
    """What sample_held_out returned in each process -> entries of the log.

    pass_at_1; task_pass_at_1 with reward_funcs and a task that scores; eval_reward_mean; and these with _sampled.
    eval_reward/<function> of greedy completions if there are several functions.
    eval_truncated_fraction: how many completions did not stop.
    """
    greedy, sampled = [sum(samples, []) for samples in zip(*of_processes, strict=True)]
    means = reward_means(greedy)
    scores = pass_rates(greedy) | pass_rates(sampled, "_sampled")
    scores["eval_reward_mean"] = means.pop("reward")
    scores["eval_reward_mean_sampled"] = reward_means(sampled)["reward"]
    scores["eval_truncated_fraction"] = fmean(not sample["stopped"] for sample in greedy + sampled)
    if len(means) > 1:
        scores |= {f"eval_{name}": mean for name, mean in means.items()}
    return scores


# ----------------------------------------------------------------------------------------------------------------------
# The command


def run_evaluation(model, prepared, options):
    """-> (the first line of the file, the samples: for each prompt the greedy one, then num_samples)."""
    settings, longest = prepared.settings, prepared.longest()[1]
    limits = Limits(prepared, partial(print, file=sys.stderr))
    # Nothing trains beside it, so it may take more than the run's rollouts, which may have been few.
    limits.max_eval_batch = max(settings.batch_size, AT_ONCE)

    n, temperature, seed = options.num_samples, options.temperature, options.seed
    sample = partial(sample_held_out, model, prepared, limits, n, temperature, seed)
    greedy, sampled = limits.retry("eval", sample)
    resolved = {name: getattr(settings, name, value) for name, value in vars(options).items()}
    resolved |= dict(
        temperature=temperature,
        seed=seed,
        device=options.device,
        num_prompts=len(greedy),
        max_new_tokens=longest,
    )
    summary = dict(checkpoint=hub_name(prepared.origin.path), settings=resolved)
    samples, others = [], iter(sampled)
    for first in greedy:
        samples += [first, *islice(others, n)]
    return summary | summarize(greedy, sampled), samples


def main(options, prepared, file: Path | None, run=None):
    """Print the table, write the file -> its first line, and the samples. run: default the one of prepared.origin."""
    for line in notes(prepared):
        say(f"note: {line}")
    run = run or load_run(prepared.origin, options.device)
    prepared.settings.dtype = run.settings.dtype
    summary, samples = run_evaluation(run.model, prepared, options)
    say(plain("\n".join(table(summary))))
    if file:
        text = "".join(json.dumps(finite(record)) + "\n" for record in [summary, *samples])
        with in_one_line(f"{file} cannot be written"):
            write_whole(file, text)
        say(f"samples in {file}")
    return summary, samples


def compare(options, models: list[Prepared]):
    """Print the tables of two models, A and B, and whether B is better.

    Their rows have the same numbers, and the seed is the same: so they share their luck. One model is in memory.
    """
    generators, samples = generator_state(), []  # an environment may draw from them
    for each in models:
        restore_generators(generators)
        samples.append(main(options, each, None)[1])
    say(plain("\n".join(verdict(comparison(*samples)))))


if __name__ == "__main__":
    with friendly_errors():
        if folders[1:]:
            compare(options, prepared)
        else:
            main(options, *prepared)
