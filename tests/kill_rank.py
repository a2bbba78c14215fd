"""One of two processes is killed at a random moment: the other ends with a line that names it, and a restart finishes the run.

    python tests/kill_rank.py [--kills=20] [--seed=0] [--kinds=ddp,fsdp] [--places=rollout,train,save]

For each kind and place two processes are started, again and again, until so many kills have hit the place. Rank 0 tells
when an iteration's rollout, training or save begins and ends; which iteration, which rank and how long after the beginning
is random. Then the run is started again with --resume=auto and has to end with the weights of an unharmed run. Saves are
made slow, because a save of this model is over in milliseconds. The processes are forks of this one, which has imported
torch; as torchrun does, it sends SIGTERM to the other process. test_torchrun.py kills processes of torchrun itself.
Prints one JSON object a kind and place: kills, how long the other process took to end, and whether anything was wrong.
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
from kill import left_behind
from processes import fork
from safetensors.torch import load_file

import grpo
from options import friendly_errors, read_settings
from runs import checkpoint, saver
from runs.prepare import prepare
from settings import GRPOSettings
from training.state import Training

ITERATIONS, PATIENCE = 5, 60  # seconds
PLACES = dict(
    rollout=((grpo, "collect_groups"), (grpo, "collect_groups")),
    train=((grpo, "accumulate_gradient"), (Training, "update")),
    save=((saver.Saver, "write"), (saver, "write")),  # from the decision to the end of the writing thread
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
    """-> the pids of two processes that run, or go on with, the run in this folder; their output goes to FOLDER.txt."""

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
    return fork(2, kind, work, f"{folder}.txt")


def wait_for(pid, seconds=PATIENCE):
    """-> (exit code, seconds it took to end). None: it did not end in time and was killed."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), time.monotonic() - began
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, seconds


def finish(kind, folder):
    """-> what is wrong, or None."""
    codes = [wait_for(pid)[0] for pid in start(kind, folder)]
    if codes != [0, 0]:
        return f"exit codes {codes}: {output(folder)}"


def output(folder):
    return Path(f"{folder}.txt").read_text()


def place_lasts(kind, place, folder):
    """-> seconds of a run's longest passage of the place after the first."""
    reads, writes = os.pipe()
    children, lengths = start(kind, folder, place, writes), []
    os.close(writes)
    while os.read(reads, 1):
        began = time.monotonic()
        os.read(reads, 1)
        lengths.append(time.monotonic() - began)
    assert [wait_for(pid)[0] for pid in children] == [0, 0] and len(lengths) == ITERATIONS, output(folder)
    return max(lengths[1:])


def kill(kind, place, folder, rng, longest):
    """-> (was the place hit, seconds until the other ended, what is wrong or None)."""
    iteration, victim, delay = rng.randrange(ITERATIONS), rng.randrange(2), rng.random() * longest
    reads, writes = os.pipe()
    children = start(kind, folder, place, writes)
    os.close(writes)
    for _ in range(2 * iteration + 1):
        os.read(reads, 1)
    time.sleep(delay)
    os.kill(children[victim], signal.SIGKILL)
    hit = not select.select([reads], [], [], 0)[0]  # nothing was told since: the place is not over
    code, _ = wait_for(children[victim])
    time.sleep(rng.random() * 0.15)
    os.kill(children[1 - victim], signal.SIGTERM)
    other, seconds = wait_for(children[1 - victim])
    os.close(reads)
    wanted = f"error: rank {1 - victim} lost rank {victim}, which torchrun reports below"
    if code != -signal.SIGKILL:  # the end of the run came first
        return False, seconds, None
    where = f"{kind}, {place}, iteration {iteration}, rank {victim}, after {delay:.3f} s"
    if other in (None, 0) or wanted not in output(folder):
        return hit, seconds, f"{where}: exit code {other}: {output(folder)[-2000:]}"
    wrong = left_behind(folder) or finish(kind, folder)
    return hit, seconds, wrong and f"{where}: {wrong}"


def weights(folder):
    return load_file(checkpoint.newest(folder) / "model.safetensors")


def main(kills, seed, kinds, places):
    failed = False
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        for kind, place in ((kind, place) for kind in kinds for place in places):
            rng, began = random.Random(f"{seed} {kind} {place}"), time.monotonic()
            longest = place_lasts(kind, place, f"{home}/whole")
            expected, hits, missed, took, furthest, wrong = weights(f"{home}/whole"), 0, 0, [], 0.0, []
            while hits < kills and not wrong:
                hit, seconds, error = kill(kind, place, f"{home}/run", rng, longest)
                hits, missed, took = hits + hit, missed + (not hit), [*took, seconds]
                if error:
                    wrong.append(error)
                else:
                    ours = weights(f"{home}/run")
                    furthest = max(furthest, *((ours[name] - expected[name]).abs().max().item() for name in expected))
                    wrong += ["other weights"] if furthest > 1e-6 else []
                shutil.rmtree(f"{home}/run", ignore_errors=True)
            shutil.rmtree(f"{home}/whole")
            report = dict(kind=kind, place=place, seed=seed, kills=hits, beside_it=missed, place_s=round(longest, 3))
            report |= dict(ended_after_s_max=round(max(took), 2), weights_differ_by=furthest, wrong=wrong)
            print(json.dumps(report | dict(time_s=round(time.monotonic() - began, 1))), flush=True)
            failed = failed or bool(wrong)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kills one of two processes at random moments.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="ddp,fsdp")
    parser.add_argument("--places", default="rollout,train,save")
    arguments = parser.parse_args()
    sys.exit(main(arguments.kills, arguments.seed, arguments.kinds.split(","), arguments.places.split(",")))
