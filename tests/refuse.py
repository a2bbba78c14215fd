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

from options import fields, type_of  # noqa: E402
from settings import GRPOSettings, SFTSettings  # noqa: E402

COMBINATIONS = [  # loop, words, the option that has to be named; {n} is drawn
    ("both", "--n_embd={n} --n_head=7", "n_head", lambda r: 7 * r.randrange(2, 50) + r.randrange(1, 7)),
    ("both", "--n_head=6 --n_embd=96 --n_kv_head={n}", "n_kv_head", lambda r: r.choice([4, 5, 7, 8])),
    ("both", "--n_head=4 --n_embd={n} --position=rotary", "n_embd", lambda r: 4 * (2 * r.randrange(2, 40) + 1)),
    ("both", "--seed={n}", "seed", lambda r: 2**31 + r.randrange(2**40)),
    (
        "both",
        "--gradient_accumulation_steps={n} --max_tokens_per_micro_batch=512",
        "gradient_accumulation_steps",
        lambda r: 2 ** r.randrange(1, 5),
    ),
    ("both", "--demonstration_noise={n}", "demonstration_noise", lambda r: 1 + r.random() + 1e-3),
    ("both", "--adam_beta1={n}", "adam_beta1", lambda r: 1 + r.random()),
    ("both", "--adam_beta2={n}", "adam_beta2", lambda r: 1 + r.random()),
    ("both", "--activation_offload --logits_chunk_mb={n}", "activation_offload", lambda r: r.randrange(1, 99)),
    ("both", "--param_dtype=bfloat16 --seed={n}", "param_dtype", lambda r: r.randrange(99)),
    (
        "both",
        "--memory_budget_gb={n}",
        "memory_budget_gb",
        lambda r: r.choice(["-1", "0", "much", "nan", "inf", "8GB"]),
    ),
    (
        "both",
        "--countdown_min_numbers={n} --countdown_max_numbers=3",
        "countdown_min_numbers",
        lambda r: r.randrange(4, 9),
    ),
    ("both", "--countdown_operators={n}", "countdown_operators", lambda r: r.choice(["", "%", "+-^", "plus"])),
    ("both", "--report_to={n}", "report_to", lambda r: r.choice(["mlflow", "tensorbord", "wandb,none"])),
    ("both", "--vocab_size={n}", "vocab_size", lambda r: r.randrange(1, 257)),
    ("both", "--block_size={n}", "block_size", lambda r: r.randrange(2, 25)),
    ("both", "--digits={n}", "digits", lambda r: r.randrange(1001, 9999)),
    ("both", "--task=jsonl --digits={n}", "data_file", lambda r: r.randrange(1, 9)),
    ("both", "--data_file=rows{n}.jsonl", "data_file", lambda r: r.randrange(99)),
    ("both", "--task=jsonl --data_file=no/such/file{n}.jsonl", "no/such/file", lambda r: r.randrange(99)),
    (
        "both",
        "--task=countdown --countdown_max_number={n} --countdown_min_numbers=2 --countdown_max_numbers=2 --countdown_operators=/",
        "countdown",
        lambda r: 2,
    ),
    ("both", "--out_dir=out/x{n} --init_from=out/x{n}", "init_from", lambda r: r.randrange(99)),
    ("both", "--init_from=out/no_such_run_{n}", "out/no_such_run", lambda r: r.randrange(99)),
    (
        "sft",
        "--batch_size=128 --gradient_accumulation_steps={n}",
        "gradient_accumulation_steps",
        lambda r: r.choice([3, 5, 7, 129, 256]),
    ),
    ("grpo", "--group_size={n}", "group_size", lambda r: r.choice([1])),
    ("grpo", "--train_batch_size={n}", "train_batch_size", lambda r: r.choice([3, 100, 1000, 2048])),
    (
        "grpo",
        "--train_batch_size=128 --gradient_accumulation_steps={n}",
        "gradient_accumulation_steps",
        lambda r: r.choice([3, 5, 256]),
    ),
    ("grpo", "--delta={n}", "delta", lambda r: 1 + 0.2 * r.random()),
    ("grpo", "--epsilon_high=0.5 --delta={n}", "delta", lambda r: 1.2 + 0.3 * r.random()),
    (
        "grpo",
        "--reward_funcs={n}",
        "reward_funcs",
        lambda r: r.choice(["short", "a:", ":b", "no_such_module:f", "json:no_such", "os:name", "a b:c"]),
    ),
    ("grpo", "--beta={n}", "beta", lambda r: r.random() + 1e-3),
    ("grpo", "--max_new_tokens={n}", "max_new_tokens", lambda r: r.randrange(64, 999)),
    ("grpo", "--max_prompt_length={n}", "block_size", lambda r: r.randrange(33, 99)),
]


def single(rng, cls):
    """One option with a value that its own type, minimum or choices forbid -> (words, the option)."""
    name = rng.choice(list(fields(cls)))
    kind, optional = type_of(cls, name)
    metadata = fields(cls)[name].metadata
    if metadata["choices"]:
        return [f"--{name}={rng.choice(['nothing', 'None', '7', metadata['choices'][0] + 'x'])}"], name
    if kind is bool:
        return [f"--{name}={rng.choice(['yes', '2', 'on', 'tru'])}"], name
    if kind is int or kind is float:
        bad = ["many", "1e", "--", "0x1f", "1,5"] + (
            ["nan", "inf", "-inf", "1e999"] if kind is float else ["1.5", "1e3"]
        )
        if metadata["minimum"] is not None:
            bad += [str(metadata["minimum"] - rng.randrange(1, 99))] * 5
        return [f"--{name}={rng.choice(bad)}"], name
    return [f"--{name}s{rng.randrange(9)}=1"], name  # text takes anything, but the name has to be right


def draw(rng):
    """-> (settings class, words, what the answer has to name), with some valid options around."""
    cls = rng.choice([SFTSettings, GRPOSettings])
    around = rng.sample(
        ["--learning_rate=1e-4", "--weight_decay=0.1", "--warmup_iters=3", "--eval_prompts=7", "--norm=rmsnorm"],
        rng.randrange(4),
    )
    if rng.random() < 0.5:
        words, name = single(rng, cls)
    else:
        loop, text, name, number = rng.choice(
            [c for c in COMBINATIONS if c[0] in ("both", "grpo" if cls is GRPOSettings else "sft")]
        )
        n = str(number(rng))
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
