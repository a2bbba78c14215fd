"""The Triton kernel of one decode step's attention; kvcache.py launches it, and its plain torch is the oracle.

Shapes are as in KVCache: H query heads, G key heads, R = H / G queries share a key head, D numbers a head, DP the power
of two above. A program takes one key head and a stretch of columns: of prompts, for a tile of slots that share a prompt
and so read it once, or of one slot's own tokens. What it finds is a part of its queries' softmax; the last program to
finish with a query joins the parts (`join`).

Left out: prefill, which is the model's own attention. Test: pytest tests/test_kernels.py
"""

import numpy as np

from kernels import triton

if triton is not None:
    import triton.language as tl

    from kernels import LOW

    @triton.jit
    def rotated(x, cos, sin, d, D, mask, ROTARY: tl.constexpr):
        """`kernels.rotary.rotate`: x[d] cos[d] + (-x[d + D/2] | x[d - D/2]) sin[d]. x, cos, sin: where heads begin."""
        value = tl.load(x + d, mask=mask, other=0.0)
        if ROTARY:
            half = D // 2
            other = tl.load(x + tl.where(d < half, d + half, d - half), mask=mask, other=0.0).to(
                tl.float32
            )
            c = tl.load(cos + d, mask=mask, other=0.0)
            s = tl.load(sin + d, mask=mask, other=0.0)
            value = value.to(tl.float32) * c + tl.where(d < half, -other, other) * s
        return value

    @triton.jit
    def load_queries(queries, slot, head, mask, d, D, ROTARY: tl.constexpr):
        """-> (M, DP): heads `head` (M,) of slots `slot` (M,), rotated."""
        q, q_row, q_head, cos, sin = queries
        at, turn, there = (
            (slot * q_row + head * q_head)[:, None],
            (slot * D)[:, None],
            mask[:, None] & (d[None, :] < D),
        )
        return rotated(q + at, cos + turn, sin + turn, d[None, :], D, there, ROTARY)

    @triton.jit
    def attend_block(q, keys, values, columns, end, active, scale, top, total, acc, d, D):
        """One block of the online softmax (Milakov and Gimelshein 2018): columns below `end`, for active queries (M,).

        q (M, DP); keys and values point at column 0 of (columns, D); top, total (M,); acc (M, DP)."""
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
    def join(out, split, splits, row, rows, mask, top, total, acc, d, D):
        """Store part `split` of queries `row` (M,). The program that stores the last of a query's `splits` parts joins
        them into one softmax; each part has its own maximum.

        A program stores its part, even if it is empty, and then adds 1 to the query's counter. The first barrier orders
        the stores of all its threads before this atomic addition, which releases them to the device. The program that
        adds last acquires the stores of the others, and the second barrier makes them visible to all its threads. No
        program waits for another. The last one resets the counter for the next launch."""
        parts, tops, totals, counters, y = out
        at, there, first = (
            row[:, None] * D + d[None, :],
            mask[:, None] & (d[None, :] < D),
            split.to(tl.int64) * rows,
        )
        tl.store(tops + first + row, top, mask=mask)
        tl.store(totals + first + row, total, mask=mask)
        tl.store(parts + first * D + at, acc, mask=there)
        tl.debug_barrier()
        last = (tl.atomic_add(counters + row, 1, mask=mask, sem="acq_rel") == splits - 1) & mask
        tl.debug_barrier()
        if tl.max(last.to(tl.int32), 0) > 0:
            there &= last[:, None]
            top, total, acc = (
                tl.full(top.shape, LOW, tl.float32),
                tl.zeros_like(total),
                tl.zeros_like(acc),
            )
            for _ in range(splits):
                its_top = tl.load(tops + row, mask=last, other=LOW)
                higher = tl.maximum(top, its_top)
                shrunk, share = tl.exp2(top - higher), tl.exp2(its_top - higher)
                total = total * shrunk + tl.load(totals + row, mask=last, other=1.0) * share
                acc = (
                    acc * shrunk[:, None] + tl.load(parts + at, mask=there, other=0.0) * share[:, None]
                )
                top = higher
                tops, totals, parts = tops + rows, totals + rows, parts + rows * D
            tl.store(y + at, (acc / total[:, None]).to(y.dtype.element_ty), mask=there)
            tl.store(counters + row, 0, mask=last)

    @triton.jit
    def attend_to_prompt(
        program, queries, prompt_k, prompt_v, tiles, lengths, out, scale, n, T_p, H, G, D, splits, chunk, all_splits,
        R: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr,
    ):  # fmt: skip
        """Program: a tile of slots that read one prompt, a key head, a stretch of `chunk` columns."""
        split, g = program % splits, program // splits % G
        tiles += program // splits // G * (1 + TILE)
        p = tl.load(tiles).to(tl.int64)
        if p >= 0:
            m, d = tl.arange(0, M), tl.arange(0, DP)
            slot, r = tl.load(tiles + 1 + m // (M // TILE)), m % (M // TILE)
            mask, slot, head = (slot >= 0) & (r < R), tl.maximum(slot, 0), g * R + r
            x = load_queries(queries, slot, head, mask, d, D, ROTARY).to(prompt_k.dtype.element_ty)
            top, total, acc = (
                tl.full((M,), LOW, tl.float32),
                tl.zeros((M,), tl.float32),
                tl.zeros((M, DP), tl.float32),
            )
            prompt_k += (p * G + g) * T_p * D
            prompt_v += (p * G + g) * T_p * D
            end = tl.minimum((split + 1) * chunk, tl.load(lengths + p).to(tl.int32))
            for start in range(split * chunk, end, N):
                columns = start + tl.arange(0, N)
                top, total, acc = attend_block(
                    x, prompt_k, prompt_v, columns, end, mask, scale, top, total, acc, d, D
                )
            join(out, split, all_splits, slot * H + head, n * H, mask, top, total, acc, d, D)

    @triton.jit
    def attend_to_own(
        program, queries, k, v, k_row, k_head, v_row, v_head, own_k, own_v, t, out, scale, n, T_c, H, G, D, splits,
        chunk, all_splits, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr,
    ):  # fmt: skip
        """Program: a slot, a key head, a stretch of `chunk` columns.

        Only the program whose stretch has column t touches that column: it takes the new key and value as they come
        from the projection, and writes them to the cache for later steps."""
        split, g, slot = program % splits, program // splits % G, program // splits // G
        m, d = tl.arange(0, M), tl.arange(0, DP)
        mask, head, row = m < R, g * R + m, slot * H + g * R + m
        x = load_queries(queries, slot + 0 * m, head, mask, d, D, ROTARY).to(own_k.dtype.element_ty)
        slot = slot.to(tl.int64)
        now = tl.load(t + slot).to(tl.int32)
        base, is_new = (slot * G + g) * T_c * D, now // chunk == split
        there = (d < D) & is_new
        cos, sin = queries[3] + slot * D, queries[4] + slot * D
        new_k = rotated(k + slot * k_row + g * k_head, cos, sin, d, D, there, ROTARY).to(
            own_k.dtype.element_ty
        )
        new_v = tl.load(v + slot * v_row + g * v_head + d, mask=there, other=0.0).to(
            own_v.dtype.element_ty
        )
        tl.store(own_k + base + now * D + d, new_k, mask=there)
        tl.store(own_v + base + now * D + d, new_v, mask=there)
        z = tl.sum(x.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        top, total = tl.where(is_new, z, LOW), tl.zeros((M,), tl.float32) + is_new.to(tl.float32)
        acc = tl.zeros((M, DP), tl.float32) + new_v.to(tl.float32)[None, :]
        end = tl.minimum((split + 1) * chunk, now)
        for start in range(split * chunk, end, N):
            columns = start + tl.arange(0, N)
            top, total, acc = attend_block(
                x, own_k + base, own_v + base, columns, end, mask, scale, top, total, acc, d, D
            )
        join(out, all_splits - splits + split, all_splits, row, n * H, mask, top, total, acc, d, D)

    # Numbers that change from rollout to rollout: no new compilation where one is 1 or a multiple of 16.
    @triton.jit(do_not_specialize=["n", "T_p", "T_c", "prompt_programs", "prompt_splits", "own_splits"])
    def attend_kernel(
        q, k, v, cos, sin, q_row, q_head, k_row, k_head, v_row, v_head, prompt_k, prompt_v, tiles, lengths,
        own_k, own_v, t, parts, tops, totals, counters, y, scale, n, T_p, T_c, H, G, D, prompt_programs,
        prompt_splits, prompt_chunk, own_splits, own_chunk,
        R: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, OWN_M: tl.constexpr, N: tl.constexpr, DP: tl.constexpr,
        ROTARY: tl.constexpr,
    ):  # fmt: skip
        """The programs of `attend_to_prompt`, then those of `attend_to_own`. Each rotates its queries itself."""
        program, splits = tl.program_id(0), prompt_splits + own_splits
        queries, out = (q, q_row, q_head, cos, sin), (parts, tops, totals, counters, y)
        if program < prompt_programs:
            attend_to_prompt(
                program, queries, prompt_k, prompt_v, tiles, lengths, out, scale, n, T_p, H, G, D, prompt_splits,
                prompt_chunk, splits, R, TILE, M, N, DP, ROTARY,
            )  # fmt: skip
        else:
            attend_to_own(
                program - prompt_programs, queries, k, v, k_row, k_head, v_row, v_head, own_k, own_v, t, out, scale, n,
                T_c, H, G, D, own_splits, own_chunk, splits, R, OWN_M, N, DP, ROTARY,
            )  # fmt: skip


PROGRAMS = 264  # two for each of an H200's 132 multiprocessors; with fewer, columns are split among more programs
REGISTERS = 168  # a thread: three programs fit on a multiprocessor. Left to itself, the compiler takes more or spills


def kernel_shape(H: int, G: int, D: int, itemsize: int, group_size: int) -> dict:
    """-> the kernel's constants. About group_size slots read the same prompt."""
    R, DP = H // G, triton.next_power_of_2(max(16, D))
    each, group = triton.next_power_of_2(R), triton.next_power_of_2(group_size)
    M = max(16, each, min(32 if itemsize == 2 else 16, each * group))  # 32 in float32 spill on sm_90
    # 8 KiB of keys and 8 KiB of values at a time. With twice that bfloat16 spills on sm_80 or sm_90.
    N = max(16, min(64, 8192 // (DP * itemsize)))
    return dict(R=R, TILE=min(group, M // each), M=M, OWN_M=max(16, each), N=N, DP=DP)


def split_columns(width: int, programs: int, block: int) -> tuple[int, int]:
    """-> (stretches, columns a stretch) of `width` columns, given the number of programs without splitting.

    A stretch has at least two blocks. There are at most 16, because one program joins their parts one by one."""
    blocks = max(1, -(-width // block))
    splits = min(-(-blocks // 2), max(1, PROGRAMS // programs), 16)
    each = -(-blocks // splits)
    return -(-blocks // each), each * block


def tiles_of(prompt_slot: np.ndarray, prompt_slots: int, tile: int) -> np.ndarray:
    """prompt_slot (n,), what each slot reads -> (tiles, 1 + tile) int32. A line is a prompt slot and the slots of one
    program, which all read it; -1: none. There are as many lines as any n slots may need."""
    n = len(prompt_slot)
    table = np.full(((n + min(n, prompt_slots) * (tile - 1)) // tile, 1 + tile), -1, dtype=np.int32)
    line = 0
    for p in np.unique(prompt_slot):
        slots = np.flatnonzero(prompt_slot == p)
        for i in range(0, len(slots), tile):
            part = slots[i : i + tile]
            table[line, : 1 + len(part)] = p, *part
            line += 1
    return table
