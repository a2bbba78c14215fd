"""Every common option, once: type, default, unit, meaning. A task declares its own beside itself: data/addition.py.

A class whose name ends in Options is a topic: --help=all shows its options together, under its docstring. `usual` names
the options that --help shows. A command without `usual` shows all of its options. LOSSES says what each loss is, RULES
what does not fit together.

A config (config/*.py) is a list of plain assignments that differ from these defaults. The command line overrides it:

    python grpo.py config/grpo_small.py --learning_rate=1e-4 --seed=3

snug/options reads them. Nothing here imports torch, so that a typo is reported at once. Tests: tests/test_settings.py.
"""

import math
import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from data import TASKS, TaskOptions, imported
from data.episodes import EpisodeOptions
from snug.options import OWN, SnugError, option

DTYPES = ("float32", "bfloat16")
PLACES = ("device", "host")


@dataclass
class ModelOptions:
    """The shape of a new model. With init_from, the shape comes from there."""

    vocab_size: int = option(0, "rows of the embedding and the head; 0: the tokenizer's ids")
    n_layer: int = option(2, "transformer blocks", minimum=1)
    n_head: int = option(4, "attention heads", minimum=1)
    n_kv_head: int = option(0, "key/value heads (grouped-query attention); 0: n_head")
    n_embd: int = option(64, "width of the residual stream", minimum=1)
    n_hidden: int = option(0, "width of the MLP; 0: 4 * n_embd, for swiglu 8/3 * n_embd")
    block_size: int = option(
        64,
        "tokens of prompt and completion together; at most init_from's",
        minimum=2,
    )
    norm: str = option("layernorm", "normalization", choices=("layernorm", "rmsnorm"))
    position: str = option(
        "learned",
        "learned: GPT-2's table; rotary: Llama's rotation",
        choices=("learned", "rotary"),
    )
    mlp: str = option("gelu", "gelu: GPT-2's; swiglu: Llama's, gated", choices=("gelu", "swiglu"))
    qkv_bias: bool = option(False, "biases in the query/key/value projection only (Qwen2)")
    rope_theta: float = option(10000.0, "rotary: base of the frequencies", minimum=1)
    tie_embeddings: bool = option(True, "one matrix for the embedding and the head")


@dataclass
class RunOptions:
    """Where a run starts, where it writes, and what it runs on."""

    init_from: str = option(
        "",
        "initial weights and the reference: a run, a Hugging Face model, PEFT adapters (folder or hub id), or the "
        "config of an SFT run, trained first; empty: random",
    )
    seed: int = option(1, "seed of initial weights, prompt order and sampled tokens", maximum=2**31 - 1)
    device: str = option("auto", "cpu, cuda:1, mps, ...; auto: cuda, else mps, else cpu")
    dtype: str = option(
        "auto",
        "dtype of the forward pass; auto: bfloat16 on A100, RTX 30 and newer, or as param_dtype",
        choices=("auto", *DTYPES),
    )
    parallel: str = option(
        "none",
        "with torchrun; ddp: each process has the model; fsdp: a shard of it",
        choices=("none", "ddp", "fsdp"),
    )
    kernels: str = option(
        "auto",
        "auto: Triton's where they are right on this GPU; torch: none, and no CUDA graphs",
        choices=("auto", "torch"),
    )
    enforce_eager: bool = option(False, "sample without CUDA graphs: slower, less memory")
    resume: str = option(
        "never",
        "auto: continue the run in out_dir; a folder: that run. Options given replace its own",
    )


@dataclass
class LogOptions:
    """Evaluations, checkpoints, and what is printed and logged."""

    save_interval: int = option(50, "save every N iterations and at the end; 0: only at the end")
    save_total_limit: int = option(2, "newest checkpoints to keep, beside the best", minimum=1)
    eval_interval: int = option(
        20,
        "evaluate before training, every N iterations and at the end; 0: only at the end",
    )
    eval_prompts: int = option(500, "held-out prompts of an evaluation; 0: none")
    report_to: list[str] = option(
        [],
        "also log there",
        choices=("tensorboard", "wandb", "trackio"),
    )
    on_iteration: str = option("", "module:function; gets each line of the log; True ends the run")


