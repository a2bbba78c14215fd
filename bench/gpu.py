"""Where a GPU's time goes, phase by phase, and whether its kernels are right in bfloat16.

    python bench/gpu.py [--shapes=cuda|tiny] [--only=attention,nf4]        tiny: also on a CPU; its figures say nothing

attention   relative errors of packed attention's output and gradients against float64, beside PyTorch's own attention
ceilings    a large copy, a large product, and the products of a decode step, each over more weights than caches hold
nf4         those products with matrices of 7B in 4 bits: by the kernel that reads them, dequantized, and in bfloat16
decode      a step by batch and length, the first step and the recording, and the kernels of a step
train       a micro-batch by size: the device's time and the host's, without and with checkpoints, and its kernels
optimizer   a step of AdamW
mismatch    the sampler's log-probs against the trainer's, with partial sums in bfloat16 and without

A random model of Qwen2.5-1.5B's shape, in bfloat16. Times are medians, by events of the device. A model's FLOP count its
products with weights; backward has two for each of forward. The kernels are printed, the longest first.

Left out: other libraries (sampling.py, iteration.py, logprobs.py), plans and peaks (memory.py), a whole iteration.
"""

import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from common import (
    DEVICE,
    QWEN,
    QWEN_7B,
    QWEN_15B,
    begin,
    clocked,
    copy_bandwidth,
    end,
    going_on,
    parser,
    result,
    synchronize,
)
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from batch import Cut, Sequences, make_micro_batch
from model import make_model
from sample import sample_groups
from settings import GRPOSettings, SFTSettings
from snug.decoding import DecodeBatch
from snug.device.cuda import empty_cache
from snug.device.kinds import MIB
from snug.kernels.nf4 import NF4, NF4Linear, product
from snug.kernels.segments import Segments, attend
from snug.logprobs import head_loss
from training.frozen import trainer_logprobs
from training.optimizer import make_optimizer, optimizer_step

CUDA = DEVICE == "cuda"
BFLOAT16 = dict(dtype="bfloat16", param_dtype="bfloat16")
SIZES = {
    "cuda": dict(
        model=QWEN_15B | dict(block_size=4096),
        groups=[(256, [200] * 8), (77, [31, 1, 64, 129]), (1, [3]), (300, [100, 65, 63])],
        heads=[(12, 2, 128), (14, 2, 64), (8, 8, 40)],
        copy=2**30, product=8192, rows=(16, 64, 128), cache=2**28,  # bytes of weights that no cache holds
        matrices=[(3584, 3584), (512, 3584), (18944, 3584), (3584, 18944)],
        prompts=(4, 256), decode=[(64, 256), (64, 1024), (16, 1024), (256, 512)],  # rows, longest completion
        large=QWEN_7B | dict(block_size=4096), large_decode=[(16, 512)],
        train=[(1, 1, 1024), (2, 8, 200), (8, 8, 200)],  # prompts, completions of each, their length
        sampled=(8, 200),  # completions a prompt, their length
    ),
    "tiny": dict(
        model=QWEN | dict(vocab_size=160, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=64, block_size=64),
        groups=[(7, [5, 3]), (1, [3])],
        heads=[(4, 2, 16)],
        copy=2**16, product=64, rows=(2,), cache=2**12,
        matrices=[(32, 64)],
        prompts=(2, 6), decode=[(8, 32)],
        large=QWEN | dict(vocab_size=160, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_hidden=128, block_size=64),
        large_decode=[(8, 32)],
        train=[(1, 2, 6)],
        sampled=(2, 6),
    ),
}  # fmt: skip


def microseconds(call, rounds=20):
    """The median of calls, after three that do not count. The cache is as the call before left it."""
    for _ in range(3):
        call()
    if not CUDA:
        return 1e6 * statistics.median(clocked(call)[1] for _ in range(rounds))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for before, after in pairs:
        before.record()
        call()
        after.record()
    synchronize()
    return 1e3 * statistics.median(before.elapsed_time(after) for before, after in pairs)


