"""Advantages and the policy loss against plain loops, in float64."""

import math
import re
import shutil
import statistics

import pytest
import torch

import grpo
import loss
from helpers import HOME
from loss import decoupled_advantages, group_advantages
from settings import LOSSES, OWN_LOSS, GRPOSettings
from snug.options import SnugError

SCALES = ("group", "batch", "none")


def policy_loss(*tensors, **arguments):
    """loss.policy_loss, whose options are named beside its other arguments."""
    options = {name: arguments.pop(name) for name in list(arguments) if hasattr(GRPOSettings, name)}
    return loss.policy_loss(*tensors, options=GRPOSettings(**options), **arguments)


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_equal_the_loop(scale):
    """None: not scored."""
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.25, None, -1.0, 3.0], [1.0, 0.0, None, None], [-2.0, 1.0, 0.0, 0.5]]
    advantages = group_advantages([[math.nan if r is None else r for r in group] for group in rewards], scale, 1e-3)
    everything, expected = statistics.stdev([r for group in rewards for r in group if r is not None]), []
    for group in rewards:
        known = [r for r in group if r is not None]
        divisor = {"group": statistics.stdev(known) + 1e-3, "batch": everything + 1e-3, "none": 1.0}[scale]
        expected.append([0.0 if r is None else (r - statistics.mean(known)) / divisor for r in group])
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_nothing_to_learn_is_exactly_zero(scale):
    """Equal rewards, whose mean in float32 would round; groups of one; and no NaN anywhere."""
    for n in range(2, 65):
        assert group_advantages([[0.1] * n, [1 / 3] * n, [-1e8 / 3] * n], scale, eps=1e-9).abs().max() == 0
    assert group_advantages([[3.0], [5.0]], scale).tolist() == [[0.0], [0.0]]
    nan = math.nan
    for eps in (0.0, 1e-4):
        ragged = [[nan, nan], [nan, 0.1]], [[nan, *[0.1] * 13]]
        for rewards in ([[2.0, 2.0], [2.0, 2.0]], *ragged, [[7.0]]):
            assert group_advantages(rewards, scale, eps).abs().max() == 0


def test_decoupled_advantages_equal_the_loop():
    """Three functions, one of them indifferent; a completion that one function or none has scored."""
    none = None
    functions = [
        [1.0, 0.0, 0.0, 1.0, 0.5, none, 0.0, none], [10.0, 0.0, none, 0.0, 1.0, 3.0, 3.0, none], [2.0] * 7 + [none],
    ]  # fmt: skip
    weights, totals = [1.0, 0.5, 2.0], [0.0] * 7
    for weight, rewards in zip(weights, functions, strict=True):
        for group in (range(4), range(4, 8)):
            known = [rewards[i] for i in group if rewards[i] is not None]
            for i in group:
                if rewards[i] is not None:
                    totals[i] += weight * (rewards[i] - statistics.mean(known)) / (statistics.stdev(known) + 1e-4)
    expected = [(x - statistics.mean(totals)) / (statistics.stdev(totals) + 1e-4) for x in totals] + [0.0]
    ours = decoupled_advantages(functions, 4, weights)
    torch.testing.assert_close(ours.flatten(), torch.tensor(expected), atol=1e-6, rtol=0)
    equal = decoupled_advantages([[0.1] * 6, [1 / 3] * 6], 3, [1.0, 1.0])
    assert equal.shape == (2, 3) and equal.abs().max() == 0


