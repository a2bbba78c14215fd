"""The log-prob kernels and the head beside plain torch, torch.compile and the libraries that are installed.

    python bench/logprobs.py [--shapes=cuda|cpu|tiny] [--only=loss,head]

Two parts. From logits: log-probs and gradient of M x V logits; the yardstick is a device-to-device copy measured in the
same run. From hidden states: M x C hidden states and the head, loss = -mean log-prob (GRPO's loss of equal advantages
right after a rollout), both gradients; the yardstick is the three bare matrix products. The contenders take turns, round
by round, torch.compile after the others; a figure is the median of the rounds. "loss + gradient" is what the head does
with each chunk of logits.

rate       TB/s of logits read and written (passes: forward 1, loss + gradient 2, forward + backward 3), or TFLOP/s of
           6 M C V operations
extra MiB  most bytes alive during the call without the inputs: with the weight's gradient, and with a frozen weight
error      of log-probs, against float64 on the same inputs, the largest of 64 rows

On a CPU the shapes are small and the figures say nothing about a GPU.
"""

import gc
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
from common import DEVICE, begin, chosen, clocked, parser, result, synchronize

from snug.device.kinds import MIB
from snug.logprobs.head import head_logprobs, head_loss
from snug.logprobs.rows import Options, forward_rows, token_logprobs
from snug.memory.ledger import LiveBytes

SHAPES = {  # logits (M, V), head (M, C, V), dtype, chunk_mb's, rounds
    "cuda": ((8192, 151936), (8192, 4096, 128256), torch.bfloat16, (16, 256, 512, 1024), 15),
    "cpu": ((1024, 50257), (512, 256, 50257), torch.float32, (16, 64), 7),
    "tiny": ((64, 500), (64, 16, 500), torch.float32, (0.01, 16), 1),
}
LOOK = "BLOCK and num_warps in rows.py"
SECONDS = 20  # that a stage may take, once everything is warm


# ----------------------------------------------------------------------------------------------------------------------
# The contenders. A peer that is not installed is None.


def plain_logprobs(logits, targets):
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def peers():
    """-> {name: function or None}: from logits, and from hidden states per token and as a mean loss.

    Liger's GRPO loss gets 8 sequences with an advantage of 1 each and no old log-probs: minus the mean log-prob, as a
    gradient.
    """
    libraries = dict.fromkeys(("TRL", "Liger", "cut cross-entropy"))
    try:
        from trl.trainer.utils import selective_log_softmax

        # (8, M / 8, V), as TRL calls it: it goes through the first dimension one by one
        libraries["TRL"] = lambda logits, targets: selective_log_softmax(
            logits.unflatten(0, (8, -1)), targets.view(8, -1)
        ).flatten()
    except ImportError:
        pass
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        def grpo_head(hidden, weight, targets):
            hidden, targets = (x.unflatten(0, (8, -1)) for x in (hidden, targets))
            ones = torch.ones(targets.shape, dtype=torch.long, device=targets.device)
            return fused(hidden, weight, targets, ones, torch.ones(8, device=targets.device))[0]

        fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
        libraries["Liger"] = grpo_head
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        libraries["cut cross-entropy"] = (
            partial(linear_cross_entropy, reduction="mean"),
            lambda *x: -linear_cross_entropy(*x, reduction="none"),
        )
    except ImportError:
        pass
    return libraries


def logits_contenders(libraries, compile):
    """name -> log-probs of (logits, targets); None: not installed."""
    return {
        "snug": token_logprobs,
        "plain torch": plain_logprobs,
        "torch.compile": compile(plain_logprobs),
        "TRL selective_log_softmax": libraries["TRL"],
    }


def head_contenders(libraries, compile, budgets):
    """name -> (mean loss, log-probs) of (hidden, weight, targets); None: not installed."""

    def ours(hidden, weight, targets, chunk_mb):
        return head_loss(
            hidden, weight, targets, lambda logprobs, rows: -logprobs.sum() / len(targets), chunk_mb=chunk_mb
        )[0]

    def with_logits(logprobs):
        return lambda *x: -logprobs(F.linear(*x[:2]), x[2]).mean(), lambda *x: logprobs(F.linear(*x[:2]), x[2])

    recomputed = partial(head_logprobs, chunk_mb=budgets[-1])
    named = {
        f"snug head_loss, {mb} MiB": (partial(ours, chunk_mb=mb), partial(head_logprobs, chunk_mb=mb)) for mb in budgets
    }
    return named | {
        f"snug head_logprobs, {budgets[-1]} MiB": (lambda *x: -recomputed(*x).mean(), recomputed),
        "plain torch": with_logits(plain_logprobs),
        "torch.compile": tuple(map(compile, with_logits(plain_logprobs))),
        "TRL selective_log_softmax": libraries["TRL"] and with_logits(libraries["TRL"]),
        "Liger fused linear GRPO": libraries["Liger"] and (libraries["Liger"], None),
        "cut cross-entropy": libraries["cut cross-entropy"],
    }


# ----------------------------------------------------------------------------------------------------------------------
# Measures.


def interleaved(calls, rounds):
    """{name: call} -> {name: median ms}. A call that fails is left out, and says why."""
    times, started = {name: [] for name in calls}, None
    for turn in range(-2, rounds):  # the first two warm up and compile
        if turn == 0:
            started = time.perf_counter()
        for name, call in calls.items():
            if name not in times:
                continue
            try:
                seconds = clocked(call)[1]
            except Exception as error:  # a peer's failure is a line of the table, not the end of it
                print(f"{name} failed: {type(error).__name__} {str(error).splitlines()[:1]}", flush=True)
                del times[name]
                continue
            if turn >= 0:
                times[name].append(seconds)
        if started and time.perf_counter() - started > SECONDS:
            break
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def extra_mib(call, *existing):
    """Most MiB alive during the call beyond those before it."""
    gc.collect()
    if DEVICE == "cuda":
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    with LiveBytes() as live:
        for tensor in existing:
            live.follow(tensor)
        before = live.current
        call()
        return (live.peak - before) / MIB


