"""From a Hugging Face folder through a run and out again: model, tokenizer and chat template travel together."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import evaluate
import grpo
import runs.loading
import train_sft
from helpers import HOME
from helpers.errors import assert_refused, refusal
from helpers.models import QWEN, make_chat_model
from model import GPT, GPTConfig
from runs.checkpoint import newest
from runs.export import main
from runs.loading import load_run
from runs.log import read_log
from runs.prepare import prepare
from sample import complete, sample_groups
from settings import EvaluateSettings, ExportSettings, GRPOSettings, SampleSettings, SFTSettings
from snug.device.pick import with_dtype
from snug.options import read_settings
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

HERE = Path(__file__).parent
SMALL = "--device=cpu --dtype=float32 --batch_size=2 --group_size=4 --max_new_tokens=6 --eval_prompts=2".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("models") / "qwen")


def run(cls, *words):
    settings, given, _ = read_settings(cls, words)
    (grpo if cls is GRPOSettings else train_sft).main(prepare(settings, given))
    return [json.loads(line) for line in (Path(settings.out_dir) / "log.jsonl").read_text().splitlines()]


def gsm8k(folder, out, *words):
    data = [f"--data_file={HERE}/gsm8k_sample.jsonl", "--test_file=", f"--init_from={folder}", f"--out_dir={out}"]
    more = ["--save_interval=1", "--learning_rate=0.01", "--max_iters=2", "--reward_funcs=lora_rewards:varied"]
    return run(GRPOSettings, "config/grpo_gsm8k.py", *SMALL, *data, *more, *words)


def test_the_config_for_gsm8k_on_a_folder_with_a_reference(folder, tmp_path, varied_rewards):
    log = gsm8k(folder, tmp_path / "run", "--beta=0.1")
    assert [record["iter"] for record in log] == [0, 1] and all(record["grad_norm"] > 0 for record in log)
    assert log[0]["kl"] == pytest.approx(0, abs=1e-7) and log[1]["kl"] > 1e-5  # the reference is the folder's weights
    assert log[0]["logprob_diff_max"] < 1e-5
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert "user\n" in sample["prompt"] and sample["prompt"].endswith("assistant\n")  # as the model reads it
    checkpoint = newest(tmp_path / "run")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (checkpoint / name).read_bytes() == (folder / name).read_bytes()
    loaded = load_run(tmp_path / "run")
    assert loaded.model.config.n_vocab == 259 and loaded.tokenizer.stop_tokens == (258, 256)
    assert loaded.tokenizer.encode_prompt([{"role": "user", "content": "é"}])[:2] == [257, ord("u")]


def test_only_ids_of_the_tokenizer_are_sampled_and_any_stop_token_ends(folder, tmp_path, varied_rewards, monkeypatch):
    """The model has 272 rows and the tokenizer 259 ids; 258 and 256 end a completion."""
    rounds = []

    def keep(*args, **options):
        rounds.append(sample_groups(*args, **options))
        return rounds[-1]

    monkeypatch.setattr("sample.sample_groups", keep)
    gsm8k(folder, tmp_path / "run", "--group_size=128", "--max_iters=1", "--eval_interval=0")
    rollouts = rounds[0]
    T = rollouts.mask.shape[1]
    for completion, stopped in zip(rollouts.completions(), rollouts.stopped.tolist(), strict=True):
        completion = completion[: len(completion) - stopped]
        assert max(completion, default=0) < 259 and not {256, 258} & set(completion)
    last = rollouts.tokens[torch.arange(256), rollouts.prompt_lengths + rollouts.completion_lengths - 1]
    assert ((last == 256) | (last == 258)).equal(rollouts.stopped) and {256, 258} <= set(last.tolist())
    assert (rollouts.completion_lengths[~rollouts.stopped] == T).all()


def test_settings_have_the_models_shape(folder, tmp_path, varied_rewards, capsys):
    """Not the defaults of the options. The run goes on from a checkpoint, which has them too."""
    expected = {name: QWEN[name] for name in QWEN if name != "norm_eps"}
    for words, block_size in (["--max_iters=1"], 32768), (["--resume=auto", "--block_size=4096"], 4096):
        gsm8k(folder, tmp_path / "run", *words)
        shown = json.loads((tmp_path / "run" / "settings.json").read_text())
        settings = json.loads((newest(tmp_path / "run") / "state.json").read_text())["settings"]
        size = sum(p.numel() for p in load_run(tmp_path / "run").model.parameters())
        assert shown == settings | dict(device="cpu", parameters=size, started_in=os.getcwd(), kernels_warning=None)
        assert {name: shown[name] for name in expected} == expected | dict(block_size=block_size)
    assert "resumed after 1 iterations\n" in capsys.readouterr().out


def test_out_again_to_transformers(folder, tmp_path, varied_rewards):
    """Of a run with adapters, which are merged."""
    transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")
    gsm8k(folder, tmp_path / "run", "--lora_rank=4")
    settings = read_settings(ExportSettings, [str(tmp_path / "run"), f"--to={tmp_path}/out"], positional="folder")[0]
    main(settings, tmp_path / "run")
    loaded, messages = load_run(tmp_path / "run", "cpu"), [{"role": "user", "content": "Wie groß ist 2+2?"}]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == loaded.tokenizer.encode_prompt(messages)
    with torch.no_grad():
        tokens = torch.tensor([ids])
        ours = loaded.model.logits(loaded.model(tokens))[..., :259]
        torch.testing.assert_close(theirs(tokens).logits, ours, atol=1e-5, rtol=1e-5)
        before = GPT.from_pretrained(folder)
        assert (before.logits(before(tokens))[..., :259] - ours).abs().max() > 1e-3  # it has learned something
    assert theirs.generation_config.eos_token_id == [258, 256] and their_tokenizer.eos_token == "<|im_end|>"


def test_demonstrations_of_messages_end_with_the_first_stop_token(folder, tmp_path):
    words = f"--data_file={HERE}/gsm8k_sample.jsonl --task=gsm8k --chat --device=cpu".split()
    words += ["--batch_size=4", "--max_iters=2"]
    log = run(SFTSettings, *words, f"--init_from={folder}", f"--out_dir={tmp_path}/sft", "--eval_prompts=0")
    assert all(record["grad_norm"] > 0 for record in log)
    settings, given, _ = read_settings(SFTSettings, [*words, f"--init_from={folder}"])
    prepared = prepare(settings, given)
    model = SimpleNamespace(device=torch.device("cpu"))
    training = SimpleNamespace(prepared=prepared, settings=settings, model=model)
    batch = train_sft.demonstrations(0, training)
    ends = batch.prompt_lengths + batch.completion_lengths - 1
    assert batch.tokens[torch.arange(4), ends].tolist() == [258] * 4
    assert batch.tokens[:, 0].tolist() == [257] * 4  # <|im_start|>


def test_what_does_not_go_together_is_refused(folder, tmp_path):
    begin = ["--task=addition", "--digits=1", f"--init_from={folder}", "--max_new_tokens=6", f"--out_dir={tmp_path}/a"]
    given = {"n_layer=3": "=3, but .*qwen has 1", "tokenizer=bytes": "='bytes', but .*qwen has 'tokenizer"}
    for word, said in given.items():
        assert_refused(said, prepare, *read_settings(GRPOSettings, [*begin, f"--{word}"])[:2])
    shutil.copytree(folder, tmp_path / "large")
    spec = json.loads((tmp_path / "large" / "tokenizer.json").read_text())
    spec["added_tokens"] += [spec["added_tokens"][0] | dict(id=i, content=f"<|{i}|>") for i in range(259, 301)]
    (tmp_path / "large" / "tokenizer.json").write_text(json.dumps(spec))
    settings, given, _ = read_settings(GRPOSettings, [*begin, f"--init_from={tmp_path}/large"])
    with refusal("large with the tokenizer tokenizer.json@.*n_vocab=301 is more than vocab_size=272"):
        prepare(settings, given)
    (tmp_path / "large" / "tokenizer.json").unlink()
    assert_refused("tokenizer.json", prepare, settings, given)


def test_completions_of_a_pretrained_model_are_256_tokens_at_most_or_half_of_its_context(folder, tmp_path, capsys):
    """If most completions are cut off, the run says so."""

    def prepared(*words):
        words = [f"--init_from={folder}", f"--out_dir={tmp_path}/run", "--beta=0", "--device=cpu", "--chat", *words]
        settings, given, _ = read_settings(GRPOSettings, words)
        return prepare(settings, given)

    assert prepared().settings.max_new_tokens == 256
    assert prepared("--max_new_tokens=32").settings.max_new_tokens == 32
    assert prepared("--block_size=150").settings.max_new_tokens == 75
    words = ["--max_new_tokens=3", "--max_iters=1", "--batch_size=2", "--group_size=2", "--eval_prompts=4"]
    grpo.main(prepared(*words))
    assert re.search(r"hint: truncated_fraction .*: raise max_new_tokens", capsys.readouterr().out)
    assert prepared("--resume=auto").settings.max_new_tokens == 3


@pytest.mark.long
def test_the_notebook_of_the_first_hour(folder, tmp_path):
    """From a clean kernel in another folder, with a small model. The file in the repository has no outputs."""
    nbformat, nbclient = (pytest.importorskip(name, reason=f"pip install {name}") for name in ("nbformat", "nbclient"))
    notebook = nbformat.read(HOME / "examples/first_hour.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    assert cells[0].source.startswith("MODEL = ")
    cells[0].source = f"import sys\nsys.path.insert(0, {str(HOME)!r})\nMODEL, ITERATIONS = {str(folder)!r}, 2"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    shown = [json.dumps(cell.outputs) for cell in cells]
    assert "peak_gib=" in shown[2] and "GRPO is done;" in shown[3] and "GRPO is done;" in shown[-1]
    assert "mem_max_alloc_mb" in shown[-2] and len(read_log(tmp_path / "out/first_hour")) == 4


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind, computed", [("cuda", "bfloat16"), ("cpu", "float32")])
def test_a_folder_is_evaluated_in_the_type_in_which_it_would_train(stored, kind, computed, tmp_path, monkeypatch):
    """And sampled. On a GPU float32 weights under autocast, bfloat16 weights as they are. The CPU plays the GPU for this rule."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs.loading, "with_dtype", lambda settings, _: with_dtype(settings, kind))
    forward, seen = GPT.forward, set()
    monkeypatch.setattr(GPT, "forward", lambda model, *a, **k: seen.add(model.compute_dtype) or forward(model, *a, **k))
    save_pretrained(GPT(GPTConfig(**QWEN)).to(getattr(torch, stored)), tmp_path / "folder", get_tokenizer("bytes"))
    options = EvaluateSettings(task="addition", num_prompts=2, num_samples=1, max_new_tokens=3, device="cpu")
    prepared, _ = evaluate.prepare_evaluation(options, {"task", "max_new_tokens"}, tmp_path / "folder")
    evaluate.main(options, prepared, None)
    loaded = load_run(tmp_path / "folder", "cpu")
    complete(SampleSettings(prompt="1+1=", max_new_tokens=3), {"prompt", "max_new_tokens"}, loaded)
    assert seen == {getattr(torch, computed)} and loaded.settings.dtype == computed
    weights = stored if kind == "cuda" else "float32"
    assert loaded.model.embedding.weight.dtype == getattr(torch, weights)
