"""What a checkpoint holds, what is refused, and that a resumed run is the uninterrupted one."""

import dataclasses
import json
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import grpo
import train_sft
from helpers import HOME
from helpers.errors import assert_refused, refusal
from helpers.runs import HALVED, OPTIMIZERS, figures, reward_that_draws, saved, tiny, trained, weights
from runs import checkpoint, loading
from runs.log import read_log
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings
from snug.options import SnugError, read_settings
from snug.tokenizer import get_tokenizer


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys):
    """Bits flipped, files cut, pickles in their place: never loaded, never an error while there is another."""
    assert_refused("has no checkpoint", checkpoint.newest, tmp_path)
    before, path = saved(tmp_path, iteration=2)[2], saved(tmp_path, iteration=4)[2]
    rng = random.Random(0)
    for number in range(60):
        file = path / rng.choice(["model.safetensors", "optimizer.safetensors", "state.json"])
        content = file.read_bytes()
        at = rng.randrange(len(content))
        flipped = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        file.write_bytes([flipped, flipped, content[:at], pickle.dumps({"a": 1})][number % 4])
        assert checkpoint.newest(tmp_path, checkpoint.OF_A_RUN) == before
        file.write_bytes(content)
    assert checkpoint.newest(tmp_path, checkpoint.OF_A_RUN) == path
    (path / "manifest.json").write_bytes(b"{")
    assert checkpoint.newest(tmp_path, checkpoint.OF_A_RUN) == before
    checkpoint.seal(path)
    notes = capsys.readouterr().err
    assert "checkpoint-000004" in notes and "; the one before is used" in notes
    (path / "model.safetensors").write_bytes(b"")
    (before / "state.json").unlink()
    assert_refused("state.json.*; .* has no undamaged checkpoint", loading.load_run, tmp_path)
    assert_refused("model.safetensors is not what was written", checkpoint.newest, path)


def test_a_signal_ends_the_run_after_the_iteration_and_nothing_is_lost(tmp_path, number=signal.SIGINT):
    """Exit code 0, a checkpoint, and the same end as a run that was let alone."""
    sft, _ = tiny(tmp_path)
    sft = dataclasses.replace(sft, max_iters=150, save_interval=0, eval_prompts=0)
    whole = dataclasses.replace(sft, out_dir=str(tmp_path / "whole"))
    train_sft.main(prepare(whole))
    (tmp_path / "config.py").write_text("".join(f"{name} = {value!r}\n" for name, value in vars(sft).items()))
    command = [sys.executable, "train_sft.py", tmp_path / "config.py"]
    child = subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("iter   5"):
            child.send_signal(number)
            break
    out, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    assert f"stopped by {number.name} after iteration " in out and "and saved; SFT goes on with --resume=" in out
    assert 4 <= checkpoint.read_state(checkpoint.newest(sft.out_dir))["iteration"] < 150
    train_sft.main(prepare(dataclasses.replace(sft, resume="auto")))
    assert figures(sft.out_dir) == figures(whole.out_dir)
    assert weights(sft.out_dir) == weights(whole.out_dir)


def out_of_memory_at(monkeypatch, train, rollout):
    """A device on which one iteration's training, and another's rollout, do not fit in one piece."""
    original = grpo.sample_rows, grpo.accumulate_gradient
    now = []

    def rolled(model, prepared, rows, iteration, turn, max_batch):
        now[:] = [iteration]
        if iteration == rollout and not max_batch:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return original[0](model, prepared, rows, iteration, turn, max_batch)

    def accumulated(model, rollouts, cut, step, **rest):
        if now == [train] and len(cut.steps[step]) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return original[1](model, rollouts, cut, step, **rest)

    monkeypatch.setattr(grpo, "sample_rows", rolled)
    monkeypatch.setattr(grpo, "accumulate_gradient", accumulated)


