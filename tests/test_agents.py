"""Whole runs with tools and environments: logs, evaluations, bad tools, several processes, kills, memory."""

import json
import random
from itertools import groupby
from pathlib import Path

import pytest
import torch

import agents
import grpo
from data.tools import parse_calls, schema_of
from evaluate import prepare_evaluation, run_evaluation
from helpers.errors import assert_refused
from helpers.models import DEVICE
from padded import a_few, padded
from runs import loading
from runs.log import read_lines, read_log
from runs.prepare import prepare
from sample import complete, sample_groups
from settings import EvaluateSettings, GRPOSettings, SampleSettings
from snug.device.kinds import MIB
from snug.memory.plan import plan
from snug.tokenizer import get_tokenizer
from training.dry_run import DryRun

cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="gloo, and the meter of a CPU")


def settings_of(tmp_path, name="run", **changes):
    return GRPOSettings(**agents.options(tmp_path, name, **dict(device=DEVICE, dtype="float32") | changes))


def samples_of(folder):
    return list(read_lines(Path(folder) / "samples.jsonl"))


def check_messages(sample, tokenizer):
    """The messages of a sample are what its tokens and its mask say, turn by turn and reply by reply."""
    turns, replies = [], []
    tokens = zip(sample["mask"], sample["tokens"], strict=True)
    for drawn, run in groupby(tokens, key=lambda pair: pair[0]):
        (turns if drawn else replies).append("".join(text for _, text in run))
    said = [message for message in sample["messages"] if message["role"] == "assistant"]
    for text, message in zip(turns, said, strict=True):
        content, calls = parse_calls(text, "inline", [schema_of(agents.f)])
        assert (content, calls) == (message["content"], message.get("tool_calls", []))
    written = [message for message in sample["messages"] if message["role"] != "assistant"]
    for text, message in zip(replies, written, strict=True):
        content = message["content"]
        content = f"<result>{content}</result>" if message["role"] == "tool" else content
        assert text == tokenizer.decode(tokenizer.encode(content))  # which has few letters
    assert all(value == 0 for value, drawn in zip(sample["logprobs"], sample["mask"], strict=True) if not drawn)
    errors = sum("error" in message["content"] for message in written)
    assert sample["tool_errors"] == errors or not sample["stopped"]  # there was no room for the last


# A run, and what is done with it


@pytest.fixture(scope="module", autouse=True)
def all_samples():
    """All completions of an iteration are in samples.jsonl."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.figures.SAMPLES", 16)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Its settings."""
    options = dict(reward_funcs=["agents:answered", "agents:long"], learning_rate=1e-3)  # it goes on calling
    settings = settings_of(tmp_path_factory.mktemp("agents"), **options)
    grpo.main(prepare(settings))
    return settings


def test_what_a_run_with_tools_logs(run):
    """Means over all completions."""
    samples, records = samples_of(run.out_dir), read_log(run.out_dir)
    assert len(records) == 3 and len(samples) == 3 * 16
    for i, record in enumerate(records):
        of_iteration = samples[16 * i :][:16]
        messages = [message for sample in of_iteration for message in sample["messages"]]
        said = [message for message in messages if message["role"] == "assistant"]
        tokens = [drawn for sample in of_iteration for drawn in sample["mask"]]
        assert record["logprob_diff_max"] < 1e-4
        assert record["turns"] == len(said) / 16
        assert record["tool_calls"] == sum(len(message.get("tool_calls", [])) for message in said) / 16
        assert record["tool_errors"] == sum(sample["tool_errors"] for sample in of_iteration) / 16
        assert record["written_fraction"] == pytest.approx(tokens.count(0) / len(tokens), abs=1e-6)
        assert record["completion_length_mean"] == pytest.approx(len(tokens) / 16)
    for name in ("turns", "tool_calls", "tool_errors"):  # there is something to count
        assert max(record[name] for record in records) > 0


