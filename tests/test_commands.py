"""The commands as a user types them: bad input is one line and exit code 2 before torch is imported; --help; from SFT to a page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import grpo
import train_sft
from data import make_task
from helpers import HOME
from helpers.commands import python
from helpers.models import make_model
from helpers.runs import command, refused, saved
from runs import fork
from runs.checkpoint import newest
from runs.evaluation import prepare_evaluation, prepare_pair
from runs.prepare import prepare
from settings import EvaluateSettings, GRPOSettings, SFTSettings
from snug.options import SnugError, find_path, read_config, read_settings
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

BAD = {
    "grpo.py --lerning_rate=1": "unknown option --lerning_rate; did you mean learning_rate?",
    "grpo.py --beta=0.1": "beta=0.1 needs a reference",
    "grpo.py --loss_type=nowhere:f": "loss_type='nowhere:f': no module nowhere in ",
    "train_sft.py": "name a config, such as config/grpo_small.py, or options; --help lists them",
    "sample.py out/nowhere": "out/nowhere: there is no such run", "sample.py --prompt": "--prompt has no value",
    "evaluate.py out/nowhere": "out/nowhere: there is no such run",
    "report.py out/nowhere": "out/nowhere: there is no such run or model",
}  # fmt: skip


@pytest.mark.parametrize("line, message", BAD.items())
def test_bad_input_is_one_line_and_exit_code_2(line, message):
    code, out, err = command(*line.split())
    assert code == 2
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert out == "torch imported: False\n"


def test_what_configs_name_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared = prepare(*read_settings(GRPOSettings, ["config/grpo_small.py"])[:2])
    assert prepared.warm_start.settings.digits == 4 and prepared.settings.init_from == "out/sft_small"
    words = ["config/grpo_real.py", "--init_from=", "--chat=false", "--system_prompt="]
    assert sum(map(len, make_task(read_settings(GRPOSettings, words)[0]).rows.values())) > 1000
    (tmp_path / "data").mkdir()  # what is in the current folder comes first
    (tmp_path / "data/sums.jsonl").write_text('{"prompt": "2+2=", "answer": 4}\n')
    task = make_task(read_settings(GRPOSettings, [*words, "--eval_prompts=0"])[0])
    assert [row["prompt"] for row in task.rows["train"]] == ["2+2="]
    assert find_path("no/such/file") == Path("no/such/file") and find_path(HOME / "data") == HOME / "data"


@pytest.mark.parametrize("out_dir, moves", [("out/mine", True), ("../far/mine", False)])
def test_a_run_goes_on_from_any_folder_with_the_files_beside_it(out_dir, moves, tmp_path, monkeypatch, capsys):
    """Also if its place has another name now, or is far from these files: resumed, evaluated, and branched."""
    work, moved = tmp_path / "work", tmp_path / ("moved" if moves else "work")
    for folder in (work, tmp_path / "elsewhere"):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40)]
    Path("mine.jsonl").write_text("".join(rows))
    Path("far_rewards.py").write_text("def short(completions, **c):\n    return [float(len(c)) for c in completions]\n")
    save_pretrained(make_model("gpt2", vocab_size=257), "my/base", get_tokenizer("bytes"))
    options = dict(batch_size=2, group_size=2, max_new_tokens=4, eval_prompts=2, device="cpu", init_from="my/base")
    files = dict(data_file="mine.jsonl", reward_funcs=["far_rewards:short"])
    grpo.train(task="jsonl", beta=0.1, max_iters=1, out_dir=out_dir, **files, **options)
    work.rename(moved)
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = f"{moved}/{out_dir}"

    def forget():
        sys.modules.pop("far_rewards")
        sys.path[:] = [folder for folder in sys.path if not folder.startswith(str(tmp_path))]

    forget()
    assert grpo.train(resume=run, max_iters=2).finished
    forget()
    prepared, file = prepare_evaluation(EvaluateSettings(), set(), run)
    assert len(prepared.task.rows["test"]) == 8 and file.resolve().is_relative_to(Path(run).resolve())
    forget()
    begin = make_model("gpt2", vocab_size=257)
    save_pretrained(begin, "other", get_tokenizer("bytes"))
    a, b = prepare_pair(EvaluateSettings(), set(), "other", run)
    assert a.reward_funcs[0].__name__ == b.reward_funcs[0].__name__ == "short"
    forget()
    trained = lambda words: grpo.main(prepare(*read_settings(GRPOSettings, words[2:])[:2])) - 1  # noqa: E731
    monkeypatch.setattr(fork.subprocess, "call", trained)
    fork.main(*read_settings(fork.ForkSettings, [run, "--max_iters=3", "--seeds=1"], positional="run"))
    assert newest(f"{run}-at2/same-seed1").name == "checkpoint-000003"


def test_what_is_nearer_comes_first(tmp_path, monkeypatch):
    """The current folder, snug's, and those above the run, the nearest first."""
    for folder in ("here", "a/b/c"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    run = tmp_path / "a/b/c/run"
    places = [tmp_path / folder for folder in ("", "a", "a/b", "a/b/c", "here")]
    for place in places:
        (place / "file").touch()
        (place / "README.md").touch()
        assert find_path("file", run).resolve() == place / "file"
        assert find_path("README.md", run).resolve() == (place if place.name == "here" else HOME) / "README.md"


NO_MODEL = "there is no such run or model; train it first, or name a folder, or owner/name on the hub"
MISSING = {  # what is missing -> how the line ends
    "--init_from=out/grpo_small": f"out/grpo_small: {NO_MODEL}",
    "config/distill_small.py": f"out/grpo_small: {NO_MODEL}",  # its teacher
    "--resume=empty": "resume=empty has no checkpoint; name a run's folder, or a model as --init_from",
    "--task=examples.countdown:Countdown --chat --beta=0": "lacks: name a model such as --init_from=Qwen/Qwen2.5-0.5B-Instruct",
    "config/grpo_gsm8k.py": "; config/grpo_gsm8k.py has the command that downloads it",
    "--task=gsm8k": "; config/grpo_gsm8k.py has the command that downloads it",
}


@pytest.mark.parametrize("words, end", MISSING.items())
def test_what_is_missing_is_named(tmp_path, monkeypatch, words, end):
    for name in ("data", "empty"):
        (tmp_path / name).mkdir()
    for name in ("config", "data/sums.jsonl"):
        (tmp_path / name).symlink_to(HOME / name)
    monkeypatch.chdir(tmp_path)
    # A project in which nobody has made a run, a model or data yet.
    monkeypatch.setattr("snug.options.HOME", tmp_path)
    assert end in refused(prepare, *read_settings(GRPOSettings, words.split())[:2])


def test_a_config_says_what_differs_from_the_defaults_and_its_run_has_its_name():
    """So that a missing run can be answered with the command that makes it."""
    for path in sorted((HOME / "config").glob("*.py")):
        cls = SFTSettings if path.stem.startswith("sft") else GRPOSettings
        values = {name: value for name, (_, value) in read_config(str(path)).items()}
        defaults = vars(cls(task=values.get("task", "addition"))) | dict(task="addition")
        assert values["out_dir"] == f"out/{path.stem}" and all(defaults[name] != values[name] for name in values)
    makefile = (HOME / "Makefile").read_text()
    assert "\nmodels/smollm2-135m-instruct:" in makefile


def test_an_unreadable_checkpoint_is_named_before_torch_is_imported(tmp_path):
    _, _, path = saved(tmp_path / "run")
    (path / "model.safetensors").write_bytes(b"not a checkpoint")
    for words in (["grpo.py", f"--init_from={tmp_path}/run"], ["sample.py", tmp_path / "run", "--prompt=1+1="]):
        code, out, err = command(*words)
        assert (code, out) == (2, "torch imported: False\n")
        assert "model.safetensors is not what was written; " in err and err.count("\n") == 1


SCRIPTS = ["grpo.py", "train_sft.py", "sample.py", "evaluate.py", "report.py"]
EARLY = {f"{script} --help": "pathlib" for script in (*SCRIPTS, "-m runs.export", "-m runs.fork")}
LATER = [f"{command} --max_iters=1" for command in ("-m snug grpo", "grpo.py", "train_sft.py")]
LATER += ["sample.py model --prompt=1", "evaluate.py model --task=addition", "-m runs.export model --to=export"]


@pytest.mark.parametrize("line, module", (EARLY | dict.fromkeys(LATER, "torch")).items())
def test_ctrl_c_while_a_module_is_imported_is_one_line(line, module, tmp_path):
    """Every command needs pathlib, which is as early as a test can look."""
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    (tmp_path / f"{module}.py").write_text(code)
    save_pretrained(make_model("gpt2", vocab_size=257), tmp_path / "model", get_tokenizer("bytes"))
    words = [HOME / word if word in SCRIPTS else word for word in line.split()]
    result = python(*words, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{HOME}")
    assert (result.returncode, result.stderr) == (130, "stopped\n")


def test_a_users_script_keeps_its_own_end(tmp_path):
    (tmp_path / "mine.py").write_text("import runs, sys\nassert sys.excepthook is sys.__excepthook__\n")
    assert python(tmp_path / "mine.py", PYTHONPATH=str(HOME)).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_comes_without_torch(script):
    code, out, err = command(script, "--help")
    assert code == 0 and out.startswith("usage: ") and err == "" and "torch imported: False" in out


def test_help_may_be_read_in_part():
    """grpo.py --help | head -1"""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run = subprocess.Popen([sys.executable, "grpo.py", "--help"], cwd=HOME, **pipes)
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 0


@pytest.mark.long
def test_without_triton_plain_torch_does_everything(tmp_path):
    """As on macOS and on ARM, where triton is not installed."""
    code = "import sys; sys.modules['triton'] = None; import runpy; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path('grpo.py', run_name='__main__')"
    words = "grpo.py --max_iters=1 --batch_size=2 --group_size=2 --eval_prompts=2".split()
    run = python("-c", code, *words, f"--out_dir={tmp_path}/run")
    assert run.returncode == 0 and "iter 0/1" in run.stdout, run.stderr


def test_sft_is_evaluated_with_the_users_functions_tools_and_stop_string(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = dict(digits=1, n_layer=1, n_embd=16, batch_size=2, max_iters=1, eval_prompts=4, device="cpu")
    texts = []

    def quarter(completions, **columns):
        texts.extend(completion[0]["content"] for completion in completions)
        return [0.25] * len(completions)

    asked = dict(reward_funcs=[quarter])
    log = train_sft.train(out_dir="run", stop_string="1", tools=["examples.tools:calc"], **small, **asked).log
    assert log[0]["eval_reward_mean"] == 0.25 and log[0]["pass_at_1"] == 0
    assert texts and not any("1" in text[:-1] for text in texts)  # messages, because there are tools
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 2)
    with pytest.raises(SnugError, match="rows need an answer, or --answer_column=NAME, or else a demonstration .SFT."):
        train_sft.train(out_dir="other", task="jsonl", data_file="rows.jsonl", device="cpu", **asked)
