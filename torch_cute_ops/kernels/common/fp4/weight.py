"""Device code that copies k tiles of an FP4 weight to shared memory, and loads the codes and scales of a lane.

A k tile consists of 256 elements along K of each of ``tile_n`` rows. In a k tile, the codes of a row take 128 bytes, a
cache line. TMA copies the codes as one box with the 128-byte swizzle. (In a k tile of 128 elements, the codes of a row
take 64 bytes, and TMA applies the 64-byte swizzle.) Tiled scales are copied by bulk copies of whole tiles of 128 rows x
4 blocks, and linear scales by TMA, as one box.

If K is the concatenation of several experts' ranges, the last k tile of an expert ends where the expert's range ends. A
range may be an odd number of half scale tiles (``WeightTile.spread``). Experts then begin alternately in the first and
in the second half of a scale tile. The index of this half, 0 or 1, is the expert's *phase*. If the phase is 1, a k tile
may span one more scale tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES
from torch_cute_ops.kernels.common.fp4.activations import QUAD
from torch_cute_ops.kernels.common.fp4.codes import decode, rows_of_bytes, scale_argument, scale_factors, scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import SCALE_TILE_BYTES, SCALE_TILE_ROWS, WeightTile
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class WeightCopies(NamedTuple):
    """TMA copies of a weight, with their sources and destinations.

    Attributes:
        codes_copy, codes_from, codes_to: TMA copy of codes, with its boxes in global memory and in the stages.
        scale_copy, scales_from, scales_to: TMA copy of linear scales, with its boxes in global memory and in the
            stages. None for tiled scales.
        scales: all scales in global memory. Tiled scales are copied from this tensor in bulk.
        scales_at: address of the stages' scales in shared memory.
    """

    codes_copy: Any
    codes_from: cute.Tensor
    codes_to: cute.Tensor
    scale_copy: Any
    scales_from: cute.Tensor | None
    scales_to: cute.Tensor | None
    scales: cute.Tensor
    scales_at: cute.Pointer


class WeightStages:
    """K tiles of a weight in the ``stages`` stages of a pipeline.

    Attributes:
        words: number of words of codes that a lane reads per row of a k tile. Two MMAs with K = 16 use a word. (The
            other attributes are properties of ``WeightTile``.)
    """

    def __init__(self, tile: WeightTile, stages: int):
        self.fmt, self.layout, self.tile_n, self.stages = tile.fmt, tile.layout, tile.tile_n, stages
        self.blocks, self.scale_row_tiles = tile.blocks, tile.scale_row_tiles
        self.spread, self.scale_columns = tile.spread, tile.scale_columns
        self.code_bytes, self.scale_bytes = tile.code_bytes, tile.scale_bytes
        self.row_bytes, self.words = tile.row_bytes, tile.row_bytes // QUAD // 4

    def arguments(self, n: Dim) -> tuple[TensorArg, TensorArg]:
        """Return descriptions of the arguments for the weight, (K/2, N), and for its scales."""
        half = Dim("k_bytes", divisibility=16)
        codes = TensorArg("Uint8", (half, n), (1, half), align=16)
        return codes, scale_argument(self.fmt, self.layout, n, Dim("blocks", divisibility=16))

    def maps(self, b: cute.Tensor, scale: cute.Tensor, experts=1) -> tuple:
        """Return TMA descriptors of the codes and the linear scales, for ``open``. The third dimension of each
        descriptor is the expert."""
        b, scale = rows_of_bytes(b, scale_matrix(scale, self.layout))
        load = cpasync.CopyBulkTensorTileG2SOp()
        codes_copy, codes = self._map(load, b, experts, self._codes_layout(1), (self.tile_n, self.row_bytes, 1))
        scale_copy, scales = None, scale
        if self.layout.is_linear:
            layout = cute.make_layout((self.tile_n, self.blocks, 1), stride=(self.blocks, 1, 0))
            scale_copy, scales = self._map(load, scale, experts, layout, (self.tile_n, self.blocks, 1))
        return codes_copy, codes, scale_copy, scales

    def _map(self, load, matrix: cute.Tensor, experts, layout, box: tuple[int, int, int]) -> tuple:
        n, pitch = matrix.shape
        width = cute.assume(pitch // experts, divby=16)
        view = cute.make_layout((n, width, experts), stride=(matrix.stride[0], 1, width))
        return cpasync.make_tiled_tma_atom(load, cute.make_tensor(matrix.iterator, view), layout, box)

    def _codes_layout(self, stages: int):
        """Return the layout of the codes in shared memory: (rows, bytes of a row, stages)."""
        kinds = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom({128: kinds.K_SW128, 64: kinds.K_SW64}[self.row_bytes], Uint8)
        return cute.tile_to_shape(atom, (self.tile_n, self.row_bytes, stages), order=(0, 1, 2))

    def open(self, maps: tuple, codes_at: cute.Pointer, scales_at: cute.Pointer) -> WeightCopies:
        """Return the weight's ``WeightCopies``. In shared memory, the stages' codes begin at ``codes_at`` and their
        scales at ``scales_at``."""
        codes_copy, codes, scale_copy, scales = maps
        layout = self._codes_layout(self.stages)
        stages = cute.make_tensor(cute.recast_ptr(codes_at, layout.inner, dtype=Uint8), layout.outer)
        codes_to, codes_from = self._boxes(codes_copy, codes, self.row_bytes, stages)
        scales_to = scales_from = None
        if self.layout.is_linear:
            layout = cute.make_layout(
                (self.tile_n, self.blocks, self.stages), stride=(self.blocks, 1, self.scale_bytes)
            )
            stages = cute.make_tensor(scales_at, layout)
            scales_to, scales_from = self._boxes(scale_copy, scales, self.blocks, stages)
        return WeightCopies(
            codes_copy=codes_copy,
            codes_from=codes_from,
            codes_to=codes_to,
            scale_copy=scale_copy,
            scales_from=scales_from,
            scales_to=scales_to,
            scales=scales,
            scales_at=scales_at,
        )

    def prefetch(self, maps: tuple) -> None:
        """Prefetch the TMA descriptors."""
        codes_copy, _, scale_copy, _ = maps
        cpasync.prefetch_descriptor(codes_copy)
        if scale_copy is not None:
            cpasync.prefetch_descriptor(scale_copy)

    def _boxes(self, copy, matrix, width: int, stages) -> tuple:
        """Divide the stages and the matrix into boxes. Return the boxes in shared memory, indexed by stage, and the
        boxes in global memory, indexed by n tile, k tile and expert."""
        tiled = cute.local_tile(matrix, (self.tile_n, width, 1), (None, None, None))
        return cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(stages, 0, 2), cute.group_modes(tiled, 0, 3)
        )

    @cute.jit
    def load(self, n_tile, k_tile, expert, stage, barrier, weight, n, blocks):
        """Start the copies of a k tile, and arrive at ``barrier`` once. ``barrier`` expects the bytes of the copies.

        Args:
            n_tile, k_tile, expert: indices of the n tile, the k tile and the expert.
            stage: index of the destination stage.
            barrier: full barrier of the stage.
            weight: result of ``open``.
            n: number of rows of the weight.
            blocks: number of blocks of a row in one expert's range of K.
        """
        if const_expr(self.layout.is_linear):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.code_bytes + self.scale_bytes)
            source = weight.scales_from[None, n_tile, k_tile, expert]
            self._copy(weight.scale_copy, source, weight.scales_to[None, stage], barrier)
        else:
            # All scale tiles of 128 rows are contiguous, so one bulk copy per 128 rows is enough.
            column = k_tile * (self.blocks // TILE_BLOCKS)
            if const_expr(self.spread):
                before = expert * blocks // TILE_BLOCKS
                own = cutlass.min(blocks - k_tile * self.blocks, Int32(self.blocks))
                size = cute.ceil_div(expert * blocks % TILE_BLOCKS + own, TILE_BLOCKS) * SCALE_TILE_BYTES
            else:
                # If there are several experts, each range is a whole number of scale tiles.
                columns = cute.ceil_div(blocks, TILE_BLOCKS)
                before = expert * columns
                size = cutlass.min(columns - column, Int32(self.blocks // TILE_BLOCKS)) * SCALE_TILE_BYTES
            pitch = weight.scales.shape[1] // TILE_BLOCKS
            first = n_tile * self.tile_n // SCALE_TILE_ROWS
            row_tiles = cutlass.min(cute.ceil_div(n, SCALE_TILE_ROWS) - first, self._scale_row_tiles(n_tile))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.code_bytes + size * row_tiles)
                for i in range_constexpr(self.scale_row_tiles):
                    if i < row_tiles:
                        source = (Int64(first + i) * pitch + before + column) * SCALE_TILE_BYTES
                        target = stage * self.scale_bytes + i * (SCALE_TILE_ROWS * self.scale_columns)
                        ptx.copy_bulk(
                            weight.scales_at + cute.assume(target, divby=SCALE_TILE_BYTES),
                            weight.scales.iterator + cute.assume(source, divby=SCALE_TILE_BYTES),
                            size,
                            barrier,
                            policy=ptx.EVICT_FIRST,
                        )
        codes = weight.codes_from[None, n_tile, k_tile, expert]
        self._copy(weight.codes_copy, codes, weight.codes_to[None, stage], barrier)

    def first_scale_row(self, n_tile) -> Any:
        """Return the index of the weight tile's first row in the stage's first scale tile."""
        return (
            0 if self.layout.is_linear or self.tile_n % SCALE_TILE_ROWS == 0 else n_tile * self.tile_n % SCALE_TILE_ROWS
        )

    def _scale_row_tiles(self, n_tile) -> Int32:
        """Return the number of scale tiles that a weight tile spans along its rows."""
        if self.tile_n % SCALE_TILE_ROWS == 0 or SCALE_TILE_ROWS % self.tile_n == 0:
            return Int32(self.scale_row_tiles)
        return Int32(cute.ceil_div(self.first_scale_row(n_tile) + self.tile_n, SCALE_TILE_ROWS))

    def _copy(self, copy, source, target, barrier) -> None:
        """Start a TMA copy with the L2 policy evict-first, because weights are read only once."""
        cute.copy(copy, source, target, tma_bar_ptr=barrier, cache_policy=Int64(ptx.EVICT_FIRST))

    def codes(self, codes_at: cute.Pointer, stage, row, quad) -> list:
        """Load the words of codes that a lane decodes in one row: its quarter of the row's k tile."""
        words = []
        vectors = self.row_bytes // VECTOR_BYTES // QUAD
        for i in range(vectors):
            at = self.vector_at(codes_at, stage, row, quad * vectors + i)
            words += load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
        return words

    def codes_of_part(self, codes_at: cute.Pointer, stage, row, quad, part, parts: int) -> list:
        """Load one of ``parts`` equal ranges of the words that ``codes`` loads. ``part`` is a run-time value; a range
        has at most four words."""
        size = self.row_bytes // QUAD // parts
        place = part * size
        at = self.vector_at(codes_at, stage, row, (quad * (self.row_bytes // QUAD) + place) // VECTOR_BYTES)
        at = at + cute.assume(place % VECTOR_BYTES, divby=size)
        return load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(size // 4)))

    def vector_at(self, codes_at: cute.Pointer, stage, row, vector) -> cute.Pointer:
        """Return the address of the ``vector``-th 16 bytes of a row's codes."""
        vectors = self.row_bytes // VECTOR_BYTES
        # The swizzle permutes the vectors of a row by the index of the 128-byte line that contains the row.
        line = row if self.row_bytes == 128 else row // (128 // self.row_bytes)
        vector = vector ^ (line % vectors)
        offset = stage * self.code_bytes + row * self.row_bytes + vector * VECTOR_BYTES
        return codes_at + cute.assume(offset, divby=VECTOR_BYTES)

    def existing(self, left, quad) -> Uint32:
        """Return the byte mask of a lane's existing scales, for ``factors``, in a k tile with only ``left`` blocks."""
        count = self.blocks // QUAD
        exist = cutlass.min(cutlass.max(left - quad * count, Int32(0)), Int32(count))
        return ptx.select(exist == count, Uint32(0xFFFFFFFF), (Uint32(1) << Uint32(exist * 8)) - 1)

    def factors(self, scales_at: cute.Pointer, stage, row, quad, existing, dtype, phase=None) -> list:
        """Return the factors that ``decode`` needs for a lane's blocks of a row.

        Args:
            scales_at: address of the stages' scales in shared memory.
            stage: index of the stage.
            row: index of the row, counted from the first row of the stage's first scale tile.
            quad: index of the lane among the four lanes that share the row.
            existing: byte mask of the scales of existing blocks, or None if all blocks exist. The factors of other
                blocks are zero.
            dtype: dtype of the MMAs' operands.
            phase: phase of the expert (see the module docstring), or None for 0.
        """
        bytes_ = self.scales(scales_at, stage, row, quad, existing, phase)
        return self._factors(bytes_, self.blocks // QUAD, dtype)

    def factors_of_part(
        self, scales_at: cute.Pointer, stage, row, quad, existing, dtype, phase, part, parts: int
    ) -> list:
        """Return the factors for the codes of ``codes_of_part``. ``factors`` describes the other arguments."""
        bytes_ = self.scales(scales_at, stage, row, quad, existing, phase)
        blocks = self.blocks // QUAD
        own = max(1, blocks // parts)
        # A range may be only a part of a block.
        bytes_ = (bytes_ >> Uint32(part * blocks // parts * 8)) & Uint32((1 << 8 * own) - 1)
        return self._factors(bytes_, own, dtype)[:own]

    def _factors(self, bytes_: Uint32, blocks: int, dtype) -> list:
        """Return the factors for ``blocks`` scales, which ``bytes_`` contains. All other bytes are zero."""
        together = 1 if self.fmt == MXFP4 else 2
        shifts = range(0, 8 * blocks, 8 * together)
        words = [bytes_ >> shift if shift else bytes_ for shift in shifts]
        words[:-1] = [word & Uint32((1 << 8 * together) - 1) for word in words[:-1]]
        return [factor for word in words for factor in scale_factors(word, dtype, self.fmt)]

    def scales(self, scales_at: cute.Pointer, stage, row, quad, existing, phase=None) -> Uint32:
        """Return the bytes of a lane's scales of a row in one word, the first scale in the lowest byte. ``factors``
        describes the arguments."""
        count = self.blocks // QUAD
        block = quad * count
        # In a stage, scales are laid out like a whole scale matrix with the stage's rows and columns, so the same
        # formula gives their offsets.
        column = block if phase is None else block + phase * (TILE_BLOCKS // 2)
        row_offset = self.layout.row_offset(row, self.scale_columns)
        place = stage * self.scale_bytes + row_offset + self.layout.block_offset(column)
        dtype_of = {4: Uint32, 2: Uint16, 1: Uint8}
        at = cute.recast_ptr(scales_at + cute.assume(place, divby=count), dtype=dtype_of[count])
        bytes_ = Uint32(cute.make_tensor(at, cute.make_layout(1))[0])
        if existing is not None:
            # Mask scales of missing blocks. These scales are undefined, and a NaN times a code of 0 would not be 0.
            bytes_ = bytes_ & existing
        return bytes_

    def pairs(self, codes: list, factors: list, word: int, dtype) -> list:
        """Decode the ``word``-th word of each of the lane's rows. Return the operands of MMAs, as ``decode`` does."""
        per_factor = len(codes[0]) // len(factors[0])
        rows = zip(codes, factors, strict=True)
        return [decode([words[word]], [scales[word // per_factor]], dtype, self.fmt)[0] for words, scales in rows]
