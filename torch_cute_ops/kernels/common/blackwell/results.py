"""Store accumulators, which were loaded from tensor memory, as results or as partial sums.

The weight is on the M side of the MMAs. A thread handles one row of the weight, which is a column of the result, for
consecutive tokens.
"""

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import PartialSums
from torch_cute_ops.kernels.common.core.memory import pack


@cute.jit
def store_results(values: list, dtype, out: cute.Tensor, token, end, column, n, odd):
    """Store one column of results for consecutive tokens, starting with ``token``. Tokens ``end`` and above are not
    stored.

    All lanes of a warp call this function, for consecutive columns.

    Args:
        values: finished results, fp32.
        dtype: DSL type of the result.
        out: (tokens, n), contiguous.
        column: the thread's column of ``out``. Columns ``n`` and above are not stored.
        odd: 1 in odd lanes, 0 in even lanes.
    """
    if const_expr(dtype is Float32):
        for i, value in enumerate(values):
            if (token + i < end) & (column < n):
                _store_word(out, token + i, column, n, ptx.bits_of(value))
    else:
        # Each pair of lanes exchanges halves of words. Then each lane holds two neighbouring columns of one token.
        for i in range_constexpr(0, len(values), 2):
            word = pack(values[i : i + 2], dtype)[0]
            other = cute.arch.shuffle_sync_bfly(word, offset=1)
            even = ptx.prmt(word, other, 0x5410)
            word = ptx.select(odd == 1, ptx.prmt(word, other, 0x3276), even)
            if (token + i + odd < end) & (column < n):
                _store_word(out, token + i + odd, column - odd, n, word)


def _store_word(out: cute.Tensor, token, column, n, word) -> None:
    at = out.iterator + (Int64(token) * n + column)
    cute.make_tensor(cute.recast_ptr(at.align(4), dtype=Uint32), cute.make_layout(1))[0] = word


def store_acc(tile: PartialSums, acc: list, token, column, to: cute.Pointer) -> None:
    """Store this thread's accumulators as partial sums in the CTA's shared memory. The accumulators belong to
    consecutive tokens, starting with ``token``."""
    at = to + cute.assume((token * tile.pitch + column) * 4, divby=4)
    for i, word in enumerate(acc):
        ptx.store_shared_if(at + i * tile.pitch * 4, word, True)
