"""What an iteration will need, before it runs: on any machine, without a GPU, in seconds.

    python grpo.py config/grpo_small.py --plan
    python grpo.py config/grpo_24gb.py --plan --device=cuda --memory_budget_gb=24

The real code runs on fake tensors, which have shapes and no data: init, then one iteration at the longest lengths there may be. A
ledger that follows every storage says how much is alive when, and whose it is. Two micro-batches stand for all, one
decode step, the last, for all: nothing else is left out. The loops say what that is (`rehearsal`, in each).

What only CUDA does is in CUDA_EXTRA, or here: blocks are rounded up to 512 bytes, freed ones may not fit the next tensor
(fragmentation: reserved is more than allocated), the CUDA context takes some 0.5 GiB beside all of this, and attention's
backward sums dq in float32. Ops are trusted not to allocate more inside than they return.
"""

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memory import ledger
from memory.ledger import MIB, HostLedger, LiveBytes
from memory.meter import MemoryMeter

GIB = 2**30


CUDA_EXTRA = (
    2 * 32 * MIB
)  # cuBLAS's workspaces on Hopper, one for each of forward's and backward's threads; 8 MiB each elsewhere


HOME = str(Path(__file__).parent.parent) + os.sep


SITES = (  # where a tensor was made (module, beginning of the function's name) -> what it is counted as
    ("decoding.kvcache", "KVCache", "KV cache"),
    ("logprobs", "", "logits"),
    ("decoding.draw", "sample_tokens", "logits"),
    ("sample", "rehearse_groups", "rollouts"),
    ("decoding.decode_batch", "", "rollouts"),
    ("batch", "", "micro-batch"),
    ("training.optimizer", "make_optimizer", "moments"),
    ("training.optimizer", "SlabAdamW.__init__", "moments"),
    ("training.optimizer", "HostGradients", "gradients"),
    ("training.optimizer", "", "optimizer's buffers"),
    ("model", "host_hooks", "block inputs"),
    ("model", "make_model", "weights"),
    ("model", "", "activations"),
    ("memory.lean", "", "activations"),
    ("pretrained.lora", "LoRALinear.forward", "activations"),
    ("training.loop", "learn", "backward"),  # what autograd makes while backward runs
    ("runs.checkpoint", "", "weights"),
)


class Births:
    """A ledger that remembers each storage: size, when it was born and died, where it was made."""

    def __init__(self):
        super().__init__()
        self.entries, self.alive, self.peak_at = [], {}, 0

    def born(self, key, tensor, size):
        self.alive[key] = len(self.entries)
        shape = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        component, function = self.site()
        self.entries.append(
            dict(size=size, born=len(self.entries), died=None, component=component, name=f"{shape}, {function}")
        )
        if self.current > self.peak:
            self.peak_at = len(self.entries) - 1

    def forget(self, key):
        super().forget(key)
        if key in self.alive:
            self.entries[self.alive.pop(key)]["died"] = len(self.entries)

    def reset_peak(self):
        super().reset_peak()
        self.peak_at = len(self.entries) - 1

    @staticmethod
    def site():
        """-> (component, function) of the nearest frame that is one of this project's and not the measuring's own."""
        frame = sys._getframe(2)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(HOME) and "site-packages" not in path:
                module = path.removeprefix(HOME).removesuffix(".py").replace(os.sep, ".")
                if module not in ("memory.ledger", "memory.meter", "memory.host", "memory.plan"):
                    function = frame.f_code.co_qualname
                    matches = (
                        part
                        for its, start, part in SITES
                        if (module + ".").startswith(its + ".") and function.startswith(start)
                    )
                    return next(matches, "other"), function
            frame = frame.f_back
        return "other", ""

    def label(self, component, named):
        """Say what some tensors, (name, tensor) pairs, are; those that are alive and were made here."""
        for name, tensor in named:
            index = self.alive.get(id(tensor.untyped_storage()))
            if index is not None:
                entry = self.entries[index]
                entry["component"], entry["name"] = (
                    component,
                    f"{name} {entry['name'].split(',  ')[0].rsplit(', ', 1)[0]}",
                )

    def at(self, index):
        """The entries alive when entry `index` was born, the largest first."""
        alive = [e for e in self.entries if e["born"] <= index and (e["died"] is None or e["died"] > index)]
        return sorted(alive, key=lambda e: -e["size"])


