"""A teacher: divergences and their gradients against float64 loops, what is held in memory, and whole runs."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import grpo
import train_sft
from batch import Cut
from helpers.errors import assert_refused
from helpers.kernels import BF16, F16, F32, F64
from helpers.models import DEVICE, add_adapters, make_flat_model, make_model
from helpers.rollouts import BUDGETS, K, assert_same_gradient, gradient, make_rollouts
from helpers.runs import figures, refused, trained
from loss import policy_loss
from padded import a_few, padded
from runs.log import read_lines, read_log
from runs.prepare import prepare
from settings import LOSSES, GRPOSettings, SFTSettings
from snug.device.host import stream_from_host
from snug.device.kinds import MIB
from snug.logprobs import Teacher, divergence, head_loss, rows
from snug.memory.ledger import LiveBytes
from snug.options import SnugError
from snug.pretrained.tensors import save_pretrained
from training import frozen


def slowly(logits, teacher_logits, temperature=1.0):
    """The oracle: the definition of the divergence, a row and a token at a time, in float64 -> (M,), differentiable."""
    values = []
    for z, teacher_z in zip(logits.double(), teacher_logits.double(), strict=True):
        p, q = torch.softmax(z / temperature, 0), torch.softmax(teacher_z / temperature, 0)
        values.append(sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True)))
    return torch.stack(values)


@pytest.mark.parametrize("M, V, V_T, n_vocab, temperature, dtype", [
    (9, 67, 70, 67, 1.0, F32), (5, 80, 67, 67, 0.7, F32), (1, 1, 1, 1, 1.0, F32), (4, 80, 96, 70, 0.7, BF16),
    (3, 64, 64, 64, 2.0, F16), (6, 67, 80, 60, 0.7, F64), (1, 2100, 2100, 2100, 1.0, F32),
])  # fmt: skip
def test_rows_against_float64(M, V, V_T, n_vocab, temperature, dtype):
    draw = torch.Generator().manual_seed(V)
    logits, teacher_logits = (3 * torch.randn(M, width, generator=draw).to(DEVICE, dtype) for width in (V, V_T))
    logits[:, n_vocab:], teacher_logits[:, n_vocab:] = torch.nan, torch.nan  # what padding happens to hold
    exact = logits.double()[:, :n_vocab].requires_grad_()
    expected = slowly(exact, teacher_logits[:, :n_vocab], temperature)
    expected.sum().backward()
    options = rows.Options(temperature, n_vocab)
    found = torch.empty(M, dtype=F64 if dtype == F64 else F32, device=DEVICE)
    divergence.divergence_rows(logits, teacher_logits, options, found)
    exactly = 1e-12 if dtype == F64 else 2e-5
    torch.testing.assert_close(found.double(), expected.detach(), rtol=exactly, atol=exactly)
    rounded = max(exactly, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(teacher_logits[:, :n_vocab].double(), exact.grad, rtol=rounded, atol=rounded)


@pytest.mark.parametrize("kind, slabs", [("cpu", 5), ("cuda", 1)])
def test_rows_in_slabs(kind, slabs, monkeypatch):
    """The same as in one; a GPU's are 32 times as large, so that it does not wait for launches."""
    logits, teacher_logits = torch.randn(2, 9, 67, generator=torch.Generator().manual_seed(1), dtype=F64)
    options, whole, found = rows.Options(0.7, 67), torch.empty(9, dtype=F64), torch.empty(9, dtype=F64)
    again = teacher_logits.clone()
    divergence.divergence_rows(logits, teacher_logits, options, whole)
    counts, original = [], divergence.slabs
    monkeypatch.setattr(rows, "SCRATCH", 2 * 8 * 67)
    monkeypatch.setattr(divergence, "kind_of", lambda tensor: kind)
    monkeypatch.setattr(divergence, "slabs", lambda *sizes: counts.append(original(*sizes)) or counts[-1])
    divergence.divergence_rows(logits, again, options, found)
    assert len(counts[0]) == slabs
    torch.testing.assert_close((found, again), (whole, teacher_logits), rtol=1e-14, atol=1e-14)


def test_rows_of_logits_far_apart_are_finite():
    """Tokens whose probability is 0 in float32 for one model or for both."""
    logits = torch.tensor([[0.0, -300, -300, 80], [500, 0, -500, 0]], device=DEVICE)
    teacher_logits = torch.tensor([[0.0, 300, -300, -80], [-500, 0, -500, 0]], device=DEVICE)
    found = torch.empty(2, device=DEVICE)
    divergence.divergence_rows(logits, teacher_logits, rows.Options(1.0, 4), found)
    assert found.isfinite().all() and teacher_logits.isfinite().all() and (found > 0.6).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="counts CPU storages")
