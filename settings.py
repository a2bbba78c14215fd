"""Every option of snug, once: type, default, unit, meaning. A task's own options are in data/.

A class whose name ends in Options is a topic: --help=all shows its options together, under its docstring. `usual` names
the options that --help shows. A command without `usual` shows all of its options.

A config (config/*.py) is a list of plain assignments that differ from these defaults. The command line overrides it:

    python grpo.py config/grpo_small.py --learning_rate=1e-4 --seed=3

options/ reads both. Nothing here imports torch, so that a typo is reported at once. Tests: tests/test_settings.py.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import ClassVar

from data import TASKS, TaskOptions
from data.episodes import EpisodeOptions
from snug.options import ELSEWHERE, SnugError, option, option_of

DTYPES = ("float32", "bfloat16")
PLACES = ("device", "host")
PRETRAINED_LENGTH = 256  # max_new_tokens of a Hugging Face model, in tokens; TRL has the same default


@dataclass
class ModelOptions:
    """The shape of a new model. With init_from, the shape comes from there."""

    vocab_size: int = option(
        0,
        "rows of the embedding and the head, for example 50304 for a fast head; 0: the number of the tokenizer's ids",
    )
    n_layer: int = option(2, "transformer blocks", minimum=1)
    n_head: int = option(4, "attention heads", minimum=1)
    n_kv_head: int = option(
        0, "key/value heads; query heads share them (grouped-query attention); 0: n_head"
    )
    n_embd: int = option(64, "width of the residual stream", minimum=1)
    n_hidden: int = option(0, "width of the MLP; 0: 4 * n_embd for gelu, 8/3 * n_embd for swiglu")
    block_size: int = option(
        64,
        "longest sequence, prompt and completion; at most block_size of init_from",
        "tokens",
        minimum=2,
    )
    norm: str = option(
        "layernorm", "normalization before attention and MLP", choices=("layernorm", "rmsnorm")
    )
    position: str = option(
        "learned",
        "learned: GPT-2's position table; rotary: Llama's rotation",
        choices=("learned", "rotary"),
    )
    mlp: str = option("gelu", "gelu: GPT-2's MLP; swiglu: Llama's gated MLP", choices=("gelu", "swiglu"))
    bias: bool = option(False, "use biases in linear layers and layer norms")
    qkv_bias: bool = option(False, "use biases only in the query/key/value projection (Qwen2)")
    rope_theta: float = option(10000.0, "position=rotary: base of the rotation frequencies", minimum=1)
    tie_embeddings: bool = option(True, "use one matrix for the embedding and the head")

    def check(self):
        if self.n_embd % self.n_head:
            raise SnugError(f"n_head={self.n_head} does not divide n_embd={self.n_embd}")
        if self.n_kv_head and self.n_head % self.n_kv_head:
            raise SnugError(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}")
        if self.position == "rotary" and (self.n_embd // self.n_head) % 2:
            raise SnugError(
                f"n_embd={self.n_embd} / n_head={self.n_head} is odd; position='rotary' needs it even"
            )


@dataclass
class RunOptions:
    """Where a run starts, where it writes, and what it runs on."""

    out_dir: str = option(
        "out/run", "the run's folder: log.jsonl, samples.jsonl, log.txt, settings.json, checkpoints"
    )
    init_from: str = option(
        "",
        "initial weights, and GRPO's reference: a run's folder, a Hugging Face model or PEFT's adapters (the id on the "
        "hub, perhaps with @revision, or a folder), or the config of an SFT run: "
        "grpo.py trains it first if it is missing or unfinished; empty: random weights",
    )
    seed: int = option(1, "seed of initial weights, prompt order and sampled tokens", maximum=2**31 - 1)
    device: str = option("auto", "a torch device such as cpu or cuda:1; auto: cuda if available, else cpu")
    dtype: str = option(
        "auto",
        "dtype of the forward pass. bfloat16: autocast over float32 weights; auto: bfloat16 on a GPU with tensor cores "
        "for it (A100, RTX 30 and newer) and with param_dtype=bfloat16, else float32; a resumed run keeps its own",
        choices=("auto", *DTYPES),
    )
    parallel: str = option(
        "none",
        "use several processes, started by torchrun. ddp: each has the full model; fsdp: weights, gradients and "
        "moments are sharded over all processes",
        choices=("none", "ddp", "fsdp"),
    )
    tf32: bool = option(
        False,
        "compute float32 products on tensor cores (A100 and newer): about 8 times the peak rate, relative errors of "
        "1e-3 instead of 1e-7",
    )
    enforce_eager: bool = option(False, "sample without CUDA graphs: slower, but needs less memory")
    resume: str = option(
        "never",
        "auto: continue from the newest checkpoint in out_dir; a run's folder: continue that run with its own options, "
        "except those you give",
    )
    overwrite: bool = option(
        False, "delete an earlier run in out_dir; otherwise it is moved to <out_dir>.1, .2, ..."
    )


@dataclass
class LogOptions:
    """Evaluations, checkpoints, and what is printed and logged."""

    save_interval: int = option(
        50, "save every N iterations and at the end; 0: only at the end", "iterations"
    )
    save_total_limit: int = option(
        2, "number of newest checkpoints to keep; the best one is always kept", minimum=1
    )
    eval_interval: int = option(
        20,
        "evaluate before the first iteration, every N iterations and at the end; 0: only at the end",
        "iterations",
    )
    eval_prompts: int = option(500, "number of held-out prompts per evaluation; 0: no evaluations")
    log_interval: int = option(
        0,
        "print every Nth iteration; 0: about 25 in a run. log.jsonl always has every iteration",
        "iterations",
    )
    samples_per_iteration: int = option(
        4, "completions per iteration in samples.jsonl, rounded up to full groups"
    )
    report_to: list[str] = option(
        [],
        "also log there, comma-separated; if it fails, the run continues",
        choices=("tensorboard", "wandb"),
    )

    def check(self):
        for name in self.report_to:
            if importlib.util.find_spec(name) is None:
                raise SnugError(f"report_to={name!r}: the package is not installed; pip install {name}")


@dataclass
class TrainOptions:
    """The optimizer step of SFT and GRPO."""

    learning_rate: float = option(1e-3, "peak learning rate")
    lr_schedule: str = option(
        "constant",
        "learning rate after the warmup; linear and cosine end at 0",
        choices=("constant", "linear", "cosine"),
    )
    warmup_iters: int = option(0, "length of the linear warmup of the learning rate", "iterations")
    weight_decay: float = option(0.0, "AdamW's weight decay of matrices and embeddings")
    adam_beta1: float = option(0.9, "AdamW's decay rate of the first moment", maximum=0.999999)
    adam_beta2: float = option(0.99, "AdamW's decay rate of the second moment", maximum=0.999999)
    grad_clip: float = option(1.0, "largest gradient norm; 0: no clipping")
    lora_rank: int = option(
        0, "LoRA: freeze the weights of init_from and train adapters of this rank; 0: train all weights"
    )
    lora_alpha: float = option(32.0, "LoRA: scale adapters by lora_alpha / lora_rank", minimum=1e-3)
    lora_target_modules: list[str] = option(
        ["qkv", "proj", "up", "down"],
        "LoRA: the matrices that get adapters, comma-separated; PEFT's names of whole matrices work too",
        choices=("qkv", "proj", "up", "down"),
    )
    base_dtype: str = option(
        "",
        "LoRA: dtype of the blocks' frozen matrices, for the sampler, the trainer and the reference; nf4: QLoRA's 4 "
        "bits, as bitsandbytes makes them; empty: param_dtype",
        choices=("", "nf4"),
    )


@dataclass
class MemoryOptions:
    """Options that save memory. docs/memory.md has their savings and costs. --plan prints what an iteration needs."""

    max_tokens_per_micro_batch: int = option(
        0, "largest micro-batch; 0: an optimizer step is one micro-batch", "tokens"
    )
    max_rollout_batch: int = option(
        0, "completions to decode at a time, which limits the KV cache; 0: all at once"
    )
    logits_chunk_mb: float = option(0.0, "size of a chunk of logits; 0: 16 on a CPU, 256 on CUDA", "MiB")
    checkpoint_blocks: str = option(
        "none",
        "block: keep each block's input and recompute the rest in backward; selective: also keep attention outputs",
        choices=("none", "block", "selective"),
    )
    activation_offload: bool = option(
        False, "keep block inputs on the host until backward; needs checkpoint_blocks"
    )
    param_dtype: str = option(
        "float32", "dtype of weights and gradients; bfloat16 needs dtype=bfloat16 or auto", choices=DTYPES
    )
    optimizer_dtype: str = option(
        "float32",
        "dtype of the moments; bfloat16 is rounded stochastically. With param_dtype=bfloat16: float32 adds float32 "
        "master weights, bfloat16 rounds the weights stochastically too",
        choices=DTYPES,
    )
    optimizer_device: str = option(
        "device",
        "host: keep moments and master weights on the host and stream them in each step",
        choices=PLACES,
    )
    param_offload: bool = option(
        False,
        "fsdp: keep weights, gradients, moments and master weights on the host. A block's weights are copied while it "
        "runs, all weights for a rollout. Works with one process too: torchrun --nproc_per_node=1",
    )
    grad_offload: bool = option(
        False, "move each gradient to the host as soon as backward has made it, and accumulate there"
    )
    memory_budget_gb: str = option(
        "",
        "GiB for the run, or auto: all free memory. snug chooses the fastest options that fit, among those that do not "
        "change results (docs/memory.md), whatever the config or the command line say, and prints what it changed",
    )
    plan: bool = option(False, "print the memory that an iteration needs, then stop; needs no GPU")
    num_processes: int = option(
        1, "with --plan: number of processes of the run. Otherwise torchrun sets it", minimum=1
    )

    def check(self):
        budget = self.memory_budget_gb
        is_number = budget.replace(".", "", 1).isdecimal() and float(budget) > 0
        if budget not in ("", "auto") and not is_number:
            raise SnugError(f"memory_budget_gb={budget!r} is not auto or a number of GiB above 0")


@dataclass
class RewardOptions:
    """Your own reward functions, for training and evaluations. evaluate.py uses the run's if the task is the same."""

    reward_funcs: list[str] = option(
        [], "reward functions to add up: module:function,...; empty: the task's functions"
    )
    reward_weights: list[float] = option(
        [],
        "weights of reward_funcs, comma-separated; empty: each has weight 1",
        minimum=-1e9,
        maximum=1e9,
    )
    reward_timeout: float = option(
        300.0, "stop the run if a reward function takes longer for a batch; 0: no limit", "s"
    )
    pass_reward: float | None = option(
        None,
        "smallest total reward that pass@1 counts as right; none: the total if each function gives 1",
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
        "longest completion (TRL: max_completion_length); if init_from is a Hugging Face model, the default is 256",
        "tokens",
        minimum=1,
    )
    stop_string: str = option(
        "", "text that also ends a completion, for example </answer>; empty: only the stop token"
    )
    max_prompt_length: int = option(
        0,
        "cut off the beginning of longer prompts of text, and refuse longer messages (or drop_long_prompts); 0: never",
        "tokens",
    )
    temperature: float = option(1.0, "divides the logits, in the sampler and in training", minimum=1e-3)
    max_num_gen_batches: int = option(
        1,
        "dynamic sampling (DAPO): sample up to N rollouts to replace groups whose rewards are all equal",
        minimum=1,
    )


