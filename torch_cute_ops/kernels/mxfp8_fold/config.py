"""Configuration of the kernel that folds MXFP8 matrices. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.formats import MXFP8, ScaleLayout
from torch_cute_ops.formats.fp8 import FP8_BLOCK128

CTAS_PER_SM: Final = 8
THREADS: Final = 256
WARP: Final = 32
VECTOR: Final = 16
"""Number of elements that a thread folds at a time."""
GROUP: Final = FP8_BLOCK128.block_size
"""Number of elements that share a scale after folding, unless ``Config.by_row``."""


@dataclass(frozen=True)
class Config:
    """Static properties of the kernel that folds MXFP8 matrices.

    Attributes:
        width: number of elements of a row, a multiple of 32.
        layout: layout of the scales.
        pdl: True to launch with programmatic dependent launch.
        by_row: True if all elements of a row share a scale after folding, False if each 128 elements do.
    """

    width: int
    layout: ScaleLayout
    pdl: bool
    by_row: bool = False

    @property
    def blocks(self) -> int:
        """Number of scales of a row."""
        return self.width // MXFP8.block_size

    @property
    def groups(self) -> int:
        """Number of scales of a row after folding."""
        return 1 if self.by_row else -(-self.width // GROUP)

    @property
    def vectors(self) -> int:
        """Number of vectors of a row."""
        return self.width // VECTOR

    @property
    def vectors_per_scale(self) -> int:
        """Number of vectors that share a scale after folding."""
        return self.vectors if self.by_row else GROUP // VECTOR

    @property
    def threads_per_row(self) -> int:
        """Number of threads that share a row. It is a power of two, so that a CTA processes whole rows."""
        return min(THREADS, 1 << (self.vectors - 1).bit_length())

    @property
    def lanes_per_row(self) -> int:
        """Number of lanes of a warp that divide the scales of a row: all lanes if whole warps share a row, otherwise 1,
        because some lanes may have no row."""
        return WARP if self.threads_per_row >= WARP else 1

    @property
    def rows_per_cta(self) -> int:
        return THREADS // self.threads_per_row


class Arguments(namedtuple("Arguments", "codes scale y y_scale max_ctas")):
    """Run-time arguments, in order, for R rows of W elements (``Config.width``). All tensors are contiguous.

    Attributes:
        codes: (R, W) e4m3.
        scale: uint8, e8m0 bytes, in the shape of ``Config.layout``.
        y: (R, W) e4m3, folded elements.
        y_scale: (⌈W/128⌉, R) float32, scales of the folded elements; (1, R) if ``Config.by_row``.
        max_ctas: int32, number of CTAs that fill the GPU.
    """


def plan(width: int, layout: ScaleLayout, pdl: bool, by_row: bool = False) -> Config:
    """Return the configuration for rows of ``width`` elements. Every architecture supports it."""
    return Config(width, layout, pdl, by_row)
