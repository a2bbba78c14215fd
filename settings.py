"""Every option of snug, once: type, default, unit, meaning. A task's own options are in data/.

A class whose name ends in Options is a topic: --help=all shows its options together, under its docstring. `usual` names
the options that --help shows; a command without it shows all of its options.

A config (config/*.py) is a list of plain assignments that differ from these defaults; the command line overrides it:

    python grpo.py config/grpo_small.py --learning_rate=1e-4 --seed=3

options/ reads them. Nothing here imports torch: a typo is answered at once. Tests: tests/test_settings.py.
"""

import importlib.util
import math
import os
from dataclasses import dataclass
from typing import ClassVar

from data import TASKS, TaskOptions
from options import SnugError, option

DTYPES = ("float32", "bfloat16")
PLACES = ("device", "host")
SCHEDULES = ("constant", "linear", "cosine")
SCALES = ("group", "batch", "none")


@dataclass
class ModelOptions:
    """The shape of a new model. With init_from the shape comes from the checkpoint."""

    vocab_size: int = option(
        0, "rows of embedding and head, such as 50304 for a fast head; 0: the tokenizer's ids"
    )
    n_layer: int = option(2, "transformer blocks", minimum=1)
    n_head: int = option(4, "attention heads", minimum=1)
    n_kv_head: int = option(
        0, "key/value heads, shared by the query heads (grouped-query attention); 0: n_head"
    )
    n_embd: int = option(64, "width of the residual stream", minimum=1)
    n_hidden: int = option(0, "width of the MLP; 0: 4 * n_embd for gelu, 8/3 * n_embd for swiglu")
    block_size: int = option(
        64, "longest sequence, prompt and completion; at most init_from's", "tokens", minimum=2
    )
    norm: str = option(
        "layernorm", "normalization before attention and MLP", choices=("layernorm", "rmsnorm")
    )
    position: str = option(
        "learned", "GPT-2's position table or Llama's rotation", choices=("learned", "rotary")
    )
    mlp: str = option("gelu", "GPT-2's MLP or Llama's gated MLP", choices=("gelu", "swiglu"))
    bias: bool = option(False, "use biases in linear layers and layer norms")
    qkv_bias: bool = option(False, "use biases in the query/key/value projection only (Qwen2)")
    rope_theta: float = option(10000.0, "position=rotary: base of the rotation frequencies", minimum=1)
    tie_embeddings: bool = option(True, "use one matrix for the token embedding and the output head")

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
    """Where a run starts, where its folder is, and what it runs on."""

    out_dir: str = option(
        "out/run", "the run's folder: log.jsonl, samples.jsonl, log.txt, settings.json, checkpoints"
    )
    init_from: str = option(
        "",
        "initial weights, and GRPO's reference: a run, a Hugging Face folder, or the config of an SFT run, which grpo.py "
        "first makes or finishes; empty: random",
    )
    seed: int = option(1, "seed of initial weights, prompt order and sampled tokens", maximum=2**31 - 1)
    device: str = option("auto", "auto: cuda if available, else cpu; or a torch device such as cuda:1")
    dtype: str = option(
        "float32", "dtype of the forward pass; bfloat16: autocast over float32 weights", choices=DTYPES
    )
    parallel: str = option(
        "none",
        "several processes, started by torchrun. ddp: each has the whole model; fsdp: weights, gradients, moments are "
        "sharded over all processes; hsdp: over those of a node",
        choices=("none", "ddp", "fsdp", "hsdp"),
    )
    tf32: bool = option(
        False,
        "float32 products on tensor cores: about 8 times the peak rate on an A100 or H100, relative errors of 1e-3 "
        "instead of 1e-7; no effect on bfloat16, on a CPU, on GPUs older than the A100",
    )
    enforce_eager: bool = option(False, "sample without CUDA graphs: slower, but saves their memory")
    resume: str = option(
        "never", "auto: continue from the newest checkpoint in out_dir", choices=("never", "auto")
    )


