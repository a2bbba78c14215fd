"""kill -9 at random moments: every restart finds a whole checkpoint by itself, and the end is the undisturbed run's.

    python tests/kill.py --kills=200 [--seed=0]

A run of GRPO that saves after every iteration is started as a process of its own, killed, and started again with --resume=auto, until it
has been killed so often; then it is left to finish. Every other kill waits until a save is going on; saves are made slow
(a tenth of a second before each file is flushed), so that it falls into one. A run that finishes before it could be killed is followed by a new one.
After each kill every line of log.jsonl and samples.jsonl has to be whole, and every checkpoint that has its name.
Prints one JSON object: kills, during a save, whether anything was wrong.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path.insert(0, str(HOME))
CHILD = """
import sys, time
sys.path.insert(0, {home!r})
from runs import checkpoint
flush = checkpoint.flush
def slow(path):
    print("saving", flush=True)
    time.sleep(0.1)
    flush(path)
checkpoint.flush = slow
import grpo
from runs.prepare import prepare
from options import read_settings
from settings import GRPOSettings
print("started", flush=True)
prepared = prepare(*read_settings(GRPOSettings, sys.argv[1:])[:2])
prepared.reward_funcs = [lambda prompts, completions, **columns: [sum(map(ord, c)) % 7 for c in completions]]  # an untrained model's differ
grpo.main(prepared)
"""
OPTIONS = "--digits=2 --n_layer=1 --n_embd=32 --block_size=24 --batch_size=4 --group_size=4 --max_new_tokens=8 --eval_prompts=0 --device=cpu"
OPTIONS += " --max_iters=12 --save_interval=1 --learning_rate=1e-2 --resume=auto"


def start(folder):
    words = [sys.executable, "-c", CHILD.format(home=str(HOME)), *OPTIONS.split(), f"--out_dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run_until_killed(folder, rng, in_save):
    """-> (how it ended: "killed", "finished" or what was wrong, whether a save was going on)."""
    child = start(folder)
    lines, saves, wanted = [], 0, rng.randrange(1, 60)
    for line in child.stdout:
        lines.append(line)
        if line == "started\n" and not in_save:
            time.sleep(rng.random() * 3)
            break
        saves += line == "saving\n"
        if in_save and saves == wanted:
            time.sleep(rng.random() * 0.1)
            break
    child.send_signal(signal.SIGKILL)
    rest, error = child.communicate()
    if child.returncode != -signal.SIGKILL:
        return ("finished" if child.returncode == 0 else f"exit code {child.returncode}: {error}"), False
    return "killed", in_save or rest.endswith("saving\n")


def weights(folder):
    from runs.checkpoint import newest

    path = newest(folder)
    return path.name, (path / "model.safetensors").read_bytes(), (path / "optimizer.safetensors").read_bytes()


def whole_log(folder):
    """Is every line of log.jsonl an object, one an iteration, in order?"""
    return [record["iter"] for record in lines_of(folder, "log.jsonl")] == list(range(12))


def lines_of(folder, name):
    """Every line has to be an object, the last too. Raises ValueError."""
    file = Path(folder) / name
    text = file.read_text() if file.exists() else ""
    if text and not text.endswith("\n"):
        raise ValueError(f"{name} ends with half a line")
    return [json.loads(line) for line in text.splitlines()]


def left_behind(folder):
    """What is wrong with what a kill left, or None: half a line, or a checkpoint that has its name and is not whole."""
    from runs.checkpoint import checkpoints, damage

    try:
        for name in ("log.jsonl", "samples.jsonl"):
            lines_of(folder, name)
    except ValueError as error:
        return str(error)
    return next(filter(None, map(damage, checkpoints(folder))), None)


def main(kills, seed):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as home:
        wrong, done, in_saves, runs = [], 0, 0, 0
        if finish(f"{home}/whole") != "finished":
            raise SystemExit("the undisturbed run failed")
        expected = weights(f"{home}/whole")
        learned = [json.loads(line)["grad_norm"] for line in (Path(home) / "whole/log.jsonl").read_text().splitlines()]
        assert min(learned) > 0  # else all weights would be alike
        while done < kills:
            folder, ended = f"{home}/run{runs}", None
            while ended != "finished" and not wrong:
                ended, in_save = (
                    run_until_killed(folder, rng, done % 2 == 0) if done < kills else (finish(folder), False)
                )
                if ended == "killed":
                    done, in_saves = done + 1, in_saves + in_save
                    wrong += filter(None, [left_behind(folder)])
                elif ended != "finished":
                    wrong.append(ended)
            if not wrong and weights(folder) != expected:
                wrong.append(f"run {runs} ended with other weights")
            if not wrong and not whole_log(folder):
                wrong.append(f"run {runs} has another log")
            shutil.rmtree(folder, ignore_errors=True)
            runs += 1
            if wrong:
                break
    print(json.dumps(dict(kills=done, during_a_save=in_saves, runs=runs, seed=seed, wrong=wrong)))
    return wrong


def finish(folder):
    child = start(folder)
    _, error = child.communicate()
    return "finished" if child.returncode == 0 else f"exit code {child.returncode}: {error}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kills a run at random moments and looks what is left.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(bool(main(arguments.kills, arguments.seed)))
