"""pass@1 of a model on a task's held-out prompts, greedy and sampled.

    python evaluate.py out/grpo_small --num_prompts=500

Left out, so far: pass@k, majority votes, confidence intervals.
"""

import sys

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from checkpoint import find_run
    from settings import EvaluateSettings, friendly_errors, read_settings

    with friendly_errors():
        settings, _, folder = read_settings(EvaluateSettings, sys.argv[1:], positional="folder")
        find_run(folder)

from model import autocast
from sample import rehearse_groups, sample_groups


def columns_of(rows, repeat=1):
    """Rows of a task -> the columns its reward functions take: {name: list}, each row `repeat` times in a row."""
    return {name: [row[name] for row in rows for _ in range(repeat)] for name in rows[0] if name != "prompt"}


def evaluate(model, tokenizer, task, num_prompts, max_new_tokens, *, seed=0, max_batch=None, chunk_mb=0):
    """The share of `num_prompts` held-out prompts that one completion answers rightly (reward 1 of the task's own reward).

    -> {"pass_at_1": greedy, "pass_at_1_sampled": at temperature 1}
    """
    rows = task.prompts("test", range(num_prompts))
    prompts = [row["prompt"] for row in rows]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    scores = {}
    for name, temperature in (("pass_at_1", 0.0), ("pass_at_1_sampled", 1.0)):
        rollouts = sample_groups(
            model,
            ids,
            1,
            max_new_tokens,
            temperature=temperature,
            stop_token=tokenizer.stop_token,
            seed=seed,
            max_batch=max_batch,
            chunk_mb=chunk_mb,
        )
        texts = [tokenizer.decode(completion) for completion in rollouts.completions()]
        rewards = task.rewards(prompts, texts, stopped=rollouts.stopped.tolist(), **columns_of(rows))
        scores[name] = sum(reward == 1 for reward in rewards) / num_prompts
    return scores


def evaluate_as_run(settings, model, tokenizer, task, num_prompts, max_new_tokens=0, seed=0):
    """`evaluate` with a run's own precision, decode batch and room for an answer: its max_new_tokens, or what block_size leaves."""
    left = model.config.block_size - len(task.longest_prompt())
    room = min(left, max_new_tokens or getattr(settings, "max_new_tokens", left))
    batch = getattr(settings, "max_rollout_batch", 0) or settings.batch_size
    with autocast(settings.dtype, model):
        return evaluate(model, tokenizer, task, num_prompts, room, seed=seed, max_batch=batch, chunk_mb=settings.logits_chunk_mb)


def rehearse_evaluation(model, prompt_length, max_new_tokens, settings, meter):
    """What an evaluation allocates at most, for a planner's fake tensors."""
    if settings.eval_prompts:
        batch = getattr(settings, "max_rollout_batch", 0) or settings.batch_size
        with meter.phase("eval"), autocast(settings.dtype, model):
            options = dict(max_batch=batch, chunk_mb=settings.logits_chunk_mb)
            rehearse_groups(model, prompt_length, settings.eval_prompts, 1, max_new_tokens, **options)


def evaluate_if_due(done, model, task, tokenizer, settings, meter):
    """pass@1 after `done` iterations, at the start, every eval_interval and at the end -> its log entries, or {}."""
    due = done == settings.max_iters or (settings.eval_interval and done % settings.eval_interval == 0)
    if not due or not settings.eval_prompts:
        return {}
    with meter.phase("eval"):
        return evaluate_as_run(settings, model, tokenizer, task, settings.eval_prompts)


def main(settings, folder):
    from checkpoint import load_run
    from data import make_task

    run = load_run(folder, settings.device)
    options = settings.num_prompts, settings.max_new_tokens, settings.seed
    scores = evaluate_as_run(run.settings, run.model, run.tokenizer, make_task(run.settings), *options)
    print(f"{run.path}: {run.settings.task}, {settings.num_prompts} held-out prompts")
    for name, score in scores.items():
        print(f"  {name} {score:.3f}")


if __name__ == "__main__":
    with friendly_errors():
        main(settings, folder)
