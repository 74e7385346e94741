"""Device code of the MXFP8 wgmma GEMM. The package's docstring describes roles, data path and pipelines."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.core.ue8m0 import float_of_ue8m0
from torch_cute_ops.kernels.common.fp8.consumers import (
    Consumers,
    GemmEpilogue,
    MainLoop,
    Results,
    RowScaled,
    SmemMma,
)
from torch_cute_ops.kernels.common.fp8.fold import MOST_BELOW, MX_BLOCKS, largest_byte, lowered, rounded
from torch_cute_ops.kernels.common.fp8.gemm import (
    FP8Gemm,
    Stages,
    WorkSchedule,
    store_token_scales,
    tell_decoded,
    token_scales,
)
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import FP8Weight, piece_at
from torch_cute_ops.kernels.mxfp8_wgmma.config import Config

PIECES = K_TILE // VECTOR_BYTES
"""Number of 16-byte pieces of a weight row in a k tile."""


class MXFP8WgmmaKernel(FP8Kernel):
    """GEMM kernel for MXFP8 operands, of which ``a`` is folded, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        stages = Stages(config)
        schedule = WorkSchedule(config, FP8Weight(config.tile_n, config.rows.is_plain))
        results = Results(config, stages, schedule, GemmEpilogue(config))
        loop = MainLoop(config, stages, RowScaled(config, stages), results)
        consumers = Consumers(config, stages, SmemMma(config), loop, results)
        self.gemm = FP8Gemm(config, schedule, MXScales(config, stages), consumers, Folder(config, stages))


class MXScales:
    """Scale source that stores the scales of the rows of ``a``, the largest scale of each weight row in the k tile, and
    the differences between the exponents of this scale and of the row's four scales."""

    def __init__(self, config: Config, stages: Stages):
        self.config, self.stages = config, stages

    def begin(self, tile: Tile, lane, work) -> None:
        """Return None, because nothing is loaded once per tile."""

    def load(self, k_tile, tile: Tile, lane, work) -> tuple:
        of_rows, scale, words = token_scales(self.config.tile_m, k_tile, tile, lane, work), work.b_scale, []
        first = scale.iterator + (Int64(tile.expert) * scale.stride[2] + k_tile)
        for place in range(0, self.config.tile_n, 32):
            column = tile.column + lane + place
            words += ptx.load_if(first + Int64(column) * scale.stride[0], column < work.n, 1)
        return of_rows, words

    @cute.jit
    def store(self, loaded, begun, is_last, slot, lane, work, smem):
        c, scales = self.config, self.stages.scales(slot, smem)
        store_token_scales(c.tile_m, scales, loaded[0], lane)
        for i in range_constexpr(c.tile_n // 32):
            row = lane + 32 * i
            found = [loaded[1][i] >> 8 * block & Uint32(0xFF) for block in range(MX_BLOCKS)]
            largest = largest_byte(found)
            scales[c.tile_m + row] = float_of_ue8m0(largest)
            below = Uint32(0)
            for block in range_constexpr(MX_BLOCKS):
                below = below | cutlass.min(largest - found[block], Uint32(MOST_BELOW)) << 8 * block
            store_words([below], self.stages.words(slot, c.powers_at + row, 1, smem))


class Folder:
    """Decoder that folds the weight rows of a stage in place. A lane folds one row."""

    def __init__(self, config: Config, stages: Stages):
        self.config, self.stages = config, stages

    def begin(self, warp, lane, work) -> Int32:
        """Return the lane's weight row."""
        return Int32(warp * 32 + lane)

    @cute.jit
    def complete(self, row, stage, lane, work, smem):
        """Fold the lane's row of a stage."""
        c = self.config
        (below,) = load_words(self.stages.words(stage, c.powers_at + row, 1, smem))
        # The swizzle permutes the 16-byte pieces of a 128-byte line by the index of the line.
        at = (stage * c.tile_n + row) * c.line + row % 8 * VECTOR_BYTES
        each = PIECES // MX_BLOCKS
        for block in range_constexpr(MX_BLOCKS):
            pieces = [piece_at(smem.b, at ^ (block * each + i) * VECTOR_BYTES) for i in range(each)]
            words = [word for piece in pieces for word in load_words(piece)]
            of_block = below >> 8 * block & Uint32(0xFF)
            folded, fits = lowered(words, of_block)
            if of_block != Uint32(0):
                if fits:
                    self._store(folded, pieces)
                else:
                    self._store(rounded(words, of_block), pieces)

    def _store(self, words: list, pieces: list) -> None:
        """Store the words of the pieces of a block."""
        for i, piece in enumerate(pieces):
            store_words(words[4 * i : 4 * i + 4], piece)

    def tell(self, row, stage, lane, work, smem) -> None:
        """Signal the consumers that this warp has folded its rows."""
        tell_decoded(stage, lane, smem)
