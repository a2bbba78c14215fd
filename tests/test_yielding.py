"""A budget that moves: the same weights whatever it is, what is said, a wait, a kill; and what a run may use."""

import random
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import moving
import pytest
import torch
from conftest import DEVICE, limits_of, make_model
from test_optimizer import train

import grpo
from runs.checkpoint import newest, read_state
from runs.log import read_log
from runs.page.charts import timeline
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings
from snug.device import host
from snug.device.host import HOST, borrowed, keep_on_device, stream_from_host
from snug.memory import fit
from snug.memory.fit import Room, asked, ladder, room_for, step_back
from snug.memory.plan import GIB, Plan
from snug.options import SnugError
from training import yielding
from training.frozen import relocate
from training.state import Training

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="budgets of a CPU")


LONG = pytest.mark.long
UNIT = 10**5
CPU = torch.device("cpu")


def formula(dry_run, settings):
    """A plan in which each value of each option on the ladder saves UNIT, and each place on the host takes as much."""
    steps = ladder(settings, "cpu", *dry_run.longest)
    now = {name: getattr(settings, name) for name in steps}
    places = [values.index(now[name]) if now[name] in values else 0 for name, values in steps.items()]
    peak = UNIT * sum(len(values) - place for values, place in zip(steps.values(), places, strict=True))
    on_host = UNIT * sum(value in ("host", True) for value in now.values())
    return Plan("cpu", peak, on_host, "train", dict(train=(peak, {})), [(peak, "all")], {})


@pytest.fixture
def quick(monkeypatch):
    """Plans cost nothing."""
    monkeypatch.setattr(fit, "plan", formula)


@pytest.mark.parametrize("name", ["reference", *(pytest.param(n, marks=LONG) for n in ("teacher", "lora", "episodes"))])
def test_budgets_that_move_before_every_phase_change_nothing(name, quick, tmp_path):
    """In float64. All options of the ladder move, there and some of them back."""
    moving.still(tmp_path, name, 10)
    run = moving.moved(tmp_path, name, "moved", 10)
    assert moving.difference(tmp_path / "still", tmp_path / "moved") < 1e-12
    text = (tmp_path / "moved/log.txt").read_text()
    for option in ladder(run.prepared.settings, "cuda", 1, 1):
        assert f"--{option}=" in text, option
    assert text.count("GiB may be used from ") > 2 and text.count("had room for more: changed --") > 2
    records = read_log(tmp_path / "moved")
    assert {f"mem_budget_mb_{phase}" for phase in ("rollout", "reward", "train", "optimizer")} <= records[-1].keys()
    assert len({record["mem_budget_mb_train"] for record in records}) == 10


@LONG
@pytest.mark.parametrize("name", moving.CASES)
def test_no_phase_takes_more_than_its_budget(name, tmp_path):
    """With the planner's own plans. 200 iterations of each case: docs/results.md."""
    moving.still(tmp_path, name, 12)
    run = moving.moved(tmp_path, name, "moved", 12)
    assert moving.difference(tmp_path / "still", tmp_path / "moved") < 1e-12
    assert len(run.peaks) > 50 and all(peak <= line for _, _, peak, line in run.peaks if line)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("what, number", [("phase", 3), pytest.param("change", 0, marks=LONG)])
def test_a_run_that_is_killed_goes_on_as_if_it_was_not(what, number, quick, tmp_path, monkeypatch):
    """Bit for bit, whatever the budget was then. tests/moving.py kills the process itself."""
    moving.moved(tmp_path, "teacher", "moved", 8)

    def kill(*_):
        raise Killed

    monkeypatch.setattr("os.kill", kill)
    with pytest.raises(Killed):
        moving.moved(tmp_path, "teacher", "killed", 8, (what, number))
    assert 0 < read_state(newest(tmp_path / "killed"))["iteration"] < 8
    moving.moved(tmp_path, "teacher", "killed", 8, resume="auto")
    one, other = ((newest(tmp_path / run) / "model.safetensors").read_bytes() for run in ("moved", "killed"))
    assert one == other
    one, other = ([record["grad_norm"] for record in read_log(tmp_path / run)] for run in ("moved", "killed"))
    assert one == other


# ----------------------------------------------------------------------------------------------------------------------
# What a person says and sees


def short_run(tmp_path, iterate=grpo.iterate, rewarded=lambda: None, **changes):
    """Four iterations of `iterate` in tmp_path/run -> the log's text. rewarded: called by the reward function."""
    options = dict(digits=1, n_layer=1, n_embd=16, batch_size=2, group_size=2, max_new_tokens=4, device="cpu")
    options |= dict(eval_prompts=0, max_iters=4, save_interval=0, out_dir=str(tmp_path / "run"))
    prepared = prepare(GRPOSettings(**options | changes))
    prepared.reward_funcs = [lambda prompts, **_: rewarded() or [float(i % 2) for i in range(len(prompts))]]
    (tmp_path / "run").mkdir(exist_ok=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpo, "iterate", iterate)
            assert grpo.main(prepared)
    finally:
        text = (tmp_path / "run/log.txt").read_text()
    return text


