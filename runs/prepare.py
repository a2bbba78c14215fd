"""What has to hold before anything is made, and before torch is imported: bad input is answered within a second.

`prepare` reads no tensors and writes nothing; it looks up the task, the tokenizer, the shape of the model, the reward
functions and the warm start that grpo.py has to make first, and refuses what does not fit together.
"""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from data import load_reward_function, make_task
from data.task import Task
from options import SnugError, read_settings
from pretrained.shapes import is_pretrained, read_shape
from pretrained.tensors import look_at_weights
from runs.checkpoint import checkpoints, is_checkpoint, newest, read_state, resume_path, tokenizer_of
from settings import GRPOSettings, ModelOptions, SFTSettings, TaskOptions
from tokenizer import Tokenizer, get_tokenizer

NO_PROBLEM = ("tokenizer", "gym_timeout", "gym_memory_mb")  # of TaskOptions, those that do not say what is asked


@dataclass
class Prepared:
    settings: SFTSettings | GRPOSettings
    task: Task
    tokenizer: Tokenizer
    shape: dict  # GPTConfig's keywords
    reward_funcs: list  # of functions; empty in SFT
    warm_start: "Prepared | None" = None  # the SFT run that makes init_from, where it is missing
    reward_weights: list = field(default_factory=list)  # of reward_funcs; empty: 1 each

    def longest(self, settings):
        """-> tokens of the longest prompt and of the longest completion."""
        prompt, answer = self.task.longest(self.tokenizer.encode_prompt)
        prompt = getattr(settings, "max_prompt_length", 0) or prompt
        return prompt, settings.max_new_tokens if isinstance(settings, GRPOSettings) else answer + 1


def prepare(settings, given=frozenset()):
    """settings, and the names of those the user gave -> Prepared. Raises SnugError."""
    if settings.cuda_allocator and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the same by its older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", settings.cuda_allocator)  # read when torch is imported
    task = make_task(settings)
    grpo = isinstance(settings, GRPOSettings)
    if grpo and settings.beta and not settings.init_from:
        raise SnugError(f"beta={settings.beta} needs a reference: set init_from, or --beta=0")
    if settings.init_from and Path(settings.init_from).resolve() == Path(settings.out_dir).resolve():
        raise SnugError(f"init_from and out_dir are both {settings.out_dir}; choose another out_dir")
    if settings.init_from and Path(settings.out_dir).resolve() in Path(settings.init_from).resolve().parents:
        raise SnugError(
            f"init_from={settings.init_from} is in out_dir={settings.out_dir}, which a new run moves away; choose another out_dir"
        )
    warm_start = prepare_warm_start(settings) if grpo and not is_finished(settings) else None
    if warm_start:
        shape, tokenizer = warm_start.shape, warm_start.tokenizer
        refuse_contradictions(settings, given, shape, tokenizer.name, settings.init_config)
    else:
        shape, tokenizer = starting_point(settings, given, task)
    shape = shape | {"vocab_size": shape.get("vocab_size") or tokenizer.n_vocab, "n_vocab": tokenizer.n_vocab}
    if shape["vocab_size"] < tokenizer.n_vocab:
        raise SnugError(
            f"vocab_size={shape['vocab_size']}, but the tokenizer {tokenizer.name} has {tokenizer.n_vocab} ids; leave vocab_size out"
        )
    if settings.lora_rank > shape["n_embd"]:
        raise SnugError(
            f"lora_rank={settings.lora_rank} is above n_embd={shape['n_embd']}: it is to be far below, such as --lora_rank=16"
        )
    prepared = Prepared(settings, task, tokenizer, shape, [], warm_start)
    check_lengths(prepared, shape["block_size"])
    if grpo:
        prepared.reward_funcs, prepared.reward_weights = rewards_of(settings, task)
    return prepared


def rewards_of(settings, task):
    """-> the functions that score completions, and their weights (empty: 1 each): the user's, or else the task's own."""
    if settings.reward_funcs:
        return [load_reward_function(spec) for spec in settings.reward_funcs], settings.reward_weights
    functions, weights = map(list, zip(*task.reward_functions(), strict=True))
    return functions, [] if set(weights) == {1.0} else weights


def is_finished(settings):
    """Is there no warm start to be made: none is wanted, or the run in init_from has done all its iterations?"""
    if not settings.init_from or not settings.init_config or is_pretrained(settings.init_from):
        return True
    if not Path(settings.init_from).is_dir() or not (
        is_checkpoint(settings.init_from) or checkpoints(settings.init_from)
    ):
        return False
    state = read_state(newest(settings.init_from))
    return is_checkpoint(settings.init_from) or state["iteration"] >= state["settings"].get("max_iters", 0)


