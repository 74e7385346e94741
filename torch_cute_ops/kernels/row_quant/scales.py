"""Stores of FP4 and MXFP8 block scales: single bytes, 16 bytes of four rows, and padding.

Four rows whose scales share 16 bytes of a tiled layout are a *quad*. A group processes these rows in sequence, collects
their scales in one of two buffers in shared memory, and stores 16 bytes at a time.
"""

import cutlass.cute as cute
from cutlass import Int64, Uint8, Uint32, Uint64, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core.memory import load_words, store_byte, store_words
from torch_cute_ops.kernels.row_quant.config import QUAD, Config, ceil_div


class FP4Scales:
    """Device code that stores FP4 and MXFP8 block scales. ``thread`` is a ``Thread``, ``smem`` an ``Smem``."""

    def __init__(self, config: Config):
        self.config = config

    def quad_row(self, quad):
        """Return the first row of a quad."""
        return quad // 32 * 128 + quad % 32 if self._is_128x4 else quad * QUAD

    @property
    def quad_step(self) -> int:
        """Distance between neighbouring rows of a quad, in rows."""
        return 32 if self._is_128x4 else 1

    @property
    def _is_128x4(self) -> bool:
        return self.config.spec.layout.tile_rows == 128

    def at(self, row, column, thread) -> cute.Tensor:
        """Return the address of the scale of block ``column`` of a row in global memory, as a one-byte tensor."""
        layout = self.config.spec.layout
        offset = layout.row_offset(Uint64(row), self.config.blocks) + Uint64(layout.block_offset(Uint32(column)))
        return cute.make_tensor(cute.recast_ptr(thread.scale.iterator, dtype=Uint8) + offset, cute.make_layout(1))

    def linear_at(self, row, column, thread) -> cute.Tensor:
        """Return the address of the scale of block ``column`` of a row in the linear scales, as a one-byte tensor."""
        offset = Int64(row) * self.config.blocks + column
        return cute.make_tensor(
            cute.recast_ptr(thread.scale_linear.iterator, dtype=Uint8) + offset, cute.make_layout(1)
        )

    def quad_slot(self, iteration, block, smem) -> cute.Tensor:
        """Return the place of a block's scale in the quad buffer to which the row of ``iteration`` belongs, as a
        one-byte tensor."""
        offset = iteration // QUAD % 2 * self.config.quad_bytes + block // 4 * 16 + iteration % QUAD * 4 + block % 4
        return cute.make_tensor(smem.scales + offset, cute.make_layout(1))

    @cute.jit
    def clear_quads(self, thread, smem):
        """Zero the quads' buffers. The padding bytes of the buffers are stored together with the scales, but no other
        code writes them."""
        words = 2 * self.config.groups * self.config.quad_bytes // 4
        buffers = cute.make_tensor(cute.recast_ptr(smem.all_scales, dtype=Uint32), cute.make_layout(words))
        for i in range(thread.tid, words, thread.threads):
            buffers[i] = Uint32(0)

    @cute.jit
    def zero_padding_columns(self, row, iteration, thread):
        """Zero the scale bytes between the last block of a row and the end of its tile. For rows of quads this is not
        needed, because the quads' buffers hold zeros there."""
        c = self.config
        padding = c.spec.layout.padded_blocks(c.blocks) - c.blocks
        if const_expr(padding > 0):
            if (iteration >= thread.quad_iterations) & (row < thread.rows):
                for i in range_constexpr(padding):
                    if (thread.column == i % c.threads_per_row) & (thread.rank == c.splits - 1):
                        store_byte(self.at(row, c.blocks + i, thread), 0)

    @cute.jit
    def zero_padding_rows(self, thread):
        """Zero the scales of the padding rows at the end of the last tile. All groups of the grid share this work."""
        c = self.config
        layout = c.spec.layout
        tiles = layout.padded_blocks(c.blocks) // 4
        padded_rows = cute.ceil_div(thread.rows, layout.tile_rows) * layout.tile_rows
        walkers = thread.walkers * c.splits
        for row in range(thread.rows + thread.walker * c.splits + thread.rank, padded_rows, walkers):
            offset = layout.row_offset(Uint64(row), c.blocks)
            for tile in range(thread.in_group, tiles, c.group_threads):
                target = cute.assume(offset + Uint64(layout.block_offset(Uint32(tile * 4))), divby=4)
                pointer = cute.recast_ptr(thread.scale.iterator, dtype=Uint8) + target
                store_words([Uint32(0)], cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(1)))

    @cute.jit
    def write_quad(self, iteration, thread, smem):
        """Store the scales of the quad that was completed in ``iteration``, if any, 16 bytes per thread.

        The group must synchronise between that iteration and this call.
        """
        c = self.config
        if const_expr(c.quads):
            if (iteration >= 0) & (iteration < thread.quad_iterations) & (iteration % QUAD == QUAD - 1):
                row = self.quad_row(iteration // QUAD * thread.walkers + thread.walker)
                layout = c.spec.layout
                row_offset = layout.row_offset(Uint64(row), c.blocks)
                tiles = (thread.cta_blocks + 3) // 4
                source = smem.scales + cute.assume(iteration // QUAD % 2 * c.quad_bytes, divby=16)
                words = cute.make_tensor(
                    cute.recast_ptr(source, dtype=Uint32), cute.make_layout((4, c.quad_bytes // 16), stride=(1, 4))
                )
                for i in range_constexpr(ceil_div(c.quad_bytes // 16, c.group_threads)):
                    tile = thread.in_group + i * c.group_threads
                    if tile < tiles:
                        offset = row_offset + Uint64(layout.block_offset(Uint32(thread.first_block + tile * 4)))
                        target = cute.recast_ptr(thread.scale.iterator, dtype=Uint8) + cute.assume(offset, divby=16)
                        store_words(
                            load_words(words[None, tile]),
                            cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(4)),
                        )
