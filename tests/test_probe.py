"""--probe says what the run will see and changes nothing; each planted failure is the first that it names."""

import json
from types import SimpleNamespace

import pytest

import grpo
from data.scores import share_of
from data.task import text_of
from helpers.models import make_chat_model
from helpers.runs import figures
from runs.hints import hints
from runs.log import read_log
from settings import GRPOSettings, SFTSettings
from snug.options import SnugError, read_settings
from training.figures import groups_of
from training.probe import means_of, screen, signs

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


def probed(reward, **options):
    """-> (the exit code, probe.json)."""
    with pytest.raises(SystemExit) as end:
        grpo.train(prompts=PROMPTS, reward_funcs=[reward], probe=True, **options)
    with open(f"{options['out_dir']}/probe.json") as file:
        return end.value.code, json.load(file)


def test_the_probe_is_the_run_without_learning(tmp_path, models, capsys):
    """Its figures are those of the run's first iterations at learning_rate=0. It leaves no run, and changes none."""
    options, batches = options_of(tmp_path, models[True], beta=0.1), []

    def noted(completions, **columns):
        batches.append(len(completions))
        return even(completions)

    code, report = probed(noted, **options)
    assert batches == [64, 64]  # no evaluation
    shown = capsys.readouterr().out
    assert report["verdict"] == [] and code == 0 and shown.endswith("go\n")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["probe.json"]
    grpo.train(prompts=PROMPTS, reward_funcs=[even], **options | dict(learning_rate=0.0, max_iters=2))
    log = read_log(tmp_path / "run")
    first = 16 - round(16 * log[0]["frac_reward_zero_std"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("groups")]
    assert line == f"groups with different rewards: {share_of(first, 16)}"
    for name in ("reward_mean", "truncated_fraction", "completion_length_mean", "entropy"):
        assert report["means"][name] == pytest.approx(sum(record[name] for record in log) / 2, rel=1e-6)
    assert report["means"]["mem_max_alloc_mb"] >= max(record["mem_max_alloc_mb"] for record in log) * 0.99
    assert report["seconds"] == pytest.approx(3 * report["means"]["time_s"])
    varied = first + 16 - round(16 * log[1]["frac_reward_zero_std"])
    assert (report["varied"], report["groups"]) == (varied, 32) and 0 < varied < 32
    assert f"\n  groups with different rewards: {share_of(varied, 32)}\n" in shown
    grpo.train(prompts=PROMPTS, reward_funcs=[even], **options)
    again = options | dict(out_dir=str(tmp_path / "without"))
    grpo.train(prompts=PROMPTS, reward_funcs=[even], **again)
    assert figures(tmp_path / "run") == figures(tmp_path / "without")
    probed(even, **again)  # of a folder that has a run
    assert figures(tmp_path / "run") == figures(tmp_path / "without")


PLANTED = [
    (always(0.0), True, {}, 3, "frac_reward_zero_std 1: every reward is 0"),
    (always(1.0), True, {}, 3, "frac_reward_zero_std 1: every reward is the same"),
    (always(0.0), True, dict(chat=False), 3, "unused_chat_template 1"),
    (even, True, dict(max_new_tokens=1), 0, "truncated_fraction"),
    (even, False, dict(stop_string="THE END"), 0, "stop_string_seen 0"),
    (even, False, dict(chat=False), 0, "unused_chat_template 1"),
]


@pytest.mark.parametrize("reward, brief, changes, expected, first", PLANTED)
def test_a_planted_failure_is_named_first(tmp_path, models, reward, brief, changes, expected, first):
    """Where rewards differ all the same, the run goes."""
    code, report = probed(reward, **options_of(tmp_path, models[brief], **changes))
    assert code == expected and report["verdict"][0].startswith(first)


def test_where_nothing_is_compared_no_share_is_shown(tmp_path, models, capsys):
    """Unscored completions are no groups with different rewards; one completion of a prompt beside a teacher is no
    group."""
    code, report = probed(always(None), **options_of(tmp_path, models[True]))
    assert code == 3 and (report["varied"], report["groups"]) == (0, 32)
    shown = capsys.readouterr().out
    assert "  groups with different rewards: 0 of 32, 0 % (0 % to 11 %)\n" in shown and "mean reward" not in shown
    assert "\nno go: none of 32 groups has different rewards" in shown
    teacher = dict(teacher=str(models[True]), reward_coef=0.0, group_size=1)
    code, report = probed(even, **options_of(tmp_path, models[True], **teacher))
    assert code == 0 and report["groups"] == 0 and "different rewards" not in capsys.readouterr().out


def test_dynamic_sampling_is_left_out(tmp_path, models):
    """Of the probe, not of the run's own first line: that counts all groups that were sampled."""
    batches = []

    def noted(completions, **columns):
        batches.append(len(completions))
        return [0.0] * len(completions)

    code, report = probed(noted, **options_of(tmp_path, models[True], max_num_gen_batches=3))
    assert batches == [64, 64] and code == 3 and report["groups"] == 32


def test_groups_are_counted_over_all_iterations_and_batches():
    settings = GRPOSettings(batch_size=10)
    records = [dict(frac_reward_zero_std=0.9, gen_batches=1), dict(frac_reward_zero_std=23 / 30, gen_batches=3), {}]
    assert groups_of(records, settings) == (1 + 7, 10 + 30) and groups_of(records[2:], settings) == (0, 0)
    assert share_of(15, 32) == "15 of 32, 47 % (31 % to 64 %)" and share_of(0, 2048) == "0 of 2,048, 0 % (0 % to 0 %)"


def test_times_are_those_after_the_first_iteration_and_memory_is_the_largest():
    records = [dict(time_s=9.0, time_rollout_s=7.0, mem_max_alloc_mb=5.0, reward_mean=0.0)]
    records += [dict(time_s=t, time_rollout_s=t / 2, mem_max_alloc_mb=t, reward_mean=t) for t in (2.0, 4.0)]
    expected = dict(time_s=3.0, time_rollout_s=1.5, mem_max_alloc_mb=5.0, reward_mean=2.0)
    assert means_of(records) == expected


def test_every_line_of_the_screen():
    completions = [completion_of(text, reward) for text, reward in (("a\n b", 0.25), ("c", None), ("d" * 99, 1.0))]
    means = dict(reward_mean=0.5, truncated_fraction=0.126, time_s=2.5, time_train_s=1.25, time_rollout_s=1.0)
    means |= {"mem_max_alloc_mb": 1234.4, "reward/short": 0.125, "reward/right": 0.375}
    report = dict(varied=1, groups=32, means=means, seconds=3700.0, verdict=["a hint"], go=True)
    assert screen(completions, **report) == [
        "3 completions, none of them learned from; in brackets a 95 % interval",
        "  groups with different rewards: 1 of 32, 3 % (1 % to 16 %)",
        "  mean reward: 0.500, short 0.125, right 0.375",
        "  cut off: 13 % of the completions",
        "  an iteration takes 2.50 s (rollout 1.00, train 1.25); all of them 1:01:40, without evaluations and dynamic "
        "sampling",
        "  memory: 1,234 MiB",
        "  reward 1: " + "d" * 90,
        "  reward 0.25: a b",
        "go; the likeliest cause is first:",
        "  a hint",
    ]
    assert screen(completions, **report | dict(verdict=[], go=False))[-1] == (
        "no go: none of 32 groups has different rewards"
    )


def test_the_time_that_is_left_is_that_of_a_resumed_run(tmp_path, models, capsys):
    """And each function's mean is shown."""
    options = options_of(tmp_path, models[True], batch_size=4, group_size=2, max_iters=5, eval_prompts=0)
    functions = [even, always(0.25)]
    grpo.train(prompts=PROMPTS, reward_funcs=functions, **options | dict(max_iters=2))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        grpo.train(prompts=PROMPTS, reward_funcs=functions, probe=True, resume="auto", **options)
    report = json.loads((tmp_path / "run/probe.json").read_text())
    assert report["seconds"] == pytest.approx(3 * report["means"]["time_s"])
    assert report["groups"] == 32 and f", even {report['means']['reward/even']:.3f}, " in capsys.readouterr().out


def completion_of(text, reward, **more):
    each = dict(completion=text, reward=reward, rewards={"f": reward}, columns={"answer": "12"}, stopped=True)
    return each | dict(question="?") | more


def test_answers_that_earn_nothing_and_calls_that_fail_are_signs():
    prepared = SimpleNamespace(settings=GRPOSettings(), tokenizer=SimpleNamespace(chat=True))
    equal = dict(frac_reward_zero_std=1.0, reward_std=0.0, reward_mean=0.0)
    completions = [completion_of("It is 12.", 0.0), completion_of("It is 129.", 0.0)]
    found = signs(completions, prepared)
    assert found == {"answer_unrewarded": 0.5}
    assert next(iter(hints(equal | found))) == "answer_unrewarded"
    assert signs([completion_of("It is 12.", 1.0)], prepared) == {"answer_unrewarded": 0}
    call = dict(role="assistant", content="", tool_calls=[{}])
    episodes = [completion_of("a", 0.0, messages=[call, call], tool_errors=n, columns={}) for n in (2, 1)]
    assert signs(episodes, prepared) == {"failed_calls": 0.75}
    assert next(iter(hints(equal | signs(episodes, prepared)))) == "failed_calls"


def test_sft_has_no_probe():
    with pytest.raises(SnugError, match="probe"):
        read_settings(SFTSettings, ["config/sft_small.py", "--probe"])
