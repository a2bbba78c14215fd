"""What a checkpoint holds, what is refused, and that a resumed run is the uninterrupted one."""

import dataclasses
import json
import pickle

import pytest
import torch
from conftest import make_model
from test_grpo import run, tiny

import checkpoint
import grpo
import train_sft
from log import read_log
from optimizer import make_optimizer, optimizer_step
from prepare import prepare
from settings import SFTSettings, SnugError
from tokenizer import get_tokenizer


def saved(tmp_path, shape="gpt2", iteration=7, limit=2):
    """A model with moments, saved -> (model, optimizer, path)."""
    model = make_model(shape)
    optimizer = make_optimizer(model, SFTSettings())
    for _ in range(3):
        model.logits(model(torch.arange(20, device=model.device).view(2, 10))).logsumexp(-1).sum().backward()
        optimizer_step(model, optimizer, 1e-3, 1.0)
    checkpoint.save(tmp_path, iteration, model, optimizer, SFTSettings(seed=4), get_tokenizer("bytes"), limit)
    return model, optimizer, checkpoint.newest(tmp_path)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_weights_moments_and_generators_come_back(tmp_path, shape):
    model, optimizer, path = saved(tmp_path, shape)
    expected = torch.get_rng_state()
    torch.manual_seed(99)
    other = make_model(shape, seed=5)
    other_optimizer = make_optimizer(other, SFTSettings())
    checkpoint.load_weights(path, other)
    checkpoint.load_optimizer(path, other, other_optimizer)
    state = checkpoint.read_state(path)
    checkpoint.restore_generators(state["generators"], other.device)
    assert torch.get_rng_state().equal(expected)
    assert (state["iteration"], state["settings"]["seed"], state["tokenizer"], state["optimizer_steps"]) == (7, 4, "bytes", 3)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert ours.equal(theirs)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert other_optimizer.state[ours][key].equal(optimizer.state[theirs][key])


def test_the_newest_are_kept(tmp_path):
    for iteration in (2, 4, 6):
        saved(tmp_path, iteration=iteration)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-000004", "checkpoint-000006"]
    assert not list(tmp_path.glob(".tmp*"))


def test_a_save_that_dies_leaves_the_one_before(tmp_path, monkeypatch):
    _, _, path = saved(tmp_path, iteration=2)
    monkeypatch.setattr(checkpoint.os, "rename", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path, iteration=4)
    assert checkpoint.newest(tmp_path) == path
    monkeypatch.undo()
    assert saved(tmp_path, iteration=4)[2].name == "checkpoint-000004"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "pickle", "header"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    _, _, path = saved(tmp_path)
    file = path / name
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(
            {"cut": content[:-100], "empty": b"", "pickle": pickle.dumps({"a": 1}), "header": b"\xff" * 8 + content[8:]}[damage]
        )
    with pytest.raises(SnugError, match=name):
        checkpoint.load_run(tmp_path, "cpu")


def test_what_does_not_fit_is_named(tmp_path):
    _, _, path = saved(tmp_path)
    with pytest.raises(SnugError, match=r"does not fit the model; missing \['blocks.2.attention.proj.bias'"):
        checkpoint.load_weights(path, make_model("gpt2", n_layer=3))
    with pytest.raises(SnugError, match=r"embedding.weight has shape \(67, 32\), the model \(68, 32\)"):
        checkpoint.load_weights(path, make_model("gpt2", vocab_size=68))
    state = json.loads((path / "state.json").read_text())
    state["model_config"]["n_heads"] = 3
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(SnugError, match="n_heads"):
        checkpoint.load_run(tmp_path, "cpu")


def test_no_run_and_no_checkpoint_are_told_apart(tmp_path):
    with pytest.raises(SnugError, match="there is no such run"):
        checkpoint.newest(tmp_path / "nowhere")
    with pytest.raises(SnugError, match="has no checkpoint"):
        checkpoint.newest(tmp_path)


TIMES = ("time_", "tokens_per_second", "mem_")  # the first iteration of a process makes what a later one has


def figures(folder):
    return [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in read_log(folder)]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    sft, settings = tiny(tmp_path, max_iters=6, lr_schedule="linear", eval_interval=2)
    train_sft.main(prepare(sft))
    run(settings)
    broken = dataclasses.replace(settings, out_dir=str(tmp_path / "broken"))

    class Killed(Exception):
        pass

    def killed(iteration, *args):
        if iteration == 5:
            raise Killed
        return iterate(iteration, *args)

    iterate, grpo.iterate = grpo.iterate, killed
    try:
        with pytest.raises(Killed):
            run(broken)
    finally:
        grpo.iterate = iterate
    assert len(read_log(broken.out_dir)) == 5 and checkpoint.newest(broken.out_dir).name == "checkpoint-000004"
    broken.resume = "auto"
    run(broken)
    assert figures(broken.out_dir) == figures(settings.out_dir) and figures(settings.out_dir)[5]["kl"] > 0
    assert (tmp_path / "broken/samples.jsonl").read_text() == (tmp_path / "grpo/samples.jsonl").read_text()
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (checkpoint.newest(folder) / name for folder in (broken.out_dir, settings.out_dir))
        assert ours.name == theirs.name and ours.read_bytes() == theirs.read_bytes()