def test_logits_of_both_models_are_never_alive():
    """(M, V) of either would be 31 MiB: the visit's peak is two chunks, slabs, and gradients of (V, C)."""
    M, C, V, chunk_mb = 400, 8, 20_000, 2
    hidden, weight = torch.randn(M, C, requires_grad=True), torch.nn.Parameter(torch.randn(V, C))
    teacher = Teacher(torch.randn(M, 2 * C), torch.randn(V, 2 * C))
    weight.grad, targets = torch.zeros_like(weight), torch.randint(V, (M,))
    with LiveBytes() as live:
        mean = lambda q, part, d: (q + d).sum() / M  # noqa: E731
        head_loss(hidden, weight, targets, mean, chunk_mb=chunk_mb, teacher=teacher)[0].backward()
    scratch = (rows.SCRATCH + V * divergence.TEMPORARIES) * 4 / MIB
    assert live.peak / MIB < chunk_mb + scratch + 2 < M * V * 4 / MIB / 4


@pytest.mark.parametrize("loss_type", LOSSES)
def test_an_exact_divergence_is_weighed_as_the_loss_weighs_tokens(loss_type):
    """Beside every loss: the gradient for the divergence is teacher_coef times that of a token's weight."""
    options = GRPOSettings(loss_type=loss_type, epsilon_high=5.0, teacher_coef=0.3, max_new_tokens=12)
    lengths = torch.tensor([5, 1, 3])
    sequence = torch.arange(3).repeat_interleave(lengths)
    logprobs = -torch.rand(9, dtype=F64)
    apart = torch.rand(9, dtype=F64, requires_grad=True)
    counts = dict(num_tokens=20, num_sequences=4)
    arguments = logprobs, logprobs + 0.1, torch.zeros(3, dtype=F64), sequence, lengths
    loss, metrics = policy_loss(*arguments, options=options, divergence=apart, **counts)
    loss.backward()
    weights = dict(token=[1 / 20] * 9, sequence=[1 / 20] * 5 + [1 / 4] + [1 / 12] * 3, constant=[1 / 48] * 9)
    weights |= {"micro-batch": [1 / 9] * 9, "sum": [1 / 4] * 9}
    assert apart.grad.tolist() == pytest.approx([0.3 * weight for weight in weights[LOSSES[loss_type].average]])
    assert float(metrics["divergence"]) == pytest.approx(float(apart.sum()) / 20)


def oracle(model, teacher, rollouts, options):
    """A loop over sequences, each alone, no chunks, no packing -> (the divergence's token mean, {name: gradient})."""
    model.zero_grad(set_to_none=True)
    total, num_tokens = 0.0, int(rollouts.mask.sum())
    for i in range(len(rollouts.tokens)):
        p, c = int(rollouts.prompt_lengths[i]), int(rollouts.completion_lengths[i])
        ids, sampled = rollouts.tokens[i : i + 1, : p + c], rollouts.mask[i, :c] == 1
        logits = model.logits(model(ids))[0, p - 1 : -1][sampled]  # (c, V)
        with torch.no_grad():
            teacher_logits = teacher.logits(teacher(ids))[0, p - 1 : -1][sampled]
        n, targets, T = model.config.n_vocab, ids[0, p:][sampled], options.temperature
        logprobs = torch.log_softmax(logits[:, :n] / T, -1).gather(1, targets[:, None])[:, 0]
        advantages, old = rollouts.advantages[i], rollouts.old_logprobs[i, :c][sampled]
        if options.divergence == "sampled":
            theirs = torch.log_softmax(teacher_logits[:, :n] / T, -1).gather(1, targets[:, None])[:, 0]
            advantages, apart = advantages + options.teacher_coef * (theirs - old), logprobs.detach() - theirs
        else:
            apart = slowly(logits[:, :n], teacher_logits[:, :n], T)
        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - options.epsilon, 1 + options.epsilon)
        loss = -torch.min(ratio * advantages, clipped * advantages).sum()
        if options.divergence != "sampled":
            loss = loss + options.teacher_coef * apart.sum()
        (loss / num_tokens).backward()
        total += float(apart.detach().sum()) / num_tokens
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def taught(model, teacher, rollouts, cut, options):
    """Let the teacher read the rollouts, as a run does."""
    limits = SimpleNamespace(reference_batches=4, max_tokens_per_micro_batch=20)
    training = SimpleNamespace(settings=options, teacher=teacher, model=model, limits=limits)
    rollouts.teacher_outputs = frozen.teacher_outputs(training, rollouts, cut)
    return teacher if options.divergence != "sampled" else None


TAUGHT = [("sampled", "gpt2", "host"), ("reverse_kl", "llama", "host")]
TAUGHT += [("reverse_kl", "llama", "device"), ("reverse_kl", "gpt2", "device")]


