"""Configurations of the GEMM with a recoded weight, and of the kernel that recodes the weight. No device code."""

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
"""Weight rows whose notes are contiguous: the rows of an output tile."""
WARP_ROWS: Final = 4
"""Weight rows of a warp."""
RANGE: Final = 16
"""K tiles of a range, which a team recodes as one work tile."""
TEAM: Final = 256
"""Threads of a team. A work tile of a team is ``TEAM_ROWS`` rows of a range."""
ROW_THREADS: Final = 8
"""Threads that share a row."""
TEAM_ROWS: Final = TEAM // ROW_THREADS
RANGE_WORK: Final = NOTE_ROWS // TEAM_ROWS
"""Work tiles of a range of ``NOTE_ROWS`` rows."""
LINE_WORDS: Final = 32
"""Words of a cache line."""
OVERLAP_TEAMS: Final = 3
"""Teams of a CTA that overlaps the GEMM. Three teams leave no registers for another CTA on the SM, and do not spill. On
an H100, four teams, with spills, recode 1.13 times as fast as three, and the GEMM takes the same time."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the GEMM. In ``Arguments``, ``b`` is the recoded weight, and ``b_scale`` is the weight's
    notes.

    Attributes:
        overlaps_recode: True if the kernel that recodes the weight runs while this kernel runs.
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
        """First word, in a stage's slot of scales, of the factors that change units. They follow the scales of
        ``a``."""
        return self.tile_m

    @property
    def tells_expert(self) -> bool:
        """Return True if consumers need the index of a tile's expert, here to find the units of the tile's rows."""
        return not self.rows.is_plain

    @property
    def slot_words(self) -> int:
        return self.units_at + unit_words(self.tile_n)


plan = functools.partial(with_most_stages, Config, tile_m=MANY, tile_n=NOTE_ROWS)


class Notes:
    """Layout of the notes of ``NOTE_ROWS`` weight rows. Offsets are in 4-byte words. The notes store, in order:

    1. the rows' units as fp32;
    2. a word per ``RANGE`` k tiles and ``WARP_ROWS`` rows: bit i is set if, in k tile i of the range, a row uses
       the k tile's own exponent instead of the row's unit;
    3. 16-bit exponents of the rows' units, followed, for each k tile whose bit is set, by the exponents that the rows
       use in that k tile;
    4. in a separate cache line, the number of work tiles that have been recoded.

    Arguments and results are Python integers or device integers.
    """

    @staticmethod
    def ranges(k_tiles: Any) -> Any:
        """Return the number of ranges."""
        return (k_tiles + (RANGE - 1)) // RANGE

    @staticmethod
    def owns(range_: Any) -> Any:
        """Return the offset of the words with the bits of a range of k tiles."""
        return NOTE_ROWS + range_ * (NOTE_ROWS // WARP_ROWS)

    @classmethod
    def exponents(cls, k_tiles: Any, place: Any) -> Any:
        """Return the offset of the exponents of the units (``place`` 0) or of k tile i (``place`` i + 1)."""
        return cls.owns(cls.ranges(k_tiles)) + place * (NOTE_ROWS // 2)

    @classmethod
    def done(cls, k_tiles: Any) -> Any:
        """Return the offset of the number of recoded work tiles."""
        return cls.exponents(k_tiles, k_tiles + 1)

    @classmethod
    def work_tiles(cls, k_tiles: Any) -> Any:
        """Return the number of work tiles of the rows."""
        return cls.ranges(k_tiles) * RANGE_WORK

    @classmethod
    def words(cls, k_tiles: Any) -> Any:
        """Return the size of the notes in words."""
        return cls.done(k_tiles) + LINE_WORDS


def note_words(n: int, k: int, experts: int) -> int:
    """Return the size in words of all notes of a weight."""
    return experts * -(-n // NOTE_ROWS) * int(Notes.words(-(-k // K_TILE)))


class WeightArguments(namedtuple("WeightArguments", "b b_scale weight notes first max_ctas")):
    """Run-time arguments of the kernel that recodes the weight, in order.

    Sizes: E experts; N rows of an expert's weight, a multiple of 8; K elements of a row, a multiple of 64; B elements
    of a block. A weight tile is ``NOTE_ROWS`` rows of an expert; the last weight tile of an expert may have fewer rows.

    Attributes:
        b: (K / 2, N) uint8 FP4 codes, the transposed view of a row-major (N, K / 2) weight; (E, K / 2, N) with experts.
        b_scale: block scales: linear (N, K / B) or (E, N, K / B), or tiled scales of all rows together.
        weight: (E, N, K) e4m3, contiguous, written; E is 1 without experts.
        notes: (``note_words``,) int32, ``Notes`` of all weight tiles, written for rows that exist.
        first: number of weight tiles that the first launch recodes, before the GEMM starts. The first launch also
            initialises the numbers of recoded work tiles of all weight tiles.
        max_ctas: number of CTAs of the second launch, which overlaps the GEMM and recodes all other weight tiles, in
            order.
    """


@dataclass(frozen=True)
class WeightConfig:
    """Static properties of the kernel that recodes the weight.

    Attributes:
        fmt, layout: format and scale layout of the weight.
        is_plain: True for one weight matrix, False for one matrix per expert.
        pdl: True for programmatic dependent launches.
        overlaps_gemm: True if this kernel runs while the GEMM runs.
    """

    fmt: FP4Format
    layout: ScaleLayout
    is_plain: bool
    pdl: bool
    overlaps_gemm: bool = False

    @property
    def teams(self) -> int:
        """Number of teams of a CTA."""
        return OVERLAP_TEAMS if self.overlaps_gemm else 1

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.teams * TEAM

    @property
    def at_once(self) -> int:
        """Number of k tiles that a thread recodes at once, without a branch in between. Registers limit this number."""
        return 2 if self.overlaps_gemm else 4

    @property
    def tile_scales(self) -> int:
        """Number of scales of a row in a k tile."""
        return K_TILE // self.fmt.block_size
