"""Every option of snug, once: its type, default, unit and meaning.

A config (`config/*.py`) is a list of plain assignments that differ from the defaults below; the command line
overrides it with `--name=value`:

    python grpo.py config/grpo_small.py --learning_rate=1e-4 --seed=3

A config is read as data (literals only), never executed. Nothing here imports torch, so a typo is answered at once.
Left out: nested configs, environment variables, any other file format.
"""

import importlib.util
from dataclasses import dataclass

from options import SnugError, option

# The options


@dataclass
class ModelOptions:
    """The shape of a model made from scratch. With `init_from`, the shape is the checkpoint's."""

    vocab_size: int = option(
        0,
        "rows of the embedding and the head; 0: the tokenizer's ids. More are padding of probability 0: 50304 is a faster head than 50257",
        minimum=0,
    )
    n_layer: int = option(2, "transformer blocks", minimum=1)
    n_head: int = option(4, "attention heads", minimum=1)
    n_kv_head: int = option(
        0, "key/value heads, shared by the query heads (grouped-query attention); 0: n_head", minimum=0
    )
    n_embd: int = option(64, "width of the residual stream", minimum=1)
    n_hidden: int = option(0, "width of the MLP; 0: 4 * n_embd for gelu, 8/3 * n_embd for swiglu", minimum=0)
    block_size: int = option(64, "longest sequence, prompt and completion together", "tokens", minimum=2)
    norm: str = option("layernorm", "normalisation before each half of a block", choices=("layernorm", "rmsnorm"))
    position: str = option(
        "learned", "how positions are told: GPT-2's table or Llama's rotation", choices=("learned", "rotary")
    )
    mlp: str = option("gelu", "GPT-2's MLP or Llama's gated one", choices=("gelu", "swiglu"))
    bias: bool = option(False, "biases in linear layers and layer norms")
    qkv_bias: bool = option(False, "biases in the query/key/value projection alone (Qwen2)")
    rope_theta: float = option(10000.0, "longest wavelength of position='rotary', over 2 pi", "tokens", minimum=1)
    tie_embeddings: bool = option(True, "one matrix for the token embedding and the output head")


@dataclass
class TaskOptions:
    """What is learned, and how it is scored."""

    task: str = option(
        "addition",
        "the task: its prompts, demonstrations and reward",
        choices=("addition", "countdown", "gsm8k", "reasoning_gym", "jsonl"),
    )
    data_file: str = option("", 'jsonl: a file of JSON lines, {"prompt": ..., "answer": ...}; gsm8k: its train.jsonl')
    test_file: str = option("", "jsonl, gsm8k: the held-out prompts; empty: one in ten of data_file's")
    digits: int = option(4, "addition: digits of each number", minimum=1)
    demonstration_noise: float = option(
        0.0,
        "probability that a demonstration errs: addition, each carry forgotten; countdown, the numbers joined as they come",
        minimum=0,
    )
    countdown_min_numbers: int = option(3, "countdown: fewest numbers to combine", minimum=2)
    countdown_max_numbers: int = option(4, "countdown: most numbers to combine", minimum=2)
    countdown_max_number: int = option(20, "countdown: largest number to combine", minimum=2)
    countdown_max_target: int = option(9999, "countdown: largest number to reach", minimum=1)
    countdown_operators: str = option("+-*/", "countdown: operators that may be used, as one word")
    gym_dataset: str = option("", "reasoning_gym: a generator of that package, or several with commas, asked in turn")
    gym_config: str = option(
        "",
        'reasoning_gym: the generator\'s options, as max_terms=3,min_terms=2 or {"max_terms": 3}; of several, as chain_sum.max_terms=3',
    )
    gym_max_chars: int = option(
        1000, "reasoning_gym: longer questions and answers are passed over", "UTF-8 bytes", minimum=1
    )
    gym_partial_credit: bool = option(
        False, "reasoning_gym: the reward is what the generator's scorer says, 0 to 1; false: 1 where it says 1"
    )
    gym_timeout: float = option(
        5.0, "reasoning_gym: an answer that takes its scorer longer has reward 0", "s", minimum=0.01
    )
    gym_memory_mb: int = option(
        2048, "reasoning_gym: memory that a scorer may take beyond what it starts with", "MiB", minimum=64
    )
    countdown_form: str = option(
        "terse",
        "countdown: 3 5 7=22: and the expression; or, as the field has it, the task in words and the expression in <answer> </answer>",
        choices=("terse", "tags"),
    )
    format_reward: float = option(
        0.0,
        "gsm8k, countdown in tags, reasoning_gym: added for a completion in the wanted form, right or wrong",
        minimum=0,
    )
    chat: bool = option(False, "prompts are messages, written as the template beside the tokenizer has them")
    system_prompt: str = option(
        "", "the system's message before each prompt, with chat; empty: none, or the template's own"
    )
    eval_split: str = option(
        "test",
        "what evaluations ask: the test's prompts; or, to choose settings by, tune's, a tenth of the training prompts that are left out then",
        choices=("test", "tune"),
    )
    tokenizer: str = option(
        "bytes",
        "text to ids: bytes, which needs no files, gpt2, or a folder with a tokenizer.json; that of init_from, when there is one",
    )