@dataclass
class LogOptions:
    """Evaluations, checkpoints, and what is shown and logged."""

    save_interval: int = option(
        50, "save every N iterations and at the end; 0: only at the end", "iterations"
    )
    save_total_limit: int = option(
        2, "newest checkpoints to keep; the best one is always kept", minimum=1
    )
    eval_interval: int = option(
        20, "evaluate first, every N iterations and last; 0: only last", "iterations"
    )
    eval_prompts: int = option(
        500, "held-out prompts of an evaluation, at most all; 0: do not evaluate", "prompts"
    )
    log_interval: int = option(
        0,
        "show every N-th iteration on the console; 0: some 25 in a run. log.jsonl has every one",
        "iterations",
    )
    samples_per_iteration: int = option(
        4, "completions in samples.jsonl, each iteration: rounded up to whole groups"
    )
    report_to: list[str] = option(
        [], "also log to tensorboard, wandb (comma-separated); failures do not stop the run"
    )

    def check(self):
        for name in self.report_to:
            if name not in ("tensorboard", "wandb"):
                raise SnugError(f"report_to={name!r} is not one of tensorboard, wandb")
            if importlib.util.find_spec(name) is None:
                raise SnugError(f"report_to={name!r}: the package is not installed; pip install {name}")


@dataclass
class TrainOptions:
    """The optimizer step, the same in SFT and GRPO."""

    learning_rate: float = option(1e-3, "peak learning rate")
    lr_schedule: str = option("constant", "after warmup; linear and cosine end at 0", choices=SCHEDULES)
    warmup_iters: int = option(0, "length of the linear learning rate warmup", "iterations")
    weight_decay: float = option(0.0, "AdamW's weight decay of matrices and embeddings")
    adam_beta1: float = option(0.9, "AdamW's decay of the first moment")
    adam_beta2: float = option(0.99, "AdamW's decay of the second moment")
    grad_clip: float = option(1.0, "largest norm of the gradient; 0: no clipping")
    lora_rank: int = option(
        0, "train only adapters of this rank on the weights of init_from (LoRA); 0: train all"
    )
    lora_alpha: float = option(32.0, "LoRA: adapters are scaled by lora_alpha / lora_rank")
    lora_target_modules: list[str] = option(
        ["qkv", "proj", "up", "down"], "LoRA: the matrices that get adapters"
    )

    def check(self):
        if max(self.adam_beta1, self.adam_beta2) >= 1:
            raise SnugError(
                f"adam_beta1={self.adam_beta1} and adam_beta2={self.adam_beta2} must be below 1"
            )
        names = self.lora_target_modules
        allowed = (
            names and set(names) <= {"qkv", "proj", "up", "down"} and len(set(names)) == len(names)
        )
        if self.lora_rank and not allowed:
            raise SnugError(
                f"lora_target_modules={','.join(names)!r}: choose from qkv, proj, up, down, each once"
            )


@dataclass
class MemoryOptions:
    """Options that save memory. docs/memory.md: what each saves and costs. --plan prints what an iteration needs."""

    max_tokens_per_micro_batch: int = option(
        0, "tokens of a micro-batch at most; 0: a whole optimizer step", "tokens"
    )
    max_rollout_batch: int = option(
        0, "completions decoded at a time; bounds the KV cache; 0: all", "completions"
    )
    logits_chunk_mb: float = option(
        0.0, "size of a chunk of logits; 0: 16 on a CPU, 256 on CUDA", "MiB"
    )
    checkpoint_blocks: str = option(
        "none",
        "block: keep each block's input and recompute the rest in backward; selective: also keep attention outputs",
        choices=("none", "block", "selective"),
    )
    activation_offload: bool = option(
        False, "keep block inputs on the host until backward; needs checkpoint_blocks"
    )
    param_dtype: str = option(
        "float32", "of weights and gradients; bfloat16 needs dtype=bfloat16", choices=DTYPES
    )
    optimizer_dtype: str = option(
        "float32",
        "dtype of the moments; bfloat16: rounded stochastically. With bfloat16 weights, float32 adds float32 master "
        "weights, and bfloat16 rounds the weights stochastically too",
        choices=DTYPES,
    )
    optimizer_device: str = option(
        "device", "host: stream moments and masters from there in each step", choices=PLACES
    )
    param_offload: bool = option(
        False,
        "fsdp: keep weights, gradients, moments and masters on the host; a block's weights come while it runs, all for "
        "a rollout; with one process too: torchrun --nproc_per_node=1",
    )
    grad_offload: bool = option(
        False, "move each gradient to the host when backward has made it, and accumulate there"
    )
    memory_budget_gb: str = option(
        "", "GiB for the run, or auto: all that is free; the cheapest options that fit"
    )
    plan: bool = option(
        False, "print the memory that an iteration needs, and stop; any device, no GPU needed"
    )
    num_processes: int = option(
        1, "with plan and parallel: processes of the run; else torchrun says it", minimum=1
    )

    def check(self):
        if self.activation_offload and self.checkpoint_blocks == "none":
            raise SnugError(
                "activation_offload=True moves what checkpoint_blocks keeps; add --checkpoint_blocks=block"
            )
        try:
            valid = self.memory_budget_gb in ("", "auto") or 0 < float(self.memory_budget_gb) < float(
                "inf"
            )
        except ValueError:
            valid = False
        if not valid:
            raise SnugError(
                f"memory_budget_gb={self.memory_budget_gb!r} is not auto or a number of GiB above 0"
            )


