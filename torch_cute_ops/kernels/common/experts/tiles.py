"""Running sums over the lanes of a warp, and over the threads of a CTA. Find the expert that owns a number: each of
``MAX_EXPERTS`` experts owns those from its start, in a table in shared memory, up to the next one's. Tiles of the GEMMs
of many experts, and the order in which CTAs take them, found on the device from offsets and counts."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, raster_tile
from torch_cute_ops.kernels.common.core.layouts import RASTER_WIDTH
from torch_cute_ops.kernels.common.fp8.layouts import Arguments, ExpertLayout
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

# scan
#
# Running sums over the lanes of a warp, and over the threads of a CTA.

WARP = 32


def running_sum(value: Int32, lane: Int32) -> Int32:
    """The sum of ``value`` over this lane and those below it; all lanes take part."""
    for i in range(5):
        above = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value = value + ptx.select(lane >= (1 << i), above, Int32(0))
    return value


@cute.jit
def running_sum_of_cta(value: Int32, sums: cute.Tensor, tid, warps: int):
    """The sum of ``value`` over this thread and those below it, of whole ``warps``; all threads come here.

    ``sums`` is shared memory for one number a warp, which threads may read until the CTA has met again.
    """
    lane, warp = tid % WARP, tid // WARP
    value = running_sum(value, lane)
    if lane == WARP - 1:
        sums[warp] = value
    cute.arch.sync_threads()
    for i in range_constexpr(warps - 1):
        value = value + ptx.select(warp > i, sums[i], Int32(0))
    return value


# expert search
#
# Find the expert that owns a number: each of ``MAX_EXPERTS`` experts owns those from its start, in a table in shared
# memory, up to the next one's.

SPAN = MAX_EXPERTS // WARP  # experts of a lane in the first vote


def expert_by_votes(starts: cute.Tensor, number, lane) -> Int32:
    """The last expert that starts at or before a number that is the same for the whole warp: two loads."""
    votes = cute.arch.vote_ballot_sync(starts[lane * SPAN] <= number)
    span = (Int32(cute.arch.popc(votes)) - 1) * SPAN
    within = starts[span + lane % SPAN] <= number
    votes = cute.arch.vote_ballot_sync(within & (lane < SPAN))
    return span + Int32(cute.arch.popc(votes)) - 1


def expert_by_bisection(starts: cute.Tensor, number) -> Int32:
    """The same for a number of each thread's own: nine loads, one after the other."""
    expert = Int32(0)
    step = MAX_EXPERTS // 2
    while step:
        expert = ptx.select(starts[expert + step] <= number, expert + step, expert)
        step //= 2
    return expert


# expert tiles
#
# Tiles of the GEMMs of many experts, and the order in which CTAs take them, found on the device from offsets and
# counts.
#
# A tile is ``tokens`` rows of one expert by ``columns`` rows of its weight. Tiles are numbered expert by expert; an
# expert without rows has none. CTA ``i`` of ``n`` takes the tiles ``i``, ``i + n``, ``i + 2n``, and so on. Those of
# an expert are in the order of ``raster_tile``.
#
# A table in shared memory holds what each expert begins with; a warp finds the expert of a tile in it by two votes.


class Views(NamedTuple):
    """The tensors of a call as matrices over all experts.

    Attributes:
        a: (R, K).
        b: (N, K, E).
        a_scale: (blocks, R).
        b_scale: (⌈N / 128⌉, blocks, E).
        out: (R, N).
        space: rows of the buffer; in the masked layout those that an expert has room for.
    """

    a: cute.Tensor
    b: cute.Tensor
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    out: cute.Tensor
    space: Int32


class _Table(NamedTuple):
    """For each expert: the row tiles before its own, its first row and its number of rows; and scratch for a sum per
    warp."""

    firsts: cute.Tensor
    begins: cute.Tensor
    counts: cute.Tensor
    totals: cute.Tensor


