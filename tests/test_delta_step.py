"""A decode step of the gated delta rule: the kernel beside plain torch, which tests/test_delta.py compares with chunks."""

import pytest
import torch

from helpers.kernels import ahead_of_time
from helpers.models import DEVICE
from interpreted import in_kernels, in_the_interpreter, resources_of
from snug.kernels import delta_step

test_values_in_the_interpreter = in_the_interpreter(__file__, 3)


@in_kernels
@pytest.mark.parametrize("H, K, V", [(2, 8, 8), (4, 8, 16), (3, 16, 4)])
def test_a_kernels_steps_are_plain_torchs(H, K, V, monkeypatch):
    """Nine steps of four slots; some are idle, and their states stay. In float64 plain torch runs."""
    torch.manual_seed(0)
    S = torch.randn(4, H, K, V, device=DEVICE)
    right = S.double()
    for _ in range(9):
        q, k, v = (torch.randn(4, 1, H, size, device=DEVICE).transpose(1, 2) for size in (K, K, V))
        active = torch.rand(4, 1, 1, 1, device=DEVICE) < 0.7
        g, beta = (sign * torch.rand(4, H, 1, 1, device=DEVICE) * active for sign in (-1, 1))
        inputs, before = (q, k / k.norm(dim=-1, keepdim=True), v, g, beta), S.clone()
        expected = delta_step.step(*(x.double() for x in inputs), right)
        with monkeypatch.context() as patch:
            patch.setattr(delta_step.torch.Tensor, "__imul__", lambda *_: pytest.fail("plain torch ran"))
            y = delta_step.step(*inputs, S)
        for ours, theirs in ((y, expected), (S, right)):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
        assert torch.equal(S[~active.flatten()], before[~active.flatten()])


@ahead_of_time
def test_compiled_it_stays_in_registers(capability, tmp_path):
    """At the published shapes; two programs fit on a multiprocessor of 65,536 registers."""
    pointers = dict.fromkeys(("q", "k", "v", "g", "beta", "S", "y"), "*fp32")
    constants = dict(K=128, V=128)
    used, ptx = resources_of(delta_step.step_kernel, capability, pointers, constants, [], 4, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 256
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx
