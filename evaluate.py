"""How well a model answers a task's held-out prompts: pass@k, majority votes, and their confidence intervals.

    python evaluate.py out/grpo_small --num_prompts=500
    python evaluate.py out/X --task=countdown --num_samples=16 --num_prompts=200

The second samples 16 completions of each prompt beside the greedy one, on another task than the run's, and writes them
to out/X/evaluation-countdown-test.jsonl. runs/questions.py settles what is asked, data/scores.py computes the scores.
The loops call `evaluate_run`: the greedy completion and one sampled one. Scored is as in training (data/rewards.py).

Left out: top-k, top-p and min-p (the scores are the policy's own); comparing two runs. Tests: tests/test_evaluate.py.
"""

import json
import sys
from dataclasses import asdict
from functools import partial

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from options import friendly_errors, read_settings
    from runs.questions import prepare_questions
    from settings import EvaluateSettings

    with friendly_errors():
        settings, given, folder = read_settings(EvaluateSettings, sys.argv[1:], positional="folder")
        questions = prepare_questions(settings, given, folder)

from data.rewards import Scoring, repeat_columns
from data.scores import reward_means, shares_of, summarize, table
from memory import Limits
from model import autocast
from options import SnugError, fields
from runs.loading import Run, generator_state, load_run, restore_generators
from runs.questions import Questions, write_lines
from sample import sample_groups
from settings import EvaluateSettings, GRPOSettings, SFTSettings, TaskOptions

TOKENS_AT_ONCE = 2**22  # the command samples its completions in pieces of at most this many tokens


def decoding_of(settings, limits):
    """A run's bounds on decode batches, for one completion of each prompt."""
    return dict(max_batch=limits.max_eval_batch, chunk_mb=settings.logits_chunk_mb)


def truncate_prompt(ids: list[int], max_prompt_length: int) -> list[int]:
    """The last max_prompt_length ids; 0: all."""
    return ids[-max_prompt_length:] if max_prompt_length else ids


def sampling_options(settings: SFTSettings | GRPOSettings, tokenizer, limits: Limits) -> dict:
    """Keywords of sample_groups as a run has them."""
    is_over = tokenizer.stopper(settings.stop_string)
    options = dict(
        stop_token=tokenizer.stop_tokens, is_over=is_over, enforce_eager=settings.enforce_eager
    )
    return options | dict(progress=True) | decoding_of(settings, limits)


def answers_as_run(
    settings, model, tokenizer, scoring: Scoring, num_prompts: int, limits: Limits
) -> list[list[dict]]:
    """Answers to this process's held-out prompts with a run's precision and lengths -> [greedy ones, sampled ones]."""
    own = limits.processes.part(num_prompts)
    rows = scoring.task.prompts("test", range(num_prompts)[own])
    ids = [
        truncate_prompt(tokenizer.encode_prompt(row["prompt"]), settings.max_prompt_length)
        for row in rows
    ]
    longest_prompt, longest_answer = scoring.task.longest(tokenizer.encode_prompt)
    room = model.config.block_size - (settings.max_prompt_length or longest_prompt)
    room = min(room, settings.max_new_tokens or longest_answer + 1)
    options = sampling_options(settings, tokenizer, limits) | dict(seed=0, first_row=own.start)
    with autocast(settings.dtype, model):
        asked = model, tokenizer, scoring, rows, ids, 1, room
        return [complete(*asked, temperature, **options) if rows else [] for temperature in (0.0, 1.0)]


def scores_as_run(shares: list[list[list[dict]]]) -> dict[str, float]:
    """What answers_as_run gave in each process -> log entries.

    pass_at_1, task_pass_at_1 if the task's own reward is beside reward_funcs, eval_reward_mean, the same with _sampled
    (temperature 1); eval_reward/<function> of greedy ones if there are several functions.
    """
    scores = {}
    for suffix, parts in zip(("", "_sampled"), zip(*shares, strict=True), strict=True):
        samples = [sample for part in parts for sample in part]
        means = reward_means(samples)
        scores |= shares_of(samples, suffix) | {f"eval_reward_mean{suffix}": means.pop("reward")}
        scores |= {
            f"eval_{name}": mean for name, mean in means.items() if not suffix and len(means) > 1
        }
    return scores


def is_due(done: int, scoring: Scoring, settings: SFTSettings | GRPOSettings) -> bool:
    """Is there an evaluation after `done` iterations? Before the first, every eval_interval and after the last."""
    due = done == settings.max_iters or settings.eval_interval and done % settings.eval_interval == 0
    return bool(due and settings.eval_prompts and scoring.functions)


def evaluate_run(model, scoring, tokenizer, settings, meter, limits) -> dict[str, float]:
    """Scores of the model that a run trains, as log entries."""

    def sample():
        with meter.phase("eval"), limits.processes.whole(model) as sampler:
            return answers_as_run(settings, sampler, tokenizer, scoring, settings.eval_prompts, limits)

    generators = generator_state(
        model.device
    )  # a reward function may draw; what follows must not depend on it
    answers = limits.run("eval", sample)
    restore_generators(generators, model.device)
    return scores_as_run(limits.processes.gather(lambda: answers))


