"""Configuration of the kernel that recodes an FP4 weight: no device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK

COLUMNS: Final = 128
"""Rows of the weight whose notes lie together."""
GROUP: Final = 4
"""Rows of a warp."""
RANGE: Final = 16
"""K blocks of a team."""
TEAM: Final = 256
"""Threads that recode ``TEAM_ROWS`` rows of a range."""
PARTS: Final = 8
"""Threads that share a row."""
TEAM_ROWS: Final = TEAM // PARTS
RANGE_PIECES: Final = COLUMNS // TEAM_ROWS
"""Pieces of a range: what a team recodes, of all rows whose notes lie together."""
LINE_WORDS: Final = 32
"""Words of a cache line."""
BESIDE_TEAMS: Final = 3
"""Teams of a CTA that runs beside the GEMM: so many that an SM has no registers for another CTA, and none spills. With
four, and spills, an SM recodes 1.13 times as fast, and a GEMM is as fast (an H100)."""


class Notes:
    """Where what is noted of ``COLUMNS`` rows lies, in words from the first of these: the units as fp32; a word for
    each ``RANGE`` of K blocks and ``GROUP`` of rows, whose bits are those K blocks in which a row has a power of its
    own; exponents of 16 bits, of the units and then of each K block, of a group's rows where its bit is set; and in a
    cache line of its own how many pieces of the rows have been recoded.

    Numbers are integers, or the device's.
    """

    @staticmethod
    def ranges(blocks: Any) -> Any:
        """Ranges of so many K blocks."""
        return (blocks + (RANGE - 1)) // RANGE

    @staticmethod
    def owns(range_: Any) -> Any:
        """The words of a range."""
        return COLUMNS + range_ * (COLUMNS // GROUP)

    @classmethod
    def exponents(cls, blocks: Any, place: Any) -> Any:
        """The exponents of the units, at ``place`` 0, or of K blocks, behind them."""
        return cls.owns(cls.ranges(blocks)) + place * (COLUMNS // 2)

    @classmethod
    def done(cls, blocks: Any) -> Any:
        """The word with the number of pieces that are done."""
        return cls.exponents(blocks, blocks + 1)

    @classmethod
    def pieces(cls, blocks: Any) -> Any:
        """Pieces of the rows."""
        return cls.ranges(blocks) * RANGE_PIECES

    @classmethod
    def words(cls, blocks: Any) -> Any:
        """How many there are."""
        return cls.done(blocks) + LINE_WORDS


def note_words(n: int, k: int, experts: int) -> int:
    """Words of the notes of a weight."""
    return experts * -(-n // COLUMNS) * int(Notes.words(-(-k // BLOCK)))


class Arguments(namedtuple("Arguments", "b b_scale weight notes first max_ctas")):
    """The run-time arguments, in order. Sizes: E experts; N rows of an expert's weight, a multiple of 8; K elements of
    a row, a multiple of 64; B elements of a scale. A tile is ``COLUMNS`` rows of an expert, or what is left of it.

    Attributes:
        b: (K / 2, N) codes, the transposed view of a row-major (N, K / 2); with experts (E, N, K / 2).
        b_scale: their scales, linear (N, K / B) or (E, N, K / B), or tiled ones of all rows together.
        weight: (E, N, K) e4m3, contiguous, written; E is 1 without experts.
        notes: (``note_words``,) int32, written where there are rows: ``Notes`` of each tile.
        first: tiles that are recoded before the GEMM starts, a number: by the kernel that is not ``beside``, which also
            starts the count of pieces that are done, of all tiles.
        max_ctas: CTAs of the kernel ``beside``, which recodes all other tiles, in order; a number.
    """


@dataclass(frozen=True)
class Config:
    """Everything static about a kernel.

    Attributes:
        fmt, layout: format and scale layout of the weight.
        is_plain: whether the weight is one matrix, and not one for each expert.
        pdl: whether launches are programmatic dependent launches.
        beside: whether it runs beside the GEMM.
    """

    fmt: FP4Format
    layout: ScaleLayout
    is_plain: bool
    pdl: bool
    beside: bool = False

    @property
    def teams(self) -> int:
        """Teams of a CTA."""
        return BESIDE_TEAMS if self.beside else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.teams * TEAM

    @property
    def at_once(self) -> int:
        """K blocks that are recoded without a branch: as many as there are registers for."""
        return 2 if self.beside else 4

    @property
    def block_scales(self) -> int:
        """Scales of a row in a K block."""
        return BLOCK // self.fmt.block_size
