"""A second device whose tensors are fake: what runs on it, and what it notes."""

import json
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

import grpo
import train_sft
from batch import Sequences
from helpers import HOME
from helpers.commands import python
from model import make_model
from runs.loading import configure, load_reference, load_teacher
from runs.log import NoLog
from runs.prepare import prepare
from sample import Rollouts
from settings import GRPOSettings, SFTSettings
from snug.decoding import DecodeBatch, decode_batch
from snug.device.kinds import PlanningMode
from snug.memory import Limits
from snug.memory.plan import PlanMeter, Recorder
from training.dry_run import DryTraining
from training.figures import Scored
from training.optimizer import make_optimizer

GPT2 = dict(vocab_size=300, block_size=32, n_layer=2, n_head=4, n_embd=32, mlp="gelu")
QWEN = dict(GPT2, n_kv_head=2, norm="rmsnorm", position="rotary", mlp="swiglu", qkv_bias=True)
GEMMA = dict(QWEN, mlp="geglu", zero_centered_norm=True, post_norm=True, qk_norm=True, embedding_scale=5.5)
GEMMA |= dict(sliding_window=4, full_every=2, rope_sliding_theta=100.0)
LINEAR = dict(QWEN, full_every=2, linear_key_heads=2, linear_value_heads=4, linear_key_size=8, linear_value_size=8)
LINEAR |= dict(qkv_bias=False, qk_norm=True, attention_gate=True)
GIVEN = {2: QWEN}  # all that a command line can say of Gemma and Qwen3.5
PROMPT, COMPLETION = 9, 6
BFLOAT16 = dict(dtype="bfloat16", param_dtype="bfloat16")
LADDER = {
    "plain": dict(), "selective": dict(checkpoint_blocks="selective"),
    "activation offload": dict(checkpoint_blocks="block", activation_offload=True),
    "host optimizer": dict(optimizer_device="host", grad_offload=True), "autocast": dict(dtype="bfloat16"),
    "masters": BFLOAT16, "bfloat16": BFLOAT16 | dict(optimizer_dtype="bfloat16"),
    "QLoRA": dict(lora_rank=4, base_dtype="nf4"), "teacher": dict(teacher="t"),
    "teacher on the host": dict(teacher="t", divergence="reverse_kl", teacher_device="host"),
    "reference": dict(beta=0.04, importance_sampling_cap=2.0, importance_sampling_level="sequence"),
}  # fmt: skip
SAMPLERS = {"greedy": dict(temperature=0.0), "sampled": dict(), "stop tokens": dict(stop_token=(5, 7))}


class FakeGPU(PlanningMode):
    """Tensors are fake. Values that are read are 0 or True; `waits` counts what made the host wait, by function."""

    def __init__(self, kind="cuda"):
        super().__init__(kind, Recorder())
        self.waits, self.busy, FakeGPU.now = Counter(), False, self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, op = kwargs or {}, func.overloadpacket
        devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()}
        if op is torch.ops.aten._local_scalar_dense:
            if args[0].device.type == "gpu":
                self.wait()
            return True if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        self.busy = True
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.busy = False
        if isinstance(out, torch.Tensor) and out.device.type == "gpu":
            out.constant = None  # of torch.tensor([1, 2]); else what is made of it would be computed
        if op in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[op is torch.ops.aten.copy_]
            asynchronous = kwargs.get("non_blocking") or len(args) > 2 and args[2]
            if out.device.type != source.device.type and not asynchronous:
                self.wait()
        elif len(devices) > 1:  # PyTorch allows it where a tensor picks by indices that are on the host
            self.wait()
        return out

    def wait(self):
        self.waits[self.where()] += 1

    def where(self):
        """The function of ours that called."""
        frame = sys._getframe(3)
        while not frame.f_code.co_filename.startswith(str(HOME)) or "site-packages" in frame.f_code.co_filename:
            frame = frame.f_back
            if frame is None:
                return "autograd"
        return frame.f_code.co_qualname.removesuffix(".<locals>.<genexpr>")


def upload(source, target, non_blocking=False):
    """What copies a list of numbers to the device, below all modes."""
    if not FakeGPU.now.busy:
        FakeGPU.now.wait()
    return target


def in_bfloat16(product, *tensors, **numbers):
    with torch.autocast("gpu", enabled=False):
        return product(*(x if x is None else x.to(torch.bfloat16) for x in tensors), **numbers)


LIBRARIES = []  # what is registered lasts as long as they do


def register():
    """The device "gpu"."""
    from torch.utils import backend_registration

    class Module(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend("gpu", Module())
    # for torch.tensor(numbers, device=...) and tensor[numbers]
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("empty_strided", lambda size, stride, dtype=None, **_: torch._C._acc.create_empty_tensor(size, dtype))
    library.impl("_copy_from", upload)
    # autocast: products in bfloat16, all else as it comes
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)
    casts = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in ("linear", "mm", "addmm"):
        casts.impl(name, partial(in_bfloat16, getattr(torch.ops.aten, name)))
    LIBRARIES.extend([library, others, casts])

    class Generator(torch.Generator):
        def __new__(cls, device=None):
            return super().__new__(cls)  # the fake device has none of its own

    torch.Generator = Generator


def print_cases(cases, mode):
    """What each case that the command line names returns, in a new mode, or its error: a line of JSON."""
    for name in sys.argv[1:]:
        try:
            with mode() as entered:
                told = dict(told=cases[name](entered), problems=sorted(getattr(entered, "problems", [])))
        except Exception:
            told = dict(error=traceback.format_exc())
        print(json.dumps([name, told]), flush=True)


