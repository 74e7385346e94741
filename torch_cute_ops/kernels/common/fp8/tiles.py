"""Output tiles of the FP8 GEMMs over experts, which the device finds from offsets and counts.

A tile is ``tile_m`` rows of one expert by ``tile_n`` rows of the expert's weight. The tiles of the first expert have
the lowest numbers, and are followed by the tiles of the next expert. An expert without rows owns no tiles. The tiles of
one expert are numbered in raster order (``core.launch.raster_tile``). CTA ``i`` of ``n`` computes tiles ``i``, ``i +
n``, ``i + 2n``, and so on. A warp finds the expert of a tile by two votes over a table in shared memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, raster_tile
from torch_cute_ops.kernels.common.core.layouts import RASTER_WIDTH
from torch_cute_ops.kernels.common.experts.search import WARP, expert_by_votes, running_sum_of_cta
from torch_cute_ops.kernels.common.fp8.layouts import Arguments, ExpertLayout
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class Tile(NamedTuple):
    """An output tile.

    Attributes:
        expert: index of the expert.
        row, column: first row and column of the tile.
        rows: number of rows that the expert owns from ``row`` to its last row. It is zero or negative if the tile
            begins after the expert's last row. (If the CTAs of a cluster share a tile, later CTAs may own no rows.)
    """

    expert: Int32
    row: Int32
    rows: Int32
    column: Int32


class Views(NamedTuple):
    """Tensors of a call, as matrices that concatenate all experts.

    Attributes:
        a: activations (R, K).
        b: weight (N, K, E).
        a_scale: block scales (blocks, R), or per-token scales (R, 1).
        b_scale: block scales (⌈N / 128⌉, blocks, E) or (N, blocks, E), or None if ``alpha`` contains the weight's
            scales.
        out: result (R, N).
        space: number of rows of the buffer, or number of rows per expert in the masked layout.
    """

    a: cute.Tensor
    b: cute.Tensor
    a_scale: cute.Tensor
    b_scale: cute.Tensor | None
    out: cute.Tensor
    space: Int32


class _Table(NamedTuple):
    """Table of experts in shared memory: for each expert, the number of all earlier experts' tiles, the first row, and
    the number of rows. ``sums`` is scratch memory, one running sum per warp."""

    firsts: cute.Tensor
    begins: cute.Tensor
    counts: cute.Tensor
    sums: cute.Tensor


class ExpertTiles:
    """Output tiles of ``tile_m`` rows and ``tile_n`` columns, over all experts.

    Args:
        rows: assignment of rows to experts.
        tile_m, tile_n: numbers of rows and columns of a tile.
        weight: weight source, which defines the arguments and views of the weight and its scales.
        raster: number of tiles along M that are computed at the same time and share the weight in L2 (``core.launch``).
        by_token: True if ``a`` has per-token scales, False if it has block scales.
    """

    def __init__(
        self, rows: ExpertLayout, tile_m: int, tile_n: int, weight, raster: int = RASTER_WIDTH, by_token: bool = False
    ):
        self.rows, self.tile_m, self.tile_n, self.weight, self.raster = rows, tile_m, tile_n, weight, raster
        self.by_token = by_token

    # On the host

    def arguments(self, epilogue: EpilogueOps) -> Arguments:
        """Return descriptions of the arguments of a kernel that computes these tiles."""
        n, k, blocks = Dim("n", divisibility=8), Dim("k", divisibility=64), Dim("blocks")
        pitch = Dim("a_scale_pitch", bits=64)
        experts, offsets = Dim("experts"), TensorArg("Int32", (Dim("offsets"),), (1,), align=4)
        fp8, fp32, out_dtype = "Float8E4M3FN", "Float32", epilogue.out_dtype.__name__
        if self.rows.is_masked:
            rows, of_expert = Dim("rows"), Dim("rows_of_expert", bits=64, divisibility=16)
            a = TensorArg(fp8, (experts, rows, k), (of_expert, k, 1), align=16)
            # This stride always equals ``rows``, which has 32 bits, but is declared with 64 bits. The DSL (4.8.1)
            # passes wrong values if a 64-bit stride follows a 32-bit stride: in the code that it generates, the caller
            # writes a flat struct, but the callee reads nested structs.
            a_scale_of_expert = Dim("a_scale_of_expert", bits=64)
            a_scale = TensorArg(fp32, (experts, rows, blocks), (a_scale_of_expert, 1, pitch), align=4)
            out = TensorArg(out_dtype, (experts, rows, n), (Dim("out_of_expert", bits=64, divisibility=8), n, 1), 16)
        else:
            rows = Dim("rows")
            a = TensorArg(fp8, (rows, k), (k, 1), align=16)
            a_scale = TensorArg(fp32, (rows, blocks), (1, pitch), align=4)
            out = TensorArg(out_dtype, (rows, n), (n, 1), align=16)
        if self.by_token:
            # Per-token scales of a masked buffer are one column that contains the rows of all experts.
            count = Dim("all_rows") if self.rows.is_masked else rows
            a_scale = TensorArg(fp32, (count, 1), (Dim("a_scale_stride"), 1), align=4)
        b, b_scale = self.weight.arguments(n, k, blocks, None if self.rows.is_plain else experts)
        alpha, bias = epilogue.arguments(n, None if self.rows.is_plain else experts)
        return Arguments(
            a=a,
            b=b,
            a_scale=a_scale,
            b_scale=b_scale,
            offsets=offsets if self.rows.has_offsets else None,
            counts=TensorArg("Int32", (experts,), (1,), align=4) if self.rows.has_counts else None,
            alpha=alpha,
            bias=bias,
            out=out,
            prefetch=None,
            max_ctas=ScalarArg("Int32"),
        )

    def views(self, given: Arguments) -> Views:
        """Return the tensors of a call as matrices that concatenate all experts."""
        a, a_scale, out = given.a, given.a_scale, given.out
        if self.rows.is_masked:
            space = a.shape[1]
            count = a.shape[0] * space
            k, n, scale_dim = a.shape[2], out.shape[2], 2
        else:
            space = count = a.shape[0]
            k, n, scale_dim = a.shape[1], out.shape[1], 1
        b, b_scale = self.weight.views(given.b, given.b_scale)
        return Views(
            a=cute.make_tensor(a.iterator, cute.make_layout((count, k), stride=(k, 1))),
            b=b,
            a_scale=a_scale
            if self.by_token
            else cute.make_tensor(
                a_scale.iterator,
                cute.make_layout((a_scale.shape[scale_dim], count), stride=(a_scale.stride[scale_dim], 1)),
            ),
            b_scale=b_scale,
            out=cute.make_tensor(out.iterator, cute.make_layout((count, n), stride=(n, 1))),
            space=space,
        )

    def ctas(self, given: Arguments, cluster: int = 1):
        """Return the number of CTAs of a launch, or 0 to refuse the launch if the result overlaps an operand.

        The launch uses ``cluster`` CTAs per tile, but at most ``max_ctas``. The host does not know how many rows each
        expert owns, so it computes an upper bound on the number of tiles: at most one tile of each expert is not full.
        """
        *rest, space, n = given.out.shape
        if self.rows.is_masked:
            (experts,) = rest
            tiles = experts * cute.ceil_div(space, self.tile_m)
        elif self.rows.is_plain:
            tiles = cute.ceil_div(space, self.tile_m)
        else:
            tiles = space // self.tile_m + cutlass.min(given.b.shape[0], space)
        tiles = tiles * cute.ceil_div(n, self.tile_n)
        ctas = cutlass.min(given.max_ctas // cluster, tiles) * cluster
        return ctas_unless_overlapping(ctas, (given.out,), given[: Arguments._fields.index("out")])

    # In the kernel

    def _table(self, base: cute.Pointer) -> _Table:
        at, size = cute.recast_ptr(base, dtype=Int32), self.rows.max_experts + 4
        sizes = (size, size, size, WARP)
        return _Table(*(cute.make_tensor(at + i * size, cute.make_layout(n)) for i, n in enumerate(sizes)))

    @cute.jit
    def prepare(self, offsets, counts, experts, space, base, tid, threads: int):
        """Write the table of experts, and synchronise the CTA. All ``threads`` threads of the CTA call this method."""
        if const_expr(not self.rows.is_plain):
            table = self._table(base)
            each = -(-self.rows.max_experts // threads)
            tiles = cute.make_rmem_tensor((each,), Int32)
            own = Int32(0)
            for i in range_constexpr(each):
                expert = tid * each + i
                begin, count = Int32(0), Int32(0)
                if expert < experts:
                    if const_expr(self.rows.has_offsets):
                        # Clamp offsets and counts, so that wrong values cause a wrong result but no access out of
                        # bounds.
                        begin = cutlass.max(offsets[expert], Int32(0))
                        count = counts[expert] if const_expr(self.rows.has_counts) else offsets[expert + 1] - begin
                        count = cutlass.min(count, space - begin)
                    else:
                        begin = expert * space
                        count = cutlass.min(counts[expert], space)
                count = cutlass.max(count, Int32(0))
                if expert < self.rows.max_experts:
                    table.begins[expert] = begin
                    table.counts[expert] = count
                tiles[i] = cute.ceil_div(count, self.tile_m)
                own += tiles[i]
            first = running_sum_of_cta(own, table.sums, tid, threads // WARP) - own
            for i in range_constexpr(each):
                if tid * each + i < self.rows.max_experts:
                    table.firsts[tid * each + i] = first
                first = first + tiles[i]
            if tid == threads - 1:
                table.firsts[self.rows.max_experts] = first
        cute.arch.sync_threads()

    def count(self, m, n, base):
        """Return the number of tiles of all experts."""
        columns = cute.ceil_div(n, self.tile_n)
        if const_expr(self.rows.is_plain):
            return cute.ceil_div(m, self.tile_m) * columns
        return self._table(base).firsts[self.rows.max_experts] * columns

    @cute.jit
    def find(self, number, m, n, base, lane):
        """Return the fields of ``Tile`` for tile ``number``. All lanes of a warp call this method together."""
        columns = cute.ceil_div(n, self.tile_n)
        expert, begin, count, first = Int32(0), Int32(0), m, Int32(0)
        if const_expr(not self.rows.is_plain):
            table = self._table(base)
            # An expert without rows has the same first tile as the next expert. The votes choose the last of these
            # experts.
            expert = expert_by_votes(table.firsts, number // columns, lane, self.rows.max_experts)
            begin, count, first = table.begins[expert], table.counts[expert], table.firsts[expert]
        row_tiles = cute.ceil_div(count, self.tile_m)
        column_tile, row_tile = raster_tile(number - first * columns, columns, row_tiles, self.raster)
        skipped = row_tile * self.tile_m
        return expert, begin + skipped, count - skipped, column_tile * self.tile_n


def by_expert(matrix: cute.Tensor, is_transposed: bool = False) -> cute.Tensor:
    """View a matrix as (rows, columns, E) with contiguous columns.

    Args:
        matrix: (rows, columns) or (E, rows, columns); if transposed, (columns, rows) or (E, columns, rows).
        is_transposed: True if the matrix is transposed.
    """
    *experts, rows, columns = matrix.shape
    *of_expert, of_row, _ = matrix.stride
    if is_transposed:
        rows, columns, of_row = columns, rows, matrix.stride[-1]
    shape, stride = (rows, columns, *(experts or [1])), (of_row, 1, *(of_expert or [0]))
    return cute.make_tensor(matrix.iterator, cute.make_layout(shape, stride=stride))
