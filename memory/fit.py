"""The cheapest options that fit a memory budget, found with the planner. docs/memory.md: what each saves and costs."""

import math
from dataclasses import replace

import torch

from device.host import available_on_host
from device.kinds import logits_budget
from memory.plan import GIB, Plan, kind_planned, plan
from options import SnugError

CHANGES_ROUNDING = {
    "param_dtype": "bfloat16",
    "optimizer_dtype": "bfloat16",
    "dtype": "bfloat16",
}  # never chosen for the user


def cheaper(settings, kind, prompt=1, completion=1):
    """The ladder: (option, value) pairs that each need less, cheapest first. prompt, completion: longest, tokens."""
    tokens = settings.tokens_per_step(prompt, completion)
    tokens = min(settings.max_tokens_per_micro_batch or tokens, tokens)
    for fewer in halves(tokens, prompt + completion - 1):
        yield "max_tokens_per_micro_batch", fewer
    for less in halves(logits_budget(settings.logits_chunk_mb, kind), 16):
        yield "logits_chunk_mb", float(less)
    for fewer in halves(settings.max_rollout_batch or settings.sequences_per_rollout, 1):
        yield "max_rollout_batch", fewer
    if settings.checkpoint_blocks == "none":
        yield "checkpoint_blocks", "selective"
    if settings.checkpoint_blocks != "block":
        yield "checkpoint_blocks", "block"
    if settings.needs_reference and settings.reference == "device":
        yield "reference", "host"
    if settings.teacher and settings.teacher_device == "device":
        yield "teacher_device", "host"
    if settings.optimizer_device == "device":
        yield "optimizer_device", "host"
    if not settings.activation_offload:
        yield "activation_offload", True
    if not settings.grad_offload:
        yield "grad_offload", True


def halves(now, least):
    """Yield a half, a quarter and so on, and last the least."""
    while now > least:
        now = max(least, math.ceil(now / 2))
        yield now


def fit(dry_run, settings, first: Plan, budget):
    """-> (settings that fit `budget` bytes, or come nearest, their Plan). first: the Plan of `settings`.

    It goes down the ladder until the plan fits. Then it goes back up, from the most expensive option to the cheapest,
    and gives each option its first value on the ladder that fits as well.
    """
    fitted, lowest = settings, first
    rungs = {}  # option -> its values so far, the user's first
    for name, value in cheaper(settings, first.kind, *dry_run.longest):
        if lowest.peak <= budget:
            break
        trial = replace(fitted, **{name: value})
        planned = plan(dry_run, trial)
        if planned.peak <= lowest.peak:
            rungs.setdefault(name, [getattr(settings, name)]).append(value)
            fitted, lowest = trial, planned
    enough = max(budget, lowest.peak)
    for name, values in reversed(rungs.items()):
        for value in values[:-1]:
            trial = replace(fitted, **{name: value})
            planned = plan(dry_run, trial)
            if planned.peak <= enough:
                fitted, lowest = trial, planned
                break
    return fitted, lowest


def changes(before, after) -> dict:
    """The options of `after` that differ from `before`."""
    return {name: value for name, value in vars(after).items() if value != getattr(before, name)}


def written(change: dict) -> str:
    return " ".join(f"--{name}={value}" for name, value in change.items()) or "no change"


def budget_of(settings, device) -> int | None:
    """memory_budget_gb in bytes, or None. auto: what is free on the device, less a twentieth for fragmentation."""
    if not settings.memory_budget_gb:
        return None
    if settings.memory_budget_gb != "auto":
        return int(float(settings.memory_budget_gb) * GIB)
    if kind_planned(settings.device) == "cpu":
        return int(0.95 * available_on_host())
    if not torch.cuda.is_available():
        raise SnugError(
            "memory_budget_gb='auto' asks a CUDA device what is free, and there is none; write GiB, such as 24"
        )
    return int(0.95 * torch.cuda.mem_get_info(device)[0])


def show(dry_run, settings) -> str:
    """What --plan prints."""
    budget = budget_of(settings, settings.device if settings.device.startswith("cuda:") else None)
    planned = plan(dry_run, settings)
    if budget is None:
        return f"{planned.text()}\n{planned.line()}"
    fitted, planned = fit(dry_run, settings, planned, budget)
    change = changes(settings, fitted)
    verdict = f"fits into {budget / GIB:.3g} GiB with {written(change)}"
    if planned.peak > budget:
        verdict = f"does not fit: {too_large(dry_run, fitted, planned, change, budget)}"
    return f"{planned.text()}\n{verdict}\n{planned.line()}"


def apply(dry_run, settings, device, say):
    """Before a run's first step -> settings that fit memory_budget_gb. Says what changed. SnugError if none fit."""
    budget = budget_of(settings, device)
    if budget is None:
        return settings
    first = plan(dry_run, settings)
    fitted, planned = fit(dry_run, settings, first, budget)
    change = changes(settings, fitted)
    host = available_on_host()
    if planned.kind == "cpu":  # a CPU is its own host
        host = max(0, host - planned.peak)
    if planned.peak > budget or planned.host > host:
        say(planned.text())
        if planned.host > host:
            raise SnugError(
                f"the plan takes {planned.host / GIB:.3g} GiB of the host, which has {host / GIB:.3g} GiB left; "
                "use the device for more (optimizer_device, grad_offload, reference, teacher_device), "
                "or a host with more memory"
            )
        raise SnugError(too_large(dry_run, fitted, planned, change, budget))
    if change:
        before = f"planned peak {first.peak / GIB:.3f} GiB in {first.phase}"
        say(f"{before}, {budget / GIB:.3f} GiB may be used: changed {written(change)}")
    say(f"planned: {planned.line()}")
    return fitted


def too_large(dry_run, fitted, planned: Plan, change, budget) -> str:
    """One line: what is missing, and the smallest change that would do."""
    problem = f"the plan takes {planned.peak / GIB:.3g} GiB in {planned.phase} even with {written(change)}"
    problem += f"; {budget / GIB:.3g} GiB may be used"
    if fitted.param_dtype == "float32":
        rounded = plan(dry_run, replace(fitted, **CHANGES_ROUNDING))
        if rounded.peak <= budget:
            return f"{problem}; {written(CHANGES_ROUNDING)} would make it {rounded.peak / GIB:.3g}"
    return f"{problem}; the biggest is {planned.biggest[0][1]}: use a smaller model, or shorter sequences"
