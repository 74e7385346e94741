"""The device code; the package's docstring describes the roles and the data path."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP, WGMMA_M
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.common.core.pipeline import next_stage
from torch_cute_ops.kernels.common.experts.tiles import ExpertTiles
from torch_cute_ops.kernels.common.fp8.fp8_tiles_kernel import FP8TilesKernel, Smem, Tile
from torch_cute_ops.kernels.common.fp8.layouts import (
    BLOCK,
    GROUPS,
    STORE_TILE_BYTES,
)
from torch_cute_ops.kernels.common.fp8.row_stores import store_columns, store_rows
from torch_cute_ops.kernels.fp8_wgmma.config import Config

STEP = 32  # elements of k of an MMA


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        tid: index of the thread in its CTA.
        lane, quad: index in the warp, and among the four lanes that share a row.
        first: the first of the warp's 16 rows of the M side.
        row: the first of the thread's two rows; the other is ``row + 8``.
        token: the first of its rows of ``a`` in a swapped tile.
        stores: the warp's part of shared memory for assembling lines.
    """

    tid: Int32
    lane: Int32
    quad: Int32
    first: Int32
    row: Int32
    token: Int32
    stores: cute.Pointer


class Kept(NamedTuple):
    """The tile whose sums are yet to be stored: its first row, its rows from there on, first column, and expert."""

    row: Int32
    rows: Int32
    column: Int32
    expert: Int32


