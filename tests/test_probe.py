"""--probe says what the run will see and changes nothing; each planted failure is the first that it names."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest

import grpo
from data.scores import share_of
from data.task import text_of
from helpers.models import make_chat_model
from helpers.runs import figures
from runs.log import read_log
from settings import GRPOSettings
from training.figures import groups_of

PROMPTS = [dict(prompt=f"How many are {i} and {i}?", answer=str(2 * i)) for i in range(80)]


def even(completions, **columns):
    return [float(len(text_of(each)) % 2 == 0) for each in completions]


def always(value):
    return lambda completions, **columns: [value] * len(completions)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {brief: make_chat_model(folder / f"brief={brief}", brief=brief) for brief in (True, False)}


def options_of(tmp_path, model, **changes):
    options = dict(task="jsonl", init_from=str(model), chat=True, max_new_tokens=24, block_size=128, batch_size=16)
    options |= dict(group_size=4, max_iters=3, eval_prompts=8, out_dir=str(tmp_path / "run"), dtype="float32")
    return options | changes


def probed(capsys, *rewards, **options):
    """-> (the exit code, the lines of the report)."""
    capsys.readouterr()
    with patch("training.probe.sys.exit", side_effect=SystemExit) as end:
        assert not grpo.train(prompts=PROMPTS, reward_funcs=list(rewards), probe=True, **options).finished
    lines = capsys.readouterr().out.splitlines()
    return end.call_args[0][0], lines[lines.index("2 iterations without learning; in brackets a 95 % interval") :]


def test_the_probe_is_the_run_without_learning(tmp_path, models, capsys):
    """Its figures are those of the run's first iterations at learning_rate=0. It leaves no run, and changes none."""
    options, batches = options_of(tmp_path, models[True], beta=0.1), []

    def noted(completions, **columns):
        batches.append(len(completions))
        return even(completions)

    code, report = probed(capsys, noted, **options)
    assert batches == [64, 64] and code == 0 and report[-1] == "go"  # no evaluation
    assert not list((tmp_path / "run").iterdir())
    grpo.train(prompts=PROMPTS, reward_funcs=[even], **options | dict(learning_rate=0.0, max_iters=2))
    log = read_log(tmp_path / "run")
    first = 16 - round(16 * log[0]["frac_reward_zero_std"])
    assert f"groups with different rewards: {share_of(first, 16)}" in capsys.readouterr().out.splitlines()
    varied = first + 16 - round(16 * log[1]["frac_reward_zero_std"])
    mean, cut_off = (sum(record[name] for record in log) / 2 for name in ("reward_mean", "truncated_fraction"))
    said = [f"  groups with different rewards: {share_of(varied, 32)}", f"  mean reward: {mean:.3f}"]
    assert 0 < varied < 32 and report[1:4] == [*said, f"  cut off: {100 * cut_off:.0f} % of the completions"]
    assert [line[:9] for line in report[5:-1]] == ["  reward "] * 2
    grpo.train(prompts=PROMPTS, reward_funcs=[even], **options)
    again = options | dict(out_dir=str(tmp_path / "without"))
    grpo.train(prompts=PROMPTS, reward_funcs=[even], **again)
    assert figures(tmp_path / "run") == figures(tmp_path / "without")
    probed(capsys, even, **again)  # of a folder that has a run
    assert figures(tmp_path / "run") == figures(tmp_path / "without")


PLANTED = [
    (always(0.0), True, {}, 3, "frac_reward_zero_std 1: every reward is 0"),
    (always(1.0), True, {}, 3, "frac_reward_zero_std 1: every reward is the same"),
    (even, True, dict(max_new_tokens=1), 0, "truncated_fraction"),
    (even, False, dict(chat=False), 0, "truncated_fraction"),
]


@pytest.mark.parametrize("reward, brief, changes, expected, first", PLANTED)
def test_a_planted_failure_is_named_first(tmp_path, models, capsys, reward, brief, changes, expected, first):
    """Where rewards differ all the same, the run goes."""
    code, report = probed(capsys, reward, **options_of(tmp_path, models[brief], **changes))
    found = [line for line in report if line.startswith("  hint: ")]
    assert code == expected and found[0].startswith(f"  hint: {first}")


def test_where_nothing_is_compared_no_share_is_shown(tmp_path, models, capsys):
    """Unscored completions are no groups with different rewards; one completion of a prompt beside a teacher is no
    group."""
    code, report = probed(capsys, always(None), **options_of(tmp_path, models[True]))
    assert code == 3 and report[1] == "  groups with different rewards: 0 of 32, 0 % (0 % to 11 %)"
    assert "no go: none of 32 groups has different rewards" in report and "mean reward" not in "".join(report)
    teacher = dict(teacher=str(models[True]), reward_coef=0.0, group_size=1)
    code, report = probed(capsys, even, **options_of(tmp_path, models[True], **teacher))
    assert code == 0 and "different rewards" not in "".join(report)


def test_dynamic_sampling_is_left_out(tmp_path, models, capsys):
    """Of the probe, not of the run's own first line: that counts all groups that were sampled."""
    batches = []

    def noted(completions, **columns):
        batches.append(len(completions))
        return [0.0] * len(completions)

    code, report = probed(capsys, noted, **options_of(tmp_path, models[True], max_num_gen_batches=3))
    assert batches == [64, 64] and code == 3 and "0 of 32" in report[1]


def test_groups_are_counted_over_all_iterations_and_batches():
    settings = GRPOSettings(batch_size=10)
    records = [dict(frac_reward_zero_std=0.9, gen_batches=1), dict(frac_reward_zero_std=23 / 30, gen_batches=3), {}]
    assert groups_of(records, settings) == (1 + 7, 10 + 30) and groups_of(records[2:], settings) == (0, 0)
    assert share_of(15, 32) == "15 of 32, 47 % (31 % to 64 %)" and share_of(0, 2048) == "0 of 2,048, 0 % (0 % to 0 %)"


def test_the_time_left_is_a_resumed_runs_by_its_second_iteration(tmp_path, models, capsys, monkeypatch):
    options = options_of(tmp_path, models[True], batch_size=16, group_size=2, max_iters=5, eval_prompts=0)
    grpo.train(prompts=PROMPTS, reward_funcs=[even], **options | dict(max_iters=2))
    ends = iter([100.0, 20.0])  # seconds of the two iterations
    clock = SimpleNamespace(perf_counter=lambda: next(ends))
    monkeypatch.setattr("training.probe.time", clock)
    monkeypatch.setattr("training.state.time", SimpleNamespace(perf_counter=lambda: 0.0))
    _, report = probed(capsys, even, resume="auto", **options)
    assert report[4] == ("  an iteration takes 20.00 s; all of them 01:00, without evaluations and dynamic sampling")