@dataclass
class TrainOptions:
    """The optimizer step of SFT and GRPO."""

    learning_rate: float = option(
        1e-3,
        "peak rate; default of pretrained weights: 1e-6, SFT 2e-5; with LoRA ten times as much",
    )
    lr_schedule: str = option(
        "constant",
        "after the warmup; linear and cosine end at 0",
        choices=("constant", "linear", "cosine"),
    )
    warmup_iters: int = option(0, "iterations of linear warmup")
    weight_decay: float = option(0.0, "AdamW's weight decay of matrices and embeddings")
    adam_beta2: float = option(0.99, "AdamW's decay rate of the second moment", maximum=0.999999)
    grad_clip: float = option(1.0, "largest gradient norm; 0: no clipping")
    lora_rank: int = option(0, "LoRA: train adapters of this rank; 0: all weights")
    lora_alpha: float = option(32.0, "scale adapters by lora_alpha / lora_rank", minimum=1e-3)
    lora_target_modules: list[str] = option(
        ["qkv", "proj", "up", "down"],
        "the matrices with adapters",
        choices=("qkv", "proj", "up", "down"),
    )
    base_dtype: str = option(
        "",
        "LoRA: type of frozen matrices; nf4: QLoRA's 4 bits; empty: param_dtype",
        choices=("", "nf4"),
    )


@dataclass
class MemoryOptions:
    """Options that save memory. docs/memory.md has their savings and costs. --plan prints what an iteration needs."""

    max_tokens_per_micro_batch: int = option(0, "tokens of a micro-batch; 0: all of a step")
    max_rollout_batch: int = option(0, "completions decoded at a time; 0: all")
    logits_chunk_mb: float = option(0.0, "MiB of a chunk of logits; 0: by device")
    checkpoint_blocks: str = option(
        "none",
        "block: keep only each block's input; selective: attention outputs too",
        choices=("none", "block", "selective"),
    )
    activation_offload: bool = option(False, "keep block inputs on the host until backward")
    param_dtype: str = option(
        "float32",
        "dtype of weights and gradients; auto: on a GPU as dtype",
        choices=("auto", *DTYPES),
    )
    optimizer_dtype: str = option(
        "float32",
        "dtype of moments; bfloat16: rounded stochastically; float32 with param_dtype=bfloat16: adds masters",
        choices=DTYPES,
    )
    optimizer_device: str = option(
        "device",
        "host: stream moments and masters from there",
        choices=PLACES,
    )
    param_offload: bool = option(
        False,
        "fsdp: keep weights, gradients, moments and masters on the host",
    )
    grad_offload: bool = option(False, "accumulate gradients on the host")
    memory_budget_gb: str = option(
        "",
        "GiB, on CUDA a cap, or auto: what is free; finds the fastest options that fit and keep results",
    )
    plan: bool = option(False, "print the memory of an iteration; needs no GPU")
    num_processes: int = option(1, "with --plan: processes of the run", minimum=1)


class Loss(NamedTuple):
    """A loss_type. docs/algorithm.md has a row for each."""

    surrogate: str  # the loss of a token: a function in loss.SURROGATES
    average: str  # how tokens are averaged: loss.token_weights


LOSSES = {
    "dapo": Loss("clipped", "token"),
    "grpo": Loss("clipped", "sequence"),
    "dr_grpo": Loss("clipped", "constant"),
    "bnpo": Loss("clipped", "micro-batch"),
    "cispo": Loss("cispo", "token"),
    "sapo": Loss("sapo", "sequence"),
    "luspo": Loss("clipped", "sum"),
}
OWN_LOSS = Loss("own", "token")  # the user's function


def load_loss(spec: str, run: str):
    """ "module:function" -> your loss, found where reward functions are. Raises SnugError."""
    return imported(spec, "loss_type", "my_losses:tight", run=run)


