"""Configuration of the kernel that decodes MXFP8 matrices. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats import MXFP8, ScaleLayout

CTAS_PER_SM: Final = 8
THREADS: Final = 256
VECTOR: Final = 8
"""Number of elements that a thread decodes at a time."""


@dataclass(frozen=True)
class Config:
    """Static properties of the kernel that decodes MXFP8 matrices.

    Attributes:
        width: number of elements of a row, a multiple of 32.
        layout: layout of the scales.
    """

    width: int
    layout: ScaleLayout

    @property
    def blocks(self) -> int:
        """Number of scales of a row."""
        return self.width // MXFP8.block_size

    @property
    def vectors(self) -> int:
        """Number of vectors of a row."""
        return self.width // VECTOR

    @property
    def threads_per_row(self) -> int:
        """Number of threads that share a row. It is a power of two, so that a CTA processes whole rows."""
        return min(THREADS, 1 << (self.vectors - 1).bit_length())

    @property
    def rows_per_cta(self) -> int:
        return THREADS // self.threads_per_row


class Arguments(namedtuple("Arguments", "codes scale out max_ctas")):
    """Run-time arguments, in order, for R rows of W elements (``Config.width``). All tensors are contiguous.

    Attributes:
        codes: (R, W) e4m3.
        scale: uint8, e8m0 bytes, in the shape of ``Config.layout``.
        out: (R, W) bfloat16.
        max_ctas: int32, number of CTAs that fill the GPU.
    """


def plan(width: int, layout: ScaleLayout) -> Config:
    """Return the configuration for rows of ``width`` elements. Every architecture supports it."""
    return Config(width, layout)
