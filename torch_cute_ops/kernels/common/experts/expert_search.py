"""Find the expert that owns a number: each of ``MAX_EXPERTS`` experts owns those from its start, in a table in shared
memory, up to the next one's."""

import cutlass.cute as cute
from cutlass import Int32

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.scan import WARP

SPAN = MAX_EXPERTS // WARP  # experts of a lane in the first vote


def expert_by_votes(starts: cute.Tensor, number, lane) -> Int32:
    """The last expert that starts at or before a number that is the same for the whole warp: two loads."""
    votes = cute.arch.vote_ballot_sync(starts[lane * SPAN] <= number)
    span = (Int32(cute.arch.popc(votes)) - 1) * SPAN
    within = starts[span + lane % SPAN] <= number
    votes = cute.arch.vote_ballot_sync(within & (lane < SPAN))
    return span + Int32(cute.arch.popc(votes)) - 1


def expert_by_bisection(starts: cute.Tensor, number) -> Int32:
    """The same for a number of each thread's own: nine loads, one after the other."""
    expert = Int32(0)
    step = MAX_EXPERTS // 2
    while step:
        expert = ptx.select(starts[expert + step] <= number, expert + step, expert)
        step //= 2
    return expert