@dataclass
class LossOptions:
    """What is minimized. docs/algorithm.md has the formulas."""

    loss_type: str = option(
        "dapo",
        "docs/algorithm.md explains each; module:function: yours",
        choices=(*LOSSES, OWN),
    )
    importance_sampling_level: str = option(
        "token",
        "sequence: one ratio for a completion (GSPO); set epsilon near 4e-4",
        choices=("token", "sequence"),
    )
    epsilon: float = option(0.2, "clip the ratio from 1 - epsilon to 1 + epsilon_high")
    epsilon_high: float | None = option(None, "none: epsilon. cispo: the largest ratio, such as 5")
    sapo_temperature_pos: float = option(1.0, "sapo: sharpness of the gate where A > 0", minimum=1e-3)
    sapo_temperature_neg: float = option(1.05, "sapo: sharpness of the gate elsewhere", minimum=1e-3)
    importance_sampling_cap: float | None = option(
        None,
        "weight tokens by p_trainer / p_sampler, at most this; one more forward pass",
        minimum=1,
    )
    mask_truncated_completions: bool = option(False, "do not train on completions that were cut off")

    @property
    def loss(self) -> Loss:
        return LOSSES.get(self.loss_type, OWN_LOSS)

    @property
    def depends_on_cut(self) -> bool:
        """Do results depend on how a step is cut into micro-batches?"""
        return self.loss.average == "micro-batch"

    @property
    def needs_whole_sequences(self) -> bool:
        """Does a token's loss look at its whole sequence? Then the head is computed twice."""
        return self.importance_sampling_level == "sequence" or self.loss is OWN_LOSS


ON_DEVICE = dict(reference="device", teacher_device="device", grad_offload=False)
RULES = [  # (an option, its value, what other options must be). An option that SFT lacks breaks no rule.
    ("dtype", "float32", dict(param_dtype="float32")),
    ("checkpoint_blocks", "none", dict(activation_offload=False)),
    ("multi_objective_aggregation", "normalize_then_sum", dict(scale_rewards="group")),
    ("group_size", 1, dict(reward_coef=0.0)),  # it compares no rewards: a teacher alone
    ("teacher", "", dict(reward_coef=1.0)),  # there is nothing else to learn
    ("init_from", "", dict(lora_rank=0)),
    ("lora_rank", 0, dict(base_dtype="")),
    ("parallel", "none", dict(num_processes=1)),
    ("probe", True, dict(plan=False)),
    ("param_offload", True, dict(parallel="fsdp")),
    ("parallel", "fsdp", ON_DEVICE | dict(base_dtype="", memory_budget_gb="", plan=False)),
    # its host has the same memory
    (
        "device",
        "mps",
        ON_DEVICE | dict(parallel="none", optimizer_device="device", activation_offload=False),
    ),
    ("loss_type", "luspo", dict(importance_sampling_level="sequence")),
]


PRETRAINED_LENGTH = 256  # max_new_tokens of a Hugging Face model, in tokens; TRL has the same default


@dataclass
class RewardOptions:
    """Your own reward functions, for training and evaluations. evaluate.py uses the run's if the task is the same."""

    reward_funcs: list[str] = option([], "module:function,...; empty: the task's functions")
    reward_weights: list[float] = option(
        [],
        "weights of reward_funcs; empty: 1 each",
        minimum=-1e9,
        maximum=1e9,
    )
    reward_timeout: float = option(300.0, "seconds for a batch, then the run stops; 0: no limit")

    def check_rewards(self):
        weights, functions = len(self.reward_weights), len(self.reward_funcs)
        if weights and weights != functions:
            raise SnugError(
                f"reward_weights has {weights} weights for {functions} reward_funcs; give one for each"
            )


