"""The device code; the package's docstring describes the roles and the data path."""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import load_words, store_words
from torch_cute_ops.kernels.common.fp8_stages import BLOCK
from torch_cute_ops.kernels.common.fp8_tiles_kernel import FP8TilesKernel, Smem, Tile
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.row_stores import store_columns
from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS, WARPGROUP
from torch_cute_ops.kernels.common.weight_ring import PIECE, next_stage
from torch_cute_ops.kernels.fp8_fp4_wgmma.config import WARP_ROWS, Config
from torch_cute_ops.kernels.fp8_fp4_wgmma.tables import Blocks, Exponents, look_up
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights import FP4ExpertTiles

STEP = 32  # elements of k of an MMA
STEPS = BLOCK // STEP
UNIT = 16  # elements of k of which a lane has four
UNITS = BLOCK // UNIT
WORDS = STEPS * 4  # of a lane's operand in a K block


class Consumer(NamedTuple):
    """A thread of a consumer warpgroup.

    Attributes:
        tid: index of the thread in its CTA.
        lane, quad: index in the warp, and among the four lanes that share a row.
        first: the first of the warp's 16 rows of the weight in the tile.
        row: the first of the thread's two rows; the other is ``row + 8``.
        tables: those of the warp's rows.
    """

    tid: Int32
    lane: Int32
    quad: Int32
    first: Int32
    row: Int32
    tables: cute.Pointer


