"""Our loss and advantages beside those of TRL's own GRPOTrainer (1.16), on the same tensors.

TRL and transformers are no requirement of the tests; without them this file is skipped. To run it: pip install trl==1.16.0, then pytest tests/test_trl.py.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from loss import group_advantages, policy_loss, truncated_importance  # noqa: E402
from settings import GRPOSettings  # noqa: E402

LENGTHS = [5, 1, 9, 3, 7, 2]


def tensors(seed=0):
    """Padded (N, T) float64 tensors as TRL has them, with junk where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    N, T = len(LENGTHS), max(LENGTHS)

    def noise():
        return torch.randn(N, T, dtype=torch.float64, generator=generator)

    logprobs = -noise().abs()
    case = {name: logprobs + 0.4 * noise() for name in ("old", "ref", "sampling")}
    mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
    return case | dict(logprobs=logprobs, mask=mask, advantages=noise()[:, 0], entropies=noise().abs())


class Alone:
    """An accelerator of one process."""

    num_processes, sync_gradients = 1, True

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction):
        return x


def theirs(case, steps=1, **options):
    """GRPOTrainer._compute_loss on these log-probs -> loss, its gradients by log-probs and entropies. steps: micro-batches a step."""
    cap = options.pop("cap", None)
    options["use_bias_correction_kl"] = options.pop("kl_estimator", "k3") == "k3"
    on_cpu = dict(output_dir="unused", report_to=[], bf16=False, use_cpu=True)
    args = GRPOConfig(**on_cpu, max_completion_length=12, steps_per_generation=1, **options)
    trainer = object.__new__(GRPOTrainer)
    for name in ("beta", "loss_type", "importance_sampling_level", "max_completion_length", "top_entropy_quantile"):
        setattr(trainer, name, getattr(args, name))
    trainer.args, trainer.accelerator, trainer.model = args, Alone(), SimpleNamespace(training=True)
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.aux_loss_enabled, trainer.off_policy_mask_threshold = False, None
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = cap is not None
    trainer.current_gradient_accumulation_steps, trainer._metrics = steps, {"train": defaultdict(list)}
    trainer._entropy_bonus_enabled, trainer.use_adaptive_entropy = args.entropy_coef != 0, False
    trainer.entropy_coef = args.entropy_coef
    leaf, entropies = (case[name].clone().requires_grad_() for name in ("logprobs", "entropies"))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, entropies, None)
    ids = torch.zeros_like(case["mask"])
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1] + 1, completion_ids=ids, completion_mask=case["mask"])
    inputs |= dict(advantages=case["advantages"], old_per_token_logps=case["old"], ref_per_token_logps=case["ref"])
    inputs |= dict(num_items_in_batch=case.get("num_items", case["mask"].sum()) / steps)
    if cap is not None:
        inputs["importance_sampling_ratio"] = (case["old"] - case["sampling"]).exp().clamp(max=cap)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), leaf.grad, torch.zeros_like(leaf) if entropies.grad is None else entropies.grad


def ours(case, steps=1, **options):
    """policy_loss on the flat tokens, with TRL's mean of the entropy: over the micro-batch, which for other loss types than bnpo ours is not."""
    flat = case["mask"].bool()
    leaf, entropies = (case[name].clone().requires_grad_() for name in ("logprobs", "entropies"))
    cap, entropy_coef = options.pop("cap", None), options.pop("entropy_coef", 0.0)
    sequence = torch.arange(len(flat)).repeat_interleave(flat.sum(1))
    total = int(case.get("num_items", flat.sum()))
    correction = None if cap is None else truncated_importance(case["old"][flat], case["sampling"][flat], cap)
    counts = dict(num_tokens=total, num_sequences=len(flat) * steps, num_micro_batches=steps)
    columns = leaf[flat], case["old"][flat], case["advantages"], sequence, flat.sum(1), case["ref"][flat]
    options = GRPOSettings(max_new_tokens=12, **options)
    loss, _ = policy_loss(*columns, **counts, correction=correction, options=options)
    loss = loss - entropy_coef * entropies[flat].sum() / (flat.sum() * steps)
    loss.backward()
    return loss.detach(), leaf.grad, torch.zeros_like(leaf) if entropies.grad is None else entropies.grad


VARIANTS = [dict(), dict(epsilon_high=0.28, beta=0.04), dict(delta=1.5, beta=0.1), dict(entropy_coef=0.02)]
VARIANTS += [dict(cap=1.2, beta=0.04, kl_estimator="k3_no_ratio")]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo"])
def test_loss_and_gradient_are_those_of_trl(loss_type, level, variant):
    """One micro-batch a step, and one of two, in float64 to 1e-6 (they agree to rounding)."""
    options = variant | dict(loss_type=loss_type, importance_sampling_level=level)
    if loss_type == "cispo":
        options = {name: value for name, value in options.items() if name != "delta"} | dict(epsilon_high=1.1)
    case = tensors()
    for steps in (1, 2):  # of two: the other has 30 tokens
        case["num_items"] = case["mask"].sum() + 30 * (steps - 1)
        for a, b in zip(ours(case, steps, **options), theirs(case, steps, **options), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert theirs(case, **options)[1].abs().max() > 1e-3


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_are_those_of_trl(scale_rewards, tmp_path):
    """A whole GRPOTrainer, one step with a random model, whose advantages are looked at on their way to its loss."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate("<pad> <eos> a b c d e f g".split())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=9, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    )
    given, seen = [], []

    def reward(prompts, completions, **_):
        given.append([None if i == 6 else float((7 * i) % 5 if i < 8 else 2.0) for i in range(len(completions))])
        return given[-1]

    class Watched(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs["advantages"].clone())
            return super()._compute_loss(model, inputs)

    args = GRPOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=12, num_generations=4,
        max_completion_length=6, scale_rewards=scale_rewards, logging_steps=1, save_strategy="no", shuffle_dataset=False,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": p} for p in ("a b", "c", "d e f")])
    Watched(model=model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer).train()
    rewards = torch.tensor([float("nan") if r is None else r for r in given[0]]).view(3, 4)
    ours, theirs = group_advantages(rewards, scale_rewards).flatten(), seen[0].float()
    torch.testing.assert_close(ours.sort().values, theirs.sort().values, rtol=0, atol=1e-6)
    assert seen[0].abs().max() > 0.5 and rewards.isnan().sum() == 1
