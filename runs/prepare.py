"""Everything a run needs that can be checked before torch is imported: bad input is answered within a second.

`prepare` looks up the task, the tokenizer, the model's shape and the reward functions, opens the checkpoint to resume
and init_from, and refuses what does not fit together. Only then it reads every byte of these checkpoints. It loads no
tensors and writes nothing. If grpo.py has to make its warm start first, that is prepared, too.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from data import load_reward_function, make_task
from data.rewards import Scoring
from data.task import Task
from options import SnugError, read_settings
from pretrained.shapes import is_pretrained, read_shape
from runs import checkpoint
from runs.checkpoint import Checkpoint, checkpoints, is_checkpoint, open_checkpoint, settings_of
from settings import GRPOSettings, ModelOptions, RewardOptions, SFTSettings, TaskOptions
from tokenizer import Tokenizer, get_tokenizer

SHAPE = [f.name for f in fields(ModelOptions)]
PROBLEM = [
    f.name for f in fields(TaskOptions) if f.name not in ("tokenizer", "gym_timeout", "gym_memory_mb")
]
ADAPTERS = ["lora_rank", "lora_alpha", "lora_target_modules"]


@dataclass
class Prepared:
    settings: SFTSettings | GRPOSettings
    task: Task
    tokenizer: Tokenizer
    shape: dict  # GPTConfig's keywords
    reward_funcs: list[
        Callable
    ]  # of the training, and of evaluations; empty: SFT of a task that scores nothing
    warm_start: "Prepared | None" = (
        None  # the SFT run that makes init_from, if that is missing or not finished
    )
    reward_weights: list[float] = field(default_factory=list)  # of reward_funcs; empty: 1 each
    resume: Checkpoint | None = None  # the checkpoint in out_dir to continue from
    origin: Checkpoint | Path | None = (
        None  # the initial or reference weights: a checkpoint, or a Hugging Face folder
    )
    found: list[Path] = field(default_factory=list)  # the checkpoints that were in out_dir

    def refuse_if_changed(self) -> None:
        """Call it when the folder is locked. Raises SnugError if another run has written there in the meantime."""
        if self.settings.resume == "auto" and checkpoints(self.settings.out_dir) != self.found:
            raise SnugError(
                f"{self.settings.out_dir}: another run has just written there; start this command again"
            )

    @property
    def scoring(self) -> Scoring:
        """How evaluations score completions."""
        rewards = self.settings if isinstance(self.settings, RewardOptions) else RewardOptions()
        return Scoring(
            self.task,
            self.reward_funcs,
            self.reward_weights,
            rewards,
            self.settings.sequences_per_rollout,
        )

    def longest(self, settings: SFTSettings | GRPOSettings) -> tuple[int, int]:
        """-> tokens of the longest prompt and of the longest completion."""
        prompt, answer = self.task.longest(self.tokenizer.encode_prompt)
        if isinstance(settings, GRPOSettings):
            return settings.max_prompt_length or prompt, settings.max_new_tokens
        return prompt, answer + 1


def prepare(
    settings: SFTSettings | GRPOSettings, given: Set[str] = frozenset(), whole: bool = True
) -> Prepared:
    """given: names of the options that the user gave. whole: read every byte of the checkpoints. Raises SnugError."""
    grpo = isinstance(settings, GRPOSettings)
    task = make_task(settings, demonstrations=not grpo)
    held_out = task.size(settings.eval_split)
    if held_out and held_out < settings.eval_prompts:  # none twice
        settings = replace(settings, eval_prompts=held_out)
    if settings.beta and not settings.init_from:
        raise SnugError(f"beta={settings.beta} needs a reference: set init_from, or --beta=0")
    if settings.init_from:
        source, out_dir = Path(settings.init_from).resolve(), Path(settings.out_dir).resolve()
        if out_dir == source:
            raise SnugError(
                f"init_from and out_dir are both {settings.out_dir}; choose another out_dir"
            )
        if out_dir in source.parents:
            advice = "which a new run moves away; choose another out_dir"
            raise SnugError(
                f"init_from={settings.init_from} is in out_dir={settings.out_dir}, {advice}"
            )
    found = checkpoints(settings.out_dir) if settings.resume == "auto" else []
    resume, origin, warm_start = find_weights(settings, task, found, whole=False)
    shape, tokenizer = shape_and_tokenizer(settings, given, resume or origin, warm_start)
    shape = shape | {
        "vocab_size": shape.get("vocab_size") or tokenizer.n_vocab,
        "n_vocab": tokenizer.n_vocab,
    }
    if shape["vocab_size"] < tokenizer.n_vocab:
        seen = f"vocab_size={shape['vocab_size']}, but the tokenizer {tokenizer.name} has {tokenizer.n_vocab} ids"
        raise SnugError(f"{seen}; leave vocab_size out")
    if settings.lora_rank > shape["n_embd"]:
        raise SnugError(
            f"lora_rank={settings.lora_rank} is above n_embd={shape['n_embd']}; try --lora_rank=16"
        )
    functions, weights = rewards_of(settings, task)
    if grpo and not functions:
        missing = f"data_file={settings.data_file} has no column answer to score completions by"
        raise SnugError(f"{missing}; add it, or reward_funcs")
    block_size = settings.block_size if "block_size" in given else shape["block_size"]
    its = {name: shape[name] for name in SHAPE if name in shape} | dict(block_size=block_size)
    settings = replace(settings, **its)  # for settings.json; a smaller block_size is the user's
    prepared = Prepared(settings, task, tokenizer, shape, functions, warm_start, weights, found=found)
    check_lengths(prepared, block_size)
    prepared.resume, prepared.origin, prepared.warm_start = find_weights(
        settings, task, found, whole and not settings.plan
    )
    return prepared


def find_weights(settings, task: Task, found: list[Path], whole: bool):
    """-> (the checkpoint to resume, the weights in init_from, the warm start that makes them), or None. Raises
    SnugError.

    whole: read and compare every byte; otherwise only sizes and small files.
    """
    resume = open_checkpoint(settings.out_dir, whole) if found else None
    if resume:
        refuse_changes(settings, task, resume)
    return resume, *find_origin(settings, resume, whole)


def refuse_changes(settings: SFTSettings | GRPOSettings, task: Task, resume: Checkpoint) -> None:
    """A resumed run keeps its task, its data and its adapters. Raises SnugError."""
    before = settings_of(resume.state)
    names = PROBLEM + (ADAPTERS if settings.lora_rank or before.lora_rank else [])
    values = {name: (getattr(before, name), getattr(settings, name)) for name in names}
    changed = [f"{name} was {was!r}, is {now!r}" for name, (was, now) in values.items() if was != now]
    what = f"is of another task: {'; '.join(changed)}" if changed else ""
    if not changed and task.fingerprint() != resume.state["data"]:
        what = "is of other data: data_file, test_file or the generators' package has changed"
    if what:
        raise SnugError(f"{resume.path} {what}; put it back, or start anew in another out_dir")


def find_origin(
    settings, resume: Checkpoint | None, whole: bool
) -> tuple[Checkpoint | Path | None, Prepared | None]:
    """-> (the weights in init_from, opened; the warm start that makes them), either may be None. Raises SnugError."""
    init_from = settings.init_from
    if resume and settings.lora_rank:
        return checkpoint.base_of(resume, init_from, whole), None
    if not init_from or resume and not settings.beta:
        return None, None
    if is_pretrained(init_from):  # a plan needs no weights
        return Path(init_from) if settings.plan else checkpoint.open_weights(init_from), None
    makes_it = (
        isinstance(settings, GRPOSettings) and settings.init_config and not is_checkpoint(init_from)
    )
    if makes_it and not checkpoints(init_from):
        return None, prepare_warm_start(settings, whole)
    origin = open_checkpoint(init_from, whole)
    its = settings_of(origin.state)
    if makes_it and origin.state["iteration"] < its.max_iters:
        return None, prepare_warm_start(settings, whole)
    if not resume and settings.eval_split == "tune" != its.eval_split and its.task == settings.task:
        advice = "was trained on its prompts; make it with --eval_split=tune too"
        raise SnugError(f"eval_split=tune, but init_from={init_from} {advice}")
    return origin, None


def prepare_warm_start(settings: GRPOSettings, whole: bool) -> Prepared:
    """The SFT run of init_config, with this run's seed and device; resumed if it was stopped. Raises SnugError."""
    names = ["seed", "device", "parallel", "eval_split"] + (
        ["memory_budget_gb"] if settings.memory_budget_gb else []
    )
    own = {name: getattr(settings, name) for name in names} | {
        "out_dir": settings.init_from,
        "resume": "auto",
    }
    words = [f"--{name}={value}" for name, value in own.items()]
    warm_start = prepare(*read_settings(SFTSettings, [settings.init_config, *words])[:2], whole)
    for name in PROBLEM:
        ours, theirs = getattr(settings, name), getattr(warm_start.settings, name)
        if ours != theirs and name not in ("demonstration_noise", "format_reward"):
            seen = f"{name}={ours!r}, but the warm start {settings.init_config} has {theirs!r}"
            raise SnugError(f"{seen}; make them the same")
    return warm_start