@dataclass
class RunOptions:
    """Where a run lives and what it runs on."""

    out_dir: str = option("out/run", "the run's folder: log.jsonl, samples.jsonl, log.txt, settings.json, checkpoints")
    seed: int = option(1, "seeds initial weights, the order of prompts and every sampled token", minimum=0)
    device: str = option("auto", "auto: cuda if there is one, else cpu; or any torch device, such as cuda:1")
    dtype: str = option(
        "float32",
        "arithmetic of the forward pass: bfloat16 is autocast over float32 weights",
        choices=("float32", "bfloat16"),
    )
    resume: str = option(
        "never", "auto: continue from the newest checkpoint in out_dir, if any", choices=("never", "auto")
    )
    save_interval: int = option(
        50, "a checkpoint every so many iterations, and at the end; 0: only at the end", "iterations", minimum=0
    )
    save_total_limit: int = option(
        2, "checkpoints kept, newest first; the one with the best evaluation is kept beside them", minimum=1
    )
    eval_interval: int = option(
        20,
        "evaluate at the start, every so many iterations and at the end; 0: only at the end",
        "iterations",
        minimum=0,
    )
    eval_prompts: int = option(500, "held-out prompts in an evaluation; 0: no evaluation", "prompts", minimum=0)
    enforce_eager: bool = option(False, "sample without CUDA graphs: slower, and their memory is not taken")
    samples_per_iteration: int = option(4, "completions written to samples.jsonl in each iteration", minimum=0)
    report_to: list[str] = option(
        [],
        "also send log.jsonl's numbers to tensorboard or wandb, comma-separated; a service that fails or hangs is left behind",
    )


@dataclass
class TrainOptions:
    """The update, the same for both loops."""

    learning_rate: float = option(1e-3, "peak learning rate", minimum=0)
    lr_schedule: str = option(
        "constant", "after warmup: constant, or down to zero at max_iters", choices=("constant", "linear", "cosine")
    )
    warmup_iters: int = option(0, "learning rate rises linearly over these", "iterations", minimum=0)
    weight_decay: float = option(0.0, "AdamW's decay of matrices and embeddings", minimum=0)
    adam_beta1: float = option(0.9, "AdamW's decay of the first moment", minimum=0)
    adam_beta2: float = option(0.99, "AdamW's decay of the second moment", minimum=0)
    grad_clip: float = option(1.0, "largest norm of the gradient; 0: not clipped", minimum=0)
    max_dropped_steps: int = option(
        5,
        "a step whose loss or gradient is not finite is dropped; after so many in a row the run stops",
        "optimizer steps",
        minimum=1,
    )
    lora_rank: int = option(
        0,
        "train thin matrices of this rank beside the frozen weights of init_from (LoRA): gradients and moments for those alone, and the "
        "reference is the model without them; 0: train all weights",
        minimum=0,
    )
    lora_alpha: float = option(32.0, "lora_rank: their product is multiplied by lora_alpha / lora_rank", minimum=0)
    lora_target_modules: list[str] = option(
        ["qkv", "proj", "up", "down"],
        "lora_rank: which matrices of a block: qkv and proj of attention, up and down of the MLP",
    )


