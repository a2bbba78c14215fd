"""Matrices in NF4 in a folder of transformers with bitsandbytes: which tensors each has, and reading them.

Beside X.weight, the packed codes, there are X.weight.absmax (the blocks' scales), .quant_map (the 16 numbers) and
.quant_state.bitsandbytes__nf4 (JSON); with double quantization also .nested_absmax and .nested_quant_map.
snug/kernels/nf4.py has the format, shapes.py checks quantization_config. Test: pytest tests/test_nf4.py
"""

import json
import math

STATE, BLOCK, SCALE_BLOCK = ".quant_state.bitsandbytes__nf4", 64, 256


def tensors_of(entry, double: bool | None) -> list:
    """An Entry -> the Entries that the folder has for it. double: `double_quant` of the folder."""
    if double is None or not entry.is_matrix:
        return [entry]
    n = math.prod(entry.shape)
    tensors = {"": ((n // 2, 1), "U8"), ".quant_map": ((16,), "F32"), STATE: (None, "U8")}
    tensors[".absmax"] = (n // BLOCK,), "U8" if double else "F32"
    if double:
        tensors[".nested_absmax"] = (math.ceil(n / BLOCK / SCALE_BLOCK),), "F32"
        tensors[".nested_quant_map"] = (256,), "F32"
    return [
        entry._replace(name=entry.name + end, shape=shape, types=(dtype,))
        for end, (shape, dtype) in tensors.items()
    ]


def read_matrix(entry, tensor, double: bool, device):
    """-> kernels.nf4.Quantized. tensor: name -> tensor. Raises ValueError for what the headers do not say."""
    from snug.kernels.nf4 import TABLE, Quantized

    codes, scales, numbers = (tensor(entry.name + end) for end in ("", ".absmax", ".quant_map"))
    state = json.loads(bytes(tensor(entry.name + STATE).tolist()))
    expected = dict(quant_type="nf4", blocksize=BLOCK, shape=list(entry.shape))
    if double:
        expected |= dict(nested_blocksize=SCALE_BLOCK, nested_dtype="float32")
    for key, value in expected.items():
        if state.get(key) != value:
            raise ValueError(f"{key}={state.get(key)!r:.40} is not supported; only {value!r}")
    if numbers.tolist() != TABLE:
        raise ValueError("quant_map is not the 16 numbers of NF4")
    parts = [codes.flatten(), scales]
    if double:
        parts += [tensor(f"{entry.name}.nested_{end}") for end in ("quant_map", "absmax")]
        parts.append(parts[-1].new_tensor(state["nested_offset"]))
    return Quantized(*(part.to(device) for part in parts))
