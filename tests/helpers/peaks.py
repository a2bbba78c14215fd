"""Peaks of memory, measured and planned."""

import re
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

import train_sft
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings


def profiled_peak(function):
    """The most bytes alive on the CPU allocator while function runs, by PyTorch's profiler, and what function returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = function()
    changes = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = current = 0
    for change in changes:
        current += change
        peak = max(peak, current)
    return peak, result


LLAMA = dict(norm="rmsnorm", position="rotary", mlp="swiglu", n_kv_head=2, tie_embeddings=False)
WIDE = LLAMA | dict(n_embd=192, n_layer=4)
COMMON = dict(digits=4, device="cpu", eval_prompts=16, eval_interval=2, save_interval=0, max_iters=2)
COMMON |= dict(dtype="float32", n_layer=3, n_embd=96, block_size=64)
GRPO = dict(batch_size=6, group_size=4, max_new_tokens=24)


def prepared_run(tmp_path, **changes):
    """-> (Prepared, settings), with a warm start if there is a reference, and with a wider teacher if it has one."""
    settings = GRPOSettings(**COMMON | GRPO | changes | dict(out_dir=str(tmp_path / "run")))
    shape = {name: value for name, value in changes.items() if name in ("vocab_size", *LLAMA)}
    for name, wanted, wider in (("init_from", settings.beta, {}), ("teacher", settings.teacher, WIDE)):
        if wanted:
            short = dict(max_iters=1, eval_prompts=0, batch_size=2, out_dir=str(tmp_path / name))
            train_sft.main(prepare(SFTSettings(**COMMON | shape | wider | short)))
            setattr(settings, name, short["out_dir"])
    prepared = prepare(settings)
    prepared.reward_funcs = [one_group_differs if settings.max_num_gen_batches > 1 else differ]
    return prepared, prepared.settings


def differ(prompts, completions, **columns):
    """Something to learn, whatever an untrained model says."""
    return [float(i % 2) for i in range(len(prompts))]


def one_group_differs(prompts, completions, **columns):
    """So that groups are refilled as often as is allowed."""
    return [float(i == 0) for i in range(len(prompts))]


def measured_peak(phase, record, folder):
    """MiB that the meter saw in a phase; while loading, as the log's line after init says."""
    if phase != "load":
        return record[f"mem_max_alloc_mb_{phase}"]
    (peak,) = re.findall(r"after init: .* peak_since_reset=([\d.]+)MiB", (Path(folder) / "log.txt").read_text())
    return float(peak)
