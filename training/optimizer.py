"""AdamW, clipping and the learning rate's schedule; where the optimizer's state and the gradients live.

Two optimizers, one formula. float32 weights with float32 state on the device take PyTorch's fused AdamW: one pass, in
place, no second copy of anything. All else takes SlabAdamW, which is one pass in place too (kernels/adamw.py). Its
state may be in bfloat16. What is on the host comes to the device a slab at a time.

    bytes a weight on the device      weights  gradients  moments  masters
    param_dtype float32                  4         4          8              optimizer_dtype float32
    param_dtype bfloat16                 2         2          8        4     optimizer_dtype float32
    param_dtype bfloat16                 2         2          4              optimizer_dtype bfloat16
    optimizer_device host: moments and masters move to the host; grad_offload: so do the gradients; param_offload: all

All state is allocated at the start, so a step allocates almost nothing.
Left out: 8-bit state, a step on the host's cores.
"""

import math
import weakref
from typing import NamedTuple

import torch

from device.host import new_on_host
from device.kinds import is_planned
from device.streams import Done, aside, settle
from kernels.adamw import adamw, key_of, numbers_of
from runs.loading import trained

SLAB = 2**21  # weights that come from the host at a time
RING = 3  # slabs on the device at once: one is updated and copied back, the next ones arrive
PIECE = 2**24  # weights at a time if nothing comes from the host
STATE = "exp_avg", "exp_avg_sq", "master"


def make_optimizer(model, settings):
    """AdamW over the parameters that train. As in nanoGPT matrices and embeddings decay, norms and biases do not."""
    named = trained(model)
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options = dict(lr=settings.learning_rate, betas=(settings.adam_beta1, settings.adam_beta2))
    on_host = set(STATE) if settings.optimizer_device == "host" else set()
    on_host |= {"gradient"} if settings.grad_offload else set()
    on_host |= {*STATE, "gradient", "weight"} if settings.param_offload else set()
    if settings.param_dtype == settings.optimizer_dtype != "bfloat16" and not on_host:
        optimizer = torch.optim.AdamW(groups, **options, fused=True)
        for p in named.values():
            zeros = {
                key: torch.zeros_like(p, memory_format=torch.preserve_format)
                for key in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[p] = {"step": torch.zeros((), device=p.device)} | zeros
        return optimizer
    options |= dict(dtype=getattr(torch, settings.optimizer_dtype), seed=settings.seed)
    device = getattr(model, "runs_on", next(iter(named.values())).device)
    optimizer = SlabAdamW(groups, **options, on_host=on_host, device=device)
    if settings.grad_offload:
        optimizer.host_gradients = HostGradients(list(named.values()))
    return optimizer


def learning_rate_at(iteration: int, settings) -> float:
    """The learning rate of iteration 0, 1, ...: a linear warmup over warmup_iters, then lr_schedule.

    learning_rate 1, warmup_iters 2, linear, max_iters 6 -> 0.5, 1, 1, 0.75, 0.5, 0.25
    """
    if iteration < settings.warmup_iters:
        return settings.learning_rate * (iteration + 1) / settings.warmup_iters
    done = (iteration - settings.warmup_iters) / max(1, settings.max_iters - settings.warmup_iters)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
        settings.lr_schedule
    ]
    return settings.learning_rate * factor


def optimizer_step(
    model, optimizer, learning_rate: float, grad_clip: float, whole=lambda norm: norm
) -> float:
    """Clip, step, and free the gradients -> the gradient's norm before clipping. grad_clip 0: not clipped.

    whole: the norm of a shard of the gradients -> that of all (OneProcess.norm).

    If the norm is not finite nothing is done, and the gradients stay, so that the cause can be found.
    """
    slabs = isinstance(optimizer, SlabAdamW)
    total = (
        optimizer.gradient_norm()
        if slabs
        else torch.nn.utils.get_total_norm(gradients_of(model, optimizer).values())
    )
    norm = float(total := whole(total))
    if not math.isfinite(norm):
        return norm
    if grad_clip and not slabs:
        torch.nn.utils.clip_grads_with_norm_(trained(model).values(), grad_clip, total)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if slabs:
        optimizer.step(scale=min(1.0, (grad_clip or math.inf) / (norm + 1e-6)))
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # freed: no gradient is alive during the next rollout
    return norm


