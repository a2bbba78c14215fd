"""Two models with the same luck: p-values, intervals and how often they hold, by other libraries and simulation."""

import json
import math
import weakref
from collections import defaultdict
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import evaluate
import grpo
import train_sft
from data.pairs import MOST, compared, comparison, sign_flip, verdict
from evaluate import compare
from helpers.errors import assert_refused
from helpers.models import make_model
from helpers.tasks import COUNTDOWN
from runs.evaluation import prepare_pair
from runs.prepare import prepare
from settings import EvaluateSettings, GRPOSettings, SFTSettings
from snug.options import SnugError, read_settings
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ["--task=addition", "--digits=1", "--max_new_tokens=12", "--device=cpu"]


def test_signs_of_ones_are_mcnemars_test():
    for up, down in [*product(range(8), range(8)), (400, 350), (1000, 0)]:
        expected = binomtest(up, up + down, 0.5).pvalue if up + down else 1
        ones = np.repeat([1.0, -1.0, 0.0], [up, down, 3])
        assert sign_flip(ones) == pytest.approx(expected, rel=1e-9)
        assert sign_flip(-ones / 8) == pytest.approx(expected, rel=1e-9)


RNG = np.random.default_rng(3)
DIFFERENCES = [RNG.integers(-3, 5, n) / 4 for n in (0, 1, 2, 5, 9)]
DIFFERENCES += [RNG.integers(-30, 40, 12) / 7, RNG.integers(-9999, 9999, 11) / 3, RNG.normal(size=12)]
DIFFERENCES += [np.array([0.1, 0.2, -0.3, 0.3]), np.array([1e20, 2e20, -3e20, 1e20]), np.array([1e-5, 1e-5])]


@pytest.mark.parametrize("d", DIFFERENCES, ids=str)
def test_signs_of_all_differences_are_an_enumeration(d):
    """Sums that are equal but for rounding are equal: 0.1 + 0.2 and 0.3."""
    sums = np.array([abs(np.dot(signs, d)) for signs in product((-1, 1), repeat=len(d))])
    expected = np.mean(sums >= abs(d.sum()) * (1 - 1e-9) - 1e-12)
    assert sign_flip(np.append(d, [0, 0])) == pytest.approx(expected)


def test_signs_of_many_differences_are_drawn_as_often():
    """MOST units are not enough for these, so they are rounded. 5,000 draws; five standard deviations."""
    d = np.random.default_rng(5).normal(0.15, 1, 300) * 1000
    assert abs(d).sum() > MOST
    signs = np.random.default_rng(6).choice([-1, 1], (5_000, 300))
    expected = np.mean(abs(signs @ d) >= abs(d.sum()))
    p = sign_flip(d)
    assert 0.001 < p < 0.2 and abs(p - expected) < 5 * math.sqrt(p * (1 - p) / 5_000)


def samples_of(values, greedy=False, **more):
    """An array (P, n) of figures -> samples of n completions of P prompts."""
    shared = dict(greedy=greedy, reward=None, length=1, stopped=True) | more
    return [dict(prompt=str(i), right=float(v)) | shared for i, row in enumerate(values) for v in row]


@pytest.mark.parametrize(
    "prompts, mean, half, expected",
    [  # half: Bonett and Price's, as they write it
        ([(0, 1), (0, 1), (1, 1), (1, 0)], 1 / 6, (3 / 6 + 2 / 6 - 1 / 36) / 6, dict(a=0.5, b=0.75, p=1, up=2, down=1)),
        (
            [(0, 1 / 2), (1 / 4, 1 / 2), (1 / 2, 3 / 4), (1, 1)], 1 / 6, ((3 / 4 + 1 / 8) / 6 - 1 / 36) / 6,
            dict(a=7 / 16, b=11 / 16, p=2 / 8, up=3, down=0),
        ),
        ([(0.1 + 0.2, 0.3)] * 6, 0, 2 / 8 / 8, dict(a=0.3, b=0.3, p=1, up=0, down=0)),  # not a difference
    ],
)  # fmt: skip
def test_the_interval_counts_two_prompts_more_by_as_much_as_the_largest_difference(prompts, mean, half, expected):
    """Of differences of 1/2, 1/4, 1/4, 0: 1/2 and -1/2 beside them. Without a difference 1 and -1."""
    half = 1.959964 * math.sqrt(half)
    assert compared(prompts) == pytest.approx(expected | dict(low=mean - half, high=mean + half))


