"""A run's log: whole lines whatever happens, a console that may go away, and services that may fail or hang."""

import itertools
import json
import re
import sys
import unicodedata
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import evaluate
import grpo
import report
import train_sft
from helpers.errors import assert_refused
from helpers.runs import tiny
from runs import log
from runs.checkpoint import newest
from runs.loading import load_run
from runs.log import RunLog, console_line, read_lines, read_log
from runs.page.runs import read_run, read_runs
from runs.prepare import prepare
from settings import EvaluateSettings, SFTSettings
from snug.options import SnugError, friendly_errors
from training import state


class Service:
    """Fails in method `where`, in the way `how`."""

    def __init__(self, where, how):
        self.where, self.how, self.logged = where, how, 0

    def send(self, record):
        if record is None:
            return self.fail_in("start")
        self.fail_in("log" if record["iter"] == 2 else "")
        self.logged += 1

    def close(self):
        self.fail_in("close")

    def fail_in(self, method):
        if method and method == self.where:
            raise self.how("no route to host")


@pytest.mark.parametrize(
    "where, how, logged", [("start", OSError, 0), ("log", SystemExit, 2), ("close", ValueError, 4)]
)
def test_a_run_finishes_whatever_its_services_do(tmp_path, monkeypatch, where, how, logged):
    bad, good = Service(where, how), Service("", OSError)
    monkeypatch.setattr(log, "SERVICES", {"tensorboard": lambda *_: bad, "wandb": lambda *_: good})
    sft, _ = tiny(tmp_path)
    prepared = prepare(replace(sft, eval_prompts=0))
    prepared.settings.report_to = ["tensorboard", "wandb"]
    train_sft.main(prepared)
    assert (len(read_log(sft.out_dir)), good.logged, bad.logged) == (4, 4, logged)
    warning = f"warning: tensorboard failed ({how.__name__}: no route to host); going on without it"
    assert (Path(sft.out_dir) / "log.txt").read_text().count(warning) == 1


@pytest.mark.parametrize("closed", [False, True])
def test_a_console_that_fails_does_not_end_the_run(tmp_path, monkeypatch, closed):
    """Its reader is gone, or a function of the user's has closed it."""
    console = open("/dev/full", "w")
    if closed:
        console.close()
    sft, _ = tiny(tmp_path)
    monkeypatch.setattr(sys, "stdout", console)
    train_sft.main(prepare(replace(sft, eval_prompts=0)))
    monkeypatch.undo()
    assert len(read_log(sft.out_dir)) == 4
    assert "warning: the console failed" in (Path(sft.out_dir) / "log.txt").read_text()


def test_a_file_that_cannot_be_written_warns_once_and_the_run_goes_on(tmp_path, capsys):
    settings = SFTSettings(out_dir=str(tmp_path), max_iters=3)
    with RunLog(settings) as run_log:
        run_log.iteration({"iter": 0, "time_s": 1.0})
        run_log.files["log.jsonl"] = open("/dev/full", "a", buffering=1)
        for i in (1, 2):
            run_log.iteration({"iter": i, "time_s": 1.0}, [{"reward": 1.0}])
    out = capsys.readouterr().out
    warning = "warning: log.jsonl cannot be written (No space left on device); lines are lost"
    assert out.count("warning") == 1 and warning in out and "iter 2/3" in out
    assert [record["iter"] for record in read_log(tmp_path)] == [0]
    assert [line["iter"] for line in read_lines(tmp_path / "samples.jsonl")] == [1, 2]


def test_what_is_not_finite_is_null(tmp_path):
    record = {"iter": 0, "loss": float("nan"), "grad_norm": float("inf"), "time_s": 1.0}
    with RunLog(SFTSettings(out_dir=str(tmp_path), max_iters=3)) as run_log:
        run_log.iteration(record, [{"reward": -float("inf")}])
    wanted = {"log.jsonl": record | {"loss": None, "grad_norm": None}, "samples.jsonl": {"iter": 0, "reward": None}}
    for name, line in wanted.items():
        assert json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail) == line


def test_the_console_shows_every_nth_iteration_and_those_that_matter(tmp_path, capsys):
    """Of SFT about 25. The file has all of them."""
    settings = SFTSettings(out_dir=str(tmp_path), max_iters=14)
    with RunLog(settings, start=1) as run_log:
        (tmp_path / "long").mkdir()
        assert RunLog(replace(settings, out_dir=str(tmp_path / "long"), max_iters=1000)).every == 40
        run_log.every = 5
        for i in range(1, 14):
            scores = {"eval_reward_mean": 0.5} if i == 6 else {}
            run_log.iteration({"iter": i, "dropped_steps": 2, "time_s": 1.0} | scores)
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/14", "4/14", "6/14", "9/14", "13/14"]
    assert [record["iter"] for record in read_log(tmp_path)] == list(range(1, 14))


