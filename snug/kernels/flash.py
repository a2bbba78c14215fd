"""Attention of packed groups on CUDA: a kernel forward and backward, two more backward. segments.py: who sees whom.

H query heads, G key heads; R = H / G query heads share a key head. D numbers per head, DP the next power of two.
Scores and probabilities exist only as blocks of M x N in registers (Dao 2023, FlashAttention-2). A program reads only
tokens of one group, and every sum has a fixed order, so two runs give the same bits.

q, k and v may have any strides of heads and tokens; y and all gradients are laid out as (T, heads, D). Places within a
head are counted in 32 bits, which save registers: enough for 800,000 tokens of Qwen2.5-1.5B.

Left out: decoding's attention (snug/decoding/attention.py). The oracle is segments.py. Test: pytest tests/test_flash.py
"""

import torch

from snug.kernels import has_tensor_cores, nothing_to_do, triton

TILE = 64  # most tokens of a tile (Segments.tiles)

if triton is not None:
    import triton.language as tl
    from triton.language import constexpr

    from snug.kernels import LN2, LOG2E, LOW

    @triton.jit
    def tile_of(tiles, program, heads, PARTS: constexpr, M: constexpr):
        """-> a program's line of `tiles`, its head, its first token, and the end of its tokens.

        A tile is cut into PARTS of M tokens. A part behind the tile's last token has an end before its first token.
        """
        line = tiles + program // (heads * PARTS) * 5
        head = (program % heads).to(tl.int64)
        first = tl.load(line).to(tl.int32) + program // heads % PARTS * M
        end = tl.minimum(first + M, tl.load(line + 1).to(tl.int32))
        return line, head, first, end

    @triton.jit
    def scores(a, b, token, low, high):
        """a (M, DP), b (N, DP) -> their products (M, N), not scaled; LOW unless low <= token <= high."""
        z = tl.dot(a, tl.trans(b), input_precision="ieee")
        return tl.where((token >= low) & (token <= high), z, LOW)

    # T differs in every micro-batch. Without this, T = 1 or a multiple of 16 would compile the kernel again.
    @triton.jit(do_not_specialize=["T"])
    def queries_kernel(
        q,
        k,
        v,
        y,
        lse,
        dy,
        dq,
        delta,
        start,
        tiles,
        scale,
        T,
        H,
        q_head,
        q_time,
        k_head,
        k_time,
        v_head,
        v_time,
        R: constexpr,
        D: constexpr,
        DP: constexpr,
        PARTS: constexpr,
        M: constexpr,
        N: constexpr,
        BACKWARD: constexpr,
    ):
        """y and lse; or BACKWARD: dq, and delta (H, T), the sum of dy * y over D. The other pointers may be None.

        One program per tile of queries and head. The last tiles run first: prompts' tiles see the fewest keys.
        """
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        line, h, first, end = tile_of(tiles, program, H, PARTS, M)
        if first >= end:
            return
        prompt = tl.load(line + 2).to(tl.int32)
        prompt_end = tl.load(line + 3).to(tl.int32)
        begin = tl.load(start + first).to(tl.int32)
        token = first + tl.arange(0, M)[:, None]  # (M, 1)
        d = tl.arange(0, DP)[None, :]  # (1, DP)
        mask = (token < end) & (d < D)
        low = tl.load(start + token, token < end, 0).to(tl.int32)  # (M, 1)
        y += h * D
        place = token * (H * D) + d
        x = tl.load(q + h * q_head + token * q_time + d, mask, 0.0)
        k += h // R * k_head
        v += h // R * v_head
        exponent = scale * LOG2E
        acc = tl.zeros((M, DP), tl.float32)
        if BACKWARD:
            dx = tl.load(dy + h * D + place, mask, 0.0)
            out = tl.load(y + place, mask, 0.0)
            log_sum = tl.load(lse + h * T + token, token < end, 0.0) * LOG2E
            slope = tl.sum(dx.to(tl.float32) * out.to(tl.float32), 1, keep_dims=True)
            tl.store(delta + h * T + token, slope, token < end)
        else:
            top = tl.full((M, 1), LOW, tl.float32)
            total = tl.zeros((M, 1), tl.float32)
        # Blocks of the prompt, then of the queries' segments.
        blocks = tl.cdiv(prompt_end - prompt, N)
        for i in range(blocks + tl.cdiv(end - begin, N)):
            in_prompt = i < blocks
            key = tl.where(in_prompt, prompt + i * N, begin + (i - blocks) * N) + tl.arange(0, N)
            key_mask = (key < tl.where(in_prompt, prompt_end, end))[:, None] & (d < D)
            keys = tl.load(k + key[:, None] * k_time + d, key_mask, 0.0)
            values = tl.load(v + key[:, None] * v_time + d, key_mask, 0.0)
            last = tl.where(in_prompt, prompt_end - 1, token)
            z = scores(x, keys, key[None, :], tl.where(in_prompt, prompt, low), last)  # (M, N)
            if BACKWARD:
                p = tl.exp2(z * exponent - log_sum)
                dp = tl.dot(dx, tl.trans(values), input_precision="ieee")
                acc = tl.dot((p * (dp - slope)).to(keys.dtype), keys, acc, input_precision="ieee")
            else:  # the online softmax (Milakov and Gimelshein 2018)
                higher = tl.maximum(top, tl.max(z, 1, keep_dims=True) * exponent)
                p = tl.exp2(z * exponent - higher)
                shrunk = tl.exp2(top - higher)
                acc = tl.dot(p.to(values.dtype), values, acc * shrunk, input_precision="ieee")
                total = total * shrunk + tl.sum(p, 1, keep_dims=True)
                top = higher
        if BACKWARD:
            tl.store(dq + h * D + place, (acc * scale).to(dq.dtype.element_ty), mask)
        else:
            tl.store(y + place, (acc / total).to(y.dtype.element_ty), mask)
            tl.store(lse + h * T + token, (top + tl.log2(total)) * LN2, token < end)

    @triton.jit(do_not_specialize=["T"])
    def keys_kernel(
        dy,
        q,
        k,
        v,
        dk,
        dv,
        lse,
        delta,
        dk_shares,
        dv_shares,
        start,
        tiles,
        scale,
        T,
        H,
        q_head,
        q_time,
        k_head,
        k_time,
        v_head,
        v_time,
        R: constexpr,
        D: constexpr,
        DP: constexpr,
        PARTS: constexpr,
        M: constexpr,
        N: constexpr,
    ):
        """dk and dv. A program takes a tile of completions' keys and adds up the R query heads of its key head.

        All tokens of the group see a prompt's keys, so a prompt's few programs would run for long. Therefore a program
        takes only one query head there. It writes shares (tokens, H, D), which `sum_kernel` adds up."""
        line, h, first, end = tile_of(tiles, tl.program_id(0), H, PARTS, M)
        of_prompt = tl.load(line + 2) == tl.load(line + 3)
        queries_end = tl.load(line + 4).to(tl.int32)
        if (first >= end) | ((h % R > 0) & (not of_prompt)):
            return
        g = h // R
        m = tl.arange(0, M)[:, None]
        key = first + m  # (M, 1)
        d = tl.arange(0, DP)[None, :]  # (1, DP)
        mask = (key < end) & (d < D)
        keys = tl.load(k + g * k_head + key * k_time + d, mask, 0.0)
        values = tl.load(v + g * v_head + key * v_time + d, mask, 0.0)
        exponent = scale * LOG2E
        dkeys = tl.zeros((M, DP), tl.float32)
        dvalues = tl.zeros((M, DP), tl.float32)
        for head in range(h, tl.where(of_prompt, h + 1, h + R)):
            for first_query in range(first, queries_end, N):
                query = first_query + tl.arange(0, N)
                column = query[:, None]
                # A token from queries_end on adds 0, because its dy and q are 0.
                inside = query < queries_end
                low = tl.load(start + query, inside & (not of_prompt), 0).to(tl.int32)
                log_sum = tl.load(lse + head * T + query, inside, 0.0) * LOG2E
                slope = tl.load(delta + head * T + query, inside, 0.0)
                query_mask = inside[:, None] & (d < D)
                x = tl.load(q + head * q_head + column * q_time + d, query_mask, 0.0)
                dx = tl.load(dy + head * D + column * (H * D) + d, query_mask, 0.0)
                z = scores(keys, x, key, low[None, :], query[None, :])  # (M, N)
                p = tl.exp2(z * exponent - log_sum[None, :])
                dvalues = tl.dot(p.to(dx.dtype), dx, dvalues, input_precision="ieee")
                dp = tl.dot(values, tl.trans(dx), input_precision="ieee")
                dz = (p * (dp - slope[None, :])).to(x.dtype)
                dkeys = tl.dot(dz, x, dkeys, input_precision="ieee")
        dkeys *= scale
        if of_prompt:
            row = (tl.program_id(0) // H * M).to(tl.int64) + m
            place = (row * H + h) * D + d
            tl.store(dk_shares + place, dkeys, mask)
            tl.store(dv_shares + place, dvalues, mask)
        else:
            place = g * D + (key * (H // R * D) + d)
            tl.store(dk + place, dkeys.to(dk.dtype.element_ty), mask)
            tl.store(dv + place, dvalues.to(dv.dtype.element_ty), mask)

    @triton.jit
    def sum_kernel(
        dk,
        dv,
        dk_shares,
        dv_shares,
        tiles,
        G,
        R: constexpr,
        D: constexpr,
        DP: constexpr,
        PARTS: constexpr,
        M: constexpr,
    ):
        """Add up the shares of a prompt's keys: one program per tile and key head."""
        _, g, first, end = tile_of(tiles, tl.program_id(0), G, PARTS, M)
        m = tl.arange(0, M)[:, None]
        d = tl.arange(0, DP)[None, :]
        mask = (first + m < end) & (d < D)
        row = (tl.program_id(0) // G * M).to(tl.int64) + m
        dkeys = tl.zeros((M, DP), tl.float32)
        dvalues = tl.zeros((M, DP), tl.float32)
        for h in range(g * R, g * R + R):
            place = (row * (G * R) + h) * D + d
            dkeys += tl.load(dk_shares + place, mask, 0.0)
            dvalues += tl.load(dv_shares + place, mask, 0.0)
        place = ((first + m) * G + g) * D + d
        tl.store(dk + place, dkeys.to(dk.dtype.element_ty), mask)
        tl.store(dv + place, dvalues.to(dv.dtype.element_ty), mask)


def kernel_shape(D: int, itemsize: int, keys: bool = False, tensor_cores: bool = True):
    """-> a kernel's constants, warps and stages. keys: for `keys_kernel`, which holds two sums in registers.

    With larger blocks bfloat16 spills on sm_80 or sm_90. float32 is multiplied outside of tensor cores, and so is every
    type on sm_75: they take still smaller blocks, which also fit into 64 KiB of shared memory."""
    DP = triton.next_power_of_2(max(16, D))
    M, N, warps = 32, 16, 8
    if itemsize == 2 and tensor_cores:
        M, N, warps = 64, 32, 8 if keys and DP > 64 else 4
    if DP > 128:
        M //= 2
    M = min(TILE, M)
    return dict(D=D, DP=DP, PARTS=TILE // M, M=M, N=N, num_warps=warps, num_stages=2)


def constants(q, k, keys: bool = False):
    """-> `kernel_shape` on q's device, and R."""
    tensor_cores = not q.is_cuda or has_tensor_cores(q.device)
    shape = kernel_shape(q.shape[-1], q.itemsize, keys, tensor_cores)
    return shape | dict(R=q.shape[1] // k.shape[1])


def strides(*tensors):
    """-> of each tensor (1, heads, T, D), the stride of heads and the stride of tokens."""
    return [tensor.stride(axis) for tensor in tensors for axis in (1, 2)]


def forward(q, k, v, y, lse, segments):
    """Fill y (1, H, T, D) and lse (1, H, T)."""
    if nothing_to_do(q):
        return
    start, tiles = segments.tables
    _, H, T, D = q.shape
    assert T * max(q.stride(2), k.stride(2), v.stride(2)) < 2**31, f"{T} tokens in a row"
    shape = constants(q, k)
    with torch.cuda.device_of(q):
        queries_kernel[(len(tiles) * shape["PARTS"] * H,)](
            q,
            k,
            v,
            y,
            lse,
            None,
            None,
            None,
            start,
            tiles,
            D**-0.5,
            T,
            H,
            *strides(q, k, v),
            **shape,
            BACKWARD=False,
        )


def backward(dy, q, k, v, y, lse, dq, dk, dv, segments):
    """Fill dq (1, H, T, D), dk and dv (1, G, T, D)."""
    _, H, T, D = q.shape
    G = k.shape[1]
    prompt_tiles = sum(-(-(middle - begin) // TILE) for begin, middle, _ in segments.groups)
    delta = torch.empty_like(lse)
    dk_shares, dv_shares = lse.new_empty(2, prompt_tiles * TILE, H, D)
    dy = dy.transpose(1, 2).contiguous()  # (1, T, H, D)
    if nothing_to_do(q):
        return
    start, tiles = segments.tables
    scale = D**-0.5
    shape = constants(q, k)
    keys_shape = constants(q, k, keys=True)
    sum_shape = {name: value for name, value in keys_shape.items() if name != "N"}
    programs = len(tiles) * shape["PARTS"] * H
    with torch.cuda.device_of(q):
        queries_kernel[(programs,)](
            q,
            k,
            v,
            y,
            lse,
            dy,
            dq,
            delta,
            start,
            tiles,
            scale,
            T,
            H,
            *strides(q, k, v),
            **shape,
            BACKWARD=True,
        )
        keys_kernel[(programs,)](
            dy,
            q,
            k,
            v,
            dk,
            dv,
            lse,
            delta,
            dk_shares,
            dv_shares,
            start,
            tiles,
            scale,
            T,
            H,
            *strides(q, k, v),
            **keys_shape,
        )
        sum_kernel[(prompt_tiles * shape["PARTS"] * G,)](
            dk, dv, dk_shares, dv_shares, tiles, G, **sum_shape
        )
