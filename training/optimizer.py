"""AdamW, clipping and the learning rate's schedule; where the optimizer's state and the gradients live.

Two optimizers, one formula. float32 weights with float32 state on the device take PyTorch's fused AdamW: one pass, in
place, no second copy of anything. All else takes SlabAdamW: a few million weights at a time pass through float32
buffers, so state and gradients may be in bfloat16 or on the host, and no temporary has a parameter's size.

    bytes a weight on the device      weights  gradients  moments  masters
    param_dtype float32                  4         4          8              optimizer_dtype float32
    param_dtype bfloat16                 2         2          8        4     optimizer_dtype float32
    param_dtype bfloat16                 2         2          4              optimizer_dtype bfloat16
    optimizer_device host: moments and masters move to the host; grad_offload: so do the gradients

All state is allocated at the start, so a step allocates almost nothing.
Left out: 8-bit state, a step on the host's cores.
"""

import math
import weakref

import torch

from memory import is_planned, new_on_host

SLAB = 2**22  # weights at a time


def make_optimizer(model, settings):
    """AdamW over the parameters that train. As in nanoGPT matrices and embeddings decay, norms and biases do not."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options = dict(lr=settings.learning_rate, betas=(settings.adam_beta1, settings.adam_beta2))
    on_host = settings.optimizer_device == "host"
    plain = settings.param_dtype == settings.optimizer_dtype != "bfloat16" and not on_host and not settings.grad_offload
    if plain:
        optimizer = torch.optim.AdamW(groups, **options, fused=True)
        for p in named.values():
            zeros = {key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros((), device=p.device)} | zeros
        return optimizer
    optimizer = SlabAdamW(
        groups, **options, dtype=getattr(torch, settings.optimizer_dtype), on_host=on_host, seed=settings.seed
    )
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
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[settings.lr_schedule]
    return settings.learning_rate * factor


def optimizer_step(model, optimizer, learning_rate: float, grad_clip: float) -> float:
    """Clip, step, and free the gradients -> the gradient's norm before clipping. grad_clip 0: not clipped.

    If the norm is not finite nothing is done, and the gradients stay for whoever looks for the cause.
    """
    slabs = isinstance(optimizer, SlabAdamW)
    total = (
        optimizer.gradient_norm() if slabs else torch.nn.utils.get_total_norm(gradients_of(model, optimizer).values())
    )
    norm = float(total)
    if not math.isfinite(norm):
        return norm
    if grad_clip and not slabs:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, total)
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
        return {name: found[p] for name, p in model.named_parameters() if p in found}
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class SlabAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019), SLAB weights at a time, in float32.

    dtype float32: moments in float32 and, beside bfloat16 weights, a float32 master of each weight. bfloat16: bfloat16
    moments, no masters. Then moments and weights are rounded stochastically: up with the probability that makes the
    result right on average. Rounding to nearest would lose every change below 1/512 of a number.
    on_host: state and masters in pinned host memory; each slab goes to the device and back.
    Random bits follow from (seed, step, slab). A step allocates its buffers first: after an out-of-memory nothing has
    changed.
    """

    def __init__(self, groups, lr, betas, dtype, on_host, seed, eps=1e-8):
        super().__init__(groups, dict(lr=lr, betas=betas, weight_decay=0.0, eps=eps))
        self.seed, self.steps, self.host_gradients = seed, 0, None
        self.stochastic = dtype == torch.bfloat16
        for p in self.parameters():
            kinds = dict.fromkeys(("exp_avg", "exp_avg_sq"), dtype)
            if p.dtype == torch.bfloat16 and not self.stochastic:
                kinds["master"] = torch.float32
            for kind, its_dtype in kinds.items():
                make = new_on_host(p, its_dtype, keep=True) if on_host else torch.empty_like(p, dtype=its_dtype)
                self.state[p][kind] = make.copy_(p.detach()) if kind == "master" else make.zero_()

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def gradients(self):
        """-> {parameter: its gradient}, on the device or the host, of the parameters that have one."""
        if self.host_gradients is not None:
            return self.host_gradients.collect()
        return {p: p.grad for p in self.parameters() if p.grad is not None}

    def slabs(self):
        """-> (group, parameter, gradient, slice of the flattened parameter), slab by slab."""
        gradients = self.gradients()
        for group in self.param_groups:
            for p in group["params"]:
                for start in slab_starts(p) if p in gradients else ():
                    yield group, p, gradients[p].view(-1), slice(start, min(start + SLAB, p.numel()))

    def buffers(self, count, dtype=None):
        parameters = self.parameters()
        size = min(SLAB, max(p.numel() for p in parameters))
        dtype = dtype or torch.promote_types(parameters[0].dtype, torch.float32)
        return torch.empty(count, size, dtype=dtype, device=parameters[0].device)

    @torch.no_grad()
    def gradient_norm(self):
        """The norm of all gradients together, a scalar tensor on the device."""
        (buffer,), stage = self.buffers(1), self.buffers(1, torch.bfloat16)[0]
        total = torch.zeros((), dtype=buffer.dtype, device=buffer.device)
        for _, _, gradient, part in self.slabs():
            total += move(gradient[part], buffer[: part.stop - part.start], stage).square_().sum()
        return total.sqrt()

    @torch.no_grad()
    def step(self, scale=1.0):
        """One update. scale: what gradients are multiplied by, to clip them."""
        buffers, noise, stage = self.buffers(5), self.buffers(1, torch.int32)[0], self.buffers(1, torch.bfloat16)[0]
        generator = torch.Generator(buffers.device)
        self.steps += 1
        for number, (group, p, gradient, part) in enumerate(self.slabs()):
            generator.manual_seed(hash((self.seed, self.steps, number)) % 2**32)  # CPU generators take 32-bit seeds
            state = {kind: value.view(-1)[part] for kind, value in self.state[p].items()}
            source = state.get("master", p.view(-1)[part])
            g, m, v, w, spare = (buffer[: part.stop - part.start] for buffer in buffers)
            for buffer, value in ((g, gradient[part]), (m, state["exp_avg"]), (v, state["exp_avg_sq"]), (w, source)):
                move(value, buffer, stage)
            self.update(g.mul_(scale), m, v, w, spare, group)
            targets = [(m, state["exp_avg"]), (v, state["exp_avg_sq"]), (w, source)]
            if "master" in state:
                p.view(-1)[part].copy_(w)
            for result, target in targets:
                if target.dtype == torch.bfloat16:
                    round_stochastically(result, noise[: len(result)], generator)
                move(result, target, stage)
        if buffers.is_cuda:
            torch.cuda.current_stream(buffers.device).synchronize()  # wait for copies to the host

    def update(self, g, m, v, w, spare, group):
        beta1, beta2 = group["betas"]
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(v, 1 - beta2**self.steps, out=spare).sqrt_().add_(group["eps"])
        w.mul_(1 - group["lr"] * group["weight_decay"])
        w.addcdiv_(m, spare, value=-group["lr"] / (1 - beta1**self.steps))

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=True)
        if self.host_gradients is not None:
            self.host_gradients.clear()


