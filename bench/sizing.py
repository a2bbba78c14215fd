"""What one device needs, planned: models x devices x places of weights and optimizer. Prints the table of docs/scaling.md.

    python bench/sizing.py [--only=7B]      five minutes on a CPU; needs no GPU
    python bench/sizing.py --shapes=tiny     only shows that it runs

The batch grows with the devices: four prompts of up to 256 tokens per device, four completions of up to 1,024 tokens per
prompt. Blocks are checkpointed, a micro-batch is one sequence, weights and gradients are in bfloat16.
"""

from common import QWEN_05B, QWEN_7B, QWEN_15B, UNTIED, chosen, parser

import grpo
from runs.prepare import prepare
from settings import GRPOSettings
from snug.memory.plan import GIB, plan
from training.dry_run import DryRun

BATCH = dict(
    block_size=2048,
    task="examples.countdown:Countdown",
    group_size=4,
    max_prompt_length=256,
    max_new_tokens=1024,
    eval_prompts=0,
)
MEMORY = dict(dtype="bfloat16", param_dtype="bfloat16", checkpoint_blocks="block", max_tokens_per_micro_batch=1280)
MODELS = {  # the shapes of Qwen2.5; tied embeddings up to 1.5B, as published
    "0.5B": QWEN_05B,
    "1.5B": QWEN_15B,
    "7B": QWEN_7B,
    "32B": UNTIED | dict(n_layer=64, n_head=40, n_kv_head=8, n_embd=5120, n_hidden=27648),
}
DEVICES = {
    "1": dict(),
    "8 ddp": dict(parallel="ddp", num_processes=8),
}
RUNGS = {
    "float32 masters and moments": dict(),
    "bfloat16 moments, no masters": dict(optimizer_dtype="bfloat16"),
    "masters and moments on the host": dict(optimizer_device="host"),
    "and gradients": dict(optimizer_device="host"),
}


def cell(shape, devices, rung):
    last = rung == list(RUNGS)[-1]
    offload = dict(grad_offload=True) if last else {}
    batch = dict(batch_size=4 * devices.get("num_processes", 1))
    options = shape | BATCH | MEMORY | batch | devices | RUNGS[rung] | offload
    settings = GRPOSettings(**options, plan=True, device="cuda")
    planned = plan(DryRun(prepare(settings), grpo.iterate), settings)
    return f"{planned.peak / GIB:.1f} {planned.phase}" + (f" + {planned.host / GIB:.0f} host" if planned.host else "")


def main(arguments):
    models = MODELS
    if arguments.shapes == "tiny":
        models = {"tiny": UNTIED | dict(vocab_size=512, n_layer=4, n_head=4, n_kv_head=2, n_embd=64, n_hidden=128)}
    print("| model | devices | " + " | ".join(RUNGS) + " |\n" + "|---" * (2 + len(RUNGS)) + "|")
    for model, shape in models.items():
        for devices, options in DEVICES.items():
            if chosen(f"{model}, {devices}", arguments.only):
                cells = " | ".join(cell(shape, options, rung) for rung in RUNGS)
                print(f"| {model} | {devices} | {cells} |", flush=True)


if __name__ == "__main__":
    main(parser("Plans of models on several devices.").parse_args())