@dataclass
class RewardOptions:
    """Reward functions of your own, for training and evaluations. evaluate.py takes the run's, for its own task."""

    reward_funcs: list[str] = option(
        [], "reward functions to add up: module:function,...; empty: the task's own"
    )
    reward_weights: list[float] = option(
        [], "weight of each of reward_funcs, comma-separated; empty: 1 each"
    )
    reward_timeout: float = option(
        300.0, "stop if a reward function takes longer for a batch; 0: no limit", "s"
    )
    pass_reward: float | None = option(
        None,
        "least total reward that pass@1 counts as right; none: the total if each function gives 1",
        minimum=-1e9,
    )

    def check_rewards(self):
        for spec in self.reward_funcs:
            if not all(spec.partition(":")):
                raise SnugError(
                    f"reward_funcs={spec!r}: write module:function, such as my_rewards:is_short"
                )
        weights, functions = len(self.reward_weights), len(self.reward_funcs)
        if weights and weights != functions:
            raise SnugError(
                f"reward_weights has {weights} weights for {functions} reward_funcs; give one for each"
            )
        if self.pass_reward is not None and not functions:
            raise SnugError(
                f"pass_reward={self.pass_reward:g} is a total of reward_funcs; add them, or leave it out"
            )


@dataclass
class RolloutOptions:
    """How completions are sampled."""

    max_new_tokens: int = option(
        32, "longest completion (TRL: max_completion_length)", "tokens", minimum=1
    )
    stop_string: str = option(
        "", "text that also ends a completion, such as </answer>; empty: only the stop token"
    )
    max_prompt_length: int = option(
        0, "cut the beginning of longer prompts; 0: keep whole prompts", "tokens"
    )
    temperature: float = option(
        1.0, "divides the logits, in the sampler and in the trainer", minimum=1e-3
    )
    max_num_gen_batches: int = option(
        1,
        "dynamic sampling (DAPO): in up to N rollouts, replace groups of equal rewards by other prompts",
        minimum=1,
    )


@dataclass
class AdvantageOptions:
    """How rewards become advantages."""

    scale_rewards: str = option("group", "divide advantages by this standard deviation", choices=SCALES)
    baseline: str = option(
        "mean", "subtract the mean of the group or of the others", choices=("mean", "leave_one_out")
    )
    soft_punish_cache: int = option(
        0, "the last N tokens of max_new_tokens subtract 1/N each from the reward"
    )


