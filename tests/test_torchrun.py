"""torchrun as users start it: a process that dies, is late, fails or is stopped. No hang, one clear line, and a restart goes on."""

import os
import re
import signal
import subprocess
import sys

import pytest

from helpers import HOME
from helpers.models import DEVICE
from helpers.runs import assert_same_weights
from runs.checkpoint import newest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="gloo on a CPU")
long = pytest.mark.long


def start(*words):
    """-> the process of torchrun on dying.py."""
    words = [*TORCHRUN, HOME / "tests/dying.py", *words]
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(*words):
    """-> exit code, stdout, stderr."""
    child = start(*words)
    out, err = child.communicate(timeout=600)
    return child.returncode, out, err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    code, out, err = run("none", "reward", "0", f"--out_dir={folder}", "--parallel=ddp")
    assert code == 0 and "iter 4/5" in out, err
    return folder


@long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("where, who", [("rollout", 1), ("train", 0), ("train", 1), ("save", 0), ("save", 1)])
def test_a_dead_process_ends_all_and_a_restart_goes_on(where, who, kind, tmp_path, undisturbed):
    code, out, err = run("kill", where, str(who), f"--out_dir={tmp_path}/run", f"--parallel={kind}")
    assert code != 0
    assert re.search(rf"Root Cause.*rank +: {who} ", err, re.DOTALL)
    code, out, err = run("none", "reward", "0", f"--out_dir={tmp_path}/run", "--resume=auto", f"--parallel={kind}")
    assert code == 0 and "resumed after" in out, err
    assert_same_weights(tmp_path / "run", undisturbed, 1e-6)


@long
@pytest.mark.parametrize("number, kind", [(signal.SIGTERM, "ddp"), (signal.SIGINT, "ddp"), (signal.SIGTERM, "fsdp")])
def test_a_signal_saves_once_and_ends_all(number, kind, tmp_path):
    child = start("wait", "reward", "1", f"--out_dir={tmp_path}/run", "--save_interval=0", f"--parallel={kind}")
    assert any(line == "waits\n" for line in child.stderr)
    child.send_signal(number)
    out, _ = child.communicate(timeout=600)
    assert out.count(f"stopped by {number.name} after iteration 2, and saved; GRPO goes on with --resume=") == 1
    assert newest(tmp_path / "run").name == "checkpoint-000003" and child.returncode != 0


@long
def test_rank_0s_on_iteration_ends_all(tmp_path):
    """By True after iteration 1, by an error after the first of the resumed run."""
    words = "none reward 0 --parallel=fsdp --on_iteration=__main__:stop --resume=auto".split()
    code, out, err = run(*words, f"--out_dir={tmp_path}/run")
    assert code == 0 and out.count("stopped by on_iteration=__main__:stop after iteration 1, and saved") == 1, err
    code, out, err = run(*words, f"--out_dir={tmp_path}/run")
    assert code != 0 and "error: rank 0: on_iteration=__main__:stop after iteration 2 raised KeyError" in err


@long
def test_processes_and_the_option_have_to_fit(tmp_path):
    code, _, err = run("none", "reward", "0", f"--out_dir={tmp_path}/run")
    assert code and "error: parallel='none' and 2 processes of torchrun do not fit; start several with torchrun" in err
