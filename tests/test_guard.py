"""NaN and infinity, wherever they come from: no bad update is applied; the step is named, kept, and can be taken again."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

import grpo
import train_sft
from helpers.errors import assert_refused
from helpers.runs import OPTIMIZERS, figures, refused, tiny, weights
from runs import checkpoint
from runs.loading import tensors_of
from runs.log import read_log
from runs.prepare import prepare
from snug.decoding import decode_batch
from snug.options import SnugError
from training import state
from training.optimizer import gradients_of

# what is poisoned, which part of it, and with what
PLACES = [("loss", "", "nan"), ("advantages", "", "inf"), ("ref_logprobs", "", "nan")]
PLACES += [("sampling_logprobs", "", "-inf")]
PLACES += [("reward", "", "nan"), ("gradient", "embedding.weight", "inf"), ("train", "norm", "inf")]
PLACES += [("rollout", "blocks.1.mlp", "-inf"), ("logits", "rollout", "inf"), ("logits", "train", "nan")]
PLACES += [("reference", "blocks.1.mlp", "inf")]


class Poison:
    """Puts a value into one place of iteration 1, and notes the weights and moments before and after each iteration."""

    def __init__(self, monkeypatch, what, name, value):
        self.what, self.name, self.value, self.now, self.states = what, name, float(value), -1, []
        self.patch = monkeypatch
        places = [(grpo, "policy_loss"), (grpo, "teaches"), (grpo, "iterate")]
        for module, function in [*places, (state, "optimizer_step"), (decode_batch, "sample_tokens")]:
            monkeypatch.setattr(module, function, getattr(self, function))

    def here(self, what):
        return self.now == 1 and self.what == what

    originals = dict(iterate=grpo.iterate, policy_loss=grpo.policy_loss, teaches=grpo.teaches)
    originals |= dict(optimizer_step=state.optimizer_step, sample_tokens=decode_batch.sample_tokens)

    def iterate(self, iteration, training):
        self.training, self.now = training, iteration
        if iteration == 0:
            for model, phases in ((training.model, ("train", "rollout")), (training.reference, ("reference",))):
                for name, module in model.named_modules():
                    hook = lambda _, args, out, name=name, phases=phases: self.output(name, out, phases)  # noqa: E731
                    module.register_forward_hook(hook)
        self.states.append(self.state())
        try:
            return self.originals["iterate"](iteration, training)
        finally:
            self.states.append(self.state())

    def state(self):
        tensors = tensors_of(self.training.model, self.training.optimizer)
        return {name: tensor.clone() for named in tensors.values() for name, tensor in named.items()}

    def output(self, name, out, phases):
        here = name == self.name and self.what in phases and self.here(self.training.meter.now)
        if here and isinstance(out, torch.Tensor):
            out = out.clone()
            out[0, :, 3] = self.value
        return out

    def sample_tokens(self, model, hidden, *arguments, **options):
        """Bad logits of a row, for the kernel and for plain torch: from a bad hidden state."""
        if self.here("logits") and self.training.meter.now == self.name == "rollout":
            hidden = hidden.clone()
            hidden[0] = self.value
        return self.originals["sample_tokens"](model, hidden, *arguments, **options)

    def policy_loss(self, logprobs, *arguments, **options):
        if self.here("logits") and self.name == "train":
            logprobs = logprobs + torch.tensor([self.value] + [0.0] * (len(logprobs) - 1), device=logprobs.device)
        loss, metrics = self.originals["policy_loss"](logprobs, *arguments, **options)
        return loss + self.value if self.here("loss") else loss, metrics

    def teaches(self, rollouts, *arguments):
        if self.now == 1 and self.what in ("advantages", "sampling_logprobs", "ref_logprobs"):
            getattr(rollouts, self.what).view(-1)[0] = self.value
        return self.originals["teaches"](rollouts, *arguments)

    def optimizer_step(self, model, optimizer, *arguments):
        if self.here("gradient"):
            gradients_of(model, optimizer)[self.name].view(-1)[-1] = self.value
        return self.originals["optimizer_step"](model, optimizer, *arguments)

    def reward(self, prompts, completions, **columns):
        answer = [sum(map(ord, c)) % 7 / 7 for c in completions]
        return [self.value, *answer[1:]] if self.here("reward") else answer


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Where all runs begin: the folder of one SFT iteration."""
    home = tmp_path_factory.mktemp("start")
    train_sft.main(prepare(dataclasses.replace(tiny(home)[0], n_layer=2, eval_prompts=0, max_iters=1)))
    return str(home / "sft")