class ExpertTiles:
    """Tiles of ``tokens`` rows and ``columns`` columns."""

    raster: ClassVar = RASTER_WIDTH
    """Tiles of rows that run side by side."""

    def __init__(self, rows: ExpertLayout, tokens: int, columns: int):
        self.rows, self.tokens, self.columns = rows, tokens, columns

    def arguments(self, epilogue: EpilogueOps) -> Arguments:
        """The arguments of a kernel that works on these tiles."""
        n, k, blocks = Dim("n", divisibility=8), Dim("k", divisibility=64), Dim("blocks")
        pitch = Dim("a_scale_pitch", bits=64)
        experts, offsets = Dim("experts"), TensorArg("Int32", (Dim("offsets"),), (1,), align=4)
        fp8, fp32, out_dtype = "Float8E4M3FN", "Float32", epilogue.out_dtype.__name__
        if self.rows.is_masked:
            rows, of_expert = Dim("rows"), Dim("rows_of_expert", bits=64, divisibility=16)
            a = TensorArg(fp8, (experts, rows, k), (of_expert, k, 1), align=16)
            a_scale = TensorArg(fp32, (blocks, experts, rows), (pitch, rows, 1), align=4)
            out = TensorArg(out_dtype, (experts, rows, n), (Dim("out_of_expert", bits=64, divisibility=8), n, 1), 16)
        else:
            rows = Dim("rows")
            a = TensorArg(fp8, (rows, k), (k, 1), align=16)
            a_scale = TensorArg(fp32, (blocks, rows), (pitch, 1), align=4)
            out = TensorArg(out_dtype, (rows, n), (n, 1), align=16)
        b, b_scale = self.weight_arguments(n, k, blocks, None if self.rows.is_plain else experts)
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

    def weight_arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        """The weight, of each expert if there are any, and its scales."""
        columns = Dim("b_scale_rows")
        if experts is None:
            b = TensorArg("Float8E4M3FN", (k, n), (1, k), align=16)
            return b, TensorArg("Float32", (columns, blocks), (blocks, 1), align=4)
        b = TensorArg("Float8E4M3FN", (experts, n, k), (Dim("b_of_expert", bits=64, divisibility=16), k, 1), align=16)
        of_expert = Dim("b_scale_of_expert", bits=64)
        return b, TensorArg("Float32", (experts, columns, blocks), (of_expert, blocks, 1), align=4)

    # On the host

    def views(self, a, b, a_scale, b_scale, out) -> Views:
        """The tensors of a call as matrices over all experts. In the masked layout the experts' parts of a buffer
        follow each other."""
        if self.rows.is_masked:
            space = a.shape[1]
            count = a.shape[0] * space
            k, n = a.shape[2], out.shape[2]
        else:
            space = count = a.shape[0]
            k, n = a.shape[1], out.shape[1]
        weight, weight_scale = self.weight_views(b, b_scale)
        return Views(
            a=cute.make_tensor(a.iterator, cute.make_layout((count, k), stride=(k, 1))),
            b=weight,
            a_scale=cute.make_tensor(
                a_scale.iterator, cute.make_layout((a_scale.shape[0], count), stride=(a_scale.stride[0], 1))
            ),
            b_scale=weight_scale,
            out=cute.make_tensor(out.iterator, cute.make_layout((count, n), stride=(n, 1))),
            space=space,
        )

    def weight_views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        """The weight and its scales as matrices over all experts: (N, K, E) and (⌈N / 128⌉, blocks, E)."""
        plain = self.rows.is_plain
        return by_expert(b, plain, is_transposed=True), by_expert(b_scale, plain)

    def ctas(self, given: Arguments, cluster: int = 1):
        """CTAs of a launch: ``cluster`` for each tile that there may be, ``max_ctas`` at most, and none where the
        result overlaps an operand.

        The host does not know how many rows each expert has; at most one tile of each is not full.
        """
        *rest, space, n = given.out.shape
        if self.rows.is_masked:
            (experts,) = rest
            tiles = experts * cute.ceil_div(space, self.tokens)
        elif self.rows.is_plain:
            tiles = cute.ceil_div(space, self.tokens)
        else:
            tiles = space // self.tokens + cutlass.min(given.b.shape[0], space)
        tiles = tiles * cute.ceil_div(n, self.columns)
        ctas = cutlass.min(given.max_ctas // cluster, tiles) * cluster
        return ctas_unless_overlapping(ctas, (given.out,), given[: Arguments._fields.index("out")])

    # In the kernel

    def _table(self, base: cute.Pointer) -> _Table:
        at, size = cute.recast_ptr(base, dtype=Int32), MAX_EXPERTS + 4
        sizes = (size, size, size, WARP)
        return _Table(*(cute.make_tensor(at + i * size, cute.make_layout(n)) for i, n in enumerate(sizes)))

    @cute.jit
    def prepare(self, offsets, counts, experts, space, base, tid, threads: int):
        """Write the table. All ``threads`` of the CTA call this, which ends with a barrier."""
        if const_expr(not self.rows.is_plain):
            table = self._table(base)
            each = -(-MAX_EXPERTS // threads)
            tiles = cute.make_rmem_tensor((each,), Int32)
            own = Int32(0)
            for i in range_constexpr(each):
                expert = tid * each + i
                begin, count = Int32(0), Int32(0)
                if expert < experts:
                    if const_expr(self.rows.has_offsets):
                        begin = offsets[expert]
                        count = counts[expert] if const_expr(self.rows.has_counts) else offsets[expert + 1] - begin
                        count = cutlass.min(count, space - begin)
                    else:
                        begin = expert * space
                        count = cutlass.min(counts[expert], space)
                count = cutlass.max(count, Int32(0))
                if expert < MAX_EXPERTS:
                    table.begins[expert] = begin
                    table.counts[expert] = count
                tiles[i] = cute.ceil_div(count, self.tokens)
                own += tiles[i]
            first = running_sum_of_cta(own, table.totals, tid, threads // WARP) - own
            for i in range_constexpr(each):
                if tid * each + i < MAX_EXPERTS:
                    table.firsts[tid * each + i] = first
                first = first + tiles[i]
            if tid == threads - 1:
                table.firsts[MAX_EXPERTS] = first
        cute.arch.sync_threads()

    def count(self, m, n, base):
        """How many tiles there are."""
        columns = cute.ceil_div(n, self.columns)
        if const_expr(self.rows.is_plain):
            return cute.ceil_div(m, self.tokens) * columns
        return self._table(base).firsts[MAX_EXPERTS] * columns

    @cute.jit
    def find(self, number, m, n, base, lane):
        """Tile ``number``: its expert, its first row, how many rows the expert has from there on, and its first column.
        All lanes of a warp call this together."""
        columns = cute.ceil_div(n, self.columns)
        expert, begin, count, first = Int32(0), Int32(0), m, Int32(0)
        if const_expr(not self.rows.is_plain):
            table = self._table(base)
            # Experts without rows start at the same tile as the one after them, and come before it.
            expert = expert_by_votes(table.firsts, number // columns, lane)
            begin, count, first = table.begins[expert], table.counts[expert], table.firsts[expert]
        token_tiles = cute.ceil_div(count, self.tokens)
        column_tile, token_tile = raster_tile(number - first * columns, columns, token_tiles, self.raster)
        skipped = token_tile * self.tokens
        return expert, begin + skipped, count - skipped, column_tile * self.columns


def by_expert(matrix: cute.Tensor, is_plain: bool, is_transposed: bool = False) -> cute.Tensor:
    """(E, rows, columns), or plain (rows, columns) or ``is_transposed`` that, as (rows, columns, E); columns are
    contiguous."""
    if not is_plain:
        experts, rows, columns = matrix.shape
        shape, stride = (rows, columns, experts), (matrix.stride[1], 1, matrix.stride[0])
    elif is_transposed:
        shape, stride = (matrix.shape[1], matrix.shape[0], 1), (matrix.stride[1], 1, 0)
    else:
        shape, stride = (*matrix.shape, 1), (matrix.stride[0], 1, 0)
    return cute.make_tensor(matrix.iterator, cute.make_layout(shape, stride=stride))


class ExpertTilesKernel:
    """Base of the kernels whose CTAs take such tiles: built from a ``Config`` with ``rows`` and an ``epilogue``."""

    def __init__(self, config: Any, tokens: int, columns: int, tiles: Callable[..., ExpertTiles] = ExpertTiles):
        self.config = config
        self.epilogue = EpilogueOps(config.epilogue)
        self.tiles = tiles(config.rows, tokens, columns)

    def arguments(self) -> Arguments:
        return self.tiles.arguments(self.epilogue)