def test_a_line_has_what_was_logged():
    """And the mean of each reward function."""
    record = dict(iter=7, reward_mean=0.25, reward_std=0.5, loss=-0.001, kl=0.02, entropy=0.1, grad_norm=1.5)
    record |= dict(completion_length_mean=18, tokens_per_second=51804, mem_alloc_mb=2, mem_max_alloc_mb=39, time_s=2.3)
    more = dict(skipped_steps=0, dropped_steps=1, tool_calls=0.52, tool_errors=0.0, tokens_per_second=None)
    line = "iter  7/80  reward 0.250 (sd 0.50)  loss -0.0010  kl 0.0200  entropy 0.100  grad 1.50  length 18.0  calls 0.52  "
    line += "mem 2 MiB  peak 39 MiB  2.30 s  dropped 1"
    assert console_line(record | more, 80) == line
    means = {"reward/right": 0.125, "reward/short": 0.4, "reward/never": None, "eval_reward/short": 1.0}
    assert "reward 0.250 (sd 0.50)  right 0.12 short 0.40  loss" in console_line(record | means, 80)


def test_a_pipe_says_what_is_going_on_before_the_first_iteration(tmp_path, capsys):
    sft, settings = tiny(tmp_path)
    train_sft.main(prepare(sft))
    assert capsys.readouterr().out.splitlines()[0].startswith("SFT on addition")  # random weights
    grpo.main(prepare(settings))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"loading {sft.out_dir}/checkpoint-000004" and lines[1].startswith("GRPO on addition")
    assert lines[2] == "evaluating before training: 20 prompts" and lines[3].startswith("before training  pass@1")
    assert re.search(r"pass@1 \d.\d{3} \(sampled", lines[3])
    grpo.main(prepare(replace(settings, resume="auto", max_iters=5)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"loading {settings.out_dir}/checkpoint-000004"
    assert not any("evaluating" in line for line in lines)


@pytest.mark.parametrize("max_iters, interval, scored", [(3, 2, [2, 3]), (2, 0, [2])])
def test_an_evaluation_comes_first_every_n_iterations_and_last(tmp_path, monkeypatch, max_iters, interval, scored):
    """The score is a weight of the model, and so shows which model was evaluated."""
    none = dict(eval_reward_mean=0.0, eval_truncated_fraction=0.0)
    score = lambda model, *_: none | dict(pass_at_1=model.norm.weight[0].item())  # noqa: E731
    monkeypatch.setattr("training.state.evaluate_run", score)
    changes = dict(max_iters=max_iters, eval_interval=interval, save_interval=1, save_total_limit=9)
    for settings, main in zip(tiny(tmp_path), (train_sft.main, grpo.main), strict=True):
        settings = replace(settings, **changes)
        main(prepare(settings))
        records, folder = read_log(settings.out_dir), Path(settings.out_dir)
        wanted = {done: score(load_run(folder / f"checkpoint-{done:06d}").model)["pass_at_1"] for done in scored}
        assert {r["iter"] + 1: r["pass_at_1"] for r in records if "pass_at_1" in r} == wanted
        if interval and settings.init_from:
            assert score(load_run(settings.init_from).model)["pass_at_1"] == records[0]["before/pass_at_1"]
        best = max(scored, key=lambda done: (wanted[done], done))
        assert (folder / "best").resolve().name == f"checkpoint-{best:06d}"


@pytest.mark.parametrize("failing", [2, 4])
def test_an_evaluation_that_fails_loses_no_iteration(tmp_path, monkeypatch, failing):
    """Also the last one, after which no iteration is left."""
    sft = replace(tiny(tmp_path)[0], max_iters=4, eval_interval=2, save_interval=0)
    real, calls = state.evaluate_run, itertools.count()

    def fails(*arguments):
        if 2 * next(calls) == failing:
            raise SnugError("reward function f raised")
        return real(*arguments)

    monkeypatch.setattr("training.state.evaluate_run", fails)
    assert_refused("reward function f raised", train_sft.main, prepare(sft))
    assert newest(sft.out_dir).name == f"checkpoint-{failing:06d}"
    records = read_log(sft.out_dir)
    assert len(records) == failing and "pass_at_1" not in records[-1] and "loss" in records[-1]
    assert read_run(Path(sft.out_dir), 1).ended == (failing == 4)
    train_sft.main(prepare(replace(sft, resume="auto")))
    other = replace(sft, out_dir=f"{sft.out_dir}-whole")
    train_sft.main(prepare(other))
    ours, theirs = ([record["loss"] for record in read_log(each.out_dir)] for each in (sft, other))
    assert ours == theirs and len(ours) == 4


def test_half_a_line_is_not_read_and_cut_off_on_resume(tmp_path):
    for name in ("log.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text('{"iter": 0}\n{"iter": 1}\n{"iter": 2}\n{"it')
    assert [record["iter"] for record in read_log(tmp_path)] == [0, 1, 2]
    with RunLog(SFTSettings(out_dir=str(tmp_path), max_iters=4), start=2) as run_log:
        run_log.iteration({"iter": 2, "time_s": 0.5}, [{}])
    for name in ("log.jsonl", "samples.jsonl"):
        assert [json.loads(line)["iter"] for line in (tmp_path / name).read_text().splitlines()] == [0, 1, 2]


def test_tensorboard_has_the_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sft, _ = tiny(tmp_path)
    settings = replace(sft, eval_prompts=0, report_to=["tensorboard"])
    train_sft.main(prepare(settings))
    events = EventAccumulator(str(Path(sft.out_dir) / "tensorboard"))
    events.Reload()
    wanted = [(record["iter"], pytest.approx(record["loss"], rel=1e-6)) for record in read_log(sft.out_dir)]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == wanted and len(wanted) == 4


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_wandb_and_trackio_have_the_numbers_and_go_on_with_their_run(tmp_path, monkeypatch, service):
    """Stand-ins. W&B goes on with a run of the same id, Trackio (0.43) with one of the same name; it takes no more."""
    told = []

    def init(project, name, config, resume, **of_wandb):
        assert of_wandb.keys() == ({"id", "dir", "settings"} if service == "wandb" else set()) and config["seed"]
        told.append((project, resume, of_wandb.get("id", name)))
        log = lambda metrics, step: told.append((step, metrics["loss"]))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda: told.append("end"))

    monkeypatch.setitem(sys.modules, service, SimpleNamespace(init=init, Settings=dict))
    settings = replace(tiny(tmp_path)[0], eval_prompts=0, report_to=[service])
    for end in (4, 6):
        train_sft.main(prepare(replace(settings, resume="auto", max_iters=end)))
    folder = Path(settings.out_dir)
    own = (folder / f"{service}.txt").read_text()
    begun = ("snug", "allow", own if service == "wandb" else f"{folder.name}-{own}")
    losses = [(record["iter"], record["loss"]) for record in read_log(folder)]
    assert told == [begun, *losses[:4], "end", begun, *losses[4:], "end"] and len(losses) == 6


def test_a_name_that_a_reward_function_gives_commands_no_terminal(tmp_path, capsys):
    """Titles and clipboards stay: a run, its evaluation, its report and an error show escape sequences as text."""
    name = "\x1b]0;mine\x07\x9b2J\u202e\u2028\u2029\u2066"

    def good(prompts, completions, log_metric, **columns):
        log_metric(name, 1.0)
        return [float(len(completion)) for completion in completions]

    def bad(prompts, completions, **columns):
        raise ValueError(name)

    functions = {}
    for spec, function in {"m:good": good, "m:bad": bad, "m:same": partial(good)}.items():
        function.__name__ = name
        functions[spec] = function
    settings = tiny(tmp_path, init_from="", beta=0.0, max_iters=1, eval_prompts=2)[1]
    settings = replace(settings, reward_funcs=["m:good", "m:same"])
    grpo.main(prepare(settings, functions=functions))
    options = EvaluateSettings(num_prompts=2, samples_file="none")
    evaluate.main(options, *evaluate.prepare_evaluation(options, set(), settings.out_dir, functions))
    report.main(read_runs([settings.out_dir]))
    with RunLog(settings) as run_log:
        run_log.say(f"warning: {name} failed")
    with pytest.raises(SystemExit), friendly_errors():
        grpo.main(prepare(replace(settings, reward_funcs=["m:bad"]), functions=functions))
    out, err = capsys.readouterr()
    text = (Path(settings.out_dir) / "log.txt").read_text()
    assert out.count(r"\x1b]0;mine\x07\x9b2J\u202e\u2028\u2029\u2066") == 8 and rf"{name}" not in out
    assert r"error: reward function \x1b]0;mine" in err and r"error: reward function \x1b]0;mine" in text
    for shown in (out, err.rpartition("\r")[2], text):
        assert {char for char in shown if unicodedata.category(char) in {"Cc", "Cf", "Zl", "Zp"}} <= {"\n", "\t"}


@pytest.mark.parametrize(
    "error, last", [(ZeroDivisionError("by 0"), "ZeroDivisionError: by 0"), (SnugError("b"), "error: b")]
)
def test_the_log_has_the_error_that_ended_the_run(tmp_path, error, last):
    with pytest.raises(type(error)), RunLog(SFTSettings(out_dir=str(tmp_path))):
        raise error
    lines = (tmp_path / "log.txt").read_text().rstrip().splitlines()
    assert lines[-1] == last and (lines[0].startswith("Traceback") or len(lines) == 1)
