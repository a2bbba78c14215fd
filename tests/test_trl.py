"""Our loss, advantages and calls of reward functions beside those of TRL's own GRPOTrainer (1.16).

make test-long installs TRL. To run this file alone: pip install -r requirements-long.txt, then pytest --long tests/test_trl.py.
"""

import inspect
import math
import re
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.long
trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -r requirements-long.txt")
import datasets  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer import grpo_trainer  # noqa: E402

from data import load_reward_function  # noqa: E402
from data.rewards import repeat_columns, total_rewards  # noqa: E402
from helpers import HOME  # noqa: E402
from helpers.families import their_model  # noqa: E402
from helpers.tokenizers import END_OF_TEXT, folder_of, qwen_like  # noqa: E402
from loss import policy_loss  # noqa: E402
from settings import LOSSES, GRPOSettings  # noqa: E402
from snug.options import SnugError  # noqa: E402

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
    trainer._entropy_bonus_enabled = trainer.use_adaptive_entropy = False
    leaf = case["logprobs"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, case["entropies"], None)
    ids = torch.zeros_like(case["mask"])
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1] + 1, completion_ids=ids, completion_mask=case["mask"])
    inputs |= dict(advantages=case["advantages"], old_per_token_logps=case["old"], ref_per_token_logps=case["ref"])
    inputs |= dict(num_items_in_batch=case.get("num_items", case["mask"].sum()) / steps)
    if cap is not None:
        inputs["importance_sampling_ratio"] = their_correction(case, cap)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), leaf.grad


def their_correction(case, cap):
    """The part of GRPOTrainer._generate_and_score_completions that computes it: its own lines, cut out of their source."""
    lines = inspect.getsource(GRPOTrainer._generate_and_score_completions).splitlines()
    begin = next(i for i, line in enumerate(lines) if "per_token_logps_diff = (old_per_token_logps" in line)
    end = next(i for i, line in enumerate(lines) if "Unknown vLLM importance sampling level" in line)
    names = dict(old_per_token_logps=case["old"], sampling_per_token_logps=case["sampling"], mask=case["mask"])
    trainer = SimpleNamespace(vllm_importance_sampling_mode="token_truncate")
    trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = None, cap
    names |= dict(self=trainer, torch=torch, math=math)
    exec(textwrap.dedent("\n".join([*lines[begin:end], lines[end + 1]])), names)
    return names["vllm_importance_sampling_ratio"]


def ours(case, steps=1, **options):
    """policy_loss on the flat tokens."""
    flat = case["mask"].bool()
    leaf, cap = case["logprobs"].clone().requires_grad_(), options.pop("cap", None)
    sequence = torch.arange(len(flat)).repeat_interleave(flat.sum(1))
    total = int(case.get("num_items", flat.sum()))
    options = GRPOSettings(max_new_tokens=12, importance_sampling_cap=cap, **options)
    counts = dict(num_tokens=total, num_sequences=len(flat) * steps, num_micro_batches=steps)
    columns = leaf[flat], case["old"][flat], case["advantages"], sequence, flat.sum(1), case["ref"][flat]
    loss, _ = policy_loss(*columns, **counts, sampling_logprobs=case["sampling"][flat], options=options)
    loss.backward()
    return loss.detach(), leaf.grad


