"""Which storages on the device are alive, how many bytes they have, and what they are for.

A CPU has no caching allocator to ask, so a dispatch mode sees the tensors that every op returns, and holds weak
references to their storages. This is exact for tensors. What an op allocates and frees inside itself is not seen. The
cost is about 10 microseconds an op.

What a tensor is for follows from the function that made it. COMPONENTS says what a plan calls the tensors of a module
or package; a function or class in it may have a mark of its own:

    @component("gradients")
    def backward(ctx, dy): ...
"""

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from snug.device.host import HOST, Ledger

# Dotted name of a function, class, module or package -> its name in --plan's table. device/ may not import this file:
# its mark is here.
COMPONENTS = {
    "snug.device.host.fetch": "streamed weights",
    "snug.kernels": "activations",
    "snug.kernels.adamw": "optimizer's buffers",
    "snug.kernels.nf4": "weights",
    "snug.logprobs": "logits",
    "snug.delta": "activations",
    "snug.lora": "activations",
    "snug.decoding": "rollouts",
    "snug.decoding.draw": "logits",
    "model": "activations",
    "batch": "micro-batch",
    "loss": "loss",
    "training.optimizer": "optimizer's buffers",
}


def component(name):
    """A decorator: plans count the tensors that this function or class makes as `name`. It costs nothing in a run."""

    def mark(item):
        COMPONENTS[f"{item.__module__}.{item.__qualname__}"] = name
        return item

    return mark


def component_of(frame):
    """-> (component, name) of the nearest function with a mark, from this stack frame outwards; or ("other", "")."""
    while frame is not None:
        function = frame.f_code.co_qualname
        marked = f"{frame.f_globals.get('__name__')}.{function}"
        while marked:  # a nested function counts as the one around it, a module as its package
            if marked in COMPONENTS:
                return COMPONENTS[marked], function
            marked = marked.rpartition(".")[0]
        frame = frame.f_back
    return "other", ""


class LiveBytes(Ledger, TorchDispatchMode):
    """Device bytes: follows what every op returns, except host tensors.

    A storage that is older than this context is not known until an op returns it; `follow` adds one by hand.
    """

    def __init__(self, host: Ledger = HOST):
        super().__init__()
        self.host = host

    def __torch_dispatch__(self, func, types, args, kwargs):
        result = func(*args, **kwargs)
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and not (
                item.is_meta or is_traceable_wrapper_subclass(item)
            ):
                self.follow(item)  # a DTensor holds nothing, the tensor in it does
        return result

    def follow(self, tensor):
        if not self.host.making and id(tensor.untyped_storage()) not in self.host.sizes:
            super().follow(tensor)


# A context in which LiveBytes sees no op: for many small steps, where 10 microseconds an op are a long time.
unwatched = _disable_current_modes


@component("loss")
def not_finite(named: dict):
    """{name: tensor} -> "embedding.weight has NaN or infinity", of the first such tensor, or None. Copies nothing."""
    for name, tensor in named.items():
        if tensor.numel() and tensor.is_floating_point():
            # Lowest and highest; NaN if any element is
            if not torch.stack(tensor.aminmax()).isfinite().all():
                return f"{name} has NaN or infinity"
    return None
