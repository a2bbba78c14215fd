"""pass@k, majority votes and intervals against enumeration and simulation; the command on runs that sample ragged completions."""

import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import hypothesis
import pytest
import torch
from conftest import make_flat_model, make_model
from hypothesis import strategies as st
from test_commands import command

import evaluate
import train_sft
from data import make_task
from data.rewards import Scoring
from data.scores import Z, majority, pass_at, powers, scores_of_prompts, summarize, table, wilson
from data.task import Task
from evaluate import answers_as_run, run_evaluation, scores_as_run
from memory import Limits
from options import SnugError, read_settings
from pretrained.tensors import save_pretrained
from runs.checkpoint import newest
from runs.loading import Run, load_run
from runs.prepare import prepare
from runs.questions import Questions, prepare_questions, settings_asked, write_lines
from settings import EvaluateSettings, GRPOSettings, RewardOptions, SFTSettings
from tokenizer import get_tokenizer

HOME = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small are only slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -----------------------------------------------------------------------------
# The estimators


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


SAMPLES = st.lists(st.tuples(st.sampled_from([None, "a", "b", 7, (1, 2)]), st.booleans()), min_size=1, max_size=8)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(SAMPLES)
def test_pass_is_the_mean_over_every_subset_and_majority_the_vote_of_all(group):
    """An answer may be right in one sample and wrong in another: cut off, or in another format."""
    n, right = len(group), sum(good for _, good in group)
    for k in range(1, n + 1):
        assert pass_at(k, n, right) == pytest.approx(listed(group, k, lambda s: any(good for _, good in s)), abs=1e-15)
    assert majority(*zip(*group, strict=True)) == pytest.approx(float(share_of(group)), abs=1e-15)


def test_the_example_of_the_docstring():
    assert (pass_at(2, 4, 2), majority([7, 7, 8, None], [1, 1, 0, 0])) == (5 / 6, 1)
    assert majority([None] * 3, [0, 0, 0]) == 0 and majority([None, None, 1], [0, 0, 1]) == 1


def test_large_numbers_neither_overflow_nor_round_to_nothing():
    assert pass_at(1000, 2000, 1) == 0.5 and pass_at(1500, 2000, 1000) == 1.0 and pass_at(1, 10**6, 1) == 1e-6
    assert majority(["a"] * 31 + ["b"] * 33, [1] * 31 + [0] * 33) == 0