VARIANTS = [dict(), dict(epsilon_high=0.28, beta=0.04), dict(cap=3.0)]
VARIANTS += [dict(cap=1.2, beta=0.04, kl_estimator="k3_no_ratio")]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient_are_those_of_trl(loss_type, level, variant):
    """One micro-batch a step, and one of two, in float64 to 1e-6 (they agree to rounding)."""
    if f'"{loss_type}"' not in inspect.getsource(GRPOTrainer._compute_loss):
        pytest.skip("TRL has no such loss")
    options = variant | dict(loss_type=loss_type, importance_sampling_level=level)
    if loss_type == "cispo":
        options |= dict(epsilon_high=1.1)
    case = tensors()
    for steps in (1, 2):  # of two: the other has 30 tokens
        case["num_items"] = case["mask"].sum() + 30 * (steps - 1)
        for a, b in zip(ours(case, steps, **options), theirs(case, steps, **options), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert theirs(case, **options)[1].abs().max() > 1e-3


ROWS = [{"prompt": "1/3?", "solution": r"$\frac{1}{3}$", "n": 1}, {"prompt": "2+2?", "solution": "$4$", "n": 2}]
TEXTS = [r"<think>a</think> \boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"]
TEXTS += [r"<think>b \boxed{4}", r"so </think> \boxed{4}"]
IDS = [[5, 6, 7, 8], [5, 5, 5, 5, 5, 5], [1], [2] * 60]


def as_trl_calls(functions, prompts, completions):
    """GRPOTrainer._calculate_rewards -> (N, functions), what was logged."""
    trainer = object.__new__(GRPOTrainer)
    trainer.accelerator, trainer.environments = SimpleNamespace(device="cpu", is_main_process=False), None
    trainer.reward_funcs, trainer.reward_processing_classes = functions, [None] * len(functions)
    trainer.reward_func_names = [str(i) for i in range(len(functions))]
    trainer.args, trainer.state = SimpleNamespace(report_to=[]), SimpleNamespace(global_step=3, max_steps=9)
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    thread, trainer.async_loop, ready = grpo_trainer.start_event_loop_in_daemon(name="test")
    ready.wait()
    rows = [row for row in ROWS for _ in range(2)]
    try:
        rewards = trainer._calculate_rewards(rows, prompts, completions, IDS)
    finally:
        grpo_trainer.shutdown_event_loop_in_daemon(thread, trainer.async_loop)
    return rewards, dict(trainer._pending_extra_logs), dict(trainer._pending_metrics)


def test_the_functions_of_trl_rewards_work_unchanged():
    from trl import rewards as of_trl

    prompts = [[{"role": "user", "content": row["prompt"]}] for row in ROWS for _ in range(2)]
    made = [of_trl.get_cosine_scaled_reward(max_len=50), of_trl.get_repetition_penalty_reward()]
    made.append(of_trl.get_soft_overlong_punishment(max_completion_len=50, soft_punish_cache=20))
    names = ["think_format_reward", "accuracy_reward", "reasoning_accuracy_reward"]
    functions = [load_reward_function(f"trl.rewards:{name}", {}, ROWS[0]) for name in names] + made
    columns = repeat_columns(ROWS, 2) | dict(stopped=[True] * 4, completion_ids=IDS)
    scores = total_rewards(functions, prompts, TEXTS, columns, 60)
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
    expected, extra, _ = as_trl_calls(functions, prompts, completions)
    rewards = torch.tensor(list(scores.by_function.values()), dtype=torch.float32).T
    torch.testing.assert_close(rewards, expected, rtol=0, atol=0)
    assert rewards[:, 1].tolist() == [1, 0, 1, 1] and rewards[:, 2].tolist() == [1, 0, 0, 1] and rewards[0, 0] == 1
    assert {*scores.extra} == {*extra} == {"solution", "gold_parsed", "answer_parsed"}
    with pytest.raises(SnugError, match="get_cosine_scaled_reward': missing .* 'max_len'; it must take ..columns"):
        load_reward_function("trl.rewards:get_cosine_scaled_reward", {}, ROWS[0])


def test_the_pages_trainer_takes_trls_steps(tmp_path):
    """Its lines put head_logprobs into GRPOTrainer: the log of three steps, with old and reference log-probs."""
    text = (HOME / "docs/parts.md").read_text()
    exec(re.search(r"```python\n(from snug.logprobs import head_logprobs\n.*?)```", text, re.DOTALL)[1], globals())
    model = their_model("qwen2")
    model.resize_token_embeddings(1300)
    model.save_pretrained(tmp_path)
    tokens = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    folder_of(tmp_path, qwen_like(), tokenizer_config=tokens)
    rows = datasets.Dataset.from_list([dict(prompt=text) for text in ("a", "bcd", "ef", "g h")])
    options = dict(use_cpu=True, bf16=False, report_to="none", logging_steps=1, max_steps=3, beta=0.1, temperature=0.7)
    options |= dict(num_iterations=2, max_completion_length=6, per_device_train_batch_size=4, num_generations=4)
    args = GRPOConfig(output_dir=str(tmp_path / "out"), save_strategy="no", learning_rate=1e-2, **options)
    logs = []
    for cls in (GRPOTrainer, Trainer):  # noqa: F821
        trainer = cls(str(tmp_path), lambda completions, **_: list(map(float, map(len, completions))), args, rows)
        trainer.train()
        lines = trainer.state.log_history[:3]
        logs += [torch.tensor([[line[name] for name in ("loss", "grad_norm", "entropy", "kl")] for line in lines])]
    assert (logs[0][:, 1] > 0.01).all() and torch.allclose(*logs, rtol=1e-4, atol=1e-6), logs
