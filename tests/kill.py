"""kill -9 at random moments: what is left is undamaged, and a restart ends as a run that nobody killed.

    python tests/kill.py [--kills=20] [--seed=0] [--kinds=none,ddp,fsdp] [--places=rollout,train,save]

A run of GRPO saves after every iteration, in one process (none) or in two (ddp, fsdp). For each kind and place, runs are
started and one process is killed, until `kills` kills have hit the place. Rank 0 tells when an iteration's rollout,
training or save begins and ends. The iteration, the rank and the delay are random. After each kill all lines of the
logs are complete, all checkpoints are undamaged, and the other process has ended with a line that says so. Then
--resume=auto has to finish the run.

Saves are made slow: a save of this model takes milliseconds. The processes are forks of this one, which has imported
torch. As torchrun does, it sends SIGTERM to the other process; test_torchrun.py kills processes of torchrun itself.
Prints one JSON object a kind and place: kills, how long the other process took to end, and what was wrong.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from dying import OPTIONS, letters
from processes import fork
from safetensors.torch import load_file

import grpo
from runs import checkpoint, saver
from runs.prepare import prepare
from settings import GRPOSettings
from snug.options import friendly_errors, read_settings
from training.state import Training

ITERATIONS, PATIENCE = 5, 60  # seconds
SIZES = dict(none=1, ddp=2, fsdp=2)
PLACES = dict(
    rollout=((grpo, "collect_groups"), (grpo, "collect_groups")),
    train=((grpo, "accumulate_gradient"), (Training, "update")),
    save=((saver.Saver, "write"), (saver, "write")),
)


def tell(place, pipe):
    """Write ( into the pipe when the place begins, ) when it ends."""

    def before(original):
        return lambda *arguments, **options: (os.write(pipe, b"("), original(*arguments, **options))[1]

    def after(original):
        return lambda *arguments, **options: (original(*arguments, **options), os.write(pipe, b")"))[0]

    for wrap, (owner, name) in zip((before, after), PLACES[place], strict=True):
        setattr(owner, name, wrap(getattr(owner, name)))


def slow_flush(path, flush=checkpoint.flush):
    time.sleep(0.1)
    flush(path)


def start(kind, folder, place=None, pipe=None):
    """-> the pids of the processes that run, or go on with, the run in this folder; their output goes to FOLDER.txt."""

    def work(rank):
        checkpoint.flush = slow_flush
        if place and rank == 0:
            tell(place, pipe)
        words = [*OPTIONS.split(), f"--out_dir={folder}", "--resume=auto", f"--parallel={kind}"]
        with friendly_errors():
            prepared = prepare(*read_settings(GRPOSettings, words)[:2])
            prepared.reward_funcs = [letters]
            grpo.main(prepared)

    Path(f"{folder}.txt").unlink(missing_ok=True)
    return fork(SIZES[kind], kind, work, f"{folder}.txt")


def output(folder):
    return Path(f"{folder}.txt").read_text()


def wait_for(pid):
    """-> (exit code, seconds it took to end). None: it did not end in time and was killed."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), time.monotonic() - began
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, PATIENCE


def place_lasts(kind, place, folder):
    """Run without a kill -> seconds of the longest passage of the place after the first."""
    reads, writes = os.pipe()
    children, lengths = start(kind, folder, place, writes), []
    os.close(writes)
    while os.read(reads, 1):
        began = time.monotonic()
        os.read(reads, 1)
        lengths.append(time.monotonic() - began)
    codes = {wait_for(pid)[0] for pid in children}
    assert codes == {0} and len(lengths) == ITERATIONS, output(folder)
    return max(lengths[1:])