def iterate(mode, shape, options, micro_batches):
    """An iteration of GRPO of 8 sequences -> the waits of its training phase."""
    common = dict(device=mode.kind, task="addition", digits=1, eval_prompts=0, batch_size=2, group_size=4)
    common["dtype"] = "float32"
    tokens = 2 // micro_batches * (PROMPT + 4 * (COMPLETION - 1))  # two groups, or one
    common |= dict(max_tokens_per_micro_batch=tokens, max_new_tokens=COMPLETION)
    settings = GRPOSettings(**common | GIVEN.get(shape.get("full_every"), shape) | options)
    with unset_fake_temporarily():
        prepared = prepare(replace(settings, beta=0.0, teacher=""))
    prepared.shape |= shape
    # A parameter of a fake device cannot move to the host: of such a teacher only the outputs are there.
    prepared.settings = replace(settings, teacher_device="device")
    prepared.teacher = SimpleNamespace(state=dict(model_config=prepared.shape))
    models = [load(prepared, torch.device("gpu")) for load in (load_reference, load_teacher)]
    prepared.settings = settings
    training = make_training(prepared, *models)

    def collect(iteration, training):
        tokens = torch.zeros(8, PROMPT + COMPLETION, dtype=torch.long, device="gpu")
        logprobs = torch.zeros(8, COMPLETION, device="gpu")
        with training.meter.phase("rollout"):
            time.sleep(0.001)  # tokens are divided by its seconds
            learned = Rollouts(tokens, known(8, PROMPT), known(8, COMPLETION), logprobs, None, known(8, True))
        return Scored(learned, torch.zeros(2, 4), {}, {}, {}, {}, 4), dict(tokens=0, gen_batches=1)

    mode.waits.clear()
    grpo.iterate(0, training, collect)
    return mode.waits


def known(count, value):
    """A column on the device whose values the host knows: micro-batches are cut by them."""
    column = torch.full((count,), value, device="gpu")
    column.tolist = lambda: [value] * count
    return column


def make_training(prepared, reference=None, teacher=None):
    settings, device = prepared.settings, torch.device("gpu")
    model = make_model(prepared.shape, device, settings.param_dtype, base_dtype=settings.base_dtype)
    configure(model, settings)
    log = NoLog(settings)
    parts = PlanMeter(Recorder()), log, None, Limits(prepared, log.say)
    optimizer = make_optimizer(model, settings)
    return DryTraining(prepared, model, reference, optimizer, *parts, teacher=teacher)


def sft(mode, shape, micro_batches):
    common = dict(device=mode.kind, task="addition", digits=1, eval_prompts=0, batch_size=8)
    common["max_tokens_per_micro_batch"] = 8 // micro_batches * (PROMPT + COMPLETION)
    settings = SFTSettings(**common | GIVEN.get(shape.get("full_every"), shape))
    with unset_fake_temporarily():
        prepared = prepare(settings)
    prepared.shape |= shape
    training = make_training(prepared)

    def collect(iteration, training):
        tokens = torch.zeros(8, PROMPT + COMPLETION, dtype=torch.long, device="gpu")
        return Sequences(tokens, known(8, PROMPT), known(8, COMPLETION))

    mode.waits.clear()
    train_sft.iterate(0, training, collect)
    return mode.waits


def sample(mode, shape, options):
    """Everything a rollout does on the device; -> the waits of one step."""
    decode_batch.SHRINK_ABOVE["cuda"] = 1  # this batch is small
    model = make_model(shape, torch.device("gpu"), "bfloat16")
    with torch.no_grad():
        batch = DecodeBatch(model, [[1] * PROMPT, [2] * 5, [3] * 7], 4, COMPLETION, 6, **options)
        batch.rehearse()
        batch = DecodeBatch(model, [[1] * PROMPT, [2] * 5, [3] * 7], 4, COMPLETION, 6, **options)
        batch.look = lambda: None
        assert batch.refill()
        batch.step()
        batch.held[2:4] = 12  # these are over; others take their slots
        assert batch.refill()
        mode.waits.clear()
        batch.step()
        waits = dict(mode.waits)
        batch.step()
        batch.held[:] = 12
        assert batch.refill()
        batch.step()
        batch.held[1:] = 12
        assert batch.refill() and len(batch.sequences) < 6  # idle slots were removed
        batch.step()
    return waits


def cases_of(train, sft, ladder):
    """{name: a function of the mode}: GPT-2, Gemma and Qwen3.5 plain and sampled, Qwen with all options."""
    found = {}
    for shape_name, shape in dict(gpt2=GPT2, qwen=QWEN, gemma=GEMMA, linear=LINEAR).items():
        for name, options in ladder.items() if shape_name == "qwen" else [("plain", {})]:
            found[f"train-{shape_name}-{name}"] = partial(train, shape=shape, options=options)
        for name, options in SAMPLERS.items() if shape_name == "qwen" else [("sampled", {})]:
            found[f"sample-{shape_name}-{name}"] = partial(sample, shape=shape, options=options)
        found[f"sft-{shape_name}"] = partial(sft, shape=shape)
    return found


def run_apart(file, request, cases):
    """Run a file by itself, with those of the cases that are asked for -> {case: what it printed of it}."""
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot register a device from Python")
    asked = [item for item in request.session.items if item.path == Path(file) and not item.get_closest_marker("skip")]
    names = [name for name in cases if any(item.name.endswith(f"[{name}]") for item in asked)]
    result = python(file, *names, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(HOME))
    assert result.returncode == 0, result.stderr
    return dict(map(json.loads, result.stdout.splitlines()))
