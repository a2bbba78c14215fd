"""Two models with the same luck: p-values, intervals and power by other libraries and simulation, partings by the naive
sampler."""

import json
import math
import os
import subprocess
import sys
import weakref
from itertools import product

import numpy as np
import pytest
import torch
from conftest import HOME, make_model
from scipy.stats import binom, binomtest
from test_evaluate import hex_run

import evaluate
import train_sft
from data.pairs import compared, comparison, mcnemar, pairs_of, partings, sign_flip, verdict
from evaluate import compare, run_evaluation
from runs.evaluation import prepare_pair
from runs.loading import load_run
from runs.prepare import prepare
from sample import generate_naive
from settings import EvaluateSettings, SFTSettings
from snug.options import SnugError, read_settings
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ["--task=addition", "--digits=1", "--max_new_tokens=12", "--device=cpu"]


# ----------------------------------------------------------------------------------------------------------------------
# Is B better?


def test_mcnemar_is_the_binomial_test_of_a_coin():
    for up, down in [*product(range(8), range(8)), (400, 350), (1000, 0)]:
        expected = binomtest(up, up + down, 0.5).pvalue if up + down else 1
        assert mcnemar(up, down) == pytest.approx(expected, rel=1e-9)


def test_the_permutation_is_the_enumeration_of_all_signs():
    """Of more than MOST_EXACT differences 10,000 signs are drawn: five standard deviations of a share of so many."""
    rng = np.random.default_rng(3)
    for n in (0, 1, 2, 5, 9):
        d = rng.integers(-3, 5, n) / 4
        sums = [abs(np.dot(signs, d)) for signs in product((-1, 1), repeat=n)]
        expected = np.mean([s >= abs(d.sum()) - 1e-12 for s in sums])
        assert sign_flip(np.append(d, [0, 0])) == pytest.approx(expected)
    for up, down in ((40, 25), (15, 15), (60, 1)):
        p = mcnemar(up, down)
        drawn = sign_flip(np.repeat([1.0, -1.0], [up, down]))
        assert abs(drawn - p) <= 5 * math.sqrt(p * (1 - p) / 10_000) + 1e-4 and drawn > 0


def samples_of(values, greedy=False, **more):
    """An array (P, n) of figures -> samples of n completions of P prompts."""
    shared = dict(greedy=greedy, reward=None, length=1, stopped=True) | more
    return [dict(prompt=str(i), right=float(v)) | shared for i, row in enumerate(values) for v in row]


def pairs_with(ours, theirs, greedy=False):
    return list(zip(samples_of(ours, greedy), samples_of(theirs, greedy), strict=True))


def test_an_example_of_four_prompts():
    row = compared(pairs_with([[0], [0], [1], [1]], [[1], [1], [1], [0]], greedy=True), "right")
    assert (row["a"], row["b"], row["up"], row["down"], row["p"]) == (0.5, 0.75, 2, 1, 1)
    half = 1.959964 * math.sqrt((3 / 6 + 2 / 6 - (1 / 6) ** 2) / 6)  # Bonett and Price's, as they write it
    assert (row["low"], row["high"]) == pytest.approx((1 / 6 - half, 1 / 6 + half))
    assert row["needed"] == math.ceil((2.801585 * math.sqrt(11 / 16) / 0.25) ** 2) == 87
    assert verdict({"greedy right": row})[-1] == (
        "no difference to see: greedy right +0.250, p = 1; one of this size takes about 87 prompts (power 80 %)"
    )


def test_a_prompt_that_is_repeated_counts_once():
    ours, theirs = [[0], [0], [1]] * 9, [[1], [0], [1]] * 9
    for greedy in (True, False):
        pairs = pairs_with(ours, theirs, greedy)
        for i, pair in enumerate(pairs):
            for sample in pair:
                sample["prompt"] = [dict(role="user", content=str(i % 3))]
        row = compared(pairs, "right")
        assert (row["up"], row["down"], row["p"], row["a"]) == (1, 0, 1, pytest.approx(1 / 3))


def test_the_verdict_is_about_sampled_answers_if_there_are_any():
    ours = samples_of(np.zeros((9, 1)), greedy=True) + samples_of(np.ones((9, 2)), reward=0.5)
    theirs = samples_of(np.ones((9, 1)), greedy=True) + samples_of(np.zeros((9, 2)), reward=0.25)
    figures = comparison(ours, theirs)
    assert [name for name in figures if "reward" in name] == ["sampled reward"]  # no greedy one was scored
    for sample in ours + theirs:
        sample["reward"] = sample["right"]
    assert not any("reward" in name for name in comparison(ours, theirs))  # it says the same
    assert verdict(figures)[-1] == "B is worse: sampled right -1.000, p = 0.0039"
    assert verdict(comparison(ours[:9], theirs[:9]))[-1] == "B is better: greedy right +1.000, p = 0.0039"
    assert verdict(comparison(ours, ours))[-1] == "no difference to see: sampled right +0.000, p = 1"


def simulated(rates, n, rng):
    return (rng.random((len(rates), n)) < rates[:, None]).astype(float)


