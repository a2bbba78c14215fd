"""Invalid options and combinations, drawn at random, given to the real commands: exit code 2, one line, the option named, how fast.

    python tests/refuse.py --count=100 [--seed=0]

Prints one JSON object: how many, the slowest in seconds, and which were not refused as they should be.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path.insert(0, str(HOME))

from settings import GRPOSettings, SFTSettings  # noqa: E402
from snug.options import fields, type_of  # noqa: E402

BOTH = [  # words, the option that has to be named, values of {n}
    ("--n_embd={n} --n_head=7", "n_head", [15, 29, 64, 100]),
    ("--n_head=6 --n_embd=96 --n_kv_head={n}", "n_kv_head", [4, 5, 7, 8]),
    ("--n_head=4 --n_embd={n} --position=rotary", "n_embd", [12, 20, 100]),
    ("--seed={n}", "seed", [2**31, 2**40]),
    ("--demonstration_noise={n}", "demonstration_noise", [1.001, 2]),
    ("--adam_beta1={n}", "adam_beta1", [1, 1.5]),
    ("--adam_beta2={n}", "adam_beta2", [1, 1.5]),
    ("--activation_offload --logits_chunk_mb={n}", "activation_offload", [1, 99]),
    ("--param_dtype=bfloat16 --dtype=float{n}", "param_dtype", [32]),
    ("--memory_budget_gb={n}", "memory_budget_gb", ["-1", "0", "much", "nan", "inf", "8GB"]),
    ("--task=countdown --countdown_numbers={n}", "countdown_numbers", [1, 11, "4-3"]),
    ("--task=countdown --countdown_operators={n}", "countdown_operators", ["", "%", "+-^", "plus"]),
    ("--task=countdown --countdown_max_number={n} --countdown_max_target=1 --countdown_operators=/", "countdown", [2]),
    ("--report_to={n}", "report_to", ["mlflow", "tensorbord", "wandb,none"]),
    ("--vocab_size={n}", "vocab_size", [1, 100, 256]),
    ("--block_size={n}", "block_size", [2, 24]),
    ("--digits={n}", "digits", [1001, 9999]),
    ("--task=jsonl --digits={n}", "data_file", [3]),
    ("--data_file=rows{n}.jsonl", "data_file", [1, 2]),
    ("--task=jsonl --data_file=no/such/file{n}.jsonl", "no/such/file", [1, 2]),
    ("--system_prompt={n}", "system_prompt", ["Be brief.", "x"]),
    ("--out_dir=out/x{n} --init_from=out/x{n}", "init_from", [1, 2]),
    ("--init_from=out/no_such_run_{n}", "out/no_such_run", [1, 2]),
    ("--cuda_allocator={n}", "cuda_allocator", ["", "x"]),
]
GRPO = [
    ("--group_size={n}", "group_size", [1]),
    ("--train_batch_size={n}", "train_batch_size", [3, 100, 1000, 2048]),
    ("--delta={n}", "delta", [1, 1.1, 1.2]),
    ("--epsilon_high=0.5 --delta={n}", "delta", [1.2, 1.5]),
    ("--reward_funcs={n}", "reward_funcs", "short a: :b no_such_module:f json:no_such os:name".split() + ["a b:c"]),
    ("--pass_reward={n}", "pass_reward", [-1, 0.5]),
    ("--beta={n}", "beta", [0.001, 1]),
    ("--max_new_tokens={n}", "max_new_tokens", [64, 999]),
    ("--max_prompt_length={n}", "block_size", [33, 99]),
]


def single(rng, cls):
    """One option with a value that its own type, minimum or choices forbid -> (words, the option)."""
    name = rng.choice(list(fields(cls)))
    kind, limits = type_of(cls, name)[0], fields(cls)[name].metadata
    if limits["choices"]:
        bad = ["nothing", "None", "7", limits["choices"][0] + "x"]
    elif kind is bool:
        bad = ["yes", "2", "on", "tru"]
    elif kind in (int, float):
        bad = ["many", "1e", "0x1f", "1,5", *([str(limits["minimum"] - rng.randrange(1, 99))] * 5)]
        bad += ["nan", "inf", "-inf", "1e999"] if kind is float else ["1.5", "1e3"]
    else:
        return [f"--{name}s{rng.randrange(9)}=1"], name  # text takes anything, but the name has to be right
    return [f"--{name}={rng.choice(bad)}"], name


def draw(rng):
    """-> (settings class, words, what the answer has to name), with some valid options around."""
    cls = rng.choice([SFTSettings, GRPOSettings])
    valid = ["--learning_rate=1e-4", "--weight_decay=0.1", "--warmup_iters=3", "--eval_prompts=7", "--norm=rmsnorm"]
    around = rng.sample(valid, rng.randrange(4))
    if rng.random() < 0.5:
        words, name = single(rng, cls)
    else:
        text, name, values = rng.choice(BOTH + GRPO if cls is GRPOSettings else BOTH)
        n = str(rng.choice(values))
        words = [word.replace("{n}", n) for word in text.split()]  # the value may have spaces
    return cls, around + words, name


def main(count, seed):
    rng, slowest, wrong = random.Random(seed), 0.0, []
    for _ in range(count):
        cls, words, name = draw(rng)
        command = [sys.executable, "grpo.py" if cls is GRPOSettings else "train_sft.py", *words]
        started = time.perf_counter()
        child = subprocess.run(command, cwd=HOME, capture_output=True, text=True)
        slowest = max(slowest, time.perf_counter() - started)
        if child.returncode != 2 or child.stderr.count("\n") != 1 or name not in child.stderr:
            wrong.append(f"{' '.join(words)}: {child.returncode} {child.stderr[-300:]}")
    print(json.dumps(dict(count=count, slowest_s=round(slowest, 2), seed=seed, wrong=wrong)))
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Gives the commands options that cannot be.")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(bool(main(arguments.count, arguments.seed)))
