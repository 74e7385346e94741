"""The first GEMM of a mixture of experts, with its gate: for Hopper.

``y[m, e · I + i] = swiglu(alpha · Σ_k a[m, k] · w[e, i, k] + bias, the same of w[e, I + i, k])``, in 16 bits or
quantised to FP4, of pairs of a token and an expert whose ``routing`` is not zero; others cost nothing, and nothing is
written of them. What it writes is what ``kernels.fp4_experts`` reads.

A call launches two kernels:

1. Lists. A CTA for each expert and tile of up to 512 tokens scans its column of ``routing`` for the tokens that are
   routed to the expert, and lists them in their order. All CTAs together rearrange the activations of each token once,
   as ``kernels.common.fp4.activations`` describes, decoded if they are in FP4. For few tokens there are no lists, and
   so few CTAs that those of the second kernel run beside them.
2. GEMM. A unit of work is an expert and up to ``tile_m`` of its tokens; a task is a unit and a slice of ``tile_n`` rows
   of its expert's weight, of which half are of the gate and half the same columns of up. Workers, CTAs, have equal
   shares
   of all tasks, one after the other: tasks differ only in their number of tokens. Slices that share tiles of scales are
   computed at the same time, by neighbours. In ``Config.split_k`` of k, shares are those of parts: of a task that
   workers share, each has a run of its parts, and leaves the sums so far in the workspace for the one with the next
   run. A worker begins with the first parts of a task, and ends with the last parts of another.

Roles in a CTA of the second kernel. 16 warps multiply. Each has 16 rows, 8 of the gate and 8 of up, so that a lane has
both sums of a column; and every ``pipelines``-th chunk of 256 elements of k: the whole CTA works on one task. With up
to eight tokens each warp multiplies by itself (mma.sync), else as one of a warpgroup (wgmma). Each slot has a ring of
stages, and a warp that fills it, which goes on with the next task: with codes and scales by TMA and bulk copies, and
with the rows of the unit's tokens, for warps in bulk, for warpgroups by ``cp.async``, each to its place in the swizzled
operand. It waits for the latter, of a chunk or two before, fences them, and hands them over; of all chunks, if there is
no stage to fill.

A warp keeps the sums of a part of k in registers. At its end the warps with the same rows add them up, in the order of
their slots, to those of the parts before: each leaves the total for the one after it, and goes on. The last one
multiplies by ``alpha``, adds the bias, and applies SwiGLU; its threads exchange the results through shared memory,
quantise whole blocks, and store them.

So a token's result depends on nothing but the tactic and its own row of ``a``, bit for bit.

Bytes moved: touched experts' weights and scales once for each ``tile_m`` of tokens, from L2 after the first;
``routing`` once, or once for each worker if tokens are few; activations of a token twice in memory, and those of a pair
once for each slice from L2. A tile of scales (128 rows) is copied for each slice that has some of its rows, from L2
after the first.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_gated_experts.config import (
    SPLIT_K,
    TILES_M,
    TILES_N,
    TOKEN_BLOCKS,
    Arguments,
    Config,
    GatedEpilogue,
    plan,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_gated_experts.kernel import FP4GatedExpertsKernel

__all__ = [
    "KERNEL",
    "SPLIT_K",
    "TILES_M",
    "TILES_N",
    "TOKEN_BLOCKS",
    "Arguments",
    "Config",
    "FP4GatedExpertsKernel",
    "GatedEpilogue",
    "plan",
]

KERNEL = f"{__name__}.kernel.FP4GatedExpertsKernel"
__getattr__ = on_demand(__name__, "FP4GatedExpertsKernel")
