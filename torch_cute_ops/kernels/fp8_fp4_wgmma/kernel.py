"""The device code; the package's docstring describes the roles and the data path."""

import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp8.fp8_tiles_kernel import Smem
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK
from torch_cute_ops.kernels.fp8_fp4_wgmma.config import Config
from torch_cute_ops.kernels.fp8_fp4_wgmma.decode import (
    look_up,
    tables_of_own_unit,
    tables_of_shared_unit,
)
from torch_cute_ops.kernels.fp8_fp4_wgmma.unit_scales import UnitScales


class FP8FP4WgmmaKernel(UnitScales):
    """The kernel of one ``Config``."""

    config: Config

    def _weight_at(self, smem: Smem) -> cute.Pointer:
        return smem.own

    # Decoding

    def _begin_help(self, warp, lane, share) -> tuple:
        """A decoding warp has 32 of the CTA's rows, or halves of 16: the lane's row among these and in the tile, its
        halves, and the warp's first row in the tile."""
        c = self.config
        each = 32 // c.lanes_per_row
        row, halves = warp * each + lane % each, [0, 1] if c.lanes_per_row == 1 else [lane // each]
        before = share.part * c.copied_columns
        return row, before + row, halves, before + warp * each

    def _complete(self, begun, stage, lane, share, smem) -> None:
        row, place, halves, first = begun
        (flags,) = load_words(self._flags(stage, smem))
        for half in halves:
            self._decode_half(flags >> first // 32 & Uint32(1), stage, row, place, half, smem)

    def _tell_complete(self, begun, stage, lane, share, smem) -> None:
        if self.config.row_ctas == 1:
            super()._tell_complete(begun, stage, lane, share, smem)
        else:
            self._share_rows(stage, begun[3], 32 // self.config.lanes_per_row, share, smem)

    @cute.jit
    def _share_rows(self, stage, first, rows: int, share, smem):
        """Send the rows that a warp has decoded, from ``first`` on, to the other CTA, and expect as many from there."""
        decoded = smem.own + cute.assume((stage * self.config.columns + first) * BLOCK, divby=VECTOR_BYTES)
        with cute.arch.elect_one():
            ptx.expect_and_send(decoded, smem.full + stage, rows * BLOCK, share.part ^ 1)

    @cute.jit
    def _decode_half(self, is_own, stage, row, place, half, smem):
        """Decode half of the CTA's ``row`` of a K block, the tile's row ``place``."""
        c = self.config
        record = self._record_words(stage, row, smem)
        at = record.iterator + cute.assume(Int32(half) * 2, divby=2)
        first, second = load_words(cute.make_tensor(at, cute.make_layout(2)))
        # Swizzles permute pieces by the number of the 128 bytes that they are in.
        codes_at = (stage * c.copied_columns + row) * c.line + (half * 2 ^ row // 2 % 4) * VECTOR_BYTES
        codes = []
        for piece in range_constexpr(2):
            codes += load_words(self._piece(smem.columns, codes_at ^ piece * VECTOR_BYTES))
        if is_own != Uint32(0):
            self._store_half(tables_of_own_unit(first, Int32(second), c.fmt), codes, stage, place, half, smem)
        else:
            self._store_half(tables_of_shared_unit(first, second, c.fmt), codes, stage, place, half, smem)

    def _store_half(self, tables: list, codes: list, stage, place, half, smem) -> None:
        c = self.config
        to = (stage * c.columns + place) * BLOCK + (half * 4 ^ place % 8) * VECTOR_BYTES
        for piece in range(4):
            table = tables[piece * len(tables) // 4]
            words = [word for one in codes[2 * piece : 2 * piece + 2] for word in look_up(table, one)]
            store_words(words, self._piece(smem.own, to ^ piece * VECTOR_BYTES))
