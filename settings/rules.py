"""What does not fit together, as data: a test looks up every option and value."""

from typing import Any, NamedTuple

from settings.losses import LOSSES


class Rule(NamedTuple):
    """If `option` has `value`, other options need values. What SFT does not have breaks no rule."""

    option: str
    value: Any
    needs: dict
    # given: the option with its value. other: another option as it is. needed: as it should be
    text: str = "{given} does not support {other}; use --{needed}"


NO_SCALE = "{given} does not support {other}: a mean below 0 is no scale; leave it out"
RULES = [
    Rule(
        "dtype",
        "float32",
        dict(param_dtype="float32"),
        "{given} does not support {other}; use --dtype=bfloat16",
    ),
    Rule(
        "checkpoint_blocks",
        "none",
        dict(activation_offload=False),
        "{given} does not support {other}; use --checkpoint_blocks=block",
    ),
    Rule(
        "importance_sampling_cap",
        None,
        dict(importance_sampling_mode="token_truncate"),
        "{other} needs a cap; use --importance_sampling_cap=2",
    ),
    Rule(
        "multi_objective_aggregation",
        "normalize_then_sum",
        dict(scale_rewards="group", baseline="mean", soft_punish_cache=0),
    ),
    Rule(
        "scale_rewards",
        "group",
        dict(use_kl_in_reward=False),
        "{given} does not support {other}: scaling cancels beta; use --scale_rewards=none",
    ),
    Rule("scale_rewards", "mean", dict(use_kl_in_reward=False, soft_punish_cache=0), NO_SCALE),
    Rule("beta", 0.0, dict(use_kl_in_reward=False), "{other} has no weight with {given}; use --beta=0.01"),
    Rule(
        "group_size",
        1,
        dict(reward_coef=0.0),
        "{given} compares no rewards; use 2 or more, or a --teacher alone: --reward_coef=0",
    ),
    Rule(
        "teacher",
        "",
        dict(reward_coef=1.0),
        "{other} without a teacher leaves nothing else to learn; set it to 1, or name a --teacher",
    ),
    Rule(
        "init_from",
        "",
        dict(lora_rank=0),
        "{other} adapts the weights of init_from; name a run or a model there",
    ),
    Rule(
        "lora_rank",
        0,
        dict(base_dtype=""),
        "{other} freezes the weights; add adapters, such as --lora_rank=16, or leave it out",
    ),
    Rule(
        "parallel",
        "none",
        dict(num_processes=1),
        "{given} does not support {other}; use --parallel=ddp or fsdp",
    ),
    Rule(
        "param_offload",
        True,
        dict(parallel="fsdp"),
        "{given} does not support {other}; use --parallel=fsdp, with one process: torchrun --nproc_per_node=1",
    ),
    Rule(
        "parallel",
        "fsdp",
        dict(
            reference="device",
            teacher_device="device",
            base_dtype="",
            grad_offload=False,
            memory_budget_gb="",
        ),
        "{given} does not support {other}; use --parallel=ddp",
    ),
    *(Rule("loss_type", name, loss.needs) for name, loss in LOSSES.items()),
]
