"""Fixtures for all tests, and the options --long and --long-only."""

import json
import os
import signal

import pytest
import torch

import train_sft
from helpers.runs import ONE_DIGIT
from runs.prepare import prepare
from settings import SFTSettings
from snug.options import progress, read_settings

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes whose threads wait for one another crawl
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start: rounding depends on it


@pytest.fixture(scope="module")
def one_thread():
    """Hundreds of small ops: with other work on the machine, threads that wait for each other take 30 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """A fork leaves Ctrl-C to its branch, and then its process ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_thread_speaks():
    """Of a command in this process: its thread would go on through other tests."""
    with pytest.MonkeyPatch.context() as patch:  # not the test's, which may undo it
        patch.setattr(progress, "speak", lambda *console: None)
        yield


@pytest.fixture
def place(tmp_path):
    """A folder in which anybody could write, nobody too: if nothing appears, something refused it."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    assert os.access(tmp_path, os.W_OK)
    return tmp_path


@pytest.fixture
def varied_rewards(tmp_path, monkeypatch):
    """A reward that differs within groups, of texts and of messages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "def varied(prompts, completions, **_):\n    return [float(len(set(str(text)))) for text in completions]\n"
    (tmp_path / "lora_rewards.py").write_text(text)


@pytest.fixture(scope="session")
def sft(tmp_path_factory):
    """-> the folder of a short SFT run, to begin from."""
    folder = tmp_path_factory.mktemp("runs") / "sft"
    words = "--max_iters=10 --batch_size=32 --n_embd=64 --n_head=2 --block_size=24 --save_interval=0"
    train_sft.main(prepare(*read_settings(SFTSettings, [*ONE_DIGIT, *words.split(), f"--out_dir={folder}"])[:2]))
    return folder


def pytest_addoption(parser):
    also = "also the checks that are slow, rarely differ from the short ones, or need packages of requirements-long.txt"
    parser.addoption("--long", action="store_const", const="too", help=also)
    parser.addoption("--long-only", dest="long", action="store_const", const="only", help="these checks alone")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: runs with --long and --long-only")
    config.addinivalue_line("markers", "both: runs always, because it does more with --long and --long-only")


def pytest_runtest_logreport(report):
    """For bench/all.py, which may have to stop the tests: what failed, as soon as it has."""
    path = os.environ.get("BENCH_RESULTS")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        row = dict(step="tests", name=report.nodeid, value="FAILED", unit="", error=report.longreprtext[-4000:])
        row |= dict(reached=False)
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("long")
    if chosen == "only":
        items[:] = [item for item in items if item.get_closest_marker("long") or item.get_closest_marker("both")]
    for item in items if not chosen else []:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="a long check: --long runs it"))
