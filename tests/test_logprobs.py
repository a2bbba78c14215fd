"""Log-probs, head and their gradients against plain log_softmax in float64; what they save and hold against their promise."""

import gc

import pytest
import torch

from helpers.kernels import BF16, F16, F32, F64, assert_near, make_rows, plain, tolerance
from helpers.models import DEVICE
from interpreted import INTERPRETED, KERNELS, forbid_plain_torch, in_the_interpreter
from snug.device.kinds import MIB
from snug.logprobs import head_logprobs, head_loss, rows, token_logprobs
from snug.logprobs.head import add_product, rows_per_chunk
from snug.logprobs.rows import SCRATCH
from snug.memory.ledger import LiveBytes

plain_only = pytest.mark.skipif(INTERPRETED, reason="plain torch on a CPU: not again in the interpreter's process")
on_cpu = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="counts CPU storages")
test_the_kernels_in_the_interpreter = in_the_interpreter(__file__, 20)


@pytest.fixture(autouse=True)
def only_kernels(monkeypatch):
    forbid_plain_torch(monkeypatch, (rows, "slab_in_torch"))


def make_head(M, C, V, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, C, generator=generator).to(DEVICE, dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(V, C, generator=generator).to(DEVICE, dtype))
    targets = torch.randint(V, (M,), generator=generator).to(DEVICE)
    return hidden, weight, targets, torch.randn(M, generator=generator).to(DEVICE, dtype)


NAMES = "M, V, n_vocab, temperature, dtype"
CASES = [(0, 67, 67, 1.0, F32), (1, 1, 1, 0.7, F32), (9, 67, 67, 1.0, F64), (13, 80, 67, 0.7, F32)]
CASES += [(7, 80, 67, 0.7, BF16), (5, 128, 128, 1.0, F16), (3, 5008, 5000, 1.0, F16)]
CASES += [(11, 50257, 50257, 0.7, F32)]  # more rows than a slab


@pytest.mark.parametrize(NAMES, CASES)
def test_rows_against_float64(M, V, n_vocab, temperature, dtype):
    """Log-probs and entropies; the gradient for an upstream gradient, and the one in place of the logits."""
    logits, targets, upstream = make_rows(M, V, dtype)
    logits[:, n_vocab:] = torch.nan  # what a buffer's padding happens to hold
    targets = targets % n_vocab
    expected, expected_entropy = plain(logits, targets, temperature, n_vocab)
    options = rows.Options(temperature, n_vocab)
    logprobs, entropy = torch.empty(2, M, dtype=torch.promote_types(dtype, F32), device=DEVICE)
    rows.forward_rows(logits, targets, options, logprobs, entropy)
    assert_near(logprobs, expected, 2 * tolerance(dtype))
    assert_near(entropy, expected_entropy, 2 * tolerance(dtype))
    softmax = torch.softmax(logits.double()[:, :n_vocab] / temperature, -1)
    gradient = (torch.nn.functional.one_hot(targets, n_vocab) - softmax) / temperature
    rounded = 4 * torch.finfo(dtype).eps  # a gradient is rounded once, and once more behind the upstream gradient
    if n_vocab == V:
        leaf = logits.clone().requires_grad_()
        (token_logprobs(leaf, targets, temperature) * upstream).sum().backward()
        bound = max(1e-5, 2 * rounded) if dtype != F64 else 1e-12
        assert_near(leaf.grad, gradient * upstream.double()[:, None], bound)
    rows.forward_rows(logits, targets, options, logprobs, entropy, gradient=True)
    assert_near(logits[:, :n_vocab], gradient, max(2e-6, rounded) if dtype != F64 else 1e-12)
    assert (logits[:, n_vocab:] == 0).all()


