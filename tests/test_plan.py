"""The planner against the meter and PyTorch's profiler, and the settings that it finds."""

import dataclasses
import gc
import json
import os
import random
import re

import pytest
import torch

import grpo
import runs
import train_sft
from helpers.errors import assert_refused
from helpers.models import DEVICE
from helpers.peaks import COMMON, LLAMA, measured_peak, prepared_run, profiled_peak
from helpers.rollouts import never_stop
from runs.log import read_log
from runs.prepare import prepare
from sample import sample_groups
from settings import GRPOSettings, SFTSettings
from snug.device import host
from snug.device.host import HOST
from snug.device.kinds import MIB
from snug.memory import fit as memory_fit
from snug.memory.fit import Room, apply, fit, ladder, room_for, show
from snug.memory.plan import GIB, Plan, plan
from snug.options import SnugError, read_settings
from training.dry_run import DryRun

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="exact bytes of a CPU; on CUDA bench/memory.py compares")
BF16 = dict(param_dtype="bfloat16", dtype="bfloat16", optimizer_dtype="bfloat16")
BLOCK = dict(checkpoint_blocks="block", max_tokens_per_micro_batch=306)
PROFILED = "sequence level"  # compared with PyTorch's profiler too, which is slow
# 4-digit additions have prompts of 10 tokens, so a group takes 10 + 4 * 23 = 102 of the row. Micro-batches hold whole
# groups, or 10 + 2 * 23 = 56 tokens of one: then a run whose completions do not stop fills them as the planner does.
CONFIGS = {
    PROFILED: dict(importance_sampling_level="sequence", max_tokens_per_micro_batch=306),
    "all on the host": BLOCK | LLAMA | dict(activation_offload=True, optimizer_device="host", grad_offload=True),
}
# Other tests plan like these: of NF4, of a CUDA device.
RARE = {
    "bfloat16": dict(max_tokens_per_micro_batch=306, n_layer=4, n_embd=192, **BF16),
    "importance, refilled": dict(importance_sampling_cap=2.0, max_num_gen_batches=3, max_tokens_per_micro_batch=306),
    "reference on the host": BLOCK | dict(beta=0.04, reference="host", vocab_size=4080, max_tokens_per_micro_batch=102),
    "selective": dict(checkpoint_blocks="selective", max_tokens_per_micro_batch=306, **LLAMA),
    "autocast": dict(dtype="bfloat16", n_embd=192, **LLAMA),
    "teacher": BLOCK | dict(teacher="x", divergence="reverse_kl", vocab_size=4080, max_tokens_per_micro_batch=102),
    "teacher on the host": BLOCK | dict(teacher="x", teacher_device="host", vocab_size=4080),
    "long rollouts": dict(batch_size=6, group_size=8, max_tokens_per_micro_batch=56, max_rollout_batch=24),
}


def ragged(monkeypatch):
    """No completion stops, and each is cut somewhere."""
    never_stop(monkeypatch)
    original, draw = sample_groups, random.Random(0)

    def cut_somewhere(*args, **options):
        rollouts = original(*args, **options)
        rollouts.completion_lengths = torch.tensor([draw.randint(1, int(n)) for n in rollouts.completion_lengths])
        return rollouts

    monkeypatch.setattr("sample.sample_groups", cut_somewhere)


def dry_run(prepared):
    return DryRun(prepared, train_sft.iterate if isinstance(prepared.settings, SFTSettings) else grpo.iterate)


