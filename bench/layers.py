"""What a layer of Qwen2.5 launches and moves on CUDA, in a decode step and in a training step: counted, not timed.

    python bench/layers.py [--model=1.5B] [--lora_rank=16] [--base_dtype=nf4] [--rows=64] [--tokens=4096]

The model runs on a planner's CUDA tensors, which have no data, at two depths: the difference is a layer. A dispatch
mode sees every ATen op; views launch nothing. Bytes: each op reads its arguments once and writes its results once.

floor    the bytes of matrix products and attention alone: as if all else happened within them. What is dequantized
         from NF4 counts as bfloat16 in a product

The training step is one packed row of a prompt. Some ops differ on CUDA, which this file corrects: a product that adds
to a copy (2 kernels), and Triton's kernels (3 in attention's backward).
"""

import argparse
import sys

import numpy as np
import torch
from common import QWEN_7B, QWEN_15B
from torch.utils._python_dispatch import TorchDispatchMode

from model import make_model
from snug import lora
from snug.decoding import attention, cached_casts, kvcache
from snug.device.host import Ledger
from snug.device.kinds import PlanningMode
from snug.kernels import flash, layers, nf4, rotary
from snug.kernels.segments import Segments

SHAPES = {"1.5B": QWEN_15B, "7B": QWEN_7B}
PROMPTS, PROMPT_WIDTH, WIDTH = 4, 256, 256  # of the KV cache, which is full
# where kernels are launched by `launch`; in flash.py if not `nothing_to_do`
LAUNCH = "kernels.rotary", "kernels.gated", "kernels.norm", "kernels.nf4", "decoding.kvcache"
NO_LAUNCH = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "device")


class Count(TorchDispatchMode):
    """launches, and the bytes of products and attention (`floor`) and of all."""

    def __init__(self):
        super().__init__()
        self.launches = self.bytes = self.floor = 0

    def add(self, launches, tensors, floor=False):
        # What is expanded is read once. Without data a product of one token a row is one of expanded matrices.
        size = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)
        self.launches, self.bytes, self.floor = self.launches + launches, self.bytes + size, self.floor + floor * size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        inputs, outputs = tensors_in([args, kwargs]), tensors_in(result)
        storages = {id(tensor.untyped_storage()) for tensor in inputs}
        view = all(id(tensor.untyped_storage()) in storages for tensor in outputs)
        if (view and not func._schema.is_mutable) or name in NO_LAUNCH:
            return result
        adds = name == "addmm" and args[0].dim() == 2
        copies = outputs + outputs if adds else []
        self.add(1 + adds, inputs + outputs + copies, name in ("mm", "bmm", "addmm", "addmm_"))
        return result


def tensors_in(value):
    """-> the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, tuple | list) else []


def counted(count):
    """In place of flash's `nothing_to_do`: count a kernel, and the tensors among its caller's variables."""
    frame = sys._getframe(2)
    tensors = tensors_in(list(frame.f_locals.values()))
    count.add(3 if frame.f_code.co_name == "backward" else 1, tensors, floor=True)
    return True


def launched(count):
    """-> in place of a module's `launch`: count a kernel and its tensors."""

    def launch(kernel, grid, *arguments, **constants):
        tensors, product = tensors_in(arguments), kernel is nf4.product_kernel
        if product:  # parts are written and read; of y a part
            named = dict(zip(kernel.arg_names, arguments, strict=False))
            tensors = tensors_in([named[name] for name in "x codes scales scale_map scale_scales".split()])
            tensors += tensors_in([named[name] for name in "bias residual h B parts parts".split()])
            tensors.append(named["y"][..., named["start"] : named["start"] + named["rows"]])
        if kernel is rotary.rotary_kernel:
            tensors.append(tensors[0])  # it reads and writes
        count.add(1, tensors, floor=product or kernel is attention.attend_kernel)

    return launch


