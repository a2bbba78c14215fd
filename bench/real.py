"""A real model, SmolLM2-135M-Instruct: our sampler beside Hugging Face `generate`.

    make models/smollm2-135m-instruct
    python bench/real.py [--rounds=3]

The same prompts in the chat template, equally many completions, stop tokens on, float32. Calls take turns.

Prints the ratios and, last, one JSON object. An iteration of this model beside TRL's: bench/iteration.py --only=smollm2.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path.insert(0, str(HOME))

MODEL = str(HOME / "models/smollm2-135m-instruct")
SAMPLER = {"8 prompts x 4, 64 tokens": (8, 4, 64), "16 prompts x 8, 16 tokens": (16, 8, 16)}


def prompts(count):
    """-> prompts of config/grpo_real.py, as messages."""
    from options import read_settings
    from runs.prepare import prepare
    from settings import GRPOSettings

    words = [f"--init_from={MODEL}", f"--data_file={HOME / 'data/sums.jsonl'}"]
    prepared = prepare(*read_settings(GRPOSettings, [str(HOME / "config/grpo_real.py"), *words])[:2])
    return [row["prompt"] for row in prepared.task.prompts("train", range(count))]


def sampler(rounds):
    """-> tokens per second and their ratios. Which tokens are drawn differs, so that lengths differ a little."""
    import torch
    from transformers import AutoModelForCausalLM

    from runs.device import pick_device
    from runs.loading import load_run
    from sample import sample_groups

    pick_device("cpu")
    run, peer = load_run(MODEL, "cpu"), AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    asked, found = prompts(16), {}
    stop = run.tokenizer.stop_tokens
    for name, (P, k, longest) in SAMPLER.items():
        ids = [run.tokenizer.encode_prompt(prompt) for prompt in asked[:P]]
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
    print(json.dumps(about | dict(sampler=sampler(arguments.rounds))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A real model: the sampler beside generate.")
    parser.add_argument("--rounds", type=int, default=3, help="pairs")
    main(parser.parse_args())