def shape_and_tokenizer(
    settings, given: Set[str], source: Checkpoint | Path | None, warm_start: Prepared | None
):
    """-> (GPTConfig's keywords, the Tokenizer): the source's, the warm start's, or as the options say."""
    if isinstance(source, Checkpoint):
        shape, tokenizer, named = (
            source.state["model_config"],
            checkpoint.tokenizer_of(*source),
            source.path,
        )
    elif source:  # its own tokenizer, unless it has none and the user names one
        own = (source / "tokenizer.json").is_file() or "tokenizer" not in given
        shape, tokenizer, named = (
            read_shape(source),
            get_tokenizer(str(source) if own else settings.tokenizer),
            source,
        )
    elif warm_start:
        shape, tokenizer, named = warm_start.shape, warm_start.tokenizer, settings.init_config
    else:
        return {name: getattr(settings, name) for name in SHAPE}, get_tokenizer(settings.tokenizer)
    refuse_contradictions(settings, given, shape, tokenizer.name, named)
    return shape, tokenizer


def refuse_contradictions(
    settings, given: Set[str], shape: dict, tokenizer_name: str, source: str | Path
) -> None:
    """Shape and tokenizer come from `source`; the options that the user gave must agree. Raises SnugError."""
    theirs = {f.name: f.default for f in fields(ModelOptions)} | shape | {"tokenizer": tokenizer_name}
    for name in sorted(given & {*SHAPE, "tokenizer"}):
        ours = getattr(settings, name)
        if (
            ours == theirs[name] or name in ("vocab_size", "n_kv_head", "n_hidden") and not ours
        ):  # 0: derived
            continue
        if name == "block_size" and ours < theirs[name]:  # check_lengths holds to it
            continue
        if (
            name == "tokenizer" and get_tokenizer(ours).name == theirs[name]
        ):  # a folder, and the name of what is in it
            continue
        raise SnugError(f"{name}={ours!r}, but {source} has {theirs[name]!r}; leave {name} out")


def rewards_of(settings: RewardOptions | SFTSettings, task: Task) -> tuple[list[Callable], list[float]]:
    """-> the functions that score completions, the user's or the task's, if any, and their weights (empty: 1 each)."""
    if settings.reward_funcs:
        return [load_reward_function(spec) for spec in settings.reward_funcs], settings.reward_weights
    if not task.scored:
        return [], []
    functions, weights = map(list, zip(*task.reward_functions(), strict=True))
    return functions, [] if set(weights) == {1.0} else weights


def check_lengths(prepared: Prepared, block_size: int) -> None:
    """Prompt and completion must fit into block_size. Raises SnugError."""
    settings = prepared.settings
    prompt, completion = prepared.longest(settings)
    if prompt + completion > block_size:
        grpo = isinstance(settings, GRPOSettings)
        what = (
            f"max_new_tokens={settings.max_new_tokens}"
            if grpo
            else f"demonstrations of up to {completion} tokens"
        )
        seen = f"prompts of {settings.task} have up to {prompt} tokens; with {what} that is {prompt + completion}"
        raise SnugError(f"{seen}, more than block_size={block_size}")
