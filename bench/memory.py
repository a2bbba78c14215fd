"""The planner's peaks beside measured ones, and the peaks that are promised.

    python bench/memory.py

Each row is a run of two iterations in which every completion is as long as it may be (no stop token), so that the plan's longest
lengths are the run's. On CUDA measured is torch.cuda.max_memory_allocated, on a CPU the meter's live bytes; the shapes follow
the device. Then GPT-2's shape at 8 layers x 256 with 8 sequences of 256 tokens, and the plans of the large configs, for
which no device is needed. Prints tables and, last, one JSON object.
"""

import contextlib
import io
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import grpo  # noqa: E402
import train_sft  # noqa: E402
from memory.ledger import MIB  # noqa: E402
from memory.plan import GIB, plan  # noqa: E402
from options import read_settings  # noqa: E402
from runs.log import read_log  # noqa: E402
from runs.prepare import prepare  # noqa: E402
from settings import GRPOSettings, SFTSettings  # noqa: E402
from training.dry_run import DryRun  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = dict(
    digits=4,
    n_layer=4,
    n_head=4,
    n_embd=128,
    block_size=128,
    vocab_size=8192,
    batch_size=4,
    group_size=8,
    max_new_tokens=80,
)
GPT2 = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, bias=True)
GPT2 |= dict(digits=4, batch_size=8, group_size=8, max_new_tokens=512, dtype="bfloat16")
QWEN = dict(norm="rmsnorm", position="rotary", mlp="swiglu", qkv_bias=True, dtype="bfloat16", param_dtype="bfloat16")
QWEN |= dict(n_layer=24, n_head=14, n_kv_head=2, n_embd=896, n_hidden=4864, block_size=1024, vocab_size=151936)
QWEN |= dict(
    digits=4, batch_size=4, group_size=8, max_new_tokens=768, optimizer_dtype="bfloat16", checkpoint_blocks="block"
)
LADDER = {  # name -> (reference?, changes)
    "plain": dict(),
    "reference": dict(beta=0.04),
    "reference host": dict(beta=0.04, reference="host"),
    "block": dict(checkpoint_blocks="block"),
    "selective": dict(checkpoint_blocks="selective"),
    "block, offload": dict(checkpoint_blocks="block", activation_offload=True),
    "optimizer host": dict(optimizer_device="host"),
    "both host": dict(optimizer_device="host", grad_offload=True),
    "bfloat16": dict(dtype="bfloat16", param_dtype="bfloat16", optimizer_dtype="bfloat16"),
}
SHAPES = {"cpu": {"small": (SMALL, 512, LADDER)}, "cuda": {"GPT-2 124M": (GPT2, 4096, LADDER)}}
SHAPES["cuda"]["Qwen2.5-0.5B"] = (QWEN, 2048, {name: LADDER[name] for name in ("plain", "reference host", "both host")})


def run(shape, tokens, changes, folder):
    """-> the Plan, and what a run's second iteration took: the log's record."""
    common = dict(device=DEVICE, eval_prompts=0, save_interval=0, max_iters=2, max_tokens_per_micro_batch=tokens)
    settings = GRPOSettings(**common | shape | changes | dict(out_dir=f"{folder}/grpo"))
    with contextlib.redirect_stdout(io.StringIO()):
        if settings.beta:
            fields = {
                name: shape[name]
                for name in shape
                if name not in ("batch_size", "group_size", "max_new_tokens", "beta")
            }
            sft = SFTSettings(**common | fields | dict(out_dir=f"{folder}/sft", batch_size=2, max_iters=1))
            train_sft.main(prepare(sft))
            settings.init_from = sft.out_dir
        prepared = prepare(settings)
        prepared.reward_funcs = [
            lambda prompts, completions, **columns: [i % 2 for i in range(len(prompts))]
        ]  # else there is no step
        planned = plan(DryRun(prepared, grpo.iterate, grpo.make_reference), settings)
        grpo.main(prepared)
    return planned, read_log(settings.out_dir)[-1]


