"""Peak bytes of an iteration, before it runs: on any machine, without a GPU, in seconds.

    python grpo.py config/grpo_small.py --plan
    python grpo.py config/grpo_24gb.py --plan --device=cuda --memory_budget_gb=24

The real code runs on fake tensors, which have shapes and no data: init, then one iteration with the longest possible
prompts and completions (training/dry_run.py). A ledger follows every storage: when it is alive, and what it is for.

A model's blocks are alike, or every n-th block is of another kind, so two depths are enough: within one stretch of an
iteration (a forward, a backward) the peak's bytes are a linear function of the depth. `plan` runs the two depths of
`depths_of` and extrapolates.

CUDA_EXTRA has what only CUDA needs. Left out are: the allocator rounds sizes up to 512 bytes; freed memory may not fit
the next tensor (fragmentation: reserved is more than allocated); the CUDA context takes about 0.5 GiB; attention's
backward sums dq in float32. The plan trusts that no op allocates more inside itself than it returns.
"""

import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from snug.device.host import Ledger
from snug.device.kinds import MIB, PlanningMode, is_planned, kind_planned
from snug.memory.ledger import LiveBytes, component_of, unwatched
from snug.memory.meter import MemoryMeter

GIB = 2**30
# cuBLAS's workspaces on Hopper: one for the forward's thread, one for the backward's, one for CUDA graphs
CUDA_EXTRA = 3 * 32 * MIB


@dataclass
class Storage:
    """name: the tensor's label, or else the name of the function that made the tensor."""

    size: int  # bytes
    shape: tuple
    dtype: str
    component: str
    name: str


class Recorder(Ledger):
    """Remembers what was alive at the peak of each stretch of the iteration. The host has one stretch, "all"."""

    def __init__(self, *args):
        super().__init__(*args)
        self.made = {}  # id of a storage -> the last Storage that had it
        self.peaks = {}  # stretch -> (bytes, [Storage])

    def follow(self, tensor):
        key = id(tensor.untyped_storage())
        known = key in self.sizes
        super().follow(tensor)
        if known or key not in self.sizes:  # a host's tensor, perhaps
            return
        size, dtype = self.sizes[key][1], str(tensor.dtype).removeprefix("torch.")
        self.made[key] = Storage(size, tuple(tensor.shape), dtype, *component_of(sys._getframe(1)))
        stretch = self.current_stretch()
        if stretch is not None and self.current > self.peaks.get(stretch, (-1, []))[0]:
            self.peaks[stretch] = self.current, list(map(self.made.get, self.sizes))

    def current_stretch(self):
        return "all"

    def label(self, component, named):
        """Set component and name of the storages of these (name, tensor) pairs, if this ledger follows them."""
        for name, tensor in named:
            if (key := id(tensor.untyped_storage())) in self.sizes:
                self.made[key].component, self.made[key].name = component, name


class PlannedBytes(Recorder, LiveBytes):
    """A stretch is (phase, number). A new one begins wherever backward begins or ends."""

    number, backward = 0, False

    def current_stretch(self):
        backward = torch._C._current_graph_task_id() != -1
        if backward != self.backward:
            self.backward, self.number = backward, self.number + 1
        return self.meter.now and (self.meter.now, self.number)

    def __torch_dispatch__(self, func, types, args, kwargs):
        if func is torch.ops.aten._local_scalar_dense.default and is_planned(args[0]):
            # `item` of a tensor without data: let losses and norms be finite, and something be left to learn
            return int(args[0].dtype == torch.bool)
        return super().__torch_dispatch__(func, types, args, kwargs)


class PlanMeter(MemoryMeter):
    """A meter of fake tensors."""

    def __init__(self, host):
        super().__init__("cpu")
        self.live = PlannedBytes(host)
        self.live.meter = self

    def label(self, component, named):
        named = list(named)
        self.live.label(component, named)
        self.live.host.label(component, named)


class Peak:
    """What was alive at the peak of a stretch. components: {name: bytes}.

    largest: {(component, name): the largest Storage with both}.
    """

    def __init__(self, storages):
        self.components, self.largest = Counter(), {}
        for s in storages:
            self.components[s.component] += s.size
            key = s.component, s.name
            self.largest[key] = max(s, self.largest.get(key, s), key=lambda s: s.size)

    @property
    def size(self):
        return self.components.total()


def depths_of(depth: int, period: int):
    """-> the two depths from which the plan of `depth` follows, or [depth] if it is not deeper. period: every
    period-th block is of another kind; 1: all are alike. 26 blocks with a period of 6 are 4 periods and 2 blocks: 8 and
    14. 24 blocks that are alike: 2 and 3."""
    first = depth % period + period if period > 1 else 2
    return [first, first + period] if depth > first + period else [depth]


