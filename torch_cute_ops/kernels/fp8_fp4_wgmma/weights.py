"""Tiles of an FP4 weight, whose rows may belong to experts."""

from typing import Any

import cutlass.cute as cute
from cutlass import Uint8

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.convert import DSL_DTYPES
from torch_cute_ops.kernels.common.expert_tiles import ExpertTiles, by_expert
from torch_cute_ops.kernels.common.fp4_weights import scale_argument
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class FP4ExpertTiles(ExpertTiles):
    """``ExpertTiles`` of such a weight: codes (K/2, N), or (E, N, K/2). Linear scales are (N, K/B), or (E, N, K/B);
    tiled ones those of a matrix with the rows of all experts."""

    def __init__(self, fmt: FP4Format, layout: ScaleLayout, *tile: Any):
        super().__init__(*tile)
        self.fmt, self.layout = fmt, layout

    def weight_arguments(self, n: Dim, k: Dim, blocks: Dim, experts: Dim | None) -> tuple[TensorArg, TensorArg]:
        half, scales = Dim("k_bytes", divisibility=32), Dim("b_blocks", divisibility=64 // self.fmt.block_size)
        if experts is None:
            b = TensorArg("Uint8", (half, n), (1, half), align=16)
        else:
            of_expert = Dim("b_of_expert", bits=64, divisibility=16)
            b = TensorArg("Uint8", (experts, n, half), (of_expert, half, 1), align=16)
        if not self.layout.is_linear:
            rows = Dim("b_scale_rows", divisibility=self.layout.tile_rows)
            return b, scale_argument(self.fmt, rows, Dim("b_blocks", divisibility=TILE_BLOCKS))
        if experts is None:
            return b, scale_argument(self.fmt, n, scales)
        dtype = DSL_DTYPES[self.fmt.scale_dtype].__name__
        of_expert = Dim("b_scale_of_expert", bits=64, divisibility=4)
        return b, TensorArg(dtype, (experts, n, scales), (of_expert, scales, 1), align=16)

    def weight_views(self, b, b_scale) -> tuple[cute.Tensor, cute.Tensor]:
        """The codes (N, K/2, E); linear scales (N, K/B, E), tiled ones as they are."""
        scale = cute.make_tensor(cute.recast_ptr(b_scale.iterator, dtype=Uint8), b_scale.layout)
        if self.layout.is_linear:
            scale = by_expert(scale, self.rows.is_plain)
        return by_expert(b, self.rows.is_plain, is_transposed=True), scale
