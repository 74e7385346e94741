"""Configuration of the kernel that recodes an FP4 weight: no device code."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.fp8_stages import BLOCK

COLUMNS: Final = 128
"""Rows of the weight whose exponents lie together."""
WORDS: Final = COLUMNS // 2
"""Words of their exponents in a K block, of 16 bits each."""


def exponent_words(n: int, k: int, experts: int) -> int:
    """Words of the exponents of a weight: for each ``COLUMNS`` rows those of the units, then those of each K block."""
    return experts * -(-n // COLUMNS) * (-(-k // BLOCK) + 1) * WORDS


class Arguments(NamedTuple):
    """The run-time arguments, in order. Sizes: E experts; N rows of an expert's weight, a multiple of 8; K elements of
    a row, a multiple of 64; B elements of a scale.

    Attributes:
        b: (K / 2, N) codes, the transposed view of a row-major (N, K / 2); with experts (E, N, K / 2).
        b_scale: their scales, linear (N, K / B) or (E, N, K / B), or tiled ones of all rows together.
        weight: (E, N, K) e4m3, contiguous, written; E is 1 without experts.
        exponents: (``exponent_words``,) int32, written where there are rows.
    """

    b: Any
    b_scale: Any
    weight: Any
    exponents: Any


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel.

    Attributes:
        fmt, layout: format and scale layout of the weight.
        is_plain: whether the weight is one matrix, and not one for each expert.
        pdl: whether launches are programmatic dependent launches.
    """

    fmt: FP4Format
    layout: ScaleLayout
    is_plain: bool
    pdl: bool

    @property
    def block_scales(self) -> int:
        """Scales of a row in a K block."""
        return BLOCK // self.fmt.block_size
