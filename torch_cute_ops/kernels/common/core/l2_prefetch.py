"""Bringing what a later launch reads into L2 while memory has nothing else to do: where a GEMM of few rows ends, and
the next one begins."""

from typing import Final

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as primitives
from cutlass import Int32, Int64

from torch_cute_ops.runtime.argspec import Dim, TensorArg

MOST_BYTES: Final = 8 << 20
"""What is brought into L2 at most. (6, 12 and 20 MB make a layer of an 8B model as fast, on an H100.)"""
PIECE: Final = 4096
"""Bytes of one request."""


def prefetch_argument() -> TensorArg:
    """A matrix of bytes, such as the rows of a weight."""
    width = Dim("prefetch_bytes", divisibility=16)
    return TensorArg("Uint8", (Dim("prefetch_rows"), width), (width, 1), align=16)


@cute.jit
def prefetch(matrix: cute.Tensor, share, shares) -> None:
    """Ask for this share of the matrix's first bytes, as a converged warp. It may be written at the same
    time."""
    rows, width = matrix.shape
    total = cutlass.min(Int64(rows) * width, Int64(MOST_BYTES)).to(Int32)
    with cute.arch.elect_one():
        for piece in range(share, cute.ceil_div(total, PIECE), shares):
            at = cute.assume(piece * PIECE, divby=PIECE)
            primitives.cp_async_bulk_prefetch(matrix.iterator + at, cutlass.min(total - at, Int32(PIECE)))
