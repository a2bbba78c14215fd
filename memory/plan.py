"""Peak bytes of an iteration, before it runs: on any machine, without a GPU, in seconds.

    python grpo.py config/grpo_small.py --plan
    python grpo.py config/grpo_24gb.py --plan --device=cuda --memory_budget_gb=24

The real code runs on fake tensors, which have shapes and no data: init, then one iteration at the longest lengths there
may be (training/dry_run.py). A ledger that follows every storage says how many bytes are alive when, and what for.

A model's blocks are alike, so two depths are enough: within one stretch of an iteration (a forward, a backward) the
peak's bytes are a linear function of the depth. `plan` runs DEPTHS blocks and continues the lines.

What only CUDA does is in CUDA_EXTRA, or left out: blocks are rounded up to 512 bytes, freed ones may not fit the next
tensor (fragmentation: reserved is more than allocated), the CUDA context takes some 0.5 GiB, and attention's backward
sums dq in float32. Ops are trusted not to allocate more inside than they return.
"""

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from device.host import HostLedger
from device.kinds import MIB, PlanningMode, is_planned
from device.processes import BUCKET
from memory.ledger import LiveBytes
from memory.meter import MemoryMeter

GIB = 2**30
MEASURING = ("memory.ledger", "memory.meter", "memory.plan")
DEPTHS = 2, 3
# cuBLAS's workspaces on Hopper: of the forward's thread, of the backward's, of CUDA graphs
CUDA_EXTRA = 3 * 32 * MIB
HOME = str(Path(__file__).parent.parent) + os.sep
# components of which FSDP leaves each process a part
SHARDED = ("weights", "gradients", "moments", "reference")
SITES = (  # where a tensor is made (module, beginning of the function's name) -> what it counts as
    ("decoding.kvcache", "KVCache", "KV cache"),
    ("decoding.draw", "", "logits"),
    ("decoding.decode_batch", "", "rollouts"),
    ("sample", "", "rollouts"),
    ("training.dry_run", "", "rollouts"),
    ("logprobs.head", "HeadLoss.forward", "gradients"),
    ("logprobs", "", "logits"),
    ("loss", "", "loss"),
    ("batch", "", "micro-batch"),
    ("model", "make_model", "weights"),
    ("model", "", "activations"),
    ("kernels.layers", "Embed.backward", "gradients"),
    ("kernels.layers", "BlockInput", "block inputs"),
    ("kernels.adamw", "", "optimizer's buffers"),
    ("kernels", "", "activations"),
    ("lora", "", "activations"),
    ("training.optimizer", "make_optimizer", "moments"),
    ("training.optimizer", "SlabAdamW.__init__", "moments"),
    ("training.optimizer", "HostGradients", "gradients"),
    ("training.optimizer", "", "optimizer's buffers"),
    ("grpo", "trainer_logprobs", "rollouts"),
    ("grpo", "iterate", "rollouts"),
    ("grpo", "", "backward"),  # what autograd makes while backward runs
    ("train_sft", "", "backward"),
    ("runs.saver", "not_finite", "loss"),
)


@dataclass
class Storage:
    """What became of a storage. born, died: how many storages had been made by then; died None: it still lives."""

    size: int  # bytes
    shape: tuple
    dtype: str
    component: str
    name: str
    born: int
    died: int | None = None


class Recorder:
    """Part of a ledger: remembers each storage, and the peak of each stretch of the iteration."""

    def __init__(self, *args):
        super().__init__(*args)
        self.storages, self.alive = [], {}  # alive: key -> number of the storage
        self.stretch, self.peaks = None, {}  # peaks: stretch -> (bytes, storages made by then)

    def created(self, key, tensor, size):
        self.alive[key] = len(self.storages)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.storages.append(Storage(size, tuple(tensor.shape), dtype, *made_at(), len(self.storages)))
        stretch = self.current_stretch()
        if stretch is not None and self.current > self.peaks.get(stretch, (-1, 0))[0]:
            self.peaks[stretch] = self.current, len(self.storages)

    def current_stretch(self):
        return "all"

    def forget(self, key):
        super().forget(key)
        if key in self.alive:
            self.storages[self.alive.pop(key)].died = len(self.storages)

    def label(self, component, named):
        """Say what some tensors are, (name, tensor) pairs; those that are alive and were made here."""
        for name, tensor in named:
            number = self.alive.get(id(tensor.untyped_storage()))
            if number is not None:
                self.storages[number].component, self.storages[number].name = component, name

    def alive_at(self, made):
        """The storages that were alive when so many had been made."""
        return [s for s in self.storages if s.born < made and (s.died is None or s.died >= made)]