@pytest.mark.parametrize(
    "options, cuts, iters",
    [  # after an evaluation, after an out-of-memory in training, after one in a rollout; after each
        (OPTIMIZERS[3], [2, 4, 5], 6),
        (HALVED | dict(linear=True, optimizer_device="host"), [4], 5),
        *(pytest.param(options, range(1, 9), 9, marks=pytest.mark.long) for options in OPTIMIZERS),
        pytest.param(HALVED | dict(linear=True), range(1, 9), 9, marks=pytest.mark.long),
    ],
)
def test_a_run_cut_anywhere_resumes_bit_for_bit(tmp_path, monkeypatch, options, cuts, iters):
    """The uninterrupted run's checkpoint number `cut` is all that is left, beside logs that went on: the rest comes out the same."""
    out_of_memory_at(monkeypatch, train=3, rollout=4)
    changes = dict(max_iters=iters, lr_schedule="linear", train_batch_size=8)
    changes |= dict(eval_interval=2, save_interval=1, save_total_limit=99)
    sft, settings = tiny(tmp_path, **changes, **options)
    train_sft.main(prepare(sft))
    random.seed(1), np.random.seed(1)
    whole = trained(settings, reward_that_draws)
    log = read_log(settings.out_dir)
    assert [record["grad_norm"] > 0 for record in log] == [True] * iters and "pass_at_1" in log[1]
    assert checkpoint.read_state(whole)["after_oom"].keys() == {"max_tokens_per_micro_batch", "max_rollout_batch"}
    for cut in cuts:
        broken = dataclasses.replace(settings, out_dir=str(tmp_path / f"cut{cut}"), resume="auto")
        path = Path(settings.out_dir) / f"checkpoint-{cut:06d}"
        shutil.copytree(path, Path(broken.out_dir) / path.name)
        for name in ("log.jsonl", "samples.jsonl"):
            shutil.copy(Path(settings.out_dir) / name, broken.out_dir)
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        resumed = trained(broken, reward_that_draws)
        assert figures(broken.out_dir) == figures(settings.out_dir)
        for name in ("model.safetensors", "optimizer.safetensors"):
            ours, theirs = (safetensors.torch.load_file(folder / name) for folder in (resumed, whole))
            assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)
        ours, theirs = (checkpoint.read_state(folder) for folder in (resumed, whole))
        for name in ("generators", "after_oom", "optimizer_steps", "health", "extra_prompts"):
            assert ours[name] == theirs[name], name
        ours, theirs = (Path(folder) / "samples.jsonl" for folder in (broken.out_dir, settings.out_dir))
        assert ours.read_bytes() == theirs.read_bytes()
        shutil.rmtree(broken.out_dir)


def write_settings(folder, *gone, **changed):
    """Into the newest checkpoint, with checksums that fit."""
    path = checkpoint.newest(folder)
    state = json.loads((path / "state.json").read_text())
    state["settings"] = {name: value for name, value in state["settings"].items() if name not in gone} | changed
    (path / "state.json").write_text(json.dumps(state))
    checkpoint.seal(path)


def test_weights_that_become_bfloat16_keep_float32_masters(tmp_path):
    sft = dataclasses.replace(tiny(tmp_path)[0], max_iters=1, eval_prompts=0, dtype="bfloat16")
    train_sft.main(prepare(sft))
    before = safetensors.torch.load_file(checkpoint.newest(sft.out_dir) / "model.safetensors")
    more = dict(param_dtype="bfloat16", learning_rate=0.0, weight_decay=0.0)
    train_sft.main(prepare(dataclasses.replace(sft, resume="auto", max_iters=2, **more)))
    after = safetensors.torch.load_file(checkpoint.newest(sft.out_dir) / "optimizer.safetensors")
    assert all(after[f"master.{name}"].equal(weight) for name, weight in before.items())


def test_a_checkpoint_of_an_older_version_resumes(tmp_path, capsys):
    """It has options that are gone, and lacks newer ones: these have their defaults. What is no choice now is refused."""
    sft, _ = tiny(tmp_path, max_iters=1)
    sft = dataclasses.replace(sft, max_iters=1, eval_prompts=0)
    train_sft.main(prepare(sft))
    write_settings(sft.out_dir, "stop_string", cuda_allocator="expandable", kv_cache_mb=3)
    assert loading.load_run(sft.out_dir).settings.stop_string == ""
    again = dataclasses.replace(sft, resume="auto", max_iters=2)
    train_sft.main(prepare(again))
    assert [record["iter"] for record in read_log(sft.out_dir)] == [0, 1]
    write_settings(sft.out_dir, baseline="mean", countdown_form="tags", format_reward=0.0)
    assert loading.load_run(sft.out_dir).iteration == 2
    assert capsys.readouterr().err.endswith("000002 has options that are gone, ignored: {'countdown_form': 'tags'}\n")
    assert_refused("the run has options that are gone, {'countdown_form': 'tags'}: use the version", prepare, again)
    write_settings(sft.out_dir, lr_schedule="step", countdown_form="terse")
    words = [f"--resume={sft.out_dir}"]
    assert_refused("lr_schedule='step' is not one of", prepare, *read_settings(SFTSettings, words)[:2])
    assert prepare(*read_settings(SFTSettings, [*words, "--lr_schedule=linear"])[:2]).settings.lr_schedule == "linear"
    write_settings(sft.out_dir, task="countdown", countdown_numbers="5", tools=["calc", "a:b"])
    settings = loading.load_run(sft.out_dir).settings
    assert (settings.task, settings.countdown_numbers) == ("examples.countdown:Countdown", "5")
    assert settings.tools == ["examples.tools:calc", "a:b"]


