"""A product with FP4 weights by warpgroup products: ``out[m, n] = alpha · Σ_k a[m, k] · b[n, k]``, or over experts
``Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · b[n, k])``. For sm_90a.

The weights are the product's M side, decoded into registers (64 rows of ``b`` a warpgroup); the activations are its N
side, in shared memory. Nothing is repacked in advance. ``kernels.activation_tiles`` puts the activations in order
first, or, with few of them, the CTAs that multiply.

Roles. A CTA has one warp that copies, in a warpgroup of its own, and two or four warpgroups that multiply. Its tile is
64 rows of ``b`` for each of these, by ``tokens`` rows of ``a``; k goes by chunks of 256 (128 bytes of codes a row, a
whole cache line).

1. The copying warp keeps two rings filled, each stage with a barrier that counts bytes: codes (one TMA box with the
   128-byte swizzle) and scales of a chunk; activations, a chunk, a half or a quarter of it at a time. It starts with
   the weight before the activations are in order (programmatic dependent launch; ``activation_tiles`` has waited by
   then for all kernels before it, one that wrote the weight among them).
2. A lane has two rows of ``b``, and of each the 64 elements of its quarter of the chunk, read at once with their
   scales. It decodes eight codes of both rows (two k16 steps), starts their products, and decodes the next eight
   meanwhile; then it waits for the products before those. A warp frees a stage of activations when the products that
   read it have ended, and one of codes when it has decoded some of all that it read.
3. Either ``workers`` CTAs share the work on one tile of tokens: the chunks of all rows of ``b``, one tile after the
   other, in equal contiguous portions. Where a portion ends inside a tile, its sums go to memory, and the worker with
   the tile's last chunk adds them up in the order of k. A worker does the part that others wait for first, so that none
   waits in fact; and it waits only for workers before it, which have been started, since CTAs are started in their
   order. No worker may be without work: it would leave no sums.
   Or a cluster of ``splits`` CTAs has one tile, each an equal part of its chunks, and adds the sums up through shared
   memory. With up to 32 tokens three warps beside the one that copies then read the activations, decode them if they
   are in FP4, and put them in order in their stages: one launch, and no workspace.
   A row's result depends on the tactic (``tokens``, and ``workers`` or ``splits``) alone, not on M or on what else is
   computed.
4. With experts, which have equal ranges of k, a thread has two sums: that of an expert is multiplied by the token's
   factor for it, in fp32, where its range or the portion ends, and added to the total, in the order of the experts. The
   factors come beside the last activations of a chunk. Those of zero add nothing. All pairs of a token and an expert
   are multiplied: ``kernels.fp4_experts`` is for those of which few count.
5. Sums are scaled, rounded, and transposed in registers, so that a store has 16 bytes in a row.

Bytes moved: ``b`` and its scales once for each tile of tokens (those that run together read it from L2); ``a`` once for
each tile of rows, from L2; 8 bytes a sum where portions meet.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_wgmma.config import (
    CLUSTER_TOKENS,
    EXPERT_TILES,
    SPLITS,
    TILES,
    Config,
    arranges,
    plan,
    rows_of,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_wgmma.kernel import FP4WgmmaKernel

__all__ = [
    "CLUSTER_TOKENS",
    "EXPERT_TILES",
    "KERNEL",
    "SPLITS",
    "TILES",
    "Config",
    "FP4WgmmaKernel",
    "arranges",
    "plan",
    "rows_of",
]

KERNEL = f"{__name__}.kernel.FP4WgmmaKernel"
__getattr__ = on_demand(__name__, "FP4WgmmaKernel")
