"""Models by their hub id: a cache as huggingface_hub lays it out, and its client against a server on this machine."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from safetensors.torch import save_file

import evaluate
import grpo
import sample
from helpers import HOME
from helpers.hub import NAME, NEW, OLD, put
from helpers.models import make_model
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


def init_from():
    """-> init_from of the run, as its checkpoint has it."""
    return read_state(newest("out/run"))["settings"]["init_from"]


def test_a_run_keeps_its_commit(cache, folders):
    grpo.main(prepared_by("--beta=0.1"))
    assert init_from() == json.loads(Path("out/run/settings.json").read_text())["init_from"] == f"{NAME}@{OLD}"
    put(cache, folders[NEW], NEW)
    resumed = prepared_by("--beta=0.1", "--max_iters=2")
    assert resumed.origin.path.name == OLD  # the reference
    grpo.main(resumed)
    assert init_from() == f"{NAME}@{OLD}"
    for name, commit in ((NAME, NEW), (f"{NAME}@{OLD}", OLD), (f"{NAME}@main", NEW)):
        other = prepared_by("--out_dir=out/other", f"--init_from={name}")
        assert (other.settings.init_from, other.origin.path.name) == (f"{NAME}@{commit}", commit)
    for beta in ("--beta=0.1", "--beta=0"):
        with pytest.raises(SnugError, match=f"init_from was '{NAME}@{OLD}', is '{NAME}@{NEW}'"):
            prepared_by(beta, f"--init_from={NAME}@{NEW}")
    shutil.rmtree(cache)  # without a reference a run needs its own checkpoint only
    assert prepared_by("--beta=0", "--max_iters=3").settings.init_from == f"{NAME}@{OLD}"


def test_adapters_find_their_base_in_another_cache(cache, folders, monkeypatch):
    grpo.main(prepared_by("--lora_rank=2"))
    put(cache, folders[NEW], NEW)
    weights = load_run("out/run", "cpu").model.state_dict()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.rename("moved")))
    again = load_run("out/run", "cpu").model.state_dict()
    assert all(again[name].equal(weight) for name, weight in weights.items())
    assert prepared_by("--lora_rank=2").origin.path.parts[-4:] == ("moved", "models--tiny--model", "snapshots", OLD)
    shutil.rmtree("moved")
    with pytest.raises(SnugError, match=f"{NAME}@{OLD}: is no folder here and not in the hub's cache"):
        load_run("out/run", "cpu")


def test_exported_adapters_are_for_the_commit_of_their_base(cache, folders):
    """Also once the branch has another."""
    grpo.main(prepared_by("--lora_rank=2"))
    put(cache, folders[NEW], NEW)
    export.main(ExportSettings(to="adapters", adapters=True), "out/run")
    file = Path("adapters/adapter_config.json")
    config = json.loads(file.read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, OLD)
    assert find_base(file.parent)[0].name == OLD
    file.write_text(json.dumps(config | dict(revision=None)))
    assert find_base(file.parent)[0].name == NEW


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
    with pytest.raises(SnugError, match=r"tiny/modle: there is no such run or model; did you mean tiny/model\?"):
        find_run("tiny/modle")
    for name in ("out/x", "models/x", "nothing", "a/b/c", "/a/b", "./a/b"):
        with pytest.raises(SnugError, match="there is no such run or model"):
            find_run(name)


def test_every_file_of_a_tokenizer_is_downloaded():
    assert {*tokenizer.FILES} - {tokenizer.DATE} < {*hub.FILES}


# ----------------------------------------------------------------------------------------------------------------------
# The library's own client


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A hub on this machine: `address`, and `files`, {repository: folder} -> `asked`: the paths of its requests."""
    root = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "MAX_SHARD_BYTES", 50_000)
        save_pretrained(make_model(vocab_size=257), root / "tiny/shards", get_tokenizer("bytes"))
    assert len(list(root.glob("tiny/shards/model-*.safetensors"))) > 1
    save_pretrained(make_model(vocab_size=257), root / "tiny/model", get_tokenizer("bytes"))
    for name in ("shards", "model"):
        (root / "tiny" / name / "original").mkdir()
        for other in ("pytorch_model.bin", "consolidated.safetensors", "original/x.safetensors", "README.md"):
            (root / "tiny" / name / other).write_text(other)
    for name, files in dict(pickles=["config.json", "pytorch_model.bin"], gguf=["x.gguf"], gemma=[]).items():
        (root / "tiny" / name).mkdir()
        for file in files:
            shutil.copy(root / "tiny/model" / "config.json", root / "tiny" / name / file)
    (root / "tiny/gemma/config.json").write_text('{"model_type": "gemma"}')
    (root / "tiny/gemma/model.safetensors").write_text("gigabytes")
    shutil.copytree(root / "tiny/model", root / "tiny/gated")
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def answer(self, status, content=b"", **headers):
            self.send_response(status)
            for name, value in (headers | {"Content-Length": len(content)}).items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_GET(self):
            path = self.path.partition("?")[0]
            if "tiny" not in path:  # the library asks for a list of coding agents, if one runs it
                return self.answer(404)
            asked.append(path.removeprefix("/"))
            owner, name, kind, revision, *file = path.removeprefix("/api/models").strip("/").split("/")
            folder = root / owner / name
            if not folder.is_dir():
                return self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Invalid username or password.")
            if revision not in ("main", NEW):
                return self.answer(404, X_Error_Code="RevisionNotFound")
            files = [file for file in folder.rglob("*") if file.is_file()]
            if kind == "resolve":
                if name == "gated":
                    return self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="Ask for access.")
                content = folder.joinpath(*file).read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()}"'
                return self.answer(200, content, ETag=tag, X_Repo_Commit=NEW)
            names = [str(file.relative_to(folder)) for file in files]
            value = dict(id=f"{owner}/{name}", sha=NEW, siblings=[dict(rfilename=name) for name in names])
            if kind == "tree":
                sizes = [file.stat().st_size for file in files]
                rows = zip(names, sizes, strict=True)
                value = [dict(type="file", path=name, size=size, oid="c" * 40) for name, size in rows]
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=http.serve_forever, daemon=True).start()
    yield SimpleNamespace(address=f"http://127.0.0.1:{http.server_port}", asked=asked, root=root)
    http.shutdown()


