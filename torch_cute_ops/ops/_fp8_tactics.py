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
"""Rows of ``a`` of a tile with which the CTAs of a cluster have tiles side by side."""
BLOCK: Final = 128
BLOCK_CLOCKS: Final = 215.0
"""Of an SM for a block of k of a tile of many rows, besides its products (measured on an H200, of ``WGMMA``)."""
PRODUCTS_PER_CLOCK: Final = 3700.0
"""Multiplications and additions of an SM in such tiles (measured on an H200)."""
SECOND_HALF: Final = 0.93
"""What a tile's second 128 columns take, over its first (measured on an H200)."""
ONE_GROUP: Final = 0.75
"""What a tile takes of which one warpgroup has all rows (measured on an H200)."""
FEW_BLOCK_CLOCKS: Final = 225.0
FEW_ROW_CLOCKS: Final = 4.8
"""Of an SM for a block of k of a tile of few rows, and for each of them (measured on an H200)."""
MEMORY_BYTES_PER_CLOCK: Final = 19.0
"""That memory gives an SM while all of them read: 4.26 TB/s of a copy with 132 SMs (measured on an H200)."""
WAITS: Final = 0.33
WIDE_WAITS: Final = 0.4
FEW_WAITS: Final = 0.5
"""Of the time in which memory gives a block, what products wait for: in tiles of many rows, the widest of those, and in
tiles of few (measured on an H200)."""
WIDE_READS: Final = 1.05
"""How much longer the widest tiles read than others (measured on an H200)."""
TILE_CLOCKS: Final = 600.0
"""Of a tile, besides its blocks of k. (An estimate.)"""
SHARE_CLOCKS: Final = 6500.0
"""For the sums of a tile that CTAs share, for each CTA but the first (measured on an H200)."""
PAIR_CLOCKS: Final = 1500.0
PAIRED_COLUMN_CLOCKS: Final = 0.1
"""What CTAs with tiles side by side cost once, and save for each column in each block of k: of a plain product; with
experts nothing (measured on an H200)."""

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
    """A kernel and its tile: rows of ``a``, and of ``b``; and CTAs of a cluster, which have tiles side by side, or
    share one."""

    kernel: str
    tokens: int
    columns: int
    cluster: int = 1

    def across(self, shape: Shape) -> int:
        """Tiles of clusters side by side."""
        return -(-shape.n // (self.columns * self.pair))

    def most_tiles(self, shape: Shape) -> int:
        """At least as many tiles of clusters as there are."""
        columns = self.across(shape)
        if shape.rows_of_expert is not None:
            return shape.experts * -(-shape.rows_of_expert // self.tokens) * columns
        # An expert has at most one tile that is not full.
        return (shape.rows // self.tokens + min(shape.experts, shape.rows)) * columns

    def usual_tiles(self, shape: Shape) -> int:
        """The tiles of clusters for ``usual_rows`` rows of each expert."""
        return shape.experts * -(-shape.usual_rows // self.tokens) * self.across(shape)

    def workers(self, shape: Shape, sms: int) -> int:
        """CTAs of a launch."""
        return min(self.clusters(sms), self.most_tiles(shape)) * self.cluster

    def clusters(self, sms: int) -> int:
        """Clusters that run at once. (Of four CTAs, an H200 has room for one less than its SMs would do for.)"""
        return sms * self.ctas_per_sm // self.cluster - (self.cluster == 4)

    @property
    def pair(self) -> int:
        """CTAs of a cluster that have tiles side by side."""
        return self.cluster if self.tokens >= MANY else 1

    @property
    def splits(self) -> int:
        """CTAs of a cluster that share a tile."""
        return self.cluster // self.pair

    def clocks(self, shape: Shape, sms: int) -> float:
        """That a call will take: a model of operations, bytes and waves, to choose by."""
        # The weight comes from memory at least once, and is shared by the tiles of rows that run beside each other; as
        # memory is by the SMs that read.
        tiles = self.usual_tiles(shape)
        beside = min(-(-shape.usual_rows // self.tokens), 8)
        readers = min(1.0, tiles * self.cluster / sms)
        from_memory = readers * self.columns * BLOCK / beside / MEMORY_BYTES_PER_CLOCK
        if self._is_wide:
            from_memory *= WIDE_READS
        products = self._products(shape)
        waves = -(-tiles // self.clusters(sms))
        # While results are stored, copies go on: only products wait.
        stores = waves * TILE_CLOCKS if products > from_memory else TILE_CLOCKS
        shares = waves * SHARE_CLOCKS * (self.splits - 1)
        starts = PAIR_CLOCKS if self.pair > 1 else 0.0
        block = max(from_memory, products + self._waits * from_memory)
        return waves * shape.k / BLOCK / self.splits * block + stores + shares + starts

    def _products(self, shape: Shape) -> float:
        """Clocks of a block of k, if its operands are there."""
        if self.kernel == MMA:
            return MMA_BLOCK_CLOCKS + self.tokens * self.columns * BLOCK / MMA_PRODUCTS_PER_CLOCK
        if self.tokens < MANY:
            return FEW_BLOCK_CLOCKS + FEW_ROW_CLOCKS * self.tokens
        products = BLOCK_CLOCKS + self.tokens * min(self.columns, BLOCK) * BLOCK / PRODUCTS_PER_CLOCK
        if self._is_wide:
            products *= 1 + SECOND_HALF
        if shape.usual_rows <= MANY // 2:
            products *= ONE_GROUP
        if self.pair > 1 and shape.experts == 1:
            products -= PAIRED_COLUMN_CLOCKS * self.columns
        return products

    @property
    def _waits(self) -> float:
        """Of the time in which memory gives a block, what products wait for."""
        if self.kernel == MMA:
            return 0.0
        if self.tokens < MANY:
            return FEW_WAITS
        return WIDE_WAITS if self._is_wide else WAITS

    @property
    def _is_wide(self) -> bool:
        return self.columns > BLOCK

    def wanted(self, rows: "ExpertLayout", out_dtype: torch.dtype, arch: Arch) -> Wanted:
        """The kernel."""
        if self.kernel == WGMMA:
            from torch_cute_ops.kernels import fp8_wgmma

            by_groups = fp8_wgmma.plan(
                rows=rows,
                out_dtype=out_dtype,
                tokens=self.tokens,
                columns=self.columns,
                cluster=self.cluster,
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
    fewest CTAs in a cluster."""
    able = [one for one in tactics(arch) if one.tokens < MANY or shape.usual_rows > MANY // 4]
    return min(able, key=lambda one: (one.clocks(shape, sms), one.tokens, -one.columns, one.cluster))
