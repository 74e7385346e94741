"""The device code; the package's docstring describes the roles and the data path."""

from collections.abc import Callable
from typing import Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP, WGMMA_M
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES, next_stage
from torch_cute_ops.kernels.common.fp8.fp8_tiles_kernel import Tile
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK, GROUPS
from torch_cute_ops.kernels.common.fp8.row_stores import store_columns
from torch_cute_ops.kernels.fp8_fp4_wgmma.decode import look_up, table_of_bytes, table_of_own_unit
from torch_cute_ops.kernels.fp8_fp4_wgmma.lines import LineStages
from torch_cute_ops.kernels.fp8_fp4_wgmma.lines_config import SPAN
from torch_cute_ops.kernels.fp8_fp4_wgmma.unit_scales import UnitScales
from torch_cute_ops.kernels.fp8_fp4_wgmma.units import IS_LAST
from torch_cute_ops.kernels.fp8_nvfp4_wgmma.config import Config
from torch_cute_ops.kernels.fp8_wgmma.kernel import STEP, Consumer

LANES: Final = 4
"""Lanes that share the rows of an MMA, each with a quarter of a K block."""
STEPS: Final = BLOCK // STEP
BLOCKS: Final = 2
"""Blocks of a quarter."""
PASS: Final = 16
"""Rows of activations that a helper arranges at once."""
PAIR: Final = GROUPS * WARPGROUP
"""Threads of a pair of consumer warpgroups."""
ROWS: Final = 2
"""Rows of a lane."""


class Loaded(NamedTuple):
    """For each of a lane's two rows, what its quarter of a K block is decoded from: four words of codes, and for each
    of its two blocks the e4m3 bytes of the scale and of 1.5 times it, over the row's unit. Of a row over another unit,
    ``ones`` are the scales themselves."""

    codes: cute.Tensor
    ones: cute.Tensor
    one_and_halves: cute.Tensor