def measured_rows():
    rows = []
    for shape_name, (shape, tokens, ladder) in SHAPES[DEVICE].items():
        for name, changes in ladder.items():
            with tempfile.TemporaryDirectory() as folder:
                planned, record = run(shape, tokens, changes, folder)
            row = dict(
                shape=shape_name,
                options=name,
                planned=planned.peak / MIB,
                measured=record["mem_max_alloc_mb"],
                phase=planned.phase,
            )
            row |= dict(
                host_planned=planned.host / MIB,
                host_measured=record.get("mem_max_host_mb", 0),
                seconds=record["time_s"],
            )
            rows.append(row)
            print_row(row)
    return rows


def print_row(row):
    ratio = row["planned"] / row["measured"]
    print(
        f"{row['shape']:13} {row['options']:15} {row['planned']:10.1f} {row['measured']:10.1f} {ratio:6.3f} {row['phase']:10}"
        f"{row['host_planned']:9.1f} {row['host_measured']:9.1f} {row['seconds']:7.2f}",
        flush=True,
    )


def wide_vocabulary():
    """8 layers x 256, V = 50,257, 8 sequences of 256 tokens in one micro-batch, float32, beta 0.04, a resident reference -> MiB."""
    shape = dict(n_layer=8, n_head=8, n_embd=256, block_size=256, bias=True, vocab_size=50257)
    shape |= dict(digits=4, batch_size=2, group_size=4, max_new_tokens=246, beta=0.04)
    peaks = {}
    for checkpoint_blocks in ("none", "block"):
        with tempfile.TemporaryDirectory() as folder:
            planned, record = run(shape, 8 * 256, dict(checkpoint_blocks=checkpoint_blocks), folder)
        peaks[checkpoint_blocks] = record["mem_max_alloc_mb"]
        print(
            f"checkpoint_blocks={checkpoint_blocks}: {record['mem_max_alloc_mb']:.1f} MiB measured, {planned.peak / MIB:.1f} planned"
        )
    return peaks


def large_plans():
    plans = {}
    for words in (
        ["config/grpo_qwen2_1.5b.py"],
        ["config/grpo_qwen2_1.5b.py", "--optimizer_device=host"],
        "config/grpo_qwen2_1.5b.py --optimizer_dtype=float32 --optimizer_device=host".split(),
        ["config/grpo_24gb.py"],
        "config/grpo_qwen2_1.5b.py --optimizer_dtype=float32 --checkpoint_blocks=selective --max_tokens_per_micro_batch=10240 --batch_size=16 --group_size=8".split(),
    ):
        prepared = prepare(*read_settings(GRPOSettings, [*words, "--device=cuda"])[:2])
        planned = plan(DryRun(prepared, grpo.iterate, grpo.make_reference), prepared.settings)
        plans[" ".join(words)] = dict(peak_gib=planned.peak / GIB, host_gib=planned.host / GIB, phase=planned.phase)
        print(f"{' '.join(words):55} {planned.line()}", flush=True)
    return plans


def main():
    original = grpo.sample_groups
    grpo.sample_groups = lambda *args, stop_token, **options: original(*args, stop_token=None, **options)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}, torch {torch.__version__}: MiB")
    print(
        f"{'shape':13} {'options':15} {'planned':>10} {'measured':>10} {'ratio':>6} {'phase':10}{'host':>9} {'measured':>9} {'seconds':>7}"
    )
    summary = dict(
        bench="memory", device=device, torch=torch.__version__, python=platform.python_version(), rows=measured_rows()
    )
    print("\nGPT-2's shape, 8 layers x 256, V = 50,257, 8 x 256 tokens, float32, beta 0.04")
    summary["wide_vocabulary"] = wide_vocabulary()
    print("\nPlanned for CUDA")
    print(json.dumps(summary | dict(plans=large_plans())))


if __name__ == "__main__":
    main()
