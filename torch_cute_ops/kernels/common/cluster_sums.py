"""Sums of one tile by the CTAs of a cluster: left in shared memory, added up in the order of the CTAs, and stored.

The sums are accumulators of tensor-core products with the weight on the M side: of a tile of 8 tokens a lane has four,
of the weight's row ``row`` and the eighth after it, and of two tokens each.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import load_words, pack, store_words
from torch_cute_ops.kernels.common.sum_tile import SumTile

TILE = 8  # tokens


def leave_sums(tile: SumTile, sums: cute.Tensor, base: cute.Pointer, row, quad) -> None:
    """A lane's sums into this CTA's shared memory."""
    layout = cute.make_layout((tile.tokens, tile.rows), stride=(tile.pitch, 1))
    to = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)
    for group in range(tile.tokens // TILE):
        for i in range(4):
            to[group * TILE + quad * 2 + i % 2, row + i // 2 * 8] = sums[group * 4 + i]


@cute.jit
def write_sums(tile: SumTile, splits: int, threads: int, scale, out, base, rank, tid, first_token, first_row):
    """Add up what the cluster's ``splits`` CTAs have left, multiply by both of ``scale`` in turn, and store.

    Each CTA has every ``splits``-th token, ``threads`` threads together. All sums have been left before, and stay until
    all CTAs have read them: the caller sees to both.
    """
    m, n = out.shape
    width = tile.rows // 4
    mine = Int32(tile.tokens // splits) if tile.tokens % splits == 0 else (tile.tokens - rank + splits - 1) // splits
    for piece in range(tid, mine * width, threads):
        token = piece // width * splits + rank
        column = piece % width * 4
        total = [Float32(0.0)] * 4
        for peer in range_constexpr(splits):
            part = base
            if const_expr(splits > 1):
                part = cute.arch.map_dsmem_ptr(base, peer)
            at = cute.assume((token * tile.pitch + column) * 4, divby=16)
            words = load_words(cute.make_tensor(cute.recast_ptr(part + at, dtype=Uint32), cute.make_layout(4)))
            total = [x + ptx.float_of(word) for x, word in zip(total, words, strict=True)]
        values = [ptx.mul_rn(ptx.mul_rn(x, scale[0]), scale[1]) for x in total]
        to_token, to_row = first_token + token, first_row + column
        if (to_token < m) & (to_row < n):
            row = out.iterator + cute.assume(Int64(to_token) * n + to_row, divby=4)
            packed = pack(values, out.element_type)
            store_words(packed, cute.make_tensor(cute.recast_ptr(row, dtype=Uint32), cute.make_layout(len(packed))))
