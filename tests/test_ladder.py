"""Each option of the memory ladder: the loss curve stays where it was, and less is alive."""

import pytest

import grpo
import train_sft
from helpers.models import DEVICE
from helpers.runs import limits_of
from runs.log import read_log
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings

COMMON = dict(digits=2, n_layer=2, n_embd=32, block_size=24, device=DEVICE, eval_prompts=0, save_interval=0, seed=3)
COMMON["dtype"] = "float32"  # on a GPU too
SFT = COMMON | dict(max_iters=8, batch_size=16, learning_rate=3e-3, demonstration_noise=0.5)
GRPO = COMMON | dict(max_iters=8, batch_size=4, group_size=4, max_new_tokens=10, learning_rate=3e-4, beta=0.04)
FLOAT32 = dict(param_dtype="float32", optimizer_dtype="float32")
EXACT = {  # in float64: what is left is a rounding of 1e-16, which Adam may enlarge
    "token budget": dict(max_tokens_per_micro_batch=60), "small chunks": dict(logits_chunk_mb=0.01),
    "block": dict(checkpoint_blocks="block"), "selective": dict(checkpoint_blocks="selective"),
    "offload": dict(checkpoint_blocks="block", activation_offload=True),
    "optimizer on the host": dict(optimizer_device="host"), "gradients on the host": dict(grad_offload=True),
}  # fmt: skip
EXACT["all together"] = {name: value for changes in EXACT.values() for name, value in changes.items()}
EXACT_GRPO = {"reference on the host": dict(reference="host"), "decoded in limits": dict(max_rollout_batch=3)}
EXACT_GRPO["all together"] = EXACT["all together"] | dict(reference="host", max_rollout_batch=3)


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """-> function of a loop's name and changes: the losses and peaks of its iterations; the plain ones are made once."""
    folder, known = tmp_path_factory.mktemp("ladder"), {}

    def losses(loop, **changes):
        key = loop, tuple(sorted(changes.items()))
        if key not in known:
            out = str(folder / f"{loop}{len(known)}")
            changes = dict(param_dtype="float64", optimizer_dtype="float64") | changes
            if loop == "sft":
                train_sft.main(prepare(SFTSettings(**SFT | changes, out_dir=out)))
            else:
                losses("sft")
                grpo.main(prepare(GRPOSettings(**GRPO | changes, out_dir=out, init_from=known["sft", ()][1])))
            known[key] = read_log(out), out
        return known[key][0]

    return losses


def worst(ours, theirs, name):
    return max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", EXACT)
def test_sft_goes_the_same_way(curves, name):
    plain, changed = curves("sft"), curves("sft", **EXACT[name])
    assert plain[0]["loss"] - plain[-1]["loss"] > 0.5  # it learned something
    assert worst(plain, changed, "loss") <= 1e-9
    if name != "gradients on the host" and DEVICE == "cpu":
        assert changed[-1]["mem_max_alloc_mb"] < plain[-1]["mem_max_alloc_mb"]


@pytest.mark.parametrize("name", EXACT_GRPO)
def test_grpo_goes_the_same_way(curves, name):
    """Same tokens, too: a row does not depend on what is decoded beside it."""
    plain, changed = curves("grpo"), curves("grpo", **EXACT_GRPO[name])
    assert max(record["kl"] for record in plain) > 1e-7
    assert worst(plain, changed, "loss") <= 1e-9 and worst(plain, changed, "kl") <= 1e-9
    assert [record["reward_mean"] for record in plain] == [record["reward_mean"] for record in changed]


HALF = dict(dtype="bfloat16", param_dtype="bfloat16")
ROUNDED = [(dict(dtype="bfloat16"), 0.01), (dict(optimizer_dtype="bfloat16"), 0.002)]
ROUNDED += [(HALF, 0.03), (HALF | dict(optimizer_dtype="bfloat16"), 0.05)]


@pytest.mark.parametrize("changes, most", ROUNDED)
def test_rounding_moves_the_loss_curve_a_little(curves, changes, most):
    plain, changed = curves("sft", **FLOAT32), curves("sft", **FLOAT32 | changes)
    distance = worst(plain, changed, "loss")
    assert 1e-6 < distance <= most


def test_bfloat16_grpo_runs_and_its_sampler_agrees_with_its_trainer(curves):
    records = curves("grpo", **HALF, optimizer_dtype="bfloat16", reference="host", max_iters=5)
    assert all(record["logprob_diff_max"] < 0.3 and record["logprob_diff_mean"] < 0.02 for record in records)


def test_a_smaller_rollout_batch_makes_evaluations_no_larger():
    """Evaluations decode as many completions at a time as a rollout's cache has room for, each behind its own prompt."""
    cases = [(batch, (1, 10_000), 127) for batch in (0, 128, 999)]  # of 16 prompts with 8 completions each
    cases += [(0, (256, 1024), 72)]  # (16 * 1,024 + 128 * 1,024) / 2,048
    cases += [(0, (10_000, 1), 16), (4, (256, 1024), 2), (1, (10_000, 1), 1)]
    for batch, longest, expected in cases:
        settings = GRPOSettings(batch_size=16, group_size=8, max_rollout_batch=batch)
        assert limits_of(settings, longest=longest).max_eval_batch == expected
    assert limits_of(SFTSettings(batch_size=16), longest=(256, 1024)).max_eval_batch == 16
