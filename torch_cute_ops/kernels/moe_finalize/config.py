"""How a finalising kernel is built: no device code."""

from dataclasses import dataclass

import torch

VECTOR = 16
"""Bytes of a row that a thread takes at once."""
FEW = 512
"""Tokens up to which it is faster to read rows past L1."""
THREADS, MORE_THREADS = 128, 256
"""Of a CTA, at most; and where larger ones, of few tokens, are spread more evenly."""
CTAS_PER_SM = 5
"""CTAs beside each other on a multiprocessor, by which slices are counted."""
WARP = 32


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel.

    Attributes:
        dtype: of the rows: bfloat16, float16 or float32.
        width: elements of a row.
        topk: rows of a token.
        has_residual: whether there is a residual.
        few: tokens up to which rows are read past L1.
        threads: of a CTA.
        more_threads: of a CTA of few tokens, where that spreads them more evenly.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    width: int
    topk: int
    has_residual: bool
    few: int
    threads: int
    more_threads: int
    pdl: bool

    @property
    def vector(self) -> int:
        """Elements that a thread takes at once."""
        return VECTOR // self.dtype.itemsize

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.width // self.vector

    def portions(self, threads: int) -> int:
        """Times that so many threads take a vector each, for a whole row."""
        return -(-self.vectors // threads)


def plan(dtype: torch.dtype, width: int, topk: int, has_residual: bool, pdl: bool = True) -> Config:
    """The configuration for these facts; every architecture has one."""
    vectors = width * dtype.itemsize // VECTOR
    threads, more_threads = (_even_threads(vectors, most) for most in (THREADS, MORE_THREADS))
    return Config(dtype, width, topk, has_residual, FEW, threads, more_threads, pdl)


def _even_threads(vectors: int, most: int) -> int:
    """Threads, ``most`` or fewer, that take a row's vectors in portions of one size, but for less than a warp each."""
    portions = -(-vectors // most)
    return -(-vectors // (portions * WARP)) * WARP
