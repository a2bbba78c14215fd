"""The log-prob kernels and the head beside plain torch, torch.compile and the libraries that are installed.

    python bench/logprobs.py [--quick]

Two parts. Logits in: M x V logits there already, their log-probs and gradient; the yardstick is a device-to-device copy measured
in the same run. Hidden states in: M x C hidden states and the head, loss = -mean log-prob (which is also GRPO's of equal
advantages, right after a rollout), both gradients; the yardstick is the three bare matrix products. The contenders take
turns, round by round, and a figure is the median of its rounds. "loss + gradient" is what the head does with each chunk of logits.

extra      most bytes alive during the call beyond its inputs: as it is (dweight included) and with the weight frozen
max error  of log-probs, against float64 on the same inputs, over 64 rows

On a CPU the shapes are small and the figures say nothing about a GPU. Prints one table and, last, one JSON object.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from logprobs.head import head_logprobs, head_loss  # noqa: E402
from logprobs.rows import Options, backward_rows, forward_rows, new_rows, new_scratch, token_logprobs  # noqa: E402
from memory.ledger import (
    MIB,  # noqa: E402
    LiveBytes,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # (device, quick) -> logits (M, V), head (M, C, V), dtype, chunk_mb's, rounds
    ("cuda", False): ((8192, 151936), (8192, 4096, 128256), torch.bfloat16, (16, 256, 512, 1024), 15),
    ("cuda", True): ((8192, 151936), (2048, 2048, 128256), torch.bfloat16, (16, 512), 5),
    ("cpu", False): ((1024, 50257), (1024, 256, 50257), torch.float32, (16, 64), 7),
    ("cpu", True): ((256, 50257), (256, 128, 50257), torch.float32, (16,), 3),
}


# ----------------------------------------------------------------------------------------------------------------------
# The contenders. A peer that is not installed is None.


def plain_logprobs(logits, targets):
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def peers():
    """-> {name: function or None}: from logits, and from hidden states per token and as a mean loss.

    GRPO losses get 8 sequences with an advantage of 1 each and no old log-probs: minus the mean log-prob, as a gradient.
    """
    found = dict.fromkeys(("trl", "liger", "liger_grpo_head", "liger_grpo", "cce"))
    try:
        from trl.trainer.utils import selective_log_softmax

        # (8, M / 8, V), as TRL calls it: it goes through the first dimension one by one
        found["trl"] = lambda logits, targets: selective_log_softmax(
            logits.unflatten(0, (8, -1)), targets.view(8, -1)
        ).flatten()
    except ImportError:
        pass
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        found["liger"] = lambda reduction: (
            lambda hidden, weight, targets: LigerFusedLinearCrossEntropyLoss(reduction=reduction)(
                weight, hidden, targets
            )
        )
    except ImportError:
        pass
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        def in_eight(*tensors):
            return [x.unflatten(0, (8, -1)) for x in tensors]

        def grpo_head(hidden, weight, targets):
            hidden, targets = in_eight(hidden, targets)
            ones = torch.ones(targets.shape, dtype=torch.long, device=targets.device)
            return fused(hidden, weight, targets, ones, torch.ones(8, device=targets.device))[0]

        def grpo(logits, targets):  # drops each sequence's last row, as a model's logits have one too many
            logits, targets = in_eight(logits, targets)
            advantages = torch.ones(8, device=targets.device)
            return triton_grpo_loss(
                logits, None, None, targets[:, :-1].contiguous(), advantages, temperature=1.0, beta=0.0
            )[0].sum()

        fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
        found["liger_grpo_head"], found["liger_grpo"] = grpo_head, grpo
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cce"] = lambda reduction: partial(linear_cross_entropy, reduction=reduction)
    except ImportError:
        pass
    return found


def logits_contenders(found):
    """name -> log-probs of (logits, targets); None: not installed."""
    return {
        "snug": token_logprobs,
        "plain torch": plain_logprobs,
        "torch.compile": torch.compile(plain_logprobs),
        "TRL selective_log_softmax": found["trl"],
        "snug, in place": partial(token_logprobs, inplace=True),  # last: it uses the logits up
    }


def head_contenders(found, budgets):
    """name -> (mean loss, log-probs) of (hidden, weight, targets); None: not installed."""

    def ours(hidden, weight, targets, chunk_mb):
        return head_loss(
            hidden, weight, targets, lambda logprobs, rows: -logprobs.sum() / len(targets), chunk_mb=chunk_mb
        )[0]

    def with_logits(logprobs):
        return lambda *x: -logprobs(F.linear(*x[:2]), x[2]).mean(), lambda *x: logprobs(F.linear(*x[:2]), x[2])

    def of_loss(make):
        return make and (make("mean"), lambda *x: -make("none")(*x))

    recomputed = partial(head_logprobs, chunk_mb=budgets[-1])
    named = {
        f"snug head_loss, {mb} MiB": (partial(ours, chunk_mb=mb), partial(head_logprobs, chunk_mb=mb)) for mb in budgets
    }
    return named | {
        f"snug head_logprobs, {budgets[-1]} MiB": (lambda *x: -recomputed(*x).mean(), recomputed),
        "plain torch": with_logits(plain_logprobs),
        "torch.compile": tuple(torch.compile(f) for f in with_logits(plain_logprobs)),
        "TRL selective_log_softmax": found["trl"] and with_logits(found["trl"]),
        "Liger fused linear CE": of_loss(found["liger"]),
        "Liger fused linear GRPO": found["liger_grpo_head"] and (found["liger_grpo_head"], None),
        "cut cross-entropy": of_loss(found["cce"]),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Measures.


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def interleaved(calls, rounds):
    """{name: call} -> {name: median ms}. A call that fails is left out, and says why."""
    times = {name: [] for name in calls}
    for turn in range(-2, rounds):  # the first two warm up and compile
        for name, call in calls.items():
            if name not in times:
                continue
            try:
                synchronize()
                started = time.perf_counter()
                call()
                synchronize()
                elapsed = time.perf_counter() - started
            except Exception as error:  # a peer's failure is a row of the table, not the end of it
                print(f"{name} failed: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}")
                del times[name]
                continue
            if turn >= 0:
                times[name].append(elapsed)
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def extra_bytes(call, *existing):
    """Most bytes alive during the call beyond those before it."""
    gc.collect()
    if DEVICE == "cuda":
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        for tensor in existing:
            live.follow(tensor)
        before = live.current
        call()
        return live.peak - before


def attempt(function, *arguments):
    try:
        return function(*arguments)
    except Exception:  # told by `interleaved` already
        return None


# ----------------------------------------------------------------------------------------------------------------------
# The two parts.


def bench_logits(M, V, dtype, rounds, found):
    """-> rows of the table, and the copy's TB/s."""
    logits = (3 * torch.randn(M, V, device=DEVICE)).to(dtype)
    targets = torch.randint(V, (M,), device=DEVICE)
    contenders = logits_contenders(found)
    read = logits.numel() * logits.element_size()

    def forward(function):
        with torch.no_grad():
            function(logits, targets)

    def both(function):
        leaf = logits.detach().requires_grad_()
        function(leaf, targets).sum().backward()

    rows = []
    exact = plain_logprobs(logits[:64].double(), targets[:64])
    ready = {name: function for name, function in contenders.items() if function}
    errors = {
        name: attempt(lambda f=f: float((f(logits[:64], targets[:64]) - exact).abs().max()))
        for name, f in ready.items()
    }

    other = torch.empty_like(logits)
    copies = {"copy": lambda: other.copy_(logits)}
    options = Options(1.0, V, False, dtype)
    lse, ones = torch.full((M,), 12.0, device=DEVICE), torch.ones(M, device=DEVICE)
    scratch = new_scratch(logits, copy=True, entropy=True)
    backward = {"snug, kernel alone": lambda: backward_rows(logits, targets, options, lse, ones, other, scratch)}

    def visit(entropy):
        results = new_rows(M, options._replace(entropy=entropy), DEVICE)
        forward_rows(other, targets, options, *results, scratch, in_place=dtype == torch.float32, gradient=True)

    def liger():
        leaf = other.detach().requires_grad_()
        found["liger_grpo"](leaf, targets).backward()

    one_visit = {"snug, one visit": partial(visit, False), "snug, one visit with entropy": partial(visit, True)}
    if found["liger_grpo"]:
        one_visit["Liger GRPO loss, in place"] = liger
    stages = {  # what, passes over the logits that it takes at least, contenders
        "forward": (1, {name: partial(forward, f) for name, f in ready.items() if "in place" not in name}),
        "backward": (2, backward),
        "loss + gradient": (2, one_visit),
        "forward + backward": (3, {name: partial(both, f) for name, f in ready.items()}),
    }
    for stage, (passes, calls) in stages.items():
        times = interleaved(copies | calls, rounds)
        bandwidth = 2 * read / times["copy"] / 1e9  # TB/s
        for name in calls:
            if name in times:
                rate = passes * read / times[name] / 1e9
                extra = None if stage == "backward" else attempt(extra_bytes, calls[name], logits, other, targets)
                row = dict(
                    stage=stage,
                    name=name,
                    ms=times[name],
                    rate=rate,
                    share=rate / bandwidth,
                    extra=extra,
                    error=errors.get(name),
                )
                rows.append(row)
        absent = [name for name, function in contenders.items() if not function] if "forward" in stage else []
        absent += ["Liger GRPO loss, in place"] if stage == "loss + gradient" and not found["liger_grpo"] else []
        rows += [dict(stage=stage, name=name, note="failed") for name in calls if name not in times]
        rows += [dict(stage=stage, name=name, note="not installed") for name in absent]
    return rows, bandwidth