@dataclass
class MemoryOptions:
    """The memory ladder: what each saves and costs is in docs/memory.md. --plan says what an iteration will take."""

    max_tokens_per_micro_batch: int = option(
        0,
        "sequences are sorted by length and cut so that a padded micro-batch holds at most this; costs next to nothing. 0: off",
        "tokens",
        minimum=0,
    )
    max_rollout_batch: int = option(
        0, "completions decoded at a time, which bounds the KV cache; 0: all", "completions", minimum=0
    )
    logits_chunk_mb: float = option(
        0.0,
        "the most that logits may take at a time, in the head and in the sampler; smaller starves the GEMMs; 0: 16 on a CPU, 256 on CUDA",
        "MiB",
        minimum=0,
    )
    checkpoint_blocks: str = option(
        "none",
        "block: keep only block inputs and run each block again in backward, a third more compute; selective: keep attention outputs too",
        choices=("none", "block", "selective"),
    )
    activation_offload: bool = option(
        False, "the kept block inputs wait for backward on the host; wants checkpoint_blocks"
    )
    param_dtype: str = option(
        "float32",
        "weights and gradients; bfloat16 halves them and what optimizer_dtype says is rounded",
        choices=("float32", "bfloat16"),
    )
    optimizer_dtype: str = option(
        "float32",
        "moments; bfloat16 halves them, stochastically rounded. Beside bfloat16 weights: float32 adds masters, bfloat16 rounds weights so too",
        choices=("float32", "bfloat16"),
    )
    optimizer_device: str = option(
        "device",
        "host: moments and masters in pinned host memory, streamed through the device in each step",
        choices=("device", "host"),
    )
    grad_offload: bool = option(
        False, "each gradient moves to the host when backward has made it, and is added up there"
    )
    memory_budget_gb: str = option(
        "",
        "GiB the run may take of the device: the cheapest changes of the ladder that fit are made; auto: what is free on it; empty: off",
    )
    plan: bool = option(
        False,
        "say what an iteration will take and stop: any device, no GPU needed. With memory_budget_gb: what would fit",
    )
    memory_snapshot: bool = option(
        False, "CUDA: write memory_snapshot.pickle for pytorch.org/memory_viz when the run ends or fails"
    )
    cuda_allocator: str = option(
        "expandable_segments:True",
        "PYTORCH_ALLOC_CONF, where the environment has none: segments that can grow do not fragment",
    )


@dataclass
class SFTSettings(RunOptions, TaskOptions, ModelOptions, TrainOptions, MemoryOptions):
    """Supervised fine-tuning on a task's demonstrations: options of train_sft.py."""

    out_dir: str = option("out/sft", "the run's folder: log.jsonl, samples.jsonl, log.txt, settings.json, checkpoints")
    init_from: str = option(
        "", "what to start from: a run's folder, or a model's as Hugging Face lays it out; empty: random weights"
    )
    max_iters: int = option(500, "optimizer steps", "iterations", minimum=1)
    batch_size: int = option(128, "demonstrations an optimizer step", "sequences", minimum=1)

    @property
    def sequences_per_step(self):
        return self.batch_size

    @property
    def sequences_per_rollout(self):
        return self.batch_size  # an evaluation's, the only one

    @property
    def needs_reference(self):
        return False

    def check(self):
        check_common(self)