def test_a_prompt_that_is_repeated_counts_once():
    for greedy in (True, False):
        ours, theirs = [samples_of([[0], [0], [1]] * 9, greedy), samples_of([[1], [0], [1]] * 9, greedy)]
        for samples in (ours, theirs):
            for i, sample in enumerate(samples):
                sample["prompt"] = [dict(role="user", content=str(i % 3))]
        [(_, row), *_] = comparison(ours, theirs).items()
        assert (row["up"], row["down"], row["p"], row["a"]) == (1, 0, 1, pytest.approx(1 / 3))


def test_every_figure_is_a_mean_over_prompts():
    """Three prompts, two samples each. Rewards are 3 apart."""
    ours, theirs = samples_of([[1, 0], [0, 0], [0, 1]]), samples_of([[1, 1], [0, 0], [1, 1]])
    for a, b in zip(ours, theirs, strict=True):
        a["reward"], b["reward"] = 1.0, 4.0
    assert verdict(comparison(ours, theirs)) == [
        "sampled right: A 0.333, B 0.667, B - A +0.333 (-0.151 to +0.551), up in 2 and down in 0, p = 0.5",
        "sampled reward: A 1.000, B 4.000, B - A +3.000 (-0.304 to +3.904), up in 3 and down in 0, p = 0.25",
        "no difference to see: sampled right, p = 0.5",
    ]
    theirs[1]["reward"] = None
    assert list(comparison(ours, theirs)) == ["sampled right"]


