"""TODO"""

import math
from dataclasses import replace

import torch

from memory.host import available_on_host
from memory.ledger import MIB
from memory.oom import biggest_tensors
from memory.plan import GIB, kind_planned, plan
from options import SnugError

# The settings that fit.


def cheaper(settings, kind, longest):
    """The ladder: {option: value} changes that each need less, in the order of what they cost. longest: tokens of a sequence."""
    batch = getattr(settings, "train_batch_size", 0) or settings.batch_size * getattr(settings, "group_size", 1)
    tokens = longest * (batch // settings.gradient_accumulation_steps)
    for less in halvings(min(settings.max_tokens_per_micro_batch or tokens, tokens), longest):
        yield {"max_tokens_per_micro_batch": less, "gradient_accumulation_steps": 1}
    for less in halvings(settings.logits_chunk_mb or (256 if kind == "cuda" else 16), 16):
        yield {"logits_chunk_mb": float(less)}
    if getattr(settings, "kv_cache_mb", 0):
        for less in halvings(settings.kv_cache_mb, 1):
            yield {"kv_cache_mb": float(less)}
    elif hasattr(settings, "max_rollout_batch"):
        for less in halvings(settings.max_rollout_batch or settings.batch_size * settings.group_size, 1):
            yield {"max_rollout_batch": less}
    if settings.checkpoint_blocks == "none":
        yield {"checkpoint_blocks": "selective"}
    if settings.checkpoint_blocks != "block":
        yield {"checkpoint_blocks": "block"}
    if getattr(settings, "beta", 0) and settings.reference == "device" and not settings.lora_rank:
        yield {"reference": "host"}
    if settings.optimizer_device == "device":
        yield {"optimizer_device": "host"}
    if not settings.activation_offload and settings.checkpoint_blocks != "none":
        yield {"activation_offload": True}
    if not settings.grad_offload:
        yield {"grad_offload": True}


HALVED_ALREADY = {"max_tokens_per_micro_batch", "max_rollout_batch", "kv_cache_mb"}


HALVED = {
    "param_dtype": "bfloat16",
    "optimizer_dtype": "bfloat16",
    "dtype": "bfloat16",
}  # not chosen for anyone: it rounds


def halvings(now, floor):
    """A half, a quarter and an eighth of it, where the first of them may be too little to show, and the floor."""
    return sorted({max(floor, math.ceil(now / n)) for n in (2, 4, 8, now / floor) if now > floor}, reverse=True)


def fit(make_iteration, settings, longest, budget):
    """-> (settings that fit into `budget` bytes, or the nearest to it, their Plan, {option: value} that was changed, the first Plan).

    Down the ladder, keeping what helps; then whatever the later changes made unnecessary is taken back.
    """
    current = settings
    first_plan = its_plan = plan(make_iteration, settings)
    while its_plan.peak > budget:
        for change in cheaper(current, its_plan.kind, longest):
            trial = replace(current, **change)
            trial_plan = plan(make_iteration, trial)
            if trial_plan.peak < its_plan.peak - MIB // 4:
                current, its_plan = trial, trial_plan
                break
        else:
            break
    for name in changes(settings, current):
        trial = replace(current, **{name: getattr(settings, name)})
        try:
            trial.check()
        except SnugError:  # takes something that depends on it along
            continue
        trial_plan = plan(make_iteration, trial)
        if trial_plan.peak <= max(budget, its_plan.peak):
            current, its_plan = trial, trial_plan
    return current, its_plan, changes(settings, current), first_plan


def changes(before, after):
    return {name: value for name, value in vars(after).items() if value != getattr(before, name, None)}


def written(change):
    return " ".join(f"--{name}={value}" for name, value in change.items())


def budget_of(settings, device):
    """memory_budget_gb in bytes, or None. auto: what is free on the device, of which a twentieth is left for fragmentation."""
    if not settings.memory_budget_gb:
        return None
    if settings.memory_budget_gb != "auto":
        return int(float(settings.memory_budget_gb) * GIB)
    if kind_planned(settings.device) == "cpu":
        return int(0.95 * available_on_host())
    if not torch.cuda.is_available():
        raise SnugError(
            "memory_budget_gb='auto' asks the device what is free, and there is none here; write the GiB, such as 24"
        )
    return int(0.95 * torch.cuda.mem_get_info(device)[0])


# When the device refuses all the same: smaller pieces from here on, which a checkpoint remembers.


def remember(settings, name, value, said, say):
    """Go on with a smaller `value`; settings.after_oom: name -> (what had been asked for, what it is now)."""
    known = getattr(settings, "after_oom", {})
    asked = known[name][0] if name in known else getattr(settings, name, 0)
    settings.after_oom = known | {name: (asked, value)}
    setattr(settings, name, value)
    say(f"{said}; going on with {name}={value}")


def recall(settings, state, say):
    """In a resumed run: the same again, as long as the same is asked for."""
    for name, (asked, value) in state.get("after_oom", {}).items():
        if getattr(settings, name, 0) == asked:
            remember(settings, name, value, "an earlier out-of-memory", say)


def halve_rollout_batch(settings, rows, model, said, say):
    """Decode half as many completions at a time. rows: how many there are. Raises SnugError where it was one."""
    now = min(getattr(settings, "max_rollout_batch", 0) or rows, rows)
    if now == 1:
        raise SnugError(at_the_floor(settings, f"decoding one completion at a time: {said}", model))
    remember(settings, "max_rollout_batch", -(-now // 2), said, say)


def halve_micro_batch(settings, sequences, model, said, say):
    """Half as many tokens a micro-batch. Raises SnugError where it was one sequence."""
    longest = max(map(sum, zip(sequences.prompt_lengths.tolist(), sequences.completion_lengths.tolist(), strict=True)))
    step = getattr(settings, "train_batch_size", 0) or len(sequences.tokens)
    now = min(
        settings.max_tokens_per_micro_batch or longest * step, longest * (step // settings.gradient_accumulation_steps)
    )
    if now < 2 * longest:
        raise SnugError(at_the_floor(settings, f"one sequence of {longest} tokens at a time: {said}", model))
    settings.gradient_accumulation_steps = 1
    remember(settings, "max_tokens_per_micro_batch", max(longest, now // 2), said, say)


def once_more(settings, model):
    """-> what to do after an out-of-memory where nothing can be smaller: try once more, with the allocator's cache empty."""
    tried = []

    def smaller(said):
        if tried:
            raise SnugError(at_the_floor(settings, f"in the optimizer step: {said}", model))
        tried.append(said)

    return smaller


def at_the_floor(settings, what, model):
    further = [change for change in cheaper(settings, model.device.type, 1) if not set(change) & HALVED_ALREADY]
    if further or settings.param_dtype == "float32" or settings.optimizer_dtype == "float32":
        advice = f"{written((further or [HALVED])[0])}, with --resume=auto"
    else:
        advice = "a smaller model, or shorter sequences"
    return f"out of memory, {what}; the biggest tensors: {biggest_tensors(model)}; next: {advice}"


def show(make_iteration, settings, longest):
    """What --plan prints."""
    budget = budget_of(settings, settings.device if settings.device.startswith("cuda:") else None)
    fitted, its_plan, change = (
        (settings, plan(make_iteration, settings), {})
        if budget is None
        else fit(make_iteration, settings, longest, budget)[:3]
    )
    lines = [its_plan.text()]
    if budget is not None:
        verdict = "fits into" if its_plan.peak <= budget else "the nearest to"
        lines.append(f"{verdict} {budget / GIB:.3g} GiB with {written(change) or 'no change'}")
    return "\n".join(lines + [its_plan.line()])


def apply(make_iteration, settings, longest, device, say):
    """Before a run's first step: change `settings` to what fits memory_budget_gb, say which and why; refuse what cannot fit."""
    budget = budget_of(settings, device)
    if budget is None:
        return settings
    fitted, its_plan, change, before = fit(make_iteration, settings, longest, budget)
    on_host = max(0, available_on_host() - (its_plan.peak if its_plan.kind == "cpu" else 0))  # a CPU is its own host
    if its_plan.peak > budget or its_plan.host > on_host:
        say(its_plan.text())
        raise SnugError(refusal(make_iteration, fitted, its_plan, change, budget, on_host))
    if change:
        say(
            f"planned peak {before.peak / GIB:.3f} GiB in {before.phase}, {budget / GIB:.3f} GiB may be used: changed {written(change)}"
        )
    say(f"planned: {its_plan.line()}")
    return fitted


def refusal(make_iteration, fitted, its_plan, change, budget, on_host):
    """One line: what is missing, and the smallest change that would do."""
    if its_plan.host > on_host:
        return (
            f"the plan takes {its_plan.host / GIB:.3g} GiB of the host, which has {on_host / GIB:.3g} GiB left; use the device for more "
            "(optimizer_device, grad_offload, reference), or a host with more memory"
        )
    said = f"the plan takes {its_plan.peak / GIB:.3g} GiB in {its_plan.phase} even with {written(change) or 'all else'}; {budget / GIB:.3g} GiB may be used"
    if fitted.param_dtype == "float32":
        halved = plan(make_iteration, replace(fitted, **HALVED))
        if halved.peak <= budget:
            return f"{said}; {written(HALVED)} would make it {halved.peak / GIB:.3g}"
    return f"{said}; the biggest is {its_plan.biggest[0][1]}: a smaller model, or shorter sequences, would have to do"
