"""A real model, SmolLM2-135M-Instruct: our sampler beside Hugging Face `generate`, our iteration beside TRL's.

    make models/smollm2-135m-instruct
    python bench/real.py [--only=sampler|iteration] [--rounds=3]        # iteration: pip install trl==1.16.0

sampler    the same prompts in the chat template, equally many completions, stop tokens on, float32. Calls take turns.
iteration  one GRPO iteration of config/grpo_real.py and the same in TRL: the same folder, prompts in the same order,
           reward (the length), 128 completions of at most 16 tokens, no reference, float32, AdamW. Each contender runs
           in its own process; they take turns. The first iteration is not counted. TRL's micro-batches have 16
           sequences.

Prints the ratios and, last, one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path.insert(0, str(HOME))

MODEL = str(HOME / "models/smollm2-135m-instruct")
SAMPLER = {"8 prompts x 4, 64 tokens": (8, 4, 64), "16 prompts x 8, 16 tokens": (16, 8, 16)}
ITERATIONS = 3  # of a process; the first is not counted


def prepared_run(out_dir, iterations=ITERATIONS):
    from options import read_settings
    from runs.prepare import prepare
    from settings import GRPOSettings

    words = [f"--init_from={MODEL}", f"--out_dir={out_dir}", f"--max_iters={iterations}", "--eval_prompts=0"]
    words += [f"--data_file={HOME / 'data/sums.jsonl'}", "--device=cpu"]
    words.append("--reward_funcs=bench.real:reward")
    return prepare(*read_settings(GRPOSettings, [str(HOME / "config/grpo_real.py"), *words])[:2])


def reward(completions, **_):
    """Of the length: it differs in every group, so every step is taken. Right answers are too rare at first."""
    return [len(c if isinstance(c, str) else c[0]["content"]) / 100 for c in completions]


def iteration_of_snug():
    """-> the log's lines."""
    import grpo

    with tempfile.TemporaryDirectory() as folder:
        with open(os.devnull, "w") as sys.stdout:
            grpo.main(prepared_run(f"{folder}/run"))
        sys.stdout = sys.__stdout__
        return [json.loads(line) for line in open(f"{folder}/run/log.jsonl")]


def iteration_of_trl():
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    prepared = prepared_run(tempfile.mkdtemp())
    s = prepared.settings
    rows = prepared.task.prompts("train", range(ITERATIONS * s.batch_size))
    clock, phases = {}, []

    def timed(name, function):
        def call(*args, **kwargs):
            started = time.perf_counter()
            result = function(*args, **kwargs)
            clock[name] = clock.get(name, 0) + time.perf_counter() - started
            return result

        return call

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=s.batch_size * s.group_size // 16,
            num_generations=s.group_size,
            max_completion_length=s.max_new_tokens,
            max_steps=ITERATIONS,
            learning_rate=s.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=s.adam_beta2,
            beta=0.0,
            loss_type="dapo",
            temperature=1.0,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([dict(prompt=r["prompt"]) for r in rows]),
        )
        trainer._generate = timed("rollout", trainer._generate)
        trainer.training_step = timed("step", trainer.training_step)  # holds the rollout
        original, began = trainer.log, [time.perf_counter()]

        def log(logs, *args, **kwargs):
            original(logs, *args, **kwargs)  # adds TRL's metrics
            if "loss" in logs:  # one a step
                now = time.perf_counter()
                phases.append(dict(time_s=now - began[0], time_rollout_s=clock["rollout"]))
                phases[-1] |= dict(time_train_s=clock["step"] - clock["rollout"])
                phases[-1] |= dict(completion_length_mean=logs["completions/mean_length"])
                clock.clear()
                began[0] = now

        trainer.log = log
        with open(os.devnull, "w") as sys.stdout:
            trainer.train()
        sys.stdout = sys.__stdout__
    return phases


def resident_gib():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def arm(name):
    """In a process of its own: the medians of its iterations but the first, and the most resident memory."""
    lines = (iteration_of_snug if name == "snug" else iteration_of_trl)()[1:]
    names = ("time_s", "time_rollout_s", "time_train_s", "completion_length_mean")
    figures = {key: round(statistics.median(line[key] for line in lines), 2) for key in names}
    print(json.dumps(figures | dict(resident_gib=round(resident_gib(), 2))))


def iteration(rounds):
    arms = {"snug": [], "trl": []}
    for number in range(rounds):
        for name, found in arms.items():
            command = [sys.executable, __file__, f"--arm={name}"]
            output = subprocess.run(command, capture_output=True, text=True)
            if output.returncode:
                raise SystemExit(output.stderr[-2000:])
            found.append(json.loads(output.stdout.splitlines()[-1]))
            print(f"round {number + 1}, {name}: {found[-1]}", flush=True)
    ratios = {}
    for key in arms["snug"][0]:
        pairs = [theirs[key] / ours[key] for ours, theirs in zip(arms["snug"], arms["trl"], strict=True)]
        ratios[key] = [round(f(pairs), 2) for f in (statistics.median, min, max)]
    print("TRL / snug:", ratios, flush=True)
    return dict(rounds=arms, ratios=ratios)


def sampler(rounds):
    """-> tokens per second and their ratios. Which tokens are drawn differs, so that lengths differ a little."""
    import torch
    from transformers import AutoModelForCausalLM

    from runs.device import pick_device
    from runs.loading import load_run
    from sample import sample_groups

    pick_device("cpu")
    run, peer = load_run(MODEL, "cpu"), AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows, found = prepared_run(tempfile.mkdtemp()).task.prompts("train", range(16)), {}
    stop = run.tokenizer.stop_tokens
    for name, (P, k, longest) in SAMPLER.items():
        ids = [run.tokenizer.encode_prompt(row["prompt"]) for row in rows[:P]]
        width = max(map(len, ids))
        padded = torch.tensor([[stop[0]] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        options = dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, num_return_sequences=k, pad_token_id=0)
        options |= dict(max_new_tokens=longest, eos_token_id=list(stop), attention_mask=mask)

        def ours(seed, ids=ids, k=k, longest=longest):
            return int(sample_groups(run.model, ids, k, longest, stop_token=stop, seed=seed).completion_lengths.sum())

        @torch.no_grad()
        def theirs(seed, padded=padded, options=options, width=width):
            torch.manual_seed(seed)
            tokens = peer.generate(padded, **options)[:, width:]
            ends = torch.isin(tokens, torch.tensor(stop))
            return int(torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens.shape[1]).sum())

        speeds = {"snug": [], "generate": []}
        for seed in range(rounds + 1):
            for who, call in (("snug", ours), ("generate", theirs)):
                started = time.perf_counter()
                tokens = call(seed)
                if seed:
                    speeds[who].append(tokens / (time.perf_counter() - started))
        ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
        found[name] = {who: round(statistics.median(values)) for who, values in speeds.items()}
        found[name]["ratio"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        print(name, found[name], flush=True)
    return found


def main(arguments):
    import torch

    about = dict(machine=platform.machine(), torch=torch.__version__, threads=torch.get_num_threads())
    benches = {"sampler": sampler, "iteration": iteration}
    print(json.dumps(about | {name: f(arguments.rounds) for name, f in benches.items() if arguments.only in name}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A real model: sampler beside generate, iteration beside TRL.")
    parser.add_argument("--only", default="", help="sampler or iteration")
    parser.add_argument("--rounds", type=int, default=3, help="pairs")
    parser.add_argument("--arm", choices=("snug", "trl"), help="used by the bench itself")
    arguments = parser.parse_args()
    arm(arguments.arm) if arguments.arm else main(arguments)
