"""Sums of tensor-core products to memory, a whole line of a row at a time.

A product leaves a lane, of each eight columns, two neighbours of a row and of the eighth row after it. Lines of 128
bytes are put together in a part of shared memory that each warp has for itself.
"""

from typing import Final

import cutlass.cute as cute
from cutlass import Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import load_words, pack, store_words, words_per
from torch_cute_ops.kernels.common.row_tile import LINE, PITCH, ROWS

PIECE: Final = 16  # bytes that a lane stores at once


@cute.jit
def store_rows(sums: cute.Tensor, out: cute.Tensor, base: cute.Pointer, first_row, rows, first_column, lane):
    """Round the sums of 16 rows and store the first ``rows`` of them, from ``first_row`` of ``out`` on.

    Args:
        sums: of a lane, four for each eight columns.
        out: (rows, columns), contiguous; what lies beyond its columns is left out.
        base: of the warp's ``row_tile.SIZE_BYTES`` of shared memory, of which no lane needs what was there.
        first_row, rows, first_column: of the warp.
        lane: of the warp.
    """
    dtype = out.element_type
    groups = min(LINE // dtype.width, cute.size(sums) // 4)  # of eight columns in a line
    pieces = groups * dtype.width // PIECE
    n = out.shape[1]
    for line in range_constexpr(cute.size(sums) // (4 * groups)):
        for group in range_constexpr(groups):
            for r in range_constexpr(2):
                at = (line * groups + group) * 4 + 2 * r
                words = pack([sums[at], sums[at + 1]], dtype)
                place = (lane // 4 + 8 * r) * PITCH + (group * 4 + lane % 4) * (4 * len(words))
                to = cute.recast_ptr(base + cute.assume(place, divby=4 * len(words)), dtype=Uint32)
                store_words(words, cute.make_tensor(to, cute.make_layout(len(words))))
        cute.arch.sync_warp()
        column = first_column + line * groups * 8 + lane % pieces * (PIECE * 8 // dtype.width)
        places = [i * (32 // pieces) + lane // pieces for i in range(ROWS * pieces // 32)]
        loaded = []
        for row in places:
            at = cute.recast_ptr(base + cute.assume(row * PITCH + lane % pieces * PIECE, divby=PIECE), dtype=Uint32)
            loaded.append(load_words(cute.make_tensor(at, cute.make_layout(4))))
        for row, piece in zip(places, loaded, strict=True):
            to = _place(PIECE * 8 // dtype.width, out, first_row + row, column)
            ptx.store_if(to, piece, (row < rows) & (column < n))
        cute.arch.sync_warp()


@cute.jit
def store_columns(sums: cute.Tensor, out: cute.Tensor, first_row, rows, first_column, lane):
    """The same of sums that were computed the other way round: 16 columns of ``out``, and rows in groups of eight.

    Sums are transposed in registers, so that a store has 16 bytes of a row.
    """
    dtype = out.element_type
    n = out.shape[1]
    for group in range_constexpr(cute.size(sums) // 4):
        for r in range_constexpr(2):
            pair = [sums[4 * group + 2 * r], sums[4 * group + 2 * r + 1]]
            if const_expr(words_per(2, dtype) == 2):
                # fp32: an element of two rows
                column = first_column + lane // 4 + 8 * r
                for e in range_constexpr(2):
                    row = 8 * group + lane % 4 * 2 + e
                    if (row < rows) & (column < n):
                        _store([ptx.bits_of(pair[e])], 1, out, first_row + row, column)
            else:
                word = ptx.transpose_8x8(pack(pair, dtype)[0])
                row, column = 8 * group + lane // 4, first_column + 8 * r + lane % 4 * 2
                if (row < rows) & (column < n):
                    _store([word], 2, out, first_row + row, column)


def _store(words: list, divby: int, out: cute.Tensor, row, column) -> None:
    store_words(words, cute.make_tensor(_place(divby, out, row, column), cute.make_layout(len(words))))


def _place(divby: int, out: cute.Tensor, row, column) -> cute.Pointer:
    """Where the words of an element and its neighbours lie."""
    offset = cute.assume(Int64(row) * out.shape[1] + column, divby=divby)
    return cute.recast_ptr(out.iterator + offset, dtype=Uint32)
