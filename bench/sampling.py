"""Sampling beside Hugging Face `generate`: the same random weights and prompts, lengths from the same distribution.

    python bench/sampling.py [--shapes=cuda|cpu|tiny] [--only=WORD] [--rounds=5]

A model's stop token has a constant probability at each token, so lengths are geometric; or it has none, and all lengths
are equal. "smollm2" cases are a real model with the prompts of config/grpo_real.py, if it is installed (`make
models/smollm2-135m-instruct`). The contenders take turns, call by call; a figure is the median of the pairs so far, with
the smallest and the largest. On CUDA eager steps and generate are slow and take part in the first pair only. tokens/s
counts sampled tokens, stop tokens included. Left out: a decode step alone, which gpu.py measures.
"""

from importlib.util import find_spec

import torch
from common import (
    DEVICE,
    GPT2,
    HOME,
    QWEN,
    QWEN_15B,
    begin,
    chosen,
    clocked,
    end,
    going_on,
    largest_difference,
    median_result,
    parser,
    result,
)
from iteration import set_stop_probability, transformers_model

from model import autocast, make_model
from runs.loading import load_run
from runs.prepare import prepare
from sample import sample_groups
from settings import GRPOSettings
from snug.options import read_settings
from snug.pretrained.shapes import config_of
from snug.pretrained.tensors import entries, rows_of

REAL = HOME / "models/smollm2-135m-instruct"

QWEN_1B = QWEN_15B | dict(block_size=2048)
QWEN_TINY = QWEN | dict(vocab_size=512, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=64, block_size=64)
SMALL = dict(vocab_size=512, n_head=4, block_size=256)
# name: (shape, prompts, tokens a prompt, completions a prompt, mean length or 0, longest, dtype)
CASES = {
    "cpu": {
        "2 x 64, geometric": (SMALL | dict(n_layer=2, n_embd=64), 16, 96, 16, 16, 128, "float32"),
        "4 x 256, geometric": (SMALL | dict(n_layer=4, n_embd=256), 16, 96, 16, 16, 128, "float32"),
        "2 x 64, uniform": (SMALL | dict(n_layer=2, n_embd=64), 64, 96, 1, 0, 64, "float32"),
        "smollm2, 8 x 4, 64 tokens": (None, 8, 0, 4, 1, 64, "float32"),
        "smollm2, 16 x 8, 16 tokens": (None, 16, 0, 8, 1, 16, "float32"),
    },
    "cuda": {  # the most wanted first
        "qwen 1.5B, batch 64": (QWEN_1B, 4, 256, 16, 0, 256, "bfloat16"),
        "gpt2, batch 64": (GPT2, 4, 128, 16, 0, 256, "bfloat16"),
        "qwen 1.5B, batch 16": (QWEN_1B, 1, 256, 16, 0, 256, "bfloat16"),
        "gpt2, batch 64, geometric": (GPT2, 4, 128, 16, 128, 512, "bfloat16"),
    },
    "tiny": {
        "qwen": (QWEN_TINY, 2, 8, 2, 0, 8, "bfloat16"),
        "gpt2, geometric": (SMALL | dict(n_layer=2, n_embd=32), 2, 8, 2, 4, 12, "float32"),
    },
}
LOOK = "the kernel table of bench/gpu.py --only=decode"
# of "times as fast as generate"; others: 10
AIMS = {"2 x 64, geometric": 8, "4 x 256, geometric": 20, "2 x 64, uniform": 2}
AIMS |= {"smollm2, 8 x 4, 64 tokens": 3, "smollm2, 16 x 8, 16 tokens": 4}


def real_models(dtype):
    """-> (our model, the peer or None, stop tokens, 16 prompts as ids)."""
    words = [str(HOME / "config/grpo_real.py"), f"--init_from={REAL}", f"--dtype={dtype}"]
    prepared, peer = prepare(*read_settings(GRPOSettings, words)[:2]), None
    task, run = prepared.task, load_run(prepared.origin, DEVICE)
    if find_spec("transformers"):
        peer = transformers_model(REAL, dtype).eval()
    ids = [run.tokenizer.encode_prompt(row["prompt"]) for row in task.prompts("train", range(16))]
    return run.model, peer, run.tokenizer.stop_tokens, ids


def hugging_face(config, dtype):
    """A model of this shape in transformers, or None where it is not installed."""
    if not find_spec("transformers"):
        return None
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoConfig.for_model(**config_of(config, dtype))
    return AutoModelForCausalLM.from_config(theirs, dtype=getattr(torch, dtype))


