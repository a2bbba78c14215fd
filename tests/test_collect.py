"""What an iteration learns from: groups refilled until their rewards differ, rewards in parts, and what is taken from them."""

import dataclasses
import itertools
import math

import pytest
import torch

import grpo
from helpers.models import DEVICE, make_flat_model
from helpers.runs import figures
from runs.checkpoint import newest, read_state
from runs.log import read_log
from runs.prepare import prepare
from sample import sample_groups
from settings import GRPOSettings

STOP = 3
TINY = dict(digits=2, n_layer=1, n_embd=32, block_size=24, device=DEVICE, dtype="float32", eval_prompts=0)
TINY |= dict(batch_size=4, group_size=4, max_new_tokens=8, max_iters=3)


def prepared_for(tmp_path, reward, **changes):
    """A run whose reward is reward(number of the prompt, number of the completion in its group); prompts are numbered as drawn."""
    prepared = prepare(GRPOSettings(**TINY | dict(out_dir=str(tmp_path / "run")) | changes))
    original, drawn = prepared.task.prompts, []

    def prompts(split, index):
        index = list(index)
        if split == "train":
            drawn.append(index)
        return [row | {"number": number} for row, number in zip(original(split, index), index, strict=True)]

    def rewards(prompts, completions, number, **columns):
        k = prepared.settings.group_size
        return [reward(n, i % k) for i, n in enumerate(number)]

    prepared.task.prompts, prepared.reward_funcs = prompts, [rewards]
    return prepared, drawn


def learned_from(monkeypatch):
    """-> the list that every iteration's (rewards given to group_advantages, prompts kept) is added to."""
    seen = []
    original = grpo.group_advantages

    def noted(rewards, *rest, **options):
        seen.append(rewards.clone())
        return original(rewards, *rest, **options)

    monkeypatch.setattr(grpo, "group_advantages", noted)
    return seen


def test_groups_without_variance_make_room(tmp_path, monkeypatch):
    """Only every third prompt teaches: 4 of them take three rollouts of 4 the first time, and prompts are never used twice."""
    reward = lambda n, i: float(n % 3 == 0 and i == 1) + n / 1000  # noqa: E731
    prepared, drawn = prepared_for(tmp_path, reward, max_num_gen_batches=5)
    seen = learned_from(monkeypatch)
    grpo.main(prepared)
    numbers = list(itertools.chain(*drawn))
    assert numbers == list(range(len(numbers)))  # in order, none twice, none left out
    taught = [sorted({int(1000 * group.min() + 0.5) for group in rewards}) for rewards in seen]
    records = read_log(tmp_path / "run")
    used = list(itertools.accumulate((record["gen_batches"] for record in records), initial=0))
    for i, kept in enumerate(taught):
        drawn_now = range(4 * used[i], 4 * used[i + 1])
        assert kept == [n for n in drawn_now if n % 3 == 0][:4] and len(kept) == 4
        assert records[i]["frac_reward_zero_std"] == pytest.approx(sum(n % 3 != 0 for n in drawn_now) / len(drawn_now))
    assert records[0]["gen_batches"] == 3
    assert records[0]["reward_mean"] == pytest.approx(4 / 12 / 4 + 5.5 / 1000, abs=1e-6)  # of all that was sampled
    assert read_state(newest(tmp_path / "run"))["extra_prompts"] == 4 * (sum(r["gen_batches"] for r in records) - 3)


def test_at_the_cap_the_batch_is_filled_with_what_there_is(tmp_path, monkeypatch):
    reward = lambda n, i: float(n == 5 and i) + n / 1000  # noqa: E731
    prepared, drawn = prepared_for(tmp_path, reward, max_num_gen_batches=2, max_iters=1)
    seen = learned_from(monkeypatch)
    grpo.main(prepared)
    smallest = [int(1000 * group.min() + 0.5) for group in seen[0]]
    assert smallest == [0, 1, 2, 5]  # the one that teaches, and others, in their order
    assert len(drawn) == 2 and read_log(tmp_path / "run")[0]["grad_norm"] > 0