def test_equal_models_differ_in_5_of_100_evaluations_and_an_effect_is_found_as_often_as_the_formula_says():
    """200 pairs of evaluations without shared luck; 99.8 % of such counts are within the limits."""
    rng = np.random.default_rng(1)
    called, covered, greedy = 0, 0, 0
    for _ in range(200):
        rates = rng.beta(0.5, 0.5, 60)
        row = compared(pairs_with(simulated(rates, 4, rng), simulated(rates, 4, rng)), "right")
        called += row["p"] < 0.05
        covered += row["low"] <= 0 <= row["high"]
        row = compared(pairs_with(simulated(rates, 1, rng), simulated(rates, 1, rng), greedy=True), "right")
        greedy += row["p"] < 0.05
    low, high = binom.ppf([0.001, 0.999], 200, 0.05)
    assert low <= called <= high and low <= 200 - covered <= high
    assert greedy <= high  # an exact test of few whole numbers says so less often

    def evaluation(prompts):
        rates = rng.uniform(0.1, 0.7, prompts)
        return compared(pairs_with(simulated(rates, 4, rng), simulated(rates + 0.1, 4, rng)), "right")

    needed = evaluation(20_000)["needed"]
    low, high = binom.ppf([0.001, 0.999], 200, 0.8)
    assert 50 < needed < 200 and low <= sum(evaluation(needed)["p"] < 0.05 for _ in range(200)) <= high