def room_for(ids: list[list[int]], wanted: int, block_size: int) -> int:
    """Tokens that completions of these prompts may have: `wanted` or fewer. Raises SnugError if there is no room."""
    longest = max(map(len, ids))
    left = block_size - longest
    if left < 1:
        raise SnugError(
            f"prompts have up to {longest} tokens, and this model takes {block_size}, with the completion"
        )
    if left < wanted:
        note = (
            f"note: completions are cut to {left} tokens: prompts have up to {longest} of {block_size}"
        )
        print(note, file=sys.stderr)
    return min(left, wanted)


def complete(
    model, tokenizer, scoring, rows, ids, group_size, max_new_tokens, temperature, **options
) -> list[dict]:
    """`group_size` completions of each row, whose prompts have these ids -> a dict each, groups adjacent, in row order.

    prompt, completion; answer: what a majority vote counts, None without one or if cut off; right, reward and others
    of `Scoring.columns`; stopped; length in tokens with the stop token; greedy; logprob: natural, of the whole
    completion at that temperature (greedy: at 1).
    """
    rollouts = sample_groups(model, ids, group_size, max_new_tokens, temperature=temperature, **options)
    completions, stopped = rollouts.completions(), rollouts.stopped.tolist()
    lengths, logprobs = (
        rollouts.completion_lengths.tolist(),
        rollouts.sampling_logprobs.double().sum(1).tolist(),
    )
    prompts = [row["prompt"] for row in rows for _ in range(group_size)]
    texts = [tokenizer.decode(completion) for completion in completions]
    columns = repeat_columns(rows, group_size) | dict(stopped=stopped, completion_ids=completions)
    answers = [
        scoring.task.answer_of(text) if over else None
        for text, over in zip(texts, stopped, strict=True)
    ]
    samples = dict(prompt=prompts, completion=texts, answer=answers) | scoring.columns(
        prompts, texts, columns
    )
    samples |= dict(
        stopped=stopped, length=lengths, greedy=[temperature == 0] * len(texts), logprob=logprobs
    )
    return [dict(zip(samples, values, strict=True)) for values in zip(*samples.values(), strict=True)]


def sample_answers(
    run: Run, questions: Questions, ids, room, group_size, temperature, seed, limits
) -> list[dict]:
    """`complete` for all rows, TOKENS_AT_ONCE at a time, fewer after an out-of-memory; the samples stay the same."""
    settings, model, samples = questions.settings, run.model, []
    size = max(1, TOKENS_AT_ONCE // (group_size * room))  # prompts

    def sample(first):
        with autocast(settings.dtype, model):
            options = sampling_options(settings, run.tokenizer, limits)
            options |= dict(seed=seed, first_row=first * group_size)
            rows, prompts = questions.rows[first : first + size], ids[first : first + size]
            scoring = questions.scoring
            return complete(
                model, run.tokenizer, scoring, rows, prompts, group_size, room, temperature, **options
            )

    for first in range(0, len(ids), size):
        samples += limits.run("eval", sample, first)
    return samples


def run_evaluation(
    run: Run, questions: Questions, settings: EvaluateSettings
) -> tuple[dict, list[dict]]:
    """-> (the first line of the file of samples, the samples: of each prompt the greedy one, then num_samples)."""
    encode, rows, task = run.tokenizer.encode_prompt, questions.rows, questions.scoring.task
    n = settings.num_samples if settings.temperature else 0
    ids = [truncate_prompt(encode(row["prompt"]), questions.settings.max_prompt_length) for row in rows]
    wanted = settings.max_new_tokens or questions.settings.max_new_tokens or task.longest(encode)[1] + 1
    room = room_for(ids, wanted, run.model.config.block_size)
    limits = Limits(questions.settings, partial(print, file=sys.stderr))
    greedy = sample_answers(run, questions, ids, room, 1, 0.0, settings.seed, limits)
    sampled = (
        sample_answers(run, questions, ids, room, n, settings.temperature, settings.seed, limits)
        if n
        else []
    )
    different = len({json.dumps(row["prompt"]) for row in rows})
    asked = asdict(settings) | {name: getattr(questions.settings, name) for name in fields(TaskOptions)}
    asked |= asdict(questions.scoring.settings) | dict(pass_reward=questions.scoring.threshold)
    asked |= dict(max_new_tokens=room, samples_file=str(questions.file))
    head = dict(checkpoint=str(run.path), settings=asked, different_prompts=different)
    head |= summarize(greedy, sampled, n, different)
    return head, [
        sample for i in range(len(rows)) for sample in (greedy[i], *sampled[i * n : (i + 1) * n])
    ]


def main(settings: EvaluateSettings, questions: Questions):
    head, samples = run_evaluation(load_run(questions.checkpoint, settings.device), questions, settings)
    try:
        if questions.file:
            write_lines(questions.file, [head, *samples])  # before the console, which may be gone
    finally:  # a full disk does not lose the scores
        print("\n".join(table(head)), flush=True)
    for sample in [sample for sample in samples if sample["greedy"]][: settings.show]:
        prompt = (
            sample["prompt"] if isinstance(sample["prompt"], str) else sample["prompt"][-1]["content"]
        )
        print(
            f"  {'right' if sample['right'] else 'wrong'}  {prompt!r} -> {sample['completion']!r}",
            flush=True,
        )
    if questions.file:
        print(f"samples in {questions.file}", flush=True)


if __name__ == "__main__":
    with friendly_errors():
        main(settings, questions)