def test_what_a_run_with_tools_leaves_in_its_samples(run):
    samples = samples_of(run.out_dir)
    tokenizer = get_tokenizer(run.tokenizer)
    for sample in samples:
        check_messages(sample, tokenizer)
        start = sample["columns"]["start"]
        assert sample["prompt"].endswith(f"={start}?") and sample["rewards"]["Game"] == start / 10
        assert sample["rewards"]["answered"] == agents.answered([sample["messages"]], [None])[0]
    assert any("".join(map(str, sample["mask"])).strip("1").count("01") > 0 for sample in samples)  # two replies


def test_groups_that_are_selected_keep_their_episodes(tmp_path):
    settings = settings_of(tmp_path, max_num_gen_batches=3, eval_prompts=0)
    grpo.main(prepare(settings))
    assert max(record["gen_batches"] for record in read_log(settings.out_dir)) > 1
    for sample in samples_of(settings.out_dir):
        check_messages(sample, get_tokenizer(settings.tokenizer))
        assert sample["rewards"]["Game"] == sample["columns"]["start"] / 10


def evaluated(folder, **options):
    """-> the summary and samples of evaluate.py"""
    settings = EvaluateSettings(samples_file="none", num_prompts=6, num_samples=2, **options)
    prepared, _ = prepare_evaluation(settings, {*options}, folder)
    return run_evaluation(loading.load_run(prepared.origin, DEVICE).model, prepared, settings)


def test_evaluations_with_and_without_tools(run, tmp_path):
    summary, samples = evaluated(run.out_dir, tools=["agents:f"], max_turns=2)
    assert summary["settings"]["tools"] == ["agents:f"] and summary["settings"]["environment"] == "agents:Game"
    assert len(samples) == 18 and all(len(sample["messages"]) <= 3 for sample in samples)
    turns = [len([m for m in sample["messages"] if m["role"] == "assistant"]) for sample in samples]
    assert set(turns) == {1, 2} and "tool_errors" in samples[0]
    summary, samples = evaluated(run.out_dir, tools=[])  # --tools=: the environment stays
    assert summary["settings"]["tools"] == []
    assert all(message["role"] != "tool" for sample in samples for message in sample["messages"])
    settings = settings_of(tmp_path, environment="", reward_funcs=[], max_iters=1, eval_prompts=2, eval_interval=0)
    grpo.main(prepare(settings))
    summary, samples = evaluated(settings.out_dir, tools=[])
    assert summary["settings"]["tools"] == [] and "messages" not in samples[0]
    assert all(isinstance(sample["completion"], str) for sample in samples)


def test_functions_and_a_class_of_a_cell(tmp_path):
    called = []

    def f(text: str) -> str:
        """Say its length.

        Args:
            text: any
        """
        called.append(text)
        return str(len(text))

    class Cell(agents.Game):
        pass

    options = {name: value for name, value in agents.options(tmp_path, "run").items() if name != "data_file"}
    options |= dict(device=DEVICE, dtype="float32", max_iters=2)
    options |= dict(tools=[f], environment=Cell, reward_funcs=[agents.answered])
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    result = grpo.train(prompts=prompts, **options)
    assert result.finished and called and {"reward/Cell", "tool_calls"} <= result.log[0].keys()
    before = len(called)
    texts = result.sample(n=20)
    assert len(texts) == 20 and len(called) > before and "  user: ?" in "\n".join(texts)
    assert result.settings.tools == ["test_agents:f"]
    again = grpo.train(resume=result.folder, tools=[f], environment=Cell, reward_funcs=[agents.answered], max_iters=3)
    assert len(again.log) == 3
    options |= dict(prompts=prompts)
    assert_refused("tool <lambda> has no JSON schema", grpo.train, **options | dict(tools=[lambda text: text]))
    assert_refused("environment dict.reset raised AttributeError", grpo.train, **options | dict(environment=dict))


REPLIES = {  # the turn, the reply: of 60 tokens, another turn has the last one
    "each row, after a token": (lambda ids: True, lambda row, ids: [5] * 58),
    "two of three rows, after seven": (lambda ids: len(ids) == 7, lambda row, ids: [5] * 51 if row % 3 else []),
}


