"""NF4, QLoRA's 4-bit type (Dettmers et al. 2023, arXiv 2305.14314), value for value as bitsandbytes has it.

    quantize        a matrix -> codes and scales          NF4         a layer's weight, in such parts
    dequantize      the other way, TABLE[code] * scale    NF4Linear   the product: W is there only while it is used
    product         of few rows, by a Triton kernel that reads W as 4 bits

The row-major values are cut into blocks of 64. A block has a scale, its largest absolute value, and each value divided
by it becomes the code of the nearest of 16 numbers, the quantiles of a normal distribution. Double quantization: the
scales, less their mean, are cut into blocks of 256, and become 8-bit codes of the same kind. Bits a value:
4 + 8 / 64 + 32 / (64 * 256) = 4.127.

We choose the nearest number, as bitsandbytes' kernels for any device do. Its CPU kernel for scales first rounds to
multiples of 2^-15, so one scale in 500 gets a neighbour's code there.

A decode step has few rows and reads all weights. Through a dequantized W it moves 4.5 bytes a weight, by `product` 0.5.

Left out: FP4, other block sizes. Test: pytest tests/test_nf4.py
"""

from typing import NamedTuple

import torch
from torch import Tensor

from snug.device.cpu import linear
from snug.kernels import constexpr, has_tensor_cores, launch, tl, triton, uses_triton
from snug.memory.ledger import component

BLOCK, SCALE_BLOCK = 64, 256
TABLE = [
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
]
PIECE = 2**14  # blocks that plain torch takes at a time; to dequantize a value takes 6 bytes meanwhile
ROWS = 16  # blocks of a kernel's program: 8 values a lane
FEW = 128  # rows of x for `product`: for more, tensor cores make up for a dequantized W
# Of `product`, times their rows of x: 8, 4 or 2 for each of an H200's 132 multiprocessors with 16, 32 or 64 rows. With
# fewer tiles, W's rows are split among programs.
PROGRAMS = 132 * 128