def prepare_warm_start(settings):
    """The SFT run that init_config describes, on this run's task, with its seed and device; taken up where it was left."""
    own = {
        "out_dir": settings.init_from,
        "resume": "auto",
        "seed": settings.seed,
        "device": settings.device,
        "eval_split": settings.eval_split,
    }
    own |= {"memory_budget_gb": settings.memory_budget_gb} if settings.memory_budget_gb else {}
    words = [f"--{name}={value}" for name, value in own.items()]
    warm_start = prepare(*read_settings(SFTSettings, [settings.init_config, *words])[:2])
    for f in fields(TaskOptions):
        ours, theirs = getattr(settings, f.name), getattr(warm_start.settings, f.name)
        if ours != theirs and f.name not in ("demonstration_noise", "format_reward", *NO_PROBLEM):
            raise SnugError(
                f"{f.name}={ours!r}, but the warm start {settings.init_config} has {theirs!r}; make them the same"
            )
    return warm_start


def starting_point(settings, given, task):
    """-> (the model's shape, the tokenizer): the checkpoint's or the Hugging Face folder's, where there is one to resume or to start from."""
    if not resume_path(settings) and is_pretrained(settings.init_from):
        return pretrained_point(settings, given)
    path = resume_path(settings) or (newest(settings.init_from) if settings.init_from else None)
    if path is None:
        return {f.name: getattr(settings, f.name) for f in fields(ModelOptions)}, get_tokenizer(settings.tokenizer)
    state = read_state(path)
    refuse_contradictions(settings, given, state["model_config"], state["tokenizer"], path)
    tokenizer = tokenizer_of(path, state)
    if (
        path != resume_path(settings)
        and settings.eval_split == "tune"
        and state["settings"].get("task") == settings.task
    ):
        if state["settings"].get("eval_split") != "tune":
            raise SnugError(
                f"eval_split=tune, but init_from={settings.init_from} was trained on its prompts; make it with --eval_split=tune too"
            )
    if path == resume_path(settings):
        refuse_other_adapters(settings, state["settings"], path)
        refuse_another_task(settings, state["settings"], path)
        if task.fingerprint() != state["data"]:
            raise SnugError(
                f"{path} is of other data: data_file, test_file or the generators' package has changed; put it back, or start anew in another out_dir"
            )
    return state["model_config"], tokenizer


def pretrained_point(settings, given):
    """The same of the Hugging Face folder init_from, whose tokenizer is its own, unless it has none and the user names one."""
    folder = Path(settings.init_from)
    if not settings.plan:  # which config.json and a tokenizer are enough for
        look_at_weights(folder)
    own = (folder / "tokenizer.json").is_file() or "tokenizer" not in given
    shape, tokenizer = read_shape(folder), get_tokenizer(str(folder) if own else settings.tokenizer)
    refuse_contradictions(settings, given, shape, tokenizer.name, folder)
    return shape, tokenizer


def refuse_other_adapters(settings, before, source):
    """A run goes on with the adapters that it began with: another rank or scale is another model."""
    for name in ("lora_rank", "lora_alpha", "lora_target_modules"):
        was, now = before.get(name, getattr(type(settings)(), name)), getattr(settings, name)
        if was != now and (settings.lora_rank or before.get("lora_rank")):
            raise SnugError(f"{source}: {name} was {was!r}, is {now!r}; put it back, or start anew in another out_dir")


def refuse_another_task(settings, before, source):
    """A run goes on with the task that it began with."""
    names = [f.name for f in fields(TaskOptions) if f.name not in NO_PROBLEM]
    changed = [
        f"{name} was {before[name]!r}, is {getattr(settings, name)!r}"
        for name in names
        if before.get(name, getattr(settings, name)) != getattr(settings, name)
    ]
    if changed:
        raise SnugError(
            f"{source} is of another task: {'; '.join(changed)}; put it back, or start anew in another out_dir"
        )


def refuse_contradictions(settings, given, shape, tokenizer_name, source):
    """The shape and the tokenizer come from `source`; what the user gave must not say otherwise."""
    shape = {f.name: f.default for f in fields(ModelOptions)} | shape
    for name in sorted(given & ({f.name for f in fields(ModelOptions)} | {"tokenizer"})):
        theirs = tokenizer_name if name == "tokenizer" else shape[name]
        if (
            name == "tokenizer" and get_tokenizer(settings.tokenizer).name == theirs
        ):  # a folder's path, and the name of what is in it
            continue
        derived = name in ("vocab_size", "n_kv_head", "n_hidden") and not getattr(
            settings, name
        )  # 0: whatever follows from the others
        if theirs != getattr(settings, name) and not derived:
            raise SnugError(f"{name}={getattr(settings, name)!r}, but {source} has {theirs!r}; leave {name} out")


def check_lengths(prepared, block_size):
    """Prompt and completion have to fit into block_size."""
    settings, (prompt, completion) = prepared.settings, prepared.longest(prepared.settings)
    grpo = isinstance(settings, GRPOSettings)
    what = f"max_new_tokens={settings.max_new_tokens}" if grpo else f"demonstrations of up to {completion} tokens"
    if prompt + completion > block_size:
        raise SnugError(
            f"prompts of {settings.task} have up to {prompt} tokens; with {what} that is {prompt + completion}, more than "
            f"block_size={block_size}"
        )
