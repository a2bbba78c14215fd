"""--probe says what the run will see and changes nothing; each planted failure is the first that it names."""

import json
from types import SimpleNamespace

import pytest
from conftest import figures, make_chat_model

import grpo
from data.scores import wilson
from data.task import text_of
from runs.hints import hints
from runs.log import read_log
from settings import GRPOSettings, SFTSettings
from snug.options import SnugError, read_settings
from training.probe import rates_of, signs

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
    assert "estimated from these" not in shown
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["probe.json"]
    grpo.train(prompts=PROMPTS, reward_funcs=[even], **options | dict(learning_rate=0.0, max_iters=2))
    log = read_log(tmp_path / "run")
    assert capsys.readouterr().out.count("groups that teach something, estimated from these: ") == 1
    for name in ("reward_mean", "truncated_fraction", "completion_length_mean", "entropy"):
        assert report["means"][name] == pytest.approx(sum(record[name] for record in log) / 2, rel=1e-6)
    assert report["means"]["mem_max_alloc_mb"] >= max(record["mem_max_alloc_mb"] for record in log) * 0.99
    assert report["seconds"] == pytest.approx(3 * report["means"]["time_s"])
    rate, low, high = report["rates"]["pass@1"]
    assert rate == pytest.approx(report["means"]["reward_mean"]) and low < rate < high
    seen = 1 - report["means"]["frac_reward_zero_std"]  # of 32 groups, so with a standard deviation of 0.06
    rate, low, high = report["rates"]["groups of 4 that teach"]
    assert abs(rate - seen) < 0.18 and f"{rate:.3f}   {low:.3f} to {high:.3f}" in shown
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
    """Unscored completions, or one of a prompt beside a teacher: no group can teach by its rewards."""
    teacher = dict(teacher=str(models[True]), reward_coef=0.0, group_size=1)
    for reward, changes, go in ((always(None), {}, 3), (even, teacher, 0)):
        code, report = probed(reward, **options_of(tmp_path, models[True], **changes))
        assert not any("teach" in name for name in report["rates"])
        assert code == go


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


def test_rates_are_of_completions_groups_and_prompts():
    """Two prompts of four completions: one right of the first, none of the second."""
    task = SimpleNamespace(answers_of=lambda texts, stopped: [text or None for text in texts])
    prepared = SimpleNamespace(settings=GRPOSettings(), reward_funcs=[even], reward_weights=[1.0], task=task)
    groups = [
        [completion_of(text, reward) for text, reward in zip("abcd", rewards, strict=True)]
        for rewards in ([0, 1, 0, 0], [0, 0, None, 0])
    ]
    groups[0][0] |= dict(stopped=False, completion="")
    rates = rates_of(groups, prepared)
    assert rates["pass@1"][1:] == list(wilson(1 / 8, 2))
    rates = {name: rate for name, (rate, _, _) in rates.items()}
    assert rates["pass@1"] == 1 / 8 and rates["pass@2"] == 1 / 4 and rates["pass@4"] == 1 / 2
    assert rates["groups in which f varies"] == 1 / 2 and rates["cut off"] == rates["no answer"] == 1 / 8
    assert rates["groups of 4 that teach"] < rates["groups of 32 that teach"]
    assert "groups of 3 that teach" in rates_of([group[:3] for group in groups], prepared)


def test_sft_has_no_probe():
    with pytest.raises(SnugError, match="probe"):
        read_settings(SFTSettings, ["config/sft_small.py", "--probe"])
