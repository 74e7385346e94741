"""Apply the epilogue to accumulators, and store the results so that each warp writes whole cache lines of a row.

A lane holds two adjacent columns of every eight columns, in row r and in row r + 8. To store contiguous data, each warp
first assembles lines of 128 bytes in its own part of shared memory.
"""

from typing import Final

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import Finish, TileEpilogue
from torch_cute_ops.kernels.common.core.memory import pack, store_words, unpack, words_per
from torch_cute_ops.kernels.common.fp8.layouts import STORE_LINE, STORE_PITCH, STORE_ROWS

PIECE: Final = 16  # number of bytes that a lane stores at once


@cute.jit
def store_rows(
    acc: cute.Tensor,
    out: cute.Tensor,
    base: cute.Pointer,
    first_row,
    rows,
    first_column,
    lane,
    epilogue: TileEpilogue,
):
    """Apply the epilogue to a warp's accumulators of 16 rows, and store the rows that exist.

    Args:
        acc: accumulators of a lane, four per eight columns.
        out: (rows, columns), contiguous. Columns beyond the last are not stored.
        base: address of ``STORE_TILE_BYTES`` of shared memory of this warp, which are overwritten.
        first_row, first_column: first row and column of the warp in ``out``.
        rows: number of the warp's 16 rows that exist.
        lane: index of the lane in its warp.
        epilogue: epilogue of the tile.
    """
    dtype = out.element_type
    groups = min(STORE_LINE // dtype.width, cute.size(acc) // 4)  # number of groups of eight columns per line
    pieces = groups * dtype.width // PIECE
    columns_of_piece = PIECE * 8 // dtype.width
    n = out.shape[1]
    # Addresses of this lane's first pair of columns, and of its first piece of a line.
    pair_bytes = const_expr(2 * dtype.width // 8)
    pair = base + cute.assume(lane // 4 * STORE_PITCH + lane % 4 * pair_bytes, divby=pair_bytes)
    piece_at = base + cute.assume(lane // pieces * STORE_PITCH + lane % pieces * PIECE, divby=PIECE)
    pair, piece_at = cute.recast_ptr(pair, dtype=Uint32), cute.recast_ptr(piece_at, dtype=Uint32)
    own_column = first_column + lane % 4 * 2
    for line in range_constexpr(cute.size(acc) // (4 * groups)):
        for group in range_constexpr(groups):
            # Apply the epilogue to 16-bit results now, because rounded results are exchanged between lanes. Apply it to
            # fp32 results later, when a lane holds four contiguous columns of a line: now, with alpha and bias, two
            # registers would spill.
            finish = _unfinished
            if const_expr(dtype is not Float32):
                finish = epilogue(own_column, 2, after=(line * groups + group) * 8)
            for r in range_constexpr(2):
                at = (line * groups + group) * 4 + 2 * r
                words = pack([finish(acc[at + i], i) for i in range(2)], dtype)
                ptx.store_vector(pair, words, 2 * r * STORE_PITCH + 4 * group * len(words))
        cute.arch.sync_warp()
        column = first_column + line * groups * 8 + lane % pieces * columns_of_piece
        finish = _unfinished
        if const_expr(dtype is Float32):
            finish = epilogue(
                first_column + lane % pieces * columns_of_piece, columns_of_piece, after=line * groups * 8
            )
        rows_at_once = const_expr(32 // pieces)
        places = const_expr(range(0, STORE_ROWS, rows_at_once))
        loaded = [ptx.load_vector(piece_at, PIECE // 4, STORE_PITCH // 4 * place) for place in places]
        for place, piece in zip(places, loaded, strict=True):
            row = lane // pieces + place
            if const_expr(dtype is Float32):
                piece = pack([finish(value, i) for i, value in enumerate(unpack(piece, dtype))], dtype)
            to = _place(columns_of_piece, out, first_row + row, column)
            ptx.store_if(to, piece, (row < rows) & (column < n))
        cute.arch.sync_warp()


def _unfinished(total: Float32, i: int) -> Float32:
    return total


@cute.jit
def store_columns(
    acc: cute.Tensor, out: cute.Tensor, first_row, rows, first_column, lane, finish: tuple[Finish, Finish]
):
    """Apply the epilogue to the accumulators of a swapped tile, and store 16 columns of ``out``, eight rows at a time.

    16-bit results are transposed in registers, so that the lanes of a warp store 16 contiguous bytes of a row.
    ``finish`` contains the functions for the lane's two columns, ``lane // 4`` and ``lane // 4 + 8``.
    """
    dtype = out.element_type
    n = out.shape[1]
    for group in range_constexpr(cute.size(acc) // 4):
        for r in range_constexpr(2):
            pair = [finish[r](acc[4 * group + 2 * r + e], 0) for e in range(2)]
            if const_expr(words_per(2, dtype) == 2):
                # fp32: a lane stores one element in each of two rows, without a transposition.
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


def store_column_pairs(acc: cute.Tensor, out: cute.Tensor, first_row, rows, first_column, lane, finish) -> None:
    """Apply the epilogue to the accumulators of a swapped tile whose threads hold neighbouring columns
    (``FP8GemmConfig.pairs_rows``), and store 16 columns of ``out``, eight rows at a time.

    Eight lanes store 16 contiguous columns of a row, that is, whole sectors. ``finish`` contains the functions for the
    lane's two columns. In every second pair of columns, the lane's first column is the odd column.
    """
    dtype = out.element_type
    pair = lane // 4
    column = first_column + pair * 2
    exists, is_odd = column < out.shape[1], pair % 2 > 0
    for group in range(cute.size(acc) // 4):
        for e in range(2):
            row = 8 * group + lane % 4 * 2 + e
            values = [finish[r](acc[4 * group + 2 * r + e], 0) for r in range(2)]
            words = pack(values, dtype)
            if len(words) == 2:
                words = [ptx.select(is_odd, words[1 - i], words[i]) for i in range(2)]
            else:
                words = [ptx.prmt_by(words[0], words[0], ptx.select(is_odd, Uint32(0x1032), Uint32(0x3210)))]
            ptx.store_if(_place(2, out, first_row + row, column), words, (row < rows) & exists)


def _store(words: list, divby: int, out: cute.Tensor, row, column) -> None:
    store_words(words, cute.make_tensor(_place(divby, out, row, column), cute.make_layout(len(words))))


def _place(divby: int, out: cute.Tensor, row, column) -> cute.Pointer:
    """Return a pointer to element (row, column) of ``out``, as words. Its offset is a multiple of ``divby``
    elements."""
    offset = cute.assume(Int64(row) * out.shape[1] + column, divby=divby)
    return cute.recast_ptr(out.iterator + offset, dtype=Uint32)
