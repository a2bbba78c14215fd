"""What tests share: the device, small models of both shapes, and settings that run in seconds."""

import json
import os

import pytest
import torch

from model import GPT, GPTConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT2 = dict(vocab_size=67, block_size=32, n_layer=2, n_head=4, n_embd=32, bias=True)
LLAMA = dict(
    GPT2,
    n_kv_head=2,
    norm="rmsnorm",
    position="rotary",
    mlp="swiglu",
    bias=False,
    qkv_bias=True,
    proj_bias=True,
    qk_norm=True,
    tie_embeddings=False,
)
SHAPES = {"gpt2": GPT2, "llama": LLAMA}

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes whose threads wait for one another crawl
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start: rounding depends on it


def make_model(shape="gpt2", seed=0, dtype=torch.float32, **changes):
    """A random model whose predictions are far from uniform."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SHAPES[shape] | changes)).to(DEVICE, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += 0.1 * torch.randn_like(weight)
            if name.endswith(("embedding.weight", "head.weight")):
                weight *= 3
    return model


def make_flat_model(shape="gpt2", **changes):
    """One whose 16 tokens are all sampled often, the stop token too, so that lengths are ragged."""
    model = make_model(shape, **{"vocab_size": 16} | changes)
    with torch.no_grad():
        model.norm.weight *= 0.3
    return model


@pytest.fixture
def device():
    return torch.device(DEVICE)


def pytest_addoption(parser):
    parser.addoption(
        "--long", action="store_true", help="also the checks that are slow and rarely differ from the short ones"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "long: runs with --long only")


def pytest_runtest_logreport(report):
    """For bench/all.py, which may have to stop the tests: what failed, as soon as it has."""
    path = os.environ.get("BENCH_RESULTS")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        row = dict(step="tests", name=report.nodeid, value="FAILED", unit="", error=report.longreprtext[-4000:])
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="a long check: --long runs it"))
