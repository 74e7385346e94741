"""Stores of quantised rows: codes, scales, norms, and sums with the residual."""

import functools

import cutlass.cute as cute
from cutlass import Int64, Uint8, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.fp8 import COLUMN, FP8_BLOCK128, FP8_TOKEN
from torch_cute_ops.kernels.common.core.memory import store_byte, store_words
from torch_cute_ops.kernels.common.fp8.layouts import SCALE_THREADS
from torch_cute_ops.kernels.row_quant.codes import Encoder
from torch_cute_ops.kernels.row_quant.config import Config
from torch_cute_ops.kernels.row_quant.rows import Rows
from torch_cute_ops.kernels.row_quant.scales import FP4Scales


def bulk_store(source: cute.Pointer, target: cute.Pointer, elements: int) -> None:
    """Start one bulk copy from shared to global memory, in the thread's open bulk group."""
    atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkS2GOp(), source.dtype)
    layout = cute.make_layout(elements)
    cute.copy(atom, cute.make_tensor(source, layout), cute.make_tensor(target, layout))


class Stores:
    """Stores of one ``Config``; ``t`` is a ``Thread``, ``s`` the ``Shared`` memory."""

    def __init__(self, config: Config, rows: Rows, scales: FP4Scales, encoder: Encoder):
        self.config, self.rows, self.scales, self.encoder = config, rows, scales, encoder

    @property
    def is_bulk(self) -> bool:
        """Whether rows are stored by bulk copies from shared memory."""
        return self.config.problem.source == "add" or self.config.bulk_norm

    @cute.jit
    def start_bulk(self, it, stage, t, s):
        """Start the bulk stores of this iteration's sums and of the previous iteration's norms."""
        c = self.config
        if const_expr(c.problem.source == "add"):
            row = self.rows.row_at(it, t) + t.in_group
            if (t.in_group < c.group_rows) & (row < t.rows):
                self._store_slice(self.rows.buffer(1, stage, t.in_group, s), self.rows.input_row(1, row, t), t)
        if const_expr(c.bulk_norm):
            self.start_norm(it - 1, t, s)

    @cute.jit
    def start_norm(self, it, t, s):
        """Start the bulk stores of iteration ``it``'s norms, if there is such an iteration."""
        c = self.config
        row = self.rows.row_at(it, t) + t.in_group
        if (it >= 0) & (t.in_group < c.group_rows) & (row < t.rows):
            target = t.norm.iterator + cute.assume(Int64(row) * c.problem.width, divby=16)
            self._store_slice(self._norm_buffer(it, t.in_group, s), target, t)

    def _store_slice(self, source: cute.Pointer, row: cute.Pointer, t) -> None:
        store = functools.partial(bulk_store, source=source, target=self.rows.slice_of(row, t))
        self.rows.copy_slice(store, t)
        cute.arch.cp_async_bulk_commit_group()

    def _norm_buffer(self, it, row, s) -> cute.Pointer:
        """The buffer of a normalised row of the group; each row has two, for even and odd iterations."""
        c = self.config
        slot = it % 2 * c.group_rows + row
        return s.norms + cute.assume(slot * c.slice_width, divby=16)

    @cute.jit
    def store_row(self, blocks, rstd, amax, g, row, place, it, t, s):
        """Quantise the thread's blocks of row ``row`` and store codes, scales and norm; codes and FP8 scales go to row
        ``place`` of their tensors."""
        c = self.config
        p = c.problem
        # All arithmetic first, then all stores: a branch in between would keep the compiler from interleaving blocks.
        if const_expr(isinstance(p.fmt, FP4Format)):
            quantized = [self.encoder.fp4_block(*block, rstd, g) for block in blocks[: c.common_blocks]]
        elif const_expr(p.fmt == FP8_BLOCK128):
            words, scale = self.encoder.fp8_blocks(blocks, rstd, amax, t)
            quantized = [(words[j], None) for j in range(c.thread_blocks)]
            self._store_block_scale(scale, place, row < t.rows, t)
        elif const_expr(p.fmt is None):
            quantized = [(None, None)] * c.thread_blocks
        else:
            quantized = self.encoder.fp8(blocks, rstd, amax, g)
        for j in range_constexpr(c.common_blocks):
            self._store_block(j, blocks[j], rstd, quantized[j], row, place, it, t, s)
        if const_expr(c.common_blocks < c.thread_blocks):
            if self.rows.has_last_block(t):
                last = self.encoder.fp4_block(*blocks[-1], rstd, g)
                self._store_block(c.common_blocks, blocks[-1], rstd, last, row, place, it, t, s)

    @cute.jit
    def _store_block(self, j: int, block, rstd, quantized, row, place, it, t, s):
        """Store codes, scale and norm of the thread's j-th block."""
        c = self.config
        p = c.problem
        at = t.column + j * c.threads_per_row
        column = t.first_block + at
        words, scale = quantized
        exists = (row < t.rows) & (at < t.my_blocks)
        if const_expr(p.fmt is not None):
            if exists:
                self._store_words(words, t.y, place, column)
        if const_expr(p.writes_norm):
            norm = self.encoder.rounded(block[0], rstd)
            from_registers = exists
            if const_expr(c.bulk_norm):
                # A group's only row does not wait for a bulk copy: ``rmsnorm_fp4quant_with_norm`` of up to 32 rows of
                # 7,168 takes 2.8 µs and not 2.95 (H200).
                from_registers = exists & (t.its == 1)
                if t.its > 1:
                    self.rows.fill_buffer(norm, self._norm_buffer(it, t.row, s), j, t)
            if from_registers:
                self._store_words(norm, t.norm, row, column)
        if const_expr(p.also_linear):
            if exists:
                store_byte(self.scales.linear_at(row, column, t), scale)
        if const_expr(c.quads):
            if at < t.my_blocks:
                store_byte(self.scales.quad_slot(it, at, s), scale)
        if const_expr(isinstance(p.fmt, FP4Format)):
            if exists & (it >= t.quad_its):
                store_byte(self.scales.at(row, column, t), scale)
        elif const_expr(p.fmt == FP8_TOKEN):
            if const_expr(j == 0):
                if (row < t.rows) & (column == 0):
                    t.scale[row, 0] = scale

    @cute.jit
    def _store_block_scale(self, scale, place, exists, t) -> None:
        """Store the scale of the FP8 block that this thread computed, if it is the first of those that have it."""
        shared = self.encoder.shared
        block = t.column // SCALE_THREADS * SCALE_THREADS + shared.mine(t.lane) * self.config.threads_per_row
        column = (t.first_block + block) // SCALE_THREADS
        if exists & shared.leads(t.lane) & (block < t.my_blocks):
            if const_expr(self.config.problem.layout == COLUMN):
                t.scale[column, place] = scale
            else:
                t.scale[place, column] = scale

    def _store_words(self, words: list, output: cute.Tensor, row, column) -> None:
        """Store the words of block ``column`` in a row of an output."""
        block = 4 * len(words)
        offset = cute.assume(Int64(row) * (self.config.blocks * block), divby=min(block, 16))
        layout = cute.make_layout((len(words), self.config.blocks), stride=(1, len(words)))
        values = cute.recast_ptr(cute.recast_ptr(output.iterator, dtype=Uint8) + offset, dtype=Uint32)
        store_words(words, cute.make_tensor(values, layout)[None, column])