@dataclass
class LossOptions:
    """What is minimized. docs/algorithm.md has the formulas."""

    loss_type: str = option(
        "dapo",
        "average over all tokens (dapo; cispo: weights by the ratio instead of clipping), over each sequence's tokens "
        "(grpo), over a constant length (dr_grpo), over each micro-batch's tokens (bnpo: depends on how these are cut)",
        choices=("dapo", "grpo", "bnpo", "dr_grpo", "cispo"),
    )
    importance_sampling_level: str = option(
        "token",
        "one ratio per token, or per sequence (GSPO): the geometric mean of its tokens'; then set epsilon near 4e-4",
        choices=("token", "sequence"),
    )
    epsilon: float = option(0.2, "clip the ratio to 1 - epsilon and 1 + epsilon_high")
    epsilon_high: float | None = option(
        None, "upper clipping range; none: epsilon. cispo: largest ratio, such as 5"
    )
    delta: float | None = option(
        None, "largest ratio if the advantage is negative; none: no bound", minimum=1
    )
    entropy_coef: float = option(
        0.0, "weight of a bonus for the tokens' entropy in nats; if not 0, a second head pass"
    )
    importance_sampling_cap: float | None = option(
        None,
        "weight a token by p_trainer / p_sampler, at most this; for bfloat16; costs one forward pass",
        minimum=1,
    )
    mask_truncated_completions: bool = option(False, "do not train on completions that did not stop")


@dataclass
class KLOptions:
    """The reference, and the KL divergence to it."""

    beta: float = option(
        0.0, "weight of the KL divergence to the reference, init_from; 0: no reference is loaded"
    )
    reference: str = option(
        "device", "where the reference is; host: stream it block by block", choices=PLACES
    )
    kl_estimator: str = option(
        "k3",
        "estimator of the KL divergence; the loss multiplies k1 and k3 by the ratio; k3_no_ratio: DeepSeekMath's",
        choices=("k1", "k2", "k3", "k3_no_ratio"),
    )
    use_kl_in_reward: bool = option(
        False, "subtract beta times the KL from the reward; false: add it to the loss"
    )


@dataclass
class LoopSettings(RunOptions, LogOptions, TrainOptions, TaskOptions, ModelOptions, MemoryOptions):
    """What SFT and GRPO share."""

    def check(self):
        for options in (LogOptions, ModelOptions, TrainOptions, MemoryOptions):
            options.check(self)
        if self.param_dtype == "bfloat16" and self.dtype == "float32":
            raise SnugError("param_dtype='bfloat16' computes in bfloat16; add --dtype=bfloat16")
        if self.num_processes > 1 and self.parallel == "none":
            raise SnugError(
                f"num_processes={self.num_processes} with parallel='none'; add --parallel=ddp or fsdp"
            )
        if self.num_processes > self.batch_size:
            seen = f"batch_size={self.batch_size} is less than {self.num_processes} processes"
            raise SnugError(f"{seen}; each takes a prompt at least")
        if self.parallel in ("fsdp", "hsdp"):
            taken = dict(
                grad_offload=False, reference="device", memory_budget_gb=""
            )  # sharding takes their place
            for name, value in taken.items():
                if getattr(self, name, value) != value:
                    seen = f"{name}={getattr(self, name)!r} with parallel={self.parallel!r}"
                    raise SnugError(
                        f"{seen}, which moves the weights itself; leave it out, or use --parallel=ddp"
                    )
        elif self.param_offload:
            raise SnugError(
                "param_offload=True is FSDP's; start with torchrun --nproc_per_node=1 and --parallel=fsdp"
            )
        if self.lora_rank and not self.init_from:
            raise SnugError(
                f"lora_rank={self.lora_rank} trains beside the weights of init_from; name a run or model"
            )

    @property
    def processes_per_machine(self) -> int:
        """As torchrun says in LOCAL_WORLD_SIZE. Without torchrun, --plan plans one machine, unless it is set."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.num_processes))

    @property
    def sequences_per_rollout(self) -> int:
        return self.batch_size * self.group_size

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimizer step."""
        return self.train_batch_size or self.sequences_per_rollout

    def tokens_per_step(self, prompt: int, completion: int) -> int:
        """Tokens that the model reads in an optimizer step, if all prompts and completions are so long (batch.py)."""
        groups = math.ceil(self.sequences_per_step / self.group_size)
        return groups * prompt + self.sequences_per_step * (completion - 1)

    @property
    def needs_reference(self) -> bool:
        """A second model? With LoRA the reference is the model without its adapters."""
        return bool(self.beta and not self.lora_rank)


