"""Sums of accumulators over the CTAs of a cluster (split-K), of which each CTA adds up a share."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP
from torch_cute_ops.kernels.common.core.memory import load_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES


@cute.jit
def add_in_order(acc: cute.Tensor, received, rank, ctas: int, tid) -> None:
    """Replace this thread's accumulators by their sum over the CTAs of a cluster, in the order of the CTAs.

    Args:
        acc: accumulators of this CTA, ``rank``.
        received: accumulators of the other ``ctas - 1`` CTAs, in the order of the CTAs. Each has the layout of
            ``partial_sums.send_accumulators``.
        rank, ctas: rank of this CTA in the cluster, and number of CTAs.
        tid: index of the thread in its warpgroup.
    """
    of_cta = cute.size(acc) * WARPGROUP * 4  # bytes
    for i in range_constexpr(cute.size(acc) // 4):
        totals = [Float32(0.0)] * 4
        for peer in range_constexpr(ctas):
            place = cutlass.min(ptx.select(rank < peer, Int32(peer - 1), Int32(peer)), Int32(ctas - 2))
            offset = place * of_cta + (i * WARPGROUP + tid) * VECTOR_BYTES
            at = received + cute.assume(offset, divby=VECTOR_BYTES)
            words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
            for j in range_constexpr(4):
                own = ptx.bits_of(acc[4 * i + j])
                value = ptx.float_of(ptx.select(rank == peer, own, words[j]))
                totals[j] = value if const_expr(peer == 0) else ptx.add_rn(totals[j], value)
        for j in range_constexpr(4):
            acc[4 * i + j] = totals[j]
