"""Runs from Python: the same as the commands', one after the other in a process, interrupted, and in a real notebook."""

import json
import os
import random
import signal
import sys
import time
from functools import wraps
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

import grpo
import train_sft
from helpers.errors import assert_refused
from helpers.runs import PROMPTS, SMALL, refused, weights
from runs.checkpoint import newest
from runs.log import read_log
from training.notebook import write_prompts


def test_prompts_and_functions_of_a_cell(tmp_path, capsys):
    calls = []

    def short(completions, answer, trainer_state, **columns):
        calls.append((trainer_state.global_step, len(completions)))
        return [1 - len(text) / 8 for text in completions]

    options = SMALL | dict(out_dir=str(tmp_path / "run"), beta=0.0)
    run = grpo.train(prompts=PROMPTS, reward_funcs=short, **options)
    assert run.finished and [record["iter"] for record in run.log] == [0, 1] and calls[0] == (0, 4)
    # two evaluations' halves before training, an iteration, an iteration, two halves after the last
    assert [step for step, _ in calls[:6]] == [0, 0, 0, 1, 2, 2]
    assert run.log[0]["reward_mean"] < 1
    texts = run.sample("2+3=", n=3, max_new_tokens=2)
    assert len(texts) == 3 and all(isinstance(text, str) for text in texts) and run.sample(n=1)
    assert_refused("block_size", run.sample, "1" * 999)
    scores = run.evaluate(num_prompts=5)
    assert scores["pass_at_1"] <= 1 and "  pass_at_1" in capsys.readouterr().out
    data = json.loads((tmp_path / "run/settings.json").read_text())["data_file"]
    assert [json.loads(line) for line in Path(data).read_text().splitlines()] == PROMPTS
    more = wraps(short)(lambda **columns: [1 + value for value in short(**columns)])  # of the same name
    again = grpo.train(resume=run.folder, reward_funcs=[short, more], max_iters=3)
    assert len(again.log) == 3
    assert again.log[2]["reward/short.1"] == pytest.approx(again.log[2]["reward/short.0"] + 1)
    for wrong, message in (
        (dict(learning_rat=1.0), "unknown option learning_rat; did you mean learning_rate?"),
        (dict(learning_rate="fast"), "learning_rate takes a number, not 'fast'"),
        (dict(reward_funcs=[lambda completions: [0]]), "must take ..columns"),
        (
            dict(prompts=[{"prompt": "a"}, {"prompt": object()}]),
            "prompts: row 2 must be .* that JSON can hold .*object",
        ),
        (dict(prompts=["a=", "b="]), 'prompts: row 1 must be {"prompt": ...}, of values'),
    ):
        assert_refused(message, grpo.train, **options | wrong)


def test_a_script_goes_on_after_a_probe(tmp_path, capsys):
    run = grpo.train(prompts=PROMPTS, probe=True, beta=0.0, out_dir=str(tmp_path / "run"), **SMALL)
    assert not run.finished and "iterations without learning" in capsys.readouterr().out


def test_each_list_of_prompts_has_its_own_file(tmp_path):
    """An earlier run, which was moved aside, keeps its prompts."""
    first, second, again = (write_prompts(rows, f"{tmp_path}/run") for rows in (PROMPTS, PROMPTS[1:], PROMPTS))
    assert first == again != second and len(Path(first).read_text().splitlines()) == 81


def test_options_beside_prompts_are_taken(tmp_path, capsys):
    """A test_file is one of them; `data_file` is the prompts' own."""
    test_file = tmp_path / "test.jsonl"
    test_file.write_text('{"prompt": "a", "answer": "b"}\n')
    options = SMALL | dict(out_dir=str(tmp_path / "run"), test_file=str(test_file), data_file="nowhere.jsonl")
    options |= dict(max_iters=1, eval_prompts=1, beta=0.0)
    run = grpo.train(prompts=PROMPTS, **options)
    assert run.settings.test_file == str(test_file) and run.settings.task == "jsonl"
    run.evaluate(num_prompts=9, samples_file=str(tmp_path / "samples.jsonl"))
    [summary, *samples] = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert {sample["prompt"] for sample in samples} == {"a"}


def test_a_run_in_another_thread_trains_and_its_late_function_is_stopped(tmp_path, capsys):
    """As a notebook's button starts it: Python lets the main thread alone have signals and alarms."""
    ended = []

    def hanging(completions, trainer_state, **columns):
        while trainer_state.global_step == 1:
            time.sleep(0.01)
        return [float(len(text)) for text in completions]

    def train(**options):
        try:
            grpo.train(reward_funcs=[hanging], reward_timeout=0.3, **SMALL | options)
        except BaseException as error:
            ended.append(error)

    for options in (dict(max_iters=1), dict(max_iters=3)):
        place = tmp_path / str(options["max_iters"])
        thread = Thread(target=train, kwargs=options | dict(out_dir=str(place), eval_prompts=0))
        thread.start()
        thread.join(60)
        assert len(read_log(place)) == 1
    [error] = ended
    assert str(error) == "reward function hanging took longer than reward_timeout=0.3 seconds"
    assert newest(place).name == "checkpoint-000001"


