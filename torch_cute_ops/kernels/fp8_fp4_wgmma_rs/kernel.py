"""Device code of the GEMM with an NVFP4 weight decoded to registers. The package's docstring describes roles, data path
and pipelines."""

from typing import Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.kernels.common.core.layouts import WARPGROUP
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp8.consumers import (
    K_STEP,
    Consumer,
    GemmEpilogue,
    RegisterMma,
    Results,
)
from torch_cute_ops.kernels.common.fp8.fp4_tables import look_up, table_of_bytes, table_of_own_unit
from torch_cute_ops.kernels.common.fp8.gemm import FP8Gemm, Stages, WorkSchedule, tell_decoded
from torch_cute_ops.kernels.common.fp8.k_groups import K_GROUP_THREADS, KGroupSums
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.layouts import GROUPS, K_TILE, LINE_SPAN
from torch_cute_ops.kernels.common.fp8.row_stores import store_columns
from torch_cute_ops.kernels.common.fp8.units import IS_LAST, Units, UnitScales, record_words
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight, piece_at
from torch_cute_ops.kernels.fp8_fp4_wgmma_rs.config import Config

LANES: Final = 4
"""Number of lanes that share the rows of an MMA. Each decodes a quarter of a row's k tile."""
STEPS: Final = K_TILE // K_STEP
BLOCKS: Final = 2
"""Number of scale blocks of a quarter."""
PASS: Final = 16
"""Number of rows of ``a`` that a decoder warp rearranges at once."""
ROWS: Final = 2
"""Number of weight rows of a lane."""


class FP8FP4WgmmaRSKernel(FP8Kernel):
    """GEMM kernel for a weight that is decoded to registers, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        stages = Stages(config)
        weight = FP4Weight(config.fmt, config.layout, config.rows.is_plain, config.copied_n, config.line)
        schedule, units = WorkSchedule(config, weight), Units(config, stages)
        results = Results(config, stages, schedule, GemmEpilogue(config))
        loop = DecodingLoop(config, stages, weight, units)
        consumers = KGroupConsumers(config, stages, RegisterMma(config), loop, results)
        scales = UnitScales(config, stages, weight, units)
        self.gemm = FP8Gemm(config, schedule, scales, consumers, QuarterDecoder(config))


class QuarterDecoder:
    """Decoder that rearranges the activations of a k tile: the first word (four elements) of each quarter, then the
    second word of each quarter, and so on.

    Each warp of a decoder group handles one k tile of a stage.
    """

    def __init__(self, config: Config):
        self.config = config

    def begin(self, warp, lane, work) -> Int32:
        """Return the index of the k tile that this warp handles among a stage's k tiles."""
        return Int32(warp)

    @cute.jit
    def complete(self, begun, stage, lane, work, smem):
        c = self.config
        base = smem.a + cute.assume((stage * LINE_SPAN + begun) * (c.tile_m * K_TILE), divby=c.tile_m * K_TILE)
        for first in range_constexpr(0, c.tile_m, PASS):
            self._rearrange(base, first, min(PASS, c.tile_m - first), lane)

    def tell(self, begun, stage, lane, work, smem) -> None:
        tell_decoded(stage, lane, smem)

    @cute.jit
    def _rearrange(self, base, first: int, rows: int, lane):
        """Rearrange ``rows`` rows of ``a``, starting at row ``first``. A lane handles every second 16-byte piece of a
        row."""
        row, odd = first + lane % rows, lane // rows % 2
        # The swizzle permutes the 16-byte pieces of a row by the index of the row. Undo it.
        of_row, swizzle = row * K_TILE, row % 8
        quarters = []
        for quarter in range_constexpr(LANES):
            piece = 2 * quarter + odd ^ swizzle
            quarters.append(load_words(piece_at(base, of_row + piece * VECTOR_BYTES)))
        cute.arch.sync_warp()
        if lane < 2 * rows:
            for i in range_constexpr(LANES):
                piece = LANES * odd + i ^ swizzle
                store_words([words[i] for words in quarters], piece_at(base, of_row + piece * VECTOR_BYTES))


class Loaded(NamedTuple):
    """Codes and scales from which a lane decodes its quarter of a k tile, for both of its weight rows.

    Attributes:
        codes: four words of codes per row.
        ones, one_and_halves: e4m3 bytes of the scale, and of 1.5 times the scale, divided by the row's unit, for both
            blocks of the quarter. If the row uses the k tile's own exponent, ``ones`` contains the scales themselves.
    """

    codes: cute.Tensor
    ones: cute.Tensor
    one_and_halves: cute.Tensor