class PlannedBytes(Births, LiveBytes):
    pass


class PlannedHost(Births, HostLedger):
    highest = highest_at = 0  # over all phases

    def born(self, key, tensor, size):
        super().born(key, tensor, size)
        if self.current > self.highest:
            self.highest, self.highest_at = self.current, len(self.entries) - 1


class PlanMeter(MemoryMeter):
    """A meter that keeps what was alive at each phase's peak."""

    def __init__(self):
        super().__init__("cpu")
        self.live, self.snapshots = PlannedBytes(), {}

    @contextmanager
    def phase(self, name):
        with super().phase(name):
            yield
            if self.live.peak > self.snapshots.get(name, (-1,))[0]:
                self.snapshots[name] = self.live.peak, self.live.at(self.live.peak_at)

    def label(self, component, named):
        named = list(named)
        self.live.label(component, named)
        ledger.HOST.label(component, named)


@dataclass
class Plan:
    """Bytes. phases: name -> (peak, {component: bytes}); biggest: (bytes, what), of the binding phase."""

    kind: str  # "cuda" or "cpu"
    peak: int
    host: int
    phase: str
    phases: dict
    biggest: list
    host_components: dict

    def text(self):
        """A table of components and phases, then the biggest tensors."""
        unit, size = ("GiB", GIB) if self.peak >= GIB else ("MiB", MIB)
        largest = {}
        for _, parts in self.phases.values():
            for name, bytes_ in parts.items():
                largest[name] = max(bytes_, largest.get(name, 0))
        shown = sorted((name for name in largest if largest[name] >= self.peak / 1000), key=lambda name: -largest[name])
        lines = [
            f"planned for {self.kind}: {unit} at each phase's peak",
            f"{'':22}" + "".join(f"{name:>11}" for name in self.phases),
        ]
        for name in shown:
            lines.append(
                f"{name:22}" + "".join(f"{parts.get(name, 0) / size:11.2f}" for _, parts in self.phases.values())
            )
        lines.append(f"{'together':22}" + "".join(f"{peak / size:11.2f}" for peak, _ in self.phases.values()))
        lines += [f"the biggest in {self.phase}:"] + [f"{bytes_ / size:11.2f}  {name}" for bytes_, name in self.biggest]
        if self.host:
            parts = ", ".join(f"{name} {bytes_ / size:.2f}" for name, bytes_ in self.host_components.items())
            lines.append(f"on the host: {self.host / size:.2f} ({parts})")
        return "\n".join(lines)

    def line(self):
        return f"peak_gib={self.peak / GIB:.3f} host_gib={self.host / GIB:.3f} phase={self.phase}"


def plan(make_iteration, settings):
    """make_iteration(settings) builds what the loop would run, a function of a meter -> Plan of settings.device."""
    kind = kind_planned(settings.device)
    host, kept = PlannedHost(), ledger.HOST
    try:
        ledger.HOST, ledger.planned_kind = host, kind
        with FakeTensorMode(allow_non_fake_inputs=True), PlanMeter() as meter:
            make_iteration(settings)(meter)
    finally:
        ledger.HOST, ledger.planned_kind = kept, None
    extra = CUDA_EXTRA if kind == "cuda" else 0
    phases = {name: (peak + extra, components(entries, extra)) for name, (peak, entries) in meter.snapshots.items()}
    phase = max(phases, key=lambda name: phases[name][0])
    biggest = [(entry["size"], f"{entry['component']}: {entry['name']}") for entry in meter.snapshots[phase][1][:6]]
    return Plan(kind, phases[phase][0], host.highest, phase, phases, biggest, components(host.at(host.highest_at)))


def components(entries, extra=0):
    sums = {"cuBLAS workspace": extra} if extra else {}
    for entry in entries:
        sums[entry["component"]] = sums.get(entry["component"], 0) + entry["size"]
    return sums


def kind_planned(device):
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]
