"""What an iteration's figures say when something is not well: one line each, with what to try.

The thresholds are where others have seen runs go wrong, not laws: an easy task ends with most of its groups solved, and is
told so. A line is said once a run; the log's `hints` name those that hold, in every iteration.

Left out: what guard.py stops, and anything that is not in the log's line already.
"""

HINTS = (  # figure of the log, from where on, what it means and what to try
    (
        "frac_reward_zero_std",
        ">",
        0.8,
        "of the groups have equal rewards and teach nothing: the prompts are too easy or too hard; try --max_num_gen_batches=3, a larger "
        "group_size, other prompts",
    ),
    (
        "entropy",
        "<",
        0.01,
        "nats a token: a group's completions are nearly alike, so there is little to compare; try --epsilon_high=0.28, a small entropy_coef, a "
        "lower learning_rate",
    ),
    (
        "kl",
        ">",
        1.0,
        "nats a token from the reference: the policy has left what it knew; try a lower learning_rate or a larger beta",
    ),
    (
        "truncated_fraction",
        ">",
        0.5,
        "of the completions were cut off at max_new_tokens, which most rewards count as wrong: raise max_new_tokens, or try --soft_punish_cache, "
        "--mask_truncated_completions",
    ),
    (
        "mismatch_kl",
        ">",
        0.01,
        "nats a token between the sampler and the trainer: the ratios are noise; try --dtype=float32 or --importance_sampling_cap=2",
    ),
    (
        "clip_fraction",
        ">",
        0.3,
        "of the tokens are clipped: the steps are too large or too many a rollout; try a lower learning_rate or num_iterations",
    ),
)


def hints(record):
    """A line of the log -> {figure: what it says}, for those beyond their thresholds."""
    found = {}
    if "reward_mean" not in record:  # they are of groups, and of options of grpo.py
        return found
    for name, side, threshold, meaning in HINTS:
        value = record.get(name)
        if value is not None and (value > threshold if side == ">" else value < threshold):
            found[name] = f"{name} {value:.3g} ({side} {threshold:g}) {meaning}"
    return found
