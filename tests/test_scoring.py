"""Held-out scores by a user's own reward functions: the run's and the command's are those of a count by hand, and choose the best checkpoint."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from test_checkpoint import progress, reward_that_draws
from test_evaluate import questions_of
from test_grpo import tiny
from test_jsonl import written

import evaluate
import grpo
import report
import train_sft
from data.rewards import Scoring
from data.scores import reward_means, shares_of
from data.task import Task
from options import SnugError
from page.runs import read_runs
from runs import checkpoint
from runs.log import read_log
from runs.prepare import prepare
from runs.saver import Saver
from settings import GRPOSettings, RewardOptions, SFTSettings
from tokenizer import get_tokenizer
from training.guard import Guard

FUNCTIONS = """
def short(prompts, completions, completion_ids, **columns):
    return [None if text[:1] > "i" else min(1, 1.5 - len(ids) / 8) for text, ids in zip(completions, completion_ids)]

def vowels(prompts, completions, **columns):
    return [None if text[:1] > "p" else float(sum(map(text.count, "aeiou")) % 2) for text in completions]

def broken(prompts, completions, **columns):
    if "q" in prompts[0]:
        raise ValueError("no reward for a question")
    return [0.0] * len(prompts)
"""


def short(sample):
    ids = sample["length"] - sample["stopped"]
    return None if sample["completion"][:1] > "i" else min(1, 1.5 - ids / 8)


def vowels(sample):
    return None if sample["completion"][:1] > "p" else float(sum(sample["completion"].count(v) for v in "aeiou") % 2)


def total(sample, weights):
    """None adds nothing; without any reward there is no total."""
    said = [
        weight * given
        for weight, given in zip(weights, (short(sample), vowels(sample)), strict=True)
        if given is not None
    ]
    return sum(said) if said else None


def mean(values):
    said = [value for value in values if value is not None]
    return sum(said) / len(said)


@pytest.fixture(scope="module", autouse=True)
def rewards_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "held_out_rewards.py").write_text(FUNCTIONS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory):
    """A model that writes words of letters, ragged and different for each prompt."""
    folder = tmp_path_factory.mktemp("warm")
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [letters[i % 26] + letters[i // 3 % 26] * (i % 5) + letters[i // 7 % 26] for i in range(300)]
    rows = [{"prompt": f"{i}?", "demonstration": text} for i, text in enumerate(texts)]
    options = dict(
        n_layer=1, n_embd=32, block_size=16, batch_size=32, max_iters=120, learning_rate=1e-2, eval_prompts=0
    )
    path = written(folder, rows)
    train_sft.main(prepare(SFTSettings(task="jsonl", data_file=path, out_dir=str(folder / "sft"), **options)))
    return str(folder / "sft")


@pytest.fixture(scope="module", params=[True, False], ids=["answers", "no answers"])
def run_folder(request, tmp_path_factory, warm_start):
    """A run by two of the user's functions -> (its folder, has the file answers?). The last iteration evaluates what is saved."""
    folder, scored = tmp_path_factory.mktemp("run"), request.param
    rows = [{"prompt": f"{i}?"} | ({"answer": "abcdeghi"[i % 8]} if scored else {}) for i in range(300)]
    settings = GRPOSettings(task="jsonl", data_file=written(folder, rows), out_dir=str(folder / "run"), **RUN)
    settings.init_from = warm_start
    grpo.main(prepare(settings))
    return folder / "run", scored


RUN = dict(max_iters=2, batch_size=4, group_size=4, max_new_tokens=8, block_size=16, eval_prompts=24, eval_interval=1)
RUN |= dict(reward_funcs=["held_out_rewards:short", "held_out_rewards:vowels"], reward_weights=[1.0, 0.5], beta=0.0)