def python(words, place, address):
    """Run Python in a process of its own: huggingface_hub reads its environment once -> (exit code, stdout, stderr)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= dict(PYTHONPATH=str(HOME), HF_ENDPOINT=address, HF_HOME=str(place / "hf"), no_proxy="127.0.0.1")
    result = subprocess.run([sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout, result.stderr


STEPS = """
import sys
from snug.pretrained.hub import hub_name, local_folder
for name in sys.argv[1:]:
    folder = local_folder(name.removeprefix("-"), weights=name[0] != "-")
    print(hub_name(folder), *sorted(file.name for file in folder.iterdir()))
"""


def test_what_is_downloaded(server, tmp_path):
    name = "tiny/shards"
    ours = {file.name for file in server.root.glob(f"{name}/*.json")}
    weights = {file.name for file in server.root.glob(f"{name}/model*.safetensors")}
    server.asked.clear()
    code, out, err = python(["-c", STEPS, f"-{name}", name], tmp_path, server.address)
    small, out = out.splitlines(keepends=True)
    assert (code, small) == (0, f"{name}@{NEW} {' '.join(sorted(ours))}\n"), err
    assert out == f"{name}@{NEW} {' '.join(sorted(ours | weights))}\n"
    files = [path.rpartition("/")[2] for path in server.asked if "/resolve/" in path]
    assert {*files} == ours | weights and {*files[: 2 * len(ours)]} == ours  # HEAD, then GET
    branch = [path for path in server.asked if path.endswith("/main")]
    assert len(branch) == 2  # its commit is that of the weights, wherever the branch goes meanwhile
    server.asked.clear()
    code, again, err = python(["-c", STEPS, f"{name}@{NEW}"], tmp_path, server.address)
    assert (code, again, server.asked) == (0, out, []), err
    lost = max(tmp_path.glob(f"hf/hub/models--tiny--*/snapshots/{NEW}/model*.safetensors"))
    lost.resolve().unlink()  # as if the download had been stopped
    lost.unlink()
    code, again, err = python(["-c", STEPS, f"{name}@{NEW}"], tmp_path, server.address)
    assert (code, again, {*server.asked}) == (0, out, {f"{name}/resolve/{NEW}/{lost.name}"}), err


BASE = """
from pathlib import Path
from snug.pretrained.adapters import find_base
for weights in (False, True):
    print(*sorted(file.name for file in find_base(Path("adapters"), weights)[0].iterdir()))
"""


def test_the_weights_of_an_adapters_base_are_downloaded_when_they_are_wanted(server, tmp_path):
    (tmp_path / "adapters").mkdir()
    config = dict(peft_type="LORA", r=2, lora_alpha=4, init_lora_weights=True, base_model_name_or_path="tiny/model")
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "adapters/adapter_model.safetensors")
    small = sorted(file.name for file in server.root.glob("tiny/model/*.json"))
    code, out, err = python(["-c", BASE], tmp_path, server.address)
    assert (code, out.split("\n")[0].split()) == (0, small), err
    assert out.split("\n")[1].split() == sorted([*small, "model.safetensors"])


REFUSED = """
import sys
from snug.options import SnugError
from runs.checkpoint import find_run
for name in sys.argv[1:]:
    try:
        print(find_run(name))
    except SnugError as error:
        print(error)
"""
ERRORS = {
    "tiny/gated": "is gated: accept its licence on https://huggingface.co/tiny/gated, then run `hf auth login`",
    "tiny/missing": "is no folder here and no public model on the hub: check the name",
    "tiny/model@nowhere": "tiny/model has no such revision: name one of its branches, tags or commits after the @",
    "tiny/gemma": "config.json: model_type='gemma' is not supported",
    "tiny/pickles": "has no model.safetensors and no index of several; *.bin files are pickles",
    "tiny/gguf": "config.json: cannot be read (FileNotFoundError",
    "tiny/a--b": "cannot be downloaded (",
}


def test_what_the_hub_refuses_is_one_line(server, tmp_path):
    code, out, err = python(["-c", REFUSED, *ERRORS], tmp_path, server.address)
    assert (code, out.count("\n")) == (0, len(ERRORS)), err
    for line, (name, text) in zip(out.splitlines(), ERRORS.items(), strict=True):
        assert text in line and (line.startswith(f"{name}: ") or name == "tiny/pickles"), line
    assert "tiny/gemma/resolve/" + f"{NEW}/model.safetensors" not in server.asked


def test_no_network_and_nothing_in_the_cache_is_one_line(tmp_path):
    code, out, err = python([HOME / "sample.py", NAME, "--prompt=1"], tmp_path, "http://127.0.0.1:9")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(
        f"error: {NAME}: is no folder here and not in the hub's cache, and the hub cannot be reached: "
    )