@dataclass
class SFTSettings(LoopSettings):
    """Supervised fine-tuning on a task's demonstrations: options of train_sft.py."""

    usual = """max_iters batch_size out_dir init_from seed device dtype resume save_interval eval_interval
    log_interval learning_rate lr_schedule lora_rank task data_file tokenizer n_layer n_embd block_size
    max_tokens_per_micro_batch memory_budget_gb plan"""

    out_dir: str = option(
        "out/sft", "the run's folder: log.jsonl, samples.jsonl, log.txt, settings.json, checkpoints"
    )
    max_iters: int = option(500, "optimizer steps", "iterations", minimum=1)
    batch_size: int = option(128, "demonstrations of an optimizer step", "sequences", minimum=1)

    # GRPO's options that code for both loops reads. SFT samples only in evaluations, one completion a prompt.
    group_size: ClassVar[int] = 1
    train_batch_size: ClassVar[int] = 0
    beta: ClassVar[float] = 0.0
    max_prompt_length: ClassVar[int] = 0
    max_new_tokens: ClassVar[int] = 0  # the task's longest answer
    stop_string: ClassVar[str] = ""
    reward_funcs: ClassVar[list[str]] = []


@dataclass
class GRPOSettings(
    RolloutOptions, RewardOptions, AdvantageOptions, LossOptions, KLOptions, LoopSettings
):
    """Group relative policy optimization: options of grpo.py."""

    usual = """max_iters batch_size group_size max_new_tokens temperature reward_funcs loss_type beta out_dir
    init_from seed device dtype resume save_interval eval_interval log_interval learning_rate lora_rank task
    data_file max_tokens_per_micro_batch memory_budget_gb plan"""

    out_dir: str = option(
        "out/grpo", "the run's folder: log.jsonl, samples.jsonl, log.txt, settings.json, checkpoints"
    )
    max_iters: int = option(100, "rollouts", "iterations", minimum=1)
    log_interval: int = option(
        1,
        "show every N-th iteration on the console; 0: some 25 in a run. log.jsonl has every one",
        "iterations",
    )
    batch_size: int = option(64, "prompts of an iteration", "prompts", minimum=1)
    group_size: int = option(
        16, "completions of each prompt (TRL: num_generations)", "completions", minimum=1
    )
    train_batch_size: int = option(
        0, "completions of an optimizer step; 0: the whole rollout", "completions"
    )
    num_iterations: int = option(1, "how often to train on each rollout", minimum=1)

    def check(self):
        super().check()
        self.check_rewards()
        if self.format_reward and self.reward_funcs:
            raise SnugError(
                f"format_reward={self.format_reward} is part of the reward that reward_funcs replace"
            )
        if self.group_size < 2:
            raise SnugError(
                f"group_size={self.group_size}: a group needs at least 2 completions; try --group_size=8"
            )
        rollout = f"batch_size * group_size = {self.batch_size} * {self.group_size} = {self.sequences_per_rollout}"
        if self.train_batch_size and self.sequences_per_rollout % self.train_batch_size:
            raise SnugError(
                f"train_batch_size={self.train_batch_size} does not divide {rollout} completions"
            )
        if self.lora_rank and self.reference == "host":
            raise SnugError(
                "reference='host' with lora_rank: the reference is the model without adapters; remove it"
            )
        if self.soft_punish_cache >= self.max_new_tokens:
            raise SnugError(f"soft_punish_cache={self.soft_punish_cache} must be below max_new_tokens")
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.loss_type == "cispo" and (
            self.epsilon_high is None or high < 1 or self.delta is not None
        ):
            seen = f"loss_type=cispo with epsilon_high={self.epsilon_high}, delta={self.delta}"
            advice = "epsilon_high is the largest ratio, at least 1, and delta must be none; try --epsilon_high=5"
            raise SnugError(f"{seen}: {advice}")
        if self.delta is not None and self.delta <= 1 + high:
            raise SnugError(
                f"delta={self.delta} must be above 1 + epsilon_high, where the ratio is clipped already"
            )
        if self.use_kl_in_reward and not self.beta:
            raise SnugError(
                "use_kl_in_reward=True, but beta=0: give the KL a weight, such as --beta=0.01"
            )
        if self.use_kl_in_reward and self.scale_rewards == "group":
            why = "if a group's rewards are equal, scaling cancels beta; use --scale_rewards=batch or none"
            raise SnugError(f"use_kl_in_reward=True with scale_rewards=group: {why}")


