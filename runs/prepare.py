"""Everything a run needs that can be checked before torch is imported: bad input is answered within a second.

`prepare` finds the checkpoint to resume, init_from and the teacher. It compares their files with their checksums, or
downloads a model. It looks up the task, the tokenizer, the model's shape and the reward functions, and refuses what
does not fit together. It loads no tensors and writes nothing. If grpo.py has to train its warm start first, `prepare`
prepares the warm start too.
"""

import filecmp
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from data import imported, load_reward_function, make_task
from data.episodes import Toolbox, make_toolbox
from data.rewards import Scores, TrainerState, total_rewards
from data.task import Task
from runs.checkpoint import (
    OF_A_RUN,
    WEIGHTS,
    Checkpoint,
    base_of,
    checkpoints,
    class_of_runs,
    find_run,
    settings_of,
    tokenizer_of,
)
from settings import (
    OWN_LOSS,
    PRETRAINED_LENGTH,
    GRPOSettings,
    ModelOptions,
    SFTSettings,
    load_loss,
)
from snug.home import command
from snug.options import (
    SnugError,
    fields,
    find_path,
    in_one_line,
    make_settings,
    read_settings,
)
from snug.pretrained.hub import hub_name, local_folder
from snug.pretrained.shapes import is_pretrained
from snug.shape import GPTConfig
from snug.tokenizer import Tokenizer, get_tokenizer

SHAPE = list(fields(ModelOptions))
CALLED = ["tools", "environment"]
OF_DEMONSTRATIONS = {"demonstration_noise", "tokenizer"}  # a warm start sets its own
ADAPTERS = {"lora_rank", "lora_alpha", "lora_target_modules", "base_dtype"}


@dataclass
class Prepared:
    settings: SFTSettings | GRPOSettings
    task: Task
    tokenizer: Tokenizer
    shape: dict  # GPTConfig's keywords
    # For training and evaluations; empty: SFT of a task that scores nothing.
    reward_funcs: list[Callable]
    reward_weights: list[float]  # one for each of reward_funcs
    # The SFT run that makes init_from, if that is missing or not finished.
    warm_start: "Prepared | None" = None
    resume: Checkpoint | None = None  # the checkpoint in out_dir to continue from
    origin: Checkpoint | None = None  # the initial or reference weights
    teacher: Checkpoint | None = None
    global_step: int = 0  # the run's iteration, for reward functions
    toolbox: Toolbox | None = None  # tools that the model may call
    on_iteration: Callable | None = None
    held_out_loss: Callable | None = None  # SFT: a Training -> entries for the log

    @property
    def is_pretrained(self) -> bool:
        """Do the weights come from a Hugging Face model, perhaps through other runs?"""
        first = self.warm_start or self
        source = first.resume or first.origin
        return bool(source) and source.state.get("pretrained", is_pretrained(source.path))

    def score(self, prompts: list, completions: list, columns: dict[str, list]) -> Scores:
        """Call the reward functions."""
        return total_rewards(
            self.reward_funcs,
            prompts,
            completions,
            columns,
            self.settings.reward_timeout,
            self.reward_weights,
            TrainerState(self.global_step, self.settings.max_iters),
        )

    def encode(self, prompt, cut=True, special=True) -> list[int]:
        """Text or messages -> the last max_prompt_length ids; all ids if max_prompt_length is 0 or `cut` is False.
        Raises SnugError for messages with more ids."""
        ids = self.tokenizer.encode_prompt(prompt, special=special)
        most = self.settings.max_prompt_length
        if 0 < most < len(ids) and not isinstance(prompt, str):
            raise SnugError(
                f"max_prompt_length={most} would cut a chat prompt of {len(ids)} tokens; raise it, or add "
                "--drop_long_prompts"
            )
        return ids[-most:] if cut else ids  # [-0:] is all

    def longest(self):
        """-> how many tokens the longest prompt has, and the longest completion."""
        settings = self.settings
        prompt, answer = self.task.longest(partial(self.encode, cut=False))
        prompt, completion = settings.max_prompt_length or prompt, settings.max_new_tokens or answer + 1
        if not settings.max_new_tokens and 0 < self.task.longest_row < settings.block_size:
            # SFT: each demonstration fits behind its own prompt.
            completion = min(completion, settings.block_size - prompt)
        return prompt, completion


def prepare_from(cls, argv: list[str]) -> Prepared:
    """What `prepare` makes of a command line."""
    return prepare(*read_settings(cls, argv, class_of_runs=class_of_runs)[:2])


