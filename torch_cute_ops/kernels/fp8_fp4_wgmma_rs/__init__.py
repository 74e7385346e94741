"""FP8 x NVFP4 GEMMs of few rows for Hopper, with wgmma: consumer warps decode the weight into registers.

The GEMM is plain or grouped by expert. The activations have block scales. ``reference.mm_fp8_fp4`` defines the result.

Roles. A CTA consists of two *K groups* (each of two consumer warpgroups), one producer warp, three scale-loader warps,
and two groups of two decoder warps. Tiles (with the weight on the M side) and clusters are as in ``kernels.fp8_wgmma``.
``kernels.fp8_fp4_wgmma_ss`` describes the units of weight rows.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| copies | ``a``, codes, scales, record | producer, scale loader | decoders | 2 | - | stages |
| stages | rearranged ``a`` | decoders | consumer warps | decoded_arrivals | consumer_warps | stages |
| partial sums | ``received`` | consumers of all CTAs | first K group | 1 | 8 * split_k | 1 if split_k > 1 else 0 |
| K groups | accumulators | second K group | first K group | 8 | 8 | 1 |

1. A stage holds two k tiles, so that codes are copied in whole cache lines of 128 bytes. Each K group multiplies one k
   tile of every stage. After the last stage, the accumulators of the second group are added to the accumulators of the
   first group. Each scheduler thus runs four warps that multiply, so that one warp can decode while another waits.
2. Consumers decode by look-up tables. The decoded weight stays in registers, as the A operand. Each of the four lanes
   that share rows of an MMA decodes a quarter of a row's k tile: 16 bytes of codes, two scale blocks. A lane therefore
   needs the look-up tables of only two blocks.
3. The K of an MMA consists of eight elements of each lane's quarter. The two decoder groups take turns at the stages,
   and rearrange ``a`` in the same order, in words of four elements. Each of a group's two warps rearranges one k tile.

Bytes moved: The kernel moves the same bytes as ``fp8_wgmma``, except that the weight takes half the bytes, plus its
block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_wgmma_rs.config import TILES, Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_wgmma_rs.kernel import FP8FP4WgmmaRSKernel

__all__ = ["KERNEL", "TILES", "Arguments", "Config", "FP8FP4WgmmaRSKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP8FP4WgmmaRSKernel"
__getattr__ = on_demand(__name__, "FP8FP4WgmmaRSKernel")