@dataclass
class GRPOSettings(RunOptions, TaskOptions, ModelOptions, TrainOptions, MemoryOptions):
    """Group relative policy optimisation: options of grpo.py."""

    out_dir: str = option("out/grpo", "the run's folder: log.jsonl, samples.jsonl, log.txt, settings.json, checkpoints")
    init_from: str = option(
        "",
        "what to start from, and the reference: a run's folder, or a model's as Hugging Face lays it out; empty: random weights",
    )
    init_config: str = option("", "SFT config that makes init_from when it is missing")
    max_iters: int = option(100, "rollouts", "iterations", minimum=1)
    batch_size: int = option(64, "prompts an iteration", "prompts", minimum=1)
    group_size: int = option(16, "completions of each prompt (TRL: num_generations)", "completions", minimum=1)
    train_batch_size: int = option(
        0, "completions an optimizer step; several steps a rollout when smaller; 0: the whole rollout", minimum=0
    )
    num_iterations: int = option(1, "times each rollout is learned from", minimum=1)
    max_new_tokens: int = option(32, "longest completion (TRL: max_completion_length)", "tokens", minimum=1)
    stop_string: str = option(
        "",
        "a completion also ends with the token that completes this text, such as </answer>; empty: with the stop token alone",
    )
    max_prompt_length: int = option(
        0,
        "longer prompts lose their beginning, and plans take prompts to be as long; 0: as the task has them",
        "tokens",
        minimum=0,
    )
    temperature: float = option(
        1.0,
        "divides the logits, in the sampler and the trainer alike; there is no top-k, top-p or min-p, because training would not apply it",
        minimum=1e-3,
    )
    beta: float = option(
        0.0,
        "weight of the KL divergence to the reference, the weights of init_from; 0: no reference is loaded",
        minimum=0,
    )
    reference: str = option(
        "device",
        "where the reference's weights live; host: they pass through the device block by block",
        choices=("device", "host"),
    )
    loss_type: str = option(
        "dapo",
        "mean over: all tokens (dapo; cispo, whose ratios are weights instead of clipped), each sequence's tokens (grpo), a constant length "
        "(dr_grpo), each micro-batch's tokens (bnpo, the only one that depends on how a step is cut)",
        choices=("dapo", "grpo", "bnpo", "dr_grpo", "cispo"),
    )
    importance_sampling_level: str = option(
        "token",
        "the ratio to the sampling policy is a token's own, or one of its sequence's mean (GSPO; wants an epsilon of about 4e-4, and its head "
        "is computed twice)",
        choices=("token", "sequence"),
    )
    epsilon: float = option(0.2, "the ratio is clipped at 1 - epsilon and 1 + epsilon_high", minimum=0)
    epsilon_high: float | None = option(
        None, "upper clipping range; none: epsilon. cispo: the largest ratio itself, such as 5", minimum=0
    )
    delta: float | None = option(
        None, "upper bound of the ratio where the advantage is negative; none: no bound", minimum=1
    )
    kl_estimator: str = option(
        "k3", "how beta's KL is estimated, in the loss or in the reward", choices=("k1", "k2", "k3")
    )
    use_bias_correction_kl: bool = option(
        True,
        "the KL in the loss is multiplied by the ratio, so that its gradient is the KL's with k1 and k3; false: as with k2, or DeepSeekMath's k3",
    )
    use_kl_in_reward: bool = option(
        False, "beta times a completion's summed KL is taken from its reward, instead of being added to the loss"
    )
    entropy_coef: float = option(
        0.0,
        "weight of a bonus for the tokens' mean entropy, in nats; the head is computed twice where it is not 0",
        minimum=0,
    )
    importance_sampling_cap: float | None = option(
        None,
        "multiply a token's loss by p_trainer / p_sampler, at most this; takes one more forward pass. For bfloat16, where the two differ",
        minimum=1,
    )
    mask_truncated_completions: bool = option(
        False, "completions that did not stop teach nothing (they count as sequences, not as tokens)"
    )
    soft_punish_cache: int = option(
        0,
        "of a completion's last so many tokens before max_new_tokens each takes 1/so many from its reward; 0: off",
        "tokens",
        minimum=0,
    )
    max_num_gen_batches: int = option(
        1,
        "groups whose rewards are all equal make room for new prompts until the batch is full, in at most so many rollouts an iteration "
        "(DAPO's dynamic sampling); what is missing then is filled with such groups; 1: off",
        "rollouts",
        minimum=1,
    )
    scale_rewards: str = option(
        "group", "what a group's centred rewards are divided by", choices=("group", "batch", "none")
    )
    baseline: str = option(
        "mean",
        "what a group's rewards are compared with: their mean, or that of the others (RLOO)",
        choices=("mean", "leave_one_out"),
    )
    advantage_eps: float = option(1e-4, "added to the standard deviation of rewards", minimum=0)
    reward_funcs: list[str] = option(
        [], "your reward functions, as module:function, comma-separated, added up; empty: the task's own"
    )
    reward_weights: list[float] = option([], "one for each of reward_funcs, comma-separated; empty: 1 each")
    reward_timeout: float = option(
        300.0,
        "what a reward function may take for an iteration's completions; then the run stops, naming it; 0: any time",
        "s",
        minimum=0,
    )

    @property
    def sequences_per_step(self):
        return self.train_batch_size or self.sequences_per_rollout

    @property
    def sequences_per_rollout(self):
        return self.batch_size * self.group_size

    @property
    def needs_reference(self):
        """A second model? With LoRA the reference is the model without its adapters."""
        return bool(self.beta and not self.lora_rank)

    def check(self):
        check_common(self)
        if self.group_size < 2:
            raise SnugError(
                f"group_size={self.group_size}: a group needs at least 2 completions to compare; try --group_size=8"
            )
        rollout = self.batch_size * self.group_size
        if self.train_batch_size and rollout % self.train_batch_size:
            raise SnugError(
                f"train_batch_size={self.train_batch_size} does not divide the rollout of batch_size * group_size = "
                f"{self.batch_size} * {self.group_size} = {rollout} completions"
            )
        if self.delta is not None and self.delta <= 1 + (
            self.epsilon if self.epsilon_high is None else self.epsilon_high
        ):
            raise SnugError(f"delta={self.delta} must be above 1 + epsilon_high, where the ratio is clipped already")
        self.check_variant()
        for spec in self.reward_funcs:
            if not all(spec.partition(":")):
                raise SnugError(f"reward_funcs={spec!r}: write module:function, such as my_rewards:is_short")

    def check_variant(self):
        """What of the GRPO family does not go together."""
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1 or self.delta is not None):
            raise SnugError(
                f"loss_type=cispo with epsilon_high={self.epsilon_high}, delta={self.delta}: epsilon_high is the largest ratio itself, at least "
                "1, and there is no delta; try --epsilon_high=5"
            )
        if self.use_kl_in_reward and not self.beta:
            raise SnugError("use_kl_in_reward=True, but beta=0: give the KL a weight, such as --beta=0.01")
        if self.use_kl_in_reward and self.scale_rewards == "group":
            raise SnugError(
                "use_kl_in_reward=True with scale_rewards=group: where a group's rewards are equal its KLs would be scaled up to full strength, whatever "
                "beta is; take --scale_rewards=batch or none"
            )
        if (
            self.beta
            and not self.use_kl_in_reward
            and (self.kl_estimator == "k1") != self.use_bias_correction_kl
            and self.kl_estimator != "k3"
        ):
            why = {"k1": "a gradient of mean 0, so it restrains nothing", "k2": "another gradient than the KL's"}[
                self.kl_estimator
            ]
            raise SnugError(
                f"kl_estimator={self.kl_estimator} with use_bias_correction_kl={self.use_bias_correction_kl} has {why}; take the other of the two, "
                "or --kl_estimator=k3"
            )
        if self.soft_punish_cache >= self.max_new_tokens:
            raise SnugError(
                f"soft_punish_cache={self.soft_punish_cache} must be below max_new_tokens={self.max_new_tokens}"
            )
        weights, functions = len(self.reward_weights), len(self.reward_funcs)
        if weights and weights != functions:
            raise SnugError(
                f"reward_weights={self.reward_weights} are {weights} for {functions} reward_funcs; one each"
            )


