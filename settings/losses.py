"""What each loss is, and the options of losses. loss.py computes them.

The table is here and not in loss.py because options are checked before torch is imported: the choices of `loss_type`
and the rules for other options, the two visits of the head, and the search for a budget follow from it.
"""

import inspect
from dataclasses import dataclass
from typing import NamedTuple

from data import imported
from snug.options import OWN, SnugError, option


class Loss(NamedTuple):
    """A loss_type. docs/algorithm.md has a row for each."""

    surrogate: str  # the loss of a token: a function in loss.SURROGATES
    average: str  # how tokens are averaged: loss.token_weights
    needs: dict = {}  # values of other options: settings/rules.py
    whole_sequences: bool = (
        False  # does a token's loss look at its whole sequence? Then the head is computed twice
    )


UNCLIPPED = dict(delta=None)
OF_SEQUENCES = dict(
    delta=None, importance_sampling_level="token"
)  # they have a sequence's ratio of their own
LOSSES = {
    "dapo": Loss("clipped", "token"),
    "grpo": Loss("clipped", "sequence"),
    "dr_grpo": Loss("clipped", "constant"),
    "bnpo": Loss("clipped", "micro-batch"),
    "cispo": Loss("cispo", "token", UNCLIPPED),
    "sapo": Loss("sapo", "sequence", UNCLIPPED),
    "luspo": Loss("clipped", "sum", dict(importance_sampling_level="sequence")),
    # Its ratio has the sampler's log-probs already.
    "vespo": Loss("vespo", "token", OF_SEQUENCES | dict(importance_sampling_cap=None), True),
    "gmpo": Loss("gmpo", "sequence", OF_SEQUENCES, True),
}
OWN_LOSS = Loss("own", "token", whole_sequences=True)  # the user's function
# What it gets, by name.
ARGUMENTS = """logprobs old_logprobs ref_logprobs advantages ratio sequence lengths options num_tokens
num_sequences""".split()


def load_loss(spec: str):
    """ "module:function" -> your loss, looked for as a reward function is. Raises SnugError."""
    function = imported(spec, "loss_type", "write module:function, such as my_losses:tight", {})
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise SnugError(
            f"loss_type={spec!r}: {error}; it gets {', '.join(ARGUMENTS)}: name what it needs, then **rest"
        ) from None
    return function


def own_surrogate(logprobs, options, **rest):
    """A surrogate as those of loss.py: your function's. Raises SnugError if it is no loss for each token."""
    values = load_loss(options.loss_type)(logprobs=logprobs, options=options, **rest)
    shape = getattr(values, "shape", None)
    fits = shape == logprobs.shape and hasattr(values, "requires_grad")
    if not fits or logprobs.requires_grad and not values.requires_grad:
        raise SnugError(
            f"loss_type={options.loss_type} must return a tensor [{len(logprobs)}] with a gradient, a loss for each "
            f"token, not {type(values).__name__} {list(shape or [])}{' without one' * fits}"
        )
    return values, 0 * logprobs.detach()


@dataclass
class LossOptions:
    """What is minimized. docs/algorithm.md has the formulas."""

    loss_type: str = option(
        "dapo",
        "docs/algorithm.md has a row for each; module:function: yours",
        choices=(*LOSSES, OWN),
    )
    importance_sampling_level: str = option(
        "token",
        "sequence: one ratio for a completion, the geometric mean of its tokens' (GSPO); set epsilon near 4e-4",
        choices=("token", "sequence"),
    )
    epsilon: float = option(
        0.2, "clip the ratio from 1 - epsilon to 1 + epsilon_high; gmpo: its logarithm, for example by 0.4"
    )
    epsilon_high: float | None = option(
        None, "upper clipping range; none: epsilon. cispo: the largest ratio, for example 5"
    )
    delta: float | None = option(
        None, "largest ratio where the advantage is negative; none: no limit", minimum=1
    )
    sapo_temperature_pos: float = option(1.0, "sapo: sharpness of the gate where A > 0", minimum=1e-3)
    sapo_temperature_neg: float = option(1.05, "sapo: sharpness of the gate elsewhere", minimum=1e-3)
    vespo_k_pos: float = option(2.0, "vespo: power of small sequence ratios where A > 0")
    vespo_lambda_pos: float = option(3.0, "vespo: decay for large ratios where A > 0")
    vespo_k_neg: float = option(3.0, "vespo: power of small sequence ratios where A < 0")
    vespo_lambda_neg: float = option(2.0, "vespo: decay for large ratios where A < 0")
    entropy_coef: float = option(0.0, "weight of a bonus for the tokens' entropy in nats")
    importance_sampling_cap: float | None = option(
        None,
        "weight tokens by p_trainer / p_sampler, at most by this; costs a forward pass; none: off",
        minimum=1,
    )
    importance_sampling_mode: str = option(
        "token_truncate",
        "the ratio of each token or of its sequence; above the cap it is the cap, or 0 with a mask",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    mask_truncated_completions: bool = option(False, "do not train on completions that were cut off")

    @property
    def loss(self) -> Loss:
        return LOSSES.get(self.loss_type, OWN_LOSS)

    @property
    def depends_on_cut(self) -> bool:
        """Do results depend on how a step is cut into micro-batches?"""
        return self.loss.average == "micro-batch"

    @property
    def upper_epsilon(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_whole_sequences(self) -> bool:
        levels = self.importance_sampling_level + self.importance_sampling_mode
        return "sequence" in levels or self.loss.whole_sequences

    def check_loss(self):
        if self.loss_type == "cispo" and (self.epsilon_high or 0) < 1:
            raise SnugError(
                f"epsilon_high={self.epsilon_high} is the largest ratio of cispo; try --epsilon_high=5"
            )
        if self.delta is not None and self.delta <= 1 + self.upper_epsilon:
            raise SnugError(
                f"delta={self.delta} is not above 1 + epsilon_high, where the ratio is clipped"
            )