def deepen(shallow: Peak, deep: Peak, steps: float):
    """The Peaks of one stretch at the two depths -> the Peak on the line through both, `steps` steps from the first."""

    def line(a, b):
        return round(a + (b - a) * steps)

    peak = Peak([])
    for name in deep.components | shallow.components:
        peak.components[name] = line(shallow.components[name], deep.components[name])
    for key, b in deep.largest.items():
        # A tensor that each block has keeps its size. A tensor for all blocks, such as the KV cache, grows.
        a = shallow.largest.get(key, b)
        peak.largest[key] = replace(
            b, size=line(a.size, b.size), shape=tuple(map(line, a.shape, b.shape))
        )
    return peak


@dataclass
class Plan:
    """Bytes. phases: name -> (peak, {component: bytes}); biggest: (bytes, what), in the phase that has the peak."""

    kind: str  # "cuda", "mps" or "cpu"
    peak: int
    host: int
    phase: str
    phases: dict
    biggest: list
    host_components: dict

    def text(self) -> str:
        """A table of components and phases, then the biggest tensors."""
        unit, size = ("GiB", GIB) if self.peak >= GIB else ("MiB", MIB)

        def row(name, sizes):
            return f"{name:22}" + "".join(f"{bytes_ / size:11.2f}" for bytes_ in sizes)

        tables, largest = [components for _, components in self.phases.values()], Counter()
        for components in tables:
            largest |= components  # the larger of both
        lines = [
            f"planned for {self.kind}: {unit} at each phase's peak",
            f"{'':22}" + "".join(f"{name:>11}" for name in self.phases),
        ]
        for name, most in largest.most_common():
            if most >= self.peak / 1000:
                lines.append(row(name, [components[name] for components in tables]))
        lines += [
            row("together", [peak for peak, _ in self.phases.values()]),
            f"the biggest in {self.phase}:",
            *(f"{bytes_ / size:11.2f}  {name}" for bytes_, name in self.biggest),
        ]
        if self.host:
            each = [f"{name} {bytes_ / size:.2f}" for name, bytes_ in self.host_components.items()]
            lines.append(f"on the host: {self.host / size:.2f} ({', '.join(each)})")
        return "\n".join(lines)

    def line(self) -> str:
        return f"peak_gib={self.peak / GIB:.3f} host_gib={self.host / GIB:.3f} phase={self.phase}"


def plan(dry_run, settings) -> Plan:
    """The Plan of settings.device. dry_run(settings, n_layer, meter) runs init and an iteration of a model with n_layer
    blocks."""
    kind, depth = kind_planned(settings.device), dry_run.n_layer
    depths = depths_of(depth, dry_run.period)
    steps = (depth - depths[0]) / dry_run.period
    recorded = []  # for each depth: {stretch: Peak}, of the device's stretches and the host's "all"
    for n_layer in depths:
        host = Recorder()
        # On MPS torch trains with this attention, which keeps the attention weights for backward.
        attention = sdpa_kernel(SDPBackend.MATH) if kind == "mps" else nullcontext()
        # Inside a run (--probe) the run's meter must not count this. A reward function may have switched gradients off.
        with (
            unwatched(),
            torch.enable_grad(),
            PlanningMode(kind, host),
            attention,
            PlanMeter(host) as meter,
        ):
            dry_run(settings, n_layer, meter)
        peaks = meter.live.peaks | host.peaks
        recorded.append({stretch: Peak(storages) for stretch, (_, storages) in peaks.items()})
    shallow, deep = recorded[0], recorded[-1]
    peaks = {stretch: deepen(peak, deep[stretch], steps) for stretch, peak in shallow.items()}
    on_host = peaks.pop("all", Peak([])).components
    highest = {}  # phase -> the Peak of its highest stretch
    for (phase, _), peak in peaks.items():
        if phase not in highest or peak.size > highest[phase].size:
            highest[phase] = peak
    if kind == "cuda":
        for peak in highest.values():
            peak.components["cuBLAS workspace"] = CUDA_EXTRA
    binding = max(highest, key=lambda phase: highest[phase].size)
    biggest = [
        (s.size, f"{s.component}: {s.name} {s.shape} {s.dtype}")
        for s in highest[binding].largest.values()
    ]
    return Plan(
        kind=kind,
        peak=highest[binding].size,
        host=sum(on_host.values()),
        phase=binding,
        phases={phase: (peak.size, peak.components) for phase, peak in highest.items()},
        biggest=sorted(biggest, reverse=True)[:6],
        host_components=on_host,
    )