@dataclass
class SampleSettings:
    """Completions from a run's newest checkpoint: options of sample.py."""

    prompt: str = option("", "the text to complete; empty: a held-out prompt of the run's task")
    chat: bool = option(
        False, "write the prompt as a message in the chat template; always on for runs with chat"
    )
    system_prompt: str = option(
        "", "chat: the system message before the prompt; empty: the run's, if it has one"
    )
    num_samples: int = option(1, "completions", minimum=1)
    max_new_tokens: int = option(32, "longest completion", "tokens", minimum=1)
    temperature: float = option(1.0, "divides the logits; 0: always the most likely token")
    top_k: int = option(0, "sample from the K most likely tokens; 0: all", "tokens")
    top_p: float = option(
        1.0, "sample from the most likely tokens of this total probability", minimum=1e-6, maximum=1
    )
    min_p: float = option(
        0.0, "sample from tokens with at least this share of the highest probability", maximum=1
    )
    stop_string: str = option(
        "", "text that also ends a completion, and is not shown; empty: only the stop token does"
    )
    seed: int = option(1, "the same seed gives the same completions")
    enforce_eager: bool = option(False, "do not use CUDA graphs")
    device: str = option("auto", "auto: cuda if available, else cpu; or a torch device")

    def check(self):
        if (self.chat or self.system_prompt) and not self.prompt:
            raise SnugError(
                "chat and system_prompt need --prompt; a run's own prompts are asked as in the run"
            )


@dataclass
class EvaluateSettings(TaskOptions, RewardOptions):
    """pass@k and majority votes of a run's newest checkpoint on held-out prompts: options of evaluate.py."""

    usual = """task eval_split data_file num_prompts num_samples temperature max_new_tokens reward_funcs
    samples_file show seed device"""

    task: str = option(
        "run", "run: the run's; another one: with the defaults below", choices=("run", *TASKS)
    )
    eval_split: str = option(
        "run", "split; run: the run's, or test for another task", choices=("run", "test", "tune")
    )
    num_prompts: int = option(500, "held-out prompts, at most all", "prompts", minimum=1)
    num_samples: int = option(
        1, "sampled completions of each prompt, besides the greedy one", "completions", minimum=1
    )
    temperature: float = option(
        1.0, "temperature of the sampled completions; 0: only the greedy completion"
    )
    max_new_tokens: int = option(
        0, "longest completion; 0: the run's own, or the task's longest answer", "tokens"
    )
    samples_file: str = option(
        "", "all completions; empty: evaluation-<task>-<split>.jsonl in the run; none: off"
    )
    show: int = option(0, "print the greedy completions of the first N prompts", "prompts")
    seed: int = option(0, "seed of the sampled completions; 0: the seed of a run's own evaluations")
    device: str = option("auto", "auto: cuda if available, else cpu; or a torch device")

    def check(self):
        if self.num_samples > 1 and self.temperature == 0:
            seen = f"temperature=0 with num_samples={self.num_samples} is the greedy completion so many times"
            raise SnugError(f"{seen}; leave num_samples out, or try --temperature=1")
        if 0 < self.temperature < 1e-3:
            raise SnugError(
                f"temperature={self.temperature} is below 0.001; 0 takes the most likely token"
            )


@dataclass
class ExportSettings:
    """A run's newest checkpoint as a Hugging Face folder: options of tools/export.py."""

    to: str = option("", "the new folder")
    dtype: str = option("", "dtype of the weights; empty: as in the run", choices=("", *DTYPES))

    def check(self):
        if not self.to:
            raise SnugError("name the new folder: --to=export/mine")


@dataclass
class FromGGUFSettings(ExportSettings):
    """A GGUF file as a Hugging Face folder: options of tools/from_gguf.py."""

    dtype: str = option("float32", "dtype of the weights", choices=DTYPES)