@pytest.mark.parametrize(NAMES, [case for case in CASES if case[4] in (F32, F64)])
def test_heads_against_float64(M, V, n_vocab, temperature, dtype):
    """Chunks of at most 4 rows."""
    hidden, weight, targets, upstream = make_head(M, 8, V, dtype)
    targets, atol = targets % n_vocab, 1e-11 if dtype == F64 else 2e-4
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected, expected_entropy = plain(exact[0] @ exact[1].T, targets, temperature, n_vocab)
    truth = torch.autograd.grad((expected * upstream).sum(), exact)
    head = hidden, weight, targets, temperature
    options = dict(entropy=True, n_vocab=n_vocab, chunk_size=4)
    logprobs, entropy = head_logprobs(*head, **options)
    recomputed = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
    loss, again, entropy_again = head_loss(*head[:3], lambda q, rows: (q * upstream[rows]).sum(), *head[3:], **options)
    loss.backward()
    assert_near(loss, (expected * upstream).sum(), atol)
    for ours in (logprobs, again):
        assert_near(ours, expected, atol)
    for ours in (entropy, entropy_again):
        assert_near(ours, expected_entropy, atol)
    assert not entropy.requires_grad
    for ours in (recomputed, (hidden.grad, weight.grad)):
        for gradient, right_gradient in zip(ours, truth, strict=True):
            assert_near(gradient, right_gradient, atol)
    assert (weight.grad[n_vocab:] == 0).all()


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 2.0, 1.0], [88.0, 89.0, -200.0]], device=DEVICE)
    targets = torch.tensor([0, 1, 1], device=DEVICE)
    exact = torch.log_softmax(logits.double(), -1)
    logprobs, entropy = torch.empty(2, 3, device=DEVICE)
    gradient = logits.clone()
    rows.forward_rows(gradient, targets, rows.Options(1.0, 3), logprobs, entropy, gradient=True)
    assert_near(logprobs, exact.gather(1, targets[:, None])[:, 0], 1e-5)
    assert_near(entropy, torch.special.entr(exact.exp()).sum(-1), 1e-4)
    assert gradient.isfinite().all()
    if KERNELS:  # outside of the vocabulary nothing is read; plain torch raises
        assert token_logprobs(logits, torch.tensor([3, -1, 7], device=DEVICE)).isneginf().all()
    logits[0, 1] = torch.nan
    assert token_logprobs(logits, targets).isnan().tolist() == [True, False, False]


# head_loss: one visit, and where the weight's gradient goes.


@pytest.mark.parametrize("chunk_size", [1, 10, None])
def test_head_loss_is_head_logprobs_and_a_loss(chunk_size):
    """One that is not linear in the log-probs, as PPO's is not, so that a coefficient depends on its own log-prob."""
    hidden, weight, targets, advantages = make_head(29, 8, 67)

    def token_loss(logprobs, rows):
        ratio = torch.exp(logprobs + 3)
        return -torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows]).sum() / 29

    expected = token_loss(head_logprobs(hidden, weight, targets, 0.7), slice(None))
    expected.backward()
    dhidden, dweight = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    for times in (1, 2):  # the second call adds to both .grad
        loss, logprobs = head_loss(hidden, weight, targets, token_loss, 0.7, chunk_size)
        loss.backward()
        assert_near(loss, expected, 1e-10)
        assert_near(hidden.grad, times * dhidden, 1e-10)
        assert_near(weight.grad, times * dweight, 1e-10)
    assert not logprobs.requires_grad
    hidden.grad = weight.grad = None  # a weight that is no leaf takes autograd's way, where any gradient is right
    (3 * head_loss(hidden, weight.view_as(weight), targets, token_loss, 0.7)[0]).backward()
    assert_near(hidden.grad, 3 * dhidden, 1e-10)
    assert_near(weight.grad, 3 * dweight, 1e-10)


def test_a_tied_weight_gets_both_gradients():
    """Into .grad itself: the head's during the visit, the embedding's in backward; a hook sees the whole."""
    _, weight, targets, _ = make_head(29, 8, 67)
    tokens, fired = targets.flip(0), []
    hidden = torch.nn.functional.embedding(tokens, weight).tanh()
    plain_loss = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    (expected,) = torch.autograd.grad(plain_loss, weight, retain_graph=True)
    weight.register_post_accumulate_grad_hook(lambda w: fired.append(w.grad.clone()))
    buffer = weight.grad = torch.zeros_like(weight)
    loss = head_loss(hidden, weight, targets, lambda logprobs, rows: -logprobs.sum() / 29, chunk_size=10)[0]
    assert buffer.abs().sum() > 0
    loss.backward()
    assert len(fired) == 1 and torch.equal(fired[0], weight.grad) and weight.grad is buffer
    assert_near(weight.grad, expected, 1e-12)


@on_cpu
def test_backward_with_another_gradient_is_refused_where_it_would_be_wrong():
    """On CUDA the device refuses, and then nothing in the process can use it any more."""
    hidden, weight, targets, _ = make_head(5, 4, 9)
    loss = head_loss(hidden, weight, targets, lambda logprobs, rows: logprobs.sum())[0]
    with pytest.raises(RuntimeError, match="scale inside token_loss"):
        (loss / 2).backward()


