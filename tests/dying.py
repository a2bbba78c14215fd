"""grpo.py in which one process dies, or is late, in its third iteration: torchrun tests/dying.py kill train 1 --out_dir=...

kill or wait; where: rollout, reward, train, save; the rank.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import grpo
from helpers.tasks import letters
from runs import saver
from runs.prepare import prepare
from settings import GRPOSettings
from snug.options import friendly_errors, read_settings

OPTIONS = "--digits=2 --n_layer=1 --n_embd=32 --block_size=24 --batch_size=4 --group_size=4 --max_new_tokens=8"
OPTIONS += " --device=cpu --eval_prompts=0 --max_iters=5 --save_interval=1 --learning_rate=1e-2"


def stop(record):
    return os.environ["RANK"] == "0" and record["iter"] and (record["iter"] == 1 or record["none"])


def breaks(original, what, calls):
    @functools.wraps(original)
    def function(*arguments, **options):
        calls.append(None)
        if len(calls) == 3 and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == 3 and what == "wait":
            print("waits", file=sys.stderr, flush=True)
            time.sleep(4)
        return original(*arguments, **options)

    return function


PLACES = dict(rollout=(grpo, "sample_episodes"), train=(grpo, "head_loss"), save=(saver.Saver, "write"))

if __name__ == "__main__":
    what, where, who, *words = sys.argv[1:]
    with friendly_errors():
        prepared = prepare(*read_settings(GRPOSettings, [*OPTIONS.split(), *words])[:2])
        prepared.reward_funcs = [letters]
        if os.environ["RANK"] == who and where == "reward":
            prepared.reward_funcs = [breaks(letters, what, [])]
        elif os.environ["RANK"] == who:
            module, name = PLACES[where]
            setattr(module, name, breaks(getattr(module, name), what, []))
        grpo.main(prepared)
