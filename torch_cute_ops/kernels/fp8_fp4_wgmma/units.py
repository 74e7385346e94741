"""Sums of rows of a weight that have units of their own: powers of two over which their numbers are in e4m3."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.fp8_fp4_wgmma.decode import power_of_two
from torch_cute_ops.kernels.fp8_wgmma.kernel import FP8WgmmaKernel

IS_LAST, HAS_OWN = 0x10, 0x20  # flags: of the last K block of a tile, and of any of a tile with units of its own


class UnitsKernel(FP8WgmmaKernel):
    """``FP8WgmmaKernel`` with such a weight. The totals of a row are in the row's unit. Where the numbers of a K block
    are over another power of two, consumers bring that block's sums to the unit; and behind the last K block of a tile
    all totals to the unit 1. The scale warps leave them flags and powers in the stage, from ``Config.units_at`` on."""

    def _powers(self, place, smem, which: int) -> cute.Tensor:
        """For each row of the weight, where units change, the factor of totals (0), or of the K block's sums (1)."""
        c = self.config
        at = self._scales(place, smem).iterator + (c.units_at + c.columns * which)
        return cute.make_tensor(at, cute.make_layout(c.columns))

    def _store_powers(self, of_totals, of_sums, place, row, smem) -> None:
        for which, exponent in enumerate((of_totals, of_sums)):
            self._powers(place, smem, which)[row] = power_of_two(exponent)

    def _flags(self, place, smem) -> cute.Tensor:
        """A word: bit i is set where the i-th 32 rows of the weight are not all over their units; and
        ``IS_LAST``."""
        return self._words(place, Int32(self.config.units_at + 2 * self.config.columns), 1, smem)

    def _factors(self, stage, consumer, smem) -> Any:
        """The scales of a lane's rows of ``a``, which are columns of swapped tiles."""
        c, scales = self.config, self._scales(stage, smem)
        if c.is_swapped:
            return self._token_scales_of(scales, consumer)
        return [scales[consumer.row], scales[consumer.row + 8]]

    def _read_flags(self, stage, consumer, smem) -> Uint32:
        """Which groups of 32 rows of the weight change units, or bring their sums to these: those of the warp."""
        (flags,) = load_words(self._flags(stage, smem))
        if self.config.is_swapped:
            return flags & (Uint32(1) << consumer.first // 32 | IS_LAST)
        return flags

    @cute.jit
    def _prepare(self, sums, partial, flags, stage, consumer, smem):
        """Change the units of totals, and bring the sums of a K block to these."""
        if flags != Uint32(0):
            if const_expr(self.config.is_swapped):
                for values, which in ((sums, 0), (partial, 1)):
                    powers = self._powers(stage, smem, which)
                    of_rows = [powers[consumer.row], powers[consumer.row + 8]]
                    for i in range_constexpr(self.config.mma_columns // 2):
                        values[i] = ptx.mul_rn(values[i], of_rows[i // 2 % 2])
            else:
                for i in range_constexpr(self.config.columns // 32):
                    if (flags & Uint32(1 << i | IS_LAST)) != Uint32(0):
                        for group in range_constexpr(4 * i, 4 * i + 4):
                            of_sums = self._pair(self._powers(stage, smem, 0), group, consumer)
                            of_partial = self._pair(self._powers(stage, smem, 1), group, consumer)
                            for j in range_constexpr(4):
                                at = 4 * group + j
                                sums[at] = ptx.mul_rn(sums[at], of_sums[j % 2])
                                partial[at] = ptx.mul_rn(partial[at], of_partial[j % 2])
