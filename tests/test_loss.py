"""Advantages and the policy loss against plain Python loops, in float64."""

import math
import statistics

import pytest
import torch

from loss import group_advantages, k3, policy_loss

LOSS_TYPES = ("dapo", "grpo", "dr_grpo")


def slow_advantages(rewards, scale, eps):
    everything = statistics.stdev([r for group in rewards for r in group])
    result = []
    for group in rewards:
        mean = sum(group) / len(group)
        divisor = {"group": statistics.stdev(group) + eps, "batch": everything + eps, "none": 1.0}[scale]
        result.append([(r - mean) / divisor for r in group])
    return result


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_loop(scale):
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.25, 0.5, -1.0, 3.0], [1.0, 0.0, 0.0, 0.0]]
    advantages = group_advantages(rewards, scale, eps=1e-3)
    torch.testing.assert_close(advantages, torch.tensor(slow_advantages(rewards, scale, 1e-3)), atol=1e-6, rtol=1e-5)


def test_advantages_by_example():
    assert group_advantages([[1, 0, 0, 1]], eps=0).tolist() == [pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nothing_to_learn_is_exactly_zero(scale):
    """Equal rewards whose mean rounds (0.1 thirteen times), groups of one, and no NaN anywhere."""
    assert group_advantages([[0.1] * 13, [1 / 3] * 13], scale, eps=1e-9).abs().max() == 0
    assert group_advantages([[3.0], [5.0]], scale).tolist() == [[0.0], [0.0]]


def slow_loss(case, loss_type, beta, epsilon, epsilon_high, delta, max_new_tokens):
    """One token at a time -> (loss, clip fraction, kl), and only float arithmetic."""
    total = clips = kls = 0.0
    for i, s in enumerate(case["sequence"].tolist()):
        logp, old, ref = (float(case[name][i]) for name in ("logprobs", "old_logprobs", "ref_logprobs"))
        A = float(case["advantages"][s])
        ratio = math.exp(logp - old)
        clipped = min(max(ratio, 1 - epsilon), 1 + (epsilon if epsilon_high is None else epsilon_high))
        unclipped = ratio if delta is None else min(ratio, delta)
        r = math.exp(ref - logp)
        token = -min(unclipped * A, clipped * A) + beta * (r - math.log(r) - 1)
        weight = {
            "dapo": 1 / case["num_tokens"],
            "grpo": 1 / (case["num_sequences"] * int(case["lengths"][s])),
            "dr_grpo": 1 / (case["num_sequences"] * max_new_tokens),
        }[loss_type]
        total += token * weight
        clips += (clipped * A < unclipped * A) / case["num_tokens"]
        kls += (r - math.log(r) - 1) / case["num_tokens"]
    return total, clips, kls


def make_case(lengths, seed=0, spread=0.4):
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def noise(n):
        return torch.randn(n, generator=generator, dtype=torch.float64)

    logprobs = -noise(len(sequence)).abs()
    return dict(
        logprobs=logprobs,
        old_logprobs=logprobs + spread * noise(len(sequence)),
        advantages=noise(len(lengths)),
        sequence=sequence,
        lengths=torch.tensor(lengths),
        ref_logprobs=logprobs + spread * noise(len(sequence)),
        num_tokens=len(sequence),
        num_sequences=len(lengths),
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("epsilon_high, delta, beta", [(None, None, 0.0), (0.28, None, 0.04), (0.28, 1.5, 0.1)])
def test_policy_loss_equals_the_loop(loss_type, epsilon_high, delta, beta):
    case = make_case([5, 1, 9, 3])
    options = dict(loss_type=loss_type, beta=beta, epsilon=0.2, epsilon_high=epsilon_high, delta=delta, max_new_tokens=12)
    leaf = case["logprobs"].requires_grad_()
    loss, metrics = policy_loss(**case, **options)
    expected, clips, kl = slow_loss(case, **options)
    assert float(loss) == pytest.approx(expected, abs=1e-12)
    assert float(metrics["clip_fraction"]) == pytest.approx(clips, abs=1e-7) and clips > 0
    assert float(metrics["kl"]) == pytest.approx(kl, abs=1e-12)
    loss.backward()
    for i in range(len(leaf)):  # central differences of the loop
        shifted = []
        for step in (1e-6, -1e-6):
            moved = leaf.detach().clone()
            moved[i] += step
            shifted.append(slow_loss(case | {"logprobs": moved}, **options)[0])
        assert float(leaf.grad[i]) == pytest.approx((shifted[0] - shifted[1]) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_shares_of_micro_batches_add_up(loss_type):
    """Two halves of the sequences, with the counts of the whole, give the loss of the whole."""
    case = make_case([5, 1, 9, 3])
    options = dict(loss_type=loss_type, beta=0.04, max_new_tokens=12)
    whole, metrics = policy_loss(**case, **options)
    total, kl = 0.0, 0.0
    for group in ([0, 2], [1, 3]):
        tokens = torch.isin(case["sequence"], torch.tensor(group))
        sequence = torch.tensor([group.index(s) for s in case["sequence"][tokens].tolist()])
        part = {name: case[name][tokens] for name in ("logprobs", "old_logprobs", "ref_logprobs")}
        part |= dict(sequence=sequence, advantages=case["advantages"][group], lengths=case["lengths"][group])
        share, share_metrics = policy_loss(**part, num_tokens=18, num_sequences=4, **options)
        total, kl = total + share, kl + share_metrics["kl"]
    torch.testing.assert_close(total, whole, atol=1e-14, rtol=0)
    torch.testing.assert_close(kl, metrics["kl"], atol=1e-14, rtol=0)


# advantage, ratio -> does the gradient flow? (epsilon 0.2)
CLIPPING = [(1, 1.0, True), (1, 1.3, False), (1, 0.7, True), (-1, 1.0, True), (-1, 1.3, True), (-1, 0.7, False), (0, 1.3, False)]


@pytest.mark.parametrize("advantage, ratio, flows", CLIPPING)
def test_truth_table_of_clipping(advantage, ratio, flows):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, A, zero = torch.zeros(1, dtype=torch.float64), torch.tensor([float(advantage)]), torch.zeros(1, dtype=torch.long)
    loss, metrics = policy_loss(logprobs, old, A, zero, torch.ones(1), num_tokens=1, num_sequences=1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(gradient) == pytest.approx(-advantage * ratio if flows else 0.0)
    assert float(metrics["clip_fraction"]) == (advantage != 0 and not flows)


def test_right_after_a_rollout_loss_is_zero_and_gradient_is_not():
    advantages = group_advantages([[1.0, 0.0, 0.0, 1.0]]).flatten()
    logprobs = torch.full((8,), -1.0, requires_grad=True)
    sequence = torch.arange(4).repeat_interleave(2)
    loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, sequence, torch.full((4,), 2), num_tokens=8, num_sequences=4)
    loss.backward()
    assert abs(float(loss)) < 1e-7 and logprobs.grad.abs().min() > 0.1
    torch.testing.assert_close(logprobs.grad, -advantages[sequence] / 8)
    ragged, lengths = torch.tensor([0] * 1 + [1] * 9), torch.tensor([1, 9])
    counts = dict(num_tokens=10, num_sequences=2)
    by_type = {
        kind: float(policy_loss(zeros, zeros, A, ragged, lengths, loss_type=kind, **counts)[0])
        for kind in ("dapo", "grpo")
        for zeros, A in [(torch.zeros(10), torch.tensor([1.0, -1.0]))]
    }
    assert by_type["grpo"] == pytest.approx(0, abs=1e-7) and by_type["dapo"] == pytest.approx(0.8)


def test_k3_is_zero_at_the_reference_positive_elsewhere_and_unbiased():
    p, q = torch.softmax(torch.randn(50, dtype=torch.float64), 0), torch.softmax(torch.randn(50, dtype=torch.float64), 0)
    assert k3(p.log(), p.log()).abs().max() == 0 and (k3(p.log(), q.log()) >= 0).all()
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), (p * (p.log() - q.log())).sum())


def test_unknown_loss_type():
    with pytest.raises(ValueError, match="loss_type='ppo' is not one of"):
        policy_loss(**make_case([2]), loss_type="ppo")