def poisoned(tmp_path, monkeypatch, start, place, **changes):
    poison = Poison(monkeypatch, *place)
    _, settings = tiny(tmp_path, **{"init_from": start, "n_layer": 2, "eval_prompts": 0, "max_iters": 3} | changes)
    prepared = prepare(settings)
    prepared.reward_funcs = [poison.reward]
    return poison, prepared, settings


def same(a, b):
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("number", range(len(PLACES)), ids=["-".join(filter(None, place)) for place in PLACES])
def test_no_bad_update_is_applied(tmp_path, monkeypatch, start, number):
    """Iteration 1 is poisoned: nothing changes in it, bit for bit; iterations 0 and 2 learn."""
    place, options = PLACES[number], OPTIMIZERS[number % len(OPTIMIZERS)]
    poison, prepared, settings = poisoned(tmp_path, monkeypatch, start, place, save_interval=0, **options)
    if place[0] == "reward":
        assert_refused(r"reward function reward returned (nan|inf|-inf) for the completion", grpo.main, prepared)
        assert same(poison.states[2], poison.states[3])
        return
    grpo.main(prepared)
    before, after = poison.states[0::2], poison.states[1::2]
    assert same(before[1], after[1]) and not same(before[0], after[0]) and not same(before[2], after[2])
    assert all(tensor.isfinite().all() for state in after for tensor in state.values())
    log = read_log(settings.out_dir)
    assert [record["dropped_steps"] for record in log] == [0, 1, 1]
    assert ["loss" in record for record in log] == [True, False, True]
    found = (Path(settings.out_dir) / "log.txt").read_text()
    if place[0] in ("advantages", "sampling_logprobs", "ref_logprobs"):
        assert f"the batch: {place[0]} has NaN or infinity" in found
    elif place[0] == "gradient":
        assert f"the gradient: {place[1]} has NaN or infinity (" in found
    elif place[0] in ("rollout", "reference") or place[:2] == ("logits", "rollout"):
        assert f"the batch: {'ref' if place[0] == 'reference' else 'sampling'}_logprobs" in found
    elif place[0] == "loss":
        assert "loss " + place[2] in found


def fall_ill(monkeypatch, after):
    """All gradients after so many steps are bad; three in a row end the run."""
    original, steps = state.optimizer_step, itertools.count()

    def ill(model, optimizer, *arguments):
        if next(steps) >= after:
            next(model.parameters()).grad[0, 0] = float("nan")
        return original(model, optimizer, *arguments)

    monkeypatch.setattr(state, "optimizer_step", ill)
    monkeypatch.setattr("training.guard.MAX_DROPPED_STEPS", 3)


def test_the_run_stops_after_a_number_in_a_row_and_goes_on_from_the_newest_checkpoint(tmp_path, monkeypatch):
    """From iteration 4 on every gradient is bad. Then it is mended: the end is that of a run that was never ill."""
    sft, _ = tiny(tmp_path)
    sft = dataclasses.replace(sft, max_iters=9, save_interval=1, save_total_limit=1, eval_prompts=0)
    healthy = dataclasses.replace(sft, out_dir=str(tmp_path / "healthy"))
    train_sft.main(prepare(healthy))
    fall_ill(monkeypatch, after=4)
    said = refused(train_sft.main, prepare(sft))
    assert "3 optimizer steps in a row were not finite; the last was a step of iteration 6, seed 1, " in said
    assert "sequences 0 to 15: the gradient: embedding.weight" in said
    assert f"goes on from {sft.out_dir}/checkpoint-000004; if that fails too, delete this checkpoint" in said
    assert [path.name for path in checkpoint.checkpoints(sft.out_dir)] == ["checkpoint-000004"]
    monkeypatch.undo()
    train_sft.main(prepare(dataclasses.replace(sft, resume="auto")))
    assert figures(sft.out_dir) == figures(healthy.out_dir)
    assert weights(sft.out_dir) == weights(healthy.out_dir)


def test_the_count_in_a_row_outlives_the_process(tmp_path, monkeypatch):
    """Two dropped steps, SIGTERM's save, and one more after the resume are three."""
    sft, _ = tiny(tmp_path)
    sft = dataclasses.replace(sft, max_iters=3, save_interval=1, eval_prompts=0)
    fall_ill(monkeypatch, after=1)
    train_sft.main(prepare(sft))  # its last save is made all the same
    health = checkpoint.read_state(checkpoint.newest(sft.out_dir))["health"]
    assert health == {"dropped_steps": 2, "dropped_in_a_row": 2}
    with pytest.raises(SnugError, match="3 optimizer steps in a row .* the last was a step of iteration 3"):
        train_sft.main(prepare(dataclasses.replace(sft, max_iters=9, resume="auto")))