class DecodingLoop:
    """Mainloop of a K group. The loop decodes one k tile of each stage to registers, multiplies this k tile, and
    promotes the result."""

    def __init__(self, config: Config, stages: Stages, weight: FP4Weight, units: Units):
        self.config, self.stages, self.weight, self.units = config, stages, weight, units

    @cute.jit
    def run(self, multiply, acc, k_group, stage, parity, consumer, work, smem):
        """Multiply the k tiles of an output tile that belong to K group ``k_group``. The caller has waited for the
        first stage. Return the next stage and its parity.

        The codes of a k tile are loaded while the MMAs of the previous k tile run.
        """
        acc.fill(0.0)
        partial = cute.make_rmem_tensor((self.config.mma_n // 2,), Float32)
        words = cute.make_rmem_tensor((4 * STEPS,), Uint32)
        loaded = Loaded(*(cute.make_rmem_tensor((ROWS * count,), Uint32) for count in (STEPS, 1, 1)))
        following = Uint32(0)
        if work.end > work.begin:
            following = self._load(loaded, stage * LINE_SPAN + k_group, consumer, smem)
        for rest in cutlass.range(work.end - work.begin - 1, -1, -1, unroll=1):
            slot, read, flags = stage * LINE_SPAN + k_group, stage, following
            self._decode(words, loaded, flags, slot, consumer, smem)
            multiply(slot, words, partial)
            factors = self.units.factors(slot, consumer, smem)
            stage, parity = smem.stages.next(stage, parity)
            if rest > 0:
                smem.stages.wait_full(stage, parity)
                following = self._load(loaded, stage * LINE_SPAN + k_group, consumer, smem)
            warpgroup.wait_group(0)
            self.units.prepare(acc, partial, flags, slot, consumer, smem)
            self.stages.release(read, consumer.lane, smem)
            self.units.promote(acc, partial, factors)
        return stage, parity

    def _load(self, loaded: Loaded, slot, consumer, smem) -> Uint32:
        """Load the codes and scales of a k tile into ``loaded``. Return the k tile's flags."""
        for r in range(ROWS):
            row = consumer.row + 8 * r
            codes = load_words(piece_at(smem.b, self.weight.line_offset(slot, row, consumer.quad, LINE_SPAN)))
            for i in range(STEPS):
                loaded.codes[r * STEPS + i] = codes[i]
            loaded.ones[r] = self._bytes(slot, row, 0, consumer, smem)
            loaded.one_and_halves[r] = self._bytes(slot, row, 1, consumer, smem)
        return self.units.flags(slot, consumer, smem)

    def _bytes(self, slot, row, which: int, consumer, smem) -> Uint32:
        """Load the scale bytes of a lane's two blocks from a row's record.

        A record holds two words for each half of a k tile. From the half that contains the lane's quarter, ``which`` (0
        or 1) selects a word.
        """
        record = cute.recast_ptr(record_words(self.config, self.stages, slot, row, smem).iterator, dtype=Uint8)
        at = consumer.quad // 2 * 8 + which * 4 + consumer.quad % 2 * BLOCKS
        pointer = cute.recast_ptr(record + cute.assume(at, divby=BLOCKS), dtype=Uint16)
        return Uint32(cute.make_tensor(pointer, cute.make_layout(1))[0])

    @cute.jit
    def _decode(self, words, loaded: Loaded, flags, slot, consumer, smem):
        """Decode this lane's quarter of a k tile, for both weight rows, into ``words``: the A operands of the MMAs."""
        fmt = self.config.fmt
        tables = cute.make_rmem_tensor((ROWS * BLOCKS * 2,), Uint32)
        for r in range_constexpr(ROWS):
            for block in range_constexpr(BLOCKS):
                table = table_of_bytes(loaded.ones[r], loaded.one_and_halves[r], block)
                self._set_table(tables, r, block, table)
        if (flags & Uint32(IS_LAST - 1)) != Uint32(0):
            # Rows with a flag use the k tile's own exponent. The records of these rows hold the scales themselves, and
            # this exponent.
            for r in range_constexpr(ROWS):
                exponent = Int32(record_words(self.config, self.stages, slot, consumer.row + 8 * r, smem)[1])
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


class KGroupConsumers:
    """Two K groups of two consumer warpgroups. Each group multiplies 128 weight rows over one k tile of each stage.

    After the last stage, the first group adds the second group's accumulators to its own accumulators.
    """

    def __init__(self, config: Config, stages: Stages, mma: RegisterMma, loop: DecodingLoop, results: Results):
        self.config, self.stages, self.mma, self.loop, self.results = config, stages, mma, loop, results
        self.sums = KGroupSums(config)

    @cute.jit
    def run(self, tid, work, smem):
        c = self.config
        group, lane = cute.arch.make_warp_uniform(tid // WARPGROUP), tid % 32
        k_group, in_group = group // GROUPS, tid % K_GROUP_THREADS
        first = in_group // 32 * 16
        consumer = Consumer(in_group, lane, lane % 4, first, first + lane // 4, Int32(0), smem.stores)
        multiply = self.mma.begin(smem)
        acc = cute.make_rmem_tensor((c.mma_n // 2,), Float32)
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        self.results.meet_cluster()
        for number in range(work.first, work.num_tiles, work.num_clusters):
            row, rows, column, expert = self.results.await_tile(number, stage, parity, lane, work, smem)
            # Load alpha and bias before the MMAs, so that the MMAs hide the latency of the loads.
            finish = self.results.finish(column, expert, consumer, work)
            stage, parity = self.loop.run(multiply, acc, k_group, stage, parity, consumer, work, smem)
            if k_group > 0:
                self.sums.leave(acc, turn, consumer, smem)
            else:
                self.sums.join(acc, turn, consumer, smem)
                if const_expr(c.split_k > 1):
                    is_last = number + work.num_clusters >= work.num_tiles
                    self.results.add_up(acc, finish, row, rows, column, turn, is_last, consumer, work, smem)
                else:
                    store_columns(acc, work.out, row, rows, column + consumer.first, lane, finish)
            turn = turn ^ 1
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()
