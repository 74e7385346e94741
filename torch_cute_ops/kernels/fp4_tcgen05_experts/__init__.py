"""The second GEMM of a mixture of experts by block-scaled ``tcgen05.mma``:
``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · w[n, k])``, of two FP4 operands. For data-center Blackwell.

The activations are on the M side of the MMAs: a row of tensor memory is a token, so that its factor for an expert is
one number for each thread that loads sums. The weight is on the N side, ``columns`` rows of it. A CTA has one tile of
128 tokens by ``columns``, and all of an expert's k, in chunks of 256, one expert after the other. With few tokens the
rows beyond are zeros, which cost no bytes of memory; up to 128 tokens, MMAs take less time than the weight's bytes.

Roles.

1. The copying warp fills stages: codes of both operands by tensor map, whose chunks end with their expert, and tiles of
   scales by bulk copies. Its mbarrier counts the bytes.
2. With linear scales, four more warps, each for every fourth chunk, write those of the chunk's rows in the order of
   tiles.
3. One thread of the multiplying warp copies a chunk's scales to tensor memory and issues its MMAs, as ``fp4_tcgen05``
   does. An expert's sums begin at zero in one of two accumulators; its last commit says that they are complete.
4. Four storing warps take an expert's sums out while the next one's are computed. A thread multiplies them by its
   token's factor, in fp32, and adds them to totals in registers. Where the factor is zero nothing is added, whatever
   the sums are; a warp without a token that is routed to the expert loads none.

A cluster of ``splits`` CTAs shares a tile: the CTA of rank r has every ``splits``-th expert from r on. At the end all
leave their totals in shared memory, in place of the stages, and add them up in the order of the CTAs.

Routed. All threads of the CTA first look for experts that some token of the tile is routed to, and list them. The roles
then pass over the others: their weights are not read.

So a token's result depends on the tactic, and on its own row of ``a`` and ``alpha``, alone.

A tile of scales has four blocks. Where an expert's width is an odd multiple of 64 and a block has 32 elements, every
second expert begins in the middle of a tile: a chunk then has one tile more, and MMAs begin with its second half.

Bytes moved: the weight once for each tile of 128 tokens (tiles that run together read it from L2); of the activations
a row for each tile of ``columns``, from L2; if routed, ``alpha`` once for each CTA.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_tcgen05_experts.config import (
    MAX_EXPERTS,
    SPLITS,
    TILES,
    Arguments,
    Config,
    plan,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_tcgen05_experts.kernel import FP4Tcgen05ExpertsKernel

__all__ = [
    "KERNEL",
    "MAX_EXPERTS",
    "SPLITS",
    "TILES",
    "Arguments",
    "Config",
    "FP4Tcgen05ExpertsKernel",
    "plan",
]

KERNEL = f"{__name__}.kernel.FP4Tcgen05ExpertsKernel"
__getattr__ = on_demand(__name__, "FP4Tcgen05ExpertsKernel")
