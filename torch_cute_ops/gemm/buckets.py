"""Buckets of M: row counts that GEMMs are planned for, so that few choices serve every M."""

import functools


@functools.lru_cache(4096)  # cached, because every call of a GEMM asks
def bucket(m: int) -> int:
    """Return the number of rows for which a GEMM of ``m`` rows is planned.

    One row stays one row. Other ``m`` are rounded up to a multiple of 8, or of a sixteenth of the next power of two if
    that is larger.
    """
    if m == 1:
        return 1
    step = max(8, (1 << max(m - 1, 0).bit_length()) // 16)
    return max(1, -(-m // step)) * step
