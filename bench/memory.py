"""Iterations of GRPO at fixed lengths: the planner's peak beside the measured one, and each phase's seconds.

    python bench/memory.py [--shapes=cuda|cpu|tiny] [--only=1.5B]

A case is a run from random weights. Every prompt and every completion has the longest allowed length (random ids, no
stop token), as in the plan. A plan fills micro-batches to the budget, so here they hold complete groups: prompt + k *
(completion - 1) tokens each. On CUDA the measured peak is torch.cuda.max_memory_allocated, on a CPU the meter's live
bytes. The figures are those of the last iteration. Plans of large configs: `--plan --device=cuda` of grpo.py.

"24 GB card" and "8 GB card" run with this memory_budget_gb, so that a larger GPU shows what a smaller one would do.
"""

import gc
import time
from dataclasses import replace
from functools import partial

import torch
from common import DEVICE, GPT2, QWEN, QWEN_05B, QWEN_15B, begin, chosen, end, going_on, parser, result

import grpo
import sample
from model import make_model
from runs.loading import configure, load_reference
from runs.log import NoLog
from runs.prepare import prepare
from settings import GRPOSettings
from snug.device.cuda import empty_cache
from snug.device.kinds import MIB
from snug.device.pick import pick_device
from snug.memory import Limits, MemoryMeter
from snug.memory.fit import apply
from snug.memory.plan import GIB, plan
from training.dry_run import DryRun
from training.optimizer import make_optimizer
from training.state import Training

TINY = dict(n_layer=3, n_head=4, n_embd=32, block_size=32, vocab_size=300, batch_size=2, group_size=2)
TINY |= dict(max_prompt_length=12, max_new_tokens=8, max_tokens_per_micro_batch=26)
SMALL = dict(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=8192, batch_size=4, group_size=8)
SMALL |= dict(max_prompt_length=10, max_new_tokens=80, max_tokens_per_micro_batch=642)
BFLOAT16 = dict(dtype="bfloat16", param_dtype="bfloat16", optimizer_dtype="bfloat16")
LARGE = GPT2 | dict(vocab_size=50304, bias=True, dtype="bfloat16", batch_size=8, group_size=8)
LARGE |= dict(max_prompt_length=256, max_new_tokens=256, max_tokens_per_micro_batch=4592)
HALF_B = QWEN_05B | BFLOAT16 | dict(block_size=1024, batch_size=4, group_size=8)
HALF_B |= dict(max_prompt_length=256, max_new_tokens=256, max_tokens_per_micro_batch=2296)
ITERATION = QWEN_15B | BFLOAT16 | dict(block_size=2048, batch_size=4, group_size=4)
ITERATION |= dict(max_prompt_length=256, max_new_tokens=1024)
ITERATION |= dict(checkpoint_blocks="block", max_tokens_per_micro_batch=1280)
LADDER = {  # name -> options
    "plain": dict(),
    "reference": dict(beta=0.04),
    "host reference": dict(beta=0.04, reference="host"),
    "block": dict(checkpoint_blocks="block"),
    "selective": dict(checkpoint_blocks="selective"),
    "activation offload": dict(checkpoint_blocks="block", activation_offload=True),
    "host optimizer": dict(optimizer_device="host"),
    "grad offload": dict(optimizer_device="host", grad_offload=True),
    "bfloat16": BFLOAT16,
    "bfloat16, masters": BFLOAT16 | dict(optimizer_dtype="float32"),
    "LoRA": dict(lora_rank=16),
}
CARDS = {f"{gb} GB card": dict(memory_budget_gb=gb) for gb in (24, 8)}
CASES = {  # shapes -> name -> (shape, ladder)
    "tiny": {"1.5B's options": (TINY | QWEN | BFLOAT16, {"": {}}), "tiny": (TINY, LADDER), "": (TINY, CARDS)},
    "cpu": {"small": (SMALL, LADDER)},
    "cuda": {
        "Qwen2.5-1.5B": (ITERATION, {"": {}}),
        "": (ITERATION, CARDS),
        "GPT-2 124M": (LARGE, LADDER),
        "Qwen2.5-0.5B": (HALF_B, {name: LADDER[name] for name in ("block", "bfloat16, masters", "grad offload")}),
    },
}
SECONDS = dict(at_most=3, look="its longest phase, in the kernel tables of the steps decode and train")


