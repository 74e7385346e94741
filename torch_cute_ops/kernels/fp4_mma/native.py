"""Products of FP4 codes by block-scaled ``mma.sync``: both operands as they lie in memory, scales applied by the MMA.

A lane holds, of 64 elements of k, eight from 8 t on and eight from 32 + 8 t on, t being its place among the four lanes
that share a row: a word each. Words that a warp reads at once are in different banks, because pieces of 16 bytes are
permuted within a row's line.

Activations' scales come to shared memory as rows of a chunk's blocks, from whatever layout.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32, const_expr, range_constexpr

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.fp4_mma.config import CHUNK, THREADS, Config

LINE = CHUNK // 2  # bytes of codes of a row in a chunk
STEP = 64  # elements of k of one MMA
TILE = 8  # rows of activations of one MMA


def code_place(row, column) -> Int32:
    """Offset of the 16 bytes ``column`` of a row of codes."""
    return row * LINE + (column ^ (row % 8)) * 16


@cute.jit
def load_activations(c: Config, chunk, tokens, part):
    """Start this thread's copies of a chunk's codes and scales to ``tokens`` on."""
    pieces = c.tokens * (LINE // 16)
    for i in range_constexpr(-(-pieces // THREADS)):
        piece = part.tid + i * THREADS
        row, column = piece // (LINE // 16), piece % (LINE // 16)
        begin = chunk * LINE + column * 16
        exists = (part.first_token + row < part.m) & (begin < part.k // 2)
        offset = Int64(part.first_token + row) * (part.k // 2) + begin
        source = part.a.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=16)
        if piece < pieces:
            ptx.copy_async_16(tokens + code_place(row, column), source, exists)
    # Of any layout four blocks of a row follow each other.
    words = c.tokens * (c.chunk_blocks // 4)
    scales = tokens + c.token_bytes
    for i in range_constexpr(-(-words // THREADS)):
        piece = part.tid + i * THREADS
        row, column = piece // (c.chunk_blocks // 4), piece % (c.chunk_blocks // 4)
        block = chunk * c.chunk_blocks + column * 4
        exists = (part.first_token + row < part.m) & (block < part.blocks)
        offset = c.a_layout.row_offset(Int64(part.first_token + row), part.blocks) + c.a_layout.block_offset(block)
        source = part.a_scale.iterator + cute.assume(ptx.select(exists, offset, Int64(0)), divby=4)
        if piece < words:
            ptx.copy_async_4(scales + (row * c.chunk_blocks + column * 4), source, exists)


@cute.jit
def multiply_codes(c: Config, chunk, operands, sums, part):
    """Add a chunk to the sums; ``operands``: where the weight's codes, its scales, and the activations are."""
    codes, scales, tokens = operands
    count = STEP // c.fmt.block_size
    row = part.row + 8 * (part.quad % 2)
    for step in range_constexpr(CHUNK // STEP):
        left = part.blocks - chunk * c.chunk_blocks - step * count
        mine = [_word(codes, part.row + 8 * (i % 2), step * 2 + i // 2, part.quad) for i in range(4)]
        # The scales of a stage are laid out like those of a matrix of its size.
        place = c.layout.row_offset(row, c.chunk_blocks) + c.layout.block_offset(step * count)
        scale = _scales(c, scales, place, left)
        for tile in range_constexpr(c.tokens // TILE):
            token = tile * TILE + part.token
            other = [_word(tokens, token, step * 2 + i, part.quad) for i in range(2)]
            other_scale = _scales(c, tokens, c.token_bytes + token * c.chunk_blocks + step * count, left)
            total = [sums[tile * 4 + i] for i in range(4)]
            total = ptx.mma_16x8x64(mine, other, total, scale, other_scale, const_expr(c.fmt == NVFP4))
            for i in range_constexpr(4):
                sums[tile * 4 + i] = total[i]


def _word(codes, row, column, word) -> Uint32:
    """One of the four words in 16 bytes of a row."""
    at = codes + cute.assume(code_place(row, column) + word * 4, divby=4)
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(1))[0]


def _scales(c: Config, scales, place, left) -> Uint32:
    """The scales of one step and row, in the low bytes. ``left``: how many blocks there are from the step's first on;
    scales of others may be anything, and 0 times NaN is not 0."""
    count = STEP // c.fmt.block_size
    dtype = Uint32 if count == 4 else Uint16
    at = scales + cute.assume(place, divby=count)
    word = Uint32(cute.make_tensor(cute.recast_ptr(at, dtype=dtype), cute.make_layout(1))[0])
    # k is a multiple of 32: of NVFP4 two blocks, of MXFP4 one.
    half = Uint32(0xFFFF if count == 4 else 0xFF)
    word = ptx.select(left >= count, word, word & half)
    return ptx.select(left > 0, word, Uint32(0))