def test_many_samples_take_no_longer_than_a_few_each():
    """A list of all the subsets, or a table of all the counts of votes, would never end."""
    n = 2**14
    scores = scores_of_prompts([True], [[(i // 2, i < 2) for i in range(n)]])
    assert scores[f"maj_at_{n}"] == [2 / n] and scores["pass_at_8192"] == [pytest.approx(0.75, abs=1e-4)]


def test_the_k_that_are_reported():
    assert [powers(n) for n in (1, 2, 3, 10, 16)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 10], [1, 2, 4, 8, 16]]
    assert list(scores_of_prompts([True], [])) == ["pass_at_1"]
    names = ["pass_at_1", "pass_at_1_sampled", "pass_at_2", "pass_at_3", "maj_at_3"]
    assert list(scores_of_prompts([True], [[("a", True), ("b", False), ("a", True)]])) == names


def test_wilson_is_where_the_normal_test_turns():
    """Its ends are the p that are Z standard deviations, of their own, from the mean."""
    for n, right in ((1, 0), (1, 1), (7, 3), (7, 7), (200, 0), (200, 1), (200, 77)):
        for p in wilson(right / n, n):
            assert 0 <= p <= 1
            if 1e-12 < p < 1 - 1e-12:
                assert abs(right / n - p) == pytest.approx(Z * math.sqrt(p * (1 - p) / n), rel=1e-9)
    assert wilson(0.0, 9)[0] == pytest.approx(0, abs=1e-15) and wilson(1.0, 9)[1] == pytest.approx(1)


def test_wilson_covers_a_known_p():
    """Exactly, from the binomial distribution: 95 % on average over p, and nowhere near as few as the plain normal interval's."""
    n, covered = 50, []
    for p in (i / 100 for i in range(2, 99)):
        ways = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        covered.append(sum(way for c, way in enumerate(ways) if wilson(c / n, n)[0] <= p <= wilson(c / n, n)[1]))
    assert 0.945 < sum(covered) / len(covered) < 0.96 and min(covered) > 0.91


def test_intervals_cover_what_is_known_of_simulated_prompts():
    """Prompts whose chance p of the right answer is uniform, wrong answers all different: pass@k is k / (k + 1) and maj@8 is 19/24."""
    rng, P, n, rounds = random.Random(0), 40, 8, 400
    truth = {
        "pass_at_1": 1 / 2,
        "pass_at_1_sampled": 1 / 2,
        "pass_at_4": 4 / 5,
        "pass_at_8": 8 / 9,
        "maj_at_8": 19 / 24,
    }
    hits, means = Counter(), Counter()
    for _ in range(rounds):
        chances = [rng.random() for _ in range(P)]
        greedy = [dict(answer=1, right=rng.random() < p, reward=0.5, length=1, stopped=True) for p in chances]
        right = [rng.random() < p for p in chances for _ in range(n)]
        answers = ["right" if good else i for i, good in enumerate(right)]
        both = zip(answers, right, strict=True)
        sampled = [dict(answer=answer, right=good, reward=0.5, length=1, stopped=True) for answer, good in both]
        found = summarize(greedy, sampled, n, P)
        for name, value in truth.items():
            low, high = found["intervals"][name]
            hits[name] += low <= value <= high
            means[name] += found["scores"][name] / rounds
    for name, value in truth.items():
        assert means[name] == pytest.approx(value, abs=0.016), name  # unbiased: four standard errors of zeros and ones
        assert hits[name] / rounds > 0.92, name
    assert hits["pass_at_1_sampled"] / rounds > 0.97  # values between 0 and 1 vary less than Wilson grants


# -----------------------------------------------------------------------------
# A model that is asked. Its 16 tokens are hexadecimal digits; 3 ends a completion.


class Hex:
    name, stop_tokens, n_vocab = "hex", (3,), 16

    def encode(self, text):
        return [int(digit, 16) for digit in text]

    def decode(self, ids):
        return "".join(f"{i:x}" for i in ids)

    encode_prompt = encode

    def stopper(self, text):
        return None


class Digits(Task):
    """Is the completion's first digit in the row's `wanted`?"""

    columns = ("wanted",)

    def propose(self, rng):
        prompt = "".join(rng.choice("0124567") for _ in range(rng.randint(1, 5)))
        return {"prompt": prompt, "wanted": random.Random(prompt).sample("0123456789abcdef", 6)}

    def identity(self, row):
        return row["prompt"]

    def is_right(self, completion, wanted):
        return completion[:1] in wanted

    def longest(self, encode):
        return 5, 11


class First(Digits):
    def answer_of(self, completion):
        return completion[:1] or None


class Parts(Digits):
    def reward_functions(self):
        def brief(prompts, completions, completion_ids, **columns):
            return [None if text.startswith("0") else len(text) / 10 for text in completions]

        return [(self.rewards, 1.0), (brief, 0.5)]


def hex_questions(cls=First, P=13, num_samples=6, **options):
    """-> Run, Questions, EvaluateSettings, for `run_evaluation`."""
    run_settings = SFTSettings(batch_size=8, logits_chunk_mb=0.5)
    task = cls(run_settings)
    run = Run(make_flat_model("llama", n_layer=1), Hex(), run_settings, 7, Path("out/x/checkpoint-000007"))
    settings = EvaluateSettings(num_prompts=P, num_samples=num_samples, **options)
    functions, weights = map(list, zip(*task.reward_functions(), strict=True))
    scoring = Scoring(task, functions, weights, RewardOptions(), 8)
    return run, Questions(run_settings, scoring, task.prompts("test", range(P)), None), settings


def recomputed(samples, n):
    """Samples as they are in the file -> every score, by enumeration."""
    groups = [samples[i : i + n + 1] for i in range(0, len(samples), n + 1)]
    assert all(
        [s["greedy"] for s in group] == [True] + [False] * n and len({s["prompt"] for s in group}) == 1
        for group in groups
    )
    pairs = [[(s["answer"], s["right"]) for s in group[1:]] for group in groups]
    scores = {"pass_at_1": [group[0]["right"] for group in groups]}
    for k in powers(n):
        scores["pass_at_1_sampled" if k == 1 else f"pass_at_{k}"] = [
            listed(pair, k, lambda s: any(r for _, r in s)) for pair in pairs
        ]
    scores[f"maj_at_{n}"] = [share_of(pair) for pair in pairs]
    return {name: sum(values) / len(groups) for name, values in scores.items()}


def test_the_scores_are_those_of_the_samples():
    run, questions, settings = hex_questions()
    head, samples = run_evaluation(run, questions, settings)
    assert head["scores"] == pytest.approx(recomputed(samples, 6)) and len(samples) == 13 * 7
    assert 0 < head["scores"]["pass_at_1_sampled"] < head["scores"]["maj_at_6"] < head["scores"]["pass_at_6"] < 1
    assert head["settings"]["max_new_tokens"] == 12 and head["checkpoint"] == "out/x/checkpoint-000007"
    wanted = {row["prompt"]: row["wanted"] for row in questions.rows}
    assert len({s["length"] for s in samples}) > 5  # ragged
    assert 0 < sum(s["stopped"] for s in samples) < len(samples)  # and some cut off
    for s in samples:
        assert s["length"] == len(s["completion"]) + s["stopped"]
        assert s["answer"] == ((s["completion"][:1] or None) if s["stopped"] else None)
        assert s["right"] == bool(s["stopped"] and s["completion"][:1] in wanted[s["prompt"]]) == s["reward"]
    drawn = [s for s in samples if not s["greedy"]]
    means = {"length": sum(s["length"] for s in drawn) / 78, "stopped": sum(s["stopped"] for s in drawn) / 78}
    assert head["means"] == pytest.approx(means)


@torch.no_grad()
def test_the_logprob_is_the_whole_completions_at_its_temperature():
    run, questions, settings = hex_questions(P=5, num_samples=2, temperature=0.7)
    for s in run_evaluation(run, questions, settings)[1]:
        prompt = run.tokenizer.encode(s["prompt"])
        completion = run.tokenizer.encode(s["completion"]) + [3] * s["stopped"]
        tokens = torch.tensor([prompt + completion], device=run.model.device)
        logits = run.model.logits(run.model(tokens))[0, len(prompt) - 1 : -1].double() / (1 if s["greedy"] else 0.7)
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None]).sum()
        assert s["logprob"] == pytest.approx(float(expected), abs=1e-4)


def test_neither_pieces_nor_an_out_of_memory_change_anything(monkeypatch, capsys):
    """A few prompts at a time, and a device on which three completions are too many to decode."""
    whole = run_evaluation(*hex_questions())
    monkeypatch.setattr(evaluate, "TOKENS_AT_ONCE", 5 * 6 * 12)  # 5 prompts
    calls, sample_groups = [], evaluate.sample_groups

    def small_device(model, prompts, group_size, *rest, max_batch, **options):
        calls.append((len(prompts), group_size, max_batch))
        assert options["chunk_mb"] == 0.5
        if max_batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return sample_groups(model, prompts, group_size, *rest, max_batch=max_batch, **options)

    monkeypatch.setattr(evaluate, "sample_groups", small_device)
    most = 2
    cut = run_evaluation(*hex_questions())
    assert calls == [(13, 1, 8), (13, 1, 4), (13, 1, 2), (5, 6, 2), (5, 6, 2), (3, 6, 2)]
    for ours, theirs in zip(cut[1], whole[1], strict=True):
        assert ours == theirs | {"logprob": pytest.approx(theirs["logprob"], abs=1e-4)}
    assert cut[0] == whole[0]
    assert "Tried to allocate 1 GiB; going on with max_eval_batch=2" in capsys.readouterr().err
    most = 0
    message = "decoding one completion at a time: CUDA out of memory.*; try a smaller max_new_tokens than 12"
    with pytest.raises(SnugError, match=message):
        run_evaluation(*hex_questions())


def test_named_parts_of_the_reward_are_means_of_what_was_said():
    head, samples = run_evaluation(*hex_questions(Parts))
    drawn = [s for s in samples if not s["greedy"]]
    said = [s["reward/brief"] for s in drawn if s["reward/brief"] is not None]
    assert 0 < len(said) < len(drawn) and head["means"]["reward/brief"] == pytest.approx(sum(said) / len(said))
    for s in samples:  # of a task that does not say where its answers are
        assert s["answer"] == ((s["completion"] or None) if s["stopped"] else None)
    names = ["length", "stopped", "reward_greedy", "reward", "reward/rewards", "reward/brief"]
    assert list(head["means"]) == names and all(s["right"] == s["reward/rewards"] for s in samples)
    totals = [s["reward/rewards"] + 0.5 * (s["reward/brief"] or 0.0) for s in samples]
    assert [s["reward"] for s in samples] == pytest.approx(totals)
    assert any(line.startswith("  reward/brief") and line.endswith("mean") for line in table(head))


def test_repeated_prompts_make_no_interval_narrower():
    run, questions, settings = hex_questions(P=4, num_samples=2)
    for row in questions.rows:
        row["prompt"] = [row["prompt"]]  # as messages: neither text nor what a set takes
    run.tokenizer.encode_prompt = lambda prompt: run.tokenizer.encode(prompt[0])
    questions.rows *= 5
    settings.num_prompts = 20
    head, _ = run_evaluation(run, questions, settings)
    assert head["different_prompts"] == 4 and head["intervals"]["pass_at_1"] == wilson(head["scores"]["pass_at_1"], 4)
    assert "20 prompts of the test split (4 different), 2 samples each" in table(head)[0]


def test_temperature_0_asks_once():
    run, questions, settings = hex_questions(num_samples=1, temperature=0.0)
    head, samples = run_evaluation(run, questions, settings)
    assert list(head["scores"]) == ["pass_at_1"] and len(samples) == 13 and all(s["greedy"] for s in samples)
    assert head["means"]["length"] == pytest.approx(sum(s["length"] for s in samples) / 13)
    assert "each at temperature" not in table(head)[0]


def test_an_answer_may_be_anything_that_votes_and_is_written_as_text(tmp_path):
    class Fractions(Digits):
        def answer_of(self, completion):
            return Fraction(len(completion), 7)

    head, samples = run_evaluation(*hex_questions(Fractions))
    assert head["scores"] == pytest.approx(recomputed(samples, 6))
    write_lines(tmp_path / "x", [head | {"broken": math.nan}, *samples])
    first, *lines = map(json.loads, (tmp_path / "x").read_text().splitlines())
    assert first["broken"] is None
    answers = [s["answer"] for s in samples]
    assert [s["answer"] for s in lines] == [answer if answer is None else str(answer) for answer in answers]


def test_prompts_that_leave_no_room_are_refused_and_little_room_is_told(capsys):
    run, questions, settings = hex_questions()
    questions.rows[3]["prompt"] = "1" * 32
    with pytest.raises(SnugError, match="prompts have up to 32 tokens, and this model takes 32"):
        run_evaluation(run, questions, settings)
    questions.rows[3]["prompt"] = "1" * 30
    head, samples = run_evaluation(run, questions, settings)
    assert max(s["length"] for s in samples) == head["settings"]["max_new_tokens"] == 2
    assert capsys.readouterr().err == "note: completions are cut to 2 tokens: prompts have up to 30 of 32\n"


# -----------------------------------------------------------------------------
# A run that is asked


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run on lines of a file, whose demonstrations are mostly right; on the prompts of the train split alone."""
    folder, rng = tmp_path_factory.mktemp("evaluate"), random.Random(0)
    names = ("prompt", "answer", "demonstration")
    rows = [(f"q{i}", rng.choice("01"), rng.choice(["0", "1", "1", "22"])) for i in range(400)]
    lines = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines))
    options = dict(n_layer=1, n_embd=32, block_size=16, batch_size=32, max_iters=30, learning_rate=5e-3, eval_prompts=0)
    settings = SFTSettings(task="jsonl", data_file=str(folder / "rows.jsonl"), out_dir=str(folder / "run"), **options)
    train_sft.main(prepare(settings))
    return folder / "run"


def questions_of(folder, *words):
    """What the command makes of its words -> Questions, EvaluateSettings."""
    settings, given, place = read_settings(EvaluateSettings, [str(folder), *words], positional="folder")
    return prepare_questions(settings, given, place), settings


def test_the_command(run_folder):
    """In a process of its own, its stdout a pipe: the table, the file, and that the two say the same."""
    words = ["--num_samples=6", "--num_prompts=30", "--temperature=0.9", "--show=2"]
    run = subprocess.run([sys.executable, "evaluate.py", run_folder, *words], cwd=HOME, capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    file = run_folder / "evaluation-jsonl-test.jsonl"
    head, *samples = map(json.loads, file.read_text().splitlines())
    assert list(samples[0]) == "prompt completion answer right reward stopped length greedy logprob".split()
    assert head["scores"] == pytest.approx(recomputed(samples, 6)) and 0 < head["scores"]["pass_at_1_sampled"] < 1
    assert (head["checkpoint"], head["settings"]["task"]) == (str(newest(run_folder)), "jsonl")
    assert head["settings"]["num_samples"] == 6
    lines = run.stdout.splitlines()
    start = (
        f"{newest(run_folder)}: jsonl, 30 prompts of the test split, 6 samples each at temperature 0.9; 95 % intervals"
    )
    assert lines[0] == start and lines[-1] == f"samples in {file}" and lines[1:-3] == table(head)[1:]
    shown = [f"  {'right' if s['right'] else 'wrong'}  {s['prompt']!r} -> {s['completion']!r}" for s in samples[0:14:7]]
    assert lines[-3:-1] == shown
    names = ["pass@1", "pass@1", "pass@2", "pass@4", "pass@6", "maj@6", "length", "stopped"]
    assert [line.split()[0] for line in lines[1:-3]] == names
    for line, (name, mean) in zip(lines[1:7], head["scores"].items(), strict=True):
        low, high = head["intervals"][name]
        assert line.split()[1:5] == [f"{mean:.3f}", f"{low:.3f}", "to", f"{high:.3f}"]
    assert lines[1].endswith("   greedy") and lines[2].endswith("   mean of 6 samples")
    assert [path.name for path in run_folder.iterdir() if path.name.startswith(".")] == []
    test_rows = make_task(load_run(run_folder).settings).rows["test"]
    assert {s["prompt"] for s in samples} <= {row["prompt"] for row in test_rows}


def test_without_options_it_is_the_loops_own_evaluation(run_folder):
    run = load_run(run_folder)
    questions, settings = questions_of(run_folder, "--num_prompts=40", "--samples_file=none")
    head, samples = run_evaluation(run, questions, settings)
    scores, limits = head["scores"], Limits(run.settings, print)
    asked = run.settings, run.model, run.tokenizer, questions.scoring, len(questions.rows)
    answers = answers_as_run(*asked, limits)
    assert [answer for both in zip(*answers, strict=True) for answer in both] == samples
    assert max(answer["length"] for answer in answers[1]) == 3  # the longest answer and the stop token
    its = scores_as_run([answers])
    assert its == scores | {name.replace("pass_at_1", "eval_reward_mean"): mean for name, mean in scores.items()}
    assert questions.file is None
    assert 0 < scores["pass_at_1_sampled"] < 1


def test_a_hugging_face_folder_is_asked_what_the_command_names(tmp_path, capsys):
    save_pretrained(make_model("gpt2", vocab_size=257), tmp_path / "model")
    get_tokenizer("bytes").save(tmp_path / "model")
    questions, settings = questions_of(tmp_path / "model", "--task=addition", "--digits=1", "--num_prompts=3")
    evaluate.main(settings, questions)
    assert f"{tmp_path}/model: addition, 3 prompts" in capsys.readouterr().out
    head = json.loads((tmp_path / "model/evaluation-addition-test.jsonl").read_text().splitlines()[0])
    assert head["settings"]["digits"] == 1


def test_bad_input_is_answered_before_torch_is_imported(run_folder, tmp_path):
    code, out, err = command("evaluate.py", run_folder, f"--samples_file={tmp_path}/nowhere/x.jsonl")
    assert (code, out) == (2, "torch imported: False\n") and err.count("\n") == 1 and err.startswith("error: ")
    assert "nowhere/x.jsonl cannot be written (No such file or directory); name another" in err


def test_what_cannot_be_asked_is_refused(run_folder):
    home = run_folder.parent
    rows = [json.dumps({"prompt": str(i), "demonstration": "x"}) + "\n" for i in range(50)]
    (home / "unscored.jsonl").write_text("".join(rows))
    for words, message in (
        ("--temperature=0.0001", "temperature=0.0001 is below 0.001"),
        ("--num_samples=4 --temperature=0", "temperature=0 with num_samples=4 is the greedy completion so many times"),
        ("--task=countdwn", "--task='countdwn' is not one of run, .*did you mean countdown"),
        ("--tokenizer=gpt2", "tokenizer='gpt2', but .*has 'bytes'; leave tokenizer out|tokenizer=gpt2 cannot be had"),
        (f"--data_file={home}/none.jsonl", "none.jsonl: cannot be read"),
        (f"--data_file={home}/unscored.jsonl", "its data_file has no column answer to score completions by"),
        ("--task=countdown --data_file=x", "data_file='x' does not fit task='countdown'"),
        ("--task=countdown --countdown_operators=%", "countdown_operators='%'"),
        (f"--task=jsonl --samples_file={home}", "is a folder"),
        (f"--samples_file={home}/rows.jsonl/x", "cannot be written"),
        ("--samples_file=/proc/x", "cannot be written"),
    ):
        with pytest.raises(SnugError, match=message) as caught:
            questions_of(run_folder, *words.split())
        assert "\n" not in str(caught.value)


def asked(words, run):
    """What a run with these settings is asked."""
    settings, given, _ = read_settings(EvaluateSettings, words.split(), positional="folder")
    return settings_asked(settings, given, run, "out/x")


def test_options_come_from_the_command_then_the_run_then_the_defaults():
    lengths = dict(max_new_tokens=9, max_prompt_length=5, stop_string="x")
    run = GRPOSettings(digits=7, countdown_max_number=9, demonstration_noise=0.5, **lengths)
    assert asked("", run) == run and asked("--max_new_tokens=3", run).max_new_tokens == 9
    same = asked("--digits=4", run)  # 4 is the default too, and was given all the same
    assert (same.task, same.digits, same.countdown_max_number, same.max_new_tokens) == ("addition", 4, 9, 9)
    assert asked("--task=addition", run).digits == 7
    other = asked("--task=countdown --countdown_numbers=5", run)
    options = (other.task, other.digits, other.countdown_max_number, other.countdown_numbers)
    assert options == ("countdown", 4, 20, "5")
    assert (other.max_new_tokens, other.max_prompt_length, other.demonstration_noise) == (0, 0, 0.0)
    assert other.stop_string == "x" and asked("", SFTSettings(digits=3)) == SFTSettings(digits=3)
    with pytest.raises(SnugError, match="out/x has no task of its own; name one, such as --task=countdown"):
        asked("--digits=2", GRPOSettings(task=""))
    assert asked("--task=addition", GRPOSettings(task="")).max_new_tokens == 0


def test_the_commands_longest_completion_comes_before_the_runs():
    run, questions, settings = hex_questions(P=4, num_samples=1)
    questions.settings = GRPOSettings(max_new_tokens=6, max_prompt_length=2)
    for asked_for, room in ((0, 6), (3, 3)):
        settings.max_new_tokens = asked_for
        head, samples = run_evaluation(run, questions, settings)
        assert head["settings"]["max_new_tokens"] == max(s["length"] for s in samples) == room


def test_data_that_was_trained_on_is_not_asked():
    """With a test_file all of data_file is trained on; without, the prompts that are held out follow from the prompts."""
    run = GRPOSettings(task="jsonl", data_file="a", test_file="t")
    with pytest.raises(
        SnugError, match="out/x was trained on all of data_file=a; give a --test_file with other prompts"
    ):
        asked("--test_file=", run)
    with pytest.raises(
        SnugError, match="data_file=b is given, but the run's test_file=t is asked; give --test_file too"
    ):
        asked("--data_file=b", run)
    for words, files in (("", "at"), ("--test_file=u", "au"), ("--data_file=b --test_file=", "b")):
        assert asked(words, run).data_file + asked(words, run).test_file == files
    assert asked("--data_file=b", GRPOSettings(task="jsonl", data_file="a")).test_file == ""


def test_the_file_is_replaced_whole_or_not_at_all(run_folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "samples.jsonl"
    file.write_text("what was there\n")
    questions, settings = questions_of(run_folder, f"--samples_file={file}", "--num_prompts=5")
    assert questions.file == file and file.read_text() == "what was there\n" and len(list(tmp_path.iterdir())) == 1
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr("runs.questions.os.fsync", lambda handle: (_ for _ in ()).throw(full))
        with pytest.raises(SnugError, match=r"samples.jsonl cannot be written \(No space left on device\)"):
            evaluate.main(settings, questions)
    assert file.read_text() == "what was there\n" and len(list(tmp_path.iterdir())) == 1
    assert "pass@1" in capsys.readouterr().out
    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr("builtins.print", lambda *words, **options: (_ for _ in ()).throw(BrokenPipeError))
        evaluate.main(settings, questions)
    assert len(file.read_text().splitlines()) == 11  # | head
    evaluate.main(settings, questions)
    first = file.read_text()
    evaluate.main(settings, questions)
    assert len(first.splitlines()) == 11 and file.read_text() == first and len(list(tmp_path.iterdir())) == 1
    assert questions_of(run_folder / newest(run_folder).name)[0].file.parent == run_folder