@dataclass
class SampleSettings:
    """Completions of a run's newest checkpoint: options of sample.py."""

    prompt: str = option("", "the text to complete; empty: a held-out prompt of the run's task")
    chat: bool = option(
        False, "the prompt is a message, written as the tokenizer's chat template has it; a run with chat has it anyway"
    )
    system_prompt: str = option("", "with chat: the system's message before it; empty: the run's, if it has one")
    num_samples: int = option(1, "completions", minimum=1)
    max_new_tokens: int = option(32, "longest completion", "tokens", minimum=1)
    temperature: float = option(1.0, "divides the logits; 0: the likeliest token each time", minimum=0)
    top_k: int = option(0, "only so many of the likeliest tokens; 0: all", "tokens", minimum=0)
    top_p: float = option(
        1.0, "only the fewest likeliest tokens that together have this probability; 1: all", minimum=0
    )
    min_p: float = option(
        0.0, "only tokens with at least this share of the likeliest one's probability; 0: all", minimum=0
    )
    stop_string: str = option(
        "",
        "a completion also ends where this text has appeared, and is shown without it; empty: with the stop token alone",
    )
    seed: int = option(1, "the same seed gives the same completions", minimum=0)
    enforce_eager: bool = option(False, "no CUDA graphs")
    device: str = option("auto", "auto: cuda if there is one, else cpu; or any torch device")

    def check(self):
        if (self.chat or self.system_prompt) and not self.prompt:
            raise SnugError(
                "chat and system_prompt are about the --prompt that you give; a run's own prompts are as it asks them"
            )
        for name in ("top_p", "min_p"):
            if not (0 < getattr(self, name) <= 1 or name == "min_p" and self.min_p == 0):
                raise SnugError(f"{name}={getattr(self, name)} must be a probability: above 0, at most 1")


