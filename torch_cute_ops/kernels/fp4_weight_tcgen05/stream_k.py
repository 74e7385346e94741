"""Stream-K: division of the k tiles of all n tiles among CTAs, and partial sums in the workspace.

An *iteration* is one k tile of one n tile, for all rows of ``a``. The iterations are numbered n tile by n tile. Each
CTA computes a contiguous range of iterations. The lengths of the ranges differ by at most one. If a range begins or
ends inside an n tile, the CTA stores partial sums of this n tile in the workspace. A second kernel adds up the partial
sums of an n tile in the order of k. So a row's result depends only on N, K and the number of CTAs: not on the order in
which CTAs run, and not on other rows.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.fp4_weight_tcgen05.config import SLOTS

COLUMNS = 4
"""Number of neighbouring columns of the result that a thread of the second kernel computes."""
ROWS = 4
"""Number of rows of the result that a CTA of the second kernel computes, one in each warp."""


class WorkTile(NamedTuple):
    """Output tile for which the CTA multiplies some or all k tiles.

    Attributes:
        expert, row, rows, column: fields of ``Tile``.
        slot: index of the slot for partial sums, or -1 if the CTA multiplies all k tiles.
    """

    expert: Int32
    row: Int32
    rows: Int32
    column: Int32
    slot: Int32


class Ranges(NamedTuple):
    """Division of the iterations among CTAs.

    Attributes:
        n_tiles, k_tiles: number of n tiles, and number of k tiles of an n tile.
        ctas: number of CTAs, at most the number of iterations.
    """

    n_tiles: Int32
    k_tiles: Int32
    ctas: Int32

    @property
    def iterations(self) -> Int64:
        """Number of iterations."""
        return Int64(self.n_tiles) * self.k_tiles

    def begin(self, cta) -> Int64:
        """Return the first iteration of a CTA, which is also the end of the previous CTA's range."""
        return cta * self.iterations // self.ctas

    def cta_of(self, iteration) -> Int32:
        """Return the CTA that computes an iteration."""
        return Int32(((iteration + 1) * self.ctas - 1) // self.iterations)


def slots_of(workspace: cute.Tensor, m, ctas) -> cute.Tensor:
    """Return the workspace as partial sums: (rows, columns of an n tile, slots) fp32. A CTA has two slots. The first
    slot holds partial sums of an n tile whose first k tile another CTA multiplies. The second slot holds partial sums
    that include the n tile's first k tile."""
    layout = cute.make_layout((m, MMA_M, SLOTS * ctas), stride=(MMA_M, 1, Int64(m) * MMA_M))
    return cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=Float32), layout)


def load_sums(slots: cute.Tensor, row, column, slot) -> list:
    """Load the partial sums of ``COLUMNS`` neighbouring columns."""
    at = slots.iterator + cute.assume(cute.crd2idx((row, column, slot), slots.layout), divby=COLUMNS)
    words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(COLUMNS)))
    return [ptx.float_of(word) for word in words]
