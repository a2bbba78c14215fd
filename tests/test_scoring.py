"""Held-out scores by a user's reward functions: the run's and the command's are a count by hand, and choose the best checkpoint."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch

import evaluate
import grpo
import train_sft
from data.scores import pass_rates, reward_means
from helpers.errors import assert_refused
from helpers.runs import prepared_by, progress, reward_that_draws, tiny, trained
from helpers.tasks import written
from runs import checkpoint
from runs.loading import load_run
from runs.log import read_log
from runs.prepare import Prepared, prepare
from runs.saver import Saver
from settings import GRPOSettings, RewardOptions, SFTSettings
from snug.tokenizer import get_tokenizer

RUN = dict(max_iters=2, batch_size=4, group_size=4, max_new_tokens=8, block_size=16, eval_prompts=24, eval_interval=1)
RUN |= dict(reward_funcs=[f"{__name__}:short", f"{__name__}:vowels"], reward_weights=[1.0, 0.5], beta=0.0)


def short(prompts, completions, completion_ids, **columns):
    lengths = map(len, completion_ids)
    return [None if s[:1] > "i" else min(1, 1.5 - n / 8) for s, n in zip(completions, lengths, strict=True)]


def vowels(prompts, completions, **columns):
    return [None if text[:1] > "p" else float(sum(map(text.count, "aeiou")) % 2) for text in completions]


def short_of(sample):
    ids = sample["length"]  # with the stop token, as in TRL
    return None if sample["completion"][:1] > "i" else min(1, 1.5 - ids / 8)


def vowels_of(sample):
    return None if sample["completion"][:1] > "p" else float(sum(sample["completion"].count(v) for v in "aeiou") % 2)


def total(sample, weights=(1.0, 0.5)):
    """None adds nothing; without any reward there is no total."""
    pairs = zip(weights, (short_of(sample), vowels_of(sample)), strict=True)
    rewards = [weight * reward for weight, reward in pairs if reward is not None]
    return sum(rewards) if rewards else None


def mean(values):
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers)


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory):
    """A model that writes words of letters, ragged and different for each prompt."""
    folder = tmp_path_factory.mktemp("warm")
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [letters[i % 26] + letters[i // 3 % 26] * (i % 5) + letters[i // 7 % 26] for i in range(300)]
    path = written(folder, [{"prompt": f"{i}?", "demonstration": text} for i, text in enumerate(texts)])
    options = dict(n_layer=1, n_embd=32, block_size=16, batch_size=32, max_iters=120, learning_rate=1e-2)
    options |= dict(task="jsonl", data_file=path, eval_prompts=1, eval_interval=0, out_dir=str(folder / "sft"))
    train_sft.main(prepare(SFTSettings(**options)))
    return str(folder / "sft")


@pytest.fixture(scope="module", params=[True, False], ids=["answers", "no answers"])
def run_folder(request, tmp_path_factory, warm_start):
    """A run by two of the user's functions -> (its folder, has the file answers?). The last iteration evaluates what is saved."""
    folder, scored = tmp_path_factory.mktemp("run"), request.param
    rows = [{"prompt": f"{i}?"} | ({"answer": "abcdeghi"[i % 8]} if scored else {}) for i in range(300)]
    settings = GRPOSettings(task="jsonl", data_file=written(folder, rows), out_dir=str(folder / "run"), **RUN)
    grpo.main(prepare(replace(settings, init_from=warm_start)))
    return folder / "run", scored


def evaluated(folder, *words):
    """evaluate.py with these words -> (the first line of its file, its samples, the greedy ones, the others)."""
    prepared, options, file = prepared_by(folder, "--num_prompts=24", *words)
    evaluate.main(options, prepared, file)
    summary, *samples = map(json.loads, file.read_text().splitlines())
    return summary, samples, [s for s in samples if s["greedy"]], [s for s in samples if not s["greedy"]]


