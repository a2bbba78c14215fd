"""The fastest options that fit a memory budget, found with the planner. docs/memory.md says what each saves and costs.

Left out: a budget that changes during a run.
"""

from bisect import bisect_left
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

import torch

from snug.device.cuda import cap
from snug.device.host import available_on_host
from snug.device.kinds import kind_planned, logits_budget
from snug.memory.plan import GIB, plan
from snug.options import SnugError
from snug.options.progress import counted, phase

PLACES = ["device", "host"]
APART = {"cuda"}  # kinds of devices that have memory of their own; others share the host's


class Room(NamedTuple):
    """Bytes that a run may use. Where device and host share their memory, `device` is for both."""

    device: float
    host: float = inf

    def holds(self, planned):
        return need(planned) <= self.device and planned.host <= self.host


def need(planned) -> int:
    """Bytes on the device, and those on the host if both share one memory."""
    return planned.peak + (0 if planned.kind in APART else planned.host)


def ladder(settings, kind, prompt, completion) -> dict:
    """{option: its values, from the fastest to the one that needs least memory}; options that cost little time first.

    prompt, completion: how many tokens the longest ones have. No value changes results: docs/memory.md.
    """
    steps = {
        "max_tokens_per_micro_batch": [
            0,
            *halves(settings.tokens_per_step(prompt, completion), prompt + completion - 1),
        ],
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
    """Yield a half of `now`, a quarter and so on; the last value is `least`."""
    while now > least:
        now = max(least, ceil(now / 2))
        yield now


def fit(dry_run, settings, room):
    """-> (settings that fit the room, or come nearest, their Plan).

    The search starts with the fastest value of each option on the ladder, whatever value `settings` has. Option by
    option, the cheapest first, the search takes the value that needs least memory, until the plan fits. Then it goes
    back and gives each of these options the fastest value with which the plan still fits. It goes back from the most
    expensive option: copies from the host can take longer than the computation, and recomputing adds a third to it.
    Smaller pieces cost little, so they get the memory that is left.
    """
    steps = ladder(settings, kind_planned(settings.device), *dry_run.longest)
    fitted = replace(settings, **{name: values[0] for name, values in steps.items()})
    lowest = plan(dry_run, fitted)
    lowered = []
    for name, values in counted(steps.items(), "options"):
        if room.holds(lowest):
            break
        trial = replace(fitted, **{name: values[-1]})
        planned = plan(dry_run, trial)
        if planned.peak <= lowest.peak:
            fitted, lowest = trial, planned
            lowered.append(name)
    enough = room._replace(device=max(room.device, need(lowest)))

    def fits(trial):
        return enough.holds(plan(dry_run, trial))

    for name in counted(lowered[::-1], "options"):
        fitted, *slower = (replace(fitted, **{name: value}) for value in steps[name])
        if not fits(fitted):
            fitted = slower[bisect_left(slower[:-1], True, key=fits)]
    return fitted, plan(dry_run, fitted)


def changes(before, after) -> str:
    """The options of `after` that differ from `before`, as the command line has them."""
    change = [
        f"--{name}={value}" for name, value in vars(after).items() if value != getattr(before, name)
    ]
    return " ".join(change) or "no change"


def room_for(settings, device) -> Room | None:
    """The Room of memory_budget_gb; None without one. device: the run's.

    auto: the free memory, less 8 % for fragmentation and for kernels and libraries that CUDA loads later; on MPS what
    Metal recommends, less a twentieth. On a CPU less a fifth: there the kernel kills a process that takes too much, and
    other processes may need more later.
    """
    budget, kind, host = settings.memory_budget_gb, kind_planned(settings.device), inf
    mine = kind == kind_planned("auto")
    if not budget:
        return None
    if mine and kind in APART:
        host = available_on_host()
    if budget != "auto":
        return Room(float(budget) * GIB, host)
    if kind == "cpu":
        return Room(0.8 * available_on_host())
    if not mine:
        raise SnugError(
            f"memory_budget_gb='auto' needs device={kind} here; give a number of GiB, such as 24"
        )
    if kind == "mps":
        return Room(0.95 * torch.mps.recommended_max_memory())
    return Room(0.92 * torch.cuda.mem_get_info(device)[0], host)


@phase("planning")
def show(dry_run, settings) -> str:
    """What --plan prints."""
    room, verdict = room_for(settings, settings.device.replace("auto", "cuda")), ""
    if room is None:
        planned = plan(dry_run, settings)
    else:
        fitted, planned = fit(dry_run, settings, room)
        change = changes(settings, fitted)
        verdict = f"fits into {room.device / GIB:.3g} GiB with {change}\n"
        if not room.holds(planned):
            verdict = f"does not fit: {too_large(planned, change, room)}\n"
    return f"{planned.text()}\n{verdict}{planned.line()}"


@phase("planning")
def apply(dry_run, settings, device, say):
    """Before a run's first step -> settings that fit memory_budget_gb. Says what changed. SnugError if none fit."""
    room = room_for(settings, device)
    if device.type == "cuda":
        cap(device, room.device if settings.memory_budget_gb not in ("", "auto") else inf)
    if room is None:
        return settings
    fitted, planned = fit(dry_run, settings, room)
    change = changes(settings, fitted)
    if not room.holds(planned):
        say(planned.text())
        raise SnugError(too_large(planned, change, room))
    if fitted != settings:
        say(f"{room.device / GIB:.3f} GiB may be used: changed {change}")
    say(f"planned: {planned.line()}")
    return fitted


def too_large(planned, change, room) -> str:
    """One line: what is missing, and what would help. Options that lower the precision were not tried."""
    host = f" and {room.host / GIB:.3g} GiB of the host" if room.host < inf else ""
    return (
        f"the plan takes {need(planned) / GIB:.3g} GiB in {planned.phase} even with {change}; "
        f"{room.device / GIB:.3g} GiB{host} may be used; the biggest is {planned.biggest[0][1]}: try "
        "--param_dtype=bfloat16 --optimizer_dtype=bfloat16, --lora_rank with --base_dtype=nf4, a smaller model or "
        "shorter sequences"
    )