def bench_head(M, C, V, dtype, budgets, rounds, found):
    """-> rows of the table, and the bare products' TFLOP/s."""
    hidden = torch.randn(M, C, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.nn.Parameter((3 * torch.randn(V, C, device=DEVICE) / C**0.5).to(dtype))
    targets = torch.randint(V, (M,), device=DEVICE)
    contenders = head_contenders(found, budgets)

    def train(loss):
        hidden.grad = weight.grad = None
        loss(hidden, weight, targets).backward()

    def products():
        logits = h @ w.T
        return logits @ w, logits.T @ h

    h, w = hidden.detach(), weight.detach()
    exact = plain_logprobs(h[:64].double() @ w.double().T, targets[:64])
    ready = {name: pair for name, pair in contenders.items() if pair}
    times = interleaved(
        {"products": products} | {name: partial(train, pair[0]) for name, pair in ready.items()}, rounds
    )
    flops, rows = 6 * M * C * V, []
    for name, pair in contenders.items():
        if name not in times:
            rows.append(dict(stage="head", name=name, note="failed" if pair else "not installed"))
            continue
        extra = []
        for frozen in (False, True):
            hidden.grad = weight.grad = None
            weight.requires_grad_(not frozen)
            extra.append(attempt(extra_bytes, partial(train, pair[0]), hidden, weight, targets))
        weight.requires_grad_(True)
        with torch.no_grad():
            error = pair[1] and attempt(lambda f=pair[1]: float((f(h[:64], w, targets[:64]) - exact).abs().max()))
        rate, share = flops / times[name] / 1e9, times["products"] / times[name]
        rows.append(
            dict(
                stage="head",
                name=name,
                ms=times[name],
                rate=rate,
                share=share,
                extra=extra[0],
                frozen=extra[1],
                error=error,
            )
        )
    return rows, flops / times["products"] / 1e9


def print_rows(rows, unit):
    print(f"{'':19} {'':34} {'ms':>9} {unit:>8} {'share':>6} {'extra MiB':>10} {'frozen':>9} {'max error':>9}")
    for row in rows:
        if "ms" not in row:
            print(f"{row['stage']:19} {row['name']:34} {row['note']:>34}")
            continue
        mib = ["" if row.get(key) is None else f"{row[key] / MIB:.1f}" for key in ("extra", "frozen")]
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        print(
            f"{row['stage']:19} {row['name']:34} {row['ms']:9.3f} {row['rate']:8.3f} {row['share']:6.1%} {mib[0]:>10} {mib[1]:>9} {error:>9}"
        )


def main():
    parser = argparse.ArgumentParser(description="Times the log-prob kernels and the head beside their peers.")
    parser.add_argument("--quick", action="store_true", help="smaller shapes and fewer rounds: about 20 seconds")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    (M, V), (head_M, C, head_V), dtype, budgets, rounds = SHAPES[DEVICE, arguments.quick]
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{device}, torch {torch.__version__}, {dtype}"
        + ("" if DEVICE == "cuda" else ": reduced shapes, no word about a GPU")
    )
    found = peers()

    rows, bandwidth = bench_logits(M, V, dtype, rounds, found)
    print(
        f"\nLogits ({M}, {V}). Yardstick: a copy at {bandwidth:.3f} TB/s. Passes counted: forward 1, backward 2, loss + gradient 2, forward + backward 3."
    )
    print_rows(rows, "TB/s")
    head_rows, rate = bench_head(head_M, C, head_V, dtype, budgets, rounds, found)
    print(
        f"\nHead: hidden ({head_M}, {C}), weight ({head_V}, {C}). Yardstick: its three products at {rate:.3f} TFLOP/s. FLOP counted: 6 M C V."
    )
    print_rows(head_rows, "TFLOP/s")
    summary = dict(
        bench="logprobs", device=device, torch=torch.__version__, python=platform.python_version(), dtype=str(dtype)
    )
    summary |= dict(
        quick=arguments.quick, logits=[M, V], head=[head_M, C, head_V], copy_tb_s=bandwidth, products_tflop_s=rate
    )
    print(json.dumps(summary | {"rows": rows + head_rows}))


if __name__ == "__main__":
    main()