def slow_loss(case, logprobs, o):
    """One sequence and one token at a time -> (loss, clip fraction, k3). What is constant for the gradient is a float."""
    high = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    total, clips, k3s = 0.0, 0, 0.0
    for s, length in enumerate(case["lengths"].tolist()):
        tokens = [i for i in range(len(logprobs)) if int(case["sequence"][i]) == s]
        A = float(case["advantages"][s])
        names = "old_logprobs", "ref_logprobs", "sampling_logprobs"
        old, ref, sampled = ([float(case[name][i]) for i in tokens] for name in names)
        mine = [logprobs[i] for i in tokens]
        changes = [m - q for m, q in zip(mine, old, strict=True)]
        mean = sum(changes) / length
        for m, q, r, v in zip(mine, old, ref, sampled, strict=True):
            ratio = torch.exp(mean if o["importance_sampling_level"] == "sequence" else m - q)
            if o["loss_type"] == "cispo":
                token = -min(ratio.item(), high) * A * m
                clips += bool(ratio > high) and A != 0
            elif o["loss_type"] == "sapo":
                t = o["sapo_temperature_pos" if A > 0 else "sapo_temperature_neg"]
                token = -4 * A / t / (1 + torch.exp(-t * (ratio - 1)))
            else:
                plain, clipped = ratio * A, ratio.clamp(1 - o["epsilon"], 1 + high) * A
                token = -min(plain, clipped)
                clips += bool(clipped < plain)
            if o["cap"]:
                token = token * min(math.exp(q - v), o["cap"])
            d = r - m
            weight = o["beta"] * (ratio if o["kl_estimator"] == "k3" else 1)
            token = token + weight * (torch.exp(d) - d - 1)
            k3s += (torch.exp(d) - d - 1).item()
            divisor = dict.fromkeys(("dapo", "cispo"), case["num_tokens"])
            divisor |= dict.fromkeys(("grpo", "sapo"), case["num_sequences"] * length)
            divisor |= dict(luspo=case["num_sequences"], bnpo=len(logprobs) * o["num_micro_batches"])
            divisor |= dict(dr_grpo=case["num_sequences"] * o["max_new_tokens"])
            total += token / divisor[o["loss_type"]]
    return total, clips / case["num_tokens"], k3s / case["num_tokens"]


def make_case(lengths, seed=0, spread=0.4):
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def noise(n):
        return torch.randn(n, generator=generator, dtype=torch.float64)

    logprobs = -noise(len(sequence)).abs()
    old, sampled, reference = (logprobs + spread * noise(len(sequence)) for _ in range(3))
    case = dict(logprobs=logprobs, old_logprobs=old, sampling_logprobs=sampled, ref_logprobs=reference)
    case |= dict(advantages=noise(len(lengths)), sequence=sequence, lengths=torch.tensor(lengths))
    return case | dict(num_tokens=len(sequence), num_sequences=len(lengths))


OPTIONS = dict(epsilon=0.2, epsilon_high=None, beta=0.0, kl_estimator="k3", cap=None)
OPTIONS |= dict(max_new_tokens=12, num_micro_batches=3, sapo_temperature_pos=0.75, sapo_temperature_neg=1.25)
VARIANTS = {"plain": {}, "k3 times the ratio, truncated importance": dict(beta=0.04, cap=1.1)}
VARIANTS["asymmetric, k3"] = dict(epsilon_high=0.28, beta=0.1, kl_estimator="k3_no_ratio")


def evaluate(case, options):
    """policy_loss and its gradient."""
    options = dict(options)
    options["importance_sampling_cap"] = options.pop("cap", None)
    leaf = case["logprobs"].detach().requires_grad_()
    value, metrics = policy_loss(**case | {"logprobs": leaf}, **options)
    assert not any(metric.requires_grad for metric in metrics.values())
    return value.detach(), torch.autograd.grad(value, leaf)[0], metrics


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_policy_loss_equals_the_loop(loss_type, level, variant):
    """Every loss_type x level in each of three variants: value and gradient in float64."""
    case = make_case([5, 1, 9, 3, 2, 2, 7, 4])
    case["advantages"] = torch.tensor([1.2, 0.0, 0.0, -1.2, -0.3, 1.4, -0.6, -0.5], dtype=torch.float64)
    options = OPTIONS | variant | dict(loss_type=loss_type, importance_sampling_level=level)
    if loss_type == "cispo":
        options |= dict(epsilon_high=1.3 if level == "token" else 1.02)
    value, gradient, metrics = evaluate(case, options)
    logprobs = case["logprobs"].detach().requires_grad_()
    expected, clips, k3 = slow_loss(case, logprobs, options)
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), abs=1e-12)
    assert float(metrics["clip_fraction"]) == pytest.approx(clips, abs=1e-7)
    assert clips or LOSSES[loss_type].surrogate not in ("clipped", "cispo")
    assert float(metrics["kl"]) == pytest.approx(k3, abs=1e-12)
    torch.testing.assert_close(gradient, logprobs.grad, atol=1e-12, rtol=1e-10)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["teacher_logprobs", "divergence"])
def test_metrics_of_a_teacher_keep_no_graph(name):
    """It would hold the activations of every micro-batch until the step ends."""
    case = make_case([5, 1])
    case.pop("sampling_logprobs")
    leaf = case["logprobs"].requires_grad_()
    column = {name: leaf * 2 if name == "divergence" else leaf.detach() - 1}
    value, metrics = loss.policy_loss(**case, **column, options=GRPOSettings())
    assert value.requires_grad and not metrics["divergence"].requires_grad and metrics["divergence"] != 0


