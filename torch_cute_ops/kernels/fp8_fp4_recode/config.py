"""Configurations of the GEMM by a recoded weight, and of the kernel that recodes the weight. No device code."""

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.fp8.layouts import (
    K_TILE,
    MANY,
    WIDE,
    Arguments,
    FP8GemmConfig,
    unit_words,
    with_most_stages,
)

__all__ = ["Arguments", "Config", "plan"]

RASTER: Final = 16
"""Row tiles that run side by side: more than in other kernels, so that weight rows which are recoded while the GEMM
runs are needed later. L2 then serves the same number of tiles with the same shared data."""
NOTE_ROWS: Final = 128
"""Weight rows whose notes lie together: the rows of an output tile."""
WARP_ROWS: Final = 4
"""Weight rows of a warp."""
RANGE: Final = 16
"""K tiles of a team."""
TEAM: Final = 256
"""Threads of a team, which recodes ``TEAM_ROWS`` rows of a range."""
ROW_THREADS: Final = 8
"""Threads that share a row."""
TEAM_ROWS: Final = TEAM // ROW_THREADS
RANGE_WORK: Final = NOTE_ROWS // TEAM_ROWS
"""Work tiles of a range: a team recodes a work tile at once."""
LINE_WORDS: Final = 32
"""Words of a cache line."""
OVERLAP_TEAMS: Final = 3
"""Teams of a CTA that overlaps the GEMM: enough that the SM has no registers left for another CTA, and none spills. On
an H100, four teams, with spills, recode 1.13 times as fast, and the GEMM is as fast."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Everything static about the GEMM. Of its ``Arguments``, ``b`` is the recoded weight, and ``b_scale`` its notes.

    Attributes:
        overlaps_recode: whether the kernel that recodes the weight runs at the same time.
    """

    tiles: ClassVar = ((MANY, WIDE, 1),)
    stage_counts: ClassVar = range(12, 1, -1)
    scales_ahead: ClassVar = 4
    unrolls: ClassVar = True

    overlaps_recode: bool

    @property
    def registers(self) -> tuple[int, ...]:
        return 224, 56

    @property
    def waits_last(self) -> bool:
        return self.pdl and self.overlaps_recode

    @property
    def units_at(self) -> int:
        """First word of a slot that tells how units change: after the scales of ``a``."""
        return self.tile_m

    @property
    def tells_expert(self) -> bool:
        """Whether consumers need the expert of a tile: for the units of its rows."""
        return not self.rows.is_plain

    @property
    def slot_words(self) -> int:
        return self.units_at + unit_words(self.tile_n)


plan = functools.partial(with_most_stages, Config, tile_m=MANY, tile_n=NOTE_ROWS)


class Notes:
    """Layout of the notes of ``NOTE_ROWS`` weight rows, in words from the first:

    1. the units as fp32;
    2. for each ``RANGE`` of k tiles and ``WARP_ROWS`` of rows a word whose bits are the k tiles in which a row is over
       an exponent of its own;
    3. 16-bit exponents of the units, and then of each k tile, of the rows whose bit is set;
    4. in a separate cache line, the number of work tiles that have been recoded.

    Numbers are Python integers or device integers.
    """

    @staticmethod
    def ranges(k_tiles: Any) -> Any:
        """Return the number of ranges."""
        return (k_tiles + (RANGE - 1)) // RANGE

    @staticmethod
    def owns(range_: Any) -> Any:
        """Return the offset of the words of a range that say which rows are over their own exponents."""
        return NOTE_ROWS + range_ * (NOTE_ROWS // WARP_ROWS)

    @classmethod
    def exponents(cls, k_tiles: Any, place: Any) -> Any:
        """Return the offset of exponents: ``place`` 0 of the units, ``i + 1`` of k tile i."""
        return cls.owns(cls.ranges(k_tiles)) + place * (NOTE_ROWS // 2)

    @classmethod
    def done(cls, k_tiles: Any) -> Any:
        """Return the offset of the number of work tiles that are done."""
        return cls.exponents(k_tiles, k_tiles + 1)

    @classmethod
    def work_tiles(cls, k_tiles: Any) -> Any:
        """Return the number of work tiles of the rows."""
        return cls.ranges(k_tiles) * RANGE_WORK

    @classmethod
    def words(cls, k_tiles: Any) -> Any:
        """Return the size of the notes."""
        return cls.done(k_tiles) + LINE_WORDS


def note_words(n: int, k: int, experts: int) -> int:
    """Return the words of the notes of a weight."""
    return experts * -(-n // NOTE_ROWS) * int(Notes.words(-(-k // K_TILE)))


class WeightArguments(namedtuple("WeightArguments", "b b_scale weight notes first max_ctas")):
    """Run-time arguments of the kernel that recodes the weight, in order.

    Sizes: E experts; N rows of an expert's weight, a multiple of 8; K elements of a row, a multiple of 64; B elements
    of a scale. A weight tile is ``NOTE_ROWS`` rows of an expert, or the rest of its rows.

    Attributes:
        b: (K / 2, N) codes, the transposed view of a row-major (N, K / 2); with experts (E, K / 2, N).
        b_scale: scales, linear (N, K / B) or (E, N, K / B), or tiled scales of all rows together.
        weight: (E, N, K) e4m3, contiguous, written; E is 1 without experts.
        notes: (``note_words``,) int32, written where rows exist: ``Notes`` of each weight tile.
        first: number of weight tiles that are recoded before the GEMM starts, by the kernel that does not overlap it.
            That kernel also initialises the numbers of work tiles that are done, of all weight tiles.
        max_ctas: CTAs of the kernel that overlaps the GEMM and recodes all other weight tiles, in order.
    """


@dataclass(frozen=True)
class WeightConfig:
    """Everything static about the kernel that recodes the weight.

    Attributes:
        fmt, layout: format and scale layout of the weight.
        is_plain: whether the weight is one matrix instead of one for each expert.
        pdl: whether launches are programmatic dependent launches.
        overlaps_gemm: whether it runs at the same time as the GEMM.
    """

    fmt: FP4Format
    layout: ScaleLayout
    is_plain: bool
    pdl: bool
    overlaps_gemm: bool = False

    @property
    def teams(self) -> int:
        """Teams of a CTA."""
        return OVERLAP_TEAMS if self.overlaps_gemm else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.teams * TEAM

    @property
    def at_once(self) -> int:
        """K tiles that are recoded without a branch, limited by registers."""
        return 2 if self.overlaps_gemm else 4

    @property
    def tile_scales(self) -> int:
        """Scales of a row in a k tile."""
        return K_TILE // self.fmt.block_size
