"""How long a save keeps the training waiting: GPT-2 124M with its AdamW state, beside and instead of the training.

    python bench/saving.py [--device=cpu] [--folder=/tmp]

Three saves of each kind after one that warms up; medians. `stall` is what the training waits for; `written after` is
when the checkpoint is there. How much slower forward passes are meanwhile is measured too, and a plain torch.save of
the same tensors to the same disk, flushed. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from device.host import available_on_host
from device.kinds import MIB
from model import GPT, GPTConfig
from runs import saver as saving
from runs.loading import tensors_of
from runs.saver import Saver
from settings import SFTSettings
from tokenizer import get_tokenizer
from training.guard import Guard
from training.optimizer import make_optimizer


@torch.no_grad()
def forwards_a_second(model, going_on):
    """Forward passes of 8 x 32 tokens for as long as something goes on."""
    tokens, count, started = torch.zeros(8, 32, dtype=torch.long, device=model.device), 0, time.perf_counter()
    while count == 0 or going_on():
        model(tokens)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        count += 1
    return count / (time.perf_counter() - started)


def main(device, folder):
    with tempfile.TemporaryDirectory(dir=folder) as home:
        settings = SFTSettings(out_dir=home, save_total_limit=1, max_iters=99)
        with torch.device(device):
            model = GPT(GPTConfig(vocab_size=50257, bias=True))
        optimizer, guard = make_optimizer(model, settings), Guard(settings, print)
        size = sum(tensor.nbytes for named in tensors_of(model, optimizer).values() for tensor in named.values())
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {size / MIB:.0f} MiB of state, torch {torch.__version__}, {device}"
        )
        saver = Saver(settings, get_tokenizer("bytes"), model, optimizer, print)
        stop = time.perf_counter() + 3
        alone, slowdowns = forwards_a_second(model, lambda: time.perf_counter() < stop), []
        rows = {"beside": [], "waited for": [], "torch.save": []}
        for done in range(1, 5):
            for kind in ("beside", "waited for"):
                saving.available_on_host = available_on_host if kind == "beside" else lambda: 0
                started = time.perf_counter()
                progress = dict(health=dict(guard.health), after_oom={}, extra_prompts=0)
                saver.save(2 * done + (kind == "beside"), progress)
                stall = time.perf_counter() - started
                if kind == "beside":
                    slowdowns.append(alone / forwards_a_second(model, lambda: saver.thread.is_alive()))
                saver.wait()
                rows[kind].append((stall, time.perf_counter() - started))
            started = time.perf_counter()
            with open(Path(home) / "plain.pt", "wb") as file:
                torch.save(tensors_of(model, optimizer), file)
                os.fsync(file.fileno())
            rows["torch.save"].append((time.perf_counter() - started,) * 2)
        result = {}
        for kind, times in rows.items():
            stall, whole = (round(median(column), 3) for column in zip(*times[1:], strict=True))
            result[kind] = dict(stall_s=stall, written_after_s=whole)
            print(f"{kind:12} stall {stall:7.3f} s   written after {whole:7.3f} s")
        result["slowdown_beside"] = round(median(slowdowns[1:]), 2)
        print(
            f"while a checkpoint is written beside it, a forward pass takes {result['slowdown_beside']:.2f} times as long"
        )
        print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a save costs.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    main(arguments.device, arguments.folder)