if triton is not None:

    @triton.jit
    def read_blocks(codes, scales, scale_map, scale_scales, offset, block, mask):
        """block (n,) -> the 32 bytes of each, and its scale (n, 1)."""
        scale = tl.load(scale_map + tl.load(scales + block, mask))
        scale = scale * tl.load(scale_scales + block // 256, mask) + tl.load(offset)
        return tl.load(codes + block[:, None] * 32 + tl.arange(0, 32), mask[:, None]), scale[:, None]

    @triton.jit
    def dequantize_kernel(
        out, codes, scales, scale_map, scale_scales, offset, pairs, blocks, ROWS: constexpr
    ):
        """One program per ROWS blocks of 64 values. A lane reads 4 bytes of codes and writes 8 values side by side.

        Code i's number is the second of pairs[i]: all 16 are in a line of the first cache. scale_map stays there, too.
        """
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = row < blocks
        byte, scale = read_blocks(codes, scales, scale_map, scale_scales, offset, row, mask)
        # What lanes beyond the end have is below 16, too.
        code = tl.join(byte // 16, byte % 16).reshape(ROWS, 64)
        values = tl.load(pairs + code * 2 + 1) * scale
        at = out + row[:, None] * 64 + tl.arange(0, 64)
        tl.store(at, values, mask[:, None])

    @triton.jit
    def sum_parts(total, parts, counters, splits):
        """-> the sum of all programs' totals, and whether this program is the last that has one: the others' is theirs.

        They are joined as in snug/decoding/attention.py.
        """
        ROWS: constexpr = total.shape[0]
        M: constexpr = total.shape[1]
        last = tl.program_id(1) == 0  # without parts
        if splits > 1:
            which = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
            size = tl.num_programs(0) * tl.num_programs(2) * ROWS * M
            mine = parts + which * ROWS * M + tl.arange(0, ROWS)[:, None] * M + tl.arange(0, M)
            tl.store(mine + tl.program_id(1) * size, total)
            tl.debug_barrier()
            last = tl.atomic_add(counters + which, 1, sem="acq_rel") == splits - 1
            tl.debug_barrier()
            if last:
                total = tl.zeros_like(total)
                for _ in range(splits):
                    total += tl.load(mine)
                    mine += size
                tl.store(counters + which, 0)
        return total, last

    @triton.jit
    def adapter(h, B, m, row, in_x, in_w, rank, RANK):
        """-> B h^T (rows of W, rows of x)."""
        r = tl.arange(0, RANK)
        thin = tl.load(h + m[:, None] * rank + r, in_x[:, None] & (r < rank), 0.0)
        b = tl.load(B + row[:, None] * rank + r, in_w[:, None] & (r < rank), 0.0)
        return tl.dot(b.to(thin.dtype), thin.trans())

    @triton.jit(do_not_specialize=["n", "start", "chunk"])
    def product_kernel(
        x,
        codes,
        scales,
        scale_map,
        scale_scales,
        offset,
        pairs,
        bias,
        residual,
        h,
        B,
        alpha,
        parts,
        counters,
        y,
        n,
        start,
        rows,
        all_rows,
        columns,
        rank,
        splits,
        chunk,
        M: constexpr,
        ROWS: constexpr,
        RANK: constexpr,
    ):
        """One program per ROWS rows of W, M rows of x, and `chunk` blocks of W's rows. codes are of `rows` rows of W,
        from `start` on. The bytes of the next block are read before this block's product. Numbers are looked up in
        shared memory: from global memory each would take an address, and that is half of the loop.
        """
        row, m = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * M + tl.arange(0, M)
        in_w, in_x = row < rows, m < n
        first = tl.program_id(1) * chunk
        end = tl.minimum(first + chunk, columns // 64)
        block = row.to(tl.int64) * (columns // 64)
        total = tl.zeros([ROWS, M], tl.float32)
        byte, scale = read_blocks(codes, scales, scale_map, scale_scales, offset, block + first, in_w)
        numbers = tl.load(pairs + tl.arange(0, 16) * 2 + 1)
        for i in range(first, end):
            of_x = x + m[:, None] * columns + i * 64 + tl.arange(0, 64)
            values = tl.load(of_x, in_x[:, None])
            more = in_w & (i + 1 < end)
            ahead = read_blocks(codes, scales, scale_map, scale_scales, offset, block + i + 1, more)
            code = tl.join(byte // 16, byte % 16).to(tl.int32).reshape(ROWS * 64)
            w = tl.gather(numbers, code, 0).reshape(ROWS, 64) * scale
            total = tl.dot(w.to(values.dtype), values.trans(), total)
            byte, scale = ahead
        total, last = sum_parts(total, parts, counters, splits)
        row += start
        if B is not None:
            total += alpha * adapter(h, B, m, row, in_x, in_w, rank, RANK)
        if bias is not None:
            total += tl.load(bias + row, in_w)[:, None]
        at = m * all_rows + row[:, None]
        mask = in_w[:, None] & in_x & last
        if residual is not None:
            total += tl.load(residual + at, mask)
        tl.store(y + at, total, mask)


class Quantized(NamedTuple):
    """A matrix of n values, a multiple of 64."""

    codes: Tensor  # (n / 2,) uint8; the first of two values has the upper four bits
    scales: Tensor  # (n / 64,) uint8
    scale_map: Tensor  # (256,) float32: the number of each code of `scales`
    scale_scales: Tensor  # (n / 64 / 256,) float32, rounded up
    offset: Tensor  # () float32


def dynamic_map() -> list[float]:
    """256 numbers, sorted: the 8-bit dynamic type (Dettmers et al. 2021, arXiv 2110.02861), by bitsandbytes' steps.

    Each power of ten from 1e-6 to 1 has twice as many fractions between 0.1 and 1 as the one before.
    """
    numbers = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = 10.0 ** (i - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        numbers += [*means.tolist(), *(-means).tolist()]
    return sorted(numbers)


DYNAMIC_MAP = dynamic_map()  # once: on tensors without data it takes long


def blockwise(values, numbers, size):
    """values (n,), sorted numbers (k,) -> codes (n,) uint8 of the nearest numbers, scales (n / size,) float32.

    In pieces: of a whole matrix float32 values and int32 codes would take four times its bytes in bfloat16 and more.
    The pieces are large because a plan does this, too, and takes as long for a small one.
    """
    codes, scales = [], []
    for piece in values.split(8 * PIECE * size):
        blocks = torch.nn.functional.pad(piece.float(), (0, -len(piece) % size)).view(-1, size)
        scale = blocks.abs().amax(-1)
        unit = blocks * (1 / scale.clamp(min=1e-38))[:, None]
        code = torch.bucketize(unit.flatten(), (numbers[:-1] + numbers[1:]) / 2, out_int32=True)
        codes.append(code[: len(piece)].to(torch.uint8))
        scales.append(scale)
    return torch.cat(codes), torch.cat(scales)


@torch.no_grad()
def quantize(weight):
    """weight (rows, columns) -> Quantized on its device. Raises ValueError."""
    values = weight.reshape(-1)
    if len(values) % BLOCK:
        raise ValueError(f"{len(values)} values are no multiple of {BLOCK}")
    codes, scales = blockwise(values, values.new_tensor(TABLE, dtype=torch.float32), BLOCK)
    codes = codes[::2] << 4 | codes[1::2]
    offset, numbers = scales.mean(), scales.new_tensor(DYNAMIC_MAP)
    scales, scale_scales = blockwise(scales - offset, numbers, SCALE_BLOCK)
    return Quantized(codes, scales, numbers, scale_scales, offset)


def dequantize(q, pairs, out):
    """Write the values into out (rows, columns). pairs (256,) int64: the two float32 of each byte."""
    if not uses_triton(out, "nf4"):
        dequantize_torch(q, pairs, out)
        return
    blocks = out.numel() // BLOCK
    # The twin rounds scale * number + offset twice. A fused product, which is switched off, would round once.
    launch(
        dequantize_kernel,
        (triton.cdiv(blocks, ROWS),),
        out,
        *q,
        pairs.view(torch.float32),
        blocks,
        ROWS,
        enable_fp_fusion=False,
    )


@component("dequantized weights")
def dequantize_torch(q, pairs, out):
    """The kernel's twin: bit for bit the same values, piece by piece."""
    scales = q.scale_map[q.scales.int()]
    scales.mul_(q.scale_scales.repeat_interleave(SCALE_BLOCK)[: len(scales)]).add_(q.offset)
    blocks = out.view(-1, BLOCK), q.codes.view(-1, BLOCK // 2), scales[:, None]
    for piece, codes, scale in zip(*(x.split(PIECE) for x in blocks), strict=True):
        code = codes.flatten().int()
        piece.copy_(pairs.index_select(0, code).view(torch.float32).view_as(piece).mul_(scale))


class NF4:
    """A frozen matrix (rows, columns) in the place of an nn.Linear's weight. It is empty until `copy_`.

    No nn.Parameter: it never trains, a checkpoint leaves it out, and `to` neither moves nor casts it. A folder has
    several matrices where the model has one, such as q, k and v. Each is quantized by itself, as bitsandbytes does.
    """

    def __init__(self, shape, device):
        self.shape, self.device = torch.Size(shape), torch.device(device)
        numbers = torch.tensor(TABLE, dtype=torch.float32, device=device)
        # (256,) int64: a CPU looks up one number of 8 bytes four times as fast as two of 4.
        self.pairs = torch.cartesian_prod(numbers, numbers).view(torch.int64).flatten()
        self.parts = {}  # first row -> Quantized
        # Of `product`, 0 between launches
        self.counters = torch.zeros(shape[0] // 64 + 2, dtype=torch.int32, device=device)

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, weight, start=0):
        """The rows from `start` on: weight (some rows, columns) quantized. ValueError if it has NaN or infinity."""
        part = quantize(weight.to(self.device))
        if not all(tensor.isfinite().all() for tensor in part):
            raise ValueError("has NaN or infinity")
        self.parts[start] = part

    def by_rows(self):
        """Yield (first row, end, Quantized) of each part."""
        starts = sorted(self.parts)
        for start, end in zip(starts, [*starts[1:], self.shape[0]], strict=True):
            yield start, end, self.parts[start]

    @component("dequantized weights")
    def dequantized(self, dtype):
        """-> a new tensor (rows, columns)"""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for start, end, part in self.by_rows():
            dequantize(part, self.pairs, out[start:end])
        return out


def dtype_of(x) -> torch.dtype:
    """The type of x's products: autocast's inside autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@component("activations")
class NF4Linear(torch.autograd.Function):
    """y = x W^T + b, dx = dy W with a frozen W, which exists only while it is used: nothing is saved for backward."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        """x (..., columns), weight: an NF4, bias (rows,) or None -> (..., rows), in autocast's type inside autocast."""
        ctx.weight = weight
        return linear(x, weight.dequantized(dtype_of(x)), bias)

    @staticmethod
    def backward(ctx, dy):
        return linear(dy, ctx.weight.dequantized(dy.dtype).t()), None, None


def takes_product(x, weight):
    """Is x W^T for `product`: without gradients, few rows, 16 bits? Without tensor cores its sums spill."""
    if not isinstance(weight, NF4) or torch.is_grad_enabled() or not uses_triton(x, "nf4_product"):
        return False
    few = x.numel() <= FEW * x.shape[-1]
    return few and dtype_of(x).itemsize == 2 and x.shape[-1] % BLOCK == 0 and has_tensor_cores(x)


@component("activations")
def product(x, weight, bias=None, residual=None, h=None, B=None, alpha=1.0):
    """x W^T + b + residual + alpha h B^T -> (..., rows), in the residual's type, or `dtype_of(x)`.

    x (..., columns), at most FEW rows; residual (..., rows); an adapter's h (..., rank) and B (rows, rank). Its twins
    are NF4Linear and lora.py. It rounds W and B as they do, adds in float32 and rounds the sum once.
    """
    rows, columns = weight.shape
    x = x.to(dtype_of(x)).contiguous()
    n, blocks = x.numel() // columns, columns // BLOCK
    y = x.new_empty(*x.shape[:-1], rows, dtype=None if residual is None else residual.dtype)
    M = min(64, max(16, triton.next_power_of_2(n)))
    tile, batches = max(64, 2 * M), triton.cdiv(n, M)
    rank = 1 if B is None else B.shape[1]
    for start, end, part in weight.by_rows():
        tiles = triton.cdiv(end - start, tile)
        # A program has at least 8 blocks of a row.
        chunk = triton.cdiv(blocks, max(1, min(PROGRAMS // (M * tiles * batches), blocks // 8)))
        splits = triton.cdiv(blocks, chunk)
        parts = x.new_empty(splits if splits > 1 else 0, batches * tiles, tile, M, dtype=torch.float32)
        launch(
            product_kernel,
            (tiles, splits, batches),
            x,
            *part,
            weight.pairs.view(torch.float32),
            bias,
            residual,
            h,
            B,
            alpha,
            parts,
            weight.counters,
            y,
            n,
            start,
            end - start,
            rows,
            columns,
            rank,
            splits,
            chunk,
            M,
            tile,
            max(16, triton.next_power_of_2(rank)),
            num_warps=tile // 16,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return y


def weights_of(model) -> dict:
    """{name: parameter or NF4} of all weights."""
    weights = dict(model.named_parameters())
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "weight", None), NF4):
            weights[f"{name}.weight"] = layer.weight
    return weights