@pytest.mark.parametrize("name", [*CONFIGS, *(pytest.param(name, marks=pytest.mark.long) for name in RARE)])
def test_the_plan_is_what_a_run_takes(name, tmp_path, monkeypatch):
    """Within 2 % of the meter, phase by phase, and of the profiler's trace of the whole run; the host's bytes exactly.

    Rollouts that are decoded in pieces may take 5 % less: a plan has rows of different lengths, of prompts that are far apart.
    """
    never_stop(monkeypatch)
    most = {"long rollouts": 0.05, "teacher": 0.002}.get(name, 0.02)
    prepared, settings = prepared_run(tmp_path, **(CONFIGS | RARE)[name])
    its_plan = plan(dry_run(prepared), settings)
    gc.collect()
    before = HOST.current
    profiled = profiled_peak(lambda: grpo.main(prepared))[0] if name == PROFILED else grpo.main(prepared) and None
    record = read_log(settings.out_dir)[-1]
    assert its_plan.peak / MIB == pytest.approx(record["mem_max_alloc_mb"], rel=most)
    assert its_plan.line().endswith(f"phase={its_plan.phase}")
    assert record["mem_max_alloc_mb_" + its_plan.phase] == record["mem_max_alloc_mb"]
    if name == "teacher on the host":
        del its_plan.phases["load"]  # a CPU reads it to where its own tensors are
    for phase, (peak, parts) in its_plan.phases.items():
        measured = measured_peak(phase, record, settings.out_dir)
        assert peak / MIB == pytest.approx(measured, rel=most, abs=0.05), phase
        assert peak / MIB > 0.98 * measured - 0.05
        assert sum(parts.values()) == peak and parts.get("other", 0) < 0.02 * peak  # nearly all by name
    assert {"weights", "activations", "logits"} <= its_plan.phases["train"][1].keys()
    if its_plan.host:
        assert its_plan.host == pytest.approx(record["mem_max_host_mb"] * MIB - before, rel=0.02)
    if profiled is not None:  # it sees device and host, and not that they are at their peaks at different times
        assert 0.98 * its_plan.peak <= profiled <= 1.025 * (its_plan.peak + its_plan.host)


@pytest.mark.parametrize(
    "changes, lengths, least",
    [
        (dict(batch_size=32, max_tokens_per_micro_batch=90), ragged, 0.93),  # less than a long group
        # 3 groups, and 3 that find gradients
        pytest.param(dict(max_tokens_per_micro_batch=400, n_embd=192, **BF16), never_stop, 0.8, marks=pytest.mark.long),
    ],
)
def test_a_plan_bounds_a_ragged_run(changes, lengths, least, tmp_path, monkeypatch):
    """A budget that is no multiple of anything; where first-fit fills micro-batches, the plan is not far above."""
    lengths(monkeypatch)
    prepared, settings = prepared_run(tmp_path, eval_prompts=0, **changes)
    planned_peak = plan(dry_run(prepared), settings).phases["train"][0] / MIB
    grpo.main(prepared)
    measured = max(record["mem_max_alloc_mb_train"] for record in read_log(settings.out_dir))
    assert least * planned_peak < measured < 1.02 * planned_peak


def test_the_plan_of_sft(tmp_path):
    changes = dict(batch_size=16, out_dir=str(tmp_path), max_tokens_per_micro_batch=100, checkpoint_blocks="block")
    settings = SFTSettings(**COMMON | BF16 | changes)
    prepared = prepare(settings)
    its_plan = plan(dry_run(prepared), settings)
    train_sft.main(prepared)
    assert its_plan.peak / MIB == pytest.approx(read_log(tmp_path)[-1]["mem_max_alloc_mb"], rel=0.02)


def test_a_gpus_plan_is_in_bfloat16_and_a_cpus_in_float32(capsys, monkeypatch):
    monkeypatch.setattr("training.loop.show", lambda dry_run, settings: f"planned in {settings.dtype}")
    for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32")):
        words = ["config/grpo_small.py", "--plan", f"--device={device}"]
        grpo.main(prepare(*read_settings(GRPOSettings, words)[:2]))
        assert f"planned in {dtype}\n" in capsys.readouterr().out


def made_up_plan(dry_run, settings):
    """A plan from a formula: bytes for what each option on the ladder saves."""
    tokens = settings.max_tokens_per_micro_batch or settings.tokens_per_step(*dry_run.longest)
    kept = dict(none=40, selective=12, block=4)[settings.checkpoint_blocks] - 3 * settings.activation_offload
    sizes = dict(activations=tokens * kept, logits=100 * int(settings.logits_chunk_mb or 16))
    sizes |= dict(cache=200 * (settings.max_rollout_batch or settings.sequences_per_rollout), weights=8000)
    on_host = dict(moments=16000) if settings.optimizer_device == "host" else {}
    sizes |= {} if on_host else dict(moments=16000)
    sizes |= {} if settings.grad_offload else dict(gradients=4000)
    peak, biggest = sum(sizes.values()), [(size, name) for name, size in sizes.items()]
    return Plan("cpu", peak, sum(on_host.values()), "train", dict(train=(peak, sizes)), biggest, on_host)


@pytest.fixture
def made_up(monkeypatch):
    """Plans from the formula, of a CPU whose host is another machine's, as that of a GPU is."""
    monkeypatch.setattr("snug.memory.fit.plan", made_up_plan)
    monkeypatch.setattr("snug.memory.fit.APART", {"cpu"})