def kill_in(kind, place, folder, rng, longest):
    """-> (was the place hit, seconds until the other process ended, what is wrong or None)."""
    iteration, victim, delay = rng.randrange(ITERATIONS), rng.randrange(SIZES[kind]), rng.random() * longest
    reads, writes = os.pipe()
    children = start(kind, folder, place, writes)
    os.close(writes)
    for _ in range(2 * iteration + 1):
        os.read(reads, 1)
    time.sleep(delay)
    os.kill(children[victim], signal.SIGKILL)
    hit = not select.select([reads], [], [], 0)[0]  # nothing was told since: the place is not over
    code, seconds = wait_for(children[victim])
    wrong, others = None, [pid for pid in children if pid != children[victim]]
    for pid in others:
        time.sleep(rng.random() * 0.15)
        os.kill(pid, signal.SIGTERM)
        other, seconds = wait_for(pid)
        wanted = f"error: rank {1 - victim} lost another process, which torchrun reports below"
        if other in (None, 0) or wanted not in output(folder):
            wrong = f"exit code {other}: {output(folder)[-2000:]}"
    os.close(reads)
    if code != -signal.SIGKILL:  # the end of the run came first
        return False, seconds, None
    wrong = wrong or left_behind(folder)
    return hit, seconds, wrong and f"{kind}, {place}, iteration {iteration}, rank {victim}, {delay:.3f} s: {wrong}"


def left_behind(folder):
    """What is wrong with what a kill left, or None: half a line, or a damaged checkpoint."""
    for name in ("log.jsonl", "samples.jsonl"):
        file = Path(folder) / name
        text = file.read_text() if file.exists() else ""
        try:
            lines = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return f"{name} has half a line"
        if lines and not text.endswith("\n"):
            return f"{name} ends without a newline"
    return next(filter(None, map(checkpoint.damage, checkpoint.checkpoints(folder))), None)


def finish(kind, folder, expected):
    """Resume the run -> what is wrong, or None. expected: {file: {name: tensor}} of a run that nobody killed."""
    codes = {wait_for(pid)[0] for pid in start(kind, folder)}
    if codes != {0}:
        return f"exit codes {codes}: {output(folder)}"
    if left_behind(folder):
        return left_behind(folder)
    iterations = [json.loads(line)["iter"] for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    if iterations != list(range(ITERATIONS)):
        return f"log.jsonl has iterations {iterations}"
    tensors, tolerance = tensors_in(folder), 0 if kind == "none" else 1e-6
    for name, tensor in expected.items():
        if (tensors[name] - tensor).abs().max() > tolerance:
            return f"{name} differs"


def tensors_in(folder):
    """{name: tensor} of the newest checkpoint: weights and moments."""
    path = checkpoint.newest(folder)
    return load_file(path / "model.safetensors") | load_file(path / "optimizer.safetensors")


def main(kills, seed, kinds, places):
    failed = False
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        for kind, place in ((kind, place) for kind in kinds for place in places):
            rng, began = random.Random(f"{seed} {kind} {place}"), time.monotonic()
            longest = place_lasts(kind, place, f"{home}/unharmed")
            expected, hits, missed, slowest, wrong = tensors_in(f"{home}/unharmed"), 0, 0, 0.0, None
            assert any(tensor.any() for name, tensor in expected.items() if name.startswith("exp_avg"))  # it learned
            while hits < kills and not wrong:
                hit, seconds, wrong = kill_in(kind, place, f"{home}/run", rng, longest)
                hits, missed, slowest = hits + hit, missed + (not hit), max(slowest, seconds)
                wrong = wrong or finish(kind, f"{home}/run", expected)
                shutil.rmtree(f"{home}/run", ignore_errors=True)
            shutil.rmtree(f"{home}/unharmed")
            report = dict(kind=kind, place=place, seed=seed, kills=hits, beside_it=missed)
            report |= dict(place_s=round(longest, 3), ended_after_s_max=round(slowest, 2), wrong=wrong)
            print(json.dumps(report | dict(time_s=round(time.monotonic() - began, 1))), flush=True)
            failed = failed or bool(wrong)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kills processes of runs at random moments.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="none,ddp,fsdp")
    parser.add_argument("--places", default="rollout,train,save")
    arguments = parser.parse_args()
    sys.exit(main(arguments.kills, arguments.seed, arguments.kinds.split(","), arguments.places.split(",")))
