"""TODO"""

import gc

import torch

from memory import ledger
from memory.ledger import MIB

# After out-of-memory.


def is_out_of_memory(error):
    """The device's; on a CPU that is the host's. CUDA's libraries have words of their own for it."""
    words = [
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
    ]
    words += [] if torch.cuda.is_initialized() else ["can't allocate memory"]
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def surviving(attempt, smaller):
    """attempt() -> its result. After an out-of-memory `smaller(what PyTorch said)` makes the next attempt need less, or raises."""
    while True:
        try:
            return attempt()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).strip().splitlines()[0]
        # Here the exception is gone, and with it the frames that held the failed attempt's tensors.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        smaller(said)


def biggest_tensors(model, count=3):
    """The largest tensors alive on the model's device -> "embedding.weight 147.2 MiB, ..."."""
    named = list(model.named_parameters())
    named += [(f"the gradient of {name}", p.grad) for name, p in named if p.grad is not None]
    known = {id(tensor.untyped_storage()): name for name, tensor in named}
    sizes = {}
    for thing in [tensor for _, tensor in named] + gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device == model.device:
            storage = thing.untyped_storage()
            if id(storage) not in ledger.HOST.sizes:
                sizes[id(storage)] = storage.nbytes(), known.get(id(storage), f"a tensor {tuple(thing.shape)}")
    largest = sorted(sizes.values(), reverse=True)[:count]
    return ", ".join(f"{name} {size / MIB:.1f} MiB" for size, name in largest)
