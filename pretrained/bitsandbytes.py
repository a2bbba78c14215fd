"""Matrices in NF4 in a folder of transformers with bitsandbytes: which tensors each has, and reading them.

Beside X.weight, the packed codes, there are X.weight.absmax (the blocks' scales), .quant_map (the 16 numbers) and
.quant_state.bitsandbytes__nf4 (JSON); with double quantization also .nested_absmax and .nested_quant_map. kernels/nf4.py
has the format, shapes.py checks quantization_config. Test: pytest tests/test_nf4.py
"""

import json
import math

STATE, BLOCK, SCALE_BLOCK = ".quant_state.bitsandbytes__nf4", 64, 256


def tensors_of(matrix, double: bool) -> list:
    """The Entry of a matrix -> the Entries of the tensors that hold it. double: with double quantization."""
    n = math.prod(matrix.shape)
    blocks = math.ceil(n / BLOCK)
    tensors = {
        "": ((math.ceil(n / 2), 1), "U8"),
        ".absmax": ((blocks,), "U8" if double else "F32"),
        ".quant_map": ((16,), "F32"),
        STATE: (None, "U8"),
    }
    if double:
        tensors[".nested_absmax"] = (math.ceil(blocks / SCALE_BLOCK),), "F32"
        tensors[".nested_quant_map"] = (256,), "F32"
    return [
        matrix._replace(name=matrix.name + end, shape=shape, types=(dtype,))
        for end, (shape, dtype) in tensors.items()
    ]


def read_matrix(matrix, tensor, double: bool):
    """-> kernels.nf4.Quantized. tensor: name -> tensor. Raises SnugError, ValueError for what the headers do not say."""
    import torch

    from kernels.nf4 import TABLE, Quantized

    name = matrix.name
    state = json.loads(bytes(tensor(name + STATE).numpy()))
    expected = dict(quant_type="nf4", blocksize=BLOCK, shape=list(matrix.shape))
    if double:
        expected |= dict(nested_blocksize=SCALE_BLOCK, nested_dtype="float32")
    for key, value in expected.items():
        if state.get(key) != value:
            raise ValueError(f"{key}={state.get(key)!r:.40} is not supported; only {value!r}")
    if tensor(f"{name}.quant_map").tolist() != TABLE:
        raise ValueError("quant_map is not the 16 numbers of NF4")
    parts = [tensor(name).flatten(), tensor(f"{name}.absmax")]
    if double:
        parts += [tensor(f"{name}.nested_quant_map"), tensor(f"{name}.nested_absmax")]
        parts.append(torch.tensor(state["nested_offset"], dtype=torch.float32))
    return Quantized(*parts)
