"""Second GEMM of a mixture of experts, the down-projection, for every GPU from Hopper on.

``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · w[n, k] + bias[e, n])``. A pair of a token and an expert is not
computed if its ``alpha`` is zero. A call launches two kernels:

1. Lists. One CTA per expert and *token block* (up to 512 tokens) scans the expert's column of ``alpha``. It lists the
   tokens that are routed to the expert, in ascending order, with their factors. The CTA also rearranges these tokens'
   activations as ``kernels.common.fp4.activations`` describes. FP4 activations are decoded, unless MMAs multiply codes.
2. GEMM. A *work tile* consists of an expert, an m tile of up to ``tile_m`` of its listed tokens, and an n tile of 64
   rows of ``w``. A CTA computes one n tile for one token block: the m tiles of all experts to which a token of the
   block is routed. So each byte of such an expert's weight is read once per token block.

A CTA of the second kernel runs up to four *pipelines*. Each pipeline uses one producer warp and its own consumer warps,
and computes one m tile at a time. Roles:

1. A producer warp copies to the stages: codes and scales of the weight, activations of the m tile's tokens, and one
   pair of words per token (offset of the token's accumulators, and factor).
2. Up to 16 consumer warps multiply. Four of them share an m tile, and each multiplies 16 rows of ``w``. With m tiles of
   up to eight tokens, and on GPUs without wgmma, each warp issues its own MMAs (mma.sync): it decodes a word of codes
   once, and multiplies it by one group of eight tokens after the other. With more tokens on Hopper, the four warps form
   a warpgroup, whose wgmma reads the activations once for all 64 rows.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| pipeline | weight, activations, pairs | producer warp | consumer warps | 2 | 4 * k_warps | stages |
| turns | accumulators of the token block | previous warp of the chain | next warp | 1 | - | consumer_warps |

K tiles span 256 elements, or 128 elements if the accumulators leave too little shared memory, for example with token
blocks of 512 tokens. If both sizes fit, the kernel uses 256 elements, because 128 elements are 20 % slower. With linear
scales, a k tile of 128 elements is too narrow: a TMA box needs at least 16 bytes of a row of scales. If four pipelines
with 256 elements do not fit, the CTA therefore runs only two pipelines, and two warps or warpgroups divide the k of the
same rows.

Blackwell: the activations of an m tile are laid out for mma.sync. Desktop Blackwell has only 99 KB of shared memory per
CTA. There, a token block contains at most 256 tokens, and a CTA may run only two pipelines or one. Two or four warps
then divide the k of the same rows. All warps of a pipeline execute the same instructions, with different addresses.
Desktop Blackwell lacks setmaxnreg, so all warps get 96 registers. If both operands are FP4, desktop Blackwell
multiplies their codes by block-scaled MMAs (``kernels.common.fp4.code_mma``): the list kernel copies codes and scales,
and consumer warps decode nothing. On Blackwell, the kernels were run only in the PTX emulator.

A warp accumulates an m tile in registers. At the end of the expert's k, the warp adds the expert's bias and multiplies
by the tokens' factors, both in fp32. It then adds the products to the token block's accumulators (tokens, 64) in shared
memory. All warps with the same 16 rows form a *chain*: they take turns in the order of the m tiles, so that products
are added in the order of the experts.

A scale tile holds four blocks per row. If a block holds 32 elements and an expert's width is an odd multiple of 64,
every second expert begins in the middle of a scale tile. A k tile of such an expert may then span one more scale tile,
and its first blocks are in the second half of its first scale tile.

Schedule: with one class of experts, a CTA computes one n tile. With ``classes`` classes, the class of an expert is its
index modulo ``classes``. The (n tile, class) pairs are divided among CTAs, one per SM, in equal contiguous ranges. A
range consists of some classes of one n tile or of two consecutive n tiles. With two n tiles, the CTA computes the
second n tile first, and writes this n tile's partial sums to the workspace. The CTA with an n tile's last class adds up
the partial sums in the order of the classes, its own partial sums last. A CTA rarely needs to wait, and it waits only
for CTAs with lower indices, which started earlier.

The bits of a token's result depend only on the tactic, the number of SMs, and the token's rows of ``a`` and ``alpha``.

Bytes moved: The weights and scales of experts with a routed token are read once per token block. ``alpha`` is read
once, or once per CTA if token blocks are small. The activations of a routed token are read and written in memory once
per expert, and read from L2 once per n tile. Each partial sum in the workspace costs 8 bytes: 4 written and 4 read.
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
    reason_expert_k_unsupported,
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
    "reason_expert_k_unsupported",
]

KERNEL = f"{__name__}.kernel.FP4ExpertsKernel"
__getattr__ = on_demand(__name__, "FP4ExpertsKernel")
