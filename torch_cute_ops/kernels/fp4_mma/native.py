"""Block-scaled ``mma.sync`` of FP4 codes. Operands stay in their memory order, and the MMA applies the scales.

Four lanes share a row. For every 64 elements of k, lane ``t`` of these four lanes holds two words of codes: eight
elements that begin at element 8 t, and eight elements that begin at element 32 + 8 t. In shared memory, the 16-byte
vectors of a row are permuted, so that the words that a warp reads at the same time are in different banks. The scales
of the activations may have any layout in global memory. In shared memory, each row's scales of one k tile are
contiguous.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.fp4.code_mma import existing_scales
from torch_cute_ops.kernels.common.fp4.layouts import CODE_MMA_K
from torch_cute_ops.kernels.fp4_mma.config import K_TILE, THREADS, Config

LINE = K_TILE // 2  # bytes of codes of a row in a k tile
TILE = 8  # number of rows of activations per MMA


def code_place(row, column) -> Int32:
    """Return the offset of 16-byte vector ``column`` of a row of codes in shared memory."""
    return row * LINE + (column ^ (row % 8)) * 16


@cute.jit
def load_activations(c: Config, k_tile, activations, work):
    """Start the copies that this thread makes of a k tile of activations: codes, then scales, to ``activations``."""
    vectors = c.tile_m * (LINE // 16)
    for i in range_constexpr(-(-vectors // THREADS)):
        vector = work.tid + i * THREADS
        row, column = vector // (LINE // 16), vector % (LINE // 16)
        begin = k_tile * LINE + column * 16
        exists = (work.first_row + row < work.m) & (begin < work.k // 2)
        offset = Int64(work.first_row + row) * (work.k // 2) + begin
        source = work.a.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=16)
        if vector < vectors:
            ptx.copy_async_16(activations + code_place(row, column), source, exists)
    # In every scale layout, the scales of four neighbouring blocks of a row are contiguous.
    words = c.tile_m * (c.k_tile_blocks // 4)
    scales = activations + c.activation_bytes
    for i in range_constexpr(-(-words // THREADS)):
        vector = work.tid + i * THREADS
        row, column = vector // (c.k_tile_blocks // 4), vector % (c.k_tile_blocks // 4)
        block = k_tile * c.k_tile_blocks + column * 4
        exists = (work.first_row + row < work.m) & (block < work.blocks)
        offset = c.a_layout.row_offset(Int64(work.first_row + row), work.blocks) + c.a_layout.block_offset(block)
        source = work.a_scale.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=4)
        if vector < words:
            ptx.copy_async_4(scales + (row * c.k_tile_blocks + column * 4), source, exists)


@cute.jit
def multiply_codes(c: Config, k_tile, operands, acc, work):
    """Multiply a k tile, and add the products to ``acc``.

    ``operands`` contains three shared-memory addresses: the weight's codes, the weight's scales, and the activations.
    """
    codes, scales, activations = operands
    count = CODE_MMA_K // c.fmt.block_size
    row = work.row + 8 * (work.quad % 2)
    for step in range_constexpr(K_TILE // CODE_MMA_K):
        left = work.blocks - k_tile * c.k_tile_blocks - step * count
        mine = [_word(codes, work.row + 8 * (i % 2), step * 2 + i // 2, work.quad) for i in range(4)]
        # In a stage, scales are laid out like a whole scale matrix with the stage's rows and columns, so the same
        # formula gives their offsets.
        place = c.layout.row_offset(row, c.k_tile_blocks) + c.layout.block_offset(step * count)
        scale = _scales(c, scales, place, left)
        for tile in range_constexpr(c.tile_m // TILE):
            token = tile * TILE + work.token
            other = [_word(activations, token, step * 2 + i, work.quad) for i in range(2)]
            other_scale = _scales(c, activations, c.activation_bytes + token * c.k_tile_blocks + step * count, left)
            total = [acc[tile * 4 + i] for i in range(4)]
            total = ptx.mma_16x8x64(mine, other, total, scale, other_scale, const_expr(c.fmt == NVFP4))
            for i in range_constexpr(4):
                acc[tile * 4 + i] = total[i]


def _word(codes, row, column, word) -> Uint32:
    """Load word ``word`` of 16-byte vector ``column`` of a row of codes."""
    at = codes + cute.assume(code_place(row, column) + word * 4, divby=4)
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(1))[0]


def _scales(c: Config, scales, place, left) -> Uint32:
    """Load one row's scales for an MMA into the low bytes of a word.

    ``left`` is the number of blocks from the MMA's first block to the end of the row.
    """
    count = CODE_MMA_K // c.fmt.block_size
    dtype = Uint32 if count == 4 else Uint16
    at = scales + cute.assume(place, divby=count)
    word = Uint32(cute.make_tensor(cute.recast_ptr(at, dtype=dtype), cute.make_layout(1))[0])
    return existing_scales(word, left, count)