@dataclass
class RolloutOptions:
    """How completions are sampled."""

    max_new_tokens: int = option(
        32,
        "tokens of the longest completion; 256 for a Hugging Face model",
        minimum=1,
    )
    temperature: float = option(1.0, "divides the logits, in the sampler and in training", minimum=1e-3)
    max_prompt_length: int = option(
        0,
        "tokens: cut the beginning of longer texts, refuse longer messages; 0: never",
    )
    max_num_gen_batches: int = option(
        1,
        "dynamic sampling (DAPO): up to N rollouts replace groups of equal rewards",
        minimum=1,
    )


@dataclass
class AdvantageOptions:
    """How rewards become advantages."""

    scale_rewards: str = option(
        "group",
        "divide by the standard deviation of the group's or the batch's rewards",
        choices=("group", "batch", "none"),
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "normalize the sum of rewards, or each function's (GDPO)",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )


@dataclass
class KLOptions:
    """The reference model, and the KL divergence to it."""

    beta: float = option(0.0, "weight of the KL divergence to init_from; 0: no reference")
    reference: str = option("device", "where its weights are; host: streamed by block", choices=PLACES)
    kl_estimator: str = option(
        "k3",
        "the loss multiplies k3 by the ratio; k3_no_ratio is DeepSeekMath's k3",
        choices=("k3", "k3_no_ratio"),
    )


