"""Buckets of M: the numbers of rows for which GEMMs are planned, so that a few choices serve every M."""

import functools


@functools.lru_cache(4096)  # cached, because every call of a GEMM needs its bucket
def bucket(m: int) -> int:
    """Return the bucket of ``m``: the number of rows for which a GEMM of ``m`` rows is planned.

    The bucket of 1 is 1. Any other ``m`` is rounded up to a multiple of 8, or to a multiple of a sixteenth of the next
    power of two if this sixteenth is larger than 8.
    """
    if m == 1:
        return 1
    step = max(8, (1 << max(m - 1, 0).bit_length()) // 16)
    return max(1, -(-m // step)) * step