class FP8NVFP4WgmmaKernel(LineStages, UnitScales):
    """The kernel of one ``Config``."""

    config: Config

    # Scales

    def _begin_scales(self, tile: Tile, lane, share) -> tuple:
        return super()._begin_scales(tile, lane, share._replace(begin=share.begin * SPAN))

    def _store_scales(self, loaded, begun, is_last, stage, lane, share, smem) -> None:
        # Each pair of consumers has a last K block.
        for i, of_block in enumerate(loaded):
            super()._store_scales(of_block, begun, is_last, stage * SPAN + i, lane, share, smem)

    # Helpers

    @cute.jit
    def _complete(self, begun, stage, lane, share, smem):
        """Arrange the activations of a K block: of the words of four elements the first of each quarter, then the
        second of each, and so on."""
        c = self.config
        base = smem.tokens + cute.assume((stage * SPAN + begun) * (c.tokens * BLOCK), divby=c.tokens * BLOCK)
        for first in range_constexpr(0, c.tokens, PASS):
            self._arrange_rows(base, first, min(PASS, c.tokens - first), lane)

    @cute.jit
    def _arrange_rows(self, base, first: int, rows: int, lane):
        """Arrange the activations of so many rows, half of a row each lane."""
        # A lane has every other piece of a row.
        row, odd = first + lane % rows, lane // rows % 2
        # Swizzles permute the pieces of a row by its number.
        of_row, swizzle = row * BLOCK, row % 8
        quarters = []
        for quarter in range_constexpr(LANES):
            piece = 2 * quarter + odd ^ swizzle
            quarters.append(load_words(self._piece(base, of_row + piece * VECTOR_BYTES)))
        cute.arch.sync_warp()
        if lane < 2 * rows:
            for i in range_constexpr(LANES):
                piece = LANES * odd + i ^ swizzle
                store_words([words[i] for words in quarters], self._piece(base, of_row + piece * VECTOR_BYTES))

    # Decoding

    def _load(self, loaded: Loaded, place, consumer, smem) -> Uint32:
        """Load what a K block is decoded from. Returns its flags."""
        for r in range(ROWS):
            row = consumer.row + 8 * r
            codes = load_words(self._piece(smem.columns, self._code_place(place, row, consumer.quad)))
            for i in range(STEPS):
                loaded.codes[r * STEPS + i] = codes[i]
            loaded.ones[r] = self._bytes(place, row, 0, consumer, smem)
            loaded.one_and_halves[r] = self._bytes(place, row, 1, consumer, smem)
        return self._read_flags(place, consumer, smem)

    def _bytes(self, place, row, which: int, consumer, smem) -> Uint32:
        """The bytes of a lane's blocks of a row in what scale warps have left: of the first or second word of the half
        K block that the quarter is in."""
        record = cute.recast_ptr(self._record_words(place, row, smem).iterator, dtype=Uint8)
        at = consumer.quad // 2 * 8 + which * 4 + consumer.quad % 2 * BLOCKS
        pointer = cute.recast_ptr(record + cute.assume(at, divby=BLOCKS), dtype=Uint16)
        return Uint32(cute.make_tensor(pointer, cute.make_layout(1))[0])

    @cute.jit
    def _decode(self, words, loaded: Loaded, flags, place, consumer, smem):
        """A lane's part of the A operands of a K block."""
        fmt = self.config.fmt
        tables = cute.make_rmem_tensor((ROWS * BLOCKS * 2,), Uint32)
        for r in range_constexpr(ROWS):
            for block in range_constexpr(BLOCKS):
                table = table_of_bytes(loaded.ones[r], loaded.one_and_halves[r], block)
                self._set_table(tables, r, block, table)
        if (flags & Uint32(IS_LAST - 1)) != Uint32(0):
            # There are the scales themselves, and the exponent of the K block's own unit.
            for r in range_constexpr(ROWS):
                exponent = Int32(self._record_words(place, consumer.row + 8 * r, smem)[1])
                for block in range_constexpr(BLOCKS):
                    scale = (loaded.ones[r] >> 8 * block) & Uint32(0xFF)
                    self._set_table(tables, r, block, table_of_own_unit(scale, exponent, fmt))
        for r in range_constexpr(ROWS):
            for step in range_constexpr(STEPS):
                at = (r * BLOCKS + step * BLOCKS // STEPS) * 2
                numbers = look_up([tables[at], tables[at + 1]], loaded.codes[r * STEPS + step])
                for half in range_constexpr(2):
                    words[4 * step + 2 * half + r] = numbers[half]

    def _set_table(self, tables, row: int, block: int, table: list) -> None:
        for i in range(2):
            tables[(row * BLOCKS + block) * 2 + i] = table[i]

    # MMAs

    def _mma(self, group, smem) -> Callable:
        """The function that starts a consumer's MMAs of a K block."""
        c = self.config
        operand = self._token_operand(smem)

        def multiply(place, words, partial) -> None:
            codes = self._register_operand(words, STEPS)
            mma = self._tiled_mma()
            sums = cute.make_tensor(partial.iterator, mma.partition_shape_C((WGMMA_M, c.mma_columns)))
            warpgroup.fence()
            for step in range(STEPS):
                mma.set(warpgroup.Field.ACCUMULATE, step > 0)
                cute.gemm(mma, sums, codes[None, None, step], operand[None, None, step, place], sums)
            warpgroup.commit_group()

        return multiply

    @cute.jit
    def _consume(self, tid, share, smem):
        """A consumer warpgroup: its 64 rows of the weight of each of the CTA's tiles, in its K block of each stage."""
        c = self.config
        group, lane = cute.arch.make_warp_uniform(tid // WARPGROUP), tid % 32
        part, in_pair = group // GROUPS, tid % PAIR
        first = in_pair // 32 * 16
        consumer = Consumer(in_pair, lane, lane % 4, first, first + lane // 4, Int32(0), smem.stores)
        multiply = self._mma(group, smem)
        sums = cute.make_rmem_tensor((c.mma_columns // 2,), Float32)
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        self._meet_cluster()
        for number in range(share.first, share.count, share.workers):
            row, rows, column, expert = self._await_tile(number, stage, parity, lane, share, smem)
            # Alpha and bias are loaded before the MMAs, which hide the latency.
            finish = self._finish(column, expert, consumer, share)
            stage, parity = self._add_part(multiply, sums, part, stage, parity, consumer, share, smem)
            if part > 0:
                self._leave(sums, turn, consumer, smem)
            else:
                self._join(sums, turn, consumer, smem)
                if const_expr(c.splits > 1):
                    is_last = number + share.workers >= share.count
                    self._add_up(sums, finish, row, rows, column, turn, is_last, consumer, share, smem)
                else:
                    store_columns(sums, share.out, row, rows, column + consumer.first, lane, finish)
            turn = turn ^ 1
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _add_part(self, multiply, sums, part, stage, parity, consumer, share, smem):
        """Sum a warpgroup's K blocks of a tile, whose first stage has arrived. Returns the next stage, and its parity.

        What a K block is decoded from is loaded while the MMAs of the one before run.
        """
        sums.fill(0.0)
        partial = cute.make_rmem_tensor((self.config.mma_columns // 2,), Float32)
        words = cute.make_rmem_tensor((4 * STEPS,), Uint32)
        loaded = Loaded(*(cute.make_rmem_tensor((ROWS * count,), Uint32) for count in (STEPS, 1, 1)))
        following = Uint32(0)
        if share.end > share.begin:
            following = self._load(loaded, stage * SPAN + part, consumer, smem)
        for rest in cutlass.range(share.end - share.begin - 1, -1, -1, unroll=1):
            place, read, flags = stage * SPAN + part, stage, following
            self._decode(words, loaded, flags, place, consumer, smem)
            multiply(place, words, partial)
            factors = self._factors(place, consumer, smem)
            stage, parity = next_stage(stage, parity, self.config.stages)
            if rest > 0:
                ptx.wait(smem.full + stage, parity)
                following = self._load(loaded, stage * SPAN + part, consumer, smem)
            warpgroup.wait_group(0)
            self._prepare(sums, partial, flags, place, consumer, smem)
            self._free(read, consumer.lane, smem)
            self._promote(sums, partial, factors)
        return stage, parity

    @cute.jit
    def _leave(self, sums, turn, consumer, smem):
        """Leave the sums of the second pair to the first, which has read those of the tile before."""
        ptx.wait(smem.joined, turn ^ 1)
        for i in range_constexpr(0, self.config.mma_columns // 2, 4):
            store_words([ptx.bits_of(sums[i + j]) for j in range(4)], self._parted_sums(i, consumer, smem))
        self._arrive(smem.parted, consumer.lane)

    @cute.jit
    def _join(self, sums, turn, consumer, smem):
        """Add the second pair's sums to the first's."""
        ptx.wait(smem.parted, turn)
        for i in range_constexpr(0, self.config.mma_columns // 2, 4):
            words = load_words(self._parted_sums(i, consumer, smem))
            for j in range_constexpr(4):
                sums[i + j] = ptx.add_rn(sums[i + j], ptx.float_of(words[j]))
        self._arrive(smem.joined, consumer.lane)

    def _parted_sums(self, i: int, consumer, smem) -> cute.Tensor:
        """Where four sums of a thread are left, from the ``i``-th on."""
        return self._piece(smem.own, (i // 4 * PAIR + consumer.tid) * VECTOR_BYTES)
