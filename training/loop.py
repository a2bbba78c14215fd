"""The run around both loops' iterations: its folder, meter, model and optimizer; resuming, planning, stopping.

Left out: what an iteration is. grpo.py and train_sft.py say that, in `iterate`.
"""

import random
import signal
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread

import numpy as np
import torch

from data.calls import blaming
from model import make_model
from runs.checkpoint import base_record, checkpoints
from runs.loading import (
    configure,
    generator_state,
    load_into,
    load_optimizer,
    load_reference,
    load_teacher,
    load_weights,
    restore_generators,
)
from runs.lock import locked, move_aside
from runs.log import NoLog, RunLog, finite
from runs.notes import notes
from runs.saver import Saver
from snug.device.pick import pick_device, with_dtype
from snug.device.processes import ONE_PROCESS
from snug.home import command
from snug.kernels.nf4 import weights_of
from snug.lora import trained
from snug.memory import Limits, MemoryMeter
from snug.memory.fit import apply, show
from snug.memory.plan import kind_planned
from snug.options.progress import phase, say
from snug.trust import choose_kernels
from training import parallel
from training.dry_run import DryRun
from training.optimizer import make_optimizer
from training.probe import probe
from training.state import Training


def run(prepared, iterate) -> bool:
    """Train as the settings say, with a meter and a log. With --plan only print the plan.

    -> False if the run was stopped. Then its last iteration was finished and saved, and --resume=auto goes on.
    """
    rehearse = DryRun(prepared, iterate)
    settings, kind = prepared.settings, kind_planned(prepared.settings.device)
    if kind == "mps":
        replace(settings, device=kind).check()  # "auto" may have chosen it
    if settings.plan:
        settings = with_dtype(settings, kind)
        choose_kernels(settings, prepared.shape, kind, say)  # the plan too uses only these
        say(show(rehearse, settings))
        return True
    processes = parallel.start(settings)
    device = pick_device(processes.device(settings.device))
    with processes:
        settings = with_dtype(settings, device.type)
        warning = choose_kernels(settings, prepared.shape, device.type, say, processes)
        prepared.settings = processes.first(apply(rehearse, settings, device, say))
        with ExitStack() as stack:
            # If rank 0 does not get the lock, all processes end.
            lock = locked(settings.out_dir)
            processes.from_all_ranks(lambda: None if processes.rank else stack.enter_context(lock))
            return train(prepared, iterate, device, processes, warning)


def train(prepared, iterate, device, processes, warning):
    """-> False if the run was stopped. warning: from `choose_kernels`."""
    settings, resume = prepared.settings, prepared.resume
    # The same in every process: a checkpoint keeps rank 0's generators. A reward function may draw from any generator.
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(settings.seed)
    if source := resume or prepared.origin:
        say(f"loading {source.path}")
    with MemoryMeter(device) as meter:
        reference, teacher = (
            processes.shard(load(prepared, processes.loads_on(device)), device)
            for load in (load_reference, load_teacher)
        )
        model, optimizer, start = begin(prepared, device, processes)  # last: it restores the generators
        moved, folder = None, Path(settings.out_dir)
        quiet = settings.probe or processes.rank
        is_used = (folder / "log.jsonl").exists() or checkpoints(folder)
        if resume is None and not quiet and is_used:
            moved = move_aside(folder)
        make_log = NoLog if quiet else RunLog
        facts = dict(parameters=size_of(model), device=device.type, kernels_warning=warning)
        with make_log(settings, start, **facts) as log:
            if warning:
                log.to_file(warning)
            constants = {"data": prepared.task.fingerprint(), "pretrained": prepared.is_pretrained}
            if settings.lora_rank:
                constants["base"] = base_record(prepared.origin)
            saver = Saver(
                settings,
                prepared.tokenizer,
                model,
                optimizer,
                log.say,
                start,
                processes,
                **constants,
            )
            limits = Limits(prepared, log.say, resume and resume.state["after_oom"], processes)
            training = Training(
                prepared, model, reference, optimizer, meter, log, saver, limits, teacher
            )
            if resume:
                training.health = resume.state["health"]
                training.extra_prompts = resume.state["extra_prompts"]
            introduce(training, start, moved)
            log.to_file(meter.line("after init"))
            if settings.probe:
                return probe(iterate, training)
            if start >= settings.max_iters:
                log.say(f"nothing to do: all {start} iterations are done; a larger --max_iters goes on")
            finished = iterations(iterate, training)
            if finished:
                log.say(f"{settings.loop} is done; next: {command('report')} {settings.out_dir}")
            return finished


