"""Hints: what an iteration's figures say if something is wrong, one line each, with what to try.

The thresholds come from runs that went wrong elsewhere. They are no laws: an easy task ends with most of its groups
solved, and gets that hint. A run prints a hint once; the log's `hints` names those that hold, in every iteration.

Left out: what guard.py stops, and anything that is not in the log already.
"""

# A figure, when it is bad, what it counts and what to try.
HINTS = """\
frac_reward_zero_std > 0.8 of the groups have equal rewards and teach nothing: the prompts are too easy or too hard; \
try --max_num_gen_batches=3, a larger group_size, other prompts
entropy < 0.01 nats a token: a group's completions are nearly alike, so there is little to compare; \
try --epsilon_high=0.28, a small entropy_coef, a lower learning_rate
kl > 1 nats a token from the reference: the policy has left what it knew; try a lower learning_rate or a larger beta
truncated_fraction > 0.5 of the completions were cut off at max_new_tokens, which most rewards count as wrong: \
raise max_new_tokens, or try --soft_punish_cache, --mask_truncated_completions
mismatch_kl > 0.01 nats a token between the sampler and the trainer: the ratios are noise; \
try --dtype=float32 or --importance_sampling_cap=2
clip_fraction > 0.3 of the tokens are clipped: the steps are too large, or there are too many of them in an iteration; \
try a lower learning_rate or num_iterations
"""


def hints(record: dict):
    """A line of the log -> {figure: hint} for the figures beyond their thresholds. {} for SFT, which has no groups."""
    lines = {}
    for line in HINTS.splitlines():
        name, sign, limit, meaning = line.split(maxsplit=3)
        value = record.get(name)
        taught = name == "frac_reward_zero_std" and "divergence" in record
        if value is None or taught or not {"reward_mean", "divergence"} & record.keys():
            continue
        if value > float(limit) if sign == ">" else value < float(limit):
            lines[name] = f"{name} {value:.3g} ({sign} {limit}) {meaning}"
    return lines
