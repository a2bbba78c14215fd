"""A task in the user's own file, with an option of its own: it trains, goes on, is evaluated and sampled, from anywhere."""

import sys
from pathlib import Path

import pytest

import evaluate
import grpo
import sample
import train_sft
from helpers.commands import block_with
from helpers.errors import assert_refused, refusal
from helpers.tasks import COUNTDOWN
from runs.checkpoint import class_of_runs, find_run, newest
from runs.evaluation import prepare_evaluation
from runs.prepare import prepare
from settings import EvaluateSettings, GRPOSettings, SampleSettings, SFTSettings
from snug.options import read_settings

# The documents' task with another default and one option more, and classes that are no tasks.
OURS = 'loud: bool = option(False, "answer in capitals")\n    length: int = option(3'
LETTERS = block_with("CONTRIBUTING.md", "class Letters(").replace("length: int = option(4", OURS)
LETTERS += """

class NoTask:
    pass


class Listed(Letters):
    @dataclass
    class options:
        sizes: list[int] = option([], "sizes")


class Bare(Letters):
    options = NoTask


class Shared(Letters):
    @dataclass
    class options:
        seed: int = option(1, "a seed")
"""
SMALL = """--n_layer=1 --n_head=1 --n_embd=8 --block_size=16 --device=cpu --batch_size=4 --eval_prompts=4 --save_interval=1
--eval_interval=0""".split()


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with the user's file."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work/my_letters.py").write_text(LETTERS)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path / "work"
    sys.modules.pop("my_letters", None)


def test_a_task_of_ones_own_trains_goes_on_and_is_evaluated(work, monkeypatch, capsys):
    # In any order, in configs and on the command line
    config = "length = 4\ntask = 'my_letters:Letters'\nout_dir = 'out/sft'\nloud = True\nmax_iters = 2\n"
    (work / "sft.py").write_text(config)
    train_sft.main(prepare(*read_settings(SFTSettings, ["sft.py", *SMALL])[:2]))
    words = "--task=my_letters:Letters --length=4 --loud --init_from=out/sft --out_dir=out/mine --max_iters=2".split()
    words += [*SMALL[4:], "--group_size=2", "--max_new_tokens=5", "--beta=0"]
    grpo.main(prepare(*read_settings(GRPOSettings, words)[:2]))
    # From another folder, where the file is not, in another process
    run = str(work / "out/mine")
    (work / "elsewhere").mkdir()
    monkeypatch.chdir(work / "elsewhere")
    sys.modules.pop("my_letters")
    sys.path[:] = [place for place in sys.path if place != str(work)]
    prepared = prepare(*read_settings(GRPOSettings, [f"--resume={run}", "--max_iters=3"])[:2])
    assert prepared.settings.length == 4 and prepared.settings.loud and prepared.task.row("test", 0)["word"]
    grpo.main(prepared)
    assert newest(run).name == "checkpoint-000003"
    words = [run, "--num_prompts=3", "--length=5"]
    options, given, folders = read_settings(EvaluateSettings, words, "folders", class_of_runs)
    prepared, file = prepare_evaluation(options, given, *folders)
    assert prepared.settings.length == 5 and prepared.settings.loud  # one is given, the other is the run's
    assert "pass_at_1" in evaluate.main(options, prepared, file)[0]["scores"]
    settings, given, folder = read_settings(SampleSettings, [run, "--num_samples=2"], "folder")
    capsys.readouterr()
    sample.main(settings, given, find_run(folder))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line[4] == "=" for line in lines)
    again = [f"--resume={run}", "--task=my_letters:Letters", "--length=5"]
    assert_refused("length was 4, is 5", prepare, *read_settings(GRPOSettings, again)[:2])
    fresh = [f"--init_from={run}", "--out_dir=out/b", "--max_new_tokens=4"]
    said = "^init_from={} has task my_letters:Letters, .* addition; add --task=my_letters:Letters$"
    assert_refused(said.format(run), prepare, *read_settings(GRPOSettings, fresh)[:2])
    Path("my_sft.py").write_text("task = 'my_letters:Letters'\nout_dir = 'out/none'\n")  # the same before it has run
    begin = ["--init_from=my_sft.py", *fresh[1:]]
    assert_refused(said.format("my_sft.py"), prepare, *read_settings(GRPOSettings, begin)[:2])
    assert prepare(*read_settings(GRPOSettings, [*fresh, "--task=addition", "--digits=1"])[:2]).settings.digits == 1
    with refusal("unknown option digits; it is an option of --task=addition"):
        prepare(*read_settings(GRPOSettings, [f"--resume={run}", "--digits=4"])[:2])


def test_help_shows_the_options_of_the_task_that_is_named(work, capsys):
    for words in (["--help"], ["--help=all"]):
        for task, shown in (("my_letters:Letters", "--length INT"), (COUNTDOWN, "--countdown_numbers STR")):
            with pytest.raises(SystemExit):
                read_settings(GRPOSettings, [*words, f"--task={task}"])
            out = capsys.readouterr().out
            assert shown in out and "--digits" not in out and "--data_file" not in out
    with pytest.raises(SystemExit):
        read_settings(GRPOSettings, ["--help"])
    assert "--digits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "task, said",
    {
        "my_letters": "'my_letters' is not one of addition, ",
        "my_letters:NoTask": "task='my_letters:NoTask' is no task; derive the class from snug.Task",
        "my_letters:Leters": "has no function or class Leters; did you mean Letters?",
        "my_letters:Bare": "its options must be a dataclass of fields such as ",
        "my_letters:Listed": "its options must be a dataclass of fields such as ",
        "my_letters:Shared": "seed is an option already; rename the task's",
    }.items(),
)
def test_what_is_no_task_is_refused(work, task, said):
    assert_refused(said, read_settings, GRPOSettings, [f"--task={task}"])
