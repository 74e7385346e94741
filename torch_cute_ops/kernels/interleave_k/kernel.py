"""Device code of the kernel that interleaves k. The package's docstring describes the order."""

from typing import Final

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint32, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import store_words
from torch_cute_ops.kernels.interleave_k.config import THREADS, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, TensorArg

SPAN: Final = 256  # number of elements within which k is interleaved
PIECE: Final = 16  # number of elements that a thread moves
QUARTERS: Final = 4  # number of words of a piece, each from a different quarter of the 256 elements


class InterleaveKKernel:
    """Kernel that interleaves k, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config

    def arguments(self) -> Arguments:
        rows, k, padded = Dim("rows"), Dim("k", divisibility=64), Dim("padded_k", divisibility=SPAN)
        return Arguments(
            a=TensorArg("Float8E4M3FN", (rows, k), (k, 1), align=16),
            out=TensorArg("Float8E4M3FN", (rows, padded), (padded, 1), align=16),
        )

    @cute.jit
    def __call__(self, a, out, stream):
        threads = Int64(out.shape[0]) * (out.shape[1] // PIECE)
        ctas = ctas_unless_overlapping(cute.ceil_div(threads, THREADS), (out,), (a,))
        self.kernel(a, out).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.config.pdl)

    @cute.kernel
    def kernel(self, a, out):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        # Let the next kernel, the GEMM, start early: before the GEMM waits for this kernel, it reads only its weight.
        pdl_start(self.config.pdl)
        k, padded = a.shape[1], out.shape[1]
        pieces = padded // PIECE
        piece = Int64(cta) * THREADS + tid
        row = piece // pieces
        if row < a.shape[0]:
            to = (piece % pieces).to(cutlass.Int32) * PIECE  # first place of the piece in the row
            start = to // SPAN * SPAN + to % SPAN // QUARTERS
            words = []
            for quarter in range_constexpr(QUARTERS):
                element = start + quarter * (SPAN // QUARTERS)
                at = a.iterator + cute.assume(row * k + element, divby=4)
                words += ptx.load_if(at, element < k, 1)
            at = out.iterator + cute.assume(row * padded + to, divby=PIECE)
            store_words(words, cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(QUARTERS)))
