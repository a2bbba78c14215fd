"""The fastest options that fit a memory budget, found with the planner. docs/memory.md: what each saves and costs.

Left out: a budget that moves during a run (training/yielding.py).
"""

import math
from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from snug.device.host import HOST, available_on_host
from snug.device.kinds import kind_planned, logits_budget
from snug.memory.plan import GIB, Plan, plan
from snug.options import SnugError
from snug.options.progress import counted, phase

PLACES = ["device", "host"]
APART = {"cuda"}  # kinds of devices that have memory of their own; others share the host's


class Room(NamedTuple):
    """Bytes that a run may use. Where device and host share their memory, `device` is for both."""

    device: float
    host: float = math.inf

    def holds(self, planned: Plan) -> bool:
        return need(planned) <= self.device and planned.host <= self.host


def need(planned: Plan) -> int:
    """Bytes of the device, and of the host if it is the same memory."""
    return planned.peak + (0 if planned.kind in APART else planned.host)


def ladder(settings, kind, prompt, completion) -> dict:
    """{option: its values, from the fastest to the one that needs least}; options that cost little time first.

    prompt, completion: longest, tokens. No value changes results: docs/memory.md.
    """
    tokens = settings.tokens_per_step(prompt, completion)
    steps = {
        "max_tokens_per_micro_batch": [0, *halves(tokens, prompt + completion - 1)],
        "logits_chunk_mb": [*map(float, halves(8 * logits_budget(0, kind), 16))],
        "max_rollout_batch": [0, *halves(settings.sequences_per_rollout, 1)],
        "checkpoint_blocks": ["none", "selective", "block"],
    }
    if settings.depends_on_cut:
        del steps["max_tokens_per_micro_batch"]
    if kind not in APART:
        return steps
    if settings.needs_reference:
        steps["reference"] = PLACES
    if settings.teacher:
        steps["teacher_device"] = PLACES
    return steps | dict(
        optimizer_device=PLACES, activation_offload=[False, True], grad_offload=[False, True]
    )


def halves(now, least):
    """Yield a half, a quarter and so on, and last the least."""
    while now > least:
        now = max(least, math.ceil(now / 2))
        yield now


def plan_of(dry_run, settings) -> Plan:
    """`plan`, remembered: a budget that moves asks for the same ones again."""
    key = repr(settings)
    if key not in dry_run.plans:
        dry_run.plans[key] = plan(dry_run, settings)
    return dry_run.plans[key]


def fit(dry_run, settings, room: Room):
    """-> (settings that fit the room, or come nearest, their Plan).

    It starts with the fastest value of each option on the ladder, whatever `settings` have. It gives one option after
    the other the value that needs least, cheapest first, until the plan fits. Then it goes back and gives each of them
    its fastest value that fits as well. The most expensive is first: copies from the host can take longer than the
    computation, recomputing adds a third to it, and smaller pieces cost little, so they get what memory is left.
    """
    steps = ladder(settings, kind_planned(settings.device), *dry_run.longest)
    fitted = replace(settings, **{name: values[0] for name, values in steps.items()})
    lowest = plan_of(dry_run, fitted)
    lowered = []
    for name, values in counted(steps.items(), "options"):
        if room.holds(lowest):
            break
        trial = replace(fitted, **{name: values[-1]})
        planned = plan_of(dry_run, trial)
        if planned.peak <= lowest.peak:
            fitted, lowest = trial, planned
            lowered.append(name)
    enough = room._replace(device=max(room.device, need(lowest)))

    def fits(trial):
        return enough.holds(plan_of(dry_run, trial))

    for name in counted(lowered[::-1], "options"):
        fitted, *slower = (replace(fitted, **{name: value}) for value in steps[name])
        if not fits(fitted):
            fitted = slower[bisect_left(slower[:-1], True, key=fits)]
    return fitted, plan_of(dry_run, fitted)


def step_back(dry_run, now, room: Room):
    """-> settings one step from `now` towards the faster ones that fit the room; `now` if these are not faster.

    Options that are slower in these become as slow. Of those that are faster, the most expensive one gets its next
    value. So the step needs at most what they need.

        now: pieces of 4, blocks recomputed; what fits: pieces of 2, nothing recomputed -> pieces of 2, selective
    """
    target, _ = fit(dry_run, now, room)
    slower, faster = {}, {}
    for name, values in ladder(now, kind_planned(now.device), *dry_run.longest).items():
        have, want = getattr(now, name), getattr(target, name)
        # A value of the user's own is on no ladder: it becomes the faster one at once.
        place = values.index(have) if have in values else len(values)
        if place > values.index(want):
            faster = {name: values[place - 1] if have in values else want}
        else:
            slower[name] = want
    return replace(now, **slower, **faster) if faster else now