class Measured(Training):
    """A Training that neither evaluates nor saves, and keeps its latest line for the log."""

    def evaluate_if_due(self, done):
        return {}

    def end_iteration(self, record, samples=()):
        self.record = record | {"time_s": time.perf_counter() - self.started} | self.meter.stats()


def prepared_run(settings):
    """-> Prepared with random weights, also for a reference and adapters. Every id of the shape can be sampled."""
    prepared = prepare(replace(settings, beta=0.0))
    prepared.settings, prepared.shape["n_vocab"] = settings, prepared.shape["vocab_size"]
    prepared.tokenizer.decode = lambda ids: ""
    # Rewards differ in every group, so that no step is skipped.
    prepared.reward_funcs = [lambda prompts, **columns: [i % 2 for i in range(len(prompts))]]
    return prepared


def longest(sample_groups, length, model, prompts, *arguments, stop_token, is_over, **options):
    """sample_groups with random prompts of this length and without an end."""
    prompts = torch.randint(model.config.n_vocab, (len(prompts), length)).tolist()
    return sample_groups(model, prompts, *arguments, stop_token=None, **options)


def run(prepared, iterations=2, iterate=grpo.iterate):
    """Iterations from random weights, as training/loop.py runs them -> the log's last record."""
    settings, device, sample_groups = prepared.settings, pick_device(DEVICE), sample.sample_groups
    torch.manual_seed(0)
    with MemoryMeter(device) as meter:
        reference = load_reference(prepared, device)
        model = configure(make_model(prepared.shape, device, settings.param_dtype), settings)
        optimizer = make_optimizer(model, settings)
        parts = meter, NoLog(settings), None, Limits(prepared, print)
        training = Measured(prepared, model, reference, optimizer, *parts)
        sample.sample_groups = partial(longest, sample_groups, settings.max_prompt_length)
        try:
            for iteration in range(iterations):
                training.begin_iteration(iteration)
                training.end_iteration(*iterate(iteration, training))
        finally:
            sample.sample_groups = sample_groups
    return training.record


def measure(name, settings, iterations, **aim):
    prepared = prepared_run(settings)
    gc.collect()
    empty_cache()
    settings = apply(DryRun(prepared, grpo.iterate), settings, pick_device(DEVICE), print)  # no budget: no cap
    prepared.settings = settings
    record = run(prepared, iterations)
    seconds = {key.removeprefix("time_"): value for key, value in record.items() if key.startswith("time_")}
    result(f"{name}: an iteration", seconds.pop("s"), "s", **aim, **seconds)
    if DEVICE == "cuda" and prepared.shape["n_embd"] < 100:
        return  # tiny shapes beside 64 MiB of cuBLAS's own say nothing about a plan
    planned, measured = plan(DryRun(prepared, grpo.iterate), settings), record["mem_max_alloc_mb"]
    details = dict(planned_mib=planned.peak / MIB, measured_mib=measured, phase=planned.phase)
    details |= dict(host_planned_mib=planned.host / MIB, host_measured_mib=record.get("mem_max_host_mb", 0.0))
    if budget := settings.memory_budget_gb:
        look = f"the plan of {planned.phase}, then what the context and the libraries take"
        details |= dict(reserved_mib=record["mem_reserved_mb"])
        what = f"{name}: peak, planned {planned.peak / GIB:.2f}"
        result(what, measured / 1024, "GiB", at_most=budget, **details, look=look)
        return
    off = 100 * abs(planned.peak / MIB / measured - 1)
    look = f"{planned.phase}: its tensors in --plan's table, beside [MEM] in the log"
    result(f"{name}: plan is off by", off, "%", at_most=5, **details, look=look)


def main():
    arguments, failed = parser("Iterations of fixed lengths: plans, peaks, seconds.").parse_args(), []
    begin(arguments)
    for shape_name, (shape, ladder) in CASES[arguments.shapes].items():
        for name, changes in ladder.items():
            case = f"{shape_name} {name}".strip()
            if not chosen(case, arguments.only):
                continue
            settings = GRPOSettings(
                **dict(device=DEVICE, eval_prompts=0, task="examples.countdown:Countdown") | shape | changes
            )
            iteration = "1.5B" in case  # the first one warms up; the second may still record graphs
            with going_on(case, failed):
                measure(case, settings, 3 if iteration else 2, **(SECONDS if iteration else {}))
    end(failed)


if __name__ == "__main__":
    main()