def slab_starts(p):
    """Where the slabs of a parameter begin. A planner needs only one: they are all alike."""
    return range(0, min(p.numel(), SLAB) if is_planned(p) else p.numel(), SLAB)


def move(source, target, stage):
    """target = source, both (n,), on the device or the host.

    Across devices copy_ would cast through a temporary; stage, (n,) bfloat16 on the device, takes its place.
    """
    if source.device != target.device and source.dtype != target.dtype:
        source = stage[: len(source)].copy_(source, non_blocking=True)
    return target.copy_(source, non_blocking=True)


def round_stochastically(x, noise, generator):
    """Round x (n,) float32, in place, to one of its two bfloat16 neighbours, the nearer one more likely.

    noise: (n,) int32 scratch.
    """
    noise.random_(0, 2**16, generator=generator)
    x.view(torch.int32).add_(noise).bitwise_and_(-(2**16))  # bits below bfloat16's last one carry, or are cut off


class HostGradients:
    """Gradients that move to the host, and are added up there, as soon as backward has finished each.

    A sum is made on the device, a slab at a time, so it equals the sum without offload. Two gradients are written by
    autograd functions of ours, where hooks do not fire (the head's by head_loss, the embedding's by Embed): those stay
    on the device until the optimizer asks.
    """

    def __init__(self, parameters):
        self.parameters = parameters
        self.host = {p: new_on_host(p, keep=True) for p in parameters}
        self.has = set()
        take = weakref.WeakMethod(self.take)  # else parameters and this object would keep each other alive
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: take()(p))

    def take(self, p):
        stored, fresh = self.host[p].view(-1), p.grad.view(-1)
        if p in self.has:
            for start in slab_starts(p):
                part = slice(start, start + SLAB)
                fresh[part] += stored[part].to(fresh.device, non_blocking=True)
        stored.copy_(fresh, non_blocking=True)
        self.has.add(p)
        p.grad = None

    def collect(self) -> dict:
        """-> {parameter: its gradient on the host}, of the parameters that have one; none is left on the device."""
        for p in self.parameters:
            if p.grad is not None:
                self.take(p)
        return {p: self.host[p] for p in self.has}

    def clear(self):
        self.has = set()
