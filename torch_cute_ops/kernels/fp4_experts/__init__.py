"""The down-projection of a mixture of experts: ``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · w[n, k])``, where
pairs of a token and an expert whose ``alpha`` is zero cost nothing. For Hopper.

A call launches two kernels:

1. Lists. A CTA for each expert and tile of up to 512 tokens scans its column of ``alpha`` for the tokens that are
   routed to the expert, and lists them, in their order, with their factors. It rearranges these tokens' activations as
   ``kernels.common.fp4.activations`` describes, decoded if they are in FP4.
2. GEMM. A unit of work is an expert, up to ``group`` of its tokens, and a slice of 64 rows of ``w``. A worker, a CTA,
   processes all experts that any token of its tile is routed to; so each byte of a touched expert's weight is read
   once.

Roles in a CTA of the second kernel. 16 warps multiply, four on a unit, 16 rows each: four units at a time, in four
slots. With up to eight tokens each warp multiplies by itself (mma.sync). The four warps of a wider unit are a
warpgroup, whose wgmma reads the activations once for all of its rows, and not again for each warp. Each slot has a ring
of stages, of 256 elements of k each, and a warp that fills it by copies alone: codes and scales of the weight, the
activations of the unit's tokens, and where their sums are, with their factors. Where the sums leave too little shared
memory, as in a tile of 512 tokens, a chunk is 128 elements (a fifth slower where both fit); or there are two slots, and
two warps, or warpgroups, share the k of the same rows (for linear scales, whose boxes have 16 bytes of a row).

A warp keeps a unit's sums in registers. At its end it adds the expert's bias, if there is one, multiplies by the
factors, in fp32, and adds the products to the sums of the tokens in shared memory, (tokens, 64). Warps that have the
same rows do that in the order of the units, each after the one before: sums are added up in the order of the experts,
whatever else is computed.

A tile of scales has four blocks. Where a block has 32 elements and an expert's width is an odd multiple of 64, every
second expert begins in the middle of a tile. A chunk then has up to one tile more, and lanes begin with the second half
of its first.

Workers. With one class of experts a worker has a slice. With ``classes`` of them, where an expert's class is its number
modulo ``classes``, the pairs of a slice and a class are divided among as many workers as there are SMs, in equal
contiguous portions: some classes of one slice, or of two consecutive ones. A worker begins with the second of these and
writes its partial sums to the workspace for the next worker, which has the slice's last class; that one adds them up
in the order of the classes, its own last. A worker hardly ever waits, and only for workers of lower
numbers, whose CTAs have been started before.

So a token's result depends on nothing but the tactic, the number of SMs, and its own row of ``a`` and ``alpha``, bit
for bit.

Bytes moved: touched experts' weights and scales once for each tile of tokens; ``alpha`` once, or once for each worker
if tokens are few; activations of a pair twice in memory, and once for each slice from L2; 8 bytes for each
partial sum in the workspace.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_experts.config import (
    CLASSES,
    TILE_N,
    TILES_M,
    TOKEN_BLOCKS,
    Arguments,
    Config,
    plan,
    reason_width_unsupported,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_experts.kernel import FP4ExpertsKernel

__all__ = [
    "CLASSES",
    "KERNEL",
    "TILES_M",
    "TILE_N",
    "TOKEN_BLOCKS",
    "Arguments",
    "Config",
    "FP4ExpertsKernel",
    "plan",
    "reason_width_unsupported",
]

KERNEL = f"{__name__}.kernel.FP4ExpertsKernel"
__getattr__ = on_demand(__name__, "FP4ExpertsKernel")