class FP8FP4WgmmaKernel(FP8TilesKernel):
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        super().__init__(config, config.columns, functools.partial(FP4ExpertTiles, config.fmt, config.layout))
        self.exponents = Exponents(config.fmt)

    def _weight_layout(self, stages: int):
        kinds = warpgroup.SmemLayoutAtomKind
        c = self.config
        atom = warpgroup.make_smem_layout_atom({128: kinds.K_SW128, 64: kinds.K_SW64}[c.line], Uint8)
        return cute.tile_to_shape(atom, (c.columns, c.line, stages), order=(0, 1, 2))

    def _weight_stages(self, smem: Smem) -> cute.Tensor:
        layout = self._weight_layout(self.config.stages)
        return cute.make_tensor(cute.recast_ptr(smem.columns, layout.inner, dtype=Uint8), layout.outer)

    # Scales

    def _load_scales(self, block, tile: Tile, lane, share) -> tuple:
        """Those of the rows of ``a``, 32 at a time; then the words of a lane's four rows of the weight."""
        c = self.config
        of_rows = self._token_scales(block, tile, lane, share)
        left = share.width * 2 // c.fmt.block_size - block * c.block_scales  # may be negative
        rows = [self._weight_scales(tile, lane + 32 * i, block, left, share) for i in range(c.columns // 32)]
        return of_rows, rows

    def _weight_scales(self, tile: Tile, row, block, left, share) -> list:
        """The scales of a row in a K block, four a word; zeros where there are none."""
        c, scale = self.config, share.b_scale
        column = tile.column + row
        first = block * c.block_scales
        exists = column < share.n
        if c.layout.is_linear:
            at = scale.iterator + (
                Int64(tile.expert) * scale.stride[2] + Int64(column) * scale.stride[0] + Int64(first)
            )
            if c.fmt == MXFP4:
                # Rows of scales are multiples of two bytes.
                halves = [ptx.load_narrow_if(at, exists & (2 * i < left), 2, 2 * i) for i in range(2)]
                return [halves[0] | (halves[1] << 16)]
            return [ptx.load_if(at, exists & (4 * i < left), 1, 4 * i)[0] for i in range(c.block_scales // 4)]
        of_all = Int64(tile.expert) * share.n + column
        at = scale.iterator + (c.layout.row_offset(of_all, Int64(scale.shape[1])) + c.layout.block_offset(Int64(first)))
        words = []
        for i in range(c.block_scales // 4):
            word = ptx.load_if(at, exists & (4 * i < left), 1, c.layout.block_offset(4 * i))[0]
            if c.fmt == MXFP4:
                # Padding may be anything.
                word = ptx.select(left > 2, word, word & Uint32(0xFFFF))
            words.append(word)
        return words

    @cute.jit
    def _store_scales(self, loaded, place, lane, smem):
        scales = self._scales(place, smem)
        self._store_token_scales(scales, loaded[0], lane)
        each = self.config.block_scales // 4
        for i in range_constexpr(len(loaded[1])):
            at = scales.iterator + cute.assume(self.config.tokens + (lane + 32 * i) * each, divby=each)
            store_words(loaded[1][i], cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(each)))

    # Operands

    def _blocks(self, place, consumer, smem) -> Blocks:
        """The lane's blocks in the K block there."""
        c = self.config
        each = c.block_scales // 4  # bytes that a lane has of a row
        bytes_at = cute.recast_ptr(self._scales(place, smem).iterator + c.tokens, dtype=Uint8)
        words = []
        for r in range(2):
            at = bytes_at + cute.assume((consumer.row + 8 * r) * c.block_scales + consumer.quad * each, divby=each)
            source = cute.recast_ptr(at, dtype=Uint8 if each == 1 else Uint16)
            words.append(Uint32(cute.make_tensor(source, cute.make_layout(1))[0]))
        return Blocks(words, c.fmt)

    def _store_tables(self, tables: list, consumer) -> None:
        """Store the lane's tables where the warp finds them."""
        # All lanes have read the tables of the block before.
        cute.arch.sync_warp()
        for r, row in enumerate(tables):
            store_words([word for table in row for word in table], self._tables_at(8 * r, consumer.quad, consumer))
        cute.arch.sync_warp()

    def _make_tables(self, place, units, consumer, smem):
        """Make the tables of the warp's rows in the K block there. Returns what ``_promote`` needs: 2^t of the lane's
        rows, or where totals have ``units`` the change of these."""
        blocks = self._blocks(place, consumer, smem)
        if not self.config.has_units:
            self._store_tables(blocks.tables(blocks.exponents), consumer)
            return self.exponents.powers(blocks.exponents)
        change = blocks.units(units)
        self._store_tables(blocks.tables(ptx.select(change.differ, change.exact, change.now)), consumer)
        return change

    def _tables_at(self, after: int, step, consumer) -> cute.Tensor:
        """The tables of a k32 step in the lane's row, or the eighth after it. They are permuted so that neither the
        lanes that store nor those that load have bank conflicts."""
        c = self.config
        size = c.table_line // STEPS
        row = consumer.lane // 4
        swizzle = row // 2 % 4 if const_expr(size == 16) else row // 4 % 2 * 2
        at = consumer.tables + cute.assume((row + after) * c.table_line + (step ^ swizzle) * size, divby=size)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(size // 4))

    def _decode(self, stage, block: int, steps: range, consumer, smem) -> list:
        """Some k32 steps of a lane's operand of a K block, whose tables have been made: for each four words, of both
        rows with low and then with high k."""
        c = self.config
        # The swizzle permutes pieces by the number of the 128 bytes that they are in.
        pieces = c.line // PIECE
        row = consumer.lane // 4 % 8
        swizzle = row if c.line == 128 else row // 2
        start = smem.columns + cute.assume(
            (stage * c.columns + consumer.row) * c.line + consumer.quad * 2, divby=2
        )
        words = []
        for step in steps:
            found = [load_words(self._tables_at(8 * r, step, consumer)) for r in range(2)]
            piece = ((block * STEPS + step) ^ swizzle % pieces) * PIECE
            for high in range(2):
                for r in range(2):
                    at = start + cute.assume(piece + (high * UNIT // 2 + 8 * r * c.line), divby=2)
                    codes = cute.make_tensor(cute.recast_ptr(at, dtype=Uint16), cute.make_layout(1))[0]
                    first = 2 * high if len(found[r]) == 4 else 0
                    words.append(look_up(found[r][first : first + 2], Uint32(codes)))
        return words

    # MMAs

    @cute.jit
    def _consume(self, tid, share, smem):
        c = self.config
        lane = tid % 32
        first = tid // 32 * WARP_ROWS
        consumer = Consumer(
            tid=tid,
            lane=lane,
            quad=lane % 4,
            first=first,
            row=first + lane // 4,
            tables=smem.own + cute.assume(tid // 32 * (WARP_ROWS * c.table_line), divby=PIECE),
        )
        multiply = self._mma(smem)
        sums = cute.make_rmem_tensor((c.tokens // 2,), Float32)
        partial = cute.make_rmem_tensor((c.mma_tokens // 2,), Float32)
        weights = cute.make_rmem_tensor((WORDS,), Uint32)
        factors = cute.make_rmem_tensor((4,), Uint32)
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        for number in range(share.first, share.count, share.workers):
            row, rows, column, expert = self._await_tile(number, stage, parity, lane, share, smem)
            # With few rows, alpha and bias are loaded before the MMAs, which hide the latency.
            finish = self._finish(column, expert, consumer, share) if const_expr(c.streams_weight) else None
            sums.fill(0.0)
            if share.begin < share.end:
                self._take(stage, weights, factors, consumer, smem)
            for step in cutlass.range(share.begin, share.end, unroll=1):
                stage, parity = self._add_stage(
                    multiply, sums, partial, weights, factors, step + 1 < share.end, stage, parity, consumer, smem
                )
            if const_expr(c.has_units):
                # The units before what was decoded in vain
                powers = self.exponents.powers(factors[0])
                for i in range_constexpr(c.tokens // 2):
                    sums[i] = ptx.mul_rn(sums[i], powers[i // 2 % 2])
            if const_expr(c.splits > 1):
                self._add_up(sums, finish, row, rows, column, turn, consumer, share, smem)
                turn = turn ^ 1
            else:
                if const_expr(not c.streams_weight):
                    finish = self._finish(column, expert, consumer, share)
                store_columns(sums, share.out, row, rows, column + first, lane, finish)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    def _take(self, stage, weights, factors, consumer, smem) -> None:
        """Decode the first K block of a tile, which has arrived."""
        place = stage * self.config.stage_blocks
        first = self._blocks(place, consumer, smem).first_units() if self.config.has_units else None
        self._keep(self._make_tables(place, first, consumer, smem), factors)
        for i, word in enumerate(self._decode(stage, 0, range(STEPS), consumer, smem)):
            weights[i] = word

    def _keep(self, found, factors) -> None:
        """Keep what ``_make_tables`` has returned."""
        for i, value in enumerate(found):
            factors[i] = Uint32(value) if self.config.has_units else ptx.bits_of(value)

    @cute.jit
    def _add_stage(self, multiply, sums, partial, weights, factors, follows, stage, parity, consumer, smem):
        """Add the K blocks of a stage to the totals; the first one has been decoded. While the MMAs of one run, the
        next is decoded; behind the last of a tile, where none ``follows``, that one once more, in vain. Returns the
        next stage, and its parity."""
        c = self.config
        after, after_parity = next_stage(stage, parity, c.stages)
        for block in range_constexpr(c.stage_blocks):
            place = stage * c.stage_blocks + block
            next_at, next_block = stage, block + 1
            multiply(place, 0, weights, partial)
            if const_expr(block + 1 == c.stage_blocks):
                self._wait_if(follows, smem.full + after, after_parity)
                next_at, next_block = ptx.select(follows, after, stage), 0
            found = self._make_tables(next_at * c.stage_blocks + next_block, factors[1], consumer, smem)
            words = []
            for i in range_constexpr(c.passes):
                # A part at a time: all tables together would take too many registers.
                steps = range(STEPS * i // c.passes, STEPS * (i + 1) // c.passes)
                words += self._decode(next_at, next_block, steps, consumer, smem)
                warpgroup.wait_group(0)
                self._promote(sums, partial, i, factors, place, consumer, smem)
                if const_expr(i + 1 < c.passes):
                    multiply(place, i + 1, weights, partial)
            for i in range_constexpr(WORDS):
                weights[i] = words[i]
            self._keep(found, factors)
        # Of codes that were decoded in vain, the loads may not have ended.
        fence_async()
        self._free(stage, consumer.lane, smem)
        return after, after_parity

    @cute.jit
    def _promote(self, sums, partial, part: int, factors, place, consumer, smem):
        """Add a K block's sums to the totals: times 2^t of their row of the weight, and the scale of their row of
        ``a``."""
        c = self.config
        scales = self._scales(place, smem)
        begin = part * (c.mma_tokens // 2)
        if const_expr(c.has_units):
            if factors[3] != 0:
                changes = self.exponents.ratios(factors[0], factors[1])
                ratios = self.exponents.ratios(factors[2], factors[1])
                for i in range_constexpr(c.mma_tokens // 2):
                    sums[begin + i] = ptx.mul_rn(sums[begin + i], changes[i // 2 % 2])
                    partial[i] = ptx.mul_rn(partial[i], ratios[i // 2 % 2])
        for group in range_constexpr(c.mma_tokens // 8):
            at = scales.iterator + cute.assume(part * c.mma_tokens + group * 8 + consumer.quad * 2, divby=2)
            pair = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(2)))
            for i in range_constexpr(4):
                value = partial[4 * group + i]
                if const_expr(not c.has_units):
                    value = ptx.mul_rn(value, ptx.float_of(factors[i // 2]))
                to = begin + 4 * group + i
                sums[to] = ptx.fma_rn(ptx.float_of(pair[i % 2]), value, sums[to])

    def _tiled_mma(self) -> cute.TiledMma:
        """A k32 step of a warpgroup's MMAs."""
        shape, mode = (GROUP_ROWS, self.config.mma_tokens, STEP), OperandMajorMode.K
        sources = warpgroup.OperandSource.RMEM, mode, mode
        return cute.make_tiled_mma(warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, shape, *sources))

    def _mma(self, smem) -> Any:
        """The function that starts a K block's MMAs with a part of the tokens."""
        c = self.config
        tokens = self._activations(smem.tokens, c.mma_tokens, c.stages * c.stage_blocks * c.passes)
        mma = self._tiled_mma()
        operand = mma.make_fragment_B(mma.get_slice(0).partition_B(tokens))

        def multiply(place, part: int, weights, partial) -> None:
            # A new object each time: the DSL knows whether it accumulates only in the scope where that was set.
            mma = self._tiled_mma()
            left = cute.make_tensor(
                cute.recast_ptr(weights.iterator, dtype=Float8E4M3FN),
                cute.make_layout(((4, 2, 2), 1, STEPS), stride=((1, 4, 8), 0, 16)),
            )
            accumulators = cute.make_tensor(partial.iterator, mma.partition_shape_C((GROUP_ROWS, c.mma_tokens)))
            warpgroup.fence()
            for step in range(STEPS):
                mma.set(warpgroup.Field.ACCUMULATE, step > 0)
                cute.gemm(
                    mma,
                    accumulators,
                    left[None, None, step],
                    operand[None, None, step, place * c.passes + part],
                    accumulators,
                )
            warpgroup.commit_group()

        return multiply