@phase("making the model")
def begin(prepared, device, processes=ONE_PROCESS):
    """-> (model, optimizer, first iteration): from the checkpoint to resume, from init_from, or from random weights."""
    settings, resume = prepared.settings, prepared.resume
    weights = resume if resume and not settings.lora_rank else prepared.origin
    model = make_model(
        prepared.shape,
        processes.loads_on(device),
        settings.param_dtype,
        initialise=weights is None,
        base_dtype=settings.base_dtype,
    )
    if weights is not None:
        load_weights(weights, model)
    configure(model, settings)
    if resume and settings.lora_rank:
        load_into(resume.path / "model.safetensors", trained(model))
    processes.shard(model, device)
    optimizer = make_optimizer(model, settings)  # after the weights: it may keep masters of them
    if resume is None:
        return model, optimizer, 0
    load_optimizer(resume, model, optimizer)
    restore_generators(resume.state["generators"])
    return model, optimizer, resume.state["iteration"]


def size_of(model) -> int:
    return sum(weight.numel() for weight in weights_of(model).values())


def introduce(training, start, moved):
    """The first lines of a run's log. moved: where an earlier run in the folder is now, or None."""
    prepared, settings, model = training.prepared, training.settings, training.model
    task, say, size = prepared.task, training.log.say, size_of(model)
    trained_size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trains = f" ({trained_size:,} trainable)" if trained_size < size else ""
    say(
        f"{settings.loop} on {settings.task}: {size:,} parameters{trains} "
        f"on {model.device} in {settings.dtype}, {settings.out_dir}"
    )
    if count := task.size("train"):
        say(
            f"{getattr(settings, 'data_file', settings.task)}: {count:,} prompts for training, "
            f"{task.size('test'):,} held out{task.dropped}"
        )
    if cut := sum(length > settings.max_prompt_length > 0 for length in task.prompt_lengths):
        say(
            f"max_prompt_length={settings.max_prompt_length} cuts off the beginning of {cut:,} of these "
            f"{count + task.size('test'):,} prompts; --drop_long_prompts drops them"
        )
    for line in notes(prepared):
        say(f"note: {line}")
    if moved:
        say(f"an earlier run in {settings.out_dir} was moved to {moved}")
    if start:
        say(f"resumed after {start} iterations")


def iterations(iterate, training):
    """-> False if the run was stopped. Afterwards the working directory is the same as before."""
    log, saver, max_iters = training.log, training.saver, training.settings.max_iters
    going_on = phase(log.title, max_iters, "iterations", log.start)
    with noting_signals() as noted, chdir("."), going_on as bar:
        for iteration in range(log.start, max_iters):
            with saver.keeping(iteration, training.progress()):
                training.begin_iteration(iteration)
                record = training.end_iteration(*iterate(iteration, training))
            bar.update()
            own = training.prepared.on_iteration and ends(training, record)
            stopped_by = training.processes.agreed(noted[-1] if noted else own)
            if stopped_by and iteration + 1 < max_iters:
                saver.save(iteration + 1, training.progress(), last=True)
                log.say(
                    f"stopped by {stopped_by} after iteration {iteration}, and saved; "
                    f"{log.title} goes on with --resume={training.settings.out_dir}"
                )
                return False
    return True


def ends(training, record):
    """Call on_iteration with a copy of the log's line -> its name if it returns True. The generators are restored."""
    iteration, generators = record["iter"], generator_state()
    name = f"on_iteration={training.settings.on_iteration}"

    def call():
        if training.processes.rank:  # rank 0 decides
            return False
        hint = "some lines have no scores: record.get(name)"
        with chdir("."), blaming(f"{name} after iteration {iteration}", "", hint):
            return training.prepared.on_iteration(finite(record)) in [True]  # NumPy's too

    with training.saver.keeping(iteration + 1, training.progress()):
        stop = training.processes.from_all_ranks(call)[0]
    restore_generators(generators)
    return name if stop else None


@contextmanager
def noting_signals():
    """Inside, SIGTERM and the first Ctrl-C only add their names to the list; a second Ctrl-C interrupts at once.

    Only Python's main thread gets signals. In another one, such as a notebook button's, the list stays empty.
    """
    noted = []
    if current_thread() is not main_thread():
        yield noted
        return

    def note(number, frame):
        noted.append(signal.Signals(number).name)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