SLOWEST = dict(max_tokens_per_micro_batch=33, logits_chunk_mb=16.0, max_rollout_batch=1, checkpoint_blocks="block")
SLOWEST |= dict(optimizer_device="host", activation_offload=True, grad_offload=True)


@pytest.mark.parametrize("share", [1, 0.9, 0.7, 0.5, 0.4, 0.3, 0.2])
def test_fit_finds_the_fastest_options_wherever_it_begins(share, tmp_path, made_up):
    """None of those that were changed has room for a faster value. So a resumed run finds the same again."""
    prepared, settings = prepared_run(tmp_path, **SLOWEST)
    make, steps = dry_run(prepared), ladder(settings, "cpu", *prepared.longest())
    fastest = dataclasses.replace(settings, **{name: values[0] for name, values in steps.items()})
    budget = share * made_up_plan(make, fastest).peak
    fitted, planned = fit(make, settings, Room(budget))
    fitted.check()
    assert fit(make, fitted, Room(budget)) == fit(make, fastest, Room(budget)) == (fitted, planned)
    assert planned == made_up_plan(make, fitted) and planned.peak <= budget
    assert (fitted == fastest) == (share == 1)
    for name, values in steps.items():
        place = values.index(getattr(fitted, name))
        for faster in values[:place]:
            assert made_up_plan(make, dataclasses.replace(fitted, **{name: faster})).peak > budget, name


def test_a_budget_does_not_cut_what_depends_on_the_cut(tmp_path):
    """bnpo averages over each micro-batch."""
    _, settings = prepared_run(tmp_path, n_layer=1, batch_size=4, eval_prompts=0)
    for loss, cut in (("dapo", True), ("bnpo", False)):
        steps = ladder(dataclasses.replace(settings, loss_type=loss), "cpu", 1, 1)
        assert ("max_tokens_per_micro_batch" in steps) == cut


def test_a_budget_bounds_the_run_and_says_so(tmp_path, capsys, monkeypatch):
    steps = dict(max_tokens_per_micro_batch=[0, 200, 102], checkpoint_blocks=["none", "selective", "block"])
    monkeypatch.setattr("snug.memory.fit.ladder", lambda *args: steps)
    prepared, settings = prepared_run(tmp_path, n_layer=1, eval_prompts=0)
    budget = 0.7 * plan(dry_run(prepared), settings).peak
    settings.memory_budget_gb = f"{budget / GIB:f}"
    grpo.main(prepared)
    said = capsys.readouterr().out
    assert "GiB may be used: changed --max_tokens_per_micro_batch=" in said and "planned: peak_gib=" in said
    assert read_log(settings.out_dir)[-1]["mem_max_alloc_mb"] <= budget / MIB
    assert json.loads((tmp_path / "run/settings.json").read_text())["max_tokens_per_micro_batch"] > 0


def test_what_cannot_fit_is_refused_before_the_first_step(tmp_path, capsys, made_up):
    prepared, _ = prepared_run(tmp_path, memory_budget_gb="0.000001")
    said = r"the plan takes .* GiB in train even with --.* may be used; the biggest is .*--base_dtype=nf4.* smaller"
    assert_refused(said, grpo.main, prepared)
    assert "together" in capsys.readouterr().out and not (tmp_path / "run").exists()


def test_a_host_that_is_too_small_gets_nothing(tmp_path, monkeypatch, made_up):
    """The device keeps the moments if it has room for them; else the run is refused."""
    prepared, settings = prepared_run(tmp_path, **SLOWEST)
    peak = made_up_plan(dry_run(prepared), settings).peak
    monkeypatch.setattr("snug.memory.fit.available_on_host", lambda: 1000)
    settings.memory_budget_gb = f"{(1.01 * peak + 16000) / GIB:.9f}"
    assert apply(dry_run(prepared), settings, torch.device("cpu"), print).optimizer_device == "device"
    settings.memory_budget_gb = f"{1.01 * peak / GIB:.9f}"
    with pytest.raises(SnugError, match=r"GiB and [\de.-]+ GiB of the host may be used"):
        apply(dry_run(prepared), settings, torch.device("cpu"), print)


def limited(limit, used, active=0, inactive=0):
    stat = f"anon 5\nactive_file {active}\ninactive_file {inactive}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