def asked(folder, *words):
    """evaluate.py with these words -> (the first line of its file, its samples, the greedy ones, the others)."""
    questions, settings = questions_of(folder, "--num_prompts=24", *words)
    evaluate.main(settings, questions)
    head, *samples = map(json.loads, questions.file.read_text().splitlines())
    return head, samples, [s for s in samples if s["greedy"]], [s for s in samples if not s["greedy"]]


def test_the_runs_figures_and_the_commands_are_those_of_a_count_by_hand(run_folder, capsys):
    folder, scored = run_folder
    head, samples, greedy, drawn = asked(folder)
    answers = {row["prompt"]: row.get("answer") for row in questions_of(folder)[0].rows}
    for s in samples:
        own = total(s, [1.0, 0.5])
        assert s["reward"] == (own if own is None else pytest.approx(own))
        assert s["reward/short"] == short(s) and s["reward/vowels"] == vowels(s)
        assert s["right"] == (own is not None and own >= 1.5)
        assert ("task_reward" in s) == scored
        if scored:
            assert s["task_reward"] == float(s["stopped"] and s["completion"].strip() == answers[s["prompt"]])
    assert 3 < sum(s["reward"] is None for s in samples) < 24 and len({s["reward"] for s in samples}) > 6
    counted = {}
    for suffix, part in (("", greedy), ("_sampled", drawn)):
        counted["eval_reward_mean" + suffix] = mean([total(s, [1.0, 0.5]) for s in part])
        counted["pass_at_1" + suffix] = mean([(total(s, [1.0, 0.5]) or 0.0) >= 1.5 for s in part])
        if scored:
            right = [s["stopped"] and s["completion"].strip() == answers[s["prompt"]] for s in part]
            counted["task_pass_at_1" + suffix] = mean(right)
    counted["eval_reward/short"] = mean(map(short, greedy))
    counted["eval_reward/vowels"] = mean(map(vowels, greedy))
    log = read_log(folder)
    assert {name: log[-1][name] for name in log[-1] if "pass_at" in name or "eval_reward" in name} == pytest.approx(
        counted
    )
    assert head["scores"] == pytest.approx({name: counted[name] for name in counted if "pass_at" in name})
    means = {"reward_greedy": counted["eval_reward_mean"], "reward": counted["eval_reward_mean_sampled"]}
    means |= {"reward/short": mean(map(short, drawn)), "reward/vowels": mean(map(vowels, drawn))}
    assert {name: head["means"][name] for name in means} == pytest.approx(means)
    printed = {}
    for line in capsys.readouterr().out.splitlines()[1:-1]:
        printed.setdefault(line.split()[0], []).append(line.split()[1])
    assert printed["pass@1"] == [f"{counted['pass_at_1' + suffix]:.3f}" for suffix in ("", "_sampled")]
    assert printed.get("task_pass@1", []) == [
        f"{counted['task_pass_at_1' + s]:.3f}" for s in ("", "_sampled") if scored
    ]
    assert {name: printed[name] for name in means} == {name: [f"{value:.3f}"] for name, value in means.items()}


def test_console_and_report_show_the_held_out_reward(run_folder):
    folder, scored = run_folder
    log = read_log(folder)
    lines = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith(("before", "iter"))]
    scores = [{name.removeprefix("before/"): value for name, value in log[0].items() if "before/" in name}, *log]
    for line, record in zip(lines, scores, strict=True):
        if "pass_at_1" in record:
            sampled, reward = record["pass_at_1_sampled"], record["eval_reward_mean"]
            assert line.endswith(f"(sampled {sampled:.3f})  eval reward {reward:.3f}")
    table = "\n".join(report.table(read_runs([folder])))
    for name in ("eval_reward_mean", "pass_at_1", "task_pass_at_1"):
        first_and_last = f"{scores[0].get(name, 0):.3f} -> {log[-1].get(name, 0):.3f}"
        shown = f"{name} (first -> last)" in table and first_and_last in table
        assert shown == (name in log[-1])
    assert ("task_pass_at_1" in log[-1]) == scored