def hold_in_nf4(model):
    """Each matrix of a folder by itself: q, k and v are three."""
    layers.hold_in_nf4(model, "cpu", empty=True)
    c, rows = model.config, {}
    for block in model.blocks:
        kv = c.n_kv_head * c.head_size
        rows[block.attention.qkv], rows[block.mlp.up] = [c.n_head * c.head_size, kv, kv], [c.n_hidden] * 2
        rows[block.attention.proj], rows[block.mlp.down] = [c.n_embd], [c.n_embd]
    for layer, parts in rows.items():
        for start, n in zip(np.cumsum([0, *parts]).tolist(), parts, strict=False):
            layer.weight.parts[start] = fake_nf4(n * layer.weight.shape[1])


def fake_nf4(n):
    """-> Quantized of n values, without data."""
    blocks, numbers = n // nf4.BLOCK, dict(dtype=torch.float32)
    scales = torch.empty(256, **numbers), torch.empty(-(-blocks // nf4.SCALE_BLOCK), **numbers)
    codes = torch.empty(n // 2, dtype=torch.uint8), torch.empty(blocks, dtype=torch.uint8)
    return nf4.Quantized(*codes, *scales, torch.empty((), **numbers))


def run(what, n_layer, rows, tokens, model, lora_rank, base_dtype) -> Count:
    """Count one decode step, or one forward and backward, of a model this deep."""
    with PlanningMode("cuda", Ledger()):
        shape = SHAPES[model] | dict(vocab_size=8, block_size=32768, n_layer=n_layer)
        model, count = make_model(shape, "cpu", "bfloat16"), Count()
        if base_dtype:
            hold_in_nf4(model)
        if lora_rank:
            lora.add(model, lora_rank, 32.0, list(lora.TARGETS))
        model.checkpoint_blocks = what
        flash.nothing_to_do = lambda tensor: counted(count)
        for name in LAUNCH:
            sys.modules[f"snug.{name}"].launch = launched(count)
        model.angles(torch.zeros(1, 1, dtype=torch.long, device=model.device), max(tokens, PROMPT_WIDTH + WIDTH))
        if what == "decode":
            cache = kvcache.KVCache(
                model.config, PROMPTS, PROMPT_WIDTH, rows, WIDTH, torch.bfloat16, "cpu", rows // PROMPTS
            )
            cache.assign(np.arange(rows) % PROMPTS)
            cache.begin_step(torch.zeros(rows, dtype=torch.long), WIDTH, True)
            with torch.no_grad(), cached_casts(model), count:
                model(torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, 1, dtype=torch.long), cache)
        else:
            with count:
                row = torch.zeros(1, tokens, dtype=torch.long)
                hidden = model(row, row, mask=Segments([(tokens, [])]))
                hidden.backward(torch.empty_like(hidden))
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="1.5B", help="Qwen2.5")
    parser.add_argument("--lora_rank", type=int, default=0, help="of adapters beside all matrices; 0: none")
    parser.add_argument("--base_dtype", choices=["", "nf4"], default="", help="of the frozen matrices")
    parser.add_argument("--rows", type=int, default=64, help="of the decode batch")
    parser.add_argument("--tokens", type=int, default=4096, help="of the micro-batch")
    sizes = vars(parser.parse_args())
    print(f"a layer: {'launches':>28} {'MB moved':>10} {'floor':>10}")
    for what, title in (
        ("decode", f"decode step, {sizes['rows']} rows"),
        ("none", f"train, {sizes['tokens']} tokens"),
        ("block", "train, blocks recomputed"),
    ):
        shallow, deep = (run(what, n, **sizes) for n in (2, 3))
        mb = [(getattr(deep, name) - getattr(shallow, name)) / 1e6 for name in ("bytes", "floor")]
        print(f"{title:25} {deep.launches - shallow.launches:11} {mb[0]:10.1f} {mb[1]:10.1f}")


if __name__ == "__main__":
    main()