@dataclass
class TeacherOptions:
    """On-policy distillation: a second, frozen model judges every token that the model samples. docs/algorithm.md"""

    teacher: str = option(
        "",
        "a run or a Hugging Face model (folder or hub id) with the same tokenizer",
    )
    divergence: str = option(
        "sampled",
        "sampled: log p_teacher / p_sampler in advantages; reverse_kl: KL(model || teacher) in the loss",
        choices=("sampled", "reverse_kl"),
    )
    teacher_coef: float = option(1.0, "weight of the teacher's advantages or divergence")
    reward_coef: float = option(
        1.0,
        "weight of the rewards' advantages beside a teacher; 0: the teacher alone",
    )
    teacher_device: str = option(
        "device", "where its weights are; host: streamed by block", choices=PLACES
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

    usual = """max_iters batch_size out_dir init_from seed device dtype resume eval_interval learning_rate lora_rank
    task max_tokens_per_micro_batch memory_budget_gb plan """

    def check(self):
        if not re.fullmatch(r"(auto|\d*\.?\d+)?", self.memory_budget_gb):
            raise SnugError(
                f"memory_budget_gb={self.memory_budget_gb!r} is not auto or a number of GiB"
            )
        for given, value, needs in RULES:
            for name, needed in needs.items():
                now = getattr(self, name, needed)
                if (name, now) == ("param_dtype", "auto"):  # goes with any dtype
                    now = needed
                if getattr(self, given, None) == value and now != needed:
                    problem = f"{given}={value or 'none'} does not support {name}={now}"
                    raise SnugError(f"{problem}; use --{name}={needed}, or another {given}")
        self.check_rewards()
        if self.num_processes > self.batch_size:
            raise SnugError(
                f"batch_size={self.batch_size} is less than {self.num_processes} processes; "
                "each needs a prompt"
            )

    @property
    def default_learning_rate(self) -> float:
        """Of pretrained weights."""
        return round(self.pretrained_learning_rate * (10 if self.lora_rank else 1), 6)

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

    usual = LoopSettings.usual + (
        "save_interval lr_schedule assistant_turns tokenizer n_layer n_embd block_size"
    )
    loop = "SFT"
    pretrained_learning_rate = 2e-5  # TRL's

    out_dir: str = option("out/sft", "the run's folder")
    max_iters: int = option(500, "optimizer steps", minimum=1)
    batch_size: int = option(128, "demonstrations per optimizer step", minimum=1)
    assistant_turns: str = option(
        "all", "which messages of a conversation to learn", choices=("all", "last")
    )

    # GRPO's options in SFT: evaluations sample one completion of a prompt, as long as the task's longest answer; an
    # iteration is a step; there is no second model.
    probe: ClassVar[bool] = False
    group_size: ClassVar[int] = 1
    train_batch_size: ClassVar[int] = 0
    max_prompt_length: ClassVar[int] = 0
    max_new_tokens: ClassVar[int] = 0
    beta: ClassVar[float] = 0.0
    teacher: ClassVar[str] = ""
    depends_on_cut: ClassVar[bool] = False


@dataclass
class GRPOSettings(
    RolloutOptions, AdvantageOptions, LossOptions, KLOptions, TeacherOptions, LoopSettings
):
    """Group relative policy optimization: the options of grpo.py."""

    usual = LoopSettings.usual + (
        "group_size max_new_tokens temperature tools reward_funcs loss_type beta teacher probe"
    )
    loop = "GRPO"
    pretrained_learning_rate = 1e-6  # TRL's

    out_dir: str = option("out/grpo", "the run's folder")
    max_iters: int = option(100, "number of rollouts", minimum=1)
    batch_size: int = option(64, "prompts per iteration", minimum=1)
    group_size: int = option(16, "completions per prompt; 1 only with a teacher alone", minimum=1)
    train_batch_size: int = option(0, "completions per optimizer step; 0: the full rollout")
    num_iterations: int = option(1, "how often to train on each rollout", minimum=1)
    probe: bool = option(
        False,
        "say whether the first rollouts teach, and how long the run takes; stop",
    )

    def check(self):
        super().check()
        if self.loss_type == "cispo" and (self.epsilon_high or 0) < 1:
            raise SnugError(
                f"loss_type=cispo needs epsilon_high of at least 1, not {self.epsilon_high}; try --epsilon_high=5"
            )
        if self.train_batch_size and self.sequences_per_rollout % self.train_batch_size:
            raise SnugError(
                f"train_batch_size={self.train_batch_size} does not divide the {self.sequences_per_rollout} "
                "completions of a rollout, batch_size * group_size"
            )


@dataclass
class CompletionOptions:
    """What is sampled, and where."""

    num_samples: int = option(
        1, "sampled completions of a prompt; evaluate.py adds a greedy one", minimum=1
    )
    max_new_tokens: int = option(0, "tokens of the longest completion; left out: the run's, or 256")
    temperature: float = option(1.0, "divides the logits; 0: the likeliest tokens")
    device: str = option("auto", "cpu, cuda:1, mps, ... or auto")


@dataclass
class SampleSettings(CompletionOptions, EpisodeOptions):
    """Completions from a run's newest checkpoint: the options of sample.py."""

    prompt: str = option("", "text to complete; empty: a held-out prompt of the run's task")
    chat: bool = option(False, "write the prompt as a message; left out: as in the run")
    system_prompt: str = option("", "chat: system message; empty: the run's")
    chat_template_kwargs: dict = option({}, "variables of the chat template")
    seed: int = option(1, "the same seed gives the same completions")


@dataclass
class EvaluateSettings(CompletionOptions, TaskOptions, EpisodeOptions, RewardOptions):
    """pass@k and majority votes of a run's newest checkpoint on held-out prompts: options of evaluate.py.

    The run's options of task and reward hold, unless you give others. Another task has the defaults shown here. For two
    models the options of the second hold, or those of the one that is a run.
    """

    usual = """task num_prompts num_samples temperature max_new_tokens reward_funcs
    samples_file seed device"""

    task: str = option("", "the task; empty: the run's", choices=("", *TASKS, OWN))
    num_prompts: int = option(500, "held-out prompts, at most all", minimum=1)
    samples_file: str = option(
        "",
        "for all completions; empty: evaluation-<task>-test.jsonl in the run or out/<name>; none: off",
    )
    seed: int = option(0, "seed of the sampled completions; 0: as in a run's evaluations")


@dataclass
class ExportSettings:
    """A run's newest checkpoint as a Hugging Face folder: the options of runs/export.py."""

    to: str = option("", "the new folder")
    dtype: str = option("", "dtype of the weights; empty: as in the run", choices=("", *DTYPES))
    adapters: bool = option(False, "write only the adapters, as PEFT does")

    def check(self):
        if not self.to:
            raise SnugError("name the new folder: --to=export/mine")
