"""pass@k, majority votes and intervals against enumeration; the command on runs that sample ragged completions."""

import itertools
import json
import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import evaluate
import train_sft
from data import make_task
from data.scores import Z, group_scores, majority, pass_at, powers, table, wilson
from evaluate import run_evaluation
from helpers.commands import python
from helpers.errors import assert_refused
from helpers.models import make_model
from helpers.runs import disk, hex_run, prepared_by, run_settings
from helpers.tasks import COUNTDOWN, written
from model import GPT
from runs.checkpoint import newest
from runs.evaluation import evaluation_settings
from runs.loading import load_run
from runs.prepare import prepare
from sample import sample_groups
from settings import EvaluateSettings, GRPOSettings, SFTSettings
from snug.memory import Limits
from snug.options import SnugError, read_settings
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def share_of(subset):
    """Pairs (answer, right) -> how right the majority is, by the words of the docstring."""
    count = Counter(answer for answer, _ in subset if answer is not None)
    winners = [answer for answer in count if count[answer] == max(count.values())]
    shares = [Fraction(sum(right for a, right in subset if a == answer), count[answer]) for answer in winners]
    return sum(shares) / len(winners) if winners else Fraction(0)


def listed(group, k, value):
    """The mean of value(subset) over every k-subset."""
    subsets = list(itertools.combinations(group, k))
    return float(sum(Fraction(value(subset)) for subset in subsets) / len(subsets))


answers = st.tuples(st.sampled_from([None, "a", "b", 7, (1, 2)]), st.booleans())


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.lists(answers, min_size=1, max_size=8))
def test_pass_is_the_mean_over_every_subset_and_majority_the_vote_of_all(group):
    """An answer may be right in one sample and wrong in another: cut off, or in another format."""
    n, right = len(group), sum(good for _, good in group)
    for k in range(1, n + 1):
        assert pass_at(k, n, right) == pytest.approx(listed(group, k, lambda s: any(good for _, good in s)), abs=1e-15)
    assert majority(*zip(*group, strict=True)) == pytest.approx(float(share_of(group)), abs=1e-15)


