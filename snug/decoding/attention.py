"""The Triton kernel of one decode step's attention. kvcache.py launches it, and its plain torch is the oracle.

Shapes are KVCache's: H query heads, G key heads, R = H / G query heads share a key head. D numbers per head, DP the
next power of two. A program takes one key head and a stretch of columns: of a prompt, for a tile of slots that share it
and so read it once, or of one slot's completion. Its result is a part of its queries' softmax. The last program to
finish with a query joins the parts (`join`).

Left out: prefill, which is the model's own attention. Test: pytest tests/test_kernels.py
"""

import numpy as np

from snug.kernels import triton

if triton is not None:
    import triton.language as tl
    from triton.language import constexpr

    from snug.kernels import LOW

    @triton.jit
    def rotated(x, cos, sin, d, D, mask, ROTARY: constexpr):
        """`kernels.rotary.rotate`: x[d] cos[d] + (-x[d + D/2] | x[d - D/2]) sin[d]. x, cos, sin: where heads begin."""
        value = tl.load(x + d, mask, 0.0)
        if ROTARY:
            half = D // 2
            other = tl.load(x + tl.where(d < half, d + half, d - half), mask, 0.0)
            other = other.to(tl.float32)
            c = tl.load(cos + d, mask, 0.0)
            s = tl.load(sin + d, mask, 0.0)
            value = value.to(tl.float32) * c + tl.where(d < half, -other, other) * s
        return value

    @triton.jit
    def attend_block(q, k, v, column, end, active, scale, top, total, acc, d, D):
        """One block of the online softmax (Milakov and Gimelshein 2018): columns below `end`, for active queries (M,).

        q (M, DP); k and v: column 0 of (columns, D); top, total (M,) and acc (M, DP): the softmax so far."""
        at = column[:, None] * D + d[None, :]
        mask = (column < end)[:, None] & (d[None, :] < D)
        sees = (column < end)[None, :] & active[:, None]
        keys = tl.load(k + at, mask, 0.0)
        values = tl.load(v + at, mask, 0.0)
        z = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        z = tl.where(sees, z, LOW)
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.where(sees, tl.exp2(z - higher[:, None]), 0.0)
        shrunk = tl.exp2(top - higher)
        acc = acc * shrunk[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        return higher, total * shrunk + tl.sum(p, 1), acc

    @triton.jit
    def join(parts, tops, totals, counters, y, split, splits, query, queries, mask, top, total, acc, d, D):
        """Store part `split` of the queries `query` (M,). The program that stores the last of a query's `splits` parts
        joins them into one softmax; each part has its own maximum.

        A program stores its part, even if it is empty, and then adds 1 to the query's counter. The first barrier orders
        the stores of all its threads before this atomic addition, which releases them to the device. The program that
        adds last acquires the stores of the others, and the second barrier makes them visible to all its threads. No
        program waits for another. The last one resets the counter for the next launch."""
        at = query[:, None] * D + d[None, :]
        inside = d[None, :] < D
        first = split.to(tl.int64) * queries
        tl.store(tops + first + query, top, mask)
        tl.store(totals + first + query, total, mask)
        tl.store(parts + first * D + at, acc, mask[:, None] & inside)
        tl.debug_barrier()
        last = (tl.atomic_add(counters + query, 1, mask=mask, sem="acq_rel") == splits - 1) & mask
        tl.debug_barrier()
        if tl.max(last.to(tl.int32), 0) > 0:
            last_mask = last[:, None] & inside
            top = tl.full(top.shape, LOW, tl.float32)
            total = tl.zeros_like(total)
            acc = tl.zeros_like(acc)
            for _ in range(splits):
                part_top = tl.load(tops + query, last, LOW)
                part_total = tl.load(totals + query, last, 1.0)
                part = tl.load(parts + at, last_mask, 0.0)
                higher = tl.maximum(top, part_top)
                shrunk = tl.exp2(top - higher)
                share = tl.exp2(part_top - higher)
                total = total * shrunk + part_total * share
                acc = acc * shrunk[:, None] + part * share[:, None]
                top = higher
                tops += queries
                totals += queries
                parts += queries * D
            tl.store(y + at, (acc / total[:, None]).to(y.dtype.element_ty), last_mask)
            tl.store(counters + query, 0, last)

    # These change from rollout to rollout. Without this, 1 or a multiple of 16 would compile the kernel again.
    @triton.jit(
        do_not_specialize=["n", "T_p", "T_c", "prompt_programs", "prompt_splits", "completion_splits"]
    )
    def attend_kernel(
        q,
        k,
        v,
        cos,
        sin,
        q_row,
        q_head,
        k_row,
        k_head,
        v_row,
        v_head,
        prompt_k,
        prompt_v,
        tiles,
        lengths,
        completion_k,
        completion_v,
        t,
        parts,
        tops,
        totals,
        counters,
        y,
        scale,
        n,
        T_p,
        T_c,
        H,
        G,
        D,
        prompt_programs,
        prompt_splits,
        prompt_chunk,
        completion_splits,
        completion_chunk,
        R: constexpr,
        TILE: constexpr,
        M: constexpr,
        COMPLETION_M: constexpr,
        N: constexpr,
        DP: constexpr,
        ROTARY: constexpr,
    ):
        """The first programs attend to prompts, the others to completions. Each rotates its queries itself.

        To a prompt: a tile of slots that read it, a key head, a stretch of prompt_chunk columns. To a completion: a
        slot, a key head, a stretch of completion_chunk columns."""
        program = tl.program_id(0)
        splits = prompt_splits + completion_splits
        d = tl.arange(0, DP)
        if program < prompt_programs:
            split = program % prompt_splits
            g = program // prompt_splits % G
            tiles += program // prompt_splits // G * (1 + TILE)
            p = tl.load(tiles).to(tl.int64)
            if p >= 0:
                m = tl.arange(0, M)
                r = m % (M // TILE)
                slot = tl.load(tiles + 1 + m // (M // TILE))
                active = (slot >= 0) & (r < R)
                slot = tl.maximum(slot, 0)
                head = g * R + r
                mask = active[:, None] & (d[None, :] < D)
                turn = (slot * D)[:, None]
                x = q + (slot * q_row + head * q_head)[:, None]
                x = rotated(x, cos + turn, sin + turn, d[None, :], D, mask, ROTARY)
                x = x.to(prompt_k.dtype.element_ty)
                top = tl.full((M,), LOW, tl.float32)
                total = tl.zeros((M,), tl.float32)
                acc = tl.zeros((M, DP), tl.float32)
                prompt_k += (p * G + g) * T_p * D
                prompt_v += (p * G + g) * T_p * D
                end = tl.minimum((split + 1) * prompt_chunk, tl.load(lengths + p).to(tl.int32))
                for start in range(split * prompt_chunk, end, N):
                    column = start + tl.arange(0, N)
                    top, total, acc = attend_block(
                        x, prompt_k, prompt_v, column, end, active, scale, top, total, acc, d, D
                    )
                join(
                    parts,
                    tops,
                    totals,
                    counters,
                    y,
                    split,
                    splits,
                    slot * H + head,
                    n * H,
                    active,
                    top,
                    total,
                    acc,
                    d,
                    D,
                )
            return
        program -= prompt_programs
        split = program % completion_splits
        g = program // completion_splits % G
        slot = (program // completion_splits // G).to(tl.int64)
        m = tl.arange(0, COMPLETION_M)
        active = m < R
        head = g * R + m
        mask = active[:, None] & (d[None, :] < D)
        cos += slot * D
        sin += slot * D
        x = q + (slot * q_row + head * q_head)[:, None]
        x = rotated(x, cos, sin, d[None, :], D, mask, ROTARY).to(completion_k.dtype.element_ty)
        completion_k += (slot * G + g) * T_c * D
        completion_v += (slot * G + g) * T_c * D
        # Only the program whose stretch has column t touches it: it takes the new key and value as they come from
        # the projection, and writes them to the cache for later steps.
        now = tl.load(t + slot).to(tl.int32)
        is_new = now // completion_chunk == split
        new_mask = (d < D) & is_new
        new_k = rotated(k + slot * k_row + g * k_head, cos, sin, d, D, new_mask, ROTARY)
        new_k = new_k.to(completion_k.dtype.element_ty)
        new_v = tl.load(v + slot * v_row + g * v_head + d, new_mask, 0.0)
        new_v = new_v.to(completion_v.dtype.element_ty)
        tl.store(completion_k + now * D + d, new_k, new_mask)
        tl.store(completion_v + now * D + d, new_v, new_mask)
        z = tl.sum(x.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        top = tl.where(is_new, z, LOW)
        total = tl.zeros((COMPLETION_M,), tl.float32) + is_new.to(tl.float32)
        acc = tl.zeros((COMPLETION_M, DP), tl.float32) + new_v.to(tl.float32)[None, :]
        end = tl.minimum((split + 1) * completion_chunk, now)
        for start in range(split * completion_chunk, end, N):
            column = start + tl.arange(0, N)
            top, total, acc = attend_block(
                x, completion_k, completion_v, column, end, active, scale, top, total, acc, d, D
            )
        join(
            parts,
            tops,
            totals,
            counters,
            y,
            prompt_splits + split,
            splits,
            slot * H + head,
            n * H,
            active,
            top,
            total,
            acc,
            d,
            D,
        )


# Two for each of an H200's 132 multiprocessors; with fewer, columns are split among more programs.
PROGRAMS = 264
# Per thread: three programs fit on a multiprocessor. Left to itself, the compiler takes more or spills.
REGISTERS = 168


def kernel_shape(H: int, G: int, D: int, itemsize: int, group_size: int):
    """-> the kernel's constants. About group_size slots read the same prompt."""
    R = H // G
    DP = triton.next_power_of_2(max(16, D))
    heads = triton.next_power_of_2(R)
    group = triton.next_power_of_2(group_size)
    M = max(16, heads, min(32 if itemsize == 2 else 16, heads * group))  # 32 in float32 spill on sm_90
    # 8 KiB of keys and 8 KiB of values at a time. With twice that bfloat16 spills on sm_80 or sm_90.
    N = max(16, min(64, 8192 // (DP * itemsize)))
    return dict(R=R, TILE=min(group, M // heads), M=M, COMPLETION_M=max(16, heads), N=N, DP=DP)


def split_columns(width: int, programs: int, block: int):
    """-> (stretches, columns per stretch) of `width` columns. programs: how many run without splitting.

    A stretch has at least two blocks. There are at most 16, because one program joins their parts one by one."""
    blocks = max(1, -(-width // block))
    splits = min(-(-blocks // 2), max(1, PROGRAMS // programs), 16)
    each = -(-blocks // splits)
    return -(-blocks // each), each * block


def tiles_of(prompt_slot: np.ndarray, prompt_slots: int, tile: int):
    """prompt_slot (n,), the prompt slot that each slot reads -> (tiles, 1 + tile) int32.

    A line has a prompt slot and the slots of one program, which all read it; -1: none. The number of lines is the most
    that any n slots may need, so that a CUDA graph keeps its grid."""
    n = len(prompt_slot)
    lines = (n + min(n, prompt_slots) * (tile - 1)) // tile
    table = np.full((lines, 1 + tile), -1, dtype=np.int32)
    line = 0
    for p in np.unique(prompt_slot):
        slots = np.flatnonzero(prompt_slot == p)
        for i in range(0, len(slots), tile):
            readers = slots[i : i + tile]
            table[line, : 1 + len(readers)] = p, *readers
            line += 1
    return table