@pytest.mark.parametrize("name, shape, place", TAUGHT)
def test_the_gradient_against_a_float64_loop(name, shape, place):
    """1e-10: packed, cut, checkpointed, with adapters; a tied student of an untied teacher and the other way round; another
    width, depth and padding; episodes; resident and streamed."""
    model = make_flat_model(shape, dtype=F64, vocab_size=20, n_vocab=16)
    other = "llama" if shape == "gpt2" else "gpt2"
    teacher = make_flat_model(other, seed=3, dtype=F64, vocab_size=24, n_vocab=16, n_embd=48, n_layer=3)
    teacher.requires_grad_(False)
    rollouts = make_rollouts(episodes=shape == "llama")
    options = dict(teacher="x", divergence=name, teacher_coef=0.7, teacher_device=place, temperature=0.8)
    options = GRPOSettings(max_new_tokens=12, batch_size=6, group_size=K, logits_chunk_mb=2e-3, **options)
    expected = oracle(model, teacher, rollouts, options)
    if place == "host":
        stream_from_host(teacher, teacher.device)
    for budget in BUDGETS.values():
        cut = Cut(rollouts, 0, budget, K)
        head = taught(model, teacher, rollouts, cut, options)
        metrics, gradients = gradient(model, rollouts, cut, options, teacher=head)
        assert metrics["divergence"] == pytest.approx(expected[0], rel=1e-10)
        torch.testing.assert_close(gradients, expected[1], rtol=1e-10, atol=1e-10)
    with padded():
        padded_gradient = gradient(model, rollouts, a_few(cut, 4), options, teacher=head)
    assert_same_gradient((metrics, gradients), padded_gradient)
    assert all(not hasattr(p, "host") for p in teacher.parameters())
    for kept in ("block", "selective"):
        model.checkpoint_blocks = kept
        assert_same_gradient(gradient(model, rollouts, cut, options, teacher=head), (metrics, gradients))
    model.checkpoint_blocks = "none"
    add_adapters(model).double()
    for block in teacher.blocks:  # on a CPU a streamed teacher's host weights can be used where they are
        block._forward_pre_hooks.clear(), block._forward_hooks.clear()
    expected = oracle(model, teacher, rollouts, options)
    metrics, gradients = gradient(model, rollouts, cut, options, teacher=head)
    torch.testing.assert_close(gradients, expected[1], rtol=1e-10, atol=1e-10)
    assert len(gradients) == 2 * 4 * 2


@pytest.mark.parametrize("name, options", [
    ("reverse_kl", dict(importance_sampling_level="sequence")),
    ("sampled", dict(importance_sampling_cap=1.5, beta=0.1)),
    ("reverse_kl", dict(mask_truncated_completions=True, loss_type="grpo")),
    ("reverse_kl", dict(reward_coef=0.0)),
])  # fmt: skip
def test_a_teacher_beside_every_kind_of_loss(name, options):
    """Packed and cut = padded, where the head is visited twice too."""
    model, teacher = make_flat_model("llama", dtype=F64), make_flat_model("gpt2", seed=3, dtype=F64)
    options = GRPOSettings(max_new_tokens=12, teacher="x", divergence=name, logits_chunk_mb=2e-3, **options)
    rollouts = make_rollouts()
    head = taught(model, teacher, rollouts, Cut(rollouts, group_size=K), options)
    with padded(poison=7):
        expected = gradient(model, rollouts, a_few(Cut(rollouts), 4), options, teacher=head)
    for budget in BUDGETS.values():
        assert_same_gradient(gradient(model, rollouts, Cut(rollouts, 0, budget, K), options, teacher=head), expected)