@pytest.mark.parametrize(
    "cgroup, folders, left",
    [
        ("0::/\n", {}, 102_400_000),
        ("0::/\n", {"": limited(70_000, 50_000)}, 20_000),
        ("0::/\n", {"": limited(70_000, 50_000, active=3_000, inactive=9_000)}, 32_000),
        ("0::/\n", {"": limited("max", 50_000)}, 102_400_000),
        ("0::/\n", {"": limited(10**12, 50_000)}, 102_400_000),
        ("0::/\n", {"": limited(70_000, 90_000)}, 0),
        ("0::/a/b\n", {"a": limited(70_000, 50_000), "a/b": limited("max", 9)}, 20_000),
        ("0::/docker/123\n", {"": limited(70_000, 50_000)}, 20_000),  # a container that sees its host's names
        ("4:memory:/x\n3:cpu:/x\n0::/a\n", {"a": limited(70_000, 50_000)}, 20_000),
    ],
)
def test_what_the_host_or_its_cgroups_have_left(cgroup, folders, left, tmp_path, monkeypatch):
    """A system with 100,000 KiB free. folders: {folder of a cgroup: {file: text}}."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 200000 kB\nMemAvailable: 100000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for folder, files in folders.items():
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / "sys/fs/cgroup" / folder / name).write_text(text)
    monkeypatch.setattr(host, "SYSTEM", tmp_path)
    assert host.available_on_host() == left


def test_auto_is_what_is_free(monkeypatch):
    monkeypatch.setattr(memory_fit, "available_on_host", lambda: 1000)
    settings = GRPOSettings(device="cpu", memory_budget_gb="auto")
    assert room_for(settings, torch.device("cpu")) == Room(0.8 * 1000)
    half, none = [dataclasses.replace(settings, memory_budget_gb=text) for text in ("0.5", "")]
    assert room_for(half, torch.device("cpu")) == Room(GIB / 2) and room_for(none, "cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 9000))
    settings.device = half.device = "cuda"
    assert room_for(settings, torch.device("cuda")) == Room(0.92 * 300, 1000)
    assert room_for(half, torch.device("cuda")) == Room(GIB / 2, 1000)


def test_a_budget_in_gib_is_a_cap_until_the_next_run(monkeypatch, made_up, tmp_path):
    """Not above the card's memory, here 2 GiB; a run without a budget, and one with auto, has no cap."""
    prepared, settings = prepared_run(tmp_path)
    caps, device = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: caps.append(given))
    for budget in ("0.5", "99", "", "auto"):
        apply(dry_run(prepared), dataclasses.replace(settings, memory_budget_gb=budget), device, print)
    assert caps == [(0.25, device), (1.0, device), (1.0, device), (1.0, device)]


def test_a_cpu_has_no_other_place_for_its_tensors():
    """What it would move to the host would stay in the same memory."""
    steps = ladder(GRPOSettings(device="cpu", beta=0.1), "cpu", 3, 5)
    assert list(steps) == "max_tokens_per_micro_batch logits_chunk_mb max_rollout_batch checkpoint_blocks".split()
    cpu, cuda = (Plan(device, 10, 5, "train", {}, [], {}) for device in ("cpu", "cuda"))
    assert Room(15).holds(cpu) and not Room(14).holds(cpu)
    assert Room(10, 5).holds(cuda) and not Room(99, 4).holds(cuda)


def test_what_plan_prints(tmp_path, monkeypatch, made_up):
    """auto: of what is free a fifth is left alone."""
    prepared, settings = prepared_run(tmp_path)
    peak = made_up_plan(dry_run(prepared), settings).peak
    monkeypatch.setattr("snug.memory.fit.available_on_host", lambda: peak)
    for budget, verdict in (
        (f"{0.8 * peak / GIB:.9f}", r"fits into .* GiB with --max_tokens_per_micro_batch=\d+ "),
        ("1", "fits into 1 GiB with --logits_chunk_mb=64.0$"),
        ("0.000001", "does not fit: the plan takes .*"),
        ("auto", f"fits into {0.8 * peak / GIB:.3g} GiB with --max_tokens_per_micro_batch="),
    ):
        settings.memory_budget_gb = budget
        *table, line, last = show(dry_run(prepared), settings).splitlines()
        assert re.match(verdict, line), line
        assert any(line.split()[:1] == ["together"] for line in table)
        assert last.startswith("peak_gib=0.0") and " host_gib=0.000 phase=train" in last


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_is_set_before_torch_is_imported_unless_the_user_has_set_it(name, monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    runs.set_environment()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "2.11.0+rocm7.2")
        runs.set_environment()
        assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.setenv(name, "garbage_collection_threshold:0.8")
    runs.set_environment()
    assert os.environ.get("PYTORCH_ALLOC_CONF") in (None, "garbage_collection_threshold:0.8")
