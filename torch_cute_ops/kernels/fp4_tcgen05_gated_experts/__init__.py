"""First GEMM of a mixture of experts, with its gate, by block-scaled ``tcgen05.mma``, for data-center Blackwell.

``y[m, e · I + i] = gate(g) · u`` (SwiGLU, GELU or squared ReLU), in 16 bits or quantised to FP4, with two FP4 operands
and ``g = alpha · Σ_k a[m, k] · w[e, i, k] + bias``. ``u`` is computed in the same way from ``w[e, I + i, k]``. Nothing
is decoded. If the ``routing`` of a token and an expert is zero, their results are not written. A call launches two
kernels:

1. Lists. An expert *touches* an m tile of 128 tokens if a token of the m tile is routed to the expert. One CTA per
   *token block* (1,024 tokens, eight m tiles) lists the touched m tiles, expert by expert, and zeroes the padding of
   the result's scales.
2. GEMM. A *work tile* consists of an expert, an m tile that the expert touches, and an n tile: ``tile_n / 2`` rows of
   the weight that compute columns of gate, and ``tile_n / 2`` rows that compute the same columns of up. CTAs are
   persistent and take every ``num_ctas``-th work tile. M tiles of an expert follow each other, so that the weight of an
   expert with several m tiles is often in L2.

The activations are on the M side of the MMAs: a lane of tensor memory is a token, so that an epilogue thread holds
whole blocks of a row of the result. The rows of gate and the rows of up are two operands on the N side, each with its
own MMAs, its own scales, and its own half of the accumulator. With few tokens, rows without a token are filled with
zeros, which costs no memory traffic. With up to 128 tokens, the MMAs take less time than the copies of the weight.

Roles:

1. The producer warp fills stages. The warp copies codes of the three operands by TMA, and scale tiles by bulk copies.
2. If scales are linear, four scale-loader warps load the scales and store them as 128x4 tiles. Each warp handles every
   fourth k tile.
3. One thread of the MMA warp copies a k tile's scales to tensor memory and issues the k tile's MMAs, as in
   ``fp4_tcgen05``. The last commit of a work tile signals that its accumulator is complete.
4. Four epilogue warps load an accumulator. With two accumulators, MMAs compute the next work tile at the same time. A
   thread handles a token: it applies ``alpha``, bias and gate to a block of columns, quantises the block, and stores
   its codes and its scale. A warp without a routed token does not load the accumulator.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| pipeline | operands of a k tile | producer, scale loaders | MMA thread | 1 + stage.has_scale_loaders | 1 | stages |
| scales_empty | scales in tensor memory | MMA thread | MMA thread | - | 1 | 2 |
| acc_pipeline | accumulator | MMA thread | epilogue warps | 1 | 4 | accumulators |

A token's result depends only on the tactic and on the token's row of ``a``. The MMAs compute all tokens of a touched m
tile, including tokens that are not routed to the expert.

Bytes moved: The weights of experts with a routed token are read once per touched m tile. With several m tiles, most of
these reads hit L2, provided that L2 can hold the weights of all experts that are computed at the same time. A token's
activations are read from L2 once per work tile. ``routing`` is read once for the lists, and once per work tile. The
results of routed pairs are written once.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_tcgen05_gated_experts.config import TILES_N, TOKEN_BLOCK, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_tcgen05_gated_experts.kernel import FP4Tcgen05GatedExpertsKernel

__all__ = ["KERNEL", "TILES_N", "TOKEN_BLOCK", "Arguments", "Config", "FP4Tcgen05GatedExpertsKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4Tcgen05GatedExpertsKernel"
__getattr__ = on_demand(__name__, "FP4Tcgen05GatedExpertsKernel")
