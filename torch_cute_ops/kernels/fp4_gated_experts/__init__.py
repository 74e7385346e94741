"""First GEMM of a mixture of experts, with its gate, for every GPU from Hopper on.

``y[m, e · I + i] = gate(g) · u`` (SwiGLU or GELU), in 16 bits or quantised to FP4, with
``g = alpha · Σ_k a[m, k] · w[e, i, k] + bias``. ``u`` is computed in the same way from ``w[e, I + i, k]``. If the
``routing`` of a token and an expert is zero, their results are neither computed nor written. ``kernels.fp4_experts``
reads the output. A call launches two kernels:

1. Lists. One CTA per expert and *token block* (up to 512 tokens) scans the expert's column of ``routing``, and lists
   the tokens that are routed to the expert, in ascending order. All CTAs together rearrange the activations of each
   token once, as ``kernels.common.fp4.activations`` describes. FP4 activations are decoded, unless MMAs multiply codes.
   For few tokens, no lists are needed, and the CTAs of both kernels fit on the GPU at the same time.
2. GEMM. A *work tile* consists of an expert, an m tile of up to ``tile_m`` of its tokens, and an n tile of ``tile_n``
   rows of the expert's weight. Half of these rows compute columns of gate, and the other half compute the same columns
   of up. Work tiles are divided equally among the CTAs, because they differ only in their number of tokens. N tiles
   that share scale tiles are computed at the same time, by neighbouring CTAs (*siblings*).

Split-K: k is divided into ``split_k`` parts, and the parts of all work tiles are divided equally among the CTAs. If
several CTAs share a work tile, each computes consecutive parts, and writes its partial sums to the workspace, where the
CTA that computes the next parts reads them. If a CTA owns only the first parts of a work tile, it computes these parts
before its other work. If it owns only the last parts of a work tile, it computes these parts after its other work.

Roles in a CTA of the second kernel, which computes one work tile at a time:

1. A producer warp fills the stages of each *pipeline*. Pipeline p takes every ``pipelines``-th k tile (256 elements),
   starting with k tile p. The producer copies codes and scales by TMA and bulk copies. It copies the activation rows of
   the m tile's tokens by bulk copies for mma.sync, and by ``cp.async`` into the swizzled operand for wgmma. One or two
   k tiles later, the producer waits for the ``cp.async`` copies of a k tile, executes a fence, and arrives at the k
   tile's full barrier. If no stage is empty, the producer does this at once for all k tiles whose copies have started.
2. 8 or 16 consumer warps multiply. Each warp multiplies the k tiles of one pipeline by 16 rows of the weight: 8 rows of
   gate and 8 rows of up, so that a lane holds both values of a column. With m tiles of up to eight tokens, and on GPUs
   without wgmma, each warp issues its own MMAs (mma.sync): it decodes a word of codes once, and multiplies it by one
   group of eight tokens after the other. With more tokens on Hopper, four warps form a warpgroup (wgmma).

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| pipeline | gate, up, activations | producer warp | consumer warps | 3 | n_warps | stages |
| turns | accumulators in shared memory | previous warp of the chain | next warp | 1 | - | consumer_warps |

A warp accumulates a part of k in registers. All warps with the same rows form a *chain*, in the order of the pipelines.
Each warp adds its accumulators to the sum of earlier warps and earlier parts, and stores the sum in shared memory for
the next warp. The last warp multiplies by ``alpha``, adds the bias, and applies SwiGLU. Its threads exchange the
results through shared memory, quantise whole blocks, and store them.

Blackwell: activations are always copied for mma.sync. If two stages per pipeline do not fit into shared memory, as on
desktop Blackwell with its 99 KB per CTA, k tiles have 128 elements, or a CTA has 8 consumer warps and half of the
pipelines. Desktop Blackwell lacks setmaxnreg: with 16 consumer warps, all warps get at most 96 registers, so values
that depend only on the lane are computed again for each work tile. If both operands are FP4, desktop Blackwell
multiplies their codes by block-scaled MMAs (``kernels.common.fp4.code_mma``): the list kernel copies codes and scales,
and consumers decode nothing. On Blackwell, the kernels were run only in the PTX emulator.

The bits of a token's result depend only on the tactic and the token's row of ``a``.

Bytes moved: The weights and scales of experts with a routed token are read once per m tile; for all m tiles except the
first, they are read from L2. ``routing`` is read once, or once per CTA if token blocks are small. A token's activations
are read and written in memory once, and read from L2 once per n tile of each of the token's experts. A scale tile (128
rows) is copied once per n tile that needs some of these rows. All of its copies except the first read from L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_gated_experts.config import (
    CONSUMER_WARPS,
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
    "CONSUMER_WARPS",
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
