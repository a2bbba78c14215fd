"""Options of SFT and GRPO."""

import importlib.util
from dataclasses import dataclass

from snug.options import SnugError, option

DTYPES = ("float32", "bfloat16")
PLACES = ("device", "host")


@dataclass
class ModelOptions:
    """The shape of a new model. With init_from, the shape comes from there."""

    vocab_size: int = option(
        0,
        "rows of the embedding and the head; 0: the tokenizer's ids",
    )
    n_layer: int = option(2, "transformer blocks", minimum=1)
    n_head: int = option(4, "attention heads", minimum=1)
    n_kv_head: int = option(0, "key/value heads (grouped-query attention); 0: n_head")
    n_embd: int = option(64, "width of the residual stream", minimum=1)
    n_hidden: int = option(0, "width of the MLP; 0: 4 * n_embd for gelu, 8/3 * n_embd for swiglu")
    block_size: int = option(
        64,
        "longest prompt and completion, in tokens; at most block_size of init_from",
        minimum=2,
    )
    norm: str = option("layernorm", "normalization", choices=("layernorm", "rmsnorm"))
    position: str = option(
        "learned",
        "learned: GPT-2's position table; rotary: Llama's rotation",
        choices=("learned", "rotary"),
    )
    mlp: str = option("gelu", "gelu: GPT-2's MLP; swiglu: Llama's gated MLP", choices=("gelu", "swiglu"))
    bias: bool = option(False, "biases in linear layers and norms")
    qkv_bias: bool = option(False, "biases in the query/key/value projection only (Qwen2)")
    rope_theta: float = option(10000.0, "rotary: base of the frequencies", minimum=1)
    tie_embeddings: bool = option(True, "one matrix for the embedding and the head")

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

    out_dir: str = option("out/run", "the run's folder")
    init_from: str = option(
        "",
        "initial weights and the reference: a run's folder, a Hugging Face model or PEFT's adapters (id on the hub, "
        "or folder), or the config of an SFT run, which grpo.py trains first; empty: random weights",
    )
    seed: int = option(1, "seed of initial weights, prompt order and sampled tokens", maximum=2**31 - 1)
    device: str = option("auto", "a torch device such as cpu or cuda:1; auto: cuda if available, else cpu")
    dtype: str = option(
        "auto",
        "of the forward pass. bfloat16: autocast over float32 weights; auto: bfloat16 on GPUs with tensor cores for "
        "it (A100, RTX 30 and newer) and with param_dtype=bfloat16, else float32",
        choices=("auto", *DTYPES),
    )
    parallel: str = option(
        "none",
        "processes that torchrun starts. ddp: each has the model; fsdp: weights, gradients and moments are sharded",
        choices=("none", "ddp", "fsdp"),
    )
    tf32: bool = option(
        False,
        "float32 products on tensor cores (A100 and newer): faster, relative errors of 1e-3 instead of 1e-7",
    )
    enforce_eager: bool = option(False, "sample without CUDA graphs: slower, but needs less memory")
    resume: str = option(
        "never",
        "auto: continue the newest run in out_dir; a run's folder: with its own options, except those given",
    )


@dataclass
class LogOptions:
    """Evaluations, checkpoints, and what is printed and logged."""

    save_interval: int = option(50, "save every N iterations and at the end; 0: only at the end")
    save_total_limit: int = option(2, "newest checkpoints to keep, beside the best", minimum=1)
    eval_interval: int = option(
        20,
        "evaluate at first, every N iterations and at the end; 0: only at the end",
    )
    eval_prompts: int = option(500, "held-out prompts of an evaluation; 0: none")
    samples_per_iteration: int = option(4, "completions of an iteration in samples.jsonl, in full groups")
    report_to: list[str] = option(
        [],
        "also log there; if it fails, the run continues",
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
        "after the warmup; linear and cosine end at 0",
        choices=("constant", "linear", "cosine"),
    )
    warmup_iters: int = option(0, "iterations of linear warmup")
    weight_decay: float = option(0.0, "AdamW's weight decay of matrices and embeddings")
    adam_beta1: float = option(0.9, "AdamW's decay rate of the first moment", maximum=0.999999)
    adam_beta2: float = option(0.99, "AdamW's decay rate of the second moment", maximum=0.999999)
    grad_clip: float = option(1.0, "largest gradient norm; 0: no clipping")
    lora_rank: int = option(0, "LoRA: train adapters of this rank; 0: all weights")
    lora_alpha: float = option(32.0, "LoRA: scale adapters by lora_alpha / lora_rank", minimum=1e-3)
    lora_target_modules: list[str] = option(
        ["qkv", "proj", "up", "down"],
        "LoRA: the matrices with adapters; PEFT's names of whole matrices work too",
        choices=("qkv", "proj", "up", "down"),
    )
    base_dtype: str = option(
        "",
        "LoRA: the blocks' frozen matrices; nf4: QLoRA's 4 bits; empty: param_dtype; auto: nf4 if nothing else fits "
        "memory_budget_gb",
        choices=("", "nf4", "auto"),
    )


@dataclass
class MemoryOptions:
    """Options that save memory. docs/memory.md has their savings and costs. --plan prints what an iteration needs."""

    max_tokens_per_micro_batch: int = option(0, "tokens of a micro-batch; 0: a step is one micro-batch")
    max_rollout_batch: int = option(0, "completions decoded at a time; 0: all")
    logits_chunk_mb: float = option(0.0, "MiB of a chunk of logits; 0: 16 on a CPU, 256 on CUDA")
    checkpoint_blocks: str = option(
        "none",
        "block: keep each block's input, recompute the rest in backward; selective: keep attention outputs too",
        choices=("none", "block", "selective"),
    )
    activation_offload: bool = option(False, "keep block inputs on the host until backward")
    param_dtype: str = option(
        "float32", "dtype of weights and gradients; bfloat16 needs dtype=bfloat16 or auto", choices=DTYPES
    )
    optimizer_dtype: str = option(
        "float32",
        "of the moments; bfloat16 is rounded stochastically. With param_dtype=bfloat16: float32 adds float32 master "
        "weights, bfloat16 rounds the weights stochastically too",
        choices=DTYPES,
    )
    optimizer_device: str = option(
        "device",
        "host: stream moments and master weights from there in each step",
        choices=PLACES,
    )
    param_offload: bool = option(
        False,
        "fsdp: keep weights, gradients, moments and masters on the host; works with one process, too: torchrun "
        "--nproc_per_node=1",
    )
    grad_offload: bool = option(False, "accumulate gradients on the host")
    memory_budget_gb: str = option(
        "",
        "GiB for the run, or auto: all free memory. snug takes the fastest options that fit and do not change "
        "results (docs/memory.md), whatever is given",
    )
    plan: bool = option(False, "print the memory that an iteration needs, and stop; needs no GPU")
    num_processes: int = option(1, "with --plan: processes of the run", minimum=1)

    def check(self):
        budget = self.memory_budget_gb
        is_number = budget.replace(".", "", 1).isdecimal() and float(budget) > 0
        if budget not in ("", "auto") and not is_number:
            raise SnugError(f"memory_budget_gb={budget!r} is not auto or a number of GiB above 0")