RUN = dict(digits=1, device="cpu", eval_prompts=8, batch_size=4, save_interval=1, max_iters=2, n_layer=2, n_embd=32)
RUN |= dict(block_size=40, max_new_tokens=12, group_size=4, max_tokens_per_micro_batch=60)
WIDE = dict(n_layer=3, n_embd=48, norm="rmsnorm", position="rotary", mlp="swiglu", tie_embeddings=False, n_kv_head=2)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A student and a teacher of another shape, runs of one step each."""
    folder = tmp_path_factory.mktemp("teacher")
    shape = {name: value for name, value in RUN.items() if name not in ("max_new_tokens", "group_size")}
    for name, changes in (("student", dict()), ("teacher", WIDE | dict(vocab_size=260, seed=2))):
        options = shape | changes | dict(out_dir=str(folder / name), max_iters=1, eval_prompts=0)
        train_sft.main(prepare(SFTSettings(**options)))
    return folder


def run(places, out_dir, **changes):
    """Train -> (the log without what is measured, the last checkpoint's weights)."""
    options = RUN | dict(init_from=str(places / "student"), teacher=str(places / "teacher"), out_dir=str(out_dir))
    options |= changes
    if "task" in changes:
        del options["digits"]  # an option of the addition's
    settings = GRPOSettings(**options)
    settings.check()
    grpo.main(prepare(settings))
    weights = sorted(out_dir.glob("checkpoint-*"))[-1] / "model.safetensors"
    return figures(out_dir), weights.read_bytes()


@pytest.mark.parametrize("name, place", [("sampled", "host"), ("reverse_kl", "device")])
def test_a_run_goes_on_bit_for_bit(places, tmp_path, name, place):
    """Killed after the first iteration."""
    options = dict(divergence=name, teacher_device=place)
    whole = run(places, tmp_path / "whole", **options)
    run(places, tmp_path / "stopped", max_iters=1, **options)
    assert run(places, tmp_path / "stopped", resume="auto", **options)[1] == whole[1]
    assert all(record["divergence"] > 0.01 for record in whole[0])
    record = read_log(tmp_path / "whole")[0]
    assert record["time_teacher_s"] > 0 and record["mem_max_alloc_mb_teacher"] > 0 and "frac_reward_zero_std" in record
    sample = next(read_lines(tmp_path / "whole" / "samples.jsonl"))
    assert ("teacher_logprobs" in sample) == (name == "sampled")
    assert "hint: frac_reward_zero_std" not in (tmp_path / "whole/log.txt").read_text()


def test_a_teacher_alone_needs_no_reward(places, tmp_path, monkeypatch):
    """Prompts without answers, groups of one; the figures of rewards and evaluations are not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(dict(prompt=f"{i}+1=")) + "\n" for i in range(50)))
    options = dict(task="jsonl", data_file="prompts.jsonl", reward_coef=0.0, group_size=1, max_tokens_per_micro_batch=0)
    log, _ = run(places, tmp_path / "alone", **options)
    assert not any("reward" in name or "pass" in name for name in log[-1]) and log[-1]["divergence"] > 0
    text = (tmp_path / "alone" / "log.txt").read_text()
    assert "  divergence " in text and "  reward " not in text
    with pytest.raises(SnugError, match="no column answer to score by"):
        run(places, tmp_path / "none", **options | dict(teacher="", reward_coef=1.0, group_size=2))


def test_reward_coef_0_leaves_the_teacher(places, tmp_path):
    """The gradient is that of rewards that are all equal; the log still has the rewards."""
    rewards = {"differ": lambda prompts, **_: [float(i % 2) for i in range(len(prompts))]}
    rewards["same"] = lambda prompts, **_: [0.0 for _ in prompts]
    weights = {}
    for name, coef in (("differ", 0.0), ("same", 1.0), ("differ", 1.0)):
        options = RUN | dict(init_from=str(places / "student"), teacher=str(places / "teacher"), eval_prompts=0)
        settings = GRPOSettings(**options, out_dir=str(tmp_path / f"{name}{coef}"), reward_coef=coef)
        weights[name, coef] = (trained(settings, rewards[name]) / "model.safetensors").read_bytes()
        mean = read_log(tmp_path / f"{name}{coef}")[0]["reward_mean"]
        assert mean == (0.5 if name == "differ" else 0)
    assert weights["differ", 0.0] == weights["same", 1.0] != weights["differ", 1.0]


def test_other_vocabularies_are_refused(places, tmp_path):
    """Another number of ids, other ids of the same number, too few rows, too short; padded rows are fine."""
    student = prepare(GRPOSettings(**RUN | dict(init_from=str(places / "student"))))
    model = make_model("gpt2", vocab_size=300, n_vocab=257, block_size=64)
    save_pretrained(model, tmp_path / "hf", student.tokenizer)
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == 257
    padded = dict(teacher=str(tmp_path / "hf"), teacher_device="host", divergence="reverse_kl", max_iters=1)
    run(places, tmp_path / "padded", **padded)
    swapped = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    for _ in range(2):
        (tmp_path / "other/tokenizer.json").write_text(json.dumps(swapped))
        said = refused(run, places, tmp_path / "refused", teacher=str(tmp_path / "other"))
        assert "; the run needs bytes, 257" in said
        swapped["added_tokens"].append(dict(swapped["added_tokens"][0], id=257, content="<more>"))
    for name, sizes, problem in (
        ("few", dict(vocab_size=200, block_size=64), "200 ids, block_size=64; the run needs bytes, 257"),
        ("short", dict(vocab_size=257, block_size=14), "257 ids, block_size=14; the run needs bytes, 257 and"),
    ):
        save_pretrained(make_model("gpt2", **sizes), tmp_path / name, student.tokenizer)
        assert problem in refused(run, places, tmp_path / "refused", teacher=str(tmp_path / name))


def test_a_teacher_in_the_runs_own_folder_is_refused(places):
    inside = dict(teacher=str(places / "teacher"), out_dir=str(places))
    assert_refused("teacher=.* is in out.*choose another", prepare, GRPOSettings(**RUN | dict(init_from="") | inside))
