"""Each Triton kernel beside its plain twin on a small case, before a run trusts it: on a GPU that nobody has tried, a
kernel may not compile, write nothing or be wrong. Then plain torch runs in its place.

A case has the run's types, head size, groups, windows and adapters. Its numbers fit bfloat16, and the twin computes
from the same numbers in float64, for which no kernel is used. A case takes some small operations. Most of the time goes
to Triton's compiler, which the run needs anyway. If all kernels were right, an empty file in Triton's cache spares the
next start the trial. A wrong kernel is tried again at each start: something may have been installed.

Left out: speed, other lengths. Test: pytest tests/test_trust.py
"""

from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from snug.decoding.draw import sample_tokens
from snug.decoding.kvcache import KVCache
from snug.device.cuda import empty_cache
from snug.device.processes import ONE_PROCESS
from snug.kernels import OFF, adamw, delta_step, gated, layers, rotary, segments, triton
from snug.logprobs import head_logprobs
from snug.lora import LoRALinear
from snug.options import described, in_one_line
from snug.options.progress import phase
from snug.shape import GPTConfig

DEVICE = "cuda"
# Of a result's norm. Rounding to bfloat16 changes a number by at most 2^-8 and a norm by 0.0015, and no path through a
# kernel and back rounds more than five times. A hundredth is more.
TOLERANCE = 2**-7


def cases(settings, config):
    """Yield (kernel, a function that uses it, shapes of its inputs)."""
    q, k = ((4, heads, 1, config.head_size) for heads in (config.n_head, config.n_kv_head))
    C, V, group = config.n_embd, config.n_vocab, config.n_head // config.n_kv_head
    four, longest = torch.arange(4, device=DEVICE), max(config.windows) + 60
    angles = None
    if config.position == "rotary":
        angles = [table[:, None, None] for table in rotary.rotary_table(config, 4, DEVICE)]

    def attention(x):
        mask = segments.Segments([(longest, [33, 20])], DEVICE)
        parts = x.split([group, 1, 1], 1)
        return torch.cat([segments.attend(*parts, mask, window) for window in {*config.windows}])

    @torch.no_grad()
    def decode(q, k):
        cache = KVCache(config, 1, longest, 4, 40, q.dtype, DEVICE, settings.group_size)
        cache.prompt_lengths.fill_(longest)
        cache.prompt.copy_(k[:1])
        cache.assign(np.zeros(4, int))
        cache.begin_step(four * 13, 40, False)
        return torch.cat([cache.attend(layer, q, k, k, angles) for layer in range(len(config.windows))])

    def draw(weight):
        weight = 8 * weight  # likely tokens, so that rounding does not draw a neighbour
        model = SimpleNamespace(config=config, lm_head_weight=weight, logits=lambda _: weight.T)
        return sample_tokens(model, torch.eye(4).to(weight), 0.1 + four / 5, 1.0)[1]

    def rows(weight):
        return head_logprobs(torch.eye(4).to(weight), weight, four, entropy=True)[0]

    def step(x):
        weight, *others = x.detach().abs()
        adamw.adamw(weight, *others, None, [0.5] * 7, 7, 0, adamw.new_scratch(weight))
        return weight

    yield "adamw", step, (4, 5000)
    yield "attention", attention, (1, group + 2, longest + 53, config.head_size)
    yield "decode", decode, q, k
    if config.is_linear(0):
        n = 4, config.linear_value_heads, 1
        yield "delta", delta, (*n, config.linear_key_size), (*n, config.linear_value_size)
    yield "draw", draw, (V, 4)
    yield "rows", rows, (V, 4)
    yield "gated", lambda x: gated.GatedUnit.apply(x, config.mlp == "geglu"), (3, 2 * config.n_hidden)
    if config.norm == "rmsnorm":  # the first row is the weight, so that its gradient is compared, too
        eps, centered = config.norm_eps, config.zero_centered_norm
        yield "norm", lambda x: layers.Norm.apply(x[1:], x[0, 0], eps, centered), (5, 4, C)
    if angles:
        yield "rotary", lambda x: rotary.Rotary.apply(x, *angles, x.shape[1:2])[0], q
    if settings.base_dtype:
        linear = layers.Linear(C, 192, bias=False, device=DEVICE)
        layers.hold_in_nf4(linear, DEVICE)
        linear = LoRALinear(linear, settings.lora_rank, 2.0)
        torch.nn.init.constant_(linear.lora_B, 0.1)
        yield "nf4", linear, (64, C)
        yield "nf4_product", torch.no_grad()(linear.forward), (64, C)


