"""Options of GRPO alone, and the settings of both loops."""

import math
from dataclasses import dataclass
from typing import ClassVar

from data import TaskOptions
from data.episodes import EpisodeOptions
from settings.losses import LossOptions
from settings.rules import RULES
from settings.shared import (
    PLACES,
    LogOptions,
    MemoryOptions,
    ModelOptions,
    RunOptions,
    TrainOptions,
)
from snug.options import ELSEWHERE, SnugError, option, option_of

PRETRAINED_LENGTH = 256  # max_new_tokens of a Hugging Face model, in tokens; TRL has the same default


@dataclass
class RewardOptions:
    """Your own reward functions, for training and evaluations. evaluate.py uses the run's if the task is the same."""

    reward_funcs: list[str] = option([], "module:function,...; empty: the task's functions")
    reward_weights: list[float] = option(
        [],
        "of reward_funcs; empty: 1 each",
        minimum=-1e9,
        maximum=1e9,
    )
    reward_timeout: float = option(
        300.0, "stop the run if a function takes more seconds for a batch; 0: no limit"
    )
    pass_reward: float | None = option(
        None,
        "least total reward that pass@1 counts as right; none: the total if each function gives 1",
        minimum=-1e9,
    )

    def check_rewards(self):
        weights, functions = len(self.reward_weights), len(self.reward_funcs)
        if weights and weights != functions:
            raise SnugError(
                f"reward_weights has {weights} weights for {functions} reward_funcs; give one for each"
            )
        if self.pass_reward is not None and not functions and not self.environment:
            raise SnugError(
                f"pass_reward={self.pass_reward:g} is a total of reward_funcs; add them, or leave it out"
            )


@dataclass
class RolloutOptions:
    """How completions are sampled."""

    max_new_tokens: int = option(
        32,
        "longest completion in tokens (TRL: max_completion_length); default for a Hugging Face model: 256",
        minimum=1,
    )
    temperature: float = option(1.0, "divides the logits, in the sampler and in training", minimum=1e-3)
    max_prompt_length: int = option(
        0,
        "tokens: cut off the beginning of longer texts, refuse longer messages; 0: never",
    )
    max_num_gen_batches: int = option(
        1,
        "dynamic sampling (DAPO): up to N rollouts, to replace groups with equal rewards",
        minimum=1,
    )