def prepare(
    settings: SFTSettings | GRPOSettings,
    chosen: Set[str] = frozenset(),
    functions: Mapping[str, Callable] = {},
) -> Prepared:
    """chosen: names of the options that the user set. functions: reward functions, tools and environments that are not
    imported, by their names in the settings. Raises SnugError.
    """
    resume, before = find_resume(settings)
    if before:
        settings = continued(settings, chosen, before, str(resume.path.parent))
        chosen = chosen | {"block_size"}
    task = make_task(settings, demonstrations=isinstance(settings, SFTSettings))
    settings, config = resolve_names(settings, before)
    if resume:
        refuse_changes(settings, task, resume, before)
    origin, warm_start = find_origin(settings, resume, config)
    was = origin and not resume and origin.state["settings"]["task"]
    if config and not origin:
        was = make_settings(SFTSettings, config, {})[0].task
    if was and "task" not in chosen and was != settings.task == GRPOSettings.task:
        raise SnugError(
            f"init_from={config or settings.init_from} has task {was}, this run has task {settings.task}; "
            f"add --task={was}"
        )
    shape, tokenizer = shape_and_tokenizer(settings, chosen, resume or origin, warm_start)
    toolbox = make_toolbox(settings, tokenizer, functions)
    rewards = rewards_of(settings, task, functions, toolbox)
    if isinstance(settings, GRPOSettings) and settings.loss is OWN_LOSS:
        load_loss(settings.loss_type, settings.out_dir)
    prepared = Prepared(
        settings, task, tokenizer, shape, *rewards, warm_start, resume, origin, toolbox=toolbox
    )
    if spec := settings.on_iteration:
        prepared.on_iteration = imported(
            spec, "on_iteration", "my_hooks:look", functions, settings.out_dir
        )
    resolve_lengths(prepared, chosen)
    if settings.teacher:
        prepared.teacher = find_teacher(prepared)
    refuse_lengths(prepared)
    return prepared


def find_resume(settings):
    """-> (the checkpoint to resume, the settings of its run), or (None, None) for a new run. Raises SnugError."""
    folder = settings.out_dir if settings.resume == "auto" else settings.resume
    if folder == "never" or settings.resume == "auto" and not checkpoints(folder):
        return None, None
    if not checkpoints(folder):
        raise SnugError(
            f"resume={folder} has no checkpoint; name a run's folder, or a model as --init_from"
        )
    resume = find_run(folder, () if settings.plan else OF_A_RUN)
    before = settings_of(resume, goes_on=True)
    if before.loop != settings.loop:
        script = command(before.loop.lower())
        raise SnugError(f"{folder} is a run of `{script}`; continue it with that command")
    return resume, before


def continued(settings, chosen: Set[str], before, folder: str):
    """A resumed run keeps its options, except those that are chosen now or now differ from the defaults."""
    defaults = vars(type(settings)())
    given = {name: value for name, value in vars(settings).items() if value != defaults[name]}
    given |= {name: getattr(settings, name) for name in chosen}
    refuse_others(folder, differences(before, settings, ["task"] if "task" in given else []))
    values = vars(before) | given | dict(out_dir=folder, resume="auto")
    for name in "parallel", "num_processes":  # they belong to this machine
        values[name] = getattr(settings, name)
    return make_settings(before.without_task, "", values)[0]  # refuses outdated values


def resolve_names(settings, before):
    """-> (settings with commits in init_from and teacher, see with_commit; the warm start's config or "").

    Raises SnugError if beta has no reference, or if init_from or the teacher is in out_dir: a new run would move it."""
    config = ""
    if isinstance(settings, GRPOSettings) and settings.init_from.endswith(".py"):
        config = settings.init_from
        settings = replace(
            settings, init_from=make_settings(SFTSettings, config, dict(task=settings.task))[0].out_dir
        )
    else:
        settings = replace(settings, init_from=with_commit(settings, "init_from", before))
    if settings.teacher:
        settings = replace(settings, teacher=with_commit(settings, "teacher", before))
    if settings.beta and not settings.init_from:
        raise SnugError(f"beta={settings.beta} needs a reference: set init_from, or --beta=0")
    out_dir = Path(settings.out_dir).resolve()
    for option, name in dict(init_from=settings.init_from, teacher=settings.teacher).items():
        if name and Path(name).resolve().is_relative_to(out_dir):
            raise SnugError(f"{option}={name} is in out_dir={settings.out_dir}; choose another out_dir")
    return settings, config


def with_commit(settings, option: str, before):
    """-> init_from or teacher; a model on the hub with its newest commit. A resumed run keeps its commit."""
    name, was = getattr(settings, option), getattr(before, option, "")
    if not name or was.startswith(f"{name}@"):
        return was
    return (
        name
        if find_path(name, settings.out_dir).is_dir()
        else hub_name(local_folder(name, weights=False))
    )


