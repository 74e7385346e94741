"""Tiles of an FP4 weight, whose rows may belong to experts; its codes in shared memory, and its scales in registers."""

import functools
from typing import Any

import cutlass.cute as cute
from cutlass import Int64, Uint8, Uint32
from cutlass.cute.nvgpu import warpgroup

from torch_cute_ops.formats import MXFP4, FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.experts.tiles import ExpertTiles, by_expert
from torch_cute_ops.kernels.common.fp4.codes import scale_argument
from torch_cute_ops.kernels.common.fp8.fp8_tiles_kernel import Smem, Tile
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK
from torch_cute_ops.kernels.fp8_wgmma.kernel import FP8WgmmaKernel
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

    def row_scales(self, scale: cute.Tensor, n, expert, column, exists, first, left) -> list:
        """The words of a K block's scales of a row of the weight, four scales a word; zeros where there are none.

        Args:
            scale: as ``weight_views`` returns it.
            n, expert, column, exists: rows of an expert's weight; which row, and whether there is one.
            first, left: the K block's first scale, an Int64, and how many the row has from there on.
        """
        words = BLOCK // self.fmt.block_size // 4
        at = scale.iterator + self.scale_offset(scale, n, expert, column, first)
        if self.layout.is_linear:
            if self.fmt == MXFP4:
                # Rows of scales are multiples of two bytes.
                halves = [ptx.load_narrow_if(at, exists & (2 * i < left), 2, 2 * i) for i in range(2)]
                return [halves[0] | (halves[1] << 16)]
            return [ptx.load_if(at, exists & (4 * i < left), 1, 4 * i)[0] for i in range(words)]
        offsets = [self.layout.block_offset(4 * i) for i in range(words)]
        return [ptx.load_if(at, exists & (4 * i < left), 1, offset)[0] for i, offset in enumerate(offsets)]

    def scale_offset(self, scale: cute.Tensor, n, expert, column, place) -> Int64:
        """Where a row's scale ``place``, an Int64, is in ``scale``; the rest as for ``row_scales``."""
        if self.layout.is_linear:
            return Int64(expert) * scale.stride[2] + Int64(column) * scale.stride[0] + place
        row = self.layout.row_offset(Int64(expert) * n + column, Int64(scale.shape[1]))
        return row + self.layout.block_offset(place)

    def without_padding(self, words: list, left) -> list:
        """The words of a row's scales in a K block of which ``left`` exist, half or all: what is behind the last may be
        anything. In its place are those of the first half again, which fit where these do."""
        if self.fmt == MXFP4:
            return [ptx.select(left > 2, word, ptx.prmt(word, word, 0x1010)) for word in words]
        return [words[0], ptx.select(left > 4, words[1], words[0])]


class FP4WeightStages(FP8WgmmaKernel):
    """``FP8WgmmaKernel`` with such a weight, whose codes are copied to the stages as they are. A ``Config`` has its
    ``fmt`` and ``layout``."""

    def __init__(self, config: Any):
        super().__init__(config, functools.partial(FP4ExpertTiles, config.fmt, config.layout))
        self.block_scales = BLOCK // config.fmt.block_size

    def _weight_layout(self, stages: int):
        c = self.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Uint8)
        return cute.tile_to_shape(atom, (c.copied_columns, c.line, stages), order=(0, 1, 2))

    def _piece(self, base: cute.Pointer, offset) -> cute.Tensor:
        """16 bytes of shared memory."""
        at = base + cute.assume(offset, divby=VECTOR_BYTES)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4))

    def _weight_stages(self, smem: Smem) -> cute.Tensor:
        layout = self._weight_layout(self.config.stages)
        return cute.make_tensor(cute.recast_ptr(smem.columns, layout.inner, dtype=Uint8), layout.outer)

    def _load_scales(self, block, tile: Tile, lane, share) -> tuple:
        """Those of the rows of ``a``, 32 at a time; then the words of a lane's rows of the weight."""
        return self._token_scales(block, tile, lane, share), self._weight_scales(tile, lane, block, share)

    def _weight_scales(self, tile: Tile, lane, block, share) -> list:
        """The scales of a lane's rows of the weight in a K block, every 32nd from ``lane`` on: of each its words, four
        scales a word; anything where there is no row."""
        c, scale = self.config, share.b_scale
        words = self.block_scales // 4
        left = share.width * 2 // c.fmt.block_size - block * self.block_scales
        first = Int64(block) * self.block_scales
        if c.rows.is_plain and not c.layout.is_linear:
            # Tiles are those of the layout, or halves of them, in which these rows follow each other.
            row = c.layout.row_offset(Int64(tile.column) + lane, Int64(scale.shape[1]))
            at = scale.iterator + (row + c.layout.block_offset(first))
            count = c.columns // 32
            found = [ptx.load_if(at, 4 * i < left, count, c.layout.block_offset(4 * i)) for i in range(words)]
            rows = [list(of_row) for of_row in zip(*found, strict=True)]
        else:
            rows = []
            for i in range(c.columns // 32):
                column = tile.column + lane + 32 * i
                rows.append(self.tiles.row_scales(scale, share.n, tile.expert, column, column < share.n, first, left))
        return [self.tiles.without_padding(row, left) for row in rows]
