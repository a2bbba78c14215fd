"""The loop, the sampler, the optimizer, evaluations and SFT as they run on MPS, without a Mac.

As in test_fake_cuda.py tensors are fake and their device is "gpu", a second device that Python registers; the code
believes that it plans for MPS. What MPS cannot do raises: float64, pinned memory, side streams, anything of torch.cuda,
and operations for which torch has no MPS kernel. torchgen has a list of kernels, of the torch that is installed.
What is not seen: whether MPS computes right.
"""

import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

import evaluate
from data.episodes import Episodes
from helpers import fake_device as fake
from helpers.errors import assert_refused
from runs.prepare import prepare
from sample import assemble
from settings import GRPOSettings, SFTSettings
from snug.memory.ledger import not_finite

REFUSED = {"activation offload", "host optimizer", "teacher on the host"}  # by a rule of settings.py
GSPO = dict(importance_sampling_level="sequence")
# They have no kernel of their own, or are those of the fake device: it makes tensors and copies.
ANYWHERE = {"empty", "empty_strided", "_to_copy", "copy_", "_local_scalar_dense", "detach", "alias", "lift_fresh"}


@cache
def mps_kernels() -> set:
    """Names of operations that run on MPS, such as "sort.stable"."""
    import torchgen

    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    functions = {}
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        functions[entry.partition("(")[0]] = entry
    names = set()
    for name, entry in functions.items():
        delegate = re.search(r"^  structured_delegate: (\S+)", entry, re.MULTILINE)
        kernels = functions[delegate[1]] if delegate else entry
        if "dispatch:" not in kernels or re.search(r"^    [\w, ]*\b(MPS|Composite\w+)\b", kernels, re.MULTILINE):
            names.add(name)
    return names


class FakeMPS(fake.FakeGPU):
    def __init__(self):
        super().__init__("mps")
        self.problems = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name().removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if x.device.type == "gpu"]
        if any(x.dtype == torch.float64 for x in here):
            self.problem(f"float64: {name}")
        if "_pin_memory" in name or (kwargs or {}).get("pin_memory"):
            self.problem("pinned memory")
        if here and func.namespace == "aten" and name.partition(".")[0] not in ANYWHERE and name not in mps_kernels():
            self.problem(f"no kernel: {name}")
        return out

    def problem(self, what):
        """Autograd's thread cannot raise it."""
        self.problems.add(f"{what} in {self.where()}")


def forbid_cuda():
    """Whatever of torch.cuda a run on CUDA uses raises, and pinned memory."""

    def fail(*args, **options):
        raise AssertionError("not on MPS")

    for name in ("Stream", "Event", "current_stream", "synchronize", "device", "device_of", "CUDAGraph", "MemPool"):
        setattr(torch.cuda, name, fail)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "mem_get_info", "cudart", "init"):
        setattr(torch.cuda, name, fail)
    torch.Tensor.pin_memory = fail


def evaluated(mode):
    """What is made of sampled tokens that are on the device, and what an evaluation reads of them."""
    tokens = torch.zeros(2, 4, dtype=torch.long, device="gpu")
    rollouts = assemble([[1], [2, 3]], 1, (5, 7), tokens, torch.zeros(2, 4, device="gpu"), None, None)
    nothing = SimpleNamespace(rows=[dict(prompt="1+1=", answer="2")] * 2, k=1, episodes=[], figures=dict)
    nothing.columns = partial(Episodes.columns, nothing)
    nothing.prompts, nothing.begun, nothing.finish = ["1+1="] * 2, [""] * 2, lambda rollouts: ["2"] * 2
    evaluate.sample_episodes = lambda *arguments, **options: (rollouts, nothing)
    with unset_fake_temporarily():
        prepared = prepare(SFTSettings(device="mps", task="addition", digits=1))
    return len(evaluate.sample_and_score(None, prepared, None, 1, temperature=0.0))


def saved(mode):
    """The check of weights before they are saved."""
    return not_finite(dict(weight=torch.zeros(3, device="gpu")))


def cases():
    ladder = {name: options for name, options in (fake.LADDER | {"GSPO": GSPO}).items() if name not in REFUSED}
    of_two = partial(fake.iterate, micro_batches=2), partial(fake.sft, micro_batches=2)
    return dict(evaluated=evaluated, saved=saved) | fake.cases_of(*of_two, ladder)


@pytest.fixture(scope="module")
def told(request):
    return fake.run_apart(__file__, request, cases())


@pytest.mark.long
@pytest.mark.parametrize("name", cases())
def test_what_runs_on_mps_asks_for_nothing_that_it_lacks(name, told):
    assert "error" not in told[name], told[name]["error"]
    assert told[name]["problems"] == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_offload_is_refused_in_one_line(name):
    assert_refused("^device=mps does not support .*=.*; use --", GRPOSettings(device="mps", **fake.LADDER[name]).check)


if __name__ == "__main__":
    fake.register()
    forbid_cuda()
    torch.Tensor.tolist = lambda x: np.zeros(x.shape, dtype=int).tolist()
    fake.print_cases(cases(), FakeMPS)