def changes(before, after) -> str:
    """The options of `after` that differ from `before`, as the command line has them."""
    values = vars(after).items()
    change = [f"--{name}={value}" for name, value in values if value != getattr(before, name)]
    return " ".join(change) or "no change"


def asked(settings, folder: Path, warn) -> str:
    """The budget, auto or GiB: of the file `budget` in the run's folder if it says one, else of the option. "": none.

    warn: told in one line what is wrong with the file.
    """
    text = ""
    if settings.parallel != "fsdp":
        with suppress(OSError), open(folder / "budget", errors="replace") as file:
            text = file.read(20).strip()
    try:
        if text:
            replace(settings, memory_budget_gb=text).check()
    except SnugError as error:
        warn(f"warning: {folder / 'budget'}: {error}")
        text = ""
    return text or settings.memory_budget_gb


def room_for(budget: str, settings, device, held=0) -> Room | None:
    """The Room of a budget; None without one. device: the run's. held: bytes of a CPU that the run has now.

    auto: what is free or the run's own, less a twentieth for fragmentation; on MPS what Metal recommends. On a CPU less
    a fifth: there the kernel kills, and others may take more during a phase.
    """
    kind, host = kind_planned(settings.device), math.inf
    mine = kind == kind_planned("auto")
    if not budget:
        return None
    if mine and kind in APART:
        host = available_on_host() + HOST.current
    if budget != "auto":
        return Room(float(budget) * GIB, host)
    if kind == "cpu":
        return Room(0.8 * (available_on_host() + held), host)
    if not mine:
        raise SnugError(
            f"memory_budget_gb='auto' asks a device of the kind {kind} what is free, and there is none; write GiB, "
            "such as 24"
        )
    if kind == "mps":
        return Room(0.95 * torch.mps.recommended_max_memory())
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return Room(0.95 * free, host)


@phase("planning")
def show(dry_run, settings) -> str:
    """What --plan prints."""
    room = room_for(settings.memory_budget_gb, settings, settings.device.replace("auto", "cuda"))
    if room is None:
        planned = plan(dry_run, settings)
        return f"{planned.text()}\n{planned.line()}"
    fitted, planned = fit(dry_run, settings, room)
    change = changes(settings, fitted)
    verdict = f"fits into {room.device / GIB:.3g} GiB with {change}"
    if not room.holds(planned):
        verdict = f"does not fit: {too_large(planned, change, room)}"
    return f"{planned.text()}\n{verdict}\n{planned.line()}"


@phase("planning")
def apply(dry_run, settings, device, say, before=None):
    """Before a run's first step -> settings that fit its budget. Says what changed. SnugError if none fit.

    before: the settings of the checkpoint to resume, a dict. If its budget was the same and what it had fits, the run
    goes on with that, so that its results are those of a run that was not stopped.
    """
    budget = settings.memory_budget_gb
    if before:
        budget = asked(settings, Path(settings.out_dir), say)
    room = room_for(budget, settings, device)
    if room is None:
        return settings
    if before and before["memory_budget_gb"] == settings.memory_budget_gb:
        names = ladder(settings, kind_planned(settings.device), *dry_run.longest)
        kept = replace(settings, **{name: before[name] for name in names})
        if room.holds(plan_of(dry_run, kept)):
            return kept
    fitted, planned = fit(dry_run, settings, room)
    change = changes(settings, fitted)
    if not room.holds(planned):
        say(planned.text())
        raise SnugError(too_large(planned, change, room))
    if fitted != settings:
        say(f"{room.device / GIB:.3f} GiB may be used: changed {change}")
    say(f"planned: {planned.line()}")
    return fitted


def too_large(planned: Plan, change: str, room: Room) -> str:
    """One line: what is missing, and what would help. Nothing that rounds was tried."""
    host = f" and {room.host / GIB:.3g} GiB of the host" if room.host < math.inf else ""
    return (
        f"the plan takes {need(planned) / GIB:.3g} GiB in {planned.phase} even with {change}; "
        f"{room.device / GIB:.3g} GiB{host} may be used; the biggest is {planned.biggest[0][1]}: use fewer bytes a "
        "number (--param_dtype=bfloat16 --optimizer_dtype=bfloat16, with --lora_rank --base_dtype=nf4), a smaller "
        "model, or shorter sequences"
    )