def resolve_lengths(prepared: Prepared, chosen: Set[str]):
    """Set the options that follow from the model. Options of the shape get the model's values, for settings.json,
    except a smaller block_size of the user. A new run of a pretrained model gets max_new_tokens=PRETRAINED_LENGTH, at
    most half of block_size, and a learning rate.

    Drops long prompts, if the settings say so. Lowers eval_prompts to the number of held-out prompts.
    """
    shape, task = prepared.shape, prepared.task
    values = {name: shape[name] for name in SHAPE if name in shape}
    if "block_size" in chosen:
        values["block_size"] = prepared.settings.block_size
    settings = prepared.settings = replace(prepared.settings, **values)

    def is_unset(name):
        default = name not in chosen and getattr(settings, name) == getattr(GRPOSettings, name)
        return default and not prepared.resume

    if is_unset("max_new_tokens") and prepared.origin and is_pretrained(prepared.origin.path):
        settings.max_new_tokens = min(PRETRAINED_LENGTH, settings.block_size // 2)
    if is_unset("learning_rate") and prepared.is_pretrained:
        settings.learning_rate = settings.default_learning_rate
    task.drop_long(prepared.tokenizer.encode_prompt, settings)
    settings.eval_prompts = min(settings.eval_prompts, task.size("test") or settings.eval_prompts)


def find_weights(name: str, settings) -> Checkpoint:
    """init_from or the teacher. Raises SnugError."""
    return find_run(find_path(name, settings.out_dir), () if settings.plan else WEIGHTS)


def find_teacher(prepared: Prepared) -> Checkpoint:
    """Find the teacher. Raises SnugError if it is missing, has another tokenizer, or is too small for the sequences."""
    name, tokenizer, length = prepared.settings.teacher, prepared.tokenizer, sum(prepared.longest())
    teacher = find_weights(name, prepared.settings)
    theirs, shape = tokenizer_of(teacher), teacher.state["model_config"]
    same = theirs.backend.get_vocab() == tokenizer.backend.get_vocab()
    if not same or shape["vocab_size"] < tokenizer.n_vocab or shape["block_size"] < length:
        raise SnugError(
            f"teacher={name} has tokenizer {theirs.name}, {shape['vocab_size']} ids, block_size={shape['block_size']}; "
            f"the run needs {tokenizer.name}, {tokenizer.n_vocab} and {length}"
        )
    return teacher


def find_origin(settings, resume: Checkpoint | None, config: str):
    """-> (the initial or reference weights, the warm start that makes them); each may be None. Raises SnugError.

    config: the warm start's config, if init_from named one.
    """
    origin = warm_start = None
    init_from = settings.init_from
    if resume and settings.lora_rank:
        origin = base_of(resume, init_from)
    elif init_from and (settings.beta or not resume):
        if not config or checkpoints(init_from):
            origin = find_weights(init_from, settings)
        if config and origin:
            names = [name for name in settings.of_task() if name not in OF_DEMONSTRATIONS]
            refuse_others(init_from, differences(settings_of(origin), settings, names))
        if config and (not origin or origin.state["iteration"] < settings_of(origin).max_iters):
            origin, warm_start = None, prepare_warm_start(settings, config)
    begin = warm_start.settings if warm_start else origin and settings_of(origin)
    if begin and settings.base_dtype and begin.lora_rank:
        raise SnugError(
            f"base_dtype={settings.base_dtype!r}, but {init_from} has adapters, which would be rounded to 4 bits; name "
            f"its base weights, or a folder that {command('export')} made"
        )
    files = [
        find_path(getattr(run, "data_file", ""), place)
        for run, place in ((begin, init_from), (settings, settings.out_dir))
    ]
    same_file = all(file.is_file() for file in files) and filecmp.cmp(*files, shallow=False)
    if same_file and settings.eval_prompts and not settings.test_file:
        learned_all = begin.test_file or not begin.eval_prompts
        if learned_all or bool(begin.environment) != bool(settings.environment):
            raise SnugError(
                f"{init_from} has learned rows of data_file={settings.data_file} that would be held out now; give "
                "--test_file"
            )
    return origin, warm_start


def differences(before, settings, names) -> list[str]:
    """The options whose values differ, in words."""
    pairs = {name: (getattr(before, name, None), getattr(settings, name)) for name in names}
    return [f"{name} was {was!r}, is {now!r}" for name, (was, now) in pairs.items() if was != now]


def refuse_others(folder: str | Path, differ: list[str]):
    """Raises SnugError if options differ, so that a run or a warm start cannot go on."""
    if differ:
        raise SnugError(
            f"{folder} cannot go on with other options: {'; '.join(differ)}; restore them, or move the folder away"
        )


def refuse_changes(settings, task: Task, resume: Checkpoint, before):
    """Raises SnugError if a resumed run would get another task, other data, other adapters or another model.

    Weights that are gone from their place may be in the new init_from. For adapters base_of compares them."""
    names = {*settings.of_task(), *CALLED} - {"tokenizer"}
    names |= {"assistant_turns"} & vars(settings).keys()
    if settings.lora_rank or before.lora_rank:
        names |= ADAPTERS
    else:
        was, now = (find_path(s.init_from, settings.out_dir).resolve() for s in (before, settings))
        if "@" in before.init_from or was.exists() and was != now:
            names.add("init_from")
    differ = differences(before, settings, sorted(names))
    if task.fingerprint() != resume.state["data"]:
        differ.append("data_file, test_file, eval_prompts=0 or the task's package has changed")
    refuse_others(resume.path, differ)


def prepare_warm_start(settings: GRPOSettings, config: str) -> Prepared:
    """The SFT run of this config on this run's task, seed, device and dtype, resumed if it stopped. Raises
    SnugError."""
    names = {"seed", "device", "parallel", "dtype", "kernels", "enforce_eager", "plan"}
    names |= {*settings.of_task()} - OF_DEMONSTRATIONS
    if settings.memory_budget_gb:
        names.add("memory_budget_gb")
    values = {name: getattr(settings, name) for name in names} | dict(resume="auto")
    return prepare(*make_settings(SFTSettings, config, values))


def shape_and_tokenizer(
    settings, chosen: Set[str], source: Checkpoint | None, warm_start: Prepared | None
):
    """-> (GPTConfig's keywords, the tokenizer): the source's, the warm start's, or as the options say. Raises
    SnugError."""
    if source:
        place, shape, tokenizer = source.path, source.state["model_config"], tokenizer_of(source)
    elif warm_start:
        place, shape, tokenizer = settings.init_from, warm_start.shape, warm_start.tokenizer
    else:
        place, shape = "", {name: getattr(settings, name) for name in SHAPE}
        tokenizer = get_tokenizer(settings.tokenizer)
    if place:
        refuse_contradictions(settings, chosen, vars(ModelOptions()) | shape, tokenizer.name, place)
    tokenizer.set_template_kwargs(settings.chat_template_kwargs)
    n_vocab = tokenizer.n_vocab
    shape = shape | dict(vocab_size=shape["vocab_size"] or n_vocab, n_vocab=n_vocab)
    with in_one_line(f"{place or 'a model'} with the tokenizer {tokenizer.name}"):
        GPTConfig(**shape)
    return shape, tokenizer


def refuse_contradictions(settings, chosen: Set[str], expected: dict, tokenizer_name: str, source):
    """Shape and tokenizer come from `source`; the options that the user chose must agree with it. Raises SnugError."""
    for name in sorted(chosen & {*SHAPE}):
        value = getattr(settings, name)
        smaller = name == "block_size" and value < expected[name]  # refuse_lengths checks it
        default = value == 0 and type(value) is int  # such as n_hidden: as many as the shape has
        if value != expected[name] and not smaller and not default:
            raise SnugError(f"{name}={value!r}, but {source} has {expected[name]!r}; leave {name} out")
    named = settings.tokenizer
    if "tokenizer" in chosen and get_tokenizer(named).name != tokenizer_name:
        raise SnugError(
            f"tokenizer={named!r}, but {source} has {tokenizer_name!r}; leave tokenizer out"
        )


def rewards_of(settings, task: Task, functions, toolbox: Toolbox | None):
    """-> the functions that score completions, and their weights: the user's and the environment's, or else the task's.
    Raises SnugError if there are none for GRPO without a teacher."""
    own = toolbox.reward_functions() if toolbox else []
    if settings.reward_funcs or own:
        [row] = task.prompts("train", [0])
        loaded = [
            load_reward_function(spec, functions, row, settings.out_dir)
            for spec in settings.reward_funcs
        ]
        weights = settings.reward_weights or [1.0] * len(loaded)
        return loaded + own, weights + [1.0] * len(own)
    if task.scored:
        return [task.rewards], [1.0]
    if isinstance(settings, GRPOSettings) and not settings.teacher:
        raise SnugError(
            f"{getattr(settings, 'data_file', settings.task)} has no column answer to score by; name --answer_column, "
            "or --reward_funcs"
        )
    return [], []


def refuse_lengths(prepared: Prepared):
    """Raises SnugError if prompt and completion do not fit into block_size."""
    settings, (prompt, completion) = prepared.settings, prepared.longest()
    if prompt + completion > settings.block_size:
        what = "max_new_tokens" if settings.max_new_tokens else "demonstrations"
        advice = ""
        if prepared.task.longest_at and not settings.max_prompt_length:
            advice = f"; shorten {prepared.task.longest_at}, or add --drop_long_prompts"
        raise SnugError(
            f"prompts of up to {prompt} tokens and {what} of up to {completion} are more than "
            f"block_size={settings.block_size}{advice}"
        )
