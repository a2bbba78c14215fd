"""Models by their hub id: a cache as huggingface_hub lays it out, and what its client is asked for."""

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from safetensors.torch import save_file

import evaluate
import grpo
import sample
from helpers import HOME
from helpers.errors import assert_refused
from helpers.hub import NAME, NEW, OLD, put
from helpers.models import make_model
from helpers.runs import refused
from runs import export
from runs.checkpoint import find_run, newest, read_state
from runs.loading import load_run
from runs.prepare import prepare
from settings import EvaluateSettings, ExportSettings, GRPOSettings, SampleSettings
from snug import tokenizer
from snug.options import SnugError, read_settings
from snug.pretrained import hub, tensors
from snug.pretrained.adapters import find_base
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

SMALL = f"--init_from={NAME} --out_dir=out/run --digits=1 --device=cpu --max_iters=1 --batch_size=2 --group_size=2"
SMALL = f"{SMALL} --max_new_tokens=4 --eval_prompts=2 --resume=auto".split()
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """-> {commit: folder}: two models."""
    result = {commit: tmp_path_factory.mktemp("models") / commit for commit in (OLD, NEW)}
    for seed, folder in enumerate(result.values()):
        save_pretrained(make_model(seed=seed, vocab_size=257), folder, get_tokenizer("bytes"))
    return result


@pytest.fixture
def cache(tmp_path, monkeypatch, folders):
    """A cache without a network, which has the older model; the working folder is a new one."""
    place = tmp_path / "hub"
    put(place, folders[OLD], OLD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return place


def prepared_by(*words):
    settings, given, _ = read_settings(GRPOSettings, [*SMALL, *words])
    return prepare(settings, given)


def test_a_run_keeps_its_commit(cache, folders):
    grpo.main(prepared_by("--beta=0.1"))
    assert json.loads(Path("out/run/settings.json").read_text())["init_from"] == f"{NAME}@{OLD}"
    put(cache, folders[NEW], NEW)
    resumed = prepared_by("--beta=0.1", "--max_iters=2")
    assert resumed.origin.path.name == OLD  # the reference
    grpo.main(resumed)
    assert read_state(newest("out/run"))["settings"]["init_from"] == f"{NAME}@{OLD}"
    for name, commit in ((NAME, NEW), (f"{NAME}@{OLD}", OLD), (f"{NAME}@main", NEW)):
        other = prepared_by("--out_dir=out/other", f"--init_from={name}")
        assert (other.settings.init_from, other.origin.path.name) == (f"{NAME}@{commit}", commit)
    for beta in ("--beta=0.1", "--beta=0"):
        with pytest.raises(SnugError, match=f"init_from was '{NAME}@{OLD}', is '{NAME}@{NEW}'"):
            prepared_by(beta, f"--init_from={NAME}@{NEW}")
    shutil.rmtree(cache)  # without a reference a run needs its own checkpoint only
    assert prepared_by("--beta=0", "--max_iters=3").settings.init_from == f"{NAME}@{OLD}"


def test_adapters_are_for_the_commit_of_their_base(cache, folders, monkeypatch):
    """Also once the branch has another, and in another cache."""
    grpo.main(prepared_by("--lora_rank=2"))
    put(cache, folders[NEW], NEW)
    export.main(ExportSettings(to="adapters", adapters=True), "out/run")
    file = Path("adapters/adapter_config.json")
    config = json.loads(file.read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, OLD)
    assert find_base(file.parent)[0].name == OLD
    file.write_text(json.dumps(config | dict(revision=None)))
    assert find_base(file.parent)[0].name == NEW
    weights = load_run("out/run", "cpu").model.state_dict()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.rename("moved")))
    again = load_run("out/run", "cpu").model.state_dict()
    assert all(again[name].equal(weight) for name, weight in weights.items())
    assert prepared_by("--lora_rank=2").origin.path.parts[-4:] == ("moved", "models--tiny--model", "snapshots", OLD)
    shutil.rmtree("moved")
    assert_refused(f"{NAME}@{OLD}: is no folder, and the download from the hub failed", load_run, "out/run", "cpu")


def test_the_commands_write_nothing_into_the_cache(cache, capsys):
    before = {path: path.lstat().st_mtime_ns for path in cache.rglob("*")}
    words = [NAME, "--task=addition", "--digits=1", "--num_prompts=2", "--device=cpu", "--max_new_tokens=4"]
    options, given, folder = read_settings(EvaluateSettings, words, positional="folder")
    evaluate.main(options, *evaluate.prepare_evaluation(options, given, folder))
    summary = json.loads(Path("out/model/evaluation-addition-test.jsonl").read_text().splitlines()[0])
    assert summary["checkpoint"] == f"{NAME}@{OLD}" and f"{NAME}@{OLD}: addition" in capsys.readouterr().out
    settings = SampleSettings(prompt="1+1=", max_new_tokens=2, device="cpu")
    sample.main(settings, {"max_new_tokens"}, find_run(f"{NAME}@main"))
    assert capsys.readouterr().out.startswith("1+1=")
    export.main(ExportSettings(to="mine"), NAME)
    assert Path("mine/model.safetensors").is_file()
    assert before == {path: path.lstat().st_mtime_ns for path in cache.rglob("*")}