class PlannedHost(Recorder, HostLedger):
    pass


class PlannedBytes(Recorder, LiveBytes):
    """A stretch: (phase, number), a new one wherever backward begins or ends."""

    phase, number, backward = None, 0, False

    def current_stretch(self):
        backward = torch._C._current_graph_task_id() != -1
        if backward != self.backward:
            self.backward, self.number = backward, self.number + 1
        return self.phase and (self.phase, self.number)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and is_planned(args[0]):
            # The value of a tensor without data. Losses and norms are finite, and there is something to learn.
            return (
                True if args[0].dtype == torch.bool else 0 if not args[0].is_floating_point() else 0.0
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


def made_at():
    """-> (component, function) of the nearest frame of this project that is not the measuring's own."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(HOME) and "site-packages" not in path:
            module = path.removeprefix(HOME).removesuffix(".py").replace(os.sep, ".")
            if module not in MEASURING and not module.startswith("device."):
                function = frame.f_code.co_qualname
                here = (
                    c
                    for its, start, c in SITES
                    if f"{module}.".startswith(f"{its}.") and function.startswith(start)
                )
                return next(here, "other"), function
        frame = frame.f_back
    return "other", ""


class PlanMeter(MemoryMeter):
    """A meter of fake tensors."""

    def __init__(self, host):
        super().__init__("cpu")
        self.live = PlannedBytes(host)

    @contextmanager
    def phase(self, name):
        with super().phase(name):
            self.live.phase = name
            yield
        self.live.phase = None

    def label(self, component, named):
        named = list(named)
        self.live.label(component, named)
        self.live.host.label(component, named)


@dataclass
class Peak:
    """The most bytes of a stretch, by component, and the storages that were alive then."""

    size: int
    components: dict
    storages: list


def peaks_of(recorder) -> dict:
    """-> {stretch: Peak}"""
    found = {}
    for stretch, (size, made) in recorder.peaks.items():
        storages, components = recorder.alive_at(made), {}
        for s in storages:
            components[s.component] = components.get(s.component, 0) + s.size
        found[stretch] = Peak(size, components, storages)
    return found


def deepen(peak, deeper, depth) -> Peak:
    """The Peaks of the same stretch at the two DEPTHS -> that at another depth, on the line through both."""

    def line(a, b):
        return a + (b - a) * (depth - DEPTHS[0]) // (DEPTHS[1] - DEPTHS[0])

    components = {
        name: line(peak.components.get(name, 0), deeper.components.get(name, 0))
        for name in deeper.components | peak.components
    }
    same = {}  # component, name and type -> the storages at each depth
    for depth_, its in enumerate((peak, deeper)):
        for s in its.storages:
            same.setdefault((s.component, s.name, s.dtype), ([], []))[depth_].append(s)
    storages = []
    for shallow, deep in same.values():
        for a, b in (
            zip(shallow, deep, strict=True) if len(shallow) == len(deep) else ((s, s) for s in deep)
        ):
            # One that holds all blocks' at once, such as the KV cache, grows with the depth.
            shape = tuple(map(line, a.shape, b.shape)) if len(a.shape) == len(b.shape) else b.shape
            storages.append(Storage(line(a.size, b.size), shape, b.dtype, b.component, b.name, b.born))
    return Peak(line(peak.size, deeper.size), components, storages)


@dataclass
class Plan:
    """Bytes. phases: name -> (peak, {component: bytes}); biggest: (bytes, what), in the phase that has the peak."""

    kind: str  # "cuda" or "cpu"
    peak: int
    host: int
    phase: str
    phases: dict
    biggest: list
    host_components: dict

    def text(self) -> str:
        """A table of components and phases, then the biggest tensors."""
        unit, size = ("GiB", GIB) if self.peak >= GIB else ("MiB", MIB)
        largest = {}
        for _, parts in self.phases.values():
            for name, bytes_ in parts.items():
                largest[name] = max(bytes_, largest.get(name, 0))
        shown = sorted(
            (name for name in largest if largest[name] >= self.peak / 1000),
            key=lambda name: -largest[name],
        )
        lines = [f"planned for {self.kind}: {unit} at each phase's peak"]
        lines.append(f"{'':22}" + "".join(f"{name:>11}" for name in self.phases))
        for name in shown:
            parts = (parts.get(name, 0) / size for _, parts in self.phases.values())
            lines.append(f"{name:22}" + "".join(f"{part:11.2f}" for part in parts))
        lines.append(
            f"{'together':22}" + "".join(f"{peak / size:11.2f}" for peak, _ in self.phases.values())
        )
        lines += [f"the biggest in {self.phase}:"] + [
            f"{bytes_ / size:11.2f}  {name}" for bytes_, name in self.biggest
        ]
        if self.host:
            parts = ", ".join(
                f"{name} {bytes_ / size:.2f}" for name, bytes_ in self.host_components.items()
            )
            lines.append(f"on the host: {self.host / size:.2f} ({parts})")
        return "\n".join(lines)

    def line(self) -> str:
        return f"peak_gib={self.peak / GIB:.3f} host_gib={self.host / GIB:.3f} phase={self.phase}"


def plan(dry_run, settings) -> Plan:
    """The Plan of settings.device. dry_run(settings, n_layer, meter) runs init and an iteration of a model so deep."""
    kind, depth = kind_planned(settings.device), dry_run.n_layer
    runs = [
        record(dry_run, settings, kind, n_layer)
        for n_layer in (DEPTHS if depth > DEPTHS[1] else [depth])
    ]
    device, host = (
        {
            stretch: deepen(run[stretch], runs[1][i][stretch], depth) if len(runs) > 1 else run[stretch]
            for stretch in run
        }
        for i, run in enumerate(runs[0])
    )
    always = {"cuBLAS workspace": CUDA_EXTRA} if kind == "cuda" else {}
    always |= {"all-reduce bucket": BUCKET} if settings.parallel == "ddp" else {}
    extra, phases = sum(always.values()), {}
    for (phase, _), peak in device.items():
        if phase not in phases or peak.size > phases[phase].size:
            phases[phase] = peak
    binding = max(phases, key=lambda phase: phases[phase].size)
    biggest = sorted(phases[binding].storages, key=lambda s: -s.size)[:6]
    host = host.get("all", Peak(0, {}, []))
    whole = Plan(
        kind,
        phases[binding].size + extra,
        host.size,
        binding,
        {phase: (peak.size + extra, always | peak.components) for phase, peak in phases.items()},
        [(s.size, f"{s.component}: {s.name} {s.shape} {s.dtype}") for s in biggest],
        host.components,
    )
    return (
        sharded(whole, settings, *dry_run.units(settings))
        if settings.parallel in ("fsdp", "hsdp")
        else whole
    )


def sharded(whole: Plan, settings, outside: int, block: int) -> Plan:
    """A Plan of whole weights -> that of one process. fsdp shards them over all, hsdp over a machine's.

    outside, block: bytes of the weights outside the blocks, and of a block. Not run, but added up: two blocks and the
    weights outside are gathered while the model runs; the gradients of one block and of those outside; the float32 copy
    that is reduced; for a rollout all weights. tests/test_parallel.py compares it with what runs need.
    """
    n = settings.processes_per_machine if settings.parallel == "hsdp" else settings.num_processes
    phases, weights = {}, max(parts["weights"] for _, parts in whole.phases.values())
    offloaded = ("weights", "gradients", "reference") if settings.param_offload else ()
    host = {
        name: size // n if name in SHARDED else size for name, size in whole.host_components.items()
    }
    width = getattr(torch, settings.param_dtype).itemsize
    wide = max(outside, block) * max(4, width) // width
    for phase, (_, parts) in whole.phases.items():
        parts = {name: size // n if name in SHARDED else size for name, size in parts.items()}
        host |= {name: max(parts.pop(name), host.get(name, 0)) for name in offloaded if name in parts}
        here = dict(
            rollout=weights, eval=weights, reference=outside + 2 * block, train=outside + 2 * block
        )
        parts["gathered weights"] = here.get(phase, 0)
        if phase == "train" and not settings.lora_rank:
            parts["gathered gradients"] = block + outside + wide
        phases[phase] = sum(parts.values()), parts
    binding = max(phases, key=lambda phase: phases[phase][0])
    biggest = sorted(((size, name) for name, size in phases[binding][1].items()), reverse=True)[:6]
    return Plan(whole.kind, phases[binding][0], sum(host.values()), binding, phases, biggest, host)


def record(dry_run, settings, kind, n_layer):
    """-> ({stretch: Peak} of the device, the same of the host)."""
    host = PlannedHost()
    with PlanningMode(kind, host), PlanMeter(host) as meter:
        dry_run(settings, n_layer, meter)
    return peaks_of(meter.live), peaks_of(host)


def kind_planned(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]
