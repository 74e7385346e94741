"""Device code of the FP8 wgmma GEMM. The package's docstring describes roles, data path and pipelines."""

from typing import Any

import cutlass.cute as cute

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.fp8.consumers import (
    Consumers,
    GemmEpilogue,
    MainLoop,
    Results,
    RowScaled,
    SmemMma,
    TokenScaled,
    promote,
)
from torch_cute_ops.kernels.common.fp8.gemm import (
    FP8Gemm,
    Stages,
    WorkSchedule,
    row_scales,
    store_token_scales,
    token_scales,
)
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE
from torch_cute_ops.kernels.common.fp8.tiles import Tile
from torch_cute_ops.kernels.common.fp8.weights import FP8Weight
from torch_cute_ops.kernels.fp8_wgmma.config import Config


class FP8WgmmaKernel(FP8Kernel):
    """GEMM kernel for FP8 operands with block scales, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        stages = Stages(config)
        kind = config.weight_scales
        weight = FP8Weight(config.tile_n, config.rows.is_plain, kind != "alpha", by_row=kind == "rows")
        schedule = WorkSchedule(config, weight)
        results = Results(config, stages, schedule, GemmEpilogue(config))
        scales: TokenScales = BlockScales(config, stages)
        promotion: Any = BlockScaled(config, stages)
        if kind == "rows":
            scales, promotion = RowScales(config, stages), RowScaled(config, stages)
        elif kind == "alpha":
            scales, promotion = TokenScales(config, stages), TokenScaled(config, stages)
        loop = MainLoop(config, stages, promotion, results)
        consumers = Consumers(config, stages, SmemMma(config), loop, results)
        self.gemm = FP8Gemm(config, schedule, scales, consumers)


class TokenScales:
    """Scale source that stores the scales of the rows of ``a``."""

    def __init__(self, config: Config, stages: Stages):
        self.config, self.stages = config, stages

    def begin(self, tile: Tile, lane, work) -> None:
        """Return None, because nothing is loaded once per tile."""

    def load(self, k_tile, tile: Tile, lane, work) -> tuple:
        return (token_scales(self.config.tile_m, k_tile, tile, lane, work),)

    @cute.jit
    def store(self, loaded, begun, is_last, slot, lane, work, smem):
        store_token_scales(self.config.tile_m, self.stages.scales(slot, smem), loaded[0], lane)


class BlockScales(TokenScales):
    """Scale source that stores the scales of the rows of ``a``, and the scale of the weight tile."""

    def load(self, k_tile, tile: Tile, lane, work) -> tuple:
        of_rows = token_scales(self.config.tile_m, k_tile, tile, lane, work)
        return of_rows, work.b_scale[tile.column // K_TILE, k_tile, tile.expert]

    @cute.jit
    def store(self, loaded, begun, is_last, slot, lane, work, smem):
        scales = self.stages.scales(slot, smem)
        store_token_scales(self.config.tile_m, scales, loaded[0], lane)
        if lane == 0:
            scales[self.config.tile_m] = loaded[1]


class RowScales(TokenScales):
    """Scale source that stores the scales of the rows of ``a``, and the scales of the weight rows."""

    def load(self, k_tile, tile: Tile, lane, work) -> tuple:
        c = self.config
        return token_scales(c.tile_m, k_tile, tile, lane, work), row_scales(c.tile_n, k_tile, tile, lane, work)

    @cute.jit
    def store(self, loaded, begun, is_last, slot, lane, work, smem):
        c, scales = self.config, self.stages.scales(slot, smem)
        store_token_scales(c.tile_m, scales, loaded[0], lane)
        of_weight = cute.make_tensor(scales.iterator + c.tile_m, cute.make_layout(c.tile_n))
        store_token_scales(c.tile_n, of_weight, loaded[1], lane)


class BlockScaled:
    """Promotion that multiplies the results of a k tile by the products of both operands' scales."""

    def __init__(self, config: Config, stages: Stages):
        self.config, self.stages = config, stages

    def factors(self, stage, consumer, smem) -> list:
        """Return the products of both operands' scales for a lane's rows of ``a``. In swapped tiles, rows of ``a`` are
        columns of the accumulators."""
        c, scales = self.config, self.stages.scales(stage, smem)
        if c.is_swapped:
            first = consumer.token + consumer.quad * 2
            places = [first + 8 * i + e for i in range(c.mma_n // 8) for e in range(2)]
        else:
            places = [consumer.row, consumer.row + 8]
        of_weight = scales[c.tile_m]
        return [ptx.mul_rn(scales[place], of_weight) for place in places]

    def flags(self, stage, consumer, smem) -> None:
        return None

    def prepare(self, acc, partial, flags, stage, consumer, smem) -> None:
        pass

    def promote(self, acc, partial, factors: list) -> None:
        promote(self.config, acc, partial, factors)
