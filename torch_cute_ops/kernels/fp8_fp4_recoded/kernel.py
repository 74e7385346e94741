"""The device code; the package's docstring describes the data path."""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import store_words
from torch_cute_ops.kernels.common.expert_tiles import ExpertTiles, by_expert
from torch_cute_ops.kernels.common.fp8_tiles_kernel import Tile
from torch_cute_ops.kernels.fp4_to_fp8.config import COLUMNS, WORDS
from torch_cute_ops.kernels.fp8_fp4_recoded.config import Config
from torch_cute_ops.kernels.fp8_fp4_wgmma.units import IS_LAST, UnitsKernel
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class RecodedTiles(ExpertTiles):
    """``ExpertTiles`` of a recoded weight, whose scales are exponents."""

    def weight_arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        b, _ = super().weight_arguments(n, k, blocks, experts)
        return b, TensorArg("Int32", (Dim("exponent_words", bits=64),), (1,), align=16)

    def weight_views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        return by_expert(b, self.rows.is_plain, is_transposed=True), b_scale


class FP8FP4RecodedKernel(UnitsKernel):
    """The kernel of one ``Config``."""

    config: Config

    def __init__(self, config: Config):
        super().__init__(config, RecodedTiles)

    def _begin_scales(self, tile: Tile, lane, share) -> tuple:
        """The exponents of the units of a lane's rows of the weight, four that follow each other; and whether the rows
        exist."""
        exists = tile.column + 4 * lane < share.n
        return self._exponents(tile, Int32(0), lane, exists, share), exists

    def _load_scales(self, block, tile: Tile, lane, share) -> tuple:
        """Those of the rows of ``a``, 32 at a time; and the exponents of a lane's rows of the weight in the K block."""
        exists = tile.column + 4 * lane < share.n
        return self._token_scales(block, tile, lane, share), self._exponents(tile, block + 1, lane, exists, share)

    def _exponents(self, tile: Tile, place, lane, exists, share) -> list:
        """Two words of exponents: those of the units at ``place`` 0, those of the K blocks behind them."""
        of_expert = tile.expert * cute.ceil_div(share.n, COLUMNS)
        line = Int64(of_expert + tile.column // COLUMNS) * (share.blocks + 1) + place
        return ptx.load_if(share.b_scale.iterator + (line * WORDS + 2 * lane), exists, 2)

    @cute.jit
    def _store_scales(self, loaded, begun, is_last, place, lane, share, smem):
        self._store_token_scales(self._scales(place, smem), loaded[0], lane)
        units, exists = begun
        exponents = loaded[1]
        changes = exists & ((units[0] != exponents[0]) | (units[1] != exponents[1]))
        votes = Uint32(cute.arch.vote_ballot_sync(changes))
        flags = ptx.select(is_last, Uint32(IS_LAST), Uint32(0))
        for group in range_constexpr(COLUMNS // 32):
            # Eight lanes have the rows of a group.
            changed = (votes & Uint32(0xFF << 8 * group)) != Uint32(0)
            flags |= ptx.select(changed, Uint32(1 << group), Uint32(0))
        if flags != Uint32(0):
            for i in range_constexpr(4):
                shift = const_expr(16 - 16 * (i % 2))
                unit = Int32(units[i // 2] << shift) >> 16
                after = ptx.select(is_last, Int32(0), unit)
                of_sums = Int32(exponents[i // 2] << shift) >> 16
                self._store_powers(unit - after, of_sums - after, place, 4 * lane + i, smem)
        if lane == 0:
            store_words([flags], self._flags(place, smem))
