"""The loop, the sampler and the optimizer on tensors of a second device, without a GPU: what is mixed, what waits.

Where host and device are one, nothing tells a tensor that was made on the wrong one. Here tensors are fake: they have a
shape, a device "gpu" and no data. PyTorch lets Python register such a device (PrivateUse1), and checks devices as on
CUDA. The code believes that it plans for CUDA, so it takes CUDA's ways; kernels are not launched.
A read of a value, and a copy to or from ordinary host memory, make the host wait on CUDA. They are noted.
The device is registered in a process of its own, which runs all cases.
"""

from collections import Counter
from functools import partial

import pytest

from helpers import fake_device as fake


def one_and_two(iteration):
    """-> function: how often the host waited in it, with one micro-batch and with two"""
    one, two = (Counter(iteration(micro_batches=n)) for n in (1, 2))
    return {name: [one[name], two[name]] for name in one | two}


def cases():
    twice = lambda iteration: lambda mode, **given: one_and_two(partial(iteration, mode, **given))  # noqa: E731
    return fake.cases_of(twice(fake.iterate), twice(fake.sft), fake.LADDER)


@pytest.fixture(scope="module")
def told(request):
    return fake.run_apart(__file__, request, cases())


RARELY = [f"train-qwen-{name}" for name in ("selective", "autocast", "masters", "bfloat16", "teacher", "reference")]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in RARELY)) for name in cases()])
def test_no_devices_are_mixed_and_the_host_does_not_wait(name, told):
    assert "error" not in told[name], told[name]["error"]
    waits = told[name]["told"]
    if name.startswith("sample"):
        assert waits == {}  # of a step
    else:
        grown = {function for function, (one, two) in waits.items() if two > one}
        assert grown == {"upload"}  # on CUDA from pinned memory, without a wait; the fake device pins nothing


if __name__ == "__main__":
    fake.register()
    fake.print_cases(cases(), fake.FakeGPU)