class FP8WgmmaKernel(FP8TilesKernel):
    """The kernel of one ``Config``."""

    parts: ClassVar = 1
    """Parts of a K block that have accumulators of their own."""
    m_source: ClassVar = warpgroup.OperandSource.SMEM
    """Where the M side of the MMAs is."""

    def __init__(self, config: Config, tiles: Callable[..., ExpertTiles] = ExpertTiles):
        super().__init__(config, config.tokens * config.row_ctas, config.columns, tiles)

    def _weight_layout(self, stages: int):
        return self._activations_layout(self.config.columns, stages)

    def _weight_stages(self, smem: Smem) -> cute.Tensor:
        return self._activations(smem.columns, self.config.columns, self.config.stages)

    def _weight_at(self, smem: Smem) -> cute.Pointer:
        """Where the MMAs read the weight."""
        return smem.columns

    def _load_scales(self, block, tile: Tile, lane, share) -> tuple:
        """Those of the rows, 32 at a time, and that of the columns."""
        return self._token_scales(block, tile, lane, share), share.b_scale[tile.column // BLOCK, block, tile.expert]

    @cute.jit
    def _store_scales(self, loaded, begun, is_last, place, lane, share, smem):
        scales = self._scales(place, smem)
        self._store_token_scales(scales, loaded[0], lane)
        if lane == 0:
            scales[self.config.tokens] = loaded[1]

    # MMAs

    @cute.jit
    def _consume(self, tid, share, smem):
        """A consumer warpgroup: its 64 rows of the M side of each of the CTA's tiles, beside all of the N side or a
        part."""
        c = self.config
        group, lane = cute.arch.make_warp_uniform(tid // WARPGROUP), tid % 32
        first, token = tid // 32 * 16, Int32(0)
        if const_expr(c.token_parts > 1):
            first, token = tid % WARPGROUP // 32 * 16, group * c.mma_columns
        base = smem.stores + cute.assume(tid // 32 * STORE_TILE_BYTES, divby=16)
        consumer = Consumer(tid, lane, lane % 4, first, first + lane // 4, token, base)
        multiply = self._mma(group, smem)
        size = c.mma_columns // 2
        sums = cute.make_rmem_tensor((size,), Float32)
        partials = [cute.make_rmem_tensor((size * self.parts,), Float32) for _ in range(c.together)]
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        # There is none at first.
        kept = Kept(Int32(0), Int32(0), Int32(0), Int32(0))
        self._meet_cluster()
        for number in range(share.first, share.count, share.workers):
            row, rows, column, expert = self._await_tile(number, stage, parity, lane, share, smem)
            exists = True if const_expr(c.is_swapped) else rows > group * WGMMA_M
            is_last = number + share.workers >= share.count
            if exists:
                # In swapped tiles, alpha and bias are loaded before the MMAs, which hide the latency.
                finish = self._finish(column, expert, consumer, share) if const_expr(c.is_swapped) else None
                stage, parity = self._multiply_tile(
                    multiply, sums, partials, kept, stage, parity, consumer, share, smem
                )
                if const_expr(not c.is_swapped):
                    if const_expr(c.splits > 1):
                        # The other CTA stores the other warpgroup's.
                        rows = ptx.select(share.rank == group, rows, Int32(0))
                    kept = Kept(row, rows, column, expert)
                elif const_expr(c.splits > 1):
                    self._add_up(sums, finish, row, rows, column, turn, is_last, consumer, share, smem)
                else:
                    before = consumer.token
                    store_columns(sums, share.out, row + before, rows - before, column + consumer.first, lane, finish)
            else:
                # None of its rows exists.
                for _ in cutlass.range(share.end - share.begin, unroll=1):
                    ptx.wait(smem.full + stage, parity)
                    self._free(stage, lane, smem)
                    stage, parity = next_stage(stage, parity, c.stages)
            if const_expr(c.splits > 1):
                if const_expr(not c.is_swapped):
                    self._exchange(sums, exists, group, turn, is_last, consumer, share, smem)
                turn = turn ^ 1
        if const_expr(not c.is_swapped):
            self._store_kept(sums, kept, consumer, share)
        if const_expr(c.pdl):
            if const_expr(c.waits_last):
                cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _multiply_tile(
        self, multiply, sums, partials: list, kept, stage, parity, consumer, share, smem, prepares: bool = True
    ):
        """Sum the CTA's K blocks of a tile, of which the first has arrived.

        With rows of ``a`` on the M side, ``sums`` still hold those of the tile ``kept``, which are stored meanwhile.
        ``prepares``: whether ``_prepare`` has something to do.

        Returns the next stage, and its parity.
        """
        c = self.config
        count = share.end - share.begin
        if const_expr(c.is_swapped):
            sums.fill(0.0)
        else:
            if count >= c.together:
                count = count - c.together
                store = functools.partial(self._store_kept, sums, kept, consumer, share)
                stage, parity = self._add_blocks(
                    multiply, sums, partials, count, stage, parity, consumer, smem, store, prepares
                )
            else:
                self._store_kept(sums, kept, consumer, share)
        if const_expr(c.unrolls):
            # The rest of a round of the ring that the tile before has begun, whole rounds, and what is left
            begun = cutlass.min((c.stages - stage) % c.stages, count)
            stage, parity = self._add_some(
                multiply, sums, partials, begun, count - begun, stage, parity, consumer, smem, prepares
            )
            for rest in cutlass.range(count - begun - c.stages, -1, -c.stages, unroll=1):
                for place in range_constexpr(0, c.stages, c.together):
                    follow = rest + (c.stages - c.together - place)
                    _, parity = self._add_blocks(
                        multiply, sums, partials, follow, place, parity, consumer, smem, prepares=prepares
                    )
            count = (count - begun) % c.stages
        return self._add_some(multiply, sums, partials, count, 0, stage, parity, consumer, smem, prepares)

    @cute.jit
    def _add_some(
        self, multiply, sums, partials: list, count, follow, stage, parity, consumer, smem, prepares: bool = True
    ):
        """Add ``count`` blocks of a tile, after which ``follow`` blocks of it are left. Returns the next stage, and its
        parity."""
        together = self.config.together
        for rest in cutlass.range(count - together, -1, -together, unroll=1):
            stage, parity = self._add_blocks(
                multiply, sums, partials, rest + follow, stage, parity, consumer, smem, prepares=prepares
            )
        for _ in cutlass.range(count % together, unroll=1):
            stage, parity = self._add_blocks(
                multiply, sums, partials[:1], follow, stage, parity, consumer, smem, prepares=prepares
            )
        return stage, parity

    def _store_kept(self, sums, kept, consumer, share) -> None:
        """Store the sums of a tile, and clear them."""
        store_rows(
            sums,
            share.out,
            consumer.stores,
            kept.row + consumer.first,
            kept.rows - consumer.first,
            kept.column,
            consumer.lane,
            self._epilogue(kept.expert, share),
        )
        sums.fill(0.0)

    def _add_blocks(
        self,
        multiply,
        sums,
        partials: list,
        follow,
        stage,
        parity,
        consumer,
        smem,
        meanwhile=None,
        prepares: bool = True,
    ) -> tuple:
        """Multiply as many blocks as there are ``partials``, of which the first has arrived, and add their sums to the
        totals: the first block's while the MMAs of the others run. ``meanwhile``, if given, is called when all of them
        have been started. Returns the next stage, and its parity.

        While a consumer adds its last block, the tensor cores have only the other consumer's MMAs. So everything else
        is done before its own end: scales are read, and the first of the blocks that ``follow`` is waited for.
        """
        c = self.config
        reads = []
        for i, partial in enumerate(partials):
            if i > 0:
                ptx.wait(smem.full + stage, parity)
            multiply(stage, partial)
            reads.append(stage)
            stage, parity = next_stage(stage, parity, c.stages)
        if meanwhile is not None:
            meanwhile()
        for i, partial in enumerate(partials):
            later = len(partials) - 1 - i
            factors = self._factors(reads[i], consumer, smem)
            flags = self._read_flags(reads[i], consumer, smem) if prepares else None
            if later == 0:
                self._wait_if(follow > 0, smem.full + stage, parity)
            warpgroup.wait_group(later)
            if prepares:
                self._prepare(sums, partial, flags, reads[i], consumer, smem)
            self._free(reads[i], consumer.lane, smem)
            self._promote(sums, partial, factors)
        return stage, parity

    def _tiled_mma(self) -> cute.TiledMma:
        """A k32 step of a consumer's MMAs: a new object for each place that sets whether it accumulates, which the DSL
        knows only in that scope."""
        shape = WGMMA_M, self.config.mma_columns, STEP
        sources = self.m_source, OperandMajorMode.K, OperandMajorMode.K
        return cute.make_tiled_mma(warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, shape, *sources))

    def _mma(self, group, smem):
        """The function that starts a consumer's MMAs of a stage."""
        c = self.config
        weight = self._weight_at(smem)
        rows, columns = (weight, smem.tokens) if c.is_swapped else (smem.tokens, weight)
        # The rows of the second consumer follow those of the first; or both have the same, and parts of the other side.
        parts = c.token_parts
        m_side = self._activations(rows, WGMMA_M, c.stages * GROUPS // parts)
        n_side = self._activations(columns, c.mma_columns, c.stages * parts)
        mma = self._tiled_mma()
        thread = mma.get_slice(0)
        m_operand = mma.make_fragment_A(thread.partition_A(m_side))
        n_operand = mma.make_fragment_B(thread.partition_B(n_side))

        def multiply(stage, partial) -> None:
            mma = self._tiled_mma()
            shape = mma.partition_shape_C((WGMMA_M, c.mma_columns))
            accumulators = cute.make_tensor(partial.iterator, shape)
            warpgroup.fence()
            for step in range(BLOCK // STEP):
                mma.set(warpgroup.Field.ACCUMULATE, step > 0)
                cute.gemm(
                    mma,
                    accumulators,
                    m_operand[None, None, step, stage * (GROUPS // parts) + (group if parts == 1 else 0)],
                    n_operand[None, None, step, stage * parts + (0 if parts == 1 else group)],
                    accumulators,
                )
            warpgroup.commit_group()

        return multiply

    def _factors(self, stage, consumer, smem) -> Any:
        """The products of both scales for a lane's sums: of its rows, or in swapped tiles of its columns."""
        c, scales = self.config, self._scales(stage, smem)
        if c.is_swapped:
            first = consumer.token + consumer.quad * 2
            places = [first + 8 * i + e for i in range(c.mma_columns // 8) for e in range(2)]
        else:
            places = [consumer.row, consumer.row + 8]
        of_columns = scales[c.tokens]
        return [ptx.mul_rn(scales[place], of_columns) for place in places]

    def _pair(self, values: cute.Tensor, group: int, consumer) -> list:
        """The values of a lane's columns in a group of eight."""
        at = values.iterator + cute.assume(8 * group + consumer.quad * 2, divby=2)
        words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
        return [ptx.float_of(word) for word in words]

    def _token_scales_of(self, values: cute.Tensor, consumer) -> list:
        """The values of a lane's rows of ``a`` in a swapped tile."""
        own = cute.make_tensor(values.iterator + cute.assume(consumer.token, divby=2), values.layout)
        return [one for group in range(self.config.mma_columns // 8) for one in self._pair(own, group, consumer)]

    def _read_flags(self, stage, consumer, smem) -> Any:
        """What tells ``_prepare`` what to do; read while the MMAs run."""

    def _prepare(self, sums, partial, flags, stage, consumer, smem) -> None:
        """What has to be done before a K block's sums are added to the totals."""

    def _promote(self, sums, partial, factors: Any) -> None:
        """Add a block's sums, times the factors, to the totals."""
        for i in range(self.config.mma_columns // 2):
            which = i // 4 * 2 + i % 2 if self.config.is_swapped else i // 2 % 2
            sums[i] = ptx.fma_rn(factors[which], partial[i], sums[i])