@pytest.mark.parametrize(
    "words, weights, threshold",
    [
        ([], [1.0, 0.5], 1.5),
        (["--pass_reward=0.5"], [1.0, 0.5], 0.5),
        (["--pass_reward=-0.25"], [1.0, 0.5], -0.25),
        (["--reward_weights=1,-2"], [1.0, -2.0], -1.0),
        (["--reward_weights=0.25,3", "--pass_reward=3.1"], [0.25, 3.0], 3.1),
        (["--reward_funcs=held_out_rewards:short,held_out_rewards:vowels"], [1.0, 1.0], 2.0),
    ],
)
def test_the_threshold_and_the_weights(run_folder, words, weights, threshold):
    """What is given holds, also against the run's; other functions have no weights of the run."""
    head, samples, greedy, drawn = asked(run_folder[0], "--num_samples=4", *words)
    assert head["settings"]["pass_reward"] == threshold and head["settings"]["seed"] == 0
    for s in samples:
        own = total(s, weights)
        assert s["right"] == (own is not None and own >= threshold) and (s["reward"] is None) == (own is None)
    assert head["scores"]["pass_at_1"] == pytest.approx(mean([s["right"] for s in greedy]))
    groups = [drawn[i : i + 4] for i in range(0, 96, 4)]
    assert head["scores"]["pass_at_4"] == pytest.approx(mean([any(s["right"] for s in group) for group in groups]))
    assert head["scores"]["maj_at_4"] <= head["scores"]["pass_at_4"]


def test_the_tasks_own_score_and_other_tasks(run_folder, warm_start):
    folder, scored = run_folder
    other = asked(folder, "--task=addition", "--digits=1", "--max_new_tokens=4")[0]
    assert "task_pass_at_1" not in other["scores"] and list(other["means"]) == ["length", "stopped"]
    assert (other["settings"]["reward_funcs"], other["settings"]["pass_reward"]) == ([], None)
    words = ["--task=addition", "--digits=1", "--max_new_tokens=4", "--reward_funcs=held_out_rewards:vowels"]
    head, samples, *_ = asked(folder, *words)
    assert all(s["reward"] == s["reward/vowels"] == vowels(s) and s["right"] == (vowels(s) == 1) for s in samples)
    assert head["scores"]["task_pass_at_1"] == 0 and head["settings"]["pass_reward"] == 1.0
    if scored:
        head, samples, greedy, _ = asked(folder, "--reward_funcs=")
        ours = [s["reward"] for s in greedy]
        assert {"right", "reward"} <= set(samples[0]) and not {"task_reward", "reward/short"} & set(samples[0])
        assert head["scores"]["pass_at_1"] == mean(ours) == read_log(folder)[-1]["task_pass_at_1"]
    else:
        message = "has no column answer to score completions by; add it, or --reward_funcs=my_rewards:is_short"
        with pytest.raises(SnugError, match=message):
            questions_of(folder, "--reward_funcs=")
        with pytest.raises(SnugError, match=message):  # SFT, which has no functions
            questions_of(warm_start)
        head = asked(warm_start, "--reward_funcs=held_out_rewards:short")[0]
        assert "reward/short" in head["means"]


def test_what_cannot_score_is_refused(run_folder):
    for words, message in (
        ("--reward_weights=1", "reward_weights has 1 weights for 2 reward_funcs; give one for each"),
        ("--reward_funcs=nowhere:f", "reward_funcs='nowhere:f': no module nowhere in "),
        ("--reward_funcs=held_out_rewards:shirt", "held_out_rewards has no shirt; did you mean short"),
        ("--reward_funcs=short", "reward_funcs='short': write module:function"),
        ("--task=addition --pass_reward=0.5", "pass_reward=0.5 is a total of reward_funcs; add them, or leave it out"),
    ):
        with pytest.raises(SnugError, match=message) as caught:
            questions_of(run_folder[0], *words.split())
        assert "\n" not in str(caught.value)