def turns(calls):
    """The contenders in two parts: torch.compile, which may take a minute to compile, comes last."""
    compiled = {name: call for name, call in calls.items() if "compile" in name}
    return [part for part in ({name: calls[name] for name in calls if name not in compiled}, compiled) if part]


# ----------------------------------------------------------------------------------------------------------------------
# The two parts.


def bench_logits(M, V, dtype, rounds, libraries, compile, only):
    logits = (3 * torch.randn(M, V, device=DEVICE)).to(dtype)
    targets = torch.randint(V, (M,), device=DEVICE)
    other = torch.randn(M, V, device=DEVICE, dtype=dtype)
    read = logits.numel() * logits.element_size()

    def forward(function):
        with torch.no_grad():
            function(logits, targets)

    def both(function):
        leaf = logits.detach().requires_grad_()
        function(leaf, targets).sum().backward()

    def error(function):
        exact = plain_logprobs(logits[:64].double(), targets[:64])
        return float((function(logits[:64], targets[:64]) - exact).abs().max())

    ready = {name: function for name, function in logits_contenders(libraries, compile).items() if function}

    def visit(entropy):
        results = [torch.empty(M, device=DEVICE) for _ in range(1 + entropy)]
        forward_rows(other, targets, Options(1.0, V), *results, overwrite=True, gradient=True)

    one_visit = {"snug, one visit": partial(visit, False), "snug, one visit with entropy": partial(visit, True)}
    stages = {  # what, passes over the logits that it takes at least, contenders
        "loss + gradient": (2, one_visit),
        "forward": (1, {name: partial(forward, f) for name, f in ready.items()}),
        "forward + backward": (3, {name: partial(both, f) for name, f in ready.items()}),
    }
    cases = [(stage, passes, part) for stage, (passes, calls) in stages.items() for part in turns(calls)]
    for stage, passes, calls in (case for case in cases if chosen(case[0], only)):
        times = interleaved({"copy": lambda: other.copy_(logits)} | calls, rounds)
        for name in (name for name in calls if name in times):
            rate, copied = (n * read / times[which] / 1e9 for n, which in ((passes, name), (2, "copy")))  # TB/s
            details = dict(rate=rate, error=error(ready[name]) if stage == "forward" else None)
            details |= dict(extra_mib=extra_mib(calls[name], logits, other, targets))
            if stage == "loss + gradient":
                aim = dict(at_most=1.75, look=LOOK) if name == "snug, one visit" else {}
                result(f"{stage}: {name}", times[name], "ms", **aim, share=rate / copied, **details)
            else:
                aim = dict(at_least=90, look=LOOK) if name == "snug" and passes < 3 else {}
                result(f"{stage}: {name}", 100 * rate / copied, "% copy", **aim, ms=times[name], **details)


def bench_head(M, C, V, dtype, budgets, rounds, libraries, compile):
    hidden = torch.randn(M, C, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.nn.Parameter((3 * torch.randn(V, C, device=DEVICE) / C**0.5).to(dtype))
    targets = torch.randint(V, (M,), device=DEVICE)

    def train(loss):
        hidden.grad = weight.grad = None
        loss(hidden, weight, targets).backward()

    def products():
        logits = h @ w.T
        return logits @ w, logits.T @ h

    def error(function):
        exact = plain_logprobs(h[:64].double() @ w.double().T, targets[:64])
        return float((function(h[:64], w, targets[:64]) - exact).abs().max())

    def extra(loss, frozen):
        hidden.grad = weight.grad = None
        weight.requires_grad_(not frozen)
        try:
            return extra_mib(partial(train, loss), hidden, weight, targets)
        finally:
            weight.requires_grad_(True)

    h, w = hidden.detach(), weight.detach()
    ready = {name: pair for name, pair in head_contenders(libraries, compile, budgets).items() if pair}
    for part in turns(ready):
        times = interleaved({"products": products} | {name: partial(train, part[name][0]) for name in part}, rounds)
        for name in (name for name in part if name in times):
            loss, function = ready[name]
            details = dict(ms=times[name], rate=6 * M * C * V / times[name] / 1e9)
            with torch.no_grad():
                details |= dict(error=error(function) if function else None)
            details |= dict(extra_mib=extra(loss, frozen=False), frozen_mib=extra(loss, frozen=True))
            aim = (
                dict(at_most=1.10, look="chunk_mb: the other rows")
                if name == f"snug head_loss, {budgets[-1]} MiB"
                else {}
            )
            result(f"head: {name}", times[name] / times["products"], "products", **aim, **details)


def main():
    arguments = parser("Times the log-prob kernels and the head beside their peers.").parse_args()
    torch.manual_seed(0)
    (M, V), head, dtype, budgets, rounds = SHAPES[arguments.shapes]
    begin(arguments)
    libraries, compile = peers(), partial(torch.compile, backend="eager" if arguments.shapes == "tiny" else "inductor")
    print(f"not installed: {', '.join(name for name in libraries if not libraries[name]) or 'none'}")
    print(f"logits ({M}, {V}), {dtype}")
    bench_logits(M, V, dtype, rounds, libraries, compile, arguments.only)
    if chosen("head", arguments.only):
        print("head: hidden states ({}, {}), weight ({}, {})".format(*head[:2], *head[2:0:-1]))
        bench_head(*head, dtype, budgets, rounds, libraries, compile)


if __name__ == "__main__":
    main()
