"""Device code of the GEMM with an FP4 weight decoded to shared memory. The package's docstring describes roles, data
path and pipelines."""

import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp8.consumers import Consumers, GemmEpilogue, MainLoop, Results, SmemMma
from torch_cute_ops.kernels.common.fp8.fp4_tables import look_up, tables_of_own_unit, tables_of_shared_unit
from torch_cute_ops.kernels.common.fp8.gemm import FP8Gemm, Stages, WorkSchedule, tell_decoded
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE
from torch_cute_ops.kernels.common.fp8.units import Units, UnitScales, record_words
from torch_cute_ops.kernels.common.fp8.weights import FP4Weight, piece_at
from torch_cute_ops.kernels.fp8_fp4_wgmma_ss.config import Config


class FP8FP4WgmmaSSKernel(FP8Kernel):
    """GEMM kernel for a weight that is decoded to shared memory, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        stages = Stages(config)
        weight = FP4Weight(config.fmt, config.layout, config.rows.is_plain, config.copied_n, config.line)
        schedule, units = WorkSchedule(config, weight), Units(config, stages)
        results = Results(config, stages, schedule, GemmEpilogue(config))
        loop = MainLoop(config, stages, units, results)
        consumers = Consumers(config, stages, SmemMma(config, is_decoded=True), loop, results)
        scales, decoder = UnitScales(config, stages, weight, units), SmemDecoder(config, stages, units)
        self.gemm = FP8Gemm(config, schedule, scales, consumers, decoder)


class SmemDecoder:
    """Decoder that writes the weight of a stage to the workspace in shared memory, as e4m3.

    A warp decodes 32 rows, or 16 rows with two lanes per row.
    """

    def __init__(self, config: Config, stages: Stages, units: Units):
        self.config, self.stages, self.units = config, stages, units

    def begin(self, warp, lane, work) -> tuple:
        """Return four values: the index of the lane's weight row among the rows that this CTA decodes, the index of the
        same row in the tile, the halves of the row that the lane decodes, and the index in the tile of the warp's first
        row."""
        c = self.config
        each = 32 // c.lanes_per_row
        row, halves = warp * each + lane % each, [0, 1] if c.lanes_per_row == 1 else [lane // each]
        before = work.m_rank * c.copied_n
        return row, before + row, halves, before + warp * each

    def complete(self, begun, stage, lane, work, smem) -> None:
        """Decode the rows, or half rows, of a stage that belong to this lane."""
        row, tile_row, halves, first = begun
        (flags,) = load_words(self.units.flag_word(stage, smem))
        for half in halves:
            self._decode_half(flags >> first // 32 & Uint32(1), stage, row, tile_row, half, smem)

    def tell(self, begun, stage, lane, work, smem) -> None:
        """Signal the consumers that this warp has decoded its rows. If two CTAs share the weight, also send the rows to
        the other CTA."""
        if self.config.cluster_m == 1:
            tell_decoded(stage, lane, smem)
        else:
            self._share_rows(stage, begun[3], 32 // self.config.lanes_per_row, work, smem)

    @cute.jit
    def _share_rows(self, stage, first, rows: int, work, smem):
        """Send ``rows`` decoded rows, starting with row ``first``, to the other CTA, and expect the same number of rows
        from the other CTA."""
        decoded = smem.workspace + cute.assume((stage * self.config.tile_n + first) * K_TILE, divby=VECTOR_BYTES)
        with cute.arch.elect_one():
            ptx.expect_and_send(decoded, smem.stages.full + stage, rows * K_TILE, work.m_rank ^ 1)

    @cute.jit
    def _decode_half(self, is_own, stage, row, tile_row, half, smem):
        """Decode half of a weight row.

        The index of the weight row is ``row`` among the rows that this CTA decodes, and ``tile_row`` in the tile.
        """
        c = self.config
        record = record_words(c, self.stages, stage, row, smem)
        at = record.iterator + cute.assume(Int32(half) * 2, divby=2)
        first, second = load_words(cute.make_tensor(at, cute.make_layout(2)))
        # The swizzle permutes the 16-byte pieces of a 128-byte line by the index of the line. A line holds two rows.
        codes_at = (stage * c.copied_n + row) * c.line + (half * 2 ^ row // 2 % 4) * VECTOR_BYTES
        codes = []
        for piece in range_constexpr(2):
            codes += load_words(piece_at(smem.b, codes_at ^ piece * VECTOR_BYTES))
        if is_own != Uint32(0):
            self._store_half(tables_of_own_unit(first, Int32(second), c.fmt), codes, stage, tile_row, half, smem)
        else:
            self._store_half(tables_of_shared_unit(first, second, c.fmt), codes, stage, tile_row, half, smem)

    def _store_half(self, tables: list, codes: list, stage, tile_row, half, smem) -> None:
        """Look up the codes of half a row, and store the e4m3 numbers in the swizzled layout of the MMAs."""
        c = self.config
        to = (stage * c.tile_n + tile_row) * K_TILE + (half * 4 ^ tile_row % 8) * VECTOR_BYTES
        for piece in range(4):
            table = tables[piece * len(tables) // 4]
            words = [word for one in codes[2 * piece : 2 * piece + 2] for word in look_up(table, one)]
            store_words(words, piece_at(smem.workspace, to ^ piece * VECTOR_BYTES))