@cpu_only
@pytest.mark.parametrize("slots", [10, pytest.param(0, marks=pytest.mark.long)])
def test_a_plan_covers_what_tools_write(slots, tmp_path, monkeypatch):
    """Rollouts and evaluations: the plan is that of the longest replies, within 0.5 %, and no run takes more.

    A plan also has what steps leave behind. It does not know what an environment adds to prompts.
    """
    shape = dict(n_layer=2, n_embd=96, batch_size=4, block_size=80, max_new_tokens=60, max_iters=1, eval_prompts=8)
    shape |= dict(environment="", reward_funcs=["agents:long"])
    settings = settings_of(tmp_path, max_rollout_batch=slots, save_interval=0, **shape)
    prepared = prepare(settings)
    planned = plan(DryRun(prepared, grpo.iterate), settings).phases
    for name, (is_over, respond) in REPLIES.items():
        change = dict(stop_token=None, is_over=is_over, respond=respond)
        sampled = lambda *of, change=change, **options: sample_groups(*of, **options | change)  # noqa: E731
        monkeypatch.setattr("sample.sample_groups", sampled)
        grpo.main(prepared)
        record = read_log(settings.out_dir)[-1]
        for phase in ("rollout", "eval"):
            taken, peak = record["mem_max_alloc_mb_" + phase], planned[phase][0] / MIB
            assert taken < peak + 0.0005  # the log has three decimals
            assert taken > 0.995 * peak or name != "each row, after a token"


class Counter:
    """Its first text is a goal that `reset` draws; the reward is how near the calls came."""

    draw = random.Random(5)

    def reset(self, **columns) -> str:
        self.count, self.goal = 0, Counter.draw.randint(1, 9)
        return f"{self.goal}?"

    def f(self, text: str) -> int:
        """Count.

        Args:
            text: any
        """
        self.count += 1
        return self.count

    def get_reward(self) -> float:
        return -abs(self.goal - self.count) + 0.01 * self.goal


def test_each_completion_may_have_its_own_prompt(tmp_path, monkeypatch):
    """Texts that `reset` draws differ within a group: rows and gradients are those of prompts of their own."""
    monkeypatch.setattr(agents, "Counter", Counter, raising=False)
    own = dict(environment="agents:Counter", tools=[], reward_funcs=[], max_iters=1, eval_prompts=2)
    prepared = prepare(settings_of(tmp_path, **own))
    learned = []
    accumulate = grpo.accumulate_gradient

    def watch(model, rollouts, cut, step, settings, **rest):
        metrics = accumulate(model, rollouts, cut, step, settings, **rest)
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with padded():
            expected = accumulate(model, rollouts, a_few(cut, 3), step, settings, **rest)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, p.grad, atol=1e-5, rtol=1e-4)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        learned.append(rollouts)
        return metrics

    monkeypatch.setattr(grpo, "accumulate_gradient", watch)
    grpo.main(prepared)
    [rollouts] = learned
    prompts = [ids[:length] for ids, length in zip(rollouts.tokens.tolist(), rollouts.prompt_lengths, strict=True)]
    asked = [prepared.tokenizer.decode(ids) for ids in prompts]
    assert any(len(set(asked[i : i + 4])) > 1 for i in range(0, 16, 4))
    assert all(len({prompt.split("=")[0] for prompt in asked[i : i + 4]}) == 1 for i in range(0, 16, 4))
    shown = samples_of(tmp_path / "run")
    assert [sample["prompt"] for sample in shown] == asked  # the reward is that of this prompt's goal
    for sample in shown:
        count, goal = sum(m["role"] == "tool" for m in sample["messages"]), int(sample["prompt"][-2])
        assert sample["reward"] == pytest.approx(-abs(goal - count) + 0.01 * goal) or not sample["stopped"]
    prompt, texts = complete(SampleSettings(num_samples=3), set(), loading.load_run(tmp_path / "run", DEVICE))
    assert prompt.endswith("=") and len(texts) == 3
