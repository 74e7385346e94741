"""The down-projection of a mixture of experts: ``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · w[n, k])``, where
pairs of a token and an expert whose ``alpha`` is zero cost nothing. For sm_90a.

Two kernels of one launch:

1. Lists. A CTA for each expert and tile of up to 512 tokens scans its column of ``alpha``: which tokens it is for, in
   their order, and with what factor. It puts these tokens' activations in order, as ``kernels.common.activations``
   tells, decoded if they are in FP4.
2. Products. A unit of work is an expert, up to ``group`` of its tokens, and a slice of 64 rows of ``w``. A worker, a
   CTA, walks through the experts that any token of its tile is for; so each byte of a touched expert's weight is
   read once.

Roles in a CTA of the second: 16 warps multiply, four on a unit, each 16 rows, and so four units at a time. Up to eight
tokens each warp multiplies by itself (mma.sync); the four of a wider unit are a warpgroup, whose products (wgmma) read
the activations once for all of its rows, and not again for each warp. Each of these slots has a ring of stages, a chunk
of 256 elements of k in each, and a warp that feeds it by copies alone: codes and scales of the weight, the activations
of the unit's tokens, and where their sums are, with their factors. Where sums leave no room for that, as in a tile of
512 tokens, a chunk is 128 elements (a fifth slower where both fit); or there are two units at a time, and two warps, or
warpgroups, share the k of the same rows (linear scales, whose boxes have 16 bytes of a row).

A warp keeps a unit's sums in registers; at its end it multiplies them by the factors, in fp32, and adds them to those
of the tokens in shared memory, (tokens, 64). The warps that have the same rows do that in the order of the units, each
after the one before: sums are added up in the order of the experts, whatever else is computed.

Workers. With one class of experts a worker has a slice. With ``classes`` of them, experts of one number modulo that,
pairs of a slice and a class are shared out to as many workers as there are SMs, in equal contiguous portions: some
classes of one slice, or of two that follow each other. A worker begins with the second of these, whose sums it leaves
in memory for the next worker, which has the slice's last class: that one adds up what others left, in the order of the
classes, and its own last. None waits in fact, and each only for workers before it, which have been started.

So a token's result depends on nothing but the tactic, the number of SMs, and its own row of ``a`` and ``alpha``, bit
for bit.

Bytes moved: touched experts' weights and scales once for each tile of tokens; ``alpha`` once, or once for each worker
if tokens are few; activations of a pair twice in memory, and once for each slice from L2; 8 bytes a sum that is left.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_experts.config import CLASSES, GROUPS, MAX_EXPERTS, ROWS, TILES, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_experts.kernel import FP4ExpertsKernel

__all__ = ["CLASSES", "GROUPS", "KERNEL", "MAX_EXPERTS", "ROWS", "TILES", "Config", "FP4ExpertsKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4ExpertsKernel"
__getattr__ = on_demand(__name__, "FP4ExpertsKernel")
