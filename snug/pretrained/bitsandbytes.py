"""Matrices in NF4 in a folder of transformers with bitsandbytes: which tensors each has, and reading them.

Beside X.weight, the packed codes, there are X.weight.absmax (the blocks' scales), .quant_map (the 16 numbers) and
.quant_state.bitsandbytes__nf4 (JSON); with double quantization also .nested_absmax and .nested_quant_map.
snug/kernels/nf4.py has the format, shapes.py checks quantization_config. Test: pytest tests/test_nf4.py
"""

import json
import math

TYPES = "F32", "F16", "BF16", "F64"  # integers and 8-bit floats are quantized and need scales
STATE, BLOCK, SCALE_BLOCK = ".quant_state.bitsandbytes__nf4", 64, 256


def parts_of(entry, double: bool | None) -> dict:
    """An Entry -> {end of a name: (shape, types)} of the tensors that a folder has for it. None: of any shape.

    double: `double_quant` of the folder. Other sizes of blocks have other shapes.
    """
    if double is None or not entry.is_matrix:
        return {"": (entry.shape, TYPES)}
    n = math.prod(entry.shape)
    scales = math.ceil(n / BLOCK / SCALE_BLOCK)
    parts = {"": ((n // 2, 1), "U8"), ".quant_map": ((16,), "F32"), STATE: (None, "U8")}
    if not double:
        return parts | {".absmax": ((n // BLOCK,), "F32")}
    nested = {".nested_absmax": ((scales,), "F32"), ".nested_quant_map": ((256,), "F32")}
    return parts | {".absmax": ((n // BLOCK,), "U8")} | nested


def quantized(tensors: dict, device):
    """{end of a name: tensor} of a matrix -> kernels.nf4.Quantized."""
    from snug.kernels.nf4 import Quantized

    parts = [tensors[""].flatten(), tensors[".absmax"]]
    if ".nested_absmax" in tensors:
        offset = json.loads(bytes(tensors[STATE].tolist()))["nested_offset"]
        scales = tensors[".nested_absmax"]
        parts += [tensors[".nested_quant_map"], scales, scales.new_tensor(offset)]
    return Quantized(*(part.to(device) for part in parts))
