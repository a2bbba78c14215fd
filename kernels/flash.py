"""Attention of packed groups on CUDA: one kernel forward, three backward. segments.py says who sees what.

H query heads, G key heads, R = H / G queries share a key head; D numbers a head, DP the power of two above. Scores and
probabilities exist only as blocks of M x N in registers (Dao 2023, FlashAttention-2). A program reads tokens of its own
group alone, and every sum has a fixed order: results are the same in every run.

Left out: decoding's attention (decoding/attention.py). The oracle is segments.py. Test: pytest tests/test_flash.py
"""

import torch

from kernels import has_tensor_cores, nothing_to_do, triton

TILE = 64  # tokens of a tile (Segments.tiles): the queries of a program, or its keys

if triton is not None:
    import triton.language as tl

    from kernels import LN2, LOG2E, LOW

    @triton.jit
    def part_of(tiles, program, heads, PARTS: tl.constexpr, M: tl.constexpr):
        """A program's line of `tiles`, its head, the first token of its part and the end, which may be before."""
        line = tiles + program // (heads * PARTS) * 5
        first = tl.load(line) + program // heads % PARTS * M
        return line, (program % heads).to(tl.int64), first, tl.minimum(first + M, tl.load(line + 1))

    @triton.jit
    def load_rows(x, first, end, time, n, d, D: tl.constexpr):
        """x: token 0 of a head; time: its stride -> (N, DP), tokens `first` + n; 0 from token `end` on."""
        there = (n < (end - first).to(tl.int32))[:, None] & (d < D)[None, :]
        return tl.load(x + first * time + (n[:, None] * time + d[None, :]), mask=there, other=0.0)

    @triton.jit
    def store_rows(x, value, first, end, time, n, d, D: tl.constexpr):
        there = (n < (end - first).to(tl.int32))[:, None] & (d < D)[None, :]
        tl.store(
            x + first * time + (n[:, None] * time + d[None, :]),
            value.to(x.dtype.element_ty),
            mask=there,
        )

    @triton.jit
    def scores(a, b, token, low, high):
        """a (M, DP), b (N, DP) -> their products (M, N), not scaled; LOW unless low <= token <= high."""
        z = tl.dot(a, tl.trans(b), input_precision="ieee")
        return tl.where((token >= low) & (token <= high), z, LOW)

    @triton.jit
    def attend_block(
        x, k, v, keys, column, end, low, high, scale, top, total, acc, n, d, D: tl.constexpr
    ):
        """One block of the online softmax (Milakov and Gimelshein 2018): keys `column` + n, below `end`.

        Query x[i] sees the keys from low[i] to high[i]. keys: strides of k and v. top, total (M,); acc (M, DP)."""
        k_time, v_time = keys
        z = scores(
            x, load_rows(k, column, end, k_time, n, d, D), (column + n).to(tl.int32)[None, :], low, high
        )
        higher = tl.maximum(top, tl.max(z, 1) * scale)
        p = tl.exp2(z * scale - higher[:, None])
        shrunk = tl.exp2(top - higher)
        values = load_rows(v, column, end, v_time, n, d, D)
        acc = tl.dot(p.to(values.dtype), values, acc * shrunk[:, None], input_precision="ieee")
        return higher, total * shrunk + tl.sum(p, 1), acc

    @triton.jit
    def query_block(
        x, dx, k, v, keys, column, end, low, high, scale, lse, delta, acc, n, d, D: tl.constexpr
    ):
        """What one block of keys adds to the gradient of the queries x; dx: that of their outputs."""
        k_time, v_time = keys
        block = load_rows(k, column, end, k_time, n, d, D)
        p = tl.exp2(
            scores(x, block, (column + n).to(tl.int32)[None, :], low, high) * scale - lse[:, None]
        )
        dp = tl.dot(dx, tl.trans(load_rows(v, column, end, v_time, n, d, D)), input_precision="ieee")
        dz = (p * (dp - delta[:, None])).to(block.dtype)
        return tl.dot(dz, block, acc, input_precision="ieee")

    # The numbers of tokens differ in every micro-batch: no new compilation where one is 1 or a multiple of 16.
    @triton.jit(do_not_specialize=["T"])
    def forward_kernel(
        q, k, v, y, lse, start, tiles, scale, T, H, q_head, q_time, k_head, k_time, v_head, v_time, y_head, y_time,
        R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        """One program per tile of queries and head. The last tile comes first: prompts' tiles see the fewest keys."""
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        line, h, first, last = part_of(tiles, program, H, PARTS, M)
        if first >= last:
            return
        prompt, prompt_end = tl.load(line + 2), tl.load(line + 3)
        m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
        k, v, keys = k + h // R * k_head, v + h // R * v_head, (k_time, v_time)
        x = load_rows(q + h * q_head, first, last, q_time, m, d, D)
        there, row = first + m < last, (first + m).to(tl.int32)[:, None]
        low = tl.load(start + first + m, mask=there, other=0).to(tl.int32)[:, None]
        scale = scale * LOG2E
        top, total, acc = (
            tl.full((M,), LOW, tl.float32),
            tl.zeros((M,), tl.float32),
            tl.zeros((M, DP), tl.float32),
        )
        for column in range(prompt, prompt_end, N):
            top, total, acc = attend_block(
                x,
                k,
                v,
                keys,
                column,
                prompt_end,
                prompt,
                prompt_end - 1,
                scale,
                top,
                total,
                acc,
                n,
                d,
                D,
            )
        for column in range(tl.load(start + first), last, N):
            top, total, acc = attend_block(
                x, k, v, keys, column, last, low, row, scale, top, total, acc, n, d, D
            )
        store_rows(y + h * y_head, acc / total[:, None], first, last, y_time, m, d, D)
        tl.store(lse + h * T + first + m, (top + tl.log2(total)) * LN2, mask=there)

    @triton.jit(do_not_specialize=["T"])
    def queries_kernel(
        dy, q, k, v, y, dq, lse, delta, start, tiles, scale, T, H, dy_head, dy_time, q_head, q_time, k_head, k_time,
        v_head, v_time, y_head, y_time, dq_head, dq_time,
        R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        """dq and delta (H, T), the sum of dy * y. As `forward_kernel`: one program per tile of queries and head."""
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        line, h, first, last = part_of(tiles, program, H, PARTS, M)
        if first >= last:
            return
        prompt, prompt_end = tl.load(line + 2), tl.load(line + 3)
        m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
        k, v, keys = k + h // R * k_head, v + h // R * v_head, (k_time, v_time)
        x = load_rows(q + h * q_head, first, last, q_time, m, d, D)
        dx = load_rows(dy + h * dy_head, first, last, dy_time, m, d, D)
        out = load_rows(y + h * y_head, first, last, y_time, m, d, D)
        there, row = first + m < last, (first + m).to(tl.int32)[:, None]
        low = tl.load(start + first + m, mask=there, other=0).to(tl.int32)[:, None]
        its_lse = tl.load(lse + h * T + first + m, mask=there, other=0.0) * LOG2E
        its_delta = tl.sum(dx.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(delta + h * T + first + m, its_delta, mask=there)
        acc, exponent = tl.zeros((M, DP), tl.float32), scale * LOG2E
        for column in range(prompt, prompt_end, N):
            acc = query_block(
                x, dx, k, v, keys, column, prompt_end, prompt, prompt_end - 1, exponent, its_lse, its_delta, acc,
                n, d, D,
            )  # fmt: skip
        for column in range(tl.load(start + first), last, N):
            acc = query_block(
                x, dx, k, v, keys, column, last, low, row, exponent, its_lse, its_delta, acc, n, d, D
            )
        store_rows(dq + h * dq_head, acc * scale, first, last, dq_time, m, d, D)

    @triton.jit(do_not_specialize=["T"])
    def keys_kernel(
        dy, q, k, v, dk, dv, lse, delta, dk_shares, dv_shares, start, tiles, scale, T, H, dy_head, dy_time,
        q_head, q_time, k_head, k_time, v_head, v_time, dk_head, dk_time, dv_head, dv_time,
        R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        """dk and dv: one program per tile of keys and key head; it reads the R query heads one after the other.

        Of a prompt, which all the group's tokens see, a program per query head, else a few programs would run for long:
        they write their shares (rows, H, D), and `sum_kernel` adds them."""
        line, h, first, last = part_of(tiles, tl.program_id(0), H, PARTS, M)
        of_prompt, end = tl.load(line + 2) == tl.load(line + 3), tl.load(line + 4)
        if (first >= last) | ((h % R > 0) & (not of_prompt)):
            return
        m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
        key = (first + m).to(tl.int32)[:, None]
        keys = load_rows(k + h // R * k_head, first, last, k_time, m, d, D)
        values = load_rows(v + h // R * v_head, first, last, v_time, m, d, D)
        dkeys, dvalues, exponent = (
            tl.zeros((M, DP), tl.float32),
            tl.zeros((M, DP), tl.float32),
            scale * LOG2E,
        )
        for head in range(h, tl.where(of_prompt, h + 1, h + R)):
            for row in range(first, end, N):  # a token from `end` on adds 0: its dy and q are 0
                there = row + n < end
                low = tl.load(start + row + n, mask=there & (not of_prompt), other=0).to(tl.int32)[
                    None, :
                ]
                its_lse = tl.load(lse + head * T + row + n, mask=there, other=0.0) * LOG2E
                its_delta = tl.load(delta + head * T + row + n, mask=there, other=0.0)
                x = load_rows(q + head * q_head, row, end, q_time, n, d, D)
                dx = load_rows(dy + head * dy_head, row, end, dy_time, n, d, D)
                z = scores(keys, x, key, low, (row + n).to(tl.int32)[None, :])
                p = tl.exp2(z * exponent - its_lse[None, :])
                dvalues = tl.dot(p.to(dx.dtype), dx, dvalues, input_precision="ieee")
                dp = tl.dot(values, tl.trans(dx), input_precision="ieee")
                dz = (p * (dp - its_delta[None, :])).to(x.dtype)
                dkeys = tl.dot(dz, x, dkeys, input_precision="ieee")
        if of_prompt:
            row = (tl.program_id(0) // H * M).to(tl.int64)
            store_rows(dk_shares + h * D, dkeys * scale, row, row + last - first, H * D, m, d, D)
            store_rows(dv_shares + h * D, dvalues, row, row + last - first, H * D, m, d, D)
        else:
            store_rows(dk + h // R * dk_head, dkeys * scale, first, last, dk_time, m, d, D)
            store_rows(dv + h // R * dv_head, dvalues, first, last, dv_time, m, d, D)

    @triton.jit
    def sum_kernel(
        dk, dv, dk_shares, dv_shares, tiles, G, dk_head, dk_time, dv_head, dv_time,
        R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr,
    ):  # fmt: skip
        """The sums of a prompt's shares, one program per tile and key head."""
        _, g, first, last = part_of(tiles, tl.program_id(0), G, PARTS, M)
        row, m, d = (tl.program_id(0) // G * M).to(tl.int64), tl.arange(0, M), tl.arange(0, DP)
        end, dkeys, dvalues = (
            row + last - first,
            tl.zeros((M, DP), tl.float32),
            tl.zeros((M, DP), tl.float32),
        )
        for h in range(g * R, g * R + R):
            dkeys += load_rows(dk_shares + h * D, row, end, G * R * D, m, d, D)
            dvalues += load_rows(dv_shares + h * D, row, end, G * R * D, m, d, D)
        store_rows(dk + g * dk_head, dkeys, first, last, dk_time, m, d, D)
        store_rows(dv + g * dv_head, dvalues, first, last, dv_time, m, d, D)


def strides(*tensors) -> list[int]:
    """Of heads and tokens."""
    return [tensor.stride(axis) for tensor in tensors for axis in (1, 2)]


def kernel_shape(D: int, itemsize: int, keys: bool = False, tensor_cores: bool = True) -> dict:
    """-> a kernel's constants, and its warps and stages; keys: of `keys_kernel`, which holds two sums.

    With larger blocks bfloat16 spills on sm_80 or sm_90. float32 is multiplied outside of tensor cores, and so is every
    type on sm_75: still smaller blocks, which fit into 64 KiB of shared memory too."""
    DP = triton.next_power_of_2(max(16, D))
    M, N, warps = (
        (64, 32, 8 if keys and DP > 64 else 4) if itemsize == 2 and tensor_cores else (32, 16, 8)
    )
    M = min(TILE, M if DP <= 128 else M // 2)
    return dict(D=D, DP=DP, PARTS=TILE // M, M=M, N=N, num_warps=warps, num_stages=2)


def constants(q, k, keys=False) -> dict:
    """`kernel_shape` on q's device, and R."""
    tensor_cores = not q.is_cuda or has_tensor_cores(q.device)
    return kernel_shape(q.shape[-1], q.itemsize, keys, tensor_cores) | dict(R=q.shape[1] // k.shape[1])


def forward(q, k, v, y, lse, segments):
    """Fill y (1, H, T, D) and lse (1, H, T)."""
    if nothing_to_do(q):
        return
    (start, tiles), (_, H, T, D), shape = segments.tables, q.shape, constants(q, k)
    with torch.cuda.device_of(q):
        forward_kernel[(len(tiles) * shape["PARTS"] * H,)](
            q, k, v, y, lse, start, tiles, D**-0.5, T, H, *strides(q, k, v, y), **shape
        )


def backward(dy, q, k, v, y, lse, dq, dk, dv, segments):
    """Fill dq (1, H, T, D), dk and dv (1, G, T, D)."""
    (_, H, T, D), G = q.shape, k.shape[1]
    prompts = sum(-(-(middle - begin) // TILE) for begin, middle, _ in segments.groups)  # their tiles
    delta, shares = torch.empty_like(lse), lse.new_empty(2, prompts * TILE, H, D)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    if nothing_to_do(q):
        return
    (start, tiles), shape = segments.tables, constants(q, k)
    with torch.cuda.device_of(q):
        queries_kernel[(len(tiles) * shape["PARTS"] * H,)](
            dy,
            q,
            k,
            v,
            y,
            dq,
            lse,
            delta,
            start,
            tiles,
            D**-0.5,
            T,
            H,
            *strides(dy, q, k, v, y, dq),
            **shape,
        )
        shape = constants(q, k, keys=True)
        keys_kernel[(len(tiles) * shape["PARTS"] * H,)](
            dy, q, k, v, dk, dv, lse, delta, *shares, start, tiles, D**-0.5, T, H, *strides(dy, q, k, v, dk, dv),
            **shape,
        )  # fmt: skip
        del shape["N"]
        sum_kernel[(prompts * shape["PARTS"] * G,)](
            dk, dv, *shares, tiles, G, *strides(dk, dv), **shape
        )