@dataclass
class EvaluateSettings(TaskOptions):
    """A run's newest checkpoint on held-out prompts, pass@k and majority votes: options of evaluate.py."""

    task: str = option(
        "run",
        "what is asked; run: the run's task, with its options where they are not given here; another: with the defaults below",
        choices=("run", *TaskOptions.__dataclass_fields__["task"].metadata["choices"]),
    )
    eval_split: str = option(
        "run",
        "of the test, or of tune; run: as the run's own evaluations, and of another task the test",
        choices=("run", "test", "tune"),
    )
    num_prompts: int = option(500, "held-out prompts", "prompts", minimum=1)
    num_samples: int = option(1, "sampled completions of each prompt, beside the greedy one", "completions", minimum=1)
    temperature: float = option(
        1.0, "of the sampled ones, divides the logits; 0: only the greedy completion", minimum=0
    )
    max_new_tokens: int = option(
        0, "longest completion; 0: the run's own, or the task's longest answer", "tokens", minimum=0
    )
    samples_file: str = option(
        "",
        "where completions and scores go, as JSON lines; empty: evaluation-<task>-<split>.jsonl in the run's folder; none: nowhere",
    )
    seed: int = option(0, "seeds the sampled completions; 0 is what a run's own evaluations use", minimum=0)
    device: str = option("auto", "auto: cuda if there is one, else cpu; or any torch device")

    def check(self):
        if self.num_samples > 1 and self.temperature == 0:
            raise SnugError(
                f"temperature=0 with num_samples={self.num_samples} is the greedy completion so many times; leave num_samples out, or "
                "try --temperature=1"
            )
        if 0 < self.temperature < 1e-3:
            raise SnugError(f"temperature={self.temperature} is below 0.001; 0 takes the likeliest token")


@dataclass
class ExportSettings:
    """A run's newest checkpoint as a folder that Hugging Face's transformers load: options of pretrained.py."""

    to: str = option("", "the new folder")
    dtype: str = option("", "type of the weights; empty: as the run has them", choices=("", "float32", "bfloat16"))

    def check(self):
        if not self.to:
            raise SnugError("name the new folder: --to=export/mine")