def test_all_files_are_compared_once_and_damaged_ones_are_not_loaded(tmp_path, monkeypatch, capsys):
    """A plan reads no tensors."""
    sft, settings = tiny(tmp_path, eval_prompts=0, max_iters=2, save_interval=1)
    train_sft.main(prepare(dataclasses.replace(sft, eval_prompts=0)))
    lora = dataclasses.replace(settings, lora_rank=2, out_dir=str(tmp_path / "lora"), max_iters=1)
    for each in (settings, lora):
        grpo.main(prepare(each))
    real, read = checkpoint.sha256, []
    monkeypatch.setattr(checkpoint, "sha256", lambda file: read.append(file.name) or real(file))
    resumed = dataclasses.replace(settings, resume="auto")
    prepare(dataclasses.replace(resumed, plan=True))
    assert read and not [name for name in read if name.endswith(".safetensors")]
    prepare(resumed)  # the run, and the reference
    assert read.count("model.safetensors") == 2 and read.count("optimizer.safetensors") == 1

    def flip(folder, name):
        """One bit of the newest checkpoint's file."""
        file = checkpoint.newest(folder, ()) / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    flip(settings.out_dir, "optimizer.safetensors")
    assert prepare(resumed).resume.path.name == "checkpoint-000001"
    flip(sft.out_dir, "model.safetensors")
    assert prepare(resumed).origin.path.name == "checkpoint-000002" and len(capsys.readouterr().err.splitlines()) == 2
    with pytest.raises(SnugError, match="checkpoint-000004: model.safetensors is not what was written"):
        prepare(dataclasses.replace(lora, resume="auto"))  # these adapters have no other base


