"""A GEMM with an FP4 weight by wgmma: ``out[m, n] = Σ_k a[m, k] · b[n, k]``, through an epilogue, or over experts
``Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · b[n, k])``. For Hopper.

The weight is on the M side of the MMAs, decoded into registers (64 rows of ``b`` a warpgroup); the activations are on
the N side, in shared memory. Nothing is repacked in advance. The activations are rearranged first: by
``kernels.activation_tiles``, or, where a tile has few of them, by the CTAs of the GEMM.

Roles. A CTA has a producer warp, in a warpgroup of its own, and two to four consumer warpgroups. Its tile is 64 rows of
``b`` for each of these, by ``tokens`` rows of ``a``; k is processed in chunks of 256 (128 bytes of codes a row, a whole
cache line). With few tokens a tile may have fewer rows of ``b``, so that the number of tiles suits that of the SMs.
With ``mma.sync`` each warp multiplies 16 rows by itself, a *band*; if that leaves schedulers with unequal numbers of
warps, each of the last bands has two or four warps, on different schedulers, which take its chunks in turn. Each waits
for all chunks, and frees those of the others at once.

1. The producer keeps two rings filled; each stage has a barrier that counts bytes. One ring holds chunks of the weight:
   codes (one TMA box with the 128-byte swizzle) and scales. The other holds activations: a chunk, a half or a quarter
   of one in a stage. The producer starts to copy the weight before the activations are rearranged (programmatic
   dependent launch): ``activation_tiles`` has waited for all kernels before it, so the weight is complete. Where there
   is no such kernel, the producer waits for the one before, unless the weight is static. How much is copied that early
   is ``Config.ahead``: a chunk, where decoding is the limit. When it has started its last
   copy, it may have something brought into L2, such as the weight of the next GEMM
(``kernels.common.core.memory``). 2. A lane has two rows of ``b``, and of each the 64 elements of its quarter of
   the chunk, which it loads at once with their scales. It decodes eight codes of both rows (two k16 steps), starts
   their MMAs, and decodes the next eight meanwhile; then it waits for the MMAs before those. A warp frees a stage of
   activations when the MMAs that read it have ended, and a stage of codes when it has decoded a part of everything that
   it loaded. A tile of one row has MMAs of its own (``row``): columns are blocks, and scales multiply sums in place of
   codes. If it is in FP4, and the tile has whole warpgroups' rows of the weight, these are FP8 MMAs of a warpgroup
(``codes``). 3. Either ``workers`` CTAs share all work on one tile of tokens: the chunks of all tiles of rows of ``b``,
   in equal contiguous portions (stream-K). Where a portion ends inside a tile, its partial sums go to memory, and the
   worker that has the tile's last chunk adds them up in the order of k. A worker starts with the partial sums that
   others need, so that these hardly ever wait; and it waits only for workers of lower numbers, whose CTAs have been
   started before. Every worker must have a chunk, since the others wait for its sums. Or a cluster of ``splits`` CTAs
   has one tile, each an equal part of its chunks, and adds up the sums through shared memory: a CTA those of every
   ``splits``-th token, which the others send to it (``st.async``), or, where there are more sums than there is room
   for, which it reads, between two barriers of the cluster. With up to 32 tokens, three warps beside the producer, of
   16 tokens three pairs of warps, of 32 four warps together, then read the activations, decode them if they are in FP4,
   and rearrange them into their stages: one launch, and no workspace. The first chunks of 16-bit activations of up to
   eight tokens the consumers rearrange together. Whoever rearranges 16-bit activations may also gate them: it reads
   gate and up, and rounds their product. A row of the result depends on the tactic (``tokens``, ``rows``, and
   ``workers`` or ``splits``) alone, not on M or on what else is computed.
4. Over experts, which have equal ranges of k, a thread has two sets of sums. Where an expert's range or the portion
   ends, its sums are multiplied by the tokens' factors for the expert, in fp32, and added to the totals, in the order
   of the experts. The factors are copied with the last activations of a chunk; those of zero add nothing. All pairs of
   a token and an expert are multiplied: ``kernels.fp4_experts`` is for routings in which few pairs count.
5. The epilogue finishes the sums. They are transposed in registers, so that a store has 16 contiguous bytes.

``kernel`` launches and has the roles; ``part`` is what they share, ``copies`` fills the rings, ``multiply`` has
the consumers, ``mma``, ``row`` and ``codes`` their MMAs, ``results`` what becomes of sums.

Bytes moved: ``b`` and its scales once for each tile of tokens (tiles that run together read it from L2); ``a`` once for
each tile of rows, from L2; 8 bytes for each partial sum in memory.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_wgmma.config import (
    CLUSTER_TOKENS,
    EXPERT_TILES,
    QUANTISED_TOKENS,
    ROWS,
    SPLITS,
    TILES,
    Arguments,
    Config,
    arranges,
    by_codes,
    mma_tokens,
    plan,
    rows_of,
    sends,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_wgmma.kernel import FP4WgmmaKernel

__all__ = [
    "CLUSTER_TOKENS",
    "EXPERT_TILES",
    "KERNEL",
    "QUANTISED_TOKENS",
    "ROWS",
    "SPLITS",
    "TILES",
    "Arguments",
    "Config",
    "FP4WgmmaKernel",
    "arranges",
    "by_codes",
    "mma_tokens",
    "plan",
    "rows_of",
    "sends",
]

KERNEL = f"{__name__}.kernel.FP4WgmmaKernel"
__getattr__ = on_demand(__name__, "FP4WgmmaKernel")