def nudged(model, size):
    """The model with other weights: a little noise on each."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * weight.std() * torch.randn_like(weight)
    return model


def test_shared_luck_makes_intervals_narrower():
    """At equal samples; by three fifths here, where the weights differ by a tenth of their spread."""
    widths = []
    for seed in (0, 1):
        rows = []
        for change, luck in ((0, 0), (0.1, seed)):
            model, prepared, options = hex_run(P=40, num_samples=4, seed=luck)
            rows.append(run_evaluation(nudged(model, change), prepared, options)[1])
        row = comparison(*rows)["sampled right"]
        widths.append(row["high"] - row["low"])
    assert widths[0] < 0.6 * widths[1]


# ----------------------------------------------------------------------------------------------------------------------
# What changed?


def test_where_completions_part():
    end = 9
    texts = ([5, 7, 7], [5, 8]), ([1, 2], [1, 2]), ([3, end], [3, 4, end]), ([1, 2], [1, 2, 3])
    ours, theirs = zip(*texts, strict=True)
    shared = dict(prompt="p", greedy=True)
    a = [shared | dict(ids=ids, right=right) for ids, right in zip(ours, (0, 1, 1, 1), strict=True)]
    b = [shared | dict(ids=ids, right=right) for ids, right in zip(theirs, (1, 1, 0, 1), strict=True)]
    pairs = pairs_of(a, b, lambda ids: "".join(str(i) for i in ids if i != end))
    assert [(pair["at"], pair["flip"]) for pair in pairs] == [(1, 1), (None, 0), (1, -1), (None, 0)]
    assert [pair.get("tokens") for pair in pairs] == [["7", "8"], None, ["<end>", "4"], None]
    assert pairs[0]["shared"] == "5" and pairs[2]["a"] is a[2]
    for pair in pairs[::2]:
        pair |= dict(logprobs_a=[math.log(0.9), math.log(0.1)], logprobs_b=[math.log(0.25), math.log(0.75)])
    lines = partings([*pairs, pairs[0]])
    assert lines[0] == "2 of 5 pairs are the same; the others part first at"
    assert [line.split() for line in lines[2:]] == [
        ["2", "2", "0", '"7"', "0.900", "->", "0.250", '"8"', "0.100", "->", "0.750"],
        ["1", "0", "1", '"<end>"', "0.900", "->", "0.250", '"4"', "0.100", "->", "0.750"],
    ]
    assert partings(pairs[1:2]) == ["1 of 1 pairs are the same"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models that differ in one weight, as Hugging Face folders, and one with another tokenizer."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("a", "b", "other"):
        model = make_model("gpt2", vocab_size=257)
        with torch.no_grad():
            model.embedding.weight[65, 0] += (name == "b") * 2.0
        save_pretrained(model, folder / name)
        get_tokenizer("bytes").save(folder / name)
    spec = json.loads((folder / "other/tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "other/tokenizer.json").write_text(json.dumps(spec))
    return folder


def compare_by(*words):
    """What the command does with these words -> the records of its file, Prepared of both, the options."""
    options, given, places = read_settings(EvaluateSettings, [*words, *WORDS], positional="folders")
    models, file = prepare_pair(options, given, *places)
    compare(options, models, file)
    return [json.loads(line) for line in file.read_text().splitlines()], models, options


@pytest.fixture(autouse=True)
def current_folder(tmp_path, monkeypatch):
    """Samples of models that are no runs are written into its out/."""
    monkeypatch.chdir(tmp_path)


def test_a_model_and_itself_have_no_parting(folders, capsys, monkeypatch):
    """And one model is in memory at a time."""
    models = []

    def loaded(*arguments, load=evaluate.loaded):
        assert all(model() is None for model in models)
        model = load(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(evaluate, "loaded", loaded)
    (first, *pairs), *_ = compare_by(f"{folders}/a", f"{folders}/a", "--num_prompts=9", "--num_samples=3")
    assert len(pairs) == 36 and all(pair["at"] is None and pair["a"] == pair["b"] for pair in pairs)
    assert all(row["p"] == 1 and row["low"] <= 0 <= row["high"] for row in first["comparison"].values())
    out = capsys.readouterr().out.splitlines()
    assert out[-3:-1] == ["no difference to see: sampled right +0.000, p = 1", "36 of 36 pairs are the same"]
    assert out[-1] == "pairs in out/a/evaluation-addition-pairs.jsonl"


@torch.no_grad()
def test_models_that_differ_in_a_weight_part_where_naive_loops_do(folders):
    words = [f"{folders}/a", f"{folders}/b", "--num_prompts=8", "--num_samples=3", "--temperature=0.8", "--seed=4"]
    (first, *pairs), (ours, theirs), _ = compare_by(*words)
    models, parted = [load_run(each.origin, "cpu").model for each in (ours, theirs)], 0
    assert [first[name]["checkpoint"] for name in "ab"] == [f"{folders}/a", f"{folders}/b"]
    for i, pair in enumerate(pairs):
        group, place = divmod(i, 4)
        temperature, row = (0.8, group * 3 + place - 1) if place else (0, group)
        prompt = ours.encode(pair["a"]["prompt"])
        (a, a_logprobs), (b, b_logprobs) = [
            generate_naive(model, prompt, 12, temperature, ours.tokenizer.stop_tokens, 4, row) for model in models
        ]
        assert (pair["a"]["ids"], pair["b"]["ids"]) == (a, b)
        at = next((t for t, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        assert pair["at"] == at
        if at is not None:
            parted += 1
            assert pair["shared"] == ours.tokenizer.decode(a[:at])
            taken = pair["logprobs_a"][0], pair["logprobs_b"][1]
            assert taken == pytest.approx((a_logprobs[at], b_logprobs[at]), abs=1e-4)
            for name, model in zip("ab", models, strict=True):
                logits = model.logits(model(torch.tensor([prompt + a[:at]])))[0, -1] / (temperature or 1)
                expected = logits.log_softmax(-1)[[a[at], b[at]]].tolist()
                assert pair[f"logprobs_{name}"] == pytest.approx(expected, abs=1e-4)
    assert 5 < parted < 32


def test_other_tokenizers_are_compared_by_their_scores(folders, capsys):
    records, *_ = compare_by(f"{folders}/a", f"{folders}/other", "--num_prompts=3")
    assert len(records) == 1 and "comparison" in records[0]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "the tokenizers differ, so only the scores are compared"


def test_the_task_is_the_runs_and_two_tasks_are_refused(folders, tmp_path, monkeypatch):
    """A run beside the model that it began from: its options hold for both, its limit too."""
    for task in ("addition", "countdown"):
        options = dict(n_layer=1, n_embd=16, n_head=4, block_size=96, max_iters=1, batch_size=2, eval_prompts=0)
        train_sft.main(prepare(SFTSettings(task=task, device="cpu", digits=2, out_dir=str(tmp_path / task), **options)))
    run, model = str(tmp_path / "addition"), str(folders / "a")
    prepare_options = EvaluateSettings(num_prompts=3)
    monkeypatch.setattr("runs.prepare.refuse_lengths", lambda prepared: None)  # of the models' 32 tokens
    for places, wanted in (((model, run), tmp_path), ((run, model), "out/a")):
        (a, b), file = prepare_pair(prepare_options, set(), *places)
        assert a.settings.digits == b.settings.digits == 2 and a.longest() == b.longest() == (6, 10)
        assert (a.settings.init_from, b.settings.init_from) == places
        assert file.name == "evaluation-addition-pairs.jsonl" and file.is_relative_to(wanted)
    with pytest.raises(SnugError, match="addition is a run of addition, .* of countdown; name the task of both, such"):
        prepare_pair(prepare_options, set(), run, str(tmp_path / "countdown"))
    (a, b), _ = prepare_pair(EvaluateSettings(task="countdown"), {"task"}, run, str(tmp_path / "countdown"))
    assert a.settings.task == b.settings.task == "countdown"
    with pytest.raises(SnugError, match="a has no task of its own"):
        prepare_pair(prepare_options, set(), model, model)


def test_the_command_takes_one_folder_or_two(folders, tmp_path):
    """In a process of its own."""
    command = [sys.executable, HOME / "evaluate.py", folders / "a", "--num_prompts=4", folders / "b", *WORDS]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert f"{folders}/a: addition, 4 prompts" in run.stdout and f"{folders}/b: addition, 4 prompts" in run.stdout
    assert run.stdout.splitlines()[-1] == "pairs in out/b/evaluation-addition-pairs.jsonl"
    assert os.listdir("out") == ["b"]
    with pytest.raises(SnugError, match="one argument too many: c"):
        read_settings(EvaluateSettings, ["a", "--seed=1", "b", "c"], positional="folders")