def test_examples_large_numbers_and_the_k_that_are_reported():
    assert (pass_at(2, 4, 2), majority([7, 7, 8, None], [1, 1, 0, 0])) == (5 / 6, 1)
    assert pass_at(1000, 2000, 1) == 0.5 and pass_at(1500, 2000, 1000) == 1.0 and pass_at(1, 10**6, 1) == 1e-6
    assert [powers(n) for n in (1, 2, 3, 10, 16)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 10], [1, 2, 4, 8, 16]]
    groups = [[("a", True), ("b", False), ("a", True)]]
    assert group_scores(groups) == {"pass_at_2": 1, "pass_at_3": 1, "maj_at_3": 1}
    assert group_scores([groups[0][:1]]) == {}
    n = 2**14  # a list of all the subsets, or a table of all the counts of votes, would never end
    scores = group_scores([[(i // 2, i < 2) for i in range(n)]])
    assert scores[f"maj_at_{n}"] == 2 / n and scores["pass_at_8192"] == pytest.approx(0.75, abs=1e-4)


def test_wilson_is_where_the_normal_test_turns():
    """Its ends are the p that are Z standard deviations, of their own, from the mean."""
    for n, right in ((1, 0), (1, 1), (7, 3), (7, 7), (200, 0), (200, 1), (200, 77)):
        for p in wilson(right / n, n):
            assert 0 <= p <= 1
            if 1e-12 < p < 1 - 1e-12:
                assert abs(right / n - p) == pytest.approx(Z * math.sqrt(p * (1 - p) / n), rel=1e-9)
    assert wilson(0.0, 9)[0] == pytest.approx(0, abs=1e-15) and wilson(1.0, 9)[1] == pytest.approx(1)


# A model that is asked. Its 16 tokens are hexadecimal digits; 3 ends a completion.


def recomputed(samples, n):
    """Samples as they are in the file -> every score, by enumeration."""
    groups = [samples[i : i + n + 1] for i in range(0, len(samples), n + 1)]
    for group in groups:
        assert [s["greedy"] for s in group] == [True] + [False] * n and len({s["prompt"] for s in group}) == 1
    pairs = [[(s["answer"], s["right"]) for s in group[1:]] for group in groups]
    scores = {"pass_at_1": [group[0]["right"] for group in groups], f"maj_at_{n}": list(map(share_of, pairs))}
    for k in powers(n):
        name = "pass_at_1_sampled" if k == 1 else f"pass_at_{k}"
        scores[name] = [listed(pair, k, lambda s: any(right for _, right in s)) for pair in pairs]
    return {name: sum(values) / len(groups) for name, values in scores.items()}


def test_the_scores_are_those_of_the_samples():
    model, prepared, options = hex_run()
    summary, samples = run_evaluation(model, prepared, options)
    assert summary["scores"] == pytest.approx(recomputed(samples, 6)) and len(samples) == 13 * 7
    scores = summary["scores"]
    assert 0 < scores["pass_at_1_sampled"] < scores["maj_at_6"] < scores["pass_at_6"] < 1
    assert summary["settings"]["max_new_tokens"] == 12 and summary["checkpoint"] == "out/x/checkpoint-000007"
    wanted = {row["prompt"]: row["wanted"] for row in prepared.task.prompts("test", range(13))}
    assert len({s["length"] for s in samples}) > 5  # ragged
    assert 0 < sum(s["stopped"] for s in samples) < len(samples)  # and some cut off
    for s in samples:
        assert s["length"] == len(s["completion"]) + s["stopped"]
        assert s["answer"] == ((s["completion"][:1] or None) if s["stopped"] else None)
        assert s["right"] == bool(s["stopped"] and s["completion"][:1] in wanted[s["prompt"]]) == s["reward"]
    drawn = [s for s in samples if not s["greedy"]]
    means = {"length": sum(s["length"] for s in drawn) / 78, "stopped": sum(s["stopped"] for s in drawn) / 78}
    assert summary["means"] == pytest.approx(means)


@torch.no_grad()
def test_the_logprob_is_the_whole_completions_at_its_temperature():
    model, prepared, options = hex_run(P=5, num_samples=2, temperature=0.7)
    for s in run_evaluation(model, prepared, options)[1]:
        prompt = prepared.tokenizer.encode_prompt(s["prompt"])
        completion = prepared.tokenizer.encode_prompt(s["completion"]) + [3] * s["stopped"]
        tokens = torch.tensor([prompt + completion], device=model.device)
        logits = model.logits(model(tokens))[0, len(prompt) - 1 : -1].double() / (1 if s["greedy"] else 0.7)
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None]).sum()
        assert s["logprob"] == pytest.approx(float(expected), abs=1e-4)


def test_neither_pieces_nor_an_out_of_memory_change_anything(monkeypatch, capsys):
    """64 completions at a time, and a device on which five are too many to decode."""
    wanted = run_evaluation(*hex_run(run=run_settings(8)))
    calls = []

    def small_device(model, prompts, group_size, max_new_tokens, max_batch, **options):
        calls.append((len(prompts), group_size, max_batch))
        assert options["chunk_mb"] == 0.5
        if max_batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return sample_groups(model, prompts, group_size, max_new_tokens, max_batch=max_batch, **options)

    monkeypatch.setattr("sample.sample_groups", small_device)
    most = 5
    summary, samples = run_evaluation(*hex_run(run=run_settings(40)))
    assert calls == [(13, 1, size) for size in (64, 20, 10, 5)] + [(13, 6, 5)]
    for ours, theirs in zip(samples, wanted[1], strict=True):
        assert ours == theirs | {"logprob": pytest.approx(theirs["logprob"], abs=1e-4)}
    assert summary == wanted[0]
    assert "Tried to allocate 1 GiB; going on with max_eval_batch=5" in capsys.readouterr().err
    model, prepared, options = hex_run(run=run_settings(40))
    prepared.settings.environment, most = "one a completion", 64
    for ours, theirs in zip(run_evaluation(model, prepared, options)[1], samples, strict=True):
        assert ours == theirs | {"logprob": pytest.approx(theirs["logprob"], abs=1e-4)}
    assert calls[5:] == [(13, 1, 64), (6, 6, 64), (6, 6, 64), (1, 6, 64)]
    most = 0
    said = r"decoding one completion at a time: CUDA out of memory.*; try a lower --max_new_tokens"
    assert_refused(said, run_evaluation, *hex_run())


def test_the_command_decodes_more_completions_at_a_time_than_a_small_run(monkeypatch):
    forward, rows = GPT.forward, []
    monkeypatch.setattr(GPT, "forward", lambda model, x, *a, **k: rows.append(len(x)) or forward(model, x, *a, **k))
    run_evaluation(*hex_run(P=30, num_samples=2, run=replace(run_settings(4), group_size=16)))
    assert max(rows) == 60


def test_repeated_prompts_make_no_interval_narrower():
    """Their prompts are messages: neither text nor what a set takes."""
    model, prepared, options = hex_run(P=20, num_samples=2)
    four = [row | {"prompt": [row["prompt"]]} for row in prepared.task.prompts("test", range(4))]
    prepared.task.prompts = lambda split, numbers: four * 5
    encode = prepared.tokenizer.encode_prompt
    prepared.tokenizer.encode_prompt = lambda prompt, **_: encode(prompt[0])
    summary, _ = run_evaluation(model, prepared, options)
    scores, intervals = summary["scores"], summary["intervals"]
    assert summary["different_prompts"] == 4 and intervals["pass_at_1"] == wilson(scores["pass_at_1"], 4)
    assert "20 prompts of the test split (4 different), 2 samples each" in table(summary)[0]


def test_temperature_0_samples_once():
    summary, samples = run_evaluation(*hex_run(num_samples=1, temperature=0.0))
    assert list(summary["scores"]) == ["pass_at_1"] and len(samples) == 13 and all(s["greedy"] for s in samples)
    assert "each at temperature" not in table(summary)[0]
    for summary["means"]["stopped"], said in ((0.6, False), (0.4, True)):
        longest = summary["settings"]["max_new_tokens"]
        assert (f"  most were cut off at max_new_tokens={longest}" in table(summary)) == said


# A run that is asked


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run on lines of a file, whose demonstrations are mostly right; on the prompts of the train split alone."""
    folder, rng = tmp_path_factory.mktemp("evaluate"), random.Random(0)
    names = ("prompt", "answer", "demonstration")
    rows = [(f"q{i}", rng.choice("01"), rng.choice(["0", "1", "1", "22"])) for i in range(400)]
    file = written(folder, [dict(zip(names, row, strict=True)) for row in rows], "rows.jsonl")
    options = dict(n_layer=1, n_embd=32, block_size=16, batch_size=32, max_iters=30, learning_rate=5e-3, eval_prompts=1)
    settings = SFTSettings(task="jsonl", data_file=file, eval_interval=0, out_dir=str(folder / "run"), **options)
    train_sft.main(prepare(settings))
    return folder / "run"


def test_the_command(run_folder):
    """In a process of its own, its stdout a pipe: the table, the file, and that the two say the same."""
    words = ["--num_samples=6", "--num_prompts=30", "--temperature=0.9"]
    run = python("evaluate.py", run_folder, *words)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    file = run_folder / "evaluation-jsonl-test.jsonl"
    summary, *samples = map(json.loads, file.read_text().splitlines())
    assert list(samples[0]) == "prompt completion answer right reward stopped length greedy logprob".split()
    assert summary["scores"] == pytest.approx(recomputed(samples, 6)) and 0 < summary["scores"]["pass_at_1_sampled"] < 1
    options = summary["settings"]
    assert (summary["checkpoint"], options["task"], options["num_samples"]) == (str(newest(run_folder)), "jsonl", 6)
    start = "jsonl, 30 prompts of the test split, 6 samples each at temperature 0.9; 95 % intervals"
    lines = run.stdout.splitlines()
    told = ("starting", "evaluation ")  # by a busy machine, which is slow
    lines = [line for line in lines if not line.startswith(told)]
    assert lines == [f"{newest(run_folder)}: {start}", *table(summary)[1:], f"samples in {file}"]
    names = ["pass_at_1", "pass_at_1_sampled", "pass_at_2", "pass_at_4", "pass_at_6", "maj_at_6", "length", "stopped"]
    assert [line.split()[0] for line in lines[1:-1]] == names
    for name, *shown in map(str.split, lines[1:-3]):
        low, high = summary["intervals"][name]
        assert shown == [f"{summary['scores'][name]:.3f}", f"{low:.3f}", "to", f"{high:.3f}"]
    test_rows = make_task(load_run(run_folder).settings).rows["test"]
    assert {s["prompt"] for s in samples} <= {row["prompt"] for row in test_rows}


def test_without_options_it_is_the_loops_own_evaluation(run_folder):
    run = load_run(run_folder)
    prepared, options, file = prepared_by(run_folder, "--num_prompts=40", "--samples_file=none")
    summary, samples = run_evaluation(run.model, prepared, options)
    prepared.settings = replace(run.settings, eval_prompts=prepared.settings.eval_prompts)
    both = evaluate.sample_held_out(run.model, prepared, Limits(prepared, print))
    assert [sample for pair in zip(*both, strict=True) for sample in pair] == samples
    assert max(sample["length"] for sample in both[1]) == 3  # the longest answer and the stop token
    scores = summary["scores"]
    rewards = {name.replace("pass_at_1", "eval_reward_mean"): mean for name, mean in scores.items()}
    cut = dict(eval_truncated_fraction=sum(not sample["stopped"] for sample in samples) / len(samples))
    parts = [tuple(samples[part] for samples in both) for part in (slice(15), slice(15, None))]
    for of_processes in ([both], parts):
        assert evaluate.run_scores(of_processes) == scores | rewards | cut
    assert file is None and 0 < scores["pass_at_1_sampled"] < 1


def test_a_hugging_face_folder_is_evaluated_on_what_the_command_names(tmp_path, monkeypatch, capsys):
    """Its samples are in out/ of the current folder, because the model's may be read-only or another's."""
    monkeypatch.chdir(tmp_path)
    save_pretrained(make_model("gpt2", vocab_size=257), tmp_path / "model", get_tokenizer("bytes"))
    prepared, options, file = prepared_by(tmp_path / "model", "--task=addition", "--digits=1", "--num_prompts=3")
    evaluate.main(options, prepared, file)
    assert f"{tmp_path}/model: addition, 3 prompts" in capsys.readouterr().out
    assert str(file) == "out/model/evaluation-addition-test.jsonl"
    summary = json.loads(file.read_text().splitlines()[0])
    assert summary["settings"]["digits"] == 1
    before = sorted((tmp_path / "model").iterdir())
    for name, place in (("model/../model", "model"), ("model/", "model"), (".", "model")):
        if name == ".":
            monkeypatch.chdir("model")
        assert str(prepared_by(name, "--task=addition")[2]) == f"out/{place}/evaluation-addition-test.jsonl"
    assert sorted(set((tmp_path / "model").iterdir()) - {tmp_path / "model/out"}) == before
    assert_refused("model has no task of its own; name one, such as --task=addition", prepared_by, tmp_path / "model")


def test_what_cannot_be_evaluated_is_refused(run_folder):
    home = run_folder.parent
    written(home, [{"prompt": str(i), "demonstration": "x"} for i in range(50)], "unscored.jsonl")
    for words, message in (
        ("--tokenizer=gpt2", "='gpt2', but .*has 'bytes'; leave tokenizer out|tokenizer=gpt2 cannot be downloaded"),
        (f"--data_file={home}/none.jsonl", "none.jsonl: cannot be read"),
        (f"--data_file={home}/unscored.jsonl", "unscored.jsonl has no column answer to score by"),
        ("--max_new_tokens=20", "max_new_tokens of up to 20 are more than block_size=16"),
        (f"--samples_file={home}/rows.jsonl/x", "written; name another, or --samples_file=none .(FileExists|NotADir)"),
    ):
        assert_refused(message, prepared_by, run_folder, *words.split())


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_sampled(run_folder, tmp_path):
    """Nothing stays of what is tried."""
    place = tmp_path / "new/folder"
    with pytest.raises(SnugError, match="samples_file=.*/x cannot be written; name another.* .OSError: .* File too"):
        with disk(0):
            prepared_by(run_folder, f"--samples_file={place}/x")
    *_, file = prepared_by(run_folder, f"--samples_file={place}/x")
    assert file == place / "x" and list(place.iterdir()) == []


def changed(words, run):
    """The settings of an evaluation with these words of a run with these settings."""
    of_run = lambda cls, folders: cls.with_task(run.task)  # noqa: E731
    options, given, _ = read_settings(EvaluateSettings, ["run", *words.split()], "folder", of_run)
    return evaluation_settings(options, given, run)


def test_options_come_from_the_command_then_the_run_and_another_task_has_the_defaults():
    lengths = dict(max_new_tokens=9, max_prompt_length=5, stop_string="x")
    run = GRPOSettings(digits=7, demonstration_noise=0.5, chat=True, **lengths)
    same = replace(run, max_iters=0)  # nothing is trained
    assert changed("", run) == changed("--task=", run) == changed("--task=addition", run) == same
    # 4 digits are the default, too.
    assert changed("--digits=4 --max_new_tokens=3", run) == replace(same, digits=4, max_new_tokens=3)
    other = changed(f"--task={COUNTDOWN} --countdown_numbers=5", run)
    wanted = GRPOSettings(task=COUNTDOWN, countdown_numbers="5", max_new_tokens=0, stop_string="x", max_iters=0)
    assert other == wanted
    sft = changed("", SFTSettings(digits=3, batch_size=9, dtype="bfloat16"))
    assert (sft.digits, sft.dtype, sft.max_new_tokens, sft.sequences_per_rollout) == (3, "bfloat16", 0, 9)


def test_another_data_file_is_refused_where_the_prompts_are_in_a_test_file():
    run = GRPOSettings(task="jsonl", data_file="a", test_file="t")
    assert_refused("data_file=b: the run trained on all of its file; give --test_file", changed, "--data_file=b", run)
    for words, files in (("", "at"), ("--test_file=u", "au"), ("--data_file=b --test_file=", "b")):
        assert changed(words, run).data_file + changed(words, run).test_file == files
    assert changed("--data_file=b", GRPOSettings(task="jsonl", data_file="a")).test_file == ""


def test_the_file_is_replaced_whole_or_not_at_all(run_folder, tmp_path, monkeypatch, capsys):
    def fail(error):
        raise error

    file = tmp_path / "samples.jsonl"
    prepared_by(run_folder, f"--samples_file={file}", "--num_prompts=5")
    assert not file.exists()  # before there are samples
    file.write_text("what was there\n")
    prepared, options, place = prepared_by(run_folder, f"--samples_file={file}", "--num_prompts=5")
    assert place == file and file.read_text() == "what was there\n" and len(list(tmp_path.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("runs.log.os.replace", lambda *paths: fail(OSError(28, "No space left on device")))
        with pytest.raises(SnugError, match="samples.jsonl cannot be written .OSError: .* No space left on device"):
            evaluate.main(options, prepared, file)
    assert file.read_text() == "what was there\n" and len(list(tmp_path.iterdir())) == 1
    assert "pass_at_1" in capsys.readouterr().out
    evaluate.main(options, prepared, file)
    assert len(file.read_text().splitlines()) == 11 and len(list(tmp_path.iterdir())) == 1
