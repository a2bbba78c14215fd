"""pass@1 of a model on a task's held-out prompts, greedy and sampled.

    python evaluate.py out/grpo_small --num_prompts=500

Left out, so far: pass@k, majority votes, confidence intervals.
"""

import sys
from functools import partial

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from checkpoint import find_run
    from settings import EvaluateSettings, friendly_errors, read_settings

    with friendly_errors():
        settings, _, folder = read_settings(EvaluateSettings, sys.argv[1:], positional="folder")
        find_run(folder)

from memory import surviving
from model import autocast
from plan import halve_rollout_batch
from sample import rehearse_groups, sample_groups
from settings import SnugError


def columns_of(rows, repeat=1):
    """Rows of a task -> the columns its reward functions take: {name: list}, each row `repeat` times in a row."""
    return {name: [row[name] for row in rows for _ in range(repeat)] for name in rows[0] if name != "prompt"}


def evaluate(model, tokenizer, task, num_prompts, max_new_tokens, *, seed=0, max_prompt_length=0, split="test", **decoding):
    """The share of `num_prompts` held-out prompts that one completion answers rightly (reward 1 of the task's own reward).

    decoding: other options of sample_groups.
    -> {"pass_at_1": greedy, "pass_at_1_sampled": at temperature 1}
    """
    rows = task.prompts(split, range(num_prompts))
    prompts = [row["prompt"] for row in rows]
    ids = [tokenizer.encode(prompt)[-max_prompt_length:] for prompt in prompts]
    options = dict(stop_token=tokenizer.stop_token, seed=seed) | decoding
    scores = {}
    for name, temperature in (("pass_at_1", 0.0), ("pass_at_1_sampled", 1.0)):
        rollouts = sample_groups(model, ids, 1, max_new_tokens, temperature=temperature, **options)
        texts = [tokenizer.decode(completion) for completion in rollouts.completions()]
        rewards = task.rewards(prompts, texts, stopped=rollouts.stopped.tolist(), **columns_of(rows))
        scores[name] = sum(reward == 1 for reward in rewards) / num_prompts
    return scores


def decoding_of(settings):
    """A run's bounds on its decode batches, for prompts that have one completion each."""
    batch = min(settings.batch_size, getattr(settings, "max_rollout_batch", 0) or settings.batch_size)
    return dict(max_batch=batch, chunk_mb=settings.logits_chunk_mb, kv_cache_mb=getattr(settings, "kv_cache_mb", 0))


def evaluate_as_run(settings, model, tokenizer, task, num_prompts, max_new_tokens=0, seed=0):
    """`evaluate` with a run's own precision, prompts, decode batch and room for an answer: its max_new_tokens, or the task's longest."""
    longest = getattr(settings, "max_prompt_length", 0)
    prompt, answer = task.longest(tokenizer.encode)
    left = model.config.block_size - (longest or prompt)
    room = max_new_tokens or getattr(settings, "max_new_tokens", 0) or answer + 1
    with autocast(settings.dtype, model):
        options = dict(seed=seed, max_prompt_length=longest, split=settings.eval_split) | decoding_of(settings)
        options |= dict(
            is_over=tokenizer.stopper(getattr(settings, "stop_string", "")), enforce_eager=settings.enforce_eager, progress=True
        )
        return evaluate(model, tokenizer, task, num_prompts, min(left, room), **options)


def rehearse_evaluation(model, prompt_length, max_new_tokens, settings, meter):
    """What an evaluation allocates at most, for a planner's fake tensors."""
    if settings.eval_prompts:
        with meter.phase("eval"), autocast(settings.dtype, model):
            rehearse_groups(model, prompt_length, settings.eval_prompts, 1, max_new_tokens, **decoding_of(settings))


def evaluate_if_due(done, model, task, tokenizer, settings, meter, say):
    """pass@1 after `done` iterations, at the start, every eval_interval and at the end -> its log entries, or {}."""
    due = done == settings.max_iters or (settings.eval_interval and done % settings.eval_interval == 0)
    if not due or not settings.eval_prompts or not task.scored:
        return {}
    with meter.phase("eval"):
        smaller = partial(halve_rollout_batch, settings, settings.batch_size, model, say=say)
        return surviving(partial(evaluate_as_run, settings, model, tokenizer, task, settings.eval_prompts), smaller)


def main(settings, folder):
    from checkpoint import load_run
    from data import make_task

    run = load_run(folder, settings.device)
    if not make_task(run.settings).scored:
        raise SnugError(f"{folder}: its data_file has no column answer to score completions by")
    if settings.eval_split not in ("run", run.settings.eval_split):
        if settings.eval_split == "tune":
            raise SnugError(f"{folder} was trained on the prompts of the tune split; only runs with eval_split=tune leave them out")
        run.settings.eval_split = settings.eval_split
    options = settings.num_prompts, settings.max_new_tokens, settings.seed
    scores = evaluate_as_run(run.settings, run.model, run.tokenizer, make_task(run.settings), *options)
    print(f"{run.path}: {run.settings.task}, {settings.num_prompts} prompts of the {run.settings.eval_split} split")
    for name, score in scores.items():
        print(f"  {name} {score:.3f}")


if __name__ == "__main__":
    with friendly_errors():
        main(settings, folder)