def test_the_verdict_is_about_sampled_answers_if_there_are_any():
    ours = samples_of(np.zeros((9, 1)), greedy=True) + samples_of(np.ones((9, 2)), reward=0.5)
    theirs = samples_of(np.ones((9, 1)), greedy=True) + samples_of(np.zeros((9, 2)), reward=0.25)
    figures = comparison(ours, theirs)
    assert [name for name in figures if "reward" in name] == ["sampled reward"]  # no greedy one was scored
    for sample in ours + theirs:
        sample["reward"] = sample["right"]
    assert not any("reward" in name for name in comparison(ours, theirs))  # it says the same
    assert verdict(figures)[-1] == "B is worse: sampled right, p = 0.0039"
    assert verdict(comparison(ours[:9], theirs[:9]))[-1] == "B is better: greedy right, p = 0.0039"
    assert verdict(comparison(ours, ours))[-1] == "no difference to see: sampled right, p = 1"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models that differ in one weight, as Hugging Face folders, and one with another tokenizer."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("a", "b", "other"):
        model = make_model("gpt2", vocab_size=257)
        with torch.no_grad():
            model.embedding.weight[65, 0] += (name == "b") * 2.0
        save_pretrained(model, folder / name, get_tokenizer("bytes"))
    spec = json.loads((folder / "other/tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "other/tokenizer.json").write_text(json.dumps(spec))
    return folder


def compare_by(capsys, *words):
    """What the command prints with these words -> its lines."""
    options, given, places = read_settings(EvaluateSettings, [*words, *WORDS], positional="folders")
    compare(options, prepare_pair(options, given, *places))
    return capsys.readouterr().out.splitlines()


def test_a_model_and_itself_are_equal(folders, capsys, monkeypatch):
    """And one model is in memory at a time, and nothing is written."""
    models = []

    def load_run(*arguments, load=evaluate.load_run):
        assert all(model() is None for model in models)
        run = load(*arguments)
        models.append(weakref.ref(run.model))
        return run

    monkeypatch.setattr(evaluate, "load_run", load_run)
    before = sorted((folders / "a").iterdir())
    out = compare_by(capsys, f"{folders}/a", f"{folders}/a", "--num_prompts=9", "--num_samples=3")
    assert len(models) == 2 and out[:-3] == 2 * out[: (len(out) - 3) // 2]
    assert [line.partition(": A ")[0] for line in out[-3:-1]] == ["greedy right", "sampled right"]
    assert all("B - A +0.000 (-0." in line and "up in 0 and down in 0, p = 1" in line for line in out[-3:-1])
    assert out[-1] == "no difference to see: sampled right, p = 1"
    assert sorted((folders / "a").iterdir()) == before


def letters(completions, **columns):
    return [float(len(set(text))) for text in completions]


def test_the_table_is_that_of_both_models_samples(folders, capsys):
    """A's column and B's are the scores of each alone, also where B's tokenizer is another."""
    words = ["--num_prompts=8", "--num_samples=3", "--temperature=0.8", "--seed=4", "--reward_weights=0.5"]
    words.append(f"--reward_funcs={__name__}:letters")
    for other in ("b", "other"):
        out, means = compare_by(capsys, f"{folders}/a", f"{folders}/{other}", *words), []
        for name in ("a", other):
            options, given, places = read_settings(EvaluateSettings, [*words, *WORDS], positional="folders")
            model = prepare_pair(options, given, f"{folders}/{name}", f"{folders}/{name}")[0]
            _, samples = evaluate.main(options, model, None)
            by_prompt = defaultdict(list)
            for sample in samples:
                if not sample["greedy"]:
                    by_prompt[sample["prompt"]].append((sample["right"], sample["reward"]))
            means.append(np.mean([np.mean(values, axis=0) for values in by_prompt.values()], axis=0))
        shown = [line.split() for line in out if line.startswith("sampled r")]
        assert [row[1] for row in shown] == ["right:", "reward:"]
        assert (means[0] != means[1]).any() or other != "b"  # which has two letters exchanged
        assert [row[3:6:2] for row in shown] == [[f"{x:.3f}," for x in pair] for pair in zip(*means, strict=True)]


def test_a_file_of_samples_of_two_models_is_refused(folders):
    with pytest.raises(SnugError, match="samples_file needs one model, not two; leave it out"):
        prepare_pair(EvaluateSettings(samples_file="x.jsonl", task="addition"), set(), str(folders), str(folders))


def test_the_task_is_the_runs_or_the_seconds(folders, tmp_path, monkeypatch):
    """A run beside the model that it began from: its options hold for both, its limit too."""
    for task, own in (("addition", dict(digits=2)), (COUNTDOWN, {})):
        options = own | dict(n_layer=1, n_embd=16, n_head=4, block_size=96, max_iters=1, batch_size=2, eval_prompts=0)
        train_sft.main(prepare(SFTSettings(task=task, device="cpu", out_dir=str(tmp_path / task), **options)))
    run, model = str(tmp_path / "addition"), str(folders / "a")
    prepare_options = EvaluateSettings(num_prompts=3)
    monkeypatch.setattr("runs.prepare.refuse_lengths", lambda prepared: None)  # of the models' 32 tokens
    for places in ((model, run), (run, model)):
        a, b = prepare_pair(prepare_options, set(), *places)
        assert a.settings.digits == b.settings.digits == 2 and a.longest() == b.longest() == (6, 10)
        assert (a.settings.init_from, b.settings.init_from) == places
    longer = dict(digits=2, max_new_tokens=32, max_iters=1, batch_size=2, group_size=2, eval_prompts=0, device="cpu")
    grpo.main(prepare(GRPOSettings(**longer, init_from=run, out_dir=str(tmp_path / "run32"))))
    assert prepare_pair(prepare_options, set(), model, str(tmp_path / "run32"))[0].settings.max_new_tokens == 32
    for order in (("addition", COUNTDOWN), (COUNTDOWN, "addition")):
        a, b = prepare_pair(prepare_options, set(), *(str(tmp_path / name) for name in order))
        assert a.settings.task == b.settings.task == order[1]
    a, b = prepare_pair(EvaluateSettings(task=COUNTDOWN), {"task"}, run, str(tmp_path / COUNTDOWN))
    assert a.settings.task == b.settings.task == COUNTDOWN
    assert_refused("a has no task of its own", prepare_pair, prepare_options, set(), model, model)