def gradients_of(model, optimizer):
    """-> {parameter's name: its gradient}, on the device or the host."""
    if isinstance(optimizer, SlabAdamW):
        found = optimizer.gradients()
        return {name: found[p] for name, p in trained(model).items() if p in found}
    return {name: p.grad for name, p in trained(model).items() if p.grad is not None}


class Slab(NamedTuple):
    """Some weights of one parameter."""

    group: dict
    parameter: int  # its number
    first: int  # index of the first of these weights
    tensors: dict  # {name: (n,)}, on the device or the host


class SlabAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) in float32, with a choice of its state's dtype and place.

    dtype float32: moments in float32 and, beside bfloat16 weights, a float32 master of each weight. bfloat16: bfloat16
    moments, no masters. Then moments and weights are rounded stochastically; random bits follow from the seed and step.
    on_host: which of weight, gradient and STATE are in pinned host memory. The next slab arrives on the device while
    one is updated and copied back.
    A step allocates its buffers first: after an out-of-memory nothing has changed.
    """

    def __init__(self, groups, lr, betas, dtype, on_host, device, seed, eps=1e-8):
        super().__init__(groups, dict(lr=lr, betas=betas, weight_decay=0.0, eps=eps))
        self.seed, self.steps, self.host_gradients = seed, 0, None
        self.on_host, self.device = on_host, device
        for p in self.parameters():
            kinds = dict.fromkeys(("exp_avg", "exp_avg_sq"), dtype)
            if p.dtype == torch.bfloat16 != dtype:
                kinds["master"] = torch.float32
            for kind, its_dtype in kinds.items():
                here = kind not in on_host
                make = (
                    torch.empty_like(p, dtype=its_dtype)
                    if here
                    else new_on_host(p, its_dtype, keep=True)
                )
                self.state[p][kind] = make.copy_(p.detach()) if kind == "master" else make.zero_()

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def largest(self):
        return max(self.parameters(), key=torch.Tensor.numel)

    def gradients(self):
        """-> {parameter: its gradient}, on the device or the host, of the parameters that have one."""
        if self.host_gradients is not None:
            return self.host_gradients.collect()
        return {p: p.grad for p in self.parameters() if p.grad is not None}

    def slabs(self, *names):
        """Yield the Slabs of the parameters that have a gradient, with the tensors of these names."""
        gradients, numbers = self.gradients(), {p: number for number, p in enumerate(self.parameters())}
        for group in self.param_groups:
            for p in group["params"]:
                if p in gradients:
                    tensors = {"weight": p.detach(), "gradient": gradients[p]} | self.state[p]
                    tensors = {name: tensors[name].view(-1) for name in names if name in tensors}
                    for part in slices(
                        p, slab_size(self.largest()) if self.on_host.intersection(names) else PIECE
                    ):
                        yield Slab(
                            group,
                            numbers[p],
                            part.start,
                            {name: x[part] for name, x in tensors.items()},
                        )

    def ring(self, *names):
        """Buffers on the device for tensors on the host -> RING times {name: (n,)} for those of these names."""
        p = self.largest()
        dtypes = {name: x.dtype for name, x in ({"weight": p, "gradient": p} | self.state[p]).items()}
        here = {
            name: dtype for name, dtype in dtypes.items() if name in self.on_host.intersection(names)
        }
        return [
            {
                name: torch.empty(slab_size(p), dtype=dtype, device=self.device)
                for name, dtype in here.items()
            }
            for _ in range(RING)
        ]

    def run(self, slabs, ring, work):
        """work(slab, {name: tensor on the device}) for each slab; what is on the host is copied to the ring first."""

        def fetch(slab, buffers):
            for name, buffer in buffers.items():
                buffer[: len(slab.tensors[name])].copy_(slab.tensors[name], non_blocking=True)

        def work_here(slab, buffers):
            work(
                slab, slab.tensors | {name: x[: len(slab.tensors[name])] for name, x in buffers.items()}
            )

        if any(ring):
            in_turn(self.device, slabs, ring, fetch, work_here).wait()
        else:
            for slab in slabs:
                work(slab, slab.tensors)

    @torch.no_grad()
    def gradient_norm(self):
        """The norm of all gradients together, a scalar tensor on the device."""
        p, ring, slabs = self.parameters()[0], self.ring("gradient"), list(self.slabs("gradient"))
        norms = torch.zeros(
            len(slabs), dtype=torch.promote_types(p.dtype, torch.float32), device=self.device
        )
        each = iter(norms)

        def work(slab, here):
            torch.linalg.vector_norm(here["gradient"], dtype=norms.dtype, out=next(each))

        self.run(slabs, ring, work)
        return torch.linalg.vector_norm(norms)

    @torch.no_grad()
    def step(self, scale=1.0):
        """One update. scale: what gradients are multiplied by, to clip them."""
        names = "weight", "gradient", "exp_avg", "exp_avg_sq", "master"
        ring = self.ring(*names)
        self.steps += 1

        def work(slab, here):
            numbers, key = (
                numbers_of(slab.group, self.steps, scale),
                key_of(self.seed, self.steps, slab.parameter),
            )
            adamw(*(here.get(name) for name in names), numbers, key, slab.first)
            for name in self.on_host & slab.tensors.keys() - {"gradient"}:
                slab.tensors[name].copy_(here[name], non_blocking=True)

        self.run(self.slabs(*names), ring, work)
        settle()  # state on the host is complete

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=True)
        if self.host_gradients is not None:
            self.host_gradients.clear()


def slab_size(p) -> int:
    """Weights of p at a time: SLAB, or a quarter of a smaller one, so that a ring is smaller than it."""
    return min(SLAB, math.ceil(p.numel() / 4096) * 1024)


def slices(p, size):
    """Slices of at most `size` weights of the flattened parameter. A planner needs only one: they are all alike."""
    for start in range(0, min(p.numel(), size) if is_planned(p) else p.numel(), size):
        yield slice(start, min(start + size, p.numel()))


def in_turn(device, slabs, ring, fetch, work):
    """For each slab fetch(slab, buffers), which copies to the device, then work(slab, buffers), which may copy back.

    They run on two side streams: the next slab is fetched while one is worked on and copied back. buffers: those of
    the ring, in turn. -> the Done of the last slab.
    """
    done = Done(device)
    free = [done] * len(ring)
    for number, slab in enumerate(slabs):
        turn = number % len(ring)
        with aside(device, to="device") as fetched:
            free[turn].wait()
            fetch(slab, ring[turn])
        with aside(device, to="host") as done:
            fetched.wait()
            work(slab, ring[turn])
        free[turn] = done
    return done


class HostGradients:
    """Gradients that move to the host, and are added up there, as soon as backward has finished each.

    They move while backward goes on, two at most. A sum is made on the device, a slab at a time, so it equals the sum
    without offload. Where no hook fires for a gradient that an autograd function of ours has written (the head's, the
    embedding's), it stays on the device until the optimizer asks.
    """

    def __init__(self, parameters):
        self.parameters = parameters
        self.host = {p: new_on_host(p, keep=True) for p in parameters}
        self.has = set()
        self.moving = {}  # parameter -> (Done, tensors that are kept until then), the oldest first
        take = weakref.WeakMethod(
            self.take
        )  # else parameters and this object would keep each other alive
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: take()(p))

    @torch.no_grad()
    def take(self, p):
        self.land(1 if p not in self.moving else 0)  # wait for all if one is its own earlier gradient
        stored, fresh, n = self.host[p].view(-1), p.grad.view(-1), slab_size(p)
        ring = [
            torch.empty(n, dtype=p.dtype, device=p.device) for _ in range(RING if p in self.has else 0)
        ]

        def fetch(part, buffer):
            buffer[: part.stop - part.start].copy_(stored[part], non_blocking=True)

        def add(part, buffer):
            fresh[part].add_(buffer[: part.stop - part.start])
            stored[part].copy_(fresh[part], non_blocking=True)

        if ring:
            done = in_turn(p.device, slices(p, n), ring, fetch, add)
        else:
            with aside(p.device, to="host") as done:
                stored.copy_(fresh, non_blocking=True)
        self.moving[p] = done, fresh, ring
        self.has.add(p)
        p.grad = None
        if (
            p is self.parameters[0]
        ):  # the embedding's, the last of a backward: no compute is left to overlap with
            self.land()

    def land(self, but=0):
        """Compute waits for the copies of gradients, except for the last `but`. Then their memory may be freed."""
        for p in list(self.moving)[: len(self.moving) - but]:
            self.moving.pop(p)[0].wait()

    def collect(self) -> dict:
        """-> {parameter: its gradient on the host}, of the parameters that have one; none is left on the device."""
        for p in self.parameters:
            if p.grad is not None:
                self.take(p)
        self.land()
        settle()
        return {p: self.host[p] for p in self.has}

    def clear(self):
        self.land()
        self.has = set()