def test_the_runs_figures_and_the_commands_are_a_count_by_hand(run_folder, capsys):
    folder, scored = run_folder
    summary, samples, greedy, drawn = evaluated(folder)
    answers = {row["prompt"]: row.get("answer") for row in prepared_by(folder)[0].task.prompts("test", range(24))}
    right = [s["stopped"] and s["completion"].strip() == answers[s["prompt"]] for s in samples]
    for s, is_right in zip(samples, right, strict=True):
        assert s["reward"] == (None if total(s) is None else pytest.approx(total(s)))
        assert s["reward/short"] == short_of(s) and s["reward/vowels"] == vowels_of(s)
        assert s["right"] == (total(s) is not None and total(s) >= 1.5)
        assert s.get("task_reward") == (float(is_right) if scored else None)
    assert 3 < sum(s["reward"] is None for s in samples) < 24 and len({s["reward"] for s in samples}) > 6
    counted = {}
    for suffix, chosen in (("", greedy), ("_sampled", drawn)):
        counted["eval_reward_mean" + suffix] = mean(map(total, chosen))
        counted["pass_at_1" + suffix] = mean([(total(s) or 0.0) >= 1.5 for s in chosen])
        if scored:
            counted["task_pass_at_1" + suffix] = mean(right[bool(suffix) :: 2])
    counted |= {"eval_reward/short": mean(map(short_of, greedy)), "eval_reward/vowels": mean(map(vowels_of, greedy))}
    last = read_log(folder)[-1]
    logged = {name: value for name, value in last.items() if "pass_at" in name or "eval_reward" in name}
    assert logged == pytest.approx(counted)
    assert summary["scores"] == pytest.approx({name: counted[name] for name in counted if "pass_at" in name})
    means = {"reward_greedy": counted["eval_reward_mean"], "reward": counted["eval_reward_mean_sampled"]}
    means |= {"reward/short": mean(map(short_of, drawn)), "reward/vowels": mean(map(vowels_of, drawn))}
    assert {name: summary["means"][name] for name in means} == pytest.approx(means)
    printed = {tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()[1:-1]}
    for name, value in (summary["scores"] | means).items():
        assert (name, f"{value:.3f}") in printed


@pytest.mark.parametrize(
    "words, weights, threshold",
    [
        (["--reward_weights=0.25,3"], [0.25, 3.0], 3.25),
        ([f"--reward_funcs={__name__}:short,{__name__}:vowels"], [1.0, 1.0], 2.0),
    ],
)
def test_the_threshold_and_the_weights(run_folder, words, weights, threshold):
    """What is given holds, also against the run's; other functions have no weights of the run."""
    summary, samples, greedy, drawn = evaluated(run_folder[0], "--num_samples=4", *words)
    assert summary["settings"]["seed"] == 0
    for s in samples:
        reward = total(s, weights)
        assert s["right"] == (reward is not None and reward >= threshold) and (s["reward"] is None) == (reward is None)
    groups = [drawn[i : i + 4] for i in range(0, 96, 4)]
    assert summary["scores"]["pass_at_4"] == pytest.approx(mean([any(s["right"] for s in group) for group in groups]))


def test_the_tasks_own_score_and_other_tasks(run_folder, warm_start):
    folder, scored = run_folder
    words = ["--task=addition", "--digits=1", "--max_new_tokens=4"]
    other = evaluated(folder, *words)[0]
    assert "task_pass_at_1" not in other["scores"] and list(other["means"]) == ["length", "stopped"]
    assert other["settings"]["reward_funcs"] == []
    summary, samples, *_ = evaluated(folder, *words, f"--reward_funcs={__name__}:vowels")
    for s in samples:
        assert s["reward"] == s["reward/vowels"] == vowels_of(s) and s["right"] == (vowels_of(s) == 1)
    assert summary["scores"]["task_pass_at_1"] == 0
    if scored:
        summary, samples, greedy, _ = evaluated(folder, "--reward_funcs=")
        assert {"right", "reward"} <= set(samples[0]) and not {"task_reward", "reward/short"} & set(samples[0])
        rewards = mean([s["reward"] for s in greedy])
        assert summary["scores"]["pass_at_1"] == rewards == read_log(folder)[-1]["task_pass_at_1"]
        return
    for place, word in ((folder, "--reward_funcs="), (warm_start, "--seed=0")):  # SFT has no functions
        assert_refused("column answer to score by; name --answer_column, or --reward_funcs", prepared_by, place, word)
    summary = evaluated(warm_start, f"--reward_funcs={__name__}:short")[0]
    assert "reward/short" in summary["means"]