@dataclass
class AdvantageOptions:
    """How rewards become advantages."""

    scale_rewards: str = option(
        "group",
        "divide by the standard deviation of the group's or the batch's rewards; mean: by the group's mean reward "
        "(MaxRL)",
        choices=("group", "batch", "none", "mean"),
    )
    baseline: str = option(
        "mean",
        "subtract the mean reward of the group, or of its other completions",
        choices=("mean", "leave_one_out"),
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "add up rewards, or the advantages of each function (GDPO)",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    soft_punish_cache: int = option(
        0, "the last N tokens of max_new_tokens each subtract 1/N from the reward (DAPO)"
    )


@dataclass
class KLOptions:
    """The reference model, and the KL divergence to it."""

    beta: float = option(0.0, "weight of the KL divergence to init_from; 0: no reference")
    reference: str = option(
        "device", "of the reference's weights; host: stream them by block", choices=PLACES
    )
    kl_estimator: str = option(
        "k3",
        "the loss multiplies k1 and k3 by the ratio; k3_no_ratio is DeepSeekMath's k3",
        choices=("k1", "k2", "k3", "k3_no_ratio"),
    )
    use_kl_in_reward: bool = option(False, "subtract beta * KL from the reward, not in the loss")


@dataclass
class TeacherOptions:
    """On-policy distillation: a second, frozen model judges every token that the model samples. docs/algorithm.md"""

    teacher: str = option(
        "",
        "a run's folder or a Hugging Face model (id on the hub, or folder) with the same tokenizer",
    )
    divergence: str = option(
        "sampled",
        "sampled: a token's advantage gets log p_teacher - log p_sampler; others are sums over the vocabulary in the "
        "loss: reverse_kl: KL(model || teacher); forward_kl: KL(teacher || model); jsd: between both",
        choices=("sampled", "reverse_kl", "forward_kl", "jsd"),
    )
    teacher_coef: float = option(1.0, "weight of the teacher's advantages or divergence")
    reward_coef: float = option(
        1.0,
        "weight of the rewards' advantages beside a teacher; 0: the teacher alone",
    )
    teacher_device: str = option(
        "device", "of the teacher's weights; host: stream them by block", choices=PLACES
    )


@dataclass
class LoopSettings(
    EpisodeOptions,
    RewardOptions,
    RunOptions,
    LogOptions,
    TrainOptions,
    TaskOptions,
    ModelOptions,
    MemoryOptions,
):
    """What SFT and GRPO share."""

    # What users of TRL and PEFT may write -> the answer.
    other_names = ELSEWHERE["options"]

    def check(self):
        for options in (LogOptions, ModelOptions, MemoryOptions):
            options.check(self)
        for rule in RULES:
            for name, needed in rule.needs.items():
                now = getattr(self, name, needed)
                if getattr(self, rule.option, None) == rule.value and now != needed:
                    given, other = f"{rule.option}={rule.value}", f"{name}={now}"
                    raise SnugError(rule.text.format(given=given, other=other, needed=f"{name}={needed}"))
        self.check_rewards()
        if self.format_reward and self.reward_funcs:
            raise SnugError(
                f"format_reward={self.format_reward} belongs to the task's reward, which reward_funcs replace; "
                "leave one out"
            )
        if self.num_processes > self.batch_size:
            raise SnugError(
                f"batch_size={self.batch_size} is less than {self.num_processes} processes; "
                "each needs at least one prompt"
            )

    @property
    def sequences_per_rollout(self) -> int:
        return self.batch_size * self.group_size

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimizer step."""
        return self.train_batch_size or self.sequences_per_rollout

    def tokens_per_step(self, prompt: int, completion: int) -> int:
        """Tokens that the model reads in an optimizer step (batch.py). prompt, completion: their lengths."""
        groups = math.ceil(self.sequences_per_step / self.group_size)
        return groups * prompt + self.sequences_per_step * (completion - 1)

    @property
    def needs_reference(self) -> bool:
        """Is there a second model? With LoRA the reference is the model without its adapters."""
        return bool(self.beta and not self.lora_rank)

    @property
    def streams_weights(self) -> bool:
        """Do the frozen weights of a reference or of a teacher wait on the host?"""
        reference = self.needs_reference and self.reference == "host"
        return reference or bool(self.teacher) and self.teacher_device == "host"


@dataclass
class SFTSettings(LoopSettings):
    """Supervised fine-tuning on a task's demonstrations: the options of train_sft.py."""

    usual = """max_iters batch_size out_dir init_from seed device dtype resume save_interval eval_interval
    learning_rate lr_schedule lora_rank task data_file tokenizer n_layer n_embd block_size
    max_tokens_per_micro_batch memory_budget_gb plan"""

    out_dir: str = option_of(RunOptions, "out_dir", default="out/sft")
    max_iters: int = option(500, "optimizer steps", minimum=1)
    batch_size: int = option(128, "demonstrations per optimizer step", minimum=1)

    # What GRPO's options are for SFT: one completion of a prompt, in evaluations, as long as the task's longest answer;
    # an iteration is a step; there is no second model.
    group_size: ClassVar[int] = 1
    train_batch_size: ClassVar[int] = 0
    max_prompt_length: ClassVar[int] = 0
    max_new_tokens: ClassVar[int] = 0
    beta: ClassVar[float] = 0.0
    teacher: ClassVar[str] = ""
    depends_on_cut: ClassVar[bool] = False


@dataclass
class GRPOSettings(RolloutOptions, AdvantageOptions, LossOptions, KLOptions, TeacherOptions, LoopSettings):
    """Group relative policy optimization: the options of grpo.py."""

    usual = """max_iters batch_size group_size max_new_tokens temperature tools reward_funcs loss_type beta teacher
    out_dir init_from seed device dtype resume save_interval eval_interval learning_rate lora_rank task data_file
    max_tokens_per_micro_batch memory_budget_gb plan"""

    out_dir: str = option_of(RunOptions, "out_dir", default="out/grpo")
    max_iters: int = option(100, "number of rollouts", minimum=1)
    batch_size: int = option(64, "prompts per iteration", minimum=1)
    group_size: int = option(
        16, "completions per prompt (TRL: num_generations); 1 only with a teacher alone", minimum=1
    )
    train_batch_size: int = option(0, "completions per optimizer step; 0: the full rollout")
    num_iterations: int = option(1, "how often to train on each rollout", minimum=1)

    def check(self):
        super().check()
        self.check_loss()
        if self.train_batch_size and self.sequences_per_rollout % self.train_batch_size:
            raise SnugError(
                f"train_batch_size={self.train_batch_size} does not divide the {self.sequences_per_rollout} "
                f"completions of a rollout, batch_size={self.batch_size} * group_size={self.group_size}"
            )
