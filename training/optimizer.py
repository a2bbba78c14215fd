"""AdamW, clipping and the learning rate's schedule; where the optimizer's state and the gradients live.

One class, one formula. Float32 weights with float32 state on the device take PyTorch's fused step: one pass, in place,
no second copy of anything. Any other combination takes one pass in place too (snug/kernels/adamw.py): its state may be
in bfloat16, and tensors on the host come to the device a slab at a time.

    bytes a weight on the device      weights  gradients  moments  masters
    param_dtype float32                  4         4          8              optimizer_dtype float32
    param_dtype bfloat16                 2         2          8        4     optimizer_dtype float32
    param_dtype bfloat16                 2         2          4              optimizer_dtype bfloat16
    optimizer_device host: moments and masters move to the host; grad_offload: so do the gradients; param_offload: all

All state is allocated at the start, so a step allocates almost nothing. To use another optimizer, write a
torch.optim.Optimizer with `steps`, `gradients`, `gradient_norm`, `step` and `zero_grad` as SlabAdamW has them.
Left out: 8-bit state, a step on the host's cores.
"""

import math
import weakref
from functools import partial

import torch

from snug.device.host import new_on_host
from snug.device.kinds import is_planned, wide
from snug.device.streams import Done, aside, settle
from snug.kernels.adamw import adamw, key_of, new_scratch, numbers_of
from snug.lora import trained
from snug.memory.ledger import component

SLAB = 2**21  # weights that come from the host at a time
RING = 3  # slabs on the device at once: one is updated and copied back, the next ones arrive
PIECE = 2**24  # weights at a time if nothing comes from the host
STATE = "exp_avg", "exp_avg_sq", "master"


def make_optimizer(model, settings):
    """AdamW over the parameters that train. As in nanoGPT matrices and embeddings decay, all else does not."""
    named = trained(model)
    groups = [
        {"params": [p for p in named.values() if p.dim() == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in named.values() if p.dim() != 2], "weight_decay": 0.0},
    ]
    on_host = set()
    if settings.param_offload:
        on_host = {"weight", "gradient", *STATE}
    if settings.optimizer_device == "host":
        on_host.update(STATE)
    if settings.grad_offload:
        on_host.add("gradient")
    return SlabAdamW(list(named.values()), groups, settings, on_host, model.device)


def learning_rate_at(iteration, settings):
    """The learning rate of iteration 0, 1, ...: a linear warmup over warmup_iters, then lr_schedule.

    learning_rate 1, warmup_iters 2, linear, max_iters 6 -> 0.5, 1, 1, 0.75, 0.5, 0.25
    """
    if iteration < settings.warmup_iters:
        return settings.learning_rate * (iteration + 1) / settings.warmup_iters
    done = (iteration - settings.warmup_iters) / max(1, settings.max_iters - settings.warmup_iters)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    factors = dict(constant=1.0, linear=1 - done, cosine=cosine)
    return settings.learning_rate * factors[settings.lr_schedule]


def optimizer_step(
    model, optimizer, learning_rate: float, grad_clip: float, norm_of_all=lambda norm: norm
):
    """Clip, step, and free the gradients -> the gradient's norm before clipping. grad_clip 0: not clipped.

    norm_of_all: the norm of this process's gradients -> the norm of all gradients (OneProcess.norm). If the norm is not
    finite, nothing is done, and the gradients stay, so that the cause can be found.
    """
    total = norm_of_all(optimizer.gradient_norm())
    norm = float(total)
    if not math.isfinite(norm):
        return norm
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    scale = 1.0
    if grad_clip:  # as torch.nn.utils.clip_grad_norm_ does it
        scale = float((grad_clip / (total + 1e-6)).clamp(max=1.0))
    optimizer.step(scale)
    optimizer.zero_grad()  # freed: no gradient is alive during the next rollout
    return norm


def gradients_of(model, optimizer):
    """-> {parameter's name: its gradient}, on the device or the host, of the parameters that have one."""
    gradients = optimizer.gradients()
    return {name: gradients[p] for name, p in trained(model).items() if p in gradients}


class SlabAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019) in float32, with a choice of its state's dtype and place.

    optimizer_dtype float32: moments in float32 and, beside bfloat16 weights, a float32 master of each weight. bfloat16:
    bfloat16 moments, no masters. Then moments and weights are rounded stochastically; random bits follow from the seed
    and step.
    on_host: which of weight, gradient and STATE are in pinned host memory. While a slab is updated and copied back,
    the next one arrives on the device.
    A step allocates its buffers first: after an out-of-memory error nothing has changed. `steps`: those taken.
    """

    @component("moments")
    def __init__(self, parameters, groups, settings, on_host, device):
        self.fused = settings.param_dtype == settings.optimizer_dtype != "bfloat16" and not on_host
        super().__init__(groups, betas=(0.9, settings.adam_beta2), fused=self.fused)
        self.parameters, self.on_host, self.device = parameters, on_host, device
        self.seed, self.steps = settings.seed, 0
        self.largest = max(parameters, key=torch.Tensor.numel)
        self.host_gradients = HostGradients(parameters) if settings.grad_offload else None
        dtype = None if self.fused else getattr(torch, settings.optimizer_dtype)  # None: the weight's
        new = partial(new_on_host, keep=True) if "exp_avg" in on_host else torch.empty_like
        for p in parameters:
            masters = p.dtype == torch.bfloat16 != dtype
            for name in STATE[: 2 + masters]:
                tensor = self.state[p][name] = new(p, dtype=dtype)
                tensor.copy_(p.detach()) if name == "master" else tensor.zero_()

    def gradients(self):
        """-> {parameter: its gradient}, on the device or the host, of the parameters that have one."""
        if self.host_gradients:
            return self.host_gradients.collect()
        return {p: p.grad for p in self.parameters if p.grad is not None}

    def slabs(self, *names):
        """-> [(tensors, parameter's group, parameter's number, index of the first weight)], one for each slab.

        tensors: {name: (n,)} with these names, on the device or the host. Parameters without a gradient have no slab.
        """
        slabs, gradients, number = [], self.gradients(), 0
        size = slab_size(self.largest) if self.on_host.intersection(names) else PIECE
        for group in self.param_groups:
            for p in group["params"]:
                if p in gradients:
                    tensors = {"weight": p.detach(), "gradient": gradients[p]} | self.state[p]
                    flat = {name: tensors[name].view(-1) for name in names if name in tensors}
                    for piece in slices(p, size):
                        pieces = {name: x[piece] for name, x in flat.items()}
                        slabs.append((pieces, group, number, piece.start))
                number += 1
        return slabs

    def ring(self, slabs):
        """RING dicts of buffers on the device, {name: (n,)}: one for each tensor of a slab that is on the host."""
        largest = max((tensors for tensors, *_ in slabs), key=lambda tensors: len(tensors["gradient"]))
        names = [name for name in largest if name in self.on_host]
        return [
            {name: torch.empty_like(largest[name], device=self.device) for name in names}
            for _ in range(RING)
        ]

    @torch.no_grad()
    def gradient_norm(self):
        """The norm of all gradients together, a scalar tensor on the device."""
        if self.fused:
            return torch.nn.utils.get_total_norm(self.gradients().values())
        slabs = self.slabs("gradient")
        ring = self.ring(slabs)
        dtype = wide(self.largest.dtype)
        # Made here: on a side stream nothing may be allocated.
        norms = torch.zeros(len(slabs), dtype=dtype, device=self.device)
        each = iter(norms)

        def measure(tensors, *_):
            torch.linalg.vector_norm(tensors["gradient"], dtype=dtype, out=next(each))

        in_turn(self.device, slabs, ring, measure).wait()
        return torch.linalg.vector_norm(norms)

    @torch.no_grad()
    def step(self, scale=1.0):
        """One update. scale: what gradients are multiplied by, to clip them."""
        if self.fused:
            self.step_of_torch(scale)
            return
        names = "weight", "gradient", *STATE
        slabs = self.slabs(*names)
        ring = self.ring(slabs)
        scratch = new_scratch(ring[0].get("weight", self.largest))
        self.steps += 1

        def update(tensors, group, number, first):
            numbers = numbers_of(group, self.steps, scale)
            key = key_of(self.seed, self.steps, number)
            adamw(*map(tensors.get, names), numbers, key, first, scratch)

        in_turn(self.device, slabs, ring, update).wait()
        # A checkpoint may read the state on the host next, and reading on the host does not wait for copies.
        settle()

    def step_of_torch(self, scale):
        counts = torch.full((len(self.state),), float(self.steps), device=self.device)
        for state, count in zip(self.state.values(), counts.unbind(), strict=True):
            state["step"] = count
        if scale < 1:
            torch._foreach_mul_(list(self.gradients().values()), scale)
        super().step()
        self.steps += 1

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        if self.host_gradients:
            self.host_gradients.clear()


def slab_size(p) -> int:
    """How many weights of p a slab has: SLAB, or for a small p a quarter of p, so that a ring is smaller than p."""
    return min(SLAB, math.ceil(p.numel() / 4096) * 1024)


def slices(p, size):
    """-> slices of `size` weights of the flattened parameter. A planner needs only one: they are alike."""
    starts = range(0, p.numel(), size)
    return [slice(start, start + size) for start in (starts[:1] if is_planned(p) else starts)]


def in_turn(device, slabs, ring, work):
    """Call work(tensors, ...) for each slab (tensors, ...) -> the Done of the last slab.

    ring: dicts of buffers on the device. Tensors with the names in these dicts are on the host: `work` gets copies of
    them in the buffers. Afterwards all copies but gradients are copied back.
    """
    done = Done()
    free = [done] * len(ring)  # when the work on an entry's buffers is done
    for number, (tensors, *place) in enumerate(slabs):
        turn = number % len(ring)
        copies = {name: buffer[: len(tensors[name])] for name, buffer in ring[turn].items()}
        if not copies:  # then the work needs no side stream
            work(tensors, *place)
            continue
        # Two side streams: while one slab is worked on and copied back, the next ones arrive. Neither stream waits for
        # compute again, so they wait for each other: work for its slab to arrive, a slab for buffers that are free.
        with aside(device, to="device") as fetched:
            free[turn].wait()
            for name, copy in copies.items():
                copy.copy_(tensors[name], non_blocking=True)
        with aside(device, to="host") as done:
            fetched.wait()
            work(tensors | copies, *place)
            for name in copies.keys() - {"gradient"}:
                tensors[name].copy_(copies[name], non_blocking=True)
        free[turn] = done
    return done


@component("gradients")
class HostGradients:
    """Gradients on the host: each moves there, and is added to its sum, as soon as backward has finished it.

    They move while backward goes on, at most two at a time. A sum is computed on the device, a slab at a time, so it
    equals the sum without offload.
    """

    def __init__(self, parameters):
        self.host = {p: new_on_host(p, keep=True) for p in parameters}
        self.arrived = set()  # parameters whose gradient is on the host, or moving
        self.moving = {}  # parameter -> (Done, tensors to keep until then), the oldest first
        # A weak reference: with a strong one, parameters and this object would keep each other alive.
        take = weakref.WeakMethod(self.take)
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: take()(p))

    @torch.no_grad()
    def take(self, p):
        """Begin to move p.grad. autograd calls this as a hook; `collect` calls it for gradients that fire no hook."""
        # Wait for all moves but the last, which overlaps with backward. An earlier gradient of p has to arrive first.
        self.land(1 if p not in self.moving else 0)
        total, fresh, ring = self.host[p].view(-1), p.grad.view(-1), []
        if p in self.arrived:
            size = slab_size(p)
            ring = [{"total": torch.empty(size, dtype=p.dtype, device=p.device)} for _ in range(RING)]
            slabs = [({"total": total[piece], "gradient": fresh[piece]},) for piece in slices(p, size)]
            done = in_turn(p.device, slabs, ring, lambda x: x["total"].add_(x["gradient"]))
        else:
            with aside(p.device, to="host") as done:
                total.copy_(fresh, non_blocking=True)
        self.moving[p] = done, fresh, ring
        self.arrived.add(p)
        p.grad = None
        if p is next(
            iter(self.host)
        ):  # the embedding's is the last: no compute is left to overlap with
            self.land()

    def land(self, but=0):
        """Compute waits for the oldest moves, all but the last `but`. Then their memory may be freed."""
        for p in list(self.moving)[: len(self.moving) - but]:
            self.moving.pop(p)[0].wait()

    def collect(self):
        """-> {parameter: its gradient on the host}, of the parameters that have one; none is left on the device."""
        for p in self.host:
            if p.grad is not None:  # written by the head's or the embedding's backward: no hook fires
                self.take(p)
        self.land()
        settle()
        return {p: self.host[p] for p in self.arrived}

    def clear(self):
        self.land()
        self.arrived = set()