@torch.no_grad()
def give_weights(model, peer):
    """Copy our weights into the peer."""
    ours, theirs, config = dict(model.named_parameters()), peer.state_dict(), model.config
    for entry in entries(config, peer.config.model_type):
        rows = rows_of(ours[entry.ours], entry)
        theirs[entry.name].copy_(rows.t() if entry.transposed else rows)


def make_models(name, shape, mean, dtype):
    """-> (our model, the peer or None, stop tokens or None), in eval mode on DEVICE. The two share no memory."""
    torch.manual_seed(0)
    model = make_model(shape | dict(bias="position" not in shape), DEVICE, dtype).eval()
    config = model.config
    with torch.device(DEVICE):  # a model of billions takes minutes on a host
        peer = hugging_face(config, dtype)
    stop = config.vocab_size - 1 if mean else None
    if mean:
        set_stop_probability(model, stop, 1 / mean)
    if peer is not None:
        give_weights(model, peer.eval())
        peer = peer if agree(model, peer, name) else None
    return model, peer, (stop,) if mean else None


def agree(model, peer, name):
    """Do both compute the same log-probs? Otherwise nothing would be compared."""
    difference = largest_difference(model, peer)
    limit = 1e-3 if model.device.type == "cpu" and next(peer.parameters()).dtype == torch.float32 else 0.2
    result(f"{name}: log-probs, difference to generate's model", difference, at_most=limit, look="give_weights")
    return difference <= limit


def ours(model, prompts, k, longest, stop, seed, **options):
    """-> sampled tokens"""
    return int(
        sample_groups(model, prompts, k, longest, stop_token=stop, seed=seed, **options).completion_lengths.sum()
    )


def theirs(peer, prompts, k, longest, stop, seed):
    torch.manual_seed(seed)
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=DEVICE)
    tokens = peer.generate(
        padded,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        num_return_sequences=k,
        max_new_tokens=longest,
        eos_token_id=stop if stop is None else list(stop),
        pad_token_id=0,
    )[:, width:]
    if stop is None:
        return tokens.numel()
    ends = torch.isin(tokens, torch.tensor(stop, device=DEVICE))
    return int(torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens.shape[1]).sum())


def measure(name, case, rounds):
    shape, P, T, k, mean, longest, dtype = case
    if shape:
        model, peer, stop = make_models(name, shape, mean, dtype)
        prompts = torch.randint(shape["vocab_size"] - 1, (P, T)).tolist()
    else:
        model, peer, stop, prompts = real_models(dtype)
        prompts = prompts[:P]
    contenders = {"snug": lambda seed, most: ours(model, prompts, k, most, stop, seed)}
    if DEVICE == "cuda":
        contenders["eager"] = lambda seed, most: ours(model, prompts, k, most, stop, seed, enforce_eager=True)
    if peer is not None:
        contenders["generate"] = lambda seed, most: theirs(peer, prompts, k, most, stop, seed)
    figures = {}  # what -> one a round

    def tell(what, value, unit="", **aim):
        values = figures.setdefault(what, [])
        values.append(value)
        median_result(f"{name}: {what}", values, unit, **aim)

    with autocast("float32", model):
        for seed in range(-1, rounds):  # the first round is not counted, and on CUDA it is short
            speed, most = {}, 16 if seed < 0 and DEVICE == "cuda" else longest
            for who, call in contenders.items():
                if seed > 0 and DEVICE == "cuda" and who != "snug":
                    continue
                count, seconds = clocked(lambda call=call, most=most, seed=seed: call(seed + 1, most))
                speed[who] = count / seconds
                if seed < 0:
                    continue
                aim = dict(at_least=100_000, look=LOOK) if (who, name) == ("snug", "gpt2, batch 64") else {}
                tell(who, speed[who], "tokens/s", **aim)
                if who != "snug":
                    aim = dict(at_least=AIMS.get(name, 10), look=LOOK) if who == "generate" else {}
                    tell(f"times as fast as {who}", speed["snug"] / speed[who], "x", **aim)


def main(arguments):
    begin(arguments)
    failed = []
    for name, case in CASES[arguments.shapes].items():
        if (case[0] or REAL.exists()) and chosen(name, arguments.only):
            with going_on(name, failed):
                measure(name, case, arguments.rounds)
    end(failed)


if __name__ == "__main__":
    main(parser("Sampling: tokens a second, beside Hugging Face generate.", rounds=5).parse_args())
