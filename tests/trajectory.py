"""Fifty optimizer steps on rollouts that are kept in tests/data: one trajectory of losses and gradient norms for every way to compute it.

    python tests/trajectory.py        makes tests/data/trajectory.{safetensors,json} anew: only when GRPO itself has changed

The rollouts are a run's own (two-digit additions, two steps a rollout, a KL penalty, clipping), so on the way back ratios are
what they were. test_trajectory.py takes the steps again, by every option that keeps precision.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from safetensors.torch import load_file, save_file

import grpo
from batch import Cut
from model import make_model
from runs.checkpoint import newest
from runs.loading import configure
from runs.prepare import prepare
from sample import Rollouts
from settings import GRPOSettings, SFTSettings
from snug.device.processes import OneProcess
from training.optimizer import make_optimizer, optimizer_step

FILE = Path(__file__).parent / "data/trajectory.safetensors"
ROLLOUTS = 25
COLUMNS = "tokens prompt_lengths completion_lengths sampling_logprobs mask stopped advantages ref_logprobs".split()
SHAPE = dict(digits=2, n_layer=2, n_embd=32, block_size=20, device="cpu", eval_prompts=0, save_interval=0)
TRAIN = dict(batch_size=8, group_size=4, train_batch_size=16, max_new_tokens=10, beta=0.04, learning_rate=1e-3)
TRAIN |= dict(scale_rewards="group", epsilon_high=0.28)


def closeness(prompts, completions, answer, **columns):
    """A reward that a warm start of seconds earns unevenly: how many of the last three characters are right."""
    return [
        sum(a == b for a, b in zip(c[-3:], f"{r:>3}"[-3:], strict=False)) / 3
        for c, r in zip(completions, map(str, answer), strict=True)
    ]


def settings(**changes):
    return GRPOSettings(**SHAPE | TRAIN | dict(init_from="kept", max_iters=ROLLOUTS) | changes)


def make():
    """Run, keep what it learned from, and write it down with its losses."""
    kept = {}
    with tempfile.TemporaryDirectory() as home:
        sft = SFTSettings(**SHAPE, out_dir=f"{home}/sft", max_iters=60, learning_rate=3e-3)
        grpo.train_sft.main(prepare(sft))
        folders = dict(init_from=sft.out_dir, out_dir=f"{home}/grpo")
        prepared = prepare(GRPOSettings(**SHAPE | TRAIN | folders, max_iters=ROLLOUTS))
        prepared.reward_funcs = [closeness]
        original, seen = grpo.teaches, []

        def teaches(rollouts, *rest):
            """Called once before each optimizer step, two of a rollout."""
            iteration = len(seen) // 2
            seen.append(None)
            for name in COLUMNS:
                value = getattr(rollouts, name)
                value = value if value.is_floating_point() else value.to(torch.int16)
                kept[f"{iteration}.{name}"] = value.contiguous()
            return original(rollouts, *rest)

        grpo.teaches = teaches
        weights = load_file(newest(sft.out_dir) / "model.safetensors")
        kept |= {f"model.{name}": value for name, value in weights.items()}
        grpo.main(prepared)
    save_file(kept, FILE)
    FILE.with_suffix(".json").write_text(json.dumps(take(settings())) + "\n")


def take(settings, device="cpu", processes=None):
    """Two steps of each of max_iters rollouts -> [[loss, gradient norm], ...]. processes: those that share the work."""
    kept = load_file(FILE)
    weights = {name[6:]: value for name, value in kept.items() if name.startswith("model.")}
    prepared = prepare(GRPOSettings(**SHAPE | TRAIN | dict(beta=0.0)))
    model = make_model(prepared.shape, torch.device(device))
    assert weights.keys() == dict(model.named_parameters()).keys()
    model.load_state_dict(weights, strict=False)  # a tied head has no weights of its own
    processes = processes or OneProcess()
    model = processes.shard(configure(model, settings), torch.device(device))
    optimizer, steps = make_optimizer(model, settings), []
    for iteration in range(settings.max_iters):
        columns = {name: kept[f"{iteration}.{name}"].to(device) for name in COLUMNS}
        columns |= {name: value.long() for name, value in columns.items() if not value.is_floating_point()}
        columns["stopped"] = columns["stopped"].bool()
        rollouts = Rollouts(**columns, old_logprobs=columns["sampling_logprobs"])
        cut = Cut(rollouts, 16, settings.max_tokens_per_micro_batch, processes=processes)
        for step in (0, 1):
            optimizer.zero_grad(set_to_none=True)
            metrics = grpo.accumulate_gradient(model, rollouts, cut, step, settings)
            loss = cut.processes.add_up(model, optimizer, metrics)["loss"]
            rate, clip = settings.learning_rate, settings.grad_clip
            steps.append([loss, optimizer_step(model, optimizer, rate, clip, processes.norm)])
    return steps


if __name__ == "__main__":
    make()
    losses = json.loads(FILE.with_suffix(".json").read_text())
    print(f"{FILE}: {FILE.stat().st_size:,} bytes, {len(losses)} steps, the first {losses[0]}, the last {losses[-1]}")