def writing(tmp_path, texts):
    """`iterate` that writes these texts into the budget file: {iteration: text}, None removes it."""

    def iterate(iteration, training, *rest):
        file = tmp_path / "run/budget"
        if iteration in texts:
            file.unlink(missing_ok=True)
            if texts[iteration] is not None:
                file.write_text(texts[iteration])
        original(iteration, training, *rest)

    original = grpo.iterate
    return iterate


def test_a_file_holds_in_place_of_the_option(quick, tmp_path):
    """Also where no option asks for a budget. What is no budget is said once, and the option holds."""
    some = f"{10 * UNIT / GIB:.12f}\n"
    text = short_run(tmp_path, writing(tmp_path, {1: some, 2: "8GB", 3: None}))
    wrong = "warning: .*budget: memory_budget_gb='8GB' is not auto or a number of GiB"
    lines = text.splitlines()
    assert f"iteration 1: memory_budget_gb={some.strip()} from now on" in lines
    assert len([line for line in lines if "8GB" in line]) == 1 and re.search(wrong, text)
    assert "iteration 2: memory_budget_gb= from now on" in lines
    assert any(
        line.startswith("0.001 GiB may be used from rollout of iteration 1 on: changed --max_to") for line in lines
    )
    asked_for = ["mem_budget_mb_train" in record for record in read_log(tmp_path / "run")]
    assert asked_for == [False, True, False, False]


def test_without_a_budget_nothing_is_planned_or_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "plan", lambda *_: pytest.fail("planned"))
    assert "changed" not in short_run(tmp_path)


def test_it_goes_back_one_step_at_a_time(quick, tmp_path):
    """After three iterations that had room in every phase, and only to where more fits."""
    texts = {0: f"{6 * UNIT / GIB:.12f}", 1: "1"}
    text = short_run(tmp_path, writing(tmp_path, texts), max_iters=12)
    lowered, *back = [line for line in text.splitlines() if ": changed --" in line]
    assert lowered.startswith("0.001 GiB may be used from rollout of iteration 0 on") and len(back) == 3
    assert all(line.startswith("3 iterations had room for more: changed --") for line in back)
    assert all(line.count("--") == 1 for line in back)


def test_one_phase_without_room_keeps_it_where_it_is(quick, tmp_path, monkeypatch):
    """There is more at the beginning of each iteration, and at its end."""
    little, file = f"{6 * UNIT / GIB:.12f}", tmp_path / "run/budget"
    rewarded = lambda: file.write_text(little) and None  # noqa: E731
    monkeypatch.setattr(Training, "samples", lambda *_: file.write_text("1") and [])
    text = short_run(tmp_path, rewarded=rewarded, max_iters=10)
    assert text.count(": changed --") == 1 and text.count("memory_budget_gb=1 from now on") == 10


def test_a_resumed_run_knows_how_long_there_was_room(quick, tmp_path):
    texts = {0: f"{6 * UNIT / GIB:.12f}", 1: "1"}
    assert "had room" not in short_run(tmp_path, writing(tmp_path, texts), max_iters=3)
    text = short_run(tmp_path, max_iters=4, resume="auto")
    assert text.count("3 iterations had room for more") == 1


def test_a_run_waits_saved_and_goes_on(quick, tmp_path, monkeypatch):
    seconds = []

    def sleep(_):
        seconds.append(1)
        if len(seconds) == 130:
            (tmp_path / "run/budget").unlink()

    monkeypatch.setattr(yielding.time, "sleep", sleep)
    text = short_run(tmp_path, writing(tmp_path, {2: "0"}))
    saved = "saved after iteration 1, before a wait for memory; --resume=auto goes on"
    before, waited = text.split(saved)
    assert "iter 1/4" in before and "waiting" not in before
    told = "waiting: 0.000 GiB may be used before rollout of iteration 2; an iteration takes 0.000 GiB\n"
    assert waited.count(told) == 3 and "going on after 130 s" in waited and "iter 3/4" in waited


