"""Stores of quantised rows: codes, scales, norms, and sums with the residual."""

import functools

import cutlass.cute as cute
from cutlass import Int64, Uint8, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats.fp8 import FP8_TOKEN
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import store_byte, store_words
from torch_cute_ops.kernels.common.fp8.layouts import SCALE_THREADS
from torch_cute_ops.kernels.row_quant.codes import Encoder
from torch_cute_ops.kernels.row_quant.config import Config, ceil_div
from torch_cute_ops.kernels.row_quant.rows import Rows
from torch_cute_ops.kernels.row_quant.scales import FP4Scales


def bulk_store(source: cute.Pointer, target: cute.Pointer, elements: int) -> None:
    """Start one bulk copy from shared to global memory, in the thread's open bulk group."""
    atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkS2GOp(), source.dtype)
    layout = cute.make_layout(elements)
    cute.copy(atom, cute.make_tensor(source, layout), cute.make_tensor(target, layout))


class Stores:
    """Device code that stores the outputs of a row. ``thread`` is a ``Thread``, ``smem`` an ``Smem``."""

    def __init__(self, config: Config, rows: Rows, scales: FP4Scales, encoder: Encoder):
        self.config, self.rows, self.scales, self.encoder = config, rows, scales, encoder

    @property
    def is_bulk(self) -> bool:
        """True if sums or norms are stored by bulk copies from shared memory."""
        return self.config.spec.source == "add" or self.config.bulk_norm

    @cute.jit
    def start_bulk(self, iteration, stage, thread, smem):
        """Start the bulk stores of this iteration's sums and of the previous iteration's norms."""
        c = self.config
        if const_expr(c.spec.source == "add"):
            row = self.rows.row_at(iteration, thread) + thread.in_group
            if (thread.in_group < c.group_rows) & (row < thread.rows):
                self._store_slice(
                    self.rows.buffer(1, stage, thread.in_group, smem), self.rows.input_row(1, row, thread), thread
                )
        if const_expr(c.bulk_norm):
            self.start_norm(iteration - 1, thread, smem)

    @cute.jit
    def start_norm(self, iteration, thread, smem):
        """Start the bulk stores of the norms that ``iteration`` computed, if this iteration exists."""
        c = self.config
        row = self.rows.row_at(iteration, thread) + thread.in_group
        if (iteration >= 0) & (thread.in_group < c.group_rows) & (row < thread.rows):
            target = thread.norm.iterator + cute.assume(Int64(row) * c.spec.width, divby=16)
            self._store_slice(self._norm_buffer(iteration, thread.in_group, smem), target, thread)

    def _store_slice(self, source: cute.Pointer, row: cute.Pointer, thread) -> None:
        store = functools.partial(bulk_store, source=source, target=self.rows.slice_of(row, thread))
        self.rows.copy_slice(store, thread)
        cute.arch.cp_async_bulk_commit_group()

    def _norm_buffer(self, iteration, row, smem) -> cute.Pointer:
        """Return the buffer of a normalised row of the group. Each row has two buffers, for even and for odd
        iterations."""
        c = self.config
        slot = iteration % 2 * c.group_rows + row
        return smem.norms + cute.assume(slot * c.slice_width, divby=16)

    @cute.jit
    def store_row(self, blocks, rstd, amax, global_scale, row, memory_row, iteration, thread, smem):
        """Quantise the thread's blocks of a row, and store codes, scales and norm.

        Codes and fp32 scales are stored in row ``memory_row`` of the outputs, byte scales and norms in row ``row``.
        """
        c = self.config
        spec = c.spec
        # Compute all blocks before the first store: with a branch between blocks, the compiler could not interleave
        # their instructions.
        if const_expr(spec.has_byte_scales):
            quantized = [self.encoder.block(*block, rstd, global_scale) for block in blocks[: c.common_blocks]]
        elif const_expr(spec.has_fp8_blocks):
            words, scale = self.encoder.fp8_blocks(blocks, rstd, amax, thread)
            quantized = [(words[j], None) for j in range(c.blocks_per_thread)]
            self._store_block_scale(scale, memory_row, row < thread.rows, thread)
        elif const_expr(spec.fmt is None):
            quantized = [(None, None)] * c.blocks_per_thread
        else:
            quantized = self.encoder.fp8(blocks, rstd, amax, global_scale)
        for j in range_constexpr(c.common_blocks):
            self._store_block(j, blocks[j], rstd, quantized[j], row, memory_row, iteration, thread, smem)
        if const_expr(c.common_blocks < c.blocks_per_thread):
            if self.rows.has_last_block(thread):
                last = self.encoder.block(*blocks[-1], rstd, global_scale)
                self._store_block(c.common_blocks, blocks[-1], rstd, last, row, memory_row, iteration, thread, smem)
        if const_expr(spec.padding_blocks > 0):
            self._store_padding(row < thread.rows, memory_row, thread)

    @cute.jit
    def store_row_scale(self, row_scale, row, thread):
        """Store the scale of a row. The thread with the row's first block stores it."""
        scales = thread.row_scale
        if (row < thread.rows) & (thread.first_block + thread.column == 0):
            scales[row] = row_scale

    @cute.jit
    def _store_block(self, j: int, block, rstd, quantized, row, memory_row, iteration, thread, smem):
        """Store codes, scale and norm of the thread's j-th block."""
        c = self.config
        spec = c.spec
        at = thread.column + j * c.threads_per_row
        column = thread.first_block + at
        words, scale = quantized
        exists = (row < thread.rows) & (at < thread.cta_blocks)
        if const_expr(spec.fmt is not None):
            if exists:
                if const_expr(spec.interleaved):
                    self._store_interleaved(self._without_padding(words, column), memory_row, column, thread)
                else:
                    self._store_words(words, thread.y, memory_row, column)
        if const_expr(spec.writes_norm):
            norm = self.encoder.rounded(block[0], rstd)
            from_registers = exists
            if const_expr(c.bulk_norm):
                # A group with a single row stores its norm from registers, because it would have to wait for the end of
                # a bulk copy. On an H200, ``rmsnorm_fp4quant_with_norm`` of up to 32 rows of 7,168 elements takes 2.8
                # µs with stores from registers, and 2.95 µs with bulk copies.
                from_registers = exists & (thread.iterations == 1)
                if thread.iterations > 1:
                    self.rows.fill_buffer(norm, self._norm_buffer(iteration, thread.row, smem), j, thread)
            if from_registers:
                self._store_words(norm, thread.norm, row, column)
        if const_expr(spec.also_linear):
            if exists:
                store_byte(self.scales.linear_at(row, column, thread), scale)
        if const_expr(c.quads):
            if at < thread.cta_blocks:
                store_byte(self.scales.quad_slot(iteration, at, smem), scale)
        if const_expr(spec.has_byte_scales):
            if exists & (iteration >= thread.quad_iterations):
                store_byte(self.scales.at(row, column, thread), scale)
        elif const_expr(spec.fmt == FP8_TOKEN):
            if const_expr(j == 0):
                if (row < thread.rows) & (column == 0):
                    thread.scale[row, 0] = scale

    @cute.jit
    def _store_block_scale(self, scale, memory_row, exists, thread) -> None:
        """Store the scale of the FP8 block that this thread owns. Of the lanes that own the same block, only the first
        stores."""
        shared = self.encoder.shared
        block = thread.column // SCALE_THREADS * SCALE_THREADS + shared.mine(thread.lane) * self.config.threads_per_row
        column = (thread.first_block + block) // SCALE_THREADS
        if exists & shared.leads(thread.lane) & (block < thread.cta_blocks):
            thread.scale[memory_row, column] = scale

    def _store_words(self, words: list, output: cute.Tensor, row, column) -> None:
        """Store the words of block ``column`` in a row of an output."""
        block = 4 * len(words)
        offset = cute.assume(Int64(row) * (self.config.blocks * block), divby=min(block, 16))
        layout = cute.make_layout((len(words), self.config.blocks), stride=(1, len(words)))
        values = cute.recast_ptr(cute.recast_ptr(output.iterator, dtype=Uint8) + offset, dtype=Uint32)
        store_words(words, cute.make_tensor(values, layout)[None, column])

    def _store_interleaved(self, words: list, memory_row, column, thread) -> None:
        """Store the four words of block ``column`` in a row of codes whose k is interleaved.

        Block ``column`` contains elements 16 · column to 16 · column + 15 of the row. Words of neighbouring elements
        are 16 bytes apart in memory (``formats.interleave``).
        """
        spec = self.config.spec
        blocks = spec.blocks + spec.padding_blocks
        block_bytes = 4 * len(words)
        offset = cute.assume(Int64(memory_row) * (blocks * block_bytes), divby=INTERLEAVED_K)
        # ``column`` divides into 2 p + i // 2, c (as in ``formats.interleave``), and the index of the 256 elements.
        stride = (INTERLEAVED_K // block_bytes, 1, INTERLEAVED_K // 4)
        layout = cute.make_layout((len(words), (4, 4, blocks // 16)), stride=(4, stride))
        values = cute.recast_ptr(cute.recast_ptr(thread.y.iterator, dtype=Uint8) + offset, dtype=Uint32)
        store_words(words, cute.make_tensor(values, layout)[None, column])

    def _without_padding(self, words: list, column) -> list:
        """Set the codes of elements beyond ``norm_width``, which are in the last block of a row, to zero.

        The input is padded with zeros, but their codes may be -0 or NaN: for a negative offset of the gate, or for a
        static scale that is zero, negative or NaN.
        """
        spec = self.config.spec
        used = spec.norm_width - (spec.blocks - 1) * spec.block_elements
        if used == spec.block_elements:
            return words
        masks = [(1 << 8 * min(max(used - 4 * i, 0), 4)) - 1 for i in range(len(words))]
        is_last = column == spec.blocks - 1
        return [
            word & ptx.select(is_last, Uint32(mask), Uint32(0xFFFFFFFF))
            for word, mask in zip(words, masks, strict=True)
        ]

    @cute.jit
    def _store_padding(self, exists, memory_row, thread):
        """Store zeros in the blocks at the end of a row of interleaved codes."""
        c = self.config
        padding = c.spec.padding_blocks
        if exists & (thread.rank == c.splits - 1):
            for i in range_constexpr(ceil_div(padding, c.threads_per_row)):
                block = thread.column + i * c.threads_per_row
                if block < padding:
                    self._store_interleaved([Uint32(0)] * 4, memory_row, c.blocks + block, thread)
