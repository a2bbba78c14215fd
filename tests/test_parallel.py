"""Several processes take the steps of one: the same samples, gradients and weights, whoever has which share of the work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import trajectory
from conftest import DEVICE
from processes import CHECKS
from safetensors.torch import load_file

from memory import OneProcess
from runs.checkpoint import newest, read_state
from runs.log import read_lines, read_log

HOME = Path(__file__).parent.parent
RUNS = {2: [*CHECKS, "sft"], 4: ["dapo", "uneven", "out of memory"]}
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="gloo on a CPU")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A folder with all that 1, 2 and 4 processes have found."""
    folder, (two, four) = tmp_path_factory.mktemp("processes"), map(",".join, RUNS.values())
    jobs = f"1:{two},resume2", f"2:{two},trajectory,resume3", "1:resume4", f"4:{four},trajectory70"
    done = subprocess.run([sys.executable, HOME / "tests/processes.py", folder, *jobs], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def told(folder):
    """Its log without what is measured, and its samples."""
    records = [
        {k: v for k, v in record.items() if not k.startswith(("time", "mem")) and k != "tokens_per_second"}
        for record in read_log(folder)
    ]
    return records, read_lines(folder / "samples.jsonl")


def assert_same_weights(ours, theirs, atol):
    a, b = (load_file(newest(folder) / "model.safetensors") for folder in (ours, theirs))
    assert a.keys() == b.keys() and max((a[name] - b[name]).abs().max() for name in a) <= atol


@pytest.mark.parametrize("size, name", [(size, name) for size, names in RUNS.items() for name in names])
def test_processes_take_the_steps_of_one(found, name, size):
    (ours, samples), (theirs, expected) = told(found / str(size) / name), told(found / "1" / name)
    assert samples == expected  # texts and rewards
    assert len(ours) == len(theirs) > 1
    for our, their in zip(ours, theirs, strict=True):
        assert our == {key: pytest.approx(value, abs=1e-6) for key, value in their.items()}
    assert_same_weights(found / str(size) / name, found / "1" / name, 1e-9)


def test_the_checks_are_what_they_say(found):
    """What is compared above would not mean much if nothing was refilled, masked, skipped or repeated."""
    records = {name: told(found / "2" / name)[0] for name in RUNS[2]}
    assert max(record["gen_batches"] for record in records["dapo"]) > 1 and records["dapo"][0]["grad_norm"] > 0
    assert records["no variance"][0]["skipped_steps"] == 1 and "loss" not in records["no variance"][0]
    assert 0 < records["uneven"][1]["truncated_fraction"] < 1 and records["uneven"][1]["skipped_steps"] > 0
    assert min(record["grad_norm"] for record in records["plain"] + records["sft"]) > 0.1
    halved = read_state(newest(found / "4/out of memory"))["after_oom"]
    assert set(halved) == {"max_rollout_batch", "max_tokens_per_micro_batch"}


@pytest.mark.parametrize("size, budget", [(2, ""), (4, "70")])
def test_the_trajectory_of_one_process(found, size, budget):
    expected = json.loads(trajectory.FILE.with_suffix(".json").read_text())
    for rank in range(size):
        steps = json.loads((found / str(size) / f"trajectory{budget}.{rank}.json").read_text())
        assert len(steps) == 50
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)


def test_a_run_goes_on_with_more_processes_and_with_fewer(found):
    """Two iterations of one process, one of two, one of one."""
    assert_same_weights(found / "resume", found / "1/plain", 1e-9)
    assert told(found / "resume")[1] == told(found / "1/plain")[1]


def test_only_rank_0_writes(found):
    assert (found / "4/out.txt").read_text().count("GRPO on addition") == len(RUNS[4])
    assert sorted(path.name for path in (found / "4").iterdir() if path.is_dir()) == sorted(RUNS[4])


def test_one_process_shares_with_nobody():
    one = OneProcess()
    assert one.part(7) == slice(0, 7) and one.gather(lambda: 3) == [3] and one.agreed(None) is None