@torch.no_grad()
def delta(k, v):
    """Three steps of a linear layer: k (n, H, 1, K), v (n, H, 1, V)."""
    half = torch.full_like(v[..., :1], 0.5, dtype=torch.float32)
    k = 0.2 * half * k  # at least float32, as a layer's; float64 for the twin
    v = half * v
    S = torch.zeros_like(k.mT @ v)
    return torch.cat([delta_step.step(k, k, v, -half, half, S) for _ in range(3)])


@torch.enable_grad()
def error_of(dtype, function, *shapes) -> float:
    """How far the function's result is off, or the gradient of its first input, as a share of the right one."""
    numbers = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]

    def results(dtype):
        x, *others = (number.to(dtype, copy=True) for number in numbers)
        y = function(x.requires_grad_(), *others)
        return [y, *torch.autograd.grad(y.square().sum(), x)] if y.grad_fn else [y]

    # `map` ends with the shorter list: a kernel may have no gradient where its twin has one.
    both = results(dtype), results(torch.float64)
    errors = map(lambda a, b: (a - b).norm() / b.norm(), *both)
    return torch.stack([*errors]).max().item()


@phase("trying kernels")
def try_kernels(settings, shape):
    """-> OFF, with the kernels that are not right, and why. If all were right before, nothing is tried."""
    smaller = dict(
        n_layer=shape.get("full_every") or 1,
        sliding_window=min(shape.get("sliding_window", 0), 1000),  # the twin has a dense mask
    )
    config = GPTConfig(**shape | smaller)
    machine = (
        f"{torch.cuda.get_device_name()} (driver {torch._C._cuda_getDriverVersion()}, "
        f"torch {torch.__version__}, Triton {triton.__version__})"
    )
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    facts = (
        f"{machine} {config} {settings.dtype} {settings.lora_rank} {settings.base_dtype} "
        f"{settings.group_size} {sources}"
    )
    right = Path(triton.knobs.cache.dir, sha256(facts.encode()).hexdigest())
    for name, *case in [] if right.exists() else cases(settings, config):
        try:
            error = error_of(getattr(torch, settings.dtype), *case)
            if not error <= TOLERANCE:
                OFF[name] = f"off by {error:.1%} on {machine}"
        except Exception as error:  # whatever it is, plain torch runs instead
            OFF[name] = f"{described(error)[:200]} (Triton needs gcc and python3-dev) on {machine}"
            # After some errors CUDA does nothing more in this process.
            with in_one_line(
                f"{name}: {OFF[name]}; start again with --device=cpu, a run also with --kernels=torch"
            ):
                torch.cuda.synchronize()
    empty_cache()
    if not OFF:
        with suppress(OSError):  # of a cache that is only read
            right.touch()
    return OFF


def choose_kernels(settings, shape, kind, say, processes=ONE_PROCESS):
    """From now on OFF has the kernels that plain torch replaces, in all processes, and why. With any, `say` gets
    a line -> this line, for the log and settings.json, or None. SnugError if a kernel broke CUDA.

    shape: GPTConfig's keywords. kind: "cuda" or another kind of device.
    """
    OFF.clear()
    if kind != "cuda":
        return
    if settings.kernels == "torch":
        OFF["all"] = "--kernels=torch"
    elif triton is None:
        OFF["all"] = "Triton is missing (pip install triton)"
    elif torch.cuda.is_available():  # else it is a plan of another machine's
        for found in processes.from_all_ranks(lambda: try_kernels(settings, shape)):
            OFF.update(found)
    if not OFF:
        return
    line = (
        f"warning: plain torch in place of kernels ({', '.join(OFF)})"
        f"{' and no CUDA graphs' if OFF.keys() & {'all', 'decode'} else ''}, which is slower: "
        f"{'; '.join(dict.fromkeys(OFF.values()))}"
    )
    say(line)
    return line
