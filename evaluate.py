"""How well a model answers a task's held-out prompts: pass@k, majority votes, and how sure that is.

    python evaluate.py out/grpo_small --num_prompts=500
    python evaluate.py out/X --task=countdown --num_samples=16 --num_prompts=200

The second asks for 16 completions of each prompt beside the greedy one, of another task than the run's, and leaves them all in
out/X/evaluation-countdown-test.jsonl. What is asked is settled in exam.py, what is made of the answers in scores.py. The loops' own
evaluation is `evaluate_if_due`: greedy, and one sampled completion.

Left out: top-k, top-p and min-p, which sample.py has: the scores are the policy's own. Several runs at once; comparing two.
"""

import json
import sys
from dataclasses import asdict
from functools import partial

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from options import friendly_errors, read_settings
    from runs.exam import prepare_exam
    from settings import EvaluateSettings

    with friendly_errors():
        settings, given, folder = read_settings(EvaluateSettings, sys.argv[1:], positional="folder")
        exam = prepare_exam(settings, given, folder)

from data.rewards import ask
from data.scores import judge, table
from memory import Pieces, attempts
from model import autocast
from options import SnugError, fields
from runs.exam import write_lines
from sample import sample_groups
from settings import TaskOptions

AT_ONCE = 2**22  # tokens that the command's completions may have together, of those that are sampled in one go


def columns_of(rows, repeat=1):
    """Rows of a task -> the columns its reward functions take: {name: list}, each row `repeat` times in a row."""
    return {name: [row[name] for row in rows for _ in range(repeat)] for name in rows[0] if name != "prompt"}


def evaluate(
    model, tokenizer, task, num_prompts, max_new_tokens, *, seed=0, max_prompt_length=0, split="test", **decoding
):
    """The share of `num_prompts` held-out prompts that one completion answers rightly (reward 1 of the task's own reward).

    decoding: other options of sample_groups.
    -> {"pass_at_1": greedy, "pass_at_1_sampled": at temperature 1}
    """
    rows = task.prompts(split, range(num_prompts))
    prompts = [row["prompt"] for row in rows]
    ids = [tokenizer.encode_prompt(prompt)[-max_prompt_length:] for prompt in prompts]
    options = dict(stop_token=tokenizer.stop_tokens, seed=seed) | decoding
    scores = {}
    for name, temperature in (("pass_at_1", 0.0), ("pass_at_1_sampled", 1.0)):
        rollouts = sample_groups(model, ids, 1, max_new_tokens, temperature=temperature, **options)
        texts = [tokenizer.decode(completion) for completion in rollouts.completions()]
        rewards = task.rewards(prompts, texts, stopped=rollouts.stopped.tolist(), **columns_of(rows))
        scores[name] = sum(reward == 1 for reward in rewards) / num_prompts
    return scores


def decoding_of(settings, pieces):
    """A run's bounds on its decode batches, for prompts that have one completion each. pieces: a run's Pieces, or its settings."""
    batch = min(settings.batch_size, pieces.max_rollout_batch or settings.batch_size)
    return dict(max_batch=batch, chunk_mb=settings.logits_chunk_mb)


def options_of(settings, tokenizer, pieces):
    """sample_groups' options as a run has them."""
    stops = dict(stop_token=tokenizer.stop_tokens, is_over=tokenizer.stopper(getattr(settings, "stop_string", "")))
    return stops | dict(enforce_eager=settings.enforce_eager, progress=True) | decoding_of(settings, pieces)


def evaluate_as_run(settings, model, tokenizer, task, num_prompts, pieces=None):
    """`evaluate` with a run's own precision, prompts, decode batch and room for an answer: its max_new_tokens, or the task's longest."""
    longest = getattr(settings, "max_prompt_length", 0)
    prompt, answer = task.longest(tokenizer.encode_prompt)
    left = model.config.block_size - (longest or prompt)
    room = getattr(settings, "max_new_tokens", 0) or answer + 1
    with autocast(settings.dtype, model):
        options = dict(max_prompt_length=longest, split=settings.eval_split) | options_of(
            settings, tokenizer, pieces or settings
        )
        return evaluate(model, tokenizer, task, num_prompts, min(left, room), **options)


def evaluate_if_due(done, model, task, tokenizer, settings, meter, pieces):
    """pass@1 after `done` iterations, at the start, every eval_interval and at the end -> its log entries, or {}."""
    due = done == settings.max_iters or (settings.eval_interval and done % settings.eval_interval == 0)
    if not due or not settings.eval_prompts or not task.scored:
        return {}
    for attempt in attempts(pieces.halve_rollout(settings.batch_size, model)):
        with attempt, meter.phase("eval"):
            scores = evaluate_as_run(settings, model, tokenizer, task, settings.eval_prompts, pieces)
    return scores


# -----------------------------------------------------------------------------
# The command


def room_for(ids, settings, block_size, task, encode):
    """The most tokens that completions of these prompts, lists of ids, may have. Raises SnugError where there is no room for any."""
    longest = max(map(len, ids))
    left, wanted = block_size - longest, settings.max_new_tokens or task.longest(encode)[1] + 1
    if left < 1:
        raise SnugError(
            f"prompts of {settings.task} have up to {longest} tokens, and this model takes {block_size}, the completion's included"
        )
    if left < wanted:
        print(
            f"note: completions have at most {left} tokens: prompts have up to {longest}, of block_size={block_size}",
            file=sys.stderr,
        )
    return min(left, wanted)


def complete(model, tokenizer, task, rows, ids, group_size, max_new_tokens, temperature, **options):
    """`group_size` completions of each row, whose prompts have these ids -> a dict each, groups adjacent, in the order of the rows.

    prompt, completion; answer: what a majority vote counts, None where there is none or the completion was cut off; reward: the task's,
    1 is right; reward/<name>: what each of the task's reward functions says, where it has any; stopped; length in tokens, the stop token
    included; greedy; logprob: natural, of the whole completion at that temperature (greedy: at 1).
    """
    rollouts = sample_groups(model, ids, group_size, max_new_tokens, temperature=temperature, **options)
    completions, stopped = rollouts.completions(), rollouts.stopped.tolist()
    prompts = [row["prompt"] for row in rows for _ in range(group_size)]
    texts = [tokenizer.decode(completion) for completion in completions]
    answer_of = getattr(task, "answer_of", lambda text: text.strip() or None)
    columns = columns_of(rows, group_size) | dict(stopped=stopped, completion_ids=completions)
    named = dict(prompt=prompts, completion=texts)
    named["answer"] = [answer_of(text) if ended else None for text, ended in zip(texts, stopped, strict=True)]
    named["reward"] = task.rewards(prompts, texts, **columns)
    for function, _ in getattr(task, "reward_functions", list)():
        if function != task.rewards:
            named[f"reward/{function.__name__}"] = ask(function, prompts, texts, columns)
    named |= dict(stopped=stopped, length=rollouts.completion_lengths.tolist(), greedy=[temperature == 0] * len(texts))
    named["logprob"] = rollouts.sampling_logprobs.double().sum(1).tolist()
    return [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]


def ask_model(run, exam, ids, room, group_size, temperature, seed):
    """`complete` for all of an Exam's rows, some at a time, so that the device never holds the tokens of all.

    A row's number is its own all the same, and so are its samples. After an out-of-memory fewer are decoded at a time.
    """
    settings, model, samples = exam.settings, run.model, []
    pieces = Pieces(settings, partial(print, file=sys.stderr))
    halve = pieces.halve_rollout(settings.batch_size, model)

    def make_smaller(error):
        if decoding_of(settings, pieces)["max_batch"] == 1:
            advice = f"try a smaller max_new_tokens than {room}"
            raise SnugError(f"out of memory, decoding one completion at a time: {error}; {advice}")
        halve(error)

    size = max(1, AT_ONCE // (group_size * room))  # prompts
    for first in range(0, len(ids), size):
        rows, prompts = exam.rows[first : first + size], ids[first : first + size]
        for attempt in attempts(make_smaller):
            with attempt, autocast(settings.dtype, model):
                options = options_of(settings, run.tokenizer, pieces) | dict(seed=seed, first_row=first * group_size)
                shared = model, run.tokenizer, exam.task, rows, prompts, group_size, room, temperature
                some = complete(*shared, **options)
        samples += some
    return samples


def examine(run, exam, settings):
    """-> (the first line of the file of samples, the samples: of each prompt the greedy one, then num_samples others)."""
    encode, n, P = run.tokenizer.encode_prompt, settings.num_samples if settings.temperature else 0, len(exam.rows)
    ids = [encode(row["prompt"])[-exam.settings.max_prompt_length :] for row in exam.rows]
    room = room_for(ids, exam.settings, run.model.config.block_size, exam.task, encode)
    greedy = ask_model(run, exam, ids, room, 1, 0.0, settings.seed)
    sampled = ask_model(run, exam, ids, room, n, settings.temperature, settings.seed) if n else []
    different = len({json.dumps(row["prompt"]) for row in exam.rows})
    task = {name: getattr(exam.settings, name) for name in fields(TaskOptions)}
    asked = asdict(settings) | task | dict(max_new_tokens=room, samples_file=str(exam.file))
    head = dict(checkpoint=str(run.path), settings=asked, different_prompts=different) | judge(
        greedy, sampled, n, different
    )
    return head, [sample for i in range(P) for sample in (greedy[i], *sampled[i * n : (i + 1) * n])]


def main(settings, exam, folder):
    from runs.checkpoint import load_run

    head, samples = examine(load_run(folder, settings.device), exam, settings)
    try:
        if exam.file:
            write_lines(exam.file, [head, *samples])  # before the console, which may be gone
    finally:  # and the console where there is no room for a file
        print("\n".join(table(head)), flush=True)
    if exam.file:
        print(f"samples in {exam.file}", flush=True)


if __name__ == "__main__":
    with friendly_errors():
        main(settings, exam, folder)