def test_a_probe_that_waits_has_nothing_to_save(quick, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/budget").write_text("0")
    options = dict(digits=1, n_layer=1, n_embd=16, batch_size=2, group_size=2, max_new_tokens=4, device="cpu")
    settings = GRPOSettings(**options, out_dir=str(tmp_path / "run"), probe=True, wait_for_memory=0.0)
    with pytest.raises(SnugError, match="stopped by 0 minutes without memory"):
        grpo.main(prepare(settings))


@pytest.mark.parametrize("signalled", [True, False])
def test_a_wait_ends_saved(signalled, quick, tmp_path, monkeypatch):
    """After wait_for_memory minutes, or when the run is told to stop. It goes on from there."""
    iterate = writing(tmp_path, {2: "0"})

    def told_to_stop(iteration, training, *rest):
        if signalled and iteration == 2:
            training.noted.append("SIGTERM")
        iterate(iteration, training, *rest)

    monkeypatch.setattr(yielding.time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(SnugError, match="goes on from .*checkpoint-000002$") as caught:
        short_run(tmp_path, told_to_stop, wait_for_memory=None if signalled else 0.0)
    stopped = "stopped by SIGTERM: 0.000 GiB may be used" if signalled else "stopped by 0 minutes without memory: "
    assert str(caught.value).startswith(stopped)
    (tmp_path / "run/budget").unlink()
    assert "resumed after 2 iterations" in short_run(tmp_path, resume="auto")


def test_the_page_draws_the_budget_that_comes_near(tmp_path):
    """As steps, over the phases in their order; no line where all budgets are far above the peaks."""
    base = {f"mem_max_alloc_mb_{phase}": peak for phase, peak in (("rollout", 4.0), ("train", 8.0))}
    budgets = [{"rollout": 9.0, "train": 12.0}, {"rollout": 99.0, "train": 10.0}]
    records = [base | {"iter": i} | {f"mem_budget_mb_{k}": v for k, v in row.items()} for i, row in enumerate(budgets)]
    *blocks, line = timeline(SimpleNamespace(records=records, folder="run")).series
    assert [block.name for block in blocks] == ["rollout", "train"] and (line.name, line.style) == ("budget", "line")
    assert line.x == [0, 0.5, 0.5, 1, 1, 1.5, 1.5, 2] and line.y == [9, 9, 12, 12, 16, 16, 10, 10]
    for far in (99.0, None):
        one = base | {"iter": 0} | ({"mem_budget_mb_train": far} if far else {})
        assert len(timeline(SimpleNamespace(records=[one], folder="run")).series) == 2


# ----------------------------------------------------------------------------------------------------------------------
# What may be used, and how a run is moved


def write_system(root, cgroup, folders):
    """A system with 100,000 KiB free. folders: {folder of a cgroup: {file: text}}."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 200000 kB\nMemAvailable: 100000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, files in folders.items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / "sys/fs/cgroup" / folder / name).write_text(text)


def limited(limit, used, active=0, inactive=0):
    stat = f"anon 5\nactive_file {active}\ninactive_file {inactive}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def limited_1(limit, used, active=0, inactive=0):
    stat = f"cache 5\nactive_file {active}\ninactive_file {inactive}\ntotal_active_file 9\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


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
        ("4:memory:/x\n3:cpu:/x\n0::/\n", {"memory/x": limited_1(70_000, 50_000, 3_000, 9_000)}, 32_000),
    ],
)
def test_what_the_host_or_its_cgroups_have_left(cgroup, folders, left, tmp_path, monkeypatch):
    write_system(tmp_path, cgroup, folders)
    monkeypatch.setattr(host, "SYSTEM", tmp_path)
    assert host.available_on_host() == left


def test_auto_counts_what_the_run_has(monkeypatch):
    monkeypatch.setattr(fit, "available_on_host", lambda: 1000)
    settings = GRPOSettings(device="cpu")
    assert room_for("auto", settings, torch.device("cpu"), held=200) == Room(0.8 * 1200)
    assert room_for("0.5", settings, torch.device("cpu")) == Room(GIB / 2) and room_for("", settings, "cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(HOST, "current", 70)
    settings = GRPOSettings(device="cuda")
    assert room_for("auto", settings, torch.device("cuda")) == Room(0.95 * 800, 1070)
    assert room_for("2", settings, torch.device("cuda")) == Room(2 * GIB, 1070)


def test_a_cpu_has_no_other_place_for_its_tensors():
    """What it would move to the host would stay in the same memory."""
    steps = ladder(GRPOSettings(device="cpu", beta=0.1), "cpu", 3, 5)
    assert list(steps) == "max_tokens_per_micro_batch logits_chunk_mb max_rollout_batch checkpoint_blocks".split()
    assert Room(15).holds(Plan("cpu", 10, 5, "train", {}, [], {})) and not Room(14).holds(
        Plan("cpu", 10, 5, "train", {}, [], {})
    )
    assert Room(10, 5).holds(Plan("cuda", 10, 5, "train", {}, [], {})) and not Room(99, 4).holds(
        Plan("cuda", 10, 5, "train", {}, [], {})
    )


def test_fsdp_has_no_budget(tmp_path):
    (tmp_path / "budget").write_text("4")
    assert asked(GRPOSettings(), tmp_path, print) == "4"
    assert asked(GRPOSettings(parallel="fsdp"), tmp_path, print) == ""


def test_steps_back_come_to_the_faster_options(quick, monkeypatch):
    """From any options to any faster ones: each step makes one option faster by one value and needs at most what those
    need; at their end no option is slower than in those."""
    monkeypatch.setattr(fit, "APART", {"cpu"})
    draw = random.Random(0)
    dry_run = SimpleNamespace(longest=(8, 8), plans={})
    start = GRPOSettings(device="cpu", beta=0.1, batch_size=4, group_size=4)
    steps = ladder(start, "cpu", 8, 8)
    for _ in range(20):
        now = replace(start, **{name: draw.choice(values) for name, values in steps.items()})
        room = Room(UNIT * draw.randint(len(steps), 40))
        target, planned = fit.fit(dry_run, now, room)
        for _ in range(40):
            after = step_back(dry_run, now, room)
            if after == now:
                break
            places = [(v.index(getattr(now, n)), v.index(getattr(after, n))) for n, v in steps.items()]
            assert sum(a > b for a, b in places) == 1 and all(a <= b + 1 for a, b in places)
            assert formula(dry_run, after).peak <= planned.peak
            now = after
        assert all(v.index(getattr(now, n)) <= v.index(getattr(target, n)) for n, v in steps.items())
    own = replace(start, max_tokens_per_micro_batch=77, logits_chunk_mb=64.0)  # on no ladder
    assert step_back(dry_run, own, Room(10**9)).max_tokens_per_micro_batch == 0


def test_an_out_of_memory_holds_when_the_budget_moves():
    limits = limits_of(GRPOSettings(max_rollout_batch=8))
    limits.lower("max_rollout_batch", 4, "out of memory")
    for asked_for, got in ((0, 4), (2, 2), (8, 4)):
        limits.follow(GRPOSettings(max_rollout_batch=asked_for, max_tokens_per_micro_batch=7))
        assert limits.halved == {"max_rollout_batch": [asked_for, 4]}  # so that a resumed run knows it
        assert limits.max_rollout_batch == got and limits.max_tokens_per_micro_batch == 7
    assert limits.halved == {"max_rollout_batch": [8, 4]}


def test_state_and_gradients_move_between_steps():
    """Also while gradients are there, between backward and the step."""
    places = [dict(), dict(optimizer_device="host", grad_offload=True), dict(grad_offload=True), dict()]
    expected, model = make_model("llama", n_layer=1), make_model("llama", n_layer=1)
    train(expected, SFTSettings(), 8)
    optimizer = train(model, SFTSettings(), 1)
    before, generator = HOST.current, torch.Generator().manual_seed(1)
    slopes = [torch.randn(p.shape, generator=generator) for p in model.parameters()] * 2
    for where in places:
        sum((p * slope).sum() for p, slope in zip(model.parameters(), slopes, strict=False)).backward()
        optimizer.follow(SFTSettings(**where))
        assert all(p.grad is None for p in model.parameters()) == ("grad_offload" in where)
        found = optimizer.gradients()
        assert len(found) == len(list(model.parameters())) and optimizer.fused == (not where)
        for p, slope in zip(model.parameters(), slopes, strict=False):
            torch.testing.assert_close(found[p], slope)
        moments = optimizer.state[next(iter(found))]["exp_avg"]
        assert (id(moments.untyped_storage()) in HOST.sizes) == ("optimizer_device" in where)
        optimizer.zero_grad()
    assert HOST.current == before and not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_teachers_outputs_go_where_its_weights_go():
    """The tensor that an iteration holds is the same; what is under it has moved."""
    teacher = make_model("llama").requires_grad_(False)
    outputs = torch.arange(6.0).view(2, 3)
    relocate(teacher, "host", CPU)  # before it has any
    teacher.outputs = weakref.ref(outputs)
    relocate(teacher, "device", CPU)
    for place in ("host", "host", "device"):
        relocate(teacher, place, CPU)
        assert (id(outputs.untyped_storage()) in HOST.sizes) == (place == "host") == hasattr(teacher, "streamed")
        assert outputs.flatten().tolist() == list(range(6))
    before = outputs.data_ptr()
    relocate(teacher, "device", CPU)
    assert outputs.data_ptr() == before
    del outputs
    relocate(teacher, "host", CPU)
    relocate(None, "host", CPU)


def test_frozen_weights_go_to_the_host_and_back():
    model = make_model("llama").requires_grad_(False)
    tokens = torch.arange(18).view(2, 9)
    expected, before = model(tokens), HOST.current
    for _ in range(2):
        stream_from_host(model, torch.device("cpu"))
        assert HOST.current > before
        with borrowed(model):
            assert torch.equal(model(tokens), expected)
        keep_on_device(model)
        assert HOST.current == before and not model.blocks[0]._forward_hooks
        assert torch.equal(model(tokens), expected)
