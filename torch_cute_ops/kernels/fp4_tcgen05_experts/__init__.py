"""The second GEMM of a mixture of experts by block-scaled ``tcgen05.mma``:
``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · w[n, k] + bias[e, n])``, of two FP4 operands. For data-center
Blackwell.

The activations are on the M side of the MMAs: a row of tensor memory is a token, so that its factor for an expert is
one number for each thread that loads sums. The weight is on the N side, ``tile_n`` rows of it. With few tokens the
rows beyond are zeros, which cost no bytes of memory; up to 128 tokens, MMAs take less time than the weight's bytes.

Units. A unit of work is a tile of 128 tokens by ``tile_n``, and one of ``classes`` parts of the experts: those whose
number modulo ``classes`` is the part's. It goes through its experts in order, through all of an expert's k in chunks of
256. As many CTAs as there are SMs share all units: each has one after the other (persistent), all as many, or one more.
What a unit computes is the same whichever CTA has it.

Roles.

1. The copying warp fills stages: codes of both operands by tensor map, whose chunks end with their expert, and tiles of
   scales by bulk copies. Its mbarrier counts the bytes.
2. With linear scales, four more warps, each for every fourth chunk, write those of the chunk's rows in the order of
   tiles.
3. One thread of the multiplying warp copies a chunk's scales to tensor memory and issues its MMAs, as ``fp4_tcgen05``
   does. An expert's sums begin at zero in one of two accumulators; its last commit says that they are complete.
4. Four storing warps take an expert's sums out while the next one's are computed. A thread adds the expert's bias,
   multiplies by its token's factor, in fp32, and adds the products to totals in registers. Where the factor is zero
   nothing is added, whatever the sums are; a warp without a token that is routed to the expert loads none. The warp has
   loaded the bias meanwhile, and shares it through shared memory. At the end of a unit they store the totals, while
   MMAs of the next one run: as the result, or with several parts in the workspace.

Several parts. A second kernel adds up the totals of each part, in the order of the parts.

Routed. A first kernel finds out which experts some token of a tile is routed to, and writes a bit for each. All roles
pass over the others: their weights are not read.

So a token's result depends on the tactic, and on its own row of ``a`` and ``alpha``, alone; not on the number of SMs.

A tile of scales has four blocks. Where an expert's width is an odd multiple of 64 and a block has 32 elements, every
second expert begins in the middle of a tile: a chunk then has one tile more, and MMAs begin with its second half.

Bytes moved: the weight once for each tile of 128 tokens (tiles that run together read it from L2); of the activations
a row for each tile of ``tile_n``, from L2; ``alpha`` once for each tile of ``tile_n``, and if routed once more; with
several parts, four bytes of each are written and read for each element of the result.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_tcgen05_experts.config import CLASSES, TILES_N, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_tcgen05_experts.kernel import FP4Tcgen05ExpertsKernel

__all__ = ["CLASSES", "KERNEL", "TILES_N", "Arguments", "Config", "FP4Tcgen05ExpertsKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4Tcgen05ExpertsKernel"
__getattr__ = on_demand(__name__, "FP4Tcgen05ExpertsKernel")
