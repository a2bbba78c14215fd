"""The Triton kernel of one decode step's attention. kvcache.py launches it; plain torch there is its oracle.

Shapes are KVCache's: H query heads and G key heads; R = H / G query heads share a key head. A head has D numbers; DP is
the next power of two. A program takes one key head and a range of columns. The columns are of a prompt, which is read
once for a tile of slots that share the prompt, or of one slot's completion. A program rotates its queries itself. Its
result is one part of the softmax of its queries. The last program to finish with a query joins the parts (`join`).

WINDOW: how many tokens a token sees, itself included; 0: all up to itself. PART: how many numbers of a head are
rotated; 0: all.

Left out: prefill, which uses the model's own attention. Test: pytest tests/test_kernels.py
"""

from snug.kernels import LOW, constexpr, dot, tl, triton

if triton is not None:

    @triton.jit
    def rotated(x, cos, sin, d, D, mask, ROTARY: constexpr, PART: constexpr):
        """`kernels.rotary.rotate`: x[d] cos[d] + (-x[d + D/2] | x[d - D/2]) sin[d]. x, cos, sin: where heads begin.

        PART: how many numbers of a head are rotated; 0: all D. The others stay: their cos is 1, their sin 0."""
        value = tl.load(x + d, mask, 0.0)
        if ROTARY:
            half = (PART if PART else D) // 2
            turns = mask & (d < PART) if PART else mask
            other = tl.load(x + tl.where(d < half, d + half, d - half), turns, 0.0)
            c = tl.load(cos + d, turns, 1.0 if PART else 0.0)
            s = tl.load(sin + d, turns, 0.0)
            value = value * c + tl.where(d < half, -other, other) * s
        return value

    @triton.jit
    def attend_columns(
        q,
        keys,
        values,
        begin,
        end,
        active,
        latest,
        earliest,
        scale,
        d,
        D,
        N: constexpr,
        WINDOW: constexpr,
    ):
        """The softmax of active queries (M,) over columns begin .. end - 1, online (Milakov and Gimelshein 2018).

        q (M, DP); keys and values: column 0 of (columns, D). latest (M,): the column of each query's token, counted as
        these columns are; earliest: the smallest of `latest`. With a window a query sees columns that are less than
        WINDOW before its token's.
        -> top, total (M,), acc (M, DP)"""
        if WINDOW:  # skip whole blocks, so that a query's sums do not depend on its neighbours
            begin += tl.maximum(earliest + 1 - WINDOW - begin, 0) // N * N
        q = q.to(keys.dtype.element_ty)
        top = tl.full((q.shape[0],), LOW, tl.float32)
        total = tl.zeros_like(top)
        acc = tl.zeros(q.shape, tl.float32)
        for start in range(begin, end, N):
            column = start + tl.arange(0, N)
            at = column[:, None] * D + d[None, :]
            mask = (column < end)[:, None] & (d[None, :] < D)
            sees = (column < end)[None, :] & active[:, None]
            if WINDOW:
                sees &= latest[:, None] - column[None, :] < WINDOW
            k = tl.load(keys + at, mask, 0.0)
            v = tl.load(values + at, mask, 0.0)
            z = dot(q, tl.trans(k)) * scale
            z = tl.where(sees, z, LOW)
            higher = tl.maximum(top, tl.max(z, 1))
            p = tl.where(sees, tl.exp2(z - higher[:, None]), 0.0)
            shrunk = tl.exp2(top - higher)
            acc = acc * shrunk[:, None] + dot(p.to(v.dtype), v)
            total = total * shrunk + tl.sum(p, 1)
            top = higher
        return top, total, acc

    @triton.jit
    def join(parts, tops, totals, counters, y, split, splits, query, active, top, total, acc, d, D):
        """Store part `split` of the queries `query` (M,). The program that stores the last of a query's `splits` parts
        joins them into one softmax; each part has its own maximum.

        A program stores its part, even if it is empty, and then adds 1 to the query's counter. The first barrier orders
        the stores of all its threads before this atomic addition, which releases them to the device. The program that
        adds last acquires the stores of the others, and the second barrier makes them visible to all its threads. No
        program waits for another. The last one resets the counter for the next launch."""
        inside = d[None, :] < D
        part = query * splits + split
        tl.store(tops + part, top, active)
        tl.store(totals + part, total, active)
        tl.store(parts + part[:, None] * D + d[None, :], acc, active[:, None] & inside)
        tl.debug_barrier()
        last = (tl.atomic_add(counters + query, 1, mask=active, sem="acq_rel") == splits - 1) & active
        tl.debug_barrier()
        if tl.max(last.to(tl.int32), 0) > 0:
            last_mask = last[:, None] & inside
            top = tl.full(top.shape, LOW, tl.float32)
            total = tl.zeros_like(total)
            acc = tl.zeros_like(acc)
            for i in range(splits):
                part = query * splits + i
                part_top = tl.load(tops + part, last, LOW)
                part_total = tl.load(totals + part, last, 1.0)
                part_acc = tl.load(parts + part[:, None] * D + d[None, :], last_mask, 0.0)
                higher = tl.maximum(top, part_top)
                shrunk = tl.exp2(top - higher)
                share = tl.exp2(part_top - higher)
                total = total * shrunk + part_total * share
                acc = acc * shrunk[:, None] + part_acc * share[:, None]
                top = higher
            at = query[:, None] * D + d[None, :]
            tl.store(y + at, acc / total[:, None], last_mask)
            tl.store(counters + query, 0, last)

    @triton.jit
    def queries_of(
        q, cos, sin, slot, active, head, q_row, size, d, D, ROTARY: constexpr, PART: constexpr
    ):
        """-> (M, DP), rotated."""
        mask = active[:, None] & (d[None, :] < D)
        turn = (slot * size)[:, None]
        x = q + (slot * q_row + head * D)[:, None]
        return rotated(x, cos + turn, sin + turn, d[None, :], D, mask, ROTARY, PART)

    @triton.jit
    def write_column(
        k, v, cos, sin, keys, values, s, g, k_row, v_row, size, now, d, D, ROTARY: constexpr, PART: constexpr
    ):  # fmt: skip
        """Rotate the new key of slot s. Write this key and its value to column `now`."""
        inside = d < D
        key = k + s * k_row + g * D
        key = rotated(key, cos + s * size, sin + s * size, d, D, inside, ROTARY, PART)
        value = tl.load(v + s * v_row + g * D + d, inside, 0.0)
        tl.store(keys + now * D + d, key, inside)
        tl.store(values + now * D + d, value, inside)

    @triton.jit
    def end_of_prompt(lengths, p, t, slot):
        """-> a prompt's length; the column that each slot's token would have if the prompt went on, and the smallest.

        The smallest is found here, within the kernel's branch. If the reduction stands behind the branch, Triton does
        not know the alignment, and then does not prefetch columns (cp.async)."""
        length = tl.load(lengths + p, p >= 0, 0).to(tl.int32)
        latest = length + tl.load(t + slot, slot >= 0, 2**30).to(tl.int32)
        return length, latest, tl.min(latest, 0)

    # These arguments change from rollout to rollout. Specialised, 1 or a multiple of 16 would compile the kernel again.
    @triton.jit(do_not_specialize=["T_p", "T_c", "prompt_programs"])
    def attend_kernel(
        q, k, v, cos, sin, q_row, k_row, v_row, prompt_k, prompt_v, tiles, lengths, completion_k, completion_v, t,
        parts, tops, totals, counters, y, scale, T_p, T_c, D, prompt_programs, prompt_chunk, completion_chunk,
        R: constexpr, TILE: constexpr, M: constexpr, N: constexpr, DP: constexpr, ROTARY: constexpr,
        PART: constexpr, WINDOW: constexpr,
    ):  # fmt: skip
        """Programs (i, g); g is the key head. Each of the first prompt_programs attends to prompt_chunk columns of one
        prompt, for a tile of slots. Each of the others attends to completion_chunk columns of one slot's completion.
        The program whose columns include the new token's column writes this column first, for itself and for later
        steps."""
        program, g = tl.program_id(0), tl.program_id(1)
        G = tl.num_programs(1)
        d = tl.arange(0, DP)
        member = tl.arange(0, M) // (M // TILE)  # number of the slot in the tile
        r = tl.arange(0, M) % (M // TILE)
        size = PART if PART else D  # numbers in a line of cos or sin
        prompt_splits = tl.cdiv(T_p, prompt_chunk)
        completion_splits = tl.cdiv(T_c, completion_chunk)
        if program < prompt_programs:
            split = program % prompt_splits
            tiles += program // prompt_splits * (1 + TILE)
            p = tl.load(tiles).to(tl.int64)
            slot = tl.load(tiles + 1 + member)
            keys = prompt_k + (p * G + g) * T_p * D
            values = prompt_v + (p * G + g) * T_p * D
            begin = split * prompt_chunk
            end = begin + prompt_chunk
            length, latest, earliest = end_of_prompt(lengths, p, t, slot)
            end = tl.minimum(end, length)
        else:
            s = (program - prompt_programs) // completion_splits
            split = (program - prompt_programs) % completion_splits
            slot = tl.where(member == 0, s, -1)
            s = s.to(tl.int64)
            keys = completion_k + (s * G + g) * T_c * D
            values = completion_v + (s * G + g) * T_c * D
            begin = split * completion_chunk
            now = tl.load(t + s).to(tl.int32)
            end = tl.minimum(begin + completion_chunk, now + 1)
            latest = tl.full((M,), now, tl.int32)
            earliest = now
            if now // completion_chunk == split:
                write_column(
                    k, v, cos, sin, keys, values, s, g, k_row, v_row, size, now, d, D, ROTARY, PART
                )
            tl.debug_barrier()  # all threads of the program see the new column
            split += prompt_splits
        active = (slot >= 0) & (r < R)
        slot = tl.maximum(slot, 0)
        head = g * R + r
        q = queries_of(q, cos, sin, slot, active, head, q_row, size, d, D, ROTARY, PART)
        top, total, acc = attend_columns(
            q, keys, values, begin, end, active, latest, earliest, scale, d, D, N, WINDOW
        )
        query, splits = slot * G * R + head, prompt_splits + completion_splits
        join(parts, tops, totals, counters, y, split, splits, query, active, top, total, acc, d, D)


# Programs that fill a device: two for each of an H200's 132 multiprocessors. If there are fewer, columns are split.
PROGRAMS = 264
# Registers per thread: three programs fit on a multiprocessor. Without this limit the compiler takes more, or spills.
REGISTERS = 168


def kernel_shape(H: int, G: int, D: int, itemsize: int, group_size: int):
    """-> the kernel's constants. About group_size slots read the same prompt."""
    R = H // G
    DP = triton.next_power_of_2(max(16, D))
    heads = triton.next_power_of_2(R)
    group = triton.next_power_of_2(group_size)
    most = 32 if itemsize == 2 and DP < 256 else 16  # with more queries, registers spill
    M = max(16, heads, min(most, heads * group))
    # 8 KiB of keys and 8 KiB of values at a time. With 16 KiB of each, bfloat16 spills registers on sm_80 or sm_90.
    N = max(16, min(64, 8192 // (DP * itemsize)))
    return dict(R=R, TILE=min(group, M // heads), M=M, N=N, DP=DP)


def split_columns(width: int, programs: int, block: int):
    """-> (ranges, columns per range) of `width` columns. programs: how many run if nothing is split.

    A range has at least two blocks. There are at most 16 ranges, because one program joins their parts one by one."""
    blocks = -(-width // block)
    splits = min(-(-blocks // 2), max(1, PROGRAMS // programs), 16)
    each = -(-blocks // splits)
    return -(-blocks // each), each * block