@pytest.mark.parametrize("dtype, other", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_keeps_its_dtype_unless_another_is_named(dtype, other, tmp_path):
    """On any device: prepared, it is no longer "auto", so no device is asked."""
    sft = dataclasses.replace(tiny(tmp_path)[0], dtype="auto", device="cpu", max_iters=1, eval_prompts=0)
    train_sft.main(prepare(dataclasses.replace(sft, dtype=dtype)))
    again = dataclasses.replace(sft, resume="auto", max_iters=2)
    assert prepare(sft).settings.dtype == "auto" and prepare(again).settings.dtype == dtype
    assert prepare(dataclasses.replace(again, dtype=other)).settings.dtype == other
    train_sft.main(prepare(again))
    log = (Path(sft.out_dir) / "log.txt").read_text()
    assert log.count(f" parameters on cpu in {dtype}, ") == 2 and "dtype was" not in log
    assert json.loads((Path(sft.out_dir) / "settings.json").read_text())["dtype"] == dtype
    assert loading.load_run(sft.out_dir, "cpu").settings.dtype == dtype
    if dtype == "float32":
        with pytest.raises(SnugError, match="dtype=float32 does not support param_dtype=bfloat16; use"):
            prepare(dataclasses.replace(again, param_dtype="bfloat16"))


def test_a_run_goes_on_by_the_name_of_its_folder(tmp_path):
    """With its own options; those that are given replace them."""
    sft, settings = tiny(tmp_path)
    sft = dataclasses.replace(sft, max_iters=2, eval_prompts=0)
    train_sft.main(prepare(sft))
    words = [f"--resume={sft.out_dir}", "--max_iters=4", "--learning_rate=0.25"]
    again, given, _ = read_settings(SFTSettings, words)
    prepared = prepare(again, given)
    shape = {name: getattr(prepared.settings, name) for name in ("vocab_size", "n_kv_head", "n_hidden")}
    assert prepared.settings == dataclasses.replace(sft, resume="auto", max_iters=4, learning_rate=0.25, **shape)
    train_sft.main(prepared)
    assert [record["iter"] for record in read_log(sft.out_dir)] == list(range(4))
    changed = "resumed after 2 iterations\n"
    assert changed in (Path(sft.out_dir) / "log.txt").read_text()
    with refusal(f"{sft.out_dir} is a run of `python train_sft.py`; continue it with that command"):
        prepare(*read_settings(GRPOSettings, words[:1])[:2])
    with pytest.raises(SnugError, match="is a run of `python train_sft.py`; continue it with that command"):
        prepare(dataclasses.replace(settings, out_dir=sft.out_dir, init_from="", beta=0.0, resume="auto"))
    for folder in (checkpoint.newest(sft.out_dir), tmp_path / "none"):
        with pytest.raises(SnugError, match=f"resume={folder} has no checkpoint; name a run's folder"):
            prepare(*read_settings(SFTSettings, [f"--resume={folder}"])[:2])


def test_what_a_resumed_run_cannot_change_is_refused_by_name(tmp_path):
    """The model, its shape, the tokenizer and the task, by the folder's name and with resume=auto."""
    sft, settings = tiny(tmp_path, max_iters=1, eval_prompts=0)
    for each in (sft, dataclasses.replace(sft, out_dir=f"{tmp_path}/other", seed=2)):
        train_sft.main(prepare(dataclasses.replace(each, max_iters=1, eval_prompts=0)))
    grpo.main(prepare(settings))
    get_tokenizer("bytes").save(tmp_path / "tokenizer")
    file = tmp_path / "tokenizer/tokenizer.json"
    file.write_text(file.read_text().replace('"normalizer":null', '"normalizer":{"type":"NFC"}'))
    for name, value, said in (
        ("init_from", f"{tmp_path}/other", f"init_from was '{sft.out_dir}', is '{tmp_path}/other'; restore them, or"),
        ("n_layer", 3, "n_layer=3, but .*checkpoint-000001 has 1; leave n_layer out"),
        ("tokenizer", f"{tmp_path}/tokenizer", "but .*checkpoint-000001 has 'bytes'; leave tokenizer out"),
        ("digits", 3, "cannot go on with other options: digits was 2, is 3"),
        ("tools", ["examples.tools:calc"], "cannot go on with other options: tools was .., is .'examples.tools:calc'."),
    ):
        word = f"--{name}={','.join(value) if isinstance(value, list) else value}"
        by_name, given, _ = read_settings(GRPOSettings, [f"--resume={settings.out_dir}", word])
        again = dataclasses.replace(settings, resume="auto", **{name: value})
        for changed, chosen in ((by_name, given), (again, {name})):
            assert_refused(said, prepare, changed, chosen)
    again = dataclasses.replace(settings, resume="auto", max_iters=2)
    prepare(dataclasses.replace(again, teacher=sft.out_dir))
    prepare(dataclasses.replace(again, init_from=f"{tmp_path}/other/../sft/"))  # another name of the same folder
    assert prepare(dataclasses.replace(again, init_from="")).settings.init_from == sft.out_dir
    (tmp_path / "sft").rename(tmp_path / "moved")
    moved = prepare(dataclasses.replace(again, init_from=f"{tmp_path}/moved"))
    assert moved.origin.path == tmp_path / "moved/checkpoint-000001"


def test_a_run_of_several_processes_goes_on_alone_and_a_warm_start_of_another_task_is_refused(tmp_path):
    sft, settings = tiny(tmp_path, max_iters=1, eval_prompts=0)
    train_sft.main(prepare(dataclasses.replace(sft, max_iters=1, eval_prompts=0)))
    write_settings(sft.out_dir, parallel="ddp", num_processes=2)
    again = prepare(*read_settings(SFTSettings, [f"--resume={sft.out_dir}", "--max_iters=2"])[:2])
    assert again.settings.parallel == "none" and again.settings.num_processes == 1
    config = tmp_path / "warm.py"
    config.write_text(f"out_dir = {sft.out_dir!r}\nmax_iters = 1\n")
    words = [f"--init_from={config}", f"--out_dir={tmp_path / 'new'}", f"--digits={sft.digits + 1}"]
    with refusal(f"sft cannot go on with other options: digits was {sft.digits}, is {sft.digits + 1}; restore"):
        prepare(*read_settings(GRPOSettings, words)[:2])
