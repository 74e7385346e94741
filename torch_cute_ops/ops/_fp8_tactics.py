"""Which kernel multiplies FP8 matrices, and with which tile: chosen from what the host knows."""

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Wanted

if TYPE_CHECKING:
    from torch_cute_ops.kernels.common.expert_layout import ExpertLayout

WGMMA: Final = "wgmma"
MMA: Final = "mma"
MANY: Final = 128
"""Rows of ``a`` of a tile that has these on the M side of its products; with fewer it has ``b`` there."""
BLOCK: Final = 128
BLOCK_CLOCKS: Final = 314.0
PRODUCTS_PER_CLOCK: Final = 5600.0
"""Of an SM, what a block of k of a tile of many rows takes besides its products, and what more of these take (fitted to
the times of tiles of 64 and 128 columns on an H200: no rate of its tensor cores)."""
ONE_GROUP: Final = 0.69
"""What a tile takes of which one warpgroup has all rows (measured on an H200)."""
FEW_BLOCK_CLOCKS: Final = 225.0
FEW_ROW_CLOCKS: Final = 4.8
"""Of an SM for a block of k of a tile of few rows, and for each of them (measured on an H200)."""
MEMORY_BYTES_PER_CLOCK: Final = 19.0
"""That memory gives an SM while all of them read: 4.26 TB/s of a copy with 132 SMs (measured on an H200)."""
WAITS: Final = 0.345
FEW_WAITS: Final = 0.5
"""Of the time in which memory gives a block, what products wait for: in tiles of many rows and of few (measured on an
H200)."""
SHARE_CLOCKS: Final = 6500.0
"""For the sums of a tile that CTAs share, for each CTA but the first (measured on an H200)."""

MMA_BLOCK_CLOCKS: Final = 340.0
MMA_PRODUCTS_PER_CLOCK: Final = 3400.0
"""The same of ``MMA``. (An estimate.)"""


class Shape(NamedTuple):
    """What the host knows of a product.

    Attributes:
        rows: of ``a``: more than all that experts have, or as many.
        experts: how many there are.
        n, k: columns of the result, and elements of a sum.
        rows_of_expert: of the masked layout, the most that an expert can have; else ``None``.
    """

    rows: int
    experts: int
    n: int
    k: int
    rows_of_expert: int | None = None

    @property
    def usual_rows(self) -> int:
        """Rows that an expert is taken to have."""
        return self.rows_of_expert or -(-self.rows // self.experts)


class Tactic(NamedTuple):
    """A kernel and its tile: rows of ``a``, and of ``b``; and how many CTAs share it, each with a part of k."""

    kernel: str
    tokens: int
    columns: int
    splits: int = 1

    def across(self, shape: Shape) -> int:
        """Tiles side by side."""
        return -(-shape.n // self.columns)

    def most_tiles(self, shape: Shape) -> int:
        """At least as many tiles as there are."""
        columns = self.across(shape)
        if shape.rows_of_expert is not None:
            return shape.experts * -(-shape.rows_of_expert // self.tokens) * columns
        # An expert has at most one tile that is not full.
        return (shape.rows // self.tokens + min(shape.experts, shape.rows)) * columns

    def usual_tiles(self, shape: Shape) -> int:
        """The tiles for ``usual_rows`` rows of each expert."""
        return shape.experts * -(-shape.usual_rows // self.tokens) * self.across(shape)

    def workers(self, shape: Shape, sms: int) -> int:
        """CTAs of a launch."""
        return min(self.clusters(sms), self.most_tiles(shape)) * self.splits

    def clusters(self, sms: int) -> int:
        """Clusters that run at once. (Of four CTAs, an H200 has room for one less than its SMs would do for.)"""
        return sms * self.ctas_per_sm // self.splits - (self.splits == 4)

    def clocks(self, shape: Shape, sms: int) -> float:
        """That a call will take: a model of operations, bytes and waves, to choose by."""
        # The weight comes from memory at least once, and is shared by the tiles of rows that run beside each other; as
        # memory is by the SMs that read.
        tiles = self.usual_tiles(shape)
        beside = min(-(-shape.usual_rows // self.tokens), 8)
        readers = min(1.0, tiles * self.splits / sms)
        from_memory = readers * self.columns * BLOCK / beside / MEMORY_BYTES_PER_CLOCK
        products = self._products(shape)
        waves = -(-tiles // self.clusters(sms))
        shares = waves * SHARE_CLOCKS * (self.splits - 1)
        block = max(from_memory, products + self._waits * from_memory)
        return waves * shape.k / BLOCK / self.splits * block + shares

    def _products(self, shape: Shape) -> float:
        """Clocks of a block of k, if its operands are there."""
        if self.kernel == MMA:
            return MMA_BLOCK_CLOCKS + self.tokens * self.columns * BLOCK / MMA_PRODUCTS_PER_CLOCK
        if self.tokens < MANY:
            return FEW_BLOCK_CLOCKS + FEW_ROW_CLOCKS * self.tokens
        products = BLOCK_CLOCKS + self.tokens * self.columns * BLOCK / PRODUCTS_PER_CLOCK
        if shape.usual_rows <= MANY // 2:
            products *= ONE_GROUP
        return products

    @property
    def _waits(self) -> float:
        """Of the time in which memory gives a block, what products wait for."""
        if self.kernel == MMA:
            return 0.0
        return FEW_WAITS if self.tokens < MANY else WAITS

    def wanted(self, rows: "ExpertLayout", out_dtype: torch.dtype, arch: Arch) -> Wanted:
        """The kernel."""
        if self.kernel == WGMMA:
            from torch_cute_ops.kernels import fp8_wgmma

            by_groups = fp8_wgmma.plan(
                rows=rows,
                out_dtype=out_dtype,
                tokens=self.tokens,
                columns=self.columns,
                splits=self.splits,
                arch=arch,
                pdl=settings.PDL,
            )
            return Wanted(fp8_wgmma.KERNEL, by_groups)
        from torch_cute_ops.kernels import fp8_mma

        by_warps = fp8_mma.plan(rows=rows, out_dtype=out_dtype, tokens=self.tokens, arch=arch, pdl=settings.PDL)
        return Wanted(fp8_mma.KERNEL, by_warps)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share an SM."""
        return 1 if self.kernel == WGMMA else 2


def tactics(arch: Arch) -> tuple[Tactic, ...]:
    """All that a GPU of ``arch`` can use, by rising numbers of rows in a tile."""
    if arch.name == "sm_90a":
        from torch_cute_ops.kernels.fp8_wgmma import TILES

        return tuple(Tactic(WGMMA, *tile) for tile in TILES)
    from torch_cute_ops.kernels.fp8_mma import COLUMNS
    from torch_cute_ops.kernels.fp8_mma import TILES as ROWS

    return tuple(Tactic(MMA, rows, COLUMNS) for rows in ROWS)


def choose(shape: Shape, arch: Arch, sms: int) -> Tactic:
    """The tactic with the least estimate; of equal ones that with the fewest rows in a tile, the widest tiles, and the
    fewest CTAs for each."""
    # CTAs that share a tile beside others of the same columns read the weight more than once: 10 % slower.
    able = [
        one
        for one in tactics(arch)
        if (one.tokens < MANY or shape.usual_rows > MANY // 4) and (one.splits == 1 or shape.usual_rows <= one.tokens)
    ]
    return min(able, key=lambda one: (one.clocks(shape, sms), one.tokens, -one.columns, one.splits))