@pytest.mark.parametrize("options, best, score", [(dict(reward_funcs=["a:b"]), 2, -0.2), ({}, 4, 0.9)])
def test_the_best_is_chosen_by_the_reward_of_own_functions_or_by_pass_at_1(tmp_path, options, best, score):
    settings = GRPOSettings(out_dir=str(tmp_path), max_iters=99, save_interval=1, save_total_limit=1, **options)
    model = torch.nn.Linear(2, 2)
    model.config = RewardOptions()  # any dataclass
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.steps = 1  # as our optimizers count
    saver = Saver(settings, get_tokenizer("bytes"), model, optimizer, print)
    scores = [(-0.9, 0.8), (-0.2, 0.0), (-0.5, 0.1), (None, 0.9)]
    scores = [dict(eval_reward_mean=reward, pass_at_1=rate) for reward, rate in scores] + [{}, {}]
    for done, entries in enumerate(scores, start=1):
        saver.after(done, progress(), entries)
    assert checkpoint.newest(tmp_path / "best").name == f"checkpoint-{best:06d}" and saver.scores[best] == score


def test_a_function_gets_as_many_completions_as_in_training(run_folder):
    """So that reward_timeout means the same. A group is not cut."""
    calls = []

    def count(prompts, completions, **columns):
        lists = [values for values in columns.values() if isinstance(values, list)]
        assert {len(values) for values in lists} == {len(prompts)} == {len(completions)}
        calls.append(len(prompts))
        return [0.5] * len(prompts)

    run = load_run(run_folder[0])
    for n, sizes in ((1, [16, 8, 16, 8]), (6, [16, 8] + [12] * 12), (20, [16, 8] + [20] * 24)):
        prepared, options, _ = prepared_by(run_folder[0], "--num_prompts=24", f"--num_samples={n}")
        prepared.reward_funcs, prepared.reward_weights = [count], [1.0]
        calls.clear()
        evaluate.run_evaluation(run.model, prepared, options)
        assert calls == sizes


@pytest.mark.parametrize(
    "rewards, weights, right",
    [
        ([np.float32(0.9) + np.float32(0.1) - np.float32(6e-8)], [1.0], True),
        ([1, 1, 1], [0.7, 0.1, 0.1], True),
        ([1 + 1e-7], [-1.0], True),
        ([0.9999], [1.0], False),
        ([0.0], [1e-9], False),
        ([None], [1.0], False),
    ],
)
def test_a_total_that_is_too_small_by_rounding_is_right(rewards, weights, right):
    """float32 has no 0.9, and the sum of 0.7, 0.1 and 0.1 is 0.8999999999999999."""
    settings = GRPOSettings(reward_funcs=["a:b"])
    functions = [lambda reward=reward, **_: [reward] for reward in rewards]
    unscored = SimpleNamespace(scored=False)
    prepared = Prepared(settings, unscored, None, {}, functions, weights)
    assert evaluate.score(prepared, [""], [""], {})["right"] == [right]


def test_a_completion_that_nobody_scores_is_wrong_and_in_no_mean():
    samples = [dict(right=False, reward=None), dict(right=True, reward=1.0), dict(right=False, reward=0.5)]
    assert pass_rates(samples) == {"pass_at_1": 1 / 3} and reward_means(samples) == {"reward": 0.75}
    assert reward_means(samples[:1]) == {"reward": None}


def test_evaluations_do_not_change_what_is_learned(tmp_path):
    """A reward function draws from every generator, and the run seeds them: without evaluations, the same weights."""
    weights = []
    for prompts in (0, 5):
        _, settings = tiny(tmp_path, init_from="", beta=0.0, eval_interval=1, eval_prompts=prompts)
        path = trained(replace(settings, out_dir=str(tmp_path / f"run{prompts}")), reward_that_draws)
        weights.append(safetensors.torch.load_file(path / "model.safetensors"))
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
