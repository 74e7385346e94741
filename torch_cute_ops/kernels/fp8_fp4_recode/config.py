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
"""Number of row tiles that run at the same time. A larger number than in other kernels delays the moment at which the
GEMM needs the weight rows that are recoded while it runs. The operands of the tiles that run at the same time still
take the same amount of L2."""
NOTE_ROWS: Final = 128
"""Number of weight rows whose notes are contiguous: the rows of an output tile."""
WARP_ROWS: Final = 4
"""Number of weight rows that a warp recodes at a time."""
RANGE: Final = 16
"""Number of k tiles of a *range*. A work tile consists of one range of ``TEAM_ROWS`` weight rows."""
TEAM: Final = 256
"""Number of threads of a thread group, which recodes a work tile."""
ROW_THREADS: Final = 8
"""Number of threads that share a weight row."""
TEAM_ROWS: Final = TEAM // ROW_THREADS
RANGE_WORK: Final = NOTE_ROWS // TEAM_ROWS
"""Number of work tiles of one range of ``NOTE_ROWS`` rows."""
LINE_WORDS: Final = 32
"""Number of words of a cache line."""
OVERLAP_TEAMS: Final = 3
"""Number of thread groups of a CTA that overlaps the GEMM. With three groups, registers do not spill, and the SM has no
registers left for another CTA. On an H100, four groups recode 1.13 times as fast as three, although registers spill,
but the GEMM takes the same time."""


@dataclass(frozen=True)
class Config(FP8GemmConfig):
    """Static properties of the GEMM with a recoded weight. In ``Arguments``, ``b`` is the recoded weight, and
    ``b_scale`` contains the weight's notes.

    Attributes:
        overlaps_recode: True if the weight is recoded by another kernel while this kernel runs.
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
        """Index of the first word with factors for changes of units (``common.fp8.units``), among a k tile's words of
        scales. These words follow the scales of ``a``."""
        return self.tile_m

    @property
    def tells_expert(self) -> bool:
        """Return True if consumers need the index of a tile's expert. Consumers of this kernel need the expert to find
        the units of the tile's rows."""
        return not self.rows.is_plain

    @property
    def slot_words(self) -> int:
        return self.units_at + unit_words(self.tile_n)


plan = functools.partial(with_most_stages, Config, tile_m=MANY, tile_n=NOTE_ROWS)


class Notes:
    """Layout of the notes of ``NOTE_ROWS`` weight rows. The recoding kernel writes the notes, and the GEMM reads them.
    Offsets are in 4-byte words. The notes store, in order:

    1. the rows' units as fp32;
    2. one word per ``RANGE`` k tiles and ``WARP_ROWS`` rows. Bit i is set if, in k tile i of the range, one of the rows
       uses the k tile's own exponent instead of the row's unit;
    3. 16-bit exponents: first the exponents of the rows' units, then the exponents of each k tile. A k tile's exponents
       are written only if the k tile's bit is set;
    4. in a separate cache line, the number of work tiles that have been recoded.

    Arguments and results are Python integers or device integers.
    """

    @staticmethod
    def ranges(k_tiles: Any) -> Any:
        """Return the number of ranges that ``k_tiles`` k tiles form."""
        return (k_tiles + (RANGE - 1)) // RANGE

    @staticmethod
    def owns(range_: Any) -> Any:
        """Return the offset of the words that contain the bits of a range of k tiles."""
        return NOTE_ROWS + range_ * (NOTE_ROWS // WARP_ROWS)

    @classmethod
    def exponents(cls, k_tiles: Any, place: Any) -> Any:
        """Return the offset of the exponents of the rows' units if ``place`` is 0, or of k tile i's exponents if
        ``place`` is i + 1."""
        return cls.owns(cls.ranges(k_tiles)) + place * (NOTE_ROWS // 2)

    @classmethod
    def done(cls, k_tiles: Any) -> Any:
        """Return the offset of the number of work tiles that have been recoded."""
        return cls.exponents(k_tiles, k_tiles + 1)

    @classmethod
    def work_tiles(cls, k_tiles: Any) -> Any:
        """Return the number of work tiles of ``NOTE_ROWS`` rows."""
        return cls.ranges(k_tiles) * RANGE_WORK

    @classmethod
    def words(cls, k_tiles: Any) -> Any:
        """Return the size in words of the notes of ``NOTE_ROWS`` rows."""
        return cls.done(k_tiles) + LINE_WORDS


def note_words(n: int, k: int, experts: int) -> int:
    """Return the number of words that the notes of a whole weight take."""
    return experts * -(-n // NOTE_ROWS) * int(Notes.words(-(-k // K_TILE)))


class WeightArguments(namedtuple("WeightArguments", "b b_scale weight notes first max_ctas")):
    """Run-time arguments of the kernel that recodes the weight, in order.

    Sizes: E experts; N rows of an expert's weight, a multiple of 8; K elements of a row, a multiple of 64; B elements
    of a block. A weight tile is ``NOTE_ROWS`` rows of an expert. The last weight tile of an expert may have fewer rows.

    Attributes:
        b: (K / 2, N) uint8 FP4 codes, the transposed view of a row-major (N, K / 2) weight; with experts (E, K / 2, N).
        b_scale: block scales: linear (N, K / B) or (E, N, K / B), or tiled scales of all rows together.
        weight: (E, N, K) e4m3, contiguous, written. E is 1 without experts.
        notes: (``note_words``,) int32, ``Notes`` of all weight tiles. Notes of existing rows are written.
        first: number of weight tiles that the first launch recodes, before the GEMM starts. The first launch also
            initialises the counts of recoded work tiles of all weight tiles.
        max_ctas: number of CTAs of the second launch, which overlaps the GEMM and recodes all other weight tiles, in
            order.
    """


@dataclass(frozen=True)
class WeightConfig:
    """Static properties of the kernel that recodes the weight.

    Attributes:
        fmt, layout: format and scale layout of the weight.
        is_plain: True for a single weight matrix, False for one matrix per expert.
        pdl: True to launch with programmatic dependent launch.
        overlaps_gemm: True if this kernel runs while the GEMM runs.
    """

    fmt: FP4Format
    layout: ScaleLayout
    is_plain: bool
    pdl: bool
    overlaps_gemm: bool = False

    @property
    def teams(self) -> int:
        """Number of thread groups of a CTA."""
        return OVERLAP_TEAMS if self.overlaps_gemm else 1

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return self.teams * TEAM

    @property
    def at_once(self) -> int:
        """Number of k tiles that a thread recodes at once, without a branch between them. Registers limit this
        number."""
        return 2 if self.overlaps_gemm else 4

    @property
    def tile_scales(self) -> int:
        """Number of scales of a row in a k tile."""
        return K_TILE // self.fmt.block_size