def without_launches(call, times):
    """Microseconds of a call within a CUDA graph of `times` calls, so that the host launches nothing in between."""
    if not CUDA:
        return microseconds(call)
    call()  # what a library makes once
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return microseconds(graph.replay) / times


def print_kernels(name, call, calls=3):
    """Print the kernels of a call, and how many it launches."""
    kind, device = ("device", DeviceType.CUDA) if CUDA else ("cpu", DeviceType.CPU)
    with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as profiled:
        for _ in range(calls):
            call()
        synchronize()
    events = [event for event in profiled.key_averages() if event.device_type == device]
    spent = {event.key: getattr(event, f"self_{kind}_time_total") / calls for event in events}
    counts = {event.key: event.count / calls for event in events}
    for key in sorted(spent, key=spent.get, reverse=True)[:18]:
        print(f"    {spent[key]:10.1f} us {counts[key]:7.1f} x  {key[:80]}")
    result(f"{name}: kernels and copies", round(sum(counts.values())), "", us=sum(spent.values()))


def random_bfloat16(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def each_in_turn(multiply, x, weights):
    """Microseconds of a product of x and one of many weights, more than a cache holds."""
    turn = itertools.cycle(weights)
    return without_launches(lambda: multiply(x, next(turn)), len(weights))


def random_model(sizes):
    torch.manual_seed(0)
    return make_model(sizes["model"], DEVICE, "bfloat16")


def random_prompts(sizes):
    return torch.randint(sizes["model"]["vocab_size"], sizes["prompts"]).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Sections


def attention(sizes):
    for (H, G, D), dtype in itertools.product(sizes["heads"], (torch.bfloat16, torch.float32)):
        packed = Segments(sizes["groups"], DEVICE)
        T = int(packed.lengths.sum())
        qkv = [torch.randn(1, n, T, D, device=DEVICE).to(dtype) for n in (H, G, G)]
        dy = torch.randn(1, H, T, D, device=DEVICE).to(dtype)
        exact = with_gradients(attend, [x.double() for x in qkv], dy.double(), packed.mask())
        ours = with_gradients(attend, qkv, dy, packed)
        theirs = with_gradients(attend, qkv, dy, packed.mask())
        for name, a, b, right in zip(("y", "dq", "dk", "dv"), ours, theirs, exact, strict=True):
            error, peer = (float((x - right).norm() / right.norm()) for x in (a, b))
            name = f"attention {H}/{G} x {D}, {str(dtype)[6:]}: error of {name} / PyTorch's"
            result(name, error / peer, "x", at_most=2, error=error, look="flash.py with num_stages=1 first")


def product_speed(sizes):
    """TFLOP/s of a large product."""
    n = sizes["product"]
    a = random_bfloat16(n, n)
    return 2 * n**3 / microseconds(lambda: a @ a) / 1e6


def with_gradients(function, qkv, dy, packed):
    leaves = [x.detach().requires_grad_() for x in qkv]
    y = function(*leaves, packed)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def ceilings(sizes):
    result("a copy", copy_bandwidth(sizes["copy"]) / 1e12, "TB/s")
    result("a product", product_speed(sizes), "TFLOP/s")
    model = random_model(sizes)
    block = model.blocks[0]
    matrices = dict(qkv=block.attention.qkv, proj=block.attention.proj, up=block.mlp.up, down=block.mlp.down)
    shapes = {name: module.weight.shape for name, module in matrices.items()} | dict(head=model.lm_head_weight.shape)
    del model, block, matrices
    for rows, (name, (out, width)) in itertools.product(sizes["rows"], shapes.items()):
        count = 1 + sizes["cache"] // (2 * out * width)
        weights = [random_bfloat16(out, width) for _ in range(count)]
        us = each_in_turn(F.linear, random_bfloat16(rows, width), weights)
        result(f"{rows} rows, {name} {out} x {width}", us, "us", tb_per_s=2 * out * width / us / 1e6)


@torch.inference_mode()
def nf4(sizes):
    for rows, (out, width) in itertools.product(sizes["rows"], sizes["matrices"]):
        x, count = random_bfloat16(rows, width), 1 + 2 * sizes["cache"] // (out * width)
        weights = [NF4((out, width), DEVICE) for _ in range(count)]
        for weight in weights:
            weight.copy_(torch.randn(out, width, device=DEVICE))
        values = [weight.dequantized(torch.bfloat16) for weight in weights[: 1 + count // 4]]
        exact, name = x.double() @ values[0].double().t(), f"NF4, {rows} rows, {out} x {width}"
        y = (product if CUDA else dequantized)(x, weights[0])  # the kernel runs on CUDA alone
        error, peer = ((each - exact).norm() / exact.norm() for each in (y, F.linear(x, values[0])))
        look = "nf4.py with PROGRAMS = 1: no sum is shared"
        result(f"{name}: error / bfloat16's", float(error / peer), "x", at_most=1.1, error=float(error), look=look)
        ways = dict(dequantized=(weights, dequantized), bfloat16=(values, F.linear))
        if CUDA:
            ways["4 bits"] = weights, product
        for way, (matrices, multiply) in ways.items():
            us = each_in_turn(multiply, x, matrices)
            result(f"{name}: {way}", us, "us", tb_per_s=out * width * 4.127 / 8 / us / 1e6)


def dequantized(x, weight):
    return NF4Linear.apply(x, weight, None)


@torch.inference_mode()
def decode(sizes):
    model = random_model(sizes)
    decode_steps("decode", model, sizes, sizes["decode"], sum(p.nbytes for p in model.parameters()), 60)


@torch.inference_mode()
def nf4_decode(sizes):
    """A step of 7B in NF4: q, k and v, and gate and up, are matrices of their own, as in a folder."""
    torch.manual_seed(0)
    model = make_model(sizes["large"], DEVICE, "bfloat16", base_dtype="nf4")
    c, bytes_ = model.config, 2 * model.lm_head_weight.numel()
    kv = c.n_kv_head * c.head_size
    for block in model.blocks:
        for layer, sizes_of in (
            (block.attention.qkv, [c.n_head * c.head_size, kv, kv]),
            (block.mlp.up, [c.n_hidden] * 2),
        ):
            whole = layer.weight.dequantized(torch.bfloat16)
            layer.weight.parts, start = {}, 0
            for rows in sizes_of:
                layer.weight.copy_(whole[start : start + rows], start)
                start += rows
        matrices = block.attention.qkv, block.attention.proj, block.mlp.up, block.mlp.down
        bytes_ += sum(part.codes.nbytes + part.scales.nbytes for m in matrices for part in m.weight.parts.values())
    decode_steps("NF4 decode", model, sizes, sizes["large_decode"], bytes_, 26)  # bfloat16 takes as long then


def decode_steps(what, model, sizes, cases, weights, aim):
    """weights: bytes that a step reads. aim: its share of a copy's bandwidth, in percent."""
    c, (P, T) = model.config, sizes["prompts"]
    copy = copy_bandwidth(sizes["copy"])
    for rows, longest in cases:
        batch = DecodeBatch(model, random_prompts(sizes), rows // P, longest, rows, cuda_graphs=CUDA)
        batch.u.uniform_()
        batch.refill()
        _, first = clocked(batch.step)
        for _ in range(longest // 2 - 10):
            batch.step()
        us = microseconds(batch.step, 10)
        cached = 4 * c.n_layer * c.n_kv_head * c.head_size * (P * T + rows * longest // 2)
        share = 100 * (weights + cached) / copy / us * 1e6
        details = dict(ms=us / 1e3, tokens_per_s=rows / us * 1e6, tb_per_s=(weights + cached) / us / 1e6)
        details |= dict(graph=bool(batch.recorder and batch.recorder.graph), look="the kernel table in log.txt")
        result(f"{what} {rows} x {longest}: a copy's bandwidth", share, "%", at_least=aim, **details)
        result(f"{what} {rows} x {longest}: the first step, with a recording", 1e3 * first, "ms")
    print_kernels(f"{what} {rows} x {longest}", batch.step)


def train(sizes):
    model, T = random_model(sizes), sizes["prompts"][1]
    c, blocks = model.config, sum(p.numel() for p in model.blocks.parameters())
    aim = dict(at_least=round(product_speed(sizes) / 2), look="host_ms beside ms, then the kernel table in log.txt")
    for (P, k, length), way in itertools.product(sizes["train"], ("none", "block")):
        model.checkpoint_blocks = way
        prompts = [ids for ids in torch.randint(c.vocab_size, (P, T)).tolist() for _ in range(k)]
        both = Sequences.from_lists(prompts, torch.randint(c.vocab_size, (P * k, length)).tolist(), DEVICE)
        micro = make_micro_batch(both, list(range(P * k)), Cut(both, group_size=k))
        M, tokens = len(micro.targets), micro.tokens.shape[1]

        def forward(micro=micro):
            return micro.completion_hidden(model)

        def step(micro=micro, M=M):
            mean = lambda logprobs, rows: -logprobs.sum() / M  # noqa: E731
            head_loss(forward(micro), model.lm_head_weight, micro.targets, mean)[0].backward()

        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        us = microseconds(step, 5)
        synchronize()
        started = time.perf_counter()
        step()
        host = time.perf_counter() - started  # without waiting for the device
        details = dict(tokens=tokens, ms=us / 1e3, host_ms=1e3 * host)
        details |= dict(peak_mib=torch.cuda.max_memory_allocated() / MIB) if CUDA else {}
        with torch.no_grad():
            details |= dict(forward_ms=microseconds(forward, 5) / 1e3)
        name = f"train {P} x {k} x {length}, checkpoints: {way}"
        tflop = 6 * (blocks * tokens + c.n_embd * c.vocab_size * M) / 1e12
        result(name, tflop / us * 1e6, "TFLOP/s", **details, **(aim if way == "none" else {}))
        if way == "none":
            print_kernels(name, step)
        model.zero_grad()


def optimizer(sizes):
    model = random_model(sizes)
    adamw = make_optimizer(model, SFTSettings(**BFLOAT16, optimizer_dtype="bfloat16"))

    def seconds():
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        return clocked(lambda: optimizer_step(model, adamw, 1e-6, 1.0))[1]

    ms, numbers = 1e3 * statistics.median(seconds() for _ in range(5)), sum(p.numel() for p in model.parameters())
    result("optimizer: a step", ms, "ms", tb_per_s=16 * numbers / ms / 1e9)  # gradient twice; two moments and a weight


def mismatch(sizes):
    model, (k, length), products = random_model(sizes), sizes["sampled"], torch.backends.cuda.matmul
    for rounded in (True, False):
        products.allow_bf16_reduced_precision_reduction = rounded
        rollouts = sample_groups(model, random_prompts(sizes), k, length, seed=1)
        with torch.no_grad():
            logprobs = trainer_logprobs(model, rollouts, Cut(rollouts, 0, 4096, k), GRPOSettings(**BFLOAT16))
        d = (logprobs - rollouts.sampling_logprobs).double()[rollouts.mask == 1]
        name = f"sampler / trainer, partial sums in {'bfloat16' if rounded else 'float32'}"
        look = "the hidden states of one token, read and sampled"
        result(f"{name}: KL", float((d.exp() - 1 - d).mean()), at_most=0.01, largest=float(d.abs().max()), look=look)


SECTIONS = (attention, ceilings, nf4, decode, nf4_decode, train, optimizer, mismatch)


def main(arguments):
    begin(arguments)
    failed, names = [], arguments.only or ",".join(section.__name__ for section in SECTIONS)
    for section in SECTIONS:
        if section.__name__ in names.split(","):
            with going_on(section.__name__, failed):
                section(SIZES["cuda" if arguments.shapes == "cuda" else "tiny"])
            empty_cache()
    end(failed)


if __name__ == "__main__":
    main(parser("Phases of a GPU: errors, ceilings, times, kernels.").parse_args())
