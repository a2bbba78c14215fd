"""Several processes take the steps of one: the same samples, gradients and weights, whoever has which share of the work."""

from dataclasses import replace

import pytest
import torch

import grpo
from batch import Cut
from helpers.commands import python
from helpers.errors import assert_refused
from helpers.models import DEVICE, make_model
from helpers.rollouts import some_rollouts
from helpers.runs import assert_same_weights, told
from processes import CHECKS, GRPO
from runs.prepare import prepare
from settings import GRPOSettings
from snug.memory.plan import plan
from training.dry_run import DryRun
from training.optimizer import make_optimizer
from training.parallel import Processes, merged

long = pytest.mark.long
ALL = ["sft", *CHECKS]
ALIVE = [name for name in ALL if name not in ("host", "out of memory", "nf4")]  # it ends or refuses these
WHOLE = [name for name in ALL if name != "offload"]
KINDS = dict(ddp2=[*WHOLE, "episodes"], ddp4=WHOLE, fsdp1=["offload", "lora"], fsdp2=ALIVE, fsdp4=ALIVE)
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="gloo on a CPU")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A folder with all that one process and several have found."""
    folder = tmp_path_factory.mktemp("processes")
    compared = dict.fromkeys(sum(KINDS.values(), []))
    jobs = [f"none1:{','.join(compared)},resume1", "ddp2:resume2", "fsdp2:resume3", "none1:resume4"]
    jobs += [f"{kind}:{','.join(names)}" for kind, names in KINDS.items()]
    done = python("tests/processes.py", folder, *jobs)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@long
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in KINDS.items() for name in names])
def test_processes_take_the_steps_of_one(found, kind, name):
    (ours, samples), (theirs, expected) = told(found / kind / name), told(found / "none1" / name)
    assert samples == expected  # texts and rewards
    assert len(ours) == len(theirs) > 1
    for our, their in zip(ours, theirs, strict=True):
        assert our == {key: pytest.approx(value, abs=1e-6) for key, value in their.items()}
    assert_same_weights(found / kind / name, found / "none1" / name, 1e-5 if name in ("lora", "nf4") else 1e-9)


@long
def test_a_run_goes_on_with_more_processes_and_with_fewer(found):
    """An iteration of one process, one of two with whole models, one of two with shards, one of one process again."""
    assert_same_weights(found / "resume", found / "none1/plain", 1e-9)
    assert told(found / "resume")[1] == told(found / "none1/plain")[1]


@long
def test_only_rank_0_writes(found):
    out = (found / "ddp4/out.txt").read_text()
    folders = [path.name for path in (found / "ddp4").iterdir() if path.is_dir()]
    assert out.count("GRPO on addition") == len([name for name in folders if name != "sft"])
    assert "sequences 0 to" in (found / "fsdp2/dropped/log.txt").read_text()


def test_a_process_of_several_is_planned_by_its_share_of_the_batch():
    settings = GRPOSettings(**GRPO | dict(batch_size=8, train_batch_size=16, n_layer=2, plan=True))
    rehearse = DryRun(prepare(settings), grpo.iterate)
    ddp = plan(rehearse, replace(settings, parallel="ddp", num_processes=2))
    assert ddp.peak == plan(rehearse, replace(settings, batch_size=4, train_batch_size=8, eval_prompts=3)).peak
    for options, message in (
        (dict(num_processes=2), "parallel=none does not support num_processes=2; use --num_processes=1"),
        (dict(parallel="ddp", num_processes=8, batch_size=4), "batch_size=4 is less than 8 processes"),
        (dict(parallel="fsdp", plan=True), "parallel=fsdp does not support plan=True; use --plan=False"),
    ):
        assert_refused(message, GRPOSettings(**options).check)


def test_metrics_are_added_up_and_maxima_are_not():
    shares = [dict(loss=0.5, difference_max=3.0), dict(loss=0.25, difference_max=4.0, clipped=1.0)]
    assert merged(shares) == dict(loss=0.75, difference_max=4.0, clipped=1.0)


def test_bfloat16_gradients_are_added_in_float32(monkeypatch):
    """1 and four shares of 2^-9: in bfloat16 each sum would be 1. Here piece by piece."""
    model, processes = make_model(dtype=torch.bfloat16), Processes.__new__(Processes)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    processes.from_all_ranks = lambda work: [work()]
    monkeypatch.setattr("torch.distributed.all_reduce", lambda total: [total.add_(2**-9) for _ in range(4)])
    monkeypatch.setattr("training.parallel.PIECE", 100)
    processes.add_up(model, make_optimizer(model, GRPOSettings(param_dtype="bfloat16")), {})
    assert all((p.grad == 1 + 2**-7).all() for p in model.parameters())


def test_an_exchange_that_fails_is_one_line():
    processes = Processes.__new__(Processes)
    processes.size = 2
    assert_refused("^the processes cannot exchange data; torchrun says why", processes.from_all_ranks, int)


def test_a_sequence_that_moves_to_another_process_keeps_one_entropy():
    """An out-of-memory ends the first attempt of a step; its groups are dealt again, in smaller parts."""
    model = make_model(dtype=torch.float64)
    rollouts, settings = some_rollouts(model), GRPOSettings()
    found = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        processes = Processes.__new__(Processes)
        processes.rank, processes.size = rank, size
        cut, entropies = Cut(rollouts, group_size=4, processes=processes), torch.zeros_like(rollouts.sampling_logprobs)
        before = cut.rank_of
        for _ in range(2):
            grpo.accumulate_gradient(model, rollouts, cut, 0, settings, entropies)
            cut = cut.with_limit(cut.longest)
        found.append(entropies)
    assert before != cut.rank_of
    torch.testing.assert_close(found[1] + found[2], found[0], rtol=0, atol=1e-12)