def test_a_finished_run_that_is_resumed_says_that_it_did_nothing(tmp_path, capsys):
    run = train_sft.train(out_dir=str(tmp_path / "run"), max_iters=2, n_layer=1, n_embd=16, eval_prompts=0)
    assert "nothing to do" not in capsys.readouterr().out
    before = weights(run.folder)
    for end in (2, 1):
        train_sft.train(resume=run.folder, max_iters=end)
        out = capsys.readouterr().out
        assert out.count("nothing to do: all 2 iterations are done; a larger --max_iters goes on\n") == 1
        assert weights(run.folder) == before and len(read_log(run.folder)) == 2
    train_sft.train(resume=run.folder, max_iters=3)
    assert "nothing to do" not in capsys.readouterr().out


def test_an_interrupt_keeps_the_run_and_a_second_call_works(tmp_path, capsys):
    """The first ends the run after its iteration, saved; after a second one the folder is free too."""
    handler, presses, when = signal.getsignal(signal.SIGINT), [1, 2, 2], 1

    def pressing(completions, trainer_state, **columns):
        if trainer_state.global_step == when and columns["stopped"]:
            for _ in range(presses.pop(0) if presses else 0):
                signal.raise_signal(signal.SIGINT)  # in this thread: two by os.kill may arrive as one
        return [float(len(text)) for text in completions]

    options = SMALL | dict(max_iters=4, eval_prompts=0, out_dir=str(tmp_path / "run"), beta=0.0)
    run = grpo.train(reward_funcs=[pressing], **options)
    assert not run.finished and len(run.log) == 2 and newest(run.folder).name == "checkpoint-000002"
    assert signal.getsignal(signal.SIGINT) is handler
    when = 2
    with pytest.raises(KeyboardInterrupt, match=f"^--resume=auto goes on from {run.folder}/checkpoint-000002$"):
        grpo.train(reward_funcs=[pressing], **options)
    when = 0  # an earlier run's checkpoints are no reason to go on
    with pytest.raises(KeyboardInterrupt, match="^--resume=auto goes on from the beginning$"):
        grpo.train(reward_funcs=[pressing], **options)
    assert_refused("has no checkpoint; name a run.s folder", grpo.train, resume=run.folder)
    when = 1
    assert signal.getsignal(signal.SIGINT) is handler and (tmp_path / "run.1").exists()
    run = grpo.train(resume=f"{tmp_path}/run.1", reward_funcs=[pressing])
    assert run.finished and len(run.log) == 4
    whole = grpo.train(reward_funcs=[pressing], **options | dict(out_dir=str(tmp_path / "whole")))
    assert weights(whole.folder) == weights(run.folder)


def test_a_callback_ends_the_run_and_changes_nothing(tmp_path, capsys):
    """It draws from the generators of the rewards, empties its record and leaves the folder; the run can go on."""

    def noisy(completions, **columns):
        return [random.random() + np.random.rand() + torch.rand(1).item() for _ in completions]

    def stop(record):
        seen.append(dict(record))
        record.clear()
        os.chdir("/")
        return np.bool_(noisy("abc") and len(seen) == 2)

    seen, options = [], SMALL | dict(reward_funcs=[noisy], max_iters=4, eval_interval=2)
    whole = grpo.train(out_dir=str(tmp_path / "whole"), **options)
    run = grpo.train(out_dir=str(tmp_path / "run"), on_iteration=stop, **options)
    ended = "stopped by on_iteration=test_notebook:stop after iteration 1, and saved; "
    ended += f"GRPO goes on with --resume={tmp_path}/run\n"
    assert capsys.readouterr().out.count(ended) == 1 and not run.finished and seen == run.log
    assert len(seen) == 2 and "eval_reward_mean" in seen[1]
    run = grpo.train(resume=run.folder, reward_funcs=[noisy], on_iteration=stop)
    assert run.finished and len(seen) == 4 and weights(run.folder) == weights(whole.folder)


def test_a_callback_that_fails_is_named_and_a_resumed_run_loads_it_again(tmp_path, monkeypatch):
    (tmp_path / "iterated.py").write_text("def stop(record):\n    return record['pass_at_1'] > 0.9\n")
    monkeypatch.chdir(tmp_path)
    options = dict(max_iters=3, n_layer=1, n_embd=16, eval_prompts=0, save_interval=0, out_dir="run")
    message = refused(train_sft.train, on_iteration="iterated:stop", **options)
    assert message.startswith("on_iteration=iterated:stop after iteration 0 raised KeyError: ")
    assert message.endswith(" at iterated.py:2; some lines have no scores: record.get(name)")
    assert newest("run").name == "checkpoint-000001"
    seen = []
    sys.modules["iterated"].stop = lambda record: seen.append(record["iter"]) or "True"  # a text is not True
    assert train_sft.train(resume="run").finished and seen == [1, 2]