@dataclass
class AdvantageOptions:
    """How rewards become advantages."""

    scale_rewards: str = option(
        "group",
        "divide advantages by the standard deviation of the group's or the batch's rewards; mean: by the group's mean "
        "reward (MaxRL), for rewards from 0 up",
        choices=("group", "batch", "none", "mean"),
    )
    baseline: str = option(
        "mean",
        "subtract the mean reward of the group, or of the other completions in it",
        choices=("mean", "leave_one_out"),
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "several reward functions: add up rewards, or the advantages of each (GDPO)",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    soft_punish_cache: int = option(
        0, "each of the last N tokens of max_new_tokens subtracts 1/N from the reward (DAPO)", "tokens"
    )


@dataclass
class LossOptions:
    """What is minimized. docs/algorithm.md has the formulas."""

    loss_type: str = option(
        "dapo",
        "how the losses of tokens are averaged. dapo: over all tokens; grpo: over each sequence's tokens; dr_grpo: "
        "over a constant length; bnpo: over each micro-batch's tokens, so the result depends on the micro-batches; "
        "cispo: like dapo, but the ratio is a weight and is not clipped; sapo: like grpo with a soft gate instead of "
        "clipping; luspo: over sequences, each the sum of its tokens, for importance_sampling_level=sequence; vespo: "
        "like cispo with a weight of the sequence's ratio; gmpo: like grpo with the geometric mean of clipped ratios",
        choices=("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo", "gmpo"),
    )
    importance_sampling_level: str = option(
        "token",
        "token: a ratio for each token; sequence: one for each completion, the geometric mean of its tokens' ratios "
        "(GSPO); then set epsilon near 4e-4",
        choices=("token", "sequence"),
    )
    epsilon: float = option(
        0.2, "clip the ratio to 1 - epsilon to 1 + epsilon_high; gmpo: its logarithm, for example by 0.4"
    )
    epsilon_high: float | None = option(
        None, "upper clipping range; none: epsilon. cispo: the largest ratio, for example 5"
    )
    delta: float | None = option(
        None, "largest ratio where the advantage is negative; none: no limit", minimum=1
    )
    sapo_temperature_pos: float = option(1.0, "sapo: sharpness of the gate where A > 0", minimum=1e-3)
    sapo_temperature_neg: float = option(1.05, "sapo: sharpness of the gate elsewhere", minimum=1e-3)
    vespo_k_pos: float = option(2.0, "vespo: power of small sequence ratios where A > 0")
    vespo_lambda_pos: float = option(3.0, "vespo: decay for large ratios where A > 0")
    vespo_k_neg: float = option(3.0, "vespo: power of small sequence ratios where A < 0")
    vespo_lambda_neg: float = option(2.0, "vespo: decay for large ratios where A < 0")
    entropy_coef: float = option(
        0.0, "weight of a bonus for the tokens' entropy in nats; above 0 the head is computed twice"
    )
    importance_sampling_cap: float | None = option(
        None,
        "weight each token by p_trainer / p_sampler, at most by this; for bfloat16; costs a forward pass; none: off",
        minimum=1,
    )
    importance_sampling_mode: str = option(
        "token_truncate",
        "p_trainer / p_sampler of each token or of its sequence; above the cap it becomes the cap, or 0 with a mask",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    mask_truncated_completions: bool = option(
        False, "do not train on completions that did not stop before max_new_tokens"
    )

    @property
    def upper_epsilon(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_whole_sequences(self) -> bool:
        """Does a token's loss look at the whole sequence? Then the head is computed twice."""
        levels = self.importance_sampling_level + self.importance_sampling_mode
        return "sequence" in levels or self.loss_type in ("gmpo", "vespo")

    def check_loss(self):
        if self.loss_type == "cispo" and (self.epsilon_high or 0) < 1:
            raise SnugError(
                f"epsilon_high={self.epsilon_high}: for cispo it is the largest ratio; try --epsilon_high=5"
            )
        if self.delta is not None and self.delta <= 1 + self.upper_epsilon:
            raise SnugError(
                f"delta={self.delta} must be above 1 + epsilon_high, where the ratio is clipped already"
            )


@dataclass
class KLOptions:
    """The reference model, and the KL divergence to it."""

    beta: float = option(
        0.0, "weight of the KL divergence to the reference, init_from; 0: no reference is loaded"
    )
    reference: str = option(
        "device", "where the reference's weights are; host: stream them block by block", choices=PLACES
    )
    kl_estimator: str = option(
        "k3",
        "estimator of the KL divergence. The loss multiplies k1 and k3 by the ratio; k3_no_ratio is DeepSeekMath's k3",
        choices=("k1", "k2", "k3", "k3_no_ratio"),
    )
    use_kl_in_reward: bool = option(False, "subtract beta * KL from the reward; false: add it to the loss")


@dataclass
class TeacherOptions:
    """On-policy distillation: a second, frozen model judges every token that the model samples. docs/algorithm.md"""

    teacher: str = option(
        "",
        "the teacher: a run's folder, or a Hugging Face model (its id on the hub, or a folder), with the same "
        "tokenizer; empty: none",
    )
    divergence: str = option(
        "sampled",
        "from the teacher. sampled: the advantage of each token gets log p_teacher - log p_sampler, an estimate of the "
        "reverse KL; the others are exact sums over the vocabulary in the loss: reverse_kl: KL(model || teacher); "
        "forward_kl: KL(teacher || model); jsd: between both",
        choices=("sampled", "reverse_kl", "forward_kl", "jsd"),
    )
    teacher_coef: float = option(1.0, "weight of the teacher's advantages or divergence")
    reward_coef: float = option(
        1.0,
        "weight of the rewards' advantages beside a teacher; 0: the teacher alone; rewards are still logged",
    )
    teacher_device: str = option(
        "device", "where the teacher's weights are; host: stream them block by block", choices=PLACES
    )


# What does not fit together: a choice, what it needs, perhaps why. SFT does not have all of these options.
NEEDS = """\
dtype=float32 needs param_dtype=float32 because bfloat16 weights compute in bfloat16; try --dtype=bfloat16
checkpoint_blocks=none needs activation_offload=False because no block's input is kept; try --checkpoint_blocks=block
loss_type=cispo needs delta=None
loss_type=sapo needs delta=None
loss_type=luspo needs importance_sampling_level=sequence
loss_type=gmpo needs delta=None
loss_type=gmpo needs importance_sampling_level=token because it has a sequence's ratio of its own
loss_type=vespo needs delta=None
loss_type=vespo needs importance_sampling_level=token because it has a sequence's ratio of its own
loss_type=vespo needs importance_sampling_cap=None because its ratio has the sampler's log-probs already
importance_sampling_cap=None needs importance_sampling_mode=token_truncate or a cap: --importance_sampling_cap=2
multi_objective_aggregation=normalize_then_sum needs scale_rewards=group
multi_objective_aggregation=normalize_then_sum needs baseline=mean
multi_objective_aggregation=normalize_then_sum needs soft_punish_cache=0 because this is no reward function
teacher= needs reward_coef=1.0 because nothing else teaches; or name a --teacher
scale_rewards=group needs use_kl_in_reward=False because scaling cancels beta; try --scale_rewards=none
scale_rewards=mean needs use_kl_in_reward=False because a mean below 0 is no scale
scale_rewards=mean needs soft_punish_cache=0 because a mean below 0 is no scale
reference=host needs lora_rank=0 because with adapters the reference is the model without them; leave it out
group_size=1 needs reward_coef=0.0 because one reward compares nothing; take 2 or more, or a --teacher alone
beta=0.0 needs use_kl_in_reward=False because the KL has no weight; give it one, for example --beta=0.01
init_from= needs lora_rank=0 because adapters belong to the weights of init_from; name a run or a model there
parallel=none needs num_processes=1 because one process runs; add --parallel=ddp or fsdp
parallel=none needs param_offload=False because it is FSDP's; start with torchrun --nproc_per_node=1 and --parallel=fsdp
parallel=ddp needs param_offload=False because it is FSDP's; try --parallel=fsdp
parallel=fsdp needs reference=device or --parallel=ddp
parallel=fsdp needs teacher_device=device or --parallel=ddp
parallel=fsdp needs base_dtype= or --parallel=ddp
parallel=fsdp needs grad_offload=False or --parallel=ddp
parallel=fsdp needs memory_budget_gb= or --parallel=ddp
"""


@dataclass
class LoopSettings(RunOptions, LogOptions, TrainOptions, TaskOptions, ModelOptions, MemoryOptions):
    """What SFT and GRPO share."""

    # What users of TRL and PEFT may write -> the answer.
    other_names = ELSEWHERE["options"]

    def check(self):
        for options in (LogOptions, ModelOptions, MemoryOptions):
            options.check(self)
        chosen = {name: f"{name}={value}" for name, value in vars(self).items()}
        for line in NEEDS.splitlines():
            choice, _, needed, *_ = line.split()
            now = chosen.get(needed.partition("=")[0], needed)
            if choice in chosen.values() and now != needed:
                raise SnugError(f"{now}: {line}")
        if self.base_dtype and not self.lora_rank:
            raise SnugError(
                f"base_dtype={self.base_dtype!r} freezes the weights; add adapters (--lora_rank=16), or leave it out"
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
    log_interval learning_rate lr_schedule lora_rank task data_file tokenizer n_layer n_embd block_size
    max_tokens_per_micro_batch memory_budget_gb plan"""

    out_dir: str = option_of(RunOptions, "out_dir", default="out/sft")
    max_iters: int = option(500, "optimizer steps", minimum=1)
    batch_size: int = option(128, "demonstrations per optimizer step", minimum=1)

    # GRPO's options that code for both loops reads. SFT samples only in evaluations, one completion per prompt.
    # Without types they are no options.
    group_size = 1
    train_batch_size = 0
    beta = 0.0
    teacher = ""
    max_prompt_length = 0
    max_new_tokens = 0  # the length of the task's longest answer
    stop_string = ""
    tools = []
    environment = ""
    reward_funcs = []
    pass_reward = None
    reward_timeout = RewardOptions.reward_timeout


@dataclass
class GRPOSettings(
    RolloutOptions,
    EpisodeOptions,
    RewardOptions,
    AdvantageOptions,
    LossOptions,
    KLOptions,
    TeacherOptions,
    LoopSettings,
):
    """Group relative policy optimization: the options of grpo.py."""

    usual = """max_iters batch_size group_size max_new_tokens temperature tools reward_funcs loss_type beta teacher
    out_dir init_from seed device dtype resume save_interval eval_interval learning_rate lora_rank task data_file
    max_tokens_per_micro_batch memory_budget_gb plan"""

    out_dir: str = option_of(RunOptions, "out_dir", default="out/grpo")
    log_interval: int = option_of(LogOptions, "log_interval", default=1)
    max_iters: int = option(100, "number of rollouts", minimum=1)
    batch_size: int = option(64, "prompts per iteration", minimum=1)
    group_size: int = option(
        16, "completions per prompt (TRL: num_generations); 1 only with a teacher alone", minimum=1
    )
    train_batch_size: int = option(0, "completions per optimizer step; 0: the full rollout")
    num_iterations: int = option(1, "how often to train on each rollout", minimum=1)

    def check(self):
        super().check()
        self.check_rewards()
        self.check_loss()
        if self.format_reward and self.reward_funcs:
            raise SnugError(
                f"format_reward={self.format_reward} belongs to the task's reward, which reward_funcs replace; "
                "leave one out"
            )
        if self.train_batch_size and self.sequences_per_rollout % self.train_batch_size:
            raise SnugError(
                f"train_batch_size={self.train_batch_size} does not divide the {self.sequences_per_rollout} "
                f"completions of a rollout, batch_size={self.batch_size} * group_size={self.group_size}"
            )
        if self.soft_punish_cache >= self.max_new_tokens:
            raise SnugError(f"soft_punish_cache={self.soft_punish_cache} must be below max_new_tokens")


@dataclass
class SampleSettings(EpisodeOptions):
    """Completions from a run's newest checkpoint: the options of sample.py."""

    prompt: str = option("", "text to complete; empty: a held-out prompt of the run's task")
    chat: bool = option(
        False, "write the prompt as a message in the chat template; left out: as in the run"
    )
    system_prompt: str = option(
        "", "chat: system message before the prompt; empty: the run's, if it has one"
    )
    num_samples: int = option(1, "number of completions", minimum=1)
    max_new_tokens: int = option(0, "longest completion; left out: as in the run, or 256", "tokens")
    temperature: float = option(1.0, "divides the logits; 0: always take the most likely token")
    stop_string: str = option(
        "", "text that also ends a completion and, without tools, is not printed; left out: the run's"
    )
    chat_template_kwargs: dict = option_of(TaskOptions, "chat_template_kwargs", default={})
    seed: int = option(1, "the same seed gives the same completions")
    enforce_eager: bool = option(False, "do not use CUDA graphs")
    device: str = option("auto", "a torch device such as cpu or cuda:1; auto: cuda if available, else cpu")

    def check(self):
        if (self.chat or self.system_prompt) and not self.prompt:
            raise SnugError(
                "chat and system_prompt need --prompt; a prompt of the run's task is asked as in the run"
            )


@dataclass
class EvaluateSettings(TaskOptions, EpisodeOptions, RewardOptions):
    """pass@k and majority votes of a run's newest checkpoint on held-out prompts: options of evaluate.py.

    The run's options of task and reward hold, unless you give others. Another task has the defaults shown here.
    """

    usual = """task data_file num_prompts num_samples temperature max_new_tokens reward_funcs
    samples_file seed device"""

    task: str = option("", "the task; empty: the run's", choices=("", *TASKS))
    num_prompts: int = option(500, "held-out prompts, at most all", "prompts", minimum=1)
    num_samples: int = option(
        1, "sampled completions of each prompt, besides the greedy one", "completions", minimum=1
    )
    temperature: float = option(
        1.0, "temperature of the sampled completions; 0: only the greedy completion"
    )
    max_new_tokens: int = option(
        0,
        "longest completion; left out: the run's, a Hugging Face model's 256, or another task's longest answer",
        "tokens",
    )
    samples_file: str = option(
        "",
        "all completions; empty: evaluation-<task>-test.jsonl in the run, or in out/<name> for a model on the hub; "
        "none: off",
    )
    seed: int = option(0, "seed of the sampled completions; 0: as in a run's evaluations")
    device: str = option("auto", "auto: cuda if available, else cpu; or a torch device")

    def check(self):
        if self.num_samples > 1 and self.temperature == 0:
            raise SnugError(
                f"temperature=0 with num_samples={self.num_samples} is the same completion each time; "
                "leave num_samples out, or try --temperature=1"
            )


@dataclass
class ExportSettings:
    """A run's newest checkpoint as a Hugging Face folder: the options of runs/export.py."""

    to: str = option("", "the new folder")
    dtype: str = option("", "dtype of the weights; empty: as in the run", choices=("", *DTYPES))
    adapters: bool = option(False, "write only the adapters of a run with lora_rank, as PEFT does")

    def check(self):
        if not self.to:
            raise SnugError("name the new folder: --to=export/mine")


@dataclass
class FromGGUFSettings(ExportSettings):
    """A GGUF file as a Hugging Face folder: the options of runs/from_gguf.py."""

    dtype: str = option("float32", "dtype of the weights", choices=DTYPES)
    adapters: ClassVar[bool] = False