def test_no_file_but_the_functions_evaluates_it(tmp_path):
    """The votes of a task without answers are whole texts; pass_reward of the run holds in the command too."""
    rows = written(tmp_path, [{"prompt": str(i)} for i in range(40)])
    options = RUN | dict(reward_funcs=["held_out_rewards:vowels"], reward_weights=[], pass_reward=0.0, max_iters=2)
    grpo.main(prepare(GRPOSettings(task="jsonl", data_file=rows, out_dir=str(tmp_path / "run"), **options)))
    head, samples, greedy, _ = asked(tmp_path / "run")
    record = read_log(tmp_path / "run")[-1]
    assert record["pass_at_1"] == head["scores"]["pass_at_1"] == mean([s["reward"] is not None for s in greedy]) > 0
    assert "eval_reward/vowels" not in record and head["settings"]["pass_reward"] == 0.0  # one function: it is the mean
    assert all(s["answer"] == ((s["completion"].strip() or None) if s["stopped"] else None) for s in samples)


def test_sft_is_scored_by_the_task(tmp_path):
    """Its parts too, where an answer has a form."""
    sft, _ = tiny(tmp_path, max_iters=1)
    train_sft.main(prepare(sft))
    record = read_log(sft.out_dir)[-1]
    assert record["eval_reward_mean"] == record["pass_at_1"] and "task_pass_at_1" not in record
    assert "eval reward" not in (Path(sft.out_dir) / "log.txt").read_text()
    forms = dict(task="countdown", countdown_form="tags", block_size=400, max_iters=1, format_reward=0.25)
    train_sft.main(prepare(dataclasses.replace(sft, **forms, demonstration_noise=0.0, eval_prompts=3)))
    record = read_log(sft.out_dir)[-1]
    parts = record["eval_reward/correct"], record["eval_reward/formatted"]
    assert record["eval_reward_mean"] == parts[0] + 0.25 * parts[1] and record["pass_at_1"] == parts[0]


# -----------------------------------------------------------------------------
# The best checkpoint


def saver_of(tmp_path, **options):
    """A Saver of a small model -> a function that saves after `done` iterations with these scores."""
    settings = GRPOSettings(out_dir=str(tmp_path), max_iters=99, save_interval=1, save_total_limit=1, **options)
    model = torch.nn.Linear(2, 2)
    model.config = RewardOptions()  # any dataclass
    optimizer = torch.optim.AdamW(model.parameters())
    saver = Saver(settings, get_tokenizer("bytes"), model, optimizer, torch.device("cpu"), print)

    def save(done, **scores):
        saver.after(done, progress(Guard(settings, print)), scores)
        saver.wait()

    return save, saver


def test_the_best_is_chosen_by_the_reward_of_own_functions(tmp_path):
    scores = [(-0.9, 0.8), (-0.2, 0.0), (-0.5, 0.1), (None, 0.9)]  # mean reward, pass@1
    for name, options, best in (("own", dict(reward_funcs=["a:b"]), 2), ("task", {}, 4)):
        save, saver = saver_of(tmp_path / name, **options)
        for done, (reward, share) in enumerate(scores, start=1):
            save(done, eval_reward_mean=reward, pass_at_1=share)
        save(5), save(6)
        assert checkpoint.newest(tmp_path / name / "best").name == f"checkpoint-{best:06d}"
        assert saver.scores[best] == (-0.2 if name == "own" else 0.9)