def test_a_folder_comes_before_the_hub(cache, monkeypatch):
    """Where there is a folder `owner`, and in out/ and models/, a name is a path, and errors are those of paths."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    shutil.copytree(cache / f"models--tiny--model/snapshots/{OLD}", "tiny/model")
    assert find_run(NAME).path == Path(NAME)
    assert prepared_by().settings.init_from == NAME
    snapshot = prepared_by(f"--init_from={cache}/models--tiny--model/snapshots/{OLD}")  # perhaps of another cache
    assert snapshot.settings.init_from.endswith(OLD)
    assert_refused(r"tiny/modle: there is no such run or model; did you mean tiny/model\?", find_run, "tiny/modle")
    for name in ("out/x", "models/x", "nothing", "a/b/c", "/a/b", "./a/b"):
        assert_refused("there is no such run or model", find_run, name)


HUB = "is no folder, and the download from the hub failed; check name and network; for a gated model accept its licence"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A stand-in for the hub. It has models in tmp_path/tiny, and its cache is empty at first. -> the repository and the
    revision of each request. A request puts the files that it names into the cache."""
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "MAX_SHARD_BYTES", 50_000)
        save_pretrained(make_model(vocab_size=257), tmp_path / "tiny/shards", get_tokenizer("bytes"))
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (tmp_path / "tiny/shards" / name).write_text(name)
    requests = []

    def snapshot_download(name, revision, allow_patterns):
        requests.append((name, revision))
        folder = tmp_path / f"models--{name.replace('/', '--')}/snapshots/{NEW}"
        folder.mkdir(parents=True, exist_ok=True)
        for file in (tmp_path / name).iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, folder)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # else tiny/shards is a path
    return requests


def names_in(folder):
    return {file.name for file in folder.iterdir()}


def test_what_is_downloaded(asked, tmp_path):
    """No weights before they are wanted, and then those of the configuration's commit, wherever the branch goes meanwhile."""
    files = names_in(tmp_path / "tiny/shards")
    weights = {name for name in files if name.startswith("model-")}
    small = {name for name in files if name.endswith(".json")}
    assert {*tokenizer.FILES} - {tokenizer.DATE} < {*hub.FILES}
    folder = hub.local_folder("tiny/shards", weights=False)
    assert names_in(folder) == small and hub.hub_name(folder) == f"tiny/shards@{NEW}"
    assert asked == [("tiny/shards", None)] and len(weights) > 1
    assert names_in(hub.local_folder("tiny/shards")) == small | weights
    assert asked[1:] == [("tiny/shards", None), ("tiny/shards", NEW)]
    (folder / min(weights)).unlink()  # as if the download had been stopped
    assert names_in(hub.local_folder(f"tiny/shards@{NEW}")) == small | weights


def test_the_weights_of_an_adapters_base_are_downloaded_when_they_are_wanted(asked):
    Path("adapters").mkdir()
    config = dict(peft_type="LORA", r=2, lora_alpha=4, init_lora_weights=True, base_model_name_or_path="tiny/shards")
    Path("adapters/adapter_config.json").write_text(json.dumps(config))
    save_file({}, "adapters/adapter_model.safetensors")
    for weights in (False, True):
        names = names_in(find_base(Path("adapters"), weights)[0])
        assert any(name.startswith("model-") for name in names) == weights and "config.json" in names


def test_what_the_hub_refuses_is_one_line(asked, tmp_path, monkeypatch):
    files = dict(gemma=["config.json", "model.safetensors"], pickles=["config.json", "pytorch_model.bin"])
    files |= dict(gguf=["x.gguf"])
    for name, wanted in files.items():
        (tmp_path / "tiny" / name).mkdir()
        for file in wanted:
            (tmp_path / "tiny" / name / file).write_text('{"model_type": "gemma"}')
    shutil.copy(tmp_path / "tiny/shards/config.json", tmp_path / "tiny/pickles")
    assert "config.json: model_type='gemma' is not supported" in refused(find_run, "tiny/gemma")
    assert asked == [("tiny/gemma", None)]  # before its weights are downloaded
    assert "*.bin files, which are pickles" in refused(find_run, "tiny/pickles")
    assert "config.json: cannot be read (FileNotFoundError" in refused(find_run, "tiny/gguf")
    error = errors.GatedRepoError
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error.__new__(error, "why")))
    said = refused(find_run, NAME)
    assert said.startswith(f"{NAME}: {HUB}") and "(GatedRepoError:" in said


def test_no_network_and_nothing_in_the_cache_is_one_line(tmp_path):
    """In a process of its own: the library reads its environment once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= dict(PYTHONPATH=str(HOME), HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hf"))
    command = [sys.executable, HOME / "sample.py", NAME, "--prompt=1"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith(f"error: {NAME}: {HUB}")
