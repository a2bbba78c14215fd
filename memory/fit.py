"""The cheapest options that fit a memory budget, found with the planner. docs/memory.md: what each saves and costs."""

import math
from dataclasses import replace

import torch

from device.host import available_on_host
from device.kinds import MIB, logits_budget
from memory.plan import GIB, Plan, kind_planned, plan
from options import SnugError

CHANGES_ROUNDING = {
    "param_dtype": "bfloat16",
    "optimizer_dtype": "bfloat16",
    "dtype": "bfloat16",
}  # never chosen for the user
LEAST = MIB // 4  # bytes that a change must save
LOWERS = {  # option -> the phases whose peak it can lower; others lower all
    "max_tokens_per_micro_batch": {"reference", "train"},
    "max_rollout_batch": {"rollout", "eval"},
    "checkpoint_blocks": {"train"},
    "activation_offload": {"train"},
    "grad_offload": {"train", "optimizer"},
}


def cheaper(settings, kind, prompt=1, completion=1):
    """The ladder: {option: value} changes that each need less, cheapest first. prompt, completion: longest, tokens."""
    tokens = settings.tokens_per_step(prompt, completion)
    for less in halvings(
        min(settings.max_tokens_per_micro_batch or tokens, tokens), prompt + completion - 1
    ):
        yield {"max_tokens_per_micro_batch": less}
    for less in halvings(logits_budget(settings.logits_chunk_mb, kind), 16):
        yield {"logits_chunk_mb": float(less)}
    for less in halvings(settings.max_rollout_batch or settings.sequences_per_rollout, 1):
        yield {"max_rollout_batch": less}
    if settings.checkpoint_blocks == "none":
        yield {"checkpoint_blocks": "selective"}
    if settings.checkpoint_blocks != "block":
        yield {"checkpoint_blocks": "block"}
    if settings.needs_reference and settings.reference == "device":
        yield {"reference": "host"}
    if settings.optimizer_device == "device":
        yield {"optimizer_device": "host"}
    if not settings.activation_offload and settings.checkpoint_blocks != "none":
        yield {"activation_offload": True}
    if not settings.grad_offload:
        yield {"grad_offload": True}


def halvings(now, floor):
    """A half, a quarter and an eighth, because a half may be too little to show, and the floor."""
    return sorted(
        {max(floor, math.ceil(now / n)) for n in (2, 4, 8, now / floor) if now > floor}, reverse=True
    )


def fit(dry_run, settings, longest, budget):
    """-> (settings that fit `budget` bytes, or come nearest, their Plan, {option: value} that changed, the first Plan).

    Down the ladder, keeping what helps. Then what later changes made unnecessary is taken back.
    longest: tokens of the longest prompt and of the longest completion.
    """
    current = settings
    first_plan = its_plan = plan(dry_run, settings)
    while its_plan.peak > budget:
        for change in cheaper(current, its_plan.kind, *longest):
            if not may_help(change, its_plan):
                continue
            trial = replace(current, **change)
            trial_plan = plan(dry_run, trial)
            if trial_plan.peak < its_plan.peak - LEAST:
                current, its_plan = trial, trial_plan
                break
        else:
            break
    for name in changes(settings, current):
        trial = replace(current, **{name: getattr(settings, name)})
        try:
            trial.check()
        except SnugError:  # another change depends on it
            continue
        trial_plan = plan(dry_run, trial)
        if trial_plan.peak <= max(budget, its_plan.peak):
            current, its_plan = trial, trial_plan
    return current, its_plan, changes(settings, current), first_plan


def may_help(change: dict, its_plan: Plan) -> bool:
    """Can a change lower the peak? Smaller chunks cannot where the peak has no logits."""
    (name,) = change
    if name == "logits_chunk_mb":
        return its_plan.phases[its_plan.phase][1].get("logits", 0) >= LEAST
    return its_plan.phase in LOWERS.get(name, {its_plan.phase})


def changes(before, after) -> dict:
    return {name: value for name, value in vars(after).items() if value != getattr(before, name)}


def written(change: dict) -> str:
    return " ".join(f"--{name}={value}" for name, value in change.items())


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


def show(dry_run, settings, longest) -> str:
    """What --plan prints."""
    budget = budget_of(settings, settings.device if settings.device.startswith("cuda:") else None)
    if budget is None:
        its_plan = plan(dry_run, settings)
        return f"{its_plan.text()}\n{its_plan.line()}"
    fitted, its_plan, change, _ = fit(dry_run, settings, longest, budget)
    verdict = f"fits into {budget / GIB:.3g} GiB with {written(change) or 'no change'}"
    if its_plan.peak > budget:
        verdict = f"does not fit: {refusal(dry_run, fitted, its_plan, change, budget, math.inf)}"
    return f"{its_plan.text()}\n{verdict}\n{its_plan.line()}"


def apply(dry_run, settings, longest, device, say):
    """Before a run's first step -> settings that fit memory_budget_gb. Says what changed; refuses what cannot fit."""
    budget = budget_of(settings, device)
    if budget is None:
        return settings
    fitted, its_plan, change, before = fit(dry_run, settings, longest, budget)
    on_host = max(
        0, available_on_host() - (its_plan.peak if its_plan.kind == "cpu" else 0)
    )  # a CPU is its own host
    if its_plan.peak > budget or its_plan.host > on_host:
        say(its_plan.text())
        raise SnugError(refusal(dry_run, fitted, its_plan, change, budget, on_host))
    if change:
        was = f"planned peak {before.peak / GIB:.3f} GiB in {before.phase}"
        say(f"{was}, {budget / GIB:.3f} GiB may be used: changed {written(change)}")
    say(f"planned: {its_plan.line()}")
    return fitted


def refusal(dry_run, fitted, its_plan: Plan, change, budget, on_host) -> str:
    """One line: what is missing, and the smallest change that would do."""
    if its_plan.host > on_host:
        return (
            f"the plan takes {its_plan.host / GIB:.3g} GiB of the host, which has {on_host / GIB:.3g} GiB left; "
            "use the device for more (optimizer_device, grad_offload, reference), or a host with more memory"
        )
    needed = f"the plan takes {its_plan.peak / GIB:.3g} GiB in {its_plan.phase}"
    said = f"{needed} even with {written(change) or 'no change'}"
    said += f"; {budget / GIB:.3g} GiB may be used"
    if fitted.param_dtype == "float32":
        rounded = plan(dry_run, replace(fitted, **CHANGES_ROUNDING))
        if rounded.peak <= budget:
            return f"{said}; {written(CHANGES_ROUNDING)} would make it {rounded.peak / GIB:.3g}"
    return f"{said}; the biggest is {its_plan.biggest[0][1]}: use a smaller model, or shorter sequences"