def test_a_function_gets_as_many_completions_as_in_training(tmp_path):
    """So that reward_timeout means the same; the columns are cut as the completions are."""
    seen = []

    def count(prompts, completions, number, **columns):
        seen.append(len(prompts))
        return [n + len(text) if n % 3 else None for n, text in zip(number, completions, strict=True)]

    def half(prompts, completions, number, **columns):
        return [0.5] * len(prompts)

    class Silent(Task):
        scored = False

        def __init__(self):
            pass

    scoring = Scoring(Silent(), [count, half], [], RewardOptions(reward_funcs=["a:count", "a:half"]), batch=4)
    texts = ["x" * i for i in range(10)]
    found = scoring.columns([""] * 10, texts, {"number": list(range(10))})
    assert seen == [4, 4, 2] and found["reward/count"] == [2 * i if i % 3 else None for i in range(10)]
    assert found["reward"] == [2 * i + 0.5 if i % 3 else 0.5 for i in range(10)]
    assert found["right"] == [i % 3 > 0 for i in range(10)] and set(found) == {
        "right",
        "reward",
        "reward/count",
        "reward/half",
    }


@pytest.mark.parametrize(
    "rewards, weights, least, right",
    [
        ([np.float32(0.9)], [], 0.9, True),
        ([1, 1, 1], [0.7, 0.1, 0.1], 0.9, True),
        ([np.float32(-0.9)], [], -0.9, True),
        ([0.8999], [], 0.9, False),
        ([0.0], [], 1e-9, False),
    ],
)
def test_a_total_that_is_too_small_by_rounding_is_right(rewards, weights, least, right):
    """float32 has no 0.9, and the sum of 0.7, 0.1 and 0.1 is 0.8999999999999999."""
    functions = [lambda reward=reward, **_: [reward] for reward in rewards]
    options = RewardOptions(reward_funcs=["a:b"], pass_reward=least)
    found = Scoring(SimpleNamespace(scored=False), functions, weights, options, batch=1).columns([""], [""], {})
    assert found["right"] == [right]


def test_a_completion_that_nobody_scores_is_wrong_and_in_no_mean():
    samples = [dict(right=False, reward=None), dict(right=True, reward=1.0), dict(right=False, reward=0.5)]
    assert shares_of(samples) == {"pass_at_1": 1 / 3} and reward_means(samples) == {"reward": 0.75}
    assert reward_means(samples[:1]) == {"reward": None}


def test_evaluations_do_not_change_what_is_learned(tmp_path):
    """A reward function draws from every generator, and the run seeds them: without evaluations, the same weights."""
    found = []
    for prompts in (0, 5):
        _, settings = tiny(tmp_path, init_from="", beta=0.0, eval_interval=1, eval_prompts=prompts)
        settings.out_dir = str(tmp_path / f"run{prompts}")
        prepared = prepare(settings)
        prepared.reward_funcs = [reward_that_draws]
        grpo.main(prepared)
        found.append(safetensors.torch.load_file(checkpoint.newest(settings.out_dir) / "model.safetensors"))
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


def test_a_function_that_fails_in_an_evaluation_loses_no_step(tmp_path):
    """The state after the iteration is saved, and the run goes on from it."""
    _, settings = tiny(tmp_path, init_from="", beta=0.0, save_interval=0, eval_interval=3, max_iters=6)
    for held_out in (True, False):
        prepared = prepare(dataclasses.replace(settings, resume="auto"))
        evaluations = []

        def reward(prompts, completions, held_out=held_out, evaluations=evaluations, **columns):
            if held_out and len(prompts) == 4:  # an evaluation's last piece: 20 = 16 + 4
                evaluations.append(1)
                if len(evaluations) == 3:  # at the start greedy and sampled; after iteration 2 greedy
                    raise ValueError("no reward for a question")
            return [sum(map(ord, text)) % 7 / 7 for text in completions]

        prepared.reward_funcs = [reward]
        if held_out:
            with pytest.raises(SnugError, match="reward function reward raised ValueError: 'no reward"):
                grpo.main(prepared)
            assert checkpoint.newest(settings.out_dir).name == "checkpoint-000003"
        else:
            grpo.main(prepared)
    assert [record["iter"] for record in read_log(settings.out_dir)] == [0, 1, 2, 3, 4, 5]
    assert all("eval_reward_mean" in read_log(settings.out_dir)[i] for i in (2, 5))
    assert math.isfinite(read_log(settings.out_dir)[-1]["eval_reward_mean"])
