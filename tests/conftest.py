"""What tests share: the device, small models of both shapes, and settings that run in seconds."""

import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model import GPT, GPTConfig
from runs.log import read_log
from snug.memory import Limits
from snug.options import progress
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

HOME = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT2 = dict(vocab_size=67, block_size=32, n_layer=2, n_head=4, n_embd=32, bias=True)
LLAMA = dict(n_kv_head=2, norm="rmsnorm", position="rotary", mlp="swiglu", qk_norm=True, tie_embeddings=False)
LLAMA = GPT2 | LLAMA | dict(bias=False, qkv_bias=True, proj_bias=True)
SHAPES = {"gpt2": GPT2, "llama": LLAMA}
QWEN = dict(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, n_hidden=48, mlp="swiglu", qkv_bias=True)
QWEN |= dict(norm="rmsnorm", norm_eps=1e-6, position="rotary", rope_theta=1e6, vocab_size=272, block_size=32768)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes whose threads wait for one another crawl
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start: rounding depends on it


@contextmanager
def disk(room):
    """Inside, no file takes more bytes than this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def make_chat_model(path, template=CHATML, brief=False):
    """Write a Qwen2.5 of random weights: more rows than ids, <|im_end|> as the end and <|endoftext|> beside it.

    brief: <|im_end|> is the likeliest token, about one in four.
    """
    torch.manual_seed(2)
    model = GPT(GPTConfig(**QWEN))
    if brief:
        with torch.no_grad():  # the first coordinate is the largest by far, behind all tokens
            model.embedding.weight *= 0.02
            model.embedding.weight[:, 0] = 1
            model.embedding.weight[258, 0] = 1.8
    save_pretrained(model, path, get_tokenizer("bytes"))
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    spec = json.loads((path / "tokenizer.json").read_text())
    added = spec["added_tokens"][0]
    spec["added_tokens"] = [added | dict(id=256 + i, content=text) for i, text in enumerate(tokens)]
    (path / "tokenizer.json").write_text(json.dumps(spec))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= dict(eos_token="<|im_end|>", chat_template=template)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[258, 256])))
    return path


def tool_of(name, function, **hints):
    """-> the function with this name and these hints; each argument is described."""
    function.__name__, function.__annotations__ = name, hints
    function.__doc__ = "Do it.\n\nArgs:\n" + "".join(f"    {argument}: of it\n" for argument in hints)
    return function


def rows_of(rollouts):
    """-> N pairs (ids, log-probs) of the completions, the stop token included."""
    columns = rollouts.tokens, rollouts.sampling_logprobs, rollouts.prompt_lengths, rollouts.completion_lengths
    return [(row[p : p + c].tolist(), values[:c].tolist()) for row, values, p, c in zip(*columns, strict=True)]


def limits_of(settings, say=print, longest=(1, 1)):
    """The Limits of a run with these settings; longest: tokens of its longest prompt and completion."""
    return Limits(SimpleNamespace(settings=settings, longest=lambda: longest), say)


def figures(folder):
    """A run's log without what is measured, which no run has twice."""
    measured = ("time_", "tokens_per_second", "mem_")
    return [{k: v for k, v in record.items() if not k.startswith(measured)} for record in read_log(folder)]


@pytest.fixture(scope="module")
def one_thread():
    """Hundreds of small ops: with other work on the machine, threads that wait for each other take 30 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_thread_speaks():
    """Of a command in this process: its thread would go on through other tests."""
    with pytest.MonkeyPatch.context() as patch:  # not the test's, which may undo it
        patch.setattr(progress, "speak", lambda *console: None)
        yield


@pytest.fixture
def device():
    return torch.device(DEVICE)


def pytest_addoption(parser):
    also = "also the checks that are slow, rarely differ from the short ones, or need packages of requirements-long.txt"
    parser.addoption("--long", action="store_const", const="too", help=also)
    parser.addoption(
        "--long-only", dest="long", action="store_const", const="only", help="these checks, without the others"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "long: runs with --long and --long-only")
    config.addinivalue_line("markers", "both: runs always, because it does more with --long and --long-only")


def pytest_runtest_logreport(report):
    """For bench/all.py, which may have to stop the tests: what failed, as soon as it has."""
    path = os.environ.get("BENCH_RESULTS")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        row = dict(step="tests", name=report.nodeid, value="FAILED", unit="", error=report.longreprtext[-4000:])
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("long")
    if chosen == "only":
        items[:] = [item for item in items if item.get_closest_marker("long") or item.get_closest_marker("both")]
    for item in items if not chosen else []:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="a long check: --long runs it"))


def tensor_bytes(tensors):
    """Bytes of the distinct storages of some tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
