"""What benches share: the device, shapes of models, the clock, and one line for each result as soon as it is known.

If BENCH_RESULTS names a file, a result is also appended there as one JSON object, so that a bench that is stopped half
way loses nothing (bench/all.py). A later result of the same name replaces the earlier one.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path.insert(0, str(HOME))

import torch  # noqa: E402

import runs  # noqa: E402, F401  the environment of a run: torch's allocator, oneDNN's cache
from snug.device.pick import pick_device  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Known models' shapes, as options of settings.py. block_size is added where it is missing.
GPT2 = dict(vocab_size=50257, n_layer=12, n_head=12, n_embd=768, block_size=1024)
QWEN = dict(norm="rmsnorm", position="rotary", mlp="swiglu", qkv_bias=True, rope_theta=1e6)
QWEN_05B = QWEN | dict(vocab_size=151936, n_layer=24, n_head=14, n_kv_head=2, n_embd=896, n_hidden=4864)
QWEN_15B = QWEN | dict(vocab_size=151936, n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, n_hidden=8960)
UNTIED = QWEN | dict(vocab_size=151936, tie_embeddings=False)  # as published, from 7B on
QWEN_7B = UNTIED | dict(n_layer=28, n_head=28, n_kv_head=4, n_embd=3584, n_hidden=18944)


def parser(description, rounds=0):
    """Options of every bench. shapes: "cuda", "cpu", or "tiny", which only shows that the bench runs."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--shapes", choices=("cuda", "cpu", "tiny"), default=DEVICE, help="default: the device's")
    options.add_argument("--only", default="", help="cases whose name has one of these words, comma-separated")
    if rounds:
        options.add_argument("--rounds", type=int, default=rounds, help="in which the contenders take turns")
    return options


def chosen(name, only):
    return any(word.strip() in name for word in only.split(","))


def commit():
    """The commit's short name, or "unknown": in a copy of the files, or without git."""
    if not shutil.which("git"):
        return "unknown"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HOME, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def begin(arguments):
    """Set up products, attention and threads as a run does."""
    pick_device(DEVICE)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}, torch {torch.__version__}, shapes: {arguments.shapes}", flush=True)


def result(name, value, unit="", at_least=None, at_most=None, **details):
    """One result. details: numbers and texts; None is left out.

    at_least or at_most: the aim, if there is one, with `look`: where to look first if the value misses it.
    """
    row, aim = dict(name=name, value=value, unit=unit), at_least if at_most is None else at_most
    if aim is not None:
        row |= dict(aim=f"at least {aim}" if at_most is None else f"at most {aim}")
        row |= dict(reached=value >= aim if at_most is None else value <= aim)
        row |= {"of aim": f"{100 * value / aim:.0f} %"} if aim else {}
    row |= {key: detail for key, detail in details.items() if detail is not None}
    print(in_words(row, row.keys() - {"name", "value", "unit", "reached", "look"}), flush=True)
    if path := os.environ.get("BENCH_RESULTS"):
        with open(path, "a") as file:
            file.write(json.dumps(dict(step=os.environ.get("BENCH_STEP")) | row) + "\n")


def median_result(name, values, unit="", **details):
    """The median of several measurements, with the smallest and the largest."""
    middle, low, high = (round(f(values), 4) for f in (statistics.median, min, max))
    result(name, middle, unit, low=low, high=high, **details)


def in_words(row, keys=("aim", "of aim")):
    """The row as a line of a table. keys: the entries to append."""
    value = f"{row['value']:.4g}" if isinstance(row["value"], float) else row["value"]
    shown = {key: f"{row[key]:.4g}" if isinstance(row[key], float) else row[key] for key in row if key in keys}
    return f"{row['name']:58} {value:>9} {row['unit']:8} " + "  ".join(f"{key} {text}" for key, text in shown.items())


@contextmanager
def going_on(case, failed):
    """After an error inside, such as out-of-memory, continue with the next case. `failed` gets the name of this one."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        result(f"{case}: failed", type(error).__name__, reached=False, look=str(error).splitlines()[:1])
        failed.append(case)


def end(failed):
    """Raises SystemExit if a case failed."""
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


@torch.no_grad()
def largest_difference(model, peer):
    """Of the log-probs of our model and of its copy in transformers."""
    tokens = torch.randint(model.config.vocab_size - 1, (2, 32), device=DEVICE)
    ours, theirs = (logits.float().log_softmax(-1) for logits in (model.logits(model(tokens)), peer(tokens).logits))
    return (ours - theirs).abs().max().item()


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def clocked(call):
    """-> (what it returns, seconds)."""
    synchronize()
    started = time.perf_counter()
    returned = call()
    synchronize()
    return returned, time.perf_counter() - started


@torch.no_grad()
def copy_bandwidth(size):
    """Bytes read and written per second by copies of `size` random bytes, which must be more than a cache holds."""
    x = torch.randint(256, (size,), dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    y.copy_(x)
    return 2 * size / min(clocked(lambda: y.copy_(x))[1] for _ in range(5))
