"""How a finalising kernel is built: no device code."""

from dataclasses import dataclass

import torch

VECTOR = 16
"""Bytes of a row that a thread takes at once."""
THREADS = 128
CTAS_PER_SM = 5
"""CTAs beside each other on a multiprocessor, by which slices are counted."""


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel.

    Attributes:
        dtype: of the rows: bfloat16, float16 or float32.
        width: elements of a row.
        topk: rows of a token.
        has_residual: whether there is a residual.
        threads: of a CTA.
        pdl: whether launches are programmatic dependent launches.
    """

    dtype: torch.dtype
    width: int
    topk: int
    has_residual: bool
    threads: int
    pdl: bool

    @property
    def vector(self) -> int:
        """Elements that a thread takes at once."""
        return VECTOR // self.dtype.itemsize

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.width // self.vector

    @property
    def portions(self) -> int:
        """Times that a CTA's threads take a vector each, for a whole row."""
        return -(-self.vectors // self.threads)


def plan(dtype: torch.dtype, width: int, topk: int, has_residual: bool, pdl: bool = True) -> Config:
    """The configuration for these facts; every architecture has one."""
    vectors = width * dtype.itemsize // VECTOR
    threads = min(THREADS, -(-vectors // 32) * 32)
    return Config(dtype, width, topk, has_residual, threads, pdl)
