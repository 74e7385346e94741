"""Second GEMM of a mixture of experts, with block-scaled ``tcgen05.mma``, for data-center Blackwell.

``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · w[n, k] + bias[e, n])``, with two FP4 operands. The activations
are on the M side of the MMAs: each lane of tensor memory belongs to a token, so each epilogue thread needs only one
factor per expert. ``tile_n`` rows of the weight are on the N side. If there are few tokens, rows without a token are
filled with zeros, which costs no memory traffic. With up to 128 tokens, the MMAs take less time than the copies of the
weight.

A *work tile* consists of an m tile of 128 tokens, an n tile of ``tile_n`` rows of the weight, and one of ``classes``
classes of experts. An expert's class is its index modulo ``classes``. A CTA multiplies the experts of a work tile in
order, with all k tiles (256 elements) of each expert. CTAs are persistent: the work tiles are divided equally among all
SMs. The result of a work tile does not depend on the CTA that computes it.

Roles:

1. The producer warp fills stages. It copies codes of both operands by TMA, and scale tiles by bulk copies. An expert's
   last k tile ends where the expert's range of k ends.
2. If scales are linear, four scale-loader warps load the scales and store them as 128x4 tiles. Each warp handles every
   fourth k tile.
3. One thread of the MMA warp copies a k tile's scales to tensor memory and issues the k tile's MMAs, as in
   ``fp4_tcgen05``. Experts alternate between two accumulators, and the first MMA of an expert overwrites the
   accumulator. The expert's last commit signals that the accumulator is complete.
4. Four epilogue warps load an expert's accumulator while the next expert is multiplied. A thread adds the expert's
   bias, multiplies by the token's factor, and adds the products to sums in registers, all in fp32. If the factor is
   zero, nothing is added, even if the accumulator holds NaN. A warp without a routed token does not load the
   accumulator. Each warp loads the bias in advance and shares it among its lanes through shared memory. At the end of a
   work tile, the warps store the sums as the result, or, with several classes, as partial sums in the workspace.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| pipeline | operands of a k tile | producer, scale loaders | MMA thread | 1 + stage.has_scale_loaders | 1 | stages |
| scales_empty | scales in tensor memory | MMA thread | MMA thread | - | 1 | 2 |
| acc_pipeline | accumulator | MMA thread | epilogue warps | 1 | 4 | accumulators |

With several classes of experts, another kernel runs last and adds up the partial sums, in the order of the classes. If
``routed``, another kernel runs first. This kernel writes one bit per m tile and expert, which is set if a token of the
m tile is routed to the expert. All roles skip experts whose bit is zero, so the weights of these experts are not read.

A token's result depends only on the tactic and on the token's rows of ``a`` and ``alpha``, not on the number of SMs.

A scale tile holds four blocks per row. If an expert's width is an odd multiple of 64 and a block holds 32 elements,
every second expert begins in the middle of a scale tile. A k tile of such an expert spans one more scale tile, and its
MMAs begin with the second half of the first scale tile.

Bytes moved: The weight is read once per m tile (from L2 for m tiles that run at the same time). A token's activations
are read from L2 once per n tile. ``alpha`` is read once per n tile, and once more if ``routed``. With several classes,
four bytes are written and read per class and element of the result.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_tcgen05_experts.config import CLASSES, TILES_N, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_tcgen05_experts.kernel import FP4Tcgen05ExpertsKernel

__all__ = ["CLASSES", "KERNEL", "TILES_N", "Arguments", "Config", "FP4Tcgen05ExpertsKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4Tcgen05ExpertsKernel"
__getattr__ = on_demand(__name__, "FP4Tcgen05ExpertsKernel")
