"""The Triton kernels of one decode step's attention; kvcache.py launches them, and its plain torch is their oracle.

cache_kernel   rotate queries and keys; write the new keys and values into the cache
prompt_kernel  each slot's queries against its prompt's keys: a tile of slots that share a prompt reads it once
own_kernel     each slot's queries against its own earlier tokens
join_kernel    one softmax of the parts that the two left

Shapes are as in KVCache: H query heads, G key heads, R = H / G queries share a key head, D numbers a head, DP the power
of two above. Columns are split into stretches if there are too few programs for the device; a part is what one stretch
gives.

Left out: prefill, which is the model's own attention. Test: pytest tests/test_kernels.py
"""

from kernels import triton

if triton is not None:
    import triton.language as tl

    from kernels import LOW

    @triton.jit
    def rotated(x, cos, sin, slot, d, D, ROTARY: tl.constexpr):
        """`model.rotate` of one head: x[d] cos[d] + (-x[d + D/2] | x[d - D/2]) sin[d]."""
        value = tl.load(x + d, mask=d < D, other=0.0)
        if ROTARY:
            half = D // 2
            other = tl.load(x + tl.where(d < half, d + half, d - half), mask=d < D, other=0.0).to(tl.float32)
            c = tl.load(cos + slot * D + d, mask=d < D, other=0.0)
            s = tl.load(sin + slot * D + d, mask=d < D, other=0.0)
            value = (value.to(tl.float32) * c + tl.where(d < half, -other, other) * s).to(value.dtype)
        return value

    @triton.jit
    def cache_kernel(
        q, k, v, cos, sin, rotated_q, own_k, own_v, t, q_row, q_head, k_row, k_head, v_row, v_head, T_c, H, G, D,
        DP: tl.constexpr, ROTARY: tl.constexpr,
    ):  # fmt: skip
        """A program a slot and head: rotate a query, or rotate a key and write it to column t, or write a value there.

        Under autocast q and k may be of another type than v and the cache."""
        slot = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        d = tl.arange(0, DP)
        if head < H:
            x_q = rotated(q + slot * q_row + head * q_head, cos, sin, slot, d, D, ROTARY)
            tl.store(rotated_q + (slot * H + head) * D + d, x_q.to(rotated_q.dtype.element_ty), mask=d < D)
        else:
            g = (head - H) % G
            here = ((slot * G + g) * T_c + tl.load(t + slot)) * D + d
            if head < H + G:
                x_k = rotated(k + slot * k_row + g * k_head, cos, sin, slot, d, D, ROTARY)
                tl.store(own_k + here, x_k.to(own_k.dtype.element_ty), mask=d < D)
            else:
                x_v = tl.load(v + slot * v_row + g * v_head + d, mask=d < D, other=0.0)
                tl.store(own_v + here, x_v.to(own_v.dtype.element_ty), mask=d < D)

    @triton.jit
    def attend_block(q, keys, values, columns, end, active, scale, top, total, acc, d, D):
        """One block of the online softmax (Milakov and Gimelshein 2018): columns below `end`, for the active queries
        (M,).

        q (M, DP); keys and values point at column 0 of (columns, D); top, total (M,); acc (M, DP). Exponents are base
        2."""
        at = columns[:, None] * D + d[None, :]
        there = (columns < end)[:, None] & (d[None, :] < D)
        seen = (columns < end)[None, :] & active[:, None]
        k = tl.load(keys + at, mask=there, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        z = tl.where(seen, z, LOW)
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.where(seen, tl.exp2(z - higher[:, None]), 0.0)
        shrunk = tl.exp2(top - higher)
        v = tl.load(values + at, mask=there, other=0.0)
        acc = acc * shrunk[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        return higher, total * shrunk + tl.sum(p, 1), acc

    @triton.jit
    def store_part(parts, tops, totals, top, total, acc, row, mask, d, D):
        """A program's maxima, sums and weighted values for `join_kernel`; row (M,): the queries' numbers."""
        tl.store(tops + row, top, mask=mask)
        tl.store(totals + row, total, mask=mask)
        tl.store(parts + row[:, None] * D + d[None, :], acc, mask=mask[:, None] & (d[None, :] < D))

    @triton.jit
    def prompt_kernel(
        q, prompt_k, prompt_v, order, prompt_slots, lengths, parts, tops, totals, scale, n, T_p, H, G, D, chunk,
        R: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr,
    ):  # fmt: skip
        """A program a tile of TILE slots in the order of their prompt slots, a key head, and a stretch of `chunk`
        columns.

        Most tiles read one prompt, for all their slots together. If a tile's slots read several, it takes them in
        turn."""
        first, g, split = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2)
        m, d = tl.arange(0, M), tl.arange(0, DP)
        at = first + m // R
        mask = (m < TILE * R) & (at < n)
        slot = tl.load(order + at, mask=mask, other=0).to(tl.int64)
        prompt = tl.load(prompt_slots + at, mask=mask, other=-1)
        row = slot * H + g * R + m % R
        x = tl.load(q + row[:, None] * D + d[None, :], mask=mask[:, None] & (d[None, :] < D), other=0.0)
        top, total, acc = tl.full((M,), LOW, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, DP), tl.float32)
        last = tl.load(prompt_slots + tl.minimum(first + TILE, n) - 1)
        for p in range(tl.load(prompt_slots + first), last + 1):
            base = ((tl.zeros((), tl.int64) + p) * G + g) * T_p * D
            end = tl.minimum((split + 1) * chunk, tl.load(lengths + p))
            end = tl.where(tl.max((prompt == p).to(tl.int32), 0) > 0, end, 0)  # no slot of this tile reads p
            for start in range(split * chunk, end, N):
                columns = start + tl.arange(0, N)
                top, total, acc = attend_block(
                    x, prompt_k + base, prompt_v + base, columns, end, prompt == p, scale, top, total, acc, d, D
                )
        store_part(parts, tops, totals, top, total, acc, split.to(tl.int64) * n * H + row, mask, d, D)

    @triton.jit
    def own_kernel(
        q, own_k, own_v, t, parts, tops, totals, scale, n, T_c, H, G, D, chunk, prompt_splits,
        R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr,
    ):  # fmt: skip
        """A program a slot, a key head, and a stretch of `chunk` columns."""
        slot, g, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        m, d = tl.arange(0, M), tl.arange(0, DP)
        mask = m < R
        row = slot * H + g * R + m
        x = tl.load(q + row[:, None] * D + d[None, :], mask=mask[:, None] & (d[None, :] < D), other=0.0)
        top, total, acc = tl.full((M,), LOW, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, DP), tl.float32)
        base = (slot * G + g) * T_c * D
        end = tl.minimum((split + 1) * chunk, tl.load(t + slot).to(tl.int32) + 1)
        for start in range(split * chunk, end, N):
            columns = start + tl.arange(0, N)
            top, total, acc = attend_block(
                x, own_k + base, own_v + base, columns, end, mask, scale, top, total, acc, d, D
            )
        store_part(parts, tops, totals, top, total, acc, (prompt_splits + split).to(tl.int64) * n * H + row, mask, d, D)

    @triton.jit
    def join_kernel(parts, tops, totals, y, rows, D, SPLITS: tl.constexpr, DP: tl.constexpr):
        """A program a query: join its parts, each with its own maximum, into one softmax."""
        row = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, DP)
        best = tl.load(tops + row)
        for split in range(1, SPLITS):
            best = tl.maximum(best, tl.load(tops + split * rows + row))
        total = 0.0
        acc = tl.zeros((DP,), tl.float32)
        for split in range(SPLITS):
            share = tl.exp2(tl.load(tops + split * rows + row) - best)
            total += tl.load(totals + split * rows + row) * share
            acc += tl.load(parts + (split * rows + row) * D + d, mask=d < D, other=0.0) * share
        tl.store(y + row * D + d, (acc / total).to(y.dtype.element_ty), mask=d < D)


PROGRAMS = 264  # two for each of an H200's 132 multiprocessors; with fewer, columns are split among more programs


def column_block(DP: int, itemsize: int) -> int:
    """Columns at a time: 8 KiB of keys and 8 KiB of values. With twice that bfloat16 spilled on sm_80 or sm_90."""
    return max(16, min(64, 8192 // (DP * itemsize)))


def split_columns(width: int, programs: int, block: int) -> tuple[int, int]:
    """-> (stretches, columns a stretch) of `width` columns, given the number of programs without splitting."""
    blocks = max(1, -(-width // block))
    splits = min(-(-blocks // 2), max(1, PROGRAMS // programs))  # a stretch has at least two blocks
    each = -(-blocks // splits)
    return -(-blocks // each), each * block


def query_tile(R: int, group_size: int) -> tuple[int, int]:
    """-> (queries, slots) a tile of prompt_kernel: R queries share a key head, group_size slots a prompt."""
    M = max(16, triton.next_power_of_2(R), min(32, triton.next_power_of_2(R * group_size)))
    return M, min(group_size, M // R)
