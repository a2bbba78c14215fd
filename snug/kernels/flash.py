"""Attention of packed groups on CUDA: a kernel forward and backward, two more backward. segments.py: who sees whom.

H query heads, G key heads; R = H / G query heads share a key head. D numbers per head, DP the next power of two.
Scores and probabilities exist only as blocks of M x N in registers (Dao 2023, FlashAttention-2). A program reads only
tokens of one group, and every sum has a fixed order, so two runs give the same bits.

WINDOW: how many tokens a token sees, itself included; 0: all. Whole blocks that no query of a tile sees are skipped,
except in the sums of a prompt's keys.

q, k and v may have any strides of heads and tokens; y and all gradients are laid out as (T, heads, D). Places within a
head are counted in 32 bits, which save registers: enough for 800,000 tokens of Qwen2.5-1.5B.

Left out: decoding's attention (snug/decoding/attention.py). The oracle is segments.py. Test: pytest tests/test_flash.py
"""

import torch

from snug.kernels import (
    LN2,
    LOG2E,
    LOW,
    constexpr,
    dot,
    has_tensor_cores,
    launch,
    nothing_to_do,
    tl,
    triton,
)

TILE = 64  # most tokens of a tile (Segments.tiles)

if triton is not None:

    @triton.jit
    def tile_of(tiles, program, heads, D, DP, PARTS, M):
        """-> a program's head; first token, end of its tokens, and the other columns of its line of `tiles`; its tokens
        (M, 1), places in a head (1, DP), and which of both there are.

        A tile is cut into PARTS of M tokens. A part behind the tile's last token has an end before its first token.
        """
        line = tiles + program // (heads * PARTS) * 5
        head = (program % heads).to(tl.int64)
        first = tl.load(line).to(tl.int32) + program // heads % PARTS * M
        end = tl.minimum(first + M, tl.load(line + 1).to(tl.int32))
        prompt, prompt_end = tl.load(line + 2).to(tl.int32), tl.load(line + 3).to(tl.int32)
        seen_until = tl.load(line + 4).to(tl.int32)
        token = first + tl.arange(0, M)[:, None]
        d = tl.arange(0, DP)[None, :]
        return head, first, end, prompt, prompt_end, seen_until, token, d, (token < end) & (d < D)

    @triton.jit
    def scores(a, b, token, low, high):
        """a (M, DP), b (N, DP) -> their products (M, N), not scaled; LOW unless low <= token <= high."""
        z = dot(a, tl.trans(b))
        return tl.where((token >= low) & (token <= high), z, LOW)

    @triton.jit
    def keys_of(
        i,
        prompt,
        prompt_end,
        begin,
        end,
        start,
        token,
        d,
        D,
        N,
        WINDOW,
    ):
        """-> block i of what queries see: its keys (N, 1), their mask (N, DP), and a query's first and last key (M, 1).

        The prompt's blocks come first, then those of the queries' segments, from `start` to `token`.
        """
        blocks = tl.cdiv(prompt_end - prompt, N)
        in_prompt = i < blocks
        key = tl.where(in_prompt, prompt + i * N, begin + (i - blocks) * N) + tl.arange(0, N)[:, None]
        mask = (key < tl.where(in_prompt, prompt_end, end)) & (d < D)
        low = tl.where(in_prompt, prompt, start)
        if WINDOW:
            # If the prompt went on, the token would lie so far behind its place in the row, or before it.
            behind = tl.where(in_prompt, prompt_end - start, 0)
            low = tl.maximum(low, token + behind - (WINDOW - 1))
        return key, mask, low, tl.where(in_prompt, prompt_end - 1, token)

    @triton.jit
    def online_softmax(z, values, scale, top, total, acc):
        """One block more (Milakov and Gimelshein 2018)."""
        higher = tl.maximum(top, tl.max(z, 1, keep_dims=True) * scale)
        p = tl.exp2(z * scale - higher)
        shrunk = tl.exp2(top - higher)
        acc = dot(p.to(values.dtype), values, acc * shrunk)
        return higher, total * shrunk + tl.sum(p, 1, keep_dims=True), acc

    @triton.jit
    def put(dk, dv, place, dkeys, dvalues, mask):
        tl.store(dk + place, dkeys, mask)
        tl.store(dv + place, dvalues, mask)

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
        T, H,
        q_head, q_time,
        k_head, k_time,
        v_head, v_time,
        R: constexpr, D: constexpr, DP: constexpr,
        PARTS: constexpr, M: constexpr, N: constexpr,
        WINDOW: constexpr,
    ):  # fmt: skip
        """y and lse; or, with dy: dq, and delta (H, T), the sum of dy * y over D. One program per tile of queries and
        head. The last tiles run first: prompts' tiles see the fewest keys."""
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        h, first, end, prompt, prompt_end, _, token, d, mask = tile_of(tiles, tile, H, D, DP, PARTS, M)
        if first >= end:
            return
        begin = tl.load(start + first).to(tl.int32)
        low = tl.load(start + token, token < end, 0).to(tl.int32)  # (M, 1)
        if WINDOW:
            # The tile's token nearest to its prompt sees the most of it.
            nearest = tl.min(tl.where(token < end, token - low, T))
            prompt = tl.minimum(tl.maximum(prompt, prompt_end + nearest - (WINDOW - 1)), prompt_end)
            begin = tl.maximum(begin, first - (WINDOW - 1))
        k, v = k + h // R * k_head, v + h // R * v_head
        place = token * (H * D) + d
        x = tl.load(q + h * q_head + token * q_time + d, mask, 0.0)
        top, total = tl.full((M, 1), LOW, tl.float32), tl.zeros((M, 1), tl.float32)
        acc = tl.zeros((M, DP), tl.float32)
        if dy is not None:
            dx = tl.load(dy + h * D + place, mask, 0.0)
            top = tl.load(lse + h * T + token, token < end, 0.0) * LOG2E
            total = tl.sum(dx.to(tl.float32) * tl.load(y + h * D + place, mask, 0.0), 1, keep_dims=True)
            tl.store(delta + h * T + token, total, token < end)
        for i in range(tl.cdiv(prompt_end - prompt, N) + tl.cdiv(end - begin, N)):
            key, inside, seen, last = keys_of(
                i, prompt, prompt_end, begin, end, low, token, d, D, N, WINDOW
            )
            keys = tl.load(k + key * k_time + d, inside, 0.0)
            values = tl.load(v + key * v_time + d, inside, 0.0)
            z = scores(x, keys, tl.trans(key), seen, last)  # (M, N)
            if dy is None:
                top, total, acc = online_softmax(z, values, D**-0.5 * LOG2E, top, total, acc)
            else:
                p = tl.exp2(z * (D**-0.5 * LOG2E) - top)
                dz = p * (dot(dx, tl.trans(values)) - total)
                acc = dot(dz.to(keys.dtype), keys, acc)
        if dy is None:
            tl.store(lse + h * T + token, (top + tl.log2(total)) * LN2, token < end)
            tl.store(y + h * D + place, acc / total, mask)
        else:
            tl.store(dq + h * D + place, acc * D**-0.5, mask)

    @triton.jit(do_not_specialize=["T"])
    def keys_kernel(
        q, k, v,
        lse,
        dy,
        dk,
        dv,
        delta,
        dk_shares,
        dv_shares,
        position,
        start,
        tiles,
        T, H,
        q_head, q_time,
        k_head, k_time,
        v_head, v_time,
        R: constexpr, D: constexpr, DP: constexpr,
        PARTS: constexpr, M: constexpr, N: constexpr,
        WINDOW: constexpr,
    ):  # fmt: skip
        """dk and dv. A program takes a tile of completions' keys and adds up the R query heads of its key head. The
        whole group sees a prompt's keys, so its few programs would run for long: there a program takes one query head,
        and writes shares (tokens, H, D), which `sum_kernel` adds up."""
        tile = tl.program_id(0)
        h, first, end, prompt, prompt_end, stop, key, d, mask = tile_of(tiles, tile, H, D, DP, PARTS, M)
        of_prompt = prompt == prompt_end
        if (first >= end) | ((h % R > 0) & (not of_prompt)):
            return
        if WINDOW:
            begin = tl.load(start + first).to(tl.int32)
            stop = tl.where(of_prompt, stop, tl.minimum(stop, end + (WINDOW - 1)))
        keys = tl.load(k + h // R * k_head + key * k_time + d, mask, 0.0)
        values = tl.load(v + h // R * v_head + key * v_time + d, mask, 0.0)
        dkeys = tl.zeros((M, DP), tl.float32)
        dvalues = tl.zeros((M, DP), tl.float32)
        blocks = tl.cdiv(stop - first, N)  # two loops take 70 registers more, and spill with Triton 3.6
        for i in range(tl.where(of_prompt, 1, R) * blocks):
            head = h + i // blocks
            query = first + i % blocks * N + tl.arange(0, N)
            x_mask = (query < stop)[:, None] & (d < D)
            # A token from `stop` on adds 0, because its dy and q are 0.
            low = tl.load(start + query, (query < stop) & (not of_prompt), 0).to(tl.int32)
            if WINDOW:
                # To its prompt a query is where it would lie if the prompt went on.
                place = begin + tl.load(position + query, query < stop, 0).to(tl.int32)
                low = tl.maximum(low, tl.where(of_prompt, place, query) - (WINDOW - 1))
            log_sum = tl.load(lse + head * T + query, query < stop, 0.0) * LOG2E
            slope = tl.load(delta + head * T + query, query < stop, 0.0)
            x = tl.load(q + head * q_head + query[:, None] * q_time + d, x_mask, 0.0)
            dx = tl.load(dy + head * D + query[:, None] * (H * D) + d, x_mask, 0.0)
            z = scores(keys, x, key, low[None, :], query[None, :])  # (M, N)
            p = tl.exp2(z * (D**-0.5 * LOG2E) - log_sum[None, :])
            dvalues = dot(p.to(dx.dtype), dx, dvalues)
            dz = p * (dot(values, tl.trans(dx)) - slope[None, :])
            dkeys = dot(dz.to(x.dtype), x, dkeys)
        if of_prompt:
            row = (tile // H * M).to(tl.int64) + key - first
            put(dk_shares, dv_shares, (row * H + h) * D + d, dkeys * D**-0.5, dvalues, mask)
        else:
            put(dk, dv, h // R * D + (key * (H // R * D) + d), dkeys * D**-0.5, dvalues, mask)

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
        tile = tl.program_id(0)
        g, first, _, _, _, _, key, d, mask = tile_of(tiles, tile, G, D, DP, PARTS, M)
        row = (tile // G * M).to(tl.int64) + key - first
        dkeys = tl.zeros((M, DP), tl.float32)
        dvalues = tl.zeros((M, DP), tl.float32)
        for h in range(g * R, g * R + R):
            place = (row * (G * R) + h) * D + d
            dkeys += tl.load(dk_shares + place, mask, 0.0)
            dvalues += tl.load(dv_shares + place, mask, 0.0)
        put(dk, dv, (key * G + g) * D + d, dkeys, dvalues, mask)


def kernel_shape(q, k, keys=False):
    """-> a kernel's constants, warps and stages for q (1, H, T, D) and k (1, G, T, D). keys: for `keys_kernel`, which
    holds two sums in registers.

    With larger blocks bfloat16 spills on sm_80 or sm_90. float32 is multiplied outside of tensor cores, and so is every
    type on sm_75: they take still smaller blocks, which also fit into 64 KiB of shared memory."""
    _, H, _, D = q.shape
    DP = triton.next_power_of_2(max(16, D))
    M, N, warps = 32, 16, 8
    if q.itemsize == 2 and has_tensor_cores(q):
        M, N, warps = 64, 32, 8 if keys and DP > 64 else 4
    if DP > 128:
        M //= 2
    M = min(TILE, M)
    return dict(
        R=H // k.shape[1],
        D=D,
        DP=DP,
        PARTS=TILE // M,
        M=M,
        N=N,
        num_warps=warps,
        num_stages=2,
    )


def common(q, k, v, segments):
    """-> what the kernels of queries and of keys take behind their tensors."""
    strides = [tensor.stride(axis) for tensor in (q, k, v) for axis in (1, 2)]
    return [*segments.tables, q.shape[2], q.shape[1], *strides]


def forward(q, k, v, y, lse, segments, window, dy=None, dq=None, delta=None):
    """Fill y (1, H, T, D) and lse (1, H, T); or, with dy, dq (1, H, T, D) and delta (1, H, T)."""
    if nothing_to_do(q):
        return
    shape = kernel_shape(q, k)
    programs = len(segments.tables[1]) * shape["PARTS"] * q.shape[1]
    launch(
        queries_kernel,
        (programs,),
        q,
        k,
        v,
        y,
        lse,
        dy,
        dq,
        delta,
        *common(q, k, v, segments),
        WINDOW=window,
        **shape,
    )


def backward(dy, q, k, v, y, lse, dq, dk, dv, segments, window):
    """Fill dq (1, H, T, D), dk and dv (1, G, T, D)."""
    _, H, _, D = q.shape
    prompt_tiles = sum(-(-(middle - begin) // TILE) for begin, middle, _ in segments.groups)
    delta = torch.empty_like(lse)
    shares = lse.new_empty(2, prompt_tiles * TILE, H, D)
    dy = dy.transpose(1, 2).contiguous()  # (1, T, H, D)
    if nothing_to_do(q):
        return
    forward(q, k, v, y, lse, segments, window, dy, dq, delta)
    shape, tiles, G = kernel_shape(q, k, True), segments.tables[1], k.shape[1]
    launch(
        keys_kernel,
        (len(tiles) * shape["PARTS"] * H,),
        q,
        k,
        v,
        lse,
        dy,
        dk,
        dv,
        delta,
        *shares,
        segments.positions if window else None,
        *common(q, k, v, segments),
        WINDOW=window,
        **shape,
    )
    programs = prompt_tiles * shape["PARTS"] * G
    del shape["N"]
    launch(sum_kernel, (programs,), dk, dv, *shares, tiles, G, **shape)