def test_a_loss_of_ones_own_is_one_of_ours(tmp_path, monkeypatch):
    """It gets what ours get, by name, and its KL, correction and mean over tokens are those of dapo."""
    module, name = tmp_path / "losses_of_a_test.py", "losses_of_a_test:mine"
    names = "logprobs old_logprobs ref_logprobs advantages ratio sequence lengths options num_tokens num_sequences"
    body = f"    assert {{*arguments}} == {{*{names.split()}}}\n    return loss.clipped_surrogate(**arguments)[0]\n"
    module.write_text(f"import loss\n\ndef mine(**arguments):\n{body}")
    monkeypatch.chdir(tmp_path)
    options = OPTIONS | VARIANTS["k3 times the ratio, truncated importance"] | dict(importance_sampling_level="token")
    case = make_case([5, 1, 9, 3])
    ours, own = evaluate(case, options | dict(loss_type="dapo")), evaluate(case, options | dict(loss_type=name))
    assert torch.equal(own[0], ours[0]) and torch.equal(own[1], ours[1]) and torch.equal(own[2]["kl"], ours[2]["kl"])
    settings = GRPOSettings(loss_type=name)
    assert settings.loss is OWN_LOSS and settings.needs_whole_sequences and not settings.depends_on_cut


WRONG = dict(none=lambda x: None, numbers=lambda x: x.tolist(), mean=lambda x: x.mean(), detached=lambda x: x.detach())


@pytest.mark.parametrize("kind", WRONG)
def test_a_loss_of_ones_own_that_returns_something_else_is_refused(kind, monkeypatch):
    monkeypatch.setattr("loss.load_loss", lambda spec, run: lambda logprobs, **rest: WRONG[kind](logprobs))
    with pytest.raises(SnugError, match=r"^loss_type=m:f must return .*, a tensor \[6\] with a gradient, not \w+ \["):
        evaluate(make_case([5, 1]), OPTIONS | dict(loss_type="m:f", importance_sampling_level="token"))


def test_the_page_has_a_row_for_each_loss():
    """With its divisor: one for each way to average."""
    page = (HOME / "docs/algorithm.md").read_text()
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([^|]*) \|", page, re.MULTILINE)
    divisors = {name: text for name, text in rows if name in LOSSES}
    assert list(divisors) == list(LOSSES)
    pairs = {(LOSSES[name].average, divisors.get(text[4:-1], text)) for name, text in divisors.items()}
    assert len(pairs) == len({average for average, _ in pairs}) == len({text for _, text in pairs})
    assert {spec.surrogate for spec in (*LOSSES.values(), OWN_LOSS)} == loss.SURROGATES.keys()


@pytest.mark.usefixtures("one_thread")
def test_a_loss_of_ones_own_trains_plans_and_resumes(tmp_path, monkeypatch, capsys):
    """From Python by its name, or the function. Where it is PPO's the figures are those of dapo."""
    body = "    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)\n"
    module = tmp_path / "my_losses_of_a_test.py"
    module.write_text(f"import torch\n\ndef tight(ratio, advantages, **rest):\n{body}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_losses_of_a_test

    small = dict(digits=1, n_layer=1, n_embd=16, batch_size=2, group_size=4, max_new_tokens=4, train_batch_size=4)
    small |= dict(reward_funcs=[lambda completions, **columns: [float(sum(map(ord, text))) for text in completions]])
    small |= dict(eval_prompts=0, max_iters=2, save_interval=1, save_total_limit=2, device="cpu", learning_rate=0.01)
    logs = []
    for name, kind in (("a", "dapo"), ("b", "my_losses_of_a_test:tight"), ("c", my_losses_of_a_test.tight)):
        logs.append(grpo.train(out_dir=name, loss_type=kind, **small).log)
        assert all(record["grad_norm"] > 0 for record in logs[-1])
    for record, own, same in zip(*logs, strict=True):
        assert own["loss"] == pytest.approx(record["loss"], abs=1e-6)
        assert own["grad_norm"] == pytest.approx(record["grad_norm"])
        assert (same["loss"], same["grad_norm"]) == (own["loss"], own["grad_norm"])
    shutil.rmtree("c/checkpoint-000002")
    assert grpo.train(resume="c", reward_funcs=small["reward_funcs"]).log[-1]["loss"] == logs[1][-1]["loss"]
    grpo.train(out_dir="d", loss_type="my_losses_of_a_test:tight", plan=True, **small)
    assert "peak_gib=" in capsys.readouterr().out
