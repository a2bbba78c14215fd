"""Tiny runs: settings that take seconds, their folders, and what is compared of them."""

import itertools
import json
import random
import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file

import grpo
from data.task import Task
from helpers import HOME
from helpers.commands import python
from helpers.errors import refusal
from helpers.models import DEVICE, make_flat_model, make_linear_model, make_model
from runs import checkpoint
from runs.checkpoint import Checkpoint, class_of_runs, newest
from runs.evaluation import prepare_evaluation
from runs.log import read_lines, read_log
from runs.prepare import Prepared, prepare
from runs.saver import Saver
from settings import EvaluateSettings, GRPOSettings, SFTSettings
from snug.memory import Limits
from snug.options import read_settings
from snug.tokenizer import get_tokenizer
from training.optimizer import make_optimizer, optimizer_step


@contextmanager
def disk(room):
    """Inside, no file takes more bytes than this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limits_of(settings, say=print, longest=(1, 1)):
    """The Limits of a run with these settings; longest: tokens of its longest prompt and completion."""
    return Limits(SimpleNamespace(settings=settings, longest=lambda: longest), say)


def figures(folder):
    """A run's log without what is measured, which no run has twice."""
    measured = ("time_", "tokens_per_second", "mem_")
    return [{k: v for k, v in record.items() if not k.startswith(measured)} for record in read_log(folder)]


def weights(folder):
    """The bytes of its newest checkpoint's."""
    return (newest(folder) / "model.safetensors").read_bytes()


def refused(function, *arguments, **options):
    """The message of the SnugError that the function raises: one line."""
    with refusal(".") as caught:
        function(*arguments, **options)
    return str(caught.value)


def tiny(tmp_path, linear=False, **changes):
    """Settings of a run of two-digit additions that takes a second or two. linear: of a model with a linear layer."""
    common = dict(digits=2, n_layer=1, n_embd=32, block_size=24, device=DEVICE, eval_prompts=20, save_interval=2)
    common["dtype"] = "float32"
    sft = SFTSettings(**common, out_dir=str(tmp_path / "sft"), max_iters=4, batch_size=16, demonstration_noise=0.5)
    if linear:
        sft.init_from = make_linear_model(tmp_path / "linear")
    options = dict(out_dir=str(tmp_path / "grpo"), init_from=sft.out_dir, max_iters=4, beta=0.04)
    options |= dict(batch_size=4, group_size=4, max_new_tokens=12)
    return sft, GRPOSettings(**common | options | changes)


def progress(dropped=0):
    return dict(health=dict(dropped_steps=dropped, dropped_in_a_row=dropped), after_oom={}, extra_prompts=0)


def saved(tmp_path, shape="gpt2", iteration=7):
    """A model with moments, saved -> (model, optimizer, path)."""
    model = make_model(shape)
    optimizer = make_optimizer(model, SFTSettings())
    for _ in range(3):
        model.logits(model(torch.arange(20, device=model.device).view(2, 10))).logsumexp(-1).sum().backward()
        optimizer_step(model, optimizer, 1e-3, 1.0)
    settings = SFTSettings(seed=4, out_dir=str(tmp_path))
    saver = Saver(settings, get_tokenizer("bytes"), model, optimizer, print)
    saver.save(iteration, progress(), last=True)
    return model, optimizer, checkpoint.newest(tmp_path)


PAIRS = itertools.product(("device", "host"), ("float32", "bfloat16"))
OPTIMIZERS = [dict(optimizer_device=device, optimizer_dtype=dtype) for device, dtype in PAIRS]
HALVED = dict(dtype="bfloat16", param_dtype="bfloat16")
OPTIMIZERS += [HALVED | dict(optimizer_device="host"), HALVED | dict(optimizer_dtype="bfloat16", grad_offload=True)]


def reward_that_draws(prompts, completions, **columns):
    """Even an untrained model earns it unevenly; from every generator that a checkpoint has."""
    return [sum(map(ord, c)) % 7 / 7 + random.random() + np.random.rand() + float(torch.rand(())) for c in completions]


def trained(settings, *functions):
    """Run GRPO with these reward functions -> the newest checkpoint. The settings stay: an out-of-memory changes a run's."""
    prepared = prepare(replace(settings))
    prepared.reward_funcs = list(functions)
    grpo.main(prepared)
    return newest(settings.out_dir)


PROBE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("torch imported:", "torch" in sys.modules)
    raise
"""


def command(*words, cwd=HOME):
    """Run a script in a process of its own -> (exit code, stdout, stderr); stdout ends with whether torch was imported."""
    result = python("-c", PROBE, *map(str, words), cwd=cwd, PYTHONPATH=str(HOME))
    return result.returncode, result.stdout, result.stderr


ONE_DIGIT = ["--eval_prompts=8", "--eval_interval=0", "--digits=1", "--device=cpu"]
LORA = ["--lora_rank=4", "--lora_alpha=8"]


def run_grpo(sft, out, *options):
    base = "--batch_size=4 --group_size=4 --max_new_tokens=8 --max_iters=2 --save_interval=1 --beta=0.1 "
    base += "--learning_rate=0.03 --temperature=1.5"
    words = [*ONE_DIGIT, *base.split(), f"--init_from={sft}", f"--out_dir={out}", *options]
    settings, given, _ = read_settings(GRPOSettings, words)
    grpo.main(prepare(settings, given))
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
SMALL = dict(n_layer=1, n_embd=16, batch_size=2, group_size=4, max_new_tokens=4, max_iters=2, eval_prompts=4)
SMALL |= dict(device="cpu", save_interval=1, learning_rate=0.01)


def told(folder):
    """Its log without what is measured, and its samples."""
    return figures(folder), list(read_lines(folder / "samples.jsonl"))


def assert_same_weights(ours, theirs, atol):
    a, b = (load_file(newest(folder) / "model.safetensors") for folder in (ours, theirs))
    assert a.keys() == b.keys() and max((a[name] - b[name]).abs().max() for name in a) <= atol


class Hex:
    name, stop_tokens, n_vocab = "hex", (3,), 16
    decode = lambda self, ids: "".join(f"{i:x}" for i in ids if i != 3)  # noqa: E731
    encode_prompt = lambda self, text, special=True: [int(digit, 16) for digit in text]  # noqa: E731
    stopper = lambda self, text: None  # noqa: E731


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


def run_settings(batch_size=8, max_new_tokens=0, **options):
    """As evaluation_settings makes them of an SFT run's: group_size is 1."""
    shared = dict(batch_size=batch_size, group_size=1, logits_chunk_mb=0.5)
    return GRPOSettings(max_new_tokens=max_new_tokens, **shared, **options)


def hex_run(cls=First, P=13, num_samples=6, run=None, **options):
    """-> a model, Prepared, EvaluateSettings, for `run_evaluation`."""
    settings = replace(run or run_settings(), eval_prompts=P)
    task = cls(settings)
    origin = Checkpoint(Path("out/x/checkpoint-000007"), {})
    prepared = Prepared(settings, task, Hex(), {}, [task.rewards], reward_weights=[1.0], origin=origin)
    model = make_flat_model("llama", n_layer=1)
    return model, prepared, EvaluateSettings(num_samples=num_samples, **options)


def prepared_by(folder, *words):
    """What the command makes of its words -> Prepared, EvaluateSettings, the file for the samples."""
    options, given, place = read_settings(EvaluateSettings, [str(folder), *words], "folder", class_of_runs)
    prepared, file = prepare_evaluation(options, given, place)
    return prepared, options, file
