"""The Triton kernels for rows of logits. rows.py launches them; its plain torch is their oracle.

Exponents have base 2, for which the hardware has an instruction: scale = log2(e) / temperature.
Test: pytest tests/test_kernels.py
"""

from snug.kernels import triton

if triton is None:
    rows_kernel = None
else:
    import triton.language as tl
    from triton.language import constexpr

    from snug.kernels import LN2, LOG2E, LOW

    @triton.jit
    def read_row(logits, scale, width, n_vocab, BLOCK: constexpr, PADDED: constexpr, ENTROPY: constexpr):
        """Of z = scale * logits -> its largest, log2 of the sum of 2^(z - largest), and with ENTROPY the mean of z.

        Each lane keeps the maximum and the sum of its columns, so the loop has no barrier. One of the two exponentials
        of the online update (Milakov and Gimelshein 2018, algorithm 3) is always 1 and is not computed.
        """
        lane = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), LOW, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)  # sum of 2^(z - top)
        moment = tl.zeros((BLOCK,), tl.float32)  # sum of z 2^(z - top)
        ahead = tl.load(logits + lane, lane < width, -float("inf"))
        for start in range(0, width, BLOCK):
            x = ahead  # the next block loads while this one is computed
            column = start + BLOCK + lane
            ahead = tl.load(logits + column, column < width, -float("inf"))
            z = x.to(tl.float32) * scale
            if PADDED:
                z = tl.where(start + lane < n_vocab, z, -float("inf"))
            smaller = tl.exp2(-tl.abs(z - top))
            rises = z > top
            total = tl.where(rises, total * smaller + 1, total + smaller)
            if ENTROPY:
                finite = tl.maximum(z, LOW)  # -inf * 0 is NaN
                moment = tl.where(rises, moment * smaller + finite, moment + finite * smaller)
            top = tl.maximum(top, z)
        best = tl.max(top, 0)
        share = tl.exp2(top - best)
        total = tl.sum(total * share, 0)
        return best, tl.log2(total), tl.sum(moment * share, 0) / total

    @triton.jit
    def rows_kernel(
        logits,
        targets,
        logprobs,
        lse,
        entropy,
        coefficients,
        dentropy,
        dlogits,
        scale,
        slope,
        width,
        n_vocab,
        row_stride,
        out_row_stride,
        BLOCK: constexpr,
        PADDED: constexpr,
    ):
        """One program per row: logprobs, lse and, if it is there, entropy; or with coefficients their gradient alone.

        dlogits may be logits; the second read comes from the L2 cache (`tile`). Without coefficients it becomes
        slope * (onehot - softmax). coefficients and dentropy are already divided by the temperature.
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        target = tl.load(targets + row)
        if coefficients is None:
            best, log_sum, mean = read_row(
                logits, scale, width, n_vocab, BLOCK, PADDED, entropy is not None
            )
            known = (target >= 0) & (target < n_vocab)
            chosen = tl.load(logits + target, known, -float("inf")).to(tl.float32) * scale
            tl.store(logprobs + row, (chosen - best - log_sum) * LN2)
            tl.store(lse + row, (best + log_sum) * LN2)
            if entropy is not None:
                tl.store(entropy + row, (best + log_sum - mean) * LN2)
            c = slope
        else:
            best, log_sum, c = tl.load(lse + row) * LOG2E, 0.0, tl.load(coefficients + row)
        if dlogits is not None:
            tl.debug_barrier()  # `chosen` is read before any lane overwrites it
            for start in range(0, width, BLOCK):
                column = start + tl.arange(0, BLOCK)
                mask = column < width
                # "evict_first": nobody reads the logits again.
                x = tl.load(logits + column, mask, other=-float("inf"), eviction_policy="evict_first")
                z = x.to(tl.float32) * scale - best - log_sum
                share = c
                if coefficients is not None:  # dH / dz = -p (log p + H)
                    log_p = tl.maximum(z, LOW) * LN2
                    share += tl.load(dentropy + row) * (log_p + tl.load(entropy + row))
                d = tl.where(column == target, c, 0.0) - share * tl.exp2(z)
                if PADDED:
                    d = tl.where(column < n_vocab, d, 0.0)
                tl.store(dlogits + row * out_row_stride + column, d.to(dlogits.dtype.element_ty), mask)


def tile(width: int, itemsize: int = 2, gradient: bool = False):
    """-> (columns, warps) of a program for rows of `width` columns.

    16 elements per lane: two 16-byte loads of bfloat16 and the next two are in flight. An SM has room for 32 warps of
    64 registers; together that is twice the bytes that cover an H200's latency. Eight warps per row suffice; more would
    only make the last wave longer. Rows that do not begin at 16-byte addresses are loaded element by element, and
    addresses and masks take registers too: then 8 elements, because sm_80 spills with 16. A short row is one block.

    gradient: the second read of a row finds it in the L2 cache if all rows in flight fit there together. 40 MB over 132
    SMs are 300 KB per SM (H200; A100: 40 MB over 108). An SM holds 32 warps of programs with 33 to 64 registers, so
    long rows take 16 or 32 warps, and 2 rows or 1 are in flight. (The leanest variant, without entropy and padding,
    needs 32 registers, so twice as many rows are in flight.) More than 8 elements per lane would spill.
    """
    elements = 16 if width % 16 == 0 and not gradient else 8
    warps = 8
    while gradient and warps < 32 and width * itemsize * (32 // warps) > 300_000:
        warps *= 2
    block = min(32 * warps * elements, max(128, triton.next_power_of_2(width)))
    return block, max(1, block // (32 * elements))