def test_frozen_weight_frozen_hidden_and_no_grad():
    """A frozen weight takes any gradient."""
    hidden, weight, targets, _ = make_head(29, 8, 67)

    def loss(h, w):
        return head_loss(h, w, targets, lambda logprobs, rows: logprobs.sum(), chunk_size=10)[0]

    (once,) = torch.autograd.grad(loss(hidden, weight.detach()), hidden)
    (half,) = torch.autograd.grad(loss(hidden, weight.detach()) / 2, hidden)
    assert_near(half, once / 2, 1e-12)
    only_weight = loss(hidden.detach(), weight)
    only_weight.backward()
    assert weight.grad is not None and hidden.grad is None and once.abs().sum() > 0
    weight.grad = hidden.grad = None
    with torch.no_grad():
        assert_near(loss(hidden, weight), only_weight.detach(), 1e-12)
    assert not loss(hidden.detach(), weight.detach()).requires_grad
    assert weight.grad is None and hidden.grad is None


@plain_only
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_products_of_bfloat16_into_float32_are_fused_from_ampere_on(capability, monkeypatch):
    """Elsewhere slabs of the vocabulary are multiplied, then added. A tensor of the CPU says that it is on a GPU."""
    fused, dweight = [], torch.ones(50, 8).as_subclass(type("OnCUDA", (torch.Tensor,), dict(is_cuda=True)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "addmm", lambda *_, **options: fused.append(options["out_dtype"]))
    add_product(dweight, *(torch.ones(9, n, dtype=torch.bfloat16) for n in (50, 8)))
    if capability < (8, 0):
        assert (dweight == 1 + 9).all() and not fused
    else:
        assert fused == [torch.float32]


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_products(autocast):
    """Under autocast over float32 weights, and with weights that are bfloat16: gradients in the inputs' own dtypes."""
    hidden, weight, targets, advantages = make_head(64, 32, 1000, torch.float32)
    if not autocast:
        hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (plain(exact[0] @ exact[1].T, targets)[0] * advantages).sum().backward()
    eager = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        eager_logits = torch.nn.functional.linear(*eager)
        (torch.log_softmax(eager_logits.float(), -1).gather(1, targets[:, None])[:, 0] * advantages).sum().backward()

        def token_loss(logprobs, rows):
            assert logprobs.dtype == torch.float32
            return (logprobs * advantages[rows]).sum()

        logprobs = head_logprobs(hidden, weight, targets, chunk_size=20)
        loss, again = head_loss(hidden, weight, targets, token_loss, chunk_size=20)
        recomputed = torch.autograd.grad((logprobs * advantages).sum(), (hidden, weight))
    loss.backward()
    assert torch.equal(again, logprobs.detach()) and logprobs.dtype == torch.float32
    for ours, other, theirs, truth in zip((hidden, weight), recomputed, eager, exact, strict=True):
        assert ours.grad.dtype == other.dtype == ours.dtype
        worst = float((theirs.grad.double() - truth.grad).abs().max())
        assert float((ours.grad - truth.grad).abs().max()) > worst / 10  # bfloat16 it was
        assert_near(ours.grad, truth.grad, 1.5 * worst)
        assert_near(other, truth.grad, 1.5 * worst)


def head_loss_backward(hidden, weight, targets, **options):
    head_loss(hidden, weight, targets, lambda q, rows: q.exp().sum(), **options)[0].backward()


def head_logprobs_backward(hidden, weight, targets, **options):
    head_logprobs(hidden, weight, targets, **options).sum().backward()


def head_logprobs_alone(hidden, weight, targets, **options):
    with torch.no_grad():
        head_logprobs(hidden, weight, targets, **options)


@on_cpu
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "function, M, frozen, options, extra",
    [
        (head_loss_backward, 4096, False, {}, 0),
        (head_loss_backward, 8192, True, dict(entropy=True), 4 * SCRATCH),
        (head_logprobs_backward, 4096, True, {}, 0),
        (head_logprobs_alone, 8192, True, {}, -4 * 8192 * 8),  # no dhidden
    ],
)
def test_extra_bytes(function, M, frozen, options, extra):
    """A chunk, twice its (m, C), dhidden and O(M), whatever M; the same for a frozen weight and one with a .grad."""
    C, V, chunk_mb = 8, 512, 1.0
    hidden, weight, targets, _ = make_head(M, C, V, torch.float32)
    weight.requires_grad_(not frozen)
    weight.grad = None if frozen else torch.zeros_like(weight)
    chunk_rows = rows_per_chunk(V, 4, chunk_mb)
    chunk = chunk_rows * V * 4
    bound = chunk + 8 * chunk_rows * C + 4 * M * C + 48 * M + 2**16
    assert chunk <= MIB and bound < 4 * M * V
    gc.collect()
    with LiveBytes() as live:
        for tensor in (hidden, weight, targets, *([] if frozen else [weight.grad])):
            live.follow(tensor)
        before = live.current
        function(hidden, weight, targets, chunk_mb=chunk_mb, **options)
        assert chunk / 2 < live.peak - before <= bound + extra