def test_where_nothing_teaches_no_step_is_taken(tmp_path):
    """All equal, or not scored at all: the weights stay as they were, moments and weight decay notwithstanding."""
    first_only = dict(max_iters=2, weight_decay=0.1, learning_rate=1e-2, save_interval=1, save_total_limit=9)
    for name, empty in (("equal", lambda n, i: 1.0), ("not scored", lambda n, i: None)):
        reward = lambda n, i, empty=empty: float(i) if n < 4 else empty(n, i)  # noqa: E731
        prepared, _ = prepared_for(tmp_path / name, reward, **first_only)
        grpo.main(prepared)
        records = read_log(prepared.settings.out_dir)
        assert [record["skipped_steps"] for record in records] == [0, 1] and records[0]["grad_norm"] > 0
        assert "loss" not in records[1] and records[1]["frac_reward_zero_std"] == 1
        from safetensors.torch import load_file

        before, after = (load_file(tmp_path / name / f"run/checkpoint-{n:06d}/model.safetensors") for n in (1, 2))
        assert all(after[key].equal(before[key]) for key in before)


def test_what_can_teach(tmp_path):
    model = make_flat_model("gpt2")
    rollouts = sample_groups(model, [[1, 2, 3]], 4, 6, stop_token=STOP, seed=3)
    rollouts.advantages = torch.zeros(4, device=DEVICE)
    broken = dataclasses.replace(rollouts, sampling_logprobs=rollouts.sampling_logprobs * math.nan)
    assert grpo.teaches(broken, range(4), GRPOSettings())  # so that the guard sees it
    ways = dict(), dict(beta=0.1), dict(loss_type="mine:with_entropy_bonus")
    teach = [grpo.teaches(rollouts, range(4), GRPOSettings(init_from="x", **options)) for options in ways]
    assert teach == [False, True, True]
    rollouts.advantages[2] = -1
    assert grpo.teaches(rollouts, range(2, 4), GRPOSettings()) and not grpo.teaches(rollouts, range(2), GRPOSettings())
    rollouts.stopped[:] = False  # all cut off
    assert not grpo.teaches(rollouts, range(4), GRPOSettings(mask_truncated_completions=True))


def test_a_resumed_run_draws_the_same_prompts(tmp_path):
    def teaches(n, i):
        return float(n % 3 == 0 and i)

    for name, iterations in (("whole", [4]), ("parts", [2, 4])):
        for n in iterations:
            prepared, _ = prepared_for(tmp_path / name, teaches, max_num_gen_batches=5, resume="auto", max_iters=n)
            grpo.main(prepared)
    ours, theirs = (figures(tmp_path / name / "run") for name in ("whole", "parts"))
    assert ours == theirs and sum(record["gen_batches"] for record in ours) > 4


def test_reward_functions_are_scaled_apart(tmp_path, monkeypatch):
    """The advantages that are learned from are those of each function, by its weight."""
    options = dict(reward_funcs=["argparse:Namespace"] * 2, reward_weights=[2.0, 0.5], max_iters=1)
    options |= dict(multi_objective_aggregation="normalize_then_sum")
    prepared, _ = prepared_for(tmp_path, lambda n, i: None, **options)
    right = lambda prompts, completions, **_: [float(i % 4 == 0) for i in range(len(prompts))]  # noqa: E731
    points = lambda prompts, completions, **_: [None if i == 3 else 10.0 * (i % 3) for i in range(len(prompts))]  # noqa: E731
    prepared.reward_funcs, kept = [right, points], keep_rollouts(monkeypatch)
    grpo.main(prepared)
    by_function = [function([""] * 16, None) for function in (right, points)]
    expected = grpo.decoupled_advantages(by_function, 4, [2.0, 0.5])
    torch.testing.assert_close(kept[0].advantages.cpu(), expected.flatten(), rtol=0, atol=1e-6)
    assert (kept[0].advantages != 0).sum() > 8


def keep_rollouts(monkeypatch):
    """-> the list that every iteration's Rollouts are added to, log-probs and all."""
    kept = []
    original = grpo.accumulate_gradient
    monkeypatch.setattr(grpo, "accumulate_gradient", lambda *a, **rest: kept.append(a[1]) or original(*a, **rest))
    return kept


def test_truncated_importance_takes_the_trainers_log_probs(tmp_path, monkeypatch):
    options = dict(importance_sampling_cap=2.0, dtype="bfloat16", max_iters=1)
    prepared, _ = prepared_for(tmp_path, lambda n, i: float(i), **options)
    kept = keep_rollouts(monkeypatch)
    grpo.main(prepared)
    (rollouts,) = kept
    assert not rollouts.old_logprobs.equal(rollouts.sampling_logprobs)
    torch.testing.assert_close(rollouts.old_logprobs, rollouts.sampling_logprobs, atol=0.1, rtol=0)
    assert (rollouts.old_logprobs[rollouts.mask == 0] == 0).all()
    record = read_log(tmp_path / "run")[0]
    assert 0 < record["mismatch_kl"] < 1e-3 and "time_reference_s" in record