@dataclass
class ReplaySettings:
    """A dropped step taken again, to see where it stops being finite: options of replay.py."""

    device: str = option("auto", "auto: cuda if there is one, else cpu; or any torch device")

    def check(self):
        pass


def divides(settings, small, large):
    if getattr(settings, large) % getattr(settings, small):
        raise SnugError(f"{small}={getattr(settings, small)} does not divide {large}={getattr(settings, large)}")


def positive(text):
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def check_common(s):
    """The combinations both loops refuse."""
    divides(s, "n_head", "n_embd")
    if s.n_kv_head and s.n_head % s.n_kv_head:
        raise SnugError(f"n_kv_head={s.n_kv_head} does not divide n_head={s.n_head}")
    if s.position == "rotary" and (s.n_embd // s.n_head) % 2:
        raise SnugError(
            f"n_embd={s.n_embd} / n_head={s.n_head} is an odd head width; position='rotary' needs an even one"
        )
    if s.seed >= 2**31:
        raise SnugError(f"seed={s.seed} must be below 2**31")
    if s.demonstration_noise > 1:
        raise SnugError(f"demonstration_noise={s.demonstration_noise} is a probability: 0 to 1")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(s, name) >= 1:
            raise SnugError(f"{name}={getattr(s, name)} must be below 1")
    if s.lora_rank:
        check_adapters(s)
    if s.activation_offload and s.checkpoint_blocks == "none":
        raise SnugError("activation_offload=True moves what checkpoint_blocks keeps; add --checkpoint_blocks=block")
    if s.param_dtype == "bfloat16" and s.dtype == "float32":
        raise SnugError("param_dtype='bfloat16' computes in bfloat16; add --dtype=bfloat16")
    if s.memory_budget_gb not in ("", "auto") and not positive(s.memory_budget_gb):
        raise SnugError(f"memory_budget_gb={s.memory_budget_gb!r} is not auto or a number of GiB above 0, such as 24")
    for name in ("data_file", "test_file"):
        if getattr(s, name) and s.task not in ("jsonl", "gsm8k"):
            raise SnugError(f"{name}={getattr(s, name)!r} is read by the tasks jsonl and gsm8k, and task is {s.task!r}")
    if s.format_reward and getattr(s, "reward_funcs", []):
        raise SnugError(
            f"format_reward={s.format_reward} is part of the task's own reward, and reward_funcs={s.reward_funcs} replace it; set one of them"
        )
    if s.system_prompt and not s.chat:
        raise SnugError(f"system_prompt={s.system_prompt!r:.60} is a message; add --chat")
    for name in s.report_to:
        if name not in ("tensorboard", "wandb"):
            raise SnugError(f"report_to={name!r} is not one of tensorboard, wandb")
        if importlib.util.find_spec(name) is None:
            raise SnugError(f"report_to={name!r}: the package is not installed; pip install {name}")
    if s.countdown_min_numbers > s.countdown_max_numbers:
        raise SnugError(
            f"countdown_min_numbers={s.countdown_min_numbers} is above countdown_max_numbers={s.countdown_max_numbers}"
        )
    if not s.countdown_operators or set(s.countdown_operators) - set("+-*/"):
        raise SnugError(
            f"countdown_operators={s.countdown_operators!r}: choose from + - * /, such as --countdown_operators=+-"
        )


def check_adapters(s):
    if not s.init_from:
        raise SnugError(
            f"lora_rank={s.lora_rank} trains beside the weights of init_from: name a run or a Hugging Face folder"
        )
    if getattr(s, "reference", "device") == "host":
        raise SnugError(
            "reference='host' with lora_rank: the reference is the model itself without adapters; leave reference out"
        )
    names = s.lora_target_modules
    if not names or set(names) - {"qkv", "proj", "up", "down"} or len(set(names)) < len(names):
        raise SnugError(f"lora_target_modules={','.join(names)!r}: choose from qkv, proj, up, down, each once")
